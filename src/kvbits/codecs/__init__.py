"""Floor 1: one quantization method per file. ``CODECS`` is the table that the grammar, the docs and the tests read."""

from kvbits.codecs.affine import Affine
from kvbits.codecs.base import Codec
from kvbits.codecs.exact import Exact
from kvbits.codecs.fp8 import Fp8, Fp8Static
from kvbits.codecs.half_quadratic import HalfQuadratic
from kvbits.codecs.normal_float import NormalFloat

CODECS: tuple[type[Codec], ...] = (Exact, Affine, NormalFloat, HalfQuadratic, Fp8, Fp8Static)

__all__ = ["CODECS", "Affine", "Codec", "Exact", "Fp8", "Fp8Static", "HalfQuadratic", "NormalFloat"]
