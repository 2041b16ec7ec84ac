"""``LayerCache``, the cache of one layer: sinks, packed blocks, and the exact recent tokens.

Append only. New tokens join the exact buffer ``[sinks | late | recent]``; once ``residual + block`` tokens are recent,
the oldest ``block`` of them are encoded, once and for all. Late sinks (:mod:`kvbits.store.late_sinks`) that are found
among those stay exact instead, and recent tokens have the room that no late sink has taken yet. A decode step therefore
copies its own token, plus a bounded share of one block. Only ``crop`` into a packed block decodes it, and puts its
tokens back among the recent ones.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch

from kvbits.attend import KVView
from kvbits.encode import Unsound, encode
from kvbits.layer.first_fit import fit_first, fitted_in
from kvbits.layer.held import Layer, outlasting
from kvbits.layer.packing import DueBlocks, Encoded, Plan, ToPack
from kvbits.store.blocks import BlockStore
from kvbits.store.crop import Crop, crop_row, whole_tokens
from kvbits.store.exact import ExactTokens, refuse_unlike
from kvbits.store.late_sinks import Late, take_out
from kvbits.store.record import Record
from kvbits.store.rows import Rows
from kvbits.transform import NOTHING, Transform
from kvbits.types import Packed, Params

ENCODE_BLOCKS = 16
"""Blocks encoded at a time, so that packing a long prompt needs little memory beside it."""


class Before(NamedTuple):
    """A layer as it was before an append; see :meth:`LayerCache.undo`."""

    rows: Rows
    keys: torch.Tensor | None
    values: torch.Tensor | None
    held: list[int]
    counts: tuple[int, ...]
    params: tuple[Params, Params]
    is_final: tuple[bool, bool]
    lost: tuple[int, ...]
    late: Late


class LayerCache(Layer):
    """Keys and values of one layer under one scheme (without overrides). Takes what :class:`Layer` takes."""

    # -- growing ---------------------------------------------------------------------------------------------------

    @outlasting
    def append(self, keys: torch.Tensor, values: torch.Tensor, rows: Rows | None = None) -> KVView:
        """Add the columns of one call.

        Args:
            keys, values: ``[B, H, q, Dk]`` and ``[B, H, q, Dv]``, each fp32, bf16, fp16 or fp64.
            rows: the columns after this call; default: ``q`` more, all of them text.

        Returns:
            What attention in this call sees: the new tokens exact, whatever is packed right after.

        Raises:
            ValueError: if shape, dtype or device differ from what the cache holds, or a value to be packed is not
                finite. The cache is then as it was.
        """
        keys, values = keys.detach(), values.detach()
        refuse_unlike(self.name, keys, values, self.buffers)
        batch, _, added, _ = keys.shape
        rows = self.rows.extend(batch, added) if rows is None else rows
        assert rows.columns == self.columns + added and rows.batch == batch
        fresh = self.buffers is None
        try:
            if fresh:
                self._allocate(keys, values)
            return self._append(keys, values, rows)
        except Exception:
            if fresh:
                self.reset()  # so that another batch may follow
            raise

    def _append(self, keys: torch.Tensor, values: torch.Tensor, rows: Rows) -> KVView:
        assert self.buffers is not None
        old = self.rows.counts or (0,) * rows.batch
        total = [held + new - before for held, new, before in zip(self.held, rows.counts, old, strict=True)]
        offset = 0 if self.window is None else max(0, self.columns - self.window + 1)
        if self.limits.packable(max(total, default=0)) == 0:
            self.buffers.append(keys, values, total, rows, self.limits)
            self.rows = rows
            return self.view(offset)
        view = self._append_and_pack(keys, values, rows, total, offset)
        self._slide()
        return view

    def step(self, keys: torch.Tensor, values: torch.Tensor, rows: Rows) -> bool:
        """The short way of most decode steps: append where nothing has to be packed, moved or refused.

        A step of a small model is so short that the steps of :meth:`append` count.

        Returns:
            False, and nothing has changed, where only :meth:`append` will do.
        """
        buffers = self.buffers
        if buffers is None or rows.valid is not None or self.window is not None or not buffers.even:
            return False
        if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            return False
        added = keys.shape[2]
        if self.limits.packable(buffers.held[0] + added) or rows.columns != self.rows.columns + added:
            return False
        if not buffers.step(keys, values):
            return False
        self.rows = rows
        return True

    def _append_and_pack(
        self, keys: torch.Tensor, values: torch.Tensor, rows: Rows, total: list[int], offset: int
    ) -> KVView:
        """Append where blocks are due. An error leaves the layer as it was: nothing changes before the last step.

        Args:
            keys, values, rows: as :meth:`append` takes them.
            total: exact tokens of each row, the new ones included.
            offset: the first column that the view shows.
        """
        assert self.store is not None
        plan = self._plan(keys, values, rows, total)
        pieces = self._encode(plan)
        self.store.make_room(pieces)
        rest = [side.rest(total, plan.left, self.limits) for side in plan.sides]
        view = self._view(plan.sides[0].tokens, plan.sides[1].tokens, total, rows, offset)
        self._commit(plan, pieces, rest)
        return view

    def _plan(self, keys: torch.Tensor, values: torch.Tensor, rows: Rows, total: list[int]) -> Plan:
        """Which tokens are packed, what is fitted to them first, and how they are transformed."""
        assert self.buffers is not None
        buffers, block = self.buffers, self.scheme.block
        blocks = [self.limits.packable(tokens) for tokens in total]
        sides = buffers.joined(keys, values, total, rows)
        packed, count = ([n * block for n in ns] for ns in (self.packed_blocks, blocks))
        late, order = take_out(sides[0], buffers.late, total, packed, count, self.limits)
        to_pack = ToPack(sides[0], order), ToPack(sides[1], order)
        # Where all rows hold the same they are encoded together, else each by itself: the bits are the same.
        together = rows.valid is None and buffers.even
        due = DueBlocks([(None, blocks[0])] if together else list(enumerate(blocks)), self.packed_blocks, self.limits)
        most = max(old + new for old, new in zip(self.packed_blocks, blocks, strict=True))
        made = self._transforms.make(self.key_params, rows, self.dropped, most, *sides)
        key_params, key_final = self._fit(0, due, to_pack[0], made.key)
        value_params, value_final = self._fit(1, due, to_pack[1], made.value)
        return Plan(
            rows, due, blocks, [tokens - n for tokens, n in zip(total, count, strict=True)], late, to_pack,
            (key_params, value_params), (key_final, value_final), made._replace(key=fitted_in(made.key, key_params)),
        )  # fmt: skip

    def _fit(self, side: int, due: DueBlocks, to_pack: ToPack, transform: Transform) -> tuple[Params, bool]:
        """Params of one side once ``due`` is packed, and whether they are final."""
        params = (self.key_params, self.value_params)[side]
        if self.is_final[side]:
            return params, True
        samples = partial(due.samples, to_pack)
        return fit_first(self.scheme, side, self.calibrated[side], params.get("mean"), samples, transform)

    def _encode(self, plan: Plan) -> Encoded:
        """The due blocks in few bits, as the store takes them."""
        pieces: Encoded = []
        for row, count in plan.due.ranges:
            if not count:
                continue
            keys, values = (
                self._encode_side(side, plan.sides[side], row, range(count), plan.params[side], transform)
                for side, transform in enumerate((plan.transforms.key, plan.transforms.value))
            )
            pieces += [(row, *pair) for pair in zip(keys, values, strict=True)]
        return pieces

    def _encode_side(
        self, side: int, to_pack: ToPack, row: int | None, blocks: range, params: Params, transform: Transform
    ) -> list[Packed]:
        """Encode some of the ``blocks`` of one side that a row packs now, counted from 0."""
        block, sinks = self.scheme.block, self.sinks
        codec, what = ((self.scheme.key, "keys"), (self.scheme.value, "values"))[side]
        transform = transform.of_row(row)
        packed = []
        for first in range(blocks.start, blocks.stop, ENCODE_BLOCKS):
            last = min(blocks.stop, first + ENCODE_BLOCKS)
            piece = to_pack.take(row, sinks + first * block, sinks + last * block).unflatten(2, (-1, block))
            number, still = self.packed_blocks[row or 0] + first, transform
            looks = codec.saturates and what not in self.warned
            if looks:
                piece, still = transform.apply_to_blocks(piece, number), NOTHING
            try:
                packed.append(encode(codec, piece, params, still, number))
            except Unsound as found:
                raise self._unsound(side, found) from None
            if looks and (warning := codec.saturation(piece, params)):
                self.warned.add(what)
                warnings.warn(f"{self.name}, {what}: {warning}", RuntimeWarning, stacklevel=2)
        return packed

    def _commit(self, plan: Plan, pieces: Encoded, rest: list[torch.Tensor]) -> None:
        """Take the new state. The store takes all pieces or, where that fails, none; the rest are assignments."""
        assert self.buffers is not None and self.store is not None
        self.store.append(pieces)
        self.rows, self.is_final = plan.rows, plan.is_final
        self.key_params, self.value_params = plan.params
        self._transforms.keep(plan.transforms)
        self.buffers.keys, self.buffers.values = rest
        self.buffers.hold(plan.left, plan.late)

    def _unsound(self, side: int, found: Unsound) -> ValueError:
        codec, what = ((self.scheme.key, "keys"), (self.scheme.value, "values"))[side]
        return ValueError(
            f"{self.name}: {found.count} of the {what} to be packed are NaN, infinite or above {found.limit:g}, which "
            f"{codec} blocks cannot hold without spoiling their neighbours; the model is broken at this point (try "
            "float32 or bfloat16 instead of float16), or use the scheme 'exact'"
        )

    def _slide(self) -> None:
        """Drop blocks that no later query can see."""
        if self.window is None or self.store is None or not self.store.longest:
            return
        # One block more than the window needs stays, so that speculative decoding can step back.
        seen_from = [tokens - (self.window - 1) - self.scheme.block - self.dropped for tokens in self.rows.counts]
        blocks = [
            min(max(0, first) // self.scheme.block, held)
            for first, held in zip(seen_from, self.store.counts, strict=True)
        ]
        common = min(blocks)
        if common:
            self.store.drop_first(common)
            self.dropped += common * self.scheme.block
        # All rows count from the same dropped tokens on. A row that is ahead of another (of one that is all padding,
        # say) leaves its blocks behind by itself.
        for row, count in enumerate(blocks):
            self.store.blank_first(row, count - common)
        self.store.trim()

    # -- changing --------------------------------------------------------------------------------------------------

    def before(self) -> Before:
        """What :meth:`undo` needs to take back the next :meth:`append`."""
        rows, params, is_final, buffers = self.rows, (self.key_params, self.value_params), self.is_final, self.buffers
        if buffers is None:
            return Before(rows, None, None, [], (), params, is_final, (), ())
        counts, lost = tuple(self.packed_blocks), tuple(self._lost())
        return Before(rows, buffers.keys, buffers.values, buffers.held, counts, params, is_final, lost, buffers.late)

    @outlasting
    def undo(self, before: Before) -> bool:
        """Take back the last append, bit for bit. False, and nothing changes, if a window has dropped blocks since."""
        if before.keys is None or before.values is None:
            self.reset()
            return True
        assert self.store is not None
        if tuple(self._lost()) != before.lost:
            return False
        (self.key_params, self.value_params), self.is_final = before.params, before.is_final
        if tuple(self.packed_blocks) == before.counts:
            self.crop(self.columns - before.rows.columns, before.rows)
            return True
        # The buffers from before a block was packed are as they were: what stays exact went into new ones.
        self._truncate(before.counts)
        self.rows, self.buffers = before.rows, ExactTokens(before.keys, before.values, before.held, before.late)
        return True

    @outlasting
    def crop(self, columns: int, rows: Rows | None = None) -> None:
        """Take back the last ``columns`` columns.

        Raises:
            ValueError: if there are fewer, or if a sliding window has already dropped what would be needed.
        """
        if not 0 <= columns <= self.columns:
            raise ValueError(f"{self.name}: cannot take back {columns} of {self.columns} columns")
        if columns == 0 or self.buffers is None or self.store is None:
            return
        rows = self.rows.crop(columns) if rows is None else rows
        gone = [old - new for old, new in zip(self.rows.counts, rows.counts, strict=True)]
        if self.window is not None and any(
            lost and new - self.window + 1 < lost for new, lost in zip(rows.counts, self._lost(), strict=True)
        ):
            raise ValueError(
                f"{self.name}: cannot take back {columns} columns, the sliding window of {self.window} tokens has "
                f"dropped what the rest would see; at most {self.scheme.block} can be taken back"
            )
        crops = [self._crop_of(row, tokens, rows.counts[row]) for row, tokens in enumerate(gone)]
        if [crop.blocks for crop in crops] == self.packed_blocks:
            self.buffers.crop(crops, self.limits)
        else:
            self.buffers.crop_further(crops, self.limits, partial(self._decoded, self.view(), crops))
            self._truncate([crop.blocks for crop in crops])
            self.store.trim()
        self.rows = rows

    def _crop_of(self, row: int, gone: int, left: int) -> Crop:
        """What is left of a row when it loses its last ``gone`` own tokens and keeps the first ``left``."""
        return crop_row(gone, left, self.held[row], self.packed_blocks[row], self.late[row], self.limits)

    def whole(self, columns: int) -> int:
        """How many of the first ``columns`` columns a crop may keep so that no block has to be decoded.

        Of a single row without padding. A window, once it has left anything behind, allows all columns or none.
        """
        if columns >= self.columns or self.store is None:
            return min(columns, self.columns)
        if self.window is not None and self.columns >= self.window:
            return 0
        return whole_tokens(columns, self.packed_blocks[0], self.late[0], self.limits)

    def _decoded(self, view: KVView, crops: Sequence[Crop], side: int, row: int) -> torch.Tensor:
        """The block that the crop of a row goes through, as attention sees it: ``[H, block, D]``.

        Only that one block of a row is ever decoded, however far back a crop goes.
        """
        first = crops[row].blocks
        codec, params, transform = (
            (self.scheme.key, self.key_params, view.key_transform),
            (self.scheme.value, self.value_params, view.value_transform),
        )[side]
        packed = {name: part[row] for name, part in view.blocks.read(first, first + 1)[side].items()}
        return transform.of_row(row).undo(codec.decode(packed, params).flatten(1, 2)[None], first)[0]

    def _truncate(self, counts: Sequence[int]) -> None:
        """Keep the first ``counts[b]`` packed blocks of row ``b``."""
        assert self.store is not None
        self.store.truncate(counts)

    def fork(self) -> LayerCache:
        """Another layer that holds the same and goes on by itself. Packed blocks are shared, exact tokens copied."""
        twin = self._empty()
        twin.key_params, twin.value_params, twin.is_final = self.key_params, self.value_params, self.is_final
        twin.warned = set(self.warned)
        if self.buffers is not None and self.store is not None:
            held = self.buffers
            exact = held.keys[:, :, : held.longest], held.values[:, :, : held.longest]
            twin.restore(self.rows, *exact, held.held, held.late, self.store.fork(), self.dropped)
        return twin

    def _empty(self) -> LayerCache:
        """Another one that holds nothing."""
        return LayerCache(self.scheme, self.window, self.name, self.rotary, self.calibrated)

    def _allocate(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        batch, heads, _, channels = keys.shape
        scheme = self.scheme
        record = Record.of(scheme.key, scheme.value, scheme.block, channels, values.shape[3], keys.dtype, values.dtype)
        self.store = BlockStore(record, heads, batch, keys.device)
        self.buffers = ExactTokens.empty(keys, values)
