"""The native kernel where rows of the batch share blocks."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernel_calls import HEADS, PLAIN, SPLIT, assert_native, same
from kvbits.attend import Call, native
from kvbits.layer.cache import LayerCache
from kvbits.schemes.scheme import Scheme
from kvbits.store.rows import Rows
from unspelled import view_of_new
from views import SMALL, query_for, random

pytestmark = pytest.mark.usefixtures("threads_stay")


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
