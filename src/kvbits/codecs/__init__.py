"""One quantization method per file. ``CODECS`` is the table that the grammar, the docs and the tests read."""

from kvbits.codecs.affine import Affine
from kvbits.codecs.base import Choice, Codec
from kvbits.codecs.exact import Exact
from kvbits.codecs.fp8 import Fp8, Fp8Static
from kvbits.codecs.grouped import Grouped
from kvbits.codecs.half_quadratic import HalfQuadratic
from kvbits.codecs.lloyd_max import LloydMax
from kvbits.codecs.non_uniform import NonUniform
from kvbits.codecs.normal_float import NormalFloat
from kvbits.codecs.rotated import Rotated

CODECS: tuple[type[Codec], ...] = (
    Exact, Affine, NormalFloat, NonUniform, Rotated, LloydMax, HalfQuadratic, Fp8, Fp8Static,
)  # fmt: skip

__all__ = [
    "CODECS",
    "Affine",
    "Choice",
    "Codec",
    "Exact",
    "Fp8",
    "Fp8Static",
    "Grouped",
    "HalfQuadratic",
    "LloydMax",
    "NonUniform",
    "NormalFloat",
    "Rotated",
]
