"""One slice of keys that were stored before the rotary embedding: scores ``[ROWS, NR]``.

A channel with query ``q`` whose pair's other channel has ``r`` meets its key at angle t with ``q cos t + p sin t``: p
is ``r`` for the first of a pair, ``-r`` for the second. At ``t = base + step`` that is ``a cos step + b sin step`` with
``a = q cos base + p sin base`` and ``b = p cos base - q sin base``. So queries are roped back, once a block. Codes are
multiplied by the steps' cosines and by their sines: no channel looks for the other of its pair.

Channels come in pieces that share cosines: *family* f of the tables and piece i of it. Families are parities, and
pieces the halves of a head; or, interleaved, there is one family, and its pieces are the parities.
"""

# The jit compiler reads annotations: no ``from __future__ import annotations`` here.

import triton
import triton.language as tl

from kvbits.attend.triton.kernel.codes import TABLE, UNIFORM, levels, slice_units, times
from kvbits.attend.triton.kernel.numbers import bf16_part, dot, dot_parts
from kvbits.attend.triton.kernel.records import (
    CHANNEL,
    LAYER,
    STATIC,
    TOKEN,
    per_channel,
    per_token,
    static,
)
from kvbits.attend.triton.kernel.rotary import partner


@triton.jit
def _units(F: tl.constexpr, PIECE: tl.constexpr, KEY: tl.constexpr, ROPE: tl.constexpr):
    """16-bit units of a piece, and its channels."""
    unit = tl.arange(0, KEY.padded // 4) + PIECE * (KEY.padded // 4) if ROPE.halves else tl.arange(0, KEY.padded // 2)
    return unit, unit * 2 + (PIECE if ROPE.interleaved else F)


@triton.jit
def load_pieces(q_at, row_live, KEY: tl.constexpr, ROPE: tl.constexpr):
    """``(q, p)`` of all pieces, float32 ``[U, NR]`` each."""
    families: tl.constexpr = ROPE.families
    count: tl.constexpr = ROPE.pieces
    pieces = ()
    for f in tl.static_range(families):
        for i in tl.static_range(count):
            _, channel = _units(f, i, KEY, ROPE)
            live = row_live[None, :] & (channel < KEY.channels)[:, None]
            q = tl.load(q_at[None, :] + channel[:, None], mask=live, other=0).to(tl.float32)
            paired = live & (channel < 2 * ROPE.half)[:, None]
            other = tl.load(q_at[None, :] + partner(channel, ROPE)[:, None], mask=paired, other=0).to(tl.float32)
            first = channel % 2 == 0 if ROPE.interleaved else channel < ROPE.half
            pieces = pieces + ((q, tl.where(first[:, None], other, -other)),)  # noqa: RUF005
    return pieces


@triton.jit
def roped_pieces(pieces, angles, at, last, KEY: tl.constexpr, TILE: tl.constexpr, ROPE: tl.constexpr):
    """``(a, b)`` of all pieces at the first tokens of the blocks of a tile, ``[U, BLOCKS, NR]`` each."""
    families: tl.constexpr = ROPE.families
    count: tl.constexpr = ROPE.pieces
    base_cos, base_sin, _, _ = angles
    block = tl.minimum(at + tl.arange(0, TILE.blocks), last - 1)
    roped = ()
    for f in tl.static_range(families):
        _, channel = _units(f, 0, KEY, ROPE)
        pair = channel // 2 if ROPE.interleaved else channel % ROPE.half
        where = block[None, :] * ROPE.half + pair[:, None]
        paired = (channel < 2 * ROPE.half)[:, None]
        cos = tl.load(base_cos + where, mask=paired, other=1.0)[:, :, None]
        sin = tl.load(base_sin + where, mask=paired, other=0.0)[:, :, None]
        for i in tl.static_range(count):
            q, p = pieces[f * count + i]
            q, p = q[:, None, :], p[:, None, :]
            roped = roped + ((q * cos + p * sin, p * cos - q * sin),)  # noqa: RUF005
    return roped


@triton.jit
def unroped_scores(
    roped, pools, params, angles, base, at, last, home, h, J: tl.constexpr, KEY: tl.constexpr,
    TILE: tl.constexpr, ROPE: tl.constexpr, IN_ORDER: tl.constexpr,
):  # fmt: skip
    """Scores of slice ``J`` of the records at ``base``, without ``scaling``; ``roped`` are the queries of the tile."""
    _, words, scales, zeros = pools
    tile_row = tl.arange(0, TILE.rows)
    bi, rr = tile_row // TILE.slice, tile_row % TILE.slice
    token = rr + J * TILE.slice
    families: tl.constexpr = ROPE.families
    count: tl.constexpr = ROPE.pieces
    groups: tl.constexpr = KEY.columns if KEY.per == TOKEN else KEY.slice_groups
    columns = tl.arange(0, TILE.blocks * groups)
    wide: tl.constexpr = TILE.blocks * groups * TILE.queries
    s = tl.full([TILE.rows, wide], 0.0, tl.float32)
    taken = tl.full([TILE.rows, wide], 0.0, tl.float32)
    for f in tl.static_range(families):
        unit, _ = _units(f, 0, KEY, ROPE)
        cos, sin = _steps(angles, f, token, unit, at, KEY, TILE)
        # What is taken off all codes of a group meets the cosines themselves: sums over the pieces.
        with_cos = tl.full([unit.shape[0], wide], 0.0, tl.float32)
        with_sin = tl.full([unit.shape[0], wide], 0.0, tl.float32)
        for i in tl.static_range(count):
            a, b = roped[f * count + i]
            unit, channel = _units(f, i, KEY, ROPE)
            factor, zero = _factors(pools, params, at, last, home, h, unit, channel, J, KEY, TILE, IN_ORDER)
            a, b = _widened(a, factor), _widened(b, factor)
            if KEY.zero and KEY.per != STATIC:
                with_cos += a * zero
                with_sin += b * zero
            units = slice_units(pools[0], base, rr, unit, J, KEY, TILE, False)
            level = _levels(units, params, J, i if ROPE.interleaved else f, KEY, TILE.parts)
            s = _dot(s, level, cos, sin, a, b, KEY, TILE.parts)
        if KEY.zero and KEY.per != STATIC:
            taken = _dot_steps(taken, cos, sin, with_cos, with_sin, TILE.parts)
    if KEY.per == TOKEN:
        if KEY.zero:
            zero = per_token(zeros, words, base + KEY.zero_at + token * KEY.count, columns % groups, KEY.count)
            taken = tl.reshape(taken, (TILE.rows, TILE.blocks * groups, TILE.queries)) * zero[:, :, None]
            s -= tl.reshape(taken, (TILE.rows, wide))
        scale = per_token(scales, words, base + KEY.scale_at + token * KEY.count, columns % groups, KEY.count)
        if TILE.blocks > 1:
            scale = tl.where(bi[:, None] == (columns // groups)[None, :], scale, 0.0)
        s = tl.sum(tl.reshape(s, (TILE.rows, TILE.blocks * groups, TILE.queries)) * scale[:, :, None], 1)
    elif KEY.per == CHANNEL:
        s = _own(s - taken, bi * groups + rr // KEY.group % groups, TILE.blocks * groups, TILE)
    else:
        s = _own(s, bi, TILE.blocks, TILE)
    return s


@triton.jit
def _steps(angles, F: tl.constexpr, token, unit, at, KEY: tl.constexpr, TILE: tl.constexpr):
    """Cosines and sines of a family within a block, ``[ROWS, U]``: bfloat16, or the sums of several parts."""
    _, _, step_cos, step_sin = angles
    # That minimum is 0. Without it, all slices' tables would be loaded before the loop, into too many registers.
    where = (F * TILE.tokens + token)[:, None] * (KEY.padded // 2) + unit[None, :] + 8 * tl.minimum(at, 0)
    cos, sin = tl.load(step_cos + where), tl.load(step_sin + where)
    parts: tl.constexpr = TILE.parts
    if parts > 1:
        cos, sin = cos.to(tl.float32), sin.to(tl.float32)
        for part in tl.static_range(1, parts):
            cos += tl.load(step_cos + part * TILE.tokens * KEY.padded + where).to(tl.float32)
            sin += tl.load(step_sin + part * TILE.tokens * KEY.padded + where).to(tl.float32)
    return cos, sin


@triton.jit
def _own(s, own, COLUMNS: tl.constexpr, TILE: tl.constexpr):
    """Of ``s [ROWS, COLUMNS * NR]`` each row's own column: ``[ROWS, NR]``."""
    if COLUMNS == 1:
        return s
    chosen = (own[:, None] == tl.arange(0, COLUMNS)[None, :])[:, :, None]
    return tl.sum(tl.where(chosen, tl.reshape(s, (TILE.rows, COLUMNS, TILE.queries)), 0.0), 1)


@triton.jit
def _factors(
    pools, params, at, last, home, h, unit, channel, J: tl.constexpr, KEY: tl.constexpr, TILE: tl.constexpr,
    IN_ORDER: tl.constexpr,
):  # fmt: skip
    """What queries of a piece are multiplied by where they meet codes, and again where they meet zeros.

    ``[U, BLOCKS or 1, groups]``, and 1 or ``[U, columns * NR]``. Zeros of the layer are in the mean.
    """
    _, words, scales, zeros = pools
    key_scale, _, _ = params
    factor = tl.full([unit.shape[0], 1, 1], 1.0, tl.float32)
    zero = 1.0
    if KEY.per == TOKEN and KEY.columns > 1:
        factor = ((channel // KEY.group)[:, None] == tl.arange(0, KEY.columns)[None, :]).to(tl.float32)[:, None, :]
    elif KEY.per == LAYER:
        factor *= tl.load(key_scale)
    elif KEY.per == STATIC:
        factor *= static(key_scale, h, channel, KEY)[:, None, None]
    elif KEY.per == CHANNEL:
        even, odd = per_channel(scales, words, at, last, unit, home, KEY.scale_at, J, KEY, TILE, IN_ORDER)
        first = (channel % 2 == 0)[:, None]
        factor = tl.reshape(tl.where(first, even, odd), (unit.shape[0], TILE.blocks, KEY.slice_groups))
        if KEY.zero:
            even, odd = per_channel(zeros, words, at, last, unit, home, KEY.zero_at, J, KEY, TILE, IN_ORDER)
            queries = tl.full([1, 1, TILE.queries], 0.0, tl.float32)
            zero = tl.where(first, even, odd)[:, :, None] + queries
            zero = tl.reshape(zero, (unit.shape[0], KEY.columns * TILE.queries))
    return factor, zero


@triton.jit
def _widened(x, factor):
    """``x [U, BLOCKS, NR]`` times ``factor [U, BLOCKS or 1, C]``: ``[U, BLOCKS * C * NR]``."""
    wide: tl.constexpr = x.shape[1] * factor.shape[2] * x.shape[2]
    return tl.reshape(x[:, :, None, :] * factor[:, :, :, None], (x.shape[0], wide))


@triton.jit
def _levels(units, params, J: tl.constexpr, PARITY: tl.constexpr, KEY: tl.constexpr, PARTS: tl.constexpr):
    """Levels of a piece: bfloat16, with their offset of 128; of several parts float32, and exact."""
    low, high = units
    _, _, table = params
    exact: tl.constexpr = PARTS > 1
    level = levels(low, high, table, 0, KEY.bits, KEY.levels, J // KEY.sub, PARITY, 0, exact)
    if exact:
        level = level.to(tl.float32)
        if KEY.levels == TABLE:
            for part in tl.static_range(1, PARTS):
                more = levels(low, high, table, part, KEY.bits, KEY.levels, J // KEY.sub, PARITY, 0, exact)
                level += more.to(tl.float32)
    return level


@triton.jit
def _dot(s, level, cos, sin, a, b, KEY: tl.constexpr, PARTS: tl.constexpr):
    """``s + (levels cos) @ a + (levels sin) @ b``: a level times a cosine is rounded once to its parts."""
    if PARTS == 1:
        offset: tl.constexpr = KEY.levels == UNIFORM and KEY.bits < 8
        s = dot(times(level, cos, offset), bf16_part(a, 0), s)
        s = dot(times(level, sin, offset), bf16_part(b, 0), s)
    else:
        s = dot_parts(level * cos, a, s, PARTS)
        s = dot_parts(level * sin, b, s, PARTS)
    return s


@triton.jit
def _dot_steps(s, cos, sin, with_cos, with_sin, PARTS: tl.constexpr):
    """``s + cos @ with_cos + sin @ with_sin``."""
    if PARTS == 1:
        s = dot(cos, bf16_part(with_cos, 0), s)
        s = dot(sin, bf16_part(with_sin, 0), s)
    else:
        s = dot_parts(cos, with_cos, s, PARTS)
        s = dot_parts(sin, with_sin, s, PARTS)
    return s
