"""Retrieval: a cell for each depth and length, the redder the more was lost."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from kvbits.report import words
from kvbits.report.drawing import Drawing
from kvbits.report.lines import tokens
from kvbits.report.merge import Row
from kvbits.report.palette import LIGHT
from kvbits.report.plane import gid_of, shortened, text_width, write

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, TALL = 300.0, 26.0
MARGINS = (46.0, 30.0, 4.0, 24.0)


def heat(rows: Sequence[Row], scheme: str) -> Drawing | None:
    """One task under one scheme. None where it has no accuracy."""
    known = [row for row in rows if row["scheme"] == scheme and row.get("accuracy") is not None]
    if not known:
        return None
    height = MARGINS[1] + TALL * len({row.get("depth") or 0 for row in known}) + MARGINS[3]
    mean = words.percent(sum(row["accuracy"] for row in known) / len(known), 0)
    paint = partial(_paint, known, scheme, mean)
    return Drawing(WIDTH, height, MARGINS, f"Retrieval under {scheme}", f"Mean accuracy {mean}.", paint)


def _paint(rows: Sequence[Row], scheme: str, mean: str, axes: Axes) -> None:
    from matplotlib.patches import Rectangle

    lengths, depths = (sorted({row.get(name) or 0 for row in rows}) for name in ("length", "depth"))
    wide = axes.bbox.width / len(lengths)
    axes.set(xlim=(0, len(lengths)), ylim=(len(depths), 0))
    axes.spines["bottom"].set_visible(False)
    write(axes, shortened(scheme, 26), (0, 1), (4 - MARGINS[0], 13), 12.5, bold=True, code=True, of_plane=True)
    write(axes, mean, (1, 1), (0, 13), 12.5, "soft", "right", bold=True, of_plane=True)
    shown = [wide > text_width(tokens(x), 11) or x in (lengths[0], lengths[-1]) for x in lengths]
    texts = [tokens(length) if seen else "" for length, seen in zip(lengths, shown, strict=True)]
    axes.set_xticks([place + 0.5 for place in range(len(lengths))], texts, size=11)
    axes.set_yticks([place + 0.5 for place in range(len(depths))], [words.percent(x, 0) for x in depths], size=11)
    for row in rows:
        x, y = lengths.index(row.get("length") or 0), depths.index(row.get("depth") or 0)
        lost = max(0.0, min(1.0, 1 - row["accuracy"]))
        for colour, share, tip in (("cell", 1.0, ""), ("lost", lost, _tip(row))):
            cell = Rectangle((x, y), 1 - 2 / wide, 1 - 2 / TALL, linewidth=0, color=LIGHT[colour], alpha=share)
            cell.set_gid(gid_of(tip))
            axes.add_patch(cell)
        if wide > 34:
            text = f"{100 * row['accuracy']:.0f}"
            write(axes, text, (x + 0.5 - 1 / wide, y + 0.5), (0, -3), 11, anchor="center")


def _tip(row: Row) -> str:
    place = f"{tokens(row.get('length') or 0)} tokens, depth {words.percent(row.get('depth'), 0)}"
    low, high = row.get("accuracy_low"), row.get("accuracy_high")
    spread = "" if low is None or high is None else f" ({100 * low:.0f} to {100 * high:.0f})"
    repeats = f", {row['repeats']} times" if row.get("repeats") else ""
    return f"{place}\n{words.percent(row['accuracy'], 0)} found{spread}{repeats}"
