"""Joins files of results: by model, kind and setting, so that only figures that may be compared stand side by side.

Two files are of one :class:`Run` where their model, their kind and all of their setting that bears on figures are the
same. Versions and dates may differ, and for all kinds but speed the machine: a run says where they do. Where one run
has the same thing measured twice, the later row counts (by date, then by the order given), but a failure never takes
the place of figures. Rows that others replaced are kept apart.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from kvbits.measure.pairs import pair_rows
from kvbits.measure.results import FORMAT, KEYS, KINDS, Results
from kvbits.schemes.scheme import Scheme

Row: TypeAlias = dict[str, Any]

NUMBERS = {
    "ppl", "ppl_se", "kl_mean", "kl_se", "kl_median", "kl_p999", "top1", "bits_per_element", "bits_at_8000", "kv_bytes",
    "peak_bytes", "seconds", "length", "depth", "repeats", "accuracy", "accuracy_low", "accuracy_high", "logprob",
    "logprob_exact", "agreement", "value", "stderr", "samples", "packed_share", "p_value", "wins", "losses", "batch",
    "context", "prefill_tokens_per_second", "first_token_seconds", "step_ms", "step_ms_low", "step_ms_high",
    "decode_tokens_per_second", "flush_ms", "speed_against_exact",
}  # fmt: skip
"""Fields of rows that are numbers, or missing."""

_VERSIONS = {"date", "command", "commit", "kvbits", "python", "torch", "transformers", "lm_eval"}
_MACHINE = {"processor", "cores", "device", "instructions"}
_GRID = {
    "quality": {"schemes"},
    "retrieval": {"schemes", "tasks", "lengths", "depths"},
    "tasks": {"schemes", "tasks"},
    "speed": {"schemes", "weights", "dtypes", "batches", "batch", "contexts", "context"},
}
"""Of a setting: what was measured, which each row says of itself."""

_CALIBRATION = ("calibration_sha256", "calibration")
"""Of a setting: which calibration there was. It bears on the rows of schemes that take one, and on no others."""


@dataclass
class Run:
    """Rows that may be compared with each other.

    Attributes:
        kind: one of :data:`kvbits.measure.results.KINDS`.
        model: its name.
        settings: by file, the earliest first.
        rows: each with the ``source``, that is the file, and the ``date`` it is from.
        replaced: rows that were measured again later.
    """

    kind: str
    model: str
    settings: dict[str, dict[str, Any]]
    rows: list[Row] = field(default_factory=list)
    replaced: list[Row] = field(default_factory=list)

    @property
    def figures(self) -> list[Row]:
        """The rows that did not fail."""
        return [row for row in self.rows if not failed(row)]

    @property
    def failures(self) -> list[Row]:
        """The others: each has an ``error``."""
        return [row for row in self.rows if failed(row)]

    @property
    def dates(self) -> list[str]:
        """Those of the rows, the earliest first, each once."""
        return sorted({row["date"] for row in self.rows if row["date"]})

    @property
    def setting(self) -> dict[str, Any]:
        """What is the same in all files."""
        return {name: found[0] for name, found in self._values().items() if len(found) == 1}

    @property
    def varying(self) -> dict[str, list[Any]]:
        """What is not, each with its values; without what rows say of themselves."""
        free = {"command", "date", *_GRID[self.kind]}
        return {name: found for name, found in self._values().items() if len(found) > 1 and name not in free}

    def _values(self) -> dict[str, list[Any]]:
        every = self.settings.values()
        names = dict.fromkeys(name for setting in every for name in setting)
        return {name: list({_text(x.get(name)): x.get(name) for x in every}.values()) for name in names}


@dataclass(frozen=True)
class Measured:
    """All that is known of one model: of each kind its runs, the widest and newest first."""

    model: str
    runs: dict[str, list[Run]]

    def main(self, kind: str) -> Run | None:
        """The run of a kind that the recommendation is made from."""
        runs = self.runs.get(kind)
        return runs[0] if runs else None

    @property
    def all_runs(self) -> list[Run]:
        return [run for kind in KINDS for run in self.runs.get(kind, [])]


def read(paths: Iterable[str | Path]) -> list[tuple[str, Results]]:
    """The results in files, and in all ``.json`` files of folders, each with the name of its file.

    A ``report.json`` that an earlier report wrote gives back what it was made from.

    Raises:
        FileNotFoundError: for a path where nothing is, and for a folder without ``.json`` files.
        ValueError: for a file that has no results, and for numbers that are none.
    """
    found: list[tuple[str, Results]] = []
    for path in (file for given in paths for file in _files(Path(given))):
        found += _of_report(path) if _is_report(path) else [(path.name, Results.load(path))]
    times: dict[str, int] = {}
    for place, (source, results) in enumerate(found):
        _check(source, results)
        times[source] = times.get(source, 0) + 1
        if times[source] > 1:
            found[place] = (f"{source} ({times[source]})", results)
    return found


def merge(found: Iterable[tuple[str, Results]]) -> list[Measured]:
    """Results of any files, models and settings as one list of models, in the order in which they first appear."""
    parts: dict[str, list[tuple[str, Results]]] = {}
    for source, results in found:
        parts.setdefault(_identity(results), []).append((source, results))
    runs = [_joined(group) for group in parts.values()]
    models: dict[str, dict[str, list[Run]]] = {}
    for run in sorted(
        runs, key=lambda run: (len({row["scheme"] for row in run.figures}), run.dates[-1:]), reverse=True
    ):
        models.setdefault(run.model, {}).setdefault(run.kind, []).append(run)
    order = dict.fromkeys(run.model for run in runs)
    return [Measured(model, models[model]) for model in order]


def failed(row: Row) -> bool:
    """Whether a row has the reason of a failure in place of figures."""
    return row.get("error") is not None


def differing(runs: list[Run]) -> list[dict[str, Any]]:
    """Of each run of one kind, what of its setting keeps it apart; digests only where nothing else does."""
    names = dict.fromkeys(name for run in runs for name in run.setting if name not in _free(run.kind))
    apart = [name for name in names if len({_text(run.setting.get(name)) for run in runs}) > 1]
    named = [name for name in apart if not name.endswith("_sha256")] or apart
    return [{name: run.setting.get(name) for name in named} for run in runs]


def numbered(runs: Iterable[Run]) -> list[tuple[int, Run]]:
    """Runs with their number among those of their kind, from 1."""
    counts: dict[str, int] = {}
    found = []
    for run in runs:
        counts[run.kind] = counts.get(run.kind, 0) + 1
        found.append((counts[run.kind], run))
    return found


def _joined(group: list[tuple[str, Results]]) -> Run:
    """One run of the files of one identity. A row that stands in two files, as after a merge, counts once."""
    group = sorted(group, key=lambda pair: _date(pair[1].setting))
    kind = group[0][1].kind
    once: dict[str, Row] = {}
    for source, results in group:
        for row in results.rows:
            dated = {**row, "date": str(row.get("date") or _date(results.setting))} | _calibration(row, results.setting)
            once.setdefault(_text(dated), {**dated, "source": source})
    used = {row["source"] for row in once.values()}
    settings = {source: results.setting for source, results in group if source in used or not used}
    run = Run(kind, _model(group[0][1].setting), settings)
    places: dict[str, int] = {}
    for row in sorted(once.values(), key=lambda row: str(row["date"])):
        key = [row.get(name) for name in (*KEYS[kind], "calibration")]
        place = places.setdefault(_text(key), len(run.rows))
        if place == len(run.rows):
            run.rows.append(row)
        elif failed(row) and not failed(run.rows[place]):
            run.replaced.append(row)
        else:
            run.replaced.append(run.rows[place])
            run.rows[place] = row
    if kind == "tasks":
        pair_rows(run.figures)  # a scheme and the exact cache may stand in files of their own
    return run


def _identity(results: Results) -> str:
    """What two files of one run have in common, as text."""
    core = {name: value for name, value in results.setting.items() if name not in _free(results.kind)}
    return _text([results.kind, _model(results.setting), core])


def _free(kind: str) -> set[str]:
    """Fields of a setting in which the files of one run may differ."""
    return _VERSIONS | _GRID[kind] | set(_CALIBRATION) | (set() if kind == "speed" else _MACHINE)


def _calibration(row: Row, setting: Mapping[str, Any]) -> dict[str, Any]:
    """Which calibration a row was measured with, where its scheme takes one and it does not say so itself."""
    found = next((setting[name] for name in _CALIBRATION if setting.get(name)), None)
    return {"calibration": found} if found and "calibration" not in row and calibrates(row.get("scheme")) else {}


def calibrates(scheme: Any) -> bool:
    """Whether a scheme, if it is one of kvbits, takes anything from a calibration."""
    try:
        parsed = Scheme.parse(str(scheme))
    except ValueError:
        return False
    return parsed.needs_calibration or parsed.centred


def _model(setting: Mapping[str, Any]) -> str:
    return str(setting.get("model") or setting.get("architecture") or "unnamed model")


def _date(setting: Mapping[str, Any]) -> str:
    return str(setting.get("date") or "")


def _text(data: Any) -> str:
    return json.dumps(data, sort_keys=True)


# -- files -------------------------------------------------------------------------------------------------------------


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(path.glob("*.json"))
    if not files:
        raise FileNotFoundError(f"there is no .json file in the folder {path}")
    return files


def _is_report(path: Path) -> bool:
    """Whether a file is a report's own; what is wrong with one that is nothing, ``Results.load`` says."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(data, Mapping) and data.get("kind") == "report"


def _of_report(path: Path) -> list[tuple[str, Results]]:
    data = json.loads(path.read_text(encoding="utf-8"))
    if data.get("format", 0) > FORMAT:
        raise ValueError(f"{path} has format {data['format']}; this release reads up to {FORMAT}: update kvbits")
    try:
        return [
            (source, Results(run["kind"], dict(setting), _rows_of(run, source)))
            for model in data["models"]
            for run in model["runs"]
            for source, setting in run["settings"].items()
        ]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is a damaged report: {error}") from None


def _rows_of(run: Mapping[str, Any], source: str) -> list[Row]:
    rows = [dict(row) for row in (*run["replaced"], *run["rows"]) if row["source"] == source]
    return [{name: value for name, value in row.items() if name != "source"} for row in rows]


def _check(source: str, results: Results) -> None:
    """Refuse rows without a scheme, and fields that should be numbers and are none."""
    for name, value in results.setting.items():
        _refuse_infinite(f"{source}: the setting's {name!r}", value)
    for place, row in enumerate(results.rows, 1):
        where = f"{source}, row {place}"
        if not isinstance(row.get("scheme"), str) or not row["scheme"]:
            raise ValueError(f"{where} names no scheme: {_text(row)[:80]}")
        for name, value in row.items():
            _refuse_infinite(f"{where} ({row['scheme']}): {name!r}", value)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if name in NUMBERS and value is not None and not number:
                raise ValueError(f"{where} ({row['scheme']}): {name!r} is {value!r}, not a number")


def _refuse_infinite(what: str, value: Any) -> None:
    if isinstance(value, (int, float)) and not -1e300 < value < 1e300:
        raise ValueError(f"{what} is {value}: a figure must be finite, and one that could not be computed is left out")
    for one in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        _refuse_infinite(what, one)
