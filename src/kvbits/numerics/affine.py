"""Affine parameters of groups: ``x ~ scale * (level - zero)``, with a float zero counted in levels.

The zero is never clamped to the code range (keys grouped per channel are often one-signed), and it is counted in
levels rather than in units of ``x``: beside a bfloat16 scale it then holds any magnitude, from 1e-30 to 1e30, with
the same relative accuracy, where an fp16 offset would overflow or vanish. (KIVI, arXiv 2402.02750, eq. 1; HQQ's
``W = s (q - z)``; KVQuant's ``x = r c + mid`` is the same with levels from -1 to 1.)
"""

from __future__ import annotations

import torch

SCALE_DTYPE = torch.bfloat16
ZERO_DTYPE = torch.float16

STEP_FLOOR = 2.0**-10
"""Smallest scale, relative to the largest magnitude of the group: keeps ``zero`` well inside fp16."""

FINE_STEP_FLOOR = 2.0**-16
"""The same beside a float32 zero, which it keeps exact to 2**-8 of a level."""


def round_up(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round ``x >= 0`` to ``dtype``, never below ``x``, so that a rounded scale still covers its range."""
    rounded = x.to(dtype)
    above = torch.nextafter(rounded, torch.full_like(rounded, torch.inf))
    return torch.where(rounded.to(x.dtype) < x, above, rounded)


def safe_divisor(scale: torch.Tensor) -> torch.Tensor:
    """``scale`` in float32 with 1 in place of 0."""
    scale = scale.float()
    return torch.where(scale == 0, 1.0, scale)


def choose_qparams(
    x: torch.Tensor,
    dim: int,
    bottom: float,
    top: float,
    *,
    outside: torch.Tensor | None = None,
    exact_constants: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and zero over ``dim`` (kept as size 1) that map the group's range onto levels ``bottom .. top``.

    Args:
        x: finite float32, any shape.
        dim: the dimension that a group runs along.
        bottom, top: lowest and highest level.
        outside: bool, as ``x``: elements that the range need not cover; a group of nothing else covers 0.
        exact_constants: level 1.0 is among the levels, and constant groups are stored by it. Else they have a range
            like others, of at least ``STEP_FLOOR`` of their magnitude.

    Returns:
        ``(scale, zero)`` in bfloat16 and float16. Codes are chosen against these *rounded* values, so rounding costs
        a little range, not accuracy. A constant group gets ``scale ~ x`` and the rest in ``zero``, so that level 1
        decodes to ``x`` itself (bit for bit where ``x`` came from fp16 or bf16); an all-zero group gets scale 0.
    """
    if outside is None:
        low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    else:
        low = x.masked_fill(outside, torch.inf).amin(dim, keepdim=True)
        high = x.masked_fill(outside, -torch.inf).amax(dim, keepdim=True)
        nothing = outside.all(dim, keepdim=True)
        low, high = low.masked_fill(nothing, 0), high.masked_fill(nothing, 0)
    return qparams_of_range(low, high, bottom, top, exact_constants=exact_constants)


def qparams_of_range(
    low: torch.Tensor,
    high: torch.Tensor,
    bottom: float,
    top: float,
    scale_dtype: torch.dtype = SCALE_DTYPE,
    zero_dtype: torch.dtype = ZERO_DTYPE,
    exact_constants: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`choose_qparams`, from the float32 ranges themselves, into dtypes of one's choice."""
    span = top - bottom
    floor = STEP_FLOOR if zero_dtype == ZERO_DTYPE else FINE_STEP_FLOOR
    step = torch.maximum(high / span - low / span, torch.maximum(high, -low) * floor)
    constant = (low == high) & exact_constants
    # Adding 0 makes a scale of -0 one of 0: which of both the minimum of zeros is depends on who takes it.
    scale = torch.where(constant, low.to(scale_dtype), round_up(step, scale_dtype)) + 0.0
    low_level = torch.where(constant, 1.0, bottom)
    return scale, (low_level - low / safe_divisor(scale)).to(zero_dtype)


def to_levels(x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """``x / scale + zero``: where ``x`` lies between the levels, as float32."""
    return x / safe_divisor(scale) + zero.float()


def quantize(x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bits: int) -> torch.Tensor:
    """Nearest of the uniform levels ``0 .. 2**bits - 1``, as uint8; ``scale`` and ``zero`` broadcast."""
    return to_levels(x, scale, zero).round_().clamp_(0, 2**bits - 1).to(torch.uint8)


def dequantize(levels: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """``scale * (levels - zero)`` in float32, for uint8 codes or float levels."""
    return (levels - zero.float()).mul_(scale.float())
