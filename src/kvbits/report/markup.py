"""HTML out of calls: all text is escaped on the way, so none that a file of results holds can become markup."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from typing import Any

_EMPTY = {"br", "col", "img", "input", "link", "meta"}


class Safe(str):
    """Text that is HTML already."""


def tag(name: str, *inside: object, **attributes: object) -> Safe:
    """An element. ``inside`` is escaped but for :class:`Safe`; attributes that are None or False are left out.

    Names are written with underscores: ``class_`` is ``class``, ``aria_label`` is ``aria-label``, ``viewBox`` itself.
    """
    words = [name]
    for key, value in attributes.items():
        if value is not None and value is not False:
            shown = key.rstrip("_").replace("_", "-")
            words.append(shown if value is True else f'{shown}="{escaped(value)}"')
    start = f"<{' '.join(words)}>"
    return Safe(start if name in _EMPTY else f"{start}{joined(inside)}</{name}>")


def joined(parts: Iterable[object], between: str = "") -> Safe:
    """Parts one after the other, escaped but for :class:`Safe`; None is nothing."""
    return Safe(escaped(between).join(x if isinstance(x, Safe) else escaped(x) for x in parts if x is not None))


def escaped(text: object) -> Safe:
    """Any text as HTML that shows it, inside an element or between quotes."""
    return Safe(html.escape(str(text), quote=True))


def data(value: Any) -> Safe:
    """JSON for a ``script`` element, which no text inside can close."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return Safe(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))
