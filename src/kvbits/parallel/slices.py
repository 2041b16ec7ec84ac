"""Read a long prompt with all ranks, each of which computes its slice of every chunk.

A chunk is cut into one slice for each rank. Layer by layer, ranks exchange the exact keys and values of their slices,
so each holds those of one chunk; their queries visit all ranks for the packed history; and each attends to the chunk
itself for its own slice. Beside the cache a rank needs room for one chunk of one layer, however long the prompt; for
the last chunk, of all layers, where some tokens of it are left that make no slices.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from kvbits.hf.names import cache_name

if TYPE_CHECKING:
    from kvbits.parallel.cache import SharedCache

_CHANGING = ("dynamic", "longrope")
"""Rotary embeddings whose frequencies follow the longest position of a call, of which each rank sees its own."""


def why_not(model: PreTrainedModel, cache: SharedCache) -> str | None:
    """The reason why ranks cannot read slices for ``model``, or None."""
    others = [index for index, layer in enumerate(cache.layers) if layer not in cache.packed_layers]
    if others:
        return (
            f"layers {others} of this model keep the model's own type (a window or a state), which a slice of the text "
            "does not fill"
        )
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return f"{type(model).__name__} takes no position_ids, so no slice can be told where it stands"
    rope = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    kinds = {str(x) for part in (rope, *rope.values()) if isinstance(part, dict) and (x := part.get("rope_type"))}
    if changing := kinds & set(_CHANGING):
        return (
            f"the rotary embedding is {', '.join(changing)}: its frequencies follow the length of the text, and slices "
            "would be turned by different ones"
        )
    return None


def read(model: PreTrainedModel, ids: torch.Tensor, cache: SharedCache, chunk_tokens: int, keep: int = 0) -> int:
    """Read as much of ``ids [B, T]`` as makes slices of one length: all but fewer tokens than ranks.

    What is left of the last chunk is for the call after this, and sees the slices of that chunk exact.

    Args:
        model, cache: see :func:`kvbits.parallel.prefill`.
        ids: the whole text.
        chunk_tokens: read at a time by all ranks together, rounded down to a multiple of their number.
        keep: so many ids at the end are left in any case.

    Returns:
        How many columns have been read.
    """
    world, total = cache.columns.ranks.world, ids.shape[1]
    done, most = 0, chunk_tokens // world
    while each := min(most, (total - keep - done) // world):
        after = done + each * world
        _read_slice(model, ids[:, done:after], cache, hold=after < total <= done + most * world)
        done = after
    return done


def _read_slice(model: PreTrainedModel, chunk: torch.Tensor, cache: SharedCache, hold: bool) -> None:
    ranks, each = cache.columns.ranks, chunk.shape[1] // cache.columns.ranks.world
    first = ranks.rank * each
    positions = torch.arange(first, first + each, device=chunk.device) + cache.get_seq_length()
    with cache.slices_of(chunk, hold):
        call(model, cache, chunk[:, first : first + each], positions[None])


@torch.no_grad()
def call(model: PreTrainedModel, cache: SharedCache, ids: torch.Tensor, positions: torch.Tensor | None = None) -> None:
    """Run the model on ``ids [B, n]``, at ``positions [1, n]`` where they are a slice, for its keys and values."""
    options: dict[str, Any] = {cache_name(model): cache, "use_cache": True}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        options["logits_to_keep"] = 1
    if positions is not None:
        options["position_ids"] = positions
        # Four dimensions: Transformers takes it for a mask that is ready, and makes none of slice x context. Attention
        # over a shared context needs none.
        options["attention_mask"] = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=ids.device)
    model(input_ids=ids, **options)
