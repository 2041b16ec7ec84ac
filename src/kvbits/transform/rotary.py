"""``Rotary``: the rotary embedding of the layers that share it, and the angles of their packed blocks.

Keys come roped; a scheme may store them unroped. They are unroped by ``position * frequencies`` and roped again by the
very same angles, so a stored key is right whatever the frequencies: only how well its channels compress depends on
their being the model's own. Some scalings change the frequencies when a text grows long (dynamic NTK, longrope): each
change begins an *epoch*, and the keys of a block are unroped and roped with those of the epoch they were computed in.
"""

from __future__ import annotations

import torch

from kvbits.store.room import angles
from kvbits.store.rows import Rows
from kvbits.transform.transform import Rope


class Rotary:
    """The angles of one rotary embedding.

    Args:
        frequencies: float ``[R/2]``, radians from one position to the next, of each pair of channels.
        interleaved: which channels make a pair; see :mod:`kvbits.numerics.rope`.

    Attributes:
        epochs: float64 ``[R/2]`` each; whoever sees the model change its frequencies appends the new ones.
    """

    def __init__(self, frequencies: torch.Tensor, interleaved: bool = False) -> None:
        self.epochs = [frequencies.detach().double().cpu()]
        self.interleaved = interleaved
        self._steps: dict[tuple[int, torch.device, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._bases: dict[tuple[object, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def __deepcopy__(self, memo: dict[int, object]) -> Rotary:
        """The same: a model's embedding, which a copied cache shares."""
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of the angles that are kept."""
        return sum(x.nbytes for pair in (*self._steps.values(), *self._bases.values()) for x in pair)

    @property
    def channels(self) -> int:
        """Channels of a head that are roped, the first ones; the others pass."""
        return 2 * len(self.epochs[0])

    def cos_sin(self, positions: torch.Tensor, epoch: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Of int64 ``positions [...]``: float32 ``[..., R/2]`` each, on the device of ``positions``."""
        angle = positions.cpu().double()[..., None] * self.epochs[epoch]
        return angle.cos().float().to(positions.device), angle.sin().float().to(positions.device)

    def rope(self, rows: Rows, first: int, block: int, count: int, device: torch.device) -> Rope:
        """Angles of ``count`` blocks of ``block`` tokens in every row; the first begins at own token ``first``."""
        # All blocks share the angles within a block. Those of the epoch that the text began in are exact for it all
        # where it began long, and close enough for the quick channels of what follows a change.
        steps = self._steps.get((block, device, rows.first_epoch))
        if steps is None:
            if len(self._steps) > 8:
                self._steps.clear()
            steps = self.cos_sin(torch.arange(block, device=device), rows.first_epoch)
            self._steps[block, device, rows.first_epoch] = steps
        cos, sin = self._base(rows, first, block, count, device)
        return Rope(cos[:, :count], sin[:, :count], *steps, self.interleaved)

    def _base(
        self, rows: Rows, first: int, block: int, count: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """At least ``count`` rows of angles, kept until more are asked for."""
        key = (rows.runs, first, block, device)
        held = self._bases.get(key)
        if held is not None and held[0].shape[1] >= count:
            return held
        if held is None and len(self._bases) > 8:
            self._bases.clear()
        room = angles(count)
        tokens = first + block * torch.arange(room)
        where = [rows.positions(row, tokens) for row in range(1 if rows.runs is None else len(rows.runs))]
        pairs = []
        for positions, epochs in where:
            frequencies = torch.stack(self.epochs)[epochs]
            angle = positions.double()[:, None] * frequencies
            pairs.append((angle.cos().float(), angle.sin().float()))
        cos, sin = (torch.stack(side).to(device) for side in zip(*pairs, strict=True))
        self._bases[key] = cos, sin
        return cos, sin
