"""A picture of a plan: memory against context for each scheme, with the line of what there is."""

from __future__ import annotations

import math
from pathlib import Path

from kvbits.plan.fit import needs
from kvbits.plan.plan import Plan

_POINTS = 80
_SHOWN = 16
"""Schemes of which a reader can still tell the lines apart."""


def draw(plan: Plan, path: str | Path) -> Path:
    """Write a picture; its kind follows from the ending of ``path`` (``.png``, ``.svg``, ``.pdf``).

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.
        ValueError: for more schemes than can be told apart, or an ending that it does not know.
    """
    if len(plan.rows) > _SHOWN:
        raise ValueError(f"a picture of {len(plan.rows)} schemes cannot be read; give {_SHOWN} or fewer")
    if not Path(path).suffix:
        raise ValueError(f"{path} does not say which kind of picture it is; give {path}.png, .svg or .pdf")
    try:
        import matplotlib  # noqa: F401
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter
    except ModuleNotFoundError:
        raise ModuleNotFoundError("pictures need matplotlib: pip install 'kvbits[report]'") from None
    setting, path = plan.setting, Path(path)
    reach = [row.max_context or 0 for row in plan.rows]
    last = max(2, int(1.25 * max(setting.context, *reach)))
    contexts = sorted({max(1, round(last * point / _POINTS)) for point in range(1, _POINTS + 1)})
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    lowest = [math.inf] * len(contexts)
    for index, row in enumerate(plan.rows):
        fullest = [max(need.total for need in needs(setting, row.named.scheme, n)) / 2**30 for n in contexts]
        lowest = [min(pair) for pair in zip(lowest, fullest, strict=True)]
        axes.plot(contexts, fullest, label=row.named.name, linewidth=2, linestyle="-" if index < 8 else "--")
    if setting.memory_bytes is not None:
        limit = (setting.memory_bytes - setting.reserve_bytes) / 2**30
        axes.axhline(limit, color="black", linewidth=1)
        axes.set_ylim(top=1.3 * max(limit, min(lowest)))
        axes.annotate(f"{limit:,.1f} GiB", (contexts[0], limit), (0, 4), textcoords="offset points")
    axes.axvline(setting.context, color="grey", linewidth=1, linestyle=":")
    axes.set_xlabel("tokens in the cache" + (f", in each of {setting.batch} rows" if setting.batch > 1 else ""))
    axes.set_ylabel("GiB" if setting.devices == 1 else "GiB on the fullest device")
    what = "the cache" if setting.shape.weights is None else "weights, cache and the peak of a prompt"
    axes.set_title(f"{setting.shape.name}: {what}")
    axes.set_xlim(0, last)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: f"{tokens:,.0f}"))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return path
