"""Which pictures a model has, in which order, and the files that show them to others."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from kvbits.report import lines
from kvbits.report.choose import Choice, Rule, choose
from kvbits.report.drawing import Drawing, Sheet
from kvbits.report.heat import heat
from kvbits.report.merge import Measured, Row, Run, numbered
from kvbits.report.scatter import WIDE, scatter
from kvbits.report.standing import COMBINATION, EXACT, MEASURED, combination


def scatters(measured: Measured, choice: Choice, rule: Rule, width: float = WIDE) -> list[tuple[str, Drawing]]:
    """Quality against the bits of the choice and, where they were measured too, against those of the windows."""
    drawn = [("quality", scatter(choice, rule, width))]
    if choice.bits_field != MEASURED:
        drawn.append(("quality-as-measured", scatter(choose(measured, rule, MEASURED), rule, width)))
    return [(name, drawing) for name, drawing in drawn if drawing is not None]


def against_context(run: Run, choice: Choice) -> list[Drawing]:
    """Speed and memory of each combination of weights, dtype and batch, the main one first, each with a caption."""
    main = combination(run)
    groups: dict[tuple[Any, ...], list[Row]] = {tuple(main.get(name) for name in COMBINATION): []}
    for row in run.figures:
        groups.setdefault(tuple(row.get(name) for name in COMBINATION), []).append(row)
    differing = [len({key[place] for key in groups}) > 1 for place in range(len(COMBINATION))]
    look = lines.looks(choice)
    found = []
    for key, rows in groups.items():
        known = [
            _in_words(*pair) for pair, shown in zip(zip(COMBINATION, key, strict=True), differing, strict=True) if shown
        ]
        speed = lines.SPEED if any(row.get(lines.SPEED.field) for row in rows) else lines.STEP
        for quantity in (speed, lines.MEMORY):
            caption = ": ".join(x for x in (quantity.title, ", ".join(known)) if x)
            found.append(lines.lines(rows, quantity, look, caption))
    return [drawing for drawing in found if drawing is not None]


def heat_maps(run: Run, choice: Choice) -> list[tuple[str, list[Drawing]]]:
    """Of each task the maps of all schemes, those that matter most first."""
    named = [one.scheme for one in (choice.take, choice.smallest, choice.closest) if one]
    order = [*EXACT, *named]
    found = []
    for task in dict.fromkeys(str(row.get("task")) for row in run.figures):
        rows = [row for row in run.figures if str(row.get("task")) == task]
        schemes = sorted(
            dict.fromkeys(row["scheme"] for row in rows),
            key=lambda name: order.index(name) if name in order else len(order),
        )
        drawings = [drawing for scheme in schemes if (drawing := heat(rows, scheme))]
        if drawings:
            found.append((task, drawings))
    return found


def pictures(run: Run) -> int:
    """About how many small pictures a run has: two for a combination, one for a task under a scheme."""
    names = {"speed": COMBINATION, "retrieval": ("task", "scheme")}.get(run.kind, ())
    kinds = {tuple(str(row.get(name)) for name in names) for row in run.figures if names}
    return len(kinds) * (2 if run.kind == "speed" else 1)


def files(models: Sequence[Measured], choices: Sequence[Choice], rule: Rule) -> list[tuple[str, str, Sheet]]:
    """Every picture for itself: its model, a name for its file that no other has, and what is in it."""
    found: list[tuple[str, str, Sheet]] = []
    taken: set[str] = set()
    for measured, choice in zip(models, choices, strict=True):
        for name, sheet in _of(measured, choice, rule):
            stem = _slug(f"{name}-{measured.model}" if len(models) > 1 else name)
            number = 1
            while (file := stem if number == 1 else f"{stem}-{number}") in taken:
                number += 1
            taken.add(file)
            found.append((measured.model, f"{file}.png", sheet))
    return found


def _of(measured: Measured, choice: Choice, rule: Rule) -> Iterator[tuple[str, Sheet]]:
    """The pictures of one model, each with a name."""

    def about(title: str) -> str:
        return f"{title}, {measured.model}"

    for name, drawing in scatters(measured, choice, rule):
        yield name, Sheet([drawing], about(drawing.title), 1)
    for place, run in numbered(measured.all_runs):
        again = f"-{place}" if place > 1 else ""
        if run.kind == "speed":
            drawn = against_context(run, choice)
            for name, quantities in (("speed", (lines.SPEED, lines.STEP)), ("memory", (lines.MEMORY,))):
                titles = {quantity.title for quantity in quantities}
                parts = [drawing for drawing in drawn if drawing.title in titles]
                if parts:
                    yield f"{name}{again}", Sheet(parts, about(f"{parts[0].title} against context"), 2)
        elif run.kind == "retrieval":
            for task, maps in heat_maps(run, choice):
                yield f"retrieval-{task}{again}", Sheet(maps, about(f"Retrieval, {task}: per cent found"), 4)


def _in_words(name: str, value: Any) -> str:
    if name == "weights":
        return "weights as loaded" if value in (None, "none") else f"{value} weights"
    return f"batch {value}" if name == "batch" else str(value)


def _slug(name: str) -> str:
    """A name that any file system takes."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:80] or "picture"
