"""Caches of earlier requests, with the tokens that they have read, under a budget of bytes.

A request takes the cache that has read the longest beginning of its prompt, cropped to that, and reads only the rest.
A crop never decodes a packed block: where the common beginning ends inside one, the cache is cut before that block, and
its tokens are read again. So what is reused is as it was first stored, and an answer is the same as if the conversation
had stayed in one cache all along.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kvbits.hf.cache import KVCache, PackedLayer


class _Sized(Protocol):
    def at(self, tokens: int, cache: KVCache | None = None) -> int: ...


@dataclass(eq=False)
class Kept:
    """A cache between requests.

    Attributes:
        tokens: that it has read, int64 ``[columns]``.
        prompt_tokens: of these were the last request's prompt; what follows is its answer.
        nbytes: read off the cache.
    """

    cache: KVCache
    tokens: torch.Tensor
    prompt_tokens: int
    nbytes: int


class Pool:
    """All caches that are not in use, the last one used at the end; what is in use counts too.

    One thread takes and gives; any may look at the numbers.

    Args:
        make: an empty cache.
        sizes: what a cache takes at most, by its tokens.
        budget_bytes: of all caches together.
    """

    def __init__(self, make: Callable[[], KVCache], sizes: _Sized, budget_bytes: int) -> None:
        self.make, self.sizes, self.budget_bytes = make, sizes, budget_bytes
        self.kept: list[Kept] = []
        self.used_bytes = 0
        self.evicted = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all caches: of those kept, and of the one in use as last measured."""
        return sum(one.nbytes for one in tuple(self.kept)) + self.used_bytes

    def take(self, prompt: torch.Tensor, tokens: int) -> tuple[KVCache, int]:
        """A cache for a prompt, and how many of its tokens the cache has read.

        Room is made for it first, by dropping what was not used for the longest time.

        Args:
            prompt: int64 ``[T]``; at least its last token is left to read.
            tokens: of prompt and answer together, at most.
        """
        found = self._longest(prompt)
        if found is not None:
            one, common, cut = found
            self.kept.remove(one)
            cache = one.cache
            # A conversation that goes on may change its cache. One that shares no more than a beginning gets a copy.
            if common < one.prompt_tokens - 1 and one.nbytes + self.sizes.at(tokens) <= self.budget_bytes:
                self.kept.append(one)
                cache = copy.deepcopy(cache)
            _crop(cache, cut)
            need = self.sizes.at(tokens, cache)
            if need <= self.budget_bytes:
                self._evict_to(self.budget_bytes - need)
                return cache, cut
        self._evict_to(self.budget_bytes - self.sizes.at(tokens))
        return self.make(), 0

    def _longest(self, prompt: torch.Tensor) -> tuple[Kept, int, int] | None:
        """The cache to reuse, how many tokens it shares with the prompt, and where to cut it."""
        best: tuple[Kept, int, int] | None = None
        for one in reversed(self.kept):
            common = common_tokens(one.tokens, prompt[:-1])
            if best is None or common > best[2]:
                cut = last_cut(one.cache, common)
                if cut > (0 if best is None else best[2]):
                    best = one, common, cut
        return best

    def measure(self, cache: KVCache) -> None:
        """Note what the cache in use takes by now."""
        self.used_bytes = int(cache.nbytes)

    def give(self, cache: KVCache, tokens: Sequence[int], prompt_tokens: int) -> None:
        """Keep a cache that a request has used, with the ``tokens`` that it has read."""
        self.used_bytes = 0
        ids = torch.tensor(tokens, dtype=torch.int64)
        assert len(ids) == cache.get_seq_length()
        # What a longer one begins with is not needed beside it.
        self.kept = [one for one in self.kept if common_tokens(one.tokens, ids) < len(one.tokens)]
        self.kept.append(Kept(cache, ids, prompt_tokens, int(cache.nbytes)))
        self._evict_to(self.budget_bytes)

    def drop(self) -> None:
        """Forget the cache that a request has used."""
        self.used_bytes = 0

    def _evict_to(self, nbytes: int) -> None:
        while self.kept and self.nbytes - self.used_bytes > nbytes:
            del self.kept[0]
            self.evicted += 1


def common_tokens(one: torch.Tensor, other: torch.Tensor) -> int:
    """How many leading tokens two texts (int64 ``[T]``) have in common."""
    length = min(len(one), len(other))
    differ = (one[:length] != other[:length]).nonzero()
    return int(differ[0]) if len(differ) else length


def last_cut(cache: KVCache, tokens: int) -> int:
    """The most tokens, up to ``tokens``, that a cache of one row can be cropped to without decoding a block.

    0 where nothing is gained: where a layer of the model's own type stands in the way, or no packed block would be
    left, of which what was learned from them would be all that stays.
    """
    columns = cache.get_seq_length()
    if tokens >= columns:
        return columns
    if not all(isinstance(layer, PackedLayer) and layer.core.window is None for layer in cache.layers):
        return 0
    cores = [layer.core for layer in cache.packed_layers]
    for cut in range(tokens, 0, -1):
        cuts = [core._cut(0, columns - cut, cut) for core in cores]
        if all(one.border == 0 for one in cuts):
            blocks = [
                (0 if core.store is None else core.store.longest, one.blocks)
                for core, one in zip(cores, cuts, strict=True)
            ]
            return 0 if any(before and not after for before, after in blocks) else cut
    return 0


def _crop(cache: KVCache, tokens: int) -> None:
    columns = cache.get_seq_length()
    if tokens < columns:  # a layer with a full window refuses even to take nothing back
        cache.crop(tokens - columns)
