"""What the grouped codecs share: bits, direction and length of a group, their spelling and their layout."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeVar

import torch

from kvbits.codecs.base import Codec
from kvbits.numerics import affine, bitpack, codebook, groups, outliers
from kvbits.types import Format, Packed, Params, Part

GROUPS = (16, 32, 64, 128)
_DEFAULT_GROUP = {"token": 64, "channel": 32}
MOST_OUTLIERS = 0.1
"""Largest fraction of outliers: each costs 32 bits, so that beyond it more bits are the better way."""
OUTLIER_STEP = 1e-5
"""Fractions are rounded to this, a thousandth of a percent: less than one entry of any block."""
Self = TypeVar("Self", bound="Grouped")

_DIRECTION: dict[str, tuple[groups.Along, int | None]] = {
    "": ("token", None),
    "-token": ("token", None),
    "-channel": ("channel", None),
    "-static": ("channel", 0),
    "-calibrated": ("channel", 0),
}


def grouped_pattern(name: str, bits: tuple[int, ...], directions: str = "-channel") -> re.Pattern[str]:
    """Spellings ``<name><bits>[<direction>][-gs<group>][-<percent>%]``; ``directions`` are separated by ``|``."""
    percent = r"(?:-(?P<percent>\d+(?:\.\d+)?|\.\d+)%)?"
    return re.compile(
        rf"{name}(?P<bits>{'|'.join(map(str, bits))})(?P<direction>{directions})?(?:-gs(?P<group>\d+))?{percent}"
    )


def spell_percent(fraction: float) -> str:
    """``-1%`` for 0.01, and nothing for 0."""
    return f"-{100 * fraction:.3f}".rstrip("0").rstrip(".") + "%" if fraction else ""


@dataclass(frozen=True)
class Grouped(Codec):
    """A code per element, and a scale and a zero per group: ``x ~ scale * (level - zero)``.

    Attributes:
        bits: bits per code.
        per: ``token`` (groups of neighbouring channels) or ``channel`` (groups of neighbouring tokens).
        group: elements in a group, at most head_dim per token; 0 per channel: one static scale and zero for each
            channel, which cost nothing per token (KVQuant, arXiv 2401.18079, section 3.1).
        outliers: fraction of the elements that are stored exactly beside the codes (KVQuant, section 3.4).
        calibrated: static scales come from calibration, not from the first tokens that are packed.
    """

    name: ClassVar[str]
    allowed_bits: ClassVar[tuple[int, ...]]
    levels: ClassVar[Literal["uniform", "table"]] = "uniform"
    dense_only: ClassVar[str] = ""
    """Why the method has neither static scales nor outliers; empty where it has."""

    bits: int
    per: groups.Along = "token"
    group: int = 64
    outliers: float = 0.0
    calibrated: bool = False

    def __post_init__(self) -> None:
        if self.bits not in self.allowed_bits:
            raise ValueError(f"{self.name} has no {self.bits} bits; allowed are {self.allowed_bits}")
        if self.per not in _DEFAULT_GROUP:
            raise ValueError(f"per={self.per!r} is not a direction; allowed are {tuple(_DEFAULT_GROUP)}")
        if self.group not in GROUPS and (self.group, self.per) != (0, "channel"):
            raise ValueError(f"{self.name}{self.bits} has no groups of {self.group}; allowed are {GROUPS}")
        if not 0 <= self.outliers <= MOST_OUTLIERS:
            raise ValueError(
                f"outliers of {100 * self.outliers:g}% do not pay, at 32 bits each; give 0% to {100 * MOST_OUTLIERS:g}%"
            )
        if self.dense_only and (self.outliers or self.group == 0):
            raise ValueError(
                f"{self.name} has no {'outliers' if self.outliers else 'static scales'}: {self.dense_only}"
            )
        if self.calibrated and self.group:
            raise ValueError(
                f"{self.name}{self.bits} has scales of its own in each block; only static ones are calibrated"
            )
        if self.outliers:  # as a name spells it, so that the name parses back
            object.__setattr__(self, "outliers", max(OUTLIER_STEP, round(self.outliers, 5)))

    @classmethod
    def from_match(cls: type[Self], match: re.Match[str]) -> Self:
        direction = match["direction"] or ""
        per, group = _DIRECTION[direction]
        if group == 0 and match["group"]:
            raise ValueError(f"{match[0]}: a static scale has no groups; leave out -gs{match['group']}")
        length = group if group == 0 else int(match["group"] or _DEFAULT_GROUP[per])
        outliers = float(match["percent"] or 0) / 100
        return cls(int(match["bits"]), per, length, outliers, direction == "-calibrated")

    def __str__(self) -> str:
        return f"{self.name}{self.bits}{self.spell_groups()}{spell_percent(self.outliers)}"

    def spell_groups(self) -> str:
        """Direction and group, as they stand in the codec's name."""
        if self.group == 0:
            return "-calibrated" if self.calibrated else "-static"
        direction = "-channel" if self.per == "channel" else ""
        return direction + ("" if self.group == _DEFAULT_GROUP[self.per] else f"-gs{self.group}")

    @property
    def is_fitted(self) -> bool:
        return self.static

    @property
    def needs_calibration(self) -> bool:
        return self.calibrated

    @property
    def static(self) -> bool:
        """Whether scale and zero are the layer's: float32 ``[H, D]`` in the params."""
        return self.group == 0

    @property
    def format(self) -> Format:
        return Format(self.bits, self.levels, self.per, self.group, zero=True, outliers=self.outliers > 0)

    @property
    def block_multiple(self) -> int:
        return max(8, self.group) if self.per == "channel" else 8

    def layout(self, tokens: int, channels: int, dtype: torch.dtype) -> tuple[Part, ...]:
        parts = [Part("codes", "codes", torch.uint8, (bitpack.packed_rows(tokens, self.bits), channels))]
        if not self.static:
            shape = groups.group_shape(tokens, channels, self.per, self.group)
            parts.append(Part("scale", "scales", affine.SCALE_DTYPE, shape))
            parts.append(Part("zero", "zeros", affine.ZERO_DTYPE, shape))
        if count := outliers.entries(self.outliers, tokens, channels):
            parts.append(Part("outlier_index", "outliers", outliers.INDEX_DTYPE, (count,)))
            parts.append(Part("outlier_value", "outliers", outliers.VALUE_DTYPE, (count,)))
        return tuple(parts)

    # -- choosing --------------------------------------------------------------------------------------------------

    @property
    def span(self) -> tuple[float, float]:
        """Lowest and highest level."""
        return (-1, 1) if self.levels == "table" else (0, 2**self.bits - 1)

    def fit(self, samples: torch.Tensor, weights: torch.Tensor | None = None) -> Params:
        if not self.static:
            return {}
        low, high = self.inlier_range(samples)
        # A channel that hardly moves in the samples may do so later: it gets a thousandth of the range of the others.
        wide = (high - low).mean(dim=-1, keepdim=True)
        spare = (torch.where(wide > 0, wide, 1.0) * 1e-3 - (high - low)).clamp(min=0) / 2
        low, high = low - spare, high + spare
        scale, zero = affine.qparams_of_range(low, high, *self.span, torch.float32, torch.float32)
        return {"scale": scale, "zero": zero}

    @property
    def saturates(self) -> bool:
        return self.static or type(self).saturation is not Grouped.saturation

    def saturation(self, x: torch.Tensor, params: Params) -> str | None:
        if not self.static:
            return None
        level = affine.to_levels(x, *(params[name].to(x.device)[:, None, None] for name in ("scale", "zero")))
        bottom, top = self.span
        margin = (top - bottom) / 4
        share = float(((level < bottom - margin) | (level > top + margin)).float().mean())
        if share <= 2 * self.outliers + 0.01:
            return None
        return (
            f"{100 * share:.2g}% of the elements lie far outside the static ranges of {self} and saturate; calibrate "
            "on text like this, or use a scheme with scales of its own in each block"
        )

    def inlier_range(self, samples: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Range ``[H, D]`` of each channel over ``samples [N, H, T, D]``, without the outliers, half on either side."""
        x = samples.float().transpose(0, 1).flatten(1, 2)  # [H, N * T, D]
        drop = math.floor(x.shape[1] * self.outliers / 2)
        if not drop:
            return x.amin(1), x.amax(1)
        x = x.transpose(1, 2).contiguous()
        low, high = (x.topk(drop + 1, dim=-1, largest=largest, sorted=False).values for largest in (False, True))
        return low.amax(-1), high.amin(-1)

    def to_codes(self, grouped: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, params: Params) -> torch.Tensor:
        """The code (uint8) of the level nearest to each element."""
        edges = self.edges(params)
        if edges is None:
            return affine.quantize(grouped, scale, zero, self.bits)
        return codebook.between(affine.to_levels(grouped, scale, zero), edges.to(grouped.device))

    def choose(
        self, grouped: torch.Tensor, dim: int, weights: torch.Tensor | None, chosen: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scale and zero of each group, from its elements that are not ``chosen`` as outliers."""
        return affine.choose_qparams(grouped, dim, *self.span, outside=chosen)

    def statics(self, x: torch.Tensor, params: Params) -> tuple[torch.Tensor, torch.Tensor]:
        """Static scales and zeros ``[H, D]`` where blocks ``x [..., H, N, T, D]`` are.

        Raises:
            ValueError: if they are for other heads.
        """
        heads, channels = x.shape[-4] if x.ndim > 3 else 1, x.shape[-1]
        fitted = tuple(params["scale"].shape)
        if fitted != (heads, channels):
            raise ValueError(
                f"the static scales of {self} are for {fitted[0]} heads of {fitted[1]} channels, "
                f"not for {heads} of {channels}: they were taken from another layer or model"
            )
        return params["scale"].to(x.device), params["zero"].to(x.device)

    def encode(self, x: torch.Tensor, params: Params) -> Packed:
        x = x.float()
        tokens, channels = x.shape[-2:]
        count = outliers.entries(self.outliers, tokens, channels)
        if self.static:
            scale, zero = (each[:, None, None] for each in self.statics(x, params))  # [H, 1, 1, D]
            packed = {"codes": bitpack.pack(self.to_codes(x, scale, zero, params), self.bits)}
            if count:
                index, value = outliers.pick(x - self._decode_dense(packed, params), count)
                packed.update(outlier_index=index, outlier_value=value)
            return packed
        grouped, dim = groups.split(x, self.per, self.group)
        weights = groups.weights(channels, self.per, self.group, x.device)
        chosen = outliers.find(grouped, dim, count, weights) if count else None
        scale, zero = self.choose(grouped, dim, weights, chosen)
        codes = groups.join(self.to_codes(grouped, scale, zero, params), self.per, channels)
        packed = {"codes": bitpack.pack(codes, self.bits), "scale": scale.squeeze(dim), "zero": zero.squeeze(dim)}
        if chosen is not None:
            where = groups.join(chosen, self.per, channels)
            index, value = outliers.at(where, x - self._decode_dense(packed, params))
            packed.update(outlier_index=index, outlier_value=value)
        return packed

    # -- decoding --------------------------------------------------------------------------------------------------

    def to_levels(self, codes: torch.Tensor, params: Params) -> torch.Tensor:
        """Levels of unpacked codes; uniform levels are the codes themselves."""
        table = self.table(params)
        if table is None:
            return codes
        # index_select on a flat int32 index: four times as fast on a CPU as table[codes]
        return table.to(codes.device).index_select(0, codes.flatten().int()).view(codes.shape)

    def _decode_dense(self, packed: Packed, params: Params) -> torch.Tensor:
        """What the codes alone decode to: float32 ``[..., T, D]``."""
        codes = packed["codes"]
        tokens, channels = codes.shape[-2] * 8 // self.bits, codes.shape[-1]
        out = torch.empty(*codes.shape[:-2], tokens, channels, dtype=torch.float32, device=codes.device)
        self._decode_dense_into(out, packed, params)
        return out

    def decode(self, packed: Packed, params: Params) -> torch.Tensor:
        out = self._decode_dense(packed, params)
        if "outlier_index" in packed:
            outliers.add_into(out, packed["outlier_index"], packed["outlier_value"])
        return out

    def decode_into(self, out: torch.Tensor, packed: Packed, params: Params) -> None:
        self._decode_dense_into(out, packed, params)
        if "outlier_index" in packed:
            outliers.add_into(out, packed["outlier_index"], packed["outlier_value"])

    def _decode_dense_into(self, out: torch.Tensor, packed: Packed, params: Params) -> None:
        # In place: a tile of float temporaries costs more in page faults than all the arithmetic on it.
        if self.levels == "uniform":
            bitpack.unpack_into(out, packed["codes"], self.bits)
        else:
            out.copy_(self.to_levels(bitpack.unpack(packed["codes"], self.bits), params))
        if self.static:
            scale, zero = (params[name].to(out.device)[:, None, None] for name in ("scale", "zero"))
            out.sub_(zero).mul_(scale)
            return
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
