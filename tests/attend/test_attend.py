"""Floor 3: the reference kernel against attention in float64 over everything decoded, and what it needs for that."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from kvbits.attend import KERNELS, Call, attend, choose, explain, reference
from kvbits.attend.dense import dense
from kvbits.layer.cache import LayerCache
from kvbits.schemes.scheme import Scheme
from kvbits.store.rows import Rows
from views import (
    FEATURES,
    NATIVE_ERROR,
    PLAIN,
    SMALL,
    Shape,
    boolean,
    causal,
    padded_text,
    plain_attention,
    query_for,
    random,
    unrounded,
    view_of,
    visible,
)

SHAPES = (
    Shape(3, 1, 8, 8),
    Shape(2, 3, 20, 20),
    Shape(1, 5, 64, 64),
    Shape(2, 7, 80, 80),
    Shape(1, 12, 96, 64),
    Shape(2, 1, 112, 128),
    Shape(1, 71, 64, 64),  # Falcon-7B: one KV head
    Shape(1, 2, 65, 12),
    Shape(1, 4, 256, 256),
    Shape(1, 2, 512, 512),
)


def assert_right(call: Call) -> None:
    """Every kernel that takes the call, against float64 over everything decoded.

    The reference errs at most twice as much as the plain formula in the query's own type, the native kernel by
    ``NATIVE_ERROR`` of the largest output or twice what torch errs in bfloat16, whichever is smaller; both may round
    their result to the query's type.
    """
    keys, values = unrounded(call.view)
    truth = plain_attention(call, torch.float64, keys, values)
    rounding = 2 * torch.finfo(call.query.dtype).eps * values.abs().amax()

    def error_of(out: torch.Tensor) -> float:
        return float((out.double() - truth).abs().amax())

    allowed = {"reference": 2 * error_of(plain_attention(call, call.query.dtype, keys, values))}
    half = dataclasses.replace(call, query=call.query.bfloat16())
    in_half = error_of(plain_attention(half, torch.bfloat16, keys, values))
    allowed["native"] = min(NATIVE_ERROR * float(truth.abs().amax()), 2 * in_half)
    fitting = [kernel for kernel in KERNELS if not kernel.why_not(call)]
    assert choose(call) is fitting[0]
    for kernel in fitting:
        got = kernel.run(call)
        assert got.shape == truth.shape and got.dtype == call.query.dtype
        assert error_of(got) <= allowed[kernel.name] + float(rounding), kernel.name


@pytest.fixture(params=("large tiles", "small tiles"))
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Small tiles: one block at a time, few queries at a time; the online softmax has to merge them all."""
    if request.param == "small tiles":
        monkeypatch.setattr(reference, "TILE_ELEMENTS", 1)
        monkeypatch.setattr(reference, "SCORE_ELEMENTS", 2000)
    return request.param


COUNTS = {
    "decode step": (150, 1),
    "short chunk": (150, 5),
    "long chunk": (150, 90),
    "first prompt": (150,),
    "one token": (1,),
    "chunks": (10, 60, 61, 3),
    "only exact": (20, 1),
}
each_count = pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)


# -- shapes and types --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("counts", ((150, 1), (150, 5), (150,)), ids=("decode step", "chunk", "first prompt"))
def test_any_heads_and_channels(shape: Shape, counts: tuple[int, ...], tiles: str) -> None:
    view = view_of(shape, counts)
    assert_right(Call(query_for(view, shape, counts[-1]), view, shape.key_channels**-0.5))


@each_count
@pytest.mark.parametrize("scheme", ("exact", "int4", "k=hqq3-channel,v=nf2", "fp8", "kivi2"))
def test_any_scheme(scheme: str, counts: tuple[int, ...], tiles: str) -> None:
    view = view_of(PLAIN, counts, scheme if scheme == "exact" else f"{scheme},{SMALL}")
    assert_right(Call(query_for(view, PLAIN, counts[-1]), view, 0.2))


@each_count
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16, torch.float16), ids=str)
def test_any_type(dtype: torch.dtype, counts: tuple[int, ...], tiles: str) -> None:
    view = view_of(PLAIN, counts, dtype=dtype)
    assert_right(Call(query_for(view, PLAIN, counts[-1]), view, 0.2))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("counts", ((1500, 1), (1500, 7)), ids=("decode step", "chunk"))
def test_half_precision_error_is_at_most_twice_that_of_torch(counts: tuple[int, ...], dtype: torch.dtype) -> None:
    """Torch's own attention in the same type, over the same tokens decoded and rounded to it."""
    shape = Shape(2, 4, 64, 64)
    view = view_of(shape, counts, "kivi4", dtype=dtype)
    query = query_for(view, shape, counts[-1])
    call = Call(query, view, 0.125)
    truth = plain_attention(call, torch.float64, *unrounded(view))
    keys, values = dense(view)
    torchs = scaled_dot_product_attention(query, keys, values, visible(call), scale=0.125, enable_gqa=True)
    error, allowed = ((x.double() - truth).square().mean().sqrt() for x in (attend(call), torchs))
    assert 0 < float(error) <= 2 * float(allowed)


# -- masks and the rest ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ("decode step", "short chunk", "long chunk", "first prompt", "chunks"))
@pytest.mark.parametrize("feature", FEATURES)
def test_masks_caps_windows_and_sinks(feature: str, name: str, tiles: str) -> None:
    counts = COUNTS[name]
    view = view_of(PLAIN, counts)
    heads = PLAIN.heads * PLAIN.groups
    options = FEATURES[feature](view, heads, counts[-1])
    call = Call(query_for(view, PLAIN, counts[-1]), view, 0.2, **options)
    assert_right(call)
    without = attend(Call(call.query, view, 0.2))
    assert not torch.allclose(attend(call), without, atol=1e-3)  # the feature does something


@pytest.mark.parametrize("dtype", (torch.float64, torch.bfloat16), ids=str)
@pytest.mark.parametrize("feature", ("additive mask per head", "everything", "additive mask of finite lowest"))
def test_additive_masks_of_other_types(feature: str, dtype: torch.dtype, tiles: str) -> None:
    view = view_of(PLAIN, (150, 5), dtype=dtype)
    options = FEATURES[feature](view, PLAIN.heads * PLAIN.groups, 5)
    assert_right(Call(query_for(view, PLAIN, 5), view, 0.2, **options))


@pytest.mark.parametrize("masked", (False, True), ids=("causal", "mask"))
@pytest.mark.parametrize("queries", (1, 6))
def test_layers_with_a_sliding_window(queries: int, masked: bool, tiles: str) -> None:
    """The view begins at a later column, blocks have been dropped, and masks cover what is left."""
    view = view_of(PLAIN, (100, 80, 90, 1, 30, queries), window=45)
    assert view.offset > 0 and view.dropped > 0 and view.blocks.longest > 0
    mask = boolean(view, 1, queries, 2) if masked else None
    assert_right(Call(query_for(view, PLAIN, queries), view, 0.2, mask, window=45))
    assert_right(Call(query_for(view, PLAIN, queries), view, 0.2, mask))  # offset alone: the mask says the rest


# -- padding -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ("left", "holes"))
@pytest.mark.parametrize("counts", ((200, 1), (100, 60, 5), (200,)), ids=("decode step", "chunks", "first prompt"))
@pytest.mark.parametrize("form", ("bool", "additive"))
def test_padded_rows(form: str, counts: tuple[int, ...], kind: str, tiles: str) -> None:
    columns, queries = sum(counts), counts[-1]
    text = padded_text(kind, columns)
    view = view_of(PLAIN, counts, batch=3, text=text)
    mask = causal(view, queries) & text[:, None, None]
    if form == "additive":
        mask = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    call = Call(query_for(view, PLAIN, queries), view, 0.2, mask)
    assert_right(call)
    # And a row sees just what it sees alone.
    out = attend(call)
    for row in range(3):
        own = text[row]
        keys, values = (x[row : row + 1][:, :, own] for x in unrounded(view))
        asked = torch.where(own[-queries:])[0]
        if not len(asked):
            continue
        alone = torch.tril(torch.ones(len(asked), int(own.sum()), dtype=torch.bool), int(own.sum()) - len(asked))
        expected = scaled_dot_product_attention(
            call.query[row : row + 1, :, asked].double(), keys, values, alone, scale=0.2, enable_gqa=True
        )
        torch.testing.assert_close(out[row : row + 1, :, asked].double(), expected, rtol=1e-4, atol=1e-5)


def test_padding_is_hidden_even_where_the_mask_shows_it(tiles: str) -> None:
    """Padding is not stored, so a mask that lets it through must not make zeros of it."""
    text = padded_text("left", 201)
    view = view_of(PLAIN, (200, 1), batch=3, text=text)
    query = query_for(view, PLAIN, 1)
    right = attend(Call(query, view, 0.2, text[:, None, None]))
    wrong = attend(Call(query, view, 0.2, torch.ones(1, 1, 1, 201, dtype=torch.bool)))
    torch.testing.assert_close(right, wrong, rtol=0, atol=0)


@pytest.mark.parametrize("form", ("bool", "additive"))
@pytest.mark.parametrize("sinks", (False, True), ids=("", "sink logits"))
def test_queries_that_see_nothing_give_zero(form: str, sinks: bool, tiles: str) -> None:
    view = view_of(PLAIN, (150, 4))
    mask = boolean(view, 1, 4, 2).clone()
    mask[0, :, 2], mask[1, :, 0] = False, False
    if form == "additive":
        mask = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    logits = random(PLAIN.heads * PLAIN.groups) if sinks else None
    call = Call(query_for(view, PLAIN, 4), view, 0.2, mask, sink_logits=logits)
    out = attend(call)
    assert not out[0, :, 2].any() and not out[1, :, 0].any() and out[0, :, 1].all()
    assert_right(call)


def test_no_queries_give_no_rows() -> None:
    view = view_of(PLAIN, (150, 0))
    assert attend(Call(query_for(view, PLAIN, 0), view, 0.2)).shape == (2, 6, 0, PLAIN.value_channels)


def test_large_scores_do_not_overflow(tiles: str) -> None:
    """The running maximum must be subtracted across tiles: exp of these scores is far beyond float32.

    The scaling is a power of two, so it rounds nothing, whether it multiplies queries or scores.
    """
    view = view_of(PLAIN, (150, 3))
    assert_right(Call(query_for(view, PLAIN, 3) * 1000, view, 0.25))


# -- memory ------------------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The largest tensor, in elements, that any operator makes (views of existing memory are free)."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        outputs = out if isinstance(out, (tuple, list)) else [out]
        for result, declared in zip(outputs, func._schema.returns, strict=False):
            if isinstance(result, torch.Tensor) and declared.alias_info is None:
                self.elements = max(self.elements, result.numel())
        return out


def largest_of(call: Call) -> int:
    with Largest() as largest:
        attend(call)
    return largest.elements


@pytest.mark.parametrize("scheme", ("int4", "kivi2", "exact,residual=8192"))
@pytest.mark.parametrize("masked", (False, True), ids=("causal", "mask"))
@pytest.mark.parametrize("queries", (1, 64))
def test_neither_the_decoded_cache_nor_the_score_matrix_ever_exists(queries: int, masked: bool, scheme: str) -> None:
    context, shape = 8192, Shape(4, 2, 64, 64)
    view = view_of(shape, (context, queries), scheme, batch=1, dtype=torch.bfloat16)
    mask = boolean(view, 1, queries, 1) if masked else None
    largest = largest_of(Call(query_for(view, shape, queries), view, 0.125, mask))
    decoded = shape.heads * context * shape.key_channels
    assert largest <= decoded / (3 if queries == 1 else 1.9)
    assert largest < context * context / 60


@pytest.mark.parametrize("queries", (1, 64))
def test_memory_does_not_grow_with_the_context(queries: int) -> None:
    shape = Shape(2, 12, 64, 64)  # and keys are not repeated for twelve query heads
    sizes = []
    for context in (8192, 16384):
        view = view_of(shape, (context, queries), "int4", batch=1, dtype=torch.bfloat16)
        sizes.append(largest_of(Call(query_for(view, shape, queries), view, 0.125)))
    assert sizes[1] <= sizes[0]
    if queries == 1:
        assert sizes[0] < 1.1 * reference.TILE_ELEMENTS


@pytest.mark.parametrize("masked", (False, True), ids=("causal", "mask"))
def test_a_first_prompt_makes_no_score_or_mask_matrix(masked: bool) -> None:
    context, shape = 4096, Shape(1, 2, 16, 16)
    view = view_of(shape, (context,), "int4", batch=1)
    mask = causal(view, context)[None, None] if masked else None
    assert largest_of(Call(query_for(view, shape, context), view, 0.25, mask)) <= context * context / 8


# -- calls that make no sense ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape",
    [(2, 1, 3, 31), (2, 1, 2, 32), (3, 1, 3, 32), (2, 2, 3, 32), (2, 3, 32), (2, 1, 1, 3, 32)],
    ids=("columns", "queries", "rows", "heads", "3 dimensions", "5 dimensions"),
)
def test_masks_of_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    view = view_of(PLAIN, (29, 3))
    with pytest.raises(ValueError, match=r"mask \(.*\) does not fit 3 query tokens over 32 columns"):
        Call(query_for(view, PLAIN, 3), view, 0.2, torch.ones(shape, dtype=torch.bool))


def test_a_padded_batch_without_a_mask_is_refused() -> None:
    view = view_of(PLAIN, (200, 1), batch=3, text=padded_text("left", 201))
    with pytest.raises(ValueError, match="the batch is padded, but attention got no mask"):
        Call(query_for(view, PLAIN, 1), view, 0.2)


@pytest.mark.parametrize(
    "shape",
    [(1, 6, 1, 20), (2, 5, 1, 20), (2, 6, 1, 12), (2, 6, 20)],
    ids=("rows", "heads", "channels", "dimensions"),
)
def test_queries_of_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    view = view_of(PLAIN, (29, 3))
    with pytest.raises(ValueError, match=r"query \(.*\) does not fit keys of 2 rows, 2 heads, 20 channels"):
        Call(torch.zeros(shape), view, 0.2)


def test_more_queries_than_columns_are_refused() -> None:
    view = view_of(PLAIN, (3,))
    with pytest.raises(ValueError, match="4 query tokens, but the cache holds 3 columns"):
        Call(torch.zeros(2, 6, 4, 20), view, 0.2)


def test_the_first_kernel_that_fits_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    view = view_of(PLAIN, (60, 1))
    call = Call(query_for(view, PLAIN, 1), view, 0.2)
    assert KERNELS[-1].name == "reference" and not KERNELS[-1].why_not(call)  # something always fits
    picky = dataclasses.replace(KERNELS[-1], name="picky", why_not=lambda call: ["no", "never"])
    other = dataclasses.replace(KERNELS[-1], name="other")
    monkeypatch.setattr("kvbits.attend.KERNELS", (picky, KERNELS[-1], other))
    assert choose(call).name == "reference"
    assert explain(call) == ["picky: no, never", "reference: runs", "other: fits, but a better one runs"]
    monkeypatch.setattr("kvbits.attend.KERNELS", (picky,))
    with pytest.raises(ValueError, match="no kernel fits this call: picky: no, never"):
        attend(call)


def test_a_view_of_nothing_but_padding_is_zero() -> None:
    cache, x = LayerCache(Scheme.parse("int4")), torch.randn(1, 1, 3, 8)
    view = cache.append(x, x, Rows().extend(1, 3, torch.zeros(1, 3, dtype=torch.bool)))
    out = attend(Call(x, view, 1.0, mask=torch.zeros(1, 1, 3, 3, dtype=torch.bool)))
    assert out.shape == (1, 1, 3, 8) and not out.any()


@pytest.mark.parametrize("scheme", ["int8", "int4", "kivi2", "nf4"])
def test_attention_near_the_largest_half_stays_finite(scheme: str) -> None:
    cache, largest = LayerCache(Scheme.parse(f"{scheme},residual=0,sinks=0,block=32")), torch.finfo(torch.float16).max
    x = torch.full((1, 1, 64, 64), largest)
    x[..., ::7, :8] = largest / 3
    cache.append(x.half(), x.half())
    one = torch.zeros(1, 1, 1, 64, dtype=torch.float16)
    view = cache.append(one, torch.full_like(one, largest))
    for mask in (None, torch.ones(1, 1, 1, 65, dtype=torch.bool)):
        assert bool(attend(Call(one, view, 1.0, mask=mask)).isfinite().all())
