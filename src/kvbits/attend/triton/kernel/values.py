"""One slice of packed values: weights times values, summed over tokens.

Sums are ``[W, columns]`` of even and of odd channels; those of :func:`finish` are ``[W, NR]``.
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
    own_group,
    per_channel,
    per_token,
    record_at,
    static,
    zeros_per_channel,
)


@triton.jit
def add_values(
    even, odd, zero_sum, p, pools, params, base, at, last, home, J: tl.constexpr, VALUE: tl.constexpr,
    TILE: tl.constexpr, IN_ORDER: tl.constexpr,
):  # fmt: skip
    """The sums and what slice ``J`` adds to them at weights ``p [ROWS, NR]``.

    ``zero_sum`` is what zeros and offsets have added to each token's columns, and is taken off at the end.
    """
    pool, words, scales, zeros = pools
    _, _, table = params
    tile_row = tl.arange(0, TILE.rows)
    bi, rr = tile_row // TILE.slice, tile_row % TILE.slice
    unit, columns = tl.arange(0, VALUE.padded // 2), tl.arange(0, VALUE.columns)
    wide: tl.constexpr = VALUE.columns * TILE.queries
    units = slice_units(pool, base, rr, unit, J, VALUE, TILE, True)
    if VALUE.per == TOKEN:
        token = rr + J * TILE.slice
        given = per_token(scales, words, base + VALUE.scale_at + token * VALUE.count, columns, VALUE.count)
        scale = down(given, J, VALUE)
        factor = tl.reshape(p[:, None, :] * scale[:, :, None], (TILE.rows, wide))
        if VALUE.zeroed:
            zero = tl.full([TILE.rows, VALUE.columns], VALUE.offset, tl.float32)
            if VALUE.zero:
                given = per_token(zeros, words, base + VALUE.zero_at + token * VALUE.count, columns, VALUE.count)
                zero += up(given, J, VALUE)
            met = tl.reshape(rounded(factor, TILE.parts), (TILE.rows, VALUE.columns, TILE.queries))
            zero_sum += tl.reshape(met * zero[:, :, None], (TILE.rows, wide))
    elif VALUE.per == CHANNEL:
        factor = p
        if VALUE.columns > 1:
            group = bi * VALUE.slice_groups + rr // VALUE.group % VALUE.slice_groups
            own = (group[:, None] == columns[None, :])[:, :, None]
            factor = tl.reshape(tl.where(own, p[:, None, :], 0.0), (TILE.rows, wide))
    else:
        factor = down(p, J, VALUE)
        if VALUE.zeroed:
            zero_sum += rounded(factor, TILE.parts)
    if VALUE.per == CHANNEL:
        # Another tile has other scales: they are applied here, not at the end.
        scale_even, scale_odd = per_channel(
            scales, words, at, last, unit, home, VALUE.scale_at, J, VALUE, TILE, IN_ORDER
        )  # fmt: skip
        zero_even, zero_odd = zeros_per_channel(zeros, words, at, last, unit, home, J, VALUE, TILE, IN_ORDER)
        sums = tl.sum(tl.reshape(rounded(factor, TILE.parts), (TILE.rows, VALUE.columns, TILE.queries)), 0)
        even += _grouped(units, table, factor, sums, scale_even, zero_even, J, 0, VALUE, TILE)
        odd += _grouped(units, table, factor, sums, scale_odd, zero_odd, J, 1, VALUE, TILE)
    else:
        even = dot_levels(even, units, table, factor, J, 0, VALUE, TILE.parts)
        odd = dot_levels(odd, units, table, factor, J, 1, VALUE, TILE.parts)
    return even, odd, zero_sum


@triton.jit
def _grouped(
    units, table, factor, sums, scale, zero, J: tl.constexpr, PARITY: tl.constexpr, VALUE: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Channels of one parity, with scales and zeros of their groups of tokens: ``[W, NR]``."""
    found = tl.full([VALUE.padded // 2, VALUE.columns * TILE.queries], 0.0, tl.float32)
    found = dot_levels(found, units, table, factor, J, PARITY, VALUE, TILE.parts)
    by_group = tl.reshape(found, (VALUE.padded // 2, VALUE.columns, TILE.queries))
    by_group -= zero[:, :, None] * sums[None, :, :]
    return tl.sum(by_group * down(scale, J, VALUE)[:, :, None], 1)


@triton.jit
def add_outliers(
    even, odd, p, pools, at, last, home, J: tl.constexpr, VALUE: tl.constexpr, TILE: tl.constexpr,
    IN_ORDER: tl.constexpr,
):  # fmt: skip
    """``[W, NR]`` of even and of odd channels, and what the outliers of slice ``J`` add to them."""
    pool, _, scales, _ = pools
    tile_row, unit = tl.arange(0, TILE.rows), tl.arange(0, VALUE.padded // 2)
    bi, token = tile_row // TILE.slice, tile_row % TILE.slice + J * TILE.slice
    blocks: tl.constexpr = TILE.blocks
    for extra in tl.static_range(blocks):
        spare = record_at(tl.minimum(at + extra, last - 1), home, TILE, IN_ORDER)
        e_token, e_channel, e_value = entries_of(pool, scales, spare, VALUE)
        mine = token[None, :] == e_token[:, None]
        chosen = (mine & (bi == extra)[None, :]).to(tl.float32)
        hit = (
            dot_parts(chosen, p, tl.full([VALUE.entries, TILE.queries], 0.0, tl.float32), TILE.parts) * e_value[:, None]
        )
        of_even = ((unit * 2)[:, None] == e_channel[None, :]).to(tl.float32)
        of_odd = ((unit * 2 + 1)[:, None] == e_channel[None, :]).to(tl.float32)
        even = dot_parts(of_even, hit, even, TILE.parts)
        odd = dot_parts(of_odd, hit, odd, TILE.parts)
    return even, odd


@triton.jit
def finish(even, odd, zero_sum, params, h, VALUE: tl.constexpr, TILE: tl.constexpr):
    """What is applied once, at the end: zeros, offsets, scales of the layer, each channel's own group."""
    value_scale, value_zero, _ = params
    unit = tl.arange(0, VALUE.padded // 2)
    if VALUE.per == STATIC:
        taken = tl.sum(zero_sum, 0)[None, :]
        if VALUE.zero:
            even -= static(value_zero, h, unit * 2, VALUE)[:, None] * taken
            odd -= static(value_zero, h, unit * 2 + 1, VALUE)[:, None] * taken
        even *= static(value_scale, h, unit * 2, VALUE)[:, None]
        odd *= static(value_scale, h, unit * 2 + 1, VALUE)[:, None]
    elif VALUE.per == LAYER:
        factor = tl.load(value_scale)
        even *= factor
        odd *= factor
    elif VALUE.per == TOKEN:
        if VALUE.zeroed:
            taken = tl.sum(zero_sum, 0)[None, :]
            even -= taken
            odd -= taken
        even = own_group(even, unit * 2, VALUE, TILE.queries)
        odd = own_group(odd, unit * 2 + 1, VALUE, TILE.queries)
    return even, odd
