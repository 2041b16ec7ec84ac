"""Modes of torch around a model with a kvbits cache: autocast, inference mode, gradients, compilation."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import kvbits
import stored
import zoo
from kvbits.attend import Call, attend
from kvbits.attend.dense import dense
from kvbits.hf.attention import attention
from kvbits.hf.handle import Pair, Trace
from kvbits.hf.names import cache_name
from kvbits.layer.cache import LayerCache
from kvbits.schemes.scheme import Scheme

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
            assert torch.equal(attend(Call(query, view, 0.125)).transpose(1, 2), out)
            shown = Pair(view, Trace()).dense()
            core.crop(100)
        results.append((*stored.row_of(core, 0), out, *shown))
    stored.assert_same(*results)
    assert Call(query, view, 1.0).query.dtype == torch.float32


def test_types_of_keys_and_of_values_stay_what_they_are() -> None:
    cache = LayerCache(Scheme.parse("int4"), name="layer 2")
    x = torch.randn(1, 2, 300, 64)
    cache.append(x, x.bfloat16())
    keys, values = dense(cache.view())
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


# -- gradients ---------------------------------------------------------------------------------------------------------

CHUNKS = ((0, 44), (44, 47), *((i, i + 1) for i in range(47, 60)))
PASSING = ["llama", "gemma3", "falcon-new", "diffllama", "gpt-oss", "bloom", "qwen3-next"]


@pytest.mark.parametrize("scheme", ["exact", INT8])
@pytest.mark.parametrize("name", PASSING)
def test_calls_run_with_gradients_on_as_without(name: str, scheme: str) -> None:
    model, ids = zoo.build(name), zoo.prompt(2, 60)
    caches = [kvbits.cache_for(model, scheme) for _ in range(2)]
    for begin, end in CHUNKS:
        with torch.no_grad():
            right = call(model, caches[0], ids[:, begin:end])
        got = call(model, caches[1], ids[:, begin:end])
        assert got.requires_grad
        # With gradients on, torch may choose another order of the same sums.
        assert (got - right).abs().max() <= 1e-5 * right.abs().max()


@pytest.mark.parametrize("scheme", ["exact", INT8])
@pytest.mark.parametrize("name", PASSING)
def test_a_backward_through_a_cache_is_refused(name: str, scheme: str) -> None:
    """Over exact and over packed history, after further calls and without: never a part of a gradient."""
    model, ids = zoo.build(name), zoo.prompt(2, 60)
    for last in (2, 3, len(CHUNKS)):
        cache = kvbits.cache_for(model, scheme)
        losses = [call(model, cache, ids[:, begin:end]).square().mean() for begin, end in CHUNKS[:last]]
        for loss in (losses[-1], sum(losses)):
            with pytest.raises(RuntimeError, match=r"gradients do not flow through a kvbits cache.* torch\.no_grad"):
                loss.backward(retain_graph=True)


def test_a_prompt_alone_has_its_gradients() -> None:
    ids, gradients = zoo.prompt(2, 60), []
    for scheme in (None, "exact", INT8):
        model = zoo.build("llama")
        cache = hf.DynamicCache(config=model.config) if scheme is None else kvbits.cache_for(model, scheme)
        call(model, cache, ids).square().mean().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for got in gradients[1:]:
        stored.assert_same(tuple(got), tuple(gradients[0]))


def test_gradients_of_a_prompt_are_not_lost_by_later_calls_without() -> None:
    """A soft prompt over frozen weights: what later calls see of it has a gradient, which the cache does not have."""
    model = zoo.build("llama").requires_grad_(False)
    soft = torch.randn(1, 50, 48, requires_grad=True)
    for scheme in ("exact", INT8):
        cache = kvbits.cache_for(model, scheme)
        model(inputs_embeds=soft, **{cache_name(model): cache})
        loss = call(model, cache, zoo.prompt(1, 3)).square().mean()
        with pytest.raises(RuntimeError, match="gradients do not flow"):
            loss.backward()
        cache.reset()
        call(model, cache, zoo.prompt(1, 50))
        assert not call(model, cache, zoo.prompt(1, 3)).requires_grad


def test_frozen_models_leave_no_graph() -> None:
    model = zoo.build("llama").requires_grad_(False)
    cache = kvbits.cache_for(model, INT8)
    for begin, end in CHUNKS:
        assert not call(model, cache, zoo.prompt(1, 60)[:, begin:end]).requires_grad


# -- compilation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, how", [("llama", "model"), ("falcon-new", "forward")])
def test_a_compiled_model_leaves_the_cache_out_of_its_graphs(name: str, how: str) -> None:
    """Compiled, the sums of a codec come out in another order, and choose other codes."""
    model, ids, sources = zoo.build(name), zoo.prompt(1, 50), set()

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        for node in graph.graph.nodes:
            sources.update(re.findall(r'File "([^"]*)"', node.stack_trace or ""))
        return graph.forward

    chunks = ((0, 40), (40, 41), (41, 42), (42, 50))
    cache, right = kvbits.cache_for(model, INT8), kvbits.cache_for(model, INT8)
    with torch.no_grad():
        expected = [call(model, right, ids[:, begin:end]) for begin, end in chunks]
        torch._dynamo.reset()
        if how == "model":
            compiled = torch.compile(model, backend=backend)
        else:
            compiled, model.forward = model, torch.compile(model.forward, backend=backend)
        for (begin, end), logits in zip(chunks, expected, strict=True):
            got = compiled(input_ids=ids[:, begin:end], **{cache_name(model): cache})[0]
            # Early releases make a mask where they trace, and stock attention over it sums in another order.
            assert (got - logits).abs().max() <= 1e-5 * logits.abs().max()
    torch._dynamo.reset()
    stored.assert_same(*(stored.row_of(each.packed_layers[0].core, 0) for each in (cache, right)))
    assert any("transformers" in source for source in sources)
    root = str(Path(kvbits.__file__).parent)
    ours = {source[len(root) + 1 :] for source in sources if source.startswith(root)}
    assert all(source.startswith("hf") for source in ours)  # what hands over to stock attention is there, no more


def test_a_compiled_model_without_graph_breaks_is_refused() -> None:
    model = zoo.build("llama")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    if "reason" not in inspect.signature(torch.compiler.disable).parameters:
        pytest.skip(f"torch {torch.__version__} gives no reasons")
    with pytest.raises(Exception, match="a kvbits cache is no part of a compiled graph"):
        compiled(input_ids=zoo.prompt(1, 5), **{cache_name(model): kvbits.cache_for(model, INT8)})
    torch._dynamo.reset()
