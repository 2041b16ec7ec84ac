"""``int8 int4 int3 int2``: uniform levels between the minimum and the maximum of each group.

Per token this is the arithmetic of Hugging Face's quanto cache (scale and a float zero per 64 channels); per channel
it is KIVI's key half (arXiv 2402.02750, section 3). ``x ~ scale * (code - zero)``, scale = (max - min) / (2^b - 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvbits.codecs.grouped import Grouped, grouped_pattern
from kvbits.numerics import affine, groups
from kvbits.types import Packed, Params


@dataclass(frozen=True)
class Affine(Grouped):
    """Min/max affine codes of 2, 3, 4 or 8 bits. See :class:`Grouped`."""

    name: ClassVar[str] = "int"
    allowed_bits: ClassVar[tuple[int, ...]] = (2, 3, 4, 8)
    pattern = grouped_pattern("int", allowed_bits)
    examples = ("int8", "int4", "int3", "int2", "int4-gs32", "int4-gs128", "int2-channel", "int4-channel-gs128")

    def encode(self, x: torch.Tensor, params: Params) -> Packed:
        grouped, dim = groups.split(x.float(), self.per, self.group)
        scale, zero = affine.choose_qparams(grouped, dim, 0, 2**self.bits - 1)
        codes = affine.quantize(grouped, scale, zero, self.bits)
        return self.pack(codes, scale, zero, dim, x.shape[-1])
