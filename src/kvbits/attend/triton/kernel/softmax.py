"""What a query sees, soft caps, and scores in base 2."""

# The jit compiler reads annotations: no ``from __future__ import annotations`` here.

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def hide_unseen(s, column, live, seeing, real, FULL: tl.constexpr, FLAGS: tl.constexpr):
    """Scores in base 2 ``[T, NR]`` with what a query does not see at -inf.

    Args:
        column: of each token; live: whether the row has it.
        seeing: the row's mask; its strides over heads, queries and columns; column, head and number of each query; the
            first column of the mask; the window.
        real: which query rows are no padding.
        FULL: whether all queries see these tokens, but for ``live``.
    """
    mask, mask_h, mask_q, mask_c, query_column, head, query, offset, window = seeing
    seen = live[:, None]
    if not FULL:
        seen = seen & (column >= offset)[:, None]
        if not FLAGS.mask:
            seen = seen & (column[:, None] <= query_column[None, :])
        if FLAGS.window:
            seen = seen & (column[:, None] > query_column[None, :] - window)
    if FLAGS.mask:
        of_query = head.to(tl.int64) * mask_h + query.to(tl.int64) * mask_q  # a long chunk's reaches beyond 2**31
        at = mask + of_query[None, :] + ((column - offset) * mask_c)[:, None]
        given = tl.load(at, mask=seen & real[None, :], other=0)
        if FLAGS.mask == 1:
            seen = seen & (given != 0)
        else:
            s = s + given.to(tl.float32) * LOG2E
    return tl.where(seen, s, float("-inf"))


@triton.jit
def base2(s, factor, bias, softcap, SOFTCAP: tl.constexpr):
    """Scores ``factor s + bias`` in base 2, after the soft cap."""
    if SOFTCAP:
        s = s * factor + bias
        return softcap * (2.0 * tl.sigmoid(2.0 * s / softcap) - 1.0) * LOG2E
    return s * (factor * LOG2E) + bias * LOG2E
