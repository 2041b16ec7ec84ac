"""Tasks of lm-evaluation-harness: what is scored has gone through the cache, and local files are read or refused."""

from __future__ import annotations

import json
import math
import pydoc_data.topics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

import characters
import kvbits
import zoo
from kvbits.cli import app
from kvbits.measure import task_data
from kvbits.measure.bits import stored
from kvbits.measure.caches import make
from kvbits.measure.packed import Tally, packed_share
from kvbits.measure.pairs import pair_rows, paired
from kvbits.measure.results import Results

pytest.importorskip("lm_eval", reason="tasks need lm-evaluation-harness: the extra eval")

from lm_eval.api.instance import Instance
from lm_eval.api.model import CachingLM
from lm_eval.models.huggingface import HFLM

from kvbits.measure import tasks
from kvbits.measure.harness import KvbitsLM, main

pytestmark = pytest.mark.usefixtures("one_thread")

LETTERS = "abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:;!?'-#$_()\n"
PACKED = "int2,residual=0,block=32"
TEXT = "It is a truth universally acknowledged, that a single man in possession of a good fortune. " * 6
LONGEST = 128
PAIRS = [
    (TEXT[:60], " abc"), (TEXT[:60], " x"), (TEXT[:60], " y"), (TEXT[:61], "z"),  # one token, several, one context
    ("", " hello there"), ("", "ab"), ("a", " " + TEXT[:50]),  # no context; a continuation that is longer
    (TEXT[:200], "q"), (TEXT[:127], TEXT[127:150]), (TEXT[:40], TEXT[40:125]),  # beyond the greatest length; all of it
]  # fmt: skip


@pytest.fixture(scope="module")
def letters() -> PreTrainedTokenizerFast:
    """A tokenizer of single letters."""
    return characters.tokenizer(LETTERS, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="module")
def llama() -> Any:
    return zoo.build("llama", max_position_embeddings=2048)


def requests(kind: str, arguments: list[Any]) -> list[Instance]:
    return [Instance(kind, {}, one if isinstance(one, tuple) else (one,), i) for i, one in enumerate(arguments)]


def score(model: Any, tokenizer: Any, pairs: list[tuple[str, str]], **options: Any) -> list[tuple[float, bool]]:
    lm = KvbitsLM(model, tokenizer=tokenizer, **options)
    return lm.loglikelihood(requests("loglikelihood", pairs), disable_tqdm=True)


def near(found: list[Any], wanted: list[Any]) -> None:
    """Sums of up to 128 float32 log-probabilities, in another order and from matrices of another shape."""
    assert [x[1] for x in found] == [x[1] for x in wanted]
    assert [x[0] for x in found] == pytest.approx([x[0] for x in wanted], rel=1e-5, abs=1e-4)


# -- log-likelihoods -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "mistral-window", "gemma3", "gpt2", "qwen3"])
@pytest.mark.filterwarnings("ignore:every layer of")
def test_the_exact_cache_gives_the_log_likelihoods_of_the_stock_model(family: str, letters: Any) -> None:
    model = zoo.build(family)
    stock = HFLM(pretrained=model, tokenizer=letters, max_length=LONGEST)
    wanted = stock.loglikelihood(requests("loglikelihood", PAIRS), disable_tqdm=True)
    for scheme, chunk, batch in (("exact", 16, 1), ("exact", 5, 4), ("exact", 0, 64), ("hf:dynamic", 16, 4)):
        options = {"scheme": scheme, "chunk": chunk, "batch_size": batch, "max_length": LONGEST}
        near(score(model, letters, PAIRS, **options), wanted)
    texts = requests("loglikelihood_rolling", [TEXT[:300], "short", TEXT[:130]])
    ours = KvbitsLM(model, tokenizer=letters, scheme="exact", max_length=LONGEST, batch_size=2)
    assert ours.loglikelihood_rolling(texts, disable_tqdm=True) == pytest.approx(
        stock.loglikelihood_rolling(texts, disable_tqdm=True), rel=1e-5
    )


def test_choices_that_share_a_context_score_as_they_do_alone(llama: Any, letters: Any) -> None:
    pairs = [(TEXT[:150], choice) for choice in (" a", " b", " ab", " and so on", " a")]
    alone = [score(llama, letters, [pair], scheme=PACKED)[0] for pair in pairs]
    for batch in (1, 3, 8):
        near(score(llama, letters, pairs, scheme=PACKED, batch_size=batch), alone)
    several = [*pairs, *PAIRS[:4]]  # of more contexts than one, which are read together
    alone += [score(llama, letters, [pair], scheme=PACKED)[0] for pair in PAIRS[:4]]
    near(score(llama, letters, several, scheme=PACKED, batch_size=64), alone)


def test_what_a_continuation_attends_to_is_packed_before_it_is_scored(llama: Any, letters: Any) -> None:
    """Even a single token is predicted from packed bits, also where the context is read in one forward."""
    pairs = [(TEXT[i : i + 150], "e") for i in range(4)]
    for chunk in (0, 16):
        exact = score(llama, letters, pairs, scheme="exact", chunk=chunk)
        packed = score(llama, letters, pairs, scheme=PACKED, chunk=chunk)
        assert all(abs(a[0] - b[0]) > 1e-3 for a, b in zip(exact, packed, strict=True))


def test_the_last_bit_counts(llama: Any, letters: Any) -> None:
    """Log-likelihoods come nearer to the exact ones with more bits."""
    pairs = [(TEXT[i : i + 200], TEXT[i + 200 : i + 240]) for i in range(0, 28, 7)]
    exact = score(llama, letters, pairs, scheme="exact", batch_size=4)
    errors = []
    for bits in (2, 4, 8):
        found = score(llama, letters, pairs, scheme=f"int{bits},residual=0,block=32", batch_size=4)
        errors.append(sum(abs(a[0] - b[0]) for a, b in zip(exact, found, strict=True)))
    assert errors == sorted(errors, reverse=True) and errors[-1] > 0


@pytest.mark.model
def test_two_bits_score_real_text_worse_which_the_stock_model_cannot_show(smollm2: Any) -> None:
    """The last words of passages: through the cache they are less likely under 2 bits, and under HFLM all the same."""
    model, tokenizer = smollm2
    words = " ".join(pydoc_data.topics.topics["assignment"].split()).split(" ")
    pairs = [(" ".join(words[i : i + 120]), f" {words[i + 120]}") for i in range(0, 400, 100)]
    options: dict[str, Any] = {"chunk": 48, "batch_size": 8}
    exact = score(model, tokenizer, pairs, scheme="exact", **options)
    lm = KvbitsLM(model, tokenizer=tokenizer, scheme=PACKED, **options)
    packed = lm.loglikelihood(requests("loglikelihood", pairs), disable_tqdm=True)
    assert lm.tally.packed_share > 0.7 and lm.tally.packed_requests == len(pairs)
    assert sum(x[0] for x in packed) < sum(x[0] for x in exact) - 0.5 * len(pairs)

    stock = HFLM(pretrained=kvbits.disable(model), tokenizer=tokenizer, batch_size=8)
    before = stock.loglikelihood(requests("loglikelihood", pairs), disable_tqdm=True)
    near(exact, before)
    kvbits.enable(model, PACKED)
    assert stock.loglikelihood(requests("loglikelihood", pairs), disable_tqdm=True) == before
    kvbits.disable(model)


def test_impossible_requests(llama: Any, letters: Any) -> None:
    lm = KvbitsLM(llama, tokenizer=letters, scheme="exact", max_length=LONGEST)
    for context, continuation in (([], [1]), ([1], []), ([1], [1] * (LONGEST + 1))):
        with pytest.raises(ValueError, match=f"1 to {LONGEST} tokens to score after it"):
            lm._loglikelihood_tokens([(None, context, continuation)], disable_tqdm=True)


# -- generation ------------------------------------------------------------------------------------------------------


def generate(lm: HFLM, contexts: list[str], **options: Any) -> list[str]:
    asked = [(context, {"until": ["\n"], "do_sample": False, **options}) for context in contexts]
    return lm.generate_until(requests("generate_until", asked), disable_tqdm=True)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_exact_cache_generates_what_the_stock_model_does(family: str, letters: Any) -> None:
    model = zoo.build(family)
    contexts = [TEXT[:100], TEXT[5:45], "a", TEXT[:90], TEXT[30:130]]
    wanted = generate(HFLM(pretrained=model, tokenizer=letters, batch_size=3), contexts, max_gen_toks=12)
    for chunk, batch in ((16, 1), (5, 3), (0, 3)):
        lm = KvbitsLM(model, tokenizer=letters, scheme="exact", chunk=chunk, batch_size=batch)
        assert generate(lm, contexts, max_gen_toks=12) == wanted
    beams = generate(HFLM(pretrained=model, tokenizer=letters), contexts[:2], max_gen_toks=6, num_beams=2)
    lm = KvbitsLM(model, tokenizer=letters, scheme="exact")
    assert generate(lm, contexts[:2], max_gen_toks=6, num_beams=2) == beams


def test_contexts_that_are_cut_are_counted(llama: Any, letters: Any) -> None:
    lm = KvbitsLM(llama, tokenizer=letters, scheme="exact", max_length=LONGEST, batch_size=2)
    generate(lm, [TEXT[:200], TEXT[:100], TEXT[:20]], max_gen_toks=20)
    assert lm.tally.truncated == 1  # more than 108 tokens before the 20
    lm.loglikelihood(requests("loglikelihood", PAIRS), disable_tqdm=True)
    assert lm.tally.truncated == 1 + 2


def test_the_first_token_is_already_generated_from_packed_bits(llama: Any, letters: Any) -> None:
    contexts = [TEXT[i : i + 150] for i in range(0, 120, 5)]
    firsts = {}
    for scheme in ("exact", PACKED):
        lm = KvbitsLM(llama, tokenizer=letters, scheme=scheme, chunk=0, batch_size=8)
        firsts[scheme] = generate(lm, contexts, max_gen_toks=1)
    assert firsts["exact"] != firsts[PACKED]


def test_a_batch_generates_what_its_rows_do_alone(llama: Any, letters: Any) -> None:
    """Rows of different lengths are packed after the same tokens as they are alone."""
    contexts = [TEXT[:150], TEXT[5:95], TEXT[:41], TEXT[9:140]]
    alone = KvbitsLM(llama, tokenizer=letters, scheme=PACKED)
    batch = KvbitsLM(llama, tokenizer=letters, scheme=PACKED, batch_size=4)
    assert generate(alone, contexts, max_gen_toks=8) == generate(batch, contexts, max_gen_toks=8)


# -- what is counted -------------------------------------------------------------------------------------------------


def test_a_context_that_stays_exact_is_told_from_one_that_was_packed(llama: Any, letters: Any) -> None:
    short, long = [(TEXT[:100].strip(), " a")], [(TEXT[:500].strip(), " a")]
    for scheme, pairs, share in (("int4", short, 0), ("int4", long, 256 / 498), (PACKED, short, 64 / 99)):
        lm = KvbitsLM(llama, tokenizer=letters, scheme=scheme)
        lm.loglikelihood(requests("loglikelihood", pairs), disable_tqdm=True)
        assert lm.tally.packed_share == pytest.approx(share)
        assert lm.tally.packed_requests == (share > 0) and lm.tally.requests == 1
        assert (lm.tally.advice(scheme) is None) == (share > 0.5)
        assert ("kernel" in "".join(lm.tally.kernels)) == (share > 0)
    assert "nothing was ever packed under int4" in (Tally(requests=1).advice("int4") or "")
    assert "add ,residual=0,block=32 to the scheme" in (Tally(requests=1).advice("int4") or "")
    assert "add" not in (Tally(requests=1).advice(PACKED) or "")
    assert Tally(requests=1).advice("exact") is None is Tally().advice("int4")


def test_shares_and_bits_of_caches(llama: Any) -> None:
    """By hand: 200 tokens, 4 of them sinks, are 6 blocks of 32; fp8 is 8 bits an element, and a scale for each side."""
    tokens = zoo.prompt(2, 200)
    for name, share, bits in (("exact", 0, 32), ("hf:dynamic", 0, 32), (PACKED, 192 / 200, None), ("hf:fp8", 1, 8)):
        cache = make(llama, name)
        assert packed_share(cache) == 0 and stored(cache)[1] == 0
        zoo.feed(llama, cache, tokens, torch.ones_like(tokens), (150, 50))
        nbytes, elements = stored(cache)
        assert packed_share(cache) == pytest.approx(share)
        assert elements == 2 * 2 * 2 * 2 * 8 * 200  # layers, sides, rows, heads, channels
        if bits is not None:
            assert bits <= 8 * nbytes / elements < bits * 1.2  # room to grow
        else:
            assert 8 * nbytes / elements == pytest.approx(cache.bits_per_element)
    kvbits.disable(llama)


def test_answers_that_are_kept_belong_to_one_scheme(llama: Any, letters: Any, tmp_path: Path) -> None:
    """The harness would hand the answers of one scheme to another: it finds them by their text alone."""
    kept = str(tmp_path / "kept.db")
    first = CachingLM(KvbitsLM(llama, tokenizer=letters, scheme="exact"), kept)
    answers = first.loglikelihood(requests("loglikelihood", PAIRS[:3]))
    again = CachingLM(KvbitsLM(llama, tokenizer=letters, scheme="exact"), kept)
    assert again.loglikelihood(requests("loglikelihood", PAIRS[:3])) == answers
    assert again.lm.tally.requests == 0
    with pytest.raises(ValueError, match=r"answers of .* exact chunk=16, not of .* int4 chunk=16; give another file"):
        CachingLM(KvbitsLM(llama, tokenizer=letters, scheme="int4"), kept)
    stock = CachingLM(HFLM(pretrained=llama, tokenizer=letters), str(tmp_path / "other.db"))
    stock.loglikelihood(requests("loglikelihood", PAIRS[:1]))
    with pytest.raises(ValueError, match="answers of some other model"):
        CachingLM(KvbitsLM(llama, tokenizer=letters, scheme="exact"), str(tmp_path / "other.db"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheme": "int5"}, "near: int8, int4"),
        ({"scheme": "nuq3"}, "calibrat"),
        ({"scheme": "int4", "chunk": -1}, "chunk=-1"),
        ({"scheme": "int4", "block": 31}, "block"),
    ],
)
def test_a_model_that_cannot_be(options: dict[str, Any], message: str, llama: Any, letters: Any) -> None:
    with pytest.raises(ValueError, match=message):
        KvbitsLM(llama, tokenizer=letters, **options)


def test_a_scheme_that_a_command_line_has_taken_apart(llama: Any, letters: Any) -> None:
    lm = KvbitsLM(llama, tokenizer=letters, scheme="int4;centred", residual=0, sinks="4+2", block=32)
    assert lm.scheme == "int4,centred,residual=0,sinks=4+2,block=32"


# -- paired tests ----------------------------------------------------------------------------------------------------


def test_mcnemar() -> None:
    """Two-sided and exact: twice the tail of the binomial distribution with 12 samples that differ, 2 of them wins."""
    won, lost, same = "10" * 1, "01" * 1, "11" * 3
    ours = won[0] * 2 + lost[0] * 10 + same
    exact = won[1] * 2 + lost[1] * 10 + same
    assert paired(ours, exact) == (2, 10, pytest.approx(2 * sum(math.comb(12, i) for i in range(3)) / 2**12))
    assert paired("0101", "0101") == (0, 0, 1.0)
    assert paired([0.5, 0.25, 0.0], [0.5, 0.75, 1.0]) == (0, 2, pytest.approx(0.5))
    with pytest.raises(ValueError, match="there are 2 and 3"):
        paired("01", "010")


def test_rows_are_paired_with_the_exact_cache_on_the_same_samples() -> None:
    def row(scheme: str, scores: str, sample_hash: str = "a") -> dict[str, Any]:
        return {"scheme": scheme, "task": "t", "metric": "acc", "scores": scores, "sample_hash": sample_hash}

    failed = {"scheme": "hf:hqq4", "task": "t", "error": "no"}
    rows = [row("int2", "0011"), failed, row("hf:dynamic", "0000"), row("exact", "1111"), row("int4", "1111", "b")]
    pair_rows(rows)
    assert (rows[0]["wins"], rows[0]["losses"], rows[0]["p_value"]) == (0, 2, 0.5)
    assert rows[2]["losses"] == 4 and "wins" not in rows[3] and "wins" not in rows[4]


# -- local files -----------------------------------------------------------------------------------------------------

CHOICE = {"question": "A man sits on a roof. He", "choices": ["sings", "is ripping tiles", "runs"], "gold": 1}
LONG = {"input": "Q: where\nA:", "context": "Q: who\nA: a man. " * 20, "answers": ["the roof", "roof"]}
SAMPLES: dict[str, dict[str, Any]] = {
    "hellaswag": CHOICE,
    "piqa": CHOICE,
    "arc_easy": CHOICE,
    "arc_challenge": CHOICE,
    "mmlu": {"subject": "abstract_algebra", **CHOICE},
    "lambada": {"context": "She took the lamp, and looked for a match with which to light the", "target": "lamp"},
    "gsm8k": {"question": "What is 1 + 1?", "solution": "1 + 1 = 2", "answer": "2"},
    "triviaqa": {"question": "Which fruit?", "aliases": ["Apple", "Apples"]},
    "longbench_trec": {**LONG, "all_classes": ["roof", "the roof", "man"]},
    "longbench_samsum": LONG,
    "longbench_triviaqa": LONG,
}


def write(folder: Path, name: str, samples: list[dict[str, Any]]) -> Path:
    file = folder / "below" / f"{name}_val.jsonl"
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps(sample) + "\n" for sample in samples), encoding="utf-8")
    return folder


def numbered(name: str, count: int) -> list[dict[str, Any]]:
    """Samples that differ in their text, with fields besides that no two lines have of one type."""
    field = next(field for field in ("question", "context", "input") if field in SAMPLES[name])
    return [{**SAMPLES[name], field: f"{i} {SAMPLES[name][field]}", "id": i if i % 2 else str(i)} for i in range(count)]


def test_every_local_task_has_a_sample_here() -> None:
    assert set(SAMPLES) == set(task_data.local_tasks())


@pytest.mark.parametrize("name", SAMPLES)
def test_every_local_task_runs(name: str, llama: Any, letters: Any, tmp_path: Path) -> None:
    (task,) = tasks.load_tasks([name], write(tmp_path, name, numbered(name, 3)), shots=1 if name == "gsm8k" else None)
    for part in task.loaded["tasks"].values():  # random models rarely end by themselves
        if part.config.generation_kwargs:
            part.config.generation_kwargs["max_gen_toks"] = 8
    results = tasks.evaluate(llama, letters, ["exact"], [task], limit=2)
    assert results.rows and all("error" not in row for row in results.rows), results.rows
    for row in results.rows:
        assert tuple(row) == tasks.ROW and row["task"] == name and row["samples"] == 2 and len(row["scores"]) == 2
        assert 0 <= row["value"] <= 1 or row["metric"] == "perplexity"


def test_prompts_and_shots(tmp_path: Path) -> None:
    (mmlu,) = tasks.load_tasks(["mmlu"], write(tmp_path, "mmlu", numbered("mmlu", 4)), shots=2)
    part = mmlu.loaded["tasks"]["mmlu"]
    part.set_fewshot_seed(seed=0)
    part.build_all_requests(limit=4, rank=0, world_size=1)
    ask = "{} A man sits on a roof. He\nA. sings\nB. is ripping tiles\nC. runs\nAnswer:"
    head = "The following are multiple choice questions (with answers) about abstract algebra.\n\n"
    asked = [instance.args for instance in part.instances]
    assert [choice for _, choice in asked[:3]] == [" A", " B", " C"]
    for i, (prompt, _) in enumerate(asked[::3]):
        *shots, question = prompt.removeprefix(head).split("\n\n")
        assert prompt.startswith(head) and question == ask.format(i)
        others = {f"{ask.format(other)} B" for other in range(4) if other != i}
        assert len(set(shots)) == 2 and set(shots) <= others  # never the question itself
    with pytest.raises(ValueError, match="mmlu has 4 samples to take 4 shots from; give fewer --shots"):
        tasks.load_tasks(["mmlu"], tmp_path, shots=4)


WRONG_FILES = {
    "no JSON": ("{", "line 1 is no JSON: Expecting"),
    "no object": ("[1]", "line 1 is no JSON object"),
    "another schema": ('{"goal": "x"}', r"line 1 has question=None; hellaswag needs question \(a string\), choices"),
    "a wrong type": (json.dumps({**CHOICE, "gold": "1"}), "line 1 has gold='1'"),
    "true is no number": (json.dumps({**CHOICE, "gold": True}), "line 1 has gold=True"),
    "no choices": (json.dumps({**CHOICE, "choices": []}), r"line 1 has choices=\[\]"),
    "beyond the choices": (json.dumps({**CHOICE, "gold": 3}), "line 1 has gold=3, but choices 0 to 2"),
    "a later line": (json.dumps(CHOICE) + "\n\n" + "{}", "line 3 has question=None"),
    "nothing": ("\n \n", "is empty; hellaswag needs lines"),
}


@pytest.mark.parametrize(("content", "message"), WRONG_FILES.values(), ids=list(WRONG_FILES))
def test_local_files_that_will_not_do(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "hellaswag.jsonl").write_text(content)
    with pytest.raises(ValueError, match=message):
        tasks.load_tasks(["hellaswag"], tmp_path)


def test_missing_double_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        tasks.load_tasks(["hellaswag"], tmp_path / "none")
    with pytest.raises(FileNotFoundError, match=r"has no file \*\*/hellaswag\*.jsonl, which hellaswag reads: question"):
        tasks.load_tasks(["hellaswag"], tmp_path)
    (tmp_path / "hellaswag.jsonl").write_bytes(b'{"question": "\xff"}')
    with pytest.raises(ValueError, match="is not text in UTF-8: invalid start byte at byte 14"):
        tasks.load_tasks(["hellaswag"], tmp_path)
    (tmp_path / "hellaswag_train.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"but .* has hellaswag.jsonl, hellaswag_train.jsonl; leave one"):
        tasks.load_tasks(["hellaswag"], tmp_path)
    with pytest.raises(ValueError, match="no tasks; give some, such as arc_challenge"):
        tasks.load_tasks([])


def test_the_harness_reads_the_task_files_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``lm_eval --include_path`` in the folder with the data, for users of plain lm_eval."""
    import datasets
    from lm_eval.tasks import TaskManager

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    manager = TaskManager(include_path=str(task_data.FOLDER), include_defaults=False)
    assert manager.all_tasks == sorted(f"local_{name}" for name in SAMPLES)
    for name in ("longbench_trec", "lambada"):
        write(tmp_path, name, numbered(name, 3))
    monkeypatch.chdir(tmp_path)
    loaded = manager.load(["local_longbench_trec", "local_lambada"])["tasks"]
    assert len(loaded["local_lambada"].eval_docs) == 3
    assert loaded["local_longbench_trec"].process_results(SAMPLES["longbench_trec"], ["man"]) == {
        "classification_score": 0.0
    }


def test_grades_of_longbench() -> None:
    grades = {name: task.config.get("process_results") for name, task in task_data.local_tasks().items()}
    trec = {"all_classes": ["Food", "Food and drink", "Person"], "answers": ["Food and drink"]}
    for answer, grade in (("Food and drink", 1), ("Food and drink, Person", 0.5), ("Food", 0), ("", 0)):
        assert grades["longbench_trec"](trec, [answer]) == {"classification_score": grade}
    answers = {"answers": ["the old man", "Sea"]}
    for answer, grade in (("An old man.", 1), ("sea", 1), ("old sea man of it", 2 * 2 / (5 + 2)), ("", 0), ("x", 0)):
        assert grades["longbench_triviaqa"](answers, [answer]) == {"qa_f1_score": pytest.approx(grade)}
    for answer, grade in (("the old man", 1), ("man old the", 1 / 3), ("the man", 2 * 1 * (2 / 3) / (5 / 3)), ("", 0)):
        assert grades["longbench_samsum"](answers, [answer]) == {"rouge_score": pytest.approx(grade)}


# -- from schemes and tasks to rows ----------------------------------------------------------------------------------


def test_rows_are_written_resumed_and_compared(llama: Any, letters: Any, tmp_path: Path) -> None:
    data = write(write(tmp_path, "lambada", numbered("lambada", 5)), "triviaqa", numbered("triviaqa", 3))
    loaded = tasks.load_tasks(["lambada", "triviaqa"], data)
    loaded[1].loaded["tasks"]["triviaqa"].config.generation_kwargs["max_gen_toks"] = 4
    file, steps = tmp_path / "out.json", []

    def run(schemes: list[str], **options: Any) -> Results:
        steps.clear()
        return tasks.evaluate(llama, letters, schemes, loaded, path=file, report=steps.append, **options)

    run([PACKED])
    assert all(row["p_value"] is None for row in Results.load(file).rows)
    run(["exact", PACKED])  # the exact cache later: what was there is compared with it then
    assert steps == ["lambada, exact", "triviaqa, exact"]
    rows = {(row["scheme"], row["task"], row["metric"]): row for row in Results.load(file).rows}
    assert len(rows) == 2 * 3
    perplexity = rows[PACKED, "lambada", "perplexity"]
    assert perplexity["wins"] + perplexity["losses"] == 5 and perplexity["p_value"] is not None
    assert perplexity["value"] == pytest.approx(math.exp(-sum(perplexity["scores"]) / 5), rel=1e-4)
    assert perplexity["stderr"] > 0 and perplexity["kv_bytes"] > 0 and perplexity["seconds"] > 0
    acc = rows[PACKED, "lambada", "acc"]
    assert acc["scores"].strip("01") == "" and acc["value"] == acc["scores"].count("1") / 5
    hashes = {row["sample_hash"] for row in rows.values()}
    assert len(hashes) == 2
    run(["exact", PACKED])
    assert steps == []
    with pytest.raises(ValueError, match="limit=None, not 2"):
        run(["exact"], limit=2)


def test_samples_that_have_changed_are_scored_again(llama: Any, letters: Any, tmp_path: Path) -> None:
    steps: list[str] = []
    for count in (2, 2, 3):
        loaded = tasks.load_tasks(["lambada"], write(tmp_path, "lambada", numbered("lambada", count)))
        found = tasks.evaluate(llama, letters, ["exact"], loaded, path=tmp_path / "out.json", report=steps.append)
        assert {row["samples"] for row in found.rows} == {count}
    assert len(steps) == 2


@pytest.mark.parametrize("task", ["hellaswag", "triviaqa"])
def test_a_model_that_says_nan_has_no_score(letters: Any, tmp_path: Path, task: str) -> None:
    model = zoo.build("llama")
    with torch.no_grad():
        model.lm_head.weight[5] = math.nan
    loaded = tasks.load_tasks([task], write(tmp_path, task, numbered(task, 3)))
    (row,) = tasks.evaluate(model, letters, ["exact"], loaded).rows
    assert "NaN" in row["error"] and "value" not in row


def test_a_peer_that_fails_is_a_row_until_it_works(letters: Any, tmp_path: Path) -> None:
    model = zoo.build("gemma3")  # Transformers' quantized caches refuse sliding windows
    loaded = tasks.load_tasks(["lambada"], write(tmp_path, "lambada", numbered("lambada", 2)))
    file = tmp_path / "out.json"
    results = tasks.evaluate(model, letters, ["exact", "hf:fp8"], loaded, path=file)
    assert [row["scheme"] for row in results.rows] == ["exact", "exact", "hf:fp8"]
    assert results.rows[-1]["error"].startswith("ValueError: ") and "value" not in results.rows[-1]
    steps: list[str] = []
    tasks.evaluate(model, letters, ["exact", "hf:fp8"], loaded, path=file, report=steps.append)
    assert steps == ["lambada, hf:fp8"] and len(Results.load(file).rows) == 3


def test_transformers_quantized_caches_are_measured_as_peers(llama: Any, letters: Any) -> None:
    """They can neither repeat rows nor be cropped, so each choice reads its own context."""
    pairs = [(TEXT[:150], choice) for choice in (" a", " b", " ab", " and so on")]
    alone = [score(llama, letters, [pair], scheme="hf:fp8")[0] for pair in pairs]
    lm = KvbitsLM(llama, tokenizer=letters, scheme="hf:fp8")
    answers = lm.loglikelihood(requests("loglikelihood", pairs), disable_tqdm=True)
    assert [x[0] for x in answers] == pytest.approx([x[0] for x in alone], abs=0.1)  # its one scale is of all rows
    assert lm.tally.packed_share == 1 and lm.tally.kernels == {"stock"}
    assert len(generate(lm, [TEXT[:100], TEXT[:40], "a"], max_gen_toks=4)) == 3
    exact = score(llama, letters, pairs, scheme="exact")
    assert answers != exact and [x[0] for x in answers] == pytest.approx([x[0] for x in exact], rel=0.05)


# -- the command line ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(llama: Any, letters: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and its tokenizer, and two files of samples."""
    path = tmp_path_factory.mktemp("tasks")
    llama.save_pretrained(path / "model")
    letters.save_pretrained(path / "model")
    write(write(path, "hellaswag", numbered("hellaswag", 4)), "lambada", numbered("lambada", 4))
    return path


def run(*arguments: str) -> tuple[int, str]:
    """Exit status and everything printed."""
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "160"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_the_command(folder: Path) -> None:
    arguments = ("tasks", str(folder / "model"), "--data", str(folder), "--json", str(folder / "out.json"))
    code, output = run(*arguments, "--tasks", "hellaswag, lambada", "--schemes", f"exact,{PACKED}", "--limit", "3")
    assert code == 0 and "hellaswag, 3 samples" in output and "lambada, 3 samples" in output
    assert f"of what was attended to under {PACKED} was packed" in output and "warning: hellaswag" in output
    results = Results.load(folder / "out.json")
    assert len(results.rows) == 2 * 2 + 2 * 2 and results.setting["data"] == folder.name
    assert {"model", "chunk", "limit", "batch", "lm_eval", "dtype", "processor"} <= set(results.setting)
    assert str(folder) not in json.dumps(results.setting)
    again, printed = run(*arguments, "--tasks", "lambada", "--schemes", "exact", "--limit", "3")
    assert again == 0 and "lambada, 3 samples" in printed and "lambada, exact" not in printed
    code, output = run(*arguments, "--tasks", "lambada", "--limit", "2")
    assert code == 2 and "was measured with limit=3, not 2" in output


WRONG = {
    "no tasks": ([], "no tasks; give some"),
    "unknown task": (["--tasks", "helloswag"], "unknown task 'helloswag'; near: hellaswag"),
    "no data": (["--tasks", "longbench_code"], "unknown task"),
    "unknown scheme": (["--tasks", "hellaswag", "--schemes", "int5"], "near: int8, int4"),
    "unknown peer": (["--tasks", "hellaswag", "--schemes", "hf:quanto5"], "did you mean 'hf:quanto4'"),
    "uncalibrated": (["--tasks", "hellaswag", "--schemes", "nuq3-1%"], "calibrat"),
    "no such folder": (["--tasks", "hellaswag", "--data", "nowhere"], "there is no folder nowhere"),
    "nowhere to write": (["--tasks", "hellaswag", "--json", "nowhere/out.json"], "there is no folder nowhere"),
}


@pytest.mark.parametrize(("arguments", "message"), WRONG.values(), ids=list(WRONG))
def test_mistakes_are_one_clear_line_before_a_model_is_loaded(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, index: Any
) -> None:
    monkeypatch.setattr("kvbits.cli.tasks.load", lambda *_: pytest.fail("a model was loaded"))
    code, output = run("tasks", "some-model", *arguments)
    assert code == 2 and message in output.replace("\n", " ") and output.count("error:") == 1


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The harness's own tasks, without the seconds that looking through all of them takes."""
    monkeypatch.setattr("lm_eval.tasks.TaskManager", type("Index", (), {"all_tasks": ["hellaswag", "gsm8k"]}))
    yield


def test_without_the_harness_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "kvbits.measure.harness")
    monkeypatch.delattr("kvbits.measure.harness")
    monkeypatch.setitem(sys.modules, "lm_eval.api.registry", None)
    for arguments in (("tasks", "--tasks", "hellaswag"), ("lm-eval", "--tasks", "hellaswag")):
        code, output = run(*arguments)
        assert code == 2 and "pip install 'kvbits[eval]'" in output and output.count("error:") == 1


@pytest.mark.parametrize(
    ("given", "handed"),
    [
        (["--tasks", "x", "--limit", "2"], ["--tasks", "x", "--limit", "2", "--model", "kvbits"]),
        (["run", "--model", "hf", "--tasks", "x"], ["run", "--model", "hf", "--tasks", "x"]),
        (["--model=hf", "--model_args", "a=b"], ["--model=hf", "--model_args", "a=b"]),
        (["ls", "tasks"], ["ls", "tasks"]),
        ([], []),
    ],
)
def test_the_harness_command_gets_its_arguments_and_our_model(
    given: list[str], handed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", lambda: seen.extend(sys.argv))
    monkeypatch.setattr(sys, "argv", ["kvbits"])
    main(given)
    assert seen == ["lm_eval", *handed]
    seen.clear()
    code, _ = run("lm-eval", *given)
    assert code == 0 and seen == ["lm_eval", *handed]


def test_importing_the_harness_module_is_what_adds_the_model_to_its_table() -> None:
    """In a process of its own, where nothing of ours is imported yet."""
    code = (
        "import lm_eval.models; from lm_eval.api.registry import get_model, model_registry as known; "
        "print('kvbits' in known); import kvbits.measure.harness; "
        "print(get_model('kvbits').__name__, get_model('dummy').__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == "False\nKvbitsLM DummyLM\n"
