"""Retrieval through the cache: a model that looks facts up, caches that lose them, rows, resuming, the command."""

from __future__ import annotations

import json
import pydoc_data.topics
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

import kvbits
import zoo
from characters import tokenizer
from command_line import run
from kvbits.cli.retrieval import summary
from kvbits.measure import caches
from kvbits.measure.haystack import Haystack
from kvbits.measure.needles import TASKS, Draw, Prompt, Prompts
from kvbits.measure.results import Results
from kvbits.measure.retrieval import Measurement, Plan, Scorer, remarks, wilson

TEXT = pydoc_data.topics.topics["execmodel"]
VALUES = ("accuracy", "logprob", "rank", "hits", "logprobs", "answers", "exact_share", "kv_bytes", "bits_per_element")


@pytest.fixture(scope="module")
def characters() -> PreTrainedTokenizerFast:
    """A token for each character, with ids below the vocabulary of the tiny models: no task needs others."""
    return tokenizer("".join(sorted({chr(i) for i in range(32, 127)} | {"\n"})), unk_token="<unk>")


# -- scoring -----------------------------------------------------------------------------------------------------------


class Memory:
    """A cache that is the list of its tokens. One that ``loses`` a stretch of the text holds 0 there."""

    def __init__(self, loses: range = range(0)) -> None:
        self.tokens: list[int] = []
        self.layers: list[Any] = []
        self.loses = loses

    def get_seq_length(self) -> int:
        return len(self.tokens)

    def add(self, ids: list[int]) -> None:
        for token in ids:
            self.tokens.append(0 if len(self.tokens) in self.loses else token)


class LookUp:
    """A model that retrieves: what came after the longest repetition of the last tokens, from the cache alone."""

    device = torch.device("cpu")
    vocabulary = 128

    def __init__(self, insists: dict[int, int] | None = None) -> None:
        self.fed: list[int] = []
        self.insists = insists or {}

    def forward(self, input_ids: torch.Tensor, use_cache: bool, cache: Memory) -> Any:
        self.fed.append(input_ids.shape[1])
        cache.add(input_ids[0].tolist())
        logits = torch.zeros(1, 1, self.vocabulary)
        logits[0, 0, self.insists.get(len(cache.tokens), self.next_token(cache.tokens))] = 9.0
        return SimpleNamespace(logits=logits)

    __call__ = forward

    def next_token(self, tokens: list[int]) -> int:
        text = bytes(tokens)
        for size in range(min(24, len(text) - 1), 3, -1):
            at = text.rfind(text[-size:], 0, len(text) - 1)
            if at >= 0:
                return text[at + size]
        return 0


def prompt_of(tokenizer: Any, task: str = "multikey", depth: float = 0.5) -> Prompt:
    return Prompts(Haystack(TEXT, tokenizer), tokenizer).make(task, 1200, depth)


@pytest.mark.parametrize("task", ("passkey", "multikey"))
def test_a_model_that_looks_up_hits_until_the_cache_loses_the_needle(characters: Any, task: str) -> None:
    prompt = prompt_of(characters, task)
    (needle,) = prompt.needles
    whole = Scorer(LookUp(), characters).score(prompt, Memory())  # type: ignore[arg-type]
    assert whole.hit and whole.logprob > -0.1 and whole.rank == 1 and prompt.riddle.wanted[0] in whole.text
    lossy = Scorer(LookUp(), characters).score(prompt, Memory(range(needle.start, needle.stop)))  # type: ignore[arg-type]
    assert not lossy.hit and lossy.logprob < -5 and lossy.rank > 1
    beside = Scorer(LookUp(), characters).score(prompt, Memory(range(needle.start - 30, needle.start)))  # type: ignore[arg-type]
    assert beside.hit and beside.logprob == whole.logprob


def test_the_question_is_read_in_small_steps_whatever_the_chunk_is(characters: Any) -> None:
    prompt = prompt_of(characters)
    scores = []
    for chunk in (1, 7, 16, 10_000):
        model = LookUp()
        scores.append(Scorer(model, characters, chunk).score(prompt, Memory()))  # type: ignore[arg-type]
        context, fed = -(-len(prompt.context) // chunk), model.fed
        assert max(fed[:context]) == min(chunk, len(prompt.context)) and sum(fed[:context]) == len(prompt.context)
        question = -(-len(prompt.question) // min(chunk, 16))
        assert sum(fed[context : context + question]) == len(prompt.question)
        assert max(fed[context : context + question]) == min(chunk, 16) and set(fed[context + question :]) == {1}
    assert len(set(scores)) == 1


@pytest.mark.parametrize("wrong", range(7))
def test_a_greedy_answer_that_differs_does_not_disturb_the_forced_one(characters: Any, wrong: int) -> None:
    """The model insists on one other token; from there on its own answer goes another way than the exemplary one."""
    prompt = prompt_of(characters)
    read = len(prompt.context) + len(prompt.question)
    other = characters("z", add_special_tokens=False).input_ids[0]
    score = Scorer(LookUp({read + wrong: other}), characters).score(prompt, memory := Memory())  # type: ignore[arg-type]
    assert len(prompt.answer) == 7  # a blank and six digits
    assert memory.tokens == prompt.context + prompt.question + prompt.answer  # nothing of what was written
    assert not score.hit and score.text.startswith(prompt.riddle.answer[:wrong] + "z")
    assert len(score.text) <= prompt.room
    good = Scorer(LookUp(), characters).score(prompt, Memory())  # type: ignore[arg-type]
    assert score.logprob == pytest.approx(good.logprob - 9 / 7) and 1 < score.rank < 2


def test_a_right_answer_in_other_words_is_a_hit_and_one_that_goes_on_is_not(characters: Any) -> None:
    prompt = prompt_of(characters)
    read = len(prompt.context) + len(prompt.question)
    blank, nine = (characters(x, add_special_tokens=False).input_ids[0] for x in (" ", "9"))
    # A second blank before the number: the question's own words are no longer what precedes it, so insist on it all.
    said = [blank, blank, *prompt.answer[1:], blank]
    insists = {read + i: token for i, token in enumerate(said)}
    score = Scorer(LookUp(insists), characters).score(prompt, Memory())  # type: ignore[arg-type]
    assert score.hit and score.logprob < -1
    longer = Scorer(LookUp({read + len(prompt.answer): nine}), characters).score(prompt, Memory())  # type: ignore[arg-type]
    assert not longer.hit and longer.rank == 1


def test_an_answer_ends_where_the_model_ends_it(characters: Any) -> None:
    prompt = prompt_of(characters)
    stop = 77
    model = LookUp({len(prompt.context) + len(prompt.question) + len(prompt.answer): stop})
    model.generation_config = SimpleNamespace(eos_token_id=[stop])  # type: ignore[attr-defined]
    assert Scorer(model, characters).score(prompt, Memory()).text == prompt.riddle.answer  # type: ignore[arg-type]


def test_nan_is_no_score(characters: Any) -> None:
    class Broken(LookUp):
        def forward(self, input_ids: torch.Tensor, use_cache: bool, cache: Memory) -> Any:
            cache.add(input_ids[0].tolist())
            return SimpleNamespace(logits=torch.full((1, 1, 128), torch.nan))

        __call__ = forward

    with pytest.raises(ValueError, match="log probability of nan"):
        Scorer(Broken(), characters).score(prompt_of(characters), Memory())  # type: ignore[arg-type]


def test_intervals() -> None:
    """Against figures from the literature (Newcombe 1998, table I)."""
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(15, 148) == pytest.approx((0.0624, 0.1605), abs=5e-5)
    assert wilson(0, 20) == pytest.approx((0, 0.1611), abs=5e-5)
    assert wilson(1, 29) == pytest.approx((0.0061, 0.1718), abs=5e-5)
    assert wilson(5, 5)[1] == 1


# -- what is exact -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", (1, 3, 50, 131, 132, 260))
@pytest.mark.parametrize(
    "scheme", ("int4", "int4,residual=40,block=32", "kivi2,residual=0,sinks=0,block=32", "int4,sinks=4+3,block=32")
)
def test_exact_ends_are_those_of_the_live_cache(scheme: str, tokens: int) -> None:
    model = zoo.build("llama")
    cache = caches.make(model, scheme)
    zoo.feed(model, cache, zoo.prompt(1, tokens), torch.ones(1, tokens), (tokens,))
    first, last = caches.exact_ends(cache)
    packed = caches.would_pack(scheme, tokens)
    core = cache.layers[0].core
    late = max(len(layer.core.late[0]) if layer.core.late else 0 for layer in cache.layers)
    assert first == min(tokens, kvbits.Scheme.parse(scheme).sinks)
    assert first + packed + last + late == tokens and packed == core.store.counts[0] * core.scheme.block
    kvbits.disable(model)


def test_exact_caches_and_peers() -> None:
    model, ids = zoo.build("llama", head_dim=64, num_key_value_heads=2), zoo.prompt(1, 200)
    found = {}
    for name in ("exact", "hf:dynamic", "hf:fp8"):
        cache = caches.make(model, name)
        zoo.feed(model, cache, ids, torch.ones(1, 200), (120, 50, 30))
        found[name] = caches.exact_ends(cache)
    assert found == {"exact": (200, 200), "hf:dynamic": (200, 200), "hf:fp8": (0, 0)}
    assert [caches.would_pack(name, 200) for name in found] == [0, 0, 200]


@pytest.mark.parametrize("name", ("hf:fp8", "hf:quanto4", "hf:hqq4", "int4,residual=0,block=32", "hf:dynamic"))
def test_a_branch_leaves_its_cache_alone(name: str) -> None:
    if name[3:6] in ("qua", "hqq"):
        pytest.importorskip({"qua": "optimum.quanto", "hqq": "hqq"}[name[3:6]], reason="in the parity extra")
    model, ids = zoo.build("llama", head_dim=64, num_key_value_heads=2), zoo.prompt(1, 60)
    cache, untouched = caches.make(model, name), caches.make(model, name)
    for one in (cache, untouched):
        zoo.feed(model, one, ids[:, :50], torch.ones(1, 50), (40, 10))
    other = caches.branch(cache)
    long = zoo.prompt(1, 250, seed=9)
    with torch.no_grad():
        for step in long.split(50, dim=1):  # past every residual
            model(input_ids=step, **{kvbits.hf.names.cache_name(model): other})
        here, there = (
            model(input_ids=ids[:, 50:], **{kvbits.hf.names.cache_name(model): one}).logits
            for one in (cache, untouched)
        )
    assert torch.equal(here, there) and cache.get_seq_length() == 60 and other.get_seq_length() == 300
    kvbits.disable(model)


# -- rows --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama() -> Any:
    return zoo.build("llama", max_position_embeddings=1024)


SCHEMES = ["kivi2,residual=32,block=32", "exact", "hf:fp8"]
PLAN = Plan(("passkey", "multikey"), (420, 512), (0, 1), repeats=2, chunk=64)


def measured(
    model: Any, tokenizer: Any, plan: Plan = PLAN, schemes: list[str] = SCHEMES, **options: Any
) -> Measurement:
    return Measurement(model, tokenizer, TEXT, schemes, plan, **options)


@pytest.fixture(scope="module")
def whole(llama: Any, characters: Any) -> tuple[Results, list[dict[str, Any]], list[tuple[int, int]]]:
    """Results of the plan, its rows, and what was reported on the way."""
    one = measured(llama, characters)
    results, told = Results("retrieval", one.setting(model="llama")), []
    return results, one.run(results, report=lambda done, total: told.append((done, total))), told


def test_rows(characters: Any, whole: tuple[Results, list[dict[str, Any]], list[tuple[int, int]]]) -> None:
    results, rows, told = whole
    assert [row["scheme"] for row in rows[::8]] == ["exact", "kivi2,residual=32,block=32", "hf:fp8"]  # the exact first
    assert len(rows) == len(results.rows) == 3 * 2 * 2 * 2
    assert told[-1] == (3 * 2 * 2 * 2 * (420 + 512),) * 2 and told == sorted(told)
    for row in rows:
        assert row["repeats"] == len(row["hits"]) == len(row["logprobs"]) == 2
        assert row["accuracy"] == sum(row["hits"]) / 2
        assert row["accuracy_low"] <= row["accuracy"] <= row["accuracy_high"]
        exact = results.find(scheme="exact", **{name: row[name] for name in ("task", "length", "depth")})
        assert exact is not None and row["logprob_exact"] == exact["logprob"] == pytest.approx(
            sum(exact["logprobs"]) / 2
        )
        assert row["kernel"] == (zoo.RUNS if row["scheme"].startswith("kivi2") else "stock")
        assert row["agreement"] is None  # a random model never hits
    kivi, fp8, full = (
        next(row for row in rows if row["scheme"] == name and row["length"] == 512)
        for name in (*SCHEMES[:1], "hf:fp8", "exact")
    )
    assert 3 < kivi["bits_per_element"] < 16 and 8 <= fp8["bits_per_element"] < 8.1 and full["bits_per_element"] >= 32
    assert fp8["kv_bytes"] < kivi["kv_bytes"] < full["kv_bytes"]
    shares = {(row["scheme"], row["depth"]): row["exact_share"] for row in rows if row["length"] == 512}
    assert shares["kivi2,residual=32,block=32", 0] == 0 == shares["hf:fp8", 1]
    assert shares["kivi2,residual=32,block=32", 1] > 0 and shares["exact", 0] == 1
    assert results.setting["chat"] is False and results.setting["chunk"] == 64
    assert results.setting["haystack_tokens"] == len(characters(TEXT).input_ids)
    json.dumps(results.setting, allow_nan=False)


def test_agreement_counts_what_the_exact_cache_hits(
    llama: Any, characters: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hits = {"exact": [True, True, False, True], "int4": [True, False, True, False]}
    plan = Plan(("passkey",), (420,), (0.5,), repeats=4)
    one = measured(llama, characters, plan, ["int4", "exact"])
    given = iter([*hits["exact"], *hits["int4"]])
    score = Scorer.score
    monkeypatch.setattr(Scorer, "score", lambda *asked: score(*asked)._replace(hit=next(given)))
    exact, int4 = one.run(Results("retrieval", one.setting()))
    assert (exact["agreement"], int4["agreement"]) == (1, pytest.approx(1 / 3))
    assert (exact["accuracy"], int4["accuracy"]) == (0.75, 0.5)


def test_an_interrupted_measurement_goes_on_where_it_stopped(
    llama: Any, characters: Any, whole: tuple[Results, list[dict[str, Any]], Any], tmp_path: Path
) -> None:
    wanted, path = whole[1], tmp_path / "rows.json"

    def stop_at(count: int) -> Callable[[Results], None]:
        def keep(results: Results) -> None:
            results.save(path)
            if len(results.rows) == count:
                raise KeyboardInterrupt

        return keep

    for count in (1, 11):
        one = measured(llama, characters)
        with pytest.raises(KeyboardInterrupt):
            one.run(Results.resume(path, "retrieval", one.setting()), stop_at(count))
        assert len(Results.load(path).rows) == count
    one, told = measured(llama, characters), []
    got = one.run(Results.resume(path, "retrieval", one.setting()), report=lambda *given: told.append(given))
    assert told[-1][1] == sum(2 * row["length"] for row in wanted[11:])  # only what was missing
    assert [{name: row[name] for name in VALUES} for row in got] == [
        {name: row[name] for name in VALUES} for row in wanted
    ]

    more = measured(llama, characters, Plan(("passkey",), (420,), (0, 1), repeats=3, chunk=64), ["exact"])
    rows = more.run(Results.resume(path, "retrieval", more.setting()))
    assert [row["repeats"] for row in rows] == [3, 3]  # two repeats are not three
    other = measured(llama, characters, Plan(("passkey",), (420,), (0,), repeats=2, chunk=32), ["exact"])
    with pytest.raises(ValueError, match="measured with chunk=64, not 32"):
        Results.resume(path, "retrieval", other.setting())


def test_what_fails_is_a_row_and_is_tried_again(llama: Any, characters: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(("passkey",), (420,), (0.5,), repeats=1, chunk=64)
    one = measured(llama, characters, plan, ["exact", "hf:fp8", "int4"])
    results = Results("retrieval", one.setting())
    make = caches.make

    def failing(model: Any, name: str, calibration: Any = None) -> Any:
        if name in ("hf:fp8", "exact"):
            raise RuntimeError(f"out of\n memory in {name}")
        return make(model, name, calibration)

    monkeypatch.setattr(caches, "make", failing)
    exact, fp8, int4 = one.run(results)
    assert fp8 == {
        "scheme": "hf:fp8", "task": "passkey", "length": 420, "depth": 0.5,
        "error": "RuntimeError: out of memory in hf:fp8",
    }  # fmt: skip
    assert "error" in exact and int4["logprob_exact"] is None and int4["agreement"] is None
    assert "hf:fp8 failed in 1 cells, which its sums and means leave out: RuntimeError: out of" in " ".join(
        remarks([exact, fp8, int4])
    )
    monkeypatch.setattr(caches, "make", make)
    exact, fp8, again = one.run(results)
    assert len(results.rows) == 3 and "error" not in exact and "error" not in fp8
    assert again["logprobs"] == int4["logprobs"] and again["logprob_exact"] == exact["logprob"]


# -- honest settings ---------------------------------------------------------------------------------------------------


def test_settings_that_measure_nothing_are_told(llama: Any, characters: Any) -> None:
    plan = Plan(("passkey",), (420, 900), (0, 1), repeats=1)
    schemes = ["exact", "int4,residual=500", "int4,residual=40,block=32"]
    (told,) = measured(llama, characters, plan, schemes).warnings()
    assert told.startswith("int4,residual=500 packs nothing of 420 tokens") and "give more than 631" in told
    assert caches.would_pack(schemes[1], 631) == 0 < caches.would_pack(schemes[1], 632)
    short = Measurement(llama, characters, "The sea is deep. " * 10, ["exact"], plan)
    free = short.prompts.free("passkey", 900)
    assert 170 < free < 900
    assert short.warnings() == [f"the haystack has 170 tokens only, and is repeated to make {free}"]
    just = Measurement(llama, characters, TEXT[:free], ["exact"], Plan(("passkey",), (900,), repeats=1))
    assert just.warnings() == []
    (flattering,) = measured(llama, characters, Plan(("passkey",), (420,), (0,), chunk=420), ["exact"]).warnings()
    assert flattering.startswith("chunks of 420 tokens attend to their own exact keys and values")


def test_remarks_on_what_was_measured() -> None:
    row = {"task": "passkey", "length": 512, "depth": 0.0, "hits": [False], "exact_share": 1.0}
    rows = [{**row, "scheme": "exact"}, {**row, "scheme": "int4", "exact_share": 0.0}]
    (never,) = remarks(rows)
    assert never.startswith("passkey at 512 tokens: the exact cache never hits")
    hit = {**rows[0], "hits": [True]}
    assert remarks([hit, rows[1]]) == []
    (exact,) = remarks([hit, {**rows[1], "exact_share": 0.1}])
    assert exact.startswith(
        "* what is asked for stood, at least in part, among the tokens that the scheme keeps exactly"
    )


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"tasks": ("needle",)}, "unknown task 'needle'; known are passkey, multikey, multikey-all, variables"),
        ({"tasks": ()}, "tasks is empty"),
        ({"depths": (1.5,)}, "depth 1.5 is not between 0"),
        ({"depths": (float("nan"),)}, "depth nan is not between 0"),
        ({"lengths": (0,)}, "length=0 is not a whole number above 0"),
        ({"repeats": 0}, "repeats=0"),
        ({"chunk": -1}, "chunk=-1"),
        ({"lengths": (2048,)}, "length 2,048 is more than the 1,024 tokens .* 1,024 is the largest possible"),
        ({"lengths": (100,)}, "length 100 leaves no room"),
    ],
)
def test_plans_that_cannot_be(llama: Any, characters: Any, wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        measured(llama, characters, Plan(**{"lengths": (420,), **wrong}))


@pytest.mark.parametrize(
    ("scheme", "says"),
    [("int5", "near: int8, int4"), ("hf:int4", "unknown peer"), ("nuq3", "calibrat"), ("int4,layers[7]=fp8", "0 to 1")],
)
def test_schemes_that_cannot_be(llama: Any, characters: Any, scheme: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        measured(llama, characters, schemes=["exact", scheme])


# -- a real model ------------------------------------------------------------------------------------------------------


@pytest.mark.model
def test_two_bits_without_exact_tokens_forget_what_the_exact_cache_finds(smollm2: Any) -> None:
    """SmolLM2 finds the pass key in 400 tokens; with everything in two bits per token it is lost."""
    plan = Plan(("passkey",), (400,), (0.3,), repeats=1, chunk=64)
    lossy = "int2,residual=0,sinks=0,block=32"
    one = Measurement(*smollm2, TEXT, ["exact", "int8,residual=0,block=32", lossy], plan)
    exact, int8, int2 = one.run(Results("retrieval", one.setting()))
    kvbits.disable(smollm2[0])
    assert one.prompts.chat and exact["hits"] == [True] and exact["logprob"] > -0.7
    assert int8["hits"] == [True] and abs(int8["logprob"] - exact["logprob"]) < 0.2
    assert int2["hits"] == [False] and int2["logprob"] < exact["logprob"] - 1 and int2["rank"] > exact["rank"]
    assert int2["agreement"] == 0 and int8["agreement"] == 1 and int2["exact_share"] == 0


# -- the command line --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(llama: Any, characters: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    llama.save_pretrained(path)
    characters.save_pretrained(path)
    return str(path)


COMMAND = ("--tasks", "passkey", "--lengths", "420,500", "--depths", "0,1", "--repeats", "1", "--chunk", "100")


def test_the_command_prints_heat_maps_and_goes_on(folder: str, tmp_path: Path) -> None:
    haystack, rows = tmp_path / "book.txt", tmp_path / "rows.json"
    haystack.write_text(TEXT)
    options = (*COMMAND, "--haystack", str(haystack), "--json", str(rows))
    schemes = "exact,int4,residual=32,block=32"
    code, output = run("retrieval", folder, *options, "--schemes", schemes, columns=80)
    assert code == 0 and "Traceback" not in output
    maps = output[: output.index("┏")]
    assert "passkey, exact: hits" in maps and "passkey, int4,residual=32,block=32: hits" in maps
    assert maps.count("0/1") == 8 and maps.count("*") == 2  # the two cells of depth 1 under the scheme
    assert "the exact cache never hits" in output
    assert max(map(len, output.splitlines())) <= 80
    saved = json.loads(rows.read_text())
    assert saved["kind"] == "retrieval" and len(saved["rows"]) == 8
    assert saved["setting"]["haystack"] == "book.txt" and str(tmp_path) not in saved["setting"]["command"]
    before = {row["seconds"] for row in saved["rows"]}
    code, output = run("retrieval", folder, *options, "--schemes", schemes + ",hf:fp8", columns=80)
    assert code == 0 and "passkey, hf:fp8: hits" in output
    after = json.loads(rows.read_text())["rows"]
    assert len(after) == 12 and before <= {row["seconds"] for row in after}


def test_any_file_with_text_is_a_haystack(folder: str, tmp_path: Path) -> None:
    digests = set()
    for name, content in (("a.txt", "\ufeff" + TEXT), ("b.jsonl", json.dumps({"id": 1, "text": TEXT}))):
        (tmp_path / name).write_text(content, encoding="utf-8")
        options = ("--haystack", str(tmp_path / name), "--json", str(tmp_path / f"{name}.json"))
        assert run("retrieval", folder, *COMMAND, *options, "--lengths", "420", "--schemes", "exact")[0] == 0
        digests.add(Results.load(tmp_path / f"{name}.json").setting["haystack_sha256"])
    assert len(digests) == 1


def test_bits_of_a_peer_are_those_of_layers_that_see_the_whole_text(characters: Any) -> None:
    model = zoo.build("gemma3", max_position_embeddings=1024)
    plan = Plan(tasks=("passkey",), lengths=(420,), depths=(0.5,), repeats=1)
    measurement = Measurement(model, characters, TEXT, ["hf:dynamic"], plan)
    (row,) = measurement.run(Results("retrieval", {}))
    assert row["bits_per_element"] == 32


def test_many_lengths_stay_within_80_columns(folder: str) -> None:
    lengths = ",".join(str(400 + 10 * i) for i in range(7))
    code, output = run(
        "retrieval", folder, "--tasks", "passkey", "--lengths", lengths, "--depths", "0.5", "--repeats", "1",
        "--chunk", "200", "--schemes", "exact", columns=80,
    )  # fmt: skip
    assert code == 0 and output.count("passkey, exact") == 2 and output[: output.index("┏")].count("0/1") == 7
    assert max(map(len, output.splitlines())) <= 80 and "…" not in output


def test_the_summary_counts_agreement_over_all_cells() -> None:
    """One of the one hit at depth 0 and none of the three at depth 1: a quarter, not a half."""
    common = {
        "task": "passkey",
        "length": 512,
        "logprob": -1.0,
        "kernel": "stock",
        "bits_per_element": 4.0,
        "kv_bytes": 9,
    }
    hits = {("exact", 0): [1, 0, 0], ("exact", 1): [1, 1, 1], ("int4", 0): [1, 1, 0], ("int4", 1): [0, 0, 0]}
    rows = [{**common, "scheme": scheme, "depth": depth, "hits": hit} for (scheme, depth), hit in hits.items()]
    rows += [{**common, "scheme": "hf:fp8", "depth": 0, "error": "no memory"}]
    table = summary(rows)
    cells = [list(column.cells) for column in table.columns]
    assert cells[0] == ["exact", "int4", "hf:fp8"] and cells[1] == ["4/6", "2/6", "failed"]
    assert cells[3] == ["100%", "25%", ""]


WRONG = {
    "length": (["--lengths", "2q"], "'2q' is not a number of tokens; give one such as 512, 2k (2,048) or 1m"),
    "too long": (["--lengths", "2k"], "2,048 is more than the 1,024 tokens"),
    "no length": (["--lengths", ","], "lengths is empty"),
    "depth": (["--depths", "half"], "--depths half is not a number"),
    "depth outside": (["--depths", "0,50"], "depth 50.0 is not between 0"),
    "task": (["--tasks", "pass"], "unknown task 'pass'"),
    "scheme": (["--schemes", "int5"], "near: int8, int4"),
    "no scheme": (["--schemes", "exact;"], "has an empty scheme"),
    "uncalibrated": (["--schemes", "nuq3"], "calibrat"),
    "repeats": (["--repeats", "0"], "--repeats"),
    "chat": (["--chat"], "no chat template"),
    "file": (["--haystack", "no-such-file.txt"], "no-such-file.txt"),
    "empty": (["--haystack", "-"], "standard input is empty"),
    "results": (["--json", "no-such-folder/rows.json"], "there is no folder no-such-folder"),
}


@pytest.mark.parametrize(("arguments", "expected"), WRONG.values(), ids=list(WRONG))
def test_what_a_user_gets_wrong_is_one_clear_line(folder: str, arguments: list[str], expected: str) -> None:
    code, output = run("retrieval", folder, *COMMAND, *arguments, text="")
    assert code == 2 and expected in output and "Traceback" not in output


def test_where_all_fails_the_command_fails(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> Any:
        raise RuntimeError("no memory")

    monkeypatch.setattr(Scorer, "score", failing)
    code, output = run("retrieval", folder, *COMMAND, "--schemes", "exact")
    assert code == 2 and "every cell failed, the first with RuntimeError: no memory" in output


def test_no_task_needs_more_than_the_tokenizer_of_these_tests_has(characters: Any) -> None:
    for task in TASKS.values():
        riddle = task(Draw(Random(0), ""))
        for text in (*riddle.asked, *riddle.others, riddle.answer):
            assert characters.decode(characters(text).input_ids) == text
