"""Scale and zero of a group from its range."""

# The jit compiler reads annotations: no ``from __future__ import annotations`` here.

import triton
import triton.language as tl

from kvbits.encode.triton.kernel.numbers import bits_near, bits_up, divisor, over, wide
from kvbits.numerics import affine, float8

STEP_FLOOR, E4M3_MAX = tl.constexpr(affine.STEP_FLOOR), tl.constexpr(float8.E4M3_MAX)


@triton.jit
def choose(low, high, SHAPE: tl.constexpr):
    """Scale (bfloat16 bits) and zero (float16): ``numerics.affine.choose_qparams``."""
    span = tl.full([1, 1, 1], SHAPE.top - SHAPE.bottom, tl.float32)
    step = over(high, span) - over(low, span)
    step = tl.maximum(step, tl.maximum(high, -low) * STEP_FLOOR)
    scale, bottom = bits_up(step), tl.zeros_like(low) + SHAPE.bottom
    if SHAPE.exact_constants:
        constant = low == high
        scale, bottom = tl.where(constant, bits_near(low), scale), tl.where(constant, 1.0, bottom)
    # Which of 0 and -0 the least of both is depends on who takes it.
    scale = tl.where((scale & 0x7FFF) == 0, 0, scale).to(tl.int16)
    zero = bottom - tl.div_rn(low, divisor(wide(scale)))
    return scale, zero.to(tl.float16)


@triton.jit
def choose_magnitude(low, high):
    """The scale of e4m3 tokens, as bfloat16 bits: ``codecs.fp8``."""
    largest = tl.maximum(tl.abs(low), tl.abs(high))
    share = over(largest, tl.full([1, 1, 1], E4M3_MAX, tl.float32))
    return tl.where(low == high, bits_near(largest), bits_up(share))
