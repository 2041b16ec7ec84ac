"""The Triton kernel of :mod:`kvbits.encode.triton`: one program encodes one block of one head."""

# The jit compiler reads annotations: no ``from __future__ import annotations`` here.

import triton
import triton.language as tl

UNIFORM, TABLE, E4M3 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
RANGE, NORM, FIXED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
STEP_FLOOR = tl.constexpr(2.0**-10)  # as numerics.affine has it


@triton.jit
def _bits_up(x):
    """The smallest bfloat16 not below ``x >= 0``, as 16 bits."""
    return ((x.to(tl.int32, bitcast=True) + 0xFFFF) >> 16).to(tl.int16)


@triton.jit
def _bits_near(x):
    """``x`` rounded to bfloat16, half to even, as 16 bits."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)


@triton.jit
def _wide(bits):
    """Float32 of bfloat16 bits."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _round(x):
    """Half to even, for magnitudes below 2**22: what lies behind the point falls off the mantissa."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _divisor(scale):
    return tl.where(scale == 0, 1.0, scale)


@triton.jit
def _choose(low, high, BOTTOM: tl.constexpr, TOP: tl.constexpr):
    """Scale (bfloat16 bits) and zero (float16) of groups: ``numerics.affine.choose_qparams``."""
    span: tl.constexpr = TOP - BOTTOM
    step = tl.div_rn(high, span + tl.zeros_like(high)) - tl.div_rn(low, span + tl.zeros_like(low))
    step = tl.maximum(step, tl.maximum(high, -low) * STEP_FLOOR)
    constant = low == high
    scale = tl.where(constant, _bits_near(low), _bits_up(step))
    zero = tl.where(constant, 1.0, BOTTOM) - tl.div_rn(low, _divisor(_wide(scale)))
    return scale, zero.to(tl.float16)


@triton.jit
def _e4m3(x):
    """e4m3 bytes: ``numerics.float8.encode``."""
    x = tl.minimum(tl.maximum(x, -448.0), 448.0)
    octave = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    quantum = tl.maximum(octave, 0.015625) * 0.125
    rounded = _round(tl.div_rn(x, quantum)) * quantum
    half = (rounded * 0.00390625).to(tl.float16).to(tl.int16, bitcast=True)
    return ((half >> 7) & 0x7F) | ((half >> 8) & 0x80)


@triton.jit
def _nearest(level, edges, BITS: tl.constexpr, TOKENS: tl.constexpr, PADDED: tl.constexpr):
    """Codes of the nearest levels, of which ``edges`` are the midpoints: ``numerics.codebook.nearest``."""
    codes = tl.zeros([TOKENS, PADDED], tl.int32)
    for edge in tl.static_range((1 << BITS) - 1):
        codes += (level > tl.load(edges + edge)).to(tl.int32)
    return codes


@triton.jit
def _by_norm(
    value, real, table, BITS: tl.constexpr, TOKENS: tl.constexpr, PADDED: tl.constexpr, CHANNELS: tl.constexpr
):  # fmt: skip
    """Codes of ``lm`` codecs and the scales that keep ``x . decoded`` at ``x . x``, as bfloat16 bits."""
    largest = _divisor(tl.max(tl.abs(value), 1))
    unit = tl.div_rn(value, tl.broadcast_to(largest[:, None], (TOKENS, PADDED)))
    wide = unit.to(tl.float64)
    square = tl.sum(wide * wide, 1)
    rms = _divisor(tl.sqrt(square / CHANNELS).to(tl.float32))
    codes = _nearest(tl.div_rn(unit, tl.broadcast_to(rms[:, None], (TOKENS, PADDED))), table, BITS, TOKENS, PADDED)
    level = tl.load(table + ((1 << BITS) - 1) + codes, mask=real, other=0).to(tl.float64)
    product = tl.sum(wide * level, 1)
    scale = tl.where(square > 0, square / tl.where(square > 0, product, 1.0), 0.0).to(tl.float32) * largest
    return codes, _bits_near(scale)


@triton.jit
def _plane(codes, LOW: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, PADDED: tl.constexpr):
    """Bits ``LOW .. LOW + WIDTH - 1`` of codes ``[T, D]``, slices of tokens side by side in bytes."""
    slots: tl.constexpr = 8 // WIDTH
    field = tl.reshape((codes >> LOW) & ((1 << WIDTH) - 1), (slots, TOKENS // slots, PADDED))
    return tl.sum(field << (tl.arange(0, slots) * WIDTH)[:, None, None], 0)


@triton.jit
def _store(codes, at, row, CHANNELS: tl.constexpr, PADDED: tl.constexpr):
    channel = tl.arange(0, PADDED)
    where = at + row[:, None] * CHANNELS + channel[None, :]
    tl.store(where, codes.to(tl.uint8), mask=(channel < CHANNELS)[None, :])


@triton.jit
def encode_block(
    x, unsound, codes_out, scale_out, zero_out, table, limit, second, third, s_a, s_b, s_c, s_t,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr, PADDED: tl.constexpr, BITS: tl.constexpr, LEVELS: tl.constexpr,
    CHOICE: tl.constexpr, PER_TOKEN: tl.constexpr, LENGTH: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Block ``[T, D]`` number ``program_id(0)`` of ``x [A, second, third, T, D]``.

    ``table`` holds the midpoints between levels, then the levels. Of a FIXED scale ``scale_out`` is where it stands.
    LENGTH and GROUPS: channels of a group and groups of a token, or tokens of a group and groups of a block.
    """
    number = tl.program_id(0).to(tl.int64)
    token, channel = tl.arange(0, TOKENS), tl.arange(0, PADDED)
    base = x + number // (second * third) * s_a + number // third % second * s_b + number % third * s_c
    real = (channel < CHANNELS)[None, :]
    value = tl.load(base + token.to(tl.int64)[:, None] * s_t + channel[None, :], mask=real, other=0).to(tl.float32)
    sound = tl.abs(value) <= limit  # not of NaN
    tl.store(unsound + number, tl.sum(tl.sum((real & ~sound).to(tl.int32), 1), 0))
    bottom: tl.constexpr = 0.0 if LEVELS == UNIFORM else -1.0
    top: tl.constexpr = (1 << BITS) - 1.0 if LEVELS == UNIFORM else 1.0

    if CHOICE == NORM:
        codes, bits = _by_norm(value, real, table, BITS, TOKENS, PADDED, CHANNELS)
        tl.store(scale_out + number * TOKENS + token, bits.to(tl.bfloat16, bitcast=True))
    elif CHOICE == FIXED:  # of the layer, e4m3
        divisor = tl.load(scale_out).to(tl.float32) + tl.zeros([TOKENS, PADDED], tl.float32)
        codes = _e4m3(tl.div_rn(value, divisor)).to(tl.int32)
    elif LEVELS == E4M3:  # one group a token, no zero
        largest = tl.max(tl.abs(value), 1)
        low = tl.min(tl.where(real, value, float("inf")), 1)
        high = tl.max(tl.where(real, value, float("-inf")), 1)
        share = tl.div_rn(largest, tl.full([TOKENS], 448.0, tl.float32))
        bits = tl.where(low == high, _bits_near(largest), _bits_up(share))
        tl.store(scale_out + number * TOKENS + token, bits.to(tl.bfloat16, bitcast=True))
        divisor = tl.broadcast_to(_divisor(_wide(bits))[:, None], (TOKENS, PADDED))
        codes = _e4m3(tl.div_rn(value, divisor)).to(tl.int32)
    else:
        if PER_TOKEN:
            divisor = tl.full([TOKENS, PADDED], 1.0, tl.float32)
            shift = tl.zeros([TOKENS, PADDED], tl.float32)
            for group in tl.static_range(GROUPS):
                mine = ((channel >= group * LENGTH) & (channel < group * LENGTH + LENGTH))[None, :] & real
                low = tl.min(tl.where(mine, value, float("inf")), 1)
                high = tl.max(tl.where(mine, value, float("-inf")), 1)
                scale, zero = _choose(low, high, bottom, top)
                at = number * TOKENS * GROUPS + token * GROUPS + group
                tl.store(scale_out + at, scale.to(tl.bfloat16, bitcast=True))
                tl.store(zero_out + at, zero)
                divisor = tl.where(mine, _divisor(_wide(scale))[:, None], divisor)
                shift = tl.where(mine, zero.to(tl.float32)[:, None], shift)
        else:
            grouped = tl.reshape(value, (GROUPS, LENGTH, PADDED))
            scale, zero = _choose(tl.min(grouped, 1), tl.max(grouped, 1), bottom, top)
            group = tl.arange(0, GROUPS)
            at = (number * GROUPS + group)[:, None] * CHANNELS + channel[None, :]
            tl.store(scale_out + at, scale.to(tl.bfloat16, bitcast=True), mask=real)
            tl.store(zero_out + at, zero, mask=real)
            wide = tl.broadcast_to(_divisor(_wide(scale))[:, None, :], (GROUPS, LENGTH, PADDED))
            divisor = tl.reshape(wide, (TOKENS, PADDED))
            wide = tl.broadcast_to(zero.to(tl.float32)[:, None, :], (GROUPS, LENGTH, PADDED))
            shift = tl.reshape(wide, (TOKENS, PADDED))
        level = tl.div_rn(value, divisor) + shift
        if LEVELS == UNIFORM:
            codes = _round(tl.minimum(tl.maximum(level, 0.0), top)).to(tl.int32)
        else:
            codes = _nearest(level, table, BITS, TOKENS, PADDED)

    out = codes_out + number * (TOKENS * BITS // 8 * CHANNELS)
    if BITS == 8:
        _store(codes, out, token, CHANNELS, PADDED)
    elif BITS == 3:
        _store(_plane(codes, 0, 2, TOKENS, PADDED), out, tl.arange(0, TOKENS // 4), CHANNELS, PADDED)
        top_row = tl.arange(0, TOKENS // 8) + TOKENS // 4
        _store(_plane(codes, 2, 1, TOKENS, PADDED), out, top_row, CHANNELS, PADDED)
    else:
        row = tl.arange(0, TOKENS * BITS // 8)
        _store(_plane(codes, 0, BITS, TOKENS, PADDED), out, row, CHANNELS, PADDED)
