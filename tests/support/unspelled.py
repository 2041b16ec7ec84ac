"""Codecs that no scheme can name: formats that the kernel knows before the catalogue does."""

from __future__ import annotations

import dataclasses
import functools
import re
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from kernel_calls import PLAIN, cached_view, view_in
from kvbits.attend import KVView
from kvbits.codecs import Affine, Codec, Fp8, Fp8Static, NormalFloat
from kvbits.codecs.grouped import Grouped
from kvbits.numerics import affine, bitpack, codebook, groups, outliers
from kvbits.schemes.scheme import Scheme
from kvbits.types import Format, Packed, Params, Part
from views import SMALL, Shape, random


@dataclass(frozen=True)
class Unspelled(Codec):
    """A codec of these tests, which no scheme can name."""

    pattern: ClassVar[re.Pattern[str]] = re.compile("(?!)")
    examples: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def from_match(cls, match: re.Match[str]) -> Codec:
        raise AssertionError

    def __str__(self) -> str:
        return type(self).__name__.lower()


@dataclass(frozen=True)
class WithOutliers(Unspelled):
    """Another codec, and the largest of what it misses beside it."""

    dense: Codec
    count: int
    used: float = 1.0

    @property
    def format(self) -> Format:
        return dataclasses.replace(self.dense.format, outliers=True)

    @property
    def block_multiple(self) -> int:
        return self.dense.block_multiple

    @property
    def is_fitted(self) -> bool:
        return self.dense.is_fitted

    def layout(self, tokens: int, channels: int, dtype: torch.dtype) -> tuple[Part, ...]:
        return (
            *self.dense.layout(tokens, channels, dtype),
            Part("outlier_index", "outliers", outliers.INDEX_DTYPE, (self.count,)),
            Part("outlier_value", "outliers", outliers.VALUE_DTYPE, (self.count,)),
        )

    def table(self, params: Params) -> torch.Tensor | None:
        return self.dense.table(params)

    def fit(self, samples: torch.Tensor, weights: torch.Tensor | None = None) -> Params:
        return self.dense.fit(samples)

    def encode(self, x: torch.Tensor, params: Params) -> Packed:
        packed = self.dense.encode(x, params)
        rest = (x.float() - self.dense.decode(packed, params)) * 3  # so that leaving one out shows
        index, value = outliers.pick(rest, self.count)
        spare = torch.arange(self.count) >= round(self.count * self.used)
        index = index.to(torch.int64).masked_fill(spare, 0).to(outliers.INDEX_DTYPE)
        return {**packed, "outlier_index": index, "outlier_value": value.masked_fill(spare, 0)}

    def decode(self, packed: Packed, params: Params) -> torch.Tensor:
        dense = {name: part for name, part in packed.items() if not name.startswith("outlier")}
        out = self.dense.decode(dense, params).clone()
        outliers.add_into(out, packed["outlier_index"], packed["outlier_value"])
        return out


@dataclass(frozen=True)
class PerChannel(Unspelled):
    """One scale, and perhaps one zero, for each channel of each head for good; levels uniform or from the params."""

    bits: int = 4
    levels: Literal["uniform", "table"] = "uniform"
    zero: bool = True

    @property
    def is_fitted(self) -> bool:
        return True

    @property
    def format(self) -> Format:
        return Format(self.bits, self.levels, "channel", 0, self.zero)

    def layout(self, tokens: int, channels: int, dtype: torch.dtype) -> tuple[Part, ...]:
        return (Part("codes", "codes", torch.uint8, (bitpack.packed_rows(tokens, self.bits), channels)),)

    def table(self, params: Params) -> torch.Tensor | None:
        return params["table"] if self.levels == "table" else None

    def fit(self, samples: torch.Tensor, weights: torch.Tensor | None = None) -> Params:
        low, high = samples.float().amin((0, 2)), samples.float().amax((0, 2))  # [H, D]
        levels = self.all_levels()
        scale = (high - low) / (levels[-1] - levels[0])
        return {"scale": scale, "zero": levels[0] - low / scale if self.zero else torch.zeros(()), "table": levels}

    def all_levels(self) -> torch.Tensor:
        return torch.arange(2.0**self.bits) if self.levels == "uniform" else uneven(self.bits)

    def encode(self, x: torch.Tensor, params: Params) -> Packed:
        scale, zero = self._spread(params)
        return {"codes": bitpack.pack(codebook.nearest(x.float() / scale + zero, self.all_levels()), self.bits)}

    def decode(self, packed: Packed, params: Params) -> torch.Tensor:
        scale, zero = self._spread(params)
        return (self.all_levels()[bitpack.unpack(packed["codes"], self.bits).long()] - zero) * scale

    @staticmethod
    def _spread(params: Params) -> tuple[torch.Tensor, torch.Tensor]:
        """For ``[B, H, n, T, D]``."""
        zero = params["zero"]
        return params["scale"][:, None, None], zero[:, None, None] if zero.ndim else zero


def uneven(bits: int) -> torch.Tensor:
    """Ascending levels with nothing regular about them, 1.0 among them."""
    levels = (random(2**bits, seed=bits) * 2 - 1).sort().values
    levels[-1] = 1.0 if levels[-2] < 1.0 else 9.0
    return levels


@dataclass(frozen=True)
class Fitted(Grouped):
    """A table that was fitted, in the params, with scale and zero per group."""

    name: ClassVar[str] = "fitted"
    allowed_bits: ClassVar[tuple[int, ...]] = (2, 3, 4)
    levels: ClassVar[Literal["uniform", "table"]] = "table"
    pattern: ClassVar[re.Pattern[str]] = re.compile("(?!)")
    examples: ClassVar[tuple[str, ...]] = ()

    @property
    def is_fitted(self) -> bool:
        return True

    def table(self, params: Params) -> torch.Tensor | None:
        return params["table"]

    def fit(self, samples: torch.Tensor, weights: torch.Tensor | None = None) -> Params:
        return {"table": uneven(self.bits)}

    def encode(self, x: torch.Tensor, params: Params) -> Packed:
        table = params["table"]
        grouped, dim = groups.split(x.float(), self.per, self.group)
        scale, zero = affine.choose_qparams(grouped, dim, float(table[0]), float(table[-1]))
        codes = groups.join(codebook.nearest(affine.to_levels(grouped, scale, zero), table), self.per, x.shape[-1])
        return {"codes": bitpack.pack(codes, self.bits), "scale": scale.squeeze(dim), "zero": zero.squeeze(dim)}

    def decode_into(self, out: torch.Tensor, packed: Packed, params: Params) -> None:
        levels = params["table"][bitpack.unpack(packed["codes"], self.bits).long()]
        grouped, dim = groups.split(levels, self.per, self.group)
        scale, zero = packed["scale"].float().unsqueeze(dim), packed["zero"].float().unsqueeze(dim)
        out.copy_(groups.join((grouped - zero) * scale, self.per, out.shape[-1]))


NEW: dict[str, Codec] = {
    "static": PerChannel(4),
    "static without zero": PerChannel(8, zero=False),
    "static of 3 bits": PerChannel(3),
    "static of 2 bits": PerChannel(2),
    "static table of 4 bits": PerChannel(4, "table"),
    "static table of 3 bits": PerChannel(3, "table"),
    "static table of 2 bits without zero": PerChannel(2, "table", zero=False),
    "fitted table of 4 bits": Fitted(4),
    "fitted table of 3 bits": Fitted(3, "token", 16),
    "fitted table of 2 bits": Fitted(2),
    "fitted table of 4 bits per channel": Fitted(4, "channel", 32),
    "fitted table of 3 bits per channel": Fitted(3, "channel", 16),
    "outliers of int4": WithOutliers(Affine(4), 25),
    "outliers of int3 per channel": WithOutliers(Affine(3, "channel", 16), 25),
    "one outlier": WithOutliers(Affine(2), 1),
    "a fifth are outliers": WithOutliers(Affine(2), 400),
    "outliers of nf4": WithOutliers(NormalFloat(4), 25),
    "outliers of fp8": WithOutliers(Fp8(), 25),
    "outliers of fp8-static": WithOutliers(Fp8Static(), 25),
    "outliers of static": WithOutliers(PerChannel(3), 25),
    "outliers of fitted table": WithOutliers(Fitted(3), 25),
    "unused outliers": WithOutliers(Affine(4), 25, used=0.5),
    "only unused outliers": WithOutliers(Affine(4), 25, used=0.0),
}


@functools.cache
def view_of_new(name: str, side: str, shape: Shape, counts: tuple[int, ...]) -> KVView:
    key, value = (NEW[name] if side in (which, "both") else Affine(8) for which in ("keys", "values"))
    return view_in(Scheme(key, value, residual=20, block=32), shape, counts)


STORED = (
    "kivi4",
    "int3",
    "nf2",
    "hqq8-channel",
    "fp8",
    "fp8-static",
    "exact",
    *list(NEW)[:1],
    "one outlier",
)


def stored_as(kind: str, counts: tuple[int, ...]) -> KVView:
    if kind in NEW:
        return view_of_new(kind, "both", PLAIN, counts)
    return cached_view(PLAIN, counts, f"{kind},{SMALL}")
