"""Parity with the packages whose methods kvbits carries on: optimum-quanto (affine codes) and hqq (its objective)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvbits.codecs import HalfQuadratic
from kvbits.codecs.half_quadratic import P_NORM
from kvbits.numerics import affine

pytestmark = pytest.mark.parity
GROUP = 64


def like_keys(x: torch.Tensor) -> torch.Tensor:
    """Keys as models have them: a mean and a spread of its own for each channel, a few channels far larger."""
    generator = torch.Generator().manual_seed(1)
    mean, spread = torch.randn(GROUP, generator=generator) * 2, torch.rand(GROUP, generator=generator) * 2 + 0.1
    spread[::17] *= 10
    return x * spread + mean


DATA: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normal": lambda x: x,
    "heavy-tailed": lambda x: x.sinh(),
    "like keys": like_keys,
    "one-signed": lambda x: x.abs() + 2,
    "of bfloat16": lambda x: x.to(torch.bfloat16).float(),
}


def groups_of(kind: str, count: int = 4096) -> torch.Tensor:
    return DATA[kind](torch.randn(count, GROUP, generator=torch.Generator().manual_seed(0)))


def min_max(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Our scales and zeros of groups ``x [..., g]``, in float32 as theirs are."""
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    return affine.qparams_of_range(low, high, 0, 2**bits - 1, torch.float32, torch.float32)


@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("bits", (4, 2), ids="{}-bit".format)
def test_affine_codes_are_those_of_quanto(bits: int, kind: str) -> None:
    """The same scale and the same code for every element, where both keep scale and zero in float32.

    quanto rounds (x + shift) / scale, kvbits x / scale + zero. In exact arithmetic they are the same; in float32 each
    is off by a few units in the last place of the larger of its terms. So an element may differ only where it lies
    that close to a tie between two codes, and then by one code; such elements are told apart in float64.
    """
    quanto = pytest.importorskip("optimum.quanto", reason="needs optimum-quanto: pip install kvbits[parity]")
    x = groups_of(kind)
    qtype = {4: quanto.qint4, 2: quanto.qint2}[bits]
    their_scale, their_shift = quanto.MaxOptimizer()(x, qtype, 0, GROUP)
    quantized = quanto.quantize_weight(x, qtype, 0, their_scale, their_shift, GROUP, optimized=False)
    theirs = quantized._data.unpack().view_as(x)

    scale, zero = min_max(x, bits)
    ours = affine.quantize(x, scale, zero, bits)
    torch.testing.assert_close(scale, their_scale.view_as(scale), rtol=4 * 2**-24, atol=0)
    torch.testing.assert_close(zero * scale, their_shift.view_as(zero), rtol=4 * 2**-24, atol=0)

    low, high = x.double().amin(-1, keepdim=True), x.double().amax(-1, keepdim=True)
    levels = (x.double() - low) / (high - low) * (2**bits - 1)
    rounding = 4 * 2**-24 * ((x.double().abs() + low.abs()) / scale.double() + 1)
    tie = (levels - levels.floor() - 0.5).abs() <= rounding
    assert torch.equal(ours[~tie], theirs[~tie])
    assert int((ours.int() - theirs.int()).abs().max()) <= 1
    assert float(tie.double().mean()) < 5e-3  # coarse bfloat16 data meets real ties, others next to none
    assert ours.unique().numel() == 2**bits

    decoded = affine.dequantize(ours, scale, zero)
    same = ours == theirs
    their_values = quantized.dequantize().view_as(x)
    step = scale.expand_as(x)
    assert bool(((decoded - their_values).abs()[same] <= (2**-18 * (step + x.abs()))[same]).all())


def objective(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """Sum of |x - x^|^0.7 of each group, in float64."""
    decoded = (codes.double() - zero.double()) * scale.double()
    return (decoded - x.double()).abs().pow(P_NORM).sum(-1)


def theirs_on(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """hqq's objective for each group, and the scale it took (float32 scales and zeros)."""
    quantize = pytest.importorskip("hqq.core.quantize", reason="needs hqq: pip install kvbits[parity]")
    codes, meta = quantize.Quantizer.quantize(
        x, nbits=bits, axis=1, group_size=GROUP, device="cpu", compute_dtype=torch.float32, bitpack=False
    )
    scale, zero = meta["scale"].view(-1, 1), meta["zero"].view(-1, 1)
    return objective(x, codes.view_as(x), scale, zero), scale


@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("bits", (8, 4, 3, 2), ids="{}-bit".format)
def test_half_quadratic_objective_is_no_worse_than_that_of_hqq(bits: int, kind: str) -> None:
    """The solver itself, on the same float32 scales: the sum of |error|^0.7 over all groups is no larger."""
    x = groups_of(kind)
    theirs, their_scale = theirs_on(x, bits)
    scale, minmax = min_max(x, bits)
    torch.testing.assert_close(scale, their_scale, rtol=1e-6, atol=0)
    zero = HalfQuadratic(bits).solve_zero(x, scale, minmax, -1)
    ours = objective(x, affine.quantize(x, scale, zero, bits), scale, zero)
    assert float(ours.sum()) <= float(theirs.sum())
    # And the comparison means something: both improve on the min/max zero.
    start = objective(x, affine.quantize(x, scale, minmax, bits), scale, minmax)
    assert float(theirs.sum()) < float(start.sum())


@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("bits", (4, 3, 2), ids="{}-bit".format)
def test_half_quadratic_as_stored_loses_at_most_the_rounding_of_its_scale(bits: int, kind: str) -> None:
    """32 bits of scale and zero per group against hqq's 64: a bf16 scale is rounded up by at most 2**-7.

    (At 8 bits an fp16 zero of 128 to 255 levels is itself coarse; there kvbits is about 4 % above hqq's objective.)
    """
    x = groups_of(kind)
    theirs, _ = theirs_on(x, bits)
    codec = HalfQuadratic(bits, group=GROUP)
    decoded = codec.decode(codec.encode(x, {}), {})
    ours = (decoded.double() - x.double()).abs().pow(P_NORM).sum(-1)
    assert float(ours.sum()) <= (1 + 2**-7) ** P_NORM * float(theirs.sum())
