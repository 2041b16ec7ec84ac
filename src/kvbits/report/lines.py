"""Speed and memory against context: a line for each scheme, which looks the same in all pictures of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvbits.report import words
from kvbits.report.axes import Frame, legend
from kvbits.report.choose import Choice
from kvbits.report.drawing import SHAPES, Dot, Drawing, Line
from kvbits.report.merge import Row
from kvbits.report.scale import Scale
from kvbits.report.scatter import PEERS
from kvbits.report.standing import Standing

WIDTH, HEIGHT = 460.0, 312.0

MOST_TOLD = 40
"""Schemes in a picture of which all are told on pointing; where there are more, only those with a look of their own."""


@dataclass(frozen=True)
class Look:
    """How a scheme is drawn."""

    colour: str
    shape: str
    dashed: bool = False


def looks(choice: Choice) -> dict[str, Look]:
    """A look for the schemes whose speed matters most: the exact ones, that to take, the front, peers, others."""

    def weight(one: Standing) -> tuple[bool, ...]:
        named = one in (choice.take, choice.smallest, choice.closest)
        return one is not choice.take, not named, not one.front, not one.scheme.startswith(PEERS)

    found = {one.scheme: Look("s0", "circle", True) for one in choice.standings if one.exact}
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


def lines(rows: Sequence[Row], quantity: Quantity, look: dict[str, Look]) -> Drawing | None:
    """A quantity against context, both by their logarithms. None where no row has it.

    Schemes without a look of their own are thin and grey.
    """
    known = [row for row in rows if (row.get(quantity.field) or 0) > 0 and (row.get("context") or 0) > 0]
    if not known:
        return None
    found: dict[str, list[tuple[float, float]]] = {}
    for row in sorted(known, key=lambda row: float(row["context"])):
        found.setdefault(row["scheme"], []).append((row["context"], row[quantity.field]))
    reference = [] if quantity.reference is None else [quantity.reference]
    frame = Frame(
        Scale.around([row["context"] for row in known], 62, WIDTH - 16, log=True),
        Scale.around([*(row[quantity.field] for row in known), *reference], HEIGHT - 54, 34, log=True),
    )
    drawing = Drawing(WIDTH, HEIGHT, quantity.title, _about(found, quantity))
    frame.draw(drawing, sorted({row["context"] for row in known}), tokens, quantity.short)
    frame.name(drawing, "context, tokens", quantity.axis)
    for value in reference:
        drawing.add(Line([(frame.x.start, frame.y(value)), (frame.x.end, frame.y(value))], "s0", 1.4, dashed=True))
    for scheme in sorted(found, key=lambda scheme: scheme in look):
        if {value for _, value in found[scheme]} != set(reference):
            told = scheme in look or len(found) <= MOST_TOLD
            _line(drawing, frame, scheme, found[scheme], quantity, look.get(scheme), told)
    entries = [(scheme, Dot(0, 0, one.colour, 4.2, one.shape)) for scheme, one in look.items() if scheme in found]
    others = sum(scheme not in look for scheme in found)
    if others:
        entries.append((f"{others} more", Dot(0, 0, "soft", 2.5)))
    drawing.height = legend(drawing, entries, 2, HEIGHT + 12) + 10
    return drawing


def tokens(count: float) -> str:
    """``8,192``, or ``32k`` where that is the same."""
    return f"{count / 1000:g}k" if count >= 10_000 and count % 1000 == 0 else f"{count:,.0f}"


def _line(
    drawing: Drawing,
    frame: Frame,
    scheme: str,
    points: Sequence[tuple[float, float]],
    quantity: Quantity,
    look: Look | None,
    told: bool,
) -> None:
    """One scheme."""
    colour, shape, dashed = (look.colour, look.shape, look.dashed) if look else ("soft", "circle", False)
    places = [(frame.x(x), frame.y(y)) for x, y in points]
    drawing.add(Line(places, colour, 2 if look else 1, dashed))
    for (x, y), (context, value) in zip(places, points, strict=True) if told else ():
        title = f"{scheme}\n{tokens(context)} tokens: {quantity.write(value)}"
        drawing.add(Dot(x, y, colour, 4.2 if look else 2.5, shape, title=title))


def _about(found: dict[str, list[tuple[float, float]]], quantity: Quantity) -> str:
    ends = [f"{scheme} {quantity.write(points[-1][1])}" for scheme, points in list(found.items())[:12]]
    longest = max(points[-1][0] for points in found.values())
    return f"At up to {longest:,.0f} tokens: {'; '.join(ends)}."
