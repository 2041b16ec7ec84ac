"""What the grouped codecs share: bits, direction and length of a group, their spelling and their layout."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeVar

import torch

from kvbits.codecs.base import Codec
from kvbits.numerics import affine, bitpack, groups
from kvbits.types import Format, Packed, Params, Part

GROUPS = (16, 32, 64, 128)
_DEFAULT_GROUP = {"token": 64, "channel": 32}
Self = TypeVar("Self", bound="Grouped")


def grouped_pattern(name: str, bits: tuple[int, ...]) -> re.Pattern[str]:
    """Spellings ``<name><bits>[-channel][-gs<group>]``."""
    return re.compile(rf"{name}(?P<bits>{'|'.join(map(str, bits))})(?P<channel>-channel)?(?:-gs(?P<group>\d+))?")


@dataclass(frozen=True)
class Grouped(Codec):
    """A code per element, and a scale and a zero per group: ``x ~ scale * (level - zero)``.

    Attributes:
        bits: bits per code.
        per: ``token`` (groups of neighbouring channels) or ``channel`` (groups of neighbouring tokens).
        group: elements in a group; at most head_dim counts per token.
    """

    name: ClassVar[str]
    allowed_bits: ClassVar[tuple[int, ...]]
    levels: ClassVar[Literal["uniform", "table"]] = "uniform"

    bits: int
    per: groups.Along = "token"
    group: int = 64

    def __post_init__(self) -> None:
        if self.bits not in self.allowed_bits:
            raise ValueError(f"{self.name} has no {self.bits} bits; allowed are {self.allowed_bits}")
        if self.per not in _DEFAULT_GROUP:
            raise ValueError(f"per={self.per!r} is not a direction; allowed are {tuple(_DEFAULT_GROUP)}")
        if self.group not in GROUPS:
            raise ValueError(f"{self.name}{self.bits} has no groups of {self.group}; allowed are {GROUPS}")

    @classmethod
    def from_match(cls: type[Self], match: re.Match[str]) -> Self:
        per: groups.Along = "channel" if match["channel"] else "token"
        return cls(int(match["bits"]), per, int(match["group"] or _DEFAULT_GROUP[per]))

    def __str__(self) -> str:
        direction = "-channel" if self.per == "channel" else ""
        group = "" if self.group == _DEFAULT_GROUP[self.per] else f"-gs{self.group}"
        return f"{self.name}{self.bits}{direction}{group}"

    @property
    def format(self) -> Format:
        return Format(self.bits, self.levels, self.per, self.group, zero=True)

    @property
    def block_multiple(self) -> int:
        return max(8, self.group) if self.per == "channel" else 8

    def layout(self, tokens: int, channels: int, dtype: torch.dtype) -> tuple[Part, ...]:
        shape = groups.group_shape(tokens, channels, self.per, self.group)
        rows = bitpack.packed_rows(tokens, self.bits)
        return (
            Part("codes", "codes", torch.uint8, (rows, channels)),
            Part("scale", "scales", affine.SCALE_DTYPE, shape),
            Part("zero", "zeros", affine.ZERO_DTYPE, shape),
        )

    def pack(self, codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, dim: int, channels: int) -> Packed:
        """Grouped codes and their parameters, as they lie in the block."""
        codes = groups.join(codes, self.per, channels)
        return {"codes": bitpack.pack(codes, self.bits), "scale": scale.squeeze(dim), "zero": zero.squeeze(dim)}

    def to_levels(self, codes: torch.Tensor) -> torch.Tensor:
        """Levels of unpacked codes; uniform levels are the codes themselves."""
        return codes

    def decode(self, packed: Packed, params: Params) -> torch.Tensor:
        codes = packed["codes"]
        tokens, channels = codes.shape[-2] * 8 // self.bits, codes.shape[-1]
        out = torch.empty(*codes.shape[:-2], tokens, channels, dtype=torch.float32, device=codes.device)
        self.decode_into(out, packed, params)
        return out

    def decode_into(self, out: torch.Tensor, packed: Packed, params: Params) -> None:
        # In place: a tile of float temporaries costs more in page faults than all the arithmetic on it.
        if self.levels == "uniform":
            bitpack.unpack_into(out, packed["codes"], self.bits)
        else:
            out.copy_(self.to_levels(bitpack.unpack(packed["codes"], self.bits)))
        scale, zero, channels = packed["scale"].float(), packed["zero"].float(), out.shape[-1]
        if self.per == "channel":
            scale, zero = scale.unsqueeze(-2), zero.unsqueeze(-2)
            out = out.unflatten(-2, (-1, self.group))
        elif scale.shape[-1] > 1:  # else one group per token and head, which broadcasts as it is
            length = groups.group_length(channels, self.group)
            if channels % length:
                scale, zero = (x.repeat_interleave(length, -1)[..., :channels] for x in (scale, zero))
            else:
                scale, zero = scale.unsqueeze(-1), zero.unsqueeze(-1)
                out = out.unflatten(-1, (-1, length))
        out.sub_(zero).mul_(scale)
