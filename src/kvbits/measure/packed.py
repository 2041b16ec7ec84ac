"""How much of a cache is packed: what shows whether a figure says anything of a scheme.

A text shorter than sinks, residual and one block is kept exact by every scheme, and its score is that of the exact
cache whatever the scheme is called.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from transformers import Cache

from kvbits.hf.cache import KVCache
from kvbits.hf.layer import PackedLayer
from kvbits.measure import caches
from kvbits.measure.bits import stored
from kvbits.schemes.scheme import BLOCKS, Scheme

LOW_SHARE = 0.5
"""Where less than this share of what was attended to was packed, a figure is mostly of exact tokens."""


def packed_tokens(cache: Cache) -> int:
    """Tokens packed so far, over layers and (but for peers) rows, also those that a window has dropped since."""
    return sum(_packed_so_far(x) if isinstance(x, PackedLayer) else _tokens(x)[1] for x in cache.layers)


def packed_share(cache: Cache) -> float:
    """Share of the cached tokens, over rows and layers, that later tokens read from quantized bits; 0 while empty."""
    counts = list(map(_tokens, cache.layers))
    total = sum(tokens for tokens, _ in counts)
    return sum(packed for _, packed in counts) / total if total else 0.0


def _packed_so_far(layer: PackedLayer) -> int:
    store = layer.core.store
    return 0 if store is None else layer.core.scheme.block * sum(store.counts)


def _tokens(layer: Any) -> tuple[int, int]:
    """Cached tokens of a layer, and how many of them are packed: of all rows, or of one row where a peer packs."""
    if isinstance(layer, PackedLayer):
        exact = layer.core.scheme.is_exact
        return layer.core.tokens, 0 if exact else layer.core.packed_tokens
    rows, exact_tokens = 1, 0
    keys = getattr(layer, "keys", None)
    if isinstance(keys, torch.Tensor) and keys.ndim == 4:
        rows, exact_tokens = keys.shape[0], keys.shape[2]
    if getattr(layer, "_quantized_keys", None) is None:
        return rows * exact_tokens, 0
    return layer.cumulative_length, layer.cumulative_length - exact_tokens


def packing_layers(cache: Cache) -> list[PackedLayer]:
    """Layers of a kvbits cache whose scheme packs; none of a peer."""
    layers = cache.packed_layers if isinstance(cache, KVCache) else []
    return [layer for layer in layers if layer.core.scheme.packs]


def packed_layers(cache: Cache) -> int:
    """Layers in which kvbits has packed anything."""
    return sum(_packed_so_far(layer) > 0 for layer in packing_layers(cache))


class Attended(NamedTuple):
    """How many keys the queries of one row have attended to.

    Attributes:
        packed, keys: those in packed blocks, and all; means over the layers that pack.
    """

    packed: float = 0.0
    keys: float = 0.0

    @property
    def share(self) -> float | None:
        """The packed ones of all; None before any."""
        return self.packed / self.keys if self.keys else None

    def after(self, cache: Cache, seen: int, queries: int) -> Attended:
        """With ``queries`` more tokens, about to attend to ``seen`` in the cache and to each other."""
        packing = packing_layers(cache)
        if not packing:
            return self
        tokens = [_packed_so_far(layer) for layer in packing if layer.core.store is not None]
        mean = sum(tokens) / len(tokens) if tokens else 0.0
        return Attended(self.packed + queries * mean, self.keys + queries * seen + queries * (queries + 1) / 2)

    def warnings(self) -> list[str]:
        """A warning where few of the keys were packed."""
        if self.share is None or self.share >= LOW_SHARE:
            return []
        return [
            f"only {100 * self.share:.0f} % of the keys that queries attended to were packed, the others exact: a "
            "greater length, or a smaller residual, shows more of the scheme"
        ]


@dataclass
class Tally:
    """What all requests so far went through.

    Attributes:
        tokens: scored or generated ones.
        packed: sum over them of the share of the cached tokens that were packed when they were predicted.
        requests, packed_requests: all, and those in which anything was packed.
        truncated: requests whose context was cut to the model's greatest length.
        nbytes, elements: sums over caches, once each had read its context.
        largest: bytes of the largest of these caches.
        kernels: what computed attention.
    """

    tokens: int = 0
    packed: float = 0.0
    requests: int = 0
    packed_requests: int = 0
    truncated: int = 0
    nbytes: int = 0
    elements: int = 0
    largest: int = 0
    kernels: set[str] = field(default_factory=set)

    @property
    def packed_share(self) -> float:
        """Share of the cached tokens that were packed, on average over the tokens that were predicted from them."""
        return self.packed / self.tokens if self.tokens else 0.0

    @property
    def bits_per_element(self) -> float | None:
        """Real bits of K and V; None where every cache was empty."""
        return 8 * self.nbytes / self.elements if self.elements else None

    def predicted(self, share: float, tokens: int) -> None:
        """Note that ``tokens`` more were predicted while this share was packed."""
        self.tokens += tokens
        self.packed += share * tokens

    def answered(self, share: float, requests: int) -> None:
        """Note that ``requests`` more are answered."""
        self.requests += requests
        self.packed_requests += requests if share > 0 else 0

    def read(self, cache: Cache) -> None:
        """Note the size of a cache that has read its context."""
        nbytes, elements = stored(cache)
        self.nbytes, self.elements = self.nbytes + nbytes, self.elements + elements
        self.largest = max(self.largest, caches.nbytes(cache))

    def advice(self, scheme: str) -> str | None:
        """What to do about a figure that says little of a scheme; None where it says enough."""
        if not self.requests or caches.is_exact(scheme) or self.packed_share >= LOW_SHARE:
            return None
        found = f"{self.packed_share:.0%} of what was attended to under {scheme} was packed"
        if self.packed_requests == 0:
            found = f"nothing was ever packed under {scheme}, so its score is that of the exact cache"
        options = "" if scheme.startswith("hf:") else ",".join(_shorter(Scheme.parse(scheme)))
        remedy = f"add ,{options} to the scheme, or take" if options else "take"
        return f"{found}: the contexts are short beside what it keeps exact; {remedy} more shots or longer texts"


def _shorter(scheme: Scheme) -> Iterator[str]:
    """Options under which more of a short context is packed."""
    if scheme.residual:
        yield "residual=0"
    if scheme.block > min(BLOCKS):
        yield f"block={min(BLOCKS)}"
