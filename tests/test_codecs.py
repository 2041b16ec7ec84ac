"""Floor 1: every codec of the table keeps what its bits allow, takes the bytes it declares, and shares nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product

import pytest
import torch

from kvbits.codecs import CODECS as CODEC_CLASSES
from kvbits.codecs import Codec, Fp8Static
from kvbits.codecs.grouped import Grouped
from kvbits.codecs.half_quadratic import HalfQuadratic
from kvbits.numerics import affine, bitpack, codebook, float8, groups
from kvbits.scheme import parse_codec
from kvbits.types import Packed, Params
from table import (
    BLOCK,
    CHANNELS,
    CODEC,
    CODECS,
    DEFAULTS,
    GROUPED,
    GROUPS,
    NORMAL_ERROR,
    QUANTIZED,
    CodecCase,
    normal_blocks,
    relative_error,
)

OTHER_CHANNELS = (8, 20, 65, 80, 112)

every_codec = pytest.mark.parametrize("case", CODECS, ids=str)
each_method = pytest.mark.parametrize("case", DEFAULTS, ids=str)
each_quantized = pytest.mark.parametrize("case", QUANTIZED, ids=str)
each_grouped = pytest.mark.parametrize("case", GROUPED, ids=str)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def encoded(case: CodecCase, x: torch.Tensor) -> tuple[Codec, Packed, Params]:
    codec = parse_codec(case.spelling)
    params = codec.fit(x)
    return codec, codec.encode(x, params), params


def round_trip(case: CodecCase, x: torch.Tensor) -> torch.Tensor:
    codec, packed, params = encoded(case, x)
    return codec.decode(packed, params)


# -- error -------------------------------------------------------------------------------------------------------------


@every_codec
def test_error_lies_within_both_bounds(case: CodecCase) -> None:
    x = normal_blocks()
    low, high = case.bounds
    assert low <= relative_error(round_trip(case, x), x) <= high


def textbook_error(case: CodecCase, x: torch.Tensor) -> float:
    """Min/max quantization in float64 by the formula alone: no storage types, no packing, nothing of kvbits."""
    dim = -1 if case.per == "token" else -2
    cut = x.double().unflatten(dim, (-1, case.group))
    low, high = cut.amin(dim, keepdim=True), cut.amax(dim, keepdim=True)
    if case.spelling.startswith("int"):
        step = (high - low) / (2**case.code_bits - 1)
        decoded = ((cut - low) / step).round() * step + low
    else:
        middle, half = (high + low) / 2, (high - low) / 2
        table = torch.tensor(codebook.normal_float(case.code_bits), dtype=torch.float64)
        decoded = table[(((cut - middle) / half)[..., None] - table).abs().argmin(-1)] * half + middle
    return relative_error(decoded, cut)


@pytest.mark.parametrize(
    "case", [c for c in CODECS if c.spelling.startswith(("int", "nf")) and "-gs" in c.spelling], ids=str
)
def test_storing_costs_little_over_the_textbook(case: CodecCase) -> None:
    """The table's figures are the method's own error plus at most 4.5 % for a bf16 scale and an fp16 zero.

    4.5 % is the worst case, 8 bits in groups of 16: there the two extremes, 2 of 16 values, are otherwise exact.
    """
    ideal = textbook_error(case, normal_blocks()[:1])
    assert ideal * 0.985 <= case.error <= ideal * 1.045


def test_half_quadratic_beats_minmax_of_the_same_bits() -> None:
    for bits, group in product((8, 4, 3, 2), range(len(GROUPS))):
        assert NORMAL_ERROR[f"hqq{bits}"][group] <= NORMAL_ERROR[f"int{bits}"][group]


def test_bounds_of_neighbouring_widths_are_apart() -> None:
    """So a codec that really keeps one width more or less cannot pass for another."""
    for case in CODECS:
        family = case.spelling.partition("-")[0]
        for other in NORMAL_ERROR:
            if case.code_bits and other[:-1] == family[:-1] and int(other[-1]) < case.code_bits:
                less = CODEC[case.spelling.replace(family, other)]
                assert case.bounds[1] * 1.8 < less.bounds[0]


def test_the_table_names_every_method_and_example() -> None:
    spelled = {str(parse_codec(case.spelling)) for case in CODECS}
    for kind in CODEC_CLASSES:
        assert kind.examples and {str(parse_codec(example)) for example in kind.examples} <= spelled
        if issubclass(kind, Grouped):
            variants = product(kind.allowed_bits, ("token", "channel"), GROUPS)
            assert {str(kind(bits, per, group)) for bits, per, group in variants} <= spelled


# -- sabotage: the bounds must notice ----------------------------------------------------------------------------------


def one_bit_fewer(codec: Codec, packed: Packed) -> Packed:
    if isinstance(codec, Grouped):
        return {**packed, "codes": bitpack.pack(bitpack.unpack(packed["codes"], codec.bits) & ~1, codec.bits)}
    return {**packed, "codes": packed["codes"] & ~1}


def stale_scale(codec: Codec, packed: Packed) -> Packed:
    """The scales of the block before, whose values were half as large."""
    return {**packed, "scale": packed["scale"] / 2}


def neighbours_scale(codec: Codec, packed: Packed) -> Packed:
    """Each group reads the scale of the next token or channel, as by an index that is off by one."""
    return {**packed, "scale": packed["scale"].roll(1, dims=-1 if codec.format.per == "channel" else -2)}


def shifted_zero(codec: Codec, packed: Packed) -> Packed:
    """A zero that is off by half a step, as by rounding it to whole levels."""
    step = 1.0 if codec.format.levels == "uniform" else 2 / (2**codec.format.bits - 1)
    return {**packed, "zero": packed["zero"] + step / 2}


def neighbours_codes(codec: Codec, packed: Packed) -> Packed:
    return {**packed, "codes": packed["codes"].roll(1, dims=-2)}


@each_quantized
@pytest.mark.parametrize("harm", (one_bit_fewer, neighbours_codes), ids=lambda f: f.__name__)
def test_sabotage_of_codes_is_noticed(case: CodecCase, harm: Callable[[Codec, Packed], Packed]) -> None:
    x = normal_blocks()[:, :, :2]
    codec, packed, params = encoded(case, x)
    assert relative_error(codec.decode(harm(codec, packed), params), x) > 1.2 * case.bounds[1]


@pytest.mark.parametrize("case", [c for c in QUANTIZED if c.spelling != "fp8-static"], ids=str)
@pytest.mark.parametrize("harm", (stale_scale, neighbours_scale), ids=lambda f: f.__name__)
def test_sabotage_of_scales_is_noticed(case: CodecCase, harm: Callable[[Codec, Packed], Packed]) -> None:
    x = normal_blocks()
    codec, packed, params = encoded(case, x)
    assert relative_error(codec.decode(harm(codec, packed), params), x) > case.bounds[1]


@each_grouped
def test_sabotage_of_zeros_is_noticed(case: CodecCase) -> None:
    x = normal_blocks()[:, :, :2]
    codec, packed, params = encoded(case, x)
    assert relative_error(codec.decode(shifted_zero(codec, packed), params), x) > 1.1 * case.bounds[1]


def test_a_stale_static_scale_is_noticed() -> None:
    x = normal_blocks()[:, :, :2]
    codec, packed, params = encoded(CODEC["fp8-static"], x)
    stale = {"scale": params["scale"] / 2}
    assert relative_error(codec.decode(packed, stale), x) > CODEC["fp8-static"].bounds[1]


@each_grouped
def test_a_wrong_table_is_noticed(case: CodecCase) -> None:
    """Uniform codes read through a table of quantiles, and the other way round."""
    x = normal_blocks()[:, :, :2]
    codec, packed, _ = encoded(case, x)
    assert isinstance(codec, Grouped)
    codes = bitpack.unpack(packed["codes"], codec.bits)
    count = 2**codec.bits
    uniform, quantiles = torch.arange(count).float(), torch.tensor(codebook.normal_float(min(codec.bits, 4)))
    if codec.format.levels == "table":
        wrong = uniform * 2 / (count - 1) - 1
    else:
        wrong = (quantiles + 1) / 2 * (count - 1) if codec.bits <= 4 else uniform.flip(0)
    levels, dim = groups.split(wrong[codes.long()], codec.per, codec.group)
    decoded = affine.dequantize(levels, packed["scale"].unsqueeze(dim), packed["zero"].unsqueeze(dim))
    assert relative_error(groups.join(decoded, codec.per, CHANNELS), x) > case.bounds[1]


@pytest.mark.parametrize("name", ("fp8", "fp8-static"))
def test_another_float8_is_noticed(name: str) -> None:
    x = normal_blocks()[:, :, :2]
    codec, packed, params = encoded(CODEC[name], x)
    scale = params.get("scale", packed.get("scale"))
    assert scale is not None
    e5m2 = (x / scale.float()).to(torch.float8_e5m2).float() * scale.float()
    assert relative_error(e5m2, x) > CODEC[name].bounds[1]
    assert relative_error(codec.decode(packed, params), x) <= CODEC[name].bounds[1]


# -- bytes -------------------------------------------------------------------------------------------------------------


def assert_layout_is_real(codec: Codec, x: torch.Tensor) -> int:
    """Every declared part is there with its type and shape, and nothing else; returns the bytes."""
    packed = codec.encode(x, codec.fit(x))
    parts = codec.layout(x.shape[-2], x.shape[-1], x.dtype)
    assert list(packed) == [part.name for part in parts]
    for part in parts:
        tensor = packed[part.name]
        assert (tensor.dtype, tensor.shape) == (part.dtype, (*x.shape[:-2], *part.shape)), part.name
        assert tensor.nbytes == part.nbytes * x.shape[:-2].numel()
    return sum(tensor.nbytes for tensor in packed.values())


@every_codec
def test_layout_is_what_lies_in_memory_and_costs_the_tables_bits(case: CodecCase) -> None:
    codec = parse_codec(case.spelling)
    x = normal_blocks()[0, :, :2].to(torch.bfloat16)
    assert 8 * assert_layout_is_real(codec, x) / x.numel() == case.bits
    assert codec.bits_per_element(BLOCK, CHANNELS) == case.bits
    assert (codec.format.bits, codec.format.per) == (case.code_bits, case.per)


@each_method
@pytest.mark.parametrize("channels", OTHER_CHANNELS, ids="D{}".format)
def test_layout_is_what_lies_in_memory_for_any_head_dim(case: CodecCase, channels: int) -> None:
    codec = parse_codec(case.spelling)
    for tokens in (32, 96):
        assert_layout_is_real(codec, torch.randn(2, tokens, channels, generator=seeded()))


@each_method
@pytest.mark.parametrize("channels", OTHER_CHANNELS, ids="D{}".format)
def test_any_head_dim_is_kept_as_well_as_64(case: CodecCase, channels: int) -> None:
    """Shorter groups can only have smaller errors; 8 % is the spread of fp8's between head_dims."""
    x = torch.randn(4, 128, channels, generator=seeded())
    assert relative_error(round_trip(case, x), x) <= 1.08 * case.bounds[1]


# -- independence ------------------------------------------------------------------------------------------------------


@each_method
def test_blocks_heads_and_rows_are_encoded_alone_as_together(case: CodecCase) -> None:
    """Bit for bit, from the strided slices that a cache encodes as from fresh memory."""
    everything = torch.randn(2, 2, 300, 80, generator=seeded()) * torch.rand(80, generator=seeded(1)).mul(9)
    x = everything[:, :, 5 : 5 + 2 * BLOCK].unflatten(2, (-1, BLOCK))  # [B, H, n, T, D]
    codec, packed, params = encoded(case, x)
    decoded = codec.decode(packed, params)
    for row, head, block in product(range(2), range(2), range(2)):
        alone = codec.encode(x[row, head, block].clone(), params)
        for name, part in packed.items():
            assert torch.equal(part[row, head, block], alone[name]), (row, head, block, name)
        assert torch.equal(decoded[row, head, block], codec.decode(alone, params))
    by_row = codec.encode(x[1:2].contiguous(), params)
    assert all(torch.equal(part[1:2], by_row[name]) for name, part in packed.items())


@pytest.mark.parametrize("case", [c for c in DEFAULTS if c.per == "token"], ids=str)
def test_per_token_codecs_keep_every_token_alone(case: CodecCase) -> None:
    """What one token holds, or that it is beside others at all, changes nothing for its neighbours."""
    x = torch.randn(64, 80, generator=seeded())
    other = x.clone()
    other[10] *= 1e6
    a, b = round_trip(case, x), round_trip(case, other)
    rest = torch.arange(64) != 10
    assert torch.equal(a[rest], b[rest])


@pytest.mark.parametrize("case", [c for c in DEFAULTS if c.per == "channel"], ids=str)
def test_per_channel_codecs_keep_every_channel_alone(case: CodecCase) -> None:
    x = torch.randn(64, 80, generator=seeded())
    other = x.clone()
    other[:, 10] *= 1e6
    a, b = round_trip(case, x), round_trip(case, other)
    rest = torch.arange(80) != 10
    assert torch.equal(a[:, rest], b[:, rest])


# -- input -------------------------------------------------------------------------------------------------------------


@each_quantized
@pytest.mark.parametrize("power", (-95, -30, 30, 95), ids="2^{}".format)
def test_huge_and_tiny_values_are_kept_as_well_as_others(case: CodecCase, power: int) -> None:
    """A power of two changes the scale and nothing else, bit for bit; 2**95 is about 4e28."""
    x = normal_blocks()[0, 0, 0]
    assert torch.equal(round_trip(case, x * 2.0**power), round_trip(case, x) * 2.0**power)


@pytest.mark.parametrize("case", [c for c in QUANTIZED if c.per != "layer"], ids=str)
def test_huge_and_tiny_groups_beside_each_other_are_kept(case: CodecCase) -> None:
    x = normal_blocks()[0, 0, :2]
    scale = 2.0 ** torch.randint(-60, 60, (x.shape[-2 if case.per == "token" else -1],), generator=seeded())
    scale = scale[:, None] if case.per == "token" else scale
    assert torch.equal(round_trip(case, x * scale), round_trip(case, x) * scale)


@each_method
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_half_precision_input_is_taken_at_its_value(case: CodecCase, dtype: torch.dtype) -> None:
    x = normal_blocks()[0, 0, 0].to(dtype)
    half, full = round_trip(case, x), round_trip(case, x.float())
    assert half.dtype == (dtype if case.spelling == "exact" else torch.float32)
    assert torch.equal(half.float(), full)


@each_method
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32), ids=str)
def test_all_zero_input_decodes_to_zero(case: CodecCase, dtype: torch.dtype) -> None:
    x = torch.zeros(2, 64, 80, dtype=dtype)
    assert torch.equal(round_trip(case, x).to(dtype), x)
    x[0, :32] = torch.randn(32, 80, generator=seeded())  # beside others, too
    assert torch.equal(round_trip(case, x).to(dtype)[1], x[1])


@each_grouped
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_constant_groups_decode_bit_for_bit(case: CodecCase, dtype: torch.dtype) -> None:
    size = 128 if case.per == "token" else 80
    values = (torch.randn(size, generator=seeded()) * 2 ** torch.randint(-9, 9, (size,), generator=seeded(1))).to(dtype)
    values = values[:, None] if case.per == "token" else values
    x = values.expand(128, 80)
    assert torch.equal(round_trip(case, x).to(dtype), x)


def test_constant_tokens_under_fp8_are_exact_in_bfloat16_and_within_the_scale_in_float16() -> None:
    """fp8 stores a bf16 scale and nothing else: a constant is kept to its 8 bits, not to fp16's 11."""
    for dtype, allowed in ((torch.bfloat16, 0.0), (torch.float16, 2**-8)):
        values = torch.randn(128, 1, generator=seeded()).to(dtype).expand(128, 80)
        decoded = round_trip(CODEC["fp8"], values).double()
        assert float((decoded / values.double() - 1).abs().amax()) <= allowed


# -- half-quadratic zeros ----------------------------------------------------------------------------------------------

SHAPES_OF_VALUES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normal": lambda x: x,
    "heavy-tailed": lambda x: x.sinh(),
    "one-signed": lambda x: x.abs() + 3,
    "two clusters": lambda x: x * 0.1 + x.sign(),
}


def lp_objective(x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bits: int) -> torch.Tensor:
    """HQQ's objective, sum |x - x^|^0.7 over the last dimension in units of the scale, in float64."""
    scale, zero = scale.double(), zero.double()
    code = (x.double() / scale + zero).round().clamp(0, 2**bits - 1)
    return ((code - zero) - x.double() / scale).abs().pow(0.7).sum(-1, keepdim=True)


@pytest.mark.parametrize("kind", SHAPES_OF_VALUES)
@pytest.mark.parametrize("spelling", ("hqq8", "hqq4-gs32", "hqq3-channel", "hqq2"))
@pytest.mark.parametrize("channels", (80, 65), ids="D{}".format)
def test_half_quadratic_zero_is_never_worse_than_minmax(spelling: str, kind: str, channels: int) -> None:
    """For every single group, over its own channels alone: not over the padding of a short last group."""
    codec = parse_codec(spelling)
    assert isinstance(codec, HalfQuadratic)
    x = SHAPES_OF_VALUES[kind](torch.randn(4, 128, channels, generator=seeded()))
    packed = codec.encode(x, {})
    better = 0
    for index in range(packed["scale"].shape[-1] if codec.per == "token" else packed["scale"].shape[-2]):
        if codec.per == "token":
            length = groups.group_length(channels, codec.group)
            group = x[..., index * length : (index + 1) * length]
            scale, zero = (packed[name][..., index : index + 1] for name in ("scale", "zero"))
        else:
            group = x[:, index * codec.group : (index + 1) * codec.group].transpose(-1, -2)
            scale, zero = (packed[name][:, index, :, None] for name in ("scale", "zero"))
        minmax_scale, minmax_zero = affine.choose_qparams(group, -1, 0, 2**codec.bits - 1)
        assert torch.equal(scale, minmax_scale)
        solved = lp_objective(group, scale, zero, codec.bits)
        minmax = lp_objective(group, scale, minmax_zero, codec.bits)
        # Where code and level tie, float32 and float64 may round apart: half a step either way, the same error.
        assert bool((solved <= minmax * (1 + 1e-4)).all())
        better += int((solved < minmax * 0.999).sum())
    if codec.bits <= 4:
        assert better > 0  # and it does find better ones


# -- fp8-static --------------------------------------------------------------------------------------------------------


def test_static_scale_leaves_eightfold_headroom() -> None:
    codec = Fp8Static()
    x = torch.randn(1, 2, 128, 64, generator=seeded())
    params = codec.fit(x)
    assert params["scale"].numel() == 1
    top = float(x.abs().amax())
    later = torch.full((8, 8), 7.99 * top)
    assert codec.saturation(later, params) is None
    decoded = codec.decode(codec.encode(later, params), params)
    assert float((decoded / later - 1).abs().amax()) <= 2**-4  # rounding of a 3-bit mantissa, no saturation


def test_saturation_under_a_static_scale_is_told_and_stays_finite() -> None:
    codec = Fp8Static()
    x = torch.randn(128, 64, generator=seeded())
    params = codec.fit(x)
    top = float(x.abs().amax())
    later = torch.full((8, 8), -9.0 * top)
    warning = codec.saturation(later, params)
    assert warning is not None and re.search(r"saturates at .* 8 times the largest value .* use fp8", warning)
    packed = codec.encode(later, params)
    torch.testing.assert_close(codec.decode(packed, params), torch.full((8, 8), -8.0 * top))


def test_static_scale_of_all_zeros_still_stores_what_comes_later() -> None:
    codec = Fp8Static()
    params = codec.fit(torch.zeros(128, 64))
    x = torch.randn(128, 64, generator=seeded())
    low, high = CODEC["fp8"].bounds
    assert 0.9 * low <= relative_error(codec.decode(codec.encode(x, params), params), x) <= 1.1 * high
    assert float(params["scale"]) * float8.E4M3_MAX == float8.E4M3_MAX


@pytest.mark.parametrize("magnitude", [1e-45, 1e-38, 1e-30])
def test_static_scale_of_tiny_samples_is_a_number(magnitude: float) -> None:
    codec = Fp8Static()
    x = torch.randn(128, 64, generator=seeded()) * magnitude
    params = codec.fit(x)
    assert float(params["scale"]) > 0
    for later in (x, torch.zeros(128, 64), torch.ones(128, 64)):
        assert bool(codec.decode(codec.encode(later, params), params).isfinite().all())
