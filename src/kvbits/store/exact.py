"""``ExactTokens``, the exact tokens of one layer: ``[sinks | late | recent]`` of each row.

Beyond a row's tokens there are zeros: what lies there is masked, and masks do not stop NaN. New tokens are written
behind the old ones. What packs or crops away more than recent tokens goes into fresh buffers instead: the old ones may
still be in an attention call's hands, or be wanted back (:meth:`kvbits.layer.cache.LayerCache.undo`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kvbits.numerics.cast import narrow
from kvbits.store.crop import Crop
from kvbits.store.late_sinks import Late
from kvbits.store.room import Limits
from kvbits.store.rows import Rows


class ExactTokens:
    """Exact keys and values.

    Args:
        keys, values: ``[B, H, room, Dk]`` and ``[B, H, room, Dv]``, zero beyond a row's tokens.
        held: exact tokens of each row.
        late: own numbers of the late sinks of each row.

    Attributes:
        even: whether all rows hold the same number.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, held: list[int], late: Late) -> None:
        self.keys, self.values = keys, values
        self.hold(held, late)

    @staticmethod
    def empty(keys: torch.Tensor, values: torch.Tensor) -> ExactTokens:
        """For tokens like these; without room so far."""
        batch = keys.shape[0]
        return ExactTokens(_zeros(keys, 0), _zeros(values, 0), [0] * batch, ((),) * batch)

    @staticmethod
    def copied(
        keys: torch.Tensor, values: torch.Tensor, held: Sequence[int], late: Late, limits: Limits
    ) -> ExactTokens:
        """Of the exact tokens of another, ``[B, H, T, D]``."""
        sides = []
        for x in (keys, values):
            sides.append(roomy(x, x.shape[2], limits))
            sides[-1][:, :, : x.shape[2]] = x
        return ExactTokens(sides[0], sides[1], list(held), late)

    def hold(self, held: list[int], late: Late) -> None:
        """Say what is in the buffers from now on."""
        self.held, self.late, self.even = held, late, len(set(held)) <= 1

    @property
    def longest(self) -> int:
        """Exact tokens of the longest row."""
        return max(self.held, default=0)

    # -- growing ---------------------------------------------------------------------------------------------------

    def append(self, keys: torch.Tensor, values: torch.Tensor, total: list[int], rows: Rows, limits: Limits) -> None:
        """Write the text among the columns ``[B, H, q, D]`` behind each row's tokens.

        Args:
            keys, values: as :func:`refuse_unlike` lets them pass.
            total: tokens of each row then.
            rows: the columns then.
            limits: how much room is made.
        """
        self._reserve(max(total, default=0), limits)
        for buffer, new in ((self.keys, keys), (self.values, values)):
            _place(buffer, new, self.held, total, rows)
        self.hold(total, self.late)

    def step(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """The short way of :meth:`append` where all rows hold the same and get the same.

        Returns:
            False, and nothing has changed, where the columns do not fit in.
        """
        kept, other = self.keys, self.values
        held, added = self.held[0], keys.shape[2]
        total = held + added
        if total > kept.shape[2] or values.shape[2] != added or not (_alike(keys, kept) and _alike(values, other)):
            return False
        if kept.is_inference():
            return False
        kept.narrow(2, held, added).copy_(keys)
        other.narrow(2, held, added).copy_(values)
        self.held = [total] * len(self.held)
        return True

    def joined(self, keys: torch.Tensor, values: torch.Tensor, total: list[int], rows: Rows) -> list[torch.Tensor]:
        """What either side would be after :meth:`append`, ``[B, H, most tokens, D]``; nothing changes."""
        sides = []
        for buffer, new in ((self.keys, keys), (self.values, values)):
            if rows.valid is None and self.even:
                held = buffer[:, :, : self.held[0]]
                sides.append(torch.cat([held, new], dim=2) if self.held[0] else new)
            else:
                space = _zeros(buffer, max(total))
                space[:, :, : self.longest] = buffer[:, :, : self.longest]
                _place(space, new, self.held, total, rows)
                sides.append(space)
        return sides

    def _reserve(self, tokens: int, limits: Limits) -> None:
        """Make room for ``tokens``."""
        held = self.longest
        room = limits.room(self.keys.shape[2], held, tokens)
        if room == self.keys.shape[2]:
            return
        grown = []
        for buffer in (self.keys, self.values):
            wider = _zeros(buffer, room)
            wider[:, :, :held] = buffer[:, :, :held]
            grown.append(wider)
        self.keys, self.values = grown

    # -- changing --------------------------------------------------------------------------------------------------

    def crop(self, crops: Sequence[Crop], limits: Limits) -> None:
        """Forget recent tokens of each row, in place."""
        self._shrink(max(crop.held for crop in crops), limits)
        for buffer in (self.keys, self.values):
            for row, (crop, old) in enumerate(zip(crops, self.held, strict=True)):
                buffer[row, :, crop.held : old] = 0  # what was taken back may hold NaN; masks do not stop 0 * NaN
        self._hold_crops(crops)

    def crop_further(self, crops: Sequence[Crop], limits: Limits, decoded: Callable[[int, int], torch.Tensor]) -> None:
        """Forget more than recent tokens; what is left of a cropped block becomes recent again.

        Args:
            decoded: tokens of that block ``[H, at least border, D]``, given the side (0 is keys) and the row; asked for
                where a crop has a border.
        """
        sides = []
        for side, buffer in enumerate((self.keys, self.values)):
            fresh = roomy(buffer, max(crop.held for crop in crops), limits)
            for row, (crop, old) in enumerate(zip(crops, self.held, strict=True)):
                begin = min(old, limits.sinks, crop.held) + len(crop.late)
                end = begin + crop.border
                fresh[row, :, :begin] = buffer[row, :, :begin]
                if crop.border:
                    fresh[row, :, begin:end] = narrow(decoded(side, row)[:, : crop.border], buffer.dtype)
                fresh[row, :, end : crop.held] = buffer[row, :, begin : begin + crop.held - end]
                if crop.back:  # they belong between the tokens of that block
                    order = crop.ranks(limits).to(buffer.device)
                    fresh[row, :, begin : crop.held] = fresh[row, :, begin : crop.held].index_select(1, order)
            sides.append(fresh)
        self.keys, self.values = sides
        self._hold_crops(crops)

    def _hold_crops(self, crops: Sequence[Crop]) -> None:
        self.hold([crop.held for crop in crops], tuple(crop.late for crop in crops))

    def _shrink(self, tokens: int, limits: Limits) -> None:
        """Give back room that a crop left unused."""
        room = limits.room_after_crop(self.keys.shape[2], tokens)
        if room < self.keys.shape[2]:
            self.keys, self.values = self.keys[:, :, :room].clone(), self.values[:, :, :room].clone()

    def select_rows(self, index: torch.Tensor) -> None:
        """Row ``i`` becomes what row ``index[i]`` was (int64)."""
        chosen, rows = index.to(self.keys.device), index.tolist()
        self.keys, self.values = self.keys.index_select(0, chosen), self.values.index_select(0, chosen)
        self.hold([self.held[row] for row in rows], tuple(self.late[row] for row in rows))

    def count(self, sinks: int) -> dict[str, int]:
        """Bytes by part: sinks (``sinks`` first ones of a row, and late ones), residual, slack."""
        parts = dict.fromkeys(("sinks", "residual", "slack"), 0)
        first = sum(min(held, sinks) for held in self.held) + sum(map(len, self.late))
        for buffer in (self.keys, self.values):
            token_bytes = buffer.shape[1] * buffer.shape[3] * buffer.itemsize
            parts["sinks"] += first * token_bytes
            parts["residual"] += (sum(self.held) - first) * token_bytes
            parts["slack"] += buffer.nbytes - sum(self.held) * token_bytes
        return parts


def roomy(like: torch.Tensor, tokens: int, limits: Limits) -> torch.Tensor:
    """Zeros with room for ``tokens``, and for all that a layer keeps exact before it packs: ``[B, H, room, D]``."""
    return _zeros(like, limits.room_after_packing(tokens))


def refuse_unlike(name: str, keys: torch.Tensor, values: torch.Tensor, buffers: ExactTokens | None) -> None:
    """Raise ValueError for what no cache holds, or not one that already holds ``buffers``; ``name`` says whose."""
    if keys.ndim != 4 or values.ndim != 4 or keys.shape[:3] != values.shape[:3]:
        raise ValueError(
            f"{name}: keys {tuple(keys.shape)} and values {tuple(values.shape)} must be [B, H, T, Dk] and "
            "[B, H, T, Dv] with the same B, H and T"
        )
    if keys.device != values.device:
        raise ValueError(f"{name}: keys are on {keys.device}, but values on {values.device}")
    for what, x in (("keys", keys), ("values", values)):  # under autocast they may differ: rotary in float32
        if not x.dtype.is_floating_point or x.dtype.itemsize < 2:
            raise ValueError(f"{name}: {what} are {x.dtype}; allowed are float32, bfloat16, float16, float64")
    if buffers is None:
        return
    sides = (buffers.keys, buffers.values), (keys, values)
    held, new = ((k.shape[0], k.shape[1], k.shape[3], v.shape[3]) for k, v in sides)
    if held != new:
        raise ValueError(
            f"{name}: the cache holds (rows, heads, key channels, value channels) = {held} and got {new}; "
            "it belongs to another batch or another model: reset() it or make a new one"
        )
    kept, got = ((k.dtype, v.dtype, k.device) for k, v in sides)
    if kept != got:
        raise ValueError(
            f"{name}: the cache holds keys {kept[0]} and values {kept[1]} on {kept[2]} and got keys {got[0]} "
            f"and values {got[1]} on {got[2]}; reset() it or make a new one, and keep to one dtype, in or out of "
            "torch.autocast"
        )


def _alike(new: torch.Tensor, buffer: torch.Tensor) -> bool:
    """Whether new tokens fit a buffer in all but their number."""
    fits = new.ndim == 4 and new.shape[:2] == buffer.shape[:2] and new.shape[3] == buffer.shape[3]
    return fits and new.dtype == buffer.dtype and new.device == buffer.device


def _zeros(like: torch.Tensor, tokens: int) -> torch.Tensor:
    """Zeros ``[B, H, tokens, D]``."""
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
