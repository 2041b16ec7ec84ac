"""What is read: a file, standard input, a data set by name, or the text that comes with Python; and windows of it.

The documents of a source are joined by blank lines, as is usual for WikiText-2 (GPTQ, arXiv 2210.17323).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvbits.calibration.text import sample_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BETWEEN = "\n\n"
FIELD = "text"
"""The field of a record that is read where nothing else is said."""

PLACEMENTS = ("spread", "start")
"""Windows evenly spaced over the whole text, or one after the other from its beginning."""

_CHARACTERS_PER_TOKEN = 64
"""More than a token of prose ever has: so much of a long text is enough for windows from its start."""


@dataclass(frozen=True)
class Text:
    """A text and what it is called in results."""

    name: str
    content: str

    def __post_init__(self) -> None:
        if not self.content.strip():
            raise ValueError(f"{self.name} is empty: there is no text to measure on")
        try:
            self.content.encode()
        except UnicodeEncodeError as error:  # JSON can hold it, as \ud800
            half = self.content[error.start]
            raise ValueError(f"{self.name} holds half a character, {half!r}, which is no text in UTF-8") from None

    @property
    def sha256(self) -> str:
        """Digest of the content in UTF-8."""
        return hashlib.sha256(self.content.encode()).hexdigest()


@dataclass(frozen=True)
class _Source:
    """Where a data set lies, and how much of it is read.

    Attributes:
        path, options: for ``datasets.load_dataset``.
        documents: how many from its beginning; None is all.
    """

    path: str
    options: dict[str, Any]
    documents: int | None = None


DATASETS = {
    "wikitext2": _Source("Salesforce/wikitext", {"name": "wikitext-2-raw-v1", "split": "test"}),
    "c4": _Source(
        "allenai/c4",
        {"data_files": {"validation": "en/c4-validation.00000-of-00008.json.gz"}, "split": "validation"},
        documents=1100,  # as GPTQ and those who compare with it
    ),
    "pg19": _Source("emozilla/pg19", {"split": "test"}, documents=10),  # books
}
"""Texts that others publish figures on, by the names that ``--dataset`` takes."""


# -- sources -----------------------------------------------------------------------------------------------------------


def read(source: str | Path, field: str | None = None) -> Text:
    """Read a file: plain text, or documents in ``.jsonl`` (one object a line) or ``.parquet``.

    Args:
        source: a path; ``-`` is plain text from standard input.
        field: of a record, that holds its text. Default: ``text``, or else the only field with strings.

    Raises:
        FileNotFoundError, IsADirectoryError: if there is no such file.
        ValueError: for an empty file, one that is not UTF-8, records that are damaged or without such a field, or a
            field named for what has none.
        ImportError: for parquet where ``pyarrow`` is not installed.
    """
    path = Path(source)
    if str(source) == "-":
        return Text("standard input", _decoded(sys.stdin.buffer.read(), "standard input"))
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; give a file, such as one of {path / '*.txt'}")
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}")
    kind = path.suffix.lower()
    if kind == ".parquet":
        return Text(path.name, BETWEEN.join(_of_parquet(path, field)))
    content = _decoded(path.read_bytes(), str(path))
    if kind in (".jsonl", ".ndjson"):
        return Text(path.name, BETWEEN.join(_of_jsonl(content, path, field)))
    if field is not None:
        raise ValueError(f"{path} is read as plain text, which has no field {field!r}; records are .jsonl or .parquet")
    return Text(path.name, content)


def _decoded(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not text in UTF-8: {error.reason} at byte {error.start}") from None


def _of_jsonl(content: str, path: Path, field: str | None) -> list[str]:
    found: list[str] = []
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where} is no JSON: {error}") from None
        if not isinstance(record, dict):
            raise ValueError(f"{where} is no object with a field of text, but {type(record).__name__}")
        strings = [name for name, value in record.items() if isinstance(value, str)]
        field = _chosen(field, strings, list(record), where)
        found.append(record[field])
    return found


def _of_parquet(path: Path, field: str | None) -> list[str]:
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError:
        raise ImportError(f"reading {path.name} needs the package pyarrow: pip install 'kvbits[eval]'") from None
    try:
        schema = parquet.read_schema(path)
        text = [name for name in schema.names if _holds_strings(arrow, schema.field(name).type)]
        field = _chosen(field, text, schema.names, str(path))
        column = parquet.read_table(path, columns=[field]).column(field).to_pylist()
    except arrow.ArrowException as error:
        raise ValueError(f"{path} is no parquet file, or damaged: {error}") from None
    return [value for value in column if value is not None]


def _holds_strings(arrow: Any, kind: Any) -> bool:
    kind = kind.value_type if arrow.types.is_dictionary(kind) else kind
    return bool(arrow.types.is_string(kind) or arrow.types.is_large_string(kind) or arrow.types.is_string_view(kind))


def _chosen(field: str | None, strings: list[str], all_fields: list[str], where: str) -> str:
    """Which field of a record is its text."""
    if field is None:
        field = FIELD if FIELD in strings or len(strings) != 1 else strings[0]
    if field in strings:
        return field
    have = f"no strings, only {', '.join(all_fields) or 'nothing'}"
    if strings:
        have = f"strings in {', '.join(strings)}: name the field with --field"
    raise ValueError(f"{where} has no string in a field {field!r}; it has {have}")


def dataset(name: str) -> Text:
    """A data set of :data:`DATASETS`, through the library ``datasets`` (online, or from its cache).

    Raises:
        ValueError: for an unknown name, or where it cannot be loaded, as without a network.
        ImportError: where ``datasets`` is not installed.
    """
    if name not in DATASETS:
        raise ValueError(f"unknown data set {name!r}; known are {', '.join(DATASETS)}. Any other: give its file")
    source = DATASETS[name]
    try:
        import datasets
    except ImportError:
        raise ImportError(
            f"{name} is loaded with the package datasets: pip install 'kvbits[eval]'; a local copy needs none"
        ) from None
    try:
        options = {**source.options, "streaming": source.documents is not None}
        rows: Iterable[dict[str, Any]] = datasets.load_dataset(source.path, **options)
        documents = [row[FIELD] for row in itertools.islice(rows, source.documents)]
    except Exception as error:  # a network fails in many ways, and each library beneath has its own errors
        raise ValueError(
            f"cannot load {name} ({source.path}): {error}. Without a network, give a local copy as a file: .txt, "
            ".jsonl or .parquet"
        ) from None
    return Text(name, BETWEEN.join(documents))


def wikitext(raw: str, name: str = "wikitext2") -> Text:
    """The raw file of WikiText-2 (``wiki.test.raw``) in the form that :func:`dataset` gives and others measure on.

    A row is a line, with its end, or nothing where a line is blank; rows are joined as documents are.
    """
    lines = raw.removesuffix("\n").split("\n")
    return Text(name, BETWEEN.join("" if not line.strip() else f"{line}\n" for line in lines))


def prose(characters: int | None = None) -> str:
    """Real English on any machine: Python's own help topics, about 100,000 tokens, or their first ``characters``."""
    from pydoc_data.topics import topics

    return BETWEEN.join(topics[name] for name in sorted(topics) if len(topics[name]) > 2000)[:characters]


def builtin() -> Text:
    """:func:`prose` as a :class:`Text`. It differs from one release of Python to another."""
    return Text("Python's help topics", prose())


# -- windows -----------------------------------------------------------------------------------------------------------


def windows_of(
    text: str,
    tokenizer: PreTrainedTokenizerBase,
    windows: int,
    length: int,
    placement: str = "spread",
    longest: int | None = None,
) -> torch.Tensor:
    """Token ids, int64 ``[windows, length]``, each window beginning with what the tokenizer puts before a text.

    Args:
        text: all of it.
        tokenizer: the model's.
        windows, length: how many, of how many tokens.
        placement: ``spread`` evenly over the text, or one after the other from its ``start``.
        longest: tokens that the model was made for, if that is known.

    Raises:
        ValueError: for no windows, windows longer than the model was made for, or too little text, with what fits.
    """
    if placement not in PLACEMENTS:
        raise ValueError(f"placement={placement!r} is unknown; allowed are {', '.join(PLACEMENTS)}")
    spread = placement == "spread"
    enough = text[: _CHARACTERS_PER_TOKEN * max(1, windows) * max(1, length)]
    if not spread and len(enough) < len(text):
        try:
            return sample_ids(enough, tokenizer, windows, length, longest, what="windows", spread=False)
        except ValueError:
            pass  # said once more below, of the whole text
    return sample_ids(text, tokenizer, windows, length, longest, what="windows", spread=spread)
