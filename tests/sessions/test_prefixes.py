"""What was read once is not read again: forks share their prompt's blocks, and a folder of prefixes gives them back."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvbits
import zoo
from kvbits.attend.dense import dense
from kvbits.files.sealed import Sealed
from kvbits.hf.cache import KVCache
from kvbits.hf.names import cache_name
from kvbits.sessions.prefixes import PrefixStore, files_of, in_common
from saved import INT8, SMALL, VARIOUS, assert_same_layer, call, grow, layer, model_of, tokens

pytestmark = pytest.mark.usefixtures("one_thread")

BUDGET = 10**7


# -- forks of a layer --------------------------------------------------------------------------------------------------


def steps() -> st.SearchStrategy[list[tuple[str, int, int]]]:
    one = st.tuples(
        st.sampled_from(["append", "append", "crop", "select", "fork", "drop"]), st.integers(0, 9), st.integers(0, 90)
    )
    return st.lists(one, min_size=1, max_size=14)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from((*VARIOUS[:2], "window")), steps())
def test_forks_are_as_copies(scheme: str, steps: list[tuple[str, int, int]]) -> None:
    """Whatever is done to them in whatever order, each is as a copy with memory of its own."""
    core = layer(INT8, window=60) if scheme == "window" else layer(scheme)
    grow((core,), 150, 0)
    pairs = [(core, copy.deepcopy(core)), (core.fork(), copy.deepcopy(core))]
    for number, (step, which, count) in enumerate(steps):
        pair = pairs[which % len(pairs)]
        if step == "append":
            grow(pair, 1 + count, number)
        elif step == "crop":
            for each in pair:
                try:
                    each.crop(min(count, each.columns - 1))
                except ValueError as error:
                    assert "has dropped" in str(error)
        elif step == "select":
            index = torch.tensor([count % 2, which % 2])
            for each in pair:
                each.select_rows(index)
        elif step == "fork":
            pairs.append((pair[0].fork(), copy.deepcopy(pair[1])))
        elif len(pairs) > 1:
            pairs.remove(pair)
    for fork, twin in pairs:
        assert_same_layer(fork, twin)


def test_what_forks_give_up_is_reclaimed_once_none_refers_to_it() -> None:
    core = layer(INT8)
    grow((core,), 600, 0)
    forks = [core.fork() for _ in range(4)]
    for number, fork in enumerate(forks):
        grow((fork,), 300, number)
    store = core.store
    assert store is not None
    alive = sum(sum(fork.store.counts) for fork in forks) - 3 * sum(store.counts)  # type: ignore[union-attr]
    assert store.used == alive  # the prompt once, and what each has added
    del fork, forks
    gc.collect()
    grow((core,), 600, 9)
    assert store.used == sum(store.counts) and store.pool.shape[0] <= store.used * 9 / 8 + 2


def test_copies_and_pickles_of_forks_have_memory_of_their_own() -> None:
    core = layer(INT8)
    grow((core,), 150, 0)
    fork = core.fork()
    for twin in (copy.deepcopy(fork), pickle.loads(pickle.dumps(fork))):
        assert twin.store.shared is not fork.store.shared and set(twin.store.shared.stores) == {twin.store}
        grow((twin,), 100, 1)
        assert_same_layer(core, fork)
    one, other = copy.deepcopy([core, fork])  # together they stay together
    assert one.store.shared is other.store.shared and len(one.store.shared.stores) == 2


def test_forks_grow_in_threads() -> None:
    core = layer(INT8)
    grow((core,), 150, 0)
    pairs = [(core.fork(), copy.deepcopy(core)) for _ in range(6)]
    errors: list[BaseException] = []

    def work(fork: Any, seed: int) -> None:
        try:
            for number in range(12):
                grow((fork,), 33, 100 * seed + number)
                if number % 5 == 4:
                    fork.crop(70)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(fork, seed)) for seed, (fork, _) in enumerate(pairs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for seed, (fork, twin) in enumerate(pairs):
        work(twin, seed)
        assert_same_layer(fork, twin)


# -- forks of a cache --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3-next"])
def test_continuations_of_one_prompt(name: str) -> None:
    model = model_of(name)
    scheme = f"lm4,centred,{SMALL}"
    cache = kvbits.cache_for(model, scheme)
    call(model, cache, zoo.prompt(1, 90))
    right = copy.deepcopy(cache)
    forks = [cache.fork(), cache.fork(), copy.copy(cache)]
    twins = [copy.deepcopy(right) for _ in forks]
    for ids in zoo.prompt(3, 50, seed=8).split(1, dim=1):
        for row, (fork, twin) in enumerate(zip(forks, twins, strict=True)):
            assert torch.equal(call(model, fork, ids[row : row + 1]), call(model, twin, ids[row : row + 1]))
            assert torch.equal(fork.tokens, twin.tokens)
    ids = zoo.prompt(1, 40, seed=9)
    assert twins[0].model is forks[0].model is model
    forks[0].reset()
    assert torch.equal(call(model, forks[0], ids), call(model, kvbits.cache_for(model, scheme), ids))
    assert torch.equal(call(model, cache, ids), call(model, right, ids))


def tensors_of(thing: Any, seen: set[int]) -> dict[int, int]:
    """Bytes of all storages that can be reached from an object."""
    found: dict[int, int] = {}
    waiting = [thing]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            found[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        elif isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, (list, tuple, set)):
            waiting += one
        elif type(one).__module__.startswith(("kvbits", "transformers")) and hasattr(one, "__dict__"):
            waiting += vars(one).values()
    return found


def test_continuations_of_one_prompt_cost_one_prompt() -> None:
    model = zoo.build("llama", head_dim=32, max_position_embeddings=4096)
    cache = kvbits.cache_for(model, f"int4,{SMALL}")
    call(model, cache, zoo.prompt(1, 4000))
    alone = cache.nbytes
    forks = [cache.fork() for _ in range(8)]
    for number, fork in enumerate(forks):
        call(model, fork, zoo.prompt(1, 100, seed=number))
    together = kvbits.nbytes_of([cache, *forks])
    uncounted = {id(cache.columns.rotaries), *(id(one.columns.ids) for one in (cache, *forks))}
    storages = tensors_of([cache, *forks], uncounted)
    assert together.total == sum(storages.values())
    more = 1 + 8 * 3 / 124  # of 4,000 tokens 124 blocks are packed, and of the next 100 each time 3
    assert together.codes == alone.codes * more
    core = cache.packed_layers[0].core
    assert core.keys is not None and core.store is not None
    own = 2 * (2 * core.keys.nbytes + core.store.table.nbytes * 9 / 8)  # both layers
    assert together.total < 9 / 8 * alone.total * more + 8 * own
    assert together.total < 0.25 * sum(fork.nbytes.total for fork in forks)
    assert 0 < forks[0].nbytes.codes - alone.codes < 0.03 * alone.codes  # each counts what it refers to
    assert kvbits.nbytes_of([]) == kvbits.cache_for(model, "int4").nbytes
    assert kvbits.nbytes_of([cache, cache]).codes == kvbits.nbytes_of([cache]).codes


def test_a_fork_is_saved_without_the_blocks_of_others(tmp_path: Path) -> None:
    model = model_of("llama")
    cache = kvbits.cache_for(model, INT8)
    call(model, cache, zoo.prompt(1, 150))
    fork = cache.fork()
    call(model, cache, zoo.prompt(1, 200, seed=5))
    for each in (fork, twin := copy.deepcopy(fork)):
        call(model, each, zoo.prompt(1, 60, seed=6))
    sizes = [kvbits.save(each, tmp_path / name).stat().st_size for each, name in ((fork, "x"), (twin, "y"))]
    assert abs(sizes[0] - sizes[1]) < 500  # two tables, and what the header says of them
    loaded, ids = kvbits.load(tmp_path / "x", model), zoo.prompt(1, 50, seed=7)
    assert torch.equal(call(model, loaded, ids), call(model, twin, ids))


def test_a_broken_cache_is_not_forked() -> None:
    model = model_of("gemma3")
    cache = kvbits.cache_for(model, INT8)
    call(model, cache, zoo.prompt(1, 50))
    hook = model.lm_head.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        call(model, cache, zoo.prompt(1, 1))
    hook.remove()
    with pytest.raises(ValueError, match="could not be taken back"):
        cache.fork()


# -- where a cache can be cut ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", [INT8, f"kivi4,sinks=2+3,{SMALL}", "exact", f"int4,sinks=0,{SMALL}"])
@pytest.mark.parametrize("count", [3, 39, 40, 150])
def test_whole_blocks(scheme: str, count: int) -> None:
    """Of every length: the crop leaves what was stored, and is the longest that does."""
    core = layer(scheme)
    generator = torch.Generator().manual_seed(3)
    keys, values = tokens(1, count, 3)
    keys *= torch.where(torch.rand(count, generator=generator) < 0.05, 20.0, 1.0)[
        None, None, :, None
    ]  # some late sinks
    core.append(keys, values)
    shown = [x.clone() for x in dense(core.view())]
    for left in range(count + 1):
        whole = core.whole(left)
        assert left - 32 - 3 < whole <= left
        blocks = sum(core.store.counts)  # type: ignore[union-attr]
        for kept in range(whole, left + 1):
            twin = copy.deepcopy(core)
            assert core.store is not None
            cut = core._cut(0, count - kept, kept)
            assert (cut.border == 0) == (kept == whole) or (cut.border == 0 and cut.blocks == blocks), (left, kept)
        twin.crop(count - whole)
        for now, then in zip(dense(twin.view()), shown, strict=True):
            assert torch.equal(now, then[:, :, :whole])
    assert core.whole(count + 5) == count


def test_layers_that_cannot_be_cut() -> None:
    for name, count, whole in (("gemma3", 10, 7), ("gemma3", 50, 0), ("qwen3-next", 10, 0), ("gemma3n", 10, 7)):
        cache = kvbits.cache_for(model_of(name), INT8)
        call(model_of(name), cache, zoo.prompt(1, count))
        assert cache.whole(count) == cache.whole(count + 1) == count and cache.whole(7) == whole
        if whole:
            cache.crop(whole - count)
    two = kvbits.cache_for(model_of("llama"), INT8)
    call(model_of("llama"), two, zoo.prompt(2, 50))
    with pytest.raises(ValueError, match="only a cache of one row"):
        two.whole(7)
    windows = kvbits.cache_for(zoo.build("mistral-window", sliding_window=200), f"int4,{SMALL}", sliding=True)
    call(windows.model, windows, zoo.prompt(1, 250))
    assert windows.whole(240) == 0 and windows.whole(250) == 250


# -- a folder of prefixes ----------------------------------------------------------------------------------------------


def put(store: PrefixStore, ids: torch.Tensor) -> KVCache:
    cache = store._new()
    call(store.model, cache, ids)
    store.put(cache)
    return cache


def test_the_longest_prefix_is_found(tmp_path: Path) -> None:
    model, ids = model_of("llama"), zoo.prompt(1, 400)
    store = PrefixStore(tmp_path / "new" / "folder", BUDGET, model, INT8)
    assert store.lookup(ids)[1] == 0
    for count in (40, 100, 260):
        put(store, ids[:, :count])
    elsewhere = ids.clone()
    elsewhere[0, 130] = ids[0, 130] % 100 + 2
    for asked, covered in (
        (ids, 260), (ids[:, :261], 260), (ids[0].tolist()[:300], 260),
        (ids[:, :260], 259), (ids[:, :240], 239),  # one must be left to read: the cut goes through recent tokens
        (ids[:, :220], 4 + 6 * 32), (elsewhere, 4 + 3 * 32),  # or it goes back to where a block ends
        (ids[:, :120], 100), (ids[:, :101], 100), (ids[:, :100], 99), (ids[:, :41], 40), (ids[:, :33], 0),
        (zoo.prompt(1, 100, seed=4), 0),
    ):  # fmt: skip
        cache, found = store.lookup(asked)
        assert (found, cache.get_seq_length()) == (covered, covered), covered
        wanted = torch.as_tensor(asked).reshape(1, -1)
        assert torch.equal(cache.tokens, wanted[:, :covered]) if covered else cache.tokens.numel() == 0


@pytest.mark.parametrize("scheme", [INT8, f"lm4,centred,{SMALL}", f"fp8-static,{SMALL}", f"kivi4,sinks=2+3,{SMALL}"])
def test_what_is_reused_is_what_was_stored(scheme: str, tmp_path: Path) -> None:
    """The whole of an entry as if it had stayed in memory; a part as if it had been cropped there."""
    model, ids = model_of("llama"), zoo.prompt(1, 300)
    store = PrefixStore(tmp_path, BUDGET, model, scheme)
    put(store, ids[:, :200])
    for asked in (ids, torch.cat([ids[:, :150], zoo.prompt(1, 40, seed=6)], dim=1)):
        cache, covered = store.lookup(asked)
        right = kvbits.cache_for(model, scheme)
        call(model, right, ids[:, :200])
        if asked is ids:
            assert covered == 200
        elif "+" in scheme:  # blocks end elsewhere in each layer
            assert covered == 0
            continue
        else:
            assert covered == 4 + 4 * 32
            right.crop(covered - 200)
        for chunk in (asked[:, covered:], *zoo.prompt(1, 40, seed=7).split(1, dim=1)):
            assert torch.equal(call(model, cache, chunk), call(model, right, chunk))


def test_generate_reads_the_rest_alone(tmp_path: Path) -> None:
    model, ids = model_of("llama"), zoo.prompt(1, 150)
    store = PrefixStore(tmp_path, BUDGET, model, INT8)
    put(store, ids[:, :100])
    read: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda _, __, given: read.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    options = {"max_new_tokens": 5, "do_sample": False}
    cache, _ = store.lookup(ids)
    out = model.generate(ids, **options, **{cache_name(model): cache})
    hook.remove()
    assert read == [50, 1, 1, 1, 1]
    right = kvbits.cache_for(model, INT8)
    call(model, right, ids[:, :100])
    assert torch.equal(out, model.generate(ids, **options, **{cache_name(model): right}))
    store.put(cache)  # and the next turn goes on from here
    assert store.lookup(torch.cat([out, out], dim=1))[1] == 154


@pytest.mark.parametrize("name", ["gemma3", "qwen3-next"])
def test_layers_that_cannot_be_cropped_reuse_whole_entries(name: str, tmp_path: Path) -> None:
    model, ids = model_of(name), zoo.prompt(1, 200)
    store = PrefixStore(tmp_path, BUDGET, model, INT8)
    right = put(store, ids[:, :100])
    put(store, ids[:, :150])
    cache, covered = store.lookup(ids[:, :140])
    assert covered == 100
    assert torch.equal(call(model, cache, ids[:, 100:]), call(model, right, ids[:, 100:]))
    assert store.lookup(ids[:, :100])[1] == 0 and store.lookup(ids[:, :151])[1] == 150


def test_the_least_recently_used_entries_make_room(tmp_path: Path) -> None:
    model = model_of("llama")
    store = PrefixStore(tmp_path, BUDGET, model, INT8)
    prompts = [zoo.prompt(1, 100, seed=seed) for seed in range(5)]
    put(store, prompts[0])
    size = store.nbytes
    store.budget_bytes = 3 * size + size // 2
    for prompt in prompts[1:3]:
        put(store, prompt)
    assert store.lookup(torch.cat([prompts[0], prompts[0]], dim=1))[1] == 100  # used again
    put(store, prompts[3])
    put(store, prompts[2])  # there already, and used now
    put(store, prompts[4])
    held = [store.lookup(torch.cat([prompt, prompt], dim=1))[1] for prompt in prompts]
    assert held == [0, 0, 100, 100, 100] and store.nbytes == 3 * size
    store.budget_bytes = size - 1
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match=f"this cache takes {size:,} bytes, more than the budget of {size - 1:,}"):
        put(store, zoo.prompt(1, 100, seed=7))
    assert sorted(tmp_path.iterdir()) == before


def test_a_clock_that_was_put_back_changes_no_order(tmp_path: Path) -> None:
    store = PrefixStore(tmp_path, BUDGET, model_of("llama"), INT8)
    prompts = [zoo.prompt(1, 100, seed=seed) for seed in range(4)]
    for prompt in prompts[:2]:
        put(store, prompt)
    store.budget_bytes = store.nbytes * 2 - 1  # of three
    for file in files_of(tmp_path):
        later = file.used_ns + 10**15
        os.utime(file.path, ns=(later, later))
    for prompt in prompts[2:]:
        put(store, prompt)
    held = [store.lookup(torch.cat([prompt, prompt], dim=1))[1] for prompt in prompts]
    assert held == [0, 100, 100, 100]
    assert store.lookup(torch.cat([prompts[1]] * 2, dim=1))[1] == 100
    put(store, prompts[0])
    assert [store.lookup(torch.cat([prompt, prompt], dim=1))[1] for prompt in prompts] == [100, 100, 0, 100]


def test_another_entry_under_the_name_of_one_is_not_taken_for_it(tmp_path: Path) -> None:
    """Somebody moves files about just when one is opened."""
    store, ids = PrefixStore(tmp_path, BUDGET, model_of("llama"), INT8), zoo.prompt(1, 200)
    other = torch.cat([ids[:, :70], zoo.prompt(1, 60, seed=9)], dim=1)
    put(store, ids[:, :130])
    put(store, other)
    known = store._refreshed()
    store._refreshed = lambda: known  # type: ignore[method-assign]
    right, wrong = sorted(known, key=lambda name: in_common(known[name].tokens, other[0]))
    os.replace(tmp_path / wrong, tmp_path / right)
    cache, covered = store.lookup(ids)
    assert covered == 4 + 2 * 32 and torch.equal(cache.tokens, ids[:, :covered])


def test_a_folder_that_was_removed_is_made_again(tmp_path: Path) -> None:
    store, ids = PrefixStore(tmp_path / "x", BUDGET, model_of("llama"), INT8), zoo.prompt(1, 100)
    shutil.rmtree(tmp_path / "x")
    assert store.lookup(ids)[1] == store.common(ids) == store.nbytes == 0
    put(store, ids)
    assert store.lookup(ids)[1] == 99


def test_each_store_sees_its_own(tmp_path: Path) -> None:
    model, ids = model_of("llama"), zoo.prompt(1, 100)
    more = torch.cat([ids, ids], dim=1)
    fitted = [kvbits.calibrate(model, zoo.prompt(1, 60, seed), "nuq3") for seed in range(2)]
    finetuned = zoo.build("llama")
    finetuned.model.layers[1].mlp.down_proj.weight.data *= 1.02
    stores = [
        PrefixStore(tmp_path, BUDGET, model, INT8),
        PrefixStore(tmp_path, BUDGET, model, f"int4,{SMALL}"),
        PrefixStore(tmp_path, BUDGET, model_of("llama", torch.bfloat16), INT8),
        PrefixStore(tmp_path, BUDGET, finetuned, INT8),
        *(PrefixStore(tmp_path, BUDGET, model, f"nuq3,{SMALL}", calibration=one) for one in fitted),
    ]
    for number, store in enumerate(stores):
        assert store.lookup(more)[1] == 0, number
        put(store, ids)
    assert len(list(tmp_path.iterdir())) == len(stores)
    assert all(store.lookup(more)[1] == 100 for store in stores)
    assert PrefixStore(tmp_path, BUDGET, model_of("llama", number=1), INT8).lookup(more)[1] == 100


def test_entries_of_a_model_that_was_changed_since_are_passed_over(tmp_path: Path) -> None:
    model, ids = zoo.build("llama"), zoo.prompt(1, 100)
    store = PrefixStore(tmp_path, BUDGET, model, INT8)
    put(store, ids)
    model.model.layers[0].mlp.down_proj.weight.data *= 1.02
    with pytest.warns(RuntimeWarning, match=r"passed over: .* its weights are others"):
        assert store.lookup(torch.cat([ids, ids], dim=1))[1] == 0
    with pytest.raises(ValueError, match="not as those of this store"):
        put(store, ids)


@pytest.mark.parametrize("what", ["first bytes", "header", "blocks", "truncated", "empty"])
def test_damaged_entries_are_removed_with_a_warning(what: str, tmp_path: Path) -> None:
    model, ids = model_of("llama"), zoo.prompt(1, 200)
    store = PrefixStore(tmp_path, BUDGET, model, INT8)
    put(store, ids[:, :60])
    put(store, ids[:, :100])
    (path,) = (file.path for file in files_of(tmp_path) if Sealed(file.path).about["rows"]["columns"] == 100)
    content = bytearray(path.read_bytes())
    if what in (places := {"first bytes": 20, "header": 700, "blocks": -700}):
        content[places[what]] ^= 1
    path.write_bytes(content[: {"truncated": -1, "empty": 0}.get(what, len(content))])
    with pytest.warns(RuntimeWarning, match=r"removed: .* (damaged|truncated|it is empty|something else)"):
        assert store.lookup(ids)[1] == 60
    assert not path.exists()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.lookup(ids)[1] == 60


def test_entries_that_vanish_and_those_of_later_releases(tmp_path: Path) -> None:
    model, ids = model_of("llama"), zoo.prompt(1, 200)
    store = PrefixStore(tmp_path, BUDGET, model, INT8)
    for count in (60, 80, 100):
        put(store, ids[:, :count])
    assert store.lookup(ids)[1] == 100
    paths = sorted(tmp_path.iterdir(), key=lambda path: Sealed(path).about["rows"]["columns"])
    content = paths[2].read_bytes()
    paths[2].write_bytes(content.replace(b'"kvbits.cache":"1"', b'"kvbits.cache":"9"'))
    os.utime(paths[2])
    known = store._refreshed()
    paths[1].unlink()
    store._refreshed = lambda: known  # type: ignore[method-assign]  # another process was quicker
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.lookup(ids)[1] == 60
    assert paths[2].exists()


def test_what_is_not_kept_says_why(tmp_path: Path) -> None:
    model, ids = model_of("llama"), zoo.prompt(1, 50)
    with pytest.raises(ValueError, match="budget_bytes=0 is no number of bytes"):
        PrefixStore(tmp_path, 0, model)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="is a file, not a folder"):
        PrefixStore(tmp_path / "file", 1, model)
    store = PrefixStore(tmp_path, BUDGET, model, INT8)
    for wrong in (ids.repeat(2, 1), ids.float(), torch.tensor(3)):
        with pytest.raises(ValueError, match="ids of one prompt"):
            store.lookup(wrong)
    for other, says in (
        (kvbits.cache_for(model, f"int4,{SMALL}"), r"\(int4,residual=4,block=32\) is not as those"),
        (kvbits.cache_for(model_of("llama", number=1), INT8), "not of the model of this store"),
        (object(), "not of the model of this store"),
    ):
        with pytest.raises(ValueError, match=says):
            store.put(other)  # type: ignore[arg-type]
    cache = store._new()
    with pytest.raises(ValueError, match="one row without padding, not of 0"):
        store.put(cache)
    call(model, cache, ids.repeat(2, 1))
    with pytest.raises(ValueError, match="one row without padding, not of 2"):
        store.put(cache)
    cache = store._new()
    with torch.no_grad():
        model(inputs_embeds=model.get_input_embeddings()(ids), **{cache_name(model): cache})
    with pytest.raises(ValueError, match="could not be found again"):
        store.put(cache)
    store.put(cache, ids)
    placed = PrefixStore(tmp_path, BUDGET, model, f"kivi4,pre-rope,{SMALL}")
    cache = placed._new()
    call(model, cache, ids, position_ids=torch.arange(7, 57)[None])
    with pytest.raises(ValueError, match="at positions of their own"):
        placed.put(cache)
    cache = store._new()  # under a scheme that does not follow positions
    call(model, cache, ids[:, :30])
    call(model, cache, ids[:, 30:], position_ids=torch.arange(37, 57)[None])
    assert cache.tokens.tolist() == [[*ids[0, :30].tolist(), *[-1] * 20]]
    with pytest.raises(ValueError, match="could not be found again"):
        store.put(cache)


def work(folder: Path, budget: int, seed: int, rounds: int, ready: Any) -> None:
    """What a process does with a store: ask, read the rest, keep it."""
    warnings.simplefilter("error", RuntimeWarning)
    model, chance, hits = model_of("llama"), random.Random(seed), 0
    store = PrefixStore(folder, budget, model, INT8)
    for number in range(rounds):
        ids = zoo.prompt(1, 120, seed=chance.randrange(6))[:, : chance.choice((60, 90, 120))]
        cache, covered = store.lookup(ids)
        hits += covered > 0
        assert not covered or torch.equal(cache.tokens, ids[:, :covered])
        call(model, cache, ids[:, covered:])
        store.put(cache)
        assert store.nbytes <= budget
        if number == 2:
            ready.set()
    assert hits > 5


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")
def test_processes_share_a_folder(tmp_path: Path) -> None:
    """Three at a time, one of them killed in the middle, with room for a few entries only."""
    folder, processes = tmp_path / "prefixes", multiprocessing.get_context("fork")
    store = PrefixStore(folder, BUDGET, model_of("llama"), INT8)
    put(store, zoo.prompt(1, 120))
    budget = 5 * store.nbytes
    started = []
    for seed, rounds in ((0, 10_000), (1, 60), (2, 60)):
        ready = processes.Event()
        worker = processes.Process(target=work, args=(folder, budget, seed, rounds, ready), daemon=True)
        worker.start()
        started.append((worker, ready))
    assert all(ready.wait(60) for _, ready in started)
    started[0][0].kill()
    for worker, _ in started:
        worker.join(60)
    assert [worker.exitcode for worker, _ in started] == [-signal.SIGKILL, 0, 0]
    for file in files_of(folder):
        Sealed(file.path).verify()
    assert 0 < store.nbytes <= budget
    store.budget_bytes = budget
    put(store, zoo.prompt(1, 120, seed=77))
    assert list(folder.glob(".*.part")) == []


def test_inspect_lists_a_store(tmp_path: Path) -> None:
    from saved import inspect

    store = PrefixStore(tmp_path, BUDGET, model_of("llama"), INT8)
    put(store, zoo.prompt(1, 60))
    path = store.put(put(store, zoo.prompt(1, 90)))
    code, output = inspect(tmp_path)
    assert code == 0 and f"2 caches, {store.nbytes:,} bytes" in output
    assert f"{path.name}" in output and f"90 tokens, {INT8}, LlamaForCausalLM" in output
    path.write_bytes(b"")
    code, output = inspect(tmp_path)
    assert code == 0 and "it is empty" in output and repr(store).startswith(f"PrefixStore({str(tmp_path)!r}")
