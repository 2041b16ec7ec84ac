"""Caches of earlier requests under a budget of bytes, in memory and, where there is a folder for them, on disk.

A request takes the cache that has read the longest beginning of its prompt, cropped to that, and reads only the rest. A
crop never decodes a packed block (:meth:`KVCache.whole`): what is reused is as it was first stored, and an answer is
the same as if the conversation had stayed in one cache all along.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from kvbits.hf.cache import KVCache, nbytes_of
from kvbits.sessions.prefixes import LEAST_TOKENS, PrefixStore, in_common
from kvbits.store.room import SPARE

log = logging.getLogger("kvbits.serve")


class _Sized(Protocol):
    def at(self, tokens: int, cache: KVCache | None = None) -> int: ...


@dataclass(eq=False)
class Kept:
    """A cache between requests.

    Attributes:
        tokens: that it has read, int64 ``[columns]``.
        prompt_tokens: of these were the last request's prompt; what follows is its answer.
    """

    cache: KVCache
    tokens: torch.Tensor
    prompt_tokens: int


class Pool:
    """All caches, the one last used at the end; the one in use counts too.

    One thread takes and gives; any may look at the numbers.

    Args:
        make: an empty cache.
        sizes: what a cache takes at most, by its tokens.
        budget_bytes: of all caches in memory together.
        folder: where caches go that have to make room, and all of them in the end.

    Attributes:
        nbytes: of all caches, read off them when last one was taken, given or measured.
        evicted: caches that had to make room.
    """

    def __init__(
        self, make: Callable[[], KVCache], sizes: _Sized, budget_bytes: int, folder: PrefixStore | None = None
    ) -> None:
        self.make, self.sizes, self.budget_bytes, self.folder = make, sizes, budget_bytes, folder
        self.kept: list[Kept] = []
        self.nbytes = self.evicted = 0

    def take(self, prompt: torch.Tensor, tokens: int) -> tuple[KVCache, int]:
        """A cache for a prompt, and how many of its tokens the cache has read.

        Room for all that it may become is made first, by dropping what was not used for the longest time.

        Args:
            prompt: int64 ``[T]``; at least its last token is left to read.
            tokens: of prompt and answer together, at most.
        """
        cache, known = self._find(prompt)
        if not self._make_room(cache, tokens):  # one that was much longer once may be larger than a new one
            cache, known = self.make(), 0
            self._make_room(cache, tokens)
        return cache, known

    def measure(self, cache: KVCache | None = None) -> int:
        """Look at the bytes of all caches, the one in use included."""
        self.nbytes = int(nbytes_of([*(one.cache for one in self.kept), *(() if cache is None else (cache,))]))
        return self.nbytes

    def give(self, cache: KVCache, prompt_tokens: int) -> None:
        """Keep a cache that a request has used."""
        ids = cache.tokens[0]
        for one in [one for one in self.kept if in_common(one.tokens, ids) == len(one.tokens)]:
            self.kept.remove(one)  # what a longer one begins with is not needed beside it
        self.kept.append(Kept(cache, ids, prompt_tokens))
        while self.measure() > self.budget_bytes:
            self._drop_first()

    def save(self) -> None:
        """Write all caches into the folder, if there is one."""
        for one in list(self.kept):
            self._write(one)

    # -- finding -------------------------------------------------------------------------------------------------------

    def _find(self, prompt: torch.Tensor) -> tuple[KVCache, int]:
        one, common, whole = self._longest(prompt)
        if self.folder is not None:
            try:
                if self.folder.common(prompt) > whole + self.folder.scheme.block:
                    cache, covered = self.folder.lookup(prompt)
                    if covered > whole:
                        return cache, covered
            except OSError as error:
                log.warning("the folder of prefixes cannot be read: %s", error)
        if one is None:
            return self.make(), 0
        # A conversation that goes on takes its cache with it. One that shares its beginning shares the blocks of that.
        self.kept.remove(one)
        cache = one.cache
        if common < one.prompt_tokens - 1:
            self.kept.append(one)
            cache = cache.fork()
        columns = cache.get_seq_length()
        if whole < columns:  # a layer with a full window refuses even to take nothing back
            cache.crop(whole - columns)
        return cache, whole

    def _longest(self, prompt: torch.Tensor) -> tuple[Kept | None, int, int]:
        """The cache to reuse, how many tokens it shares with the prompt, and how many a crop keeps."""
        best: tuple[Kept | None, int, int] = None, 0, 0
        for one in reversed(self.kept):
            common = in_common(one.tokens, prompt[:-1])
            if common >= LEAST_TOKENS and common > best[2]:
                whole = one.cache.whole(common)
                if whole >= LEAST_TOKENS and whole > best[2]:
                    best = one, common, whole
        return best

    # -- room ----------------------------------------------------------------------------------------------------------

    def _make_room(self, cache: KVCache, tokens: int) -> bool:
        """Drop caches until one in use can grow to ``tokens``; False where it cannot even alone."""
        more = self.sizes.at(tokens, cache) - int(cache.nbytes)
        while self.measure(cache) + more + self._spare(cache) > self.budget_bytes:
            if not self.kept:
                return False
            self._drop_first()
        return True

    def _spare(self, cache: KVCache) -> int:
        """What a pool that is shared gets more than it needs, when it grows: a part of all that is in it."""
        stores = [layer.core.store for layer in cache.packed_layers]
        return self.nbytes // SPARE if any(store is not None and store.is_shared for store in stores) else 0

    def _drop_first(self) -> None:
        self._write(self.kept[0])
        pools = [layer.core.store.shared for layer in self.kept[0].cache.packed_layers if layer.core.store is not None]
        del self.kept[0]
        self.evicted += 1
        for pool in pools:
            pool.compact()

    def _write(self, one: Kept) -> None:
        if self.folder is None or len(one.tokens) < LEAST_TOKENS:
            return
        try:
            self.folder.put(one.cache)
        except (OSError, ValueError) as error:
            log.warning("a cache of %d tokens is not kept: %s", len(one.tokens), error)
