"""The Triton encoder gives the bits of ``Codec.encode``, for every codec that packs; HQQ's zeros as good ones."""

from __future__ import annotations

import pytest
import torch

from blocks import HQQ, assert_same, assert_same_bits, blocks, fit, hard, normal, objective
from kvbits.codecs import CODECS, Codec, Fp8
from kvbits.codecs.affine import Affine
from kvbits.codecs.half_quadratic import HalfQuadratic
from kvbits.encode import LARGEST, Unsound
from kvbits.encode.triton import encode as fast
from kvbits.encode.triton.shape import Before, Shape, warps_of
from kvbits.schemes.names import parse_codec
from kvbits.types import Packed, Params
from triton_blocks import DTYPES, there
from triton_calls import DEVICE, needs_triton
from views import random

pytestmark = pytest.mark.usefixtures("interpreted")

EXAMPLES = {example for kind in CODECS for example in kind.examples if example != "exact"}
SPELLINGS = sorted(
    EXAMPLES - set(HQQ)
    | {f"int{bits}{rest}" for bits in (8, 4, 3, 2) for rest in ("-gs16", "-channel", "-channel-gs16")}
    | {f"nf{bits}-channel" for bits in (4, 3, 2)}
    | {"rot3-gs16", "int8-channel-gs16-5%", "nf3-gs16-1%", "nuq4-channel", "nuq3-channel-gs16-1%"}
)


def encoded(codec: Codec, x: torch.Tensor, params: Params) -> Packed:
    """What the kernel gives, on the CPU."""
    assert fast.why_not(codec, x.to(DEVICE)) == []
    return {name: part.cpu() for name, part in fast.run(codec, x.to(DEVICE), there(params)).items()}


def assert_right(spelling: str, x: torch.Tensor) -> Packed:
    """The bits of the twin; with outliers, those that go with a choice that is as good."""
    codec, x = parse_codec(spelling), blocks(x)
    params = fit(codec, x)
    got = encoded(codec, x, params)
    assert_same(got, codec.encode(x, params), codec, x, params)
    return got


def tokens_for(spelling: str) -> int:
    return max(32, parse_codec(spelling).block_multiple)


@needs_triton
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_same_bits(spelling: str) -> None:
    """Every codec, in every dtype, at head dimensions that are no powers of two."""
    for channels, dtype in zip((80, 96, 112), DTYPES, strict=True):
        assert_right(spelling, normal(1, 1, 1, tokens_for(spelling), channels, seed=channels, dtype=dtype))


@needs_triton
@pytest.mark.parametrize("channels", (1, 20, 65, 130))
@pytest.mark.parametrize("spelling", ("int4", "int3-channel", "nf3-1%", "nuq4-static-1%", "fp8", "lm2"))
def test_other_head_dimensions(spelling: str, channels: int) -> None:
    assert_right(spelling, normal(1, 2, 1, 32, channels, seed=channels, dtype=torch.bfloat16))


@needs_triton
@pytest.mark.parametrize("tokens", (16, 64, 128, 256))
@pytest.mark.parametrize("spelling", ("int4", "int3", "int2-channel-gs16", "int4-1%", "int3-static-2%", "fp8", "lm2"))
def test_other_blocks(spelling: str, tokens: int) -> None:
    assert_right(spelling, normal(1, 1, tokens, 40, seed=tokens))


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "spelling",
    ("int4", "int3-channel", "nf4", "nuq3-token", "fp8", "fp8-static", "lm4", "int4-1%", "int2-static-2%", "hqq2"),
)
def test_constant_zero_tiny_and_huge_groups(spelling: str, dtype: torch.dtype) -> None:
    """HQQ only where a group is constant: then the zero is not searched for."""
    kinds = hard(dtype)[:, :32, :32]
    assert_right(spelling, kinds[:5] if spelling == "hqq2" else kinds)


@needs_triton
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
@pytest.mark.parametrize("spelling", ("int4", "int3-channel", "nf4", "fp8", "lm4"))
def test_magnitudes(spelling: str, dtype: torch.dtype) -> None:
    """One-signed and far from zero, tiny and large, half of it of one value."""
    x = random(4, 32, 32, seed=3)
    x[0] = x[0] / 100 + 40
    x[1], x[2] = x[1] * 1e-3, x[2] * 1e3
    x[3, :, ::2], x[3, ::2] = 1, 2
    assert_right(spelling, x.to(dtype))
    if dtype == torch.float32:
        assert_right(spelling, x * 1e-25)
        assert_right(spelling, x * 1e25)


@needs_triton
def test_a_view_of_a_longer_buffer() -> None:
    """What a cache encodes: blocks in the middle of its tokens, not contiguous, for several rows and heads."""
    work = random(2, 3, 4 + 2 * 32 + 9, 24, dtype=torch.bfloat16)
    for spelling in ("int4", "int4-static-1%"):
        assert_right(spelling, work[:, :, 4:68].unflatten(2, (-1, 32)))
    assert_right("int2-channel", work[:, :, 4:68].unflatten(2, (-1, 32)).transpose(1, 2))
    assert_right("int4-static", work[:, :, 4:68].unflatten(2, (-1, 32))[None])


@needs_triton
def test_no_blocks() -> None:
    got = fast.run(Fp8(), torch.zeros(2, 0, 32, 16, device=DEVICE), {})
    assert got["codes"].shape == (2, 0, 32, 16) and got["scale"].shape == (2, 0, 32, 1)


# -- outliers ----------------------------------------------------------------------------------------------------------


@needs_triton
@pytest.mark.parametrize("spelling", ("int4-1%", "nf3-channel-5%", "int2-static-10%", "nuq2-static-1%-qnorm"))
def test_the_same_outliers(spelling: str) -> None:
    """Of numbers without equals the very elements that the twin takes, also where a whole group is among them."""
    codec, x = parse_codec(spelling), normal(2, 2, 64, 40)
    x[0, 1, ::7, 3] *= 50
    x = blocks(x)
    params = fit(codec, x)
    assert_same_bits(encoded(codec, x, params), codec.encode(x, params))


@needs_triton
@pytest.mark.parametrize("spelling", ("int4-1%", "int4-channel-1%", "int2-static-1%"))
def test_of_equals_the_first_are_outliers(spelling: str) -> None:
    coin = torch.rand(1, 1, 32, 40, generator=torch.Generator().manual_seed(1)) < 0.5
    x = torch.where(coin, 1.0, -1.0)
    got = assert_right(spelling, x)
    assert_right(spelling, x * 0)
    assert bool((got["outlier_index"].int().diff() > 0).all())
    if spelling == "int2-static-1%":
        assert_right(spelling, torch.where(coin, 3.0, x))


# -- HQQ ---------------------------------------------------------------------------------------------------------------


@needs_triton
@pytest.mark.parametrize("spelling", HQQ)
def test_half_quadratic_zeros_are_as_good(spelling: str) -> None:
    """As for the native encoder: to 1e-4 of the objective, and nearly always the same ones.

    In the interpreter all bits of these are the same. A GPU's powers are a few units in the last place off.
    """
    codec = parse_codec(spelling)
    assert isinstance(codec, HalfQuadratic)
    for size, channels, dtype in zip((1e-2, 1, 1e2), (80, 96, 65), DTYPES, strict=True):
        x = normal(1, 32, channels, seed=channels, dtype=dtype) * size
        got, wanted = encoded(codec, x, {}), codec.encode(x, {})
        assert objective(codec, got, x) <= objective(codec, wanted, x) * (1 + 1e-4)
        assert torch.equal(got["scale"], wanted["scale"])
        assert (got["zero"] != wanted["zero"]).float().mean() <= 0.01
        assert (got["codes"] != wanted["codes"]).float().mean() <= 0.001
        unsearched = encoded(Affine(codec.bits, codec.per, codec.group), x, {})
        if codec.bits < 8:
            assert objective(codec, got, x) < objective(codec, unsearched, x) * (1 - 1e-3)


# -- what is refused ---------------------------------------------------------------------------------------------------


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "spelling",
    ("int4", "int3-channel", "nf4", "fp8", "fp8-static", "lm3", "hqq4", "int4-1%", "nuq3-static-1%", "int4-static"),
)
def test_what_no_block_can_hold_is_counted_and_refused(spelling: str, dtype: torch.dtype) -> None:
    codec, x = parse_codec(spelling), random(1, 2, 1, 32, 20, dtype=dtype)
    params, x = there(fit(codec, x)), x.to(DEVICE)
    limit = min(LARGEST, torch.finfo(dtype).max)
    x[0, 1, 0, 3, 4] = limit
    fast.run(codec, x, params)
    for count, strange in enumerate((torch.nan, torch.inf, -torch.inf, -3e38)):
        x[0, count % 2, 0, 31 - count, 19] = strange
        with pytest.raises(Unsound) as found:
            fast.run(codec, x, params)
        assert (found.value.count, found.value.limit) == (count + 1, limit)


@needs_triton
def test_static_scales_of_other_heads_are_refused() -> None:
    codec, x = parse_codec("int4-static"), normal(1, 2, 1, 32, 16)
    params = there(fit(codec, x))
    for other in (normal(1, 3, 1, 32, 16), normal(1, 2, 1, 32, 20), normal(2, 32, 16)):
        with pytest.raises(ValueError, match="static scales of int4-static are for 2 heads of 16 channels"):
            fast.run(codec, other.to(DEVICE), params)


@needs_triton
@pytest.mark.parametrize(
    ("spelling", "shape", "dtype", "reason"),
    [
        ("exact", (32, 16), torch.float32, "exact (codecs that say how they choose run)"),
        ("int4", (24, 16), torch.float32, "blocks of 24 tokens (powers of two from 16 run)"),
        ("int4", (32, 520), torch.float32, "head_dim 520 (up to 512 run)"),
        ("int4", (32, 16), torch.float64, "torch.float64 (float32, bfloat16 or float16 run)"),
    ],
)
def test_what_it_cannot_run(spelling: str, shape: tuple[int, int], dtype: torch.dtype, reason: str) -> None:
    x = torch.zeros(shape, dtype=dtype, device=DEVICE)
    assert fast.why_not(parse_codec(spelling), x) == [reason]
    with pytest.raises(ValueError, match="cannot be encoded with Triton"):
        fast.run(parse_codec(spelling), x, {})


class Twisted(Affine):
    """A codec of somebody else's, with an ``encode`` of its own."""

    def encode(self, x: torch.Tensor, params: Params) -> Packed:
        return super().encode(-x, params)


@needs_triton
def test_codecs_that_encode_otherwise_are_refused() -> None:
    assert fast.why_not(Twisted(4), torch.zeros(32, 16, device=DEVICE)) == [
        "int4 (codecs that say how they choose run)"
    ]


def test_on_a_cpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for kind in CODECS:
        codec = parse_codec(kind.examples[0])
        assert fast.why_not(codec, torch.zeros(32, 16)) == ["tensors on cpu (CUDA and ROCm GPUs run)"]


# -- the tile ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", sorted(EXAMPLES))
@pytest.mark.parametrize("channels", (16, 65, 80, 128, 165, 512))
def test_a_tile_holds_the_block(spelling: str, channels: int) -> None:
    """Every group fits, and little of the tile is empty."""
    shape = Shape.of(parse_codec(spelling), 128, channels)
    groups, length = (shape.second, shape.third) if shape.per_token else (shape.first, shape.second)
    assert groups >= shape.groups and length >= shape.length
    assert shape.first * shape.second * shape.third == shape.tokens * shape.columns
    assert channels <= shape.columns <= 4 * channels
    assert warps_of(shape, Before()) in (4, 8, 16)
