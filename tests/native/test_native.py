"""Floor 3: the native kernel with every instruction set, against float64: every format, type and size."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
import torch

from kernel_calls import FLOATS, PLAIN, SPELLINGS, UNLIKE, assert_native, cached_view, each_isa, same, view_in
from kvbits.attend import Call, attend, choose, explain, native
from kvbits.attend.dense import decode
from kvbits.codecs import Affine, Exact
from kvbits.schemes.scheme import Scheme
from kvbits.transform import Transform
from kvbits.types import Format, Params
from unspelled import NEW, WithOutliers, view_of_new
from views import SMALL, Shape, plain_attention, query_for, unrounded, view_of

pytestmark = pytest.mark.usefixtures("threads_stay")


# -- every format ------------------------------------------------------------------------------------------------------

COUNTS = {"step": (170, 1), "chunk": (160, 23), "unpacked": (20, 1)}


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
    for got, right in zip(native.decode(view), decode(view, 0, view.blocks.longest), strict=True):
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
    monkeypatch.setattr("kvbits.schemes.scheme.BLOCKS", (block,))
    codec = WithOutliers(Affine(3), 9) if scheme == "outliers" else Scheme.parse(f"{scheme},block={block}").key
    view = view_in(Scheme(codec, codec, residual=10, sinks=3, block=block), PLAIN, (2 * block + 13, 3))
    assert view.blocks.longest == 2
    assert_native(Call(query_for(view, PLAIN, 3), view, 0.125))


# -- formats that no codec of the catalogue has yet --------------------------------------------------------------------


@each_isa
@pytest.mark.parametrize("side", ("keys", "values", "both"))
@pytest.mark.parametrize("name", NEW)
def test_formats_of_codecs_to_come(name: str, side: str, isa: str) -> None:
    for counts in ((150, 1), (150, 5)):
        view = view_of_new(name, side, UNLIKE, counts)
        assert view.blocks.longest == 3
        assert_native(Call(query_for(view, UNLIKE, counts[-1]), view, 0.12))
        if side == "both":
            for got, right in zip(native.decode(view), decode(view, 0, view.blocks.longest), strict=True):
                assert torch.allclose(got, right, rtol=1e-6, atol=1e-6)


@each_isa
@pytest.mark.parametrize("name", ("outliers of int4", "outliers of fp8", "static table of 3 bits"))
def test_new_formats_before_anything_is_packed(name: str, isa: str) -> None:
    """Codecs that fit have no parameters by then."""
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
