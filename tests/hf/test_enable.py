"""``enable``, ``disable``, ``load_model`` and ``explain``: stock calls on kvbits, and nothing left behind."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import itertools
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import kvbits
import stored
import zoo
from kvbits.attend import native
from kvbits.hf.cache import KVCache
from kvbits.hf.names import cache_name
from kvbits.hf.translate import scheme_of_cache_config

INT8 = "int8,residual=4,block=32"

pytestmark = pytest.mark.usefixtures("one_thread")


def generate(model: hf.PreTrainedModel, tokens: int = 12, **options: Any) -> Any:
    """Greedy tokens after a left-padded prompt, with the logits and the cache that were used."""
    ids, mask = zoo.padded_prompt()
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=tokens,
        **{"do_sample": False, "return_dict_in_generate": True, "output_logits": True, **options},
    )  # fmt: skip


def cache_of(result: Any, model: hf.PreTrainedModel) -> Any:
    return result.get(cache_name(model))


def assert_same_run(got: Any, right: Any) -> None:
    assert torch.equal(got.sequences, right.sequences)
    assert torch.equal(torch.stack(got.logits), torch.stack(right.logits))


# -- generate(cache_implementation="quantized") ------------------------------------------------------------------------


def expected_scheme(backend: str, nbits: int, group: int, residual: int, axes: tuple[int, int]) -> str:
    """Written out by hand: quanto's axis 0 and hqq's axis 1 group neighbouring channels of one token."""
    family = {"quanto": "int", "hqq": "hqq", "kvbits": "int"}[backend]
    along_token = {"quanto": 0, "hqq": 1, "kvbits": 0}[backend]
    names = []
    for axis in axes:
        channel = axis != along_token
        default = 32 if channel else 64
        names.append(f"{family}{nbits}{'-channel' if channel else ''}{'' if group == default else f'-gs{group}'}")
    first = names[0] if names[0] == names[1] else f"k={names[0]},v={names[1]}"
    first = {"k=int2-channel,v=int2-gs32": "kivi2", "k=int4-channel,v=int4-gs32": "kivi4"}.get(first, first)
    return first if residual == 128 else f"{first},residual={residual}"


CONFIGS = [
    (backend, nbits, group, residual, axes)
    for backend, bits, both in (
        ("quanto", (2, 4), (0, -1)),
        ("hqq", (2, 3, 4, 8), (0, 1)),
        ("kvbits", (2, 3, 4, 8), (0, -1)),
    )
    for nbits, group, residual, axes in itertools.product(
        bits, (16, 32, 64, 128), (0, 32, 128), itertools.product(both, both)
    )
]


def test_every_cache_config_has_its_scheme() -> None:
    assert len(CONFIGS) == 480
    for backend, nbits, group, residual, axes in CONFIGS:
        config = dict(backend=backend, nbits=nbits, q_group_size=group, residual_length=residual)
        config |= dict(axis_key=axes[0], axis_value=axes[1])
        before = dict(config)
        assert str(scheme_of_cache_config(config)) == expected_scheme(backend, nbits, group, residual, axes), config
        assert config == before


DEFAULTS: list[tuple[dict[str, Any] | None, str]] = [
    (None, "int4"),
    ({}, "int4"),
    ({"nbits": 2}, "int2"),
    ({"backend": "quanto"}, "int4"),
    ({"backend": "QUANTO", "q_group_size": 32}, "int4-gs32"),
    ({"backend": "quanto", "nbits": 4, "axis_key": -1, "q_group_size": 32}, "kivi4"),
    ({"backend": "quanto", "nbits": 4, "axis_value": -1}, "k=int4,v=int4-channel-gs64"),
    ({"backend": "hqq", "nbits": 8}, "hqq8"),
    ({"backend": "hqq", "axis_key": 0, "axis_value": 1}, "k=hqq4-channel-gs64,v=hqq4"),
    ({"backend": "fp8"}, "fp8"),
    ({"backend": "kvbits", "nbits": 3}, "int3"),
    ({"backend": "kvbits", "scheme": "kivi2,residual=32"}, "kivi2,residual=32"),
    ({"backend": "kvbits", "axis_key": -1, "q_group_size": 32, "nbits": 2, "residual_length": 64},
     "kivi2,residual=64"),
]  # fmt: skip


@pytest.mark.parametrize("config, scheme", DEFAULTS, ids=[str(config) for config, _ in DEFAULTS])
def test_stock_quantized_calls_run_on_kvbits(config: dict[str, Any] | None, scheme: str) -> None:
    model = kvbits.enable(zoo.build("llama"))
    before = copy.deepcopy(config)
    options = {} if config is None else {"cache_config": config}
    got = generate(model, cache_implementation="quantized", **options)
    cache = cache_of(got, model)
    assert isinstance(cache, KVCache)
    assert str(cache.scheme) == scheme
    assert config == before
    right = generate(model, **{cache_name(model): kvbits.cache_for(model, scheme)})
    assert_same_run(got, right)


def test_one_config_serves_models_of_different_depth() -> None:
    config = {"backend": "quanto", "nbits": 4, "residual_length": 4}
    for layers in (2, 5, 1):
        model = kvbits.enable(zoo.build("llama", num_hidden_layers=layers))
        for _ in range(2):
            cache = cache_of(generate(model, cache_implementation="quantized", cache_config=config), model)
            assert len(cache.packed_layers) == layers
    assert config == {"backend": "quanto", "nbits": 4, "residual_length": 4}


def test_a_generation_config_may_carry_it() -> None:
    model = kvbits.enable(zoo.build("gemma3"))  # which the stock quantized cache refuses
    wanted = hf.GenerationConfig(
        cache_implementation="quantized", cache_config={"backend": "fp8"}, max_new_tokens=4, do_sample=False,
        return_dict_in_generate=True,
    )  # fmt: skip
    ids, mask = zoo.padded_prompt()
    for _ in range(2):
        cache = cache_of(model.generate(ids, attention_mask=mask, generation_config=wanted), model)
        assert str(cache.scheme) == "fp8"
    assert wanted.cache_config == {"backend": "fp8"}


@pytest.mark.parametrize(
    "config, words",
    [
        ({"backend": "kivi"}, "allowed are quanto, hqq, fp8, kvbits"),
        ({"backend": "quanto", "nbits": 8}, r"quanto backend has \(2, 4\)"),
        ({"backend": "hqq", "nbits": 1}, r"hqq backend has \(2, 3, 4, 8\)"),
        ({"backend": "hqq", "axis_key": -1}, r"axis_key=-1: the hqq backend has \(0, 1\)"),
        ({"q_group_size": 48}, "groups of 48"),
        ({"residual_lenght": 32}, "residual_lenght"),
        ({"backend": "fp8", "nbits": 8}, "nbits"),
        ({"backend": "kvbits", "scheme": "kivi3"}, "kivi"),
    ],
    ids=str,
)
def test_impossible_configs_are_refused(config: dict[str, Any], words: str) -> None:
    model = kvbits.enable(zoo.build("llama"))
    with pytest.raises(ValueError, match=words):
        generate(model, cache_implementation="quantized", cache_config=config)


# -- a scheme for every call -------------------------------------------------------------------------------------------


def test_every_generate_uses_the_enabled_scheme() -> None:
    model = kvbits.enable(zoo.build("gemma3"), INT8)
    for options in ({}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}):
        torch.manual_seed(0)
        got = generate(model, **options)
        cache = cache_of(got, model)
        assert isinstance(cache, KVCache)
        assert str(cache.scheme) == INT8
        torch.manual_seed(0)
        assert_same_run(got, generate(model, **options, **{cache_name(model): kvbits.cache_for(model, INT8)}))


def test_drafts_use_it_too() -> None:
    model, assistant = (kvbits.enable(zoo.build("llama"), "exact,residual=4,block=32") for _ in range(2))
    ids = zoo.prompt(1, 40)
    options = dict(max_new_tokens=20, do_sample=False)
    right = zoo.build("llama").generate(ids, **options)
    assert torch.equal(model.generate(ids, assistant_model=assistant, **options), right)
    assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=3, eos_token_id=999, **options), right)


def test_plain_forwards_use_it_too() -> None:
    model = kvbits.enable(zoo.build("llama"), INT8)
    ids = zoo.prompt(2, 50)
    with torch.no_grad():
        first = model(input_ids=ids[:, :48])
        cache = cache_of(first, model)
        assert isinstance(cache, KVCache)
        assert all(layer.core.store.longest == 1 for layer in cache.packed_layers)
        second = model(input_ids=ids[:, 48:], **{cache_name(model): cache})
        explicit = kvbits.cache_for(model, INT8)
        model(input_ids=ids[:, :48], **{cache_name(model): explicit})
        right = model(input_ids=ids[:, 48:], **{cache_name(model): explicit})
    assert torch.equal(second.logits, right.logits)
    assert cache_of(model(input_ids=ids, use_cache=False), model) is None


def test_forwards_with_arguments_by_position() -> None:
    model, ids = kvbits.enable(zoo.build("llama"), INT8), zoo.prompt(1, 50)
    names = list(inspect.signature(model.forward).parameters)
    position = names.index(cache_name(model))
    with torch.no_grad():
        right = model(input_ids=ids)
        for args in ((ids, *[None] * position), (ids, *[None] * (position + 1)), (ids, None)):
            got = model(*args)
            assert torch.equal(got.logits, right.logits)
            assert isinstance(cache_of(got, model), KVCache)
        cache = kvbits.cache_for(model, "int4")
        assert cache_of(model(ids, *[None] * (position - 1), cache), model) is cache
        assert cache_of(model(ids, *[None] * position, use_cache=False), model) is None


def test_a_model_without_a_head_is_served_too() -> None:
    whole = zoo.build("llama")
    with torch.no_grad():
        right = whole.model(input_ids=zoo.prompt(1, 50)).last_hidden_state
    model = kvbits.enable(whole.model, "exact,residual=4,block=32")
    with torch.no_grad():
        first = model(input_ids=zoo.prompt(1, 50)[:, :45])
        cache = cache_of(first, model)
        assert isinstance(cache, KVCache)
        rest = model(input_ids=zoo.prompt(1, 50)[:, 45:], **{cache_name(model): cache})
    assert (rest.last_hidden_state - right[:, 45:]).abs().max() <= 1e-5 * right.abs().max()


def test_training_is_left_alone() -> None:
    stock, model = zoo.build("llama").train(), kvbits.enable(zoo.build("llama"), INT8).train()
    ids = zoo.prompt(2, 50)
    for m in (stock, model):
        out = m(input_ids=ids, labels=ids)
        assert not isinstance(cache_of(out, m), KVCache)
        out.loss.backward()
    for a, b in zip(stock.parameters(), model.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("explicit", ["int4", "stock"])
def test_a_cache_that_the_call_brings_wins(explicit: str) -> None:
    model = kvbits.enable(zoo.build("llama"), INT8)
    cache = zoo.stock_cache(model) if explicit == "stock" else kvbits.cache_for(model, explicit)
    got = generate(model, **{cache_name(model): cache})
    assert cache_of(got, model) is cache
    assert cache.get_seq_length() == 51
    with torch.no_grad():
        assert cache_of(model(input_ids=zoo.prompt(2, 1), **step_mask(cache, model)), model) is cache


def step_mask(cache: hf.Cache, model: hf.PreTrainedModel) -> dict[str, Any]:
    mask = torch.cat([zoo.padded_prompt()[1], torch.ones(2, 12, dtype=torch.int64)], dim=1)
    return {cache_name(model): cache, "attention_mask": mask}


@pytest.mark.parametrize("name", ["llama", "gemma3", "falcon-new", "gpt-oss"])
def test_stock_caches_on_an_enabled_model_are_as_stock(name: str) -> None:
    def runs(model: hf.PreTrainedModel) -> list[Any]:
        dynamic = {cache_name(model): zoo.stock_cache(model)}
        results = [generate(model, **dynamic)]
        results += [generate(model, cache_implementation=kind) for kind in ("dynamic", "static")]
        results += [generate(model, use_cache=False, tokens=4)]
        dynamic = {cache_name(model): zoo.stock_cache(model)}
        return [*results, generate(model, num_beams=3, **dynamic)]

    model, stock = kvbits.enable(zoo.build(name), INT8), zoo.build(name)
    for got, right in zip(runs(model), runs(stock), strict=True):
        assert_same_run(got, right)
        assert type(cache_of(got, model)) is type(cache_of(right, stock))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_continuous_batching_keeps_its_own_cache(implementation: str) -> None:
    """It pages exact keys and values itself, and is told apart by the name of the attention function."""
    if zoo.installed() < (5, 24):
        pytest.skip(f"continuous batching of Transformers {hf.__version__} needs a GPU")
    batching = importlib.import_module("transformers.generation.configuration_utils").ContinuousBatchingConfig
    ids, results = [zoo.prompt(1, tokens)[0].tolist() for tokens in (20, 30)], []
    for turn_on in (lambda model: model, lambda model: kvbits.enable(model, INT8)):
        model = turn_on(zoo.build("llama", attn_implementation=implementation))
        options = hf.GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=1, pad_token_id=0)
        paged = batching(num_blocks=8, max_batch_tokens=64, use_cuda_graph=False)
        out = model.generate_batch(inputs=ids, generation_config=options, continuous_batching_config=paged)
        results.append({name: answer.generated_tokens for name, answer in out.items()})
    assert len(results[0]) == 2 and results[0] == results[1]
    assert isinstance(cache_of(generate(model), model), KVCache)
    assert f"paged|{model.config._attn_implementation}" == f"paged|{implementation}"  # what early releases look up
    kvbits.disable(model)
    assert traces(model) == [] and str(model.config._attn_implementation) == implementation


def test_enabled_without_a_scheme_only_quantized_calls_change() -> None:
    model = kvbits.enable(zoo.build("llama"))
    assert type(cache_of(generate(model), model)) is hf.DynamicCache
    with torch.no_grad():
        assert type(cache_of(model(input_ids=zoo.prompt(1, 5)), model)) is hf.DynamicCache
    assert isinstance(cache_of(generate(model, cache_implementation="quantized"), model), KVCache)
    kvbits.enable(model, INT8)
    assert str(cache_of(generate(model), model).scheme) == INT8
    kvbits.enable(model)
    assert type(cache_of(generate(model), model)) is hf.DynamicCache


def test_sliding_layers_are_quantized_where_asked() -> None:
    model = kvbits.enable(zoo.build("gemma3", sliding_window=512), INT8, sliding=True)
    assert len(cache_of(generate(model), model).packed_layers) == 4
    assert len(cache_of(generate(model, cache_implementation="quantized"), model).packed_layers) == 4
    kvbits.enable(model, INT8)
    assert len(cache_of(generate(model), model).packed_layers) == 2


def test_use_cache_false_with_a_cache_is_refused() -> None:
    """The stock cache would get the whole text at every step, and attend to all of it again and again."""
    model = zoo.build("llama")
    with pytest.raises(ValueError, match="use_cache=False"):
        generate(model, use_cache=False, **{cache_name(model): kvbits.cache_for(model, "int4")})


# -- disable -----------------------------------------------------------------------------------------------------------


def traces(model: hf.PreTrainedModel) -> list[str]:
    """Everything of kvbits that can be found on a model."""
    found = []
    for name, module in model.named_modules():
        found += [f"{name}.{key}" for key, value in vars(module).items() if "kvbits" in f"{key} {type(value)}".lower()]
        hooks = (module._forward_pre_hooks, module._forward_hooks, module._forward_pre_hooks_with_kwargs)
        found += [f"{name} hook {hook}" for kind in hooks for hook in kind]
        found += [f"{name}.{method}" for method in ("forward", "generate") if method in vars(module)]
        if isinstance(module, hf.PreTrainedModel):
            found += [f"{name} config {k}" for k, v in vars(module.config).items() if "kvbits" in str(v)]
            found += [f"{name}.{method}" for method in vars(module) if method.startswith(("_prepare", "prepare"))]
    return found


@pytest.mark.parametrize("turn_on", ["cache_for", "enable", "enable-scheme"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "falcon-new", "qwen3-next"])
def test_disable_leaves_nothing_behind(name: str, implementation: str, turn_on: str) -> None:
    model = zoo.build(name, attn_implementation=implementation)
    attributes = [sorted(vars(module)) for module in model.modules()]
    config = copy.deepcopy(model.config.to_dict())
    right = generate(model)
    calls: dict[str, Callable[[], Any]] = {
        "cache_for": lambda: generate(model, **{cache_name(model): kvbits.cache_for(model, INT8)}),
        "enable": lambda: generate(kvbits.enable(model), cache_implementation="quantized"),
        "enable-scheme": lambda: generate(kvbits.enable(model, INT8)),
    }
    calls[turn_on]()
    assert traces(model)
    assert kvbits.disable(model) is model
    assert traces(model) == []
    assert [sorted(vars(module)) for module in model.modules()] == attributes
    assert model.config.to_dict() == config
    assert str(model.config._attn_implementation) == implementation
    got = generate(model)
    assert type(cache_of(got, model)) is hf.DynamicCache
    assert_same_run(got, right)
    kvbits.disable(model)  # again is harmless


METHODS = ["prepare_inputs_for_generation", "_prepare_cache_for_generation"]


def counting(inner: Callable[..., Any]) -> tuple[Callable[..., Any], list[int]]:
    calls = [0]

    @functools.wraps(inner)
    def mine(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return inner(*args, **kwargs)

    return mine, calls


@pytest.mark.parametrize("method", METHODS)
def test_methods_that_the_user_has_replaced_run_and_stay(method: str) -> None:
    """As PEFT replaces them on a model."""
    model = zoo.build("llama")
    right = generate(model, 3)
    mine, calls = counting(getattr(model, method))
    setattr(model, method, mine)
    generate(model, 3)
    expected = calls[0]
    assert expected > 0
    for _ in range(2):
        kvbits.enable(model)
        kvbits.enable(model, INT8)
        calls[0] = 0
        generate(model, 3, cache_implementation="dynamic")
        assert calls[0] == expected
        calls[0] = 0
        generate(model, 3)
        assert calls[0] == (expected if method == METHODS[0] else 0)  # the cache is made by kvbits
        kvbits.disable(model)
        assert vars(model)[method] is mine
    calls[0] = 0
    assert_same_run(generate(model, 3), right)
    assert calls[0] == expected


@pytest.mark.parametrize("method", METHODS)
def test_methods_that_the_user_replaces_afterwards_stay(method: str) -> None:
    model = kvbits.enable(zoo.build("llama"), INT8)
    mine, calls = counting(getattr(model, method))
    setattr(model, method, mine)
    assert isinstance(cache_of(generate(model, 3), model), KVCache)
    assert calls[0] > 0
    kvbits.disable(model)
    assert vars(model)[method] is mine
    assert type(cache_of(generate(model, 3), model)) is hf.DynamicCache
    assert traces(model) == [f".{method}"]  # the user's own
    kvbits.enable(model, INT8)
    assert isinstance(cache_of(generate(model, 3), model), KVCache)


def test_a_cache_outlives_neither_disable_nor_silence() -> None:
    """After disable nobody announces forwards any more: the cache says so instead of guessing."""
    model = zoo.build("llama")
    cache = kvbits.cache_for(model, INT8)
    generate(model, **{cache_name(model): cache})
    kvbits.disable(model)
    with pytest.raises(RuntimeError, match="cache_for"), torch.no_grad():
        model(input_ids=zoo.prompt(2, 1), **step_mask(cache, model))
    kvbits.enable(model)
    with torch.no_grad():
        model(input_ids=zoo.prompt(2, 1), **step_mask(cache, model))
    assert cache.get_seq_length() == 52


def test_the_attention_that_the_user_sets_stays() -> None:
    model = kvbits.enable(zoo.build("llama"), "exact,residual=4,block=32")
    right = generate(model).sequences
    model.set_attn_implementation("eager")
    got = generate(model)
    assert torch.equal(got.sequences, right)
    assert str(model.config._attn_implementation) == "kvbits_eager"  # the next cache_for stands before the new one
    kvbits.disable(model)
    assert str(model.config._attn_implementation) == "eager"


def test_another_attention_over_packed_history_decodes() -> None:
    model = zoo.build("llama")
    cache = kvbits.cache_for(model, "exact,residual=4,block=32")
    model.set_attn_implementation("eager")
    right = generate(zoo.build("llama", attn_implementation="eager"))
    got = generate(model, **{cache_name(model): cache})
    assert torch.equal(got.sequences, right.sequences)
    assert {layer.trace.outcome for layer in cache.packed_layers} == {"decoded"}


def test_a_copy_of_an_enabled_model_stands_for_itself() -> None:
    model = kvbits.enable(zoo.build("llama"), INT8)
    right = generate(model)
    twin = copy.deepcopy(model)
    assert_same_run(generate(twin), right)
    assert isinstance(cache_of(generate(twin), twin), KVCache)
    kvbits.disable(model)
    assert isinstance(cache_of(generate(twin), twin), KVCache)
    assert type(cache_of(generate(model), model)) is hf.DynamicCache
    kvbits.disable(twin)
    assert traces(twin) == []
    assert type(cache_of(generate(twin), twin)) is hf.DynamicCache


def test_an_enabled_model_saves_as_the_model_it_is(tmp_path: Path) -> None:
    model = kvbits.enable(zoo.build("gemma3"), INT8)
    generate(model)
    model.save_pretrained(tmp_path)
    assert "kvbits" not in (tmp_path / "config.json").read_text()
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert traces(again) == []
    assert_same_run(generate(again), generate(kvbits.disable(model)))


def test_an_enabled_model_pickles() -> None:
    model = kvbits.enable(zoo.build("llama"), INT8)
    twin = pickle.loads(pickle.dumps(model))
    assert_same_run(generate(twin), generate(model))
    kvbits.disable(twin)
    assert traces(twin) == []


@pytest.mark.parametrize("what", ["model", "config"])
def test_a_fresh_process_loads_what_was_pickled(what: str, tmp_path: Path) -> None:
    model = kvbits.enable(zoo.build("llama"), INT8)
    thing = model if what == "model" else model.config
    torch.save(thing, tmp_path / "thing.pt")
    ids = zoo.prompt(1, 50)
    with torch.no_grad():
        torch.save((ids, model(ids).logits), tmp_path / "run.pt")
    program = f"""
import torch, transformers
thing = torch.load({str(tmp_path / "thing.pt")!r}, weights_only=False)
ids, right = torch.load({str(tmp_path / "run.pt")!r})
if {what == "config"}:
    thing = transformers.AutoModelForCausalLM.from_config(thing).eval()
with torch.no_grad():
    logits = thing(ids).logits
assert logits.shape == right.shape
if {what == "model"}:  # a config alone makes other weights
    assert torch.allclose(logits, right, atol=1e-4)
print("done")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == "done\n", done.stderr


# -- load_model --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    zoo.build("llama").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("dtype", ["fp8", "int4", "kivi2,residual=32", None, "auto"], ids=str)
def test_load_model(saved: Path, dtype: str | None) -> None:
    model = kvbits.load_model(str(saved), kv_cache_dtype=dtype)
    assert not model.training
    with torch.no_grad():
        caches = [cache_of(generate(model), model), cache_of(model(input_ids=zoo.prompt(1, 5)), model)]
    if dtype in (None, "auto"):
        assert traces(model) == []
        assert [type(cache) for cache in caches] == [hf.DynamicCache] * 2
        return
    assert [str(cache.scheme) for cache in caches] == [dtype] * 2
    assert type(cache_of(generate(model, cache_implementation="static"), model)) is hf.StaticCache
    assert type(cache_of(generate(kvbits.disable(model)), model)) is hf.DynamicCache


def test_load_model_passes_options_on(saved: Path) -> None:
    model = kvbits.load_model(str(saved), "int4", dtype=torch.bfloat16, attn_implementation="eager")
    assert model.dtype == torch.bfloat16
    assert str(kvbits.disable(model).config._attn_implementation) == "eager"


def test_load_model_refuses_before_it_loads(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="int5"):
        kvbits.load_model(str(tmp_path / "nowhere"), kv_cache_dtype="int5")
    with pytest.raises(FileNotFoundError, match="there is no file"):
        kvbits.load_model(str(tmp_path / "nowhere.gguf"))


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "thing",
    ["llama", None, torch.nn.Linear(2, 2), hf.LlamaForCausalLM, hf.LlamaConfig()],
    ids=lambda x: type(x).__name__,
)
def test_what_is_no_model_is_refused(thing: Any) -> None:
    for call in (kvbits.cache_for, kvbits.enable, kvbits.explain):
        with pytest.raises(TypeError, match="Transformers model"):
            call(thing, "int4")


def test_a_wrapped_model_is_to_be_unwrapped() -> None:
    wrapped = torch.nn.DataParallel(zoo.build("llama"))
    with pytest.raises(TypeError, match=r"DataParallel; give model\.module"):
        kvbits.cache_for(wrapped, "int4")


def test_a_model_that_takes_no_cache_is_refused() -> None:
    config = hf.OpenAIGPTConfig(n_embd=48, n_layer=2, n_head=6, vocab_size=zoo.VOCABULARY)
    with pytest.raises(ValueError, match="OpenAIGPTLMHeadModel takes no cache"):
        kvbits.cache_for(hf.AutoModelForCausalLM.from_config(config), "int4")


def test_a_scheme_for_layers_that_the_model_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="layers 0 to 1"):
        kvbits.cache_for(zoo.build("llama"), "int4,layers[2]=int8")


def test_offloading_is_refused() -> None:
    model = zoo.build("llama")
    cache = kvbits.cache_for(model, "int4")
    for move in (
        cache.layers[0].offload,
        cache.layers[0].prefetch,
        lambda: cache.offload(0),
        lambda: cache.prefetch(0),
    ):
        with pytest.raises(NotImplementedError, match="cache_implementation='offloaded'"):
            move()


def test_both_a_cache_and_a_name_are_refused_as_stock_does() -> None:
    model = kvbits.enable(zoo.build("llama"))
    with pytest.raises(ValueError, match="cache_implementation"):
        generate(model, cache_implementation="quantized", **{cache_name(model): kvbits.cache_for(model, "int4")})


# -- a cache made for another model ------------------------------------------------------------------------------------


def test_a_model_that_kvbits_never_saw_is_refused() -> None:
    cache = kvbits.cache_for(zoo.build("llama"), "int4")
    stranger = zoo.build("llama")
    with pytest.raises(RuntimeError, match="made for"):
        generate(stranger, **{cache_name(stranger): cache})


@pytest.mark.parametrize(
    "changes",
    [{}, {"num_hidden_layers": 3}, {"num_key_value_heads": 3}, {"head_dim": 16}, {"dtype": torch.bfloat16}],
    ids=["same-shape", "deeper", "other-heads", "wider-heads", "other-dtype"],
)
def test_a_cache_that_another_model_has_filled_is_refused(changes: dict[str, Any]) -> None:
    model, other = zoo.build("llama"), zoo.build("llama", **changes)
    cache = kvbits.cache_for(model, INT8)
    kvbits.enable(other)
    generate(model, **{cache_name(model): cache})
    with torch.no_grad():
        with pytest.raises(ValueError, match="this cache was made for another LlamaForCausalLM than"):
            other(input_ids=zoo.prompt(2, 1), **step_mask(cache, other))
        assert cache.get_seq_length() == 51
        model.model(input_ids=zoo.prompt(2, 1), **step_mask(cache, model))  # the decoder inside is no other model
    assert cache.get_seq_length() == 52


def test_another_shape_is_refused() -> None:
    model, deeper = zoo.build("llama"), kvbits.enable(zoo.build("llama", num_hidden_layers=3))
    with pytest.raises(ValueError, match="made for a model of 2 layers and got layer 2"):
        generate(deeper, **{cache_name(deeper): kvbits.cache_for(model, INT8)})
    cache = kvbits.cache_for(model, INT8)
    generate(model, **{cache_name(model): cache})
    model.to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"torch\.float32.*torch\.bfloat16"), torch.no_grad():
        model(input_ids=zoo.prompt(2, 1), **step_mask(cache, model))


def test_an_empty_cache_that_knows_how_one_model_ropes_is_not_anothers() -> None:
    model, other = zoo.build("llama"), kvbits.enable(zoo.build("qwen2"))
    with pytest.raises(ValueError, match="made for another LlamaForCausalLM than the Qwen2ForCausalLM that runs"):
        generate(other, **{cache_name(other): kvbits.cache_for(model, "int8,pre-rope")})


def test_a_cache_of_another_model_of_the_same_shape_is_right() -> None:
    model, other = zoo.build("llama"), zoo.build("qwen2")
    kvbits.enable(other)
    cache = kvbits.cache_for(model, "exact,residual=4,block=32")
    got = generate(other, **{cache_name(other): cache})
    assert cache.model is other
    assert torch.equal(got.sequences, generate(zoo.build("qwen2")).sequences)


# -- Phi-3 throws its cache away ---------------------------------------------------------------------------------------

SHORT = 48
_ROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0],
         "original_max_position_embeddings": SHORT, "rope_theta": 10000.0}  # fmt: skip


def longrope(dtype: torch.dtype = torch.float32) -> hf.PreTrainedModel:
    return zoo.build("phi3", dtype, rope_parameters=dict(_ROPE), original_max_position_embeddings=SHORT)


@pytest.mark.parametrize("tokens", [36, 47, 48, 60])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True}], ids=["greedy", "beams", "sampling"])
def test_a_cache_that_the_model_drops_is_filled_again(options: dict[str, Any], tokens: int) -> None:
    ids, mask = zoo.padded_prompt(2, tokens)
    options = {
        "max_new_tokens": 20,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
    } | options
    stock = longrope()
    own = hf.DynamicCache(config=stock.config)
    torch.manual_seed(0)
    right = stock.generate(ids, attention_mask=mask, **{cache_name(stock): own}, **options)
    assert cache_of(right, stock) is not own  # what this test is about
    reads_one_token = zoo.installed() < (5, 24) and tokens <= SHORT  # and forgets all others, in early releases
    model = longrope()
    for scheme in ("exact", "exact,residual=4,block=32", INT8):
        cache = kvbits.cache_for(model, scheme)
        torch.manual_seed(0)
        got = model.generate(ids, attention_mask=mask, **{cache_name(model): cache}, **options)
        assert cache_of(got, model) is cache
        assert cache.get_seq_length() == tokens + 19
        if scheme == "exact" and reads_one_token:
            right = got
        elif scheme == "exact":
            assert_same_run(got, right)
        elif scheme != INT8:
            assert torch.equal(got.sequences, right.sequences)


def test_what_is_filled_again_is_under_the_scheme() -> None:
    model = longrope(torch.float64)
    cache = kvbits.cache_for(model, INT8)
    ids = zoo.prompt(1, 40)
    tokens = model.generate(ids, max_new_tokens=40, do_sample=False, **{cache_name(model): cache})
    plain = kvbits.cache_for(model, INT8)
    with torch.no_grad():
        for begin, end in [(0, SHORT + 1), *((i, i + 1) for i in range(SHORT + 1, 79))]:
            model(input_ids=tokens[:, begin:end], **{cache_name(model): plain})
    for layer, plain_layer in zip(cache.packed_layers, plain.packed_layers, strict=True):
        assert layer.core.store.counts == [2]
        stored.assert_same(stored.row_of(layer.core, 0)[:1], stored.row_of(plain_layer.core, 0)[:1])


# -- explain -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["llama", "llama-d256-eager", "gemma3", "falcon-mqa", "bloom", "gpt-oss", "qwen3-next"]
)
def test_explain_says_what_runs(name: str) -> None:
    model, family = zoo.build(name), zoo.FAMILIES[name]
    implementation = model.config._attn_implementation
    text = kvbits.explain(model, "kivi4,layers[-1]=int8")
    packed = [path for path in text.layers if path.step != "own"]
    assert {path.step for path in packed} == family.outcomes
    assert len(text.layers) - len(packed) == family.stock_layers
    assert packed[-1].stored == "int8"
    assert {path.stored for path in packed[:-1]} <= {"kivi4"}
    shown = str(text)
    assert type(model).__name__ in shown
    assert f"stock attention ({implementation})" in shown
    if name in ("falcon-mqa", "bloom"):
        assert "does not go through Transformers' attention interface" in shown
    # what it says is what a real run does
    cache = kvbits.cache_for(model, "kivi4,residual=0,sinks=0,block=32")
    generate(model, **{cache_name(model): cache})
    assert [layer.trace.outcome for layer in cache.packed_layers] == [path.step for path in packed]


@pytest.mark.parametrize("name", ["llama", "gemma3", "falcon-new"])
def test_explain_leaves_a_model_as_it_was(name: str) -> None:
    model = zoo.build(name)
    attributes = [sorted(vars(module)) for module in model.modules()]
    right = generate(model)
    kvbits.explain(model, INT8)
    with pytest.raises(ValueError, match="layers 0 to"):
        kvbits.explain(model, "int4,layers[99]=int8")
    assert traces(model) == []
    assert [sorted(vars(module)) for module in model.modules()] == attributes
    assert_same_run(generate(model), right)
    kvbits.enable(model, INT8)
    before = traces(model)
    kvbits.explain(model, "int4")
    assert traces(model) == before
    assert str(cache_of(generate(model), model).scheme) == INT8


def test_without_the_compiled_module_one_warning_and_explain_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda: (None, 0, "it was not built: no C++ compiler"))
    native.warn_if_missing.cache_clear()
    model = zoo.build("llama")
    with pytest.warns(RuntimeWarning, match="no C.. compiler.*reference kernel") as seen:
        kvbits.cache_for(model, "int4")
        text = str(kvbits.explain(model, "int4"))
    native.warn_if_missing.cache_clear()
    assert len(seen) == 1
    assert "kernel reference" in text and "not native: it was not built: no C++ compiler" in text


def test_explain_probes_with_plain_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """An id that stands for a picture raises where there is none."""
    special = dict(image_token_id=5, video_token_id=6, vision_start_token_id=7, vision_end_token_id=8)
    model, seen = zoo.build("qwen2-vl", **special), []
    model.register_forward_pre_hook(lambda m, a, k: seen.append(k["input_ids"]), with_kwargs=True)
    kvbits.explain(model, "int4")
    used = set(torch.cat(seen, dim=1).flatten().tolist())
    assert used and max(used) < zoo.VOCABULARY
    assert not used & {0, 1, 5, 6, 7, 8}  # padding and the beginning of a text among them


def test_explain_of_what_packs_nothing() -> None:
    paths = kvbits.explain(zoo.build("llama"), "exact").layers
    assert {path.step for path in paths} == {"stock"}
    assert all("packs nothing" in path.why for path in paths)


def test_explain_groups_equal_neighbours() -> None:
    shown = str(kvbits.explain(zoo.build("llama", num_hidden_layers=4), "int4,layers[0]=exact"))
    assert "layer 0: exact" in shown
    assert "layers 1-3: int4" in shown


def test_explain_of_a_model_that_asks_for_weights() -> None:
    model = zoo.build("llama", attn_implementation="eager", output_attentions=True)
    paths = kvbits.explain(model, "int4").layers
    assert {path.step for path in paths} == {"decoded"}
    assert all("output_attentions" in path.why for path in paths)


def test_explain_speaks_of_the_scheme_that_was_given() -> None:
    with pytest.raises(ValueError, match=r"^nuq3-1% needs a calibration .* --scheme nuq3-1%' or"):
        kvbits.explain(zoo.build("llama"), "nuq3-1%")
