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
        "block_count", "exact_count", "splits", "blocks_per_split", "exact_per_split", "query_columns", "offset",
        "window", "first_token", "queries", "table_b", "column_b", "angle_b", "mask_b", "mask_h", "mask_q",
    )
)  # fmt: skip
def attend_split(
    query, exact, pools, lookup, mask, key_params, value_params, angles, key_mean, found,
    block_count, exact_count, splits, blocks_per_split, exact_per_split, query_columns, offset, window, first_token,
    queries, table_b, column_b, angle_b, mask_b, mask_h, mask_q, mask_c, sizes, strides, scores,
    KEY: tl.constexpr, VALUE: tl.constexpr, TILE: tl.constexpr, ROPE: tl.constexpr, FLAGS: tl.constexpr,
):  # fmt: skip
    """One split of one row and KV head: ``out [splits + exact splits, B * H, rows, Dv]``, maxima, sums of weights.

    Split numbers below ``splits`` are packed blocks, the others exact tokens. Numbers that change from step to step
    stand by themselves: Triton compiles anew for those in a tuple that become 1 or a multiple of 16.

    Args:
        query: as packed keys meet it.
        exact: the query as it came, exact keys and exact values.
        pools: the pool as int16, int32, bfloat16 and float16.
        lookup: the table of blocks; blocks and exact tokens of each row; the column of each token.
        key_params, value_params: static scale and zero, and the table.
        angles: cosines and sines of blocks, and within a block.
        found: outputs, maxima and sums of weights.
        sizes: rows, KV heads and sinks.
        strides: of the query, the exact query, exact keys and exact values, each over rows, heads and tokens.
        scores: the scaling and the soft cap.
    """
    exact_query, keys, values = exact
    table, block_counts, exact_counts, column_of = lookup
    base_cos, base_sin, step_cos, step_sin = angles
    out, tops, weights = found
    batch, heads, sinks = sizes
    (q_b, q_h, q_q), (e_b, e_h, e_q), (k_b, k_h, k_t), (v_b, v_h, v_t) = strides
    split = tl.program_id(0)
    pair = tl.program_id(1)
    b, h = pair // heads, pair % heads
    rows = FLAGS.group_rows * queries
    row = tl.program_id(2) * TILE.queries + tl.arange(0, TILE.queries)
    row_live = row < rows
    head = h * FLAGS.group_rows + row // queries
    q = row % queries
    b64, head64, q64 = b.to(tl.int64), head.to(tl.int64), q.to(tl.int64)
    if FLAGS.ragged:
        block_count = tl.load(block_counts + b)
        exact_count = tl.load(exact_counts + b)
    state = (split * tl.num_programs(1) + pair) * rows + row
    target = (out + state.to(tl.int64) * VALUE.channels, tops + state, weights + state)
    column_row = column_of + b64 * column_b
    seeing = (mask + b64 * mask_b, mask_h, mask_q, mask_c, query_columns + q, head, q, offset, window)
    exact_q = exact_query + b64 * e_b + head64 * e_h + q64 * e_q
    if split < splits:
        first = split * blocks_per_split
        packed_split(
            query + b64 * q_b + head64 * q_h + q64 * q_q, exact_q, pools, key_params, value_params,
            (base_cos + b64 * angle_b, base_sin + b64 * angle_b, step_cos, step_sin), key_mean + h * KEY.channels,
            (table + b64 * table_b, batch, b, heads, h), target, first,
            tl.minimum(first + blocks_per_split, block_count), seeing, (column_row, first_token), row_live, scores,
            KEY, VALUE, TILE, ROPE, FLAGS,
        )  # fmt: skip
    else:
        first = (split - splits) * exact_per_split
        exact_split(
            exact_q, (keys + b64 * k_b + h.to(tl.int64) * k_h, k_t), (values + b64 * v_b + h.to(tl.int64) * v_h, v_t),
            target, first, tl.minimum(first + exact_per_split, exact_count), seeing,
            (column_row, sinks, block_count * TILE.tokens + first_token - sinks), row_live, scores,
            KEY, VALUE, TILE, FLAGS,
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
