"""``rot4 rot3 rot2``: uniform levels of rotated channels (QuaRot, arXiv 2404.00456, section 4.2).

A random Hadamard rotation over head_dim spreads what stands out in one channel over all of them, and leaves q . k as
it is; the cache rotates before it encodes (see :mod:`kvbits.numerics.hadamard`), and kernels rotate the query, and the
output back, once a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvbits.codecs.affine import Affine
from kvbits.codecs.grouped import grouped_pattern


@dataclass(frozen=True)
class Rotated(Affine):
    """Min/max affine codes of 2, 3 or 4 bits, rotated. See :class:`kvbits.codecs.grouped.Grouped`."""

    name: ClassVar[str] = "rot"
    allowed_bits: ClassVar[tuple[int, ...]] = (2, 3, 4)
    rotates: ClassVar[bool] = True
    pattern = grouped_pattern("rot", allowed_bits, "-channel|-static|-calibrated")
    examples = ("rot4", "rot3", "rot2", "rot4-gs32", "rot3-channel-gs128", "rot2-static", "rot4-1%")
