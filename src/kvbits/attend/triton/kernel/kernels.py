"""What is launched: one split of the context, and the merge of all."""

# The jit compiler reads annotations: no ``from __future__ import annotations`` here.

import triton
import triton.language as tl

from kvbits.attend.triton.kernel.exact import exact_split
from kvbits.attend.triton.kernel.numbers import cast
from kvbits.attend.triton.kernel.packed import packed_split
from kvbits.attend.triton.kernel.softmax import LOG2E


@triton.jit(
    do_not_specialize=(
        "block_count", "held_count", "splits", "blocks_per_split", "exact_per_split", "query_columns", "offset",
        "window", "first_token", "queries", "table_b", "column_b", "angle_b", "mask_b", "mask_h", "mask_q",
    )
)  # fmt: skip
def attend_split(
    query, exact_query, keys, values, pool, words, scales, zeros, table, counts, held, column_of, mask,
    key_scale, key_zero, key_table, value_scale, value_zero, value_table, base_cos, base_sin, step_cos, step_sin,
    key_mean, out, tops, weights,
    block_count, held_count, splits, blocks_per_split, exact_per_split, query_columns, offset, window, first_token,
    queries, batch, heads, sinks, scaling, softcap,
    q_b, q_h, q_q, e_b, e_h, e_q, k_b, k_h, k_t, v_b, v_h, v_t, table_b, column_b, angle_b, mask_b, mask_h, mask_q,
    mask_c, KEY: tl.constexpr, VALUE: tl.constexpr, TILE: tl.constexpr, ROPE: tl.constexpr, GROUP_ROWS: tl.constexpr,
    SINGLE: tl.constexpr, IN_ORDER: tl.constexpr, RAGGED: tl.constexpr, PADDED: tl.constexpr, MASK: tl.constexpr,
    WINDOW: tl.constexpr, PLAIN: tl.constexpr, SOFTCAP: tl.constexpr, EXACT_TILE: tl.constexpr,
):  # fmt: skip
    """One split of one row and KV head: ``out [splits + exact splits, B * H, rows, Dv]``, maxima, sums of weights.

    Split numbers below ``splits`` are packed blocks, the others exact tokens. ``words``, ``scales`` and ``zeros`` are
    the pool as int32, bfloat16 and float16. PLAIN: all packed tokens are seen by all queries.
    """
    split = tl.program_id(0)
    pair = tl.program_id(1)
    b, h = pair // heads, pair % heads
    rows = GROUP_ROWS * queries
    row = tl.program_id(2) * TILE.queries + tl.arange(0, TILE.queries)
    row_live = row < rows
    head = h * GROUP_ROWS + row // queries
    q = row % queries
    b64, head64, q64 = b.to(tl.int64), head.to(tl.int64), q.to(tl.int64)
    if RAGGED:
        block_count = tl.load(counts + b)
        held_count = tl.load(held + b)
    state = (split * tl.num_programs(1) + pair) * rows + row
    target = (out + state.to(tl.int64) * VALUE.channels, tops + state, weights + state)
    column_row = column_of + b64 * column_b
    seeing = (mask + b64 * mask_b, mask_h, mask_q, mask_c, query_columns + q, head, q, offset, window)
    exact_q = exact_query + b64 * e_b + head64 * e_h + q64 * e_q
    if split < splits:
        first = split * blocks_per_split
        packed_split(
            query + b64 * q_b + head64 * q_h + q64 * q_q, exact_q, (pool, words, scales, zeros),
            (key_scale, key_zero, key_table), (value_scale, value_zero, value_table),
            (base_cos + b64 * angle_b, base_sin + b64 * angle_b, step_cos, step_sin), key_mean + h * KEY.channels,
            (table + b64 * table_b, batch, b, heads, h), target, first,
            tl.minimum(first + blocks_per_split, block_count), seeing, column_row, first_token, row_live, scaling,
            softcap, KEY, VALUE, TILE, ROPE, IN_ORDER, PADDED, MASK, WINDOW, PLAIN, SOFTCAP,
        )  # fmt: skip
    else:
        first = (split - splits) * exact_per_split
        exact_split(
            exact_q, keys + b64 * k_b + h.to(tl.int64) * k_h, values + b64 * v_b + h.to(tl.int64) * v_h, target,
            first, tl.minimum(first + exact_per_split, held_count), k_t, v_t, sinks,
            block_count * TILE.tokens + first_token - sinks, seeing, column_row, row_live, scaling, softcap,
            TILE.queries, KEY.channels, KEY.padded, VALUE.channels, VALUE.padded, EXACT_TILE, PADDED, MASK, WINDOW,
            PLAIN and SINGLE and not MASK, SOFTCAP,
        )  # fmt: skip


@triton.jit(do_not_specialize=("first", "last", "queries", "pairs"))
def merge_splits(
    partial, tops, weights, sink_logits, out, log_sums, first, last, queries, pairs, heads, o_b, o_h, o_q,
    GROUP_ROWS: tl.constexpr, CHANNELS: tl.constexpr, PADDED: tl.constexpr,
    SINKS: tl.constexpr, LOG_SUMS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Splits ``first .. last - 1`` of one query row: the weighted mean of the values, in the type of ``out``.

    With LOG_SUMS the log-sum-exp (base 2) is written too, -inf where nothing was seen.
    """
    pair, row = tl.program_id(0), tl.program_id(1)
    rows = GROUP_ROWS * queries
    channel = tl.arange(0, PADDED)
    head = (pair % heads) * GROUP_ROWS + row // queries
    top = tl.full([], float("-inf"), tl.float32)
    if SINKS:
        top = tl.load(sink_logits + head).to(tl.float32) * LOG2E
    for at in range(first, last, SPLITS):
        split = at + tl.arange(0, SPLITS)
        state = (split * pairs + pair) * rows + row
        top = tl.maximum(top, tl.max(tl.load(tops + state, mask=split < last, other=float("-inf")), 0))
    pivot = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.zeros([], tl.float32)
    if SINKS:
        weight += tl.exp2(tl.load(sink_logits + head).to(tl.float32) * LOG2E - pivot)
    total = tl.zeros([PADDED], tl.float32)
    for at in range(first, last, SPLITS):
        split = at + tl.arange(0, SPLITS)
        state = (split * pairs + pair) * rows + row
        factor = tl.exp2(tl.load(tops + state, mask=split < last, other=float("-inf")) - pivot)
        weight += tl.sum(tl.load(weights + state, mask=split < last, other=0) * factor, 0)
        where = partial + state.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
        live = (split < last)[:, None] & (channel < CHANNELS)[None, :]
        total += tl.sum(tl.load(where, mask=live, other=0) * factor[:, None], 0)
    mean = total / tl.where(weight == 0, 1.0, weight)
    at = out + (pair // heads).to(tl.int64) * o_b + head.to(tl.int64) * o_h + (row % queries) * o_q + channel
    tl.store(at, cast(mean, out.dtype.element_ty), mask=channel < CHANNELS)
    if LOG_SUMS:
        tl.store(log_sums + pair * rows + row, pivot + tl.log2(weight))
