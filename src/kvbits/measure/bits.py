"""Real bits per element: everything that a cache has allocated, over the keys and values that it stands for."""

from __future__ import annotations

import copy
import math
import warnings
from collections import Counter
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, TypeAlias

import torch
from transformers import Cache, DynamicCache, PreTrainedModel, QuantizedCache
from transformers.cache_utils import DynamicLayer

from kvbits.hf.cache import KVCache
from kvbits.hf.names import cache_name
from kvbits.hf.stock import storage_bytes
from kvbits.layer.cache import LayerCache
from kvbits.measure.setting import SEED

LONG_TOKENS = 8000
"""A context beside which the tokens that a scheme keeps exact are few."""


def elements(exact: Cache) -> int:
    """Elements of the keys and values in those layers of an exact cache of Transformers that see the whole text."""
    full = [layer for layer in exact.layers if type(layer) is DynamicLayer]
    return sum(x.numel() for layer in full for x in (layer.keys, layer.values) if x is not None)


def elements_of_a_token(model: PreTrainedModel) -> int:
    """:func:`elements` of one token of one row, found by running it through a model."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), **{cache_name(model): cache})
    return elements(cache)


def bits_per_element(cache: Cache, elements: int) -> float | None:
    """Bits that a live cache has allocated for each element: codes, scales, exact tokens and unused room included.

    Layers with a window, or a state in place of keys, count neither here nor there, where a cache keeps them as they
    are in the exact one.

    Args:
        cache: after some text.
        elements: of the keys and values of that text; see :func:`elements`.

    Returns:
        None where a cache has no other layers.
    """
    if isinstance(cache, KVCache):
        return cache.bits_per_element or None
    full = [x for x in cache.layers if type(x) is DynamicLayer or isinstance(cache, QuantizedCache)]
    return 8 * sum(map(storage_bytes, full)) / elements if elements else None


def stored(cache: Cache) -> tuple[int, int]:
    """Bytes that a cache has allocated, and the elements of K and V that they stand for.

    Of a kvbits cache only the layers that it packs count, as in :attr:`kvbits.KVCache.bits_per_element`.
    """
    if isinstance(cache, KVCache):
        count = cache.nbytes
        return count.total - count.other, sum(layer.core.elements for layer in cache.packed_layers)
    return sum(map(storage_bytes, cache.layers)), sum(_elements(layer) for layer in cache.layers)


def _elements(layer: Any) -> int:
    """Elements of K and V in a layer of Transformers' own."""
    names = ("keys", "values", "_quantized_keys", "_quantized_values")
    return sum(_numel(getattr(layer, name, None)) for name in names)


def _numel(states: Any) -> int:
    """Of a tensor, of a quantized one, or of what a backend keeps in its place: codes and how to read them."""
    if isinstance(states, tuple):
        codes, reading = states
        return math.prod(reading["shape"]) if isinstance(reading, dict) else _numel(codes)
    return states.numel() if isinstance(states, torch.Tensor) else 0


def bits_at(cache: Cache, tokens: int = LONG_TOKENS) -> float | None:
    """The same of a long context: what the layers of a cache would allocate for a prompt of ``tokens``.

    Layers of the same shapes and schemes are filled with random bfloat16 keys and values; no model runs. Exact tokens
    therefore count 16 bits, whatever the dtype of the model. Layers with a window count nothing.

    Args:
        cache: after some text, so that its layers know their shapes.
        tokens: of the prompt.

    Returns:
        None where a cache has no layer that sees the whole text.
    """
    filled = _filled_layers(cache) if isinstance(cache, KVCache) else _filled_layers_of_peer(cache)
    alike, one = Counter(shape for shape, _ in filled), dict(filled)
    total = count = 0
    for shape, layers in alike.items():
        nbytes, layer_elements = one[shape](tokens)
        total += layers * nbytes
        count += layers * layer_elements
    return 8 * total / count if count else None


_Fill: TypeAlias = Callable[[int], tuple[int, int]]
"""A number of tokens to the bytes and elements of a layer that has read so many."""


def _filled_layers(cache: KVCache) -> list[tuple[Hashable, _Fill]]:
    """Of each layer that is not empty, what its bytes depend on, and how one like it is filled."""
    return [(_shape(x.core), partial(_filled, x.core)) for x in cache.packed_layers if x.core.keys is not None]


def _filled_layers_of_peer(cache: Cache) -> list[tuple[Hashable, _Fill]]:
    """The same of one of Transformers' own caches."""
    full = [x for x in cache.layers if type(x) is DynamicLayer or isinstance(cache, QuantizedCache)]
    filled = [x for x in full if isinstance(x, DynamicLayer) and x.get_seq_length()]
    return [((type(layer), _peer_heads(layer)), partial(_filled_peer, layer)) for layer in filled]


def _peer_heads(layer: Any) -> tuple[tuple[int, int], ...]:
    """Heads and channels of the keys, and of the values."""
    states = layer.keys, layer.values
    if type(layer) is not DynamicLayer:  # one with packed states, which keeps the newest tokens there or nothing
        states = layer._dequantize(layer._quantized_keys), layer._dequantize(layer._quantized_values)
    return tuple((x.shape[1], x.shape[3]) for x in states)


def _random(heads: int, tokens: int, channels: int, device: torch.device) -> torch.Tensor:
    """Normal bfloat16 ``[1, heads, tokens, channels]``."""
    generator = torch.Generator().manual_seed(SEED)
    return torch.randn(1, heads, tokens, channels, generator=generator).to(device, torch.bfloat16)


def _shape(core: LayerCache) -> Hashable:
    """What the bytes of a layer depend on."""
    assert core.keys is not None and core.values is not None
    fitted = tuple(tuple((name, tuple(x.shape)) for name, x in sorted(params.items())) for params in core.calibrated)
    heads, key_channels, value_channels = core.keys.shape[1], core.keys.shape[3], core.values.shape[3]
    return str(core.scheme), core.window, core.rotary is None, fitted, heads, key_channels, value_channels


def _filled(core: LayerCache, tokens: int) -> tuple[int, int]:
    """Bytes and elements of a layer like this one after a prompt."""
    assert core.keys is not None and core.values is not None
    keys, values = (_random(x.shape[1], tokens, x.shape[3], x.device) for x in (core.keys, core.values))
    layer = LayerCache(core.scheme, core.window, core.name, core.rotary, core.calibrated)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # random values may lie outside the range that a calibration has seen
        layer.append(keys, values)
    return sum(layer.nbytes().values()), layer.elements


def _filled_peer(like: Any, tokens: int) -> tuple[int, int]:
    """The same of a layer of Transformers' own."""
    layer = copy.copy(like)
    keys, values = (_random(heads, tokens, channels, layer.device) for heads, channels in _peer_heads(like))
    layer.__dict__.update(is_initialized=False, keys=None, values=None)
    layer.update(keys, values)
    return storage_bytes(layer), keys.numel() + values.numel()
