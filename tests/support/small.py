"""The small model, SmolLM2-135M-Instruct, as a folder: twenty times as fast to load as the GGUF file it comes in.

Made once for all processes that run tests side by side.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

if TYPE_CHECKING:
    import pytest


def save(folder: Path) -> str:
    """Write it in float32 with its tokenizer; what was read from GGUF cannot be saved as it is."""
    import torch
    from transformers import AutoModelForCausalLM

    from kvbits.hf.loading import DEFAULT_MODEL, load_model, load_tokenizer

    read = load_model(DEFAULT_MODEL, dtype=torch.float32)
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(folder)
    load_tokenizer(DEFAULT_MODEL).save_pretrained(folder)
    return str(folder)


def shared(factory: pytest.TempPathFactory) -> Path:
    """The folder, which the first process of a run that asks for it writes; the others wait for it."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "smollm2"
    with FileLock(f"{folder}.lock"):
        if not (folder / "complete").exists():
            save(folder)
            (folder / "complete").touch()
    return folder
