"""A scheme: how the KV cache of a whole model is stored. Frozen; strings exist only at the edges.

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
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from kvbits.catalogue import ALIASES, BY_NAME, CATALOGUE
from kvbits.codecs import CODECS, Codec, Exact
from kvbits.codecs.grouped import spell_percent

RESIDUAL_TOKENS = 128
SINK_TOKENS = 4
BLOCK_TOKENS = 128
BLOCKS = (32, 64, 128, 256)

_CHANGES = {"outliers": "keeps no outliers beside its codes", "qnorm": "has no fitted table to normalise"}
"""What a scheme may change in its codecs, and what those have not that refuse it."""

_WITH_OUTLIERS = re.compile(r"(?P<plain>.+?)(?:-(?P<percent>(?:\d+(?:\.\d+)?|\.\d+)%))?(?P<qnorm>-qnorm)?")

_EXACT_BITS = 16
"""Of an exact element, for estimates."""

_OPTIONS = ("residual", "sinks", "block")
_FIELDS = (*_OPTIONS, "pre_rope", "centred", "late_sinks")
_MODIFIERS: dict[str, tuple[str, bool]] = {
    "pre-rope": ("pre_rope", True),
    "post-rope": ("pre_rope", False),
    "centred": ("centred", True),
    "uncentred": ("centred", False),
    "qnorm": ("qnorm", True),
}
"""What a word of the grammar sets."""


@dataclass(frozen=True)
class Override:
    """Other codecs for some layers. ``layers`` may count from the end: -1 is the last."""

    layers: tuple[int, ...]
    key: Codec
    value: Codec

    def __post_init__(self) -> None:
        if not isinstance(self.layers, tuple) or not self.layers or not all(type(i) is int for i in self.layers):
            raise ValueError(f"layers={self.layers!r} names no layers; give a tuple of numbers such as (0, 1, -1)")

    @property
    def pair(self) -> str:
        """What the codecs are called together."""
        return _known_pair(self.key, self.value) or f"{self.key}/{self.value}"

    def __str__(self) -> str:
        return f"layers[{','.join(map(str, self.layers))}]={self.pair}"


@dataclass(frozen=True)
class Scheme:
    """How K and V are stored.

    Attributes:
        key, value: codecs of the packed part.
        residual: at least this many of the most recent tokens stay exact (below ``residual + block``).
        sinks: the first tokens of each sequence that stay exact.
        late_sinks: up to so many later tokens of each sequence stay exact, in every layer by itself, whose keys look
            like those of attention sinks (KVSink, arXiv 2508.04257); see :mod:`kvbits.late`.
        block: tokens that are packed at a time.
        overrides: layers with other codecs.
        pre_rope: keys are stored as they were before their rotary embedding (KVQuant, arXiv 2401.18079, section 3.2).
        centred: a static mean for each layer, KV head and channel, taken before the rotary embedding, is subtracted
            from the keys and added back when they are read. It costs no bits per token.

    A scheme whose codecs are both ``exact`` packs nothing unless ``residual`` was set: :attr:`packs` says so.
    """

    key: Codec
    value: Codec
    residual: int | None = RESIDUAL_TOKENS
    sinks: int = SINK_TOKENS
    block: int = BLOCK_TOKENS
    overrides: tuple[Override, ...] = ()
    pre_rope: bool = False
    centred: bool = False
    late_sinks: int = 0

    def __post_init__(self) -> None:
        exact = isinstance(self.key, Exact) and isinstance(self.value, Exact)
        if self.residual is None and not exact:
            raise ValueError(f"residual=None keeps every token exact, which only 'exact' means; got {self.key}")
        residual = 0 if self.residual is None else self.residual
        for name, number in (("residual", residual), ("sinks", self.sinks), ("late_sinks", self.late_sinks)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 0:
                raise ValueError(f"{name}={number!r} is not a number of tokens; give 0 or more")
        if not isinstance(self.block, int) or self.block not in BLOCKS:
            raise ValueError(f"block={self.block!r} is not a block length; allowed are {BLOCKS}")
        for codec in self.codecs:
            if self.block % codec.block_multiple:
                raise ValueError(
                    f"{codec} needs blocks of a multiple of {codec.block_multiple} tokens, not block={self.block}; "
                    f"allowed are {tuple(b for b in BLOCKS if b % codec.block_multiple == 0)}"
                )
        for name, flag in (("pre_rope", self.pre_rope), ("centred", self.centred)):
            if not isinstance(flag, bool):
                raise ValueError(f"{name}={flag!r} is neither True nor False")
        for codec in (self.key, *(override.key for override in self.overrides)):
            if self.pre_rope and codec.rotates:
                raise ValueError(
                    f"{codec} keys are rotated over head_dim, which does not commute with the rotary embedding: they "
                    "cannot be stored before it; use 'centred', which takes what is constant before RoPE off them"
                )
        named = [i for override in self.overrides for i in override.layers]
        if len(named) != len(set(named)):
            raise ValueError(f"layers {sorted({i for i in named if named.count(i) > 1})} are named twice")

    @property
    def packs(self) -> bool:
        """Whether anything leaves the exact buffer."""
        return self.residual is not None

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """All of them, those of single layers too."""
        return (self.key, self.value, *(codec for one in self.overrides for codec in (one.key, one.value)))

    @property
    def needs_calibration(self) -> bool:
        """Whether it runs with a calibration of the model only."""
        return any(codec.needs_calibration for codec in self.codecs)

    def for_layer(self, index: int, count: int) -> Scheme:
        """The scheme of layer ``index`` of ``count``, without overrides.

        Raises:
            ValueError: if an override names a layer that the model does not have.
        """
        found = None
        for override in self.overrides:
            for layer in override.layers:
                if not -count <= layer < count:
                    raise ValueError(f"{override} names layer {layer}, but the model has layers 0 to {count - 1}")
                if layer % count == index:
                    if found not in (None, override):
                        raise ValueError(f"layer {index} is named twice, by {found} and by {override}")
                    found = override
        plain = replace(self, overrides=())
        if found is None:
            return plain
        residual = plain.residual
        if isinstance(found.key, Exact) and isinstance(found.value, Exact):
            residual = None
        elif residual is None:
            residual = RESIDUAL_TOKENS
        return replace(plain, key=found.key, value=found.value, residual=residual)

    def for_window(self, window_tokens: int) -> Scheme:
        """This scheme for a layer that sees no further back than a window, where exact tokens are few anyway.

        With blocks as much shorter as it takes to need less memory than the exact window; else ``exact``: where most
        of the window is residual, packing the rest saves nothing. A scheme that packs exact tokens is left as it is.
        """
        if not self.packs or (isinstance(self.key, Exact) and isinstance(self.value, Exact)):
            return self
        for block in sorted((b for b in BLOCKS if b <= self.block), reverse=True):
            if all(block % codec.block_multiple == 0 for codec in (self.key, self.value)):
                scheme = replace(self, block=block, overrides=())
                if scheme._window_bits(window_tokens) <= 0.95 * (window_tokens - 1) * 2 * _EXACT_BITS:
                    return scheme
        return Scheme(Exact(), Exact(), residual=None, sinks=self.sinks, block=self.block)

    def for_attention(self, index: int, count: int, window_tokens: int | None, sliding: bool) -> Scheme | None:
        """The scheme of an attention layer, or None where it keeps the model's own type, exact.

        Args:
            index, count: as for :meth:`for_layer`, which also says what is raised.
            window_tokens: how far it sees back; None is without a limit.
            sliding: whether layers with a window are packed, too, where that saves memory.
        """
        own = self.for_layer(index, count)
        if window_tokens is None:
            return own
        own = own.for_window(window_tokens)
        return own if sliding and own.packs else None

    def _window_bits(self, window_tokens: int) -> float:
        """Most bits that a channel of K and one of V need together under a window: see ``LayerCache._slide``."""
        assert self.residual is not None
        block, bits = self.block, sum(c.bits_per_element(self.block, 64) for c in (self.key, self.value))
        # One block may be left behind in part, one stays for steps back, one comes before one goes; an eighth is spare.
        packed = max(0, window_tokens - 1 - self.residual) + 3 * block
        return 2 * _EXACT_BITS * (self.residual + block - 1) + bits * packed * 9 / 8

    def __str__(self) -> str:
        exact = isinstance(self.key, Exact) and isinstance(self.value, Exact)
        options = []
        if self.residual != (None if exact else RESIDUAL_TOKENS):
            options.append(f"residual={self.residual}")
        if self.sinks != SINK_TOKENS or self.late_sinks:
            options.append(f"sinks={self.sinks}" + (f"+{self.late_sinks}" if self.late_sinks else ""))
        if self.block != BLOCK_TOKENS:
            options.append(f"block={self.block}")
        known = _known_pair(self.key, self.value)
        pair, usual = known or f"k={self.key},v={self.value}", _named(known or str(self.key))
        modifiers = []
        # Without a word, what an override's name is made for would be refused.
        otherwise = usual.pre_rope or any(_named(one.pair).pre_rope for one in self.overrides)
        if self.pre_rope != usual.pre_rope or (otherwise and not self.pre_rope):
            modifiers.append("pre-rope" if self.pre_rope else "post-rope")
        if self.centred != usual.centred:
            modifiers.append("centred" if self.centred else "uncentred")
        return ",".join([pair, *modifiers, *options, *map(str, self.overrides)])

    @staticmethod
    def parse(text: str | Scheme) -> Scheme:
        """Read the grammar above; a :class:`Scheme` passes through.

        Raises:
            TypeError: if ``text`` is neither a string nor a scheme.
            ValueError: for an unknown or impossible scheme, naming what is near.
        """
        if isinstance(text, Scheme):
            return text
        if not isinstance(text, str):
            raise TypeError(f"a scheme is a string such as 'int4' or a kvbits.Scheme, not {type(text).__name__}")
        key: _Named | None = None
        value: Codec | None = None
        chosen: dict[str, Any] = {}
        overrides: list[Override] = []
        before_rope: list[str] = []
        for item in _spelled_out(_items(text)):
            left, equals, right = item.rpartition("=")
            if item in _MODIFIERS and _MODIFIERS[item][0] not in chosen:
                chosen[_MODIFIERS[item][0]] = _MODIFIERS[item][1]
            elif not equals and key is None and value is None:
                key = _named(item)
                value = key.value
            elif left == "k" and key is None:
                key = _named(right)
            elif left == "v" and value is None:
                value = _value_named(right)
            elif left == "outliers" and left not in chosen:
                chosen[left] = _fraction(right)
            elif left == "sinks" and left not in chosen:
                chosen["sinks"], chosen["late_sinks"] = _sinks(right)
            elif left in _OPTIONS and left not in chosen:
                chosen[left] = _number(left, right)
            elif match := re.fullmatch(r"layers\[(-?\d+(?:,-?\d+)*)\]", left):
                named = _named(right)
                overrides.append(Override(tuple(map(int, match[1].split(","))), named.key, named.value))
                before_rope += [item] if named.pre_rope else []
            else:
                raise ValueError(_bad_item(text, item))
        if key is None or value is None:
            missing = (
                "name a scheme" if key is None and value is None else f"'{'k' if key is None else 'v'}=' is missing"
            )
            raise ValueError(f"{text!r} is not a scheme: {missing}; for example 'int4' or 'k=int4-channel,v=int4'")
        if before_rope and not key.pre_rope and "pre_rope" not in chosen:
            raise ValueError(
                f"{before_rope[0]} in {text!r} is made for keys before their rotary embedding, and the other layers "
                "store them after it; add pre-rope or post-rope, which then holds for all"
            )
        for name in ("pre_rope", "centred"):
            chosen.setdefault(name, getattr(key, name))
        codecs = key.key, value
        if changes := {name: chosen.pop(name) for name in _CHANGES if name in chosen}:
            codecs = _changed(codecs[0], changes), _changed(codecs[1], changes)
        if all(isinstance(codec, Exact) for codec in codecs):
            chosen.setdefault("residual", None)
        return Scheme(*codecs, overrides=tuple(overrides), **chosen)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data; :meth:`from_json` reads it back."""
        return {
            "key": str(self.key),
            "value": str(self.value),
            "residual": self.residual,
            "sinks": self.sinks,
            "block": self.block,
            "pre_rope": self.pre_rope,
            "centred": self.centred,
            "late_sinks": self.late_sinks,
            "overrides": [{"layers": list(o.layers), "key": str(o.key), "value": str(o.value)} for o in self.overrides],
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> Scheme:
        """Inverse of :meth:`to_json`. Raises ValueError for unknown, missing or impossible fields."""
        _check_fields("a scheme", data, {"key", "value", *_FIELDS, "overrides"})
        if not isinstance(data["overrides"], (list, tuple)):
            raise ValueError(f"overrides={data['overrides']!r} is not a list; give [] for none")
        overrides = []
        for one in data["overrides"]:
            _check_fields("an override", one, {"layers", "key", "value"})
            if not isinstance(one["layers"], (list, tuple)):
                raise ValueError(f"layers={one['layers']!r} names no layers; give a list of numbers such as [0, 1, -1]")
            overrides.append(Override(tuple(one["layers"]), parse_codec(one["key"]), parse_codec(one["value"])))
        rest = {name: data[name] for name in _FIELDS}
        return Scheme(parse_codec(data["key"]), parse_codec(data["value"]), overrides=tuple(overrides), **rest)


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


def _check_fields(what: str, data: object, allowed: set[str]) -> None:
    if not isinstance(data, Mapping):
        raise ValueError(f"{what} has the fields {sorted(allowed)}; got {data!r}")
    if set(data) != allowed:
        raise ValueError(f"{what} has the fields {sorted(allowed)}, not {sorted(map(str, data))}")


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
    for kind in CODECS:
        if match := kind.pattern.fullmatch(name):
            return kind.from_match(match)
    return None


class _Named(NamedTuple):
    """What a name stands for."""

    key: Codec
    value: Codec
    pre_rope: bool = False
    centred: bool = False


def parse_pair(name: str) -> tuple[Codec, Codec]:
    """The codecs for K and V that a catalogue name, a codec's own spelling, or two with a slash between, stand for."""
    named = _named(name)
    return named.key, named.value


def _named(name: str) -> _Named:
    """As :func:`parse_pair`, and what a scheme of that name begins with."""
    key, slash, value = name.partition("/")
    if slash:
        return _named(key)._replace(value=_value_named(value))
    match = _WITH_OUTLIERS.fullmatch(name)
    plain = match["plain"] if match else name
    if entry := BY_NAME.get(plain):
        changes: dict[str, Any] = {}
        if match and match["percent"]:
            changes["outliers"] = _fraction(match["percent"])
        if match and match["qnorm"]:
            changes["qnorm"] = True
        pair = _changed(entry.key, changes), _changed(entry.value, changes)
        return _Named(*pair, entry.pre_rope, entry.centred)
    codec = parse_codec(name)
    return _Named(codec, codec)


def _value_named(name: str) -> Codec:
    """What ``name`` stands for where values are named: of a name that is a codec's and a pair's, the codec."""
    return _spelled(name) or _named(name).value


def _changed(codec: Codec, changes: Mapping[str, Any]) -> Codec:
    """``codec`` with outliers or Q-Norm; ValueError where it has none, or others already."""
    for name, why in _CHANGES.items():
        if name in changes and not _has(codec, name):
            able = [kind.examples[0] for kind in CODECS if _has(kind, name)]
            raise ValueError(f"{codec} {why}; {name} goes with {', '.join(able)}")
    changed = replace(codec, **changes)
    if any(getattr(codec, name) not in (0, getattr(changed, name)) for name in changes):
        raise ValueError(f"{codec} names its outliers already: they cannot be {100 * changes['outliers']:g}% as well")
    return changed


def _has(codec: Codec | type[Codec], name: str) -> bool:
    return not getattr(codec, "dense_only", "") and any(field.name == name for field in fields(codec))


def _known_pair(key: Codec, value: Codec) -> str | None:
    """How a pair of codecs is called, or None."""
    if key == value and parse_pair(str(key)) == (key, value):
        return str(key)
    changes = {name: getattr(key, name) for name in _CHANGES if getattr(key, name, None)}
    for entry in CATALOGUE:
        pair = entry.key, entry.value
        if all(_has(codec, name) for name in changes for codec in pair):
            pair = replace(entry.key, **changes), replace(entry.value, **changes)
        if pair == (key, value):
            return entry.name + spell_percent(changes.get("outliers", 0)) + "-qnorm" * ("qnorm" in changes)
    return None


def _items(text: str) -> list[str]:
    """Split at the commas outside brackets, without blanks, in lower case."""
    return [item for item in re.split(r",(?![^\[]*\])", re.sub(r"\s+", "", text.lower()))]


def _fraction(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+)%?", text)
    if match is None or not text.endswith("%"):
        raise ValueError(f"outliers={text} is not a share of the elements; give a percentage such as outliers=1%")
    return float(match[1]) / 100


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
        near = f"sinks={first[0] if first else SINK_TOKENS}"
        raise ValueError(
            f"sinks={text} is not a number of tokens; give a whole number such as {near}, or two such as {near}+8: "
            "first tokens, and later ones that are found"
        )
    return int(match[1]), int(match[2] or 0)


def _near(name: str) -> str:
    pairs = [entry for entry in CATALOGUE if entry.key != entry.value]
    spelled = {example for codec in CODECS for example in codec.examples}
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
