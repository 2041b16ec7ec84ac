"""What is done to elements before they are encoded: ``Transform.apply``, step by step, rounded as it rounds."""

# The jit compiler reads annotations: no ``from __future__ import annotations`` here.

import triton
import triton.language as tl

from kvbits.encode.triton.kernel.numbers import element, over

UNROPED_KEYS, UNROPED_MEAN = tl.constexpr(1), tl.constexpr(2)


@triton.jit
def prepare(value, start, s_t, place, home, params, angles, SHAPE: tl.constexpr, BEFORE: tl.constexpr):
    """Elements of a tile, float32, as the codec sees them; 0 where there are none.

    Args:
        value: the elements as they came; ``start`` is where the block begins, ``s_t`` the stride of a token.
        place: token and channel of each, and whether there is one.
        home: number of the head, and of the block in its row, which gives the angles of its first token.
        params: mean, balance and signs.
        angles: cosines and sines of blocks, the stride of a block, and cosines and sines within a block.
    """
    token, channel, real = place
    head, block = home
    mean, balance, signs = params
    own = head * SHAPE.channels + channel
    if BEFORE.unroped:
        pair, other, first, live = pairs(channel, BEFORE)
        live = live & real
        cos, sin = cos_sin_of(token, pair, live, block, angles, BEFORE)
    if BEFORE.unroped == UNROPED_KEYS:
        square = cos * cos + sin * sin
        near = element(tl.load(start + token.to(tl.int64) * s_t + other, mask=live, other=0))
        back = roped(value, near, over(cos, square), over(-sin, square), first)
        value = tl.where(live, back, value)
    if BEFORE.mean:
        middle = tl.load(mean + own, mask=real, other=0)
        if BEFORE.unroped == UNROPED_MEAN:
            near = tl.load(mean + head * SHAPE.channels + other, mask=live, other=0)
            middle = tl.where(live, roped(middle, near, cos, sin, first), middle)
        value = value - middle
    if BEFORE.balance:
        value = over(value, tl.load(balance + own, mask=real, other=1.0))
    if BEFORE.rotated:
        value = value * tl.load(signs + channel, mask=real, other=0)
        value = rotate(tl.where(real, value, 0.0), SHAPE, BEFORE)
    return tl.where(real, value, 0.0)


@triton.jit
def pairs(channel, BEFORE: tl.constexpr):
    """Number of a channel's rotary pair, its other channel, whether this is the first, and whether it has one."""
    if BEFORE.interleaved:
        pair, other, first = channel // 2, channel ^ 1, channel % 2 == 0
    else:
        first = channel < BEFORE.half
        pair, other = channel % BEFORE.half, tl.where(first, channel + BEFORE.half, channel - BEFORE.half)
    return pair, other, first, channel < 2 * BEFORE.half


@triton.jit
def cos_sin_of(token, pair, live, block, angles, BEFORE: tl.constexpr):
    """Cosine and sine of each token and pair: ``Rope.angles``; 1 and 0 in no pair."""
    base_cos, base_sin, block_stride, step_cos, step_sin = angles
    at, step = block.to(tl.int64) * block_stride + pair, token * BEFORE.half + pair
    c0, s0 = tl.load(base_cos + at, mask=live, other=1.0), tl.load(base_sin + at, mask=live, other=0)
    c1, s1 = tl.load(step_cos + step, mask=live, other=1.0), tl.load(step_sin + step, mask=live, other=0)
    return c0 * c1 - s0 * s1, s0 * c1 + c0 * s1


@triton.jit
def roped(own, near, cos, sin, first):
    """One channel of ``numerics.rope.apply``, beside the other one of its pair."""
    return tl.where(first, own * cos - near * sin, own * cos + near * sin)


@triton.jit
def rotate(x, SHAPE: tl.constexpr, BEFORE: tl.constexpr):
    """``numerics.hadamard.transform``. Columns of the tile are channels here, with nothing between groups."""
    stages: tl.constexpr = BEFORE.stages
    rows = tl.reshape(x, (SHAPE.tokens, SHAPE.columns))
    for stage in tl.static_range(stages):
        rows = sums(rows, SHAPE.tokens, SHAPE.columns, 1 << stage)
    return tl.reshape(rows * BEFORE.unit, x.shape)


@triton.jit
def sums(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """Sum and difference of columns ``WIDTH`` apart."""
    first, second = tl.split(tl.permute(tl.reshape(x, (ROWS, COLUMNS // (2 * WIDTH), 2, WIDTH)), (0, 1, 3, 2)))
    return tl.reshape(tl.permute(tl.join(first + second, first - second), (0, 1, 3, 2)), (ROWS, COLUMNS))
