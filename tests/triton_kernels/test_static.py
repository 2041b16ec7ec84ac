"""A layer of fixed capacity holds, packs and attends as ``LayerCache`` does; on a GPU also in a captured graph."""

from __future__ import annotations

import pytest
import torch

import kvbits
import zoo
from kvbits.attend import Call, reference
from kvbits.backends import why_no_triton
from kvbits.hf.names import cache_name
from kvbits.layer.cache import LayerCache
from kvbits.layer.frozen import FrozenLayerCache, why_not
from kvbits.schemes.scheme import Scheme
from kvbits.store.rows import Rows
from kvbits.transform.rotary import Rotary
from triton_calls import DEVICE, GPU, needs_triton
from views import random

pytestmark = pytest.mark.usefixtures("interpreted")

SMALL = "residual=8,sinks=3,block=32"


def tokens(count: int, seed: int, batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    return random(batch, 2, count, 32, seed=seed).to(DEVICE), random(batch, 2, count, 16, seed=seed + 1).to(DEVICE)


def prefilled(scheme: str, count: int) -> LayerCache:
    rotary = Rotary(10_000.0 ** -(torch.arange(16) / 16))
    cache = LayerCache(Scheme.parse(f"{scheme},{SMALL}"), rotary=rotary)
    cache.append(*tokens(count, seed=1))
    return cache


@needs_triton
@pytest.mark.parametrize("scheme", ("kivi4", "int2", "fp8", "fp8-static", "k=nf4,v=int3", "lm2,centred"))
def test_steps_are_those_of_a_growing_cache(scheme: str) -> None:
    """Over a packing: every bit that is stored, and what attention gives before and after it."""
    cache = prefilled(scheme, 80)
    layer = FrozenLayerCache(cache, capacity=160)
    for step in range(30):
        key, value = tokens(1, seed=100 + 2 * step)
        view = cache.append(key, value)
        layer.step(key, value)
        if step in (26, 27):
            query = random(2, 6, 1, 32, seed=step).to(DEVICE)
            expected = reference.run(Call(query, view, 0.2))
            torch.testing.assert_close(layer.attend(query, 0.2), expected, rtol=1e-4, atol=1e-5)
        layer.advance()
        held, blocks = int(layer.held[0]), int(layer.counts[0])
        assert (held, blocks) == (cache.held[0], cache.store.longest)
        assert torch.equal(layer.keys[:, :, :held], cache.keys[:, :, :held])
        assert torch.equal(layer.values[:, :, :held], cache.values[:, :, :held])
        assert not layer.keys[:, :, held:].any()
    for slot in cache.store.record.keys + cache.store.record.values:
        where = slice(slot.offset, slot.offset + slot.part.nbytes)
        assert torch.equal(layer.pool[: 2 * blocks, :, where], cache.store.pool[: 2 * blocks, :, where])
    assert blocks == 3


@needs_triton
@pytest.mark.parametrize("scheme", ("k=fp8-static,v=int2,centred", "k=nuq3,v=nuq2-qnorm", "k=int4-static,v=nf4"))
def test_rows_of_different_lengths_and_what_is_fitted_later(scheme: str) -> None:
    """Nothing is packed at first; rows pack at different steps."""
    cache = LayerCache(Scheme.parse(f"{scheme},{SMALL}"), rotary=Rotary(10_000.0 ** -(torch.arange(16) / 16)))
    text = torch.ones(2, 30, dtype=torch.bool, device=DEVICE)
    text[0, :21] = False
    rows = Rows().extend(2, 30, text)
    cache.append(*tokens(30, seed=1), rows)
    layer = FrozenLayerCache(cache, capacity=80)
    for step in range(45):
        key, value = tokens(1, seed=100 + 2 * step)
        rows = rows.extend(2, 1)
        view = cache.append(key, value, rows)
        layer.step(key, value)
        if step in (0, 13, 14, 40):
            query = random(2, 6, 1, 32, seed=step).to(DEVICE)
            expected = reference.run(Call(query, view, 0.2, mask=rows.valid[:, None, None]))
            torch.testing.assert_close(layer.attend(query, 0.2), expected, rtol=1e-4, atol=1e-5)
        layer.advance()
    assert layer.counts.tolist() == [1, 2] and layer.held.tolist() == [22, 11]


@needs_triton
def test_beams_that_were_reordered_are_put_in_order() -> None:
    cache = prefilled("int4", 80)
    cache.select_rows(torch.tensor([1, 0]))
    layer = FrozenLayerCache(cache, capacity=100)
    key, value = tokens(1, seed=5)
    view = cache.append(key, value)
    layer.step(key, value)
    query = random(2, 2, 1, 32, seed=9).to(DEVICE)
    expected = reference.run(Call(query, view, 0.2))
    torch.testing.assert_close(layer.attend(query, 0.2), expected, rtol=1e-4, atol=1e-5)


@needs_triton
def test_the_operator_has_a_fake_and_a_schema() -> None:
    from kvbits.attend.operator import attend_static

    layer = FrozenLayerCache(prefilled("int4", 80), capacity=100)
    layer.step(*tokens(1, seed=5))
    query = random(2, 4, 1, 32, seed=9).to(DEVICE)
    inputs = (query, layer.keys, layer.values, layer.pool, layer.table, layer.counts, layer.held)
    torch.library.opcheck(
        attend_static,
        (*inputs, [], "", None, str(layer.scheme), True, False, 0.2, None),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.skipif(not GPU, reason="CUDA graphs need a GPU")
def test_a_captured_step_stays_right_while_the_context_grows() -> None:
    cache = prefilled("kivi4", 80)
    layer = FrozenLayerCache(cache, capacity=160)
    key, value = tokens(1, seed=5)
    query = random(2, 6, 1, 32, seed=9).to(DEVICE)
    layer.attend(query, 0.2)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.step(key, value)
        out = layer.attend(query, 0.2)
    for step in range(70):
        fresh_key, fresh_value = tokens(1, seed=100 + 2 * step)
        key.copy_(fresh_key), value.copy_(fresh_value)
        graph.replay()
        expected = reference.run(Call(query, cache.append(key, value), 0.2))
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
        layer.advance()


@pytest.mark.skipif(not GPU, reason="torch.compile of the step is tested where the kernel compiles")
def test_a_compiled_step() -> None:
    layer = FrozenLayerCache(prefilled("kivi4", 80), capacity=160)
    layer.step(*tokens(1, seed=5))
    query = random(2, 6, 1, 32, seed=9).to(DEVICE)
    step = torch.compile(lambda query: 2 * layer.attend(query, 0.2), fullgraph=True)
    torch.testing.assert_close(step(query), 2 * layer.attend(query, 0.2))


@needs_triton
def test_a_whole_model_in_one_graph() -> None:
    """Through a packing, by the kernel that reads lengths on the device."""
    model, ids = zoo.build("llama").to(DEVICE), zoo.prompt(1, 40).to(DEVICE)
    cache, name = kvbits.cache_for(model, "int4,residual=6,sinks=2,block=32"), cache_name(model)
    torch._dynamo.reset()
    step = torch.compile(model.forward, backend="eager", fullgraph=True)
    with torch.no_grad():
        model(input_ids=ids[:, :-1], **{name: cache})
        frozen, token = kvbits.freeze(cache, capacity=60), ids[:, -1:].clone(memory_format=torch.contiguous_format)
        for _ in range(2):
            expected = model(input_ids=token, **{name: cache}).logits
            got = step(input_ids=token, **{name: frozen}).logits
            frozen.advance()
            torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)
            token = expected[:, -1].argmax(-1, keepdim=True)
    assert frozen.layers[0].core.counts.tolist() == [1]


def test_a_full_layer_says_so() -> None:
    layer = FrozenLayerCache(prefilled("int4", 80), capacity=81)
    layer.step(*tokens(1, seed=3))
    layer.advance()
    layer.step(*tokens(1, seed=5))
    with pytest.raises(ValueError, match="the capacity of 81 tokens is full"):
        layer.advance()


def test_what_is_not_finite_is_not_packed() -> None:
    layer = FrozenLayerCache(prefilled("int4", 42), capacity=100)
    layer.keys[0, 0, 5, 0] = torch.nan
    layer.step(*tokens(1, seed=3))
    with pytest.raises(ValueError, match="1 of the keys to be packed are NaN, infinite or above"):
        layer.advance()


def test_too_little_capacity() -> None:
    with pytest.raises(ValueError, match="holds 80 tokens, more than the capacity of 79"):
        FrozenLayerCache(prefilled("int4", 80), capacity=79)


@pytest.mark.parametrize(
    ("cache", "reason"),
    [
        (lambda: LayerCache(Scheme.parse("int4")), "it is empty: prefill it first"),
        (lambda: _filled(LayerCache(Scheme.parse("exact"))), "exact packs nothing"),
        (
            lambda: _filled(LayerCache(Scheme.parse("int4"), window=9)),
            "blocks behind a sliding window are dropped",
        ),
        (lambda: _filled(LayerCache(Scheme.parse("k=exact,v=int4"))), "keys: packed blocks of exact elements"),
        (lambda: _mixed(), "torch.float32 keys and torch.bfloat16 values"),
    ],
    ids=("empty", "exact", "window", "exact keys", "two types"),
)
def test_what_cannot_have_a_fixed_capacity(cache: object, reason: str) -> None:
    made = cache()
    if why_no_triton(torch.device(DEVICE)) and "keys" in reason:
        pytest.skip("what the Triton kernel alone cannot do")
    assert why_not(made) == [reason]
    with pytest.raises(ValueError, match="cannot have a fixed capacity"):
        FrozenLayerCache(made, 100)


def _filled(cache: LayerCache) -> LayerCache:
    cache.append(*tokens(20, seed=1))
    return cache


def _mixed() -> LayerCache:
    cache = LayerCache(Scheme.parse("int4"))
    keys, values = tokens(20, seed=1)
    cache.append(keys, values.bfloat16())
    return cache
