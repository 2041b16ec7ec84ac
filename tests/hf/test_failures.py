"""Calls that end in an error, or in the middle: the cache is as it was, or says what to do, and never goes on wrong."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers as hf

import kvbits
import stored
import zoo
from kvbits.hf.cache import KVCache
from kvbits.hf.names import cache_name

pytestmark = pytest.mark.usefixtures("one_thread")

INT8 = "int8,residual=4,block=32"


class Broken(Exception):
    """What the tests make a model raise."""


@contextmanager
def failing(module: torch.nn.Module, error: type[BaseException] = Broken) -> Iterator[None]:
    def fail(*_: Any) -> None:
        raise error

    hook = module.register_forward_pre_hook(fail)
    try:
        yield
    finally:
        hook.remove()


def call(model: hf.PreTrainedModel, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids, **{cache_name(model): cache})[0]


def twins(model: hf.PreTrainedModel, ids: torch.Tensor, scheme: str = INT8) -> tuple[Any, Any]:
    """Two caches that have read ``ids``; a call on the first of them will fail."""
    caches = kvbits.cache_for(model, scheme), kvbits.cache_for(model, scheme)
    for cache in caches if ids.shape[1] else ():
        call(model, cache, ids)
    return caches


def assert_same(model: hf.PreTrainedModel, cache: Any, right: Any, *more: torch.Tensor) -> None:
    """Both answer ``more`` alike, bit for bit."""
    for ids in more:
        assert torch.equal(call(model, cache, ids), call(model, right, ids))


def assert_same_rows(cache: Any, right: Any) -> None:
    for layer, other in zip(cache.packed_layers, right.packed_layers, strict=True):
        for row in range(layer.core.rows.batch):
            stored.assert_same(stored.row_of(layer.core, row), stored.row_of(other.core, row))


PLACES: dict[str, Callable[[hf.PreTrainedModel], torch.nn.Module]] = {
    "between the layers": lambda model: model.model.layers[1].input_layernorm,
    "after the first update": lambda model: model.model.layers[0].mlp,
    "after the last update": lambda model: model.model.layers[-1].mlp,
    "in the head": lambda model: model.lm_head,
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("held", [0, 20, 35, 67, 90], ids=lambda n: f"{n}-held")
@pytest.mark.parametrize("chunk", [1, 45], ids=lambda n: f"{n}-more")
@pytest.mark.parametrize("scheme", ["exact", INT8, "fp8-static,residual=4,block=32"])
def test_a_call_that_fails_can_be_repeated(scheme: str, chunk: int, held: int, place: str) -> None:
    """Bit for bit, also where the call filled a block (39 and 71 columns) or packed the first one of all."""
    model, ids = zoo.build("llama"), zoo.prompt(2, held + chunk + 1)
    cache, right = twins(model, ids[:, :held], scheme)
    for _ in range(2):
        with failing(PLACES[place](model)), pytest.raises(Broken):
            call(model, cache, ids[:, held : held + chunk])
        assert [layer.get_seq_length() for layer in cache.layers] == [held] * 2
    assert_same(model, cache, right, ids[:, held : held + chunk], ids[:, -1:])
    assert_same_rows(cache, right)
    assert all(layer.before is None for layer in cache.packed_layers)  # nothing is kept beyond the call


def test_a_padded_call_that_fails_can_be_repeated() -> None:
    model, (ids, mask) = zoo.build("llama"), zoo.padded_prompt(3, 60)
    cache, right = kvbits.cache_for(model, INT8), kvbits.cache_for(model, INT8)

    def run(cache: Any, begin: int, end: int) -> torch.Tensor:
        with torch.no_grad():
            new = {cache_name(model): cache, "attention_mask": mask[:, :end]}
            return model(input_ids=ids[:, begin:end], **new).logits

    for each in (cache, right):
        run(each, 0, 35)
    for end in range(36, 60):  # rows fill their blocks at different steps
        with failing(model.lm_head), pytest.raises(Broken):
            run(cache, end - 1, end)
        assert torch.equal(run(cache, end - 1, end), run(right, end - 1, end))
    assert_same_rows(cache, right)


def test_beams_go_on_after_a_call_that_failed() -> None:
    model, ids = zoo.build("llama"), zoo.prompt(2, 50)
    cache, right = twins(model, ids[:, :44])
    for each in (cache, right):
        each.reorder_cache(torch.tensor([1, 0]))
    with failing(model.lm_head), pytest.raises(Broken):
        call(model, cache, ids[:, 44:45])
    for each in (cache, right):
        each.reorder_cache(torch.tensor([1, 1]))
    assert_same(model, cache, right, ids[:, 44:])


def test_a_first_call_that_fails_leaves_an_empty_cache() -> None:
    """Also where layers of the model's own type have states that nothing could take back."""
    for name in ("gemma3", "qwen3-next"):
        model, ids = zoo.build(name), zoo.prompt(1, 50)
        cache = kvbits.cache_for(model, INT8)
        with failing(model.lm_head), pytest.raises(Broken):
            call(model, cache, ids)
        assert cache.get_seq_length() == 0
        assert_same(model, cache, kvbits.cache_for(model, INT8), ids)


@pytest.mark.parametrize("name", ["gemma3", "qwen3-next", "mistral-window"])
@pytest.mark.filterwarnings("ignore:every layer of")
def test_what_cannot_be_taken_back_is_refused_until_reset(name: str) -> None:
    """Windows that are full and linear attention have dropped older tokens of the calls before."""
    model, ids = zoo.build(name), zoo.prompt(1, 60)
    cache = kvbits.cache_for(model, INT8)
    call(model, cache, ids[:, :50])
    with failing(model.lm_head), pytest.raises(Broken):
        call(model, cache, ids[:, 50:51])
    for again in (
        lambda: call(model, cache, ids[:, 50:51]),
        lambda: cache.reorder_cache(torch.tensor([0])),
        lambda: cache.crop(-1),
        lambda: call(model, copy.deepcopy(cache), ids[:, 50:51]),
    ):
        with pytest.raises(ValueError, match=r"failed halfway and could not be taken back.* reset\(\)"):
            again()
    cache.reset()
    assert_same(model, cache, kvbits.cache_for(model, INT8), ids)


def test_windows_that_are_not_full_or_that_record_are_taken_back() -> None:
    model, ids = zoo.build("gemma3"), zoo.prompt(1, 60)
    recording = [(50, True)] if zoo.installed() >= (5, 24) else []  # early releases cannot
    for held, record in [(9, False), *recording]:
        cache, right = kvbits.cache_for(model, INT8), kvbits.cache_for(model, INT8)
        for each in (cache, right):
            if record:
                each.activate_past_recording()
            call(model, each, ids[:, :held])
        with failing(model.lm_head), pytest.raises(Broken):
            call(model, cache, ids[:, held : held + 1])
        assert cache.get_seq_length() == held
        assert_same(model, cache, right, ids[:, held:])


@pytest.mark.parametrize("place", PLACES)
def test_after_an_interruption_the_next_call_says_so_once(place: str) -> None:
    """A KeyboardInterrupt passes by all hooks, so it is noticed only by the next call."""
    model, ids = zoo.build("llama"), zoo.prompt(1, 60)
    cache, right = twins(model, ids[:, :40])
    with failing(PLACES[place](model), KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        call(model, cache, ids[:, 40:41])
    with pytest.raises(ValueError, match=r"interrupted.* holds 40 columns again: repeat that call"):
        call(model, cache, ids[:, 40:41])
    assert_same(model, cache, right, ids[:, 40:])


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize(("where", "held", "chunk"), [
    ("step", 45, 1), ("append", 39, 1), ("append", 45, 45), ("store", 39, 1), ("store", 45, 45),
])  # fmt: skip
def test_an_interruption_within_a_layer_is_taken_back(
    where: str, held: int, chunk: int, layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once its tokens are there, or some of its blocks, and nobody has been told."""
    model, ids = zoo.build("llama"), zoo.prompt(2, held + chunk + 1)
    cache, right = twins(model, ids[:, :held])
    core: Any = cache.packed_layers[layer].core
    thing, name = (core.store, "append") if where == "store" else (core, where)
    method = getattr(thing, name)

    def interrupted(*arguments: Any) -> Any:
        if method(*arguments) is False:
            return False
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(thing, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            call(model, cache, ids[:, held : held + chunk])
    with pytest.raises(ValueError, match=f"interrupted.* holds {held} columns again: repeat that call"):
        call(model, cache, ids[:, held : held + chunk])
    assert_same(model, cache, right, ids[:, held : held + chunk], ids[:, held + chunk :])


def test_an_interruption_is_noticed_by_crop_and_by_the_decoder_inside() -> None:
    model, ids = zoo.build("llama"), zoo.prompt(1, 60)
    for again in (lambda cache: cache.crop(-1), lambda cache: call(model.model, cache, ids[:, 40:41])):
        cache = kvbits.cache_for(model, INT8)
        call(model, cache, ids[:, :40])
        with failing(model.lm_head, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            call(model, cache, ids[:, 40:41])
        with pytest.raises(ValueError, match="interrupted"):
            again(cache)
        again(cache)


def test_generate_goes_on_after_a_failure() -> None:
    model, ids = zoo.build("llama"), zoo.prompt(1, 40)
    options = dict(max_new_tokens=20, do_sample=False)
    right = model.generate(ids, **options, **{cache_name(model): kvbits.cache_for(model, INT8)})
    cache, calls = kvbits.cache_for(model, INT8), [0]

    def fail_once(*_: Any) -> None:
        calls[0] += 1
        if calls[0] == 7:
            raise Broken

    hook = model.lm_head.register_forward_pre_hook(fail_once)
    with pytest.raises(Broken):
        model.generate(ids, **options, **{cache_name(model): cache})
    hook.remove()
    assert cache.get_seq_length() == 45  # what was generated so far
    so_far = right[:, :46]
    rest = model.generate(so_far, max_new_tokens=14, do_sample=False, **{cache_name(model): cache})
    assert torch.equal(rest, right)


def test_a_mask_does_not_stay_with_the_cache() -> None:
    """It would be memory that nothing counts."""
    model, (ids, mask) = zoo.build("llama"), zoo.padded_prompt(2, 40)
    cache = kvbits.cache_for(model, INT8)
    with torch.no_grad():
        model(input_ids=ids, attention_mask=mask, **{cache_name(model): cache})
    assert isinstance(cache, KVCache)
    held = [x for x in vars(cache.columns).values() if isinstance(x, torch.Tensor)]
    assert held == []


# -- a cache in the wrong hands ----------------------------------------------------------------------------------------


def generated(model: hf.PreTrainedModel, cache: KVCache, ids: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
    mask = torch.ones_like(ids) if mask is None else mask
    options = {"max_new_tokens": 2, "do_sample": False, "pad_token_id": 0, cache_name(model): cache}
    return model.generate(ids, attention_mask=mask, **options)


def test_generate_says_where_a_cache_has_read_another_text() -> None:
    """Transformers cuts off as many tokens as the cache holds, whatever they are."""
    model, ids = zoo.build("llama"), zoo.prompt(2, 60)
    cache = kvbits.cache_for(model, INT8)
    call(model, cache, ids[:, :50])
    other = ids.index_fill(1, torch.tensor([7, 30]), 0)
    with pytest.warns(UserWarning, match="the cache holds 50 tokens, and from column 7 on they are not those that"):
        generated(model, cache.fork(), other)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        generated(model, cache.fork(), ids)
        if "next_sequence_length" in inspect.signature(model.prepare_inputs_for_generation).parameters:  # not in 5.0
            generated(model, cache.fork(), ids[:, 50:], torch.ones_like(ids))  # new tokens alone, with the mask of all


@pytest.mark.parametrize("tokens", [20, 49, 50])
def test_a_prompt_that_leaves_nothing_to_read_is_an_error(tokens: int) -> None:
    """Transformers would take a slice that begins somewhere in the middle."""
    model, ids = zoo.build("llama"), zoo.prompt(2, 60)
    cache = kvbits.cache_for(model, INT8)
    call(model, cache, ids[:, :50])
    with pytest.raises(ValueError, match=f"the cache holds 50 tokens and the prompt has {tokens}, so none is left"):
        generated(model, cache, ids[:, :tokens])
    assert cache.get_seq_length() == 50


def test_ids_of_padding_say_nothing_of_the_text() -> None:
    model, ids = zoo.build("llama"), zoo.prompt(2, 60)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    cache = kvbits.cache_for(model, INT8)
    with torch.no_grad():
        model(input_ids=ids[:, :50], attention_mask=mask[:, :50], **{cache_name(model): cache})
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        generated(model, cache, ids.masked_fill(mask == 0, 3), mask)
