"""What a block can hold: NaN, infinity and what is close to it would spoil their neighbours through a shared scale."""

from __future__ import annotations

import functools

import torch

LARGEST = 1e38
"""Largest magnitude that is packed: a third of what float32 holds, so that no scale or decoded value overflows."""


class Unsound(ValueError):
    """Elements that cannot be packed.

    Attributes:
        count: how many.
        limit: largest magnitude that could have been.
    """

    def __init__(self, count: int, limit: float) -> None:
        super().__init__(f"{count} elements are NaN, infinite or above {limit:g}")
        self.count, self.limit = count, limit


@functools.cache
def limit_of(dtype: torch.dtype) -> float:
    """Largest magnitude of ``dtype`` that is packed: 1e38 itself is infinite in float16."""
    return min(LARGEST, torch.finfo(dtype).max)


@functools.cache
def compared_limit(dtype: torch.dtype) -> float:
    """The limit as PyTorch compares it with elements of ``dtype``."""
    return float(torch.tensor(limit_of(dtype), dtype=dtype))
