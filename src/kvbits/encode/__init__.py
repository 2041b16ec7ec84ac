"""Floor 3: encoding blocks. ``KERNELS`` lists the ways to run a codec's ``encode``, best first; the first to fit runs.

All give the bits of ``codec.encode``, which stays the definition (HQQ's zeros apart: see :mod:`kvbits.encode.native`),
and all refuse what no block can hold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvbits.codecs import Codec
from kvbits.encode import native, reference
from kvbits.encode.sound import LARGEST, Unsound
from kvbits.types import Packed, Params

__all__ = ["KERNELS", "LARGEST", "Kernel", "Unsound", "choose", "encode", "explain"]


@dataclass(frozen=True)
class Kernel:
    """A way to encode blocks.

    Attributes:
        name: for ``explain`` and for results.
        why_not: reasons why it cannot encode these blocks under this codec; empty where it can.
        run: as :func:`encode`.
    """

    name: str
    why_not: Callable[[Codec, torch.Tensor], list[str]]
    run: Callable[[Codec, torch.Tensor, Params], Packed]


KERNELS: tuple[Kernel, ...] = (
    Kernel("native", native.why_not, native.run),
    Kernel("reference", reference.why_not, reference.run),
)


def choose(codec: Codec, x: torch.Tensor) -> Kernel:
    """The first kernel without a reason against it."""
    return next(kernel for kernel in KERNELS if not kernel.why_not(codec, x))  # the reference takes everything


def explain(codec: Codec, x: torch.Tensor) -> list[str]:
    """One line for each kernel: ``name: runs``, ``name: fits, but a better one runs``, or its reasons against."""
    lines, found = [], False
    for kernel in KERNELS:
        reasons = kernel.why_not(codec, x)
        fits = "fits, but a better one runs" if found else "runs"
        lines.append(f"{kernel.name}: {', '.join(reasons) if reasons else fits}")
        found = found or not reasons
    return lines


def encode(codec: Codec, x: torch.Tensor, params: Params) -> Packed:
    """Encode blocks ``x [..., T, D]`` (fp32, bf16, fp16, fp64; any strides) with the best kernel.

    Args:
        codec: the method.
        x: blocks; ``T`` is a multiple of ``codec.block_multiple``.
        params: what ``codec.fit`` returned.

    Returns:
        One tensor ``[..., *part.shape]`` for each part of ``codec.layout``, as ``codec.encode`` returns them.

    Raises:
        Unsound: if elements are NaN, infinite or greater than ``LARGEST`` in magnitude.
        ValueError: if ``T`` does not suit the codec.
    """
    return choose(codec, x).run(codec, x, params)
