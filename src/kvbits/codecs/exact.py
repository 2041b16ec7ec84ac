"""``exact``: the elements themselves, in the model's dtype. What every other codec is measured against."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from kvbits.codecs.base import Codec
from kvbits.types import Format, Packed, Params, Part


@dataclass(frozen=True)
class Exact(Codec):
    """No quantization."""

    pattern = re.compile("exact")
    examples = ("exact",)

    @classmethod
    def from_match(cls, match: re.Match[str]) -> Exact:
        return cls()

    def __str__(self) -> str:
        return "exact"

    @property
    def format(self) -> Format:
        return Format(0, "exact", "element", 0, zero=False)

    def layout(self, tokens: int, channels: int, dtype: torch.dtype) -> tuple[Part, ...]:
        return (Part("codes", "codes", dtype, (tokens, channels)),)

    def encode(self, x: torch.Tensor, params: Params) -> Packed:
        return {"codes": x}

    def decode(self, packed: Packed, params: Params) -> torch.Tensor:
        return packed["codes"]
