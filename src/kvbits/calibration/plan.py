"""What a calibration will take of memory and of disk, before it starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Checkpointing: TypeAlias = Literal["auto", "on", "off"]

_BYTES_TO_FIT = 128
"""Per element of one layer's samples: the float32 forms of it, its gradients, and what sorting and k-means take."""

_BACKWARD = 1.5
"""Memory that a forward and its backward reach, over what is kept between them (SmolLM2, 512 tokens: 1.45)."""

_MEMORY_SHARE = 0.8
"""Share of the available memory that a run may take before it is checkpointed."""


@dataclass(frozen=True)
class Plan:
    """What a run will take, before it starts.

    Attributes:
        samples, length: how much text.
        done: samples that an earlier run has left.
        disk_bytes: of all samples together.
        peak_bytes: of memory above the model's, on its device: an estimate.
        available_bytes: of that memory; None where that is not known.
        checkpointing: whether layers are computed twice in order to need less.
    """

    samples: int
    length: int
    done: int
    disk_bytes: int
    peak_bytes: int
    available_bytes: int | None
    checkpointing: bool

    def __str__(self) -> str:
        gone = f", {self.done} of them already there" if self.done else ""
        room = "" if self.available_bytes is None else f" of {size(self.available_bytes)} available"
        how = " with gradient checkpointing" if self.checkpointing else ""
        text = (
            f"{self.samples} x {self.length} tokens{gone}; about {size(self.peak_bytes)} of memory above the model's"
            f"{room}{how}; {size(self.disk_bytes)} on disk for the samples"
        )
        if self.available_bytes is not None and self.peak_bytes > self.available_bytes:
            text += ". That is more than there is: expect it to fail, and take a smaller length"
        return text


def foresee(model: PreTrainedModel, ids: torch.Tensor, done: int, checkpointing: Checkpointing, sinks: int) -> Plan:
    """What it will take to calibrate ``model`` on ``ids [N, T]``, of which ``done`` samples are there already.

    The model reads two short texts for it.

    Raises:
        ValueError: if it is to be checkpointed and has no layers that could be.
    """
    from kvbits.hf.collect import GRADIENT_DTYPE, LOGITS_TOKENS, decoder_layers, probe

    samples, tokens = ids.shape
    short, long = max(2, min(32, tokens // 2)), min(64, tokens)
    (few, _), (many, states) = probe(model, short), probe(model, long)
    # Activations grow with the text, and where attention keeps its weights also with its square.
    square = max(0.0, (many / long - few / short) / (long - short))
    activations = (few / short - square * short + square * tokens) * tokens
    elements = sum(x.numel() for x in states.values()) // long * tokens
    kept = elements * (model.dtype.itemsize + GRADIENT_DTYPE.itemsize)
    config, size = model.config.get_text_config(decoder=True), model.dtype.itemsize
    logits = config.vocab_size * (2 * size * tokens + 3 * 4 * min(tokens, LOGITS_TOKENS))
    layers = len(decoder_layers(model))
    host = kept if model.device.type == "cpu" else 0
    plain = int(_BACKWARD * (activations + logits) + host)
    inputs = layers * tokens * config.hidden_size * size
    twice = int(_BACKWARD * (2 * activations / layers + inputs + logits) + host) if layers else plain
    available = available_bytes(model.device)
    if checkpointing == "on" and not layers:
        raise ValueError(f"{type(model).__name__} has no layers that could be checkpointed; give checkpointing='off'")
    again = checkpointing == "on" or (
        checkpointing == "auto" and available is not None and plain > _MEMORY_SHARE * available and twice < plain
    )
    largest = max((x.numel() for x in states.values()), default=0) // long
    fitting = largest * (tokens - sinks) * samples * _BYTES_TO_FIT
    return Plan(samples, tokens, done, kept * samples, max(twice if again else plain, fitting), available, again)


def available_bytes(device: torch.device) -> int | None:
    """Memory that a process can still take on a device; None where that is not known."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    if device.type != "cpu":
        return None
    found = []
    with_text = _read(Path("/proc/meminfo"))
    if "MemAvailable:" in with_text:
        found.append(int(with_text.split("MemAvailable:")[1].split()[0]) * 1024)
    # A container's own limit (cgroup v2), of which the page cache gives way.
    limit, used = (_read(Path(f"/sys/fs/cgroup/memory.{name}")).strip() for name in ("max", "current"))
    if limit.isdigit() and used.isdigit():
        cache = _read(Path("/sys/fs/cgroup/memory.stat")).partition("inactive_file ")[2].split()
        found.append(max(0, int(limit) - int(used) + (int(cache[0]) if cache else 0)))
    return min(found) if found else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def size(count: float) -> str:
    """So many bytes, for a sentence."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
