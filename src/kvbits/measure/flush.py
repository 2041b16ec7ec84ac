"""Steps that pack: when a cache encodes a block, or Transformers' quantized cache all that it holds, in one step.

Most steps copy one token; one in every ``block`` (kvbits) or ``residual_length`` (Transformers) does much more. Shown
together, the one hides in the other's spread, so they are told apart by what the cache holds before and after.
"""

from __future__ import annotations

from transformers import Cache
from transformers.cache_utils import QuantizedLayer

from kvbits.hf.cache import KVCache


def tokens_to_flush(cache: Cache) -> int | None:
    """How many more tokens until a step packs, that step's own included; None where none ever will.

    Args:
        cache: one that has read a prompt without padding.
    """
    if not isinstance(cache, KVCache):
        return min((layer.residual_length - _residual(layer) for layer in _requantizing(cache)), default=None)
    found = []
    for core in (layer.core for layer in cache.packed_layers):
        residual = core.scheme.residual
        if core.scheme.packs and residual is not None:
            first = core.sinks + core.late_sinks + residual + core.scheme.block
            found.append(first - max(core.held, default=0))
    return min(found, default=None)


def tokens_between(cache: Cache) -> int | None:
    """How many tokens lie between two steps that pack; None where none does."""
    if isinstance(cache, KVCache):
        return min((x.core.scheme.block for x in cache.packed_layers if x.core.scheme.packs), default=None)
    return min((layer.residual_length for layer in _requantizing(cache)), default=None)


def _requantizing(cache: Cache) -> list[QuantizedLayer]:
    """Layers that quantize anew all that they hold whenever their residual is full; ``hf:fp8`` has none."""
    return [layer for layer in cache.layers if isinstance(layer, QuantizedLayer)]


def _residual(layer: QuantizedLayer) -> int:
    """Exact tokens of a layer."""
    return layer.keys.shape[-2] if layer.keys is not None and layer.keys.ndim == 4 else 0
