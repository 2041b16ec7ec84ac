"""Modes of torch around a model with a kvbits cache: autocast, inference mode, gradients, compilation."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf

import kvbits
import stored
import zoo
from kvbits.attend import Call
from kvbits.cache import LayerCache
from kvbits.hf.attach import cache_name
from kvbits.hf.attention import attention
from kvbits.hf.handle import Pair, Trace
from kvbits.scheme import Scheme

LOSSLESS = "exact,residual=4,block=32"
INT8 = "int8,residual=4,block=32"

pytestmark = pytest.mark.usefixtures("one_thread")


# -- autocast ----------------------------------------------------------------------------------------------------------


def under_autocast(model: hf.PreTrainedModel, cache: hf.Cache) -> torch.Tensor:
    """Logits of a prompt, of a chunk and of steps."""
    ids, mask = zoo.padded_prompt(2, 80)
    logits = []
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        for begin, end in ((0, 50), (50, 70), *((i, i + 1) for i in range(70, 80))):
            new = {cache_name(model): cache, "attention_mask": mask[:, :end]}
            logits.append(model(input_ids=ids[:, begin:end], **new).logits.float())
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "phi3", "gpt2", "falcon-new", "deepseek-v3"])
def test_models_run_under_autocast(name: str) -> None:
    """Where rotary embeddings leave keys in float32 beside values in bfloat16, as the stock cache takes them."""
    model = zoo.build(name)
    exact = under_autocast(model, kvbits.cache_for(model, "exact"))
    right = under_autocast(zoo.build(name), hf.DynamicCache(config=model.config))
    text = zoo.padded_prompt(2, 80)[1].bool()
    assert torch.equal(exact[text], right[text])
    cache = kvbits.cache_for(model, LOSSLESS)
    packed = under_autocast(model, cache)
    assert all(layer.core.store.longest > 0 for layer in cache.packed_layers)
    # A few roundings to bfloat16, of which ours leaves out those inside of attention.
    assert (packed - right)[text].abs().max() <= 2**-5 * right[text].abs().max()
    if name in ("llama", "qwen3", "gemma3", "phi3"):
        core = cache.packed_layers[0].core
        assert (core.keys.dtype, core.values.dtype) == (torch.float32, torch.bfloat16)
        slots = core.store.record.keys + core.store.record.values
        assert [slot.part.dtype for slot in slots] == [torch.float32, torch.bfloat16]


def test_autocast_generates() -> None:
    model, (ids, mask) = zoo.build("llama"), zoo.padded_prompt(2, 40)
    options = dict(attention_mask=mask, max_new_tokens=12, do_sample=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        right = model.generate(ids, **options)
        for mode in ({}, {"num_beams": 3}):
            cache = kvbits.cache_for(model, INT8)
            model.generate(ids, **options, **mode, **{cache_name(model): cache})
            cache.crop(-20)
        got = model.generate(ids, **options, **{cache_name(model): kvbits.cache_for(model, "exact")})
    assert torch.equal(got, right)


@pytest.mark.parametrize("scheme", ["int4", "kivi2", "hqq4", "nf4", "fp8", "exact"])
def test_what_is_stored_and_attended_does_not_depend_on_autocast(scheme: str) -> None:
    """Its sums stay float32: autocast would make bfloat16 of them."""
    keys, values = torch.randn(2, 1, 2, 300, 64).unbind()
    query, module = torch.randn(1, 6, 1, 64), torch.nn.Module()
    module.config = hf.LlamaConfig()
    results = []
    for enabled in (False, True):
        core = LayerCache(Scheme.parse(f"{scheme},residual=4,block=32"))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            core.append(keys, values + 3)
            view = core.append(keys[:, :, :1], values[:, :, :1])
            out, _ = attention(module, query, *Pair(view, Trace()).handles(), None, stock="sdpa")
            dense = Pair(view, Trace()).dense()
            core.crop(100)
        results.append((*stored.row_of(core, 0), out, *dense))
    stored.assert_same(*results)
    assert Call(query, view, 1.0).query.dtype == torch.float32


def test_types_of_keys_and_of_values_stay_what_they_are() -> None:
    cache = LayerCache(Scheme.parse("int4"), name="layer 2")
    x = torch.randn(1, 2, 300, 64)
    cache.append(x, x.bfloat16())
    keys, values = cache.view().dense()
    assert (keys.dtype, values.dtype) == (torch.float32, torch.bfloat16)
    with pytest.raises(
        ValueError, match=r"layer 2: the cache holds keys torch\.float32 and values torch\.bfloat16 on .*autocast"
    ):
        cache.append(x, x)


# -- inference mode ----------------------------------------------------------------------------------------------------


def call(model: hf.PreTrainedModel, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, **{cache_name(model): cache})[0]


COPIES: dict[str, Callable[[Any], Any]] = {
    "copied": copy.deepcopy,
    "pickled": lambda cache: pickle.loads(pickle.dumps(cache)),
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("scheme", ["exact", INT8])
@pytest.mark.parametrize("padding", [0, 7])
def test_a_cache_copied_under_inference_mode_goes_on_in_any_mode(scheme: str, how: str, padding: int) -> None:
    model, (ids, mask) = zoo.build("gemma3"), zoo.padded_prompt(2, 60, padding)
    results = []
    for mode in (torch.inference_mode, torch.no_grad):
        cache = kvbits.cache_for(model, scheme)
        with mode():
            model(input_ids=ids[:, :44], attention_mask=mask[:, :44], **{cache_name(model): cache})
            cache = COPIES[how](cache)
        logits = []
        for end in range(45, 61):
            with torch.no_grad():
                new = {cache_name(model): cache, "attention_mask": mask[:, :end]}
                logits.append(model(input_ids=ids[:, end - 1 : end], **new).logits)
            if end == 47:
                cache.reorder_cache(torch.tensor([1, 1]))
                ids, mask = ids[[1, 1]], mask[[1, 1]]
        results.append(torch.cat(logits))
        ids, mask = zoo.padded_prompt(2, 60, padding)
    assert torch.equal(*results)


def test_a_layer_copied_under_inference_mode_can_be_cropped() -> None:
    core = LayerCache(Scheme.parse(INT8))
    core.append(*torch.randn(2, 1, 2, 300, 64))
    with torch.inference_mode():
        twin = copy.deepcopy(core)
    for each in (core, twin):
        each.crop(2)
        each.crop(100)
    stored.assert_same(stored.row_of(core, 0), stored.row_of(twin, 0))
