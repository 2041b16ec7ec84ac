"""The grammar of schemes, as users write them.

Grammar (case and blanks do not matter)::

    scheme  = first { "," option }
    first   = NAME                          both K and V, from the catalogue: int4, kivi2, nuq3-1%, rot4, ...
            | "k=" NAME "," "v=" NAME       K and V each their own
    option  = "pre-rope" | "post-rope"      keys are stored before (after) their rotary embedding
            | "centred" | "uncentred"       a static mean, taken before RoPE, is subtracted from the keys (or not)
            | "outliers=" P "%"             this share of the elements is kept exactly: int4,outliers=1% is int4-1%
            | "qnorm"                       fitted tables decode with the mean and deviation that values had before
            | "residual=" N                 at least N most recent tokens stay exact (default 128)
            | "sinks=" N [ "+" M ]          the first N tokens stay exact (default 4), and up to M found later
            | "block=" N                    tokens packed at a time (default 128)
            | "layers[" I { "," I } "]=" NAME [ "/" NAME ]    these layers differ (K/V); -1 is the last
"""

from __future__ import annotations

import difflib
import re
from typing import Any, NamedTuple

from kvbits.codecs import Codec, Exact
from kvbits.schemes.catalogue import ALIASES
from kvbits.schemes.names import CHANGES, Named, changed, fraction, named, value_named

_OPTIONS = ("residual", "sinks", "block")
_MODIFIERS: dict[str, tuple[str, bool]] = {
    "pre-rope": ("pre_rope", True),
    "post-rope": ("pre_rope", False),
    "centred": ("centred", True),
    "uncentred": ("centred", False),
    "qnorm": ("qnorm", True),
}
"""What a word of the grammar sets."""


class Said(NamedTuple):
    """What the text of a scheme says.

    Attributes:
        key, value: codecs of the packed part.
        overrides: layers, and codecs of their keys and of their values.
        options: other fields of a :class:`kvbits.Scheme` that it sets.
    """

    key: Codec
    value: Codec
    overrides: list[tuple[tuple[int, ...], Codec, Codec]]
    options: dict[str, Any]


def read(text: str) -> Said:
    """Read the text of a scheme. Raises ValueError for an unknown or impossible scheme, naming what is near."""
    key: Named | None = None
    value: Codec | None = None
    chosen: dict[str, Any] = {}
    overrides: list[tuple[tuple[int, ...], Codec, Codec]] = []
    before_rope: list[str] = []
    for item in _spelled_out(_items(text)):
        left, equals, right = item.rpartition("=")
        if item in _MODIFIERS and _MODIFIERS[item][0] not in chosen:
            chosen[_MODIFIERS[item][0]] = _MODIFIERS[item][1]
        elif not equals and key is None and value is None:
            key = named(item)
            value = key.value
        elif left == "k" and key is None:
            key = named(right)
        elif left == "v" and value is None:
            value = value_named(right)
        elif left == "outliers" and left not in chosen:
            chosen[left] = fraction(right)
        elif left == "sinks" and left not in chosen:
            chosen["sinks"], chosen["late_sinks"] = _sinks(right)
        elif left in _OPTIONS and left not in chosen:
            chosen[left] = _number(left, right)
        elif match := re.fullmatch(r"layers\[(-?\d+(?:,-?\d+)*)\]", left):
            other = named(right)
            overrides.append((tuple(map(int, match[1].split(","))), other.key, other.value))
            before_rope += [item] if other.pre_rope else []
        else:
            raise ValueError(_bad_item(text, item))
    if key is None or value is None:
        missing = "name a scheme" if key is None and value is None else f"'{'k' if key is None else 'v'}=' is missing"
        raise ValueError(f"{text!r} is not a scheme: {missing}; for example 'int4' or 'k=int4-channel,v=int4'")
    if before_rope and not key.pre_rope and "pre_rope" not in chosen:
        raise ValueError(
            f"{before_rope[0]} in {text!r} is made for keys before their rotary embedding, and the other layers "
            "store them after it; add pre-rope or post-rope, which then holds for all"
        )
    for name in ("pre_rope", "centred"):
        chosen.setdefault(name, getattr(key, name))
    codecs = key.key, value
    if changes := {name: chosen.pop(name) for name in CHANGES if name in chosen}:
        codecs = changed(codecs[0], changes), changed(codecs[1], changes)
    if all(isinstance(codec, Exact) for codec in codecs):
        chosen.setdefault("residual", None)
    return Said(*codecs, overrides, chosen)


def split_schemes(text: str) -> list[str]:
    """The schemes of a list such as ``exact,kivi2,residual=64,nuq3-1%`` or ``int4;kivi2``.

    Commas also separate the options of a scheme: what the grammar calls an option belongs to the scheme before it.
    Where that is not meant, semicolons separate schemes, and commas only options.

    Raises:
        ValueError: if an option stands first, or nothing stands between two separators.
    """
    found: list[str] = []
    for part in text.split(";"):
        if ";" in text:
            found.append(",".join(_items(part)))
            continue
        for item in _items(part):
            if item.startswith("k=") or ("=" not in item and item not in _MODIFIERS):
                found.append(item)
            elif found:
                found[-1] += f",{item}"
            else:
                raise ValueError(f"{item!r} in {text!r} is an option, and no scheme stands before it")
    if not all(found):
        raise ValueError(f"{text!r} has an empty scheme; give a list such as exact,int4,kivi2")
    return found


def _items(text: str) -> list[str]:
    """Split at the commas outside brackets, without blanks, in lower case."""
    return [item for item in re.split(r",(?![^\[]*\])", re.sub(r"\s+", "", text.lower()))]


def _spelled_out(items: list[str]) -> list[str]:
    """``items`` with an alias at the beginning replaced by the scheme that it stands for; what follows wins over it."""
    first, *rest = items
    if first not in ALIASES:
        return items
    said = {_sets(item) for item in rest}
    return [item for item in _items(ALIASES[first]) if _sets(item) not in said] + rest


def _sets(item: str) -> str:
    """What an option sets; an item that is none stands for itself."""
    return _MODIFIERS[item][0] if item in _MODIFIERS else item.partition("=")[0]


def _number(name: str, text: str) -> int:
    if not re.fullmatch(r"\d+", text):
        raise ValueError(f"{name}={text} is not a number of tokens; give a whole number such as {name}=128")
    return int(text)


def _sinks(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?:\+(\d+))?", text)
    if match is None:
        first = re.search(r"\d+", text)
        near = f"sinks={first[0] if first else 4}"
        raise ValueError(
            f"sinks={text} is not a number of tokens; give a whole number such as {near}, or two such as {near}+8: "
            "first tokens, and later ones that are found"
        )
    return int(match[1]), int(match[2] or 0)


def _bad_item(text: str, item: str) -> str:
    known = (*(f"{name}=" for name in (*_OPTIONS, "outliers", "layers[0]", "k", "v")), *_MODIFIERS)
    near = difflib.get_close_matches(item.split("=")[0] + "=" * ("=" in item), known, n=1)
    hint = f"; did you mean {near[0]}?" if near else "."
    if near and item.startswith(near[0]):
        hint = ": something before it says that already, or otherwise."
    return (
        f"{item!r} does not fit in {text!r}{hint} A scheme is a name or k=...,v=..., then once each: "
        f"residual=N, sinks=N or sinks=N+M, block=N, outliers=P%, layers[0,1,-1]=NAME, {', '.join(_MODIFIERS)}"
    )
