"""The sparse part of a block: which elements are outliers, and their entries. See ``numerics.outliers``.

The largest are found by their bits, which order as they do: one bit of the least of them after the other, each by
counting, until there are as many as there shall be. Of equals the first are taken; which of them ``Codec.encode`` takes
is not defined.
"""

# The jit compiler reads annotations: no ``from __future__ import annotations`` here.

import triton
import triton.language as tl

from kvbits.encode.triton.kernel.numbers import bits_near
from kvbits.encode.triton.kernel.tile import group_sizes, total

NOTHING = tl.constexpr(0x7FFF)  # no value of an outlier: NaN
PIECE = tl.constexpr(2048)


@triton.jit
def distances(value, real, SHAPE: tl.constexpr):
    """How far each element lies from the mean of its group, in standard deviations: sums in float64, then float32."""
    double = value.to(tl.float64)  # 0 where not real
    count = group_sizes(SHAPE).to(tl.float64)
    off = tl.where(real, double - total(double, SHAPE) / count, 0.0)
    spread = tl.sqrt(total(off * off, SHAPE) / count)
    return (tl.abs(off) * (1.0 / tl.maximum(spread, tl.full([1, 1, 1], 1e-300, tl.float64)))).to(tl.float32)


@triton.jit
def largest(far, real, SHAPE: tl.constexpr):
    """Which ``SHAPE.outliers`` elements have the largest magnitudes."""
    key = tl.where(real, far.to(tl.int32, bitcast=True) & 0x7FFFFFFF, -1)
    least, bit = 0, 30
    count = tl.sum((key >= 0).to(tl.int32))
    while (count > SHAPE.outliers) & (bit >= 0):
        tried = least | (1 << bit)
        found = tl.sum((key >= tried).to(tl.int32))
        enough = found >= SHAPE.outliers
        least, count = tl.where(enough, tried, least), tl.where(enough, found, count)
        bit -= 1
    above, equal = key > least, key == least
    missing = SHAPE.outliers - tl.sum(above.to(tl.int32))
    return above | (equal & (rank(equal, SHAPE) < missing))


@triton.jit
def rank(chosen, SHAPE: tl.constexpr):
    """How many elements before each one are ``chosen``, in the order of the text."""
    one = chosen.to(tl.int32)
    rows = tl.reshape(tl.sum(one, 2), (SHAPE.first * SHAPE.second,))
    before = tl.reshape(tl.cumsum(rows, 0) - rows, (SHAPE.first, SHAPE.second))
    return tl.cumsum(one, 2) - one + before[:, :, None]


@triton.jit
def store_entries(chosen, rest, real, token, channel, index_at, value_at, scratch, SHAPE: tl.constexpr):
    """Index and bfloat16 ``rest`` of each chosen element, ascending.

    By way of ``scratch``, int16 ``[T * D]``: places of a whole tile at once would fill the shared memory of some GPUs.
    """
    marked = tl.where(chosen, bits_near(rest), NOTHING).to(tl.int16)
    tl.store(scratch + token * SHAPE.channels + channel, marked, mask=real)
    tl.debug_barrier()
    found = 0
    for first in range(0, SHAPE.tokens * SHAPE.channels, PIECE):
        index = first + tl.arange(0, PIECE)
        bits = tl.load(scratch + index, mask=index < SHAPE.tokens * SHAPE.channels, other=NOTHING)
        one = (bits != NOTHING).to(tl.int32)
        place = found + tl.cumsum(one, 0) - one
        tl.store(index_at + place, index.to(tl.uint16), mask=one != 0)
        tl.store(value_at + place, bits.to(tl.bfloat16, bitcast=True), mask=one != 0)
        found += tl.sum(one)
