"""Real weights and real text: SmolLM2-135M-Instruct reads and continues Python's own help topics."""

from __future__ import annotations

import pydoc_data.topics
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers as hf

import kvbits
from kvbits.hf.cache import KVCache
from kvbits.hf.names import cache_name

pytestmark = pytest.mark.model

TOKENS, PROMPT, CHUNK = 512, 192, 16
OPTIONS = "residual=32,block=32"
NAMES = ("exact", "int8", "int4", "int2", "kivi4", "kivi2")


def ids_of(tokenizer: Any, tokens: int) -> torch.Tensor:
    """The first tokens ``[1, tokens]`` of the longer help topics."""
    topics = pydoc_data.topics.topics
    text = "\n".join(topics[name] for name in ("assignment", "with", "yield"))
    return tokenizer(text, return_tensors="pt").input_ids[:, :tokens]


@dataclass(frozen=True)
class Reading:
    """The text read through a cache, a prompt and then chunks: what the model expected after the prompt, and the
    cache that it read from."""

    logprobs: torch.Tensor
    cache: hf.Cache


def read(model: hf.PreTrainedModel, ids: torch.Tensor, cache: hf.Cache) -> Reading:
    logits = []
    with torch.no_grad():
        model(input_ids=ids[:, :PROMPT], use_cache=True, **{cache_name(model): cache})
        for first in range(PROMPT, ids.shape[1], CHUNK):
            new = ids[:, first : first + CHUNK]
            logits.append(model(input_ids=new, use_cache=True, **{cache_name(model): cache}).logits)
    return Reading(torch.cat(logits, dim=1)[0].log_softmax(-1), cache)


@pytest.fixture(scope="module")
def readings(smollm2: Any) -> dict[str, Reading]:
    model, tokenizer = smollm2
    ids = ids_of(tokenizer, TOKENS)
    found = {"stock": read(kvbits.disable(model), ids, hf.DynamicCache(config=model.config))}
    for name in NAMES:
        scheme = name if name == "exact" else f"{name},{OPTIONS}"
        found[name] = read(model, ids, kvbits.cache_for(model, scheme))
    kvbits.disable(model)
    return found


def divergence(reading: Reading, right: Reading) -> float:
    """Mean over the tokens of KL(right || reading), in nats."""
    return float((right.logprobs.exp() * (right.logprobs - reading.logprobs)).sum(-1).double().mean())


def test_the_exact_scheme_is_the_stock_cache_bit_for_bit(readings: dict[str, Reading]) -> None:
    assert torch.equal(readings["exact"].logprobs, readings["stock"].logprobs)


def test_quality_follows_the_bits(readings: dict[str, Reading]) -> None:
    kl = {name: divergence(readings[name], readings["stock"]) for name in NAMES}
    assert kl["exact"] == 0
    # Noise falls as the square of the distance between levels: 4 bits less cost far more than a factor of 10.
    assert 0 < kl["int8"] < kl["int4"] / 10
    assert kl["int4"] < kl["int2"] / 10
    assert kl["int8"] < 1e-3
    # Keys per channel are what makes 2 bits usable (KIVI, section 3), and 4 bits the recommended ones.
    assert kl["int4"] < kl["kivi2"] < kl["int2"] / 4
    assert kl["int8"] < kl["kivi4"] < kl["int4"] / 2


LAYERS, HEADS, CHANNELS = 30, 3, 64
SINKS, RESIDUAL, BLOCK = 4, 32, 32


@pytest.mark.parametrize("name", NAMES[1:])
def test_bytes_are_real_and_equal_the_arithmetic(readings: dict[str, Reading], name: str) -> None:
    cache = readings[name].cache
    assert isinstance(cache, KVCache)
    blocks = (TOKENS - SINKS - RESIDUAL) // BLOCK
    bits = int(name[-1])
    # Scales of one block of one head: kivi has one a channel for its keys, and two groups a token for its values.
    key_scales, value_scales = (CHANNELS, 2 * BLOCK) if name.startswith("kivi") else (BLOCK, BLOCK)
    count, per_head = cache.nbytes, LAYERS * HEADS
    assert count.codes == per_head * blocks * 2 * BLOCK * CHANNELS * bits // 8
    assert count.scales == count.zeros == per_head * blocks * (key_scales + value_scales) * 2
    assert count.sinks == per_head * 2 * SINKS * CHANNELS * 4
    assert count.residual == per_head * 2 * (TOKENS - SINKS - blocks * BLOCK) * CHANNELS * 4
    assert count.other == 0
    storages: dict[int, int] = {}
    for layer in cache.packed_layers:
        core = layer.core
        assert core.store is not None
        for tensor in (core.keys, core.values, core.store.pool, core.store.table):
            assert tensor is not None
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    assert count.total == sum(storages.values())
    elements = per_head * 2 * TOKENS * CHANNELS
    assert cache.bits_per_element == 8 * count.total / elements
    assert cache.bits_per_element < 32 / 2  # half of the exact float32 cache, all of its exact tokens included


def test_greedy_tokens_under_8_bits_are_those_of_the_exact_cache(smollm2: Any) -> None:
    """After a prompt whose continuation has no near tie: its closest second choice is 0.09 behind."""
    model, tokenizer = smollm2
    ids = ids_of(tokenizer, 400)
    options = dict(attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
    right = kvbits.disable(model).generate(ids, **options)
    cache = kvbits.cache_for(model, f"int8,{OPTIONS}")
    got = model.generate(ids, **options, **{cache_name(model): cache})
    kvbits.disable(model)
    assert all(layer.core.store.longest == 11 for layer in cache.packed_layers)
    assert torch.equal(got, right)


@pytest.mark.parametrize("scheme", ["kivi4", "int4", "fp8"])
def test_a_question_is_answered(smollm2: Any, scheme: str) -> None:
    model, tokenizer = smollm2
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    cache = kvbits.cache_for(model, f"{scheme},residual=0,block=32")
    got = model.generate(**inputs, max_new_tokens=12, do_sample=False, **{cache_name(model): cache})
    kvbits.disable(model)
    assert all(layer.core.store.longest > 0 for layer in cache.packed_layers)
    assert "Paris" in tokenizer.decode(got[0, inputs["input_ids"].shape[1] :])
