"""What all charts share: a plane with its grid, and a legend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvbits.report.drawing import Dot, Drawing, Label, Line, shortened, text_width
from kvbits.report.scale import Scale

TICK, NAME = 11.5, 12.0
"""Sizes of the values at an axis, and of its name."""


@dataclass(frozen=True)
class Frame:
    """The plane of a chart: its two axes, each with the pixels that it spans."""

    x: Scale
    y: Scale

    def draw(
        self, drawing: Drawing, xs: Sequence[float], write_x: Callable[[float], str], write_y: Callable[[float], str]
    ) -> None:
        """Lines at the ticks of y with their values, and values at ``xs``, those for which there is room."""
        for value in self.y.ticks():
            y = self.y(value)
            drawing.add(Line([(self.x.start, y), (self.x.end, y)], "grid", 1))
            drawing.add(Label(self.x.start - 8, y + 4, write_y(value), TICK, "soft", "end"))
        drawing.add(Line([(self.x.start, self.y.start), (self.x.end, self.y.start)], "edge", 1))
        last = float("-inf")
        for value in xs:
            x, text = self.x(value), write_x(value)
            drawing.add(Line([(x, self.y.start), (x, self.y.start + 5)], "edge", 1))
            if x - last > text_width(text, TICK) + 6:
                drawing.add(Label(x, self.y.start + 19, text, TICK, "soft", "middle"))
                last = x

    def name(self, drawing: Drawing, x: str, y: str) -> None:
        """The name of x below its values, that of y in the upper left corner, where it can be read."""
        middle = (self.x.start + self.x.end) / 2
        drawing.add(Label(2, 16, y, NAME, "soft"), Label(middle, self.y.start + 42, x, NAME, "soft", "middle"))


def legend(drawing: Drawing, entries: Sequence[tuple[str, Dot]], x: float, y: float) -> float:
    """Entries from left to right, in as many lines as they need; the base line of the last."""
    left = x
    for name, dot in entries:
        text = shortened(name, 40)
        width = 20 + text_width(text, TICK)
        if left > x and left + width > drawing.width - 10:
            left, y = x, y + 19
        drawing.add(Dot(left + 6, y - 4, dot.colour, dot.radius, dot.shape, dot.hollow))
        drawing.add(Label(left + 16, y, text, TICK))
        left += width + 8
    return y
