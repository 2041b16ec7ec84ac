"""The zero that HQQ finds: ``codecs.half_quadratic``.

Not bit for bit: a power is rounded otherwise than PyTorch's, and a sum runs in another order. Of two zeros that are
equally good to five digits it may therefore take the other one.
"""

# The jit compiler reads annotations: no ``from __future__ import annotations`` here.

import triton
import triton.language as tl

from kvbits.codecs import half_quadratic
from kvbits.encode.triton.kernel.numbers import over, round_even
from kvbits.encode.triton.kernel.tile import group_sizes, total

STEPS = tl.constexpr(half_quadratic.STEPS)
BETA, BETA_GROWTH = tl.constexpr(half_quadratic.BETA), tl.constexpr(half_quadratic.BETA_GROWTH)
POWER = tl.constexpr(half_quadratic.P_NORM - 1)


@triton.jit
def solve_zero(value, real, scale, zero, SHAPE: tl.constexpr):
    """The zero (float32, of float16 precision) of the least error that the splitting visits, from ``zero`` on."""
    level = over(value, scale)
    count = group_sizes(SHAPE).to(tl.float32)
    current = zero
    best = zero
    least = tl.full(zero.shape, float("inf"), tl.float32)
    beta = BETA
    for _ in range(STEPS + 1):  # the error of a zero, and the next zero
        code = round_even(tl.minimum(tl.maximum(level + current, 0.0), SHAPE.top))
        off = level - (code - current)
        size = tl.where(real, tl.abs(off), 0.0)
        steep = tl.exp2(tl.log2(tl.maximum(size, 1e-12)) * POWER)
        error = total(size * steep, SHAPE)  # |e|^0.7
        shrunk = tl.maximum(size - steep / beta, 0.0)
        # The next zero is the mean of code - (level - shrunk); without `current`, which they share, less is rounded.
        move = total(tl.where(off < 0, size - shrunk, shrunk - size), SHAPE)
        better = error < least
        best = tl.where(better, current, best)
        least = tl.where(better, error, least)
        current = (current + over(move, count)).to(tl.float16).to(tl.float32)
        beta *= BETA_GROWTH
    return best
