"""One quantization method per file. ``CODECS`` is the table that the docs and the tests read.

:func:`register` adds a codec of another package to those that a scheme can name.
"""

from kvbits.codecs.affine import Affine
from kvbits.codecs.base import Choice, Codec
from kvbits.codecs.check import check
from kvbits.codecs.exact import Exact
from kvbits.codecs.fp8 import Fp8, Fp8Static
from kvbits.codecs.grouped import Grouped, grouped_pattern
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
    "grouped_pattern",
    "known",
    "register",
    "unregister",
]

_REGISTERED: list[type[Codec]] = []


def known() -> tuple[type[Codec], ...]:
    """The codecs that a scheme can name: those of kvbits, then those that were registered."""
    return *CODECS, *_REGISTERED


def register(kind: type[Codec]) -> type[Codec]:
    """Let schemes name a codec of another package; a decorator too. A file saved under it loads where it is registered.

    Raises:
        TypeError: if ``kind`` is no :class:`Codec`.
        ValueError: if its spelling is no name or that of another, if ``encode`` makes other parts than ``layout``
            says, or if it decodes otherwise than its format, which kernels read (:mod:`kvbits.codecs.check`).
    """
    if not (isinstance(kind, type) and issubclass(kind, Codec)):
        raise TypeError(f"{kind!r} is not a codec; give a subclass of kvbits.codecs.Codec, such as one of Grouped")
    if kind in known():
        return kind
    check(kind, known())
    _REGISTERED.append(kind)
    return kind


def unregister(kind: type[Codec]) -> None:
    """Take a registered codec away again."""
    if kind not in _REGISTERED:
        raise ValueError(f"{kind!r} is not registered; registered are {[each.__name__ for each in _REGISTERED]}")
    _REGISTERED.remove(kind)
