"""Where a record lies, and its scales, zeros and outliers.

``home`` is where a row's blocks are found: ``(table row, batch, row, heads, head)``.
"""

# The jit compiler reads annotations: no ``from __future__ import annotations`` here.

import triton
import triton.language as tl

from kvbits.attend.triton.kernel.codes import up
from kvbits.attend.triton.kernel.numbers import split_word

TOKEN, CHANNEL, LAYER, STATIC = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@triton.jit
def record_at(block, home, TILE: tl.constexpr, IN_ORDER: tl.constexpr):
    """Where the record of a row's block begins. int64: pools reach beyond 2**31."""
    table_row, batch, b, heads, h = home
    if IN_ORDER:
        where = tl.cast(block, tl.int64) * batch + b
    else:
        where = tl.load(table_row + block)
    return (where * heads + h) * TILE.record


@triton.jit
def per_channel(
    source, words, at, last, unit, home, OFFSET: tl.constexpr, J: tl.constexpr, SIDE: tl.constexpr,
    TILE: tl.constexpr, IN_ORDER: tl.constexpr,
):  # fmt: skip
    """Scales or zeros of even and of odd channels in slice ``J``, ``[U, COLUMNS]`` each.

    Column c is group ``c % slice_groups`` of the slice in block ``at + c // slice_groups``. Even and odd channels come
    in one word.
    """
    columns = tl.arange(0, SIDE.columns)
    block = at
    if TILE.blocks > 1:
        block = tl.minimum(at + columns // SIDE.slice_groups, last - 1)
    begin = record_at(block, home, TILE, IN_ORDER) + OFFSET
    begin = begin // 2 + (J * TILE.slice // SIDE.group + columns % SIDE.slice_groups) * SIDE.units
    word = tl.load(words + begin[None, :] + unit[:, None], mask=(unit < SIDE.units)[:, None], other=0)
    return split_word(word, source.dtype.element_ty)


@triton.jit
def zeros_per_channel(
    zeros, words, at, last, unit, home, J: tl.constexpr, SIDE: tl.constexpr, TILE: tl.constexpr, IN_ORDER: tl.constexpr,
):  # fmt: skip
    """What is taken off the levels of even and of odd channels in slice ``J``, ``[W, COLUMNS]`` each."""
    even = tl.full([SIDE.padded // 2, SIDE.columns], SIDE.offset, tl.float32)
    odd = tl.full([SIDE.padded // 2, SIDE.columns], SIDE.offset, tl.float32)
    if SIDE.zero:
        given_even, given_odd = per_channel(
            zeros, words, at, last, unit, home, SIDE.zero_at, J, SIDE, TILE, IN_ORDER
        )  # fmt: skip
        even += up(given_even, J, SIDE)
        odd += up(given_odd, J, SIDE)
    return even, odd


@triton.jit
def per_token(source, words, at, columns, COUNT: tl.constexpr):
    """Scales or zeros of a token's groups of channels: ``[ROWS, C]`` for tokens whose own begin at ``at [ROWS]``.

    One column, or two in a 32-bit word, at a time: so few elements are loaded where they are needed, without a detour
    through shared memory.
    """
    if COUNT % 2 == 0:
        found = tl.zeros([at.shape[0], columns.shape[0]], tl.float32)
        for pair in tl.static_range(COUNT // 2):
            word = tl.load(words + (at // 2 + pair))
            low, high = split_word(word, source.dtype.element_ty)
            found = tl.where(columns[None, :] == 2 * pair, low[:, None], found)
            found = tl.where(columns[None, :] == 2 * pair + 1, high[:, None], found)
    else:
        found = tl.load(source + at)[:, None].to(tl.float32) + tl.zeros([1, columns.shape[0]], tl.float32)
        for column in tl.static_range(1, COUNT):
            given = tl.load(source + at + column)[:, None].to(tl.float32)
            found = tl.where(columns[None, :] == column, given, found)
    return found


@triton.jit
def static(source, h, channel, SIDE: tl.constexpr):
    """Static scales or zeros of one head's channels, ``[U]``."""
    return tl.load(source + h * SIDE.channels + channel, mask=channel < SIDE.channels, other=0).to(tl.float32)


@triton.jit
def entries_of(pool, values, record, SIDE: tl.constexpr):
    """Token, channel and value of a block's outliers, ``[ENTRIES]`` each; unused ones have the value 0."""
    entry = tl.arange(0, SIDE.entries)
    live = entry < SIDE.outliers
    index = tl.load(pool + record + SIDE.index_at + entry, mask=live, other=0).to(tl.int32) & 0xFFFF
    value = tl.load(values + record + SIDE.value_at + entry, mask=live, other=0).to(tl.float32)
    return index // SIDE.channels, index % SIDE.channels, value


@triton.jit
def own_group(x, channel, SIDE: tl.constexpr, NR: tl.constexpr):
    """Of columns (group, query row), those of each channel's own group: ``[U, C * NR]`` to ``[U, NR]``."""
    if SIDE.columns == 1:
        return x
    group = tl.arange(0, SIDE.columns)
    own = (channel // SIDE.group)[:, None] == group[None, :]
    return tl.sum(tl.where(own[:, :, None], tl.reshape(x, (channel.shape[0], SIDE.columns, NR)), 0.0), 1)


@triton.jit
def of_group(x, channel, SIDE: tl.constexpr, NR: tl.constexpr):
    """The inverse: ``[U, NR]`` in the columns of each channel's own group, 0 elsewhere."""
    if SIDE.columns == 1:
        return x
    own = (channel // SIDE.group)[:, None] == tl.arange(0, SIDE.columns)[None, :]
    return tl.reshape(tl.where(own[:, :, None], x[:, None, :], 0.0), (channel.shape[0], SIDE.columns * NR))
