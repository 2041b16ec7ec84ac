"""Drawings as SVG for a page: text stays text, and colours follow the page's scheme."""

from __future__ import annotations

from kvbits.report.drawing import CORNERS, Box, Dot, Drawing, Line, Mark
from kvbits.report.markup import Safe, tag


def svg(drawing: Drawing, style: str = "") -> Safe:
    """An ``svg`` element of class ``style``, with what it shows said in words."""
    name = f"{drawing.title}. {drawing.about}".strip()
    return tag(
        "svg", *map(_drawn, drawing.marks), viewBox=f"0 0 {_n(drawing.width)} {_n(drawing.height)}", role="img",
        aria_label=name, class_=style or None, style=f"max-width:{_n(drawing.width * 1.25)}px",
    )  # fmt: skip


def _drawn(mark: Mark) -> Safe:
    title = tag("title", mark.title) if not isinstance(mark, Line) and mark.title else Safe("")
    if isinstance(mark, Line):
        points = " ".join(f"{_n(x)},{_n(y)}" for x, y in mark.points)
        return tag(
            "polyline", points=points, fill="none", stroke=_colour(mark.colour), stroke_width=_n(mark.width),
            stroke_dasharray="5 4" if mark.dashed else None, stroke_linejoin="round",
        )  # fmt: skip
    if isinstance(mark, Box):
        return tag(
            "rect", title, x=_n(mark.x), y=_n(mark.y), width=_n(mark.width), height=_n(mark.height),
            fill=_colour(mark.colour), opacity=_n(mark.opacity) if mark.opacity < 1 else None,
        )  # fmt: skip
    if isinstance(mark, Dot):
        fill, stroke = ("paper", mark.colour) if mark.hollow else (mark.colour, "paper")
        name, shape = _outline(mark)
        width = "1.6" if mark.hollow else "1.2"
        return tag(name, title, **shape, fill=_colour(fill), stroke=_colour(stroke), stroke_width=width)
    return tag(
        "text", mark.text, title, x=_n(mark.x), y=_n(mark.y), fill=_colour(mark.colour), font_size=_n(mark.size),
        text_anchor=None if mark.anchor == "start" else mark.anchor, font_weight="600" if mark.bold else None,
        class_="code" if mark.code else None,
        transform=f"rotate(-90 {_n(mark.x)} {_n(mark.y)})" if mark.turned else None,
    )  # fmt: skip


def _outline(dot: Dot) -> tuple[str, dict[str, str]]:
    """The element of a dot's shape, with the attributes that make it."""
    x, y, r = dot.x, dot.y, dot.radius
    if dot.shape == "circle":
        return "circle", {"cx": _n(x), "cy": _n(y), "r": _n(r)}
    return "polygon", {"points": " ".join(f"{_n(x + r * a)},{_n(y + r * b)}" for a, b in CORNERS[dot.shape])}


def _colour(name: str) -> str:
    return f"var(--{name})"


def _n(value: float) -> str:
    """A coordinate, to a tenth of a pixel."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
