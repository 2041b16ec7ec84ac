"""Keys that were stored before the rotary embedding, and means of keys that turn with it.

Token ``m`` of block ``n`` is turned by ``base[n] + step[m]``: ``angles`` is ``(base_cos, base_sin, step_cos,
step_sin)``, the first two ``[N, half]`` of the row.
"""

# The jit compiler reads annotations: no ``from __future__ import annotations`` here.

import triton
import triton.language as tl

from kvbits.attend.triton_kernel.codes import E4M3, TABLE
from kvbits.attend.triton_kernel.numbers import bf16_part, dot
from kvbits.attend.triton_kernel.records import LAYER, STATIC, TOKEN, static
from kvbits.attend.triton_kernel.tables import PART


@triton.jit
def dense(pools, params, base, token, channel, h, SIDE: tl.constexpr, TILE: tl.constexpr):
    """Decoded float32 elements ``[ROWS, C]``: any tokens of the records at ``base``, any channels. Not fast."""
    pool, _, scales, zeros = pools
    scale_param, zero_param, table = params
    live = (channel < SIDE.channels)[None, :]
    per_row: tl.constexpr = TILE.tokens // (4 if SIDE.bits == 3 else 8 // SIDE.bits)
    at = (base + SIDE.codes_at + token % per_row * SIDE.units)[:, None] + (channel // 2)[None, :]
    byte = tl.load(pool + at, mask=live, other=0).to(tl.int32) >> (channel % 2 * 8)[None, :]
    if SIDE.bits == 3:
        code = (byte >> (token // per_row * 2)[:, None]) & 3
        row = token % (TILE.tokens // 8) + TILE.tokens // 4
        at = (base + SIDE.codes_at + row * SIDE.units)[:, None] + (channel // 2)[None, :]
        byte = tl.load(pool + at, mask=live, other=0).to(tl.int32) >> (channel % 2 * 8)[None, :]
        code = code | (((byte >> (token // (TILE.tokens // 8))[:, None]) & 1) << 2)
    else:
        code = (byte >> (token // per_row * SIDE.bits)[:, None]) & ((1 << SIDE.bits) - 1)
    if SIDE.levels == E4M3:
        bits = ((code & 0x7F) << 20) | ((code & 0x80) << 24)
        level = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
    elif SIDE.levels == TABLE:
        level = tl.load(table + code).to(tl.float32)
        parts: tl.constexpr = TILE.parts
        for part in tl.static_range(1, parts):
            level += tl.load(table + (part * PART + code)).to(tl.float32)
    else:
        level = code.to(tl.float32)
    if SIDE.per == LAYER:
        return level * tl.load(scale_param)
    if SIDE.per == STATIC:
        if SIDE.zero:
            level -= static(zero_param, h, channel, SIDE)[None, :]
        return level * static(scale_param, h, channel, SIDE)[None, :]
    if SIDE.per == TOKEN:
        own = (token * SIDE.count)[:, None] + (channel // SIDE.group)[None, :]
    else:
        own = (token // SIDE.group * SIDE.channels)[:, None] + channel[None, :]
    own += base[:, None]
    if SIDE.zero:
        level -= tl.load(zeros + SIDE.zero_at + own, mask=live, other=0).to(tl.float32)
    return level * tl.load(scales + SIDE.scale_at + own, mask=live, other=0).to(tl.float32)


@triton.jit
def partner(channel, TURN: tl.constexpr):
    """The other channel of each one's pair; its own where it is in none."""
    if TURN.interleaved:
        other = channel ^ 1
    else:
        other = tl.where(channel < TURN.half, channel + TURN.half, channel - TURN.half)
    return tl.where(channel < 2 * TURN.half, other, channel)


@triton.jit
def turn_of(angles, block, token, channel, TURN: tl.constexpr):
    """Cosine and sine of channels at tokens of blocks (shapes that broadcast); of channels in no pair 1 and 0.

    The sign of the sine is that of the other channel's share: a pair ``(x, y)`` becomes ``(x cos - y sin,
    y cos + x sin)``.
    """
    base_cos, base_sin, step_cos, step_sin = angles
    pair = channel // 2 if TURN.interleaved else channel % TURN.half
    first = channel % 2 == 0 if TURN.interleaved else channel < TURN.half
    paired = channel < 2 * TURN.half
    far, near = block * TURN.half + pair, token * TURN.half + pair
    c_base, s_base = tl.load(base_cos + far, mask=paired, other=1.0), tl.load(base_sin + far, mask=paired, other=0.0)
    c_step, s_step = tl.load(step_cos + near, mask=paired, other=1.0), tl.load(step_sin + near, mask=paired, other=0.0)
    sine = s_base * c_step + c_base * s_step
    return c_base * c_step - s_base * s_step, tl.where(first, -sine, sine)


@triton.jit
def mean_shares(q_at, mean, row_live, scaling, KEY: tl.constexpr, TURN: tl.constexpr, TILE: tl.constexpr):
    """What the mean adds to the scores of each query row: shares that turn, ``[P, NR]`` twice, and one that does not.

    A pair ``(a, b)`` of the mean at angle t meets a query's ``(x, y)`` as ``(x a + y b) cos t + (y a - x b) sin t``.
    """
    pair = tl.arange(0, TURN.padded)
    live = pair < TURN.half
    first = pair * 2 if TURN.interleaved else pair
    second = first + (1 if TURN.interleaved else TURN.half)
    seen = row_live[None, :] & live[:, None]
    x = tl.load(q_at[None, :] + first[:, None], mask=seen, other=0).to(tl.float32)
    y = tl.load(q_at[None, :] + second[:, None], mask=seen, other=0).to(tl.float32)
    a = tl.load(mean + first, mask=live, other=0)[:, None] * scaling
    b = tl.load(mean + second, mask=live, other=0)[:, None] * scaling
    still = tl.full([TILE.queries], 0.0, tl.float32)
    if 2 * TURN.half < KEY.channels:
        channel = tl.arange(0, KEY.padded)
        rest = (channel >= 2 * TURN.half) & (channel < KEY.channels)
        q = tl.load(q_at[None, :] + channel[:, None], mask=row_live[None, :] & rest[:, None], other=0).to(tl.float32)
        still = tl.sum(q * tl.load(mean + channel, mask=rest, other=0)[:, None], 0) * scaling
    return x * a + y * b, y * a - x * b, still


@triton.jit
def turn_shares(angles, shares, at, last, TURN: tl.constexpr, TILE: tl.constexpr):
    """The shares at the first token of each block of a tile: ``[P, BLOCKS * NR]`` twice."""
    base_cos, base_sin, _, _ = angles
    with_cos, with_sin, _ = shares
    pair, block = tl.arange(0, TURN.padded), tl.minimum(at + tl.arange(0, TILE.blocks), last - 1)
    where = block[None, :] * TURN.half + pair[:, None]
    live = (pair < TURN.half)[:, None]
    cos = tl.load(base_cos + where, mask=live, other=0)[:, :, None]
    sin = tl.load(base_sin + where, mask=live, other=0)[:, :, None]
    with_cos, with_sin = with_cos[:, None, :], with_sin[:, None, :]
    wide: tl.constexpr = TILE.blocks * TILE.queries
    return (
        tl.reshape(with_cos * cos + with_sin * sin, (TURN.padded, wide)),
        tl.reshape(with_sin * cos - with_cos * sin, (TURN.padded, wide)),
    )


@triton.jit
def mean_scores(angles, turned, J: tl.constexpr, TURN: tl.constexpr, TILE: tl.constexpr):
    """What the mean adds to the scores of slice ``J``, ``[ROWS, NR]``: tables of the steps times the turned shares.

    The tables are bfloat16 ``[PARTS, tokens of a block, P]``, the same for all blocks.
    """
    _, _, step_cos, step_sin = angles
    with_cos, with_sin = turned
    token, pair = tl.arange(0, TILE.slice) + J * TILE.slice, tl.arange(0, TURN.padded)
    where = token[:, None] * TURN.padded + pair[None, :]
    s = tl.full([TILE.slice, TILE.blocks * TILE.queries], 0.0, tl.float32)
    parts: tl.constexpr = TILE.parts
    for of_step in tl.static_range(parts - 1, -1, -1):
        cos = tl.load(step_cos + of_step * TILE.tokens * TURN.padded + where)
        sin = tl.load(step_sin + of_step * TILE.tokens * TURN.padded + where)
        for of_share in tl.static_range(parts - 1, -1, -1):
            if of_step + of_share < parts:
                s = dot(cos, bf16_part(with_cos, of_share), s)
                s = dot(sin, bf16_part(with_sin, of_share), s)
    if TILE.blocks == 1:
        return s
    s = tl.permute(tl.reshape(s, (TILE.slice, TILE.blocks, TILE.queries)), (1, 0, 2))
    return tl.reshape(s, (TILE.rows, TILE.queries))
