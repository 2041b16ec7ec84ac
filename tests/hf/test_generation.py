"""Every mode of ``generate`` and every operation on a cache: exact and lossless as the stock cache, quantized right.

Right, under a quantized scheme, is what a plain loop of forwards over the same tokens in the same chunks gives: the
logits of every step must be its logits, and the stored rows its rows, whatever beams, crops and selections came
between. That runs in float64, where rounding hardly ever moves a value to another code.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers as hf

import kvbits
import stored
import zoo
from kvbits.hf.cache import KVCache
from kvbits.hf.names import cache_name
from zoo import feed, positions

MODELS = ["llama", "gemma3"]  # full attention; sliding and full attention mixed
LOSSLESS = "exact,residual=4,block=32"
QUANTIZED = "int8,residual=6,block=32"

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT, NEW_TOKENS = 34, 24
"""With these a block is packed in the middle of generating."""

BATCH, COLUMNS = 3, 49
"""What operations on a cache find in it."""


@functools.cache
def build(name: str, dtype: torch.dtype, attached: bool) -> hf.PreTrainedModel:
    """The stock runs get a model that kvbits never touched."""
    return zoo.build(name, dtype)


@functools.cache
def assistant(name: str, dtype: torch.dtype) -> hf.PreTrainedModel:
    """The first layers of the same model: drafts that are right now and then."""
    model = zoo.build(name, dtype)
    with torch.no_grad():
        for parameter in model.model.layers[-1].parameters():
            parameter.zero_()
    return model


@pytest.fixture(scope="module", autouse=True)
def forget_models() -> Iterator[None]:
    yield
    build.cache_clear()
    assistant.cache_clear()


def give(cache: hf.Cache, model: hf.PreTrainedModel) -> dict[str, hf.Cache]:
    return {cache_name(model): cache}


# -- modes of generate -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mode:
    """One way to call ``generate``.

    Attributes:
        options: for ``generate``.
        batch: rows of the prompt; more than one are left-padded.
        chunks: how the prompt is fed, where not at once.
        drafts: whether tokens are proposed and taken back, so that chunks differ from a plain loop's.
        logits: whether the raw logits of a step are those of the model.
    """

    options: dict[str, Any] = field(default_factory=dict)
    batch: int = 2
    chunks: tuple[int, ...] = (PROMPT,)
    drafts: str = ""
    logits: bool = True


def contrastive(model: Any, input_ids: torch.Tensor, generation_config: Any, **model_kwargs: Any) -> torch.Tensor:
    """A small contrastive search (arXiv 2202.06417): candidates as rows of the cache, of which one is kept."""
    name = cache_name(model)
    cache, mask = model_kwargs[name], model_kwargs.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask
    options = dict(use_cache=True, output_hidden_states=True)
    options[name] = cache
    out = model(input_ids=input_ids, attention_mask=mask, position_ids=positions(mask), **options)
    context, logits = out.hidden_states[-1], out.logits[:, -1]
    batch, width = input_ids.shape[0], 3
    while input_ids.shape[1] < generation_config.max_length:
        top = logits.softmax(-1).topk(width)
        cache.batch_repeat_interleave(width)
        mask = torch.cat([mask, mask.new_ones(batch, 1)], dim=1)
        wider = mask.repeat_interleave(width, dim=0)
        candidates = top.indices.view(-1, 1)
        out = model(input_ids=candidates, attention_mask=wider, position_ids=positions(wider)[:, -1:], **options)
        new = out.hidden_states[-1][:, -1].view(batch, width, -1)
        likeness = torch.cosine_similarity(new[:, :, None], context[:, None], dim=-1)
        likeness = likeness.masked_fill(mask[:, None, :-1] == 0, -1).amax(-1)
        chosen = (0.4 * top.values - 0.6 * likeness).argmax(-1)
        cache.batch_select_indices(torch.arange(batch) * width + chosen)
        pick = torch.arange(batch), chosen
        input_ids = torch.cat([input_ids, top.indices[pick][:, None]], dim=1)
        context = torch.cat([context, new[pick][:, None]], dim=1)
        logits = out.logits[:, -1].view(batch, width, -1)[pick]
    return input_ids


MODES = {
    "greedy": Mode(),
    "sampling": Mode(dict(do_sample=True, top_k=20)),
    "three-samples": Mode(dict(do_sample=True, num_return_sequences=3)),
    "beams": Mode(dict(num_beams=4)),
    "two-of-four-beams": Mode(dict(num_beams=4, num_return_sequences=2, length_penalty=0.5)),
    "beam-sampling": Mode(dict(num_beams=4, do_sample=True)),
    "prefill-chunks": Mode(dict(prefill_chunk_size=12), chunks=(12, 12, 10)),
    "guidance": Mode(dict(guidance_scale=1.5), batch=1),
    "assistant": Mode(batch=1, drafts="assistant"),
    "assistant-sampling": Mode(dict(do_sample=True), batch=1, drafts="assistant"),
    "own-assistant": Mode(batch=1, drafts="self"),
    "early-exit": Mode(dict(assistant_early_exit=1), batch=1, drafts="early exit"),
    "prompt-lookup": Mode(dict(prompt_lookup_num_tokens=4), batch=1, drafts="lookup"),
    "contrastive": Mode(dict(custom_generate=contrastive), logits=False),
}


def run_mode(mode: Mode, name: str, model: hf.PreTrainedModel, cache: hf.Cache) -> Any:
    """Sequences, and for the stock modes logits and beams too; the same seed each time."""
    ids, mask = zoo.padded_prompt(mode.batch, PROMPT)
    options = {"do_sample": False, **mode.options}
    if mode.drafts == "lookup":
        ids = zoo.prompt(1, 6).repeat(1, 6)[:, :PROMPT]  # a prompt that repeats itself
        options["eos_token_id"] = zoo.VOCABULARY + 1  # 5.0 cannot do without one; this one never comes
    if mode.drafts == "assistant":
        options["assistant_model"] = assistant(name, model.dtype)
    elif mode.drafts == "self":
        options["assistant_model"] = model
    if mode.logits:
        options |= {"return_dict_in_generate": True, "output_logits": True}
    torch.manual_seed(0)
    result = model.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, **options, **give(cache, model))
    return result if mode.logits else {"sequences": result}


def skip_where_stock_fails(mode: str, name: str) -> None:
    if zoo.installed() >= (5, 24):
        return
    if MODES[mode].drafts and name == "gemma3":
        pytest.skip(f"Transformers {hf.__version__} cannot take drafts back from a sliding-window layer")
    if MODES[mode].drafts == "early exit":
        pytest.skip(f"early exit misses an argument of its own in Transformers {hf.__version__}")
    if mode == "prefill-chunks" and name == "gemma3":
        pytest.skip(f"prefill in chunks over sliding windows gives wrong logits in Transformers {hf.__version__}")


@functools.cache
def stock_run(mode: str, name: str) -> Any:
    model = build(name, torch.float32, attached=False)
    return run_mode(MODES[mode], name, model, zoo.stock_cache(model))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name, sliding", [("llama", False), ("gemma3", False), ("gemma3", True)])
def test_exact_and_lossless_caches_give_what_the_stock_one_does_in_every_mode(
    name: str, sliding: bool, mode: str
) -> None:
    skip_where_stock_fails(mode, name)
    right = stock_run(mode, name)
    model = build(name, torch.float32, attached=True)
    cache = kvbits.cache_for(model, LOSSLESS, sliding=sliding)
    got = run_mode(MODES[mode], name, model, cache)
    assert len(cache.packed_layers) == (2 if not sliding else 4)
    assert all(layer.core.store.longest > 0 for layer in cache.packed_layers)
    assert torch.equal(got["sequences"], right["sequences"])
    if not sliding:
        got = run_mode(MODES[mode], name, model, kvbits.cache_for(model, "exact"))
        assert torch.equal(got["sequences"], right["sequences"])
        assert not MODES[mode].logits or torch.equal(torch.stack(got.logits), torch.stack(right.logits))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_quantized_modes_equal_a_plain_loop_over_the_same_tokens(name: str, mode: str) -> None:
    skip_where_stock_fails(mode, name)
    how = MODES[mode]
    model = build(name, torch.float64, attached=True)
    cache = kvbits.cache_for(model, QUANTIZED)
    got = run_mode(how, name, model, cache)
    tokens = got["sequences"]
    rows = tokens.shape[0]
    assert tokens.shape[1] == PROMPT + NEW_TOKENS
    mask = zoo.padded_prompt(how.batch, PROMPT)[1].repeat_interleave(rows // how.batch, dim=0)
    plain = kvbits.cache_for(model, QUANTIZED)
    fed = cache.get_seq_length()
    assert tokens.shape[1] - fed in (0, 1)  # most modes never feed their last token
    logits = feed(model, plain, tokens[:, :fed], mask, (*how.chunks, *[1] * (fed - PROMPT)))
    assert all(layer.core.store.longest > 0 for layer in plain.packed_layers)
    if how.logits and not how.drafts and "guidance_scale" not in how.options:
        for step, given in enumerate(got.logits):
            beam = torch.arange(rows) if got.get("beam_indices") is None else got.beam_indices[:, step]
            wanted = logits[:, PROMPT - 1 + step].float()  # what generate makes of them
            assert (given[beam] - wanted).abs().max() <= 1e-6 * wanted.abs().max(), f"step {step}"
    if "num_beams" not in how.options:  # whose cache holds the beams that were running at the end
        for row in range(rows):
            assert_same_row(cache, row, plain, row)


def assert_same_row(got: KVCache, row: int, right: KVCache, right_row: int) -> None:
    """The first packed layer, whose keys and values depend on the tokens alone, stores the same, bit for bit.

    Its exact tokens are allowed the rounding of float64: chunks of other lengths are multiplied in another order.
    """
    a, b = (stored.row_of(cache.packed_layers[0].core, r) for cache, r in ((got, row), (right, right_row)))
    stored.assert_same((a[0], a[3]), (b[0], b[3]))
    torch.testing.assert_close(a[1:3], b[1:3], rtol=1e-12, atol=1e-12)


# -- modes that Transformers itself refuses ----------------------------------------------------------------------------

REFUSED_MODES = {
    "contrastive-search": dict(penalty_alpha=0.6, top_k=4),
    "dola": dict(dola_layers="high"),
    "group-beams": dict(num_beams=4, num_beam_groups=2, diversity_penalty=0.5),
    "constrained-beams": dict(num_beams=4, force_words_ids=[[5, 6]]),
    "low-memory-beams": dict(num_beams=4, low_memory=True),
    "batched-drafts": dict(prompt_lookup_num_tokens=3),
}


@pytest.mark.parametrize("options", REFUSED_MODES.values(), ids=REFUSED_MODES)
def test_modes_that_transformers_refuses_are_refused_alike(options: dict[str, Any]) -> None:
    """They moved to code on the hub, or were given up: the stock cache does not get further than ours."""
    ids, mask = zoo.padded_prompt()
    stock, ours = build("llama", torch.float32, attached=False), build("llama", torch.float32, attached=True)
    errors = []
    for model, cache in ((stock, zoo.stock_cache(stock)), (ours, kvbits.cache_for(ours, "int4"))):
        with pytest.raises((ValueError, NotImplementedError, OSError)) as caught:
            model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False, **options, **give(cache, model))
        errors.append((caught.type, str(caught.value)))
    assert errors[0] == errors[1]


# -- several calls on one cache ----------------------------------------------------------------------------------------


def chat(model: hf.PreTrainedModel, cache: hf.Cache, batch: int, whole: bool = True) -> torch.Tensor:
    """Three turns: a prompt, then more text after each answer, always with the mask of everything."""
    ids, mask = zoo.padded_prompt(batch, 20)
    given = ids
    for turn in range(3):
        if turn:
            more = zoo.prompt(batch, 9, seed=turn + 5)
            # The last token of an answer is in no cache yet.
            given = torch.cat([ids, more] if whole else [ids[:, -1:], more], dim=1)
            ids = torch.cat([ids, more], dim=1)
            mask = torch.cat([mask, mask.new_ones(batch, ids.shape[1] - mask.shape[1])], dim=1)
        made = model.generate(given, attention_mask=mask, max_new_tokens=7, do_sample=False, **give(cache, model))
        ids = torch.cat([ids, made[:, given.shape[1] :]], dim=1)
    return ids


@pytest.mark.parametrize("batch", [1, 2], ids=["one-row", "padded"])
@pytest.mark.parametrize("name", MODELS)
def test_chat_turns_on_one_cache(name: str, batch: int) -> None:
    stock = build(name, torch.float32, attached=False)
    right = chat(stock, zoo.stock_cache(stock), batch)
    model = build(name, torch.float32, attached=True)
    for scheme in ("exact", LOSSLESS):
        cache = kvbits.cache_for(model, scheme)
        assert torch.equal(chat(model, cache, batch), right)
        assert cache.get_seq_length() == right.shape[1] - 1
        if zoo.installed() >= (5, 24):
            assert torch.equal(chat(model, kvbits.cache_for(model, scheme), batch, whole=False), right)
    model = build(name, torch.float64, attached=True)
    cache, plain = kvbits.cache_for(model, QUANTIZED), kvbits.cache_for(model, QUANTIZED)
    tokens = chat(model, cache, batch)
    feed(model, plain, tokens[:, :-1], zoo.padded_prompt(batch, 20)[1], (20, *[1] * 6, 10, *[1] * 6, 10, *[1] * 6))
    assert plain.packed_layers[0].core.store.longest == 1
    for row in range(batch):
        for layer, plain_layer in zip(cache.packed_layers, plain.packed_layers, strict=True):
            stored.assert_same(stored.row_of(layer.core, row), stored.row_of(plain_layer.core, row))


@pytest.mark.parametrize("scheme", ["exact", LOSSLESS, QUANTIZED, "fp8-static,residual=4,block=32"])
@pytest.mark.parametrize("name", MODELS)
def test_reset_and_reuse_with_another_batch(name: str, scheme: str) -> None:
    model = build(name, torch.float32, attached=True)
    cache = kvbits.cache_for(model, scheme)
    for batch in (2, 1, 3):
        ids, mask = zoo.padded_prompt(batch, PROMPT, seed=batch)
        options = dict(attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False)
        got = model.generate(ids, **options, **give(cache, model))
        fresh = kvbits.cache_for(model, scheme)
        assert torch.equal(got, model.generate(ids, **options, **give(fresh, model)))
        assert cache.nbytes == fresh.nbytes
        cache.reset()
        assert cache.get_seq_length() == 0
        assert cache.nbytes.codes == cache.nbytes.residual == cache.nbytes.sinks == 0
    feed(model, cache, *zoo.padded_prompt(2, 8), (8,))
    with pytest.raises(ValueError, match=r"2 rows.*reset"), torch.no_grad():
        model(input_ids=zoo.prompt(3, 1), use_cache=True, **give(cache, model))


@pytest.mark.parametrize("scheme", ["exact", LOSSLESS, QUANTIZED])
@pytest.mark.parametrize("name", MODELS)
def test_copies_of_a_prefilled_cache_continue_apart(name: str, scheme: str) -> None:
    model = build(name, torch.float32, attached=True)
    ids, mask = zoo.padded_prompt(2, PROMPT + 10)
    prefilled = kvbits.cache_for(model, scheme)
    feed(model, prefilled, ids, mask, (PROMPT + 10,))
    before = [stored.row_of(prefilled.packed_layers[0].core, row) for row in range(2)]
    for seed in (7, 8):
        more = torch.cat([ids, zoo.prompt(2, 6, seed=seed)], dim=1)
        options = dict(attention_mask=torch.cat([mask, mask.new_ones(2, 6)], 1), max_new_tokens=30, do_sample=False)
        got = model.generate(more, **options, **give(copy.deepcopy(prefilled), model))
        alone = kvbits.cache_for(model, scheme)
        feed(model, alone, ids, mask, (PROMPT + 10,))
        assert torch.equal(got, model.generate(more, **options, **give(alone, model)))
    for row in range(2):
        stored.assert_same(stored.row_of(prefilled.packed_layers[0].core, row), before[row])


@pytest.mark.parametrize("scheme", ["exact", LOSSLESS, QUANTIZED])
def test_a_prompt_read_under_inference_mode_continues_in_any_mode(scheme: str) -> None:
    model = build("llama", torch.float32, attached=True)
    ids, mask = zoo.padded_prompt(BATCH, COLUMNS)
    continuations = []
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        cache = kvbits.cache_for(model, scheme)
        with mode():
            model(input_ids=ids, attention_mask=mask, position_ids=positions(mask), **give(cache, model))
            cache.reorder_cache(torch.tensor([1, 0, 2]))
        cache.crop(-12)
        continuations.append(continued(model, cache, [1, 0, 2], COLUMNS - 12))
    assert torch.equal(continuations[0], continuations[1])
    assert torch.equal(continuations[0], continuations[2])


@pytest.mark.parametrize("scheme", ["exact", LOSSLESS, QUANTIZED])
@pytest.mark.parametrize("name", MODELS)
def test_two_caches_take_turns_on_one_model(name: str, scheme: str) -> None:
    model = build(name, torch.float32, attached=True)
    prompts = [zoo.padded_prompt(2, 46, seed=3), (zoo.prompt(1, 46, seed=4), torch.ones(1, 46, dtype=torch.int64))]
    chunks = (38, 1, 5, 1, 1)
    turns = [kvbits.cache_for(model, scheme) for _ in prompts]
    last, done = [], 0
    for chunk in chunks:
        done += chunk
        for cache, (ids, mask) in zip(turns, prompts, strict=True):
            with torch.no_grad():
                new = {"attention_mask": mask[:, :done], "position_ids": positions(mask)[:, done - chunk : done]}
                last.append(model(input_ids=ids[:, done - chunk : done], **new, **give(cache, model)).logits)
    for index, (ids, mask) in enumerate(prompts):
        right = feed(model, kvbits.cache_for(model, scheme), ids, mask, chunks)
        assert torch.equal(torch.cat(last[index::2], dim=1), right)


# -- operations on a cache ---------------------------------------------------------------------------------------------

OPERATIONS: dict[str, tuple[Callable[[hf.Cache], Any], Callable[[list[int]], list[int]]]] = {
    "repeat": (lambda cache: cache.batch_repeat_interleave(2), lambda rows: [r for r in rows for _ in range(2)]),
    "select": (lambda cache: cache.batch_select_indices(torch.tensor([2, 0])), lambda rows: [2, 0]),
    "select-mask": (lambda cache: cache.batch_select_indices(torch.tensor([True, False, True])), lambda rows: [0, 2]),
    "select-last": (lambda cache: cache.batch_select_indices(torch.tensor([-1])), lambda rows: [2]),
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor([2, 2, 0])), lambda rows: [2, 2, 0]),
}


def prefilled(model: hf.PreTrainedModel, cache: hf.Cache) -> hf.Cache:
    """Three rows, two of them padded, with blocks packed at different steps."""
    ids, mask = zoo.padded_prompt(BATCH, COLUMNS)
    if zoo.installed() >= (5, 24):
        cache.activate_past_recording()  # what lets stock sliding-window layers be cropped
    feed(model, cache, ids, mask[:, : COLUMNS - 9], (COLUMNS - 9, 5, 1, 1, 1, 1))
    return cache


def continued(model: hf.PreTrainedModel, cache: hf.Cache, rows: list[int], columns: int) -> torch.Tensor:
    """Logits of a chunk and of steps after the operation."""
    mask = zoo.padded_prompt(BATCH, COLUMNS)[1][rows, :columns]
    logits = []
    for step in range(4):
        new = zoo.prompt(BATCH, 3 if step == 0 else 1, seed=20 + step)[rows]
        mask = torch.cat([mask, torch.ones_like(new)], dim=1)
        with torch.no_grad():
            result = model(
                input_ids=new, attention_mask=mask, position_ids=positions(mask)[:, -new.shape[1] :], use_cache=True,
                **give(cache, model),
            )  # fmt: skip
        logits.append(result.logits)
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", MODELS)
def test_operations_on_rows(name: str, operation: str) -> None:
    operate, rows_after = OPERATIONS[operation]
    rows = rows_after(list(range(BATCH)))
    stock = build(name, torch.float32, attached=False)
    cache = prefilled(stock, zoo.stock_cache(stock))
    operate(cache)
    right = continued(stock, cache, rows, COLUMNS)
    model = build(name, torch.float32, attached=True)
    for scheme in ("exact", LOSSLESS, QUANTIZED):
        cache = prefilled(model, kvbits.cache_for(model, scheme))
        before = [[stored.row_of(layer.core, row) for row in range(BATCH)] for layer in cache.packed_layers]
        operate(cache)
        for old, layer in zip(before, cache.packed_layers, strict=True):
            for new_row, old_row in enumerate(rows):
                stored.assert_same(stored.row_of(layer.core, new_row), old[old_row])
        assert cache.columns.rows.batch == len(rows)
        got = continued(model, cache, rows, COLUMNS)
        if scheme == "exact":
            assert torch.equal(got, right)
        elif scheme == LOSSLESS:
            assert (got - right).abs().max() <= 1e-5 * right.abs().max()
        else:  # what was packed stays packed: the rows now hold what they would without the operation
            plain = continued(model, prefilled(model, kvbits.cache_for(model, scheme)), list(range(BATCH)), COLUMNS)
            assert (got - plain[rows]).abs().max() <= 1e-4 * right.abs().max()


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", ["qwen3-next", "lfm2"])
def test_operations_on_rows_of_states(name: str, operation: str) -> None:
    """Linear attention: Transformers' own states know reordering alone."""
    operate, rows_after = OPERATIONS[operation]
    model, ids, more = zoo.build(name), zoo.prompt(BATCH, COLUMNS), zoo.prompt(BATCH, 4, seed=2)
    rows = rows_after(list(range(BATCH)))
    logits = []
    for then, chosen in ((operate, rows), (lambda cache: None, list(range(BATCH)))):
        cache = kvbits.cache_for(model, QUANTIZED)
        with torch.no_grad():
            model(input_ids=ids, use_cache=True, **give(cache, model))
            then(cache)
            steps = [model(input_ids=x[chosen], use_cache=True, **give(cache, model)).logits for x in more.split(1, 1)]
        logits.append(torch.cat(steps, dim=1))
    assert (logits[0] - logits[1][rows]).abs().max() <= 1e-4 * logits[1].abs().max()


def croppable() -> list[tuple[str, int]]:
    """Stock sliding-window layers take back what was recorded since the last crop, and nothing at all before 5.24."""
    return [("llama", gone) for gone in (0, 2, 9, 30, 41)] + [("gemma3", 2)] * (zoo.installed() >= (5, 24))


@pytest.mark.parametrize("name, gone", croppable())
def test_crop(name: str, gone: int) -> None:
    stock = build(name, torch.float32, attached=False)
    cache = prefilled(stock, zoo.stock_cache(stock))
    if gone:  # minus nothing was everything before 5.13
        cache.crop(-gone)
    left = COLUMNS - gone
    right = continued(stock, cache, list(range(BATCH)), left)
    model = build(name, torch.float32, attached=True)
    for scheme in ("exact", LOSSLESS, QUANTIZED):
        cache = prefilled(model, kvbits.cache_for(model, scheme))
        before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.packed_layers]
        if gone:
            cache.crop(-gone)
        assert cache.get_seq_length() == left
        for (keys, values), layer in zip(before, cache.packed_layers, strict=True):
            assert torch.equal(layer.keys, keys[:, :, :left])
            assert torch.equal(layer.values, values[:, :, :left])
        got, seen = continued(model, cache, list(range(BATCH)), left), right
        if left < 14:  # nothing but padding is left of the first row, whose first new token sees only itself
            got, seen = got[1:], right[1:]
        if scheme == "exact":
            assert torch.equal(got, seen)
        elif scheme == LOSSLESS:
            assert (got - seen).abs().max() <= 1e-5 * seen.abs().max()
        else:
            assert 0 < (got - seen).abs().max() <= 1e-2 * seen.abs().max()


@pytest.mark.parametrize("name", MODELS)
def test_what_cannot_be_taken_back_raises_and_changes_nothing(name: str) -> None:
    model = build(name, torch.float32, attached=True)
    ids, mask = zoo.padded_prompt(BATCH, COLUMNS)
    caches = [kvbits.cache_for(model, QUANTIZED) for _ in range(2)]
    for cache in caches:
        feed(model, cache, ids, mask, (COLUMNS - 1, 1))
    if name == "gemma3":  # its windows are full and were not told to record
        with pytest.raises((RuntimeError, ValueError)):
            caches[0].crop(-2)
    else:
        for index in (torch.tensor([0, BATCH]), torch.tensor([-BATCH - 1])):
            with pytest.raises(IndexError, match="not all among the 3 rows"):
                caches[0].batch_select_indices(index)
    got, right = (continued(model, cache, list(range(BATCH)), COLUMNS) for cache in caches)
    assert torch.equal(got, right)


@pytest.mark.parametrize("name", MODELS)
def test_drafts_taken_back_across_blocks_do_not_pile_up_errors(name: str) -> None:
    """With no recent tokens kept exact, crops reach into packed blocks, which are decoded and encoded again."""
    skip_where_stock_fails("assistant", name)
    model = build(name, torch.float64, attached=True)
    cache = kvbits.cache_for(model, "int8,residual=0,sinks=0,block=32")
    taken_back = 0

    def crop(count: int) -> None:
        nonlocal taken_back
        before = cache.get_seq_length()
        type(cache).crop(cache, count)
        taken_back += before - cache.get_seq_length()

    cache.crop = crop  # type: ignore[method-assign]
    tokens = run_mode(MODES["assistant"], name, model, cache)["sequences"]
    assert taken_back > 0
    layer = cache.packed_layers[0]
    exact = kvbits.cache_for(model, "exact")
    feed(model, exact, tokens[:, :-1], torch.ones_like(tokens[:, :PROMPT]), (tokens.shape[1] - 1,))
    plain = kvbits.cache_for(model, "int8,residual=0,sinks=0,block=32")
    feed(model, plain, tokens[:, :-1], torch.ones_like(tokens[:, :PROMPT]), (tokens.shape[1] - 1,))
    right = exact.packed_layers[0].keys
    once = (plain.packed_layers[0].keys - right).abs().max()
    assert 0 < (layer.keys - right).abs().max() <= 2 * once


# -- attention weights -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_attention_weights_under_eager(name: str) -> None:
    def run(model: hf.PreTrainedModel, cache: hf.Cache) -> Any:
        ids, mask = zoo.padded_prompt(2, PROMPT)
        return model.generate(
            ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, return_dict_in_generate=True,
            output_attentions=True, output_hidden_states=True, **give(cache, model),
        )  # fmt: skip

    stock = zoo.build(name, attn_implementation="eager")
    right = run(stock, zoo.stock_cache(stock))
    model = zoo.build(name, attn_implementation="eager")
    for scheme, tolerance in (("exact", 0.0), (LOSSLESS, 1e-5)):
        cache = kvbits.cache_for(model, scheme)
        got = run(model, cache)
        assert torch.equal(got.sequences, right.sequences)
        for what in ("attentions", "hidden_states"):
            for step, right_step in zip(got[what], right[what], strict=True):
                for layer, right_layer in zip(step, right_step, strict=True):
                    assert layer.shape == right_layer.shape
                    assert (layer - right_layer).abs().max() <= tolerance * right_layer.abs().max()
    assert {layer.trace.outcome for layer in cache.packed_layers} == {"decoded"}


def test_beams_of_a_model_whose_layers_all_stay_stock() -> None:
    """Operations on the cache must reach the model's own layers also where kvbits holds none."""
    model, (ids, mask) = zoo.build("mistral-window"), zoo.padded_prompt(2, 40)
    options = {"attention_mask": mask, "num_beams": 4, "max_new_tokens": 20, "do_sample": False}
    expected = model.generate(ids, **options)
    with pytest.warns(UserWarning, match="packs nothing; pass sliding=True"):
        cache = kvbits.cache_for(model, "int4")
    assert torch.equal(model.generate(ids, **options, **{cache_name(model): cache}), expected)


def test_a_scheme_that_keeps_whole_windows_exact_says_so() -> None:
    model = zoo.build("mistral-window")
    with pytest.warns(UserWarning, match="too short to save memory .* give a smaller residual="):
        cache = kvbits.cache_for(model, "int4", sliding=True)
    assert [type(layer) for layer in cache.layers] == [type(layer) for layer in zoo.stock_cache(model).layers]
