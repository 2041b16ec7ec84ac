"""A codec that kvbits does not know, over a format that it knows, is encoded by its kernels from the first day on."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, Literal

import pytest
import torch

from blocks import assert_same_bits, normal
from kvbits import encode
from kvbits.codecs import Affine, Codec, NonUniform
from kvbits.codecs.grouped import Grouped
from kvbits.encode.triton.encode import why_not_blocks
from kvbits.types import Params

NEVER = re.compile("(?!)")


@dataclass(frozen=True)
class Renamed(Affine):
    """A subclass that changes nothing of what is encoded."""

    pattern = NEVER


@dataclass(frozen=True)
class Cubes(Grouped):
    """Levels of its own in a table, chosen by the range of a group."""

    name: ClassVar[str] = "cubes"
    allowed_bits: ClassVar[tuple[int, ...]] = (2, 3, 4)
    levels: ClassVar[Literal["uniform", "table"]] = "table"
    chooses = "range"
    pattern = NEVER

    def table(self, params: Params) -> torch.Tensor:
        return torch.linspace(-1, 1, 2**self.bits) ** 3


@dataclass(frozen=True)
class Lopsided(Cubes):
    """As it decodes, but codes go up as soon as they leave a level's last quarter."""

    def edges(self, params: Params) -> torch.Tensor:
        table = self.table(params)
        return table[:-1] + (table[1:] - table[:-1]) * 0.75


@dataclass(frozen=True)
class Halved(Affine):
    """Half the range of each group: it chooses by itself, and does not say how."""

    pattern = NEVER

    def choose(
        self, grouped: torch.Tensor, dim: int, weights: torch.Tensor | None, chosen: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return super().choose(grouped / 2, dim, weights, chosen)


@dataclass(frozen=True)
class Clipped(NonUniform):
    """Likewise, of a codec with a table that is fitted."""

    pattern = NEVER

    def to_codes(self, grouped: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, params: Params) -> torch.Tensor:
        return super().to_codes(grouped, scale, zero, params).clamp(max=1)


@pytest.mark.parametrize(
    "codec", [Renamed(4), Renamed(3, "channel", 32), Cubes(4), Cubes(2, "channel", 16), Lopsided(3)]
)
def test_a_codec_that_says_how_it_chooses_is_encoded_natively(codec: Codec) -> None:
    x = normal(2, 3, 2, 64, 40)
    assert encode.choose(codec, x).name == "native"
    assert not [why for why in why_not_blocks(codec, x) if "say how they choose" in why]
    assert_same_bits(encode.encode(codec, x, {}), codec.encode(x, {}))


class Mixin:
    """What decides may also stand in a class that is no codec."""

    def to_codes(self, grouped: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, params: Params) -> torch.Tensor:
        return super().to_codes(grouped, scale, zero, params).clamp(max=1)  # type: ignore[misc]


@dataclass(frozen=True)
class Mixed(Mixin, Affine):
    pattern = NEVER


@pytest.mark.parametrize("codec", [Halved(4), Clipped(2), Mixed(4)])
def test_a_codec_that_chooses_in_its_own_way_is_left_to_itself(codec: Codec) -> None:
    x = normal(2, 3, 2, 64, 40)
    params = codec.fit(x.transpose(1, 2).flatten(0, 1)) if codec.is_fitted else {}
    assert codec.chooses is None and encode.choose(codec, x).name == "reference"
    assert any("say how they choose" in why for why in why_not_blocks(codec, x))
    ours, stock = encode.encode(codec, x, params), (Affine(4) if isinstance(codec, Affine) else NonUniform(2))
    assert_same_bits(ours, codec.encode(x, params))
    assert not torch.equal(ours["codes"], encode.encode(stock, x, params)["codes"])
