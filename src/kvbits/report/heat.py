"""Retrieval: a cell for each depth and length, the redder the more was lost."""

from __future__ import annotations

from collections.abc import Sequence

from kvbits.report import words
from kvbits.report.drawing import Box, Drawing, Label, shortened, text_width
from kvbits.report.lines import tokens
from kvbits.report.merge import Row

WIDTH, LEFT, TOP, TALL = 300.0, 46.0, 30.0, 26.0


def heat(rows: Sequence[Row], scheme: str) -> Drawing | None:
    """One task under one scheme. None where it has no accuracy."""
    known = [row for row in rows if row["scheme"] == scheme and row.get("accuracy") is not None]
    if not known:
        return None
    lengths = sorted({row.get("length") or 0 for row in known})
    depths = sorted({row.get("depth") or 0 for row in known})
    wide = (WIDTH - LEFT - 4) / len(lengths)
    height = TOP + TALL * len(depths) + 24
    mean = words.percent(sum(row["accuracy"] for row in known) / len(known), 0)
    drawing = Drawing(WIDTH, height, f"Retrieval under {scheme}", f"Mean accuracy {mean}.")
    drawing.add(
        Label(4, 17, shortened(scheme, 26), 12.5, bold=True, code=True),
        Label(WIDTH - 4, 17, mean, 12.5, "soft", "end", bold=True),
    )
    for place, depth in enumerate(depths):
        y = TOP + (place + 0.5) * TALL + 4
        drawing.add(Label(LEFT - 8, y, words.percent(depth, 0), 11, "soft", "end"))
    for place, length in enumerate(lengths):
        if wide > text_width(tokens(length), 11) or place in (0, len(lengths) - 1):
            x = LEFT + (place + 0.5) * wide
            drawing.add(Label(x, height - 8, tokens(length), 11, "soft", "middle"))
    for row in known:
        column, line = lengths.index(row.get("length") or 0), depths.index(row.get("depth") or 0)
        _cell(drawing, row, LEFT + column * wide, TOP + line * TALL, wide)
    return drawing


def _cell(drawing: Drawing, row: Row, x: float, y: float, wide: float) -> None:
    accuracy = float(row["accuracy"])
    box = (x, y, wide - 2, TALL - 2)
    drawing.add(Box(*box, "cell"), Box(*box, "lost", max(0.0, min(1.0, 1 - accuracy)), _told(row)))
    if wide > 34:
        drawing.add(Label(x + wide / 2 - 1, y + TALL / 2 + 3, f"{100 * accuracy:.0f}", 11, anchor="middle"))


def _told(row: Row) -> str:
    place = f"{tokens(row.get('length') or 0)} tokens, depth {words.percent(row.get('depth'), 0)}"
    low, high = row.get("accuracy_low"), row.get("accuracy_high")
    spread = "" if low is None or high is None else f" ({100 * low:.0f} to {100 * high:.0f})"
    repeats = f", {row['repeats']} times" if row.get("repeats") else ""
    return f"{place}\n{words.percent(row['accuracy'], 0)} found{spread}{repeats}"
