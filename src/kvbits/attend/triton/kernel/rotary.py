"""Pairs of channels and their angles, and the roped means of keys.

Token ``m`` of block ``n`` is roped by ``base[n] + step[m]``: ``angles`` is ``(base_cos, base_sin, step_cos,
step_sin)``, the first two float32 ``[N, half]`` of the row, the others tables of bfloat16 parts.
"""

# The jit compiler reads annotations: no ``from __future__ import annotations`` here.

import triton
import triton.language as tl

from kvbits.attend.triton.kernel.numbers import bf16_part, dot

UNROPED_KEYS = tl.constexpr(1)


@triton.jit
def partner(channel, ROPE: tl.constexpr):
    """The other channel of each one's pair; its own where it is in none."""
    if ROPE.interleaved:
        other = channel ^ 1
    else:
        other = tl.where(channel < ROPE.half, channel + ROPE.half, channel - ROPE.half)
    return tl.where(channel < 2 * ROPE.half, other, channel)


@triton.jit
def cos_sin_of(angles, block, token, channel, KEY: tl.constexpr, TILE: tl.constexpr, ROPE: tl.constexpr):
    """Cosine and sine of channels at tokens of blocks (shapes that broadcast); of channels in no pair 1 and 0.

    The sign of the sine is that of the other channel's share: a pair ``(x, y)`` becomes ``(x cos - y sin,
    y cos + x sin)``.
    """
    base_cos, base_sin, step_cos, step_sin = angles
    pair = channel // 2 if ROPE.interleaved else channel % ROPE.half
    first = channel % 2 == 0 if ROPE.interleaved else channel < ROPE.half
    paired = channel < 2 * ROPE.half
    far, near = block * ROPE.half + pair, (channel % 2 * TILE.tokens + token) * (KEY.padded // 2) + channel // 2
    c_base, s_base = tl.load(base_cos + far, mask=paired, other=1.0), tl.load(base_sin + far, mask=paired, other=0.0)
    c_step, s_step = tl.load(step_cos + near).to(tl.float32), tl.load(step_sin + near).to(tl.float32)
    parts: tl.constexpr = TILE.parts
    for part in tl.static_range(1, parts):
        c_step += tl.load(step_cos + part * TILE.tokens * KEY.padded + near).to(tl.float32)
        s_step += tl.load(step_sin + part * TILE.tokens * KEY.padded + near).to(tl.float32)
    sine = s_base * c_step + c_base * s_step
    return c_base * c_step - s_base * s_step, tl.where(first, -sine, sine)


@triton.jit
def mean_shares(q_at, mean, row_live, scaling, KEY: tl.constexpr, ROPE: tl.constexpr, TILE: tl.constexpr):
    """What the mean adds to the scores of each query row: two shares ``[P, NR]`` to be roped, and one without pairs.

    A pair ``(a, b)`` of the mean at angle t meets a query's ``(x, y)`` as ``(x a + y b) cos t + (y a - x b) sin t``.
    """
    pair = tl.arange(0, ROPE.padded)
    live = pair < ROPE.half
    first = pair * 2 if ROPE.interleaved else pair
    second = first + (1 if ROPE.interleaved else ROPE.half)
    seen = row_live[None, :] & live[:, None]
    x = tl.load(q_at[None, :] + first[:, None], mask=seen, other=0).to(tl.float32)
    y = tl.load(q_at[None, :] + second[:, None], mask=seen, other=0).to(tl.float32)
    a = tl.load(mean + first, mask=live, other=0)[:, None] * scaling
    b = tl.load(mean + second, mask=live, other=0)[:, None] * scaling
    still = tl.full([TILE.queries], 0.0, tl.float32)
    if 2 * ROPE.half < KEY.channels:
        channel = tl.arange(0, KEY.padded)
        rest = (channel >= 2 * ROPE.half) & (channel < KEY.channels)
        q = tl.load(q_at[None, :] + channel[:, None], mask=row_live[None, :] & rest[:, None], other=0).to(tl.float32)
        still = tl.sum(q * tl.load(mean + channel, mask=rest, other=0)[:, None], 0) * scaling
    return x * a + y * b, y * a - x * b, still


@triton.jit
def roped_shares(angles, shares, at, last, ROPE: tl.constexpr, TILE: tl.constexpr):
    """The shares at the first token of each block of a tile: ``[P, BLOCKS * NR]`` twice."""
    base_cos, base_sin, _, _ = angles
    with_cos, with_sin, _ = shares
    pair, block = tl.arange(0, ROPE.padded), tl.minimum(at + tl.arange(0, TILE.blocks), last - 1)
    where = block[None, :] * ROPE.half + pair[:, None]
    live = (pair < ROPE.half)[:, None]
    cos = tl.load(base_cos + where, mask=live, other=0)[:, :, None]
    sin = tl.load(base_sin + where, mask=live, other=0)[:, :, None]
    with_cos, with_sin = with_cos[:, None, :], with_sin[:, None, :]
    wide: tl.constexpr = TILE.blocks * TILE.queries
    return (
        tl.reshape(with_cos * cos + with_sin * sin, (ROPE.padded, wide)),
        tl.reshape(with_sin * cos - with_cos * sin, (ROPE.padded, wide)),
    )


@triton.jit
def mean_scores(angles, roped, KEY: tl.constexpr, ROPE: tl.constexpr, TILE: tl.constexpr):
    """What the mean adds to the scores of each slice, ``[ROWS, NR]``: tables of the steps times the roped shares.

    The tables are bfloat16 ``[PARTS, tokens of a block, P]``, the same for all blocks. Those of keys before RoPE stand
    first.
    """
    _, _, step_cos, step_sin = angles
    with_cos, with_sin = roped
    parts: tl.constexpr = TILE.parts
    token, pair = tl.arange(0, TILE.tokens), tl.arange(0, ROPE.padded)
    where = token[:, None] * ROPE.padded + pair[None, :]
    if ROPE.kind == UNROPED_KEYS:
        where += parts * TILE.tokens * KEY.padded
    s = tl.full([TILE.tokens, TILE.blocks * TILE.queries], 0.0, tl.float32)
    for of_step in tl.static_range(parts - 1, -1, -1):
        cos = tl.load(step_cos + of_step * TILE.tokens * ROPE.padded + where)
        sin = tl.load(step_sin + of_step * TILE.tokens * ROPE.padded + where)
        for of_share in tl.static_range(parts - 1, -1, -1):
            if of_step + of_share < parts:
                s = dot(cos, bf16_part(with_cos, of_share), s)
                s = dot(sin, bf16_part(with_sin, of_share), s)
    # Every slice has its tokens of all blocks; a tensor splits in two along its last side.
    half: tl.constexpr = TILE.slices // 2 if TILE.slices > 1 else 1  # Triton 3.5 knows no max of constants
    two: tl.constexpr = TILE.slices // half
    s = tl.permute(tl.reshape(s, (half, two, TILE.slice, TILE.blocks, TILE.queries)), (3, 2, 4, 0, 1))
    if TILE.slices == 1:
        found = (tl.reshape(s, (TILE.rows, TILE.queries)),)
    elif TILE.slices == 2:
        found = tl.split(tl.reshape(s, (TILE.rows, TILE.queries, 2)))
    else:
        even, odd = tl.split(tl.reshape(s, (TILE.rows, TILE.queries, 2, 2)))
        even, odd = tl.split(even), tl.split(odd)
        found = (even[0], odd[0], even[1], odd[1])
    return found
