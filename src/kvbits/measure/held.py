"""How much of what a cache holds is quantized, and in how many bits: what shows whether a figure measured anything.

A prompt shorter than sinks, residual and one block is kept exact by every scheme, and its score is that of the exact
cache whatever the scheme is called.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import Cache

from kvbits.hf.cache import KVCache
from kvbits.hf.layer import PackedLayer
from kvbits.measure import caches
from kvbits.schemes.scheme import BLOCKS, Scheme

LOW_SHARE = 0.5
"""Where less than this share of what was attended to was packed, a figure says little of a scheme."""


def packed_share(cache: Cache) -> float:
    """Share of the tokens held, over rows and layers, that later tokens read from quantized bits; 0 while empty."""
    held = [_tokens(layer) for layer in cache.layers]
    total = sum(tokens for tokens, _ in held)
    return sum(packed for _, packed in held) / total if total else 0.0


def stored(cache: Cache) -> tuple[int, int]:
    """Bytes that a cache holds, and the elements of K and V that they stand for.

    Of a kvbits cache only the layers that it packs count, as in :attr:`kvbits.KVCache.bits_per_element`.
    """
    if isinstance(cache, KVCache):
        count = cache.nbytes
        return count.total - count.other, sum(layer.core.elements for layer in cache.packed_layers)
    return caches.nbytes(cache), sum(_elements(layer) for layer in cache.layers)


def _tokens(layer: Any) -> tuple[int, int]:
    """Tokens of all rows that a layer holds, and how many of them are quantized."""
    if isinstance(layer, PackedLayer):
        exact = layer.core.scheme.is_exact
        return layer.core.tokens, 0 if exact else layer.core.packed_tokens
    rows, exact_tokens = 1, 0
    keys = getattr(layer, "keys", None)
    if isinstance(keys, torch.Tensor) and keys.ndim == 4:
        rows, exact_tokens = keys.shape[0], keys.shape[2]
    if getattr(layer, "_quantized_keys", None) is None:
        return rows * exact_tokens, 0
    return rows * layer.cumulative_length, rows * (layer.cumulative_length - exact_tokens)


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
        """Real bits of K and V; None where no cache held anything."""
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
        """Note what a cache holds."""
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
