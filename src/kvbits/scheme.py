"""A scheme: how the KV cache of a whole model is stored. Frozen; strings exist only at the edges.

Grammar (case and blanks do not matter)::

    scheme  = first { "," option }
    first   = NAME                          both K and V, from the catalogue: int4, kivi2, nf4-gs32, ...
            | "k=" NAME "," "v=" NAME       K and V each their own
    option  = "residual=" N                 at least N most recent tokens stay exact (default 128)
            | "sinks=" N                    the first N tokens stay exact (default 4)
            | "block=" N                    tokens packed at a time (default 128)
            | "layers[" I { "," I } "]=" NAME [ "/" NAME ]    these layers differ (K/V); -1 is the last
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvbits.catalogue import BY_NAME, CATALOGUE
from kvbits.codecs import CODECS, Codec, Exact

RESIDUAL_TOKENS = 128
SINK_TOKENS = 4
BLOCK_TOKENS = 128
BLOCKS = (32, 64, 128, 256)

_EXACT_BITS = 16
"""Of an exact element, for estimates."""

_OPTIONS = ("residual", "sinks", "block")


@dataclass(frozen=True)
class Override:
    """Other codecs for some layers. ``layers`` may count from the end: -1 is the last."""

    layers: tuple[int, ...]
    key: Codec
    value: Codec

    def __post_init__(self) -> None:
        if not isinstance(self.layers, tuple) or not self.layers or not all(type(i) is int for i in self.layers):
            raise ValueError(f"layers={self.layers!r} names no layers; give a tuple of numbers such as (0, 1, -1)")

    def __str__(self) -> str:
        pair = _known_pair(self.key, self.value) or f"{self.key}/{self.value}"
        return f"layers[{','.join(map(str, self.layers))}]={pair}"


@dataclass(frozen=True)
class Scheme:
    """How K and V are stored.

    Attributes:
        key, value: codecs of the packed part.
        residual: at least this many of the most recent tokens stay exact (below ``residual + block``).
        sinks: the first tokens of each sequence that stay exact.
        block: tokens that are packed at a time.
        overrides: layers with other codecs.

    A scheme whose codecs are both ``exact`` packs nothing unless ``residual`` was set: :attr:`packs` says so.
    """

    key: Codec
    value: Codec
    residual: int | None = RESIDUAL_TOKENS
    sinks: int = SINK_TOKENS
    block: int = BLOCK_TOKENS
    overrides: tuple[Override, ...] = ()

    def __post_init__(self) -> None:
        exact = isinstance(self.key, Exact) and isinstance(self.value, Exact)
        if self.residual is None and not exact:
            raise ValueError(f"residual=None keeps every token exact, which only 'exact' means; got {self.key}")
        for name, number in (("residual", 0 if self.residual is None else self.residual), ("sinks", self.sinks)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 0:
                raise ValueError(f"{name}={number!r} is not a number of tokens; give 0 or more")
        if not isinstance(self.block, int) or self.block not in BLOCKS:
            raise ValueError(f"block={self.block!r} is not a block length; allowed are {BLOCKS}")
        for codec in (self.key, self.value, *(c for o in self.overrides for c in (o.key, o.value))):
            if self.block % codec.block_multiple:
                raise ValueError(
                    f"{codec} needs blocks of a multiple of {codec.block_multiple} tokens, not block={self.block}; "
                    f"allowed are {tuple(b for b in BLOCKS if b % codec.block_multiple == 0)}"
                )
        named = [i for override in self.overrides for i in override.layers]
        if len(named) != len(set(named)):
            raise ValueError(f"layers {sorted({i for i in named if named.count(i) > 1})} are named twice")

    @property
    def packs(self) -> bool:
        """Whether anything leaves the exact buffer."""
        return self.residual is not None

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
        if self.sinks != SINK_TOKENS:
            options.append(f"sinks={self.sinks}")
        if self.block != BLOCK_TOKENS:
            options.append(f"block={self.block}")
        pair = _known_pair(self.key, self.value) or f"k={self.key},v={self.value}"
        return ",".join([pair, *options, *map(str, self.overrides)])

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
        key = value = None
        fields: dict[str, Any] = {}
        overrides: list[Override] = []
        for item in _items(text):
            left, equals, right = item.rpartition("=")
            if not equals and key is None and value is None:
                key, value = parse_pair(item)
            elif left in ("k", "v") and (key if left == "k" else value) is None:
                pair = parse_pair(right)
                key, value = (pair[0], value) if left == "k" else (key, pair[1])
            elif left in _OPTIONS and left not in fields:
                fields[left] = _number(left, right)
            elif match := re.fullmatch(r"layers\[(-?\d+(?:,-?\d+)*)\]", left):
                overrides.append(Override(tuple(map(int, match[1].split(","))), *parse_pair(right)))
            else:
                raise ValueError(_bad_item(text, item))
        if key is None or value is None:
            missing = (
                "name a scheme" if key is None and value is None else f"'{'k' if key is None else 'v'}=' is missing"
            )
            raise ValueError(f"{text!r} is not a scheme: {missing}; for example 'int4' or 'k=int4-channel,v=int4'")
        if isinstance(key, Exact) and isinstance(value, Exact):
            fields.setdefault("residual", None)
        return Scheme(key, value, overrides=tuple(overrides), **fields)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data; :meth:`from_json` reads it back."""
        return {
            "key": str(self.key),
            "value": str(self.value),
            "residual": self.residual,
            "sinks": self.sinks,
            "block": self.block,
            "overrides": [{"layers": list(o.layers), "key": str(o.key), "value": str(o.value)} for o in self.overrides],
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> Scheme:
        """Inverse of :meth:`to_json`. Raises ValueError for unknown, missing or impossible fields."""
        _check_fields("a scheme", data, {"key", "value", "residual", "sinks", "block", "overrides"})
        if not isinstance(data["overrides"], (list, tuple)):
            raise ValueError(f"overrides={data['overrides']!r} is not a list; give [] for none")
        overrides = []
        for one in data["overrides"]:
            _check_fields("an override", one, {"layers", "key", "value"})
            if not isinstance(one["layers"], (list, tuple)):
                raise ValueError(f"layers={one['layers']!r} names no layers; give a list of numbers such as [0, 1, -1]")
            overrides.append(Override(tuple(one["layers"]), parse_codec(one["key"]), parse_codec(one["value"])))
        rest = {name: data[name] for name in _OPTIONS}
        return Scheme(parse_codec(data["key"]), parse_codec(data["value"]), overrides=tuple(overrides), **rest)


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
    for kind in CODECS:
        if match := kind.pattern.fullmatch(name):
            return kind.from_match(match)
    raise ValueError(f"unknown scheme {name!r}{_near(name)}")


def parse_pair(name: str) -> tuple[Codec, Codec]:
    """The codecs for K and V that a catalogue name, a codec's own spelling, or two with a slash between, stand for."""
    if entry := BY_NAME.get(name):
        return entry.key, entry.value
    key, slash, value = name.partition("/")
    if slash:
        return parse_pair(key)[0], parse_pair(value)[1]
    codec = parse_codec(name)
    return codec, codec


def _known_pair(key: Codec, value: Codec) -> str | None:
    for entry in CATALOGUE:
        if (entry.key, entry.value) == (key, value):
            return entry.name
    return str(key) if key == value else None


def _items(text: str) -> list[str]:
    """Split at the commas outside brackets, without blanks, in lower case."""
    return [item for item in re.split(r",(?![^\[]*\])", re.sub(r"\s+", "", text.lower()))]


def _number(name: str, text: str) -> int:
    if not re.fullmatch(r"\d+", text):
        raise ValueError(f"{name}={text} is not a number of tokens; give a whole number such as {name}=128")
    return int(text)


def _near(name: str) -> str:
    names = sorted(BY_NAME.keys() | {example for codec in CODECS for example in codec.examples})
    near = difflib.get_close_matches(name, names, n=4, cutoff=0.5)
    hint = f"; near: {', '.join(near)}" if near else ""
    pair = next((entry for entry in CATALOGUE if entry.key != entry.value and name.startswith(entry.name)), None)
    if pair is not None:
        hint = f"; {pair.name} is k={pair.key},v={pair.value}: change its groups there"
    return (
        f"{hint}. Known: {', '.join(BY_NAME)}; int, nf and hqq also with -channel (groups of tokens instead of "
        "channels) and with -gs16, -gs32, -gs64 or -gs128"
    )


def _bad_item(text: str, item: str) -> str:
    near = difflib.get_close_matches(item.split("=")[0], ("residual", "sinks", "block", "layers[0]", "k", "v"), n=1)
    hint = f"; did you mean {near[0]}=?" if near else "."
    return (
        f"{item!r} does not fit in {text!r}{hint} A scheme is a name or k=...,v=..., then once each: "
        "residual=N, sinks=N, block=N, layers[0,1,-1]=NAME"
    )
