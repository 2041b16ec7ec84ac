"""``prefill``: read a long prompt with all ranks, each of which computes its slice of every chunk.

A chunk is cut into one slice for each rank. Layer by layer, ranks exchange the exact keys and values of their slices,
so each holds those of one chunk; their queries visit all ranks for the packed history; and each attends to the chunk
itself for its own slice. Beside the cache a rank needs room for one chunk, however long the prompt.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import PreTrainedModel

from kvbits.hf.attach import cache_name
from kvbits.parallel.cache import SharedCache

CHUNK_TOKENS = 4096
"""Of all ranks together."""

_CHANGING = ("dynamic", "longrope")
"""Rotary embeddings whose frequencies follow the longest position of a call, of which each rank sees its own."""


def prefill(model: PreTrainedModel, ids: torch.Tensor, cache: SharedCache, chunk_tokens: int = CHUNK_TOKENS) -> None:
    """Read ``ids`` into ``cache``, behind what it holds. Every rank calls this with the same.

    To go on with ``generate``, leave it a token: ``prefill(model, ids[:, :-1], cache)``, then
    ``model.generate(ids, cache=cache)``.

    Args:
        model: the one that the cache was made for.
        ids: int64 ``[B, T]``.
        cache: of :func:`kvbits.parallel.cache_for`.
        chunk_tokens: read at a time, by all ranks together.

    Raises:
        TypeError: for another kind of cache.
        ValueError: for ids that are no ``[B, T]``, chunks shorter than there are ranks, layers that are not shared
            (sliding windows, states), or rotary embeddings that change with the length of the text.
    """
    if not isinstance(cache, SharedCache):
        raise TypeError(f"prefill reads into a cache of kvbits.parallel.cache_for, not {type(cache).__name__}")
    _refuse_unless_sliced(model, cache)
    ranks = cache.columns.ranks
    if ids.ndim != 2:
        raise ValueError(f"ids {tuple(ids.shape)} must be [B, T]")
    if chunk_tokens < ranks.world:
        raise ValueError(f"chunk_tokens={chunk_tokens} leaves {ranks.world} ranks without a token each; give more")
    done, most = 0, chunk_tokens // ranks.world
    while each := min(most, (ids.shape[1] - done) // ranks.world):
        _read_slice(model, ids[:, done : done + each * ranks.world], cache)
        done += each * ranks.world
    if done < ids.shape[1]:  # fewer tokens than ranks
        _call(model, cache, ids[:, done:], None)


def _read_slice(model: PreTrainedModel, chunk: torch.Tensor, cache: SharedCache) -> None:
    ranks, each = cache.columns.ranks, chunk.shape[1] // cache.columns.ranks.world
    first = ranks.rank * each
    positions = torch.arange(first, first + each, device=chunk.device) + cache.get_seq_length()
    with cache.slices_of(chunk):
        _call(model, cache, chunk[:, first : first + each], positions[None])


@torch.no_grad()
def _call(model: PreTrainedModel, cache: SharedCache, ids: torch.Tensor, positions: torch.Tensor | None) -> None:
    options: dict[str, Any] = {cache_name(model): cache, "use_cache": True}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        options["logits_to_keep"] = 1
    if positions is not None:
        options["position_ids"] = positions
        # Four dimensions: Transformers takes it for a mask that is ready, and makes none of slice x context. Attention
        # over a shared context needs none.
        options["attention_mask"] = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=ids.device)
    model(input_ids=ids, **options)


def _refuse_unless_sliced(model: PreTrainedModel, cache: SharedCache) -> None:
    others = [index for index, layer in enumerate(cache.layers) if layer not in cache.packed_layers]
    if others:
        raise ValueError(
            f"layers {others} of this model keep the model's own type (a window or a state), which a slice of the text "
            "does not fill; read the prompt with the model itself, every rank all of it"
        )
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ValueError(f"{type(model).__name__} takes no position_ids, so no slice can be told where it stands")
    rope = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    kinds = {str(x) for part in (rope, *rope.values()) if isinstance(part, dict) and (x := part.get("rope_type"))}
    if changing := kinds & set(_CHANGING):
        raise ValueError(
            f"the rotary embedding is {', '.join(changing)}: its frequencies follow the length of the text, and slices "
            "would be turned by different ones; read the prompt with the model itself, every rank all of it"
        )
