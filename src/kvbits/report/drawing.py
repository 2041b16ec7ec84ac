"""Pictures, which Matplotlib draws: as SVG for the page, where text and colours stay the page's, and as PNG files.

A :class:`Drawing` says how its plane is painted, so that it can be drawn alone or on a :class:`Sheet` beside others.
Matplotlib is imported where something is drawn, and not before. A point of it is a CSS pixel here.
"""

from __future__ import annotations

import importlib.util
import io
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import unquote
from xml.etree import ElementTree

from kvbits.report.markup import Safe, joined, tag
from kvbits.report.palette import LIGHT
from kvbits.report.plane import TICK, TIP, write
from kvbits.report.words import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DENSITY = 2
"""Pixels of a PNG for each pixel of the drawing."""

GAP, CAPTION, MOST = 24.0, 26.0, 24
"""Of a sheet: pixels between drawings, and above one with a caption; and how many drawings it holds."""

NEEDED = "pictures need Matplotlib: pip install 'kvbits[report]'"

Margins: TypeAlias = tuple[float, float, float, float]
"""Pixels around a plane: on the left, above, on the right and below."""

_NAMES = {value: f"var(--{name})" for name, value in LIGHT.items()}
_LOOK = (
    "fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-linejoin", "opacity", "text-anchor", "font-size",
    "font-weight",
)  # fmt: skip
_SVG, _LINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}href"
_STYLE = {"svg.fonttype": "none", "text.parse_math": False, "font.family": "DejaVu Sans", "path.simplify": False}


@dataclass(frozen=True)
class Drawing:
    """One plane with what stands around it.

    Attributes:
        width, height: in CSS pixels.
        margins: around the plane.
        title: what it is, in a line.
        about: what it shows, for those who cannot see it.
        paint: draws on the plane.
        caption: stands above it on a sheet.
    """

    width: float
    height: float
    margins: Margins
    title: str
    about: str
    paint: Callable[[Axes], None]
    caption: str = ""


class Sheet:
    """Drawings side by side, in rows of ``columns``, under a title: one picture to send."""

    def __init__(self, drawings: Sequence[Drawing], title: str, columns: int) -> None:
        left_out = f" (the first {MOST} of {len(drawings)})" if len(drawings) > MOST else ""
        self.drawings, self.title = drawings[:MOST], title + left_out
        columns = min(columns, len(self.drawings))
        wide = max(one.width for one in self.drawings)
        top = CAPTION if any(one.caption for one in self.drawings) else 0.0
        self.width = columns * wide + (columns + 1) * GAP
        self.height = 2 * GAP
        self.corners: list[tuple[float, float]] = []
        """Of each drawing, the left and the upper edge."""
        for start in range(0, len(self.drawings), columns):
            row = self.drawings[start : start + columns]
            self.corners += [(GAP + place * (wide + GAP), self.height + top) for place in range(len(row))]
            self.height += top + max(one.height for one in row) + GAP


def available() -> bool:
    """Whether Matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def png(sheet: Sheet) -> bytes:
    """The bytes of a PNG file, the same for the same drawings."""
    figure = drawn(sheet.width, sheet.height, list(zip(sheet.drawings, sheet.corners, strict=True)), sheet.title)
    title = sheet.title.encode("latin-1", "replace").decode("latin-1")
    return _saved(figure, "png", {"Software": None, "Title": title})


def svg(drawing: Drawing, style: str = "") -> Safe:
    """An ``svg`` element of class ``style``, with what it shows said in words."""
    figure = drawn(drawing.width, drawing.height, [(drawing, (0, 0))])
    figure.patch.set_visible(False)
    root = ElementTree.fromstring(_saved(figure, "svg", dict.fromkeys(("Creator", "Date", "Format", "Type"))))
    shapes = {f"#{one.get('id')}": _short(one.get("d", "")) for one in root.iterfind(f".//{_SVG}defs/{_SVG}path")}
    return tag(
        "svg", _markup(root, shapes), viewBox=f"0 0 {drawing.width:g} {drawing.height:g}", role="img",
        aria_label=f"{drawing.title}. {drawing.about}".strip(), class_=style or None,
        style=f"max-width:{1.25 * drawing.width:g}px",
    )  # fmt: skip


def drawn(
    width: float, height: float, places: Sequence[tuple[Drawing, tuple[float, float]]], title: str = ""
) -> Figure:
    """A figure with drawings at their upper left corners, and with their captions where it has a title."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure((width / 72, height / 72), 72, facecolor=LIGHT["paper"])
    with rc_context(_STYLE):  # type: ignore[arg-type]
        if title:
            figure.text(
                GAP / width, 1 - 1.4 * GAP / height, printable(title), size=14, weight="bold", color=LIGHT["ink"]
            )
        for one, (x, y) in places:
            left, above, right, below = one.margins
            wide, tall = one.width - left - right, one.height - above - below
            corner = ((x + left) / width, 1 - (y + above + tall) / height)
            axes = figure.add_axes((*corner, wide / width, tall / height))
            axes.patch.set_visible(False)
            axes.spines[["left", "top", "right"]].set_visible(False)
            axes.spines["bottom"].set_color(LIGHT["edge"])
            axes.tick_params(which="both", length=0, pad=7, labelsize=TICK, labelcolor=LIGHT["soft"])
            one.paint(axes)
            if title and one.caption:
                write(axes, one.caption, (0, 1), (10 - left, above + 10), 12, bold=True, of_plane=True)
    return figure


def _saved(figure: Figure, kind: str, about: dict[str, str | None]) -> bytes:
    from matplotlib import rc_context

    buffer = io.BytesIO()
    with rc_context(_STYLE), warnings.catch_warnings():  # type: ignore[arg-type]
        warnings.simplefilter("ignore", UserWarning)  # a name in a script that the font lacks
        figure.savefig(buffer, format=kind, dpi=72 * (DENSITY if kind == "png" else 1), metadata=about)
    return buffer.getvalue()


def _markup(element: ElementTree.Element, shapes: dict[str, str], tip: str = "") -> Safe:
    """What Matplotlib's SVG shows, without its groups, ids and fonts, and in the page's colours.

    ``shapes`` are the paths that it defines for marks, by their ids.
    """
    name, own = element.tag.removeprefix(_SVG), element.get("id", "")
    if name in ("svg", "g"):
        tip = unquote(own.removeprefix(TIP)) if own.startswith(TIP) else tip
        return joined(_markup(one, shapes, tip) for one in element)
    title = tag("title", tip) if tip else None
    given = (one.partition(":") for one in element.get("style", "").split(";"))
    style = {key.strip(): _NAMES.get(value.strip(), value.strip()) for key, _, value in given}
    look = {key: style[key] for key in _LOOK if key in style}
    if name == "path":
        return tag("path", title, d=_short(element.get("d", "")), **look)
    if name == "use":
        place = _short(f"translate({element.get('x', 0)} {element.get('y', 0)})")
        return tag("path", title, d=shapes[element.get(_LINK, "")], transform=place, **look)
    if name == "text":
        x, y = (_short(element.get(axis, "0")) for axis in ("x", "y"))
        kind = "code" if "Mono" in style["font-family"] else None
        return tag("text", "".join(element.itertext()), title, x=x, y=y, class_=kind, **look)
    return Safe("")  # definitions, and what the file says of itself


def _short(path: str) -> str:
    """A path with its coordinates to a tenth of a pixel."""
    return re.sub(r"-?\d+\.\d+", lambda found: f"{float(found[0]):.1f}".removesuffix(".0"), " ".join(path.split()))
