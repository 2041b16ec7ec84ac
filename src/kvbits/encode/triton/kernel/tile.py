"""Which token and channel an element of a tile is, and where what its group has one of belongs."""

# The jit compiler reads annotations: no ``from __future__ import annotations`` here.

import triton
import triton.language as tl


@triton.jit
def places(SHAPE: tl.constexpr):
    """Token and channel of each element, of shapes that broadcast, and whether there is such an element."""
    first, second, third = tl.arange(0, SHAPE.first), tl.arange(0, SHAPE.second), tl.arange(0, SHAPE.third)
    if SHAPE.per_token:
        inside = third[None, None, :]
        token, channel = first[:, None, None], (second * SHAPE.length)[None, :, None] + inside
        real = (inside < SHAPE.length) & (channel < SHAPE.channels)
    else:
        token, channel = (first * SHAPE.second)[:, None, None] + second[None, :, None], third[None, None, :]
        real = channel < SHAPE.channels
    return token, channel, real


@triton.jit
def group_places(SHAPE: tl.constexpr):
    """Where scale and zero of each group stand in those of the block, and whether there is such a group."""
    first, second, third = tl.arange(0, SHAPE.first), tl.arange(0, SHAPE.second), tl.arange(0, SHAPE.third)
    if SHAPE.per_token:
        group = second[None, :, None]
        place, live = first[:, None, None] * SHAPE.groups + group, group < SHAPE.groups
    else:
        channel = third[None, None, :]
        place, live = first[:, None, None] * SHAPE.channels + channel, channel < SHAPE.channels
    return place, live


@triton.jit
def group_sizes(SHAPE: tl.constexpr):
    """Elements of each group, int32, of a shape that broadcasts; at least 1. The last of a token may be short."""
    if SHAPE.per_token:
        rest = SHAPE.channels - tl.arange(0, SHAPE.second) * SHAPE.length
        sizes = tl.maximum(tl.minimum(rest, SHAPE.length), 1)[None, :, None]
    else:
        sizes = tl.full([1, 1, 1], SHAPE.length, tl.int32)
    return sizes


@triton.jit
def total(x, SHAPE: tl.constexpr):
    """The sum of each group."""
    return tl.sum(x, SHAPE.axis, keep_dims=True)


@triton.jit
def extremes(value, taken, SHAPE: tl.constexpr):
    """Lowest and highest element of each group among those ``taken``; 0 where there are none."""
    low = tl.min(tl.where(taken, value, float("inf")), SHAPE.axis, keep_dims=True)
    high = tl.max(tl.where(taken, value, float("-inf")), SHAPE.axis, keep_dims=True)
    none = low > high
    return tl.where(none, 0.0, low), tl.where(none, 0.0, high)
