"""Quality against bits: a dot for each scheme, the Pareto front, and what the rule calls close enough."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from kvbits.report import words
from kvbits.report.choose import Choice, Rule
from kvbits.report.drawing import Drawing, Margins
from kvbits.report.palette import LIGHT
from kvbits.report.plane import DASHED, TICK, dot, legend, log_ticks, names, shortened, text_width, write
from kvbits.report.standing import Standing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import PathCollection

BITS = {
    "bits_at_8000": "bits per element at 8,000 tokens, everything stored",
    "bits_per_element": "bits per element as measured, everything stored",
}
PEERS = "hf:"
"""How the names of Transformers' own caches begin."""

KINDS = ("on the Pareto front", "beaten in both", "Transformers' own")

WIDE, NARROW = 960.0, 400.0
"""Widths in pixels, for a screen and for a telephone."""

Box = tuple[float, float, float, float]
"""Left, bottom, right and top, in pixels."""


def scatter(choice: Choice, rule: Rule, width: float = WIDE) -> Drawing | None:
    """KL to the exact cache, by its logarithm, against bits. None where no scheme has both."""
    points = [one for one in choice.standings if one.point is not None]
    if not points:
        return None
    narrow = width <= NARROW
    margins = (58, 70 if narrow else 54, 20, 52)
    front = [one for one in points if one.front]
    shown = [f"{one.scheme} ({words.decimal(one.bits)} bits, KL {words.small(one.kl)})" for one in front[:12]]
    taken = f" The rule takes {choice.take.scheme}." if choice.take else ""
    return Drawing(
        width, 480 if narrow else 500, margins, "Quality against bits",
        f"On the Pareto front: {words.listed(shown)}.{taken}", partial(_paint, choice, rule, points, margins),
    )  # fmt: skip


def _paint(choice: Choice, rule: Rule, points: Sequence[Standing], margins: Margins, axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    narrow = axes.bbox.width < NARROW
    floor = _floor(points)
    limit = rule.max_kl or floor
    places = {one.scheme: (one.bits or 0.0, max(one.kl or 0.0, floor)) for one in points}
    axes.set_yscale("log")
    axes.margins(0.08, 0.06)
    axes.update_datalim([*places.values(), (points[0].bits or 0.0, limit)])
    entries: dict[str, PathCollection] = {}
    for one in sorted(points, key=lambda one: (one is choice.take, one.front)):
        if one is choice.take:
            dot(axes, *places[one.scheme], "accent", 10, hollow=True)
        entries.setdefault(_kind(one), _dot(axes, one, *places[one.scheme]))
    axes.autoscale_view()
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    axes.set(xlim=(left, right), ylim=(low, high))
    axes.axhline(limit, color=LIGHT["good"], linewidth=1.2, linestyle=DASHED)
    axes.axhspan(low, limit, color=LIGHT["good-tint"], linewidth=0, zorder=0)
    front = [places[one.scheme] for one in points if one.front]
    # The border of what the front beats: right and down from one to the next, to the end of the plane.
    ends = [*(bits for bits, _ in front[1:]), right]
    stairs = [(front[0][0], high)]
    for (bits, kl), end in zip(front, ends, strict=True):
        stairs += [(bits, kl), (end, kl)]
    axes.plot(*zip(*stairs, strict=True), color=LIGHT["accent"], linewidth=1.6)
    for one in points:
        error = words.real(one.quality, "kl_se") if one.front else None
        if error:
            bits = one.bits or 0.0
            bar = [min(max((one.kl or 0.0) + way * error, low, floor), high) for way in (-1, 1)]
            axes.plot([bits, bits], bar, color=LIGHT["s2" if _peer(one) else "s1"], linewidth=1.2)
    axes.grid(axis="y", color=LIGHT["grid"], linewidth=1, zorder=0.5)
    axes.xaxis.set_major_locator(MaxNLocator(5 if narrow else 9, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter("{x:g}")
    log_ticks(axes, lambda value: f"{value:g}".replace("e-0", "e-"))
    write(axes, f"close enough: KL ≤ {rule.max_kl:g}", (right, limit), (-6, -15), colour="good", anchor="right")
    names(axes, BITS[choice.bits_field], "KL to the exact cache, nats; lower is closer", margins)
    known = [(kind, entries[kind]) for kind in KINDS if kind in entries]
    legend(axes, known, 2 - margins[0], 40 if narrow else 24, 2 if narrow else 3)
    order = sorted(points, key=lambda one: (one is choice.take, one.front), reverse=True)
    _label([(one, places[one.scheme]) for one in order], choice.take, stairs, 22 if narrow else 34, axes)


def _floor(points: Sequence[Standing]) -> float:
    """What a KL of zero or less, lost in rounding, is drawn as: below all others."""
    kls = [one.kl or 0.0 for one in points]
    positive = [kl for kl in kls if kl > 0]
    return min(positive, default=1e-6) / (1 if len(positive) == len(kls) else 3)


def _kind(one: Standing) -> str:
    """What the legend calls it."""
    return KINDS[2 if _peer(one) else 0 if one.front else 1]


def _peer(one: Standing) -> bool:
    return one.scheme.startswith(PEERS)


def _dot(axes: Axes, one: Standing, bits: float, kl: float) -> PathCollection:
    figures = f"{words.decimal(one.bits)} bits, KL {words.small(one.kl)}, same token {words.percent(one.top1)}"
    colour, shape = ("s2", "s") if _peer(one) else ("s1", "o")
    return dot(axes, bits, kl, colour, 5 if one.front else 4.5, shape, not one.front, f"{one.scheme}\n{figures}")


def _label(
    schemes: Sequence[tuple[Standing, tuple[float, float]]],
    take: Standing | None,
    stairs: Sequence[tuple[float, float]],
    most: int,
    axes: Axes,
) -> None:
    """Names beside their dots, the first of ``schemes`` first, where there is room; pointing tells the others."""
    line: list[tuple[float, float]] = axes.transData.transform(stairs).tolist()
    dots: list[tuple[float, float]] = axes.transData.transform([place for _, place in schemes]).tolist()
    used = [(x - 5, y - 5, x + 5, y + 5) for x, y in dots]
    used += [(min(a, c), min(b, d), max(a, c), max(b, d)) for (a, b), (c, d) in pairwise(line)]
    plane = axes.bbox
    for (one, place), (x, y) in zip(schemes, dots, strict=True):
        bold = one is take
        size = 13.0 if bold else TICK
        text = shortened(one.scheme, most)
        width = text_width(text, size, code=True)
        for right, up in _places(width, bold):
            box = (x + right - 2, y + up - 4, x + right + width + 2, y + up + size)
            inside = plane.x0 <= box[0] and box[2] <= plane.x1 + 16 and plane.y0 <= box[1] and box[3] <= plane.y1 + 6
            if inside and not any(_overlap(box, other) for other in used):
                used.append(box)
                colour = "ink" if one.front or bold else "soft"
                write(axes, text, place, (right, up), size, colour, bold=bold, code=True)
                break


def _places(width: float, bold: bool) -> list[tuple[float, float]]:
    """Where a name may begin, seen from its dot, the best place first; a bold one keeps off the ring around its dot."""
    gap, away = (14, 4) if bold else (9, 0)
    sides: list[tuple[float, float]] = [(gap, -4), (-gap - width, -4), (gap - 2, 8), (gap - 2, -17)]
    return [*sides, (-width / 2, 11 + away), (-width / 2, -20 - away)]


def _overlap(a: Box, b: Box) -> bool:
    """Whether two boxes share any of the plane."""
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
