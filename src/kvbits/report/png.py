"""Drawings as PNG, through Matplotlib: every mark where the SVG has it."""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING, Any

from kvbits.report.drawing import CORNERS, LIGHT, Box, Dot, Drawing, Line, Mark
from kvbits.report.words import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DENSITY = 2
"""Pixels of the PNG for each pixel of the drawing."""


def require() -> None:
    """Raise ImportError, saying what to install, where Matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ImportError(
            "PNG pictures need Matplotlib: pip install 'kvbits[report]'; or leave them out with --no-pictures "
            "(pictures=False), the page has its own"
        ) from None


def png(drawing: Drawing) -> bytes:
    """The bytes of a PNG file, the same for the same drawing."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # 72 points to the inch: a point of Matplotlib is a pixel of the drawing.
    figure = Figure((drawing.width / 72, drawing.height / 72), 72 * DENSITY, facecolor=LIGHT["paper"])
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, drawing.width)
    axes.set_ylim(drawing.height, 0)
    axes.axis("off")
    for order, mark in enumerate(drawing.marks):
        _draw(axes, mark, order)
    buffer, about = io.BytesIO(), {"Software": None, "Title": _latin(drawing.title)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a name in a script that the font lacks
        canvas.print_png(buffer, metadata=about)  # type: ignore[no-untyped-call]
    return buffer.getvalue()


def _draw(axes: Axes, mark: Mark, order: int) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Circle, Polygon, Rectangle

    colour = LIGHT[mark.colour]
    if isinstance(mark, Line):
        xs, ys = zip(*mark.points, strict=True)
        style: Any = (0, (5, 4)) if mark.dashed else "-"
        axes.add_line(Line2D(xs, ys, linewidth=mark.width, color=colour, linestyle=style, zorder=order))
    elif isinstance(mark, Box):
        corner = (mark.x, mark.y)
        axes.add_patch(
            Rectangle(corner, mark.width, mark.height, color=colour, linewidth=0, alpha=mark.opacity, zorder=order)
        )
    elif isinstance(mark, Dot):
        r = mark.radius
        face, edge = (LIGHT["paper"], colour) if mark.hollow else (colour, LIGHT["paper"])
        style = {"facecolor": face, "edgecolor": edge, "linewidth": 1.6 if mark.hollow else 1.2, "zorder": order}
        if mark.shape == "circle":
            axes.add_patch(Circle((mark.x, mark.y), r, **style))
        else:
            axes.add_patch(Polygon([(mark.x + r * a, mark.y + r * b) for a, b in CORNERS[mark.shape]], **style))
    else:
        axes.text(
            mark.x, mark.y, printable(mark.text), fontsize=mark.size * (0.9 if mark.code else 0.92), color=colour,
            zorder=order, ha={"start": "left", "middle": "center", "end": "right"}[mark.anchor], va="baseline",
            fontweight="bold" if mark.bold else "normal", rotation=90 if mark.turned else 0, rotation_mode="anchor",
            family="DejaVu Sans Mono" if mark.code else "DejaVu Sans", parse_math=False, usetex=False,
        )  # fmt: skip


def _latin(text: str) -> str:
    """What a text in a PNG may hold."""
    return text.encode("latin-1", "replace").decode("latin-1")
