"""Rotating blocks before they are encoded, natively where that runs: see :mod:`kvbits.numerics.hadamard`."""

from __future__ import annotations

import functools

import torch

from kvbits.backends import DTYPES, library
from kvbits.numerics import hadamard


@functools.lru_cache(maxsize=32)
def signs_on(channels: int, device: torch.device) -> torch.Tensor:
    """:func:`kvbits.numerics.hadamard.signs`, copied to a device once."""
    with torch.inference_mode(False):
        return hadamard.signs(channels).to(device)


def rotate(x: torch.Tensor) -> torch.Tensor:
    """``x [..., T, D]`` rotated, float32: ``x @ hadamard.rotation(D)``, the same bits anywhere."""
    module, isa, _ = library()
    signs = signs_on(x.shape[-1], x.device)
    if module is None or x.device.type != "cpu" or x.dtype not in DTYPES[1:4] or x.ndim < 2 or x.numel() == 0:
        return hadamard.transform(x.float() * signs)
    return rotate_on(isa, x, signs)


def rotate_on(isa: int, x: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """With the instruction set of this place in ``_native.names()``."""
    module = library()[0]
    assert module is not None
    out = torch.empty(x.shape, dtype=torch.float32)
    module.hadamard(isa, torch.get_num_threads(), x if x.stride(-1) == 1 else x.contiguous(), signs, out)
    return out
