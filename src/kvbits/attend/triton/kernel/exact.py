"""One split of the exact tokens."""

# The jit compiler reads annotations: no ``from __future__ import annotations`` here.

import triton
import triton.language as tl

from kvbits.attend.triton.kernel.numbers import cast, dot
from kvbits.attend.triton.kernel.softmax import base2, hide_unseen

EXACT_TILE = tl.constexpr(32)


@triton.jit
def exact_split(
    q_at, keys, values, target, first, last, seeing, columns, row_live, scores, KEY: tl.constexpr, VALUE: tl.constexpr,
    TILE: tl.constexpr, FLAGS: tl.constexpr,
):  # fmt: skip
    """Exact slots ``first .. last - 1``: sinks, and behind ``skipped`` packed tokens late sinks and the recent ones.

    Args:
        keys, values: where the head's begin, and the stride of a token.
        columns: where the columns of the row's tokens are looked up, sinks, and ``skipped``.
        seeing, scores: as in :func:`packed_split`.
    """
    (key_row, k_t), (value_row, v_t) = keys, values
    column_row, sinks, skipped = columns
    scaling, softcap = scores
    full: tl.constexpr = FLAGS.plain and FLAGS.single and not FLAGS.mask
    kc, vc = tl.arange(0, KEY.padded), tl.arange(0, VALUE.padded)
    right = tl.load(q_at[None, :] + kc[:, None], mask=row_live[None, :] & (kc < KEY.channels)[:, None], other=0)
    top = tl.full([TILE.queries], float("-inf"), tl.float32)
    weight = tl.full([EXACT_TILE, TILE.queries], 0.0, tl.float32)
    total = tl.full([VALUE.padded, TILE.queries], 0.0, tl.float32)
    for at in range(first, last, EXACT_TILE):
        slot = at + tl.arange(0, EXACT_TILE)
        far = slot.to(tl.int64)
        live = slot < last
        k_live = live[:, None] & (kc < KEY.channels)[None, :]
        k = tl.load(key_row + (far * k_t)[:, None] + kc[None, :], mask=k_live, other=0)
        s = dot(k, right, tl.full([EXACT_TILE, TILE.queries], 0.0, tl.float32))
        s = base2(s, scaling, 0.0, softcap, FLAGS.softcap)
        # In stored order, the order of the text but for late sinks.
        column = tl.where(slot < sinks, slot, slot + skipped)
        if FLAGS.padded:
            column = tl.load(column_row + column, mask=live, other=0).to(tl.int32)
        s = hide_unseen(s, column, live, seeing, row_live, full, FLAGS)
        new_top = tl.maximum(top, tl.max(s, 0))
        pivot = tl.where(new_top == float("-inf"), 0.0, new_top)
        fade = tl.exp2(top - pivot)
        top = new_top
        p = tl.exp2(s - pivot[None, :])
        weight = weight * fade[None, :] + p
        v_live = live[:, None] & (vc < VALUE.channels)[None, :]
        v = tl.load(value_row + (far * v_t)[:, None] + vc[None, :], mask=v_live, other=0)
        total = dot(tl.trans(v), cast(p, v.dtype), total * fade[None, :])
    out_row, tops, weights = target
    tl.store(out_row[None, :] + vc[:, None], total, mask=row_live[None, :] & (vc < VALUE.channels)[:, None])
    tl.store(tops, top, mask=row_live)
    tl.store(weights, tl.sum(weight, 0), mask=row_live)
