"""Floor 0, each against its definition: packing, groups, affine parameters, e4m3, tables, rotations, outliers.

And what is built on the rotary embedding alone: :class:`Rope`, :class:`Transform`, :class:`Rotary`.
"""

from __future__ import annotations

import itertools
import math
from statistics import NormalDist

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbits.numerics import affine, bitpack, cast, codebook, float8, groups, hadamard, kmeans, outliers, rope
from kvbits.store.rows import Rows, Run
from kvbits.transform import Rope, Transform
from kvbits.transform.rotary import Rotary

CHANNELS = (1, 7, 12, 20, 64, 65, 80, 112)
UNEVEN = (1, 7, 12, 20, 33, 64, 65, 80, 100, 112, 130, 160, 576)

# Levels that the codecs use, as (lowest, highest).
LEVELS = {"2-bit": (0, 3), "3-bit": (0, 7), "4-bit": (0, 15), "8-bit": (0, 255), "table": (-1, 1)}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def all_halves(dtype: torch.dtype) -> torch.Tensor:
    """Every finite value of a 16-bit type."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    return values[values.isfinite()]


# -- bitpack -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", CHANNELS, ids="D{}".format)
@pytest.mark.parametrize("bits", bitpack.BITS, ids="{}-bit".format)
def test_pack_round_trips_at_exactly_its_bits(bits: int, channels: int) -> None:
    for tokens in (8, 24, 128):
        codes = torch.randint(0, 2**bits, (2, 3, tokens, channels), generator=seeded(), dtype=torch.uint8)
        packed = bitpack.pack(codes, bits)
        assert packed.dtype == torch.uint8
        assert packed.shape == (2, 3, bitpack.packed_rows(tokens, bits), channels)
        assert packed.nbytes * 8 == codes.numel() * bits  # 3-bit codes take 3 bits
        assert torch.equal(bitpack.unpack(packed, bits), codes)


@pytest.mark.parametrize("bits", (2, 4), ids="{}-bit".format)
def test_packed_bits_lie_where_the_module_says(bits: int) -> None:
    """Byte row i holds tokens i, i + n/r, i + 2n/r, ... from the low bits up."""
    tokens, each = 32, 8 // bits
    rows = tokens // each
    for token in range(tokens):
        codes = torch.zeros(tokens, 1, dtype=torch.uint8)
        codes[token] = 2**bits - 1
        expected = torch.zeros(rows, 1, dtype=torch.uint8)
        expected[token % rows] = (2**bits - 1) << (bits * (token // rows))
        assert torch.equal(bitpack.pack(codes, bits), expected)


def test_three_bits_are_a_plane_of_two_and_a_plane_of_one() -> None:
    codes = torch.randint(0, 8, (64, 5), generator=seeded(), dtype=torch.uint8)
    low, top = bitpack.pack(codes, 3).split((64 * 2 // 8, 64 // 8))
    assert torch.equal(low, bitpack.pack(codes & 3, 2))
    rows = 64 // 8
    for token in range(64):
        assert torch.equal((top[token % rows] >> (token // rows)) & 1, codes[token] >> 2)


@pytest.mark.parametrize("bits", (0, 1, 5, 6, 7, 16))
def test_widths_that_cannot_be_packed_are_refused(bits: int) -> None:
    with pytest.raises(ValueError, match=f"{bits} bits cannot be packed; allowed are 2, 3, 4, 8"):
        bitpack.pack(torch.zeros(8, 4, dtype=torch.uint8), bits)


@pytest.mark.parametrize("tokens", (1, 7, 12, 127))
def test_token_counts_that_cannot_be_packed_are_refused(tokens: int) -> None:
    with pytest.raises(ValueError, match=f"{tokens} tokens cannot be packed: .* multiple of 8"):
        bitpack.pack(torch.zeros(tokens, 4, dtype=torch.uint8), 4)


# -- groups ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", UNEVEN, ids="D{}".format)
@pytest.mark.parametrize("group", (16, 32, 64, 128), ids="gs{}".format)
def test_groups_of_channels_are_even_and_rejoin(group: int, channels: int) -> None:
    x = torch.arange(3 * 8 * channels, dtype=torch.float32).view(3, 8, channels)
    cut, dim = groups.split(x, "token", group)
    count, length = cut.shape[-2:]
    assert dim == -1 and length <= group
    assert count == -(-channels // group)  # no more groups, so no more scales, than the length asks for
    assert count * length - channels < count  # all are of one length but for a channel each
    assert groups.group_shape(8, channels, "token", group) == (8, count)
    assert torch.equal(groups.join(cut, "token", channels), x)
    # Padding, if any, repeats the last channel: the range of the short group is that of its own channels.
    flat = cut.flatten(-2)
    assert torch.equal(flat[..., channels:], x[..., -1:].expand(3, 8, count * length - channels))
    weights = groups.weights(channels, "token", group, x.device)
    if count * length == channels:
        assert weights is None
    else:
        assert weights is not None
        assert torch.equal(weights.flatten(), (torch.arange(count * length) < channels).float())


@pytest.mark.parametrize("group", (16, 32, 64, 128), ids="gs{}".format)
def test_groups_of_tokens_rejoin(group: int) -> None:
    x = torch.randn(2, 128, 20, generator=seeded())
    cut, dim = groups.split(x, "channel", group)
    assert dim == -2 and cut.shape == (2, 128 // group, group, 20)
    assert groups.group_shape(128, 20, "channel", group) == (128 // group, 20)
    assert torch.equal(cut[:, -1], x[:, -group:])
    assert torch.equal(groups.join(cut, "channel", 20), x)
    assert groups.weights(20, "channel", group, x.device) is None


def test_groups_of_tokens_must_divide_the_block() -> None:
    with pytest.raises(ValueError, match="block of 96 tokens cannot be cut into groups of 64 tokens"):
        groups.group_shape(96, 8, "channel", 64)


# -- affine ------------------------------------------------------------------------------------------------------------


def decoded_at_best(x: torch.Tensor, bottom: float, top: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Encode and decode ``x [n, g]`` on uniform levels; returns decoded values, scale and zero."""
    scale, zero = affine.choose_qparams(x, -1, bottom, top)
    levels = affine.to_levels(x, scale, zero).round().clamp(bottom, top)
    return affine.dequantize(levels, scale, zero), scale, zero


def test_quantize_takes_the_nearest_level_within_range() -> None:
    x = torch.randn(64, 32, generator=seeded())
    scale, zero = affine.choose_qparams(x, -1, 0, 7)
    codes = affine.quantize(x, scale, zero, 3)
    grid = (torch.arange(8) - zero[..., None].float()) * scale[..., None].float()  # [64, 1, 8]
    distance = (x[..., None] - grid).abs()
    chosen = distance.gather(-1, codes[..., None].long()).squeeze(-1)
    torch.testing.assert_close(chosen, distance.amin(-1), rtol=1e-5, atol=1e-6)
    assert codes.dtype == torch.uint8 and set(codes.unique().tolist()) == set(range(8))


@pytest.mark.parametrize("name", LEVELS)
@pytest.mark.parametrize("offset", (-300.0, -6.0, 6.0, 300.0))
def test_one_signed_groups_keep_their_zero(name: str, offset: float) -> None:
    """Keys per channel are often one-signed: a zero clamped to the code range could not represent them."""
    bottom, top = LEVELS[name]
    x = offset + torch.rand(200, 32, generator=seeded())
    scale, zero = affine.choose_qparams(x, -1, bottom, top)
    if offset > 0:
        assert bool((zero < bottom).all())
    else:
        assert bool((zero > top).all())
    span = x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True)
    # All levels are in use: the step follows the spread, not the magnitude (but see STEP_FLOOR).
    floor = x.abs().amax(-1, keepdim=True) * affine.STEP_FLOOR
    assert bool((scale.float() <= torch.maximum(span / (top - bottom), floor) * (1 + 2**-7)).all())


HARD = {
    "normal": lambda g: torch.randn(400, 64, generator=g),
    "heavy-tailed": lambda g: torch.randn(400, 64, generator=g) / torch.rand(400, 64, generator=g).clamp(min=1e-4),
    "offset 10": lambda g: torch.randn(400, 64, generator=g) + 10,
    "offset -1e4": lambda g: torch.randn(400, 64, generator=g) - 1e4,
    "offset 1e7": lambda g: torch.randn(400, 64, generator=g) + 1e7,
    "one outlier": lambda g: torch.cat([torch.randn(400, 63, generator=g), torch.full((400, 1), 1e5)], dim=-1),
    "two values": lambda g: torch.where(torch.rand(400, 64, generator=g) < 0.5, 0.3, 0.30001),
}


@pytest.mark.parametrize("kind", HARD)
@pytest.mark.parametrize("name", ("2-bit", "3-bit", "4-bit", "8-bit"))
def test_error_stays_within_half_a_step(name: str, kind: str) -> None:
    """Codes are chosen against the rounded scale and zero, so rounding those costs at most range.

    The zero is at most 2**10 + 255 levels, where fp16 is half a level off: no more than rounding itself.
    """
    bottom, top = LEVELS[name]
    x = HARD[kind](seeded(3))
    decoded, scale, zero = decoded_at_best(x, bottom, top)
    assert bool(zero.isfinite().all())
    slack = 2**-22 * (x.abs() + scale.float() * zero.float().abs())  # float32 arithmetic on x and on the levels
    assert bool(((decoded - x).abs() <= 0.5 * scale.float() + slack).all())


@given(
    data=st.lists(st.floats(-(2.0**99), 2.0**99, width=32, allow_subnormal=False), min_size=1, max_size=12),
    name=st.sampled_from(("2-bit", "3-bit", "4-bit", "8-bit")),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_error_stays_within_half_a_step_for_any_group(data: list[float], name: str) -> None:
    bottom, top = LEVELS[name]
    x = torch.tensor([data])
    decoded, scale, zero = decoded_at_best(x, bottom, top)
    assert bool(decoded.isfinite().all())
    if float(x.abs().amax()) < 1e-30:  # bfloat16 scales end at about 1e-38, a step is up to 255 * 4 times smaller
        return
    step = scale.float().abs()  # a constant group has the sign of its value in the scale
    slack = 2**-22 * (x.abs() + step * zero.float().abs())
    assert bool(((decoded - x).abs() <= 0.5 * step + slack).all())


@pytest.mark.parametrize("name", LEVELS)
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_constant_groups_of_every_16_bit_value_are_exact(name: str, dtype: torch.dtype) -> None:
    values = all_halves(dtype)
    x = values.float()[:, None].expand(-1, 8)
    decoded, _, _ = decoded_at_best(x, *LEVELS[name])
    assert torch.equal(decoded.to(dtype), values[:, None].expand(-1, 8))


@pytest.mark.parametrize("name", LEVELS)
def test_constant_float32_groups_are_exact_to_a_millionth(name: str) -> None:
    """A bf16 scale is within 2**-8 of the value; the fp16 zero holds the rest to 2**-20 of it, and three float32
    roundings (quotient, difference, product) come on top: 1.13e-6."""
    exponent = torch.empty(4000).uniform_(-30, 30, generator=seeded())
    x = (torch.where(torch.rand(4000, generator=seeded(1)) < 0.5, -1.0, 1.0) * 10**exponent)[:, None].expand(-1, 8)
    decoded, _, _ = decoded_at_best(x, *LEVELS[name])
    assert float((decoded.double() / x.double() - 1).abs().amax()) <= 2**-20 + 3 * 2**-24


@pytest.mark.parametrize("name", LEVELS)
def test_zeros_are_exact_beside_other_groups(name: str) -> None:
    x = torch.randn(3, 16, generator=seeded())
    x[1] = 0
    decoded, scale, zero = decoded_at_best(x, *LEVELS[name])
    assert torch.equal(decoded[1], torch.zeros(16)) and float(scale[1]) == 0
    alone, _, _ = decoded_at_best(x[[0, 2]], *LEVELS[name])
    assert torch.equal(decoded[[0, 2]], alone) and bool(zero.isfinite().all())


@pytest.mark.parametrize("power", (-99, -40, -14, 15, 40, 99), ids="2^{}".format)
@pytest.mark.parametrize("name", LEVELS)
def test_magnitude_changes_the_scale_and_nothing_else(name: str, power: int) -> None:
    """2**-99 is below 1e-29 and 2**99 above 1e29: neither zero nor code may notice, bit for bit."""
    x = torch.randn(100, 32, generator=seeded()) + 0.5
    scale, zero = affine.choose_qparams(x, -1, *LEVELS[name])
    other_scale, other_zero = affine.choose_qparams(x * 2.0**power, -1, *LEVELS[name])
    assert torch.equal(other_zero, zero)
    assert torch.equal(other_scale.float(), scale.float() * 2.0**power)
    decoded, _, _ = decoded_at_best(x, *LEVELS[name])
    other, _, _ = decoded_at_best(x * 2.0**power, *LEVELS[name])
    assert torch.equal(other, decoded * 2.0**power)


@pytest.mark.parametrize("magnitude", (1e-30, 1e-10, 1.0, 1e10, 1e30), ids="{:g}".format)
def test_relative_error_is_the_same_at_every_magnitude(magnitude: float) -> None:
    x = torch.randn(500, 64, generator=seeded())
    at_one = (decoded_at_best(x, 0, 15)[0] - x).norm() / x.norm()
    there = (decoded_at_best(x * magnitude, 0, 15)[0].double() - (x * magnitude).double()).norm() / x.double().norm()
    assert float(there) / magnitude == pytest.approx(float(at_one), rel=5e-3)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
def test_round_up_is_the_least_value_not_below(dtype: torch.dtype) -> None:
    x = torch.rand(20_000, generator=seeded()).mul(12).sub(6).exp()
    x[:3] = torch.tensor([0.0, 1.0, 1.0 + 2**-20])
    up = affine.round_up(x, dtype)
    below = torch.nextafter(up, torch.full_like(up, -torch.inf))
    assert bool((up.float() >= x).all()) and bool((below.float() < x).all())


@pytest.mark.parametrize("name", LEVELS)
def test_ranges_alone_give_the_same_parameters(name: str) -> None:
    x = torch.randn(50, 32, generator=seeded()) + torch.randn(50, 1, generator=seeded(1)) * 9
    x[0], x[1], x[2] = 0, 5, -5
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    for got, expected in zip(
        affine.qparams_of_range(low, high, *LEVELS[name]), affine.choose_qparams(x, -1, *LEVELS[name]), strict=True
    ):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("name", LEVELS)
@pytest.mark.parametrize("offset", (0.0, 10.0, -1e3, 2e4))
def test_float32_parameters_map_the_range_onto_all_levels(name: str, offset: float) -> None:
    """Beside a float32 zero the step follows the spread down to 2**-16 of the magnitude, not to 2**-10."""
    bottom, top = LEVELS[name]
    low, high = torch.tensor([offset - 3.0]), torch.tensor([offset + 5.0])
    scale, zero = affine.qparams_of_range(low, high, bottom, top, torch.float32, torch.float32)
    assert scale.dtype == zero.dtype == torch.float32
    step = 8 / (top - bottom)
    assert float(scale) == pytest.approx(max(step, abs(offset + math.copysign(4, offset) + 1) * 2**-16), rel=1e-3)
    if float(scale) < 1.01 * step:
        for x, level in ((low, bottom), (high, top)):
            assert float(affine.to_levels(x, scale, zero)) == pytest.approx(level, abs=2**-8)
            assert float((level - zero) * scale) == pytest.approx(float(x), abs=2**-8 * step)


@pytest.mark.parametrize("name", LEVELS)
def test_constants_can_have_a_range_where_level_1_may_be_missing(name: str) -> None:
    values = torch.cat([torch.randn(500, generator=seeded()) * 10 ** torch.linspace(-30, 30, 500), torch.zeros(1)])
    x = values[:, None].expand(-1, 8)
    scale, zero = affine.choose_qparams(x, -1, *LEVELS[name], exact_constants=False)
    assert bool((scale >= 0).all()) and bool(zero.isfinite().all())
    assert bool((scale.squeeze(-1).float() <= values.abs() * 2**-10 * (1 + 2**-7)).all())
    bottom, top = LEVELS[name]
    level = affine.to_levels(x, scale, zero)
    assert bool((level >= bottom - 1).all() and (level <= top + 1).all())  # in range but for the rounding of the zero


def test_elements_outside_do_not_count_towards_the_range() -> None:
    x = torch.randn(40, 32, generator=seeded())
    outside = torch.rand(40, 32, generator=seeded(1)) < 0.2
    outside[3] = True
    spoiled = torch.where(outside, 1e6 * x.sign(), x)
    scale, zero = affine.choose_qparams(spoiled, -1, 0, 15, outside=outside)
    for row in range(40):
        inliers = x[row][~outside[row]] if row != 3 else torch.zeros(1)
        expected = affine.choose_qparams(inliers[None], -1, 0, 15)
        assert (float(scale[row]), float(zero[row])) == (float(expected[0]), float(expected[1])), row


def test_a_scale_of_zero_has_no_sign() -> None:
    for value in (0.0, -0.0):
        scale, zero = affine.choose_qparams(torch.full((1, 8), value), -1, 0, 15)
        assert not bool(scale.signbit()) and float(zero) == 1


# -- e4m3 --------------------------------------------------------------------------------------------------------------


def torch_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float8_e4m3fn).view(torch.uint8)


NOT_NAN = torch.tensor([byte for byte in range(256) if byte & 127 != 127], dtype=torch.uint8)
VALUES = NOT_NAN.view(torch.float8_e4m3fn).float()


def test_every_byte_decodes_as_torch_does() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    torch.testing.assert_close(
        float8.decode_table(), every.view(torch.float8_e4m3fn).float(), rtol=0, atol=0, equal_nan=True
    )
    decoded = float8.decode(NOT_NAN)
    assert torch.equal(decoded, VALUES) and torch.equal(decoded.signbit(), VALUES.signbit())


def test_every_value_encodes_to_its_own_byte() -> None:
    assert torch.equal(float8.encode(VALUES), NOT_NAN)


def test_ties_and_their_neighbours_round_as_in_torch() -> None:
    positive = VALUES[~VALUES.signbit()].sort().values
    ties = (positive[1:] + positive[:-1]) / 2
    x = torch.cat([ties, torch.nextafter(ties, torch.zeros(())), torch.nextafter(ties, torch.full((), torch.inf))])
    x = torch.cat([x, -x])
    assert torch.equal(float8.encode(x), torch_bytes(x))
    even = float8.encode(ties)
    assert bool((even % 2 == 0).all())  # ties go to the even mantissa


def test_random_values_encode_as_in_torch() -> None:
    x = torch.randn(50_000, generator=seeded()) * 10 ** torch.empty(50_000).uniform_(-5, 2, generator=seeded(1))
    x = x.clamp(-float8.E4M3_MAX, float8.E4M3_MAX)
    assert torch.equal(float8.encode(x), torch_bytes(x))
    grid = x.view(200, 250)
    assert torch.equal(float8.encode(grid.t()), torch_bytes(grid.t()))  # not contiguous


def test_encode_saturates_at_the_largest_value() -> None:
    x = torch.tensor([448.0, 449, 464, 465, 480, 1e5, 3e38])
    assert torch.equal(float8.decode(float8.encode(torch.cat([x, -x]))), torch.tensor([448.0] * 7 + [-448.0] * 7))


# -- codebooks ---------------------------------------------------------------------------------------------------------

# bitsandbytes.functional.get_4bit_type("nf4"), and appendix E of QLoRA (arXiv 2305.14314).
PUBLISHED_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def test_nf4_is_the_published_table() -> None:
    # The published one was computed in float32 from an offset given to seven digits.
    assert codebook.normal_float(4) == pytest.approx(PUBLISHED_NF4, abs=2e-7)


@pytest.mark.parametrize("bits", (2, 3, 4))
def test_normal_float_tables_have_their_shape(bits: int) -> None:
    table = codebook.normal_float(bits)
    assert len(table) == 2**bits and list(table) == sorted(set(table))
    assert (table[0], table[2 ** (bits - 1) - 1], table[-1]) == (-1.0, 0.0, 1.0)
    assert sum(level > 0 for level in table) == 2 ** (bits - 1)  # one more than below zero


@pytest.mark.parametrize("bits", (2, 3, 4))
def test_nearest_agrees_with_brute_force(bits: int) -> None:
    table = torch.tensor(codebook.normal_float(bits))
    x = torch.cat([torch.randn(5000, generator=seeded()), table, torch.tensor([-9.0, 9.0])])
    code = codebook.nearest(x, table)
    distance = (x.double()[:, None] - table.double()).abs()
    assert code.dtype == torch.uint8 and torch.equal(code.long(), distance.argmin(-1))


@pytest.mark.parametrize("bits", (2, 3, 4))
def test_nearest_is_right_on_both_sides_of_every_edge(bits: int) -> None:
    table = torch.tensor(codebook.normal_float(bits))
    for code, (low, high) in enumerate(itertools.pairwise(table.tolist())):
        middle, little = (low + high) / 2, (high - low) * 1e-5
        assert codebook.nearest(torch.tensor([middle - little, middle + little]), table).tolist() == [code, code + 1]


# -- Lloyd-Max ---------------------------------------------------------------------------------------------------------

# Max, "Quantizing for minimum distortion" (1960), table I: the positive levels and the mean squared error.
MAX_1960 = {
    2: ((0.4528, 1.510), 0.1175),
    3: ((0.2451, 0.7560, 1.344, 2.152), 0.03454),
    4: ((0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733), 0.009497),
}


@pytest.mark.parametrize("bits", MAX_1960)
def test_lloyd_max_is_the_published_table(bits: int) -> None:
    levels, distortion = MAX_1960[bits]
    table = codebook.lloyd_max(bits)
    assert table[2 ** (bits - 1) :] == pytest.approx(levels, rel=2e-3)
    assert list(table) == sorted(set(table)) and table == tuple(-level for level in reversed(table))
    x = (torch.arange(400_000, dtype=torch.float64) + 0.5) / 20_000 - 10
    density = (-x.square() / 2).exp() / math.sqrt(2 * math.pi)
    error = torch.tensor(table, dtype=torch.float64)[codebook.nearest(x, torch.tensor(table).double()).long()] - x
    assert float((density * error.square()).sum() / 20_000) == pytest.approx(distortion, rel=1e-3)


@pytest.mark.parametrize("bits", MAX_1960)
def test_lloyd_max_levels_are_the_means_of_their_cells(bits: int) -> None:
    """The condition of Lloyd (1982): halfway edges, and centroids in between."""
    table, normal = codebook.lloyd_max(bits), NormalDist()
    edges = [-12.0, *((a + b) / 2 for a, b in itertools.pairwise(table)), 12.0]
    for level, (low, high) in zip(table, itertools.pairwise(edges), strict=True):
        mean = (normal.pdf(low) - normal.pdf(high)) / (normal.cdf(high) - normal.cdf(low))
        assert level == pytest.approx(mean, abs=1e-9)


# -- k-means -----------------------------------------------------------------------------------------------------------


def squared_error(x: torch.Tensor, weights: torch.Tensor, levels: torch.Tensor) -> float:
    return float(((x[:, None] - levels.double()).abs().amin(1).square() * weights).sum())


def least_error(x: torch.Tensor, weights: torch.Tensor, count: int) -> float:
    """The optimum, by dynamic programming over the sorted samples in plain Python."""
    order = x.argsort()
    x_list, w_list = x[order].tolist(), weights[order].tolist()
    n = len(x_list)

    def cost(i: int, j: int) -> float:  # of one level for samples i .. j - 1
        mass = sum(w_list[i:j])
        if not mass:
            return 0.0
        mean = sum(w * v for w, v in zip(w_list[i:j], x_list[i:j], strict=True)) / mass
        return sum(w * (v - mean) ** 2 for w, v in zip(w_list[i:j], x_list[i:j], strict=True))

    costs = {(i, j): cost(i, j) for i in range(n + 1) for j in range(i, n + 1)}
    best = [costs[0, j] for j in range(n + 1)]
    for _ in range(count - 1):
        best = [min(best[i] + costs[i, j] for i in range(j + 1)) for j in range(n + 1)]
    return best[n]


SAMPLES = {
    "normal": lambda g: torch.randn(60, generator=g),
    "heavy-tailed": lambda g: torch.randn(60, generator=g) / torch.rand(60, generator=g).sqrt(),
    "one-sided": lambda g: torch.rand(60, generator=g).log(),
    "clusters": lambda g: torch.randint(0, 5, (60,), generator=g) + 0.02 * torch.randn(60, generator=g),
    "few far away": lambda g: torch.cat([torch.randn(57, generator=g) * 0.1, torch.tensor([8.0, 9.0, -9.0])]),
}


@pytest.mark.parametrize("kind", SAMPLES)
@pytest.mark.parametrize("weighted", (False, True), ids=("alone", "weighted"))
def test_kmeans_finds_the_least_error(kind: str, weighted: bool) -> None:
    """Up to 5 % for the width of its bins, on so few samples that dynamic programming knows the optimum."""
    x = SAMPLES[kind](seeded(7)).double()
    x = x / x.abs().amax()
    weights = torch.randn(60, generator=seeded(8)).mul(2).exp().double() if weighted else torch.ones(60).double()
    for count in (4, 8):
        levels = kmeans.fit(x, weights if weighted else None, count)
        assert levels.dtype == torch.float32 and levels.shape == (count,) and bool((levels.diff() >= 0).all())
        optimum = least_error(x, weights, count)
        assert squared_error(x, weights, levels) <= 1.05 * optimum + float(weights.sum()) * (1 / 4096) ** 2
        moved = [float((x * weights)[cell].sum() / weights[cell].sum()) for cell in cells(x, levels)]
        assert moved == pytest.approx(levels.tolist(), abs=1e-3)  # each level is the mean of what is nearest to it


def cells(x: torch.Tensor, levels: torch.Tensor) -> list[torch.Tensor]:
    code = (x[:, None] - levels.double()).abs().argmin(1)
    return [code == index for index in range(len(levels))]


def test_kmeans_of_many_samples_is_fine_enough() -> None:
    """On 100,000 normal values it is Lloyd-Max's, as far as they tell."""
    x = torch.randn(100_000, generator=seeded(), dtype=torch.float64)
    top = float(x.abs().amax())
    for bits in (2, 3, 4):
        levels = kmeans.fit(x / top, None, 2**bits) * top
        assert levels.tolist() == pytest.approx(codebook.lloyd_max(bits), abs=0.03 + 0.01 * bits)
        published = MAX_1960[bits][1]
        assert squared_error(x, torch.ones_like(x), levels) / len(x) == pytest.approx(published, rel=0.02)


def test_kmeans_takes_weights_of_any_magnitude() -> None:
    x = torch.rand(500, generator=seeded()) * 2 - 1
    weights = torch.rand(500, generator=seeded(1)).double()
    expected = kmeans.fit(x, weights, 8)
    for power in (-1000, -60, 60, 1000):
        assert torch.equal(kmeans.fit(x, weights * 2.0**power, 8), expected)
    assert torch.equal(kmeans.fit(x, torch.zeros(500), 8), kmeans.fit(x, None, 8))  # they say nothing
    # Doubling a weight is doubling the sample.
    assert torch.equal(kmeans.fit(torch.cat([x, x[:100]]), None, 8), kmeans.fit(x, 1 + (torch.arange(500) < 100), 8))


def test_samples_without_weight_do_not_move_a_level() -> None:
    x = torch.rand(400, generator=seeded())
    weights = (x < 0.5).float()
    assert torch.equal(kmeans.fit(x, weights, 8), kmeans.fit(x[x < 0.5], None, 8))
    assert float(kmeans.fit(x, weights, 8)[-1]) < 0.5


@pytest.mark.parametrize("count", (4, 8, 16))
def test_kmeans_of_degenerate_samples_is_finite_and_ascends(count: int) -> None:
    few = torch.tensor([-1.0, -0.25, 1.0])
    for x in (
        torch.full((50,), 0.3),
        torch.tensor([0.5]),
        few,
        few.repeat(100),
        torch.zeros(0),
        torch.tensor([-9, 9.0]),
    ):
        levels = kmeans.fit(x, None, count)
        assert levels.shape == (count,)
        assert bool(levels.isfinite().all() and (levels.diff() >= 0).all() and (levels.abs() <= 1).all())
        if len(x):
            inside = x.clamp(-1, 1)
            assert float((inside[:, None] - levels).abs().amin(1).amax()) <= 1e-6  # every value is a level


# -- Hadamard ----------------------------------------------------------------------------------------------------------

MULTIPLES_OF_8 = tuple(range(8, 513, 8))

# Files that hold rotated codes depend on these; they may never change.
SIGNS_OF_64 = "--++++-++---++-+--+++-+++-+-++++---+++------------+-++++-+-+-++-"


def sylvester(size: int) -> torch.Tensor:
    """The Hadamard matrix of a power of two by its recursion [[H, H], [H, -H]], of +-1."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    return matrix


def test_signs_are_the_same_for_all_time() -> None:
    assert "".join("+" if sign > 0 else "-" for sign in hadamard.signs(64).tolist()) == SIGNS_OF_64
    for channels in (8, 80, 512):  # one sequence, cut off
        length = min(64, channels)
        assert torch.equal(hadamard.signs(channels)[:length], hadamard.signs(64)[:length])
        assert hadamard.signs(channels).shape == (channels,) and bool((hadamard.signs(channels).abs() == 1).all())
    # And like those of a fair coin: neither one-sided nor alternating.
    signs = hadamard.signs(512)
    assert abs(float(signs.sum())) < 3 * 512**0.5 and abs(float((signs[1:] * signs[:-1]).sum())) < 3 * 512**0.5


@pytest.mark.parametrize("channels", (*MULTIPLES_OF_8, 1, 2, 12, 20, 65), ids="D{}".format)
def test_rotations_are_sylvesters_in_blocks_and_orthogonal(channels: int) -> None:
    rotation = hadamard.rotation(channels)
    block = hadamard.block_of(channels)
    assert channels % block == 0 and (channels // block) % 2 == 1  # the largest power of two that divides
    one = sylvester(block) / block**0.5
    expected = torch.block_diag(*[one] * (channels // block)) * hadamard.signs(channels).double()[:, None]
    torch.testing.assert_close(rotation.double(), expected, rtol=1e-6, atol=0)
    identity = torch.eye(channels, dtype=torch.float64)
    torch.testing.assert_close(rotation.double() @ rotation.double().T, identity, rtol=0, atol=1e-6)
    x = torch.randn(3, 2, channels, generator=seeded())
    rotated = hadamard.transform(x * hadamard.signs(channels))
    torch.testing.assert_close(rotated, x @ rotation, rtol=1e-5, atol=1e-5)
    query = torch.randn(3, 2, channels, generator=seeded(1))
    torch.testing.assert_close((query @ rotation * rotated).sum(-1), (query * x).sum(-1), rtol=1e-4, atol=1e-4)


def test_a_rotation_made_in_inference_mode_serves_training() -> None:
    hadamard.rotation.cache_clear(), hadamard.signs.cache_clear()
    with torch.inference_mode():
        rotation = hadamard.rotation(20)
    query = torch.randn(3, 20, requires_grad=True)
    (query @ rotation).sum().backward()
    assert query.grad is not None


def test_a_rotation_spreads_one_channel_over_its_block() -> None:
    x = torch.zeros(96)
    x[40] = 8.0
    rotated = x @ hadamard.rotation(96)
    assert torch.allclose(rotated[32:64].abs(), torch.tensor(8 / 32**0.5)) and int((rotated != 0).sum()) == 32


# -- outliers ----------------------------------------------------------------------------------------------------------


def test_entries_are_a_multiple_of_8_and_at_least_8() -> None:
    assert outliers.entries(0.0, 128, 64) == 0
    for fraction, tokens, channels, expected in (
        (0.01, 128, 64, 80), (0.01, 128, 128, 160), (0.005, 128, 64, 40), (0.02, 128, 80, 208), (0.1, 128, 64, 816),
        (1e-5, 128, 64, 8), (0.01, 8, 8, 8), (0.01, 32, 20, 8), (0.1, 128, 512, 6552), (0.1, 2, 2, 4),
    ):  # fmt: skip
        assert outliers.entries(fraction, tokens, channels) == expected
    with pytest.raises(ValueError, match="at most 65536 elements, but a block has 129 x 512; give block=128 or less"):
        outliers.entries(0.01, 129, 512)


@pytest.mark.parametrize("dim", (-1, -2))
def test_found_outliers_are_those_farthest_in_deviations_of_their_group(dim: int) -> None:
    x = torch.randn(3, 16, 4, 16, generator=seeded()) * torch.rand(3, 16, 4, 16, generator=seeded(1)).exp() + 100
    chosen = outliers.find(x, dim, 24)
    y = x.double()
    far = ((y - y.mean(dim, keepdim=True)) / y.std(dim, keepdim=True, correction=0)).abs().flatten(1)
    assert chosen.dtype == torch.bool and chosen.shape == x.shape
    for block in range(3):
        limit = far[block].sort(descending=True).values[23]
        assert torch.equal(chosen[block].flatten(), far[block] >= limit)


def test_padding_of_a_short_group_takes_no_entry_and_stretches_no_range() -> None:
    """65 channels in groups of 64 are 33 and 32: the last place of the second is padding, out of every range."""
    x = torch.randn(2, 32, 65, generator=seeded())
    x[..., -1] = 50.0  # of which the padding is a copy
    cut, dim = groups.split(x, "token", 64)
    weights = groups.weights(65, "token", 64, x.device)
    chosen = outliers.find(cut, dim, 40, weights)
    where = groups.join(chosen, "token", 65)
    assert int(where.sum()) == 80
    assert weights is not None and bool(chosen[(weights == 0).expand_as(chosen)].all())
    assert bool(where[..., -1].all())


def test_outliers_of_huge_tiny_and_equal_values_are_numbers() -> None:
    x = torch.randn(1, 16, 2, 16, generator=seeded())
    expected = outliers.find(x, -1, 16)
    for size in (2.0**-120, 2.0**120):
        assert torch.equal(outliers.find(x * size, -1, 16), expected)
    for value in (0.0, 1.0, 0.1, 1e38, -1e-38):
        assert int(outliers.find(torch.full((2, 8, 1, 40), value), -1, 8).sum()) == 16
    lone = torch.full((1, 8, 1, 40), 0.1)
    lone[0, 3, 0, 7] = 0.11
    assert bool(outliers.find(lone, -1, 8)[0, 3, 0, 7])


def test_entries_are_taken_and_added_back_where_they_were() -> None:
    rest = torch.randn(2, 3, 16, 20, generator=seeded())
    index, value = outliers.pick(rest, 24)
    assert index.dtype == torch.uint16 and value.dtype == torch.bfloat16 and index.shape == value.shape == (2, 3, 24)
    flat = rest.flatten(-2)
    for row, head in itertools.product(range(2), range(3)):
        largest = flat[row, head].abs().argsort(descending=True)[:24].sort().values
        assert torch.equal(index[row, head].long(), largest)
        assert torch.equal(value[row, head], flat[row, head, largest].to(torch.bfloat16))
    chosen = torch.zeros_like(flat, dtype=torch.bool).scatter_(-1, index.long(), True).view(rest.shape)
    assert all(torch.equal(a, b) for a, b in zip(outliers.at(chosen, rest), (index, value), strict=True))
    out = torch.ones(2, 3, 20, 16).transpose(-1, -2)  # of any strides
    outliers.add_into(out, index, value)
    assert torch.equal(out, torch.where(chosen, 1 + rest.to(torch.bfloat16).float(), 1.0))


def test_an_index_reaches_the_last_element_of_the_largest_block() -> None:
    rest = torch.zeros(1, 128, 512)
    rest[0, 127, 511], rest[0, 0, 0], rest[0, 64, 0] = 3.0, -1.0, 2.0
    index, value = outliers.pick(rest, 3)
    assert index.long().tolist() == [[0, 32768, 65535]] and value.tolist() == [[-1, 2, 3]]
    out = torch.zeros(1, 128, 512)
    outliers.add_into(out, index, value)
    assert torch.equal(out, rest)


# -- rotary embedding --------------------------------------------------------------------------------------------------

BLOCK = 8
FREQUENCIES = 10_000 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)  # of 8 rotated channels


def roped(x: torch.Tensor, positions: torch.Tensor, interleaved: bool, frequencies=FREQUENCIES) -> torch.Tensor:
    """RoFormer's rotation as products of complex numbers, in float64: ``x [..., T, D]``, ``positions [T]``."""
    half = len(frequencies)
    x = x.double()
    body, rest = x[..., : 2 * half], x[..., 2 * half :]
    pairs = body.unflatten(-1, (half, 2)) if interleaved else body.unflatten(-1, (2, half)).transpose(-1, -2)
    angle = positions.double()[:, None] * frequencies
    spun = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angle), angle)
    pairs = torch.view_as_real(spun)
    body = pairs.flatten(-2) if interleaved else pairs.transpose(-1, -2).flatten(-2)
    return torch.cat([body, rest], dim=-1)


@pytest.mark.parametrize("interleaved", (False, True), ids=("halves", "interleaved"))
@pytest.mark.parametrize("channels", (8, 12))
def test_rotate_multiplies_by_complex_numbers_and_unrotate_divides(interleaved: bool, channels: int) -> None:
    x = torch.randn(2, 3, 20, channels, generator=seeded())
    positions = torch.arange(100, 120)
    angle = positions.double()[:, None] * FREQUENCIES
    cos, sin = angle.cos().float(), angle.sin().float()
    there = rope.apply(x, cos, sin, interleaved)
    torch.testing.assert_close(there.double(), roped(x, positions, interleaved), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rope.unrope(there, cos, sin, interleaved), x, rtol=1e-5, atol=1e-5)
    scaled = rope.apply(x, cos * 1.3, sin * 1.3, interleaved)  # as under an attention scaling
    torch.testing.assert_close(rope.unrope(scaled, cos * 1.3, sin * 1.3, interleaved), x, rtol=1e-5, atol=1e-5)
    assert torch.equal(there[..., 8:], x[..., 8:])  # the others pass


def some_rope(rows: int = 1, count: int = 3, first: int = 4, interleaved: bool = False) -> tuple[Rope, torch.Tensor]:
    """Angles of ``count`` blocks, the first of row ``r`` at position ``first + 1000 r``; and all positions."""
    begin = first + 1000 * torch.arange(rows)[:, None] + BLOCK * torch.arange(count)
    base, step = (p.double()[..., None] * FREQUENCIES for p in (begin, torch.arange(BLOCK)))
    angles = (base.cos(), base.sin(), step.cos(), step.sin())
    return Rope(*(x.float() for x in angles), interleaved), (begin[..., None] + torch.arange(BLOCK)).flatten(1)


@pytest.mark.parametrize("first", (0, 4, 100_000))
def test_base_and_step_angles_add_up(first: int) -> None:
    one, positions = some_rope(2, 5, first)
    cos, sin = one.angles(1, 4)
    direct = positions[:, BLOCK : 4 * BLOCK].double()[..., None] * FREQUENCIES
    assert cos.shape == sin.shape == (2, 3 * BLOCK, 4)
    torch.testing.assert_close(cos.double(), direct.cos(), rtol=0, atol=3e-7)
    torch.testing.assert_close(sin.double(), direct.sin(), rtol=0, atol=3e-7)
    assert torch.equal(one.step_cos[0], torch.ones(4)) and torch.equal(one.step_sin[0], torch.zeros(4))


def test_balanced_channels_meet_balanced_queries() -> None:
    """Keys are divided and queries multiplied, head by head, so that their products stay as they are."""
    balance, rotation = torch.rand(2, 12, generator=seeded(3)) + 0.2, hadamard.rotation(12)
    transform = Transform(None, rotation, None, False, balance)
    x, query = (torch.randn(3, heads, n, 12, generator=seeded(heads)) for heads, n in ((2, 2 * BLOCK), (6, 5)))
    packed, transformed = transform.apply(x, 0), transform.query(query)
    assert transformed is not None
    torch.testing.assert_close(packed, (x / balance[:, None]) @ rotation)
    torch.testing.assert_close(transform.undo(packed, 0), x, rtol=1e-4, atol=2e-5)
    scores = transformed.unflatten(1, (2, 3)) @ packed[:, :, None].transpose(-1, -2)
    right = query.unflatten(1, (2, 3)) @ x[:, :, None].transpose(-1, -2)
    torch.testing.assert_close(scores, right, rtol=1e-4, atol=1e-4)
    assert Transform().query(query) is None


TRANSFORMS = [
    (mean, rotation, ropes, whole)
    for mean, rotation, ropes, whole in itertools.product((False, True), repeat=4)
    if ropes or whole
]


@pytest.mark.parametrize(("mean", "rotation", "ropes", "whole"), TRANSFORMS, ids=str)
@pytest.mark.parametrize("interleaved", (False, True), ids=("halves", "interleaved"))
def test_a_transform_is_its_formula_and_undoes_itself(
    mean: bool, rotation: bool, ropes: bool, whole: bool, interleaved: bool
) -> None:
    """In every combination, for one row and for each of several, from any block on."""
    channels, heads = 12, 2
    angles, positions = some_rope(3, 4, interleaved=interleaved)
    middle = torch.randn(heads, channels, generator=seeded(1)) if mean else None
    matrix = hadamard.rotation(channels) if rotation else None
    transform = Transform(middle, matrix, angles if ropes else None, whole)
    assert transform.is_nothing == (not mean and not rotation and (not ropes or not whole))
    x = torch.randn(3, heads, 2 * BLOCK, channels, generator=seeded()) * 3
    first = 1
    packed = transform.apply(x, first)
    for row in range(3):
        where, y = positions[row, BLOCK : 3 * BLOCK], x[row].double()
        if ropes and whole:
            y = roped(y, -where, interleaved)
        if middle is not None:
            centre = middle.double()[:, None].expand(-1, 2 * BLOCK, -1)
            y = y - (roped(centre, where, interleaved) if ropes and not whole else centre)
        if matrix is not None:
            y = y @ matrix.double()
        torch.testing.assert_close(packed[row].double(), y, rtol=1e-4, atol=2e-5)
        alone = transform.of_row(row)
        torch.testing.assert_close(alone.apply(x[row : row + 1], first), packed[row : row + 1], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(alone.undo(packed[row : row + 1], first), x[row : row + 1], rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(transform.undo(packed, first), x, rtol=1e-4, atol=2e-5)
    assert transform.of_row(None) is transform
    half = transform.apply(x.to(torch.bfloat16), first)
    assert half.dtype == torch.float32  # whatever comes in


def test_one_row_of_angles_serves_every_row() -> None:
    angles, _ = some_rope(1, 3)
    transform = Transform(torch.ones(2, 12), None, angles, whole=False)
    assert transform.of_row(1) is transform
    x = torch.randn(4, 2, 3 * BLOCK, 12, generator=seeded())
    packed = transform.apply(x, 0)
    torch.testing.assert_close(packed[2:3], transform.apply(x[2:3], 0))
    torch.testing.assert_close(transform.undo(packed, 0), x, rtol=1e-5, atol=1e-5)


def test_a_regular_rotary_counts_from_the_first_token() -> None:
    rotary, cpu = Rotary(FREQUENCIES.float()), torch.device("cpu")
    assert rotary.channels == 8
    known = FREQUENCIES.float().double()
    for first, count in ((4, 3), (4, 50), (0, 2), (4, 1)):
        angles = rotary.rope(Rows(2, 1000), first, BLOCK, count, cpu)
        assert angles.base_cos.shape == (1, count, 4) and angles.step_cos.shape == (BLOCK, 4)
        cos, sin = angles.angles(0, count)
        direct = (first + torch.arange(count * BLOCK)).double()[:, None] * known
        torch.testing.assert_close(cos[0].double(), direct.cos(), rtol=0, atol=3e-7)
        torch.testing.assert_close(sin[0].double(), direct.sin(), rtol=0, atol=3e-7)
    cos, sin = rotary.cos_sin(torch.tensor([[5, 7], [100_000, 0]]))
    assert cos.shape == (2, 2, 4)
    assert torch.equal(cos[1, 0], (100_000 * known).cos().float()) and torch.equal(sin[0, 1], (7 * known).sin().float())


def test_tables_of_a_rotary_grow_with_room_and_are_kept() -> None:
    rotary, cpu, rows = Rotary(FREQUENCIES), torch.device("cpu"), Rows(1, 0)
    first = rotary.rope(rows, 4, BLOCK, 10, cpu)
    bytes_before = rotary.nbytes
    again = rotary.rope(rows, 4, BLOCK, 12, cpu)
    assert rotary.nbytes == bytes_before > 0  # within the room that there was
    assert again.base_cos.data_ptr() == first.base_cos.data_ptr()
    grown = rotary.rope(rows, 4, BLOCK, 500, cpu)
    assert torch.equal(grown.base_cos[:, :10], first.base_cos) and rotary.nbytes > bytes_before
    for shift in range(40):  # starts that come and go do not pile up
        rotary.rope(rows, shift, BLOCK, 10, cpu)
    assert rotary.nbytes < 20 * (2 * 512 * 4 * 8)


def test_irregular_rows_have_angles_of_their_own() -> None:
    """Runs that jump, rows that differ, and epochs whose frequencies differ."""
    rotary, cpu = Rotary(FREQUENCIES, interleaved=True), torch.device("cpu")
    slower = FREQUENCIES / 4
    rotary.epochs.append(slower)
    runs = ((Run(0, 0), Run(20, 500)), (Run(0, 7), Run(12, 100, 1)))
    rows = Rows(2, 64, runs=runs)
    angles = rotary.rope(rows, 4, BLOCK, 4, cpu)
    assert angles.interleaved and angles.base_cos.shape == (2, 4, 4)
    for row, position in ((0, lambda t: t if t < 20 else t + 480), (1, lambda t: t + 7 if t < 12 else t + 88)):
        for block in range(4):
            token = 4 + BLOCK * block
            frequencies = slower if row == 1 and token >= 12 else FREQUENCIES
            expected = (position(token) * frequencies).cos().float()
            assert torch.equal(angles.base_cos[row, block], expected), (row, block)


def test_a_copied_cache_shares_its_rotary() -> None:
    import copy

    rotary = Rotary(FREQUENCIES)
    assert copy.deepcopy([rotary])[0] is rotary


# -- casts -------------------------------------------------------------------------------------------------------------


def test_a_cast_down_saturates() -> None:
    x = torch.tensor([1.0, -0.0, 65504.0, 65520.0, -7e4, 1e38])
    expected = torch.tensor([1.0, -0.0, 65504.0, 65504.0, -65504.0, 65504.0], dtype=torch.float16)
    assert torch.equal(cast.narrow(x, torch.float16), expected)
    assert torch.equal(cast.narrow(x, torch.bfloat16), x.bfloat16())
    for dtype in (torch.float32, torch.float64):
        assert torch.equal(cast.narrow(x, dtype), x.to(dtype))
    assert (
        cast.narrow(torch.tensor([1e300], dtype=torch.float64), torch.float32).item() == torch.finfo(torch.float32).max
    )
