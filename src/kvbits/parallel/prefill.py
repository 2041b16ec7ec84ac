"""``prefill``: read a prompt into a shared context, a chunk at a time."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from kvbits.parallel.cache import CHUNK_TOKENS, SharedCache


def prefill(model: PreTrainedModel, ids: torch.Tensor, cache: SharedCache, chunk_tokens: int = CHUNK_TOKENS) -> None:
    """Read ``ids`` into ``cache``, behind the text in it. Every rank calls this with the same.

    ``generate`` does the same to its prompt, in chunks of 4,096. To go on with it after this, leave it a token:
    ``prefill(model, ids[:, :-1], cache)``, then ``model.generate(ids, cache=cache)``.

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
    if reason := cache.why_no_slices(model):
        raise ValueError(f"{reason}; read the prompt with the model itself, every rank all of it")
    if ids.ndim != 2:
        raise ValueError(f"ids {tuple(ids.shape)} must be [B, T]")
    world = cache.columns.ranks.world
    if chunk_tokens < world:
        raise ValueError(f"chunk_tokens={chunk_tokens} leaves {world} ranks without a token each; give more")
    done = cache.read(model, ids, chunk_tokens)
    if done < ids.shape[1]:
        cache.run(model, ids[:, done:])
