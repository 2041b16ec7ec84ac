"""Padding through a model: never stored, never seen, and never mistaken; and every kind of mask reaches attention.

A padded row must store and compute what the same row does alone. The models run in float64, so that the rounding of
larger batches does not move a value to another code.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import transformers as hf
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

import kvbits
import stored
import zoo
from kvbits.hf import attention as hf_attention
from kvbits.hf.cache import KVCache
from kvbits.hf.names import cache_name
from zoo import feed

LOSSLESS = "exact,residual=4,block=32"
SCHEMES = [
    f"{name},residual=4,block=32" for name in ("exact", "int8", "int4-gs32", "kivi4", "kivi2", "nf4", "fp8", "hqq4")
]
COLUMNS = 80
CHUNKS = (50, 1, 1, 1, 20, 7)

pytestmark = pytest.mark.usefixtures("one_thread")


def patterns() -> dict[str, torch.Tensor]:
    """Masks ``[3, COLUMNS]``, 1 for text; the last row is whole."""
    masks = {name: torch.ones(3, COLUMNS, dtype=torch.int64) for name in ("left", "right", "holes", "all-of-a-prompt")}
    masks["left"][0, :7] = masks["left"][1, :41] = 0
    masks["right"][0, 45:50] = masks["right"][1, 20:50] = 0  # of the prompt; text goes on after it
    masks["right"][0, 78:] = 0
    masks["holes"][0, [0, 3, 4, 30, 49, 51, 60, 79]] = 0
    masks["holes"][1, 10:40] = masks["holes"][1, 55:70:2] = 0
    masks["all-of-a-prompt"][0, :50] = 0
    masks["all-of-a-prompt"][1, :52] = 0
    return masks


PATTERNS = patterns()


@pytest.fixture(scope="module")
def llama() -> hf.PreTrainedModel:
    return zoo.build("llama", torch.float64)


@pytest.fixture(scope="module")
def gemma3() -> hf.PreTrainedModel:
    return zoo.build("gemma3", torch.float64)


def alone(mask: torch.Tensor) -> tuple[int, ...]:
    """The chunks that a row with ``mask [COLUMNS]`` has when it stands alone."""
    ends = torch.tensor(CHUNKS).cumsum(0).tolist()
    counts = [int(mask[end - chunk : end].sum()) for chunk, end in zip(CHUNKS, ends, strict=True)]
    return tuple(count for count in counts if count)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_padded_row_is_what_it_is_alone(llama: hf.PreTrainedModel, scheme: str, pattern: str) -> None:
    ids, mask = zoo.prompt(3, COLUMNS), PATTERNS[pattern]
    cache = kvbits.cache_for(llama, scheme)
    logits = feed(llama, cache, ids * mask, mask, CHUNKS)
    for row in range(3):
        text = mask[row].bool()
        single = kvbits.cache_for(llama, scheme)
        right = feed(llama, single, ids[row : row + 1, text], mask[row : row + 1, text], alone(mask[row]))
        assert (logits[row, text] - right[0]).abs().max() <= 1e-9 * right.abs().max()
        for layer, single_layer in zip(cache.packed_layers, single.packed_layers, strict=True):
            core, single_core = layer.core, single_layer.core
            assert core.rows.counts[row] == int(text.sum())
            if not scheme.startswith("exact"):
                assert torch.equal(stored.blocks_of(core, row), stored.blocks_of(single_core, 0))
            # Larger batches are multiplied in another order: what is exact may differ by the rounding of float64.
            got, right_tokens = stored.exact_of(core, row), stored.exact_of(single_core, 0)
            torch.testing.assert_close(got, right_tokens, rtol=1e-9, atol=1e-9)
            for buffer in (core.keys, core.values):
                assert not buffer[row, :, core.held[row] :].any()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "falcon-alibi"])
def test_generate_pads_as_the_stock_cache_does(name: str, implementation: str, side: str) -> None:
    ids, mask = zoo.padded_prompt(2, 44)
    if side == "right":
        mask = torch.ones_like(ids)
        mask[0, 37:] = 0
        ids = zoo.prompt(2, 44) * mask
    stock = zoo.build(name, attn_implementation=implementation)
    right = stock.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
    model = zoo.build(name, attn_implementation=implementation)
    for scheme in ("exact", LOSSLESS):
        cache = kvbits.cache_for(model, scheme)
        options = {cache_name(model): cache, "max_new_tokens": 8, "do_sample": False}
        assert torch.equal(model.generate(ids, attention_mask=mask, **options), right)
        assert all(layer.core.rows.counts == (44, 51) for layer in cache.packed_layers)


# -- what is not finite ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_bad_values_in_padding_do_not_spread(scheme: str, bad: float) -> None:
    """Keys and values of padding in a later chunk are garbage; text computes and stores what it does without."""
    model = zoo.build("llama", torch.float64)
    ids, mask = zoo.prompt(3, COLUMNS), PATTERNS["holes"].clone()
    mask[:, :50] = 1
    clean = kvbits.cache_for(model, scheme)
    right = feed(model, clean, ids * mask, mask, CHUNKS)
    with torch.no_grad():
        model.get_input_embeddings().weight[0] = bad  # of the padding id
    cache = kvbits.cache_for(model, scheme)
    logits = feed(model, cache, ids * mask, mask, CHUNKS)
    assert not torch.isfinite(logits[mask == 0]).any()
    assert torch.equal(logits[mask == 1], right[mask == 1])
    for layer, clean_layer in zip(cache.packed_layers, clean.packed_layers, strict=True):
        for row in range(3):
            stored.assert_same(stored.row_of(layer.core, row), stored.row_of(clean_layer.core, row))
        assert torch.isfinite(layer.keys).all()
        assert torch.isfinite(layer.values).all()


@pytest.mark.parametrize("scheme", ["int4", "kivi2"])
def test_bad_values_in_text_raise_before_they_are_packed(scheme: str) -> None:
    model = zoo.build("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[0] = float("nan")
    cache = kvbits.cache_for(model, f"{scheme},residual=4,block=32")
    with pytest.raises(ValueError, match=r"layer 1: .* keys to be packed are NaN, infinite"), torch.no_grad():
        model(input_ids=zoo.prompt(1, 60), use_cache=True, **{cache_name(model): cache})


# -- wrong masks -------------------------------------------------------------------------------------------------------


def step(model: hf.PreTrainedModel, cache: hf.Cache, mask: Any, tokens: int = 1, batch: int = 3) -> torch.Tensor:
    with torch.no_grad():
        new = {cache_name(model): cache, "attention_mask": mask, "use_cache": True}
        return model(input_ids=zoo.prompt(batch, tokens, seed=9), **new).logits


@pytest.fixture(params=["exact", LOSSLESS])
def padded(request: pytest.FixtureRequest, llama: hf.PreTrainedModel) -> KVCache:
    """A cache of three rows and 50 columns, with padding."""
    cache = kvbits.cache_for(llama, request.param)
    mask = PATTERNS["left"][:, :50]
    feed(llama, cache, zoo.prompt(3, 50) * mask, mask, (50,))
    return cache


TOO_LONG = torch.cat([PATTERNS["left"][:, :50], torch.ones(3, 2, dtype=torch.int64)], dim=1)
WRONG_MASKS: list[tuple[torch.Tensor | None, str]] = [
    (None, "padded, but this call has no attention_mask"),
    (torch.ones(3, 51, dtype=torch.int64), "calls columns text that an earlier call called padding"),
    *((TOO_LONG[:, -n:], r"must cover the columns in the cache and the new ones: \(3, 50 \+ 1\)") for n in (1, 50, 52)),
]


def test_a_wrong_mask_is_refused_and_changes_nothing(llama: hf.PreTrainedModel, padded: KVCache) -> None:
    for mask, words in WRONG_MASKS:
        with pytest.raises(ValueError, match=words):
            step(llama, padded, mask)
    fresh = kvbits.cache_for(llama, str(padded.scheme))
    mask = TOO_LONG[:, :51]
    feed(llama, fresh, zoo.prompt(3, 50) * mask[:, :50], mask[:, :50], (50,))
    assert torch.equal(step(llama, padded, mask), step(llama, fresh, mask))


def test_text_can_be_hidden_later(llama: hf.PreTrainedModel, padded: KVCache) -> None:
    """A mask may hide more of the past than padding; what it hides is stored, but not seen by this call."""
    stock = zoo.build("llama", torch.float64)
    cache = hf.DynamicCache(config=stock.config)
    mask = PATTERNS["left"][:, :50]
    feed(stock, cache, zoo.prompt(3, 50) * mask, mask, (50,))
    mask = torch.cat([mask, mask.new_ones(3, 1)], dim=1)
    mask[:, 42:46] = 0
    right = step(stock, cache, mask)
    assert (step(llama, padded, mask) - right).abs().max() <= 1e-9 * right.abs().max()
    mask = torch.cat([PATTERNS["left"][:, :50], mask.new_ones(3, 2)], dim=1)
    right = step(stock, cache, mask)
    assert (step(llama, padded, mask) - right).abs().max() <= 1e-9 * right.abs().max()


# -- masks of other kinds ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32], ids=str)
def test_masks_of_any_dtype(llama: hf.PreTrainedModel, dtype: torch.dtype) -> None:
    mask = PATTERNS["left"]
    right = feed(llama, kvbits.cache_for(llama, LOSSLESS), zoo.prompt(3, COLUMNS) * mask, mask, CHUNKS)
    positions = zoo.positions(mask)
    cache, done = kvbits.cache_for(llama, LOSSLESS), 0
    for chunk in CHUNKS:
        new = slice(done, done + chunk)
        done += chunk
        with torch.no_grad():
            got = llama(
                input_ids=(zoo.prompt(3, COLUMNS) * mask)[:, new], attention_mask=mask[:, :done].to(dtype),
                position_ids=positions[:, new], use_cache=True, **{cache_name(llama): cache},
            ).logits  # fmt: skip
        text = mask[:, new] == 1
        assert torch.equal(got[text], right[:, new][text])


@pytest.mark.parametrize("kind", ["bool", "additive"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_mask_of_four_dimensions(implementation: str, kind: str) -> None:
    """A tree of drafts: each of the new tokens sees the past and a part of the new ones; heads may differ."""
    if kind == "bool" and implementation == "eager":
        pytest.skip("eager attention adds its masks")
    new, past = 6, 60
    seen = torch.ones(2, 1, new, past + new, dtype=torch.bool)
    seen[..., past:] = torch.eye(new, dtype=torch.bool) | (torch.arange(new) < 2)
    seen[0, :, :, 10:20] = False
    mask = seen
    if kind == "additive":
        mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
        mask[1, :, :, 30:40] = -0.7
    logits = {}
    for ours in (False, True):
        model = zoo.build("llama", attn_implementation=implementation)
        cache = kvbits.cache_for(model, LOSSLESS) if ours else hf.DynamicCache(config=model.config)
        step(model, cache, None, tokens=past, batch=2)
        logits[ours] = step(model, cache, mask, tokens=new, batch=2)
        if ours:
            assert {layer.trace.outcome for layer in cache.packed_layers} == {zoo.RUNS}
    assert (logits[True] - logits[False]).abs().max() <= 1e-5 * logits[False].abs().max()


@pytest.mark.parametrize("implementation, ours", [("sdpa", "kvbits"), ("eager", "kvbits_eager")])
def test_the_mask_reaches_attention(implementation: str, ours: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers passes no mask at all to an attention function whose name its mask interface does not know."""
    model = zoo.build("llama", attn_implementation=implementation)
    cache = kvbits.cache_for(model, LOSSLESS)
    assert str(model.config._attn_implementation) == ours
    assert ALL_MASK_ATTENTION_FUNCTIONS[ours] is ALL_MASK_ATTENTION_FUNCTIONS[implementation]
    stock_masks, calls = [], []

    def stock_function(module: torch.nn.Module, stock: str) -> Any:
        function = stock_of(module, stock)

        def spy(module: Any, q: Any, k: Any, v: Any, mask: Any, **options: Any) -> Any:
            stock_masks.append(mask)
            return function(module, q, k, v, mask, **options)

        return spy

    def choose(call: Any) -> Any:
        calls.append(call)
        return choose_kernel(call)

    stock_of, choose_kernel = hf_attention.stock_function, hf_attention.choose
    monkeypatch.setattr(hf_attention, "stock_function", stock_function)
    monkeypatch.setattr(hf_attention, "choose", choose)
    mask = PATTERNS["left"]
    feed(model, cache, zoo.prompt(3, COLUMNS) * mask, mask, CHUNKS)
    assert len(stock_masks) == len(cache.layers)
    assert len(calls) == (len(CHUNKS) - 1) * len(cache.layers)
    hidden = (lambda m: ~m) if implementation == "sdpa" else (lambda m: m < -1e30)
    assert all(m is not None and bool(hidden(m)[1, 0, -1, :41].all()) for m in stock_masks)
    assert all(c.mask is not None and bool(hidden(c.mask)[1, 0, -1, :41].all()) for c in calls)
    monkeypatch.setattr(hf_attention, "choose", lambda call: choose_kernel(dataclasses.replace(call, mask=None)))
    with pytest.raises(ValueError, match="padded, but attention got no mask"):
        step(model, cache, torch.cat([mask, mask.new_ones(3, 1)], dim=1))
