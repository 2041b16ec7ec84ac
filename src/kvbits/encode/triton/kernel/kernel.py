"""What is launched."""

# The jit compiler reads annotations: no ``from __future__ import annotations`` here.

import triton
import triton.language as tl

from kvbits.encode.triton.kernel.before import prepare
from kvbits.encode.triton.kernel.half_quadratic import solve_zero
from kvbits.encode.triton.kernel.levels import E4M3, TABLE, by_norm, code_of
from kvbits.encode.triton.kernel.numbers import divisor, e4m3, element, is_tame, quotient, wide
from kvbits.encode.triton.kernel.outliers import distances, largest, store_entries
from kvbits.encode.triton.kernel.pack import store_codes
from kvbits.encode.triton.kernel.scales import choose, choose_magnitude
from kvbits.encode.triton.kernel.tile import extremes, group_places, places

RANGE, HALF_QUADRATIC, NORM, FIXED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@triton.jit
def encode_block(
    x, unsound, codes_out, scale_out, zero_out, index_out, value_out, scratch, table, given_scale, given_zero, limit,
    mean, balance, signs, base_cos, base_sin, step_cos, step_sin, first, angle_a, angle_c,
    second, third, s_a, s_b, s_c, s_t, SHAPE: tl.constexpr, BEFORE: tl.constexpr,
):  # fmt: skip
    """Block ``[T, D]`` number ``program_id(0)`` of ``x [A, second, third, T, D]``, whose heads are ``second``.

    Angles are ``[A, blocks, half]``, of which ``x`` begins at block ``first``. ``table`` holds the midpoints between
    levels, then what codes decode to. Fixed scales are given: one float32 of the layer, or those of each channel ``[H,
    D]``, with zeros. ``scratch`` is int16 ``[blocks, T * D]``, for outliers. What a codec or a transform has not may
    point anywhere.
    """
    number = tl.program_id(0).to(tl.int64)
    head = number // third % second
    base = x + number // (second * third) * s_a + head * s_b + number % third * s_c
    token, channel, real = places(SHAPE)
    value = element(tl.load(base + token.to(tl.int64) * s_t + channel, mask=real, other=0))
    if BEFORE.anything:
        row = number // (second * third) * angle_a
        value = prepare(
            value, base, s_t, (token, channel, real), (head, first + number % third), (mean, balance, signs),
            (base_cos + row, base_sin + row, angle_c, step_cos, step_sin), SHAPE, BEFORE,
        )  # fmt: skip
    # A table may have its edge at 0, where the sign of the smallest quotient tells.
    tame = is_tame(value, SHAPE.levels == TABLE)
    bad = tl.full([], 0, tl.int32)
    if not tame:
        bad = tl.sum((real & ~(tl.abs(value) <= limit)).to(tl.int32))  # NaN too
    tl.store(unsound + number, bad)

    own, live = group_places(SHAPE)
    own += number * SHAPE.scales
    if SHAPE.choice == NORM:
        codes, bits = by_norm(value, table, tame, SHAPE)
        tl.store(scale_out + own, bits.to(tl.bfloat16, bitcast=True), mask=live)
    elif SHAPE.levels == E4M3:
        if SHAPE.choice == FIXED:
            scale = tl.load(given_scale) + tl.zeros([1, 1, 1], tl.float32)
        else:
            low, high = extremes(value, real, SHAPE)
            bits = choose_magnitude(low, high)
            tl.store(scale_out + own, bits.to(tl.bfloat16, bitcast=True), mask=live)
            scale = divisor(wide(bits))
        codes = e4m3(quotient(value, scale, tame & not_tiny(scale, SHAPE), True), value)
    else:
        inlier = real
        if SHAPE.choice == FIXED:
            of_channel = head * SHAPE.channels + channel
            scale = tl.load(given_scale + of_channel, mask=real, other=0)
            zero = tl.load(given_zero + of_channel, mask=real, other=0)
        else:
            if SHAPE.outliers:
                chosen = largest(distances(value, real, SHAPE), real, SHAPE)
                inlier = real & ~chosen
            low, high = extremes(value, inlier, SHAPE)
            bits, half = choose(low, high, SHAPE)
            scale, zero = wide(bits), half.to(tl.float32)
            if SHAPE.choice == HALF_QUADRATIC:
                solved = solve_zero(value, real, divisor(scale), zero, SHAPE)
                zero = tl.where(low == high, zero, solved)
            tl.store(scale_out + own, bits.to(tl.bfloat16, bitcast=True), mask=live)
            tl.store(zero_out + own, zero.to(tl.float16), mask=live)
        step = divisor(scale)
        level = quotient(value, step, tame & not_tiny(step, SHAPE), True)
        codes, decoded = code_of(level + zero, table, SHAPE)
        if SHAPE.outliers:
            rest = value - (decoded - zero) * scale
            if SHAPE.choice == FIXED:  # what decodes worst
                chosen = largest(rest, real, SHAPE)
            entry, own_scratch = number * SHAPE.outliers, scratch + number * (SHAPE.tokens * SHAPE.channels)
            store_entries(
                chosen, rest, real, token, channel, index_out + entry, value_out + entry, own_scratch, SHAPE
            )  # fmt: skip
    store_codes(codes, codes_out + number * (SHAPE.tokens * SHAPE.bits // 8 * SHAPE.channels), SHAPE)


@triton.jit
def not_tiny(scale, SHAPE: tl.constexpr):
    """Whether all scales are above 2**-60 and of a block's own, which are bfloat16 numbers."""
    return (SHAPE.choice != FIXED) & (tl.min(scale) >= 8.673617379884035e-19)
