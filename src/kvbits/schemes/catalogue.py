"""The catalogue: every name a user can write, what it is, where it comes from. Feeds the command line, docs, tests."""

from __future__ import annotations

from dataclasses import dataclass

from kvbits.codecs import (
    Affine,
    Codec,
    Exact,
    Fp8,
    Fp8Static,
    HalfQuadratic,
    LloydMax,
    NonUniform,
    NormalFloat,
    Rotated,
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One name of the catalogue.

    Attributes:
        name: what the user writes.
        key, value: the codecs it stands for.
        formula: what is stored, in one line.
        paper: where it is from.
        advice: when to take it.
        pre_rope, centred: what the scheme of this name begins with; see :class:`kvbits.Scheme`.
    """

    name: str
    key: Codec
    value: Codec
    formula: str
    paper: str
    advice: str
    pre_rope: bool = False
    centred: bool = False


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


_KVQUANT = "KVQuant, arXiv 2401.18079, sections 3.1 to 3.4"
_KVQUANT_FORMULA = "x ~ scale (table[code] - zero), table fitted; K: static per channel, before RoPE; V: as nf"
_ROTATED = "as int, after a Hadamard rotation over head_dim"
_QUAROT = "QuaRot, arXiv 2404.00456, section 4.2"
_DIRECTIONS = "rotated; x ~ scale table[code], scale per token and head, table = Lloyd-Max levels of N(0, 1)"
_TURBO = "TurboQuant, arXiv 2504.19874, algorithm 1"


def _non_uniform(bits: int, advice: str) -> Entry:
    key, value = NonUniform(bits, "channel", 0), NonUniform(bits, "token", 64)
    return Entry(f"nuq{bits}", key, value, _KVQUANT_FORMULA, _KVQUANT, advice, pre_rope=True)


CATALOGUE: tuple[Entry, ...] = (
    _same(Exact(), "x", "the model itself", "the yardstick: what every scheme is compared with"),
    _same(Affine(8), _MINMAX, _QUANTO, "closest to exact; about half the bytes of a 16-bit cache"),
    _same(Affine(4), _MINMAX, _QUANTO, "the usual 4 bits; default is smaller"),
    _same(Affine(3), _MINMAX, _QUANTO, "for comparison"),
    _same(Affine(2), _MINMAX, _QUANTO, "for comparison: at 2 bits take small"),
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
    _non_uniform(4, "calibrated; nuq4-1% keeps 1 % of the elements exactly beside the codes"),
    _non_uniform(3, "calibrated; take nuq3-1%"),
    _non_uniform(2, "calibrated; take nuq2-1%"),
    Entry(
        "int4-calibrated",
        Affine(4, "channel", 0, calibrated=True),
        Affine(4),
        "K: x ~ scale (code - zero), static per channel, before RoPE; V: as int4",
        "KVQuant, arXiv 2401.18079, sections 3.1 and 3.2",
        "calibrated; for comparison",
        pre_rope=True,
    ),
    _same(Fp8Static(calibrated=True), "x ~ scale e4m3, one scale per layer", "vLLM fp8 cache", "calibrated fp8-static"),
    _same(Rotated(4), _ROTATED, _QUAROT, "take rot4,centred"),
    _same(Rotated(3), _ROTATED, _QUAROT, "take rot3,centred"),
    _same(Rotated(2), _ROTATED, _QUAROT, "for comparison"),
    _same(LloydMax(4), _DIRECTIONS, _TURBO, "take lm4,centred, as default does"),
    _same(LloydMax(3), _DIRECTIONS, _TURBO, "take lm3,centred"),
    _same(LloydMax(2), _DIRECTIONS, _TURBO, "take lm2,centred, as small does"),
    _kivi(4, "nothing fitted, nothing rotated; keys with outlier channels"),
    _kivi(2, "as kivi4, in 3 bits; small takes less"),
)

ALIASES: dict[str, str] = {"default": "lm4,centred,block=64", "small": "lm2,centred,block=64"}
"""Names that stand for whole schemes, without calibration; docs/decisions.md says why these."""

ALIAS_ADVICE: dict[str, str] = {"default": "the recommended one", "small": "the smallest to try"}
"""When to take each of them."""

RECOMMENDED = "default"
"""What the command line takes where no scheme is named."""

BY_NAME: dict[str, Entry] = {entry.name: entry for entry in CATALOGUE}
