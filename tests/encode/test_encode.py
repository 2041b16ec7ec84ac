"""Floor 3: the native encoders give the bits of ``codec.encode``, and refuse what the reference refuses."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

from blocks import (
    EXAMPLES,
    HQQ,
    MODULE,
    REASON,
    assert_same,
    assert_same_bits,
    blocks,
    fit,
    hard,
    normal,
    objective,
    seeded,
)
from kvbits.codecs import CODECS, Codec, Fp8Static, NonUniform
from kvbits.codecs.affine import Affine
from kvbits.codecs.grouped import GROUPS, Grouped
from kvbits.codecs.half_quadratic import HalfQuadratic
from kvbits.encode import KERNELS, LARGEST, Unsound, choose, encode, explain, native, reference
from kvbits.numerics import bitpack, hadamard
from kvbits.schemes.names import parse_codec
from kvbits.transform import rotate
from kvbits.types import Packed, Params

needs_native = pytest.mark.skipif(MODULE is None, reason=f"no native kernels: {REASON}")
NAMES: list[str] = MODULE.names() if MODULE is not None else []
each_set = pytest.mark.parametrize(
    "isa", [pytest.param(i, id=name) for i, name in enumerate(NAMES)] or [pytest.param(0, marks=needs_native)]
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))

EQUAL = [name for name in EXAMPLES if not name.startswith("hqq")]
GROUPED = [
    str(kind(bits, per, group))
    for kind in CODECS
    if issubclass(kind, Grouped) and kind not in (HalfQuadratic, NonUniform)
    for bits, per, group in product(kind.allowed_bits, ("token", "channel"), GROUPS)
]
CHANNELS = (1, 8, 12, 20, 31, 33, 64, 65, 80, 96, 112, 128, 130, 256)


def any_bits(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Every bit pattern that can be packed: from subnormal to 1e38, both zeros, both signs."""
    word = torch.int32 if dtype == torch.float32 else torch.int16
    limit = torch.iinfo(word)
    x = torch.randint(limit.min, limit.max + 1, shape, generator=seeded(seed), dtype=torch.int64).to(word).view(dtype)
    return torch.where(x.abs() <= min(LARGEST, torch.finfo(dtype).max), x, torch.zeros_like(x))


@contextlib.contextmanager
def each_named(name: str) -> Iterator[None]:
    """Of the instruction sets that a test goes through, an error names the one that made it."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{name}: {error}") from error


def assert_right(codec: Codec, x: torch.Tensor) -> None:
    """Every instruction set gives the bits of the codec itself, which takes longer than all of them: it runs once."""
    x = blocks(x)
    params = fit(codec, x)
    wanted = codec.encode(x, params)
    for isa, name in enumerate(NAMES):
        with each_named(name):
            assert_same(native.run_on(isa, codec, x, params), wanted, codec, x, params)


# -- the same bits -----------------------------------------------------------------------------------------------------


@needs_native
@each_dtype
@pytest.mark.parametrize("name", EQUAL)
def test_every_codec_has_the_bits_of_its_twin(name: str, dtype: torch.dtype) -> None:
    for seed, channels in enumerate(CHANNELS):
        assert_right(parse_codec(name), normal(2, 128, channels, seed=seed, dtype=dtype))


@needs_native
@pytest.mark.parametrize("name", GROUPED)
def test_every_group_and_direction(name: str) -> None:
    for channels, dtype in ((64, torch.bfloat16), (65, torch.float32), (20, torch.float16), (130, torch.bfloat16)):
        assert_right(parse_codec(name), normal(3, 128, channels, seed=channels, dtype=dtype))


@needs_native
@each_dtype
@pytest.mark.parametrize("name", EQUAL)
def test_any_bit_pattern(name: str, dtype: torch.dtype) -> None:
    for seed in range(20):
        x = any_bits(1, 128, 64, seed=seed, dtype=dtype)
        if seed % 2:  # of one size within a group, so that more than one level is met
            size = any_bits(1, 128, 1, seed=100 + seed, dtype=dtype).float().abs().clamp(max=1e37)
            x = (torch.randn(1, 128, 64, generator=seeded(seed)) * size).clamp(-6e4, 6e4).to(dtype)
        assert_right(parse_codec(name), x)


@needs_native
@each_dtype
@pytest.mark.parametrize("name", EQUAL + HQQ)
def test_constant_zero_tiny_and_huge_groups(name: str, dtype: torch.dtype) -> None:
    codec = parse_codec(name)
    blocks = hard(dtype)
    if isinstance(codec, HalfQuadratic):
        blocks = blocks[:5]  # constant: the zero is not searched for
    for block in blocks:
        assert_right(codec, block)


@needs_native
@pytest.mark.parametrize(
    "name", ("int4-1%", "int2-channel-5%", "nf3-static-10%", "nuq3-token-gs16-1%", "nuq2-static-1%-qnorm")
)
def test_outliers_of_any_blocks(name: str) -> None:
    codec = parse_codec(name)
    for tokens, channels, dtype in (
        (32, 512, torch.float32),
        (64, 80, torch.bfloat16),
        (256, 256, torch.float16),
        (32, 8, torch.float32),
    ):
        x = normal(2, 2, tokens, channels, seed=tokens, dtype=dtype)
        assert_right(codec, x)
        x[..., ::7, 3] *= 50  # a whole group may be outliers
        assert_right(codec, x)


@needs_native
@pytest.mark.parametrize("tokens", (8, 24, 1000))
def test_other_block_lengths(tokens: int) -> None:
    for name in ("int8", "int4", "int3", "int2", "nf3", "fp8", "fp8-static", "int3-static", "lm3"):
        assert_right(parse_codec(name), normal(2, tokens, 80, seed=tokens, dtype=torch.bfloat16))


@needs_native
@each_dtype
@pytest.mark.parametrize(
    "name", ("int4", "int3-channel", "nf4", "fp8", "fp8-static", "exact", "int4-static-1%", "nf3-1%", "lm4")
)
def test_any_strides(name: str, dtype: torch.dtype) -> None:
    codec = parse_codec(name)
    buffer = normal(2, 3, 300, 80, seed=1, dtype=dtype)
    pieces = buffer[:, :, 4:260].unflatten(2, (2, 128))  # what a cache packs: [B, H, n, T, D]
    rows = normal(2, 128, 3, 64, seed=2, dtype=dtype).transpose(1, 2)  # heads beside each other, as a model has them
    narrow = normal(2, 128, 100, seed=3, dtype=dtype)[..., 3:67]
    transposed = normal(2, 64, 128, seed=4, dtype=dtype).transpose(1, 2)
    repeated = normal(1, 128, 64, seed=5, dtype=dtype).expand(4, 128, 64)
    for x in (pieces, rows, narrow, transposed, repeated, normal(128, 64, seed=6, dtype=dtype)):
        assert_right(codec, x)


@needs_native
@pytest.mark.parametrize("name", ("int4", "hqq4", "nf2-channel", "fp8-static", "int3-static", "nf4-1%", "lm3"))
def test_any_number_of_threads(name: str) -> None:
    codec, x, threads = parse_codec(name), normal(5, 3, 128, 64, dtype=torch.bfloat16), torch.get_num_threads()
    params = fit(codec, x)
    try:
        torch.set_num_threads(1)
        alone = native.run(codec, x, params)
        for count in (2, 3, 16):
            torch.set_num_threads(count)
            assert_same_bits(native.run(codec, x, params), alone)
    finally:
        torch.set_num_threads(threads)


# -- rotations ---------------------------------------------------------------------------------------------------------


@each_set
@each_dtype
@pytest.mark.parametrize("channels", (1, 8, 20, 64, 80, 96, 128, 256, 512))
def test_rotations_have_the_bits_of_their_twin(channels: int, dtype: torch.dtype, isa: int) -> None:
    signs = hadamard.signs(channels)
    for x in (
        normal(2, 3, 40, channels, dtype=dtype),
        normal(40, 2, channels + 3, dtype=dtype).transpose(0, 1)[..., 3:],
    ):
        wanted = hadamard.transform(x.float() * signs)
        assert torch.equal(rotate.rotate_on(isa, x, signs), wanted)
        assert torch.equal(rotate.rotate(x), wanted)


def test_rotations_of_what_the_native_kernel_does_not_take() -> None:
    for x in (normal(16, 64).double(), normal(0, 16, 64), normal(64), normal(16, 64).to("meta")):
        assert rotate.rotate(x).shape == x.shape


@needs_native
def test_rotations_without_sense_are_refused() -> None:
    assert MODULE is not None
    x, signs, out = normal(2, 16, 64), torch.ones(64), torch.empty(2, 16, 64)
    MODULE.hadamard(0, 1, x, signs, out)
    for call, words in (
        ((99, 1, x, signs, out), "no instruction set"),
        ((0, 1, x.double(), signs, out), "x is torch.float64"),
        ((0, 1, x[:, :0], signs, out), "empty or enormous"),
        ((0, 1, x, signs[:32], out), "signs has the wrong shape"),
        ((0, 1, x, None, out), "signs are missing"),
        ((0, 1, x, signs, out[:1]), "leading dimensions of x"),
        ((0, 1, x, signs, out.bfloat16()), "output is torch.bfloat16"),
        ((0, 1, x, signs, torch.empty(2, 16, 128)[..., :64]), "output is not contiguous"),
    ):
        with pytest.raises(ValueError, match=words):
            MODULE.hadamard(*call)


# -- HQQ ---------------------------------------------------------------------------------------------------------------


@needs_native
@each_dtype
@pytest.mark.parametrize("name", HQQ)
def test_half_quadratic_zeros_are_as_good(name: str, dtype: torch.dtype) -> None:
    """To 1e-4 of the objective, and nearly always the same ones.

    Measured in the worst of these tensors: 5e-6 of the objective, 0.2 % of the zeros, 0.008 % of the codes.
    """
    codec = parse_codec(name)
    assert isinstance(codec, HalfQuadratic)
    for seed, channels in enumerate((64, 65, 80, 128)):
        x = normal(4, 128, channels, seed=seed, dtype=dtype) * 10.0 ** (2 - seed)
        wanted = codec.encode(x, {})
        allowed, others = objective(codec, wanted, x) * (1 + 1e-4), bitpack.unpack(wanted["codes"], codec.bits)
        for isa, kind in enumerate(NAMES):
            got = native.run_on(isa, codec, x, {})
            assert objective(codec, got, x) <= allowed, kind
            assert torch.equal(got["scale"], wanted["scale"]), kind
            assert (got["zero"] != wanted["zero"]).float().mean() <= 0.01, kind
            assert (bitpack.unpack(got["codes"], codec.bits) != others).float().mean() <= 0.001, kind


@each_set
def test_half_quadratic_search_matters(isa: int) -> None:
    """The bound above would notice zeros that were not searched for."""
    codec, x = HalfQuadratic(2), normal(4, 128, 64)
    found, unsearched = native.run_on(isa, codec, x, {}), native.run_on(isa, Affine(2), x, {})
    assert objective(codec, found, x) < objective(codec, unsearched, x) * (1 - 1e-2)


# -- what is refused ---------------------------------------------------------------------------------------------------


def unsound(kernel: Any, codec: Codec, x: torch.Tensor, params: Params) -> tuple[int, float]:
    with pytest.raises(Unsound) as found:
        kernel(codec, x, params)
    return found.value.count, found.value.limit


@needs_native
@each_dtype
@pytest.mark.parametrize("name", EXAMPLES)
def test_what_no_block_can_hold_is_counted_and_refused(name: str, dtype: torch.dtype) -> None:
    codec = parse_codec(name)
    bad = [torch.nan, torch.inf, -torch.inf] + ([] if dtype == torch.float16 else [1.1e38, -3e38])
    for channels, strange in product((20, 64), bad):
        x = normal(2, 2, 128, channels, dtype=dtype)
        params = fit(codec, x)
        for where in ((0, 0, 0, 0), (1, 1, 127, channels - 1)):
            one = x.clone()
            one[where] = strange
            for isa, kind in enumerate(NAMES):
                assert unsound(functools.partial(native.run_on, isa), codec, one, params)[0] == 1, kind
        x[0, 1, 3:5] = strange
        expected = unsound(reference.run, codec, x, params)
        assert expected[0] == 2 * channels
        for isa, kind in enumerate(NAMES):
            assert unsound(functools.partial(native.run_on, isa), codec, x, params) == expected, kind


@each_set
@each_dtype
def test_the_largest_sound_magnitude_is_the_same(dtype: torch.dtype, isa: int) -> None:
    limit = torch.tensor(min(LARGEST, torch.finfo(dtype).max), dtype=dtype)
    for codec in (parse_codec("int4"), parse_codec("exact"), parse_codec("fp8")):
        for x in (limit, -limit):
            block = x.expand(8, 64).contiguous()
            assert_same_bits(native.run_on(isa, codec, block, {}), reference.run(codec, block, {}))
        beyond = torch.nextafter(limit, torch.tensor(torch.inf, dtype=dtype)).expand(8, 64).contiguous()
        assert unsound(lambda *call: native.run_on(isa, *call), codec, beyond, {})[0] == 8 * 64
        assert unsound(reference.run, codec, beyond, {})[0] == 8 * 64


@needs_native
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize(("name", "tokens"), [("int4", 12), ("int4-channel", 48), ("fp8-static", 128)])
def test_blocks_that_do_not_suit_the_codec(name: str, tokens: int, kernel: Any) -> None:
    codec, x = parse_codec(name), normal(tokens, 64)
    if kernel.name == "triton":
        pytest.skip("tests/triton_kernels/test_triton_encode.py has its own")
    if isinstance(codec, Fp8Static):
        with pytest.raises(KeyError):
            kernel.run(codec, x, {})
        return
    with pytest.raises(ValueError, match=r"cannot be (packed|cut)"):
        kernel.run(codec, x, {})


def good() -> dict[str, Any]:
    """A call that the module takes: int4 of blocks [2, 128, 64]."""
    return {
        "isa": 0, "threads": 1, "x": normal(2, 128, 64), "choice": 0, "levels": 0, "per": 0, "bits": 4, "length": 64,
        "codes": torch.empty(2, 64, 64, dtype=torch.uint8), "scale": torch.empty(2, 128, 1, dtype=torch.bfloat16),
        "zero": torch.empty(2, 128, 1, dtype=torch.float16), "outlier_index": None, "outlier_value": None,
        "edges": [], "table": [], "fixed": 1.0, "static_scale": None, "static_zero": None, "limit": 1e38,
    }  # fmt: skip


def wrong() -> Iterator[tuple[str, dict[str, Any], str]]:
    """What callers may get wrong, and words of the error."""
    x = normal(2, 128, 64)
    scale = torch.empty(2, 128, 1, dtype=torch.bfloat16)
    norm = {"choice": 4, "levels": 1, "edges": [0.0] * 15, "table": [0.0] * 16, "zero": None}
    yield "float64", {"x": x.double()}, "x is torch.float64; allowed are float32"
    yield "no tensor", {"x": None}, "x is missing"
    yield "one dimension", {"x": x[0, 0]}, "x has 1 dimensions"
    yield "stride", {"x": normal(2, 64, 128).transpose(1, 2)}, "last dimension has stride 128"
    yield "other device", {"x": x.to("meta")}, "x is not on the CPU"
    yield "tokens", {"x": x[:, :100]}, "multiple of 8 tokens"
    yield "no tokens", {"x": x[:, :0]}, "an empty or enormous block"
    yield "more tokens", {"x": normal(2, 136, 64)}, r"codes must be \[..., 68, 64\]"
    yield "more blocks", {"x": normal(3, 128, 64)}, "leading dimensions of x"
    yield "more channels", {"x": normal(2, 128, 80)}, "codes must be"
    yield "other leading dimensions", {"x": x[:, None]}, "leading dimensions of x"
    yield "bits", {"bits": 5}, "codes have 2, 3, 4 or 8 bits"
    yield "bits of the parts", {"bits": 8}, r"codes must be \[..., 128, 64\]"
    yield "instruction set", {"isa": 99}, "no instruction set 99"
    yield "negative instruction set", {"isa": -1}, "no instruction set -1"
    yield "empty group", {"length": 0}, "groups are longer than the block, or empty"
    yield "long group", {"length": 65}, "groups are longer than the block"
    yield "short group", {"length": 32}, r"scale must be \[..., 128, 2\]"
    yield "groups of tokens", {"per": 1, "length": 48}, "must divide the block"
    yield "direction", {"per": 2}, "groups run along"
    yield "choice", {"choice": 7}, "unknown choice"
    yield "levels", {"levels": 2}, "levels do not fit"
    yield "edges", {"levels": 1, "edges": [0.0] * 14}, "edges must be 15 numbers"
    yield "table", {"levels": 1, "edges": [0.0] * 15, "table": [0.0] * 15}, "the table must be 16 numbers"
    yield "no edges", {"levels": 1, "edges": None}, "edges must be 15 numbers"
    yield (
        "norm with groups",
        {"choice": 4, "levels": 1, "length": 32, "edges": [0.0] * 15, "table": [0.0] * 16},
        "has one group",
    )
    static = {"choice": 3, "per": 1, "length": 128, "scale": None, "zero": None}
    yield "static without heads", static, "static scales are for blocks"
    static = {**static, "x": x[None], "codes": torch.empty(1, 2, 64, 64, dtype=torch.uint8)}
    yield "no static scale", static, "static scale or zero is missing"
    yield (
        "static scale of more heads",
        {**static, "static_scale": torch.ones(2, 64)},
        "static scale has the wrong shape",
    )
    static["static_scale"] = torch.ones(1, 64)
    yield "no static zero", static, "static scale or zero is missing"
    yield (
        "static zero of float64",
        {**static, "static_zero": torch.ones(1, 64).double()},
        "static zero is torch.float64",
    )
    yield "static per token", {**static, "per": 0, "length": 64}, "levels do not fit"
    index, value = torch.empty(2, 8, dtype=torch.uint16), torch.empty(2, 8, dtype=torch.bfloat16)
    yield "outliers without values", {"outlier_index": index}, "outlier_value is missing"
    yield "fewer values", {"outlier_index": index, "outlier_value": value[:, :7]}, r"outlier_value must be \[..., 8\]"
    yield "values apart", {"outlier_index": index, "outlier_value": value.t().contiguous().t()}, "is not contiguous"
    yield (
        "indices of int16",
        {"outlier_index": index.view(torch.int16), "outlier_value": value},
        "outlier_index is torch.int16",
    )
    yield (
        "indices of more blocks",
        {"outlier_index": index.repeat(2, 1), "outlier_value": value},
        "outlier_index must be",
    )
    yield (
        "no outliers",
        {"outlier_index": index[:, :0], "outlier_value": value[:, :0]},
        "more outliers than elements, or none",
    )
    yield "outliers of norms", {**norm, "outlier_index": index, "outlier_value": value}, "outliers beside scales"
    yield "fixed scale", {"levels": 2, "bits": 8, "choice": 3, "fixed": 0.0, "scale": None, "zero": None}, "scale is 0"
    yield "no scale", {"scale": None}, "scale or zero is missing"
    yield "type of scale", {"scale": scale.half()}, "scale is torch.float16; allowed are bfloat16"
    yield "type of zero", {"zero": scale}, "zero is torch.bfloat16; allowed are float16"
    yield "type of codes", {"codes": torch.empty(2, 64, 64, dtype=torch.int8)}, "codes is torch.int8; allowed are uint8"
    yield "codes apart", {"codes": torch.empty(2, 64, 128, dtype=torch.uint8)[..., :64]}, "codes is not contiguous"
    yield "scales apart", {"scale": torch.empty(2, 256, 1, dtype=torch.bfloat16)[:, ::2]}, "scale is not contiguous"
    yield "limit", {"limit": torch.inf}, "limit"
    yield "limit of float16", {"x": x.half()}, "limit"


@needs_native
@pytest.mark.parametrize(("changes", "words"), [case[1:] for case in wrong()], ids=[case[0] for case in wrong()])
def test_mistakes_raise(changes: dict[str, Any], words: str) -> None:
    assert MODULE is not None
    call = good()
    assert MODULE.encode(*call.values())[0] == 0
    call.update(changes)
    with pytest.raises(ValueError, match=words):
        MODULE.encode(*call.values())


@each_set
@pytest.mark.parametrize(
    "name", ("int4", "int2-channel", "nf3", "int8", "fp8", "hqq3", "int4-1%", "int3-static-2%", "lm3")
)
def test_nothing_beyond_the_parts_is_written(name: str, isa: int) -> None:
    """Every part lies between guards; head dimensions are such that no vector ends where a row does."""
    assert MODULE is not None
    codec = parse_codec(name)
    for channels in (8, 20, 65, 80, 130):
        x = normal(3, 1, 128, channels, seed=channels, dtype=torch.bfloat16)
        params = fit(codec, x)
        guarded: dict[str, torch.Tensor] = {}
        for part in codec.layout(128, channels, x.dtype):
            memory = torch.full((3 * part.nbytes + 256,), 0xA5, dtype=torch.uint8)
            guarded[part.name] = memory
        inner = {
            part.name: guarded[part.name][128:-128].view(part.dtype).view(3, 1, *part.shape)
            for part in codec.layout(128, channels, x.dtype)
        }
        wanted = native.run_on(isa, codec, x, params)
        empty, torch_empty = iter(inner.values()), torch.empty
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "empty", lambda *shape, dtype, parts=empty: next(parts))
            got = native.run_on(isa, codec, x, params)
        assert torch.empty is torch_empty
        assert_same_bits(got, wanted)
        for memory in guarded.values():
            assert bool((memory[:128] == 0xA5).all()) and bool((memory[-128:] == 0xA5).all())


# -- the registry ------------------------------------------------------------------------------------------------------


@needs_native
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_native_encoder_runs(name: str) -> None:
    codec, x = parse_codec(name), normal(128, 64, dtype=torch.bfloat16)
    assert choose(codec, x).name == "native"
    why = "tensors on cpu (CUDA and ROCm GPUs run)"
    assert explain(codec, x) == ["native: runs", f"triton: {why}", "reference: fits, but a better one runs"]


class Twisted(Affine):
    """A codec of somebody else's: whatever it inherits, its ``encode`` may be another."""

    def encode(self, x: torch.Tensor, params: Params) -> Packed:
        return super().encode(-x, params)


@needs_native
@pytest.mark.parametrize(
    ("codec", "x", "words"),
    [
        (Affine(4), normal(128, 64).double(), "float64"),
        (Affine(4), normal(0, 128, 64), "nothing to encode"),
        (Twisted(4), normal(128, 64), "has no native encoder"),
        (Affine(4), normal(128, 64).to("meta"), "tensors are on meta"),
    ],
    ids=("float64", "empty", "another codec", "another device"),
)
def test_what_the_native_encoder_leaves_to_the_reference(codec: Codec, x: torch.Tensor, words: str) -> None:
    assert choose(codec, x).name == "reference"
    assert words in explain(codec, x)[0]
    if x.device.type == "cpu":
        assert_same_bits(encode(codec, x, {}), codec.encode(x, {}))


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_a_static_scale_saturates_alike(kernel: Any) -> None:
    codec, x = Fp8Static(), normal(128, 64)
    params = codec.fit(x)
    if reasons := kernel.why_not(codec, x):
        pytest.skip(f"it does not run here: {', '.join(reasons)}")
    encoded = kernel.run(codec, -9 * x, params)
    assert codec.saturation(-9 * x, params) is not None and int((encoded["codes"] & 127).max()) == 126
    assert_same_bits(encoded, codec.encode(-9 * x, params))
