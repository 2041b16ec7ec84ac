"""``nf4 nf3 nf2``: levels at the quantiles of a normal distribution (QLoRA, arXiv 2305.14314, section 3).

Each group is mapped onto [-1, 1] by its mid-range and half-range, as KVQuant does for every table (arXiv 2401.18079,
section 3.3): ``x ~ scale * (table[code] - zero)``, so keys that are not centred lose nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from kvbits.codecs.grouped import Grouped, grouped_pattern
from kvbits.numerics import codebook
from kvbits.types import Params


@dataclass(frozen=True)
class NormalFloat(Grouped):
    """NormalFloat codes of 2, 3 or 4 bits. See :class:`Grouped`."""

    name: ClassVar[str] = "nf"
    chooses = "range"
    allowed_bits: ClassVar[tuple[int, ...]] = (2, 3, 4)
    levels: ClassVar[Literal["uniform", "table"]] = "table"
    pattern = grouped_pattern("nf", allowed_bits, "-channel|-static|-calibrated")
    examples = ("nf4", "nf3", "nf2", "nf4-gs32", "nf3-gs128", "nf2-channel", "nf3-static", "nf2-calibrated", "nf3-1%")

    def table(self, params: Params) -> torch.Tensor:
        return torch.tensor(codebook.normal_float(self.bits), dtype=torch.float32)
