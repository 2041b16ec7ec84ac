"""``KVView``: one layer's keys and values as attention sees them, at one moment. Nothing in it changes until a crop."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch

from kvbits.schemes.scheme import Scheme
from kvbits.store.blocks import Blocks
from kvbits.store.derived import Kept
from kvbits.store.late_sinks import Late, listed, not_late, own_numbers
from kvbits.store.rows import Rows
from kvbits.transform import NOTHING, Transform
from kvbits.types import Params


class Shard(Protocol):
    """How attention over the packed blocks of one rank becomes attention over those of all ranks."""

    def join(self, call: Any, partial: Any) -> torch.Tensor:
        """Attention over the whole context, ``[B, Hq, q, Dv]`` in the query's dtype.

        Args:
            call: a :class:`kvbits.attend.Call` over this rank's shard; Any, for a call is made of a view.
            partial: a :data:`kvbits.attend.call.Partial`, which runs a call over one piece of the context.
        """
        ...


@dataclass(frozen=True)
class KVView:
    """Sinks, packed history and recent tokens of one layer, the tokens of this call included.

    A row's own tokens ``0, 1, 2, ...`` are: ``sinks`` exact ones, then its packed blocks, then the rest exact. Late
    sinks are the exception: stored first among the rest, they come from between the packed ones.

    Attributes:
        scheme: the layer's scheme.
        keys, values: exact tokens ``[B, H, L, Dk]`` and ``[B, H, L, Dv]``: first the sinks, then the late ones, then
            the most recent tokens; zero beyond a row's own count.
        held: exact tokens of each row.
        sinks: how many of them come before the packed ones.
        blocks: the packed tokens.
        key_params, value_params: what the codecs fitted for this layer.
        rows: which columns hold text.
        dropped: own tokens before the first packed one that a sliding window has dropped.
        offset: the first column that the layer may still see; masks begin there.
        key_transform, value_transform: what was done to packed keys and values before they were encoded.
        late: the late sinks of each row; () where no row has any.
        shard: how these packed blocks join those of other ranks; None where all blocks are here. Kernels then read
            :meth:`packed_only` and :meth:`exact_only`, since the tokens of the whole context cannot be numbered.
    """

    scheme: Scheme
    keys: torch.Tensor
    values: torch.Tensor
    held: tuple[int, ...]
    sinks: int
    blocks: Blocks
    key_params: Params
    value_params: Params
    rows: Rows
    dropped: int = 0
    offset: int = 0
    key_transform: Transform = NOTHING
    value_transform: Transform = NOTHING
    late: Late = ()
    shard: Shard | None = None

    def exact_only(self, newest: int = 0) -> KVView:
        """The same without its packed blocks, and without the ``newest`` tokens. Of unpadded rows."""
        held = self.held[0] - newest
        exact = replace(
            self, keys=self.keys[:, :, :held], values=self.values[:, :, :held], held=(held,) * len(self.held),
            blocks=replace(self.blocks, counts=(0,) * len(self.held)),
        )  # fmt: skip
        rows = self.rows.crop(newest) if newest else self.rows
        return replace(exact, rows=rows, dropped=rows.columns - held, shard=None)._of_known_blocks()

    def packed_only(self) -> KVView:
        """The same without its exact tokens, for queries that are newer than all of its blocks. Of unpadded rows."""
        packed = replace(self, keys=self.keys[:, :, :0], values=self.values[:, :, :0], held=(0,) * len(self.held))
        return replace(packed, late=(), shard=None)._of_known_blocks()

    def _of_known_blocks(self) -> KVView:
        """The same, without transforms where nothing is packed that they could be of."""
        if self.blocks.longest:
            return self
        return replace(self, key_transform=NOTHING, value_transform=NOTHING)

    @property
    def even(self) -> bool:
        """Whether all rows hold the same number of exact and of packed tokens."""
        return len(set(self.held)) <= 1 and len(set(self.blocks.counts)) <= 1

    @property
    def kv_columns(self) -> int:
        """Columns that a mask for this view has."""
        return self.rows.columns - self.offset

    def packed_tokens(self, first: int, last: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Own token numbers of blocks ``first .. last - 1``, and which rows really have them.

        Returns:
            int64 ``[n * block]`` (``[B, n * block]`` where there are late sinks) and bool ``[B, n * block]``.
        """
        block = self.blocks.record.tokens
        token = torch.arange(first * block, last * block, device=device)
        counts = torch.tensor(self.blocks.counts, device=device)[:, None] * block
        live = token < counts
        return (not_late(self.late, self.sinks, token) if self.late else token + self.sinks + self.dropped), live

    def exact_tokens(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Own token numbers of the exact slots, and which rows really have them: int64 and bool ``[B, L]``."""
        slot = torch.arange(self.keys.shape[2], device=device)
        packed = torch.tensor(self.blocks.counts, device=device)[:, None] * self.blocks.record.tokens + self.dropped
        token = torch.where(slot < self.sinks, slot, slot + packed)
        if self.late:
            found = slot - self.sinks
            few = torch.tensor([len(row) for row in self.late], device=device)[:, None]
            token = torch.where((found >= 0) & (found < few), listed(self.late, found.expand_as(token)), token)
        return token, slot < torch.tensor(self.held, device=device)[:, None]

    def columns_of(self, token: torch.Tensor) -> torch.Tensor:
        """Columns of own tokens ``[B, n]``; meaningless, but in range, for tokens that a row does not have."""
        column_of = self.rows.column_of
        if column_of is None:
            return token
        column_of = column_of.to(token.device)
        return column_of.gather(1, token.clamp(max=column_of.shape[1] - 1)).clamp(min=0)

    @cached_property
    def column_of(self) -> torch.Tensor | None:
        """int64 ``[B, most tokens of a row]``: columns of each row's tokens in stored order, -1 beyond its last.

        Stored order is sinks, packed tokens, late sinks, the rest. None where that is the order of the columns.
        """
        if not self.late:
            return self.rows.column_of
        column_of, own = self.rows.column_of, self._stored_order()
        if column_of is None:
            return own.to(torch.int64, memory_format=torch.contiguous_format)
        return column_of.gather(1, own.to(column_of.device, torch.int64))

    def _stored_order(self) -> torch.Tensor:
        """Own numbers in stored order, int32 ``[B, most tokens of a row]``.

        Made once for a layer until it packs again: what later steps add stands where it does in the text.
        """
        tokens, block = max(self.rows.counts), self.blocks.record.tokens
        state, kept = (self.late, self.sinks, self.blocks.counts), self.blocks.derived.stored_order
        if kept is None or kept.source != state or kept.made.shape[1] < tokens:
            packed = [count * block for count in self.blocks.counts]
            own = own_numbers(self.late, self.sinks, packed, tokens + block, self.keys.device)
            self.blocks.derived.stored_order = kept = Kept(state, own.int())
        order: torch.Tensor = kept.made[:, :tokens]
        return order
