"""What is measured on: files of each kind, data sets by name, windows of them, and what is wrong with some."""

from __future__ import annotations

import io
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from kvbits.measure import text

DATA = Path(__file__).parents[3] / "shared" / "data"
RECORDS = [{"id": 0, "text": "First one."}, {"id": 1, "text": "Second,\nin two lines."}]


def jsonl(path: Path, *records: Any) -> Path:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")
    return path


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ("a.txt", "a.md", "a", "a.log"))
def test_plain_text_is_read_as_it_is(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_bytes("Größe\r\n\u2028end".encode())
    found = text.read(file)
    assert (found.name, found.content) == (name, "Größe\r\n\u2028end")
    file.write_bytes(b"\xef\xbb\xbf" + "Größe".encode())
    assert text.read(str(file)).content == "Größe"  # without a byte order mark


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=io.BytesIO("Größe".encode())))
    assert text.read("-") == text.Text("standard input", "Größe")


def test_documents_are_joined_by_blank_lines(tmp_path: Path) -> None:
    joined = "First one.\n\nSecond,\nin two lines."
    assert text.read(jsonl(tmp_path / "a.jsonl", *RECORDS)).content == joined
    other = [{"n": 1, "body": record["text"]} for record in RECORDS]
    assert text.read(jsonl(tmp_path / "b.jsonl", *other)).content == joined  # the only string
    both = [{"title": "T", "body": record["text"]} for record in RECORDS]
    file = jsonl(tmp_path / "c.jsonl", *both)
    assert text.read(file, "body").content == joined
    with pytest.raises(
        ValueError, match=r"c.jsonl, line 1 has no string in a field 'text'; it has strings in title, body"
    ):
        text.read(file)
    with pytest.raises(ValueError, match=r"no string in a field 'nothing'.*--field"):
        text.read(file, "nothing")
    file.write_text(f"\n{file.read_text()}\n  \n")
    assert text.read(file, "title").content == "T\n\nT"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", "line 2 is no JSON"),
        ('["a list"]', "line 2 is no object with a field of text, but list"),
        ('{"text": 3}', "line 2 has no string in a field 'text'; it has no strings, only text"),
        ("{}", "it has no strings, only nothing"),
    ],
)
def test_damaged_records_are_named(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(f'{{"text": "good"}}\n{line}\n')
    with pytest.raises(ValueError, match=message):
        text.read(file)


def test_parquet(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="parquet needs the eval extra")
    from pyarrow import parquet

    file = tmp_path / "a.parquet"
    parquet.write_table(arrow.table({"id": [0, 1, 2], "text": ["one", None, "three"]}), file)
    assert text.read(file).content == "one\n\nthree"
    assert text.read(file, "text").name == "a.parquet"
    with pytest.raises(ValueError, match="no string in a field 'id'; it has strings in text"):
        text.read(file, "id")
    for kind in ("large_string", "string_view"):
        parquet.write_table(arrow.table({"text": arrow.array(["one", "two"]).cast(getattr(arrow, kind)())}), file)
        assert text.read(file).content == "one\n\ntwo"
    parquet.write_table(arrow.table({"text": arrow.array(["one", "two", "one"]).dictionary_encode()}), file)
    assert text.read(file).content == "one\n\ntwo\n\none"  # as a table of pandas is written, for one
    file.write_bytes(b"PAR1 but damaged PAR1")
    with pytest.raises(ValueError, match=r"a\.parquet is no parquet file, or damaged"):
        text.read(file)


def test_what_is_missing_for_parquet_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"a\.parquet needs the package pyarrow: pip install 'kvbits\[eval\]'"):
        text.read(tmp_path / "a.parquet")


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no file .*gone\.txt"):
        text.read(tmp_path / "gone.txt")
    with pytest.raises(IsADirectoryError, match="is a folder; give a file"):
        text.read(tmp_path)
    for name, content, message in (
        ("empty.txt", b"", r"empty\.txt is empty"),
        ("blank.txt", b" \n\t\n", r"blank\.txt is empty"),
        ("none.jsonl", b"\n", r"none\.jsonl is empty"),
        ("half.jsonl", b'{"text": "a\\ud800b"}', r"half\.jsonl holds half a character, '\\ud800', which is no text"),
        ("binary.txt", b"good \xff\xfe", r"binary\.txt is not text in UTF-8: invalid start byte at byte 5"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=message):
            text.read(tmp_path / name)
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ValueError, match="read as plain text, which has no field 'body'"):
        text.read(tmp_path / "a.txt", "body")


# -- data sets ---------------------------------------------------------------------------------------------------------


def library(monkeypatch: pytest.MonkeyPatch, load: Any) -> None:
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load))


@pytest.mark.parametrize(("name", "documents"), [("wikitext2", 2000), ("c4", 1100), ("pg19", 10)])
def test_data_sets_are_loaded_by_name(monkeypatch: pytest.MonkeyPatch, name: str, documents: int) -> None:
    asked: list[Any] = []

    def load(path: str, **options: Any) -> Any:
        asked.append((path, options))
        return ({"text": f"document {i}"} for i in range(2000))

    library(monkeypatch, load)
    found = text.dataset(name)
    assert found.content.split("\n\n") == [f"document {i}" for i in range(documents)] and found.name == name
    ((path, options),) = asked
    assert path == text.DATASETS[name].path and options["split"] in ("test", "validation")
    assert options["streaming"] is (name != "wikitext2")  # of a large one, only the beginning is fetched


def test_a_data_set_that_cannot_be_had_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(path: str, **_: Any) -> Any:
        raise ConnectionError(f"Couldn't reach '{path}' on the Hub")

    library(monkeypatch, load)
    with pytest.raises(ValueError, match=r"cannot load c4 \(allenai/c4\): Couldn't reach.*local copy as a file"):
        text.dataset("c4")
    with pytest.raises(ValueError, match=r"unknown data set 'wikitext'; known are wikitext2, c4, pg19"):
        text.dataset("wikitext")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'kvbits\[eval\]'"):
        text.dataset("pg19")


def test_the_raw_file_of_wikitext_becomes_what_the_data_set_is() -> None:
    raw = " \n = Title = \n \n A line . \n"
    rows = ["", " = Title = \n", "", " A line . \n"]  # as the data set has them
    assert text.wikitext(raw).content == "\n\n".join(rows)


@pytest.mark.skipif(not DATA.is_dir(), reason="the evaluation data is not there")
def test_the_real_wikitext_has_as_many_rows_as_the_data_set() -> None:
    raw = text.read(DATA / "lm" / "wikitext2_test_raw.txt").content
    assert text.wikitext(raw).content.count("\n\n\n") > 1000
    assert len(raw.removesuffix("\n").split("\n")) == 4358


@pytest.mark.skipif(not DATA.is_dir(), reason="the evaluation data is not there")
def test_real_records_are_read() -> None:
    assert text.read(DATA / "lm" / "c4_validation_150.jsonl").content.count("\n\n") >= 149


def test_the_text_that_is_always_there() -> None:
    found = text.builtin()
    assert len(found.content) > 100_000 and found.content.startswith(text.prose(1000)) and len(text.prose(1000)) == 1000
    assert text.Text("a", "x").sha256 != text.Text("a", "y").sha256 == text.Text("b", "y").sha256


# -- windows -----------------------------------------------------------------------------------------------------------


class Words:
    """A tokenizer: one token a word; it may put a token before each text."""

    def __init__(self, first: int | None = None) -> None:
        self.bos_token_id, self.read = first, 0

    def __call__(self, content: str, add_special_tokens: bool = True, **_: Any) -> dict[str, list[int]]:
        ids = [int(word) for word in content.split()]
        self.read += len(content)
        return {"input_ids": [self.bos_token_id, *ids] if add_special_tokens and self.bos_token_id is not None else ids}


NUMBERS = " ".join(map(str, range(1000)))


def windows_of(tokenizer: Any, *given: Any, content: str = NUMBERS, **more: Any) -> torch.Tensor:
    return text.windows_of(content, tokenizer, *given, **more)


def test_windows_are_spread_or_from_the_start() -> None:
    assert windows_of(Words(), 4, 100)[:, 0].tolist() == [0, 200, 500, 700]
    assert torch.equal(windows_of(Words(), 4, 100, "start"), torch.arange(400).view(4, 100))
    begun = windows_of(Words(first=7), 2, 101, "start")
    assert begun[:, 0].tolist() == [7, 7] and torch.equal(begun[:, 1:], torch.arange(200).view(2, 100))


def test_windows_from_the_start_do_not_read_all_of_a_long_text() -> None:
    words = Words()
    assert torch.equal(windows_of(words, 1, 10, "start", content=NUMBERS * 50), torch.arange(10)[None])
    assert words.read < 5000
    wide = (" " * 200).join(map(str, range(50)))  # tokens that are longer than any assumed
    assert torch.equal(windows_of(Words(), 2, 10, "start", content=wide), torch.arange(20).view(2, 10))


@pytest.mark.parametrize("placement", text.PLACEMENTS)
def test_too_little_text_says_what_would_fit(placement: str) -> None:
    with pytest.raises(ValueError, match=r"has 1000 tokens, enough for 3 windows of 300.*windows 3, or length 250"):
        windows_of(Words(), 4, 300, placement)
    with pytest.raises(
        ValueError, match=r"has 1000 tokens, enough for 0 windows of 2000; .*longer text, or length 1000"
    ):
        windows_of(Words(), 1, 2000, placement)


def test_impossible_windows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"placement='end' is unknown; allowed are spread, start"):
        windows_of(Words(), 1, 10, "end")
    with pytest.raises(ValueError, match="length 600 is more than the 512 tokens that the model was made for"):
        windows_of(Words(), 1, 600, longest=512)
    with pytest.raises(ValueError, match="0 windows of 10 tokens are none"):
        windows_of(Words(), 0, 10)
