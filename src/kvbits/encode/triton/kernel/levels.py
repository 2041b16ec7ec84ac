"""Codes of levels, what they decode to, and the scales of ``lm`` codecs, which follow from the codes."""

# The jit compiler reads annotations: no ``from __future__ import annotations`` here.

import triton
import triton.language as tl

from kvbits.encode.triton.kernel.numbers import ROUND, bits_near, divisor, quotient
from kvbits.encode.triton.kernel.tile import total

UNIFORM, TABLE, E4M3 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def code_of(level, table, SHAPE: tl.constexpr):
    """The code (int32) nearest to each level, and what it decodes to before scale and zero, float32."""
    if SHAPE.levels == UNIFORM:
        counted = tl.minimum(tl.maximum(level, 0.0), SHAPE.top) + ROUND
        code, decoded = counted.to(tl.int32, bitcast=True) & 0xFF, counted - ROUND
    else:
        code, decoded = nearest(level, table, SHAPE)
    return code, decoded


@triton.jit
def nearest(level, table, SHAPE: tl.constexpr):
    """``numerics.codebook.nearest``, by the midpoints that ``table`` begins with, and the levels behind them.

    Levels are chosen on the way: a look-up by the code would move the tile through shared memory.
    """
    edges: tl.constexpr = SHAPE.edges
    code = tl.zeros(level.shape, tl.int32)
    decoded = tl.zeros(level.shape, tl.float32) + tl.load(table + edges)
    for edge in tl.static_range(edges):
        beyond = level > tl.load(table + edge)
        code += beyond.to(tl.int32)
        decoded = tl.where(beyond, tl.load(table + (edges + 1 + edge)), decoded)
    return code, decoded


@triton.jit
def by_norm(value, table, tame, SHAPE: tl.constexpr):
    """Codes of ``lm`` codecs, and the scales that keep ``x . decoded`` at ``x . x``, as bfloat16 bits."""
    largest = divisor(tl.max(tl.abs(value), SHAPE.axis, keep_dims=True))
    unit = quotient(value, largest, tame, False)
    double = unit.to(tl.float64)  # 0 where not real
    square = total(double * double, SHAPE)
    rms = divisor(tl.sqrt(square / SHAPE.channels).to(tl.float32))
    codes, decoded = nearest(quotient(unit, rms, tame, False), table, SHAPE)
    product = total(double * decoded.to(tl.float64), SHAPE)
    scale = tl.where(square > 0, square / tl.where(square > 0, product, 1.0), 0.0).to(tl.float32) * largest
    return codes, bits_near(scale)
