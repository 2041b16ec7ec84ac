"""Speed and memory against context: a line for each scheme, which looks the same in all pictures of a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from kvbits.report import words
from kvbits.report.choose import Choice
from kvbits.report.drawing import Drawing
from kvbits.report.merge import Row
from kvbits.report.palette import LIGHT
from kvbits.report.plane import DASHED, TICK, dot, legend, log_ticks, names, shortened, text_width
from kvbits.report.scatter import PEERS
from kvbits.report.standing import Standing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Series: TypeAlias = dict[str, list[tuple[float, float]]]
"""Of each scheme, its contexts with their values."""

WIDTH, HEIGHT = 460.0, 316.0
MARGINS = (62.0, 34.0, 16.0, 58.0)
"""Without the legend, which is below."""

SHAPES = ("o", "s", "^", "D", "P", "v")

MOST_TIPS = 40
"""Schemes in a picture whose marks all say what they are; of more, only those with a look of their own do."""


@dataclass(frozen=True)
class Look:
    """How a scheme is drawn."""

    colour: str
    shape: str
    dashed: bool = False
    width: float = 2
    radius: float = 4.2


GREY = Look("soft", "o", width=1, radius=2.5)
"""Of schemes without a look of their own."""


def looks(choice: Choice) -> dict[str, Look]:
    """A look for the schemes whose speed matters most: the exact ones, that to take, the front, peers, others."""

    def weight(one: Standing) -> tuple[bool, ...]:
        named = one in (choice.take, choice.smallest, choice.closest)
        return one is not choice.take, not named, not one.front, not one.scheme.startswith(PEERS)

    found = {one.scheme: Look("s0", "o", True) for one in choice.standings if one.exact}
    timed = sorted((one for one in choice.standings if one.timed and not one.exact), key=weight)
    for place, (one, shape) in enumerate(zip(timed, SHAPES, strict=False), 1):
        found[one.scheme] = Look(f"s{place}", shape)
    return found


@dataclass(frozen=True)
class Quantity:
    """What is drawn: a field of rows of speed, in all pictures under a title, with what its axis says.

    Attributes:
        write: a value in words. short: the same at the axis.
        reference: a value that the exact cache has by definition.
    """

    field: str
    title: str
    axis: str
    write: Callable[[float | None], str]
    short: Callable[[float], str]
    reference: float | None = None


SPEED = Quantity(
    "speed_against_exact", "Decode speed", "decode speed against the exact cache; higher is faster", words.times,
    lambda value: f"{value:g}×", 1.0,
)  # fmt: skip
STEP = Quantity("step_ms", "Decode step", "milliseconds a decode step; lower is faster", words.whole, "{:g}".format)
MEMORY = Quantity("kv_bytes", "KV cache", "bytes that the KV cache really holds", words.size, words.size)


def lines(rows: Sequence[Row], quantity: Quantity, look: dict[str, Look], caption: str = "") -> Drawing | None:
    """A quantity against context, both by their logarithms. None where no row has it.

    Schemes without a look of their own are thin and grey.
    """
    known = [row for row in rows if (row.get(quantity.field) or 0) > 0 and (row.get("context") or 0) > 0]
    if not known:
        return None
    found: Series = {}
    for row in sorted(known, key=lambda row: float(row["context"])):
        found.setdefault(row["scheme"], []).append((row["context"], row[quantity.field]))
    entries = [scheme for scheme in look if scheme in found]
    others = len(found) - len(entries)
    widest = max(text_width(shortened(name, 40), TICK) for name in [*entries, "9 more"])
    columns = max(1, int((WIDTH - 12) // (widest + 28)))
    tall = 19 * math.ceil((len(entries) + bool(others)) / columns)
    return Drawing(
        WIDTH, HEIGHT + tall, (*MARGINS[:3], MARGINS[3] + tall), quantity.title, _about(found, quantity),
        partial(_paint, found, quantity, look, columns), caption,
    )  # fmt: skip


def tokens(count: float) -> str:
    """``8,192``, or ``32k`` where that is the same."""
    return f"{count / 1000:g}k" if count >= 10_000 and count % 1000 == 0 else f"{count:,.0f}"


def _paint(found: Series, quantity: Quantity, look: dict[str, Look], columns: int, axes: Axes) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.margins(0.06, 0.06)
    every = [point for points in found.values() for point in points]
    axes.update_datalim(every if quantity.reference is None else [*every, (every[0][0], quantity.reference)])
    for scheme in sorted(found, key=lambda scheme: scheme in look):
        one, points = look.get(scheme, GREY), found[scheme]
        if {value for _, value in points} == {quantity.reference}:
            continue
        style: Any = DASHED if one.dashed else "-"
        axes.plot(*zip(*points, strict=True), color=LIGHT[one.colour], linewidth=one.width, linestyle=style)
        for context, value in points if scheme in look or len(found) <= MOST_TIPS else ():
            tip = f"{scheme}\n{tokens(context)} tokens: {quantity.write(value)}"
            dot(axes, context, value, one.colour, one.radius, one.shape, tip=tip)
    axes.autoscale_view()
    if quantity.reference is not None:
        axes.axhline(quantity.reference, color=LIGHT["s0"], linewidth=1.4, linestyle=DASHED)
    axes.grid(axis="y", color=LIGHT["grid"], linewidth=1, zorder=0.5)
    log_ticks(axes, quantity.short)
    contexts = sorted({context for points in found.values() for context, _ in points})
    axes.set_xticks(contexts, _with_room(contexts, axes))
    names(axes, "context, tokens", quantity.axis, MARGINS)
    entries = [(scheme, one) for scheme, one in look.items() if scheme in found]
    more = len(found) - len(entries)
    entries += [(f"{more} more", GREY)] if more else []
    marks = [(name, dot(axes, math.nan, math.nan, one.colour, one.radius, one.shape)) for name, one in entries]
    legend(axes, marks, 2 - MARGINS[0], -axes.bbox.height - 58, columns)


def _with_room(contexts: Sequence[float], axes: Axes) -> list[str]:
    """What stands at each context: nothing where the one before reaches that far."""
    found, last = [], -math.inf
    for context in contexts:
        x, text = axes.transData.transform((context, 1.0))[0], tokens(context)
        room = x - last > text_width(text, TICK) + 6
        found.append(text if room else "")
        last = x if room else last
    return found


def _about(found: Series, quantity: Quantity) -> str:
    ends = [f"{scheme} {quantity.write(points[-1][1])}" for scheme, points in list(found.items())[:12]]
    longest = max(points[-1][0] for points in found.values())
    return f"At up to {longest:,.0f} tokens: {'; '.join(ends)}."
