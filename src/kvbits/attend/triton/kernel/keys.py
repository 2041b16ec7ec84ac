"""One slice of packed keys: the scores of its tokens, ``[ROWS, NR]``.

``pools`` is the pool as int16, int32, bfloat16 and float16; ``params`` the static scale and zero, and the table.
"""

# The jit compiler reads annotations: no ``from __future__ import annotations`` here.

import triton
import triton.language as tl

from kvbits.attend.triton.kernel.codes import dot_levels, down, slice_units, up
from kvbits.attend.triton.kernel.numbers import dot_parts, rounded
from kvbits.attend.triton.kernel.records import (
    CHANNEL,
    LAYER,
    STATIC,
    TOKEN,
    entries_of,
    of_group,
    per_channel,
    per_token,
    record_at,
    static,
    zeros_per_channel,
)
from kvbits.attend.triton.kernel.rotary import cos_sin_of, partner


@triton.jit
def load_queries(q_at, params, h, row_live, KEY: tl.constexpr, TILE: tl.constexpr):
    """Even and odd channels of the queries; the same in the columns of the groups that they meet; sums for zeros."""
    key_scale, key_zero, _ = params
    unit = tl.arange(0, KEY.padded // 2)
    live = row_live[None, :] & (unit < KEY.units)[:, None]
    even = tl.load(q_at[None, :] + (unit * 2)[:, None], mask=live, other=0).to(tl.float32)
    odd = tl.load(q_at[None, :] + (unit * 2 + 1)[:, None], mask=live, other=0).to(tl.float32)
    if KEY.per == STATIC:
        even *= static(key_scale, h, unit * 2, KEY)[:, None]
        odd *= static(key_scale, h, unit * 2 + 1, KEY)[:, None]
    wide_even, wide_odd = even, odd
    if KEY.per == TOKEN:
        wide_even = of_group(even, unit * 2, KEY, TILE.queries)
        wide_odd = of_group(odd, unit * 2 + 1, KEY, TILE.queries)
    # The sum of each column's queries, for zeros and offsets; as rounded, or offsets would not cancel.
    rounded_even, rounded_odd = rounded(wide_even, TILE.parts), rounded(wide_odd, TILE.parts)
    q_sum = tl.sum(rounded_even + rounded_odd, 0)
    q_zero = tl.zeros_like(q_sum)
    if KEY.per == STATIC and KEY.zero:
        q_zero = tl.sum(
            rounded_even * static(key_zero, h, unit * 2, KEY)[:, None]
            + rounded_odd * static(key_zero, h, unit * 2 + 1, KEY)[:, None], 0
        )  # fmt: skip
    return even, odd, wide_even, wide_odd, q_sum, q_zero


@triton.jit
def score_factor(params, scaling, KEY: tl.constexpr):
    """What finished sums are multiplied by."""
    key_scale, _, _ = params
    return scaling * tl.load(key_scale) if KEY.per == LAYER else scaling


@triton.jit
def scores_of(
    queries, pools, params, base, at, last, home, J: tl.constexpr, KEY: tl.constexpr, TILE: tl.constexpr,
    IN_ORDER: tl.constexpr,
):  # fmt: skip
    """Codes of slice ``J`` of the records at ``base`` times queries, scaled but for :func:`score_factor`."""
    q_even, q_odd, wide_even, wide_odd, q_sum, q_zero = queries
    pool, words, scales, zeros = pools
    _, _, table = params
    tile_row = tl.arange(0, TILE.rows)
    bi, rr = tile_row // TILE.slice, tile_row % TILE.slice
    unit, columns = tl.arange(0, KEY.padded // 2), tl.arange(0, KEY.columns)
    wide: tl.constexpr = KEY.columns * TILE.queries
    units = slice_units(pool, base, rr, unit, J, KEY, TILE, False)
    s = tl.full([TILE.rows, wide], 0.0, tl.float32)
    if KEY.per == CHANNEL:
        scale_even, scale_odd = per_channel(
            scales, words, at, last, unit, home, KEY.scale_at, J, KEY, TILE, IN_ORDER
        )  # fmt: skip
        wide_even = tl.reshape(q_even[:, None, :] * scale_even[:, :, None], (KEY.padded // 2, wide))
        wide_odd = tl.reshape(q_odd[:, None, :] * scale_odd[:, :, None], (KEY.padded // 2, wide))
        zero_even, zero_odd = zeros_per_channel(zeros, words, at, last, unit, home, J, KEY, TILE, IN_ORDER)
        all_even = tl.reshape(rounded(wide_even, TILE.parts), (KEY.padded // 2, KEY.columns, TILE.queries))
        all_odd = tl.reshape(rounded(wide_odd, TILE.parts), (KEY.padded // 2, KEY.columns, TILE.queries))
        terms = all_even * zero_even[:, :, None] + all_odd * zero_odd[:, :, None]
        s -= tl.reshape(tl.sum(terms, 0), (wide,))[None, :]
    s = dot_levels(s, units, table, wide_even, J, 0, KEY, TILE.parts)
    s = dot_levels(s, units, table, wide_odd, J, 1, KEY, TILE.parts)
    if KEY.per == TOKEN:
        token = rr + J * TILE.slice
        scale = per_token(scales, words, base + KEY.scale_at + token * KEY.count, columns, KEY.count)
        s3 = tl.reshape(s, (TILE.rows, KEY.columns, TILE.queries))
        sums = tl.reshape(q_sum, (KEY.columns, TILE.queries))[None, :, :]
        if KEY.zero:
            zero = up(per_token(zeros, words, base + KEY.zero_at + token * KEY.count, columns, KEY.count), J, KEY)
            s3 -= (zero + KEY.offset)[:, :, None] * sums
        elif KEY.offset > 0:
            s3 -= KEY.offset * sums
        s = tl.sum(s3 * scale[:, :, None], 1)
    elif KEY.per == CHANNEL:
        if KEY.columns > 1:
            group = bi * KEY.slice_groups + rr // KEY.group % KEY.slice_groups
            s3 = tl.reshape(s, (TILE.rows, KEY.columns, TILE.queries))
            s = tl.sum(tl.where((group[:, None] == columns[None, :])[:, :, None], s3, 0.0), 1)
    else:
        s -= (q_sum * KEY.offset + up(q_zero, J, KEY))[None, :]
    return down(s, J, KEY)


@triton.jit
def with_outliers(
    s, q_at, pools, angles, at, last, home, row_live, scaling, J: tl.constexpr, KEY: tl.constexpr,
    TILE: tl.constexpr, ROPE: tl.constexpr, IN_ORDER: tl.constexpr, UNROPED: tl.constexpr,
):  # fmt: skip
    """Scores ``s``, and what the outliers of slice ``J`` add to them. UNROPED: keys are before RoPE."""
    pool, _, scales, _ = pools
    tile_row = tl.arange(0, TILE.rows)
    bi, token = tile_row // TILE.slice, tile_row % TILE.slice + J * TILE.slice
    blocks: tl.constexpr = TILE.blocks
    for extra in tl.static_range(blocks):
        block = tl.minimum(at + extra, last - 1)
        e_token, e_channel, e_value = entries_of(pool, scales, record_at(block, home, TILE, IN_ORDER), KEY)
        hit = tl.load(q_at[None, :] + e_channel[:, None], mask=row_live[None, :], other=0).to(tl.float32)
        if UNROPED:
            far = partner(e_channel, ROPE)
            # What a channel gives to the other of its pair has the sign that the other's share has there.
            cos, sin = cos_sin_of(angles, block, e_token, e_channel, KEY, TILE, ROPE)
            other = tl.load(q_at[None, :] + far[:, None], mask=row_live[None, :], other=0).to(tl.float32)
            hit = hit * cos[:, None] - other * sin[:, None]
        hit *= e_value[:, None] * scaling
        chosen = (token[:, None] == e_token[None, :]) & (bi == extra)[:, None]
        s = dot_parts(chosen.to(tl.float32), hit, s, TILE.parts)
    return s
