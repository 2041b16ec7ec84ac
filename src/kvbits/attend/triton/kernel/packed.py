"""One split of the packed blocks: an online softmax over tiles of a few of them."""

# The jit compiler reads annotations: no ``from __future__ import annotations`` here.

import triton
import triton.language as tl

from kvbits.attend.triton.kernel.keys import load_queries, score_factor, scores_of, with_outliers
from kvbits.attend.triton.kernel.records import TOKEN, record_at
from kvbits.attend.triton.kernel.rotary import UNROPED_KEYS, mean_scores, mean_shares, roped_shares
from kvbits.attend.triton.kernel.softmax import base2, hide_unseen
from kvbits.attend.triton.kernel.unroped import load_pieces, roped_pieces, unroped_scores
from kvbits.attend.triton.kernel.values import add_outliers, add_values, finish


@triton.jit
def packed_split(
    q_at, exact_q_at, pools, key_params, value_params, angles, mean, home, target, first, last, seeing, columns,
    row_live, scores, KEY: tl.constexpr, VALUE: tl.constexpr, TILE: tl.constexpr, ROPE: tl.constexpr,
    FLAGS: tl.constexpr,
):  # fmt: skip
    """Blocks ``first .. last - 1``.

    Args:
        q_at, exact_q_at: queries as packed keys meet them, and as they came.
        target: where outputs, maxima and sums of weights of the query rows go.
        seeing: what :func:`hide_unseen` asks for.
        columns: where the columns of the row's tokens are looked up, and the first packed token.
        scores: the scaling and the soft cap.
    """
    _, _, _, _, h = home
    column_row, first_token = columns
    scaling, softcap = scores
    in_order: tl.constexpr = FLAGS.in_order
    tile_row = tl.arange(0, TILE.rows)
    bi, rr = tile_row // TILE.slice, tile_row % TILE.slice
    slices: tl.constexpr = TILE.slices
    unroped_keys: tl.constexpr = ROPE.kind == UNROPED_KEYS
    ropes_mean: tl.constexpr = ROPE.mean and ROPE.half > 0
    apart: tl.constexpr = KEY.outliers > 0 or ropes_mean  # whether other terms join scores that are scaled already
    if unroped_keys:
        queries = load_pieces(q_at, row_live, KEY, ROPE)
        factor = scaling
    else:
        queries = load_queries(q_at, key_params, h, row_live, KEY, TILE)
        factor = score_factor(key_params, scaling, KEY)
    bias = tl.full([TILE.queries], 0.0, tl.float32)
    if ROPE.mean:
        shares = mean_shares(exact_q_at, mean, row_live, scaling, KEY, ROPE, TILE)
        bias = shares[2]

    top = tl.full([TILE.queries], float("-inf"), tl.float32)
    # Sums over tokens stay spread over the rows of a tile, and are summed over those once, at the end.
    weight = tl.full([TILE.rows, TILE.queries], 0.0, tl.float32)
    wide: tl.constexpr = VALUE.columns * TILE.queries if VALUE.per == TOKEN else TILE.queries
    zero_sum = tl.full([TILE.rows, wide], 0.0, tl.float32)
    even = tl.full([VALUE.padded // 2, wide], 0.0, tl.float32)
    odd = tl.full([VALUE.padded // 2, wide], 0.0, tl.float32)
    if VALUE.outliers:
        sparse_even = tl.full([VALUE.padded // 2, TILE.queries], 0.0, tl.float32)
        sparse_odd = tl.full([VALUE.padded // 2, TILE.queries], 0.0, tl.float32)

    for at in range(first, last, TILE.blocks):
        block = at + bi
        block_live = block < last
        if TILE.blocks == 1:
            base = record_at(at, home, TILE, in_order) + tl.full([TILE.rows], 0, tl.int64)
        else:
            block = tl.minimum(block, last - 1)  # dead rows read what is there
            base = record_at(block, home, TILE, in_order)
        if ropes_mean:
            means = mean_scores(angles, roped_shares(angles, shares, at, last, ROPE, TILE), KEY, ROPE, TILE)
        if unroped_keys:
            roped = roped_pieces(queries, angles, at, last, KEY, TILE, ROPE)

        found = ()
        for j in tl.static_range(slices):
            if unroped_keys:
                s = unroped_scores(
                    roped, pools, key_params, angles, base, at, last, home, h, j, KEY, TILE, ROPE, in_order
                )  # fmt: skip
            else:
                s = scores_of(queries, pools, key_params, base, at, last, home, j, KEY, TILE, in_order)
            if apart:
                s *= factor
            if KEY.outliers:
                s = with_outliers(
                    s, q_at, pools, angles, at, last, home, row_live, scaling, j, KEY, TILE, ROPE, in_order,
                    unroped_keys,
                )  # fmt: skip
            if ropes_mean:
                s += means[j]
            s = base2(s, 1.0 if apart else factor, bias[None, :], softcap, FLAGS.softcap)
            if FLAGS.mask or not FLAGS.plain:
                column = first_token + block * TILE.tokens + rr + j * TILE.slice
                if FLAGS.padded:
                    column = tl.load(column_row + column).to(tl.int32)
                s = hide_unseen(s, column, block_live, seeing, row_live, False, FLAGS)
            elif TILE.blocks > 1:
                s = tl.where(block_live[:, None], s, float("-inf"))
            found = found + (s,)  # noqa: RUF005 - the compiler knows no starred tuples

        largest = found[0]
        for j in tl.static_range(1, slices):
            largest = tl.maximum(largest, found[j])
        new_top = tl.maximum(top, tl.max(largest, 0))
        pivot = tl.where(new_top == float("-inf"), 0.0, new_top)
        fade = tl.exp2(top - pivot)
        top = new_top
        weight *= fade[None, :]
        v_fade = fade
        if wide > TILE.queries:
            v_fade = tl.reshape(tl.broadcast_to(fade[None, :], (VALUE.columns, TILE.queries)), (wide,))
        even *= v_fade[None, :]
        odd *= v_fade[None, :]
        if VALUE.zeroed:
            zero_sum *= v_fade[None, :]
        if VALUE.outliers:
            sparse_even *= fade[None, :]
            sparse_odd *= fade[None, :]

        for j in tl.static_range(slices):
            p = tl.exp2(found[j] - pivot[None, :])
            weight += p
            if VALUE.outliers:
                sparse_even, sparse_odd = add_outliers(
                    sparse_even, sparse_odd, p, pools, at, last, home, j, VALUE, TILE, in_order
                )  # fmt: skip
            even, odd, zero_sum = add_values(
                even, odd, zero_sum, p, pools, value_params, base, at, last, home, j, VALUE, TILE, in_order
            )  # fmt: skip

    even, odd = finish(even, odd, zero_sum, value_params, h, VALUE, TILE)
    if VALUE.outliers:
        even += sparse_even
        odd += sparse_odd
    out_row, tops, weights = target
    unit = tl.arange(0, VALUE.padded // 2)
    live = row_live[None, :] & (unit < VALUE.units)[:, None]
    tl.store(out_row[None, :] + (unit * 2)[:, None], even, mask=live)
    tl.store(out_row[None, :] + (unit * 2 + 1)[:, None], odd, mask=live)
    tl.store(tops, top, mask=row_live)
    tl.store(weights, tl.sum(weight, 0), mask=row_live)
