"""The one table of schemes that drives the tests: what each spelling costs, and how well it must keep N(0, 1) data.

Figures are written down here rather than computed by kvbits, so that they can contradict it. Bounds hold on both
sides: a codec that keeps more than its bits allow is as wrong as one that keeps less.
"""

from __future__ import annotations

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
    "hqq8": (0.00386, 0.00465, 0.00532, 0.00591),
    "hqq4": (0.06079, 0.07414, 0.08630, 0.09736),
    "hqq3": (0.13027, 0.15880, 0.18476, 0.20845),
    "hqq2": (0.30510, 0.37103, 0.43164, 0.48678),
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
        group: elements that share a scale.
    """

    spelling: str
    error: float
    bits: float
    code_bits: int
    per: str
    group: int

    @property
    def bounds(self) -> tuple[float, float]:
        """Lowest and highest error that passes."""
        return self.error * (1 - TOLERANCE), self.error * (1 + TOLERANCE)

    def __str__(self) -> str:
        return self.spelling


@dataclass(frozen=True)
class SchemeCase:
    """One spelling of a scheme: the codecs it stands for."""

    spelling: str
    key: CodecCase
    value: CodecCase

    @property
    def bits(self) -> float:
        """Bits per element of K and V together."""
        return (self.key.bits + self.value.bits) / 2

    def __str__(self) -> str:
        return self.spelling


def _grouped(family: str, per: str, group: int, spelling: str) -> CodecCase:
    size = min(group, CHANNELS) if per == "token" else group  # a group never reaches beyond its token
    code_bits = int(family[-1])
    error = NORMAL_ERROR[family][GROUPS.index(size)]
    return CodecCase(spelling, error, code_bits + 32 / size, code_bits, per, size)


def _codecs() -> tuple[CodecCase, ...]:
    cases = [
        CodecCase("exact", 0.0, 16.0, 0, "element", 1),
        CodecCase("fp8", 0.02510, 8 + 16 / CHANNELS, 8, "token", CHANNELS),
        CodecCase("fp8-static", 0.02644, 8.0, 8, "layer", 0),
    ]
    for family in NORMAL_ERROR:
        cases.append(_grouped(family, "token", 64, family))
        cases.append(_grouped(family, "channel", 32, f"{family}-channel"))
        for group in GROUPS:
            cases.append(_grouped(family, "token", group, f"{family}-gs{group}"))
            cases.append(_grouped(family, "channel", group, f"{family}-channel-gs{group}"))
    return tuple(cases)


CODECS = _codecs()
CODEC: dict[str, CodecCase] = {case.spelling: case for case in CODECS}

DEFAULTS = tuple(case for case in CODECS if "-gs" not in case.spelling)
"""Each method, width and direction once."""

QUANTIZED = tuple(case for case in DEFAULTS if case.code_bits)
GROUPED = tuple(case for case in QUANTIZED if not case.spelling.startswith("fp8"))


def _scheme(spelling: str, key: str, value: str) -> SchemeCase:
    return SchemeCase(spelling, CODEC[key], CODEC[value])


CATALOGUE_SCHEMES = (
    *(_scheme(name, name, name) for name in ("exact", "fp8", "fp8-static", *NORMAL_ERROR)),
    _scheme("kivi4", "int4-channel", "int4-gs32"),
    _scheme("kivi2", "int2-channel", "int2-gs32"),
)
"""The names of the catalogue."""

SCHEMES = (
    *CATALOGUE_SCHEMES,
    *(_scheme(f"{f}-gs{g}", f"{f}-gs{g}", f"{f}-gs{g}") for f in NORMAL_ERROR for g in (32, 64, 128)),
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
)
"""Every catalogue name, its variants, and pairs."""


def normal_blocks(seed: int = 0) -> torch.Tensor:
    """The data that the errors are expected for: ``[2, 2, 4, BLOCK, CHANNELS]``, rows, heads and blocks."""
    return torch.randn(2, 2, 4, BLOCK, CHANNELS, generator=torch.Generator().manual_seed(seed))


def relative_error(decoded: torch.Tensor, x: torch.Tensor) -> float:
    """RMS error over RMS value."""
    return float((decoded.double() - x.double()).norm() / x.double().norm())
