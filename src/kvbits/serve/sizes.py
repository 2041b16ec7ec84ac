"""How large a cache may become, before it is made: what a request is admitted by."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from kvbits.hf.cache import KVCache
from kvbits.hf.layer import PackedLayer
from kvbits.hf.names import cache_name
from kvbits.hf.stock import storage_bytes
from kvbits.layer.cache import LayerCache
from kvbits.store.room import most_room

_PARAMS_BYTES = 16
"""For each channel: mean, balance, scale and zero in float32; what was calibrated is there from the start."""

_ID_BYTES = 4
"""For each token: a cache notes what it reads."""


class Sizes:
    """Upper bounds of ``cache.nbytes``, whatever the text, and however it came in.

    One token is read to find the shapes: the model runs once.

    Args:
        model: whose caches they are.
        cache: an empty one of them; it is empty again afterwards.
    """

    def __init__(self, model: PreTrainedModel, cache: KVCache) -> None:
        ids = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
        with torch.no_grad():
            model(input_ids=ids, use_cache=True, **{cache_name(model): cache})
        self._layers = [_Stock(x) if not isinstance(x, PackedLayer) else _Packed(x.core) for x in cache.layers]
        cache.reset()

    def at(self, tokens: int, cache: KVCache | None = None) -> int:
        """Bytes that a cache of one row of so many tokens holds at most; where it was cropped, it may hold more now."""
        nbytes = _ID_BYTES * tokens
        if cache is None:
            return nbytes + sum(layer.at(tokens) for layer in self._layers)
        pairs = zip(self._layers, cache.layers, strict=True)
        return nbytes + sum(max(bound.at(tokens), _nbytes(layer)) for bound, layer in pairs)

    def most_tokens(self, nbytes: int, limit: int) -> int:
        """The most tokens, up to ``limit``, whose cache takes at most ``nbytes``; 0 where not even one does."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.at(middle) <= nbytes else (low, middle - 1)
        return low


def _nbytes(layer: Any) -> int:
    return sum(layer.core.nbytes().values()) if isinstance(layer, PackedLayer) else storage_bytes(layer)


class _Packed:
    """One layer of kvbits."""

    def __init__(self, core: LayerCache) -> None:
        assert core.keys is not None and core.values is not None and core.store is not None
        self.limits = core.limits
        self.block_bytes = core.store.heads * core.store.record.nbytes
        self.token_bytes = sum(x.shape[1] * x.shape[3] * x.itemsize for x in (core.keys, core.values))
        channels = core.keys.shape[1] * (core.keys.shape[3] + core.values.shape[3])
        fitted = sum(x.nbytes for params in core.calibrated for x in params.values())
        self.params_bytes = fitted + (channels * _PARAMS_BYTES if core.scheme.packs else 0)

    def at(self, tokens: int) -> int:
        nbytes = most_room(self.limits, tokens).nbytes(self.token_bytes, self.block_bytes)
        # Where late sinks stood in the text is noted for each token.
        order = 4 * (tokens + 2 * self.limits.block) if self.limits.late_sinks else 0
        return int(nbytes) + order + self.params_bytes


class _Stock:
    """A layer of the model's own type: a sliding window may hold on to a whole prompt, a state has one size."""

    def __init__(self, layer: Any) -> None:
        exact = [x for x in (getattr(layer, "keys", None), getattr(layer, "values", None)) if x is not None]
        self.token_bytes = sum(x.nbytes for x in exact)
        self.state_bytes = storage_bytes(layer) - self.token_bytes

    def at(self, tokens: int) -> int:
        nbytes: int = tokens * self.token_bytes + self.state_bytes
        return nbytes
