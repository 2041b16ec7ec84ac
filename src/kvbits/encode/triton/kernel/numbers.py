"""Rounding: to bfloat16 as 16 bits, half to even, to e4m3; and division, which is rounding to nearest too."""

# The jit compiler reads annotations: no ``from __future__ import annotations`` here.

import triton
import triton.language as tl

from kvbits.backends import interpreted

INTERPRETED = tl.constexpr(interpreted())
ROUND = tl.constexpr(12582912.0)  # beyond it float32 holds whole numbers, in its last bits
LEAST, MOST = tl.constexpr(0x2B800000), tl.constexpr(0x53800000)  # float32 bits of 2**-40 and 2**40


@triton.jit
def bits_up(x):
    """The smallest bfloat16 not below ``x >= 0``, as 16 bits."""
    return ((x.to(tl.int32, bitcast=True) + 0xFFFF) >> 16).to(tl.int16)


@triton.jit
def bits_near(x):
    """``x`` rounded to bfloat16, half to even, as 16 bits."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)


@triton.jit
def wide(bits):
    """Float32 of bfloat16 bits."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def element(x):
    """Float32 of an element; subnormal bfloat16 too, which the interpreter would make 0."""
    if x.dtype == tl.bfloat16:
        number = wide(x.to(tl.int16, bitcast=True))
    else:
        number = x.to(tl.float32)
    return number


@triton.jit
def round_even(x):
    """Half to even, for magnitudes below 2**22: what lies behind the point falls off the mantissa."""
    return (x + ROUND) - ROUND


@triton.jit
def divisor(scale):
    """``scale`` with 1 in place of 0: ``numerics.affine.safe_divisor``."""
    return tl.where(scale == 0, 1.0, scale)


@triton.jit
def over(x, y):
    """``x / y`` rounded to nearest; ``y`` broadcasts."""
    return tl.div_rn(x, tl.broadcast_to(y, x.shape))


@triton.jit
def is_tame(x, SMALL: tl.constexpr):
    """Whether no element is NaN or above 2**40 in magnitude, nor, if SMALL, below 2**-40 and not 0: a scalar."""
    size = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tame = tl.max(size) <= MOST
    if SMALL:
        tame = tame & (tl.min(tl.where(size == 0, MOST, size)) >= LEAST)
    return tame


@triton.jit
def quotient(x, y, tame, SHORT: tl.constexpr):
    """``x / y`` rounded to nearest, 0 without its sign, from one reciprocal of each ``y``, which broadcasts.

    A quotient that is off by an ulp or two is mended by what it leaves over, which a fused product tells exactly
    (Markstein, IBM J. Res. Dev. 34:1, 1990). Once is enough where ``y`` is a bfloat16 number (SHORT): the test
    native/tests/division.cpp tries all. Where ``x`` is below 2**-118, or the quotient below 2**-126, float32 does not
    hold what is left over: those may be off by an ulp, which only a level of 0 beside an edge at 0 would show.

    Args:
        tame: scalar: ``x`` is :func:`is_tame`, and ``y`` between 2**-60 and 2**60. Else all are divided one by one.
    """
    if INTERPRETED:  # where products are not fused
        found = over(x, y)
    else:
        found = tl.zeros(x.shape, tl.float32)
        if tame:
            inverse = tl.broadcast_to(tl.div_rn(tl.full(y.shape, 1.0, tl.float32), y), x.shape)
            each = tl.broadcast_to(y, x.shape)
            found = x * inverse
            found = tl.fma(tl.fma(-found, each, x), inverse, found)
            if not SHORT:
                found = tl.fma(tl.fma(-found, each, x), inverse, found)
        else:
            found = over(x, y)
    return found


@triton.jit
def e4m3(x, signed):
    """e4m3 bytes: ``numerics.float8.encode``. The sign is that of ``signed``, also of what is rounded to 0."""
    size = tl.minimum(tl.abs(x), 448.0)
    octave = (size.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    quantum = tl.maximum(octave, 0.015625) * 0.125
    inverse = (0x7F000000 - quantum.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)  # of a power of two
    rounded = round_even(size * inverse) * quantum
    half = (rounded * 0.00390625).to(tl.float16).to(tl.int16, bitcast=True)
    return (half.to(tl.int32) >> 7) | ((signed.to(tl.int32, bitcast=True) >> 24) & 0x80)
