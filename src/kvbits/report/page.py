"""The page: one HTML file that needs nothing else, neither the network nor scripts."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterable, Sequence
from importlib import resources
from string import Template
from typing import Any

from kvbits.report import tables, words
from kvbits.report.choose import Choice, Rule
from kvbits.report.drawing import NEEDED, Drawing, available, svg
from kvbits.report.hero import hero
from kvbits.report.markup import Safe, data, joined, tag
from kvbits.report.merge import Measured, Run
from kvbits.report.palette import css
from kvbits.report.pictures import against_context, heat_maps, pictures, scatters
from kvbits.report.scatter import NARROW
from kvbits.report.standing import LONG
from kvbits.report.tables import Cell, Column, Table

SHOWN = {"pair": 4, "maps": 6}
"""Pictures of a kind that are seen at once; more of them open on demand."""

MOST_ROWS, MOST_PICTURES, MOST_REMARKS, MOST_DATA = 1500, 120, 200, 600_000
"""What a page holds, so that it weighs less than 3 MB whatever it is made of: rows of tables, small pictures, failures
and warnings, and bytes of data to take out again. What is left out is said, and is in report.json."""

PER_SAMPLE = {"scores", "hits", "texts", "answers"}
"""Fields of rows that hold something for each sample, and are in report.json only."""

Heading = Callable[[str], Safe]


def page(models: Sequence[Measured], choices: Sequence[Choice], rule: Rule, everything: dict[str, Any]) -> str:
    """The text of ``index.html``.

    Args:
        models: what was measured.
        choices: what the rule made of each.
        rule: the rule.
        everything: plain data that goes into the page for whoever wants to take it out again.
    """
    script = _file("script.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    one = len(models) == 1
    title = f"Which KV cache for {models[0].model}?" if one else f"Which KV cache for these {len(models)} models?"
    packed = data(_light(everything))
    return Template(_file("template.html")).substitute(
        title=joined([title]),
        policy=f"'sha256-{digest}'",
        style=css() + _file("style.css"),
        body=_Body(models, rule).whole(title, choices),
        data=packed if len(packed) <= MOST_DATA else "null",
        script=script,
    )


class _Body:
    """What stands between header and footer, within the bounds of a page."""

    def __init__(self, models: Sequence[Measured], rule: Rule) -> None:
        self.models, self.rule = models, rule
        runs = [run for measured in models for run in measured.all_runs]
        schemes = [len({row["scheme"] for run in measured.all_runs for row in run.rows}) for measured in models]
        self.most_rows = fair([len(run.rows) for run in runs] + schemes, MOST_ROWS)
        self.most_pictures = fair([pictures(run) for run in runs], MOST_PICTURES)
        self.most_remarks = fair([len(tables.remarks(measured)) for measured in models], MOST_REMARKS)

    def whole(self, title: str, choices: Sequence[Choice]) -> Safe:
        if len(self.models) == 1:
            sub = tag("p", _measured_on(self.models[0]), class_="sub")
            return joined([_header(title, sub), self._model(self.models[0], choices[0], 2)])
        links = [tag("a", measured.model, href=f"#model-{place}") for place, measured in enumerate(self.models)]
        parts = [_header(title), tag("nav", *links, aria_label="models"), _overview(self.models, choices)]
        for place, (measured, choice) in enumerate(zip(self.models, choices, strict=True)):
            sub = tag("p", _measured_on(measured), class_="sub")
            heading = tag("header", tag("h2", measured.model), sub, class_="model")
            parts.append(tag("article", heading, self._model(measured, choice, 3), id=f"model-{place}"))
        return joined(parts)

    def _model(self, measured: Measured, choice: Choice, level: int) -> Safe:
        def heading(text: str) -> Safe:
            return tag(f"h{level}", text)

        drawn = available()
        return joined(
            [
                hero(choice, self.rule),
                _quality(measured, choice, self.rule, heading) if drawn else tag("p", NEEDED, class_="note"),
                _card(heading("All schemes"), self._table(tables.verdicts(choice))),
                self._speed(measured, choice, heading) if drawn else None,
                self._retrieval(measured, choice, heading) if drawn else None,
                self._tasks(measured, heading),
                self._remarks(measured, heading),
                self._figures(measured, heading),
            ]
        )

    def _speed(self, measured: Measured, choice: Choice, heading: Heading) -> Safe | None:
        parts = []
        for run in measured.runs.get("speed", []):
            figures = list(map(_figure, against_context(run, choice)))
            if figures:
                parts += [_apart(measured, run), *self._some(figures, "pair", "pictures")]
        return _card(heading("Speed and memory against context"), *parts) if parts else None

    def _retrieval(self, measured: Measured, choice: Choice, heading: Heading) -> Safe | None:
        parts = []
        for run in measured.runs.get("retrieval", []):
            parts.append(_apart(measured, run))
            for task, drawings in heat_maps(run, choice):
                parts += [tag("p", task, class_="task"), *self._some(list(map(_figure, drawings)), "maps", "schemes")]
        said = "Per cent found, by how deep in the text the answer lies (down) and how long the text is (across)."
        return _card(heading("Retrieval"), tag("p", said, class_="about"), *parts) if parts else None

    def _some(self, figures: Sequence[Safe], kind: str, what: str) -> Iterable[Safe]:
        """Pictures in a grid: a few, then more that open on demand, then the number of those left out."""
        shown = SHOWN[kind]
        yield tag("div", *figures[:shown], class_=kind)
        rest, left = figures[shown : self.most_pictures], len(figures) - max(shown, self.most_pictures)
        if rest:
            yield tag("details", tag("summary", f"{len(rest)} more {what}"), tag("div", *rest, class_=kind))
        if left > 0:
            yield tag("p", f"{left} {what} are left out here; report.json has them.", class_="note")

    def _tasks(self, measured: Measured, heading: Heading) -> Safe | None:
        parts = []
        for run in measured.runs.get("tasks", []):
            parts += [_apart(measured, run), self._table(tables.rows_of(run, run.rows, "Tasks"))]
        return _card(heading("Tasks"), *parts) if parts else None

    def _remarks(self, measured: Measured, heading: Heading) -> Safe | None:
        found = tables.remarks(measured)
        items = [tag("li", tag("b", what), ": ", text) for what, text in found[: self.most_remarks]]
        if len(found) > len(items):
            items.append(tag("li", f"{len(found) - len(items)} more are left out here; report.json has them."))
        return (
            tag("section", heading("Failures and warnings"), tag("ul", *items), class_="card remarks")
            if items
            else None
        )

    def _figures(self, measured: Measured, heading: Heading) -> Safe:
        """Every figure and every setting, closed at first."""
        parts = []
        for run in measured.all_runs:
            for shown in tables.of_run(run) if run.kind != "tasks" else []:
                parts.append(_closed(_with(shown.title, tables.apart(measured, run)), self._table(shown)))
        parts.append(_closed("Settings", self._table(tables.settings(measured.all_runs))))
        return _card(heading("All figures"), *parts)

    def _table(self, shown: Table) -> Safe:
        left = len(shown.rows) - self.most_rows
        note = f"{left} more rows are left out here; report.json has them." if left > 0 else ""
        notes = [tag("p", text, class_="note") for text in (shown.note, note) if text]
        return joined([table(shown, self.most_rows), *notes])


def fair(sizes: Sequence[int], most: int) -> int:
    """The largest part that each of some lists may show, so that all of them together show at most ``most``."""
    left, parts = most, len(sizes)
    for size in sorted(sizes):
        if size * parts > left:
            return left // parts
        left, parts = left - size, parts - 1
    return most


def _light(value: Any) -> Any:
    """Plain data without what is of single samples."""
    if isinstance(value, dict):
        return {name: _light(x) for name, x in value.items() if name not in PER_SAMPLE}
    return [_light(x) for x in value] if isinstance(value, list) else value


# -- pieces ------------------------------------------------------------------------------------------------------------


def _header(title: str, *more: Safe) -> Safe:
    return tag("header", tag("p", "kvbits report", class_="eyebrow"), tag("h1", title), *more, class_="top")


def _card(*inside: object) -> Safe:
    return tag("section", *inside, class_="card")


def _figure(drawing: Drawing) -> Safe:
    return tag("figure", tag("figcaption", drawing.caption) if drawing.caption else None, svg(drawing))


def _closed(title: str, inside: Safe) -> Safe:
    return tag("details", tag("summary", title), inside)


def _with(title: str, apart: str) -> str:
    return f"{title} ({apart})" if apart else title


def _apart(measured: Measured, run: Run) -> Safe | None:
    text = tables.apart(measured, run)
    return tag("p", text, class_="apart") if text else None


def _measured_on(measured: Measured) -> str:
    """Machine, text and dates in a line."""
    runs = measured.all_runs
    dates = sorted({date for run in runs for date in run.dates})
    schemes = {row["scheme"] for run in runs for row in run.rows}
    parts = [f"{len(schemes)} schemes" if len(schemes) > 1 else "1 scheme"]
    setting = {name: value for run in reversed(runs) for name, value in run.setting.items()}
    machine = setting.get("device")
    parts += [str(setting.get("processor") or "") if machine in (None, "cpu") else str(machine)]
    text, windows, length = (setting.get(name) for name in ("text", "windows", "length"))
    if text:
        parts.append(
            f"{words.plain(text)}, {windows} × {words.plain(length)} tokens" if windows and length else str(text)
        )
    parts.append(dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}" if dates else "")
    return " · ".join(part for part in parts if part)


def _overview(models: Sequence[Measured], choices: Sequence[Choice]) -> Safe:
    """What to take for each model, and what is good enough for all of them."""
    columns = (
        Column("model", left=True), Column("take", left=True, code=True), Column("bits"), Column("KL"),
        Column("same token"), Column("decode speed"),
    )  # fmt: skip
    rows = []
    for measured, choice in zip(models, choices, strict=True):
        one = choice.take
        figures = [words.NONE] * 4
        if one is not None:
            figures = [words.decimal(one.bits), words.small(one.kl), words.percent(one.top1), words.times(one.speed)]
        take = Cell(one.scheme, mark="good") if one else Cell("none keeps the rule", mark="warn")
        rows.append([Cell(measured.model), take, *map(Cell, figures)])
    fitting = [{one.scheme: one.bits or 0.0 for one in x.standings if one.point and not one.reasons} for x in choices]
    everywhere = sorted(set.intersection(*map(set, fitting)), key=lambda name: sum(found[name] for found in fitting))
    said = f"The fewest bits of those that keep the rule on every model: {everywhere[0]}." if everywhere else ""
    note = tag("p", said or "No scheme keeps the rule on every model.", class_="note")
    return _card(tag("h2", "In short"), table(Table("The scheme to take for each model", columns, rows)), note)


def _quality(measured: Measured, choice: Choice, rule: Rule, heading: Heading) -> Safe | None:
    """The picture for a screen and that for a telephone, of which a page shows one; more of them on demand."""
    pairs = zip(scatters(measured, choice, rule), scatters(measured, choice, rule, NARROW), strict=True)
    figures = [tag("figure", svg(wide, "wide"), svg(narrow, "narrow")) for (_, wide), (_, narrow) in pairs]
    if not figures:
        return None
    run, exact = measured.main("quality"), choice.exact
    said = ["Down and to the left is better. On the line, the Pareto front, are schemes that no other beats in both."]
    if choice.bits_field == LONG and run and run.setting.get("length"):
        said.append(f"KL is that of windows of {words.plain(run.setting['length'])} tokens, bits are those of 8,000.")
    if exact and exact.kl is not None:
        said.append(f"The exact cache against itself: {words.small(exact.kl)}.")
    absent = words.listed([one.scheme for one in choice.standings if one.kl is not None and one.bits is None])
    bits = "bits at 8,000 tokens" if choice.bits_field == LONG else "bits"
    note = tag("p", f"Not in the picture, as their {bits} are not known: {absent}.", class_="note") if absent else None
    more = [_closed("The same against bits as measured, in these windows", figure) for figure in figures[1:]]
    return _card(heading("Quality against memory"), tag("p", " ".join(said), class_="about"), figures[0], note, *more)


def table(shown: Table, most: int | None = None) -> Safe:
    """A table that scrolls inside its own box, with what each cell is sorted by."""
    kinds = [_classes("left" if x.left else "", "long" if x.long else "") for x in shown.columns]
    head = [
        tag("th", column.name, scope="col", title=column.about or None, class_=kind)
        for column, kind in zip(shown.columns, kinds, strict=True)
    ]
    rows = []
    for place, row in enumerate(shown.rows[:most]):
        cells = [_cell(*parts, first=not nth) for nth, parts in enumerate(zip(row, shown.columns, kinds, strict=True))]
        rows.append(tag("tr", *cells, class_="marked" if place in shown.marked else None))
    inner = tag("table", tag("caption", shown.title), tag("thead", tag("tr", *head)), tag("tbody", *rows))
    return tag("div", inner, class_="scroll", tabindex="0", role="region", aria_label=shown.title)


def _cell(cell: Cell, column: Column, kind: str | None, first: bool) -> Safe:
    inside = tag("code", cell.text) if column.code else cell.text
    value = None if cell.value is None or str(cell.value) == cell.text else cell.value
    classes = _classes(kind, cell.mark)
    if first:
        return tag("th", inside, scope="row", class_=classes, data_value=value)
    return tag("td", inside, class_=classes, data_value=value)


def _classes(*names: str | None) -> str | None:
    return " ".join(name for name in names if name) or None


# -- what stands beside this module ------------------------------------------------------------------------------------


def _file(name: str) -> str:
    folder = resources.files(__name__.rpartition(".")[0]).joinpath("page_files")
    return folder.joinpath(name).read_text(encoding="utf-8")
