"""What is planned: a model, a length, a memory, and the precision of the weights."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from kvbits.plan.devices import gib
from kvbits.plan.memory import History
from kvbits.plan.shapes import Shape, Weights
from kvbits.plan.split import shares

MOST_TOKENS, MOST_BATCH = 2**40, 2**24
"""Longer contexts and larger batches are not planned: a number beyond is a slip, and one that fits is no limit."""

WEIGHT_BITS = {"fp32": 32.0, "bf16": 16.0, "fp16": 16.0, "fp8": 8.0, "int8": 8.0, "int4": 4.5}
"""Bits per weight in the layers. ``int4`` has a 16-bit scale and a zero for each 64. Below 16 bits, the table of tokens
and the matrix of logits stay in 16."""

WEIGHTS = ("auto", *WEIGHT_BITS, "file", "none")


@dataclass(frozen=True)
class Setting:
    """What is planned.

    Attributes:
        shape: the model.
        context: tokens in the cache.
        steps: of these, the last ones that came one by one; the others came as a prompt.
        chunk: tokens of the prompt that are read at a time; None is all of them.
        batch: rows.
        source_tokens: of an encoder's text.
        sliding: pack layers with windows, too.
        memory_bytes: of each device; None where there is no limit.
        reserve_bytes: of these, what is left to the driver and to whatever else runs.
        devices, split: see :mod:`kvbits.plan.split`.
        weights: their precision; ``auto`` is the checkpoint's, or the model's dtype.
        logits: ``last`` or ``all``; see :mod:`kvbits.plan.peak`.
        cpu: whether the device is the CPU of this machine.
    """

    shape: Shape
    context: int
    steps: int = 0
    chunk: int | None = None
    batch: int = 1
    source_tokens: int = 0
    sliding: bool = False
    memory_bytes: int | None = None
    reserve_bytes: int = 0
    devices: int = 1
    split: str = "pipeline"
    weights: str = "auto"
    logits: str = "last"
    cpu: bool = False

    def __post_init__(self) -> None:
        for name, number, most in (
            ("context", self.context, MOST_TOKENS),
            ("batch", self.batch, MOST_BATCH),
            ("chunk", 1 if self.chunk is None else self.chunk, MOST_TOKENS),
        ):
            if not 1 <= number <= most:
                raise ValueError(f"--{name} {number} is nothing to plan; give 1 to {most:,}")
        if not 0 <= self.steps < self.context:
            raise ValueError(f"of {self.context:,} tokens, {self.steps:,} cannot be new ones; give fewer")
        if self.weights not in WEIGHTS:
            raise ValueError(f"--weights {self.weights} is unknown; allowed are {', '.join(WEIGHTS)}")
        if self.logits not in ("last", "all"):
            raise ValueError(f"--logits {self.logits} is unknown; allowed are last, all")
        if self.reserve_bytes and self.memory_bytes is None:
            raise ValueError(f"--reserve {gib(self.reserve_bytes)} is kept of no memory; give --gpu or --memory, too")
        if self.memory_bytes is not None and self.reserve_bytes >= self.memory_bytes:
            kept, there = gib(self.reserve_bytes), gib(self.memory_bytes)
            raise ValueError(f"--reserve {kept} takes all of the memory of {there}; give less")
        if self.source_tokens and not self.shape.encodes:
            raise ValueError(f"--source {self.source_tokens:,} is an encoder's text, and {self.shape.name} has none")
        shares(self.shape, self.devices, self.split)
        weights_bytes(self.shape.weights, self.weights, self.shape.dtype)

    @property
    def limit_bytes(self) -> int | None:
        """What a device may hold; None is without a limit."""
        return None if self.memory_bytes is None else self.memory_bytes - self.reserve_bytes

    def history(self, context: int) -> History:
        """How a cache of so many tokens is filled."""
        return History.of(context, min(self.steps, context - 1), self.chunk)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data: all but the shape itself, of which the sizes are given."""
        shape = self.shape
        plain = {f.name: getattr(self, f.name) for f in fields(Setting) if f.name != "shape"}
        kinds = [
            {
                "layers": count, "kv_heads": kind.heads, "key_dim": kind.key_channels, "value_dim": kind.value_channels,
                "window": kind.window,
            }
            for kind, count in shape.kinds().items() if kind is not None
        ]  # fmt: skip
        return {
            "model": shape.name,
            "source": shape.source,
            "layers": len(shape.layers),
            "attention": kinds,
            "dtype": str(shape.dtype).removeprefix("torch."),
            "parameters": None if shape.weights is None else shape.weights.total,
            "weights_bytes": weights_bytes(shape.weights, self.weights, shape.dtype),
            "trained_context": shape.trained,
            **plain,
        }


def weights_bytes(weights: Weights | None, how: str, dtype: torch.dtype) -> int:
    """Bytes of the weights of a device, in a precision of :data:`WEIGHTS`.

    Raises:
        ValueError: where it is the files' own, and there are none.
    """
    if how == "file" and (weights is None or weights.file_bytes is None):
        raise ValueError("--weights file is for a GGUF file or a folder with .safetensors files; there are none here")
    if weights is None or how == "none":
        return 0
    if how == "file":
        assert weights.file_bytes is not None
        return weights.file_bytes
    bits = WEIGHT_BITS.get(how)
    if bits is None:
        bits = weights.bits or 8.0 * dtype.itemsize
    outside = bits if bits >= 16 else 16.0
    return -int(-(outside * (weights.embedding + weights.head) + bits * sum(weights.layers)) // 8)
