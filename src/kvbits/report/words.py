"""Figures in words: how the page, the tables, the pictures and the Markdown write a number."""

from __future__ import annotations

import math
from typing import Any

NONE = "–"
"""What was not measured."""


def real(row: dict[str, Any] | None, name: str) -> float | None:
    """A field of a row as a float, or None where it is missing."""
    value = None if row is None else row.get(name)
    return None if value is None else float(value)


def decimal(value: float | None, digits: int = 2) -> str:
    """``1,234.50``."""
    return NONE if value is None else f"{value:,.{digits}f}"


def whole(value: float | None) -> str:
    """``1,234``."""
    return decimal(value, 0)


def small(value: float | None) -> str:
    """For a KL divergence: three significant digits, ``0.00165``, and ``2.0e-5`` where there would be many zeros."""
    if value is None:
        return NONE
    if value == 0:
        return "0"
    if abs(value) < 1e-4:
        return f"{value:.1e}".replace("e-0", "e-")
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def spread(value: float | None, error: float | None, digits: int) -> str:
    """``23.24 ± 1.12``, or the value alone where nothing is known of its error."""
    return decimal(value, digits) if error is None or value is None else f"{value:,.{digits}f} ± {error:,.{digits}f}"


def small_spread(value: float | None, error: float | None) -> str:
    """:func:`small` with a standard error to the same digits."""
    shown = small(value)
    if error is None or value is None or "." not in shown or "e" in shown:
        return shown
    return f"{shown} ± {error:.{len(shown.partition('.')[2])}f}"


def chance(value: float | None) -> str:
    """A p-value: ``0.013``."""
    return NONE if value is None else f"{value:.2g}"


def percent(value: float | None, digits: int = 1) -> str:
    """A share: ``98.3 %``."""
    return NONE if value is None else f"{100 * value:.{digits}f} %"


def times(value: float | None) -> str:
    """A ratio: ``1.66×``."""
    return NONE if value is None else f"{value:.2f}×"


def size(value: float | None) -> str:
    """Bytes: ``23.6 MB``, with a megabyte of a million bytes."""
    if value is None:
        return NONE
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= factor:
            scaled = value / factor
            return f"{scaled:.0f} {unit}" if scaled >= 100 else f"{scaled:.3g} {unit}"
    return f"{value:.0f} B"


def listed(words: list[str], last: str = "and") -> str:
    """``a, b and c``."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}" if words else ""


def cut(text: str, length: int = 400) -> str:
    """The beginning of a text."""
    return text if len(text) <= length else f"{text[: length - 1]}…"


def printable(text: str) -> str:
    """A text for a terminal or a picture: what steers either, and what no encoding can hold, becomes a space."""
    return "".join(sign if sign.isprintable() else " " for sign in text)


def plain(value: Any) -> str:
    """A value of a setting."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(plain, value))
    if isinstance(value, dict):
        return ", ".join(f"{name}: {plain(x)}" for name, x in value.items())
    return NONE if value is None else f"{value:,}" if isinstance(value, int) else str(value)
