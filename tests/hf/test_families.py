"""Every family of the zoo: exact equals the stock cache, packing loses nothing, quantizing loses what it should.

The yardstick of each family comes from a model of its own that kvbits never touched: logits of given tokens in a
prompt, a chunk and single steps, and a greedy continuation, both of a left-padded batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest
import torch
import transformers as hf

import kvbits
import zoo
from kvbits.hf.cache import KVCache
from kvbits.hf.names import cache_name
from kvbits.hf.rotation.frequencies import CannotUnrope

LOSSLESS = "exact,residual=4,block=32"  # all of the packed machinery, with nothing lost
QUANTIZED = "int8,residual=4,block=32"

pytestmark = pytest.mark.usefixtures("one_thread")
TOKENS, NEW_TOKENS = 56, 12
CHUNKS = (42, 1, 1, 9, 1, 1, 1)
"""How the given tokens are fed: the first chunk packs one block, the fourth arrives over packed history."""

ARGUMENT_NAMES = ["past_key_values"] + (["cache"] if zoo.installed() >= (5, 24) else [])


@functools.cache
def attached(name: str) -> hf.PreTrainedModel:
    return zoo.build(name)


@functools.cache
def yardstick(name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of an untouched model with its own cache: teacher-forced logits, greedy tokens and their logits."""
    model = zoo.build(name)
    return teacher_forced(model, zoo.stock_cache(model)), *generate(model, zoo.stock_cache(model))


@functools.cache
def quantized(name: str) -> tuple[torch.Tensor, KVCache]:
    """Teacher-forced logits under 8 bits, and the cache that they came from."""
    cache = kvbits.cache_for(attached(name), QUANTIZED)
    return teacher_forced(attached(name), cache), cache


def teacher_forced(model: hf.PreTrainedModel, cache: hf.Cache, argument: str | None = None) -> torch.Tensor:
    """Logits ``[B, T, V]`` of a left-padded batch of given tokens, by plain forwards; 0 where there is padding."""
    ids, mask = zoo.padded_prompt(tokens=TOKENS)
    assert sum(CHUNKS) == TOKENS
    if hasattr(model.base_model, "rope_deltas"):
        model.base_model.rope_deltas = None  # Qwen2-VL remembers the positions of its last generate
    logits, done = [], 0
    with torch.no_grad():
        for chunk in CHUNKS:
            new = {argument or cache_name(model): cache, "attention_mask": mask[:, : done + chunk]}
            logits.append(model(input_ids=ids[:, done : done + chunk], use_cache=True, **new).logits)
            done += chunk
    return torch.cat(logits, dim=1).masked_fill(mask[:, :, None] == 0, 0)


def generate(
    model: hf.PreTrainedModel, cache: hf.Cache, argument: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy tokens after a left-padded prompt, and the logits that they were taken from."""
    ids, mask = zoo.padded_prompt()
    result = model.generate(
        ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, return_dict_in_generate=True,
        output_logits=True, **{argument or cache_name(model): cache},
    )  # fmt: skip
    assert result[cache_name(model)] is cache
    return result.sequences, torch.stack(result.logits, dim=1)


def error(logits: torch.Tensor, right: torch.Tensor) -> float:
    """Error of the logits after the prompt in units of their spread: root mean square over the vocabulary, median
    over the tokens, as a router may send single tokens to another expert."""
    logits, right = logits[:, CHUNKS[0] :].double(), right[:, CHUNKS[0] :].double()
    return float((logits - right).pow(2).mean(-1).sqrt().median() / right.std())


def assert_packed(cache: KVCache) -> None:
    assert all(layer.core.store.longest > 0 for layer in cache.packed_layers)


@pytest.fixture(scope="module", autouse=True)
def forget_models() -> Iterator[None]:
    yield
    for cached in (attached, yardstick, quantized):
        cached.cache_clear()


@pytest.mark.parametrize("name", zoo.SERVED)
def test_exact_equals_the_stock_cache_bit_for_bit(name: str) -> None:
    model = attached(name)
    logits, tokens, token_logits = yardstick(name)
    assert torch.equal(teacher_forced(model, kvbits.cache_for(model, "exact")), logits)
    got_tokens, got_logits = generate(model, kvbits.cache_for(model, "exact"))
    assert torch.equal(got_tokens, tokens)
    assert torch.equal(got_logits, token_logits)


@pytest.mark.parametrize("name, sliding", [(n, False) for n in zoo.SERVED] + [(n, True) for n in zoo.SLIDING])
def test_packing_loses_nothing(name: str, sliding: bool) -> None:
    model = attached(name)
    logits, tokens, token_logits = yardstick(name)
    cache = kvbits.cache_for(model, LOSSLESS, sliding=sliding)
    got = teacher_forced(model, cache)
    assert_packed(cache)
    assert (got - logits).abs().max() <= 1e-5 * logits.abs().max()
    got_tokens, got_logits = generate(model, kvbits.cache_for(model, LOSSLESS, sliding=sliding))
    assert torch.equal(got_tokens, tokens)
    assert (got_logits - token_logits).abs().max() <= 1e-5 * token_logits.abs().max()


@pytest.mark.parametrize("name", zoo.SERVED)
def test_layers_go_where_the_zoo_says(name: str) -> None:
    family, cache = zoo.FAMILIES[name], quantized(name)[1]
    assert_packed(cache)
    got = frozenset(layer.trace.outcome for layer in cache.packed_layers), len(cache.layers) - len(cache.packed_layers)
    allowed = [(family.outcomes, family.stock_layers)]
    if family.lowest is not None:
        if zoo.installed() == (5, 0):
            allowed = [family.lowest]
        elif zoo.installed() < (5, 24):
            allowed.append(family.lowest)
    assert got in allowed


@pytest.mark.parametrize("name", [name for name in zoo.SERVED if zoo.FAMILIES[name].outcomes])
def test_quantizing_loses_little_at_8_bits_and_more_at_4(name: str) -> None:
    model = attached(name)
    right = yardstick(name)[0]
    error8 = error(quantized(name)[0], right)
    error4 = error(teacher_forced(model, kvbits.cache_for(model, "int4,residual=4,block=32")), right)
    # The levels of int4 are 17 times as far apart, and so is what comes of them where a model is smooth.
    assert 0 < error8 < error4 / 6
    assert error8 < 0.01


@pytest.mark.parametrize("argument", ARGUMENT_NAMES)
@pytest.mark.parametrize("name", ["llama", "gemma3", "falcon-new", "gpt2", "deepseek-v3"])
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
def test_both_argument_names(name: str, argument: str) -> None:
    model = attached(name)
    logits, tokens, _ = yardstick(name)
    cache = kvbits.cache_for(model, LOSSLESS)
    assert (teacher_forced(model, cache, argument) - logits).abs().max() <= 1e-5 * logits.abs().max()
    assert_packed(cache)
    assert torch.equal(generate(model, kvbits.cache_for(model, LOSSLESS), argument)[0], tokens)


@pytest.mark.parametrize("name", zoo.SERVED)
def test_bfloat16(name: str) -> None:
    """Packing adds no more error to a bfloat16 model than bfloat16 itself does; quantized schemes run."""
    model = zoo.build(name, torch.bfloat16)
    right = yardstick(name)[0]
    stock = error(teacher_forced(model, zoo.stock_cache(model)), right)
    cache = kvbits.cache_for(model, LOSSLESS)
    assert error(teacher_forced(model, cache), right) <= 2 * stock
    assert_packed(cache)
    assert all(layer.core.keys.dtype == torch.bfloat16 for layer in cache.packed_layers)
    tokens, logits = generate(model, kvbits.cache_for(model, "kivi4,residual=4,block=32"))
    assert tokens.shape == yardstick(name)[1].shape
    assert bool(torch.isfinite(logits).all())


def test_keys_and_values_of_a_picture_stay_the_models_own() -> None:
    picture = dict(
        pixel_values=torch.randn(2, 1, 1, 3, 28, 28, generator=torch.Generator().manual_seed(0)),
        aspect_ratio_ids=torch.ones(2, 1, dtype=torch.int64),
        aspect_ratio_mask=torch.ones(2, 1, 1, dtype=torch.int64),
        cross_attention_mask=torch.ones(2, 40, 1, 1, dtype=torch.int64),
    )
    ids, mask = zoo.padded_prompt()

    def run(cache_of: Callable[[hf.PreTrainedModel], hf.Cache]) -> tuple[torch.Tensor, torch.Tensor]:
        model = zoo.build("mllama")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "attn_gate" in name:
                    parameter.fill_(1)  # which are zero in a new model, so that it does not see
        result = model.generate(
            ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, return_dict_in_generate=True,
            output_logits=True, **picture, **{cache_name(model): cache_of(model)},
        )  # fmt: skip
        return result.sequences, torch.stack(result.logits)

    tokens, logits = run(zoo.stock_cache)
    got_tokens, got_logits = run(lambda model: kvbits.cache_for(model, "exact"))
    assert torch.equal(got_tokens, tokens)
    assert torch.equal(got_logits, logits)
    got_tokens, got_logits = run(lambda model: kvbits.cache_for(model, LOSSLESS))
    assert torch.equal(got_tokens, tokens)
    assert (got_logits - logits).abs().max() <= 1e-5 * logits.abs().max()


@pytest.mark.parametrize("name", zoo.REFUSED)
def test_families_that_cannot_be_served_are_refused(name: str) -> None:
    model = zoo.build_any(name)
    if zoo.FAMILIES[name].once_refused and zoo.installed() >= (5, 24):
        pytest.skip(f"served with Transformers {hf.__version__}")
    with pytest.raises(ValueError, match=zoo.FAMILIES[name].refused or zoo.NOTHING_TO_STORE):
        kvbits.cache_for(model, "int4")
    with pytest.raises(ValueError, match=type(model).__name__):
        kvbits.enable(model, "int4")
    assert not [key for key in vars(model) if "kvbits" in key]
    assert not model._forward_pre_hooks
    assert "kvbits" not in str(model.config._attn_implementation)


@pytest.mark.parametrize("name", ["llama", "llama-d256-eager", "gemma4"])
def test_an_attached_model_still_reads_as_its_stock_implementation(name: str) -> None:
    """Gemma 4 slices queries differently where its config does not say ``sdpa``: attached, it must not."""
    model = zoo.build(name)
    stock, ids = model.config._attn_implementation, zoo.prompt(1, 40)
    with torch.no_grad():
        expected = model(input_ids=ids, logits_to_keep=3, use_cache=True).logits
        cache = kvbits.cache_for(model, "exact")
        assert model.config._attn_implementation == stock != "flex_attention"
        assert str(model.config._attn_implementation).startswith("kvbits")
        assert torch.equal(model(input_ids=ids, logits_to_keep=3, **{cache_name(model): cache}).logits, expected)


# -- packed windows never need more memory than exact ones -------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:every layer of")
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "beside-padding"])
@pytest.mark.parametrize("window", [128, 256, 512, 1024])
@pytest.mark.parametrize("scheme", ["exact", "int8", "int4", "kivi2", "int4,residual=0,block=32"])
def test_sliding_layers_never_need_more_than_exact_ones(scheme: str, window: int, padded: bool) -> None:
    """At any time from the first window on, as long as the text grows."""
    options = dict(sliding_window=window, head_dim=64, num_hidden_layers=1, max_position_embeddings=8192)
    model = zoo.build("mistral-window", torch.bfloat16, **options)
    cache, stock = kvbits.cache_for(model, scheme, sliding=True), hf.DynamicCache(config=model.config)
    batch, chunk = 2 if padded else 1, 64
    sizes = []
    for columns in range(chunk, 3 * window + 1024, chunk):
        mask = torch.ones(batch, columns, dtype=torch.int64)
        mask[: batch - 1] = 0
        keys, values = torch.randn(2, batch, 2, chunk, 64, dtype=torch.bfloat16)
        cache.columns.begin(mask)
        for each in (cache, stock):
            each.update(keys, values, 0)
        if columns > window:
            # What the stock layer's tensors show; their storage still has the last call's tokens in front.
            exact = 2 * stock.layers[0].keys.nbytes
            sizes.append((int(cache.nbytes) - cache.columns.rows.nbytes, exact))
    assert sizes
    if cache.packed_layers:
        assert all(ours <= exact for ours, exact in sizes)
    elif scheme.endswith("block=32"):
        pytest.fail("this one packs")
    else:
        assert scheme == "exact" or window <= 256


# -- what is done to keys before they are stored -----------------------------------------------------------------------


# The latent keys of early releases have their roped channels last.
NEVER_UNROPED = ["roformer"] + (["deepseek-v2", "deepseek-v3"] if zoo.installed() < (5, 24) else [])


@pytest.mark.parametrize("name", NEVER_UNROPED)
def test_keys_that_cannot_be_unroped_are_refused_before_their_rotary_embedding(name: str) -> None:
    with pytest.raises(CannotUnrope):
        kvbits.cache_for(attached(name), f"{LOSSLESS},pre-rope")


@pytest.mark.filterwarnings("ignore:.*their mean is taken as they come")
@pytest.mark.parametrize(
    "name, change",
    [(name, "pre-rope") for name in zoo.SERVED if name not in NEVER_UNROPED] + [(n, "centred") for n in zoo.SERVED],
)
def test_unroping_keys_and_roping_them_again_loses_nothing(name: str, change: str) -> None:
    """Every rotary variant of the zoo, left-padded, in chunks; families without one store their keys as they come."""
    model = attached(name)
    cache = kvbits.cache_for(model, f"{LOSSLESS},{change}")
    logits = teacher_forced(model, cache)
    if cache.packed_layers:
        assert_packed(cache)
    assert error(logits, yardstick(name)[0]) < 1e-4


@pytest.mark.filterwarnings("ignore:.*their mean is taken as they come")
@pytest.mark.parametrize("scheme", ("lm4,centred", "k=rot4-channel,v=lm4,centred", "int4-1%"))
@pytest.mark.parametrize("name", zoo.SERVED)
def test_new_schemes_run_everywhere(name: str, scheme: str) -> None:
    model = attached(name)
    cache = kvbits.cache_for(model, f"{scheme},residual=4,block=32")
    logits = teacher_forced(model, cache)
    assert error(logits, yardstick(name)[0]) < 0.35
    if cache.packed_layers:
        assert_packed(cache)
        assert error(logits, yardstick(name)[0]) > 1e-6
