"""Codes into bytes along tokens: ``numerics.bitpack``."""

# The jit compiler reads annotations: no ``from __future__ import annotations`` here.

import triton
import triton.language as tl


@triton.jit
def store_codes(codes, out, SHAPE: tl.constexpr):
    """Codes of a tile as the bytes of a block, from ``out`` on."""
    codes = tl.reshape(codes, (SHAPE.tokens, SHAPE.columns))
    if SHAPE.bits == 8:
        _store(codes, out, 0, SHAPE.tokens, SHAPE)
    elif SHAPE.bits == 3:
        _store(_plane(codes, 0, 2, SHAPE), out, 0, SHAPE.tokens // 4, SHAPE)
        _store(_plane(codes, 2, 1, SHAPE), out, SHAPE.tokens // 4, SHAPE.tokens // 8, SHAPE)
    else:
        _store(_plane(codes, 0, SHAPE.bits, SHAPE), out, 0, SHAPE.tokens * SHAPE.bits // 8, SHAPE)


@triton.jit
def _plane(codes, LOW: tl.constexpr, WIDTH: tl.constexpr, SHAPE: tl.constexpr):
    """Bits ``LOW .. LOW + WIDTH - 1`` of codes, slices of tokens side by side in bytes."""
    slots: tl.constexpr = 8 // WIDTH
    field = tl.reshape((codes >> LOW) & ((1 << WIDTH) - 1), (slots, SHAPE.tokens // slots, SHAPE.columns))
    return tl.sum(field << (tl.arange(0, slots) * WIDTH)[:, None, None], 0)


@triton.jit
def _store(bytes_, out, FIRST: tl.constexpr, ROWS: tl.constexpr, SHAPE: tl.constexpr):
    """Byte rows from ``FIRST`` on; columns are the tile's, which may have gaps between groups."""
    row, column = tl.arange(0, ROWS) + FIRST, tl.arange(0, SHAPE.columns)
    channel, live = column, column < SHAPE.channels
    if SHAPE.per_token:
        inside = column % SHAPE.third
        channel = column // SHAPE.third * SHAPE.length + inside
        live = (inside < SHAPE.length) & (channel < SHAPE.channels)
    where = out + row[:, None] * SHAPE.channels + channel[None, :]
    tl.store(where, bytes_.to(tl.uint8), mask=live[None, :])
