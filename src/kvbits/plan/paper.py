"""The papers' accounting: bits per element as KVQuant (arXiv 2401.18079) and others count them. Not what is allocated.

Of one side (keys or values) with ``d`` channels over all KV heads, at ``L`` tokens::

    int b            b + (b + 16) / g     a zero of b bits and a 16-bit scale for each group of g
    nf b, hqq b      b + 32 / g           a 16-bit zero
    kivi b           b + 32 / g           the same (KIVI, arXiv 2402.02750)
    nuq b            keys b + 32 / L, values b + 32 / d
    fp8, lm b        b + 16 / head_dim    a 16-bit scale for each token and head
    fp8-static       8
    outliers p       + 32 p               a 16-bit value and a 16-bit index
    sinks=n          + (16 - b) n / L     where the scheme names them

``int4``, ``nf4`` and ``nuq4`` mean what the paper's table means by them: one group over all ``d`` channels of a token.
What kvbits stores under these names has groups of 64 channels, which the paper calls ``int4-gs64``. Exact recent
tokens, alignment, tables and room to grow are not counted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from kvbits.codecs import Codec, Exact, Fp8, Fp8Static, Grouped, HalfQuadratic, LloydMax, NonUniform, NormalFloat
from kvbits.plan.shapes import Attention, Shape
from kvbits.schemes.scheme import Scheme

EXACT_BITS = 16
EXACT_NAMES = ("fp16", "bf16")
"""What ``exact`` is called in tables of 16-bit models."""

_OVER_ALL_CHANNELS = re.compile(r"(int|nf|nuq)\d(-token|-calibrated)?(-\d*\.?\d+%)?(-qnorm)?")


@dataclass(frozen=True)
class Named:
    """A scheme, and the name it was asked for by, since ``int4`` and ``int4-gs64`` are one scheme and two in the paper.

    Attributes:
        name: as it was written.
        scheme: what it means.
    """

    name: str
    scheme: Scheme

    @staticmethod
    def parse(text: str) -> Named:
        """Read the grammar of :mod:`kvbits.schemes.grammar`, and ``fp16`` and ``bf16`` for ``exact``. Raises
        ValueError.
        """
        name = text.strip()
        return Named(name, Scheme.parse("exact" if name.lower() in EXACT_NAMES else name))

    def words(self) -> tuple[str, str]:
        """How the codecs of keys and values are spelled."""
        items = re.sub(r"\s+", "", self.name.lower()).split(",")
        sides = {item[0]: item[2:] for item in items if item[:2] in ("k=", "v=")}
        key, _, value = items[0].partition("/")
        return sides.get("k", key), sides.get("v", value or key)


@dataclass(frozen=True)
class Terms:
    """Bits per element of keys or values, as the numerators of what they are made of.

    Attributes:
        code: of a code.
        each: of every element beside it.
        per_width: divided by the channels of all KV heads.
        per_channels: divided by those of one head.
        per_tokens: divided by the tokens in the cache.
        sinks: exact tokens, of which each costs what an exact element has more.
    """

    code: int
    each: float = 0.0
    per_width: float = 0.0
    per_channels: float = 0.0
    per_tokens: float = 0.0
    sinks: int = 0

    def bits(self, heads: int, channels: int, tokens: int) -> float:
        """The sum."""
        shared = self.per_width / (heads * channels) + self.per_channels / channels + self.per_tokens / tokens
        exact = (EXACT_BITS - self.code) * min(tokens, self.sinks) / tokens
        return self.code + self.each + shared + exact


def terms(named: Named) -> tuple[Terms, Terms]:
    """Of keys and of values, of layers that are not overridden."""
    scheme = named.scheme
    sinks = scheme.sinks + scheme.late_sinks if "sinks=" in named.name else 0
    key, value = named.words()
    return replace(_terms(scheme.key, key, True), sinks=sinks), replace(_terms(scheme.value, value, False), sinks=sinks)


def _terms(codec: Codec, word: str, keys: bool) -> Terms:
    bits = codec.format.bits
    if isinstance(codec, Exact):
        return Terms(EXACT_BITS)
    if isinstance(codec, Fp8Static):
        return Terms(bits)
    if isinstance(codec, (Fp8, LloydMax)):
        return Terms(bits, per_channels=16)
    assert isinstance(codec, Grouped)
    outliers = 32 * codec.outliers
    wide_zero = isinstance(codec, (NormalFloat, HalfQuadratic, NonUniform)) or codec.static or word.startswith("kivi")
    shared = (16 if wide_zero else bits) + 16
    if codec.static and keys:
        return Terms(bits, outliers, per_tokens=shared)
    if codec.static or _OVER_ALL_CHANNELS.fullmatch(word):
        return Terms(bits, outliers, per_width=shared)
    return Terms(bits, shared / codec.group + outliers)


def bits(named: Named, attention: Attention, tokens: int) -> float:
    """Bits per element of a packed layer that is not overridden, K and V together.

    Args:
        named: a scheme by its name.
        attention: the layer.
        tokens: in the cache, at least 1.
    """
    key, value = terms(named)
    heads, channels = attention.heads, (attention.key_channels, attention.value_channels)
    each = [side.bits(heads, of_head, tokens) * of_head for side, of_head in zip((key, value), channels, strict=True)]
    return sum(each) / sum(channels)


def nbytes(named: Named, shape: Shape, tokens: int, batch: int = 1) -> float:
    """Bytes of all attention layers. Those with a window hold it and no more, in 16 bits; overrides are counted.

    Raises:
        ValueError: where the scheme names layers that the model does not have.
    """
    total, count = 0.0, len(shape.layers)
    for index, layer in enumerate(shape.layers):
        attention = layer.attention
        if attention is None:
            total += batch * (layer.row_bytes + layer.token_bytes * tokens)
            continue
        own = named.scheme.for_layer(index, count)
        if attention.window is not None:
            each, held = float(EXACT_BITS), min(tokens, attention.window)
        else:
            name = named.name if own == replace(named.scheme, overrides=()) else str(own)
            each, held = bits(Named(name, own), attention, tokens), tokens
        total += batch * held * attention.channels * each / 8
    return total
