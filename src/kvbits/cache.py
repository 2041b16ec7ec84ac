"""Floor 4: ``LayerCache``, the cache of one layer: sinks, packed blocks, and the exact recent tokens.

Append only. New tokens join the exact buffer ``[sinks | late | recent]``; once ``residual + block`` tokens are recent,
the oldest ``block`` of them are encoded, once and for all. Late sinks (:mod:`kvbits.late`) that are found among those
stay exact instead, and recent tokens have the room that no late sink has taken yet. A decode step therefore copies its
own token, plus a bounded share of one block. Only ``crop`` into a packed block decodes it, and puts its tokens back
among the recent ones.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias, TypeVar, cast

import torch

from kvbits.attend import NOTHING, KVView, Transform
from kvbits.attend.view import STORED_ORDER
from kvbits.encode import Unsound, encode
from kvbits.growth import Limits
from kvbits.late import Late, choose, not_late
from kvbits.numerics import hadamard
from kvbits.numerics.cast import narrow
from kvbits.numerics.modes import without_autocast
from kvbits.rotary import Rotary
from kvbits.rows import Rows
from kvbits.scheme import Scheme
from kvbits.store import BlockStore, Record
from kvbits.types import Packed, Params

ENCODE_BLOCKS = 16
"""Blocks encoded at a time, so that packing a long prompt needs little memory beside it."""

_Ranges: TypeAlias = Sequence[tuple[int | None, int]]
"""Rows (None: all of them) and how many blocks each packs."""

Encoded: TypeAlias = Sequence[tuple[int | None, list[Packed], list[Packed]]]
"""Rows (None: all of them), and the blocks of keys and of values that each packs."""

_Method = TypeVar("_Method", bound=Callable[..., object])


def _outlasting(method: _Method) -> _Method:
    """Run ``method`` outside autograd, inference mode and autocast: a cache changes later, in whatever mode that is.

    A tensor made under ``torch.inference_mode()`` could not be written to by a step under ``torch.no_grad()``.
    """

    @functools.wraps(method)
    def run(self: LayerCache, *args: object, **kwargs: object) -> object:
        with torch.inference_mode(False), torch.no_grad(), without_autocast():
            self._adopt()
            return method(self, *args, **kwargs)

    return cast(_Method, run)


class Before(NamedTuple):
    """A layer as it was before an append; see :meth:`LayerCache.undo`."""

    rows: Rows
    keys: torch.Tensor | None
    values: torch.Tensor | None
    held: list[int]
    counts: tuple[int, ...]
    params: tuple[Params, Params]
    fitted: tuple[bool, bool]
    lost: tuple[int, ...]
    late: Late


class _Cut(NamedTuple):
    """What a crop leaves of one row.

    Attributes:
        blocks: whole ones that stay packed.
        border: tokens of the next block that are exact from now on.
        held: exact tokens.
        late: late sinks.
        back: late sinks that become recent tokens, since no packed token is left behind them.
    """

    blocks: int
    border: int
    held: int
    late: tuple[int, ...]
    back: tuple[int, ...] = ()


class LayerCache:
    """Keys and values of one layer under one scheme (without overrides).

    Args:
        scheme: how to store them; see :meth:`Scheme.for_layer`.
        window: tokens that the layer can see back to, its own included, for sliding windows; older blocks are
            dropped and there are no sinks, neither first nor late ones.
        name: for error messages, such as ``layer 3``.
        rotary: how the keys are rotated, for schemes that take the rotary embedding off; None where they are not.
        learned: params of keys and values from calibration, a key mean among them where the scheme is centred. What
            is not among them is taken from the first tokens that are packed.
    """

    def __init__(
        self,
        scheme: Scheme,
        window: int | None = None,
        name: str = "layer",
        rotary: Rotary | None = None,
        learned: tuple[Params, Params] = ({}, {}),
    ) -> None:
        if scheme.overrides:
            raise ValueError(f"{scheme} has overrides: give a layer its own scheme, Scheme.for_layer(index, count)")
        if window is not None and not scheme.packs:
            scheme = replace(scheme, residual=window)  # what is packed, here as it is, can be left behind
        self.scheme, self.window, self.name, self.learned = scheme, window, name, learned
        self.rotary = rotary if scheme.pre_rope or scheme.centred else None
        self.sinks, self.late_sinks = (scheme.sinks, scheme.late_sinks) if window is None else (0, 0)
        self.limits = Limits(self.sinks, self.late_sinks, scheme.residual, scheme.block)
        self.reset()

    def reset(self) -> None:
        """Forget everything, also the shape, the dtype and what static codecs learned."""
        self.rows = Rows()
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None
        self.held: list[int] = []
        self.even = True  # all rows hold the same, unless they are padded
        self.late: Late = ()
        self.store: BlockStore | None = None
        self.key_params, self.value_params = self.learned
        self.fitted = (False, False)
        self._transformed: tuple[Transform, Transform, object] | None = None
        self.warned: set[str] = set()
        self.dropped = 0

    @property
    def columns(self) -> int:
        """Columns seen so far, padding included."""
        return self.rows.columns

    @property
    def packed_blocks(self) -> list[int]:
        """Blocks that have been packed of each row, wherever they are."""
        return [] if self.store is None else self.store.counts

    # -- growing ---------------------------------------------------------------------------------------------------

    @_outlasting
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
        self._check(keys, values)
        batch, _, added, _ = keys.shape
        rows = self.rows.extend(batch, added) if rows is None else rows
        assert rows.columns == self.columns + added and rows.batch == batch
        fresh = self.keys is None
        if fresh:
            self._allocate(keys, values)
        old = self.rows.counts or (0,) * batch
        total = [held + new - before for held, new, before in zip(self.held, rows.counts, old, strict=True)]
        offset = 0 if self.window is None else max(0, self.columns - self.window + 1)
        if self.limits.packable(max(total, default=0)) == 0:
            self._reserve(max(total, default=0))
            assert self.keys is not None and self.values is not None
            for buffer, new in ((self.keys, keys), (self.values, values)):
                _place(buffer, new, self.held, total, rows)
            self.rows, self.held = rows, total
            return self.view(offset)
        try:
            view = self._append_and_pack(keys, values, rows, total, offset)
        except Exception:
            if fresh:
                self.reset()  # so that another batch may follow
            raise
        self._slide()
        return view

    def step(self, keys: torch.Tensor, values: torch.Tensor, rows: Rows) -> bool:
        """The short way of most decode steps: append where nothing has to be packed, moved or refused.

        A step of a small model is so short that the steps of :meth:`append` count.

        Returns:
            False, and nothing has changed, where only :meth:`append` will do.
        """
        kept, other = self.keys, self.values
        if kept is None or other is None or rows.valid is not None or self.window is not None or not self.even:
            return False
        if torch.is_grad_enabled() or torch.is_inference_mode_enabled() or kept.is_inference():
            return False
        held, added = self.held[0], keys.shape[2]
        total = held + added
        if total > kept.shape[2] or values.shape[2] != added or not (_alike(keys, kept) and _alike(values, other)):
            return False
        if self.limits.packable(total) or rows.columns != self.columns + added:
            return False
        kept.narrow(2, held, added).copy_(keys)
        other.narrow(2, held, added).copy_(values)
        self.rows, self.held = rows, [total] * len(self.held)
        return True

    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The exact buffers, uncopied, where nothing is packed or padded: ``[B, H, T, D]`` each."""
        assert self.keys is not None and self.values is not None
        held = self.held[0]
        return self.keys.narrow(2, 0, held), self.values.narrow(2, 0, held)

    def _append_and_pack(
        self, keys: torch.Tensor, values: torch.Tensor, rows: Rows, total: list[int], offset: int
    ) -> KVView:
        """The path where blocks fill: encode first, then take the new state, so that an error changes nothing."""
        assert self.keys is not None and self.values is not None and self.store is not None
        longest, even = max(total), rows.valid is None and self.even
        work = []
        for buffer, new in ((self.keys, keys), (self.values, values)):
            if even:
                held = buffer[:, :, : self.held[0]]
                work.append(torch.cat([held, new], dim=2) if self.held[0] else new)
            else:
                space = buffer.new_zeros(*buffer.shape[:2], longest, buffer.shape[3])
                space[:, :, : max(self.held)] = buffer[:, :, : max(self.held)]
                _place(space, new, self.held, total, rows)
                work.append(space)
        blocks = [self.limits.packable(tokens) for tokens in total]
        late, order = self._find_late(work[0], total, blocks)
        # Where all rows hold the same they are encoded together, else each by itself: the bits are the same.
        ranges = [(None, blocks[0])] if even else list(enumerate(blocks))
        most = max(old + new for old, new in zip(self.packed_blocks, blocks, strict=True))
        params, fitted = [self.key_params, self.value_params], list(self.fitted)
        for side in range(2):
            if not fitted[side]:
                params[side], fitted[side] = self._fit(side, Work(work[side], order), ranges, rows, most)
        transforms = self._transforms(params[0], rows, most)
        encoded = [
            (row, self._encode(0, Work(work[0], order), row, range(count), params[0], transforms[0]),
             self._encode(1, Work(work[1], order), row, range(count), params[1], transforms[1]))
            for row, count in ranges if count
        ]  # fmt: skip
        self._make_room(encoded, most)
        left = [tokens - count * self.scheme.block for tokens, count in zip(total, blocks, strict=True)]
        rest = [self._rest(Work(x, order), total, left) for x in work]
        # Nothing below allocates or can fail.
        self.rows, self.held, self.fitted = rows, total, (fitted[0], fitted[1])
        self.key_params, self.value_params = params
        view = self._view(work[0], work[1], offset)
        self._keep(encoded, blocks)
        self.held, (self.keys, self.values), self.late = left, rest, late
        self.even = len(set(left)) == 1
        return view

    def _make_room(self, encoded: Encoded, most: int) -> None:
        """Make room for blocks, so that :meth:`_keep` cannot fail; ``most`` are those of the longest row then."""
        assert self.store is not None
        shapes = [next(iter(piece.values())).shape for _, keys, _ in encoded for piece in keys]  # [B, H, n, ...]
        self.store.reserve(sum(shape[0] * shape[2] for shape in shapes), most)

    def _keep(self, encoded: Encoded, blocks: list[int]) -> None:
        """Take the blocks that were encoded; ``blocks`` of each row."""
        assert self.store is not None
        for row, packed_keys, packed_values in encoded:
            for piece_keys, piece_values in zip(packed_keys, packed_values, strict=True):
                self.store.append(row, piece_keys, piece_values)

    def _find_late(self, keys: torch.Tensor, total: list[int], blocks: list[int]) -> tuple[Late, torch.Tensor | None]:
        """The late sinks of each row once ``blocks`` are packed, and the order of its exact slots then.

        Returns:
            The order is ``[sinks | tokens to pack | late | the rest]``, int64 ``[B, most exact tokens of a row]``, or
            None where that is how they lie.
        """
        if not self.late_sinks:
            return self.late, None
        assert self.store is not None
        count = [n * self.scheme.block for n in blocks]
        begin = [min(tokens, self.sinks) + len(late) for tokens, late in zip(total, self.late, strict=True)]
        same = len(set(zip(begin, count, strict=True))) == 1
        found: list[list[int]] = []  # counted from `begin` on
        for row in range(1 if same else len(total)):
            room = self.late_sinks + self.sinks - begin[row]
            rows = keys if same else keys[row : row + 1]
            found += choose(rows[:, :, begin[row] : begin[row] + count[row] + room], count[row], room)
        late = []
        for row, at in enumerate(found):
            first = begin[row] + self.packed_blocks[row] * self.scheme.block  # recent tokens lie as in the text
            late.append((*self.late[row], *(first + position for position in at)))
        if not any(late):
            return tuple(late), None
        slots = torch.arange(keys.shape[2])
        order = slots.repeat(len(total), 1)
        for row, at in enumerate(found):
            sinks, last = min(total[row], self.sinks), begin[row] + count[row] + len(at)
            packed = torch.ones(last, dtype=torch.bool)
            packed[: begin[row]] = False
            packed[[begin[row] + position for position in at]] = False
            kept = ~packed
            kept[:sinks] = False
            order[row, :last] = torch.cat([slots[:sinks], slots[:last][packed], slots[:last][kept]])
        return tuple(late), order

    def _fit(self, side: int, work: Work, ranges: _Ranges, rows: Rows, most: int) -> tuple[Params, bool]:
        """What to learn of one side from the first tokens that are packed, and whether that is final."""
        codec = (self.scheme.key, self.scheme.value)[side]
        params = dict(self.learned[side])
        if side == 0 and "mean" in self.key_params:
            params["mean"] = self.key_params["mean"]
        if side == 0 and self.scheme.centred and "mean" not in params:
            before_rope = replace(self._transforms({}, rows, most)[0], rotation=None, whole=True)
            params["mean"] = self._first_packed(work, ranges, before_rope).float().mean(dim=(0, 2))
        if side == 0 and self.scheme.centred and codec.rotates and not codec.learns:
            rest = replace(self._transforms(params, rows, most)[0], rotation=None)
            params["balance"] = _balance(self._first_packed(work, ranges, rest))
        if not codec.learns or set(self.learned[side]) - {"mean"}:
            return params, True
        samples = self._first_packed(work, ranges, self._transforms(params, rows, most)[side])
        params.update(codec.fit(samples))
        # All zeros say nothing of what will come. They stay zeros under any other scale, but not beside a zero.
        return params, codec.format.zero or bool(samples.any())

    def _first_packed(self, work: Work, ranges: _Ranges, transform: Transform) -> torch.Tensor:
        """The tokens to be packed, as ``[B or 1, H, T, D]`` of samples: none that stay exact, whatever they hold."""
        size, sinks = self.scheme.block, self.sinks
        pieces = []
        for row, count in ranges:
            piece = work.take(row, sinks, sinks + count * size)
            pieces.append(piece if transform.is_nothing else transform.of_row(row).apply(piece, self._begin(row)))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)

    def _begin(self, row: int | None) -> int:
        """The first block that is new in a row."""
        return self.packed_blocks[row or 0]

    def _transforms(self, key_params: Params, rows: Rows, blocks: int) -> tuple[Transform, Transform]:
        """What is done to keys and values before they are encoded, for ``blocks`` blocks of every row."""
        assert self.keys is not None and self.values is not None
        scheme, device, mean = self.scheme, self.keys.device, key_params.get("mean")
        place = (rows.runs, rows.first_epoch, self.dropped, blocks)
        held = self._transformed
        same = held is not None and held[0].mean is mean and held[0].balance is key_params.get("balance")
        if held is not None and same and held[2] == place:
            return held[0], held[1]
        rotations = [
            hadamard.rotation(buffer.shape[3]).to(device) if codec.rotates else None
            for codec, buffer in ((scheme.key, self.keys), (scheme.value, self.values))
        ]
        rope = None
        if self.rotary is not None and blocks:
            rope = self.rotary.rope(rows, self.sinks + self.dropped, scheme.block, blocks, device)
        keys = Transform(mean, rotations[0], rope, scheme.pre_rope, key_params.get("balance"))
        pair = keys, Transform(rotation=rotations[1])
        self._transformed = (*pair, place)
        return pair

    def _encode(
        self, side: int, work: Work, row: int | None, blocks: range, params: Params, transform: Transform
    ) -> list[Packed]:
        """Encode some of the ``blocks`` that a row packs now, counted from 0."""
        block, sinks = self.scheme.block, self.sinks
        codec, what = ((self.scheme.key, "keys"), (self.scheme.value, "values"))[side]
        transform = transform.of_row(row)
        packed = []
        for first in range(blocks.start, blocks.stop, ENCODE_BLOCKS):
            last = min(blocks.stop, first + ENCODE_BLOCKS)
            piece = work.take(row, sinks + first * block, sinks + last * block).unflatten(2, (-1, block))
            number, still = self._begin(row) + first, transform
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

    def _unsound(self, side: int, found: Unsound) -> ValueError:
        codec, what = ((self.scheme.key, "keys"), (self.scheme.value, "values"))[side]
        return ValueError(
            f"{self.name}: {found.count} of the {what} to be packed are NaN, infinite or above {found.limit:g}, which "
            f"{codec} blocks cannot hold without spoiling their neighbours; the model is broken at this point (try "
            "float32 or bfloat16 instead of float16), or use the scheme 'exact'"
        )

    def _rest(self, work: Work, total: list[int], left: list[int]) -> torch.Tensor:
        """A fresh buffer with what stays exact; the old one may still be in an attention call's hands."""
        rest = self._buffer(work.tokens, max(left))
        rows = list(enumerate(zip(total, left, strict=True)))
        same = len(set(zip(total, left, strict=True))) == 1
        for row, (tokens, kept) in rows[:1] if same else rows:
            where, which = (slice(None), None) if same else (slice(row, row + 1), row)
            begin = min(tokens, self.sinks)
            rest[where, :, :begin] = work.take(which, 0, begin)
            rest[where, :, begin:kept] = work.take(which, tokens - kept + begin, tokens)
        return rest

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

    def _lost(self) -> list[int]:
        """Own tokens of each row that a window has left behind."""
        assert self.store is not None
        return [self.dropped + blank * self.scheme.block for blank in self.store.blank]

    # -- looking ---------------------------------------------------------------------------------------------------

    def view(self, offset: int = 0) -> KVView:
        """What the cache holds now, from column ``offset`` on. Raises ValueError while it is empty."""
        if self.keys is None or self.values is None:
            raise ValueError(f"{self.name}: the cache is empty")
        return self._view(self.keys, self.values, offset)

    def _view(self, keys: torch.Tensor, values: torch.Tensor, offset: int) -> KVView:
        assert self.store is not None
        longest = max(self.held, default=0)
        longest_packed = max(self.packed_blocks, default=0)
        key_transform, value_transform = self._transforms(self.key_params, self.rows, longest_packed)
        return KVView(
            scheme=self.scheme,
            keys=keys[:, :, :longest],
            values=values[:, :, :longest],
            held=tuple(self.held),
            sinks=self.sinks,
            blocks=self.store.view(),
            key_params=self.key_params,
            value_params=self.value_params,
            rows=self.rows,
            dropped=self.dropped,
            offset=offset,
            key_transform=key_transform,
            value_transform=value_transform,
            late=self.late if any(self.late) else (),
        )

    def nbytes(self, seen: set[int] | None = None) -> dict[str, int]:
        """Real bytes by part: codes, scales, zeros, outliers, sinks, residual, slack.

        Args:
            seen: where several layers are counted together, what has been counted: see :meth:`BlockStore.nbytes`.
        """
        parts = dict.fromkeys(("codes", "scales", "zeros", "outliers", "sinks", "residual", "slack"), 0)
        if self.keys is None or self.values is None or self.store is None:
            return parts
        parts.update(self.store.nbytes(seen))
        for buffer in (self.keys, self.values):
            token_bytes = buffer.shape[1] * buffer.shape[3] * buffer.itemsize
            sinks = sum(min(held, self.sinks) for held in self.held) + sum(map(len, self.late))
            parts["sinks"] += sinks * token_bytes
            parts["residual"] += (sum(self.held) - sinks) * token_bytes
            parts["slack"] += buffer.nbytes - sum(self.held) * token_bytes
        if order := self.store.record.memo.get(STORED_ORDER):
            parts["slack"] += order[1].nbytes
        learned = [x for params in (self.key_params, self.value_params) for x in params.values()]
        parts["scales"] += bytes_once(learned, seen)
        return parts

    @property
    def tokens(self) -> int:
        """Own tokens of all rows that are still held."""
        return 0 if self.store is None else sum(self.rows.counts) - sum(self._lost())

    @property
    def packed_tokens(self) -> int:
        """Those of them that stand in packed blocks."""
        return self.tokens - sum(self.held)

    @property
    def elements(self) -> int:
        """Elements of K and V of all own tokens that are still held."""
        if self.keys is None or self.values is None:
            return 0
        return self.tokens * self.keys.shape[1] * (self.keys.shape[3] + self.values.shape[3])

    # -- changing --------------------------------------------------------------------------------------------------

    def before(self) -> Before:
        """What :meth:`undo` needs to take back the next :meth:`append`."""
        counts = tuple(self.packed_blocks)
        lost = () if self.store is None else tuple(self._lost())
        params = (self.key_params, self.value_params)
        return Before(self.rows, self.keys, self.values, self.held, counts, params, self.fitted, lost, self.late)

    @_outlasting
    def undo(self, before: Before) -> bool:
        """Take back the last append, bit for bit. False, and nothing changes, if a window has dropped blocks since."""
        if before.keys is None:
            self.reset()
            return True
        assert self.store is not None
        if tuple(self._lost()) != before.lost:
            return False
        (self.key_params, self.value_params), self.fitted = before.params, before.fitted
        if tuple(self.packed_blocks) == before.counts:
            self.crop(self.columns - before.rows.columns, before.rows)
            return True
        # The buffers from before a block was packed are as they were: what stays exact went into new ones.
        self._truncate(before.counts)
        self.rows, self.keys, self.values, self.held = before.rows, before.keys, before.values, before.held
        self.late, self.even = before.late, len(set(self.held)) == 1
        return True

    @_outlasting
    def crop(self, columns: int, rows: Rows | None = None) -> None:
        """Take back the last ``columns`` columns.

        Raises:
            ValueError: if there are fewer, or if a sliding window has already left behind what would be needed.
        """
        if not 0 <= columns <= self.columns:
            raise ValueError(f"{self.name}: cannot take back {columns} of {self.columns} columns")
        if columns == 0 or self.keys is None or self.values is None:
            return
        rows = self.rows.crop(columns) if rows is None else rows
        gone = [old - new for old, new in zip(self.rows.counts, rows.counts, strict=True)]
        if (
            self.window is not None
            and self.store is not None
            and any(lost and new - self.window + 1 < lost for new, lost in zip(rows.counts, self._lost(), strict=True))
        ):
            raise ValueError(
                f"{self.name}: cannot take back {columns} columns, the sliding window of {self.window} tokens has "
                f"left behind what the rest would see; at most {self.scheme.block} can be taken back"
            )
        assert self.store is not None
        cuts = [self._cut(row, tokens, rows.counts[row]) for row, tokens in enumerate(gone)]
        if [cut.blocks for cut in cuts] != self.packed_blocks:
            self._unpack(cuts)
        else:
            self._shrink(max(cut.held for cut in cuts))
            for buffer in (self.keys, self.values):
                for row, (cut, old) in enumerate(zip(cuts, self.held, strict=True)):
                    buffer[row, :, cut.held : old] = 0  # what was taken back may hold NaN; masks do not stop 0 * NaN
        self.rows, self.held, self.late = rows, [cut.held for cut in cuts], tuple(cut.late for cut in cuts)
        self.even = len(set(self.held)) == 1

    def _cut(self, row: int, gone: int, left: int) -> _Cut:
        """What is left of a row when it loses its last ``gone`` own tokens and keeps the first ``left``."""
        block, held, late, packed = self.scheme.block, self.held[row], self.late[row], self.packed_blocks[row]
        sinks = min(held, self.sinks)
        older = gone - (held - sinks - len(late))  # tokens to lose that are not recent
        if older <= 0:
            return _Cut(packed, 0, held - gone, late)
        stay = [token for token in late if token < left]
        within = packed * block - (older - (len(late) - len(stay)))  # packed tokens that remain; below 0, sinks go too
        blocks, border = max(0, within) // block, max(0, within) % block
        # Late sinks come before the last packed token: the others are recent tokens again.
        kept = [token for i, token in enumerate(stay) if token - sinks - i < blocks * block]
        back = stay[len(kept) :]
        return _Cut(blocks, border, sinks + min(0, within) + border + len(stay), tuple(kept), tuple(back))

    def whole(self, columns: int) -> int:
        """How many of the first ``columns`` columns a crop may keep so that no block has to be decoded.

        Of a single row without padding. A window, once it has left anything behind, allows all columns or none.
        """
        if columns >= self.columns or self.store is None:
            return min(columns, self.columns)
        if self.window is not None and self.columns >= self.window:
            return 0
        return whole_tokens(columns, self.held[0], self.packed_blocks[0], self.sinks, self.scheme.block, self.late[0])

    def _unpack(self, cuts: list[_Cut]) -> None:
        """Keep what ``cuts`` say of each row; the border of a block that is cut becomes exact tokens.

        Only that one block of a row is ever decoded, however far back a crop goes.
        """
        assert self.keys is not None and self.values is not None and self.store is not None
        view = self.view()
        sides = (
            (self.keys, self.scheme.key, self.key_params, view.key_transform),
            (self.values, self.scheme.value, self.value_params, view.value_transform),
        )
        restored = []
        for side, (buffer, codec, params, transform) in enumerate(sides):
            fresh = self._buffer(buffer, max(cut.held for cut in cuts))
            for row, (cut, old) in enumerate(zip(cuts, self.held, strict=True)):
                first, tokens = cut.blocks, cut.border
                begin = min(old, self.sinks, cut.held) + len(cut.late)
                fresh[row, :, :begin] = buffer[row, :, :begin]
                if tokens:
                    packed = {name: part[row] for name, part in view.blocks.read(first, first + 1)[side].items()}
                    decoded = transform.of_row(row).undo(codec.decode(packed, params).flatten(1, 2)[None], first)
                    decoded = decoded[0, :, :tokens]
                    fresh[row, :, begin : begin + tokens] = narrow(decoded, buffer.dtype)
                recent = cut.held - begin - tokens
                fresh[row, :, begin + tokens : cut.held] = buffer[row, :, begin : begin + recent]
                if cut.back:  # they belong between the tokens of that block
                    rank = self._ranks(cut)
                    fresh[row, :, begin : cut.held] = fresh[row, :, begin : cut.held].index_select(1, rank)
            restored.append(fresh)
        self.keys, self.values = restored
        self._truncate([cut.blocks for cut in cuts])
        self.store.trim()

    def _truncate(self, counts: Sequence[int]) -> None:
        """Keep the first ``counts[b]`` packed blocks of row ``b``."""
        assert self.store is not None
        self.store.truncate(counts)

    def _ranks(self, cut: _Cut) -> torch.Tensor:
        """Which of ``[border | back]`` come first, second and so on in the text."""
        rank = torch.arange(cut.border) + cut.blocks * self.scheme.block
        border = not_late(((*cut.late, *cut.back),), self.sinks, rank)[0]
        numbers = torch.cat([border, torch.tensor(cut.back, dtype=torch.int64)])
        return numbers.argsort().to(self.store.table.device)  # type: ignore[union-attr]

    @_outlasting
    def select_rows(self, index: torch.Tensor, rows: Rows | None = None) -> None:
        """Row ``i`` becomes what row ``index[i]`` was (int64). Packed blocks are not touched, only referred to."""
        if self.keys is None or self.values is None or self.store is None:
            return
        self.rows = self.rows.select(index) if rows is None else rows
        chosen = index.to(self.keys.device)
        self.keys, self.values = self.keys.index_select(0, chosen), self.values.index_select(0, chosen)
        self.held = [self.held[row] for row in index.tolist()]
        self.late = tuple(self.late[row] for row in index.tolist())
        self.even = len(set(self.held)) <= 1
        self.store.select_rows(index)

    @_outlasting
    def restore(
        self,
        rows: Rows,
        keys: torch.Tensor,
        values: torch.Tensor,
        held: Sequence[int],
        late: Late,
        store: BlockStore,
        dropped: int = 0,
    ) -> None:
        """Take what another layer of the same scheme held; its exact tokens ``[B, H, T, D]`` are copied."""
        buffers = []
        for x in (keys, values):
            buffers.append(self._buffer(x, x.shape[2]))
            buffers[-1][:, :, : x.shape[2]] = x
        self.rows, self.held, self.late, self.dropped = rows, list(held), late, dropped
        self.keys, self.values = buffers
        self.store, self.even = store, len(set(held)) <= 1

    def fork(self) -> LayerCache:
        """Another layer that holds the same and goes on by itself. Packed blocks are shared, exact tokens copied."""
        twin = self._empty()
        twin.key_params, twin.value_params, twin.fitted = self.key_params, self.value_params, self.fitted
        twin.warned = set(self.warned)
        if self.keys is not None and self.values is not None and self.store is not None:
            longest = max(self.held, default=0)
            exact = self.keys[:, :, :longest], self.values[:, :, :longest]
            twin.restore(self.rows, *exact, self.held, self.late, self.store.fork(), self.dropped)
        return twin

    def _empty(self) -> LayerCache:
        """Another one that holds nothing."""
        return LayerCache(self.scheme, self.window, self.name, self.rotary, self.learned)

    def _adopt(self) -> None:
        """Take tensors that may be changed: a copy made under ``torch.inference_mode()`` has others."""
        if self.keys is None or self.values is None or not self.keys.is_inference():
            return
        assert self.store is not None
        self.keys, self.values = self.keys.clone(), self.values.clone()
        self.store.pool, self.store.table = self.store.pool.clone(), self.store.table.clone()

    # -- buffers ---------------------------------------------------------------------------------------------------

    def _check(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        if keys.ndim != 4 or values.ndim != 4 or keys.shape[:3] != values.shape[:3]:
            raise ValueError(
                f"{self.name}: keys {tuple(keys.shape)} and values {tuple(values.shape)} must be [B, H, T, Dk] and "
                "[B, H, T, Dv] with the same B, H and T"
            )
        if keys.device != values.device:
            raise ValueError(f"{self.name}: keys are on {keys.device}, but values on {values.device}")
        for what, x in (("keys", keys), ("values", values)):  # under autocast they may differ: rotary in float32
            if not x.dtype.is_floating_point or x.dtype.itemsize < 2:
                raise ValueError(f"{self.name}: {what} are {x.dtype}; allowed are float32, bfloat16, float16, float64")
        if self.keys is None or self.values is None:
            return
        held = (self.keys.shape[0], self.keys.shape[1], self.keys.shape[3], self.values.shape[3])
        new = (keys.shape[0], keys.shape[1], keys.shape[3], values.shape[3])
        if held != new:
            raise ValueError(
                f"{self.name}: the cache holds (rows, heads, key channels, value channels) = {held} and got {new}; "
                "it belongs to another batch or another model: reset() it or make a new one"
            )
        kept, got = ((k.dtype, v.dtype, k.device) for k, v in ((self.keys, self.values), (keys, values)))
        if kept != got:
            raise ValueError(
                f"{self.name}: the cache holds keys {kept[0]} and values {kept[1]} on {kept[2]} and got keys {got[0]} "
                f"and values {got[1]} on {got[2]}; reset() it or make a new one, and keep to one dtype, in or out of "
                "torch.autocast"
            )

    def _allocate(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        batch, heads, _, channels = keys.shape
        scheme = self.scheme
        record = Record.of(scheme.key, scheme.value, scheme.block, channels, values.shape[3], keys.dtype, values.dtype)
        self.store = BlockStore(record, heads, batch, keys.device)
        self.keys, self.values = _zeros(keys, 0), _zeros(values, 0)
        self.held, self.late = [0] * batch, ((),) * batch

    def _buffer(self, like: torch.Tensor, tokens: int) -> torch.Tensor:
        """A zeroed exact buffer with room for ``tokens``, and for all that a scheme keeps exact before it packs."""
        return _zeros(like, self.limits.room_after_packing(tokens))

    def _reserve(self, tokens: int) -> None:
        """Make room for ``tokens`` exact ones."""
        assert self.keys is not None and self.values is not None
        held = max(self.held, default=0)
        room = self.limits.room(self.keys.shape[2], held, tokens)
        if room == self.keys.shape[2]:
            return
        grown = []
        for buffer in (self.keys, self.values):
            wider = _zeros(buffer, room)
            wider[:, :, :held] = buffer[:, :, :held]
            grown.append(wider)
        self.keys, self.values = grown

    def _shrink(self, tokens: int) -> None:
        """Give back room that a crop left unused, where it is more than growth keeps in hand."""
        assert self.keys is not None and self.values is not None
        if self.keys.shape[2] > max(self.limits.most, tokens + tokens // 4 + 64):
            room = max(self.limits.most, tokens + tokens // 8 + 8)
            self.keys, self.values = self.keys[:, :, :room].clone(), self.values[:, :, :room].clone()


class Work(NamedTuple):
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
            first, last: what is read between them must be ascending.
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


def whole_tokens(left: int, held: int, blocks: int, sinks: int, block: int, late: Sequence[int]) -> int:
    """How many of its first ``left`` tokens a row can keep without decoding a block.

    All of them where the cut goes through the recent tokens or through the sinks; else it must be where a block ends.

    Args:
        left: at most all tokens of the row.
        held: exact tokens.
        blocks, block: packed ones, and tokens of each.
        sinks, late: of the layer, and own numbers of the row's late sinks.
    """
    if not blocks or left >= sinks + blocks * block + len(late):
        return left
    while left > sinks and (left - sinks - sum(token < left for token in late)) % block:
        left -= 1
    return left


def bytes_once(tensors: Iterable[torch.Tensor], seen: set[int] | None = None) -> int:
    """Bytes of tensors but for those in ``seen``, to which they are added."""
    total = 0
    for x in tensors:
        if seen is None or id(x) not in seen:
            total += x.nbytes
        if seen is not None:
            seen.add(id(x))
    return total


def _balance(x: torch.Tensor) -> torch.Tensor:
    """What channels of centred keys ``x [N, H, T, D]`` are divided by before they are rotated: float32 ``[H, D]``.

    A rotation mixes channels, so that a large one takes the bits of all. Divided by their deviations all would be
    equal, but large keys often meet large queries, and deserve more than that: the square root is between.
    """
    deviation = x.float().square().mean(dim=(0, 2)).sqrt()
    least = 0.01 * deviation.mean(dim=-1, keepdim=True)  # what hardly moves in so few tokens may do so later
    return torch.where(least > 0, deviation.maximum(least), 1.0).sqrt()


def _alike(new: torch.Tensor, buffer: torch.Tensor) -> bool:
    """Whether new tokens fit a buffer in all but their number."""
    fits = new.ndim == 4 and new.shape[:2] == buffer.shape[:2] and new.shape[3] == buffer.shape[3]
    return fits and new.dtype == buffer.dtype and new.device == buffer.device


def _zeros(like: torch.Tensor, tokens: int) -> torch.Tensor:
    """Zeros ``[B, H, tokens, D]``: what lies beyond a row's tokens is masked, and masks do not stop NaN."""
    return like.new_zeros(like.shape[0], like.shape[1], tokens, like.shape[3])


def _place(buffer: torch.Tensor, new: torch.Tensor, held: list[int], total: list[int], rows: Rows) -> None:
    """Write the text columns of ``new [B, H, q, D]`` behind each row's own tokens in ``buffer``."""
    added = new.shape[2]
    if rows.valid is None and len(set(held)) == 1:
        buffer[:, :, held[0] : total[0]] = new
        return
    valid = None if rows.valid is None else rows.valid[:, rows.columns - added :].to(new.device)
    for row, (first, last) in enumerate(zip(held, total, strict=True)):
        if valid is None or last - first == added:
            buffer[row, :, first:last] = new[row]
        elif last > first:
            buffer[row, :, first:last] = new[row][:, valid[row]]
