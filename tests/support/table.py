"""The one table of schemes that drives the tests: what each spelling costs, and how well it must keep N(0, 1) data.

Figures are written down here rather than computed by kvbits, so that they can contradict it. Those of nuq, of static
scales and of outliers come from a simulation in NumPy that follows the papers: in float64, with scales and zeros as
they are stored, and with k-means on the samples themselves. Bounds hold on both sides: a codec that keeps more than
its bits allow is as wrong as one that keeps less.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

BLOCK, CHANNELS = 128, 64
"""Tokens and channels of the blocks that the figures are for."""

GROUPS = (16, 32, 64, 128)
TOLERANCE = 0.015
"""Of the expected error, on either side: four standard deviations of its estimate from :func:`normal_blocks`."""

NORMAL_ERROR: dict[str, tuple[float, float, float, float]] = {
    # RMS error over RMS value for groups of 16, 32, 64, 128 normal values, as stored (bf16 scale, fp16 zero).
    "int8": (0.00397, 0.00469, 0.00533, 0.00591),
    "int4": (0.06521, 0.07851, 0.08990, 0.09996),
    "int3": (0.13992, 0.16829, 0.19263, 0.21451),
    "int2": (0.32785, 0.39435, 0.45083, 0.50148),
    "nf4": (0.07467, 0.08425, 0.09053, 0.09485),
    "nf3": (0.14537, 0.16847, 0.18634, 0.20051),
    "nf2": (0.38824, 0.46344, 0.52338, 0.57269),
    "nuq4": (0.06271, 0.07370, 0.08218, 0.08825),
    "nuq3": (0.13197, 0.15411, 0.16872, 0.17896),
    "nuq2": (0.28360, 0.31745, 0.33626, 0.34592),
    "hqq8": (0.00386, 0.00465, 0.00532, 0.00591),
    "hqq4": (0.06079, 0.07414, 0.08630, 0.09736),
    "hqq3": (0.13027, 0.15880, 0.18476, 0.20845),
    "hqq2": (0.30510, 0.37103, 0.43164, 0.48678),
}
# The cache rotates, not the codec; and normal data that is rotated is normal data.
NORMAL_ERROR |= {f"rot{bits}": NORMAL_ERROR[f"int{bits}"] for bits in (4, 3, 2)}

OUTLIER_ERROR: dict[str, tuple[float, float, float, float]] = {
    # The same with 1 % of the elements stored exactly, which the ranges need not cover.
    "int8": (0.00374, 0.00432, 0.00479, 0.00515),
    "int4": (0.06137, 0.07216, 0.08073, 0.08715),
    "int3": (0.13160, 0.15513, 0.17319, 0.18684),
    "int2": (0.30837, 0.36296, 0.40512, 0.43719),
    "nf4": (0.07071, 0.07927, 0.08464, 0.08786),
    "nf3": (0.13733, 0.15736, 0.17141, 0.18112),
    "nf2": (0.36516, 0.42850, 0.47600, 0.50928),
    "nuq4": (0.05911, 0.06834, 0.07483, 0.07878),
    "nuq3": (0.12445, 0.14225, 0.15286, 0.15888),
    "nuq2": (0.26667, 0.29273, 0.30531, 0.30964),
}
OUTLIER_ERROR |= {f"rot{bits}": OUTLIER_ERROR[f"int{bits}"] for bits in (4, 3, 2)}

STATIC_ERROR: dict[str, tuple[float, float]] = {
    # One range for each of 2 x CHANNELS channels, taken from the 1,024 tokens that are then stored; and with 1 %.
    "int8": (0.00736, 0.00577),
    "int4": (0.12556, 0.09726),
    "int3": (0.26867, 0.20731),
    "int2": (0.63158, 0.48267),
    "nf4": (0.10326, 0.08869),
    "nf3": (0.23171, 0.19010),
    "nf2": (0.67495, 0.54494),
    "nuq4": (0.09753, 0.08290),
    "nuq3": (0.18991, 0.16362),
    "nuq2": (0.35290, 0.31320),
}
STATIC_ERROR |= {f"rot{bits}": STATIC_ERROR[f"int{bits}"] for bits in (4, 3, 2)}

QNORM_ERROR: dict[str, tuple[float, float]] = {
    # Per token and 64 channels, and static per channel: a little more error, for the mean and deviation of before.
    "nuq4": (0.08226, 0.09777),
    "nuq3": (0.16937, 0.19094),
    "nuq2": (0.34103, 0.35904),
}

LLOYD_MAX_ERROR: dict[str, float] = {
    # 200,000 normal vectors of 64 in float64 NumPy: levels of Max (1960, table I) nearest to x / rms(x), times the
    # scale that makes x . decoded = x . x. Long vectors approach e / sqrt(1 - e^2), where e^2 is Max's distortion.
    "lm4": 0.09458,
    "lm3": 0.18363,
    "lm2": 0.35793,
}


@dataclass(frozen=True)
class CodecCase:
    """One spelling of a codec.

    Attributes:
        spelling: what a user may write.
        error: expected relative RMS error on N(0, 1) data in blocks ``[BLOCK, CHANNELS]``.
        bits: bits per element there, scales and zeros included (exact: of a bfloat16 cache).
        code_bits: bits of one code; 0 where elements are stored exactly.
        per: ``token``, ``channel``, or another word where nothing is grouped.
        group: elements that share a scale; 0 where it is static.
        entries: outliers of a block.
        is_fitted: whether there is something to fit.
        calibrated: whether that has to see calibration samples.
    """

    spelling: str
    error: float
    bits: float
    code_bits: int
    per: str
    group: int
    entries: int = 0
    is_fitted: bool = False
    calibrated: bool = False

    @property
    def static(self) -> bool:
        """Whether every channel has a scale and a zero of its own, for all tokens."""
        return self.per == "channel" and self.group == 0

    @property
    def family(self) -> str:
        """``int``, ``nuq``, ...: the spelling up to the bits."""
        return re.split(r"\d|-", self.spelling)[0]

    @property
    def bounds(self) -> tuple[float, float]:
        """Lowest and highest error that passes."""
        return self.error * (1 - TOLERANCE), self.error * (1 + TOLERANCE)

    def __str__(self) -> str:
        return self.spelling


@dataclass(frozen=True)
class SchemeCase:
    """One spelling of a scheme: the codecs it stands for, and whether keys are stored before their RoPE."""

    spelling: str
    key: CodecCase
    value: CodecCase
    pre_rope: bool = False

    @property
    def bits(self) -> float:
        """Bits per element of K and V together."""
        return (self.key.bits + self.value.bits) / 2

    def __str__(self) -> str:
        return self.spelling


ENTRIES = {"": 0, "-0.5%": 40, "-1%": 80, "-2%": 160}
"""Outliers of a block of 8,192 elements: 40.96, 81.92 and 163.84, to the nearest multiple of 8."""


def _grouped(family: str, per: str, group: int, spelling: str, error: float | None = None) -> CodecCase:
    size = min(group, CHANNELS) if per == "token" else group  # a group never reaches beyond its token
    code_bits = int(family[-1])
    share = next((share for share in ENTRIES if share and share in spelling), "")
    if error is None:
        table = OUTLIER_ERROR if share else NORMAL_ERROR
        error = table[family][GROUPS.index(size)] if size else STATIC_ERROR[family][bool(share)]
    bits = code_bits + (32 / size if size else 0) + ENTRIES[share] * 32 / (BLOCK * CHANNELS)
    fitted = family.startswith("nuq")
    is_fitted, calibrated = fitted or not size, fitted or "calibrated" in spelling
    return CodecCase(spelling, error, bits, code_bits, per, size, ENTRIES[share], is_fitted, calibrated)


def _codecs() -> tuple[CodecCase, ...]:
    cases = [
        CodecCase("exact", 0.0, 16.0, 0, "element", 1),
        CodecCase("fp8", 0.02510, 8 + 16 / CHANNELS, 8, "token", CHANNELS),
        CodecCase("fp8-static", 0.02644, 8.0, 8, "layer", 0, is_fitted=True),
        CodecCase("fp8-calibrated", 0.02644, 8.0, 8, "layer", 0, is_fitted=True, calibrated=True),
    ]
    for name, error in LLOYD_MAX_ERROR.items():
        cases.append(CodecCase(name, error, int(name[-1]) + 16 / CHANNELS, int(name[-1]), "token", CHANNELS))
    for family in NORMAL_ERROR:
        token = f"{family}-token" if family.startswith("nuq") else family
        for share in ("", "-1%") if family in OUTLIER_ERROR else ("",):
            cases.append(_grouped(family, "token", 64, f"{token}{share}"))
            cases.append(_grouped(family, "channel", 32, f"{family}-channel{share}"))
            for group in GROUPS:
                cases.append(_grouped(family, "token", group, f"{token}-gs{group}{share}"))
                cases.append(_grouped(family, "channel", group, f"{family}-channel-gs{group}{share}"))
            if family in STATIC_ERROR:
                cases.append(_grouped(family, "channel", 0, f"{family}-static{share}"))
                if not family.startswith("nuq"):
                    cases.append(_grouped(family, "channel", 0, f"{family}-calibrated{share}"))
    for family, (per_token, static) in QNORM_ERROR.items():
        cases.append(_grouped(family, "token", 64, f"{family}-token-qnorm", per_token))
        cases.append(_grouped(family, "channel", 0, f"{family}-static-qnorm", static))
    cases += (
        _grouped("int3", "channel", 128, "int3-channel-gs128-0.5%", 0.19636),
        _grouped("int2", "channel", 0, "int2-static-2%", 0.43176),
        _grouped("nuq2", "token", 64, "nuq2-token-2%-qnorm", 0.29160),
        _grouped("nuq2", "channel", 0, "nuq2-static-1%-qnorm", 0.31769),
    )
    return tuple(cases)


CODECS = _codecs()
CODEC: dict[str, CodecCase] = {case.spelling: case for case in CODECS}

_AS_OTHERS = re.compile(r".*-gs.*|(int|nf|rot)\d-calibrated.*|rot\d-.*")
"""Other lengths of groups; what is encoded as -static is; what is encoded as int is, and rotated by the cache."""

DEFAULTS = tuple(case for case in CODECS if not _AS_OTHERS.fullmatch(case.spelling))
"""Each method, width and direction once, without and with outliers."""

QUANTIZED = tuple(case for case in DEFAULTS if case.code_bits)
GROUPED = tuple(case for case in QUANTIZED if case.family not in ("fp", "lm"))


def _scheme(spelling: str, key: str, value: str) -> SchemeCase:
    pre_rope = re.match(r"(k=)?(nuq\d|int4-calibrated)(-[\d.]+%)?(-qnorm)?(,|/|$)", spelling)
    return SchemeCase(spelling, CODEC[key], CODEC[value], pre_rope is not None)


CATALOGUE_SCHEMES = (
    *(
        _scheme(name, name, name)
        for name in ("exact", "fp8", "fp8-static", "fp8-calibrated", *NORMAL_ERROR, *LLOYD_MAX_ERROR)
        if not name.startswith("nuq")
    ),
    *(_scheme(name, f"{name}-static", f"{name}-token") for name in ("nuq4", "nuq3", "nuq2")),
    _scheme("int4-calibrated", "int4-calibrated", "int4"),
    _scheme("kivi4", "int4-channel", "int4-gs32"),
    _scheme("kivi2", "int2-channel", "int2-gs32"),
)
"""The names of the catalogue."""

SCHEMES = (
    *CATALOGUE_SCHEMES,
    *(
        _scheme(f"{f}-gs{g}", *(f"{f}-token-gs{g}" if f.startswith("nuq") else f"{f}-gs{g}",) * 2)
        for f in NORMAL_ERROR
        for g in (32, 64, 128)
    ),
    *(_scheme(f"{f}-channel", f"{f}-channel", f"{f}-channel") for f in NORMAL_ERROR),
    *(
        _scheme(f"k={key},v={value}", key, value)
        for key, value in (
            ("exact", "int4"),
            ("int8", "int4"),
            ("int4", "int2-gs32"),
            ("int4-channel", "int3"),
            ("fp8", "nf4-gs32"),
            ("hqq4-channel-gs64", "fp8-static"),
            ("nf3-channel-gs128", "hqq2-gs128"),
            ("int2-channel-gs32", "nf2"),
        )
    ),
    _scheme("k=kivi4,v=kivi2", "int4-channel", "int2-gs32"),
    *(_scheme(f"{name}-1%", f"{name}-1%", f"{name}-1%") for name in OUTLIER_ERROR if not name.startswith("nuq")),
    *(_scheme(f"{name}-1%", f"{name}-static-1%", f"{name}-token-1%") for name in ("nuq4", "nuq3", "nuq2")),
    _scheme("kivi4-1%", "int4-channel-1%", "int4-gs32-1%"),
    _scheme("kivi2-1%", "int2-channel-1%", "int2-gs32-1%"),
    _scheme("int4-calibrated-1%", "int4-calibrated-1%", "int4-1%"),
    _scheme("nuq3-qnorm", "nuq3-static-qnorm", "nuq3-token-qnorm"),
    *(
        _scheme(f"k={key},v={value}", key, value)
        for key, value in (
            ("int4-calibrated", "int4-calibrated"),
            ("int4-1%", "int4"),
            ("int4", "int4-1%"),
            ("nuq3-static-1%", "int4"),
            ("int4-channel-1%", "lm4"),
            ("nuq2-static-1%-qnorm", "nuq2-token-2%-qnorm"),
            ("int2-static-2%", "int3-channel-gs128-0.5%"),
            ("fp8-calibrated", "rot3-static"),
        )
    ),
    _scheme("k=nuq4,v=int4-calibrated", "nuq4-static", "int4-calibrated"),
    _scheme("nuq3-1%/int4", "nuq3-static-1%", "int4"),
)
"""Every catalogue name, its variants, and pairs."""


def normal_blocks(seed: int = 0) -> torch.Tensor:
    """The data that the errors are expected for: ``[2, 2, 4, BLOCK, CHANNELS]``, rows, heads and blocks."""
    return torch.randn(2, 2, 4, BLOCK, CHANNELS, generator=torch.Generator().manual_seed(seed))


def samples_of(x: torch.Tensor) -> torch.Tensor:
    """Blocks ``[..., H, N, T, D]`` as samples to fit: ``[..., H, N * T, D]``, one leading dimension."""
    x = x[(None,) * max(0, 5 - x.ndim)]
    return x.flatten(0, -5).flatten(2, 3)


def relative_error(decoded: torch.Tensor, x: torch.Tensor) -> float:
    """RMS error over RMS value."""
    return float((decoded.double() - x.double()).norm() / x.double().norm())
