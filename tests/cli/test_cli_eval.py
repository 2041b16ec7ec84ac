"""``kvbits eval``: its table and file, and what a user can get wrong, most of it before a model is loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from command_line import TEXT, run
from kvbits.cli import evaluate
from kvbits.measure import caches, quality
from kvbits.measure.results import Results

SCHEME = "int4,residual=16,block=32"
SHORT = ("--windows", "2", "--length", "96", "--schemes", f"exact,{SCHEME},hf:fp8")


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("text") / "book.txt"
    file.write_text(TEXT)
    return str(file)


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may load weights."""

    def load(*_: Any, **__: Any) -> Any:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(evaluate, "load_model", load)


def test_a_table_and_a_file(folder: str, book: str, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    code, output = run("eval", folder, *SHORT, "--text", book, "--json", str(file), "--one-shot")
    assert code == 0, output
    assert "2 x 96 tokens of book.txt (spread) in chunks of 16" in output and f"written to {file}" in output
    results = Results.load(file)
    assert results.kind == "quality" and results.setting["model"] == Path(folder).name
    assert (results.setting["text"], results.setting["chunk"], results.setting["length"]) == ("book.txt", 16, 96)
    wanted = [
        "hf:dynamic",
        *(name for scheme in ("exact", SCHEME, "hf:fp8") for name in (scheme, f"{scheme} one-shot")),
    ]
    assert [row["scheme"] + " one-shot" * (row["regime"] != "chunked") for row in results.rows] == wanted
    assert all(f"\n {name} " in output.replace("(1)", "   ") or name in output for name in wanted)
    assert "of the keys that queries attended to were packed" in output and "says nothing of the cache" in output
    fields = {"scheme", "ppl", "ppl_se", "kl_mean", "kl_median", "kl_p999", "top1", "bits_per_element", "kv_bytes",
              "peak_bytes", "seconds", "kernel"}  # fmt: skip
    assert all(fields <= set(row) for row in results.rows)


def test_the_same_command_measures_nothing_again(folder: str, book: str, tmp_path: Path) -> None:
    command = ("eval", folder, *SHORT, "--text", book, "--json", str(tmp_path / "out.json"))
    assert run(*command)[0] == 0
    before = (tmp_path / "out.json").read_bytes()
    code, output = run(*command)
    assert code == 0 and SCHEME in output
    assert (tmp_path / "out.json").read_bytes() == before, "something was measured: its seconds are others"
    code, output = run(*command, "--chunk", "8")
    assert code == 2 and "was measured with chunk=16, not 8" in output


def test_records_and_standard_input_give_the_same(folder: str, book: str, tmp_path: Path) -> None:
    file = tmp_path / "book.jsonl"
    file.write_text(json.dumps({"id": 1, "body": TEXT}))
    tokens = []
    for number, source in enumerate((book, str(file), "-")):
        out = tmp_path / f"{number}.json"
        given = ("--text", source, "--schemes", "exact", "--windows", "1", "--length", "40", "--json", str(out))
        assert run("eval", folder, *given, text=TEXT if source == "-" else None)[0] == 0
        tokens.append(Results.load(out).setting["tokens_sha256"])
    assert len(set(tokens)) == 1


@pytest.mark.parametrize("keeps", (True, False))
def test_an_interruption_says_how_to_go_on(
    folder: str, book: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keeps: bool
) -> None:
    def interrupt(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(quality, "measure", interrupt)
    file = tmp_path / "out.json"
    code, output = run("eval", folder, *SHORT, "--text", book, *(["--json", str(file)] if keeps else []))
    assert code != 0 and "Traceback" not in output
    assert (f"the same command goes on from the rows in {file}" if keeps else "with --json FILE") in output


WRONG = {
    "unknown scheme": (["--schemes", "exact,int5"], "near: int8, int4"),
    "unknown peer": (["--schemes", "hf:quanto3"], "did you mean 'hf:quanto"),
    "an option first": (["--schemes", "residual=64,int4"], "no scheme stands before it"),
    "an empty list": (["--schemes", ""], "has an empty scheme"),
    "no calibration": (["--schemes", "nuq3-1%"], "needs a calibration"),
    "a calibration that is not there": (["--schemes", "nuq3-1%", "--calibration", "no-such"], "no-such"),
    "nothing packed": (["--schemes", "int4", "--length", "128"], "would pack nothing that is read again"),
    "one chunk": (["--chunk", "2048"], "holds a whole window"),
    "no windows": (["--windows", "0"], "--windows"),
    "no chunk": (["--chunk", "0"], "--chunk"),
    "missing file": (["--text", "no-such.txt"], "there is no file no-such.txt"),
    "a folder": (["--text", "."], "is a folder"),
    "two texts": (["--text", "a.txt", "--dataset", "c4"], "not both"),
    "a field of no file": (["--field", "body"], "give it with --text"),
    "unknown data set": (["--dataset", "wikitext"], "known are wikitext2, c4, pg19"),
    "no folder for the results": (["--json", "no-such-folder/out.json"], "no-such-folder"),
    "unknown dtype": (["--dtype", "int4"], "allowed are auto, float32, bfloat16, float16"),
    "unknown device": (["--device", "nowhere"], "nowhere"),
    "unknown placement": (["--placement", "end"], "allowed are spread, start"),
    "more than the model was made for": (["--length", "1000"], "more than the 512 tokens"),
    "too little text": (["--length", "400", "--windows", "400", "--schemes", "exact"], "enough for"),
}


@pytest.mark.parametrize(("arguments", "expected"), WRONG.values(), ids=list(WRONG))
@pytest.mark.usefixtures("unloaded")
def test_what_is_wrong_is_said_before_a_model_is_loaded(folder: str, arguments: list[str], expected: str) -> None:
    code, output = run("eval", folder, *arguments)
    assert code == 2
    assert expected in output and "Traceback" not in output and len(output.splitlines()) < 12


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("empty.txt", b"", "is empty"),
        ("binary.txt", b"\xff\xfe\x00", "is not text in UTF-8"),
        ("bad.jsonl", b"{", "line 1 is no JSON"),
        ("short.txt", b"word1 word2", "enough for 0 windows of 400; give a longer text\n"),
    ],
)
def test_texts_that_are_none(folder: str, tmp_path: Path, name: str, content: bytes, expected: str) -> None:
    (tmp_path / name).write_bytes(content)
    code, output = run("eval", folder, "--length", "400", "--schemes", "exact", "--text", str(tmp_path / name))
    assert code == 2 and expected in output and "Traceback" not in output


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("not json", "is no file of results, or damaged"),
        ('{"rows": []}', "is no file of results"),
        ('{"format": 1, "kind": "speed", "setting": {}, "rows": []}', "results of another kind"),
        ('{"format": 99, "kind": "quality", "setting": {}, "rows": []}', "update kvbits"),
    ],
)
def test_a_file_that_holds_something_else_is_left_alone(
    folder: str, tmp_path: Path, content: str, expected: str
) -> None:
    file = tmp_path / "out.json"
    file.write_text(content)
    code, output = run("eval", folder, "--schemes", "exact", "--length", "40", "--json", str(file))
    assert code == 2 and expected in output and file.read_text() == content


@pytest.mark.usefixtures("unloaded")
def test_a_model_without_a_tokenizer(folder: str, tmp_path: Path) -> None:
    for file in Path(folder).iterdir():
        if "token" not in file.name:
            shutil.copy(file, tmp_path / file.name)
    code, output = run("eval", str(tmp_path), "--schemes", "exact", "--length", "40")
    assert code == 2 and "has a model, but no tokenizer that can be loaded, and text needs one" in output


def test_figures_that_are_missing_for_one_reason_are_one_note() -> None:
    why = "the surprise of 9 of 9 tokens is no finite number"
    row = {"scheme": "int4", "missing": {"ppl": why, "peak_bytes": "unknown here", "ppl_se": why}, "warnings": ["mind"]}
    assert evaluate.notes(row) == ["mind", f"no ppl, ppl_se: {why}", "no peak_bytes: unknown here"]


def test_where_all_schemes_fail_the_command_fails(folder: str, book: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make = caches.make

    def fail(model: Any, name: str, *given: Any) -> Any:
        if name != caches.EXACT:
            raise ImportError("no such library")
        return make(model, name, *given)

    monkeypatch.setattr(caches, "make", fail)
    code, output = run("eval", folder, *SHORT, "--text", book)
    assert code == 2 and output.count("ImportError: no such library") == 1
    assert "every scheme failed; the reasons stand above" in output


@pytest.mark.usefixtures("unloaded")
def test_options_that_eval_once_had_name_the_commands_that_have_them(folder: str) -> None:
    for given in (
        ["--tasks", "lambada", "--data", "folder"],
        ["--limit", "5"],
        ["--retrieval=passkey", "--windows", "4"],
    ):
        code, output = run("eval", folder, *given)
        assert code == 2 and "'kvbits tasks'" in output and "'kvbits retrieval'" in output, given
    assert not {"--tasks", "--data", "--limit", "--retrieval"} & set(run("eval", "--help")[1].split())


def test_no_such_model() -> None:
    code, output = run("eval", "no/such-model", "--schemes", "exact")
    assert code == 2 and "no/such-model" in output and "Traceback" not in output


def rows() -> list[dict[str, Any]]:
    figures = {
        "ppl": 23.2368, "ppl_se": 1.1153, "nll_change": 0.00543, "nll_change_se": 0.00121, "kl_mean": 0.006089,
        "kl_se": 0.0032, "kl_median": 0.0012, "kl_p999": 0.4772, "top1": 0.97217, "bits_per_element": 11.468,
        "bits_at_8000": 4.9114, "kv_bytes": 16_900_000, "peak_bytes": 1_160_000_000, "seconds": 39.5,
        "kernel": "kernel native", "warnings": [],
    }  # fmt: skip
    return [
        {"scheme": "hf:dynamic", "regime": "chunked", **figures, "kl_mean": 4e-9, "bits_at_8000": None},
        {"scheme": "exact", "regime": "chunked", **figures, "kl_mean": 0.0},
        {"scheme": "k=int4-channel-gs64,v=int4", "regime": "chunked", **figures, "warnings": ["mind the gap"]},
        {"scheme": "int4", "regime": "one-shot", **figures, "warnings": ["says nothing"]},
        {"scheme": "hf:hqq4", "regime": "chunked", "error": "ImportError: no hqq"},
    ]


@pytest.mark.parametrize(("width", "shown", "hidden"), [(80, "KV MB", "peak MB"), (150, "peak MB", "\t")])
def test_the_table_fits_its_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int, shown: str, hidden: str
) -> None:
    monkeypatch.setattr(evaluate, "out", Console(width=width))
    setting = {
        "model": "m",
        "dtype": "float32",
        "windows": 4,
        "length": 1024,
        "text": "t",
        "placement": "start",
        "chunk": 16,
    }
    names = [row["scheme"] for row in rows()]
    evaluate.show(Results("quality", setting, rows()), names, True)
    output = capsys.readouterr().out
    assert all(len(line) <= width for line in output.splitlines()) and "…" not in output
    assert shown in output and hidden not in output
    for cell in ("4e-09", "0.00609", "23.24 ± 1.12", "97.2 %", "11.47", "16.9", "failed", "int4 one-shot",
                 "(1) mind the gap", "(2) says nothing", "(3) ImportError: no hqq"):  # fmt: skip
        assert cell in " ".join(output.split()), cell
    evaluate.show(Results("quality", setting, rows()), names[:1], False)
    assert "one-shot" not in capsys.readouterr().out  # of a file that has more, what was asked for
