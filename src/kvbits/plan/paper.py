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
tokens, alignment, tables and room to grow are not counted. A codec that no paper of these has is counted as it lies in
a block (``Codec.layout``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch

from kvbits.codecs import Affine, Exact, Grouped
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


def bits(named: Named, attention: Attention, tokens: int) -> float:
    """Bits per element of a packed layer that is not overridden, K and V together.

    Args:
        named: a scheme by its name.
        attention: the layer.
        tokens: in the cache, at least 1.
    """
    scheme, total = named.scheme, 0.0
    sinks = min(tokens, scheme.sinks + scheme.late_sinks if "sinks=" in named.name else 0)
    sides = zip(
        (scheme.key, scheme.value), named.words(), (attention.key_channels, attention.value_channels), strict=True
    )
    for index, (codec, word, channels) in enumerate(sides):
        if isinstance(codec, Grouped):
            each = _bits_of_groups(codec, word, attention.heads * channels, tokens if index == 0 else None)
        else:
            each = EXACT_BITS if isinstance(codec, Exact) else codec.bits_per_element(scheme.block, channels)
        total += channels * (each + (EXACT_BITS - (codec.format.bits or EXACT_BITS)) * sinks / tokens)
    return total / (attention.key_channels + attention.value_channels)


def _bits_of_groups(codec: Grouped, word: str, width: int, tokens: int | None) -> float:
    """Bits per element of a grouped codec.

    Args:
        word: how the codec is spelled.
        width: channels of all KV heads.
        tokens: in the cache, where static scales count once for all of them (keys); None: once for each token.
    """
    bits = codec.bits + 32 * codec.outliers
    if codec.static:
        return bits + 32 / (tokens or width)
    parts = [
        part for part in codec.layout(codec.group, codec.group, torch.bfloat16) if part.role in ("scales", "zeros")
    ]
    shared = sum(8 * part.dtype.itemsize for part in parts)
    if isinstance(codec, Affine) and not word.startswith("kivi"):
        shared = 16 + codec.bits  # the papers' zero of an integer is an integer
    return bits + shared / (width if _OVER_ALL_CHANNELS.fullmatch(word) else codec.group)


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
