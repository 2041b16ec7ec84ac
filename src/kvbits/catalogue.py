"""The catalogue: every name a user can write, what it is, where it comes from. Feeds the command line, docs, tests."""

from __future__ import annotations

from dataclasses import dataclass

from kvbits.codecs import Affine, Codec, Exact, Fp8, Fp8Static, HalfQuadratic, NormalFloat


@dataclass(frozen=True, slots=True)
class Entry:
    """One name of the catalogue.

    Attributes:
        name: what the user writes.
        key, value: the codecs it stands for.
        formula: what is stored, in one line.
        paper: where it is from.
        advice: when to take it.
    """

    name: str
    key: Codec
    value: Codec
    formula: str
    paper: str
    advice: str


def _same(codec: Codec, formula: str, paper: str, advice: str) -> Entry:
    return Entry(str(codec), codec, codec, formula, paper, advice)


_MINMAX = "x ~ scale (code - zero), scale = (max - min) / (2^b - 1) per token and 64 channels"
_QUANTO = "Hugging Face quantized cache, quanto backend"
_NORMAL = "x ~ scale (table[code] - zero), table = normal quantiles, per token and 64 channels"
_QLORA = "QLoRA, arXiv 2305.14314, section 3"
_SPLIT = "as int, with the zero that minimises sum |error|^0.7 (half-quadratic splitting)"
_HQQ = "HQQ, Badri & Shaji 2023; Hugging Face quantized cache, hqq backend"
_KIVI = "KIVI, arXiv 2402.02750, section 3"
_KIVI_FORMULA = "K: x ~ scale (code - zero) per channel and 32 tokens; V: per token and 32 channels"


def _kivi(bits: int, advice: str) -> Entry:
    key, value = Affine(bits, "channel", 32), Affine(bits, "token", 32)
    return Entry(f"kivi{bits}", key, value, _KIVI_FORMULA, _KIVI, advice)


CATALOGUE: tuple[Entry, ...] = (
    _same(Exact(), "x", "the model itself", "the yardstick: what every scheme is compared with"),
    _same(Affine(8), _MINMAX, _QUANTO, "closest to exact; about half the bytes of a 16-bit cache"),
    _same(Affine(4), _MINMAX, _QUANTO, "the usual 4 bits; kivi4 spends 0.5 bits more on the keys and values"),
    _same(Affine(3), _MINMAX, _QUANTO, "for comparison"),
    _same(Affine(2), _MINMAX, _QUANTO, "for comparison: at 2 bits take kivi2, whose keys are per channel"),
    _same(NormalFloat(4), _NORMAL, _QLORA, "as int4, for values that look normal"),
    _same(NormalFloat(3), _NORMAL, _QLORA, "for comparison"),
    _same(NormalFloat(2), _NORMAL, _QLORA, "for comparison"),
    _same(
        Fp8(),
        "x ~ scale e4m3, one scale per token and head",
        "OCP FP8 (arXiv 2209.05433)",
        "8 bits, for any range of values",
    ),
    _same(Fp8Static(), "x ~ scale e4m3, one scale per layer", "Hugging Face and vLLM fp8 caches", "exactly 8 bits"),
    _same(HalfQuadratic(8), _SPLIT, _HQQ, "for comparison"),
    _same(HalfQuadratic(4), _SPLIT, _HQQ, "as int4, slower to encode"),
    _same(HalfQuadratic(3), _SPLIT, _HQQ, "for comparison"),
    _same(HalfQuadratic(2), _SPLIT, _HQQ, "for comparison"),
    _kivi(4, "the recommended one: 5 bits"),
    _kivi(2, "the smallest to try: 3 bits"),
)

RECOMMENDED = "kivi4"
"""What the command line takes where no scheme is named."""

BY_NAME: dict[str, Entry] = {entry.name: entry for entry in CATALOGUE}
