"""``TokenIds``: which tokens a cache has read, as far as its calls said so, for whoever stores it or continues it.

A cache is right for a prompt only if it has read that very prompt. So it notes the ids of each call itself, beside its
columns: what a caller says it has read can then be checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

UNKNOWN = -1
"""In place of the id where a call had none, or where more than text went into it."""

_PIECES = 64

_TEXT = {
    "input_ids", "attention_mask", "position_ids", "cache_position", "cache", "past_key_values", "labels",
    "logits_to_keep", "num_logits_to_keep",
}  # fmt: skip
"""Arguments of a model's ``forward`` beside which its ids alone say what it reads."""


def text_of(arguments: Mapping[str, Any]) -> torch.Tensor | None:
    """The ids ``[B, columns]`` of a call that reads nothing but text, else None: no embeddings, no pictures."""
    ids = arguments.get("input_ids")
    mask = arguments.get("attention_mask")
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or (isinstance(mask, torch.Tensor) and mask.ndim != 2):
        return None
    plain = (type(None), bool, int, float, str)
    return ids if all(name in _TEXT or isinstance(x, plain) for name, x in arguments.items()) else None


def first_difference(read: torch.Tensor, ids: torch.Tensor | None, mask: torch.Tensor | None = None) -> int | None:
    """The first column of text at which ``ids [B, n]`` are not what a cache has ``read [B, columns]``, or None.

    None also where the ids are not longer than that, or of other rows, and so no continuation at all.

    Args:
        read, ids: int64; :data:`UNKNOWN` is like any other.
        mask: ``[B, n]``, 0 for padding.
    """
    columns = read.shape[1]
    if ids is None or ids.ndim != 2 or not 0 < columns < ids.shape[1] or len(read) != len(ids):
        return None
    differ = (read != UNKNOWN) & (read != ids[:, :columns].to(read.device))
    if mask is not None and mask.shape == ids.shape:
        differ &= mask[:, :columns].to(read.device) != 0
    found = differ.any(0).nonzero()
    return int(found[0]) if len(found) else None


class TokenIds:
    """Ids of the columns of a cache, int32, which grow with it: a step adds a piece and copies nothing."""

    def __init__(self, *pieces: torch.Tensor) -> None:
        self.pieces = list(pieces)

    @property
    def columns(self) -> int:
        """How many there are."""
        return sum(piece.shape[1] for piece in self.pieces)

    def extend(self, ids: torch.Tensor | None, batch: int, columns: int) -> None:
        """Add ``ids [B, columns]``, or as many unknown ones."""
        if ids is None or ids.shape != (batch, columns):
            ids = torch.full((batch, columns), UNKNOWN, dtype=torch.int32)
        self.pieces.append(ids.detach().to(torch.int32, copy=True))
        if len(self.pieces) > _PIECES:
            self.pieces = [self.all()]

    def crop(self, columns: int) -> None:
        """Keep the first ``columns``."""
        if columns < self.columns:
            self.pieces = [self.all()[:, :columns].clone()] if columns else []

    def select(self, rows: torch.Tensor) -> None:
        """Row ``i`` becomes what row ``rows[i]`` was."""
        self.pieces = [piece[rows.to(piece.device)] for piece in self.pieces]

    def all(self) -> torch.Tensor:
        """``[B, columns]``; ``[0, 0]`` while there are none."""
        device = self.pieces[0].device if self.pieces else None
        return torch.cat([x.to(device) for x in self.pieces], 1) if self.pieces else torch.empty(0, 0).int()
