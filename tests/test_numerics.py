"""Floor 0: packing, groups, affine parameters, e4m3 and codebooks, each against its definition."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbits.numerics import affine, bitpack, cast, codebook, float8, groups

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
