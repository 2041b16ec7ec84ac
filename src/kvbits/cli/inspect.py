"""``kvbits inspect``: what a file of kvbits holds, from its header alone."""

from __future__ import annotations

import datetime
import json
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer

from kvbits.cli.common import attempt, fail, say
from kvbits.files import ABOUT, TENSORS, Calibration
from kvbits.files.sealed import Sealed
from kvbits.schemes.scheme import Scheme

_NOTE_CHARACTERS = 400


def inspect(
    path: Annotated[Path, typer.Argument(help="The file of a cache, or the folder of a calibration or of prefixes.")],
    tokenizer: Annotated[
        str | None, typer.Option(help="A model whose tokenizer turns the ids of a cache into text again.")
    ] = None,
    verify: Annotated[bool, typer.Option(help="Read all of it, and compare its digests.")] = False,
) -> None:
    """Say what a saved cache, a calibration or a store of prefixes holds, and whose it is, without loading it."""
    folder = path.parent if path.name in (ABOUT, TENSORS) else path
    if (folder / ABOUT).is_file():
        rows = _of_calibration(folder)
    elif path.is_dir():
        rows = _of_store(path)
    else:
        rows = attempt(_of_cache, path, tokenizer, verify, what=f"{path}: ")
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        for i, line in enumerate(text.splitlines() or [""]):
            shown = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line)
            say(f"{name if i == 0 else '':{width}}  {shown}")


def _of_calibration(folder: Path) -> list[tuple[str, str]]:
    found: Calibration = attempt(Calibration.load, folder)  # compares the digest, too
    about, size = found.about, sum(x.nbytes for x in found.tensors.values())
    return [
        ("calibration", str(folder)),
        ("model", f"{about['model']['class']}, {about['model']['dtype']}, {len(about['layers'])} layers"),
        ("text", f"{about['samples']} x {about['length']} tokens"),
        ("fitted", "\n".join(found.fits()) or "means only"),
        ("bytes", f"{size:,}"),
        ("written by", f"kvbits {about['kvbits']}"),
    ]


def _of_store(folder: Path) -> list[tuple[str, str]]:
    from kvbits.sessions.prefixes import files_of

    files = sorted(files_of(folder), key=lambda file: -file.used_ns)
    if not files:
        fail(f"{folder} is a folder, but neither of a calibration nor of prefixes")
    lines = [("prefixes", f"{folder}, {len(files)} caches, {sum(file.nbytes for file in files):,} bytes")]
    for file in files:
        try:
            about = Sealed(file.path).about
            of = f"{about['rows']['columns']:,} tokens, {Scheme.from_json(about['scheme'])}, {about['model']['class']}"
        except (OSError, ValueError, KeyError, TypeError) as error:
            of = str(error)
        used = datetime.datetime.fromtimestamp(file.used_ns / 1e9).isoformat(" ", "seconds")
        lines.append((file.path.name, f"{file.nbytes:,} bytes, {of}, used {used}"))
    return lines


def _of_cache(path: Path, tokenizer: str | None, verify: bool) -> list[tuple[str, str]]:
    file: Sealed = attempt(Sealed, path)
    if verify:
        attempt(file.verify)
    about, rows = file.about, file.about["rows"]
    model, nbytes = about["model"], about["nbytes"]
    known = ", ".join(f"{name} {size:,}" for name, size in nbytes.items() if size)
    found = [
        ("cache", f"{path}, {file.nbytes:,} bytes" + (", verified" if verify else "")),
        ("scheme", str(Scheme.from_json(about["scheme"]))),
        ("model", f"{model['class']}, {model['dtype']}, {len(about['layers'])} layers"),
        ("holds", f"{rows['batch']} x {rows['columns']:,} tokens"),
        ("layers", _layers(about["layers"])),
        ("in memory", f"{sum(nbytes.values()):,} bytes: {known}" if known else "0 bytes"),
        ("on disk", _on_disk(file)),
        ("ids", _ids(file, tokenizer)),
        ("saved", f"{about['saved']} by kvbits {about['kvbits']}"),
    ]
    if about["note"] is not None:
        text = json.dumps(about["note"], ensure_ascii=False)
        found.append(("note", text if len(text) <= _NOTE_CHARACTERS else f"{text[:_NOTE_CHARACTERS]}..."))
    return found


def _layers(states: list[dict[str, Any]]) -> str:
    """Equal neighbours on one line."""

    def described(state: dict[str, Any]) -> str:
        if "own" in state:
            return f"{state['type']}, the model's own"
        window = "" if state["window"] is None else f", window of {state['window']} tokens"
        if state["held"] is None:
            return f"{state['scheme']}{window}, empty"
        counts = "/".join(map(str, sorted(set(state["counts"]))))
        held = "/".join(map(str, sorted(set(state["held"]))))
        return f"{state['scheme']}{window}: {counts} blocks and {held} exact tokens a row"

    lines, first = [], 0
    for text, group in groupby(map(described, states)):
        count = len(list(group))
        lines.append(f"{first if count == 1 else f'{first}-{first + count - 1}'}: {text}")
        first += count
    return "\n".join(lines)


def _on_disk(file: Sealed) -> str:
    """Bytes of the file by kind of tensor."""
    kinds: Counter[str] = Counter()
    for name in file.names:
        kinds[name.partition(".")[2] if name[0].isdigit() else name.partition(".")[0]] += file.size(name)
    kinds["header"] = file.nbytes - sum(kinds.values())
    return ", ".join(f"{name} {size:,}" for name, size in kinds.most_common() if size)


def _ids(file: Sealed, tokenizer: str | None) -> str:
    attempt(file.verify, "tokens")
    ids = file.tensor("tokens")
    unknown = int((ids < 0).sum())
    text = f"{ids.numel() - unknown:,} known" + (f", {unknown:,} not" if unknown else "")
    if tokenizer is None:
        return text
    from kvbits.hf.loading import load_tokenizer

    words = attempt(load_tokenizer, tokenizer, what=f"cannot load the tokenizer of {tokenizer!r}: ")
    for row in ids.tolist():
        first, last = (words.decode([token for token in part if token >= 0]) for part in (row[:40], row[-20:]))
        text += f"\n{first!r} ... {last!r}" if len(row) > 60 else f"\n{words.decode([t for t in row if t >= 0])!r}"
    return text
