"""Which columns of a padded batch hold text: the map between a model's columns and each row's own tokens.

A model sees a batch as a rectangle of columns; a row's own tokens are the columns that its attention mask calls text.
Everything stored counts in own tokens, so padding is never stored and a row's groups begin at its own first token.
One :class:`Rows` is shared by all layers of a cache and replaced, never changed, as the batch goes on.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch


class Run(NamedTuple):
    """Own tokens from ``token`` on are at positions ``position, position + 1, ...``, rotated as in ``epoch``."""

    token: int
    position: int
    epoch: int = 0


class Rows:
    """The columns seen so far.

    Args:
        batch: rows; 0 before the first call.
        columns: columns seen so far, padding included.
        valid: bool ``[batch, columns]``, True for text, or None where there is no padding at all.
        runs: where the positions of each row's own tokens run on by one, or None where token ``j`` of every row is
            at position ``j``.
    """

    def __init__(
        self,
        batch: int = 0,
        columns: int = 0,
        valid: torch.Tensor | None = None,
        runs: tuple[tuple[Run, ...], ...] | None = None,
    ) -> None:
        self.batch = batch
        self.columns = columns
        self.valid = valid
        self.runs = runs

    def positions(self, row: int, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions and epochs (see :mod:`kvbits.rotary`) of own ``tokens`` (int64, ascending) of one row."""
        if self.runs is None:
            return tokens, torch.zeros_like(tokens)
        token, position, epoch = (torch.tensor(column) for column in zip(*self.runs[row], strict=True))
        run = torch.bucketize(tokens, token, right=True).sub_(1).clamp_(min=0)
        return position[run] + tokens - token[run], epoch[run]

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Own tokens of each row."""
        if self.valid is None:
            return (self.columns,) * self.batch
        return tuple(self.valid.sum(-1).tolist())

    @cached_property
    def column_of(self) -> torch.Tensor | None:
        """int64 ``[batch, most tokens of a row]``: the column of each own token, -1 beyond a row's last.

        None where there is no padding: token ``j`` is column ``j``.
        """
        if self.valid is None:
            return None
        order = torch.argsort(~self.valid, dim=-1, stable=True)[:, : max(self.counts, default=0)]
        own = torch.arange(order.shape[1], device=order.device)
        return torch.where(own < self.valid.sum(-1, keepdim=True), order, -1)

    @cached_property
    def padded(self) -> bool:
        """Whether any column of any row is padding. Rows that were selected from a padded batch may have none."""
        return self.valid is not None and not bool(self.valid.all())

    @property
    def nbytes(self) -> int:
        """Bytes of the maps; 0 where there is no padding."""
        maps = (self.valid, self.__dict__.get("column_of"))
        return sum(x.nbytes for x in maps if x is not None)

    def extend(self, batch: int, columns: int, valid: torch.Tensor | None = None) -> Rows:
        """These rows and ``columns`` more; ``valid [batch, columns]`` says which of the new ones are text."""
        if valid is None and self.valid is None:
            return Rows(batch, self.columns + columns)
        device = (self.valid if valid is None else valid).device  # type: ignore[union-attr]
        old = torch.ones(batch, self.columns, dtype=torch.bool, device=device) if self.valid is None else self.valid
        new = torch.ones(batch, columns, dtype=torch.bool, device=device) if valid is None else valid
        return Rows(batch, self.columns + columns, torch.cat([old, new.to(device)], dim=-1))

    def crop(self, columns: int) -> Rows:
        """Without the last ``columns`` columns."""
        left = self.columns - columns
        return Rows(self.batch, left, None if self.valid is None else self.valid[:, :left])

    def select(self, rows: torch.Tensor) -> Rows:
        """Row ``i`` becomes what row ``rows[i]`` was."""
        return Rows(len(rows), self.columns, None if self.valid is None else self.valid[rows.to(self.valid.device)])
