"""``kvbits bench``: what is measured, in what order, what is refused, and what becomes of failures. Never how fast."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import zoo
from command_line import TEXT, run
from kvbits.calibration import calibrate
from kvbits.cli import app
from kvbits.cli import bench as cli_bench
from kvbits.hf import loading
from kvbits.measure import bench as bench_module
from kvbits.measure import peak as peak_module
from kvbits.measure import room as room_module
from kvbits.measure import speed as speed_module
from kvbits.measure import weights
from kvbits.measure.bench import Bench, Cell
from kvbits.measure.breakeven import Gain, break_even, verdicts, with_break_even
from kvbits.measure.caches import EXACT, nbytes
from kvbits.measure.memory import Peak
from kvbits.measure.packed import packed_tokens
from kvbits.measure.peak import PeakJob
from kvbits.measure.results import Results
from kvbits.measure.room import Shapes, room
from kvbits.measure.runner import Prompts, Reading, Runner, tokens_between, tokens_to_flush
from kvbits.measure.speed import WARM_ROUNDS, measure, shifted
from kvbits.measure.text import prose

pytestmark = pytest.mark.usefixtures("one_thread")


ROOT = Path(__file__).parents[2]
SMALL = "int4,residual=0,block=32"
FIELDS = {
    "scheme": str, "weights": str, "dtype": str, "batch": int, "context": int, "prefill_tokens_per_second": float,
    "first_token_seconds": float, "first_token_seconds_low": float, "first_token_seconds_high": float,
    "step_ms": float, "step_ms_low": float, "step_ms_high": float, "step_ms_min": float, "step_ms_max": float,
    "steps": int, "flush_ms": (float, type(None)), "flushes": int, "flush_every": (int, type(None)),
    "decode_tokens_per_second": float, "kv_bytes": int, "bits_per_element": float, "kernel": str,
    "speed_against_exact": float, "speed_against_quanto4": (float, type(None)), "noise": float, "warnings": list,
}  # fmt: skip


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    return Prompts(zoo.prompt(1, 3000)[0])


@pytest.fixture
def model() -> Any:
    return zoo.build("llama")


def named(*names: str) -> list[Any]:
    """Parameters for tests; those that need a package which kvbits does not are tests of parity."""
    needs = {"hf:quanto": "optimum.quanto", "torchao-": "torchao", "bnb-": "bitsandbytes"}
    found = []
    for name in names:
        package = next((package for start, package in needs.items() if name.startswith(start)), None)
        missing = package is not None and importlib.util.find_spec(package.partition(".")[0]) is None
        marks = [pytest.mark.parity] if package else []
        marks += [pytest.mark.skipif(missing, reason=f"{name} needs {package}")] if missing else []
        found.append(pytest.param(name, marks=marks))
    return found


Log = list[tuple[Runner, int, int]]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Runner, int, bool], float]], Log]:
    """Forwards take what a function of the runner, the tokens and whether something was packed says; a log of them.

    The forwards are real, only their times are made up.
    """
    read = Runner.read

    def install(seconds: Callable[[Runner, int, bool], float]) -> Log:
        log: Log = []

        def timed(runner: Runner, count: int) -> float:
            log.append((runner, runner.position, count))
            before = packed_tokens(runner.cache)
            read(runner, count)
            return seconds(runner, count, packed_tokens(runner.cache) > before)

        monkeypatch.setattr(Runner, "read", timed)
        return log

    return install


def exact_bytes(batch: int, tokens: int) -> int:
    """Of zoo's Llama in float32: 2 layers, K and V, 2 heads of 8 channels."""
    return batch * tokens * 2 * 2 * 2 * 8 * 4


def small_bench(folder: str, schemes: list[str], contexts: list[int], **options: Any) -> Bench:
    return Bench(folder, schemes, contexts, **{"steps": 4, "prefills": 1, "peak": False, "text": TEXT, **options})


# -- rows --------------------------------------------------------------------------------------------------------------


def test_every_row_has_every_figure_and_the_file_the_whole_setting(folder: str, tmp_path: Path) -> None:
    path, shown = tmp_path / "speed.json", []
    plan = small_bench(folder, [" exact", SMALL], [64, 40], batches=[2, 1], steps=4, prefills=2)
    plan.run(path, show=lambda cell, rows: shown.append((cell, [row["scheme"] for row in rows])))
    assert shown == [(Cell("none", b, c), [EXACT, "exact", SMALL]) for b in (1, 2) for c in (40, 64)]
    results = Results.load(path)
    assert results.kind == "speed" and len(results.rows) == 12
    for row in results.rows:
        for field, kind in FIELDS.items():
            assert isinstance(row[field], kind), field
        assert row["step_ms_min"] <= row["step_ms_low"] <= row["step_ms"] <= row["step_ms_high"] <= row["step_ms_max"]
        assert row["first_token_seconds_low"] <= row["first_token_seconds"] <= row["first_token_seconds_high"]
        assert row["prefill_tokens_per_second"] == row["batch"] * row["context"] / row["first_token_seconds"]
        assert row["noise"] >= 1
        if row["scheme"] == EXACT:
            assert row["kv_bytes"] == exact_bytes(row["batch"], row["context"] + WARM_ROUNDS)
            assert (row["bits_per_element"], row["speed_against_exact"], row["kernel"]) == (32, 1, "stock")
            assert row["steps"] == 8 and "break_even" not in row
        else:
            assert row["break_even"] and row["steps"] in (3, 4)
        if row["scheme"] == SMALL:
            assert (row["kernel"], row["flush_every"], row["flushes"] + row["steps"]) == (zoo.RUNS, 32, 6)
            assert 5 < row["bits_per_element"] < 40  # exact tokens and spare room count
    about = results.setting
    assert about["text_tokens"] == 300 and about["steps"] == 4 and about["prefills"] == 2 and about["layers"] == 2


def test_caches_are_stepped_in_turn_and_read_the_same(model: Any, prompts: Prompts, clock: Callable[..., Log]) -> None:
    """A/B/A/B, in another order each round, one exact cache first and another last."""
    log = clock(lambda runner, count, packed: 1.0)
    context = speed_module.WARM_TOKENS + 8  # so that the runners of the warm-up can be told from the others
    measure(model, [SMALL, "exact"], Reading(prompts, 2, context), steps=5, prefills=3)
    own = [entry for entry in log if entry[0].reading.context == context]
    runners = list(dict.fromkeys(runner for runner, _, _ in own))
    assert [runner.name for runner in runners] == [EXACT, SMALL, "exact", EXACT]
    read = [i for i, (_, first, _) in enumerate(own) if first == 0]
    assert [own[i][0] for i in read] == [runner for number in range(3) for runner in shifted(runners, number)]
    stepped = own[read[-1] + 1 :][: 4 * (WARM_ROUNDS + 5)]
    assert [entry[0] for entry in stepped] == [
        runner for number in range(WARM_ROUNDS + 5) for runner in shifted(runners, number)
    ]
    assert [entry[1:] for entry in stepped] == [
        (context + number, 1) for number in range(WARM_ROUNDS + 5) for _ in runners
    ]
    assert shifted(runners, 0) != shifted(runners, 1)


def test_ratios_and_noise(model: Any, prompts: Prompts, clock: Callable[..., Log], monkeypatch: Any) -> None:
    """Against the exact cache, whose two runs differ by a fifth; what packs counts by its share."""
    exact: list[Runner] = []

    def seconds(runner: Runner, count: int, packed: bool) -> float:
        if runner.name == EXACT:
            exact.extend([runner] if runner not in exact and runner.reading.context == 600 else [])
            return 1.2 if runner in exact[1:] else 1.0
        return {SMALL: 9.0 if packed else 1.0, "exact": 2.2}[runner.name]

    clock(seconds)
    monkeypatch.setattr(speed_module, "QUANTO4", "exact")
    rows = measure(model, [EXACT, SMALL], Reading(prompts, 1, 600), steps=40, prefills=2, beside=["exact"])
    whole, small = rows
    assert [row["scheme"] for row in rows] == [EXACT, SMALL]  # the yardstick beside them has no row
    assert whole["noise"] == small["noise"] == pytest.approx(1.2)
    assert whole["step_ms"] == pytest.approx(1100) and whole["warnings"] == [
        "two exact caches differ by 20% in this run: no smaller difference means anything"
    ]
    assert small["step_ms"] == small["step_ms_max"] == 1000 and small["flush_ms"] == 9000
    assert small["flushes"] + small["steps"] == 40 + 2 and small["flushes"] in (3, 4)
    assert small["decode_tokens_per_second"] == pytest.approx(1 / (1 + 8 / 32))
    assert small["speed_against_exact"] == pytest.approx(1.1 / 1.25)
    assert small["speed_against_quanto4"] == pytest.approx(2.2 / 1.25)


def test_calls_are_those_of_generate(model: Any, prompts: Prompts) -> None:
    """With the mask of all columns, and the logits of the last token alone; in chunks where they are asked for."""
    calls: list[dict[str, Any]] = []
    model.register_forward_pre_hook(lambda _, args, kwargs: calls.append(kwargs), with_kwargs=True)
    runner = Runner(model, SMALL, Reading(prompts, 2, 50, chunk=20))
    runner.prefill()
    runner.step()
    assert [tuple(call["input_ids"].shape) for call in calls] == [(2, 20), (2, 20), (2, 10), (2, 1)]
    assert [tuple(call["attention_mask"].shape) for call in calls] == [(2, 20), (2, 40), (2, 50), (2, 51)]
    assert all(call["logits_to_keep"] == 1 for call in calls)
    assert torch.equal(torch.cat([call["input_ids"] for call in calls], dim=1), prompts.take(2, 0, 51))


@pytest.mark.parametrize(("family", "dtype", "expected"), [
    ("falcon-mqa", torch.float32, "2 layers ran on no fast kernel, decoded: FalconForCausalLM does not go through"),
    ("llama", torch.float64, "2 layers ran on no fast kernel, kernel reference: "),
])  # fmt: skip
def test_a_slow_kernel_is_in_the_row_and_in_its_warnings(
    prompts: Prompts, clock: Callable[..., Log], family: str, dtype: torch.dtype, expected: str
) -> None:
    model = zoo.build(family, dtype)
    clock(lambda runner, count, packed: 1.0)
    exact, row = measure(model, [EXACT, SMALL], Reading(prompts, 1, 64), steps=4, prefills=1)
    assert row["kernel"] in ("decoded", "kernel reference") and not exact["warnings"]
    (warning,) = row["warnings"]
    assert warning.startswith(expected) and ("not native: " in warning) == (family == "llama")


def test_a_context_at_which_nothing_is_packed_is_said(model: Any, prompts: Prompts) -> None:
    (row,) = measure(model, ["int4"], Reading(prompts, 1, 200), steps=4, prefills=1)
    assert row["warnings"] == ["nothing is packed at 200 tokens: all of them are exact"]
    assert row["kernel"] == "stock" and row["flushes"] == 1  # the first flush is measured all the same


# -- steps that pack ---------------------------------------------------------------------------------------------------

PACKING = {
    SMALL: 32, "kivi2,residual=16,block=32": 32, "lm2,centred,block=64": 64, "int4,block=32,sinks=2+4": 32,
    "int4,residual=16,block=32,layers[0]=exact": 32, "hf:quanto4": 128,
}  # fmt: skip


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", named(*PACKING))
def test_the_step_that_packs_is_foretold(model: Any, prompts: Prompts, name: str, batch: int) -> None:
    """Every step up to it packs nothing, it packs one block in each row and layer, and the next follows a block on."""
    runner = Runner(model, name, Reading(prompts, batch, 152))
    runner.prefill()
    assert runner.cache is not None and tokens_between(runner.cache) == PACKING[name]
    left, held = tokens_to_flush(runner.cache), packed_tokens(runner.cache)
    assert left is not None and 0 < left <= 300
    for more in range(left, 1, -1):
        assert tokens_to_flush(runner.cache) == more
        assert not runner.step().packed
    assert packed_tokens(runner.cache) == held
    assert runner.step().packed
    layers = 1 if "layers[0]=exact" in name else 2
    per_row = 1 if name.startswith("hf:") else batch  # Transformers counts no rows
    grown = 152 + left - held // 2 if name.startswith("hf:") else PACKING[name]
    assert packed_tokens(runner.cache) == held + layers * per_row * grown
    assert tokens_to_flush(runner.cache) == PACKING[name]
    position = runner.position
    step = runner.flush()
    assert step is not None and step.packed and runner.position == position + PACKING[name]


@pytest.mark.parametrize("name", [EXACT, "exact", "hf:fp8"])
def test_caches_that_never_pack_have_no_such_step(model: Any, prompts: Prompts, name: str) -> None:
    if name == "hf:fp8" and zoo.installed() < (5, 24):
        pytest.skip("this release of Transformers may have no cache in fp8")
    runner = Runner(model, name, Reading(prompts, 1, 40))
    runner.prefill()
    assert runner.cache is not None and tokens_between(runner.cache) is None
    assert runner.flush() is None and runner.position == 40
    assert not any(runner.step().packed for _ in range(140))


# -- break-even --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gains", "tokens", "words"), [
    ([Gain(512, 10, 8), Gain(2048, 20, 9)], None, "always"),
    ([Gain(512, 10, 12), Gain(2048, 20, 21)], None, "never within 2,048"),
    ([Gain(2048, 20, 17), Gain(512, 10, 12)], 1126, "at about 1,100"),  # 512 + 1536 * 2 / 5
    ([Gain(100, 10, 11), Gain(200, 10, 12), Gain(300, 10, 9), Gain(400, 10, 8)], 267, "at about 270"),
    ([Gain(100, 10, 9), Gain(200, 10, 11), Gain(300, 10, 8)], 233, "at about 230"),  # from where it stays
    ([Gain(100, 10, 8), Gain(200, 10, 11)], None, "unclear: faster at 100, not at 200"),
    ([Gain(100, 10, 9.9, 1.02), Gain(200, 10, 10.1, 1.02)], None, "no difference beyond the noise"),
    ([Gain(100, 10, 9.9, 1.02), Gain(200, 10, 9)], 100, "at about 100"),  # the same at 100, faster beyond
    ([Gain(100, 10, 10.1, 1.02), Gain(200, 10, 9.1)], 110, "at about 110"),
    ([Gain(8192, 10, 5)], None, "always"),
    ([], None, "not measured"),
])  # fmt: skip
def test_break_even(gains: list[Gain], tokens: int | None, words: str) -> None:
    assert break_even(gains) == (tokens, words)


def made_up(scheme: str, context: int, speed: float | None, batch: int = 1, weights: str = "none") -> dict[str, Any]:
    return {
        "scheme": scheme, "weights": weights, "dtype": "float32", "batch": batch, "context": context,
        "decode_tokens_per_second": 100.0, "speed_against_exact": speed, "noise": None if speed is None else 1.0,
    }  # fmt: skip


def test_break_even_is_in_every_row_of_a_scheme_and_of_no_other() -> None:
    # A token takes 10 ms of the scheme, so 8 and 12 of the exact cache: equal halfway.
    rows = [made_up("int4", 1000, 0.8), made_up("int4", 3000, 1.2), made_up(EXACT, 1000, 1.0), made_up("int4", 9, None)]
    rows += [made_up("int4", 1000, 1.5, batch=4), {**made_up("int4", 1, None), "error": "KeyError: x"}]
    done = with_break_even(rows)
    assert [row.get("break_even_tokens", "none") for row in done] == [2000, 2000, "none", "none", None, "none"]
    assert done[4]["break_even"] == "always" and done[5] == rows[5]
    assert with_break_even(done) == done and "break_even" not in rows[0]
    assert verdicts(done) == ["int4, batch 1: at about 2,000", "int4, batch 4: always"]
    assert verdicts(done[:2]) == ["int4: at about 2,000"]


# -- what is read ------------------------------------------------------------------------------------------------------


def test_rows_of_a_batch_are_different_texts() -> None:
    prompts = Prompts(torch.arange(10))
    assert prompts.take(1, 2, 5).tolist() == [[2, 3, 4]]
    assert prompts.take(3, 0, 4).tolist() == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]
    assert prompts.take(2, 8, 12).tolist() == [[8, 9, 0, 1], [3, 4, 5, 6]]  # begins again at its end
    assert not prompts.repeats(2, 5) and prompts.repeats(2, 6)
    with pytest.raises(ValueError, match="the text has no tokens"):
        Prompts(torch.empty(0, dtype=torch.int64))


def test_a_text_that_is_too_short_is_said(model: Any) -> None:
    for batch, warned in ((1, False), (2, True)):
        (row,) = measure(model, ["exact"], Reading(Prompts(zoo.prompt(1, 50)[0]), batch, 40), steps=4, prefills=1)
        assert row["warnings"] == ["the text has only 50 tokens: rows share parts of it"] * warned


def test_there_is_prose_enough_for_long_contexts() -> None:
    assert len(prose().split()) > 50_000 and prose(100) == prose()[:100]


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "expected"), [
    ({"schemes": ["int5"]}, "near: int8, int4"),
    ({"schemes": ["hf:quanta4"]}, "did you mean 'hf:quanto4'"),
    ({"schemes": ["nuq3"]}, "needs a calibration"),
    ({"schemes": []}, "no schemes were given"),
    ({"weights": ["torchao-int9"]}, "did you mean 'torchao-int8'"),
    ({"weights": ["none", "zzz"]}, "Known are none, int8-dynamic"),
    ({"contexts": [512, 1]}, "contexts: 1 is too few; give 2 or more"),
    ({"batches": [0]}, "batches: 0 is too few"),
    ({"steps": 1}, "steps: 1 is too few; give 4 or more"),
    ({"prefills": 0}, "prefills: 0 is too few"),
    ({"chunk": 0}, "chunk: 0 is too few"),
    ({"text": " \n"}, "the text is empty"),
])  # fmt: skip
def test_what_is_wrong_is_said_before_a_model_is_loaded(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        Bench("no-such-model", **{"schemes": ["int4"], "contexts": [64], **options})


def test_contexts_beyond_the_positions_of_the_model_are_refused(folder: str) -> None:
    with pytest.raises(ValueError, match=r"513 tokens is beyond the 512 positions .* --context 512 or less"):
        small_bench(folder, [SMALL], [64, 513]).run()
    rows = small_bench(folder, [SMALL], [513], allow_long=True).run().rows
    assert [row["context"] for row in rows if "error" not in row] == [513, 513]


def test_steps_beyond_the_positions_that_a_model_has_are_explained() -> None:
    """Fitted positions end where a rotary embedding goes on."""
    tokenizer = lambda text, **_: SimpleNamespace(input_ids=zoo.prompt(1, 2000))  # noqa: E731
    plan = Bench("gpt2", ["exact"], [510, 512], steps=4, prefills=1, peak=False)
    for family, failing in (("gpt2", True), ("llama", False)):
        rows = plan.run(load=lambda name=family: (zoo.build(name), tokenizer)).rows
        assert ["error" in row for row in rows] == [failing] * 4
        assert not failing or rows[0]["error"] == (
            "IndexError: index out of range in self (the steps after the prompt pass the 512 positions of this model: "
            "give a shorter context)"
        )


def test_what_does_not_fit_in_memory_is_refused_with_figures(folder: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(room_module, "available_bytes", lambda device: 2_000_000)
    monkeypatch.setattr(bench_module, "measure", lambda *_, **__: pytest.fail("measured"))
    plan = small_bench(folder, [SMALL], [64, 500], batches=[1, 8])
    each = f"{exact_bytes(8, 500) / 1e6:.1f} MB"
    with pytest.raises(ValueError, match=rf"8 x 500 tokens need about .* two exact caches of {each}.* only 2.0 MB"):
        plan.run()
    monkeypatch.setattr(room_module, "available_bytes", lambda device: None)  # not known: nothing to say
    monkeypatch.setattr(bench_module, "measure", lambda *_, **__: [])
    plan.run()


OTHERS = ["gemma3", "deepseek-v3"]
"""Models that Transformers' quantized cache does not take."""


@pytest.mark.parametrize("family", OTHERS)
@pytest.mark.parametrize("name", named("hf:quanto4"))
def test_models_of_which_a_peer_has_no_size_are_refused_by_it(family: str, name: str, prompts: Prompts) -> None:
    runner = Runner(zoo.build(family, max_position_embeddings=1024), name, Reading(prompts, 1, 300))
    with pytest.raises(ValueError):
        runner.prefill()


@pytest.mark.parametrize(("family", "name"), [
    pytest.param(family, *one.values, marks=one.marks)
    for family in ("llama", "llama-mqa-d80", "qwen3", "gpt2", *OTHERS)
    for one in named(EXACT, "exact", SMALL, "kivi2", "default", *(["hf:quanto4"] if family not in OTHERS else []))
])  # fmt: skip
def test_estimates_of_caches_are_near_what_they_hold(family: str, name: str, prompts: Prompts) -> None:
    model = zoo.build(family, max_position_embeddings=1024)
    shapes = Shapes.of(model)
    for batch, tokens in ((1, 700), (2, 300)):
        runner = Runner(model, name, Reading(prompts, batch, tokens))
        runner.prefill()
        if name == "hf:quanto4":
            runner.read(127)  # its residual is empty after a prompt
        assert runner.cache is not None
        held, estimate = nbytes(runner.cache), shapes.cache_bytes(name, batch, tokens)
        if name == EXACT:
            assert held - 64 <= estimate <= held  # sliding layers count their tokens in a tensor
        assert 0.8 * held <= estimate <= 1.5 * held, (held, estimate)


def test_room_counts_what_is_held_together() -> None:
    shapes = Shapes.of(zoo.build("llama"))
    one = room(shapes, [EXACT, "exact", SMALL], 2, 400, None, True, child=False)
    assert one.exact == exact_bytes(2, 400) and one.child == 0
    assert one.others == sum(shapes.cache_bytes(name, 2, 400) for name in ("exact", SMALL))
    assert one.needed == 2 * one.exact + one.others + one.forward
    chunked = room(shapes, [EXACT], 2, 400, 50, True, child=True)
    assert chunked.forward < one.forward / 4 and chunked.child > 2 * shapes.weights_bytes
    every = room(shapes, [EXACT], 2, 400, None, False, child=False)  # the logits of all tokens
    assert every.forward - one.forward == 2 * 399 * zoo.VOCABULARY * (4 + 4)
    eager = Shapes.of(zoo.build("llama-d256-eager"))
    assert eager.eager_heads == 6 and shapes.eager_heads == 0
    assert eager.forward_bytes(1, 100, 100, True) > 6 * 100 * 100 * 8


# -- failures and interruptions ----------------------------------------------------------------------------------------


class Failing:
    """Stands before ``Runner.read`` and fails for one cache from its n-th forward on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, after: int, error: BaseException) -> None:
        self.name, self.left, self.error, self.read, self.reads = name, after, error, Runner.read, []
        outer = self

        def read(runner: Runner, count: int) -> float:
            outer.reads.append((runner.name, runner.reading.context, count))
            if runner.name == outer.name:
                outer.left -= 1
                if outer.left < 0:
                    raise outer.error
            return outer.read(runner, count)

        monkeypatch.setattr(Runner, "read", read)


@pytest.mark.parametrize("after", [0, 2, 4, 7])
def test_a_cache_that_fails_is_a_row_and_the_others_go_on(
    model: Any, prompts: Prompts, monkeypatch: Any, after: int
) -> None:
    Failing(monkeypatch, "exact", after, RuntimeError("out of\nmemory"))
    rows = measure(model, [EXACT, "exact", SMALL], Reading(prompts, 1, 64), steps=4, prefills=1)
    assert [row["scheme"] for row in rows] == [EXACT, "exact", SMALL]
    assert rows[1] == {"scheme": "exact", "batch": 1, "context": 64, "error": "RuntimeError: out of memory"}
    assert rows[2]["speed_against_exact"] > 0 and rows[0]["noise"] >= 1


def test_without_the_exact_cache_there_are_steps_but_no_ratios(model: Any, prompts: Prompts, monkeypatch: Any) -> None:
    Failing(monkeypatch, EXACT, 4, RuntimeError("no"))
    exact, small = measure(model, [EXACT, SMALL], Reading(prompts, 1, 64), steps=4, prefills=1)
    assert exact["error"] == "RuntimeError: no"
    assert small["step_ms"] > 0 and small["speed_against_exact"] is None and small["noise"] is None
    row = {"weights": "none", "dtype": "float32", **small}
    assert with_break_even([row]) == [row]


def test_a_peer_that_fails_is_a_row(folder: str) -> None:
    """Transformers' hqq cache cannot store these heads, or is not installed."""
    rows = small_bench(folder, ["hf:hqq4", SMALL], [51]).run().rows
    assert [("error" in row, row["scheme"]) for row in rows] == [(False, EXACT), (True, "hf:hqq4"), (False, SMALL)]


def test_an_interruption_keeps_the_cells_that_are_done(folder: str, tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "speed.json"
    plan = small_bench(folder, [SMALL], [40, 64])
    with monkeypatch.context() as patched:
        Failing(patched, SMALL, 14, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            plan.run(path)
    before = Results.load(path).rows
    assert [(row["scheme"], row["context"]) for row in before] == [(EXACT, 40), (SMALL, 40)]
    reads = Failing(monkeypatch, "", 0, RuntimeError()).reads
    rows = plan.run(path).rows
    assert {context for _, context, _ in reads} == {64}
    assert [(row["scheme"], row["context"]) for row in rows] == [(EXACT, 40), (SMALL, 40), (EXACT, 64), (SMALL, 64)]
    assert [row["step_ms"] for row in rows[:2]] == [row["step_ms"] for row in before]
    assert rows == Results.load(path).rows


def test_a_run_that_goes_on_measures_what_is_missing_beside_the_exact_cache(
    folder: str, tmp_path: Path, monkeypatch: Any
) -> None:
    path = tmp_path / "speed.json"
    before = small_bench(folder, [SMALL], [64]).run(path).rows
    failing = Failing(monkeypatch, "kivi2", 0, RuntimeError("no"))
    rows = small_bench(folder, [SMALL, "exact", "kivi2"], [64]).run(path).rows
    assert [row["scheme"] for row in rows] == [EXACT, SMALL, "exact", "kivi2"]
    assert "error" in rows[3] and rows[:2] == before  # the two stay as they were measured together
    assert {name for name, _, _ in failing.reads} == {EXACT, "exact", "kivi2"}
    failing.reads.clear()  # once more: what failed is tried again, and nothing else is measured for its sake
    small_bench(folder, [SMALL, "exact", "kivi2"], [64]).run(path)
    assert sum(name == "kivi2" for name, _, _ in failing.reads) == 1
    assert len(failing.reads) == 5  # that, and a prompt and a step of both exact caches to warm up
    failing.left = 1000
    rows = small_bench(folder, [SMALL, "exact", "kivi2"], [64]).run(path).rows
    assert len(rows) == 4 and not any("error" in row for row in rows)


def test_a_file_of_another_setting_is_refused(folder: str, tmp_path: Path) -> None:
    path = tmp_path / "speed.json"
    small_bench(folder, [SMALL], [40]).run(path)
    with pytest.raises(ValueError, match="was measured with steps=4, not 5"):
        small_bench(folder, [SMALL], [40], steps=5).run(path)


def test_progress_comes_to_its_end_whatever_fails(folder: str, monkeypatch: Any) -> None:
    reports: list[tuple[str, int, int]] = []
    for failing in ("", SMALL):
        reports.clear()
        Failing(monkeypatch, failing, 0, RuntimeError("no"))
        small_bench(folder, [SMALL], [40, 64]).run(report=lambda *report: reports.append(report))
        done = [done for _, done, _ in reports]
        assert done == sorted(done) and {count for _, _, count in reports} == {max(done)}
        assert {what for what, _, _ in reports} == {"40 tokens", "64 tokens"}


# -- peak memory -------------------------------------------------------------------------------------------------------


def job(folder: str, **changes: Any) -> PeakJob:
    usual: dict[str, Any] = dict(
        model=folder, dtype="float32", weights="none", scheme=SMALL, calibration=None,
        tokens=zoo.prompt(1, 200)[0].tolist(), batch=2, context=64, chunk=None, threads=1,
    )  # fmt: skip
    return PeakJob(**{**usual, **changes})


def test_peak_memory_is_of_a_process_of_its_own(folder: str) -> None:
    row, *_ = small_bench(folder, [EXACT], [64], peak=True).run().rows
    assert row["peak_bytes"] > 100e6 and "resident set" in row["peak_of"]


def test_the_process_reads_steps_and_packs(folder: str, monkeypatch: Any) -> None:
    reads = Failing(monkeypatch, "", 0, RuntimeError()).reads
    peak = peak_module.run(job(folder))
    assert peak.nbytes is None or peak.nbytes > 0
    assert [count for _, _, count in reads[:3]] == [64, 1, 1] and reads[-1][2] == 1 and len(reads) == 5
    seen: list[Any] = []
    monkeypatch.setattr(peak_module, "peak_here", lambda *given: seen.append(given))
    peak_module.run(job(folder, weights="int8-dynamic", dtype="float32", scheme="kivi2", chunk=7))
    model, scheme, reading, calibration = seen[0]
    assert not list(weights.linear_layers(model)) and (scheme, calibration) == ("kivi2", None)
    assert (reading.batch, reading.context, reading.chunk) == (2, 64, 7)


@pytest.mark.parametrize(("status", "said", "expected"), [
    (-9, "", "killed, as a rule for want of memory"),
    (1, "Traceback\nValueError: no such scheme", "failed: ValueError: no such scheme"),
    (3, "", "failed: it said nothing"),
])  # fmt: skip
def test_a_process_that_fails_leaves_a_row_without_a_peak(
    folder: str, monkeypatch: Any, status: int, said: str, expected: str
) -> None:
    done = peak_module.subprocess.CompletedProcess([], status, stdout="", stderr=said)
    monkeypatch.setattr(peak_module.subprocess, "run", lambda *_, **__: done)
    for row in small_bench(folder, [SMALL], [64], peak=True).run().rows:
        assert row["peak_bytes"] is None and row["step_ms"] > 0
        assert any(warning.endswith(expected) for warning in row["warnings"])


# -- weights in few bits -----------------------------------------------------------------------------------------------


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(zoo.prompt(1, 30)).logits


@pytest.mark.parametrize("name", named("int8-dynamic", "torchao-int8", "torchao-int8-dynamic", "bnb-int8", "bnb-nf4"))
def test_linear_layers_are_quantized_and_the_output_embedding_is_not(name: str) -> None:
    model = zoo.build("llama", hidden_size=64, intermediate_size=64, num_attention_heads=4)
    before, names = logits(model), [name for name, _ in weights.linear_layers(model)]
    assert len(names) == 2 * 7 and "lm_head" not in names
    output = model.lm_head.weight.clone()
    assert weights.quantize(model, f" {name}") is model
    assert torch.equal(model.lm_head.weight, output)
    after = logits(model)
    error = float((after - before).norm() / before.norm())
    assert 1e-4 < error < (0.6 if name == "bnb-nf4" else 0.15)
    if name == "int8-dynamic":
        assert all("dynamic" in type(model.get_submodule(name)).__module__ for name in names)


def test_weights_and_cache_are_measured_together(folder: str, tmp_path: Path) -> None:
    loads = []

    def load() -> Any:
        loads.append(loading.load_model(folder))
        return loads[-1], loading.load_tokenizer(folder)

    plan = small_bench(folder, [SMALL], [40, 64], weights=["none", "int8-dynamic"], steps=4)
    rows = plan.run(tmp_path / "speed.json", load=load).rows
    assert len(loads) == 2  # one for each kind of weights, and none for its cells
    assert [row["weights"] for row in rows] == ["none"] * 4 + ["int8-dynamic"] * 4
    assert not any("error" in row for row in rows)
    assert all(type(x) is torch.nn.Linear for x in loads[0].modules() if isinstance(x, torch.nn.Linear))
    assert not list(weights.linear_layers(loads[1]))
    assert len(verdicts(rows)) == 2
    plan.run(tmp_path / "speed.json", load=load)
    assert len(loads) == 3  # to know that nothing is missing


def test_weights_that_do_not_work_are_rows(folder: str) -> None:
    rows = small_bench(folder, [SMALL], [40, 64], weights=["int8-dynamic", "none"], dtype="bfloat16").run().rows
    wrong, right = rows[:4], rows[4:]
    assert {row["error"] for row in wrong} == {
        "ValueError: int8-dynamic is for float32 on a CPU, not bfloat16 on cpu; give --dtype float32, or torchao-int8"
    }
    assert [(row["weights"], row["context"], row["scheme"]) for row in wrong] == [
        ("int8-dynamic", context, scheme) for context in (40, 64) for scheme in (EXACT, SMALL)
    ]
    assert not any("error" in row for row in right)


def test_weights_that_need_a_package_name_it(monkeypatch: Any) -> None:
    monkeypatch.setattr(weights.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"needs the package bitsandbytes: pip install 'kvbits\[weights\]'"):
        Bench("no-such-model", ["int4"], [64], weights=["bnb-nf4"])
    Bench("no-such-model", ["int4"], [64], weights=["int8-dynamic"])
    with pytest.raises(ValueError, match=r"has no torch\.nn\.Linear layers"):
        weights.quantize(zoo.build("gpt2"), "int8-dynamic")


def test_a_calibration_serves_a_model_whose_weights_are_quantized_afterwards(folder: str, tmp_path: Path) -> None:
    model, tokenizer = loading.load_model(folder), loading.load_tokenizer(folder)
    calibrate(model, TEXT, ["nuq3"], tokenizer=tokenizer, samples=2, length=64, out=tmp_path)
    ways = {"weights": ["none", "int8-dynamic"], "calibration": tmp_path}
    rows = small_bench(folder, ["nuq3,residual=0,block=32", SMALL], [64], **ways).run().rows
    assert len(rows) == 6 and not any("error" in row for row in rows)
    asked = job(folder, scheme="nuq3,residual=0,block=32", weights="int8-dynamic", calibration=str(tmp_path))
    assert peak_module.run(asked).what  # the process of its own does the same


# -- the command line --------------------------------------------------------------------------------------------------


def test_the_command_prints_tables_that_fit_and_writes_rows(folder: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("kvbits.cli.common.out._width", 80)
    (tmp_path / "book.txt").write_text(TEXT)
    path = tmp_path / "speed.json"
    long = "k=int4-channel,v=int4,residual=0,block=32,sinks=8"
    code, output = run(
        "bench", folder, "--schemes", f"exact;{SMALL};{long};hf:hqq4", "--context", "41", "--batch", "1,2",
        "--steps", "4", "--prefills", "1", "--no-peak", "--text", str(tmp_path / "book.txt"), "--json", str(path),
    )  # fmt: skip
    assert code == 0, output
    rows = Results.load(path)
    assert len(rows.rows) == 2 * 5 and rows.setting["text"] == "book.txt" and "/" not in rows.setting["model"]
    for title in ("41 tokens", "41 tokens, batch 2"):
        assert f"\n{title} " in f"\n{output}"
    assert "41 tokens, hf:hqq4: failed: " in output  # on the other console, and as wide as it is
    assert f"{SMALL}, batch 2: " in output
    tables = [line for line in output.splitlines() if ": failed: " not in line and "warn" not in line]
    assert max(len(line) for line in tables if "tok/s" in line or "native" in line or "stock" in line) <= 80
    assert "…" not in output


def test_figures_of_any_size_fit(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr("kvbits.cli.common.out._width", 80)
    huge = {
        "scheme": "kivi4,pre-rope,residual=256,sinks=4+8", "prefill_tokens_per_second": 123456.7, "step_ms": 12345.6,
        "step_ms_low": 10000.0, "step_ms_high": 40000.0, "flush_ms": 123456.7, "decode_tokens_per_second": 1234.5,
        "speed_against_exact": 123.456, "kv_bytes": 123_456_789_012, "peak_bytes": 1_234_567_890_123,
        "kernel": "decoded, kernel native", "noise": None, "warnings": [],
    }  # fmt: skip
    tiny = {**huge, "step_ms": 0.0123, "step_ms_low": 0.0123, "step_ms_high": 0.0124, "flush_ms": None, "kv_bytes": 7,
            "speed_against_exact": None, "peak_bytes": None}  # fmt: skip
    cli_bench.show(Cell("bnb-nf4", 64, 1 << 20), [huge, tiny])
    output = capsys.readouterr().out
    assert max(map(len, output.splitlines())) <= 80 and "…" not in output
    assert "1,048,576 tokens, batch 64, bnb-nf4 weights" in output
    assert all(
        f" {figure} " in output
        for figure in ("123k", "123x", "1,235 GB", "122%", "123 GB", "12.3 s", "0.01 ms", "1,234")
    )
    assert output.count("decoded,\n") == 2 and output.count(" native\n") == 2  # the last column, uncut


WRONG = {
    "unknown scheme": (["--schemes", "int4,int5"], "near: int8, int4"),
    "no context": (["--context", "2q"], "--context: '2q' is not a number of tokens; give one such as 512, 2k (2,048)"),
    "a context of nothing": (["--context", "512,"], "--context: '' is not a number of tokens"),
    "no batch": (["--batch", "0"], "--batch: '0' is not a number of tokens"),
    "no chunk": (["--chunk", "-1"], "--chunk: '-1' is not"),
    "too few steps": (["--steps", "3"], "--steps"),
    "unknown weights": (["--weights", "int8"], "did you mean 'bnb-int8'? Known are none, int8-dynamic, "),
    "a scheme that needs a calibration": (["--schemes", "nuq3"], "needs a calibration"),
    "no such calibration": (["--calibration", "no-such-folder"], "no-such-folder"),
    "no such text": (["--text", "no-such-file.txt"], "there is no file no-such-file.txt"),
    "no folder for the results": (["--json", "no-such-folder/out.json"], "there is no folder no-such-folder"),
    "too long": (["--context", "1k"], "beyond the 512 positions"),
    "unknown dtype": (["--dtype", "int4"], "allowed are auto, float32, bfloat16, float16"),
}


@pytest.mark.parametrize(("arguments", "expected"), WRONG.values(), ids=list(WRONG))
def test_what_a_user_gets_wrong_is_one_clear_line(folder: str, arguments: list[str], expected: str) -> None:
    code, output = run("bench", folder, *arguments)
    assert code == 2
    assert expected in output and "Traceback" not in output


def test_an_interruption_says_how_to_go_on(folder: str, tmp_path: Path, monkeypatch: Any) -> None:
    Failing(monkeypatch, "exact", 0, KeyboardInterrupt())
    path = tmp_path / "speed.json"
    result = CliRunner().invoke(app, ["bench", folder, "--context", "64", "--schemes", "exact", "--json", str(path)])
    assert result.exit_code == 130 and "the same command goes on from" in result.output
    assert "Traceback" not in result.output


def test_a_command_whose_caches_all_fail_fails(folder: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(speed_module, "Runner", lambda *_: SimpleNamespace(name=EXACT, reading=None, model=None))
    code, output = run("bench", folder, "--context", "64", "--schemes", "hf:dynamic", "--no-peak")
    assert code == 2 and "every cache failed" in output and "hf:dynamic: failed: AttributeError" in output


# -- the scripts whose files the tables in the documentation are made of -----------------------------------------------


@pytest.mark.parametrize(("script", "arguments", "section"), [
    pytest.param("decode", ["--schemes", SMALL, "--rounds", "4"], "decode_speed", marks=named("hf:quanto4")[0].marks),
    ("prefill", ["--schemes", SMALL, "--rounds", "1", "--chunk", "32"], "prompt_speed"),
    ("memory", ["--schemes", SMALL], "peak_memory"),
])  # fmt: skip
def test_scripts_write_what_the_tables_are_made_of(
    folder: str, tmp_path: Path, monkeypatch: Any, script: str, arguments: list[str], section: str
) -> None:
    common, module = importlib.import_module("common"), importlib.import_module(script)
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(module, "require_green", lambda *tests: None, raising=False)
    monkeypatch.setattr(bench_module, "peak_of", lambda job: Peak("made up", 10**9))
    contexts = ["--contexts", "64", "--dtypes", "float32"]
    monkeypatch.setattr(bench_module, "prose", lambda: TEXT)
    monkeypatch.setattr("sys.argv", [f"{script}.py", "--model", folder, *contexts, *arguments])
    module.main()
    monkeypatch.setattr(importlib.import_module("measured"), "RESULTS", tmp_path)
    table = getattr(importlib.import_module("measured_speed"), section)()
    lines = [line for line in table.splitlines() if line.startswith("| float32 | 64 |")]
    assert len(lines) == {"decode": 4, "prefill": 4, "memory": 2}[script], table
    assert any(f"`{SMALL}`" in line for line in lines)
