"""Every cache that is measured, by name: kvbits schemes, and Transformers' own caches as their peers.

Peers are ``hf:dynamic`` (the exact cache), ``hf:quanto4``, ``hf:quanto2``, ``hf:hqq8``, ``hf:hqq4``, ``hf:hqq2`` and
``hf:fp8``: what ``generate(cache_implementation="quantized")`` makes of them, with its defaults.
"""

from __future__ import annotations

import copy
import difflib
import importlib.util
from pathlib import Path
from typing import Any

from transformers import Cache, DynamicCache, PreTrainedModel, QuantizedCache
from transformers.cache_utils import DynamicLayer

from kvbits.files import Calibration, refuse_uncalibrated
from kvbits.hf.attach import cache_for
from kvbits.hf.cache import KVCache
from kvbits.hf.layer import PackedLayer
from kvbits.hf.stock import storage_bytes
from kvbits.schemes.scheme import RESIDUAL_TOKENS, Scheme

EXACT = "hf:dynamic"
"""The peer that all others are compared with: Transformers' exact cache, one ``torch.cat`` a step."""

PEERS: dict[str, dict[str, Any]] = {
    "hf:quanto4": {"backend": "quanto", "nbits": 4},
    "hf:quanto2": {"backend": "quanto", "nbits": 2},
    "hf:hqq8": {"backend": "hqq", "nbits": 8, "axis_key": 1, "axis_value": 1},
    "hf:hqq4": {"backend": "hqq", "nbits": 4, "axis_key": 1, "axis_value": 1},
    "hf:hqq2": {"backend": "hqq", "nbits": 2, "axis_key": 1, "axis_value": 1},
    "hf:fp8": {"backend": "fp8"},
}
"""Options of Transformers' ``QuantizedCache`` for each peer.

hqq has groups of neighbouring channels of a token (``axis`` 1), as Transformers' documentation recommends; with its
default, 0, they run across tokens and heads, and its divergence is two to seven times as large. Below 8 bits it fails
where it is about to pack an odd number of groups: odd numbers of tokens in models with an odd number of KV heads.
"""

_PACKAGES = {"quanto": "optimum.quanto", "hqq": "hqq"}


def check(name: str, calibrated: bool = False) -> str:
    """The name as it is written in results, once it is known to be one.

    Raises:
        ValueError: for an unknown peer or scheme, or one that needs a calibration where none is given.
    """
    name = name.strip()
    if name.startswith("hf:"):
        known = [EXACT, *PEERS]
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, 0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            raise ValueError(f"unknown peer {name!r}; {hint}")
        return name
    scheme = Scheme.parse(name)
    if not calibrated:
        refuse_uncalibrated(scheme)
    return name


def is_exact(name: str) -> bool:
    """Whether nothing is quantized under this name."""
    if name.startswith("hf:"):
        return name == EXACT
    scheme = Scheme.parse(name)
    return not scheme.packs and not scheme.overrides


def installed(name: str) -> bool:
    """Whether the library that a peer stands on is there; kvbits schemes need none."""
    package = _PACKAGES.get(PEERS[name]["backend"]) if name in PEERS else None
    try:
        return package is None or importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the package that it would lie in
        return False


def make(model: PreTrainedModel, name: str, calibration: str | Path | Calibration | None = None) -> Cache:
    """A new, empty cache.

    Args:
        model: a decoder-only Transformers model.
        name: a kvbits scheme or a peer. ``exact`` is kvbits' exact cache, :data:`EXACT` Transformers'.
        calibration: for schemes that need one.

    Raises:
        ValueError: for an unknown name, and what :func:`kvbits.cache_for` and ``QuantizedCache`` refuse.
        ImportError: where a peer's library is not installed.
    """
    name = check(name, calibrated=calibration is not None)
    if name == EXACT:
        return DynamicCache(config=model.config)
    if name in PEERS:
        return QuantizedCache(config=model.config, **PEERS[name])
    return cache_for(model, name, calibration=calibration if _calibrates(name) else None)


def _calibrates(name: str) -> bool:
    """Whether a scheme takes anything from a calibration; a measured list may hold both kinds."""
    scheme = Scheme.parse(name)
    return scheme.needs_calibration or scheme.centred


def nbytes(cache: Cache) -> int:
    """Bytes that a cache has really allocated, unused room and exact tokens included."""
    return cache.nbytes.total if isinstance(cache, KVCache) else sum(map(storage_bytes, cache.layers))


def outcomes(cache: Cache) -> set[str]:
    """What computed attention in the last forward, in any layer: ``kernel native``, ``decoded``, ...

    ``stock`` is the model's own attention over exact keys and values, which is also what peers decode theirs for.
    """
    layers = cache.packed_layers if isinstance(cache, KVCache) else []
    return {layer.trace.outcome for layer in layers if layer.core.keys is not None} or {"stock"}


def kernels(cache: Cache) -> str:
    """:func:`outcomes` as one word or more."""
    return ", ".join(sorted(outcomes(cache)))


def branch(cache: Cache) -> Cache:
    """A cache that goes on from the same tokens by itself, and leaves the first one as it is.

    Transformers' quantized layers never change a tensor in place, and those of quanto cannot be copied, so these two
    share what they hold.
    """
    if not isinstance(cache, QuantizedCache):
        return copy.deepcopy(cache)
    other = copy.copy(cache)
    other.layers = [copy.copy(layer) for layer in cache.layers]
    return other


def exact_ends(cache: Cache) -> tuple[int, int]:
    """How many of the first and of the last tokens of a cache of one row are exact tokens right now.

    Late sinks, which lie anywhere, and layers that keep the model's own type are not counted; where every layer is
    exact, both are all tokens.
    """
    tokens, ends = cache.get_seq_length(), []
    for layer in cache.layers:
        if isinstance(layer, PackedLayer) and layer.core.scheme.packs and layer.core.held:
            exact, late = layer.core.held[0], len(layer.core.late[0]) if layer.core.late else 0
            first = min(exact, layer.core.sinks)
            ends.append((first, exact - first - late))
        elif isinstance(layer, DynamicLayer) and isinstance(cache, QuantizedCache):  # no sinks; packed when it is full
            residual = layer.keys
            ends.append((0, residual.shape[-2] if residual is not None and residual.ndim == 4 else 0))
    return min(ends, default=(tokens, tokens), key=sum)


def exact_tokens(scheme: Scheme) -> int:
    """How many tokens a scheme keeps exact at least: sinks, late sinks and residual."""
    residual = RESIDUAL_TOKENS if scheme.residual is None else scheme.residual
    return scheme.sinks + scheme.late_sinks + residual


def would_pack(name: str, tokens: int) -> int:
    """How many of so many tokens a cache of this name packs; of a peer, which keeps no sinks, all."""
    if name.startswith("hf:"):
        return 0 if name == EXACT else tokens
    scheme = Scheme.parse(name)
    return max(0, (tokens - exact_tokens(scheme)) // scheme.block * scheme.block) if scheme.packs else 0
