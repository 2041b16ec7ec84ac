"""A scheme: how the KV cache of a whole model is stored. Frozen; strings exist only at the edges.

How one is written stands in :mod:`kvbits.schemes.grammar`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvbits.codecs import Codec, Exact
from kvbits.schemes import grammar
from kvbits.schemes.names import known_pair, named, parse_codec
from kvbits.store.room import Limits, most_room_in_window

RESIDUAL_TOKENS = 128
SINK_TOKENS = 4
BLOCK_TOKENS = 128
BLOCKS = (32, 64, 128, 256)

_EXACT_BYTES = 2
"""Of an exact element, for estimates."""

_FIELDS = ("residual", "sinks", "block", "pre_rope", "centred", "late_sinks")


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
        return known_pair(self.key, self.value) or f"{self.key}/{self.value}"

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
            like those of attention sinks (KVSink, arXiv 2508.04257); see :mod:`kvbits.store.late_sinks`.
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
        if self.residual is None and not self.is_exact:
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
    def is_exact(self) -> bool:
        """Whether keys and values stay as they came, packed or not (apart from overrides)."""
        return isinstance(self.key, Exact) and isinstance(self.value, Exact)

    @property
    def packs(self) -> bool:
        """Whether anything leaves the exact buffer."""
        return self.residual is not None

    def limits(self, window_tokens: int | None = None) -> Limits:
        """How many tokens of a layer stay exact; under a window there are no sinks."""
        sinks = (self.sinks, self.late_sinks) if window_tokens is None else (0, 0)
        return Limits(*sinks, self.residual, self.block)

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
        if not self.packs or self.is_exact:
            return self
        for block in sorted((b for b in BLOCKS if b <= self.block), reverse=True):
            if all(block % codec.block_multiple == 0 for codec in (self.key, self.value)):
                scheme = replace(self, block=block, overrides=())
                if scheme._window_bytes(window_tokens) <= 0.95 * (window_tokens - 1) * 2 * _EXACT_BYTES:
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

    def _window_bytes(self, window_tokens: int) -> float:
        """Most bytes that a channel of K and one of V need together under a window."""
        bits = sum(codec.bits_per_element(self.block, 64) for codec in (self.key, self.value))
        room = most_room_in_window(self.limits(window_tokens), window_tokens)
        return room.nbytes(2 * _EXACT_BYTES, self.block * bits / 8)

    def __str__(self) -> str:
        options = []
        if self.residual != (None if self.is_exact else RESIDUAL_TOKENS):
            options.append(f"residual={self.residual}")
        if self.sinks != SINK_TOKENS or self.late_sinks:
            options.append(f"sinks={self.sinks}" + (f"+{self.late_sinks}" if self.late_sinks else ""))
        if self.block != BLOCK_TOKENS:
            options.append(f"block={self.block}")
        known = known_pair(self.key, self.value)
        pair, usual = known or f"k={self.key},v={self.value}", named(known or str(self.key))
        modifiers = []
        # Without a word, what an override's name is made for would be refused.
        otherwise = usual.pre_rope or any(named(one.pair).pre_rope for one in self.overrides)
        if self.pre_rope != usual.pre_rope or (otherwise and not self.pre_rope):
            modifiers.append("pre-rope" if self.pre_rope else "post-rope")
        if self.centred != usual.centred:
            modifiers.append("centred" if self.centred else "uncentred")
        return ",".join([pair, *modifiers, *options, *map(str, self.overrides)])

    @staticmethod
    def parse(text: str | Scheme) -> Scheme:
        """Read the grammar; a :class:`Scheme` passes through.

        Raises:
            TypeError: if ``text`` is neither a string nor a scheme.
            ValueError: for an unknown or impossible scheme, naming what is near.
        """
        if isinstance(text, Scheme):
            return text
        if not isinstance(text, str):
            raise TypeError(f"a scheme is a string such as 'int4' or a kvbits.Scheme, not {type(text).__name__}")
        said = grammar.read(text)
        overrides = tuple(Override(*one) for one in said.overrides)
        return Scheme(said.key, said.value, overrides=overrides, **said.options)

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


def _check_fields(what: str, data: object, allowed: set[str]) -> None:
    if not isinstance(data, Mapping):
        raise ValueError(f"{what} has the fields {sorted(allowed)}; got {data!r}")
    if set(data) != allowed:
        raise ValueError(f"{what} has the fields {sorted(allowed)}, not {sorted(map(str, data))}")
