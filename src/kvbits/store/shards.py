"""Which rank holds which packed block of a shared context: runs of neighbouring blocks, dealt out in turn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch

RUN_BLOCKS = 4
"""Neighbouring blocks that go to the same rank, unless said otherwise: encoded at a time, and few enough for ranks to
hold about as much of a short context, too."""

_Number = TypeVar("_Number", int, torch.Tensor)


@dataclass(frozen=True)
class Shards:
    """The blocks of one rank.

    Block ``n`` of every row belongs to rank ``n // run % world``, so ranks never hold more than one run more than
    others, and the owner of a block is known without asking.

    Attributes:
        rank, world: this one, of how many.
        run: neighbouring blocks that go to the same rank.
    """

    rank: int
    world: int
    run: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise ValueError(f"rank={self.rank} is not one of {self.world} ranks")
        if isinstance(self.run, bool) or not isinstance(self.run, int) or self.run < 1:
            raise ValueError(f"run={self.run!r} is not a number of blocks; give 1 or more")

    def owner(self, block: int) -> int:
        """The rank that holds a block."""
        return block // self.run % self.world

    def count(self, blocks: int) -> int:
        """How many of the first ``blocks`` are this rank's."""
        rounds, rest = divmod(blocks, self.run * self.world)
        return rounds * self.run + min(max(rest - self.rank * self.run, 0), self.run)

    def mine(self, first: int, last: int) -> Iterator[range]:
        """This rank's runs among blocks ``first .. last - 1``, ascending."""
        turn = first // self.run
        turn += (self.rank - turn) % self.world
        while turn * self.run < last:
            yield range(max(first, turn * self.run), min(last, (turn + 1) * self.run))
            turn += self.world

    def number(self, own: _Number) -> _Number:
        """Of this rank's block ``own`` the number among all blocks, from 0; of one or of many (int64)."""
        return (own // self.run * self.world + self.rank) * self.run + own % self.run


ALONE = Shards(0, 1, 1)
"""One rank that holds all blocks."""
