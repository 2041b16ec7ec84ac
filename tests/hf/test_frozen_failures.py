"""A frozen cache that something goes wrong with: it says so, and goes on as the growing one does."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch

import kvbits
import zoo
from frozen_models import SMALL, built, decode, padded, prefilled, same, twins
from kvbits.hf import announce
from kvbits.hf.names import cache_name

pytestmark = pytest.mark.usefixtures("one_thread")

SCHEME = f"int4,{SMALL}"


def columns_of_layers(frozen: Any) -> set[int]:
    return {int(layer.core.columns) for layer in frozen.layers}


@pytest.mark.parametrize("capacity", (90.0, "90", None, True))
def test_capacities_that_are_no_numbers_of_tokens(capacity: Any) -> None:
    cache = prefilled(zoo.build("llama"), SCHEME, zoo.prompt(1, 20))
    with pytest.raises(TypeError, match=f"capacity={capacity!r} is no number of tokens"):
        kvbits.freeze(cache, capacity)
    assert kvbits.freeze(cache, np.int64(90)).capacity == 90


@pytest.mark.parametrize("change", ({"num_key_value_heads": 1}, {"head_dim": 4}), ids=str)
def test_a_model_of_other_heads(change: dict[str, int]) -> None:
    """Fewer heads or channels than a slot has would fit into it. A cache that was pickled knows its model no more."""
    model, ids = zoo.build("llama"), zoo.prompt(1, 20)
    other = zoo.build("llama", **change)
    kvbits.cache_for(other, SCHEME)
    cache = prefilled(model, SCHEME, ids)
    frozen = pickle.loads(pickle.dumps(kvbits.freeze(cache, 90)))
    with pytest.raises(ValueError, match=r"layer 0 holds \(heads, key channels, value channels, dtypes\) = \(2, 8, 8"):
        decode(other, frozen, ids, 1)
    same(decode(model, frozen, ids, 5), decode(model, cache, ids, 5))


@pytest.mark.parametrize("layer", (0, 1))
def test_what_is_not_finite_is_not_packed_and_named_again_at_every_call(layer: int) -> None:
    """All layers count alike, whichever of them cannot pack."""
    model, ids, _, frozen = twins(20)
    frozen.layers[layer].core.keys[0, 0, 5, 0] = torch.nan
    for _ in range(3):
        with pytest.raises(ValueError, match=f"layer {layer}: 1 of the keys to be packed are NaN, infinite or above"):
            decode(model, frozen, ids, 30)
        assert columns_of_layers(frozen) == {frozen.columns} == {40}


def test_a_forward_that_is_interrupted_behind_its_last_layer() -> None:
    """Every layer has stored its token by then, and nothing but the model's hooks knows that it did not end."""
    model, ids = zoo.build("llama"), zoo.prompt(1, 40)
    cache = prefilled(model, SCHEME, ids)
    frozen, expected = kvbits.freeze(cache, 90), decode(model, cache, ids, 20)
    same(decode(model, frozen, ids, 8), expected[:8])
    token = expected[7].argmax(-1, keepdim=True)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = model.lm_head.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        decode(model, frozen, token, 1)
    hook.remove()
    with pytest.raises(RuntimeError, match=r"was interrupted.* the cache holds 47 columns again: repeat that call"):
        decode(model, frozen, token, 1)
    same(decode(model, frozen, token, 12), expected[8:])


def test_steps_that_were_told_and_did_not_run_are_not_taken_for_text() -> None:
    model, ids, cache, frozen = twins(30)
    frozen.advance(3)
    frozen.take_back()
    assert frozen.columns == 29 and columns_of_layers(frozen) == {29}
    same(decode(model, frozen, ids, 10), decode(model, cache, ids, 10))


def uncounted(monkeypatch: pytest.MonkeyPatch, model: Any, frozen: Any, ids: torch.Tensor, steps: int) -> None:
    """Steps as a compiled loop makes them that does not call ``advance``."""
    with monkeypatch.context() as patch:
        patch.setattr(announce, "host_runs", lambda: False)
        decode(model, frozen, ids, steps)


def test_several_steps_are_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also from layers that are exact, whose later slots must not be seen; not from a window that has lost tokens."""
    model, ids = zoo.build("llama"), zoo.prompt(1, 30)
    cache = prefilled(model, f"{SCHEME},layers[1]=exact", ids)
    frozen = kvbits.freeze(cache, 90)
    uncounted(monkeypatch, model, frozen, ids, 5)
    frozen.take_back()
    same(decode(model, frozen, ids, 10), decode(model, cache, ids, 10))
    window = built("gemma3")
    frozen = kvbits.freeze(prefilled(window, SCHEME, ids), 90)
    uncounted(monkeypatch, window, frozen, ids, 5)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"5 steps without advance\(\) cannot be taken back"):
            frozen.take_back()
        assert columns_of_layers(frozen) == {34}


def test_a_refused_mask_costs_no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids, _, frozen = twins(30)
    uncounted(monkeypatch, model, frozen, ids, 3)
    with pytest.raises(ValueError, match="a frozen cache takes one token of text"):
        model(input_ids=ids[:, :1], attention_mask=torch.zeros(1, 33).long(), **{cache_name(model): frozen})
    assert frozen.columns == 32


def test_masks_that_hide_something() -> None:
    """None is read, so one that a growing cache would follow, or refuse, is refused."""
    model = zoo.build("llama")
    ids, mask = padded(40, 25)
    cache = prefilled(model, SCHEME, ids, mask)
    frozen = kvbits.freeze(cache, 90)
    call = {"input_ids": ids[:, -1:], cache_name(model): frozen}
    hole = mask.clone()
    hole[0, 7] = 0
    for wrong, reason in (
        (hole, "other columns text"),
        (torch.ones_like(mask), "other columns text"),
        (mask[:, -1:], r"\(2, 1\) must cover the columns in the frozen cache and the new one, \(2, 40\)"),
        (torch.zeros(2, 1, 1, 40), r"\(2, 1, 1, 40\) must cover"),
    ):
        with pytest.raises(ValueError, match=reason):
            model(**call, attention_mask=wrong)
    with torch.no_grad():
        got = model(**call, attention_mask=mask, position_ids=zoo.positions(mask)[:, -1:]).logits[:, -1]
    same(got[None], decode(model, cache, ids, 1, mask))


def test_generate_with_masks_that_hide_something() -> None:
    """Its own mask of four dimensions would say what nobody reads; so would one made of padding among the ids."""
    model = zoo.build("llama")
    ids, mask = padded(40, 25)
    cache = prefilled(model, SCHEME, ids, mask)
    hole = mask.clone()
    hole[0, 7] = 0
    options = {"max_new_tokens": 2, "do_sample": False, "eos_token_id": None}
    for given in ({"attention_mask": hole, "pad_token_id": 0}, {"pad_token_id": int(ids[0, 9])}):
        frozen = kvbits.freeze(cache, 90)
        with pytest.raises(ValueError, match=r"other columns text .* \(Where generate is given none"):
            model.generate(ids, **given, **options, **{cache_name(model): frozen})
        assert columns_of_layers(frozen) == {39}


def test_steps_that_cannot_be() -> None:
    frozen = kvbits.freeze(prefilled(zoo.build("llama"), SCHEME, zoo.prompt(1, 20)), 90)
    for steps in (-1, 1.5, "1"):
        with pytest.raises(ValueError, match=f"0 or more, or None to ask the device, not {steps!r}"):
            frozen.advance(steps)
    with pytest.raises(TypeError, match=r"counts kvbits\.KVCache objects, not StaticKVCache"):
        kvbits.nbytes_of([frozen])


def test_a_model_of_more_layers() -> None:
    model, ids = zoo.build("llama", num_hidden_layers=3), zoo.prompt(1, 20)
    kvbits.cache_for(model, SCHEME)
    frozen = pickle.loads(pickle.dumps(kvbits.freeze(prefilled(zoo.build("llama"), SCHEME, ids), 90)))
    with pytest.raises(ValueError, match="made for a model of 2 layers and got layer 2"):
        decode(model, frozen, ids, 1)
    assert columns_of_layers(frozen) == {19}


def test_copies_go_on_by_themselves_in_any_mode() -> None:
    model, ids = zoo.build("llama"), zoo.prompt(1, 40)
    cache = prefilled(model, f"default,{SMALL}", ids)
    frozen, expected = kvbits.freeze(cache, 120), decode(model, cache, ids, 50)
    with torch.inference_mode():
        deep, shallow = copy.deepcopy(frozen), copy.copy(frozen)
        model(input_ids=ids[:, -1:], **{cache_name(model): deep})
    same(decode(model, deep, expected[0].argmax(-1, keepdim=True), 49), expected[1:])
    for one in (shallow, frozen):
        same(decode(model, one, ids, 50), expected)
