"""How the memory of one layer grows, in numbers alone: the cache allocates by them, the planner foretells.

A prompt is cut to fit. What grows step by step keeps an eighth in hand, so a stored byte is copied about 8 times
however long the context becomes.
"""

from __future__ import annotations

from dataclasses import dataclass

SPARE = 8
"""What grows step by step gets one part in this many more than it needs."""


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

    def room(self, room: int, held: int, tokens: int) -> int:
        """Tokens to have room for, where there is ``room``, ``held`` are in it, and there will be ``tokens``."""
        if tokens <= room:
            return room
        wanted = tokens if held == 0 else tokens + tokens // SPARE + 8
        return wanted if self.residual is None else min(wanted, self.most)

    def room_after_crop(self, room: int, tokens: int) -> int:
        """Room of a buffer that a crop leaves ``tokens`` in: less, where ``room`` is more than growth keeps in hand."""
        if room <= max(self.most, tokens + 2 * tokens // SPARE + 64):
            return room
        return max(self.most, tokens + tokens // SPARE + 8)

    def room_after_packing(self, tokens: int) -> int:
        """Room of the buffer that takes what stays exact: ``tokens``, and all that comes before the next block."""
        return max(tokens, self.most)


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
