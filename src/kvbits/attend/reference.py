"""The reference kernel: plain PyTorch for every device, dtype and format, and the definition of what is right.

History is decoded a tile at a time and met by an online softmax (Milakov & Gimelshein, arXiv 1805.02867; Dao et al.,
arXiv 2205.14135, algorithm 1): neither the decoded cache nor a score matrix over the context ever exists. Sums are
float32 (float64 for float64 queries). Grouped queries meet a KV head's tile together; keys are never repeated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvbits.attend.call import Call
from kvbits.attend.dense import decode_into
from kvbits.numerics.cast import narrow

TILE_ELEMENTS = 2**19
"""Decoded elements of K or of V in one tile, over all rows and heads (2 MB in float32)."""

SCORE_ELEMENTS = 2**21
"""Scores alive at once: longer chunks of queries meet a tile in pieces."""

Mask: TypeAlias = Callable[[slice], torch.Tensor]
"""What some of the queries see of a tile, made when they meet it: no mask is ever larger than the scores."""


def why_not(call: Call) -> list[str]:
    """Nothing: it runs everywhere."""
    return []


def run(call: Call) -> torch.Tensor:
    """``[B, Hq, q, Dv]`` in the query's dtype. See :class:`kvbits.attend.Call`."""
    view, query = call.view, call.query
    heads = view.keys.shape[1]
    if query.shape[2] == 0:
        return query.new_zeros(*query.shape[:3], view.values.shape[3])
    compute = torch.float64 if query.dtype == torch.float64 else torch.float32
    grouped = query.to(compute).unflatten(1, (heads, -1))  # [B, H, G, q, Dk]
    if _is_one_piece(call):
        return narrow(_one_piece(call, grouped), query.dtype)
    softmax = _over_pieces(call, grouped)
    if softmax.state is None:  # nothing but padding so far: there is nothing to see
        return query.new_zeros(*query.shape[:3], view.values.shape[3])
    return narrow(softmax.finish(call.sink_logits).flatten(1, 2), query.dtype)


def partial(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sums of one piece of the context; see :data:`kvbits.attend.call.Partial`."""
    view, query = call.view, call.query
    compute = torch.float64 if query.dtype == torch.float64 else torch.float32
    softmax = _over_pieces(call, query.to(compute).unflatten(1, (view.keys.shape[1], -1)))
    if softmax.state is None:
        out = query.new_zeros(*query.shape[:3], view.values.shape[3], dtype=compute)
        return out, query.new_full(query.shape[:3], -torch.inf, dtype=compute)
    top, weight, _ = softmax.state
    log_sums = (top + weight.log()).squeeze(-1)
    return softmax.finish(None).flatten(1, 2), log_sums.flatten(1, 2)


def _over_pieces(call: Call, grouped: torch.Tensor) -> _OnlineSoftmax:
    """The softmax of queries ``[B, H, G, q, Dk]`` over all that a view holds."""
    softmax = _OnlineSoftmax(grouped * call.scaling, call.softcap)
    for keys, values, mask in _pieces(call, grouped.dtype):
        softmax.add(keys, values, mask)
    return softmax


def _is_one_piece(call: Call) -> bool:
    """Whether this is a plain step over a context that fits in one tile, where torch's own softmax is quicker."""
    view = call.view
    batch, heads, held, channels = view.keys.shape
    tokens = held + view.blocks.longest * view.blocks.record.tokens
    fits = batch * heads * tokens * max(channels, view.values.shape[-1]) <= TILE_ELEMENTS
    return (
        fits and call.query.shape[2] == 1 and _all_visible(call) and call.softcap is None and call.sink_logits is None
    )


def _one_piece(call: Call, grouped: torch.Tensor) -> torch.Tensor:
    view = call.view
    packed = view.blocks.longest * view.blocks.record.tokens
    keys, values = _room(call, packed + view.keys.shape[2], grouped.dtype)
    if packed:
        decode_into(view, keys[:, :, :packed], values[:, :, :packed], 0, view.blocks.longest)
    keys[:, :, packed:], values[:, :, packed:] = view.keys, view.values
    out = scaled_dot_product_attention(grouped.squeeze(3), keys, values, scale=call.scaling)  # [B, H, G, Dv]
    return out.flatten(1, 2).unsqueeze(2)


def _room(call: Call, tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised keys and values for one piece."""
    view = call.view
    shape = (*view.keys.shape[:2], tokens)
    keys = view.keys.new_empty(*shape, view.keys.shape[3], dtype=dtype)
    return keys, view.values.new_empty(*shape, view.values.shape[3], dtype=dtype)


class _OnlineSoftmax:
    """Softmax over pieces of the context: the running maximum, the sum of weights and their weighted values."""

    def __init__(self, query: torch.Tensor, softcap: float | None) -> None:
        self.query, self.softcap = query, softcap
        self.state: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def add(self, keys: torch.Tensor, values: torch.Tensor, mask: Mask | None) -> None:
        """Meet ``keys [B, H, t, Dk]`` and ``values [B, H, t, Dv]`` under a mask; None where all is seen."""
        batch, heads, groups, queries, _ = self.query.shape
        step = max(1, SCORE_ELEMENTS // (batch * heads * groups * keys.shape[2]))
        parts = []
        for first in range(0, queries, step):
            piece = slice(first, min(queries, first + step))
            seen = None if mask is None else mask(piece)
            parts.append(self._meet(self.query[..., piece, :], keys, values, seen))
        top, weight, total = (torch.cat(part, dim=3) for part in zip(*parts, strict=True))
        if self.state is None:
            self.state = top, weight, total
            return
        old_top, old_weight, old_total = self.state
        new_top = torch.maximum(old_top, top)
        base = _finite(new_top)
        old_scale, scale = (old_top - base).exp_(), (top - base).exp_()
        self.state = (
            new_top,
            old_weight.mul_(old_scale).add_(weight.mul_(scale)),
            old_total.mul_(old_scale).add_(total.mul_(scale)),
        )

    def _meet(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Maximum, sum of weights ``[B, H, G, q, 1]`` and weighted values ``[B, H, G, q, Dv]`` of one piece alone."""
        shape = query.shape[2:4]
        scores = (query.flatten(2, 3) @ keys.transpose(-1, -2)).unflatten(2, shape)  # [B, H, G, q, t]
        if self.softcap is not None:
            scores = scores.div_(self.softcap).tanh_().mul_(self.softcap)
        if mask is not None:
            scores = scores.masked_fill_(~mask, -torch.inf) if mask.dtype == torch.bool else scores.add_(mask)
        top = scores.amax(-1, keepdim=True)
        weights = scores.sub_(top if mask is None else _finite(top)).exp_()
        total = (weights.flatten(2, 3) @ values).unflatten(2, shape)
        return top, weights.sum(-1, keepdim=True), total

    def finish(self, sink_logits: torch.Tensor | None) -> torch.Tensor:
        """Weighted mean of the values, ``[B, H, G, q, Dv]``; zero where a query saw nothing."""
        assert self.state is not None
        top, weight, total = self.state
        if sink_logits is not None:
            logits = sink_logits.to(top.dtype).view(1, *top.shape[1:3], 1, 1)
            new_top = torch.maximum(top, logits)
            scale = (top - new_top).exp_()
            weight, total = weight * scale + (logits - new_top).exp_(), total * scale
        return total / weight.masked_fill(weight == 0, 1.0)


def _finite(top: torch.Tensor) -> torch.Tensor:
    """``top`` with 0 where a query has seen nothing yet (its weights are then exp(-inf) = 0, not NaN)."""
    return top.masked_fill(top == -torch.inf, 0.0)


def _pieces(call: Call, dtype: torch.dtype) -> Iterator[tuple[torch.Tensor, torch.Tensor, Mask | None]]:
    """Keys, values and mask of one tile of history after the other, then of the exact tokens."""
    view, device = call.view, call.query.device
    blocks = view.blocks
    batch, heads, held, channels = view.keys.shape
    channels = max(channels, view.values.shape[-1])
    plain = _all_visible(call)
    step = max(1, TILE_ELEMENTS // (batch * heads * channels * blocks.record.tokens))
    block = blocks.record.tokens
    keys, values = _room(call, min(step, blocks.longest) * block, dtype)  # each tile in the place of the one before
    for first in range(0, blocks.longest, step):
        last = min(first + step, blocks.longest)
        tile = slice(0, (last - first) * block)
        decode_into(view, keys[:, :, tile], values[:, :, tile], first, last)
        mask = None if plain else functools.partial(_mask, call, *view.packed_tokens(first, last, device))
        yield keys[:, :, tile], values[:, :, tile], mask
    token, live = view.exact_tokens(device)
    for first in range(0, held, step * block):
        tile = slice(first, first + step * block)
        mask = (
            None
            if plain and call.query.shape[2] == 1
            else functools.partial(_mask, call, token[:, tile], live[:, tile])
        )
        yield view.keys[:, :, tile].to(dtype), view.values[:, :, tile].to(dtype), mask


def _all_visible(call: Call) -> bool:
    """Whether every query sees the whole history before this call."""
    view = call.view
    return call.mask is None and call.window is None and view.rows.valid is None and view.offset == 0 and view.even


def _mask(call: Call, token: torch.Tensor, live: torch.Tensor, piece: slice) -> torch.Tensor:
    """What the queries of ``piece`` see of own tokens ``token``: bool or additive ``[B|1, H|1, G|1, q, t]``.

    Args:
        call: the call.
        token: own token numbers, ``[t]`` or ``[B, t]``.
        live: bool ``[B, t]``, which rows have them.
        piece: which queries, from its start to its stop.
    """
    view = call.view
    batch, heads = view.keys.shape[:2]
    queries, first = piece.stop - piece.start, view.rows.columns - call.query.shape[2] + piece.start
    column = view.columns_of(token.expand(batch, -1))[:, None, None, :]  # [B, 1, 1, t]
    seen = (live[:, None, None, :]) & (column >= view.offset)
    query_column = torch.arange(first, first + queries, device=column.device)[:, None]
    if call.mask is None:
        seen = seen & (column <= query_column)
    if call.window is not None:
        seen = seen & (column > query_column - call.window)
    if call.mask is None:
        return seen[:, :, None]
    index = (column - view.offset).clamp(min=0)
    given: torch.Tensor = call.mask[:, :, piece].expand(batch, -1, -1, -1)
    given = torch.take_along_dim(given, index.expand(batch, given.shape[1], queries, -1), dim=-1)
    if given.dtype == torch.bool:
        given = given & seen
    else:
        given = given.to(torch.promote_types(given.dtype, torch.float32)).masked_fill(~seen, -torch.inf)
    by_head: torch.Tensor = given.unflatten(1, (heads, -1) if given.shape[1] > 1 else (1, 1))
    return by_head
