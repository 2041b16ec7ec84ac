"""One attention call: what every kernel is asked to compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch

from kvbits.attend.view import KVView


@dataclass(frozen=True)
class Call:
    """Attention of the newest tokens over everything that a layer holds.

    Attributes:
        query: ``[B, Hq, q, Dk]``, the last ``q`` columns of the view; ``Hq`` is a multiple of the view's heads.
        view: keys and values.
        scaling: factor on the scores, usually ``Dk**-0.5``.
        mask: None (causal), or ``[B or 1, 1 or Hq, q, view.kv_columns]``: bool (True attends) or additive.
        softcap: scores become ``softcap * tanh(scores / softcap)`` before the mask.
        window: a query sees only the last ``window`` columns up to its own (beside the mask).
        sink_logits: ``[Hq]``, one more score per head in the softmax's denominator (gpt-oss).
    """

    query: torch.Tensor
    view: KVView
    scaling: float
    mask: torch.Tensor | None = None
    softcap: float | None = None
    window: int | None = None
    sink_logits: torch.Tensor | None = None

    def __post_init__(self) -> None:
        query, view, mask = self.query, self.view, self.mask
        batch, heads, channels = view.keys.shape[0], view.keys.shape[1], view.keys.shape[3]
        if query.ndim != 4 or query.shape[0] != batch or query.shape[1] % heads or query.shape[3] != channels:
            raise ValueError(
                f"query {tuple(query.shape)} does not fit keys of {batch} rows, {heads} heads, {channels} channels"
            )
        if query.shape[2] > view.kv_columns:
            raise ValueError(f"{query.shape[2]} query tokens, but the cache holds {view.kv_columns} columns")
        if mask is None:
            if view.rows.padded:
                raise ValueError("the batch is padded, but attention got no mask: pass attention_mask to the model")
            return
        fits = mask.ndim == 4 and mask.shape[0] in (1, batch) and mask.shape[1] in (1, query.shape[1])
        if not fits or mask.shape[2] != query.shape[2] or mask.shape[3] != view.kv_columns:
            raise ValueError(
                f"mask {tuple(mask.shape)} does not fit {query.shape[2]} query tokens over {view.kv_columns} columns"
            )


Partial: TypeAlias = Callable[[Call], tuple[torch.Tensor, torch.Tensor]]
"""A call, without sinks in its denominator, to its output ``[B, Hq, q, Dv]`` and the log of its sums of ``exp(score)``
``[B, Hq, q]`` (-inf where nothing was seen): float32, or float64 for float64 queries."""
