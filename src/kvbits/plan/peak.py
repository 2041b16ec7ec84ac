"""The peak of reading a prompt: what is there beside the weights and the cache while a call runs. An estimate.

Of ``n`` tokens that a call brings (all rows together), in elements of the model's dtype::

    n (4 hidden + max(3 intermediate, 2 (query + key + value)))     one layer at work
    + rows of logits x vocabulary                                   and the last ones once more in float32
    + the largest layer of the cache                                encoded beside its pool, or copied as it grows

The first line is the residual stream, the norm of it, its two inputs that callers still hold, and what is widest: the
three products of a gated MLP, or queries, keys and values before and after their rotary embedding. It assumes
attention without a matrix of scores (sdpa, flash), no gradients, one layer at a time, and an allocator without gaps.
"""

from __future__ import annotations

from kvbits.plan.shapes import Shape

_FLOAT_BYTES = 4


def activation_bytes(shape: Shape, tokens: int, rows: int, logits: str = "last") -> int:
    """The first two lines, in bytes; 0 where the widths of a model are not known.

    Args:
        shape: the model.
        tokens: that the call brings, of each row.
        rows: of the batch.
        logits: of which columns logits are computed: ``last``, as ``generate`` does, or ``all``, as a plain forward.
    """
    if shape.widths is None or not tokens:
        return 0
    widths, itemsize = shape.widths, shape.dtype.itemsize
    channels = max((layer.attention.channels for layer in shape.layers if layer.attention), default=0)
    layer = 4 * widths.hidden + max(3 * widths.intermediate, 2 * (widths.query + channels))
    columns = 1 if logits == "last" else tokens
    head = rows * widths.vocabulary * (columns * itemsize + _FLOAT_BYTES)
    return rows * tokens * layer * itemsize + head
