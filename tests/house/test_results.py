"""Files of results: what two runs that write one file keep, and what one file never mixes."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from command_line import TEXT, run
from kvbits.measure.results import KEYS, Results
from kvbits.measure.setting import model_name, setting, shortened

COMMANDS = {
    "eval": ["--schemes", "exact", "--length", "40", "--windows", "1"],
    "retrieval": ["--schemes", "exact", "--lengths", "400"],
    "tasks": ["--tasks", "lambada", "--schemes", "exact"],
    "bench": ["--schemes", "exact", "--context", "64"],
}
KIND = {"eval": "quality", "retrieval": "retrieval", "tasks": "tasks", "bench": "speed"}


def row(kind: str, scheme: str, **more: Any) -> dict[str, Any]:
    return {**dict.fromkeys(KEYS[kind], 1), "scheme": scheme, **more}


@pytest.mark.parametrize("kind", KEYS)
def test_two_runs_that_write_one_file_keep_each_others_rows(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    one, other = (Results.resume(file, kind, {"chunk": 16}) for _ in range(2))
    one.put(row(kind, "int4", figure=1))
    one.put(row(kind, "int2", error="no"))
    one.save(file)
    other.put(row(kind, "int4", figure=2))
    other.put(row(kind, "kivi2", figure=3))
    other.save(file)
    one.put(row(kind, "int8", figure=4))
    one.save(file)
    found = [(row["scheme"], row.get("figure")) for row in Results.load(file).rows]
    assert found == [("int4", 1), ("kivi2", 3), ("int2", None), ("int8", 4)]


def test_a_file_has_one_line_for_each_row(tmp_path: Path) -> None:
    results = Results("quality", {"model": "m", "texts": {"a": [1, 2]}})
    for count in range(3):
        text = results.save(tmp_path / "out.json").read_text()
        assert len(text.splitlines()) == 6 + (count + 1 if count else 0)
        assert [json.loads(x.strip(",")) for x in text.splitlines() if x.startswith('{"')] == results.rows
        assert Results.load(tmp_path / "out.json") == results
        results.put(row("quality", f"int{count}\n", figure=[0.1, None, {"漢": 1}]))
    with pytest.raises(ValueError, match="JSON"):
        Results("quality", {"nan": float("nan")}).save(tmp_path / "other.json")
    assert not (tmp_path / "other.json").exists()


def test_a_run_never_writes_over_another_setting(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    one, other = (Results.resume(file, "quality", {"chunk": chunk}) for chunk in (16, 8))
    one.put(row("quality", "int4"))
    one.save(file)
    before = file.read_bytes()
    with pytest.raises(ValueError, match="was measured with chunk=16, not 8"):
        other.save(file)
    assert file.read_bytes() == before


def test_rows_of_other_weights_are_not_gone_on_with(tmp_path: Path) -> None:
    """A finetune has the name of its folder, its class and its shape in common with what it was made from."""
    file, model = tmp_path / "out.json", zoo.build("llama")
    Results("speed", setting(model, model="m")).save(file)
    Results.resume(file, "speed", setting(model, model="m"))
    with torch.no_grad():
        model.get_input_embeddings().weight += 1
    with pytest.raises(ValueError, match="weights_sha256"):
        Results.resume(file, "speed", setting(model, model="m"))
    data = json.loads(file.read_text())
    del data["setting"]["weights_sha256"]  # of a release that did not say
    file.write_text(json.dumps(data))
    Results.resume(file, "speed", setting(model, model="m"))


def test_a_model_has_one_name_however_it_is_given(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports join the results of all commands by it."""
    path = Path(folder)
    monkeypatch.chdir(path)
    (path / "model.gguf").touch()
    for given in (folder, f"{folder}/", ".", f"../{path.name}"):
        assert model_name(given) == path.name
    assert model_name("model.gguf") == model_name("./model.gguf") == "model.gguf"
    assert model_name("org/model") == "org/model" and model_name("smollm2") == "smollm2"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_calls_a_model_the_same(folder: str, tmp_path: Path, command: str) -> None:
    sample = {"context": "word1 word2", "target": "word3"}
    (tmp_path / "lambada.jsonl").write_text(json.dumps(sample))
    (tmp_path / "book.txt").write_text(TEXT)
    options = {
        "eval": ["--text", str(tmp_path / "book.txt")],
        "tasks": ["--data", str(tmp_path)],
        "bench": ["--no-peak", "--steps", "4", "--prefills", "1"],
        "retrieval": ["--repeats", "1", "--tasks", "passkey", "--haystack", str(tmp_path / "book.txt")],
    }
    file = tmp_path / "out.json"
    code, output = run(command, folder, *COMMANDS[command], *options[command], "--json", str(file))
    assert code == 0, output
    assert Results.load(file).setting["model"] == Path(folder).name


@pytest.fixture(scope="module")
def hollow(folder: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model without weights: whoever loads it has another error."""
    path = tmp_path_factory.mktemp("hollow") / "model"
    shutil.copytree(folder, path, ignore=shutil.ignore_patterns("*.safetensors"))
    return str(path)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("wrong", ["a folder", "another kind", "damaged"])
def test_where_results_cannot_go_is_said_before_a_model_is_loaded(
    hollow: str, tmp_path: Path, command: str, wrong: str
) -> None:
    file = tmp_path / "out.json"
    if wrong == "a folder":
        file.mkdir()
    elif wrong == "damaged":
        file.write_text("{")
    else:
        Results(next(kind for kind in KEYS if kind != KIND[command]), {}).save(file)
    code, output = run(command, hollow, *COMMANDS[command], "--json", str(file))
    said = {"a folder": "a folder or a device", "another kind": "results of another kind", "damaged": "or damaged"}
    assert code == 2 and said[wrong] in output and output.count("error:") == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_that_cannot_be_written_is_said_before_a_model_is_loaded(
    hollow: str, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    def refuse(dir: Path) -> Any:
        raise PermissionError(13, "Permission denied", str(dir))

    monkeypatch.setattr("kvbits.cli.common.tempfile.TemporaryFile", refuse)
    code, output = run(command, hollow, *COMMANDS[command], "--json", "out.json")
    assert code == 2 and "--json out.json: cannot write into the folder .: permission denied" in output


# -- what is read elsewhere names no folders of this machine -----------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "short"),
    [("/a/b.txt", "b.txt"), ("wiki=/a/b.txt+../c/d+~/e/f", "wiki=b.txt+d+f"), ("./z", "z"), ("~/model", "model"),
     ("--out", "--out"), ("k=int4,v=fp8", "k=int4,v=fp8"), ("org/model", "org/model")],
)  # fmt: skip
def test_words_of_a_command_are_told_without_folders(word: str, short: str) -> None:
    assert shortened(word) == short


@pytest.mark.parametrize(
    "file", sorted((Path(__file__).parents[2] / "bench" / "results").glob("*.json")), ids=lambda file: file.stem
)
def test_committed_results_name_no_folders(file: Path) -> None:
    command = json.loads(file.read_text(encoding="utf-8"))["setting"]["command"]
    assert not re.search(r"(^|[\s=+])(~|\.{0,2})/", command)
