"""Contexts and heads on several ranks: real processes over gloo, against one."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import torch
from filelock import FileLock

import kvbits
import ranks
import zoo
from kvbits.attend import KERNELS, Call
from kvbits.attend.dense import dense
from kvbits.hf.names import cache_name
from kvbits.layer.cache import LayerCache
from kvbits.parallel.join import merge, with_sinks
from kvbits.schemes.scheme import Scheme
from kvbits.store.shards import Shards

pytestmark = pytest.mark.usefixtures("one_thread")

# -- which rank holds what ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world", "run"), [(1, 1), (2, 1), (2, 16), (3, 2), (8, 5)])
def test_every_block_has_one_owner_and_no_rank_has_a_run_more_than_another(world: int, run: int) -> None:
    shards = [Shards(rank, world, run) for rank in range(world)]
    for blocks in (0, 1, run, 2 * run + 1, 97, 200):
        counts = [one.count(blocks) for one in shards]
        assert sum(counts) == blocks and max(counts) - min(counts) <= run
        for one, count in zip(shards, counts, strict=True):
            own = [n for n in range(blocks) if one.owner(n) == one.rank]
            assert own == one.number(torch.arange(count)).tolist() == [one.number(n) for n in range(count)]
            assert own == [n for piece in one.mine(0, blocks) for n in piece]
            middle = [n for piece in one.mine(blocks // 3, blocks) for n in piece]
            assert middle == [n for n in own if n >= blocks // 3]


def test_impossible_shards_are_refused() -> None:
    with pytest.raises(ValueError, match="rank=2 is not one of 2 ranks"):
        Shards(2, 2, 1)
    with pytest.raises(ValueError, match="run=0 is not a number of blocks"):
        Shards(0, 2, 0)


# -- log-sums ----------------------------------------------------------------------------------------------------------


def test_pieces_merge_to_the_softmax_of_all() -> None:
    torch.manual_seed(0)
    scores, values = 20 * torch.randn(3, 5, 60, dtype=torch.float64), torch.randn(3, 60, 8, dtype=torch.float64)
    cuts = [(0, 1), (1, 30), (30, 30), (30, 60)]
    outs = [scores[..., a:b].softmax(-1) @ values[:, a:b] for a, b in cuts]
    sums = [scores[..., a:b].logsumexp(-1) for a, b in cuts]
    out, log_sums = merge(torch.stack(outs), torch.stack(sums))
    torch.testing.assert_close(out, scores.softmax(-1) @ values)
    torch.testing.assert_close(log_sums, scores.logsumexp(-1))
    sinks = torch.randn(5, dtype=torch.float64)
    with_sink = torch.cat([scores, sinks[None, :, None].expand(3, -1, 1)], -1).softmax(-1)[..., :-1] @ values
    found = with_sinks(out[:, :, None], log_sums[:, :, None], sinks)[:, :, 0]
    torch.testing.assert_close(found, with_sink)


def test_where_nothing_is_seen_the_merge_is_zero() -> None:
    out, log_sums = merge(torch.zeros(2, 3, 4), torch.full((2, 3), -torch.inf))
    assert bool((out == 0).all()) and bool((log_sums == -torch.inf).all())


@pytest.mark.parametrize(
    "scheme", ["int4", "kivi2", "rot4", "int4,pre-rope", "k=int4,v=int4,centred", "int4,sinks=2+3"]
)
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("kernel", ["native", "triton", "reference"])
def test_a_kernel_reshards_the_log_of_its_sums(scheme: str, queries: int, kernel: str) -> None:
    """Of packed and of exact tokens apart, and together they are the attention over all."""
    from kvbits.transform.rotary import Rotary

    torch.manual_seed(1)
    layer = LayerCache(Scheme.parse(f"{scheme},residual=32,block=32"), rotary=Rotary(torch.rand(16)))
    for tokens in (300, 40, queries):
        view = layer.append(torch.randn(1, 2, tokens, 32), torch.randn(1, 2, tokens, 32))
    call = Call(torch.randn(1, 4, queries, 32), view, 0.3, softcap=5.0)
    chosen = next(one for one in KERNELS if one.name == kernel)
    if reasons := chosen.why_not(call):
        pytest.skip("; ".join(reasons))
    parts = [chosen.partial(Call(call.query, one, 0.3, softcap=5.0)) for one in (view.packed_only(), view.exact_only())]
    whole = chosen.run(call)
    out, log_sums = merge(*(torch.stack(x) for x in zip(*parts, strict=True)))
    torch.testing.assert_close(out, whole, rtol=1e-5, atol=1e-5)
    keys = dense(view)[0].double().repeat_interleave(2, 1)
    scores = 5.0 * torch.tanh(call.query.double() @ keys.transpose(-1, -2) * 0.3 / 5.0)
    columns = torch.arange(scores.shape[-1])
    later = columns > columns[-queries:, None]
    true = scores.masked_fill(later, -torch.inf).logsumexp(-1)
    torch.testing.assert_close(log_sums.double(), true, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({}, True),
        ({"logits_to_keep": 0}, False),
        ({"output_router_logits": True}, False),
        ({"output_hidden_states": True}, False),
    ],
    ids=str,
)
def test_only_a_call_for_its_last_logits_is_read_ahead(
    options: dict[str, Any], asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, calls = zoo.build("mixtral"), []
    cache = kvbits.cache_for(model, "int4")
    monkeypatch.setattr(cache, "read_ahead", lambda *arguments: calls.append(arguments) or 0, raising=False)
    with torch.no_grad():
        model(zoo.prompt(1, 20), **{"logits_to_keep": 1, cache_name(model): cache, **options})
    assert len(calls) == asked


# -- real processes ----------------------------------------------------------------------------------------------------


def found_by(world: int, factory: pytest.TempPathFactory, *scenes: str) -> list[dict[str, Any]]:
    """What each rank found. Workers that run tests side by side run the scenes once, and share what came out."""
    base = factory.getbasetemp()
    folder = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    file = folder / f"found-by-{world}.json"
    with FileLock(f"{file}.lock"):
        if not file.exists():
            ended = ranks.run(world, *scenes, SCENE_FOLDER=str(factory.mktemp(f"ranks-{world}")))
            assert [one.code for one in ended] == [0] * world, "\n".join(one.error[-3000:] for one in ended)
            file.write_text(json.dumps([one.found for one in ended]))
    found: list[dict[str, Any]] = json.loads(file.read_text())
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return found_by(
        2, tmp_path_factory, "generation", "sliced", "lengths", "positions", "features", "calls", "refusals", "tensor"
    )


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return found_by(4, tmp_path_factory, "generation", "sliced", "lengths", "tensor", "both")


@pytest.fixture(params=[2, 4])
def ranks_found(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = request.getfixturevalue({2: "two", 4: "four"}[request.param])
    return found


@pytest.mark.parametrize("scene", ["generation", "sliced"])
def test_ranks_generate_what_one_process_does(ranks_found: list[dict[str, Any]], scene: str) -> None:
    for rank in ranks_found:
        for scheme, one in rank[scene].items():
            assert one["together"] == one["alone"], (scene, scheme)
            assert one.get("within", one["alone"]) == one["alone"], (scene, scheme)


def test_what_is_no_plain_text_behind_what_is_held_is_not_read_in_slices(two: list[dict[str, Any]]) -> None:
    """It is one call, as in one process: at its own positions, and refused before any of it is read."""
    for rank in two:
        alone, together = rank["calls"]["alone"], rank["calls"]["together"]
        torch.testing.assert_close(torch.tensor(together["logits"]), torch.tensor(alone["logits"]))
        assert "a mask of the new ones alone" in together["told"]
        assert together["columns"] == alone["columns"] == 300 and together["computed"] == alone["computed"] == [300]


def test_generate_computes_a_slice_of_the_prompt(ranks_found: list[dict[str, Any]]) -> None:
    for rank in ranks_found:
        assert {one["computed"] for one in rank["generation"].values()} == {299 // len(ranks_found)}


def test_every_rank_holds_its_share_of_the_blocks_and_none_of_the_others(ranks_found: list[dict[str, Any]]) -> None:
    for scheme in ranks_found[0]["generation"]:
        shares = [rank["generation"][scheme] for rank in ranks_found]
        held = [share["here"] for share in shares]
        assert [sum(layer) for layer in zip(*held, strict=True)] == shares[0]["of"], scheme
        assert all(max(layer) - min(layer) <= 2 for layer in zip(*held, strict=True)), scheme
        if not scheme.startswith("exact"):
            assert all(share["bytes"] < shares[0]["bytes_alone"] for share in shares), scheme


def test_slices_of_a_prompt_are_known_as_what_was_read(ranks_found: list[dict[str, Any]]) -> None:
    assert all(one["read"] for rank in ranks_found for one in rank["sliced"].values())


def test_a_prompt_sees_itself_exact_whatever_its_length(ranks_found: list[dict[str, Any]]) -> None:
    """Also the tokens that make no slices; two bits would show."""
    for rank in ranks_found:
        for length, off in rank["lengths"].items():
            assert max(off) < 1e-4, length


def test_positions_of_the_call_are_kept(two: list[dict[str, Any]]) -> None:
    assert all(rank["positions"]["off"] < 1e-4 for rank in two)


@pytest.mark.parametrize("feature", ["beams", "several", "lookup", "sampling", "forks"])
def test_generation_features(two: list[dict[str, Any]], feature: str) -> None:
    for rank in two:
        assert rank["features"][feature]["together"] == rank["features"][feature]["alone"]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("save", "ValueError: this cache holds one rank's shard"),
        ("crop", "ValueError: layer 0: taking back 100 of 300 columns crops into a packed block"),
        ("padding", "ValueError: a shared context has no padding"),
        ("embeddings", "ValueError: a shared context is read from input_ids alone"),
        ("ids", "differ between the ranks"),
        ("prefill", "TypeError: prefill reads into a cache of kvbits.parallel.cache_for, not KVCache"),
        ("run", "ValueError: run=0 is not a number of blocks"),
        ("mesh", "TypeError: mesh is a DeviceMesh, a ProcessGroup or None, not str"),
        ("weights", "NotImplementedError: this layer's keys and values are spread over several ranks"),
        ("scheme", "must be the same on all ranks that share a context: rank 0 has int4, 4, LlamaForCausalLM in torch"),
        ("scheme", "; rank 1 has kivi2, 4, LlamaForCausalLM in torch.float32, "),
        ("other run", "rank 0 has int4, 1, LlamaForCausalLM in torch.float32, "),
        ("model", "the model, its weights and what a calibration knows of it (by their digests) must be the same"),
        ("elsewhere", "rank 0 has "),
        ("elsewhere", "; rank 1 has "),
        ("columns", "300"),
    ],
)
def test_what_cannot_be_done_is_refused_on_every_rank(two: list[dict[str, Any]], what: str, said: str) -> None:
    for rank in two:
        assert said in rank["refusals"][what]


def test_a_rank_that_refuses_alone_does_not_let_the_others_wait(two: list[dict[str, Any]]) -> None:
    first, second = (rank["refusals"]["padding here"] for rank in two)
    assert "and whether this rank refuses the call, differ between the ranks" in first
    assert "a shared context has no padding" in second


def test_a_rank_that_ends_ends_the_others() -> None:
    first, second = ranks.run(2, "dies")
    assert second.code == 3
    assert first.code == 1
    assert "kvbits.parallel.ranks.RankLost: rank 0 of 2 lost the others: one of them ended" in first.error


def test_a_rank_that_does_not_come_is_not_waited_for_for_ever() -> None:
    first, _ = ranks.run(2, "stalls")
    assert first.code != 0
    assert "did not come within 2 s" in first.error


# -- heads -------------------------------------------------------------------------------------------------------------


def test_tensor_parallel_generates_what_one_process_does(ranks_found: list[dict[str, Any]]) -> None:
    for rank in ranks_found:
        for scheme, one in rank["tensor"].items():
            if "alone" in one:
                assert one["together"] == one["alone"], scheme
            if "heads" in one:
                assert one["heads"] == [4 // len(ranks_found)] * 2


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("other rank", "and this process the KV heads of rank"),
        ("one process", "and this process all KV heads"),
        ("one name", "name it with {rank} for the number of the rank"),
        ("calibrate", "calibrate in one process"),
        ("store", "a store of prefixes serves one process"),
    ],
)
def test_heads_of_another_rank_are_refused(ranks_found: list[dict[str, Any]], what: str, said: str) -> None:
    for rank in ranks_found:
        assert said in rank["tensor"]["refused"][what]


def test_explain_works_on_one_rank_of_several(two: list[dict[str, Any]]) -> None:
    told = two[1]["tensor"]["explain"]["told"]
    assert "LlamaForCausalLM, the KV heads of rank 1 of 2, under int4" in told
    assert "layers 0-1: int4; steps: kernel" in told


def test_a_context_and_heads_are_spread_at_once(four: list[dict[str, Any]]) -> None:
    for rank in four:
        for scheme, one in rank["both"].items():
            assert one["together"] == one["alone"], scheme
            assert one["heads"] == [2, 2]
    blocks = [rank["both"][next(iter(four[0]["both"]))]["here"][0] for rank in four]
    assert blocks[0] == blocks[1] and blocks[2] == blocks[3] and max(blocks) - min(blocks) <= 1
