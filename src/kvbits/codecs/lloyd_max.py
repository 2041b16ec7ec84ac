"""``lm4 lm3 lm2``: length and direction; rotated, with the levels that are best for a normal distribution.

After a random rotation the channels of a vector look like N(0, |x|^2 / D), whatever it was before. The Lloyd-Max levels
of N(0, 1) (Max 1960; Lloyd 1982) and one 16-bit scale for each token and head are then all that is needed (TurboQuant,
arXiv 2504.19874, algorithm 1, without its second, 1-bit stage, which was found to do harm in practice).

Levels with the least squared error are too short: ``x . decoded`` is less than ``x . x``, by 12 % at 2 bits, so all
scores shrink. The scale makes them equal (RaBitQ, arXiv 2405.12497, section 3.2, divides by ``<o, o_bar>`` to the same
end). It costs no bits, and halves the KL of 2-bit keys and values.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvbits.codecs.base import Codec
from kvbits.numerics import affine, bitpack, codebook
from kvbits.types import Format, Packed, Params, Part

BITS = (2, 3, 4)


@dataclass(frozen=True)
class LloydMax(Codec):
    """``x ~ scale * table[code]``, table[code] nearest to ``x / rms(x)``; a scale for each token and head."""

    rotates: ClassVar[bool] = True
    chooses = "norm"
    pattern = re.compile(r"lm(?P<bits>[234])")
    examples = ("lm4", "lm3", "lm2")

    bits: int

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ValueError(f"lm has no {self.bits} bits; allowed are {BITS}")

    @classmethod
    def from_match(cls, match: re.Match[str]) -> LloydMax:
        return cls(int(match["bits"]))

    def __str__(self) -> str:
        return f"lm{self.bits}"

    @property
    def format(self) -> Format:
        return Format(self.bits, "table", "token", 0, zero=False)

    def layout(self, tokens: int, channels: int, dtype: torch.dtype) -> tuple[Part, ...]:
        return (
            Part("codes", "codes", torch.uint8, (bitpack.packed_rows(tokens, self.bits), channels)),
            Part("scale", "scales", affine.SCALE_DTYPE, (tokens, 1)),
        )

    def table(self, params: Params) -> torch.Tensor:
        return torch.tensor(codebook.lloyd_max(self.bits), dtype=torch.float32)

    def encode(self, x: torch.Tensor, params: Params) -> Packed:
        x = x.float()
        # By the largest element first: squares of 1e30 overflow, and those of 1e-30 vanish. Sums in float64 are the
        # same in whatever order, once rounded.
        largest = affine.safe_divisor(x.abs().amax(-1, keepdim=True))
        unit = x / largest
        square = unit.double().square().sum(-1, keepdim=True)
        rms = (square / x.shape[-1]).sqrt().float()
        table = self.table(params).to(x.device)
        codes = codebook.nearest(unit / affine.safe_divisor(rms), table)
        product = (unit.double() * table.double()[codes.long()]).sum(-1, keepdim=True)
        scale = torch.where(square > 0, square / product, 0.0).float() * largest
        return {"codes": bitpack.pack(codes, self.bits), "scale": scale.to(affine.SCALE_DTYPE)}

    def decode(self, packed: Packed, params: Params) -> torch.Tensor:
        codes = bitpack.unpack(packed["codes"], self.bits)
        levels = self.table(params).to(codes.device).index_select(0, codes.flatten().int()).view(codes.shape)
        return levels.mul_(packed["scale"].float())
