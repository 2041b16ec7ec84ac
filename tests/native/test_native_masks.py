"""The native kernel under masks, with many queries, and on tensors of any strides."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernel_calls import FLOATS, HEADS, PLAIN, assert_native, cached_view, each_isa, same
from kvbits.attend import Call, KVView, attend, choose, native, reference
from unspelled import stored_as
from views import NATIVE_ERROR, Shape, additive, boolean, causal, query_for, random, view_of

pytestmark = pytest.mark.usefixtures("threads_stay")


# -- masks, and many queries -------------------------------------------------------------------------------------------

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
