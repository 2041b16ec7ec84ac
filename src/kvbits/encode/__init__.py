"""Encoding blocks. ``KERNELS`` lists the ways to run a codec's ``encode``, best first; the first to fit runs.

All give the bits of ``transform.apply`` and ``codec.encode``, which stay the definition (HQQ's zeros apart: see
:mod:`kvbits.encode.native`), and all refuse what no block can hold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvbits.codecs import Codec
from kvbits.encode import native, reference
from kvbits.encode.sound import LARGEST, Unsound
from kvbits.encode.triton import encode as triton
from kvbits.transform import NOTHING, Transform
from kvbits.types import Packed, Params

__all__ = ["KERNELS", "LARGEST", "Kernel", "Unsound", "choose", "encode", "explain"]


@dataclass(frozen=True)
class Kernel:
    """A way to encode blocks.

    Attributes:
        name: for ``explain`` and for results.
        why_not: reasons why it cannot encode such blocks, so transformed, under this codec; empty where it can.
        run: as :func:`encode`.
    """

    name: str
    why_not: Callable[[Codec, torch.Tensor, Transform], list[str]]
    run: Callable[[Codec, torch.Tensor, Params, Transform, int], Packed]


KERNELS: tuple[Kernel, ...] = (
    Kernel("native", native.why_not, native.run),
    Kernel("triton", triton.why_not, triton.run),
    Kernel("reference", reference.why_not, reference.run),
)


def choose(codec: Codec, x: torch.Tensor, transform: Transform = NOTHING) -> Kernel:
    """The first kernel without a reason against it."""
    # The reference takes everything.
    return next(kernel for kernel in KERNELS if not kernel.why_not(codec, x, transform))


def explain(codec: Codec, x: torch.Tensor, transform: Transform = NOTHING) -> list[str]:
    """One line for each kernel: ``name: runs``, ``name: fits, but a better one runs``, or its reasons against."""
    lines, found = [], False
    for kernel in KERNELS:
        reasons = kernel.why_not(codec, x, transform)
        fits = "fits, but a better one runs" if found else "runs"
        lines.append(f"{kernel.name}: {', '.join(reasons) if reasons else fits}")
        found = found or not reasons
    return lines


def encode(codec: Codec, x: torch.Tensor, params: Params, transform: Transform = NOTHING, first: int = 0) -> Packed:
    """Transform and encode blocks ``x [..., T, D]`` (fp32, bf16, fp16, fp64; any strides) with the best kernel.

    Args:
        codec: the method.
        x: blocks; ``T`` is a multiple of ``codec.block_multiple``.
        params: what ``codec.fit`` returned.
        transform: what is done to them first; they are ``[B, H, n, T, D]`` then.
        first: which block of its row the first one is.

    Returns:
        One tensor ``[..., *part.shape]`` for each part of ``codec.layout``, as ``codec.encode`` returns them.

    Raises:
        Unsound: if elements, so transformed, are NaN, infinite or greater than ``LARGEST`` in magnitude.
        ValueError: if ``T`` does not suit the codec.
    """
    return choose(codec, x, transform).run(codec, x, params, transform, first)
