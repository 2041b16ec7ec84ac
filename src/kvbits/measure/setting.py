"""What is recorded beside every figure: hardware, versions, seed, date, and the model that was measured."""

from __future__ import annotations

import datetime
import platform
import re
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from kvbits import __version__
from kvbits.backends import instruction_set
from kvbits.files import fingerprint

SEED = 0

CHUNK_TOKENS = 16
"""Tokens that are read through a cache at a time, unless another number is given."""


def setting(model: PreTrainedModel | None = None, /, **more: Any) -> dict[str, Any]:
    """Hardware, versions, seed, date and command; of a model its class, dtype, device, shape, digest; then ``more``."""
    found: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "processor": processor(),
        "cores": torch.get_num_threads(),
        "device": "cpu" if model is None else device_name(model.device),
        "instructions": instruction_set(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "kvbits": __version__,
        "seed": SEED,
        "command": " ".join([program(), *(shortened(word) for word in sys.argv[1:])]),
    }
    if model is not None:
        config = model.config.get_text_config(decoder=True)
        found["architecture"] = type(model).__name__
        found["dtype"] = str(model.dtype).removeprefix("torch.")
        found["layers"] = config.num_hidden_layers
        found["parameters"] = sum(x.numel() for x in model.parameters())
        found["weights_sha256"] = fingerprint.digest(fingerprint.weights(model))
    return {**found, **more}


def model_name(model: str) -> str:
    """What results call a model, and reports join them by: a hub id as it is, a folder or a file by its own name."""
    path = Path(model)
    return path.resolve().name if path.exists() else model


def processor() -> str:
    """The processor's name as the system gives it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        if names:
            return names[0]
    return platform.processor() or platform.machine()


def device_name(device: torch.device) -> str:
    """``cpu``, ``mps``, or the name of the GPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def program() -> str:
    """What was run; ``python -m kvbits.cli`` is ``kvbits``."""
    path = Path(sys.argv[0])
    return "kvbits" if path.parts[-3:] == ("kvbits", "cli", "__main__.py") else path.name


def shortened(word: str) -> str:
    """A word of a command line, without the folders of paths that stand in it: results are read elsewhere.

    Paths begin the word, or follow a ``=`` or a ``+`` (``wiki=/data/a.txt+/data/b.txt``).
    """
    return re.sub(r"(^|[=+])(?:~|\.{0,2})/[^=+]*", lambda found: found[1] + Path(found[0][len(found[1]) :]).name, word)
