"""The tables, as cells that HTML and Markdown both write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvbits.measure.results import missing_figures
from kvbits.report import words
from kvbits.report.choose import Choice
from kvbits.report.merge import Measured, Row, Run, differing, failed, numbered
from kvbits.report.standing import Standing, one_shot, warnings_of
from kvbits.report.words import real


@dataclass(frozen=True)
class Column:
    """A heading. ``left`` is for words, ``long`` for whole sentences of them, ``code`` for names of schemes."""

    name: str
    about: str = ""
    left: bool = False
    code: bool = False
    long: bool = False


@dataclass(frozen=True)
class Cell:
    """A text, what it is sorted by, and ``good``, ``warn`` or ``bad`` where it should be seen."""

    text: str
    value: float | str | None = None
    mark: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of as many cells as there are columns. ``marked`` are rows to set off."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    marked: frozenset[int] = frozenset()
    note: str = ""


@dataclass(frozen=True)
class Field:
    """A column that shows one or a few fields of a row. ``names`` decide if there is anything to show."""

    column: Column
    names: tuple[str, ...]
    write: Callable[[Row], str]


def _number(name: str, field: str, write: Callable[[float | None], str], about: str = "") -> Field:
    return Field(Column(name, about), (field,), lambda row: write(real(row, field)))


def _text(name: str, field: str, about: str = "", code: bool = False) -> Field:
    return Field(Column(name, about, left=True, code=code), (field,), lambda row: words.plain(row.get(field)))


def _digits(digits: int) -> Callable[[float | None], str]:
    return lambda value: words.decimal(value, digits)


def _kl_spread(row: Row) -> str:
    return words.small_spread(real(row, "kl_mean"), real(row, "kl_se"))


def _ppl_spread(row: Row) -> str:
    return words.spread(real(row, "ppl"), real(row, "ppl_se"), 2)


def _range(low: str, high: str, factor: float, digits: int) -> Callable[[Row], str]:
    def write(row: Row) -> str:
        ends = real(row, low), real(row, high)
        if ends[0] is None or ends[1] is None:
            return words.NONE
        return f"{factor * ends[0]:,.{digits}f} to {factor * ends[1]:,.{digits}f}"

    return write


_SCHEME = _text("scheme", "scheme", code=True)
_KERNEL = _text("kernel", "kernel", "What computed attention: a kernel on the bits, decoded tensors, or the stock one.")
_BITS = _number("bits", "bits_per_element", words.decimal, "Bits per element of K and V in the live cache, all stored.")
_KV = _number("KV cache", "kv_bytes", words.size, "Bytes that the cache really holds.")
_PEAK = _number("peak memory", "peak_bytes", words.size, "The most memory in use.")
_SECONDS = _number("seconds", "seconds", _digits(1))
_CALIBRATED = Field(
    Column("calibration", "The beginning of its digest.", left=True),
    ("calibration",),
    lambda row: str(row.get("calibration") or words.NONE)[:8],
)

FIELDS: dict[str, tuple[Field, ...]] = {
    "quality": (
        _SCHEME,
        _number("bits at 8k", "bits_at_8000", words.decimal, "Bits per element after 8,000 tokens, all stored."),
        _BITS,
        Field(Column("KL ± se", "Mean KL divergence to the exact cache, nats."), ("kl_mean",), _kl_spread),
        _number("KL median", "kl_median", words.small),
        _number("KL 99.9 %", "kl_p999", words.small, "The KL that one token in a thousand exceeds."),
        _number("same token", "top1", words.percent, "How often the likeliest next token is that of the exact cache."),
        Field(Column("PPL ± se", "Perplexity."), ("ppl",), _ppl_spread),
        _KV,
        _PEAK,
        _SECONDS,
        _KERNEL,
        _CALIBRATED,
    ),
    "speed": (
        _SCHEME,
        _text("weights", "weights"),
        _text("dtype", "dtype"),
        _number("batch", "batch", words.whole),
        _number("context", "context", words.whole, "Tokens."),
        _number("prefill", "prefill_tokens_per_second", words.whole, "Tokens a second."),
        _number("first token", "first_token_seconds", _digits(2), "Seconds."),
        _number("step", "step_ms", _digits(1), "Milliseconds of a decode step, the median."),
        Field(Column("step spread", "Milliseconds."), ("step_ms_low",), _range("step_ms_low", "step_ms_high", 1, 1)),
        _number("decode", "decode_tokens_per_second", _digits(1), "Tokens a second."),
        _number("against exact", "speed_against_exact", words.times, "Above 1: faster than the exact cache."),
        _text("faster from", "break_even", "The context from which on it is faster than the exact cache."),
        _number("flush", "flush_ms", _digits(1), "Milliseconds of a step that packs."),
        _KV,
        _BITS,
        _PEAK,
        _KERNEL,
        _CALIBRATED,
    ),
    "retrieval": (
        _SCHEME,
        _text("task", "task"),
        _number("length", "length", words.whole, "Tokens."),
        _number("depth", "depth", lambda value: words.percent(value, 0), "Where in the text the needle lies."),
        _number("repeats", "repeats", words.whole),
        _number("accuracy", "accuracy", lambda value: words.percent(value, 0)),
        Field(Column("interval", "Per cent."), ("accuracy_low",), _range("accuracy_low", "accuracy_high", 100, 0)),
        _number("log p", "logprob", _digits(2), "Of the right answer, mean over its tokens, nats."),
        _number("log p, exact", "logprob_exact", _digits(2), "The same with the exact cache."),
        _number("agreement", "agreement", words.percent, "Answers that the exact cache gets right, and this one too."),
        _BITS,
        _KV,
        _SECONDS,
        _KERNEL,
        _CALIBRATED,
    ),
    "tasks": (
        _SCHEME,
        _text("task", "task"),
        _text("metric", "metric"),
        Field(
            Column("value ± se"), ("value",), lambda row: words.spread(real(row, "value"), real(row, "stderr"), 3)
        ),
        _number("samples", "samples", words.whole),
        _number("wins", "wins", words.whole, "Samples that only this scheme gets right, not the exact cache."),
        _number("losses", "losses", words.whole, "Samples that only the exact cache gets right."),
        _number("p", "p_value", words.chance, "McNemar's test against the exact cache."),
        _number("packed", "packed_share", lambda x: words.percent(x, 0), "Of what was read, the share in few bits."),
        _KERNEL,
        _CALIBRATED,
    ),
}  # fmt: skip
"""Columns of each kind; those that no row of a table has are left out."""


def verdicts(choice: Choice) -> Table:
    """All schemes of a model, one row each, with what the rule says of it."""
    bits = "bits at 8k" if choice.bits_field == "bits_at_8000" else "bits"
    columns = (
        Column("scheme", code=True, left=True),
        Column("verdict", "What the rule says.", left=True),
        Column(bits, "Bits per element of K and V, everything stored."),
        Column("KL ± se", "Mean KL divergence to the exact cache, nats."),
        Column("same token", "How often the likeliest next token is that of the exact cache."),
        Column("speed", "Of decoding, against the exact cache, at the longest context measured."),
        Column("retrieval", "Mean accuracy."),
    )
    rows = []
    for one in choice.standings:
        row = one.quality or {}
        verdict, mark = _verdict(one, choice)
        rows.append(
            (
                Cell(one.scheme, one.scheme),
                Cell(verdict, verdict, mark),
                Cell(words.decimal(one.bits), one.bits),
                Cell(_kl_spread(row), one.kl),
                Cell(words.percent(one.top1), one.top1),
                Cell(words.times(one.speed), one.speed),
                Cell(words.percent(one.found, 0), one.found),
            )
        )
    marked = frozenset(place for place, one in enumerate(choice.standings) if one is choice.take)
    return _narrowed(Table("All schemes", columns, rows, marked), keep=(0, 1, 2, 3, 4))


def _verdict(one: Standing, choice: Choice) -> tuple[str, str]:
    """What the rule says of a scheme, in words, and whether that is good."""
    if one.exact:
        return "the yardstick", ""
    if one is choice.take:
        return "take this one", "good"
    if one.failures and one.quality is None:
        return "failed", "bad"
    if one.failed:
        return f"fails {', '.join(one.failed)}", ""
    if one.point is None:
        return "quality not measured" if one.kl is None else "bits not measured", "warn"
    return "good, but for a warning" if one.warnings else "good, in more bits", "warn" if one.warnings else ""


def rows_of(run: Run, rows: Sequence[Row], title: str) -> Table:
    """Rows of one kind as they were measured; failures and warnings are words at the end of their row."""
    fields = [
        field for field in FIELDS[run.kind] if any(row.get(name) is not None for row in rows for name in field.names)
    ]
    said = [words.cut("; ".join(_remarks(row))) for row in rows]
    some = any(said)
    columns = [field.column for field in fields] + ([Column("remarks", left=True, long=True)] if some else [])
    found = []
    for row, remark in zip(rows, said, strict=True):
        cells = [Cell(field.write(row), _sort_value(field, row)) for field in fields]
        found.append(cells + ([Cell(remark, mark="bad" if failed(row) else "warn")] if some else []))
    return Table(title, columns, found, note=_note(run))


def of_run(run: Run) -> list[Table]:
    """The tables of a run; rows of quality of the flattering regime have one of their own."""
    if run.kind != "quality":
        return [rows_of(run, run.rows, run.kind.capitalize())]
    plain, shot = ([row for row in run.rows if one_shot(row) == apart] for apart in (False, True))
    titles = ((plain, "Quality"), (shot, "Quality in one shot: flattering, and not for comparison"))
    return [rows_of(run, rows, title) for rows, title in titles if rows]


def settings(runs: Sequence[Run]) -> Table:
    """What the runs of a model were measured in: a column for each run, a row for each field."""
    names = list(dict.fromkeys(name for run in runs for setting in run.settings.values() for name in setting))
    names = [name for name in names if name != "model"]
    heads = [
        run.kind if alone else f"{run.kind} {place}"
        for (place, run), alone in zip(numbered(runs), _alone(runs), strict=True)
    ]
    columns = [Column("", left=True), *(Column(head, left=True, long=True) for head in heads)]
    rows = [[Cell("files"), *(Cell(", ".join(run.settings)) for run in runs)]]
    rows.append([Cell("rows"), *(Cell(_rows_in_words(run)) for run in runs)])
    for name in names:
        cells = [Cell(name)]
        for run in runs:
            values = list({words.plain(x[name]): None for x in run.settings.values() if x.get(name) is not None})
            cells.append(Cell("; ".join(values) or words.NONE, mark="warn" if name in run.varying else ""))
        rows.append(cells)
    return Table("Settings", columns, rows)


def apart(measured: Measured, run: Run) -> str:
    """What tells a run from the others of its kind: ``text: C4, windows: 2``; nothing where it is the only one."""
    runs = measured.runs[run.kind]
    return words.plain(differing(runs)[runs.index(run)]) if len(runs) > 1 else ""


def remarks(measured: Measured) -> list[tuple[str, str]]:
    """Every failure, warning and difference of setting of a model: what it is about, and what it says, each once."""
    about: dict[tuple[str, str], dict[str, None]] = {}
    for run in measured.all_runs:
        for row in sorted(run.rows, key=failed, reverse=True):
            for text in _remarks(row):
                about.setdefault((run.kind, text), {})[row["scheme"]] = None
        for name, values in run.varying.items():
            about[run.kind, f"rows differ in {name}: {words.listed(list(map(words.plain, values)))}"] = {}
        if run.replaced:
            about[run.kind, _replaced(run)] = {}
    return [(_subject(kind, list(schemes)), text) for (kind, text), schemes in about.items()]


def _alone(runs: Sequence[Run]) -> list[bool]:
    """Of each run, whether no other is of its kind."""
    kinds = [run.kind for run in runs]
    return [kinds.count(kind) == 1 for kind in kinds]


def _rows_in_words(run: Run) -> str:
    return f"{len(run.rows)}, {len(run.failures)} failed" if run.failures else str(len(run.rows))


def _replaced(run: Run) -> str:
    bad = sum(map(failed, run.replaced))
    again = len(run.replaced) - bad
    parts = [f"{again} measured again later" if again else "", f"{bad} failed in another file" if bad else ""]
    return f"rows left out: {words.listed([part for part in parts if part])}; report.json has them"


def _note(run: Run) -> str:
    return words.listed(
        [f"{name}: {words.listed(list(map(words.plain, values)))}" for name, values in run.varying.items()]
    )


def _remarks(row: Row) -> list[str]:
    """What a row says besides figures: why it failed, what it warns of, what to do, and why a figure is missing."""
    found = [f"failed: {row['error']}"] if failed(row) else []
    found += [*warnings_of(row), *([str(row["advice"])] if row.get("advice") else [])]
    return list(map(words.cut, found + missing_figures(row)))


def _subject(kind: str, schemes: list[str]) -> str:
    """``quality of a, b and 3 more``."""
    shown = schemes if len(schemes) <= 4 else [*schemes[:3], f"{len(schemes) - 3} more"]
    return f"{kind} of {words.listed(shown)}" if shown else kind


def _sort_value(field: Field, row: Row) -> Any:
    value = row.get(field.names[0])
    return value if isinstance(value, (int, float, str)) else None


def _narrowed(table: Table, keep: Sequence[int]) -> Table:
    """Without columns in which nothing was measured."""
    full = [x for x in range(len(table.columns)) if x in keep or any(row[x].text != words.NONE for row in table.rows)]
    rows = [[row[x] for x in full] for row in table.rows]
    return Table(table.title, [table.columns[x] for x in full], rows, table.marked, table.note)
