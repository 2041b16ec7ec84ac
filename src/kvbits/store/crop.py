"""What a crop leaves of a row, in numbers alone: which blocks, which late sinks, how many exact tokens.

A row of a layer is ``[sinks | packed blocks | late sinks | recent]``; in the text its late sinks stand among the packed
tokens (:mod:`kvbits.store.late_sinks`). A crop takes the last tokens of the text, wherever they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kvbits.store.late_sinks import not_late
from kvbits.store.room import Limits


class Crop(NamedTuple):
    """What a crop leaves of one row.

    Attributes:
        blocks: whole ones that stay packed.
        border: tokens of the next block that are exact from now on.
        held: exact tokens.
        late: late sinks.
        back: late sinks that become recent tokens, since no packed token is left after them.
    """

    blocks: int
    border: int
    held: int
    late: tuple[int, ...]
    back: tuple[int, ...] = ()

    def ranks(self, limits: Limits) -> torch.Tensor:
        """Which of ``[border | back]`` come first, second and so on in the text, int64 on the CPU."""
        rank = torch.arange(self.border) + self.blocks * limits.block
        border = not_late(((*self.late, *self.back),), limits.sinks, rank)[0]
        return torch.cat([border, torch.tensor(self.back, dtype=torch.int64)]).argsort()


def crop_row(gone: int, left: int, held: int, packed: int, late: tuple[int, ...], limits: Limits) -> Crop:
    """What is left of a row when it loses its last ``gone`` own tokens and keeps the first ``left``.

    Args:
        gone, left: together all tokens of the row.
        held, packed: its exact tokens and its packed blocks.
        late: own numbers of its late sinks.
        limits: of the layer.
    """
    sinks, block = min(held, limits.sinks), limits.block
    older = gone - (held - sinks - len(late))  # tokens to lose that are not recent
    if older <= 0:
        return Crop(packed, 0, held - gone, late)
    stay = [token for token in late if token < left]
    within = packed * block - (older - (len(late) - len(stay)))  # packed tokens that remain; below 0, sinks go too
    blocks, border = max(0, within) // block, max(0, within) % block
    # Late sinks come before the last packed token: the others are recent tokens again.
    kept = [token for i, token in enumerate(stay) if token - sinks - i < blocks * block]
    back = stay[len(kept) :]
    return Crop(blocks, border, sinks + min(0, within) + border + len(stay), tuple(kept), tuple(back))


def whole_tokens(left: int, packed: int, late: Sequence[int], limits: Limits) -> int:
    """How many of its first ``left`` tokens a row can keep without decoding a block.

    All of them where the crop goes through the recent tokens or through the sinks; else it must be where a block ends.

    Args:
        left: at most all tokens of the row.
        packed: its packed blocks.
        late: own numbers of its late sinks.
        limits: of the layer.
    """
    sinks, block = limits.sinks, limits.block
    if not packed or left >= sinks + packed * block + len(late):
        return left
    while left > sinks and (left - sinks - sum(token < left for token in late)) % block:
        left -= 1
    return left
