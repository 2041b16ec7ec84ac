"""Caches on disk: whatever a cache holds goes on as if it had never been saved, bit for bit, or is refused."""

from __future__ import annotations

import copy
import pickle
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import kvbits
import zoo
from kvbits.attend.dense import dense
from kvbits.files import layer as layers
from kvbits.files import sealed
from kvbits.files.plain import from_plain, to_plain
from kvbits.files.sealed import Damaged, Sealed
from kvbits.hf.cache import KVCache
from kvbits.hf.devices import devices_of_layers
from kvbits.hf.names import cache_name
from kvbits.hf.rotation.rotary import rotaries
from kvbits.layer.cache import LayerCache
from kvbits.schemes.catalogue import ALIASES
from kvbits.schemes.scheme import Scheme
from kvbits.sessions import saving
from kvbits.store.rows import Rows, Run
from saved import INT8, SMALL, VARIOUS, assert_same_layer, call, grow, inspect, layer, model_of, tokens
from table import SCHEMES

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")


# -- one layer ---------------------------------------------------------------------------------------------------------


def reopened(core: LayerCache, path: Path) -> LayerCache:
    """The layer as another process finds it."""
    state, tensors = layers.state_of(core, "0")
    sealed.write(path, state, tensors)
    file = Sealed(path)
    twin = LayerCache(core.scheme, core.window, rotary=core.rotary)
    layers.restore(twin, file.about, "0", file.tensor, core.rows, CPU)
    return twin


MODIFIED = (
    *ALIASES, "kivi4,pre-rope", "lm4,centred", "kivi2,centred,pre-rope", "rot4,centred", "int4,sinks=2+3",
    "lm2,centred,sinks=4+4", "nuq3-1%,centred", "fp8-static,centred", "exact,residual=8", "int4,sinks=0",
    "nuq2,post-rope",
)  # fmt: skip


def with_small_blocks(spelling: str) -> Scheme:
    scheme = Scheme.parse(spelling)
    block = next(b for b in (32, 64, 128) if all(b % codec.block_multiple == 0 for codec in scheme.codecs))
    return replace(scheme, residual=4, block=block) if scheme.packs else scheme


@pytest.mark.parametrize("scheme", [*(str(s) for s in SCHEMES if not re.fullmatch(r"[^=]*-gs\d+", str(s))), *MODIFIED])
def test_every_scheme_goes_on(scheme: str, tmp_path: Path) -> None:
    """From the first packed block on, over the next one, where static scales were fitted before."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        core = layer(with_small_blocks(scheme))
        grow((core,), 150, 1)
        twin = reopened(core, tmp_path / "x")
        assert_same_layer(core, twin)
        for count in (1, 39, 90):
            grow((core, twin), count, count)
            assert_same_layer(core, twin)
        assert core.scheme.packs == any(core.store.counts)  # type: ignore[union-attr]


@pytest.mark.parametrize("scheme", [*VARIOUS, "exact"])
@pytest.mark.parametrize("held", [0, 1, 4, 39, 40, 90])
def test_every_length_goes_on(scheme: str, held: int, tmp_path: Path) -> None:
    core = layer(scheme)
    if held:
        grow((core,), held, 1)
    twin = reopened(core, tmp_path / "x")
    assert_same_layer(core, twin)
    grow((core, twin), 75, 2)
    assert_same_layer(core, twin)


def cropped(core: LayerCache) -> None:
    core.crop(33)


def mixed_beams(core: LayerCache) -> None:
    core.select_rows(torch.tensor([1, 0, 1]))
    core.append(*tokens(3, 40, 5))
    core.select_rows(torch.tensor([2, 2, 0, 1]))


def padded(core: LayerCache) -> None:
    text = torch.ones(2, 80, dtype=torch.bool)
    text[0, :50] = False
    core.append(*tokens(2, 80, 5), core.rows.extend(2, 80, text))


def emptied(core: LayerCache) -> None:
    core.reset()


def all_taken_back(core: LayerCache) -> None:
    core.crop(core.columns)


def no_rows(core: LayerCache) -> None:
    core.select_rows(torch.tensor([], dtype=torch.int64))


@pytest.mark.parametrize("change", [cropped, mixed_beams, padded, emptied, all_taken_back, no_rows])
@pytest.mark.parametrize("window", [None, 48])
@pytest.mark.parametrize("scheme", VARIOUS)
def test_every_state_goes_on(scheme: str, window: int | None, change: Any, tmp_path: Path) -> None:
    core = layer(scheme, window)
    grow((core,), 130, 1)
    if window is not None and change is all_taken_back:
        with pytest.raises(ValueError, match="has dropped"):
            change(core)
        return
    change(core)
    twin = reopened(core, tmp_path / "x")
    assert_same_layer(core, twin)
    if change is no_rows:
        return
    for count in (1, 40, 50):
        grow((core, twin), count, count)
        assert_same_layer(core, twin)
    for each in (core, twin):
        each.crop(20)
        each.select_rows(torch.arange(each.rows.batch).flip(0))
    assert_same_layer(core, twin)


def test_blocks_that_rows_share_are_written_once(tmp_path: Path) -> None:
    core = layer(INT8)
    core.append(*tokens(1, 200, 1))
    alone = sealed.length_of(*layers.state_of(core, "0"))
    core.select_rows(torch.zeros(8, dtype=torch.int64))
    shared = sealed.length_of(*layers.state_of(core, "0"))
    exact = 7 * core.held[0] * 2 * (16 + 24) * 4
    assert shared < alone + exact + 1000
    twin = reopened(core, tmp_path / "x")
    assert_same_layer(core, twin)
    assert twin.store.pool.shape[0] == core.store.counts[0]  # type: ignore[union-attr]


def test_nothing_but_what_is_stored_is_written(tmp_path: Path) -> None:
    """Gaps between parts, and blocks that were given up, are whatever lay there in memory before."""
    core = layer(f"k=int4-channel,v=int3,{SMALL}")
    grow((core,), 130, 1)
    core.select_rows(torch.tensor([1]))
    store = core.store
    assert store is not None and store.record.gaps
    for first, last in store.record.gaps:
        store.pool[..., first:last] = 0xAB
    state, tensors = layers.state_of(core, "0")
    sealed.write(tmp_path / "x", state, tensors)
    pool = Sealed(tmp_path / "x").tensor("0.pool")
    assert pool.shape[0] == store.counts[0] < store.used
    assert all(not pool[..., first:last].any() for first, last in store.record.gaps)
    assert (store.pool[..., store.record.gaps[0][0]] == 0xAB).all()


def forged(core: LayerCache, tmp_path: Path, change: Any) -> LayerCache:
    state, tensors = layers.state_of(core, "0")
    change(state, tensors)
    sealed.write(tmp_path / "x", state, tensors)
    file = Sealed(tmp_path / "x")
    twin = LayerCache(core.scheme)
    layers.restore(twin, file.about, "0", file.tensor, core.rows, CPU)
    return twin


def set_outlier(state: Any, tensors: Any) -> None:
    record = layer("int4-1%,residual=4,block=32").scheme
    pool = tensors["0.pool"].source
    index = next(slot for slot in layers.Record.of(record.key, record.value, 32, 16, 24, torch.float32).keys
                 if slot.part.name == "outlier_index")  # fmt: skip
    pool[0, 0, index.offset : index.offset + 2] = 0xFF


FORGERIES = {
    "a block that is not there": lambda state, tensors: tensors["0.table"].fill_(99),
    "a negative block": lambda state, tensors: tensors["0.table"].fill_(-1),
    "too many blocks": lambda state, tensors: state.update(counts=[5, 5]),
    "too few": lambda state, tensors: state.update(counts=[0, 0]),
    "tokens beyond the buffer": lambda state, tensors: state.update(held=[200, 200]),
    "no number": lambda state, tensors: state.update(held=["1", None]),
    "negative": lambda state, tensors: state.update(dropped=-32),
    "another row": lambda state, tensors: state.update(held=[*state["held"], 3]),
    "blank beyond": lambda state, tensors: state.update(blank=[9, 9]),
    "late sinks beyond": lambda state, tensors: state.update(late=[[7], [2**40]]),
    "late sinks twice": lambda state, tensors: state.update(late=[[7, 7], []]),
    "an outlier beyond the block": set_outlier,
    "keys of integers": lambda state, tensors: tensors.update({"0.keys": tensors["0.keys"].int()}),
    "another number of channels": lambda state, tensors: tensors.update({"0.keys": tensors["0.keys"][..., :8]}),
    "no pool": lambda state, tensors: tensors.pop("0.pool"),
}


@pytest.mark.parametrize("what", FORGERIES)
def test_a_file_cannot_lead_a_kernel_astray(what: str, tmp_path: Path) -> None:
    """Its digests fit, as anybody can compute them; nothing is read or written beyond what there is."""
    core = layer(f"int4-1%,{SMALL}")
    grow((core,), 100, 1)
    core.select_rows(torch.tensor([1, 0]))
    assert_same_layer(core, forged(core, tmp_path, lambda state, tensors: None))
    with pytest.raises(Damaged, match=r"contradicts itself|lacks"):
        forged(core, tmp_path, FORGERIES[what])


# -- whole models ------------------------------------------------------------------------------------------------------


def assert_goes_on(
    name: str, cache: KVCache, path: Path, steps: int = 40, dtype: torch.dtype = torch.float32
) -> KVCache:
    """A cache and what a twin of its model loads give the same logits, over a chunk, steps, and a filled block."""
    model, twin = model_of(name, dtype), model_of(name, dtype, 1)
    kvbits.save(cache, path)
    loaded = kvbits.load(path, twin)
    assert torch.equal(loaded.tokens, cache.tokens) and loaded.get_seq_length() == cache.get_seq_length()
    batch = cache.columns.rows.batch or 2
    ids = zoo.prompt(batch, steps, seed=5)
    mask = cache.columns.rows.valid
    mask = torch.ones(batch, cache.get_seq_length(), dtype=torch.bool) if mask is None else mask
    for chunk in (ids[:, :3], *ids[:, 3:].split(1, dim=1)):
        mask = torch.cat([mask, mask.new_ones(batch, chunk.shape[1])], dim=1)
        more = {"attention_mask": mask.long()}
        assert torch.equal(call(model, cache, chunk, **more), call(twin, loaded, chunk, **more))
    return loaded


FAMILIES = (
    "llama", "llama-mqa-d80", "phi4", "cohere2", "gemma3", "gemma2-softcap", "gpt-oss", "llama4-chunked", "gemma3n",
    "gemma4", "falcon-alibi", "gpt2", "roformer", "deepseek-v3", "qwen3-next", "lfm2", "jamba", "kimi-linear", "llava",
    "qwen2-vl", "mllama", "nanochat",
)  # fmt: skip
"""One of each kind of cache, and of rotary embedding."""


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str, tmp_path: Path) -> None:
    """Sliding windows packed and not, states of linear attention, layers that share keys, latent attention."""
    for scheme, sliding in ((INT8, False), (f"lm4,centred,{SMALL}", name in zoo.SLIDING)):
        model = model_of(name)
        if hasattr(model.base_model, "rope_deltas"):
            model.base_model.rope_deltas = None  # Qwen2-VL remembers the positions of its last generate
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cache = kvbits.cache_for(model, scheme, sliding=sliding)
            call(model, cache, zoo.prompt(2, 70), attention_mask=torch.ones(2, 70, dtype=torch.int64))
            assert_goes_on(name, cache, tmp_path / "x", steps=10)


def test_windows_that_are_packed(tmp_path: Path) -> None:
    model, twin = (zoo.build("mistral-window", sliding_window=200) for _ in range(2))
    cache = kvbits.cache_for(model, "int4,residual=4,block=32", sliding=True)
    call(model, cache, zoo.prompt(1, 300))
    kvbits.save(cache, tmp_path / "x")
    loaded = kvbits.load(tmp_path / "x", twin)
    core = loaded.packed_layers[0].core
    assert core.window == 200 and core.dropped > 0 and any(core.store.counts)  # type: ignore[union-attr]
    for token in zoo.prompt(1, 60, seed=2).split(1, dim=1):
        assert torch.equal(call(model, cache, token), call(twin, loaded, token))


@pytest.mark.parametrize("scheme", ["exact", INT8, f"kivi4,sinks=2+3,{SMALL}", f"lm4,centred,{SMALL}",
                                    f"kivi4,pre-rope,{SMALL}", f"int4,layers[0]=exact,{SMALL}",
                                    f"int4-1%,layers[-1]=kivi2/fp8,{SMALL}"])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_padded_batches_beams_and_crops(scheme: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model, (ids, mask) = model_of("llama", dtype), zoo.padded_prompt(3, 90, 17)
    cache = kvbits.cache_for(model, scheme)
    call(model, cache, ids, attention_mask=mask)
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    cache.crop(-5)
    assert torch.equal(cache.tokens, ids[[2, 0, 0], :85])
    assert_goes_on("llama", cache, tmp_path / "x", dtype=dtype)


@pytest.mark.parametrize("held", [0, 1, 3])
def test_short_caches(held: int, tmp_path: Path) -> None:
    cache = kvbits.cache_for(model_of("llama"), INT8)
    if held:
        call(model_of("llama"), cache, zoo.prompt(2, held))
    assert_goes_on("llama", cache, tmp_path / "x", steps=60)


def test_two_caches_of_one_file_do_not_write_into_each_other(tmp_path: Path) -> None:
    model = model_of("llama")
    cache = kvbits.cache_for(model, INT8)
    call(model, cache, zoo.prompt(1, 150))
    saved = kvbits.Saved(kvbits.save(cache, tmp_path / "x"))
    one, other = saved.cache(model), saved.cache(model)
    one.crop(-100)
    call(model, one, zoo.prompt(1, 90, seed=4))  # blocks where those of the others are
    third = saved.cache(model)
    ids = zoo.prompt(1, 3)
    for each in (other, third):
        assert torch.equal(call(model, each.fork(), ids), call(model, cache.fork(), ids))


def test_a_cache_that_was_cropped_to_nothing(tmp_path: Path) -> None:
    model = model_of("llama")
    cache = kvbits.cache_for(model, INT8)
    call(model, cache, zoo.prompt(2, 90))
    cache.crop(-90)
    assert cache.tokens.shape == (2, 0)
    assert_goes_on("llama", cache, tmp_path / "x", steps=60)


def test_a_cache_that_was_reset_is_an_empty_one(tmp_path: Path) -> None:
    model = model_of("gemma3")
    cache = kvbits.cache_for(model, f"fp8-static,{SMALL}")
    call(model, cache, zoo.prompt(2, 90))
    cache.reset()
    loaded = assert_goes_on("gemma3", cache, tmp_path / "x", steps=60)
    loaded.reset()  # and so is one that was loaded
    fresh = kvbits.cache_for(model, f"fp8-static,{SMALL}")
    assert torch.equal(call(model, loaded, zoo.prompt(1, 60)), call(model, fresh, zoo.prompt(1, 60)))


def test_calibrated_caches_need_no_calibration_again(tmp_path: Path) -> None:
    model = model_of("llama")
    scheme = f"nuq3-1%,centred,{SMALL}"
    fitted = kvbits.calibrate(model, torch.cat([zoo.prompt(1, 60, seed) for seed in range(2)]), scheme)
    cache = kvbits.cache_for(model, scheme, calibration=fitted)
    call(model, cache, zoo.prompt(2, 80))
    loaded = assert_goes_on("llama", cache, tmp_path / "x", steps=40)
    loaded.reset()
    fresh = kvbits.cache_for(model, scheme, calibration=fitted)
    for ids in zoo.prompt(1, 90).split(45, dim=1):
        assert torch.equal(call(model, loaded, ids), call(model, fresh, ids))


def test_loaded_caches_are_saved_and_loaded_again(tmp_path: Path) -> None:
    cache = kvbits.cache_for(model_of("llama"), f"lm4,centred,{SMALL}")
    call(model_of("llama"), cache, zoo.prompt(2, 100))
    kvbits.save(cache, tmp_path / "x")
    again = kvbits.load(tmp_path / "x", model_of("llama"))
    kvbits.save(again, tmp_path / "y")
    first, second = Sealed(tmp_path / "x"), Sealed(tmp_path / "y")
    assert first.names == second.names
    assert all(torch.equal(first.tensor(name), second.tensor(name)) for name in first.names)
    kvbits.save(again, tmp_path / "x")  # over the file that it is mapped from
    assert_goes_on("llama", again, tmp_path / "z")


RELEASE_0_1 = sorted((Path(__file__).parent / "release_0_1").glob("*.safetensors"))


@pytest.mark.parametrize("path", RELEASE_0_1, ids=lambda path: path.stem)
def test_files_of_an_earlier_release_load(path: Path, tmp_path: Path) -> None:
    """And are written again as they were: centred keys, late sinks, static scales, windows of the model's own type."""
    saved = kvbits.Saved(path)
    model = model_of(path.stem.partition("-")[0])
    before, after = Sealed(path), Sealed(kvbits.save(saved.cache(model), tmp_path / "x"))
    assert before.names == after.names and before.about["layers"] == after.about["layers"]
    assert all(torch.equal(before.tensor(name), after.tensor(name)) for name in before.names)
    cache = kvbits.cache_for(model, saved.scheme)
    call(model, cache, saved.tokens)
    for old, new in zip(saved.cache(model).packed_layers, cache.packed_layers, strict=True):
        for one, other in zip(old.core.view().dense(), new.core.view().dense(), strict=True):
            same = torch.isclose(one, other, rtol=1e-3, atol=1e-3)  # elements between two codes: products are rounded
            assert float(same.float().mean()) > 0.99


def test_the_file_stays_as_it_is_while_its_cache_goes_on(tmp_path: Path) -> None:
    model = model_of("llama")
    cache = kvbits.cache_for(model, INT8)
    call(model, cache, zoo.prompt(2, 100))
    kvbits.save(cache, tmp_path / "x")
    content = (tmp_path / "x").read_bytes()
    loaded = kvbits.load(tmp_path / "x", model)
    pool = loaded.layers[0].core.store.pool
    loaded.crop(-60)
    call(model, loaded, zoo.prompt(2, 30))
    assert loaded.layers[0].core.store.pool is pool  # blocks were written over those that were cropped, in memory
    assert (tmp_path / "x").read_bytes() == content
    (tmp_path / "x").unlink()
    call(model, loaded, zoo.prompt(2, 60))


def test_frequencies_that_a_model_changes_as_a_text_grows(tmp_path: Path) -> None:
    """Epochs have the numbers that this process gave them, and in another one those numbers may be taken."""
    parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model, other = (zoo.build("llama", max_position_embeddings=64, rope_parameters=parameters) for _ in range(2))
    scheme = f"kivi4,pre-rope,{SMALL}"
    cache = kvbits.cache_for(model, scheme)
    for ids in zoo.prompt(1, 160).split(40, dim=1):
        call(model, cache, ids)
    assert len(rotaries(model).distinct[0].epochs) > 2
    busy = kvbits.cache_for(other, scheme)
    call(other, busy, zoo.prompt(1, 300, seed=3))  # takes number 1 for other frequencies
    kvbits.save(cache, tmp_path / "x")
    loaded = kvbits.load(tmp_path / "x", other)
    assert loaded.columns.rows.runs != cache.columns.rows.runs
    again = kvbits.load(tmp_path / "x", other)
    assert again.columns.rows.runs == loaded.columns.rows.runs  # known now
    for one, two in zip(cache.packed_layers, loaded.packed_layers, strict=True):
        for a, b in zip(dense(one.core.view()), dense(two.core.view()), strict=True):
            assert torch.equal(a, b)
    with pytest.raises(ValueError, match="other rotary embeddings"):
        rotaries(other).adopt([torch.zeros(2, 7)])


def test_epochs_get_new_numbers() -> None:
    rows = Rows(2, 5)
    assert rows.renumbered([0]).runs is None
    moved = rows.renumbered([3])
    assert moved.runs == ((Run(0, 0, 3),),) * 2 and moved.first_epoch == 3
    assert moved.renumbered([0, 1, 2, 0]).runs is None


def test_another_process_goes_on(tmp_path: Path) -> None:
    name = "gemma3"
    model = model_of(name)
    cache = kvbits.cache_for(model, f"lm4,centred,{SMALL}")
    call(model, cache, zoo.prompt(1, 100))
    kvbits.save(cache, tmp_path / "x")
    code = f"""
import sys, torch, kvbits, zoo
torch.set_num_threads(1)
model = zoo.build({name!r})
cache = kvbits.load({str(tmp_path / "x")!r}, model)
with torch.no_grad():
    torch.save(torch.cat([model(input_ids=ids, **{{{cache_name(model)!r}: cache}}).logits
                          for ids in zoo.prompt(1, 8, seed=2).split(1, dim=1)]), {str(tmp_path / "logits")!r})
"""
    tests = str(Path(__file__).parents[1] / "support")
    done = subprocess.run([sys.executable, "-c", f"import sys; sys.path.insert(0, {tests!r}){code}"], check=False,
                          capture_output=True, text=True, timeout=120)  # fmt: skip
    assert done.returncode == 0, done.stderr
    here = torch.cat([call(model, cache, ids) for ids in zoo.prompt(1, 8, seed=2).split(1, dim=1)])
    assert torch.equal(torch.load(tmp_path / "logits"), here)


@pytest.mark.model
def test_smollm2_answers_as_before(smollm2: Any, tmp_path: Path) -> None:
    model, tokenizer = smollm2
    ids = tokenizer("The sea is deep, and the harbour is near. " * 30, return_tensors="pt").input_ids
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    right = model.generate(ids, **options, **{cache_name(model): kvbits.cache_for(model, "default")})
    cache = kvbits.cache_for(model, "default")
    call(model, cache, ids[:, :-1])
    kvbits.save(cache, tmp_path / "x", tokenizer=tokenizer, note={"title": "sea"})
    saved = kvbits.Saved(tmp_path / "x")
    assert saved.note == {"title": "sea"} and torch.equal(saved.tokens, ids[:, :-1].int())
    loaded = saved.cache(model, tokenizer=tokenizer)
    assert torch.equal(model.generate(ids, **options, **{cache_name(model): loaded}), right)
    kvbits.disable(model)


@pytest.mark.parametrize(
    ("scheme", "dtype"),
    [("default", torch.float32), ("kivi4", torch.bfloat16), ("int4-1%", torch.float32), ("exact", torch.bfloat16)],
    ids=str,
)
def test_the_file_is_as_large_as_the_cache(scheme: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Within 1 % of ``nbytes``, but for room to grow; just before the exact tokens fill there is none."""
    block = Scheme.parse(scheme).block
    count = 4 + 128 + (block - 1) + 2816
    model = zoo.build("llama", dtype, head_dim=64, num_hidden_layers=4, max_position_embeddings=4096)
    cache = kvbits.cache_for(model, scheme)
    call(model, cache, zoo.prompt(1, count))
    size = kvbits.save(cache, tmp_path / "x").stat().st_size
    assert abs(size / cache.nbytes.total - 1) < 0.01
    call(model, cache, zoo.prompt(1, 1))  # a block is packed, and the pool has an eighth to grow
    grown, room = cache.nbytes, cache.nbytes.slack
    size = kvbits.save(cache, tmp_path / "x").stat().st_size
    assert (grown.total - room) * 0.99 < size < grown.total * 1.01


# -- what has been read ------------------------------------------------------------------------------------------------


def test_a_cache_knows_what_it_has_read() -> None:
    model, ids = model_of("llama"), zoo.prompt(2, 150)
    cache = kvbits.cache_for(model, INT8)
    assert cache.tokens.shape == (0, 0)
    for chunk in ids.split([30, *[1] * 100, 20], dim=1):
        call(model, cache, chunk)
    assert torch.equal(cache.tokens, ids) and cache.tokens.dtype == torch.int64
    assert sum(piece.nbytes for piece in cache.columns.ids.pieces) == 4 * 300
    cache.crop(-25)
    call(model, cache, ids[:, :2])
    cache.batch_repeat_interleave(2)
    assert torch.equal(cache.tokens, torch.cat([ids[:, :125], ids[:, :2]], dim=1)[[0, 0, 1, 1]])
    cache.batch_select_indices(torch.tensor([3, 0]))
    assert torch.equal(cache.tokens[:, 125:], ids[[1, 0], :2])
    twin = copy.deepcopy(cache)
    cache.reset()
    assert cache.tokens.shape == (0, 0) and twin.tokens.shape == (2, 127)


def test_generate_is_noted_but_for_its_last_token() -> None:
    model, (ids, mask) = model_of("llama"), zoo.padded_prompt(2, 40)
    for more in ({}, {"num_beams": 3}):
        cache = kvbits.cache_for(model, INT8)
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=9, do_sample=False, **more, **{cache_name(model): cache}
        )
        beams = more.get("num_beams", 1)
        assert cache.tokens.shape == (2 * beams, 48)
        assert more or torch.equal(cache.tokens, out[:, :-1])
        assert torch.equal(cache.tokens[::beams, :40], ids)


def test_calls_that_fail_are_not_noted() -> None:
    model, ids = model_of("llama"), zoo.prompt(1, 60)
    cache = kvbits.cache_for(model, INT8)
    call(model, cache, ids[:, :50])

    def fail(*_: Any) -> None:
        raise RuntimeError

    for place in (model.model.layers[0], model.lm_head):  # before any layer has stored it, and after all have
        hook = place.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError):
            call(model, cache, ids[:, -2:])
        hook.remove()
        assert torch.equal(cache.tokens, ids[:, :50])
    with torch.no_grad():
        model(inputs_embeds=model.get_input_embeddings()(ids[:, 50:]), **{cache_name(model): cache})
    assert torch.equal(cache.tokens[0, 50:], torch.full((10,), -1))


def test_pictures_are_not_told_by_their_ids() -> None:
    model = model_of("llava")
    cache = kvbits.cache_for(model, INT8)
    ids = zoo.prompt(1, 30)
    with torch.no_grad():
        embeds = model.get_input_embeddings()(ids)
        model(inputs_embeds=embeds, **{cache_name(model): cache})
        model(input_ids=ids, **{cache_name(model): cache})
        model(input_ids=ids, image_sizes=torch.ones(1, 2), **{cache_name(model): cache})
        model(input_ids=ids, attention_mask=None, use_cache=True, **{cache_name(model): cache})
    unknown = torch.full_like(ids, -1)
    assert torch.equal(cache.tokens, torch.cat([unknown, ids, unknown, ids], dim=1))


def test_tokens_that_are_given_must_be_those_that_were_read(tmp_path: Path) -> None:
    model, ids = model_of("llama"), zoo.prompt(1, 50)
    cache = kvbits.cache_for(model, INT8)
    with torch.no_grad():
        model(inputs_embeds=model.get_input_embeddings()(ids[:, :20]), **{cache_name(model): cache})
    call(model, cache, ids[:, 20:])
    kvbits.save(cache, tmp_path / "x")
    assert torch.equal(kvbits.Saved(tmp_path / "x").tokens[0, 20:], ids[0, 20:].int())
    assert (kvbits.Saved(tmp_path / "x").tokens[0, :20] == -1).all()
    for given in (ids, ids[0], ids[0].tolist()):
        kvbits.save(cache, tmp_path / "x", given)
        assert torch.equal(kvbits.Saved(tmp_path / "x").tokens, ids.int())
        assert torch.equal(kvbits.load(tmp_path / "x", model).tokens, ids)
    wrong = ids.clone()
    wrong[0, 33] += 1
    with pytest.raises(ValueError, match=rf"token 33 of row 0 is {wrong[0, 33]}, but the cache has read {ids[0, 33]}"):
        kvbits.save(cache, tmp_path / "x", wrong)
    with pytest.raises(ValueError, match="one token more than it has read"):
        kvbits.save(cache, tmp_path / "x", torch.cat([ids, ids[:, :1]], dim=1))
    with pytest.raises(ValueError, match=r"tokens \(1, 7\) are not those of a cache of \(1, 50\)"):
        kvbits.save(cache, tmp_path / "x", ids[:, :7])
    assert torch.equal(kvbits.Saved(tmp_path / "x").tokens, ids.int())


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    cache = kvbits.cache_for(model_of("llama"), INT8)
    call(model_of("llama"), cache, zoo.prompt(2, 80))
    return kvbits.save(cache, tmp_path / "cache.safetensors")


def finetuned() -> hf.PreTrainedModel:
    model = zoo.build("llama")
    model.model.layers[1].mlp.down_proj.weight.data *= 1.02
    return model


def with_adapter(name: str) -> hf.PreTrainedModel:
    """As PEFT leaves a model, as far as a fingerprint looks."""
    model = zoo.build("llama")
    layer: Any = model.model.layers[0].mlp.down_proj
    layer.disable_adapters, layer.active_adapters = False, [name]
    return model


OTHERS = {
    "a finetune": (finetuned, "its weights are others"),
    "another family": (lambda: zoo.build("qwen2"), "this is a Qwen2ForCausalLM, not a LlamaForCausalLM"),
    "another shape": (lambda: zoo.build("llama", num_hidden_layers=3), "num_hidden_layers is 3, not 2"),
    "another dtype": (lambda: zoo.build("llama", torch.bfloat16), "it is bfloat16, not float32"),
    "other frequencies": (
        lambda: zoo.build("llama", rope_parameters={"rope_type": "default", "rope_theta": 5e5}), "rope_theta"),
    "an adapter": (lambda: with_adapter("french"), r"its active adapters are \['french'\], not \[\]"),
}  # fmt: skip


@pytest.mark.parametrize("what", OTHERS)
def test_other_models_are_refused(what: str, file: Path) -> None:
    make, says = OTHERS[what]
    model = make()
    with pytest.raises(ValueError, match=rf"cache\.safetensors is the cache of .*, and not for this model: .*{says}"):
        kvbits.load(file, model)
    assert not hasattr(model, "_kvbits_attachment")  # nothing was done to it


@pytest.mark.parametrize("kind", ["parameters", "buffers"])
def test_quantized_weights_are_weights(kind: str, tmp_path: Path) -> None:
    """Two models of the same embeddings and norms, whose other weights are whole numbers, as in bnb and GPTQ."""

    def quantized(seed: int) -> hf.PreTrainedModel:
        model = zoo.build("llama")
        codes = torch.randint(0, 255, (40, 12), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
        if kind == "parameters":
            model.model.layers[0].mlp.codes = torch.nn.Parameter(codes, requires_grad=False)
        else:
            model.model.layers[0].mlp.register_buffer("codes", codes)
        return model

    one, path = quantized(1), tmp_path / "x"
    cache = kvbits.cache_for(one, INT8)
    call(one, cache, zoo.prompt(1, 50))
    kvbits.save(cache, path)
    kvbits.load(path, quantized(1))
    with pytest.raises(ValueError, match="its weights are others"):
        kvbits.load(path, quantized(2))


def test_adapters_are_part_of_a_model(tmp_path: Path) -> None:
    french, german = with_adapter("french"), with_adapter("german")
    cache = kvbits.cache_for(french, INT8)
    call(french, cache, zoo.prompt(1, 50))
    kvbits.save(cache, tmp_path / "x")
    kvbits.load(tmp_path / "x", with_adapter("french"))
    with pytest.raises(ValueError, match=r"adapters are \['german'\], not \['french'\]"):
        kvbits.load(tmp_path / "x", german)
    german.model.layers[0].mlp.down_proj.disable_adapters = True
    with pytest.raises(ValueError, match=r"adapters are \[\], not \['french'\]"):
        kvbits.load(tmp_path / "x", german)


def test_damage_is_refused_before_anything_is_filled(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(Damaged, match="is not as it was written"):
        kvbits.load(file, model_of("llama"))
    kvbits.load(file, model_of("llama"), verify=False)  # on demand: this bit is in no header
    file.write_bytes(content[:-1])
    with pytest.raises(Damaged, match="truncated"):
        kvbits.load(file, model_of("llama"), verify=False)


def test_a_layer_that_is_another_one_here_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = kvbits.Saved(file)
    saved.about["layers"][1]["scheme"] = "int4"
    with pytest.raises(ValueError, match=r"layer 1 .* is \('int4', None, None\), here \('int8,residual=4,block=32'"):
        saved.cache(model_of("llama"))
    saved = kvbits.Saved(file)
    saved.about["layers"].append(saved.about["layers"][0])
    with pytest.raises(ValueError, match="it has 3 layers, not 2"):
        saved.cache(model_of("llama"))
    saved = kvbits.Saved(file)
    del saved.about["layers"][0]["counts"]
    with pytest.raises(Damaged, match="contradicts itself: KeyError 'counts'"):
        saved.cache(model_of("llama"))


def test_layers_of_the_models_own_type_are_of_one_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = kvbits.cache_for(model_of("gemma3"), INT8)
    call(model_of("gemma3"), cache, zoo.prompt(1, 60))
    kvbits.save(cache, tmp_path / "x")
    monkeypatch.setattr(saving, "_release", lambda: "9.9")
    with pytest.raises(ValueError, match=r"DynamicSlidingWindowLayer of Transformers .* may hold other things here"):
        kvbits.load(tmp_path / "x", model_of("gemma3"))


def test_what_cannot_be_saved_says_why(tmp_path: Path) -> None:
    path, model, ids = tmp_path / "x", model_of("llama"), zoo.prompt(1, 40)
    with pytest.raises(TypeError, match=r"save takes a cache that kvbits\.cache_for made, not DynamicCache"):
        kvbits.save(hf.DynamicCache(config=model.config), path)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="packs nothing"):
        windows = kvbits.cache_for(model_of("mistral-window"), INT8)
    with pytest.raises(ValueError, match="nothing that kvbits stores"):
        kvbits.save(windows, path)
    orphan = pickle.loads(pickle.dumps(kvbits.cache_for(zoo.build("llama"), INT8)))
    assert orphan.model is None
    with pytest.raises(ValueError, match="the model of this cache is not there any more"):
        kvbits.save(orphan, path)
    cache = kvbits.cache_for(model, INT8)
    with pytest.raises(ValueError, match="note is no JSON data"):
        kvbits.save(cache, path, note={1, 2})
    hook = model.lm_head.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        call(model, cache, ids)
    hook.remove()
    with pytest.raises(ValueError, match="was interrupted"):
        kvbits.save(cache, path)
    cache = kvbits.cache_for(model_of("gemma3"), INT8)
    cache.layers[0].strange = object()
    with pytest.raises(ValueError, match=r"layer 0 of this cache is a Dynamic.* 0\.strange is a object"):
        kvbits.save(cache, path)
    assert not path.exists()


def test_positions_of_pictures_are_kept_by_the_model(tmp_path: Path) -> None:
    model = zoo.build("qwen2-vl")
    cache = kvbits.cache_for(model, INT8)
    call(model, cache, zoo.prompt(1, 40))
    model.base_model.rope_deltas = torch.tensor([[-3]])
    with pytest.raises(ValueError, match="rope_deltas"):
        kvbits.save(cache, tmp_path / "x")


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    from letters import tokenizer

    cache = kvbits.cache_for(model_of("llama"), INT8)
    kvbits.save(cache, tmp_path / "x", tokenizer=tokenizer())
    kvbits.load(tmp_path / "x", model_of("llama"))
    kvbits.load(tmp_path / "x", model_of("llama"), tokenizer=tokenizer())
    with pytest.raises(ValueError, match="tokenizer has another vocabulary"):
        kvbits.load(tmp_path / "x", model_of("llama"), tokenizer=tokenizer("term"))


# -- parts -------------------------------------------------------------------------------------------------------------


def test_plain_data_comes_back() -> None:
    value = {"a": [1, 2.5, None, ("x", True)], 3: {"t": torch.arange(3)}, "d": torch.bfloat16, "where": CPU}
    tensors: dict[str, torch.Tensor] = {}
    back = from_plain(to_plain(value, "n", tensors), tensors.__getitem__, torch.device("meta"))
    assert list(tensors) == ["n.3.t"]
    assert back["a"] == value["a"] and back["d"] is torch.bfloat16 and back["where"].type == "meta"
    assert back[3]["t"].is_meta
    for wrong in ({"code": "x"}, {"dtype": "save"}, [1], {"a": 1, "b": 2}, {}):
        with pytest.raises(ValueError, match="nothing that is ever stored"):
            from_plain(wrong, tensors.__getitem__, CPU)


def test_layers_are_put_where_the_model_computes_them() -> None:
    model = zoo.build("llama")
    assert devices_of_layers(model, 2) == [CPU, CPU]
    model.model.layers[1].to("meta")
    model.model.layers[1].self_attn._hf_hook = torch.nn.Module()
    model.model.layers[1].self_attn._hf_hook.execution_device = "cuda:3"
    assert devices_of_layers(model, 2) == [CPU, torch.device("cuda:3")]


# -- kvbits inspect ----------------------------------------------------------------------------------------------------


def test_inspect_a_cache(tmp_path: Path) -> None:
    cache = kvbits.cache_for(model_of("gemma3"), INT8)
    call(model_of("gemma3"), cache, zoo.prompt(2, 80))
    path = kvbits.save(cache, tmp_path / "x", note={"title": "a \x1b[31m\x9b31mred one"})
    code, output = inspect(path, "--verify")
    assert code == 0
    for line in (
        f"cache      {path}, {path.stat().st_size:,} bytes, verified", f"scheme     {INT8}", "2 x 80 tokens",
        "model      Gemma3ForCausalLM, float32, 4 layers", "0: DynamicSlidingWindowLayer, the model's own",
        f"1: {INT8}: 2 blocks and 16 exact tokens a row", f"{cache.nbytes.total:,} bytes: codes {cache.nbytes.codes:,}",
        "160 known", f"by kvbits {kvbits.__version__}", "red one",
    ):  # fmt: skip
        assert line in output
    assert "\x1b" not in output and "\x9b" not in output
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    assert inspect(path)[0] == 0
    code, output = inspect(path, "--verify")
    assert code == 2 and "is not as it was written" in output


@pytest.mark.model
def test_inspect_shows_text(smollm2: Any, tmp_path: Path) -> None:
    model, tokenizer = smollm2
    cache = kvbits.cache_for(model, "default")
    call(model, cache, tokenizer("Once upon a time", return_tensors="pt").input_ids)
    kvbits.save(cache, tmp_path / "x")
    kvbits.disable(model)
    code, output = inspect(tmp_path / "x", "--tokenizer", "smollm2")
    assert code == 0 and "'Once upon a time'" in output


def test_inspect_other_things(tmp_path: Path) -> None:
    fitted = kvbits.calibrate(model_of("llama"), zoo.prompt(1, 60), "nuq3")
    for path in (fitted.save(tmp_path / "cal"), tmp_path / "cal" / "calibration.safetensors"):
        code, output = inspect(path)
        assert code == 0 and "calibration" in output and "value nuq3-token" in output and "1 x 60 tokens" in output
    (tmp_path / "text").write_text("text")
    for path, says in (
        ("text", "no file of a kvbits cache"),
        ("no", "there is no file"),
        (".", "is a folder, but neither"),
    ):
        code, output = inspect(tmp_path / path)
        assert code == 2 and says in output and "Traceback" not in output
    sealed.write(tmp_path / "forged", {"rows": 1}, {})
    code, output = inspect(tmp_path / "forged")
    assert code == 2 and "forged" in output


def test_a_file_and_a_model_in_each_others_place() -> None:
    with pytest.raises(TypeError, match="the file first and the model second"):
        kvbits.load(zoo.build("llama"), "cache.kvbits")  # type: ignore[arg-type]
