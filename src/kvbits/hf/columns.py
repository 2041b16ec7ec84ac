"""``Columns``: which columns of a cache are text, at which positions, with which ids; one for all layers."""

from __future__ import annotations

import torch

from kvbits.hf.rotation.rotary import Rotaries
from kvbits.hf.tokens import UNKNOWN, TokenIds
from kvbits.store.rows import Rows


class Columns:
    """What all layers of a cache share: the rows and ids so far, and what the current forward announced about padding.

    The hook that ``attach`` puts on the model calls :meth:`begin` before every forward, so each layer knows which
    columns are text whether or not its model hands a mask to the cache (none does) or to attention.

    Args:
        rotaries: given where the scheme unropes keys or their mean; only then does :attr:`rows` follow positions.
        strict: refuse positions by which keys cannot be unroped, rather than do as if they went on by one.
    """

    def __init__(self, rotaries: Rotaries | None = None, strict: bool = False) -> None:
        self.rows = Rows()
        self.rotaries, self.strict = rotaries, strict
        self.forward = 0
        self.ids = TokenIds()
        self._mask: torch.Tensor | None = None
        self._positions: torch.Tensor | None = None
        self._ids: torch.Tensor | None = None
        self._waiting = False

    def begin(self, mask: torch.Tensor | None, ids: torch.Tensor | None = None) -> None:
        """Announce a forward with a 2-D padding mask ``[B, columns]`` or None, and its new ids ``[B, n]`` if known.

        The decoder inside a model announces the same forward again; until a layer has used it, that is no new one, and
        the ids are those that came first.
        """
        if not self._waiting:
            self.forward += 1
            self._positions, self._ids = None, ids
        self._mask, self._waiting = mask, True

    def void(self) -> None:
        """Forget what was announced and not used."""
        self._waiting, self._mask, self._positions, self._ids = False, None, None, None

    def place(self, positions: torch.Tensor | None) -> None:
        """Announce the positions of the forward's columns; None: what was announced before, or as the model counts."""
        if positions is not None:
            self._positions = positions

    def fork(self) -> Columns:
        """The same for another cache."""
        twin = self._empty()
        twin.rows, twin.ids = self.rows, TokenIds(*self.ids.pieces)
        return twin

    def _empty(self) -> Columns:
        return Columns(self.rotaries, self.strict)

    @property
    def waiting(self) -> bool:
        """Whether a forward was announced that no layer has used yet."""
        return self._waiting

    def advance(self, before: int, batch: int, added: int) -> Rows:
        """The rows after this forward, for a layer that held ``before`` columns and gets ``added`` more."""
        if self._waiting:
            self._waiting, mask, self._mask = False, self._mask, None  # nothing needs the mask any more
            if self.rows.columns != before:
                raise ValueError(
                    f"a layer holds {before} columns and the cache {self.rows.columns}: an earlier call failed "
                    "halfway, or a layer was changed by itself; reset() the cache or make a new one"
                )
            text = self._text(mask, before, batch, added)
            given, self._positions = self._positions, None
            if self.rotaries is None:
                self.rows = self.rows.extend(batch, added, text)
            else:
                self.rows = self._extend_placed(self.rotaries, batch, added, text, given)
            # A token at another position than its column is no plain continuation; padding has its own count.
            if self._ids is not None and given is not None and self.rows.valid is None:
                self._ids = _known(self._ids, given, before)
            self.ids.extend(self._ids, batch, added)
            self._ids = None
        if self.rows.columns != before + added or self.rows.batch != batch:
            raise ValueError(
                f"a layer holds {before} columns and got {batch} rows of {added} more, but this forward brought the "
                f"cache to {self.rows.batch} rows of {self.rows.columns} columns; if an earlier call failed halfway, "
                "reset() the cache or make a new one"
            )
        return self.rows

    def _text(self, mask: torch.Tensor | None, before: int, batch: int, added: int) -> torch.Tensor | None:
        """Which of the new columns are text, bool ``[B, added]``, or None for all."""
        if mask is None:
            if self.rows.padded:
                raise ValueError(
                    "this batch is padded, but this call has no attention_mask: pass the mask of all "
                    f"{before + added} columns, those in the cache included"
                )
            return None
        if tuple(mask.shape) != (batch, before + added):
            raise ValueError(
                f"attention_mask {tuple(mask.shape)} must cover the columns in the cache and the new ones: "
                f"({batch}, {before} + {added}); a mask of the new ones alone means that the whole text was passed "
                "again"
            )
        text = mask != 0
        if self.rows.valid is None and bool(text[:, before:].all()):
            return None
        if self.rows.valid is not None and before and bool((text[:, :before] & ~self.rows.valid).any()):
            raise ValueError(
                "attention_mask calls columns text that an earlier call called padding; those are not stored"
            )
        return text[:, before:]

    def _extend_placed(
        self, rotaries: Rotaries, batch: int, added: int, text: torch.Tensor | None, given: torch.Tensor | None
    ) -> Rows:
        """The rows with ``added`` more columns and the positions by which the model roped their keys."""
        before = self.rows.columns
        epoch = rotaries.epoch(self.rows.last_epoch, before + added, added)
        positions = None if given is None else _plane(given, batch, added, text, self.strict)
        if positions is None and (text is not None or self.rows.valid is not None or self.rows.runs is not None):
            positions = torch.arange(before, before + added)[None]  # how all models count, padding included
        return self.rows.extend(batch, added, text, positions, epoch)

    def select(self, index: torch.Tensor) -> None:
        """Row ``i`` becomes what row ``index[i]`` was."""
        self.replace(self.rows.select(index))
        self.ids.select(index)

    def replace(self, rows: Rows) -> Rows:
        """Set the rows after a crop; what was announced before is void."""
        self.void()
        self.rows = rows
        self.ids.crop(rows.columns)
        return rows


def _known(ids: torch.Tensor, positions: torch.Tensor, before: int) -> torch.Tensor | None:
    """``ids [B, n]`` of the columns from ``before`` on, unknown if the call placed any of them elsewhere.

    Nothing waits for the device that positions ``[..., n]`` are on.
    """
    columns = torch.arange(before, before + ids.shape[1], device=positions.device)
    if positions.shape[-1:] != columns.shape:
        return None
    return ids.masked_fill((positions != columns).any().to(ids.device), UNKNOWN)


def _plane(
    positions: torch.Tensor, batch: int, added: int, text: torch.Tensor | None, strict: bool
) -> torch.Tensor | None:
    """The positions of a call as int64 ``[B or 1, added]``; None where they are of some other kind.

    Raises:
        ValueError: if ``strict`` and text has positions of several dimensions, as pictures do in Qwen2-VL, that differ.
    """
    if positions.ndim < 2:
        positions = positions.reshape(1, -1)
    if positions.ndim == 3:
        planes = positions[1:] if len(positions) == 4 else positions  # the first of four is of the text alone
        differ = (planes != planes[:1]).any(0)
        if text is not None:
            differ = differ & text.to(differ.device)
        if strict and bool(differ.any()):
            raise ValueError(
                "this call has positions of several dimensions (of a picture or a film), and keys roped by them "
                "cannot be unroped; use a scheme that stores keys as they come"
            )
        positions = planes[0]
    fits = positions.ndim == 2 and positions.shape[0] in (1, batch) and positions.shape[1] == added
    return positions if fits else None
