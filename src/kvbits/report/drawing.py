"""Pictures as a few marks on a plane: what is drawn is decided once, and both SVG and PNG are made of it.

Colours are names. The page gives each a value for light and one for dark (:data:`LIGHT`, :data:`DARK`); a PNG is light.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

LIGHT = {
    "page": "#f6f7f8", "paper": "#ffffff", "ink": "#16202a", "soft": "#56626e", "grid": "#e4e8ec", "edge": "#d5dbe1",
    "accent": "#0b63ad", "tint": "#eaf3fb", "good": "#0a7358", "good-tint": "#e3f4ee", "warn": "#8a5200",
    "warn-tint": "#fdf3e1", "bad": "#b23a06", "bad-tint": "#fdece4", "lost": "#e2662b", "cell": "#eff2f4",
    "s0": "#16202a", "s1": "#0b63ad", "s2": "#b53a10", "s3": "#0a9a72", "s4": "#93407e", "s5": "#b98408",
    "s6": "#4e9ad1",
}  # fmt: skip
DARK = {
    "page": "#0f1418", "paper": "#171d23", "ink": "#e8ecf0", "soft": "#a2aeb9", "grid": "#2a333b", "edge": "#36414b",
    "accent": "#6db6f5", "tint": "#15293b", "good": "#4fcda4", "good-tint": "#12302a", "warn": "#f0b554",
    "warn-tint": "#33260f", "bad": "#ff9468", "bad-tint": "#3a1f15", "lost": "#b54a14", "cell": "#222b33",
    "s0": "#e8ecf0", "s1": "#6db6f5", "s2": "#ff8553", "s3": "#37cf92", "s4": "#dd92bd", "s5": "#f0c040",
    "s6": "#afd9ff",
}  # fmt: skip
"""``s0`` is the exact cache, ``s1`` to ``s6`` are series: apart for those who see fewer colours too, and by shape."""

SHAPES = ("circle", "square", "triangle", "diamond", "cross", "down")

_C = 0.38
CORNERS = {
    "square": ((-0.88, -0.88), (0.88, -0.88), (0.88, 0.88), (-0.88, 0.88)),
    "triangle": ((0, -1.25), (1.15, 0.8), (-1.15, 0.8)),
    "down": ((0, 1.25), (1.15, -0.8), (-1.15, -0.8)),
    "diamond": ((0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)),
    "cross": (
        (-_C, -1.2), (_C, -1.2), (_C, -_C), (1.2, -_C), (1.2, _C), (_C, _C),
        (_C, 1.2), (-_C, 1.2), (-_C, _C), (-1.2, _C), (-1.2, -_C), (-_C, -_C),
    ),
}  # fmt: skip
"""Corners of the shapes that are no circle, for a radius of 1, y downwards."""

Point: TypeAlias = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """A line through points."""

    points: Sequence[Point]
    colour: str = "ink"
    width: float = 1.5
    dashed: bool = False


@dataclass(frozen=True)
class Dot:
    """A mark of a point, with what a reader sees on pointing at it."""

    x: float
    y: float
    colour: str = "ink"
    radius: float = 4.5
    shape: str = "circle"
    hollow: bool = False
    title: str = ""


@dataclass(frozen=True)
class Box:
    """A rectangle, from its upper left corner."""

    x: float
    y: float
    width: float
    height: float
    colour: str
    opacity: float = 1.0
    title: str = ""


@dataclass(frozen=True)
class Label:
    """A text on its base line. ``anchor`` is ``start``, ``middle`` or ``end``; ``code`` a fixed width."""

    x: float
    y: float
    text: str
    size: float = 12
    colour: str = "ink"
    anchor: str = "start"
    bold: bool = False
    code: bool = False
    turned: bool = False
    title: str = ""


Mark: TypeAlias = Line | Dot | Box | Label


@dataclass
class Drawing:
    """Marks, the first at the bottom.

    Attributes:
        width, height: in CSS pixels.
        title: what it is, in a line.
        about: what it shows, for those who cannot see it.
    """

    width: float
    height: float
    title: str
    about: str = ""
    marks: list[Mark] = field(default_factory=list)

    def add(self, *marks: Mark) -> None:
        """On top of what is there."""
        self.marks += marks


def text_width(text: str, size: float, code: bool = False) -> float:
    """About how wide a text is, in pixels: a little more than most fonts need."""
    return len(text) * size * (0.61 if code else 0.56)


def shortened(text: str, length: int) -> str:
    """A text with its middle left out where it is longer than this."""
    if len(text) <= length:
        return text
    head = (length - 1) * 2 // 3
    return f"{text[:head]}…{text[len(text) - (length - 1 - head) :]}"


def sheet(drawings: Sequence[Drawing], title: str, columns: int, gap: float = 24, most: int = 24) -> Drawing:
    """Drawings side by side, in rows of ``columns``, under a title: one picture to send, of the first ``most``."""
    if len(drawings) > most:
        title = f"{title} (the first {most} of {len(drawings)})"
    drawings = drawings[:most]
    columns = min(columns, len(drawings))
    wide = max(one.width for one in drawings)
    found = Drawing(columns * wide + (columns + 1) * gap, 0, title, " ".join(one.about for one in drawings))
    y = 2.0 * gap
    for start in range(0, len(drawings), columns):
        row = drawings[start : start + columns]
        for place, one in enumerate(row):
            x = gap + place * (wide + gap)
            found.add(*(_moved(mark, x, y) for mark in one.marks))
        y += max(one.height for one in row) + gap
    found.height = y
    found.add(Label(gap, 1.4 * gap, title, 15, bold=True))
    return found


def titled(drawing: Drawing, text: str) -> Drawing:
    """The same drawing under a line of text."""
    moved = [Label(10, 16, text, 13, bold=True), *(_moved(mark, 0, 26) for mark in drawing.marks)]
    return replace(drawing, height=drawing.height + 26, marks=moved)


def _moved(mark: Mark, x: float, y: float) -> Mark:
    if isinstance(mark, Line):
        return replace(mark, points=[(a + x, b + y) for a, b in mark.points])
    return replace(mark, x=mark.x + x, y=mark.y + y)
