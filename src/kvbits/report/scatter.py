"""Quality against bits: a dot for each scheme, the Pareto front, and what the rule calls close enough."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from kvbits.report import words
from kvbits.report.axes import TICK, Frame, legend
from kvbits.report.choose import Choice, Rule
from kvbits.report.drawing import Box, Dot, Drawing, Label, Line, Point, shortened, text_width
from kvbits.report.scale import Scale
from kvbits.report.standing import Standing

BITS = {
    "bits_at_8000": "bits per element at 8,000 tokens, everything stored",
    "bits_per_element": "bits per element as measured, everything stored",
}
PEERS = "hf:"
"""How the names of Transformers' own caches begin."""

WIDE, NARROW = 960.0, 400.0
"""Widths in pixels, for a screen and for a telephone."""


def scatter(choice: Choice, rule: Rule, width: float = WIDE) -> Drawing | None:
    """KL to the exact cache, by its logarithm, against bits. None where no scheme has both."""
    points = [one for one in choice.standings if one.point is not None]
    if not points:
        return None
    narrow = width <= NARROW
    height = 480.0 if narrow else 500.0
    floor = _floor(points)
    front = [one for one in points if one.front]
    kls = [max(one.kl or 0.0, floor) for one in points]
    frame = Frame(
        Scale.around([one.bits or 0.0 for one in points], 58, width - 20, margin=0.08),
        Scale.around([*kls, rule.max_kl or floor], height - 52, 62 if narrow else 54, log=True),
    )
    drawing = Drawing(width, height, "Quality against bits", _about(choice, front))
    limit = frame.y(max(rule.max_kl, frame.y.low))
    drawing.add(Box(frame.x.start, limit, frame.x.end - frame.x.start, frame.y.start - limit, "good-tint"))
    frame.draw(drawing, frame.x.ticks(5 if narrow else 9), "{:g}".format, lambda y: f"{y:g}".replace("e-0", "e-"))
    drawing.add(
        Line([(frame.x.start, limit), (frame.x.end, limit)], "good", 1.2, dashed=True),
        Label(frame.x.end - 6, limit + 15, f"close enough: KL ≤ {rule.max_kl:g}", TICK, "good", "end"),
    )
    frame.name(drawing, BITS[choice.bits_field], "KL to the exact cache, nats; lower is closer")
    legend(drawing, list(_entries(points)), 2, 38)

    def place(one: Standing) -> Point:
        return frame.x(one.bits or 0.0), frame.y(max(one.kl or 0.0, floor))

    stairs = list(_stairs([place(one) for one in front], frame))
    drawing.add(Line(stairs, "accent", 1.6))
    dots = sorted(points, key=lambda one: (one is choice.take, one.front))
    for one in dots:
        if one is choice.take:
            drawing.add(Dot(*place(one), "accent", 10, hollow=True))
        if one.front:
            _error(drawing, one, frame, floor)
        drawing.add(_dot(one, *place(one)))
    _names(drawing, [(one, place(one)) for one in reversed(dots)], choice.take, frame, stairs)
    return drawing


def _floor(points: Sequence[Standing]) -> float:
    """What a KL of zero or less, lost in rounding, is drawn as: below all others."""
    kls = [one.kl or 0.0 for one in points]
    positive = [kl for kl in kls if kl > 0]
    return min(positive, default=1e-6) / (1 if len(positive) == len(kls) else 3)


def _stairs(points: Sequence[Point], frame: Frame) -> Iterator[Point]:
    """The border of what the front beats: right and down from one to the next, to the end of the plane."""
    yield points[0][0], frame.y.end
    for (x, y), (after, _) in zip(points, [*points[1:], (frame.x.end, 0.0)], strict=True):
        yield x, y
        yield after, y


def _look(one: Standing) -> tuple[str, str]:
    """Colour and shape."""
    return ("s2", "square") if one.scheme.startswith(PEERS) else ("s1", "circle")


def _entries(points: Sequence[Standing]) -> Iterator[tuple[str, Dot]]:
    """The legend, for what there is."""
    if any(one.front for one in points):
        yield "on the Pareto front", Dot(0, 0, "s1")
    if any(not one.front and not one.scheme.startswith(PEERS) for one in points):
        yield "beaten in both", Dot(0, 0, "s1", hollow=True)
    if any(one.scheme.startswith(PEERS) for one in points):
        yield "Transformers' own", Dot(0, 0, "s2", shape="square", hollow=True)


def _dot(one: Standing, x: float, y: float) -> Dot:
    colour, shape = _look(one)
    figures = f"{words.decimal(one.bits)} bits, KL {words.small(one.kl)}, same token {words.percent(one.top1)}"
    return Dot(x, y, colour, 5 if one.front else 4.5, shape, not one.front, f"{one.scheme}\n{figures}")


def _error(drawing: Drawing, one: Standing, frame: Frame, floor: float) -> None:
    """A bar of one standard error to both sides, where it is known."""
    error = words.real(one.quality, "kl_se")
    if error and one.kl is not None:
        x = frame.x(one.bits or 0.0)
        ends = [frame.y(min(max(kl, frame.y.low, floor), frame.y.high)) for kl in (one.kl - error, one.kl + error)]
        drawing.add(Line([(x, ends[0]), (x, ends[1])], _look(one)[0], 1.2))


Rectangle = tuple[float, float, float, float]


def _names(
    drawing: Drawing,
    dots: Sequence[tuple[Standing, Point]],
    take: Standing | None,
    frame: Frame,
    line: Sequence[Point],
) -> None:
    """Names beside their dots, the first of ``dots`` first, where there is room; the others are told on pointing."""
    used = [(x - 5, y - 5, x + 5, y + 5) for _, (x, y) in dots]
    used += [(min(a, c), min(b, d), max(a, c), max(b, d)) for (a, b), (c, d) in pairwise(line)]
    for one, (x, y) in dots:
        bold = one is take
        size = 13.0 if bold else 11.5
        text = shortened(one.scheme, 34 if drawing.width > NARROW else 22)
        for left, base in _places(x, y, text_width(text, size, code=True), bold):
            box = (left - 2, base - size, left + text_width(text, size, code=True) + 2, base + 4)
            if _inside(box, drawing, frame) and not any(_meet(box, other) for other in used):
                used.append(box)
                colour = "ink" if one.front or bold else "soft"
                drawing.add(Label(left, base, text, size, colour, bold=bold, code=True))
                break


def _places(x: float, y: float, width: float, bold: bool) -> list[Point]:
    """Where the name of a dot may begin, the best place first; a bold one keeps off the ring around its dot."""
    gap, away = (14, 4) if bold else (9, 0)
    sides = [(x + gap, y + 4), (x - gap - width, y + 4)]
    corners = [(x + gap - 2, y - 8), (x + gap - 2, y + 17)]
    return [*sides, *corners, (x - width / 2, y - 11 - away), (x - width / 2, y + 20 + away)]


def _inside(box: Rectangle, drawing: Drawing, frame: Frame) -> bool:
    across = box[0] >= frame.x.start and box[2] <= drawing.width - 4
    return across and box[1] >= frame.y.end - 6 and box[3] <= frame.y.start


def _meet(a: Rectangle, b: Rectangle) -> bool:
    """Whether two rectangles share any of the plane."""
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _about(choice: Choice, front: Sequence[Standing]) -> str:
    shown = [f"{one.scheme} ({words.decimal(one.bits)} bits, KL {words.small(one.kl)})" for one in front[:12]]
    taken = f" The rule takes {choice.take.scheme}." if choice.take else ""
    return f"On the Pareto front: {words.listed(shown)}.{taken}"
