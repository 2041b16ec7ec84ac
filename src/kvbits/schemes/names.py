"""What a name stands for, a codec or a pair of them, and how they are called.

A name is one of the catalogue, with outliers or ``qnorm`` behind it, or a codec's own spelling; ``int4/fp8`` is one for
keys and one for values.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, NamedTuple

from kvbits.codecs import Codec, known
from kvbits.codecs.grouped import spell_percent
from kvbits.schemes.catalogue import ALIASES, BY_NAME, CATALOGUE

CHANGES = {"outliers": "keeps no outliers beside its codes", "qnorm": "has no fitted table to normalise"}
"""What a scheme may change in its codecs, and what those have not that refuse it."""

_WITH_OUTLIERS = re.compile(r"(?P<plain>.+?)(?:-(?P<percent>(?:\d+(?:\.\d+)?|\.\d+)%))?(?P<qnorm>-qnorm)?")


def parse_codec(name: str) -> Codec:
    """The codec that ``name`` spells.

    Raises:
        ValueError: naming the nearest spellings.
    """
    if not isinstance(name, str):
        raise ValueError(f"{name!r} is not the name of a codec; give a string such as 'int4'")
    codec = _spelled(name)
    if codec is None and name in ALIASES:
        raise ValueError(f"{name!r} stands for a whole scheme, {ALIASES[name]}, and only at its beginning")
    if codec is None:
        raise ValueError(f"unknown scheme {name!r}{_near(name)}")
    return codec


def _spelled(name: str) -> Codec | None:
    for kind in known():
        if match := kind.pattern.fullmatch(name):
            return kind.from_match(match)
    return None


class Named(NamedTuple):
    """What a name stands for."""

    key: Codec
    value: Codec
    pre_rope: bool = False
    centred: bool = False


def parse_pair(name: str) -> tuple[Codec, Codec]:
    """The codecs for K and V that a catalogue name, a codec's own spelling, or two with a slash between, stand for."""
    found = named(name)
    return found.key, found.value


def named(name: str) -> Named:
    """As :func:`parse_pair`, and what a scheme of that name begins with."""
    key, slash, value = name.partition("/")
    if slash:
        return named(key)._replace(value=value_named(value))
    match = _WITH_OUTLIERS.fullmatch(name)
    plain = match["plain"] if match else name
    if entry := BY_NAME.get(plain):
        changes: dict[str, Any] = {}
        if match and match["percent"]:
            changes["outliers"] = fraction(match["percent"])
        if match and match["qnorm"]:
            changes["qnorm"] = True
        pair = changed(entry.key, changes), changed(entry.value, changes)
        return Named(*pair, entry.pre_rope, entry.centred)
    codec = parse_codec(name)
    return Named(codec, codec)


def value_named(name: str) -> Codec:
    """What ``name`` stands for where values are named: of a name that is a codec's and a pair's, the codec."""
    return _spelled(name) or named(name).value


def changed(codec: Codec, changes: Mapping[str, Any]) -> Codec:
    """``codec`` with outliers or Q-Norm; ValueError where it has none, or others already."""
    for name, why in CHANGES.items():
        if name in changes and not _has(codec, name):
            able = [kind.examples[0] for kind in known() if _has(kind, name)]
            raise ValueError(f"{codec} {why}; {name} goes with {', '.join(able)}")
    changed = replace(codec, **changes)
    if any(getattr(codec, name) not in (0, getattr(changed, name)) for name in changes):
        raise ValueError(f"{codec} names its outliers already: they cannot be {100 * changes['outliers']:g}% as well")
    return changed


def _has(codec: Codec | type[Codec], name: str) -> bool:
    return not getattr(codec, "dense_only", "") and any(field.name == name for field in fields(codec))


def known_pair(key: Codec, value: Codec) -> str | None:
    """How a pair of codecs is called, or None."""
    if key == value and parse_pair(str(key)) == (key, value):
        return str(key)
    changes = {name: getattr(key, name) for name in CHANGES if getattr(key, name, None)}
    for entry in CATALOGUE:
        pair = entry.key, entry.value
        if all(_has(codec, name) for name in changes for codec in pair):
            pair = replace(entry.key, **changes), replace(entry.value, **changes)
        if pair == (key, value):
            return entry.name + spell_percent(changes.get("outliers", 0)) + "-qnorm" * ("qnorm" in changes)
    return None


def fraction(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+)%?", text)
    if match is None or not text.endswith("%"):
        raise ValueError(f"outliers={text} is not a share of the elements; give a percentage such as outliers=1%")
    return float(match[1]) / 100


def _near(name: str) -> str:
    pairs = [entry for entry in CATALOGUE if entry.key != entry.value]
    spelled = {example for codec in known() for example in codec.examples}
    names = sorted(BY_NAME.keys() | ALIASES.keys() | spelled | {f"{entry.name}-1%" for entry in pairs})
    near = difflib.get_close_matches(name, names, n=4, cutoff=0.5)
    hint = f"; near: {', '.join(near)}" if near else ""
    pair = next((entry for entry in pairs if re.fullmatch(rf"{entry.name}-(channel|gs).*", name)), None)
    if pair is not None:
        hint = f"; {pair.name} is k={pair.key},v={pair.value}: change its groups there"
    return (
        f"{hint}. Known: {', '.join((*ALIASES, *BY_NAME))}; int, nf, rot and hqq also with -channel (groups of tokens "
        "instead of channels) and with -gs16, -gs32, -gs64 or -gs128; all of these but hqq with -static (one scale for "
        "each channel of a layer) and, last, with outliers such as -1%"
    )
