"""``fp8`` and ``fp8-static``: e4m3 floating point, scaled per token and head, or once per layer and tensor.

One static scale for a whole tensor (as in Hugging Face's and vLLM's fp8 caches) loses small keys beside large ones
and saturates on what came later; ``fp8`` spends 16 bits per token and head to exclude both. ``fp8-static`` keeps the
static scale for those who want exactly 8 bits: with headroom of 8x, and a warning where a value still saturates.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from kvbits.codecs.base import Codec
from kvbits.numerics import affine, float8
from kvbits.types import Format, Packed, Params, Part

HEADROOM = 8.0
"""How far above the largest sample a static scale reaches; e4m3 pays for it with 3 of its 18 octaves, not in bits."""


@dataclass(frozen=True)
class Fp8(Codec):
    """e4m3 with a scale per token and head: ``x ~ scale * e4m3``."""

    chooses = "magnitude"
    pattern = re.compile("fp8")
    examples = ("fp8",)

    @classmethod
    def from_match(cls, match: re.Match[str]) -> Fp8:
        return cls()

    def __str__(self) -> str:
        return "fp8"

    @property
    def format(self) -> Format:
        return Format(8, "e4m3", "token", 0, zero=False)

    def layout(self, tokens: int, channels: int, dtype: torch.dtype) -> tuple[Part, ...]:
        return (
            Part("codes", "codes", torch.uint8, (tokens, channels)),
            Part("scale", "scales", affine.SCALE_DTYPE, (tokens, 1)),
        )

    def encode(self, x: torch.Tensor, params: Params) -> Packed:
        x = x.float()
        largest = x.abs().amax(-1, keepdim=True)
        constant = (x == x[..., :1]).all(-1, keepdim=True)
        # A constant token gets its own value as the scale: exact where bfloat16 holds it.
        scale = torch.where(constant, largest, largest / float8.E4M3_MAX)
        scale = torch.where(constant, scale.to(affine.SCALE_DTYPE), affine.round_up(scale, affine.SCALE_DTYPE))
        return {"codes": float8.encode(x / affine.safe_divisor(scale)), "scale": scale}

    def decode(self, packed: Packed, params: Params) -> torch.Tensor:
        return float8.decode(packed["codes"]).mul_(packed["scale"].float())


@dataclass(frozen=True)
class Fp8Static(Codec):
    """e4m3 with one scale per layer and tensor.

    Attributes:
        calibrated: the scale comes from calibration, not from the first tokens that are packed.
    """

    chooses = "fixed"
    pattern = re.compile("fp8-(?P<source>static|calibrated)")
    examples = ("fp8-static", "fp8-calibrated")

    calibrated: bool = False

    @classmethod
    def from_match(cls, match: re.Match[str]) -> Fp8Static:
        return cls(match["source"] == "calibrated")

    def __str__(self) -> str:
        return "fp8-calibrated" if self.calibrated else "fp8-static"

    @property
    def is_fitted(self) -> bool:
        return True

    @property
    def needs_calibration(self) -> bool:
        return self.calibrated

    @property
    def format(self) -> Format:
        return Format(8, "e4m3", "layer", 0, zero=False)

    def layout(self, tokens: int, channels: int, dtype: torch.dtype) -> tuple[Part, ...]:
        return (Part("codes", "codes", torch.uint8, (tokens, channels)),)

    def fit(self, samples: torch.Tensor, weights: torch.Tensor | None = None) -> Params:
        largest = samples.abs().amax().float()
        # Of denormal samples the scale itself would be rounded to zero.
        scale = (largest * (HEADROOM / float8.E4M3_MAX)).clamp(min=torch.finfo(torch.float32).tiny)
        return {"scale": torch.where(largest == 0, 1.0, scale)}

    def saturation(self, x: torch.Tensor, params: Params) -> str | None:
        largest, limit = float(x.abs().amax()), float(params["scale"]) * float8.E4M3_MAX
        if largest <= limit:
            return None
        return (
            f"a value of magnitude {largest:.4g} saturates at {limit:.4g}, {HEADROOM:g} times the largest value that "
            f"the scale of {self} was taken from; use fp8 (a scale per token) instead"
        )

    def encode(self, x: torch.Tensor, params: Params) -> Packed:
        return {"codes": float8.encode(x.float() / params["scale"])}

    def decode(self, packed: Packed, params: Params) -> torch.Tensor:
        return float8.decode(packed["codes"]).mul_(params["scale"])
