"""Exact tokens on their way into blocks: in which order they are read, which of them are samples, what stays.

Of ``[sinks | late | recent]`` the oldest recent tokens are packed. Late sinks (:mod:`kvbits.store.late_sinks`) that are
found among them stay behind, so the tokens are read in an order that is not always the one in which they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch

from kvbits.layer.first_fit import Pair
from kvbits.store.exact import roomy
from kvbits.store.late_sinks import Late
from kvbits.store.room import Limits
from kvbits.store.rows import Rows
from kvbits.transform import Transform
from kvbits.types import Packed, Params

Encoded: TypeAlias = list[tuple[int | None, Packed, Packed]]
"""Runs of blocks as :meth:`kvbits.store.blocks.BlockStore.append` takes them: row (None: all), keys and values."""


class ToPack(NamedTuple):
    """Exact tokens of which some are about to be packed.

    Attributes:
        tokens: ``[B, H, T, D]``.
        order: in which order each row is read, int64 ``[B, T]`` on the CPU; None is as they lie.
    """

    tokens: torch.Tensor
    order: torch.Tensor | None

    def take(self, row: int | None, first: int, last: int) -> torch.Tensor:
        """Tokens ``first .. last - 1`` of one row, or of all (None): ``[B or 1, H, t, D]``, uncopied where they can be.

        Args:
            row: which one.
            first, last: places in the order; between them it must be ascending.
        """
        rows = slice(None) if row is None else slice(row, row + 1)
        if self.order is None or first == last:
            return self.tokens[rows, :, first:last]
        index = self.order[rows, first:last]
        begin, end = index[:, 0].tolist(), index[:, -1].tolist()
        if len(set(begin)) == 1 and max(end) - begin[0] == last - first - 1:  # neighbours: late sinks are few
            return self.tokens[rows, :, begin[0] : begin[0] + last - first]
        index = index.to(self.tokens.device)
        pieces = [one[None].index_select(2, at) for one, at in zip(self.tokens[rows], index, strict=True)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def rest(self, total: Sequence[int], left: Sequence[int], limits: Limits) -> torch.Tensor:
        """A fresh buffer with the sinks of each row and with what comes behind the packed tokens.

        Args:
            total, left: exact tokens of each row before and after its blocks are packed.
            limits: how much room there will be.
        """
        rest = roomy(self.tokens, max(left), limits)
        rows = list(enumerate(zip(total, left, strict=True)))
        same = len(set(zip(total, left, strict=True))) == 1
        for row, (tokens, kept) in rows[:1] if same else rows:
            where, which = (slice(None), None) if same else (slice(row, row + 1), row)
            begin = min(tokens, limits.sinks)
            rest[where, :, :begin] = self.take(which, 0, begin)
            rest[where, :, begin:kept] = self.take(which, tokens - kept + begin, tokens)
        return rest


class DueBlocks(NamedTuple):
    """Which blocks of a layer are packed now.

    Attributes:
        ranges: rows (None: all of them) and how many blocks each packs.
        begins: how many blocks each row has packed before.
        limits: of the layer.
    """

    ranges: Sequence[tuple[int | None, int]]
    begins: Sequence[int]
    limits: Limits

    def samples(self, to_pack: ToPack, transform: Transform) -> torch.Tensor:
        """The tokens of these blocks as ``[B or 1, H, T, D]`` of samples: none that stay exact, whatever they hold."""
        size, sinks = self.limits.block, self.limits.sinks
        pieces = []
        for row, count in self.ranges:
            piece = to_pack.take(row, sinks, sinks + count * size)
            pieces.append(piece if transform.is_nothing else transform.of_row(row).apply(piece, self.begins[row or 0]))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)


class Plan(NamedTuple):
    """A packing, found out before anything changes.

    Attributes:
        rows: the columns then.
        due: the blocks that are packed.
        blocks: how many of each row.
        left: exact tokens of each row then.
        late: late sinks of each row then.
        sides: exact keys and values, those of the call included.
        params, is_final: of keys and of values, see :class:`kvbits.layer.held.Layer`.
        transforms: what is done to the blocks, and to those before them.
    """

    rows: Rows
    due: DueBlocks
    blocks: list[int]
    left: list[int]
    late: Late
    sides: tuple[ToPack, ToPack]
    params: tuple[Params, Params]
    is_final: tuple[bool, bool]
    transforms: Pair
