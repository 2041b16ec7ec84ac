"""Blocks of hard numbers, and how packed parts are compared."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any
from unittest import mock

import torch

from kvbits.backends import library
from kvbits.codecs import CODECS, Codec, NonUniform
from kvbits.codecs.grouped import Grouped
from kvbits.codecs.half_quadratic import P_NORM, HalfQuadratic
from kvbits.numerics import groups, outliers
from kvbits.types import Packed, Params

MODULE, _, REASON = library()

EXAMPLES = sorted({example for kind in CODECS for example in kind.examples})

HQQ = [name for name in EXAMPLES if name.startswith("hqq")]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Channels of different size, and away from zero, as keys have them."""
    generator = seeded(seed)
    channels = shape[-1]
    spread, middle = torch.rand(channels, generator=generator) * 3, torch.randn(channels, generator=generator)
    return (torch.randn(*shape, generator=generator) * spread + middle).to(dtype)


def hard(dtype: torch.dtype) -> torch.Tensor:
    """Blocks ``[12, 128, 64]`` of what arithmetic stumbles over."""
    normal_ones = torch.randn(128, 64, generator=seeded(5))
    coin = torch.rand(128, 64, generator=seeded(6)) < 0.5
    tiny, large = (1e-6, 3e4) if dtype == torch.float16 else (1e-38, 9e37)
    blocks = [
        torch.zeros(128, 64),
        -torch.zeros(128, 64),
        torch.where(coin, 0.0, -0.0),
        torch.full((128, 64), 0.1),
        torch.full((128, 64), -3.0),
        torch.where(coin, tiny, tiny * 1.5),
        normal_ones * tiny,  # subnormal in part
        normal_ones.sign() * large,
        normal_ones.clamp(-3, 3) / 3 * large,
        1000 + normal_ones / 1000,  # one-signed, and narrow beside its size
        torch.where(coin & (normal_ones > 2.2), large, normal_ones),
        torch.where(coin, 0.0, normal_ones.abs()),
    ]
    return torch.stack(blocks).to(dtype)


def assert_same_bits(got: Packed, wanted: Packed) -> None:
    assert got.keys() == wanted.keys()
    for name, part in wanted.items():
        assert got[name].dtype == part.dtype and got[name].shape == part.shape, name
        assert torch.equal(got[name].contiguous().view(torch.uint8), part.contiguous().view(torch.uint8)), name


def assert_same(got: Packed, wanted: Packed, codec: Codec, x: torch.Tensor, params: Params) -> None:
    """The same bits; with outliers, those that go with a choice that is as good."""
    if not isinstance(codec, Grouped) or not codec.outliers:
        return assert_same_bits(got, wanted)
    index = got["outlier_index"].long()
    assert bool((index.diff() > 0).all())
    chosen = torch.zeros(*x.shape[:-2], x.shape[-2] * x.shape[-1], dtype=torch.bool).scatter_(-1, index, True)
    out = how_far_out(codec, x, params).flatten(-2)
    inside, outside = out.masked_fill(chosen, 0).amax(-1), out.masked_fill(~chosen, torch.inf).amin(-1)
    assert bool((outside >= inside * (1 - 1e-6)).all())  # a sum in another order may round otherwise

    def find(grouped: torch.Tensor, dim: int, *_: Any) -> torch.Tensor:
        cut, _ = groups.split(chosen.view(x.shape).float(), codec.per, codec.group)
        return cut > 0

    def pick(rest: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return got["outlier_index"], rest.flatten(-2).gather(-1, index).to(outliers.VALUE_DTYPE)

    with mock.patch.object(outliers, "find", find), mock.patch.object(outliers, "pick", pick):
        return assert_same_bits(got, codec.encode(x, params))


def how_far_out(codec: Grouped, x: torch.Tensor, params: Params) -> torch.Tensor:
    """By what the outliers of a block are chosen."""
    x = x.float()
    if codec.static:
        dense = dataclasses.replace(codec, outliers=0.0)
        return (x - dense.decode(dense.encode(x, params), params)).abs()
    grouped, dim = groups.split(x.double(), codec.per, codec.group)
    real = groups.weights(x.shape[-1], codec.per, codec.group, x.device)
    weights = torch.ones_like(grouped) if real is None else real.double().expand_as(grouped)
    size = weights.sum(dim, keepdim=True)
    off = grouped - (grouped * weights).sum(dim, keepdim=True) / size
    spread = ((off * weights).square().sum(dim, keepdim=True) / size).sqrt()
    return groups.join(off.abs() / spread.clamp(min=1e-300), codec.per, x.shape[-1])


def blocks(x: torch.Tensor) -> torch.Tensor:
    """``x [..., T, D]`` as ``[..., H, N, T, D]``, which static scales are for."""
    return x[None, None] if x.ndim == 2 else x[:, None] if x.ndim == 3 else x


def fit(codec: Codec, x: torch.Tensor) -> Params:
    """What blocks ``x [..., H, N, T, D]`` teach, as far as static ranges go; tables are fitted to usual numbers."""
    if isinstance(codec, NonUniform):
        return usual(codec, x.shape[-4], x.shape[-1])
    return codec.fit(x.transpose(-4, -3).flatten(0, -4).float().clamp(-1e30, 1e30))


@functools.cache
def usual(codec: Codec, heads: int, channels: int) -> Params:
    return codec.fit(normal(2, heads, 128, channels, seed=99))


def objective(codec: HalfQuadratic, packed: Packed, x: torch.Tensor) -> float:
    return float((codec.decode(packed, {}).double() - x.double()).abs().pow(P_NORM).sum())
