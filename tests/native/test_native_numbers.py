"""The native kernel on numbers that are hard to compute with."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from kernel_calls import FLOATS, PLAIN, assert_native, cached_view, decoded, each_isa, same, view_in
from kvbits.attend import Call, KVView, native, reference
from kvbits.layer.cache import LayerCache
from kvbits.schemes.scheme import Scheme
from unspelled import NEW, stored_as
from views import NATIVE_ERROR, SMALL, Shape, causal, plain_attention, query_for, random, view_of

pytestmark = pytest.mark.usefixtures("threads_stay")


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
