"""Which columns of a padded batch hold text: the map between a model's columns and each row's own tokens.

A model sees a batch as a rectangle of columns; a row's own tokens are the columns that its attention mask calls text.
Everything stored counts in own tokens, so padding is never stored and a row's groups begin at its own first token.
One :class:`Rows` is shared by all layers of a cache and replaced, never changed, as the batch goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch


class Run(NamedTuple):
    """Own tokens from ``token`` on are at positions ``position, position + 1, ...``, rotated as in ``epoch``."""

    token: int
    position: int
    epoch: int = 0


_START = (Run(0, 0),)
"""Of a row whose own token ``j`` is at position ``j``."""


class Rows:
    """The columns seen so far.

    Args:
        batch: rows; 0 before the first call.
        columns: columns seen so far, padding included.
        valid: bool ``[batch, columns]``, True for text, or None where there is no padding at all.
        runs: where the positions of each row's own tokens run on by one, or None where token ``j`` of every row is
            at position ``j``.
        first_epoch: epoch of the first column.
    """

    def __init__(
        self,
        batch: int = 0,
        columns: int = 0,
        valid: torch.Tensor | None = None,
        runs: tuple[tuple[Run, ...], ...] | None = None,
        first_epoch: int = 0,
    ) -> None:
        self.batch = batch
        self.columns = columns
        self.valid = valid
        self.runs = runs
        self.first_epoch = first_epoch

    def positions(self, row: int, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions and epochs (see :mod:`kvbits.transform.rotary`) of own ``tokens`` (int64, ascending) of one row."""
        if self.runs is None:
            return tokens, torch.zeros_like(tokens)
        token, position, epoch = (torch.tensor(column) for column in zip(*self.runs[row], strict=True))
        run = torch.bucketize(tokens, token, right=True).sub_(1).clamp_(min=0)
        return position[run] + tokens - token[run], epoch[run]

    @property
    def last_epoch(self) -> int:
        """Epoch of the last text."""
        return 0 if self.runs is None else max(row[-1] for row in self.runs).epoch

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

    def extend(
        self,
        batch: int,
        columns: int,
        valid: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        epoch: int = 0,
    ) -> Rows:
        """These rows and ``columns`` more.

        Args:
            valid: bool ``[batch, columns]``, which of the new ones are text, or None for all.
            positions: int64 ``[batch or 1, columns]``, where the new ones are, or None: they go on from those before.
            epoch: of the new ones.
        """
        runs = self.runs
        if positions is not None or epoch or runs is not None:
            runs = self._runs_on(batch, columns, valid, positions, epoch)
        first_epoch = self.first_epoch if self.columns else epoch
        if valid is None and self.valid is None:
            return Rows(batch, self.columns + columns, None, runs, first_epoch)
        device = (self.valid if valid is None else valid).device  # type: ignore[union-attr]
        old = torch.ones(batch, self.columns, dtype=torch.bool, device=device) if self.valid is None else self.valid
        new = torch.ones(batch, columns, dtype=torch.bool, device=device) if valid is None else valid
        return Rows(batch, self.columns + columns, torch.cat([old, new.to(device)], dim=-1), runs, first_epoch)

    def _runs_on(
        self, batch: int, columns: int, valid: torch.Tensor | None, positions: torch.Tensor | None, epoch: int
    ) -> tuple[tuple[Run, ...], ...] | None:
        """The runs, with a new one where a row does not go on by one in the same epoch."""
        runs, counts = self.runs or (_START,) * batch, self.counts or (0,) * batch
        expected = [row[-1].position + count - row[-1].token for row, count in zip(runs, counts, strict=True)]
        if positions is None:
            steps = torch.arange(columns)
            places = [steps + first for first in expected]
        else:
            if columns == 1 and self._goes_on(positions, expected, epoch):
                return self.runs  # the usual decode step, also of rows that it only pads
            places = list(positions.cpu().expand(batch, columns))
        grown = []
        text = None if valid is None else valid.to("cpu")
        for row in range(batch):
            own = places[row] if text is None else places[row][text[row]]
            grown.append(_grown(runs[row], counts[row], own, epoch))
        return None if all(row == _START for row in grown) else tuple(grown)

    def _goes_on(self, positions: torch.Tensor, expected: list[int], epoch: int) -> bool:
        """Whether one column ``positions [batch or 1, 1]`` is where every row is expected to go on."""
        if any(row[-1].epoch != epoch for row in self.runs or (_START,)):
            return False
        found: list[int] = positions.flatten().tolist()
        return found == expected or found * len(expected) == expected

    def crop(self, columns: int) -> Rows:
        """Without the last ``columns`` columns."""
        left = self.columns - columns
        cropped = Rows(self.batch, left, None if self.valid is None else self.valid[:, :left], None, self.first_epoch)
        if self.runs is not None:
            kept = [
                (row[0], *(run for run in row[1:] if run.token < count))
                for row, count in zip(self.runs, cropped.counts, strict=True)
            ]
            cropped.runs = None if all(row == _START for row in kept) else tuple(kept)
        return cropped

    def renumbered(self, epochs: Sequence[int]) -> Rows:
        """The same with ``epochs[i]`` in place of epoch i."""
        runs = self.runs or (_START,) * self.batch
        renamed = tuple(tuple(run._replace(epoch=epochs[run.epoch]) for run in row) for row in runs)
        plain = all(row == _START for row in renamed)
        return Rows(self.batch, self.columns, self.valid, None if plain else renamed, epochs[self.first_epoch])

    def select(self, rows: torch.Tensor) -> Rows:
        """Row ``i`` becomes what row ``rows[i]`` was."""
        runs = None if self.runs is None else tuple(self.runs[row] for row in rows.tolist())
        valid = None if self.valid is None else self.valid[rows.to(self.valid.device)]
        return Rows(len(rows), self.columns, valid, runs, self.first_epoch)


def _grown(runs: tuple[Run, ...], token: int, positions: torch.Tensor, epoch: int) -> tuple[Run, ...]:
    """The runs of a row of ``token`` own tokens that gets more at ``positions [n]``, all of them in ``epoch``."""
    if not len(positions):
        return runs
    breaks = (positions[1:] - positions[:-1] != 1).nonzero().flatten().tolist()
    for index in [0, *(before + 1 for before in breaks)]:
        run, last = Run(token + index, int(positions[index]), epoch), runs[-1]
        if last.token == run.token:  # nothing came of it
            runs = (*runs[:-1], run)
        elif last.epoch != epoch or run.position - last.position != run.token - last.token:
            runs = (*runs, run)
    return runs
