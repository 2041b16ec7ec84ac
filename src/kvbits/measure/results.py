"""The file that every measurement writes: one kind of rows, and the setting that they were measured in.

::

    {"format": 1, "kind": "quality", "setting": {"model": ..., "date": ..., ...}, "rows": [{"scheme": ..., ...}, ...]}

A row of a scheme that failed has ``"error"`` with the reason, and none of the figures. A file is replaced as a whole or
not at all, so an interrupted measurement keeps the rows it had; :meth:`Results.resume` goes on with them where the
setting is the same in all that bears on figures.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvbits.files import replacing

FORMAT = 1
KEYS = {
    "quality": ("scheme", "regime"),
    "retrieval": ("scheme", "task", "length", "depth"),
    "tasks": ("scheme", "task", "metric"),
    "speed": ("scheme", "weights", "dtype", "batch", "context"),
}
"""Of each kind, what makes two rows of one setting the same measurement."""
KINDS = tuple(KEYS)

_SIDE = {"date", "command", "kvbits", "python", "schemes"}
"""Of a setting: what may differ between two runs whose rows stand in one file."""


@dataclass
class Results:
    """Rows of one kind. ``setting`` and each row are plain JSON data."""

    kind: str
    setting: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"{self.kind!r} is no kind of results; known are {', '.join(KINDS)}")

    def save(self, path: str | Path) -> Path:
        """Write the file, in place of one that is there. What another run has put there meanwhile is kept.

        Raises:
            ValueError: if what is there is of another kind or setting, as :meth:`resume`.
        """
        path = Path(path)
        there = [row for row in Results.resume(path, self.kind, self.setting).rows if "error" not in row]
        self.rows = list({self._key(row): row for row in (*there, *self.rows)}.values())
        data = {"format": FORMAT, "kind": self.kind, "setting": self.setting, "rows": self.rows}
        with replacing(path) as beside:
            beside.write_text(written(data), encoding="utf-8")
        return path

    @classmethod
    def load(cls, path: str | Path) -> Results:
        """Read what :meth:`save` has written.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: for a file that is damaged, of a later release, or something else.
        """
        path = Path(path)
        if not path.is_file():
            what = f"{path} is a folder or a device, no file" if path.exists() else f"there is no file {path}"
            raise FileNotFoundError(what)
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is no file of results, or damaged: {error}") from None
        if not isinstance(data, Mapping) or not {"format", "kind", "setting", "rows"} <= set(data):
            raise ValueError(
                f"{path} is no file of results: 'kvbits eval --json' and 'kvbits bench --json' write those"
            )
        if data["format"] > FORMAT:
            raise ValueError(f"{path} has format {data['format']}; this release reads up to {FORMAT}: update kvbits")
        try:
            return cls(data["kind"], dict(data["setting"]), [dict(row) for row in data["rows"]])
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from None

    @classmethod
    def resume(cls, path: str | Path | None, kind: str, setting: dict[str, Any]) -> Results:
        """The results in a file, to go on with, or empty ones where there is no such file.

        Raises:
            ValueError: if the file is of another kind or setting, naming what differs.
        """
        if path is None or not Path(path).exists():
            return cls(kind, setting)
        found = cls.load(path)
        if found.kind != kind:
            raise ValueError(f"{path} has results of the kind {found.kind!r}, not {kind!r}; give another file")
        here, there = _core(setting), _core(found.setting)
        unknown = {name for name in here if name.endswith("_sha256") and name not in there}  # an older release wrote it
        differing = [name for name in {**here, **there} if here.get(name) != there.get(name) and name not in unknown]
        if differing:
            name = differing[0]
            more = f", and {len(differing) - 1} more differ" if len(differing) > 1 else ""
            raise ValueError(
                f"{path} was measured with {name}={there.get(name)!r}, not {here.get(name)!r}{more}; give another "
                "file, or delete this one to measure anew"
            )
        return cls(kind, setting, found.rows)

    def find(self, **wanted: Any) -> dict[str, Any] | None:
        """The first row without an error whose fields are these."""
        for row in self.rows:
            if "error" not in row and all(row.get(name) == value for name, value in wanted.items()):
                return row
        return None

    def put(self, row: dict[str, Any]) -> None:
        """Add a row, in place of one of the same measurement."""
        self.rows = [other for other in self.rows if self._key(other) != self._key(row)] + [row]

    def _key(self, row: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(row.get(name) for name in KEYS[self.kind])


def written(data: Mapping[str, Any]) -> str:
    """Results as JSON: a line for each row, and one for each other field.

    Raises:
        ValueError: for NaN and infinity, which JSON does not have.
    """

    def line(value: Any) -> str:
        return json.dumps(value, allow_nan=False)

    parts = {name: line(value) for name, value in data.items()}
    if data.get("rows"):
        parts["rows"] = "[\n  " + ",\n  ".join(map(line, data["rows"])) + "\n ]"
    return "{\n" + ",\n".join(f" {line(name)}: {text}" for name, text in parts.items()) + "\n}\n"


def missing_figures(row: Mapping[str, Any]) -> list[str]:
    """Which figures of a row are None, a line for each reason: ``no ppl, ppl_se: too large for a number``."""
    found = row.get("missing")
    if not isinstance(found, Mapping):  # of a file that something else has written
        return []
    by_reason: dict[str, list[str]] = {}
    for name, why in found.items():
        by_reason.setdefault(str(why), []).append(str(name))
    return [f"no {', '.join(names)}: {why}" for why, names in by_reason.items()]


def _core(setting: Mapping[str, Any]) -> dict[str, Any]:
    """What of a setting bears on figures, as JSON would read it back."""
    return dict(json.loads(json.dumps({name: value for name, value in setting.items() if name not in _SIDE})))
