"""The packed memory of one layer: a pool of blocks that are written once, and a table of which row owns which.

The pool is one tensor ``[blocks, H, record bytes]`` of records (:mod:`kvbits.store.record`); block ``n`` of row ``b``
is ``pool[table[b, n]]``. Blocks never change once written, so beam search, repetition and selection of rows only move
table entries; rows that share a prefix share its blocks.

A pool that grows gets an eighth more room and copies the old blocks, so a stored byte is copied a bounded number of
times however long the context becomes. Rows may hold different numbers of blocks (left-padded batches).

Stores that were forked from each other write into one pool, each for itself: n continuations of a prompt hold its
blocks once, also after they have grown. What one of them gives up stays while another refers to it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast
from weakref import WeakSet

import torch

from kvbits.store import huge_pages
from kvbits.store.derived import Derived
from kvbits.store.record import Record, unpack
from kvbits.store.room import SPARE, pool_blocks, table_columns
from kvbits.types import Packed


@dataclass(frozen=True)
class Blocks:
    """An unchanging look at the blocks that a store held at one moment.

    Attributes:
        record: the byte map.
        pool: uint8 ``[P, H, record bytes]``.
        table: int64 ``[B, N]``, which pool block is block n of row b; beyond a row's count, any valid entry.
        counts: blocks of each row.
        in_order: pool block ``n * B + b`` is block n of row b, for all of them: nothing needs gathering.
        derived: what kernels have made of the layer so far.
    """

    record: Record
    pool: torch.Tensor
    table: torch.Tensor
    counts: tuple[int, ...]
    in_order: bool
    derived: Derived

    @property
    def longest(self) -> int:
        """Blocks of the longest row."""
        return max(self.counts, default=0)

    def read(self, first: int, last: int) -> tuple[Packed, Packed]:
        """Packed K and V of blocks ``first .. last - 1`` of every row: tensors ``[B, H, n, *part.shape]``.

        Views of the pool where the rows lie in order, else a copy of these blocks. Beyond a row's own count the
        content is some other block's.
        """
        rows = self.table.shape[0]
        if self.in_order:
            tile = self.pool[first * rows : last * rows].unflatten(0, (-1, rows))
        else:
            tile = self.pool[self.table[:, first:last].t()]
        tile = tile.permute(1, 2, 0, 3)  # [n, B, H, bytes] -> [B, H, n, bytes]
        return unpack(tile, self.record.keys), unpack(tile, self.record.values)


class Pool:
    """The blocks of one store, or of several that were forked from each other.

    Attributes:
        memory: uint8 ``[blocks, H, record bytes]``; replaced when it grows, and never written to below ``used``.
        used: blocks that have been written.
        stores: whoever refers to some of them.
        lock: held by a store while it looks at the pool or changes it: forks may run in threads of their own.
    """

    def __init__(self, memory: torch.Tensor, used: int = 0) -> None:
        self.memory, self.used = memory, used
        self.stores: WeakSet[BlockStore] = WeakSet()
        self.lock = threading.RLock()

    def compact(self) -> None:
        """Give back what no store refers to any more, once that is worth the copying."""
        for store in list(self.stores)[:1]:
            store.compact()

    def __getstate__(self) -> tuple[torch.Tensor, int]:
        return self.memory, self.used  # a copied store says itself that it refers to the copy

    def __setstate__(self, state: tuple[torch.Tensor, int]) -> None:
        Pool.__init__(self, *state)


_Method = TypeVar("_Method", bound=Callable[..., object])


def _locked(method: _Method) -> _Method:
    """Run ``method`` while no other store changes the pool."""

    @functools.wraps(method)
    def run(self: BlockStore, *args: object, **kwargs: object) -> object:
        with self.shared.lock:
            return method(self, *args, **kwargs)

    return cast(_Method, run)


class BlockStore:
    """Append-only packed blocks of one layer, for ``rows`` sequences.

    Args:
        record: what a block looks like.
        heads: KV heads.
        rows: sequences in the batch.
        device: where the pool lives.
    """

    def __init__(self, record: Record, heads: int, rows: int, device: torch.device) -> None:
        self.record = record
        self.derived = Derived()
        self.heads = heads
        self.counts = [0] * rows
        self.blank = [0] * rows
        self._zeros: int | None = None
        self.shared = Pool(huge_pages.allocate((0, heads, record.nbytes), device))
        self.shared.stores.add(self)
        self.table = torch.empty(rows, 0, dtype=torch.int64, device=device)
        self.in_order = True

    @staticmethod
    def of(
        record: Record, pool: torch.Tensor, table: torch.Tensor, counts: Sequence[int], blank: Sequence[int]
    ) -> BlockStore:
        """A store of blocks that are there: those of :meth:`in_table_order`, of as many rows, and their table.

        The pool is used where it lies until it has to grow.
        """
        store = BlockStore(record, pool.shape[1], len(counts), pool.device)
        store.pool, store.used, store.table = pool, pool.shape[0], table.contiguous()
        store.counts, store.blank = list(counts), list(blank)
        store.in_order = store._lies_in_order()
        return store

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.shared.stores.add(self)

    @property
    def pool(self) -> torch.Tensor:
        """uint8 ``[blocks, H, record bytes]``."""
        return self.shared.memory

    @pool.setter
    def pool(self, memory: torch.Tensor) -> None:
        self.shared.memory = memory

    @property
    def used(self) -> int:
        """Blocks of the pool that have been written, by whichever store."""
        return self.shared.used

    @used.setter
    def used(self, used: int) -> None:
        self.shared.used = used

    @property
    def longest(self) -> int:
        """Blocks of the longest row."""
        return max(self.counts, default=0)

    @property
    def is_shared(self) -> bool:
        """Whether other stores write into its pool."""
        return len(self.shared.stores) > 1

    @_locked
    def fork(self) -> BlockStore:
        """Another store of the same blocks, which goes on by itself."""
        twin = BlockStore(self.record, self.heads, 0, self.table.device)
        twin.shared, twin.table, twin.in_order = self.shared, self.table.clone(), self.in_order
        twin.counts, twin.blank = list(self.counts), list(self.blank)
        self.shared.stores.add(twin)
        return twin

    @_locked
    def append(self, pieces: Sequence[tuple[int | None, Packed, Packed]]) -> None:
        """Add blocks, all of them or, where that fails, none.

        Args:
            pieces: rows (None: every row, where all hold the same number), and for each the keys and the values that
                the codecs' ``encode`` gave for ``[B, H, n, T, D]`` (B = 1 for one row).
        """
        self.make_room(pieces)
        counts, used, in_order = list(self.counts), self.used, self.in_order
        for row, keys, values in pieces:
            rows = self._rows(row)
            first, added = counts[rows[0]], _blocks_in(keys)
            assert all(counts[r] == first for r in rows)
            end = used + added * len(rows)
            tile = self.pool[used:end].unflatten(0, (added, len(rows))).permute(1, 2, 0, 3)
            for slots, packed in ((self.record.keys, keys), (self.record.values, values)):
                for name, target in unpack(tile, slots).items():
                    target.copy_(packed[name])
            ids = torch.arange(used, end, device=self.table.device).unflatten(0, (added, len(rows))).t()
            self.table[rows.start : rows.stop, first : first + added] = ids
            in_order, used = in_order and row is None and used == first * len(rows), end
            for r in rows:
                counts[r] += added
        # What was written counts from here on: assignments cannot fail.
        self.counts, self.used, self.in_order = counts, used, in_order

    @_locked
    def make_room(self, pieces: Sequence[tuple[int | None, Packed, Packed]]) -> None:
        """Make room for what :meth:`append` would add, so that it allocates nothing large."""
        counts, added = list(self.counts), 0
        for row, keys, _ in pieces:
            for r in self._rows(row):
                counts[r] += _blocks_in(keys)
                added += _blocks_in(keys)
        self.reserve(added, max(counts, default=0))

    def _rows(self, row: int | None) -> range:
        return range(len(self.counts)) if row is None else range(row, row + 1)

    @_locked
    def view(self) -> Blocks:
        """What is held now; later appends do not show in it."""
        table = self.table[:, : self.longest]
        # Later appends write into the table; where it is not read they may.
        table = table if self.in_order else table.clone()
        return Blocks(self.record, self.pool, table, tuple(self.counts), self.in_order, self.derived)

    @_locked
    def select_rows(self, rows: torch.Tensor) -> None:
        """Row ``i`` becomes what row ``rows[i]`` was (int64 ``[new B]``). Moves table entries only."""
        self.table = self.table[rows.to(self.table.device)]
        chosen = rows.tolist()
        self.in_order = self.in_order and chosen == list(range(len(self.counts)))
        self.counts = [self.counts[r] for r in chosen]
        self.blank = [self.blank[r] for r in chosen]

    @_locked
    def truncate(self, counts: Sequence[int]) -> None:
        """Keep the first ``counts[b]`` blocks of row ``b``. Their memory is reclaimed when the pool next grows."""
        assert all(new <= old for new, old in zip(counts, self.counts, strict=True))
        self.counts = list(counts)
        self.blank = [min(pair) for pair in zip(self.blank, counts, strict=True)]
        if self.in_order and len(set(counts)) == 1 and len(self.shared.stores) == 1:
            self.used = self.longest * len(counts)

    @_locked
    def trim(self) -> None:
        """Give back the memory of blocks that no row refers to any more, where it is most of the pool."""
        if 2 * sum(sum(s.counts) - sum(s.blank) for s in self.shared.stores) < self.pool.shape[0] - 2:
            self._compact(self._alive())

    @_locked
    def compact(self) -> None:
        """Give back the memory of blocks that no row of any store refers to, where they are an eighth of the pool."""
        alive = self._alive()
        if SPARE * len(alive) < (SPARE - 1) * self.used:
            self._compact(alive)

    @_locked
    def drop_first(self, blocks: int) -> None:
        """Forget the first ``blocks`` of every row (sliding windows)."""
        self.table = self.table[:, blocks:].clone()
        self.counts = [count - blocks for count in self.counts]
        self.blank = [max(0, count - blocks) for count in self.blank]
        self.in_order = False

    @_locked
    def blank_first(self, row: int, blocks: int) -> None:
        """Forget the first ``blocks`` of one row, which keep their place: one block of zeros stands for all of them."""
        if blocks <= self.blank[row]:
            return
        if self._zeros is None:
            self.reserve(1, 0)
            self._zeros, self.used = self.used, self.used + 1
            self.pool[self._zeros] = 0
        self.table = self.table.clone()  # a view of blocks that lie in order shares the old one
        self.table[row, :blocks] = self._zeros
        self.blank[row], self.in_order = blocks, False

    @_locked
    def reserve(self, added: int, columns: int) -> None:
        """Make room for ``added`` more blocks in the pool and ``columns`` columns in the table, all at once."""
        if columns > self.table.shape[1]:
            wider = self.table.new_zeros(self.table.shape[0], table_columns(self.table.shape[1], columns))
            wider[:, : self.table.shape[1]] = self.table
            self.table = wider
        if self.used + added <= self.pool.shape[0]:
            return
        alive = self._alive()
        if len(alive) < self.used:  # beams, crops and windows left blocks that no row refers to
            self._compact(alive)
        capacity = pool_blocks(self.pool.shape[0], self.used, added)
        if capacity > self.pool.shape[0]:
            pool = huge_pages.allocate((capacity, *self.pool.shape[1:]), self.pool.device)
            pool[: self.used] = self.pool[: self.used]
            self.pool = pool

    @_locked
    def in_table_order(self) -> tuple[torch.Tensor | None, torch.Tensor]:
        """What there is to write of a store.

        Returns:
            Pool blocks that some row refers to, int64, first block 0 of each row, then block 1 and so on (None where
            they lie so), and the table ``[B, N]`` with their places in this order for their numbers.
        """
        table = self.table[:, : self.longest]
        if self.in_order and len(set(self.counts)) <= 1:
            return None, table
        held = self._held()[:, : self.longest].t()
        alive, number = table.t()[held].unique(return_inverse=True)
        where = torch.arange(len(number), device=table.device)
        first = torch.full_like(alive, len(number)).scatter_reduce_(0, number, where, "amin")
        place = torch.empty_like(alive)
        place[first.argsort()] = torch.arange(len(alive), device=table.device)
        placed = torch.zeros_like(table.t())
        placed[held] = place[number]
        return alive[first.argsort()], placed.t()

    def _held(self) -> torch.Tensor:
        """Which entries of the table are some row's own, bool ``[B, columns]``."""
        column = torch.arange(self.table.shape[1], device=self.table.device)
        return column < torch.tensor(self.counts, device=self.table.device)[:, None]

    def _alive(self) -> torch.Tensor:
        """Pool blocks that some row of some store refers to, ascending."""
        alive: torch.Tensor = torch.cat([store.table[store._held()] for store in self.shared.stores]).unique()
        return alive

    def _compact(self, alive: torch.Tensor) -> None:
        moved = torch.zeros(max(self.used, 1), dtype=torch.int64, device=self.table.device)
        moved[alive] = torch.arange(len(alive), device=self.table.device)
        # What may run out of memory comes first: tables of other stores must not be ahead of the pool.
        stores = list(self.shared.stores)
        tables = [moved[store.table.clamp(max=self.used - 1)] for store in stores]
        self.pool, self.used = self.pool[alive], len(alive)
        for store, table in zip(stores, tables, strict=True):
            store.table, store._zeros = table, None
        for store in stores:
            store.in_order = store._lies_in_order()

    def _lies_in_order(self) -> bool:
        ordered = torch.arange(self.used, device=self.table.device)
        same = len(set(self.counts)) == 1 and self.used == self.longest * len(self.counts)
        return same and bool((self.table[:, : self.longest].t().flatten() == ordered).all())

    @_locked
    def nbytes(self, seen: set[int] | None = None) -> dict[str, int]:
        """Real bytes: ``codes``, ``scales``, ``zeros``, ``outliers`` of the blocks written, and ``slack``.

        Slack is alignment, spare blocks, the table, and what is derived of it. A block that no row refers to any
        more counts until the pool next grows, which reclaims it.

        Args:
            seen: where several stores are counted together, what has been counted: a pool counts once. Else a store
                that shares its pool counts the blocks that it refers to itself.
        """
        blocks, pool_bytes = self.used, self.pool.nbytes
        if seen is not None and id(self.shared) in seen:
            blocks = pool_bytes = 0
        elif seen is not None:
            seen.add(id(self.shared))
        elif len(self.shared.stores) > 1:
            blocks = len(self.table[self._held()].unique())
            pool_bytes = blocks * self.heads * self.record.nbytes
        return self.record.count(blocks * self.heads, pool_bytes + self.table.nbytes + self.derived.nbytes)


def _blocks_in(packed: Packed) -> int:
    return next(iter(packed.values())).shape[2]
