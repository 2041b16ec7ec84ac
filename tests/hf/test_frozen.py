"""A frozen cache decodes as the growing one does: by hand, compiled as one graph, and under ``generate``."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import kvbits
import zoo
from frozen_models import SMALL, Step, built, decode, padded, prefilled, same, twins
from kvbits.hf.names import cache_name
from kvbits.layer.frozen import FrozenLayerCache
from kvbits.layer.ring import RingLayer
from kvbits.transform.rotary import Rotary

pytestmark = pytest.mark.usefixtures("one_thread")


# -- the same as the growing cache -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ("llama", "llama-d256-eager", "qwen3", "phi4", "glm", "gemma3", "gemma2-softcap", "gpt-oss")
)
def test_families(name: str) -> None:
    """Windows, softcap, sink logits, partial rotary embeddings; blocks are packed before and during the steps."""
    model, ids = built(name), zoo.prompt(2, 45)
    cache = prefilled(model, f"int4,{SMALL}", ids)
    frozen = kvbits.freeze(cache, capacity=100)
    window = torch.float32 if name == "gemma2-softcap" else None  # its own attention takes every softmax in float32
    same(decode(model, frozen, ids, 45), decode(model, cache, ids, 45), window)
    assert frozen.columns == 88  # the newest step is counted when the next one begins


@pytest.mark.parametrize(
    "scheme",
    (
        "kivi4", "int2", "fp8", "fp8-static", "k=int4,v=nf3", "int4-1%", "default", "small", "int4,pre-rope", "rot4",
        "lm3,centred", "k=exact,v=int4", "int4,layers[1]=exact", "hqq4",
    ),
)  # fmt: skip
@pytest.mark.parametrize("prompt", (10, 61), ids=("nothing packed yet", "packed"))
def test_schemes(scheme: str, prompt: int) -> None:
    """Static scales and means may be fitted only when the first block is packed, after the cache was frozen."""
    model, ids = zoo.build("llama"), zoo.prompt(2, prompt)
    cache = prefilled(model, f"{scheme},{SMALL}", ids)
    frozen = kvbits.freeze(cache, capacity=prompt + 60)
    same(decode(model, frozen, ids, 60), decode(model, cache, ids, 60))


@pytest.mark.parametrize("scheme", ("int4", "default", "kivi4", "int4,pre-rope", "fp8-static"))
@pytest.mark.parametrize("name", ("llama", "gemma3"))
def test_rows_of_different_lengths(name: str, scheme: str) -> None:
    model = built(name)
    ids, mask = padded(45, 3, 30)
    cache = prefilled(model, f"{scheme},{SMALL}", ids, mask)
    frozen = kvbits.freeze(cache, capacity=90)
    same(decode(model, frozen, ids, 45, mask), decode(model, cache, ids, 45, mask))


def layers_agree(
    layer: kvbits.LayerCache, keys: torch.Tensor, values: torch.Tensor, padding: int = 0, first: int = 0, epoch: int = 0
) -> FrozenLayerCache:
    """A layer frozen after 50 columns, the first ``padding`` of the second row none of its tokens.

    They are at positions from ``first`` on, roped as in ``epoch``.
    """
    text = None
    if padding:
        text = torch.ones(2, 50, dtype=torch.bool)
        text[1, :padding] = False
    rows = layer.rows.extend(2, 50, text, first + torch.arange(50)[None] if first else None, epoch)
    layer.append(keys[:, :, :50], values[:, :, :50], rows)
    frozen = FrozenLayerCache(layer, keys.shape[2])
    for column in range(50, keys.shape[2]):
        new = keys[:, :, column : column + 1], values[:, :, column : column + 1]
        rows = rows.extend(2, 1, epoch=epoch)
        view, query = layer.append(*new, rows), torch.cat([keys, values], 1)[:, :, column - 9 : column - 8]
        mask = None if rows.valid is None else rows.valid[:, None, None]
        expected = kvbits.attend.attend(kvbits.attend.Call(query, view, 0.25, mask=mask))
        frozen.step(*new)
        torch.testing.assert_close(frozen.attend(query, 0.25), expected, rtol=1e-4, atol=1e-5)
        frozen.advance()
    assert frozen.held.tolist() == layer.held and frozen.counts.tolist() == layer.packed_blocks
    return frozen


@pytest.mark.parametrize("padding", (0, 7))
def test_late_sinks(padding: int) -> None:
    """Keys of random models are all alike, so some are made shorter by hand."""
    keys, values = torch.randn(2, 2, 2, 130, 16, generator=torch.Generator().manual_seed(0))
    keys[0, :, [9, 33, 60]] *= 0.05
    keys[1, :, [20, 41]] *= 0.05
    layer = kvbits.LayerCache(kvbits.Scheme.parse("int4,residual=4,sinks=2+3,block=32"))
    layers_agree(layer, keys, values, padding)
    assert [len(row) for row in layer.late] == [3, 2]


@pytest.mark.parametrize("scheme", ("int4,pre-rope", "lm3,centred"))
def test_positions_that_begin_later(scheme: str) -> None:
    """By other frequencies than those that the text would begin with."""
    keys, values = torch.randn(2, 2, 2, 130, 16, generator=torch.Generator().manual_seed(0))
    rotary = Rotary(0.1 ** torch.arange(8))
    rotary.epochs.append(rotary.epochs[0] / 3)
    layer = kvbits.LayerCache(kvbits.Scheme.parse(f"{scheme},residual=4,sinks=2,block=32"), rotary=rotary)
    frozen = layers_agree(layer, keys, values, first=300, epoch=1)
    with pytest.raises(ValueError, match="by the positions of the text that it was frozen with"):
        frozen.reset()


def test_levels_of_a_calibration() -> None:
    keys, values = torch.randn(2, 2, 2, 130, 16, generator=torch.Generator().manual_seed(0))
    scheme = kvbits.Scheme.parse("nuq3,residual=4,sinks=2,block=32")
    fitted = scheme.key.fit(keys), scheme.value.fit(values)
    layers_agree(kvbits.LayerCache(scheme, rotary=Rotary(0.1 ** torch.arange(8)), calibrated=fitted), keys, values)


def test_beams_that_were_reordered_before() -> None:
    model, ids = zoo.build("llama"), zoo.prompt(3, 50)
    cache = prefilled(model, f"int4,{SMALL}", ids)
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    ids = ids[[2, 0, 0]]
    frozen = kvbits.freeze(cache, capacity=100)
    same(decode(model, frozen, ids, 40), decode(model, cache, ids, 40))


# -- one graph -------------------------------------------------------------------------------------------------------


@pytest.fixture
def counted() -> Any:
    """Compile a model's forward as one graph, and count the graphs."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()

    def compiled(model: PreTrainedModel, backend: str) -> tuple[Step, Any]:
        if zoo.installed() < (5, 24) and model.config.model_type != "llama":
            pytest.skip("early releases of this model count columns in Python, which is no part of a graph")
        counter = CompileCounterWithBackend(backend)
        return torch.compile(model.forward, backend=counter, fullgraph=True), counter

    yield compiled
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("name", "scheme"),
    (("llama", "kivi4"), ("llama", "default"), ("gemma3", "int4"), ("gpt-oss", "small"), ("qwen3", "int4,pre-rope")),
)  # fmt: skip
def test_one_graph_for_all_steps(name: str, scheme: str, counted: Any) -> None:
    """Over several packings, past the end of a window, and for another cache of the same shape."""
    window = torch.float32 if name == "gpt-oss" else None  # whose experts compile in float32 alone
    model, ids = built(name, window), zoo.prompt(2, 12)
    cache = prefilled(model, f"{scheme},{SMALL}", ids)
    forward, counter = counted(model, "eager")
    frozen, again = kvbits.freeze(cache, capacity=90), kvbits.freeze(cache, capacity=90)
    expected = decode(model, cache, ids, 75)
    same(decode(model, frozen, ids, 75, forward=forward, advance=True), expected, window)
    same(decode(model, again, ids, 20, forward=forward, advance=True), expected[:20], window)
    assert counter.frame_count == 1
    packed = max(int(layer.core.counts[0]) for layer in frozen.layers if isinstance(layer.core, FrozenLayerCache))
    assert packed >= 2


def test_one_graph_of_rows_of_different_lengths(counted: Any) -> None:
    model = built("gemma3")
    ids, mask = padded(30, 9)
    cache = prefilled(model, f"int4,{SMALL}", ids, mask)
    forward, counter = counted(model, "eager")
    frozen = kvbits.freeze(cache, capacity=80)
    got = decode(model, frozen, ids, 45, mask, forward=forward, advance=True)
    same(got, decode(model, cache, ids, 45, mask))
    assert counter.frame_count == 1


def test_the_inductor_compiles_it_once(counted: Any) -> None:
    model, ids = zoo.build("gemma3"), zoo.prompt(1, 12)
    cache = prefilled(model, f"default,{SMALL}", ids)
    forward, counter = counted(model, "inductor")
    frozen = kvbits.freeze(cache, capacity=90)
    same(decode(model, frozen, ids, 65, forward=forward, advance=True), decode(model, cache, ids, 65))
    assert counter.frame_count == 1


@pytest.mark.model
@pytest.mark.slow
def test_smollm2_in_one_graph(smollm2: tuple[PreTrainedModel, PreTrainedTokenizerBase], counted: Any) -> None:
    """By the inductor; docs/static.md shows it with the backend that leaves the graph as it is."""
    model, tokenizer = smollm2
    ids = tokenizer("The history of the lighthouse begins with a fire on a hill, and", return_tensors="pt").input_ids
    cache = prefilled(model, "default,residual=8,block=32", ids)
    forward, counter = counted(model, "inductor")
    frozen = kvbits.freeze(cache, capacity=96)
    got = decode(model, frozen, ids, 70, forward=forward, advance=True)
    expected = decode(model, cache, ids, 70)
    kvbits.disable(model)
    assert got.argmax(-1).tolist() == expected.argmax(-1).tolist()
    assert counter.frame_count == 1
    assert int(frozen.layers[0].core.counts[0]) >= 2


# -- generate --------------------------------------------------------------------------------------------------------


def generated(model: PreTrainedModel, ids: torch.Tensor, cache: Any, **options: Any) -> list[list[int]]:
    out = model.generate(
        ids, max_new_tokens=40, do_sample=False, eos_token_id=None, **{cache_name(model): cache}, **options
    )
    return out[:, ids.shape[1] :].tolist()


@pytest.mark.parametrize("name", ("llama", "gemma3"))
@pytest.mark.parametrize("rows", ("equal", "padded"))
def test_generate(name: str, rows: str) -> None:
    model = zoo.build(name)
    ids, mask = padded(30, 30 if rows == "equal" else 8)
    cache = prefilled(model, f"int4,{SMALL}", ids, mask)
    frozen = kvbits.freeze(cache, capacity=69)
    got = generated(model, ids, frozen, attention_mask=mask, pad_token_id=0)
    assert got == generated(model, ids, cache, attention_mask=mask, pad_token_id=0)


def test_generate_compiles_where_it_is_told_to() -> None:
    """As it does by itself on a GPU; and the cache can go on by hand."""
    from transformers import CompileConfig

    model, ids, cache, frozen = twins(30, scheme="kivi4", capacity=120)
    config = CompileConfig(fullgraph=True, backend="eager", mode=None)
    config._compile_all_devices = True
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    got = generated(model, ids, frozen, compile_config=config, attention_mask=torch.ones_like(ids))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    expected = generated(model, ids, cache, attention_mask=torch.ones_like(ids))
    assert got == expected
    last = torch.tensor(expected)[:, -1:]
    same(decode(model, frozen, last, 30), decode(model, cache, last, 30))


# -- what it refuses -------------------------------------------------------------------------------------------------


def test_a_full_cache_says_so() -> None:
    model, ids, _, frozen = twins(20, capacity=22)
    decode(model, frozen, ids, 3)
    frozen.advance()
    assert frozen.columns == 22
    with pytest.raises(ValueError, match="the capacity of 22 tokens is full; freeze the cache with more"):
        decode(model, frozen, ids, 1)
    with pytest.raises(ValueError, match="the capacity of 22 tokens is full"):
        generated(model, ids, kvbits.freeze(prefilled(model, f"int4,{SMALL}", ids), capacity=22))


def test_a_step_that_nobody_counts_is_an_error(counted: Any) -> None:
    """A compiled loop without ``advance``: exact slots run out."""
    model, ids, _, frozen = twins(20)
    forward, _ = counted(model, "eager")
    with pytest.raises(Exception, match=r"call advance\(\) after each step"):
        decode(model, frozen, ids, 40, forward=forward)


def test_steps_that_are_told_wrong() -> None:
    _, _, _, frozen = twins(20)
    with pytest.raises(ValueError, match="the host counts 49 columns and the device 19"):
        frozen.advance(30)


def test_a_forward_that_fails_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids, cache, frozen = twins(40, "gemma3")
    expected = decode(model, cache, ids, 20)
    same(decode(model, frozen, ids, 8), expected[:8])
    last = frozen.layers[-1]
    monkeypatch.setattr(last, "update", lambda *_, **__: (_ for _ in ()).throw(MemoryError("none left")))
    token = expected[7].argmax(-1, keepdim=True)
    with pytest.raises(MemoryError, match="none left"):
        decode(model, frozen, token, 1)
    monkeypatch.undo()
    same(decode(model, frozen, token, 12), expected[8:])


def test_an_interrupted_forward_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids, cache, frozen = twins(40)
    frozen.layers[0].core.step(torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8))
    with pytest.raises(RuntimeError, match="taken back just now, and the cache holds 39 columns again"):
        decode(model, frozen, ids, 1)
    same(decode(model, frozen, ids, 10), decode(model, cache, ids, 10))


def test_reset_begins_an_empty_context_in_the_same_buffers() -> None:
    model, ids = zoo.build("gemma3"), zoo.prompt(1, 45)
    frozen = kvbits.freeze(prefilled(model, f"default,{SMALL}", zoo.prompt(1, 50, seed=9)), capacity=80)
    buffers = [x.data_ptr() for layer in frozen.layers for x in layer.core.buffers]
    decode(model, frozen, ids, 10)
    frozen.reset()
    assert frozen.columns == int(frozen.get_seq_length()) == 0
    cache = kvbits.cache_for(model, f"default,{SMALL}")
    same(decode(model, frozen, ids[:, :1], 60), decode(model, cache, ids[:, :1], 60))
    assert buffers == [x.data_ptr() for layer in frozen.layers for x in layer.core.buffers]


def test_operations_of_growing_caches() -> None:
    model, ids, _, frozen = twins(20)
    for name, argument in (("reorder_cache", torch.tensor([0])), ("crop", -1), ("batch_repeat_interleave", 2)):
        with pytest.raises(NotImplementedError, match=f"a frozen cache has no {name}"):
            getattr(frozen, name)(argument)
    with pytest.raises(ValueError, match="takes one token of each of its 1 rows at a time, and got 3 of 1"):
        model(input_ids=ids[:, :3], **{cache_name(model): frozen})
    with pytest.raises(ValueError, match="cannot serve this call: output_attentions"):
        model(input_ids=ids[:, :1], output_attentions=True, **{cache_name(model): frozen})
    decode(model, frozen, ids, 3)
    assert frozen.columns == 21 and "21 of 90 tokens" in repr(frozen)
    assert frozen.is_compileable and not any(layer.is_croppable for layer in frozen.layers)


@pytest.mark.parametrize("name", ("diffllama", "bloom"))
def test_models_that_compute_with_keys(name: str) -> None:
    model, ids = zoo.build(name), zoo.prompt(1, 40)
    frozen = kvbits.freeze(prefilled(model, f"int4,{SMALL}", ids), capacity=90)
    with pytest.raises(TypeError, match="is frozen, and something else than kvbits' attention asks for"):
        decode(model, frozen, ids, 1)


def test_what_cannot_be_frozen() -> None:
    model, ids = zoo.build("llama"), zoo.prompt(1, 20)
    with pytest.raises(ValueError, match="the cache is empty"):
        kvbits.freeze(kvbits.cache_for(model, "int4"), 90)
    with pytest.raises(ValueError, match="holds 19 tokens, more than the capacity of 18"):
        kvbits.freeze(prefilled(model, "int4", ids), 18)
    with pytest.raises(TypeError, match=r"freeze takes a kvbits\.KVCache, not str"):
        kvbits.freeze("int4", 90)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="packs nothing"), pytest.raises(ValueError, match="no layer of this cache is"):
        kvbits.freeze(prefilled(zoo.build("mistral-window"), f"int4,{SMALL}", ids), 90)
    window = zoo.build("mistral-window", sliding_window=200)
    cache = kvbits.cache_for(window, f"int4,{SMALL}", sliding=True)
    window(input_ids=ids, **{cache_name(window): cache})
    with pytest.raises(ValueError, match="layer 0 cannot be frozen: blocks behind a sliding window"):
        kvbits.freeze(cache, 90)
    chunked = zoo.build("llama4-chunked")
    with pytest.raises(ValueError, match="attends to chunks"):
        kvbits.freeze(prefilled(chunked, f"int4,{SMALL}", ids), 90)


def test_another_model_is_refused() -> None:
    model, other, ids = zoo.build("llama"), kvbits.enable(zoo.build("llama"), "int4"), zoo.prompt(1, 20)
    frozen = kvbits.freeze(prefilled(model, "int4", ids), 90)
    with pytest.raises(ValueError, match="was made for another LlamaForCausalLM than the LlamaForCausalLM that runs"):
        decode(other, frozen, ids, 1)
    assert frozen.columns == 19
    assert frozen.model is model and pickle.loads(pickle.dumps(frozen)).model is None


def test_another_prompt_than_was_frozen_is_noticed() -> None:
    model, ids = zoo.build("llama"), zoo.prompt(1, 20)
    frozen = kvbits.freeze(prefilled(model, "int4", ids), 90)
    other = ids.clone()
    other[:, 3:6] = 1 + ids[:, 3:6] % 100
    with pytest.warns(UserWarning, match="the cache holds 19 tokens, and from column 3 on they are not those"):
        generated(model, other, frozen)
    frozen.reset()
    assert frozen.tokens.shape == (1, 0)


def test_windows_stay_exact_and_small() -> None:
    model, _, _, frozen = twins(40, "gemma3", capacity=1000)
    window = model.config.get_text_config().sliding_window
    rings = [layer.core for layer in frozen.layers if isinstance(layer.core, RingLayer)]
    assert rings and all(ring.keys.shape[2] == window for ring in rings)
    assert frozen.nbytes == sum(x.nbytes for layer in frozen.layers for x in layer.core.buffers)
