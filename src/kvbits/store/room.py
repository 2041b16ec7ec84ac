"""How much memory one layer takes, in numbers alone: the cache allocates by them, and forecasts count by them.

A prompt is cut to fit. What grows step by step keeps an eighth in hand, so a stored byte is copied about 8 times
however long the context becomes.

:class:`Filled` counts what given calls leave, :func:`most_room` and :func:`most_room_in_window` bound it whatever the
calls were, and :meth:`Room.nbytes` makes bytes of either: for the planner, the server, the measurements and
:meth:`kvbits.Scheme.for_window`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from kvbits.store.shards import ALONE, Shards

SPARE = 8
"""What grows step by step gets one part in this many more than it needs."""

TABLE_BYTES = torch.int64.itemsize
"""Of an entry of the table of blocks."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The exact buffer of a row, ``[sinks | late sinks | recent]``, in tokens.

    Attributes:
        sinks, late_sinks: that stay exact for ever; late ones are as many at most.
        residual: recent ones that stay exact at least; None: all of them.
        block: that are packed at a time.
    """

    sinks: int
    late_sinks: int
    residual: int | None
    block: int

    def packable(self, tokens: int) -> int:
        """Blocks to pack when a row holds ``tokens`` exact ones."""
        if self.residual is None:
            return 0
        return max(0, (tokens - self.sinks - self.late_sinks - self.residual) // self.block)

    @property
    def most(self) -> int:
        """Tokens that a row holds just before it packs; 0 where nothing is ever packed."""
        return 0 if self.residual is None else self.sinks + self.late_sinks + self.residual + self.block - 1

    def room(self, room: int, exact: int, tokens: int) -> int:
        """Tokens to have room for, where there is ``room``, ``exact`` ones are in it, and there will be ``tokens``."""
        if tokens <= room:
            return room
        wanted = tokens if exact == 0 else _stepwise(tokens)
        return wanted if self.residual is None else min(wanted, self.most)

    def room_after_crop(self, room: int, tokens: int) -> int:
        """Room of a buffer that a crop leaves ``tokens`` in: less, where ``room`` is more than a buffer keeps."""
        if room <= max(self.most, tokens + 2 * tokens // SPARE + 64):
            return room
        return max(self.most, tokens + tokens // SPARE + 8)

    def room_after_packing(self, tokens: int) -> int:
        """Room of the buffer that takes what stays exact: ``tokens``, and all that comes before the next block."""
        return max(tokens, self.most)


def _stepwise(tokens: int) -> int:
    """Room of a buffer that has grown step by step, for so many tokens."""
    return tokens + tokens // SPARE + 8


def pool_blocks(capacity: int, used: int, added: int) -> int:
    """Blocks to have room for, where there is room for ``capacity``, ``used`` are written, ``added`` are to come."""
    need = used + added
    if need <= capacity:
        return capacity
    return need if used == 0 else need + used // SPARE


def angles(blocks: int) -> int:
    """Blocks to make rotary angles of, where those of ``blocks`` are wanted."""
    return blocks + blocks // SPARE + 8


def table_columns(columns: int, wanted: int) -> int:
    """Columns of a table of blocks that has ``columns`` and needs ``wanted``."""
    return columns if wanted <= columns else wanted + wanted // SPARE


class Room(NamedTuple):
    """What one layer has room for.

    Attributes:
        tokens: exact ones, in each row.
        blocks: packed ones, in all rows together.
        columns: of the table of blocks.
        rows: of the batch.
    """

    tokens: int
    blocks: float
    columns: int = 0
    rows: int = 1

    def nbytes(self, token_bytes: float, block_bytes: float) -> float:
        """Bytes of it, given those of one exact token and of one packed block, of all heads."""
        table_bytes = self.rows * self.columns * TABLE_BYTES
        return self.rows * self.tokens * token_bytes + self.blocks * block_bytes + table_bytes


def most_room(limits: Limits, tokens: int, rows: int = 1) -> Room:
    """The most room that a layer may have for ``tokens`` of each row, whatever the calls were; without a window."""
    blocks = limits.packable(tokens)
    exact = limits.most if tokens > limits.most > 0 else _stepwise(tokens)
    if limits.residual is not None:
        exact = min(exact, limits.most)
    columns = blocks + blocks // SPARE
    return Room(exact, rows * blocks + rows * blocks // SPARE, columns, rows)


def most_room_in_window(limits: Limits, window: int) -> Room:
    """The most room that a row of a layer with a window may have; its table is too small to count."""
    assert limits.residual is not None
    # One block may be behind the window in part, one stays for steps back, one comes before one goes.
    blocks = max(0, window - 1 - limits.residual) / limits.block + 3
    return Room(limits.most, blocks * (SPARE + 1) / SPARE)


class Filled:
    """What :class:`kvbits.layer.cache.LayerCache` and :class:`kvbits.store.blocks.BlockStore` count after some calls,
    for rows of equal length.

    Args:
        limits, window: of the layer; None is without a window.
        batch: rows.
        shards: which blocks are here, where several ranks share the context.

    Attributes:
        exact, room: exact tokens of a row, and those that its buffer has room for.
        blocks: that a row refers to, on all ranks.
        used, capacity, columns: blocks that are written, those that the pool has room for, columns of the table.
        tokens, dropped: of a row, so far; and those that a window has dropped.
        packs: whether anything was ever packed.
    """

    def __init__(self, limits: Limits, batch: int = 1, window: int | None = None, shards: Shards = ALONE) -> None:
        self.limits, self.batch, self.window, self.shards = limits, batch, window, shards
        self.exact = self.room = self.blocks = self.used = self.capacity = self.columns = 0
        self.tokens = self.dropped = 0
        self.packs = False

    @property
    def room_of_layer(self) -> Room:
        """The room that it has now."""
        return Room(self.room, self.capacity, self.columns, self.batch)

    def run(self, tokens: int, calls: int) -> None:
        """So many calls of as many tokens each. Those that find room are taken all at once."""
        while calls:
            fitting = min(calls, self._fitting(tokens))
            total = self.exact + fitting * tokens
            self.tokens += fitting * tokens
            calls -= fitting
            self._take(total, self.limits.packable(total))
            if calls:
                self._append(tokens)
                calls -= 1

    def _fitting(self, tokens: int) -> int:
        """Calls after which nothing has grown or been dropped yet."""
        if not self.packs or self.window is not None:
            return (self.room - self.exact) // tokens
        here = self.shards.count(self.blocks)
        here += min((self.capacity - self.used) // self.batch, self.columns - here)
        blocks = self.shards.number(here) - self.blocks
        first = self.limits.most + 1 + blocks * self.limits.block  # tokens at which one block too many is packed
        return (first - 1 - self.exact) // tokens

    def _take(self, total: int, added: int) -> None:
        """Have ``total`` exact tokens, of which ``added`` blocks are packed."""
        self.exact = total - added * self.limits.block
        self.used += self._here(added) * self.batch
        self.blocks += added

    def _here(self, added: int) -> int:
        """How many of the next ``added`` blocks this rank holds."""
        return self.shards.count(self.blocks + added) - self.shards.count(self.blocks)

    def _append(self, tokens: int) -> None:
        self.tokens += tokens
        total = self.exact + tokens
        added = self.limits.packable(total)
        if not added:
            self.room, self.exact = self.limits.room(self.room, self.exact, total), total
            return
        self._reserve(added)
        self._take(total, added)
        self.packs = True
        self.room = self.limits.room_after_packing(self.exact)
        self._slide()

    def _reserve(self, added: int) -> None:
        self.columns = table_columns(self.columns, self.shards.count(self.blocks + added))
        more = self._here(added) * self.batch
        if self.used + more > self.capacity and self.shards.count(self.blocks) * self.batch < self.used:
            self._compact()
        self.capacity = pool_blocks(self.capacity, self.used, more)

    def _slide(self) -> None:
        if self.window is None:
            return
        block = self.limits.block
        behind = min(max(0, self.tokens - (self.window - 1) - block - self.dropped) // block, self.blocks)
        self.blocks -= behind
        self.columns -= behind
        self.dropped += behind * block
        if 2 * self.blocks * self.batch < self.capacity - 2:
            self._compact()

    def _compact(self) -> None:
        self.used = self.capacity = self.blocks * self.batch
