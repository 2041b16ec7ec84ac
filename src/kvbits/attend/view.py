"""``KVView``: one layer's keys and values as attention sees them, at one moment. Nothing in it changes until a crop."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import torch

from kvbits.attend import native
from kvbits.numerics.cast import narrow
from kvbits.schemes.scheme import Scheme
from kvbits.store.blocks import Blocks
from kvbits.store.late_sinks import Late, listed, not_late, own_numbers
from kvbits.store.rows import Rows
from kvbits.transform import Transform
from kvbits.types import Params

if TYPE_CHECKING:  # a call is made of a view
    from kvbits.attend.call import Call, Partial

STORED_ORDER = "stored order"
"""Where a layer's memo has the order of its tokens, if there are late sinks."""

_NO_TRANSFORM = Transform()


class Share(Protocol):
    """The others that hold the rest of a layer's context."""

    def join(self, call: Call, partial: Partial) -> torch.Tensor:
        """Attention over the whole context, ``[B, Hq, q, Dv]`` in the query's dtype.

        Args:
            call: over what is held here.
            partial: runs a call over one piece of the context; see :class:`kvbits.attend.Kernel`.
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
        dropped: own tokens before the first packed one that a sliding window has left behind.
        offset: the first column that the layer may still see; masks begin there.
        key_transform, value_transform: what was done to packed keys and values before they were encoded.
        late: the late sinks of each row; () where no row has any.
        share: whoever holds the other packed blocks; None where all of them are here. Kernels then read
            :meth:`packed_only` and :meth:`exact_only`, since the tokens of the whole cannot be numbered.
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
    key_transform: Transform = _NO_TRANSFORM
    value_transform: Transform = _NO_TRANSFORM
    late: Late = ()
    share: Share | None = None

    def exact_only(self, newest: int = 0) -> KVView:
        """The same without its packed blocks, and without the ``newest`` tokens. Of unpadded rows."""
        held = self.held[0] - newest
        exact = replace(
            self, keys=self.keys[:, :, :held], values=self.values[:, :, :held], held=(held,) * len(self.held),
            blocks=replace(self.blocks, counts=(0,) * len(self.held)),
        )  # fmt: skip
        rows = self.rows.crop(newest) if newest else self.rows
        return replace(exact, rows=rows, dropped=rows.columns - held, share=None)._of_known_blocks()

    def packed_only(self) -> KVView:
        """The same without its exact tokens, for queries that are newer than all of its blocks. Of unpadded rows."""
        packed = replace(self, keys=self.keys[:, :, :0], values=self.values[:, :, :0], held=(0,) * len(self.held))
        return replace(packed, late=(), share=None)._of_known_blocks()

    def _of_known_blocks(self) -> KVView:
        """The same, without transforms where nothing is packed that they could be of."""
        if self.blocks.longest:
            return self
        return replace(self, key_transform=_NO_TRANSFORM, value_transform=_NO_TRANSFORM)

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

    def dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All columns from ``offset`` on, decoded: ``[B, H, columns, Dk]`` and ``[B, H, columns, Dv]``.

        Padding, and what a sliding window has left behind, is zero. Where nothing is packed and nothing padded this
        is the exact buffer itself, uncopied.
        """
        if self.share is not None:
            raise NotImplementedError(
                "this layer's keys and values are spread over several ranks and cannot be decoded in one place: "
                "leave out what needs that (output_attentions, dropout), and take a model whose layers kvbits.explain "
                "does not call decoded"
            )
        if self.blocks.longest == 0 and self.rows.valid is None and self.dropped == 0:
            return self.keys[:, :, self.offset :], self.values[:, :, self.offset :]
        sides = [(self.keys, self.keys[:, :, :0]), (self.values, self.values[:, :, :0])]
        if self.blocks.longest:
            keys, values = self._decode_all()
            sides = [(self.keys, narrow(keys, self.keys.dtype)), (self.values, narrow(values, self.values.dtype))]
        keys, values = (self._in_columns(exact, decoded) for exact, decoded in sides)
        return keys, values

    def _decode_all(self) -> tuple[torch.Tensor, torch.Tensor]:
        transformed = not (self.key_transform.is_nothing and self.value_transform.is_nothing)
        if transformed or native.why_not_view(self):
            return self.decode(0, self.blocks.longest)
        return native.decode(self)

    def decode(self, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Blocks ``first .. last - 1`` of all rows decoded: ``[B, H, n * block, Dk]`` and ``[B, H, n * block, Dv]``."""
        keys, values = self.blocks.read(first, last)
        return (
            self.key_transform.undo(self.scheme.key.decode(keys, self.key_params).flatten(2, 3), first),
            self.value_transform.undo(self.scheme.value.decode(values, self.value_params).flatten(2, 3), first),
        )

    def decode_into(self, keys: torch.Tensor, values: torch.Tensor, first: int, last: int) -> None:
        """As :meth:`decode`, into float ``keys`` and ``values``."""
        packed_keys, packed_values = self.blocks.read(first, last)
        block = self.blocks.record.tokens
        for out, packed, codec, params, transform in (
            (keys, packed_keys, self.scheme.key, self.key_params, self.key_transform),
            (values, packed_values, self.scheme.value, self.value_params, self.value_transform),
        ):
            codec.decode_into(out.unflatten(2, (-1, block)), packed, params)
            if not transform.is_nothing:
                out.copy_(transform.undo(out, first))

    def _in_columns(self, exact: torch.Tensor, decoded: torch.Tensor) -> torch.Tensor:
        """Own tokens ``[B, H, L, D]`` and ``[B, H, N * block, D]`` put where the model's columns are."""
        if self.rows.valid is None and self.dropped <= self.offset and not self.late and self.even:
            # Own tokens are columns: sinks, packed, recent.
            skip = self.offset - self.dropped
            return torch.cat([exact[:, :, : self.sinks], decoded, exact[:, :, self.sinks :]], dim=2)[:, :, skip:]
        batch, heads, _, channels = exact.shape
        device, columns = exact.device, self.kv_columns
        pieces = ((exact, *self.exact_tokens(device)), (decoded, *self.packed_tokens(0, self.blocks.longest, device)))
        out = exact.new_zeros(batch, columns + 1, heads, channels)  # the last column is thrown away
        for x, token, live in pieces:
            column = self.columns_of(token.expand(batch, -1)) - self.offset
            column = torch.where(live & (column >= 0), column, columns)[:, :, None, None]
            out.scatter_(1, column.expand(-1, -1, heads, channels), x.transpose(1, 2))
        return out[:, :columns].transpose(1, 2).contiguous()

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
        memo, tokens, block = self.blocks.record.memo, max(self.rows.counts), self.blocks.record.tokens
        state = self.late, self.sinks, self.blocks.counts
        held = memo.get(STORED_ORDER)
        if held is None or held[0] != state or held[1].shape[1] < tokens:
            packed = [count * block for count in self.blocks.counts]
            own = own_numbers(self.late, self.sinks, packed, tokens + block, self.keys.device)
            memo[STORED_ORDER] = held = state, own.int()
        order: torch.Tensor = held[1][:, :tokens]
        return order
