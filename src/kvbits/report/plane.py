"""What pictures put on a plane of Matplotlib: texts, marks of points, legends and the values at axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from urllib.parse import quote

from kvbits.report.palette import LIGHT
from kvbits.report.words import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import PathCollection

TICK, NAME = 11.5, 12.0
"""Sizes of the values at an axis, and of its name."""

DASHED = (0, (5, 4))
"""The style of a broken line."""

TIP = "tip:"
"""How the ``gid`` of an artist begins that says something on pointing at it."""


def write(
    axes: Axes,
    text: str,
    place: tuple[float, float],
    away: tuple[float, float] = (0, 0),
    size: float = TICK,
    colour: str = "ink",
    anchor: str = "left",
    *,
    bold: bool = False,
    code: bool = False,
    of_plane: bool = False,
) -> None:
    """A text on its base line, some pixels away from a place, in data or (``of_plane``) as shares of the plane."""
    axes.annotate(
        printable(text), place, away, "axes fraction" if of_plane else "data", "offset points", size=size, ha=anchor,
        color=LIGHT[colour], weight="bold" if bold else "normal", annotation_clip=False, zorder=6,
        family="DejaVu Sans Mono" if code else "DejaVu Sans",
    )  # fmt: skip


def dot(
    axes: Axes, x: float, y: float, colour: str, radius: float, shape: str = "o", hollow: bool = False, tip: str = ""
) -> PathCollection:
    """A mark of a point; ``tip`` is what a reader sees on pointing at it."""
    face, edge = (LIGHT["paper"], LIGHT[colour]) if hollow else (LIGHT[colour], LIGHT["paper"])
    return axes.scatter(
        [x], [y], (2 * radius) ** 2, marker=shape, facecolor=face, edgecolor=edge, linewidth=1.6 if hollow else 1.2,
        gid=gid_of(tip), clip_on=False, zorder=4,
    )  # fmt: skip


def gid_of(tip: str) -> str:
    """The ``gid`` of an artist of which a reader sees ``tip`` on pointing at it."""
    return f"{TIP}{quote(tip, errors='replace')}" if tip else ""


def legend(axes: Axes, entries: Sequence[tuple[str, PathCollection]], x: float, y: float, columns: int) -> None:
    """Marks with their names, the upper left corner some pixels to the right of the plane's and above it."""
    corner = (x / axes.bbox.width, 1 + y / axes.bbox.height)
    axes.legend(
        [mark for _, mark in entries], [printable(shortened(name, 40)) for name, _ in entries], ncols=columns,
        loc="upper left", bbox_to_anchor=corner, frameon=False, fontsize=TICK, labelcolor=LIGHT["ink"], borderpad=0,
        borderaxespad=0, handlelength=1, handletextpad=0.4, columnspacing=1, labelspacing=0.5, scatterpoints=1,
    )  # fmt: skip


def shortened(text: str, length: int) -> str:
    """A text with its middle left out where it is longer than this."""
    if len(text) <= length:
        return text
    head = (length - 1) * 2 // 3
    return f"{text[:head]}…{text[len(text) - (length - 1 - head) :]}"


def text_width(text: str, size: float, code: bool = False) -> float:
    """About how wide a text is, in pixels: a little more than most fonts need."""
    return len(text) * size * (0.61 if code else 0.56)


def log_ticks(axes: Axes, text: Callable[[float], str]) -> None:
    """Round values at an axis by the logarithm: powers of ten, with 2 and 5 between them, or even steps in less."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

    low, high = axes.get_ylim()
    far = high / low
    even = MaxNLocator(6, steps=[1, 2, 5, 10])
    powers = LogLocator(subs=(1.0, 2.0, 5.0) if far < 300 else (1.0,), numticks=8)
    axes.yaxis.set_major_locator(even if far < 5 else powers)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_minor_formatter(NullFormatter())


def names(axes: Axes, x: str, y: str, margins: tuple[float, float, float, float]) -> None:
    """The name of x below its values, that of y in the upper left corner, where it can be read."""
    write(axes, x, (0.5, 0), (0, -42), NAME, "soft", "center", of_plane=True)
    write(axes, y, (0, 1), (2 - margins[0], margins[1] - 16), NAME, "soft", of_plane=True)
