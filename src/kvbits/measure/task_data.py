"""Local data for tasks: which files each of ``task_files/*.yaml`` reads, and whether what stands in them will do.

The YAML files are lm-evaluation-harness's own kind. Two things in them are meant for here: ``data_files``, a pattern
below the folder with the data, and ``metadata: fields``, what each line must hold.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "task_files"
"""The task files; ``lm_eval --include_path`` takes it too."""

_KINDS: dict[str, type] = {"str": str, "int": int, "list": list}


@dataclass(frozen=True)
class LocalTask:
    """One task that reads a local file.

    Attributes:
        name: such as ``hellaswag``.
        pattern: of its file, below the folder with the data.
        fields: what each line must hold, by name.
        config: the harness's, as its ``ConfigurableTask`` takes it.
    """

    name: str
    pattern: str
    fields: Mapping[str, type]
    config: Mapping[str, Any]


@cache
def local_tasks() -> dict[str, LocalTask]:
    """All of them by name."""
    found = {}
    for file in sorted(FOLDER.glob("[!_]*.yaml")):
        config = {**_config(file), "task": file.stem}
        fields = {name: _KINDS[kind] for name, kind in config["metadata"]["fields"].items()}
        found[file.stem] = LocalTask(file.stem, config["dataset_kwargs"]["data_files"]["test"], fields, config)
    return found


def _config(file: Path) -> dict[str, Any]:
    """A task file as the harness reads it: over what it includes, and with its functions."""
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # a class of theirs, without annotations
        """Also knows ``!function module.name``, of a module beside the file."""

    Loader.add_constructor("!function", lambda loader, node: _function(node.value))
    own = yaml.load(file.read_text(encoding="utf-8"), Loader)
    base = own.pop("include", None)
    return own if base is None else {**_config(file.with_name(base)), **own}


def _function(name: str) -> Any:
    module, _, function = name.rpartition(".")
    return getattr(importlib.import_module(f"kvbits.measure.task_files.{module}"), function)


def read(task: LocalTask, folder: Path) -> list[dict[str, Any]]:
    """The samples of a task, each with its fields and nothing else.

    Raises:
        FileNotFoundError: for a folder or a file that is not there.
        ValueError: if several files fit, or a line is not what the task needs, naming the line.
    """
    file = _file(task, folder)
    samples = [_sample(task, where, line) for where, line in _lines(file)]
    if not samples:
        raise ValueError(f"{file} is empty; {task.name} needs lines of JSON with {_described(task)}")
    return samples


def _file(task: LocalTask, folder: Path) -> Path:
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}; --data names one with files such as {task.pattern}")
    found = sorted(folder.glob(task.pattern))
    if not found:
        raise FileNotFoundError(f"{folder} has no file {task.pattern}, which {task.name} reads: {_described(task)}")
    if len(found) > 1:
        names = ", ".join(str(file.relative_to(folder)) for file in found)
        raise ValueError(f"{task.name} reads one file {task.pattern}, but {folder} has {names}; leave one of them")
    return found[0]


def _lines(file: Path) -> Iterator[tuple[str, str]]:
    """The lines that are not blank, and where each stands."""
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not text in UTF-8: {error.reason} at byte {error.start}") from None
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield f"{file}, line {number}", line


def _sample(task: LocalTask, where: str, line: str) -> dict[str, Any]:
    try:
        sample = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is no JSON: {error}") from None
    if not isinstance(sample, dict):
        raise ValueError(f"{where} is no JSON object; {task.name} needs {_described(task)}")
    for name, kind in task.fields.items():
        if not _fits(sample.get(name), kind):
            raise ValueError(f"{where} has {name}={sample.get(name)!r:.60}; {task.name} needs {_described(task)}")
    if "gold" in task.fields and not 0 <= sample["gold"] < len(sample["choices"]):
        raise ValueError(f"{where} has gold={sample['gold']}, but choices 0 to {len(sample['choices']) - 1}")
    return {name: sample[name] for name in task.fields}


def _fits(value: Any, kind: type) -> bool:
    if kind is list:
        return isinstance(value, list) and bool(value) and all(isinstance(one, str) for one in value)
    return isinstance(value, kind) and not isinstance(value, bool)


def _described(task: LocalTask) -> str:
    words = {str: "a string", int: "a number", list: "a list of strings"}
    return ", ".join(f"{name} ({words[kind]})" for name, kind in task.fields.items())
