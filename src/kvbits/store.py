"""The packed memory of one layer: a pool of blocks that are written once, and a table of which row owns which.

A *record* is everything of one block of one KV head, ``[K parts | V parts]``, each part and the record aligned to 64
bytes (see docs/formats.md). The pool is one tensor ``[blocks, H, record bytes]``; block ``n`` of row ``b`` is
``pool[table[b, n]]``. Blocks never change once written, so beam search, repetition and selection of rows only move
table entries; rows that share a prefix share its blocks.

Growth adds an eighth and copies the old blocks, so a stored byte is copied a bounded number of times however long
the context becomes. Rows may hold different numbers of blocks (left-padded batches).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvbits import memory
from kvbits.codecs import Codec
from kvbits.growth import pool_blocks, table_columns
from kvbits.types import Packed, Part, Role

ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class Slot:
    """A part and where it lies in the record, in bytes."""

    part: Part
    offset: int


class Memo(dict[str, Any]):
    """What kernels derive from a layer's record; a copy of the layer derives its own."""

    def __reduce__(self) -> tuple[type[Memo], tuple[()]]:
        return Memo, ()


@dataclass(frozen=True)
class Record:
    """Byte map of one block of one head.

    Attributes:
        tokens: of a block.
        keys, values: the parts of either side.
        nbytes: of the whole record.
        memo: what kernels derive from a layer's record, once.
    """

    tokens: int
    keys: tuple[Slot, ...]
    values: tuple[Slot, ...]
    nbytes: int
    memo: Memo = field(default_factory=Memo, compare=False, repr=False)

    @staticmethod
    def of(
        key: Codec,
        value: Codec,
        tokens: int,
        key_channels: int,
        value_channels: int,
        key_dtype: torch.dtype,
        value_dtype: torch.dtype | None = None,
    ) -> Record:
        """Lay the parts of both codecs one after the other. The dtypes are those of exact K and V; one is for both."""
        sides, offset = [], 0
        value_dtype = value_dtype or key_dtype
        for codec, channels, dtype in ((key, key_channels, key_dtype), (value, value_channels, value_dtype)):
            slots = []
            for part in codec.layout(tokens, channels, dtype):
                slots.append(Slot(part, offset))
                offset = _align(offset + part.nbytes)
            sides.append(tuple(slots))
        return Record(tokens, sides[0], sides[1], offset)

    def role_bytes(self, role: Role) -> int:
        """Bytes of all parts with ``role``, K and V together."""
        return sum(slot.part.nbytes for slot in self.keys + self.values if slot.part.role == role)

    def count(self, written: int, total: int) -> dict[str, int]:
        """By part, what ``total`` bytes of a pool and its table hold of ``written`` records; the rest is ``slack``."""
        roles: Sequence[Role] = ("codes", "scales", "zeros", "outliers")
        parts: dict[str, int] = {role: written * self.role_bytes(role) for role in roles}
        return {**parts, "slack": total - sum(parts.values())}


def _align(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True)
class Blocks:
    """An unchanging look at the blocks that a store held at one moment.

    Attributes:
        record: the byte map.
        pool: uint8 ``[P, H, record bytes]``.
        table: int64 ``[B, N]``, which pool block is block n of row b; beyond a row's count, any valid entry.
        counts: blocks of each row.
        in_order: pool block ``n * B + b`` is block n of row b, for all of them: nothing needs gathering.
    """

    record: Record
    pool: torch.Tensor
    table: torch.Tensor
    counts: tuple[int, ...]
    in_order: bool

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
        return _unpack(tile, self.record.keys), _unpack(tile, self.record.values)


def _unpack(tile: torch.Tensor, slots: tuple[Slot, ...]) -> Packed:
    packed = {}
    for slot in slots:
        part = tile[..., slot.offset : slot.offset + slot.part.nbytes]
        packed[slot.part.name] = part.view(slot.part.dtype).unflatten(-1, slot.part.shape)
    return packed


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
        self.heads = heads
        self.counts = [0] * rows
        self.blank = [0] * rows
        self._zeros: int | None = None
        self.used = 0
        self.pool = memory.allocate((0, heads, record.nbytes), device)
        self.table = torch.empty(rows, 0, dtype=torch.int64, device=device)
        self.in_order = True

    @property
    def longest(self) -> int:
        """Blocks of the longest row."""
        return max(self.counts, default=0)

    def append(self, row: int | None, keys: Packed, values: Packed) -> None:
        """Add blocks to one row, or to every row (``row=None``) where all hold the same number.

        Args:
            row: the row, or None for all.
            keys, values: what the codecs' ``encode`` gave for ``[B, H, n, T, D]`` (B = 1 for one row).
        """
        rows = range(len(self.counts)) if row is None else range(row, row + 1)
        added = next(iter(keys.values())).shape[2]
        first = self.counts[rows[0]]
        assert all(self.counts[r] == first for r in rows)
        self.reserve(added * len(rows), first + added)
        tile = self.pool[self.used : self.used + added * len(rows)].unflatten(0, (added, len(rows)))
        tile = tile.permute(1, 2, 0, 3)
        for slots, packed in ((self.record.keys, keys), (self.record.values, values)):
            for name, target in _unpack(tile, slots).items():
                target.copy_(packed[name])
        ids = torch.arange(self.used, self.used + added * len(rows), device=self.table.device)
        self.table[rows.start : rows.stop, first : first + added] = ids.unflatten(0, (added, len(rows))).t()
        self.in_order = self.in_order and row is None and self.used == first * len(rows)
        self.used += added * len(rows)
        for r in rows:
            self.counts[r] += added

    def view(self) -> Blocks:
        """What is held now; later appends do not show in it."""
        table = self.table[:, : self.longest]
        # Later appends write into the table; where it is not read they may.
        return Blocks(
            self.record, self.pool, table if self.in_order else table.clone(), tuple(self.counts), self.in_order
        )

    def select_rows(self, rows: torch.Tensor) -> None:
        """Row ``i`` becomes what row ``rows[i]`` was (int64 ``[new B]``). Moves table entries only."""
        self.table = self.table[rows.to(self.table.device)]
        chosen = rows.tolist()
        self.in_order = self.in_order and chosen == list(range(len(self.counts)))
        self.counts = [self.counts[r] for r in chosen]
        self.blank = [self.blank[r] for r in chosen]

    def truncate(self, counts: Sequence[int]) -> None:
        """Keep the first ``counts[b]`` blocks of row ``b``. Their memory is reclaimed when the pool next grows."""
        assert all(new <= old for new, old in zip(counts, self.counts, strict=True))
        self.counts = list(counts)
        self.blank = [min(pair) for pair in zip(self.blank, counts, strict=True)]
        if self.in_order and len(set(counts)) == 1:
            self.used = self.longest * len(counts)

    def trim(self) -> None:
        """Give back the memory of blocks that no row refers to any more, where it is most of the pool."""
        if 2 * (sum(self.counts) - sum(self.blank)) < self.pool.shape[0] - 2:
            self._compact(self._alive())

    def drop_first(self, blocks: int) -> None:
        """Forget the first ``blocks`` of every row (sliding windows)."""
        self.table = self.table[:, blocks:].clone()
        self.counts = [count - blocks for count in self.counts]
        self.blank = [max(0, count - blocks) for count in self.blank]
        self.in_order = False

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
            pool = memory.allocate((capacity, *self.pool.shape[1:]), self.pool.device)
            pool[: self.used] = self.pool[: self.used]
            self.pool = pool

    def _alive(self) -> torch.Tensor:
        """Pool blocks that some row refers to, ascending."""
        column = torch.arange(self.table.shape[1], device=self.table.device)
        held = column < torch.tensor(self.counts, device=self.table.device)[:, None]
        alive: torch.Tensor = self.table[held].unique()
        return alive

    def _compact(self, alive: torch.Tensor) -> None:
        moved = torch.zeros(max(self.used, 1), dtype=torch.int64, device=self.table.device)
        moved[alive] = torch.arange(len(alive), device=self.table.device)
        self.table = moved[self.table.clamp(max=self.used - 1)]
        self.pool = self.pool[alive]
        self.used, self._zeros = len(alive), None
        rows = len(self.counts)
        ordered = torch.arange(self.used, device=self.table.device)
        same = len(set(self.counts)) == 1 and self.used == self.longest * rows
        self.in_order = same and bool((self.table[:, : self.longest].t().flatten() == ordered).all())

    def nbytes(self) -> dict[str, int]:
        """Real bytes: ``codes``, ``scales``, ``zeros``, ``outliers`` of the blocks written, and ``slack``.

        Slack is alignment, spare blocks and the table. A block that no row refers to any more counts until the pool
        next grows, which reclaims it.
        """
        return self.record.count(self.used * self.heads, self.pool.nbytes + self.table.nbytes)
