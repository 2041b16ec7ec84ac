"""One split of the exact tokens."""

# The jit compiler reads annotations: no ``from __future__ import annotations`` here.

import triton
import triton.language as tl

from kvbits.attend.triton.kernel.numbers import cast, dot
from kvbits.attend.triton.kernel.softmax import base2, hide_unseen


@triton.jit
def exact_split(
    q_at, key_row, value_row, target, first, last, k_t, v_t, sinks, skipped, seeing, column_row, row_live, scaling,
    softcap, NR: tl.constexpr, K_CHANNELS: tl.constexpr, K_PADDED: tl.constexpr, V_CHANNELS: tl.constexpr,
    V_PADDED: tl.constexpr, EXACT_TILE: tl.constexpr, PADDED: tl.constexpr, MASK: tl.constexpr,
    WINDOW: tl.constexpr, PLAIN: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Exact slots ``first .. last - 1``: sinks, and behind ``skipped`` packed tokens late sinks and the recent ones."""
    kc, vc = tl.arange(0, K_PADDED), tl.arange(0, V_PADDED)
    right = tl.load(q_at[None, :] + kc[:, None], mask=row_live[None, :] & (kc < K_CHANNELS)[:, None], other=0)
    top = tl.full([NR], float("-inf"), tl.float32)
    weight = tl.zeros([EXACT_TILE, NR], tl.float32)
    total = tl.zeros([V_PADDED, NR], tl.float32)
    for at in range(first, last, EXACT_TILE):
        slot = at + tl.arange(0, EXACT_TILE)
        far = slot.to(tl.int64)
        live = slot < last
        k_live = live[:, None] & (kc < K_CHANNELS)[None, :]
        k = tl.load(key_row + (far * k_t)[:, None] + kc[None, :], mask=k_live, other=0)
        s = base2(dot(k, right, tl.zeros([EXACT_TILE, NR], tl.float32)), scaling, 0.0, softcap, SOFTCAP)
        column = tl.where(
            slot < sinks, slot, slot + skipped
        )  # in stored order, the order of the text but for late sinks
        if PADDED:
            column = tl.load(column_row + column, mask=live, other=0).to(tl.int32)
        s = hide_unseen(s, column, live, seeing, row_live, MASK, not MASK, WINDOW, PLAIN)
        new_top = tl.maximum(top, tl.max(s, 0))
        pivot = tl.where(new_top == float("-inf"), 0.0, new_top)
        fade = tl.exp2(top - pivot)
        top = new_top
        p = tl.exp2(s - pivot[None, :])
        weight = weight * fade[None, :] + p
        v_live = live[:, None] & (vc < V_CHANNELS)[None, :]
        v = tl.load(value_row + (far * v_t)[:, None] + vc[None, :], mask=v_live, other=0)
        total = dot(tl.trans(v), cast(p, v.dtype), total * fade[None, :])
    out_row, tops, weights = target
    tl.store(out_row[None, :] + vc[:, None], total, mask=row_live[None, :] & (vc < V_CHANNELS)[:, None])
    tl.store(tops, top, mask=row_live)
    tl.store(weights, tl.sum(weight, 0), mask=row_live)
