"""``int8 int4 int3 int2``: uniform levels between the minimum and the maximum of each group.

Per token this is the arithmetic of Hugging Face's quanto cache (scale and a float zero per 64 channels); per channel
it is KIVI's key half (arXiv 2402.02750, section 3). ``x ~ scale * (code - zero)``, scale = (max - min) / (2^b - 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvbits.codecs.grouped import Grouped, grouped_pattern


@dataclass(frozen=True)
class Affine(Grouped):
    """Min/max affine codes of 2, 3, 4 or 8 bits. See :class:`Grouped`."""

    name: ClassVar[str] = "int"
    chooses = "range"
    allowed_bits: ClassVar[tuple[int, ...]] = (2, 3, 4, 8)
    pattern = grouped_pattern("int", allowed_bits, "-channel|-static|-calibrated")
    examples: ClassVar[tuple[str, ...]] = (
        "int8", "int4", "int3", "int2", "int4-gs32", "int4-gs128", "int2-channel", "int4-channel-gs128",
        "int4-static", "int3-calibrated", "int4-1%", "int3-channel-gs128-0.5%", "int2-static-2%",
    )  # fmt: skip
