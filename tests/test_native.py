"""Floor 3: the native kernel with every instruction set, against float64; and calls that are meant to break it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import multiprocessing
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, ClassVar, Literal
from unittest import mock

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from kvbits.attend import Call, KVView, attend, choose, explain, native, reference
from kvbits.attend.transform import Rope, Transform
from kvbits.cache import LayerCache
from kvbits.codecs import CODECS, Affine, Codec, Exact, Fp8, Fp8Static, NormalFloat
from kvbits.codecs.grouped import Grouped
from kvbits.library import instruction_set, library
from kvbits.numerics import affine, bitpack, codebook, groups, outliers
from kvbits.rows import Rows
from kvbits.scheme import Scheme
from kvbits.store import Blocks
from kvbits.types import Format, Packed, Params, Part
from test_attend import (
    NATIVE_ERROR,
    SMALL,
    Shape,
    additive,
    boolean,
    causal,
    plain_attention,
    query_for,
    random,
    unrounded,
    view_of,
    visible,
)

_native = pytest.importorskip("kvbits._native", reason="kvbits._native is not built: no C++ compiler")
library()  # tells the module torch's dtypes

ISAS: list[str] = _native.names()
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
PLAIN = Shape(2, 3, 64, 64)
UNLIKE = Shape(2, 3, 72, 40)
each_isa = pytest.mark.parametrize("isa", ISAS, indirect=True)


@pytest.fixture
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs with one instruction set, whatever is the best."""
    name: str = request.param
    found = (_native, ISAS.index(name), name)
    monkeypatch.setattr(native, "library", lambda: found)
    return name


@pytest.fixture(autouse=True)
def _threads_stay() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def decoded(view: KVView) -> tuple[torch.Tensor, torch.Tensor]:
    """All columns in float64, as the codecs themselves decode them."""
    with mock.patch.object(native, "why_not_view", lambda view: ["a test"]):
        return unrounded(view)


def torch_in_half(call: Call, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """What torch's own attention makes of it in bfloat16; where it lacks a feature, the formula in bfloat16."""
    half = dataclasses.replace(call, query=call.query.bfloat16())
    if call.softcap is not None or call.sink_logits is not None:
        return plain_attention(half, torch.bfloat16, keys, values)
    seen = visible(call)
    bias = torch.zeros(seen.shape)
    if call.mask is not None:
        bias = bias + (torch.zeros(()) if call.mask.dtype == torch.bool else call.mask.float())
        seen = seen & call.mask if call.mask.dtype == torch.bool else seen
    bias = bias.masked_fill(~seen, -torch.inf).bfloat16().expand(call.query.shape[0], -1, -1, -1)
    parts = (half.query, keys.bfloat16(), values.bfloat16())
    return scaled_dot_product_attention(*parts, bias, scale=call.scaling, enable_gqa=True).nan_to_num(0.0)


def assert_native(call: Call, run: Callable[[Call], torch.Tensor] = native.run) -> torch.Tensor:
    """The kernel takes the call, and errs by 1e-3 of the largest output, or twice what torch does in bfloat16.

    Whichever is smaller, in the maximum norm; beside it, the result may be rounded to its type once.
    """
    assert native.why_not(call) == [] and choose(call).name == "native"
    keys, values = decoded(call.view)
    truth = plain_attention(call, torch.float64, keys, values)
    largest = float(truth.abs().amax())
    in_half = float((torch_in_half(call, keys, values).double() - truth).abs().amax())
    rounding = largest * torch.finfo(call.query.dtype).eps / 2
    got = run(call)
    assert got.shape == truth.shape and got.dtype == call.query.dtype
    assert float((got.double() - truth).abs().amax()) <= min(NATIVE_ERROR * largest, 2 * in_half) + rounding
    return got


def same(got: torch.Tensor, right: torch.Tensor, tolerance: float) -> bool:
    """Equal to ``tolerance`` of the largest."""
    return float((got - right).abs().amax()) <= tolerance * float(right.abs().amax())


# -- every format ------------------------------------------------------------------------------------------------------

SPELLINGS = sorted({example for codec in CODECS for example in codec.examples})
COUNTS = {"step": (170, 1), "chunk": (160, 23), "unpacked": (20, 1)}
cached_view = functools.cache(view_of)


@each_isa
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_codec(spelling: str, counts: tuple[int, ...], isa: str) -> None:
    """72 and 40 channels: incomplete vectors, groups of unequal length, and halves of tiles."""
    block = 128 if "gs128" in spelling else 32
    view = cached_view(UNLIKE, counts, f"{spelling},residual=20,sinks=4,block={block}")
    if spelling != "exact":
        assert (view.blocks.longest > 0) == (counts[0] > 20)
    assert_native(Call(query_for(view, UNLIKE, counts[-1]), view, 0.12))


@each_isa
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_what_is_decoded_natively_are_the_bits_of_the_codec(spelling: str, dtype: torch.dtype, isa: str) -> None:
    view = cached_view(UNLIKE, (300, 1), f"{spelling},residual=20,sinks=4,block=128", dtype=dtype)
    view = dataclasses.replace(view, key_transform=Transform(), value_transform=Transform())
    for got, right in zip(native.decode(view), view.decode(0, view.blocks.longest), strict=True):
        assert torch.equal(got, right.to(dtype))


@each_isa
@pytest.mark.parametrize("asked", FLOATS, ids=lambda dtype: f"query {dtype}")
@pytest.mark.parametrize("held", FLOATS, ids=lambda dtype: f"cache {dtype}")
@pytest.mark.parametrize("scheme", ("kivi4", "exact"))
def test_types_of_query_and_cache_are_free(scheme: str, held: torch.dtype, asked: torch.dtype, isa: str) -> None:
    view = cached_view(UNLIKE, (150, 3), f"{scheme},{SMALL}", dtype=held)
    assert_native(Call(query_for(view, UNLIKE, 3).to(asked), view, 0.12))


@each_isa
def test_keys_and_values_of_different_types(isa: str) -> None:
    view = view_of(UNLIKE, (150, 3))
    for dtypes in ((torch.float32, torch.bfloat16), (torch.float16, torch.float32)):
        mixed = dataclasses.replace(view, keys=view.keys.to(dtypes[0]), values=view.values.to(dtypes[1]))
        assert_native(Call(query_for(view, UNLIKE, 3), mixed, 0.12))


SIZES = (
    *((d, d, g) for d, g in ((8, 1), (64, 2), (72, 3), (80, 4), (96, 5), (112, 6), (128, 7), (256, 8), (512, 1))),
    *((64, 128, 2), (128, 64, 4), (192, 128, 3), (8, 512, 1), (256, 8, 2)),
)


@each_isa
@pytest.mark.parametrize("scheme", ("kivi4", "k=nf3,v=int2-channel", "k=hqq2,v=int8", "fp8"))
@pytest.mark.parametrize("size", SIZES, ids=lambda size: "D{}-{}-G{}".format(*size))
def test_heads_and_channels(size: tuple[int, int, int], scheme: str, isa: str) -> None:
    shape = Shape(2, size[2], size[0], size[1])
    view = cached_view(shape, (100, 2), f"{scheme},{SMALL}")
    assert_native(Call(query_for(view, shape, 2), view, size[0] ** -0.5))


WHOLE = ("int4", "int3", "int2", "int8", "nf3", "fp8", "outliers")
LENGTHS = [(block, scheme) for block in (8, 16, 24, 32, 48, 64, 128, 256) for scheme in WHOLE]
LENGTHS += [(block, "int2-channel-gs16") for block in (16, 32, 48, 256)]


@each_isa
@pytest.mark.parametrize(("block", "scheme"), LENGTHS)
def test_blocks_of_any_length(block: int, scheme: str, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also such as no scheme has yet: planes that end inside a tile are read another way."""
    monkeypatch.setattr("kvbits.scheme.BLOCKS", (block,))
    codec = WithOutliers(Affine(3), 9) if scheme == "outliers" else Scheme.parse(f"{scheme},block={block}").key
    view = view_in(Scheme(codec, codec, residual=10, sinks=3, block=block), PLAIN, (2 * block + 13, 3))
    assert view.blocks.longest == 2
    assert_native(Call(query_for(view, PLAIN, 3), view, 0.125))


def view_in(
    scheme: Scheme, shape: Shape, counts: tuple[int, ...], scale: float = 1.0, dtype: torch.dtype = torch.float32
) -> KVView:
    """As ``view_of``, for codecs that have no spelling and elements of any magnitude."""
    cache, view = LayerCache(scheme), None
    for seed, count in enumerate(counts):
        keys = random(2, shape.heads, count, shape.key_channels, seed=2 * seed, dtype=dtype) * scale
        values = random(2, shape.heads, count, shape.value_channels, seed=2 * seed + 1, dtype=dtype) * scale
        view = cache.append(keys, values)
    assert view is not None
    return view


# -- formats that no codec of the catalogue has yet --------------------------------------------------------------------


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
    def learns(self) -> bool:
        return self.dense.learns

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
    def learns(self) -> bool:
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
class Learned(Grouped):
    """A table that was learned, in the params, with scale and zero per group."""

    name: ClassVar[str] = "learned"
    allowed_bits: ClassVar[tuple[int, ...]] = (2, 3, 4)
    levels: ClassVar[Literal["uniform", "table"]] = "table"
    pattern: ClassVar[re.Pattern[str]] = re.compile("(?!)")
    examples: ClassVar[tuple[str, ...]] = ()

    @property
    def learns(self) -> bool:
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
    "learned table of 4 bits": Learned(4),
    "learned table of 3 bits": Learned(3, "token", 16),
    "learned table of 2 bits": Learned(2),
    "learned table of 4 bits per channel": Learned(4, "channel", 32),
    "learned table of 3 bits per channel": Learned(3, "channel", 16),
    "outliers of int4": WithOutliers(Affine(4), 25),
    "outliers of int3 per channel": WithOutliers(Affine(3, "channel", 16), 25),
    "one outlier": WithOutliers(Affine(2), 1),
    "a fifth are outliers": WithOutliers(Affine(2), 400),
    "outliers of nf4": WithOutliers(NormalFloat(4), 25),
    "outliers of fp8": WithOutliers(Fp8(), 25),
    "outliers of fp8-static": WithOutliers(Fp8Static(), 25),
    "outliers of static": WithOutliers(PerChannel(3), 25),
    "outliers of learned table": WithOutliers(Learned(3), 25),
    "unused outliers": WithOutliers(Affine(4), 25, used=0.5),
    "only unused outliers": WithOutliers(Affine(4), 25, used=0.0),
}


@functools.cache
def view_of_new(name: str, side: str, shape: Shape, counts: tuple[int, ...]) -> KVView:
    key, value = (NEW[name] if side in (which, "both") else Affine(8) for which in ("keys", "values"))
    return view_in(Scheme(key, value, residual=20, block=32), shape, counts)


@each_isa
@pytest.mark.parametrize("side", ("keys", "values", "both"))
@pytest.mark.parametrize("name", NEW)
def test_formats_of_codecs_to_come(name: str, side: str, isa: str) -> None:
    for counts in ((150, 1), (150, 5)):
        view = view_of_new(name, side, UNLIKE, counts)
        assert view.blocks.longest == 3
        assert_native(Call(query_for(view, UNLIKE, counts[-1]), view, 0.12))
        if side == "both":
            for got, right in zip(native.decode(view), view.decode(0, view.blocks.longest), strict=True):
                assert torch.allclose(got, right, rtol=1e-6, atol=1e-6)


@each_isa
@pytest.mark.parametrize("name", ("outliers of int4", "outliers of fp8", "static table of 3 bits"))
def test_new_formats_before_anything_is_packed(name: str, isa: str) -> None:
    """Codecs that learn have no parameters by then."""
    view = view_of_new(name, "both", UNLIKE, (20, 1))
    assert view.blocks.longest == 0 and view.key_params == {}
    assert_native(Call(query_for(view, UNLIKE, 1), view, 0.12))


@dataclass(frozen=True)
class Claims(Exact):
    """Elements stored exactly, under another format's name: what a kernel without that format must not read."""

    claimed: Format = Exact().format

    @property
    def format(self) -> Format:
        return self.claimed

    def __str__(self) -> str:
        return "claims"

    def table(self, params: Params) -> torch.Tensor | None:
        return torch.linspace(-1, 1, 2**self.claimed.bits) if self.claimed.levels == "table" else None

    def fit(self, samples: torch.Tensor, weights: torch.Tensor | None = None) -> Params:
        return {"scale": torch.ones(()), "zero": torch.zeros(())}


@pytest.mark.parametrize("side", ("keys", "values"))
@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (Format(5, "uniform", "token", 64, zero=True), "codes have 2, 3, 4 or 8 bits"),
        (Format(8, "table", "token", 64, zero=True), "levels do not fit the bits"),
        (Format(4, "e4m3", "token", 0, zero=False), "levels do not fit the bits"),
        (Format(8, "e4m3", "token", 0, zero=True), "e4m3 has one scale per token or per layer"),
        (Format(8, "e4m3", "token", 16, zero=False), "e4m3 has one scale per token or per layer"),
        (Format(8, "e4m3", "channel", 32, zero=False), "e4m3 has one scale per token or per layer"),
        (Format(4, "uniform", "layer", 0, zero=False), "only e4m3 has one scale per layer"),
        (Format(4, "uniform", "element", 0, zero=False), "unknown direction of groups"),
        (Format(4, "uniform", "channel", 8, zero=True), "groups of tokens must be multiples of 16"),
    ],
    ids=str,
)
def test_formats_without_arithmetic_are_left_to_the_reference(form: Format, reason: str, side: str) -> None:
    """Also where a codec that nobody has thought of claims them: the reference needs nothing but its ``decode``."""
    pair = (Claims(form), Affine(8)) if side == "keys" else (Affine(8), Claims(form))
    view = view_in(Scheme(*pair, residual=20, block=32), PLAIN, (150, 1))
    call = Call(query_for(view, PLAIN, 1), view, 0.125)
    assert choose(call).name == "reference" and reason in explain(call)[0]
    truth = plain_attention(call, torch.float64, *unrounded(view))
    assert same(attend(call).double(), truth, 1e-6)


# -- transforms --------------------------------------------------------------------------------------------------------


def rotation_of(channels: int) -> torch.Tensor:
    """Orthogonal; its memory runs down the columns, as torch's QR leaves it."""
    return torch.linalg.qr(random(channels, channels, seed=channels)).Q


def rope_of(view: KVView, pairs: int, interleaved: bool = False, per_row: bool = False) -> Rope:
    """Angles of the packed blocks of a view; per row, each row's begin elsewhere, as after left padding."""
    batch, block = view.keys.shape[0], view.blocks.record.tokens
    start = torch.arange(batch) * 7 if per_row else torch.zeros(1)
    frequencies = 10 ** -torch.linspace(0, 4, pairs)
    first = view.sinks + view.dropped + block * torch.arange(view.blocks.longest)
    base, step = (start[:, None] + first)[..., None] * frequencies, torch.arange(block)[:, None] * frequencies
    # some scalings of RoPE carry a factor
    return Rope(base.cos() * 1.1, base.sin() * 1.1, step.cos(), step.sin(), interleaved)


def means(view: KVView, side: str) -> torch.Tensor:
    like = getattr(view, side)
    return random(like.shape[1], like.shape[3], seed=len(side)) * 2


def balance_of(view: KVView) -> torch.Tensor:
    return random(view.keys.shape[1], view.keys.shape[3], seed=7).exp()


TRANSFORMS: dict[str, Callable[[KVView], tuple[Transform, Transform]]] = {
    "nothing": lambda view: (Transform(), Transform()),
    "key mean": lambda view: (Transform(means(view, "keys")), Transform()),
    "value mean": lambda view: (Transform(), Transform(means(view, "values"))),
    "both means": lambda view: (Transform(means(view, "keys")), Transform(means(view, "values"))),
    "keys rotated": lambda view: (Transform(rotation=rotation_of(64)), Transform()),
    "values rotated": lambda view: (Transform(), Transform(rotation=rotation_of(64))),
    "one rotation for both": lambda view: (Transform(rotation=rotation_of(64)),) * 2,  # one and the same object
    "means and rotations": lambda view: (
        Transform(means(view, "keys"), rotation_of(64)),
        Transform(means(view, "values"), rotation_of(64).t()),
    ),
    "RoPE": lambda view: (Transform(rope=rope_of(view, 32)), Transform()),
    "interleaved RoPE": lambda view: (Transform(rope=rope_of(view, 32, True)), Transform()),
    "partial RoPE": lambda view: (Transform(rope=rope_of(view, 9)), Transform()),
    "interleaved partial RoPE": lambda view: (Transform(rope=rope_of(view, 12, True)), Transform()),
    "RoPE of each row": lambda view: (Transform(rope=rope_of(view, 32, per_row=True)), Transform()),
    "RoPE and means": lambda view: (
        Transform(means(view, "keys"), rope=rope_of(view, 16, True, True)),
        Transform(means(view, "values")),
    ),
    "RoPE off the mean": lambda view: (
        Transform(means(view, "keys"), rope=rope_of(view, 32), whole=False),
        Transform(),
    ),
    "RoPE off the mean, rotated": lambda view: (
        Transform(means(view, "keys"), rotation_of(64), rope_of(view, 32), whole=False),
        Transform(rotation=rotation_of(64)),
    ),
    "RoPE off the mean, balanced": lambda view: (
        Transform(means(view, "keys"), rope=rope_of(view, 32), whole=False, balance=balance_of(view)),
        Transform(),
    ),
    "RoPE off the mean, balanced and rotated": lambda view: (
        Transform(means(view, "keys"), rotation_of(64), rope_of(view, 32), False, balance_of(view)),
        Transform(rotation=rotation_of(64)),
    ),
    "partial RoPE off the mean of each row": lambda view: (
        Transform(means(view, "keys"), rotation_of(64), rope_of(view, 13, True, True), whole=False),
        Transform(),
    ),
    "RoPE and values rotated": lambda view: (
        Transform(rope=rope_of(view, 32)),
        Transform(means(view, "values"), rotation_of(64)),
    ),
}
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


def transformed(view: KVView, name: str) -> KVView:
    key, value = TRANSFORMS[name](view)
    return dataclasses.replace(view, key_transform=key, value_transform=value)


@each_isa
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name: str, stored: str, isa: str) -> None:
    for counts in ((150, 1), (150, 5)):
        plain = stored_as(stored, counts)
        view = transformed(plain, name)
        call = Call(query_for(view, PLAIN, counts[-1]), view, 0.125)
        got = assert_native(call)
        assert same(got, native.run(dataclasses.replace(call, view=plain)), 1e-2) == (name == "nothing")


@pytest.mark.parametrize(
    "name",
    (
        "RoPE of each row",
        "RoPE and means",
        "means and rotations",
        "RoPE off the mean, rotated",
        "RoPE off the mean, balanced and rotated",
    ),
)
@pytest.mark.parametrize("stored", ("kivi4", "fp8", "one outlier"))
def test_transforms_of_more_rows_than_one_batch_of_queries(stored: str, name: str) -> None:
    view = transformed(stored_as(stored, (150, 70)), name)
    assert_native(Call(query_for(view, PLAIN, 70), view, 0.125, boolean(view, 6, 70, 2), softcap=3.0))


@each_isa
@pytest.mark.parametrize("channels", (8, 24, 40, 72, 80, 112, 136, 256, 512))
def test_rotations_of_any_number_of_channels(channels: int, isa: str) -> None:
    shape = Shape(2, 3, channels, channels)
    view = view_of(shape, (150, 5))
    turned = (Transform(rotation=rotation_of(channels)), Transform(rotation=rotation_of(channels)))
    view = dataclasses.replace(view, key_transform=turned[0], value_transform=turned[1])
    assert_native(Call(query_for(view, shape, 5), view, channels**-0.5))


@each_isa
@pytest.mark.parametrize("queries", (1, 5))
def test_rope_of_left_padded_rows(queries: int, isa: str) -> None:
    """Angles go by a row's own tokens, not by columns."""
    text = torch.ones(3, 200 + queries, dtype=torch.bool)
    text[1, :47], text[2, :150] = False, False
    view = view_of(PLAIN, (200, queries), batch=3, text=text)
    view = dataclasses.replace(view, key_transform=Transform(rope=rope_of(view, 32, per_row=True)))
    mask = causal(view, queries) & text[:, None, None]
    assert_native(Call(query_for(view, PLAIN, queries), view, 0.125, mask))


@each_isa
def test_rope_of_what_a_window_has_left(isa: str) -> None:
    view = view_of(PLAIN, (100, 80, 90, 1, 30, 3), window=45)
    assert view.dropped > 0 and view.blocks.longest > 0
    view = dataclasses.replace(view, key_transform=Transform(rope=rope_of(view, 32)))
    assert_native(Call(query_for(view, PLAIN, 3), view, 0.125, window=45))


@each_isa
def test_rope_where_tokens_behind_the_sinks_are_gone(isa: str) -> None:
    """Sinks that stay while blocks behind them are dropped: own tokens then have a gap, and so do the angles."""
    whole = view_of(PLAIN, (190, 3))
    blocks = whole.blocks
    left = Blocks(blocks.record, blocks.pool, blocks.table[:, 2:], tuple(n - 2 for n in blocks.counts), False)
    view = dataclasses.replace(whole, blocks=left, dropped=64)
    view = dataclasses.replace(view, key_transform=Transform(rope=rope_of(view, 32)))
    mask = causal(view, 3)[None, None].clone()
    mask[..., 4:68] = False
    assert view.sinks == 4 and left.longest > 0
    assert_native(Call(query_for(view, PLAIN, 3), view, 0.125, mask))


@each_isa
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("interleaved", (False, True), ids=("", "interleaved"))
def test_rope_before_every_codec(interleaved: bool, spelling: str, isa: str) -> None:
    block = 128 if "gs128" in spelling else 32
    view = cached_view(Shape(1, 4, 80, 80), (170, 1), f"{spelling},residual=20,sinks=4,block={block}")
    for pairs in (40, 16):
        turned = dataclasses.replace(view, key_transform=Transform(rope=rope_of(view, pairs, interleaved)))
        assert_native(Call(query_for(view, Shape(1, 4, 80, 80), 1), turned, 0.12))


@each_isa
def test_rope_before_blocks_of_any_length(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for block in (8, 16, 24, 48, 256):
        monkeypatch.setattr("kvbits.scheme.BLOCKS", (block,))
        for spelling in ("int3", "nf4", "fp8", "int2-channel-gs16"):
            if block % 16 and spelling.endswith("gs16"):
                continue
            view = view_in(Scheme.parse(f"{spelling},residual=10,sinks=3,block={block}"), PLAIN, (2 * block + 13, 3))
            for whole in (True, False):
                transform = Transform(means(view, "keys"), rope=rope_of(view, 32), whole=whole)
                turned = dataclasses.replace(view, key_transform=transform)
                assert_native(Call(query_for(view, PLAIN, 3), turned, 0.125))


def test_angles_of_any_strides() -> None:
    """A model's cosines come for all channels, each angle twice: a pair's are every other one, or the first half."""
    view = stored_as("kivi4", (150, 1))
    block, count = view.blocks.record.tokens, view.blocks.longest
    wide = torch.arange(float(block * count))[None, :, None] / 10 ** torch.linspace(0, 4, 64)
    base, step = wide[:, ::block], wide[0, :block]
    ropes = (
        Rope(base.cos()[..., ::2], base.sin()[..., ::2], step.cos()[..., ::2], step.sin()[..., ::2], True),
        Rope(base.cos()[..., :32], base.sin()[..., :32], step.cos()[..., :32], step.sin()[..., :32].contiguous()),
        Rope(
            base.cos()[..., :32].expand(2, -1, -1), base.sin()[..., :32].expand(2, -1, -1),
            step.cos()[:, :32], step.sin()[:, :32],
        ),
    )  # fmt: skip
    for rope in ropes:
        rotated = dataclasses.replace(view, key_transform=Transform(rope=rope))
        assert_native(Call(query_for(view, PLAIN, 1), rotated, 0.125))


def test_other_steps_are_not_taken_for_those_before() -> None:
    view = stored_as("kivi4", (150, 1))
    for pairs in (32, 16, 32):
        turned = dataclasses.replace(view, key_transform=Transform(rope=rope_of(view, pairs)))
        assert_native(Call(query_for(view, PLAIN, 1), turned, 0.125))


def test_steps_that_change_the_length() -> None:
    """No rotary embedding has them; the angles are what they are told to be."""
    view = stored_as("kivi4", (150, 1))
    rope = rope_of(view, 32)
    for factor in (1e-20, 0.3, 7.0):
        longer = dataclasses.replace(rope, step_cos=rope.step_cos * factor, step_sin=rope.step_sin * factor)
        assert_native(
            Call(query_for(view, PLAIN, 1), dataclasses.replace(view, key_transform=Transform(rope=longer)), 0.1)
        )


@pytest.mark.parametrize("queries", (1, 5))
def test_rotated_keys_before_the_rotary_embedding_are_left_to_the_reference(queries: int) -> None:
    view = stored_as("kivi4", (150, queries))
    both = Transform(means(view, "keys"), rotation_of(64), rope_of(view, 32))
    call = Call(query_for(view, PLAIN, queries), dataclasses.replace(view, key_transform=both), 0.125)
    lines = explain(call)
    assert (
        lines[0] == "native: keys are rotated and stored before the rotary embedding" and lines[-1] == "reference: runs"
    )
    assert same(attend(call).double(), plain_attention(call, torch.float64, *unrounded(call.view)), 1e-5)
    turned = dataclasses.replace(view, value_transform=Transform(rope=rope_of(view, 32)))
    assert explain(dataclasses.replace(call, view=turned))[0] == "native: values have a rotary embedding"


# -- masks, and many queries -------------------------------------------------------------------------------------------

HEADS = PLAIN.heads * PLAIN.groups
FEATURES: dict[str, Callable[[KVView, int], dict[str, Any]]] = {
    "causal": lambda view, queries: {},
    "bool": lambda view, queries: {"mask": boolean(view, 1, queries, 2)},
    "bool for all rows": lambda view, queries: {"mask": boolean(view, 1, queries, 1)},
    "bool per head": lambda view, queries: {"mask": boolean(view, HEADS, queries, 2)},
    **{
        f"additive {dtype}": (lambda view, queries, dtype=dtype: {"mask": additive(view, 1, queries, 2).to(dtype)})
        for dtype in (*FLOATS, torch.float64)
    },
    "additive per head": lambda view, queries: {"mask": additive(view, HEADS, queries, 1)},
    "additive of finite lowest": lambda view, queries: {
        "mask": additive(view, 1, queries, 2, torch.finfo(torch.float32).min)
    },
    "float64's lowest": lambda view, queries: {
        "mask": additive(view, 1, queries, 2).double().clamp(min=torch.finfo(torch.float64).min)
    },
    "window": lambda view, queries: {"window": 40},
    "window of 1": lambda view, queries: {"window": 1},
    "softcap": lambda view, queries: {"softcap": 1.5},
    "sink logits": lambda view, queries: {"sink_logits": random(HEADS, seed=7) * 3},
    "large sink logits": lambda view, queries: {"sink_logits": random(HEADS, seed=7) + 80},
    "everything": lambda view, queries: {
        "softcap": 2.0, "window": 50, "mask": additive(view, HEADS, queries, 2), "sink_logits": random(HEADS, seed=7)
    },
}  # fmt: skip


@pytest.mark.parametrize("queries", (1, 2, 16, 64, 65, 300))
@pytest.mark.parametrize("feature", FEATURES)
def test_chunks_under_every_feature(feature: str, queries: int) -> None:
    """300 are more than meet the history together."""
    assert native.QUERIES_AT_ONCE < 300
    view = cached_view(PLAIN, (150, queries))
    assert_native(Call(query_for(view, PLAIN, queries), view, 0.125, **FEATURES[feature](view, queries)))


@each_isa
@pytest.mark.parametrize("stored", ("k=nf3,v=int8-channel", "fp8", "exact"))
@pytest.mark.parametrize("feature", ("causal", "additive torch.bfloat16", "everything"))
def test_chunks_with_every_instruction_set(feature: str, stored: str, isa: str) -> None:
    view = stored_as(stored, (100, 65))
    assert_native(Call(query_for(view, PLAIN, 65), view, 0.125, **FEATURES[feature](view, 65)))


def test_chunks_that_end_with_a_single_query() -> None:
    """That one sees all there is, and goes another way than its neighbours."""
    queries = 2 * native.QUERIES_AT_ONCE + 1
    view = view_of(Shape(1, 2, 64, 64), (150, queries), batch=1)
    assert_native(Call(query_for(view, Shape(1, 2, 64, 64), queries), view, 0.125))


UNEQUAL = torch.ones(4, 260, dtype=torch.bool)
"""Rows with everything, with holes, without a packed block, and without a token at all."""
UNEQUAL[1] = random(260) > 0
UNEQUAL[2, :240] = False
UNEQUAL[3] = False


@each_isa
@pytest.mark.parametrize("form", ("bool", "additive"))
@pytest.mark.parametrize("counts", ((200, 60), (200, 59, 1), (260,)), ids=str)
def test_rows_of_unequal_lengths(counts: tuple[int, ...], form: str, isa: str) -> None:
    queries = counts[-1]
    view = view_of(PLAIN, counts, batch=4, text=UNEQUAL)
    assert 0 in view.held and (len(counts) == 1 or (0 in view.blocks.counts and max(view.blocks.counts) > 1))
    mask = causal(view, queries) & UNEQUAL[:, None, None]
    if form == "additive":
        mask = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    sinks = random(HEADS, seed=7)
    for logits in (None, sinks):
        out = assert_native(Call(query_for(view, PLAIN, queries), view, 0.125, mask, sink_logits=logits))
        assert not out[3].any() and bool(out[0].any())


def test_padding_is_hidden_even_where_the_mask_shows_it() -> None:
    view = view_of(PLAIN, (200, 60), batch=4, text=UNEQUAL)
    query = query_for(view, PLAIN, 60)
    right = native.run(Call(query, view, 0.125, (causal(view, 60) & UNEQUAL[:, None, None])))
    wrong = native.run(Call(query, view, 0.125, causal(view, 60)[None, None]))
    assert torch.equal(right, wrong)


@each_isa
@pytest.mark.parametrize("sinks", (False, True), ids=("", "sink logits"))
@pytest.mark.parametrize("form", ("bool", "additive"))
def test_queries_that_see_nothing_give_zero(form: str, sinks: bool, isa: str) -> None:
    view = view_of(PLAIN, (150, 4))
    mask = boolean(view, 1, 4, 2).clone()
    mask[0, :, 2], mask[1, :, 0] = False, False
    if form == "additive":
        mask = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    logits = random(HEADS) if sinks else None
    out = assert_native(Call(query_for(view, PLAIN, 4), view, 0.125, mask, sink_logits=logits))
    assert not out[0, :, 2].any() and not out[1, :, 0].any() and bool(out[0, :, 1].all())


@pytest.mark.parametrize("masked", (False, True), ids=("causal", "mask"))
@pytest.mark.parametrize("queries", (1, 6, 90))
def test_layers_with_a_sliding_window(queries: int, masked: bool) -> None:
    view = view_of(PLAIN, (100, 80, 90, 1, 30, queries), window=45)
    assert view.offset > 0 and view.dropped > 0 and view.blocks.longest > 0
    mask = boolean(view, 1, queries, 2) if masked else None
    assert_native(Call(query_for(view, PLAIN, queries), view, 0.125, mask, window=45))
    assert_native(Call(query_for(view, PLAIN, queries), view, 0.125, mask))


def test_no_queries_give_no_rows() -> None:
    view = view_of(PLAIN, (150, 0))
    call = Call(query_for(view, PLAIN, 0), view, 0.125)
    assert choose(call).name == "native" and attend(call).shape == (2, HEADS, 0, 64)


# -- strides -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("queries", (1, 5))
def test_queries_of_any_strides(queries: int) -> None:
    view = view_of(PLAIN, (150, queries))
    query = query_for(view, PLAIN, queries)
    right = assert_native(Call(query, view, 0.125))
    wide = random(2, HEADS, queries, 80)
    wide[..., 8:72] = query
    strided = {
        "from the model": query.transpose(1, 2).contiguous().transpose(1, 2),
        "channels outermost": query.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0),
        "every other channel": query.repeat_interleave(2, dim=-1)[..., ::2],
        "part of a wider one": wide[..., 8:72],
    }
    for name, given in strided.items():
        assert torch.equal(given, query), name
        assert torch.equal(native.run(Call(given, view, 0.125)), right), name
    alike = query[:1, :1].expand(2, HEADS, -1, -1)
    assert torch.equal(native.run(Call(alike, view, 0.125)), native.run(Call(alike.contiguous(), view, 0.125)))


@pytest.mark.parametrize("dtype", (torch.bool, *FLOATS, torch.float64), ids=str)
def test_masks_of_any_strides(dtype: torch.dtype) -> None:
    view = view_of(PLAIN, (150, 5))
    call = Call(query_for(view, PLAIN, 5), view, 0.125)
    mask = boolean(view, 1, 5, 1) if dtype == torch.bool else additive(view, 1, 5, 1).to(dtype)
    strided = {
        "no batch": mask.expand(2, HEADS, -1, -1),
        "no query": mask[:, :, :1].expand(2, -1, 5, -1),
        "no column": mask[:, :, :, -1:].expand(2, -1, -1, view.kv_columns),
        "columns outermost": mask.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0),
        "one row": mask[0, 0, 0][None, None, None].expand(1, 1, 5, -1),
        "part of a wider one": torch.cat([mask, mask], dim=-1)[..., 3 : 3 + view.kv_columns],
    }
    for name, given in strided.items():
        got = native.run(dataclasses.replace(call, mask=given))
        assert torch.equal(got, native.run(dataclasses.replace(call, mask=given.contiguous()))), name
        assert same(got, reference.run(dataclasses.replace(call, mask=given)), NATIVE_ERROR), name


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_exact_tokens_of_any_strides(dtype: torch.dtype) -> None:
    view = view_of(PLAIN, (150, 5), dtype=dtype)
    right = native.run(Call(query_for(view, PLAIN, 5), view, 0.125))
    for order in ((0, 1, 3, 2), (2, 1, 0, 3), (3, 2, 1, 0), (0, 2, 1, 3)):
        back = [order.index(i) for i in range(4)]
        keys, values = (x.permute(order).contiguous().permute(back) for x in (view.keys, view.values))
        strided = dataclasses.replace(view, keys=keys, values=values)
        assert torch.equal(native.run(Call(query_for(view, PLAIN, 5), strided, 0.125)), right)


# -- numbers that are hard to compute with -----------------------------------------------------------------------------


def changed(view: KVView, side: str, where: tuple[Any, ...], to: float) -> KVView:
    x = getattr(view, side).clone()
    x[where] = to
    return dataclasses.replace(view, **{side: x})


@each_isa
@pytest.mark.parametrize("bad", (torch.nan, torch.inf))
@pytest.mark.parametrize("where", ("query", "sink key", "recent key", "own key", "recent value", "all keys"))
@pytest.mark.parametrize("counts", ((150, 1), (150, 5), (20, 1)), ids=("step", "chunk", "unpacked"))
def test_what_is_not_finite_reaches_the_output(counts: tuple[int, ...], where: str, bad: float, isa: str) -> None:
    """Where it belongs and nowhere else: what is NaN in the reference is NaN here."""
    queries = counts[-1]
    view = view_of(PLAIN, counts)
    query = query_for(view, PLAIN, queries).abs()
    view = dataclasses.replace(view, keys=view.keys.abs())  # an infinite score of +inf is NaN, of -inf is nothing
    if where == "query":
        query[0, 1, queries - 1, 3] = bad
    elif where == "all keys":
        view = changed(view, "keys", (0, 0), bad)
    else:
        slot = {"sink": 1, "recent": 9, "own": -1}[where.split()[0]]
        view = changed(view, "keys" if "key" in where else "values", (1, 0, slot, 7), bad)
    call = Call(query, view, 0.125)
    right, got = reference.run(call), native.run(call)
    if not (where == "query" and bad == torch.inf):  # there packed keys of either sign meet it
        assert torch.equal(got.isnan(), right.isnan())
    assert not bool(got.isfinite().all()) and (where == "all keys" or bool(got.isfinite().any()))
    sound = right.isfinite() & got.isfinite()
    assert same(got[sound], right[sound], NATIVE_ERROR)


@each_isa
@pytest.mark.parametrize("form", ("causal", "bool", "additive"))
def test_a_hidden_nan_stays_hidden(form: str, isa: str) -> None:
    view = changed(view_of(PLAIN, (150, 5)), "keys", (slice(None), slice(None), -2), torch.nan)
    mask = causal(view, 5)[None, None]
    masks = {"causal": None, "bool": mask, "additive": torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)}
    out = native.run(Call(query_for(view, PLAIN, 5), view, 0.125, masks[form]))
    assert bool(out[:, :, :3].isfinite().all()) and bool(out[:, :, 3:].isnan().all())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_nan_with_all_bits_set_does_not_become_a_number(dtype: torch.dtype) -> None:
    """Rounding such a NaN to bfloat16 by adding half a step would carry into the sign."""
    worst = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    view = view_of(PLAIN, (20, 1))
    view.values[:, :, 3] = worst
    assert bool(native.run(Call(query_for(view, PLAIN, 1).to(dtype), view, 0.125)).isnan().all())


@each_isa
@pytest.mark.parametrize("stored", ("kivi4", "nf3", "int8", "fp8", "exact", "one outlier"))
@pytest.mark.parametrize("factor", (8.0, 1000.0))
def test_large_scores_do_not_overflow(factor: float, stored: str, isa: str) -> None:
    """Beyond float32's exp by far, so that one token takes it all; and where a few share it."""
    view = stored_as(stored, (150, 3))
    assert_native(Call(query_for(view, PLAIN, 3) * factor, view, 0.125))


@each_isa
@pytest.mark.parametrize("stored", ("kivi4", "int8", "nf3", "fp8", "static"))
@pytest.mark.parametrize("scale", (1e-36, 1e-30, 1e-25, 1e-10, 1e10, 1e18))
def test_any_magnitude(scale: float, stored: str, isa: str) -> None:
    """Down to where scales and products are denormal: there the result may vanish, but must not turn into something."""
    scheme = Scheme(NEW[stored], NEW[stored], residual=20, block=32) if stored in NEW else f"{stored},{SMALL}"
    view = view_in(Scheme.parse(scheme), PLAIN, (150, 3), scale)
    call = Call(query_for(view, PLAIN, 3), view, 0.125 / scale if scale > 1 else 0.125)
    if scale >= 1e-25:
        assert_native(call)
    got, truth = native.run(call).double(), plain_attention(call, torch.float64, *decoded(view))
    assert float((got - truth).abs().amax()) <= max(NATIVE_ERROR * float(truth.abs().amax()), 1e-30)


@each_isa
@pytest.mark.parametrize("stored", ("lm3", "nf4", "nuq3-token", "int4"))
def test_weights_that_are_all_alike(stored: str, isa: str) -> None:
    """What is rounded off each of them is alike as well, and adds up beside values that cancel."""
    shape = Shape(1, 2, 64, 64)
    view = cached_view(shape, (3000, 1), f"{stored},{SMALL}", batch=1)
    assert_native(Call(query_for(view, shape, 1) * 1e-3, view, 0.125))


@each_isa
@pytest.mark.parametrize("stored", ("kivi4", "int8", "int3", "nf4", "fp8"))
def test_keys_and_values_far_from_zero(stored: str, isa: str) -> None:
    """Zeros far outside the range of the codes must cancel, not drown the rest."""
    cache = LayerCache(Scheme.parse(f"{stored},{SMALL}"))
    offset = random(1, 2, 1, 64, seed=9) * 30
    for count in (150, 3):
        view = cache.append(random(2, 2, count, 64) + offset, random(2, 2, count, 64, seed=1) + offset)
    assert_native(Call(query_for(view, PLAIN, 3) / 8, view, 0.125))


def test_groups_that_are_constant_or_zero() -> None:
    cache = LayerCache(Scheme.parse(f"kivi4,{SMALL}"))
    keys, values = random(2, 2, 150, 64), random(2, 2, 150, 64, seed=1)
    keys[..., :8], values[..., 50:, :] = 0, -2.5
    values[:, 1] = 0
    cache.append(keys, values)
    view = cache.append(random(2, 2, 1, 64), torch.zeros(2, 2, 1, 64))
    out = assert_native(Call(query_for(view, PLAIN, 1), view, 0.125))
    assert not out[:, PLAIN.groups :].any()


# -- calls that make no sense ------------------------------------------------------------------------------------------


def good_side() -> dict[str, Any]:
    """A side of int4 per token with one group, for blocks of 32 tokens and 64 channels."""
    return {
        "bits": 4, "levels": 0, "per": 0, "type": 0, "channels": 64, "length": 64, "groups": 1, "zero": True,
        "fixed": False, "outliers": 0, "table": [], "codes": 0, "scale": 1024, "zeros": 1088,
        "outlier_index": -1, "outlier_value": -1,
    }  # fmt: skip


RECORD_BYTES = 2 * 1152
EXACT = {"bits": 0, "levels": 3, "per": 3, "type": 1, "length": 0, "groups": 0, "zero": False, "codes": 0}
TABLE = {"levels": 1, "table": [float(i) for i in range(16)]}
FIXED = {"per": 1, "fixed": True, "length": 32, "groups": 1}


@pytest.mark.parametrize("side", ("key", "value"))
@pytest.mark.parametrize(
    ("change", "message"),
    [
        *[({"channels": n}, "multiple of 8 up to 512") for n in (0, -8, 4, 60, 520, 2**30)],
        *[({"bits": n}, "2, 3, 4 or 8 bits") for n in (0, -1, 1, 5, 16, 64)],
        *[({"levels": n}, "levels do not fit") for n in (-1, 4, 2**31 - 1)],
        ({"levels": 2}, "levels do not fit"),
        *[({"per": n}, "direction of groups") for n in (-1, 3, 4, 9)],
        ({"per": 2, "fixed": True, "length": 32}, "only e4m3"),
        ({"per": 2, "length": 32}, "only e4m3"),
        ({"levels": 2, "bits": 8, "zero": False, "per": 2, "length": 32}, "static scales are per layer"),
        ({"levels": 2, "bits": 8}, "e4m3 has one scale"),
        ({"fixed": True}, "static scales are per layer or per channel"),
        ({**FIXED, "length": 16, "groups": 2}, "static scales are per layer or per channel"),
        *[({"length": n}, "groups") for n in (0, -64, 32, 128, 2**31 - 1)][:3],
        *[({"groups": n}, "groups") for n in (0, -1, 2, 2**31 - 1)],
        ({"per": 1, "length": 8, "groups": 4}, "multiples of 16"),
        ({"per": 1, "length": 24, "groups": 2}, "multiples of 16"),
        *[({"codes": n}, "codes does not lie inside") for n in (-2, 1, RECORD_BYTES - 1022, 2**40, 2**63 - 2)],
        *[({"scale": n}, "scale does not lie inside") for n in (-1, 1025, RECORD_BYTES - 62, 2**63 - 2)],
        *[({"zeros": n}, "zero does not lie inside") for n in (-1, 1089, RECORD_BYTES - 62, 2**63 - 2)],
        *[({"levels": 1, "table": [0.0] * n}, "table has the wrong length") for n in (0, 4, 15, 17)],
        *[({**TABLE, "table": [bad, *TABLE["table"][1:]]}, "not finite") for bad in (math.nan, math.inf, -math.inf)],  # type: ignore[misc, index]
        ({"outliers": -1}, "negative number of outliers"),
        ({"outliers": 4}, "outlier_index does not lie inside"),
        ({"outliers": 4, "outlier_index": 0}, "outlier_value does not lie inside"),
        ({"outliers": 2**31 - 1, "outlier_index": 0, "outlier_value": 0}, "outlier_index does not lie inside"),
        ({"outliers": 4, "outlier_index": 1, "outlier_value": 0}, "outlier_index does not lie inside"),
        ({**EXACT, "type": 0}, "exact elements of an unknown type"),
        ({**EXACT, "type": 4}, "exact elements of an unknown type"),
        ({**EXACT, "bits": 40}, "exact elements have no codes"),
        ({**EXACT, "outliers": 4}, "outliers|does not lie inside"),
        (EXACT, "codes does not lie inside"),
    ],
    ids=str,
)
def test_layouts_that_make_no_sense_are_refused(change: dict[str, Any], message: str, side: str) -> None:
    sides = {"key": good_side(), "value": good_side()}
    _native.Layout(32, RECORD_BYTES, sides["key"], sides["value"])
    sides[side].update(change)
    with pytest.raises(ValueError, match=message):
        _native.Layout(32, RECORD_BYTES, sides["key"], sides["value"])


@pytest.mark.filterwarnings("ignore:nanobind. attempted to access an uninitialized:RuntimeWarning")
def test_layouts_of_wrong_words_are_refused() -> None:
    side = good_side()
    for tokens, size in ((0, RECORD_BYTES), (-32, RECORD_BYTES), (12, RECORD_BYTES), (8192, RECORD_BYTES), (32, 100)):
        with pytest.raises(ValueError, match=r"block must be a multiple|record must be a multiple"):
            _native.Layout(tokens, size, side, side)
    for name in good_side():
        if name.startswith("outlier_"):
            continue
        with pytest.raises(ValueError, match=f"lacks {name}"):
            _native.Layout(32, RECORD_BYTES, {k: v for k, v in side.items() if k != name}, side)
        with pytest.raises(TypeError, match=f"{name} cannot be "):
            _native.Layout(32, RECORD_BYTES, {**side, name: "four"}, side)
    with pytest.raises(TypeError, match="bits cannot be 1099511627776"):
        _native.Layout(32, RECORD_BYTES, {**side, "bits": 2**40}, side)
    with pytest.raises(TypeError, match="table cannot be"):
        _native.Layout(32, RECORD_BYTES, {**side, "levels": 1, "table": ["a"] * 16}, side)
    with pytest.raises(ValueError, match="at most 65536 elements"):
        _native.Layout(2048, 2**20, {**side, "per": 1, "length": 32, "groups": 64, "outliers": 1}, side)
    with pytest.raises(TypeError):
        _native.Layout(32, RECORD_BYTES, None, side)
    with pytest.raises(TypeError):
        _native.attend(*arguments(layout=_native.Layout.__new__(_native.Layout)))


def arguments(**changes: Any) -> list[Any]:
    """A good call of the module, two rows with two KV heads each, in its order; ``changes`` by name."""
    side = good_side()
    good: dict[str, Any] = {
        "layout": _native.Layout(32, RECORD_BYTES, side, side),
        "isa": 0,
        "threads": 1,
        "output": torch.zeros(2, 6, 3, 64),
        "query": torch.zeros(2, 6, 3, 64),
        "pool": torch.zeros(4, 2, RECORD_BYTES, dtype=torch.uint8),
        "table": torch.tensor([[0, 1], [2, 3]]),
        "counts": (2, 2),
        "first_token": 4,
        "keys": torch.zeros(2, 2, 24, 64),
        "values": torch.zeros(2, 2, 24, 64),
        "held": (24, 24),
        "sinks": 4,
        "dropped": 0,
        "statics": (None, None, None, None),
        "transforms": None,
        "mask": None,
        "column_of": None,
        "offset": 0,
        "first_query_column": 85,
        "window": 0,
        "packed_visible": True,
        "exact_visible": False,
        "scaling": 0.125,
        "softcap": 0.0,
        "sink_logits": None,
    }
    assert changes.keys() <= good.keys()
    return list({**good, **changes}.values())


def unaligned(x: torch.Tensor) -> torch.Tensor:
    """A tensor like ``x`` one byte off."""
    memory = torch.zeros(x.nbytes + 1, dtype=torch.uint8)
    # torch refuses such views; numpy does not.
    return torch.from_numpy(memory.numpy()[1:].view(x.numpy().dtype)).view(x.shape)


def transforms(**changes: Any) -> dict[str, Any]:
    good = {
        "key_mean": None, "key_balance": None, "key_rotation": None, "value_mean": None, "value_back": None,
        "steps": None, "base_cos": None, "base_sin": None, "whole": True,
    }  # fmt: skip
    assert changes.keys() <= good.keys()
    return {"transforms": tuple({**good, **changes}.values())}


def turned(**changes: Any) -> dict[str, Any]:
    """Transforms with rotary angles of two blocks of 32 tokens, 32 pairs of channels."""
    return transforms(**{"steps": steps(32, 32), "base_cos": BASE, "base_sin": BASE, **changes})


def steps(tokens: int, pairs: int) -> Any:
    return _native.Steps(torch.zeros(tokens, pairs), torch.zeros(tokens, pairs), False)


def layout(**changes: Any) -> Any:
    return _native.Layout(32, RECORD_BYTES, {**good_side(), **changes}, good_side())


BASE, MASK = torch.zeros(1, 2, 32), torch.zeros(2, 1, 3, 88)
BAD_CALLS: dict[str, tuple[dict[str, Any], str]] = {
    # shapes
    "output of other rows": ({"output": torch.zeros(1, 6, 3, 64)}, "output does not fit"),
    "output of other heads": ({"output": torch.zeros(2, 5, 3, 64)}, "output does not fit"),
    "output of other queries": ({"output": torch.zeros(2, 6, 2, 64)}, "output does not fit"),
    "output of other channels": ({"output": torch.zeros(2, 6, 3, 56)}, "output does not fit"),
    "output of 3 dimensions": ({"output": torch.zeros(6, 3, 64)}, "output has 3 dimensions instead of 4"),
    "output of 5 dimensions": ({"output": torch.zeros(2, 1, 6, 3, 64)}, "output has 5 dimensions instead of 4"),
    "query of other rows": ({"query": torch.zeros(3, 6, 3, 64)}, "query does not fit the keys"),
    "query of heads that do not divide": (
        {"query": torch.zeros(2, 5, 3, 64), "output": torch.zeros(2, 5, 3, 64)},
        "query does not fit the keys",
    ),
    "query without heads": ({"query": torch.zeros(2, 0, 3, 64), "output": torch.zeros(2, 0, 3, 64)}, "query|empty"),
    "query without tokens": ({"query": torch.zeros(2, 6, 0, 64), "output": torch.zeros(2, 6, 0, 64)}, "empty"),
    "query of other channels": ({"query": torch.zeros(2, 6, 3, 72)}, "query does not fit the keys"),
    "an enormous query": (
        {"query": torch.zeros(1).expand(2, 2**16, 2**16, 64), "output": torch.zeros(1).expand(2, 2**16, 2**16, 64)},
        "stride 0|enormous",
    ),
    "a query of enormous heads": (
        {
            "query": torch.zeros(64).expand(2, 2**16, 2**16, 64),
            "output": torch.zeros(64).expand(2, 2**16, 2**16, 64),
        },
        "enormous",
    ),
    "balance of query heads": (transforms(key_balance=torch.zeros(6, 64)), "key balance has the wrong shape"),
    "key rotation of other channels": (
        transforms(key_rotation=torch.zeros(32, 32)),
        "key rotation has the wrong shape",
    ),
    "keys of other channels": ({"keys": torch.zeros(2, 2, 24, 56)}, "layout's channels"),
    "values of other channels": ({"values": torch.zeros(2, 2, 24, 72)}, "layout's channels"),
    "values of fewer tokens": ({"values": torch.zeros(2, 2, 20, 64)}, "keys and values differ"),
    "values of other heads": ({"values": torch.zeros(2, 1, 24, 64)}, "keys and values differ"),
    "no rows": ({"keys": torch.zeros(0, 2, 24, 64), "values": torch.zeros(0, 2, 24, 64)}, "empty"),
    "pool of other heads": ({"pool": torch.zeros(4, 1, RECORD_BYTES, dtype=torch.uint8)}, "pool does not fit"),
    "pool of shorter records": ({"pool": torch.zeros(4, 2, 2240, dtype=torch.uint8)}, "pool does not fit"),
    "pool with gaps": ({"pool": torch.zeros(4, 4, RECORD_BYTES, dtype=torch.uint8)[:, ::2]}, "pool does not fit"),
    "pool with gaps between blocks": (
        {"pool": torch.zeros(8, 2, RECORD_BYTES, dtype=torch.uint8)[::2]},
        "pool does not fit",
    ),
    "table of fewer rows": ({"table": torch.tensor([[0, 1]])}, "table must have one row"),
    "table of one dimension": ({"table": torch.tensor([0, 1])}, "table has 1 dimensions instead of 2"),
    "cos without sin": (turned(base_sin=None), "base sin is missing"),
    "sin without cos": (turned(base_cos=None), "base cos is missing"),
    "cos and sin of other shapes": (turned(base_sin=BASE[..., :8]), "base cos and base sin differ|base cos and sin"),
    "too many pairs": (turned(steps=steps(32, 33), base_cos=torch.zeros(1, 2, 33), base_sin=BASE), "steps do not fit"),
    "steps of other blocks": (turned(steps=steps(16, 32)), "steps do not fit"),
    "bases of other pairs": (turned(steps=steps(32, 16)), "base cos does not fit"),
    "too few bases": (turned(base_cos=BASE[:, :1], base_sin=BASE[:, :1]), "base cos has too few rows"),
    "bases of other rows": (
        turned(base_cos=BASE.expand(3, -1, -1), base_sin=BASE.expand(3, -1, -1)),
        "base cos does not fit",
    ),
    "rotation and rope": (turned(key_rotation=torch.zeros(64, 64)), "rotated keys cannot"),
    "balance and rope": (turned(key_balance=torch.zeros(2, 64)), "rotated keys cannot"),
    "steps that are a tensor": (turned(steps=BASE), "steps are not Steps"),
    "key mean of one head": (transforms(key_mean=torch.zeros(1, 64)), "key mean has the wrong shape"),
    "value mean of other channels": (transforms(value_mean=torch.zeros(2, 56)), "value mean has the wrong shape"),
    "rotation that is not square": (
        transforms(value_back=torch.zeros(64, 32)),
        "value rotation back has the wrong shape",
    ),
    "rotation that is transposed": (
        transforms(value_back=torch.zeros(64, 64).t()),
        "value rotation back: its last",
    ),
    "few transforms": ({"transforms": (None, None)}, "transforms are"),
    "mask of other rows": ({"mask": MASK[:1].expand(3, -1, -1, -1)}, "mask does not fit"),
    "mask of other heads": ({"mask": MASK.expand(-1, 2, -1, -1)}, "mask does not fit"),
    "mask of other queries": ({"mask": MASK[:, :, :2]}, "mask does not fit"),
    "mask of 3 dimensions": ({"mask": MASK[0]}, "mask has 3 dimensions"),
    "column_of of other rows": ({"column_of": torch.zeros(1, 88, dtype=torch.int64)}, "column_of must be"),
    "column_of with gaps": ({"column_of": torch.zeros(2, 100, dtype=torch.int64)[:, :88]}, "column_of must be"),
    "empty sink logits": ({"sink_logits": torch.zeros(0)}, "sink_logits has the wrong shape"),
    "an empty mask": ({"mask": MASK[..., :0]}, "mask does not fit"),
    "an empty rotation": (transforms(key_rotation=torch.zeros(0, 0)), "key rotation has the wrong shape"),
    "empty bases": (turned(base_cos=BASE[..., :0], base_sin=BASE[..., :0]), "base cos does not fit"),
    "few sink logits": ({"sink_logits": torch.zeros(2)}, "sink_logits has the wrong shape"),
    "few statics": ({"statics": (None,)}, "statics are"),
    "static scale is missing": ({"layout": layout(**FIXED)}, "key scale is missing"),
    "static zero is missing": (
        {"layout": layout(**FIXED), "statics": (torch.zeros(2, 64), None, None, None)},
        "key zero is missing",
    ),
    "static scale of one head": (
        {"layout": layout(**FIXED), "statics": (torch.zeros(1, 64), torch.zeros(2, 64), None, None)},
        "key scale has the wrong shape",
    ),
    # types
    "query of float64": ({"query": torch.zeros(2, 6, 3, 64).double()}, "query is torch.float64; allowed are float32"),
    "output of int32": ({"output": torch.zeros(2, 6, 3, 64, dtype=torch.int32)}, "output is torch.int32"),
    "keys of float64": ({"keys": torch.zeros(2, 2, 24, 64).double()}, "keys is torch.float64"),
    "values of uint8": ({"values": torch.zeros(2, 2, 24, 64, dtype=torch.uint8)}, "values is torch.uint8"),
    "pool of int8": ({"pool": torch.zeros(4, 2, RECORD_BYTES, dtype=torch.int8)}, "pool is torch.int8"),
    "table of int32": ({"table": torch.zeros(2, 2, dtype=torch.int32)}, "table is torch.int32; allowed are int64"),
    "mask of int64": ({"mask": MASK.long()}, "mask is torch.int64"),
    "mask of float64": ({"mask": MASK.double()}, "mask is torch.float64"),
    "column_of of int32": ({"column_of": torch.zeros(2, 88, dtype=torch.int32)}, "column_of is torch.int32"),
    "sink logits of bfloat16": ({"sink_logits": torch.zeros(6).bfloat16()}, "sink_logits is torch.bfloat16"),
    "angles of bfloat16": (turned(base_cos=BASE.bfloat16(), base_sin=BASE.bfloat16()), "base cos is torch.bfloat16"),
    "mean of bfloat16": (transforms(key_mean=torch.zeros(2, 64).bfloat16()), "key mean is torch.bfloat16"),
    "query on meta": ({"query": torch.zeros(2, 6, 3, 64, device="meta")}, "query is not on the CPU"),
    "a numpy array": ({"query": torch.zeros(2, 6, 3, 64).numpy()}, "query is float32"),
    # strides and alignment
    "output channels apart": ({"output": torch.zeros(2, 6, 64, 3).transpose(2, 3)}, "output: its last dimension"),
    "query channels apart": ({"query": torch.zeros(2, 6, 3, 128)[..., ::2]}, "query: its last dimension has stride 2"),
    "keys channels apart": ({"keys": torch.zeros(2, 2, 64, 24).transpose(2, 3)}, "keys: its last dimension"),
    "mask columns apart": ({"mask": MASK[..., :1].expand(-1, -1, -1, 88)}, "mask: its last dimension has stride 0"),
    "table columns apart": ({"table": torch.zeros(2, 4, dtype=torch.int64)[:, ::2]}, "table: its last dimension"),
    "unaligned query": ({"query": unaligned(torch.zeros(2, 6, 3, 64))}, "query is not aligned"),
    "unaligned pool": ({"pool": unaligned(torch.zeros(4, 2, RECORD_BYTES, dtype=torch.uint8))}, "pool is not aligned"),
    "unaligned half keys": ({"keys": unaligned(torch.zeros(2, 2, 24, 64).half())}, "keys is not aligned"),
    "unaligned table": ({"table": unaligned(torch.zeros(2, 2, dtype=torch.int64))}, "table is not aligned"),
    # numbers
    "a block beyond the pool": ({"table": torch.tensor([[0, 1], [2, 4]])}, "the pool does not have"),
    "a block far beyond": ({"table": torch.tensor([[0, 1], [2, 2**62]])}, "the pool does not have"),
    "a negative block": ({"table": torch.tensor([[0, -1], [2, 3]])}, "the pool does not have"),
    "blocks of an empty pool": ({"pool": torch.zeros(0, 2, RECORD_BYTES, dtype=torch.uint8)}, "the pool does not have"),
    "more blocks than the table has": ({"counts": (2, 3)}, "counts is out of range"),
    "negative blocks": ({"counts": (-1, 2)}, "counts is out of range"),
    "blocks of one row": ({"counts": (2,)}, "counts must have one number for each row"),
    "more exact tokens than there are": ({"held": (24, 25)}, "held is out of range"),
    "negative exact tokens": ({"held": (24, -1)}, "held is out of range"),
    "exact tokens of three rows": ({"held": (24, 24, 24)}, "held must have one number"),
    "a negative first token": ({"first_token": -1}, "negative token numbers"),
    "an enormous first token": ({"first_token": 2**31 - 1}, "more tokens than can be numbered"),
    "negative sinks": ({"sinks": -1}, "negative token numbers"),
    "negative dropped": ({"dropped": -1}, "negative token numbers"),
    "enormously many dropped": (
        {"dropped": 2**31 - 1, "column_of": torch.zeros(2, 88, dtype=torch.int64)},
        "more tokens than can be numbered",
    ),
    "a negative offset": ({"offset": -1}, "out of range"),
    "an enormous offset": ({"offset": 2**63 - 1}, "out of range"),
    "a negative window": ({"window": -1}, "out of range"),
    "a negative column": ({"first_query_column": -(2**63)}, "out of range"),
    "an enormous column": ({"first_query_column": 2**63 - 1}, "out of range"),
    "a negative softcap": ({"softcap": -1.0}, "negative softcap"),
    "a softcap that is NaN": ({"softcap": math.nan}, "negative softcap"),
    "no such instruction set": ({"isa": len(ISAS)}, "there is no instruction set"),
    "a negative instruction set": ({"isa": -1}, "there is no instruction set"),
}
BAD_TYPES: dict[str, tuple[dict[str, Any], str]] = {
    "counts of words": ({"counts": ("a", "b")}, "counts cannot be"),
    "counts too large": ({"counts": (2, 2**40)}, "counts cannot be"),
    "counts that are missing": ({"counts": None}, "incompatible function arguments|counts cannot be"),
    "held in a tensor of floats": ({"held": (24.5, 24.5)}, "held cannot be"),
    "statics in a list": ({"statics": [None]}, "statics cannot be"),
    "transforms in a list": ({"transforms": [None] * 9}, "transforms cannot be"),
    "whole is a word": (turned(whole="no"), "whole cannot be"),
    "a layout of another kind": ({"layout": good_side()}, "incompatible function arguments"),
    "a first token in words": ({"first_token": "four"}, "incompatible function arguments"),
    "a number as a query": ({"query": 1.5}, "query is not a tensor"),
    "a list as keys": ({"keys": [1, 2]}, "keys is not a tensor"),
}


def test_the_good_call_is_good() -> None:
    """Else the bad ones below could be refused for something else."""
    call = arguments(output=torch.ones(2, 6, 3, 64))
    _native.attend(*call)
    assert not call[3].any()
    _native.attend(*arguments(mask=MASK, column_of=torch.arange(88).repeat(2, 1), **turned()))
    rotated = {"key_rotation": torch.zeros(64, 64), "key_balance": torch.zeros(2, 64)}
    _native.attend(*arguments(**turned(whole=False, **rotated)))
    _native.attend(*arguments(window=2**63 - 1))
    _native.attend(*arguments(layout=layout(**FIXED), statics=(torch.zeros(2, 64), torch.zeros(2, 64), None, None)))


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls_are_refused(name: str) -> None:
    changes, message = BAD_CALLS[name]
    with pytest.raises(ValueError, match=message):
        _native.attend(*arguments(**changes))


@pytest.mark.parametrize(
    ("cos", "sin", "message"),
    [
        (torch.zeros(0, 32), torch.zeros(0, 32), "no or too many"),
        (torch.zeros(32, 0), torch.zeros(32, 0), "no or too many"),
        (torch.zeros(8, 257), torch.zeros(8, 257), "no or too many"),
        (torch.zeros(4104, 8), torch.zeros(4104, 8), "no or too many"),
        (torch.zeros(32, 32), torch.zeros(32, 31), "step sin has the wrong shape"),
        (torch.zeros(32, 32), None, "step sin is missing"),
        (None, torch.zeros(32, 32), "step cos is missing"),
        (torch.zeros(32, 64)[:, :32], torch.zeros(32, 32), "step cos is not contiguous"),
        (torch.zeros(32, 32).half(), torch.zeros(32, 32), "step cos is torch.float16"),
        (torch.zeros(32), torch.zeros(32), "step cos has 1 dimensions"),
    ],
    ids=str,
)
def test_steps_that_make_no_sense_are_refused(cos: Any, sin: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _native.Steps(cos, sin, False)


@pytest.mark.parametrize("name", BAD_TYPES)
def test_arguments_of_other_types_are_refused(name: str) -> None:
    changes, message = BAD_TYPES[name]
    with pytest.raises(TypeError, match=message):
        _native.attend(*arguments(**changes))


@pytest.mark.parametrize("position", range(26))
def test_nonsense_in_the_place_of_any_argument(position: int) -> None:
    """Refused, or as if it were not there; never a crash, and never an error without a word."""
    good = arguments()[position]
    for wrong in (None, "word", 2**70, -(2**40), 0.5, torch.zeros(0), torch.zeros(1, 1, 1, 1), object(), (), {}):
        if type(good) is bool or (type(good) is float and hasattr(wrong, "__float__")):
            continue  # anything is true or false, and any number a scaling
        if wrong is None and good is None:
            continue  # the optional ones
        call = arguments()
        call[position] = wrong
        with pytest.raises((ValueError, TypeError), match=r"."):
            _native.attend(*call)


def test_columns_that_do_not_exist_are_not_read() -> None:
    """``column_of`` and a mask that do not cover all tokens: the rest is hidden."""
    wild = torch.tensor([[0, 1, 2**62, -(2**62), -1, 7] + [10**9] * 82] * 2)
    call = arguments(query=torch.ones(2, 6, 3, 64), values=torch.ones(2, 2, 24, 64), mask=MASK[..., :2], column_of=wild)
    _native.attend(*call)
    assert torch.allclose(call[3], torch.ones(()))  # of the first two sinks
    _native.attend(*arguments(column_of=torch.zeros(2, 0, dtype=torch.int64)))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"output": torch.zeros(2, 2, 60, 64)}, ValueError, "output does not fit"),
        ({"output": torch.zeros(2, 2, 64, 56)}, ValueError, "output does not fit"),
        ({"output": torch.zeros(2, 2, 64, 64).double()}, ValueError, "output is torch.float64"),
        ({"output": torch.zeros(2, 1, 64, 64)}, ValueError, "pool does not fit"),
        ({"output": torch.zeros(1, 2, 64, 64)}, ValueError, "table does not have"),
        ({"output": torch.zeros(2, 2, 96, 64)}, ValueError, "table does not have"),
        ({"first": 1}, ValueError, "table does not have"),
        ({"first": -1}, ValueError, "table does not have"),
        ({"first": 2**31 - 1}, ValueError, "table does not have"),
        ({"table": torch.tensor([[0, 9], [0, 0]])}, ValueError, "the pool does not have"),
        ({"table": torch.tensor([[0, -9], [0, 0]])}, ValueError, "the pool does not have"),
        ({"pool": unaligned(torch.zeros(4, 2, RECORD_BYTES, dtype=torch.uint8))}, ValueError, "pool is not aligned"),
        ({"layout": layout(**FIXED)}, ValueError, "scale is missing"),
        ({"layout": layout(**FIXED), "scale": torch.zeros(2, 64)}, ValueError, "zero is missing"),
        ({"layout": layout(**FIXED), "scale": torch.zeros(64)}, ValueError, "scale has 1 dimensions"),
        ({"isa": 99}, ValueError, "no instruction set"),
        ({"output": None}, (ValueError, TypeError), "output|incompatible"),
    ],
)
def test_bad_calls_of_decode_are_refused(changes: dict[str, Any], error: Any, message: str) -> None:
    good: dict[str, Any] = {
        "layout": layout(),
        "value_side": False,
        "isa": 0,
        "threads": 1,
        "output": torch.zeros(2, 2, 64, 64),
        "pool": torch.zeros(4, 2, RECORD_BYTES, dtype=torch.uint8),
        "table": torch.tensor([[0, 1], [2, 3]]),
        "first": 0,
        "scale": None,
        "zero": None,
    }
    _native.decode(*good.values())
    with pytest.raises(error, match=message):
        _native.decode(*{**good, **changes}.values())


@pytest.mark.parametrize("threads", (-5, 0, 7, 2**31 - 1))
def test_any_number_of_threads_is_taken(threads: int) -> None:
    call = arguments(output=torch.ones(2, 6, 3, 64), threads=threads)
    _native.attend(*call)
    assert not call[3].any()


# -- threads and processes ---------------------------------------------------------------------------------------------

SPLIT = 2**-16
"""Where work is cut elsewhere, float32 sums differ in their last bit, and by that a 16-bit factor in its own last."""


@each_isa
@pytest.mark.parametrize("queries", (1, 40))
def test_the_number_of_threads_does_not_matter(queries: int, isa: str) -> None:
    view = cached_view(PLAIN, (1500, queries))
    call = Call(query_for(view, PLAIN, queries), view, 0.125)
    results = []
    for threads in (1, 2, 3, 4, 5):
        torch.set_num_threads(threads)
        results.append(native.run(call))
        assert torch.equal(results[-1], native.run(call)), "one number of threads always gives the same bits"
        assert same(results[-1], results[0], SPLIT)


def test_python_threads_do_not_disturb_each_other() -> None:
    schemes = ("kivi4", "nf3", "fp8", "int8", "k=hqq2-channel,v=nf4", "int2", "exact", "kivi2")
    calls = []
    for scheme in schemes:
        view = view_of(PLAIN, (400, 3), f"{scheme},{SMALL}")
        calls.append(Call(query_for(view, PLAIN, 3), view, 0.125))
    torch.set_num_threads(2)
    right = [native.run(call) for call in calls]
    start, wrong = threading.Barrier(len(calls)), []

    def work(index: int) -> None:
        torch.set_num_threads(2)  # a thread starts with torch's default
        start.wait()
        for _ in range(10):
            if not torch.equal(native.run(calls[index]), right[index]):
                wrong.append(schemes[index])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("isa", ["scalar"], indirect=True)
def test_other_python_threads_run_during_a_call(isa: str) -> None:
    """Were the GIL held, no stamp would fall into the call between the moment it begins and the moment it returns."""
    shape = Shape(2, 4, 128, 128)
    view = view_of(shape, (4000, 64), "int4", batch=1)
    call = Call(query_for(view, shape, 64), view, 0.1)
    stamps: list[float] = []
    stop = threading.Event()

    def count() -> None:
        while not stop.is_set():
            stamps.append(time.perf_counter())
            time.sleep(0.0005)

    torch.set_num_threads(1)
    native.run(call)
    counter = threading.Thread(target=count)
    counter.start()
    try:
        begin = time.perf_counter()
        native.run(call)
        end = time.perf_counter()
    finally:
        stop.set()
        counter.join()
    inside = [begin, *(stamp for stamp in stamps if begin < stamp < end), end]
    longest = max(after - before for before, after in itertools.pairwise(inside))
    assert end - begin > 0.05, "too short to tell"
    assert longest < (end - begin) / 2


def in_child(results: Connection, call: Call, threads: int) -> None:
    torch.set_num_threads(threads)
    results.send(native.run(call).flatten().tolist())


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("threads", (1, 2, 3))
def test_a_forked_process_can_attend(threads: int) -> None:
    """A child has none of the threads that its parent's OpenMP counts on, and must not wait for them."""
    view = view_of(PLAIN, (600, 3))
    call = Call(query_for(view, PLAIN, 3), view, 0.125)
    torch.set_num_threads(threads)
    right = native.run(call)
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=in_child, args=(there, call, threads))
    child.start()
    try:
        assert here.poll(60), "the child hangs"
        assert here.recv() == right.flatten().tolist()
        child.join(30)
        assert child.exitcode == 0
    finally:
        child.kill()
    assert torch.equal(native.run(call), right)  # and the parent goes on


# -- rows that share blocks --------------------------------------------------------------------------------------------


def cache_of(scheme: str = f"kivi4,{SMALL}", batch: int = 2, counts: tuple[int, ...] = (150, 9)) -> LayerCache:
    cache = LayerCache(Scheme.parse(scheme))
    for seed, count in enumerate(counts):
        cache.append(random(batch, 2, count, 64, seed=2 * seed), random(batch, 2, count, 64, seed=2 * seed + 1))
    return cache


def test_beam_search() -> None:
    """Rows that were chosen several times share blocks, and go apart again."""
    cache = cache_of()
    for chosen in ([1, 1, 0], [2, 0, 2], [0, 1, 1]):
        cache.select_rows(torch.tensor(chosen))
        view = cache.append(random(3, 2, 40, 64, seed=sum(chosen)), random(3, 2, 40, 64, seed=9))
        assert len(view.blocks.table.unique()) < view.blocks.table.numel() or view.blocks.in_order
        for queries in (1, 5):
            query = random(3, HEADS, queries, 64, seed=3)
            out = assert_native(Call(query, view, 0.125))
            alone = dataclasses.replace(view, keys=view.keys[:1], values=view.values[:1], held=view.held[:1])
            blocks = dataclasses.replace(view.blocks, table=view.blocks.table[:1], counts=view.blocks.counts[:1])
            one = dataclasses.replace(alone, blocks=blocks, rows=Rows(1, view.rows.columns))
            assert same(native.run(Call(query[:1], one, 0.125)), out[:1], SPLIT)


def test_crops_and_what_is_appended_after() -> None:
    cache = cache_of()
    for taken in (3, 60, 90):
        cache.crop(taken)
        view = cache.append(random(2, 2, 45, 64, seed=taken), random(2, 2, 45, 64, seed=taken + 1))
        assert_native(Call(random(2, HEADS, 2, 64), view, 0.125))


@pytest.mark.parametrize("scheme", ("kivi4", "fp8-static", "nf3"))
def test_a_view_keeps_its_own_result(scheme: str) -> None:
    """Whatever is appended, selected or grown after it was taken."""
    cache = cache_of(f"{scheme},{SMALL}")
    views, calls = [], []
    for seed in range(8):
        views.append(cache.append(random(2, 2, 37, 64, seed=seed), random(2, 2, 37, 64, seed=seed + 50)))
        calls.append(Call(random(2, HEADS, 3, 64, seed=seed), views[-1], 0.125))
    right = [native.run(call).clone() for call in calls]
    cache.select_rows(torch.tensor([1, 1, 1]))
    cache.append(random(3, 2, 300, 64), random(3, 2, 300, 64))
    for call, expected in zip(calls, right, strict=True):
        assert_native(call)
        assert torch.equal(native.run(call), expected)


def test_what_is_known_of_a_layer_goes_by_its_parameters() -> None:
    """Two views of one record whose static scales differ: neither may meet the other's."""
    view = view_of_new("static table of 3 bits", "both", PLAIN, (150, 1))
    other = dataclasses.replace(view, key_params={**view.key_params, "scale": view.key_params["scale"] * 3})
    query = query_for(view, PLAIN, 1)
    for _ in range(2):
        first, second = (assert_native(Call(query, each, 0.125)) for each in (view, other))
        assert not same(first, second, 1e-2)


# -- without the module, or with less of it ----------------------------------------------------------------------------


def in_another_process(isa: str) -> subprocess.CompletedProcess[str]:
    code = "from kvbits.library import instruction_set; print(instruction_set())"
    environment = {**os.environ, "KVBITS_ISA": isa}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_an_unknown_instruction_set_is_refused() -> None:
    result = in_another_process("mmx")
    assert result.returncode != 0
    assert f"ValueError: KVBITS_ISA='mmx' is not available here; allowed are {', '.join(ISAS)}" in result.stderr


def test_an_instruction_set_can_be_chosen() -> None:
    result = in_another_process("scalar")
    assert (result.returncode, result.stdout.strip()) == (0, "scalar"), result.stderr


def test_the_best_instruction_set_runs() -> None:
    if "KVBITS_ISA" not in os.environ:
        assert instruction_set() == ISAS[0]
    assert ISAS[-1] == "scalar" and len(set(ISAS)) == len(ISAS)
    assert _native.pool() in ("openmp", "own")


@pytest.mark.parametrize("queries", (1, 5))
def test_without_the_module_the_reference_runs(queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    view = view_of(PLAIN, (150, queries))
    call = Call(query_for(view, PLAIN, queries), view, 0.125)
    right = assert_native(call)
    why = "it was not built: no C++ compiler when kvbits was installed"
    monkeypatch.setattr(native, "library", lambda: (None, 0, why))
    assert (explain(call)[0], explain(call)[-1]) == (f"native: {why}", "reference: runs")
    assert same(attend(call), right, NATIVE_ERROR)
    for got, expected in zip(view.dense(), decoded(view), strict=True):
        assert torch.equal(got.double(), expected)


def test_what_the_kernel_leaves_to_the_reference() -> None:
    for shape, dtype, reason in (
        (Shape(2, 3, 20, 20), torch.float32, "head_dim 20 is not a multiple of 8 up to 512"),
        (Shape(1, 1, 520, 64), torch.float32, "head_dim 520 is not a multiple of 8 up to 512"),
        (PLAIN, torch.float64, "torch.float64 is computed in full only by the reference"),
    ):
        view = view_of(shape, (150, 1), dtype=dtype)
        call = Call(query_for(view, shape, 1), view, 0.125)
        lines = explain(call)
        assert reason in lines[0] and lines[-1] == "reference: runs"
        assert same(attend(call).double(), plain_attention(call, torch.float64, *decoded(view)), 1e-6)
