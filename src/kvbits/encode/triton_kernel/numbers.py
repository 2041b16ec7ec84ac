"""Rounding: to bfloat16 as 16 bits, half to even, to e4m3."""

# The jit compiler reads annotations: no ``from __future__ import annotations`` here.

import triton
import triton.language as tl


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
    return (x + 12582912.0) - 12582912.0


@triton.jit
def divisor(scale):
    """``scale`` with 1 in place of 0: ``numerics.affine.safe_divisor``."""
    return tl.where(scale == 0, 1.0, scale)


@triton.jit
def over(x, y):
    """``x / y`` rounded to nearest; ``y`` broadcasts."""
    return tl.div_rn(x, tl.broadcast_to(y, x.shape))


@triton.jit
def e4m3(x):
    """e4m3 bytes: ``numerics.float8.encode``. The sign is that of ``x``, also of what is rounded to 0."""
    size = tl.minimum(tl.abs(x), 448.0)
    octave = (size.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    quantum = tl.maximum(octave, 0.015625) * 0.125
    rounded = round_even(tl.div_rn(size, quantum)) * quantum
    half = (rounded * 0.00390625).to(tl.float16).to(tl.int16, bitcast=True)
    return (half.to(tl.int32) >> 7) | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)
