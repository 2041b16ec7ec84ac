"""Bytes that a cache really takes, foretold: those of a live ``KVCache`` after the same calls, to the byte.

Nothing is allocated. Records come from :class:`kvbits.store.record.Record`, room from :mod:`kvbits.store.room`, what a
codec fits from ``Codec.fit`` itself: the cache allocates by the same. What is left to foretell is the order of
events, and that depends on the :class:`History`: a cache that grew step by step has room in hand that one prompt does
not.

Padding, beams and crops are not foretold. Of late sinks (``sinks=4+8``) the room is; which are found is up to the text,
and where chunks are masked, the order of their tokens takes 4 bytes a token more.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import torch

from kvbits.codecs import Codec
from kvbits.plan.shapes import Attention, Layer, Shape
from kvbits.schemes.scheme import RESIDUAL_TOKENS, Scheme
from kvbits.store.record import Record
from kvbits.store.room import Filled
from kvbits.store.shards import ALONE, Shards
from kvbits.types import ByteCount

_FLOAT_BYTES = torch.float32.itemsize


@dataclass(frozen=True)
class History:
    """The calls that filled a cache: ``runs`` of (tokens of a call, calls)."""

    runs: tuple[tuple[int, int], ...]

    @staticmethod
    def of(context: int, steps: int = 0, chunk: int | None = None) -> History:
        """A prompt of ``context - steps`` tokens, in one piece or in chunks, and then single steps."""
        prompt = context - steps
        if chunk is None or chunk >= prompt:
            runs = [(prompt, 1)]
        else:
            runs = [(chunk, prompt // chunk), (prompt % chunk, 1)]
        return History(tuple((tokens, calls) for tokens, calls in [*runs, (1, steps)] if tokens and calls))

    @property
    def tokens(self) -> int:
        """Of all calls."""
        return sum(tokens * calls for tokens, calls in self.runs)


@dataclass(frozen=True)
class Real:
    """What one layer or a whole cache takes.

    Attributes:
        count: bytes by part, as ``KVCache.nbytes``.
        elements: of K and V that packed layers hold, as :attr:`kvbits.layer.cache.LayerCache.elements`.
    """

    count: ByteCount = field(default_factory=ByteCount)
    elements: int = 0

    def __add__(self, more: Real) -> Real:
        return Real(self.count + more.count, self.elements + more.elements)

    def __mul__(self, times: int) -> Real:
        parts = {part.name: times * getattr(self.count, part.name) for part in fields(ByteCount)}
        return Real(ByteCount(**parts), times * self.elements)

    @property
    def bits_per_element(self) -> float:
        """As ``KVCache.bits_per_element``: 0 while nothing is held, and without layers of the model's own type."""
        return 8 * (self.count.total - self.count.other) / self.elements if self.elements else 0.0


def cache(
    shape: Shape, scheme: Scheme, history: History, batch: int = 1, sliding: bool = False, source: int = 0
) -> Real:
    """What the cache of a model takes.

    Args:
        shape: the model.
        scheme: of its cache.
        history: calls so far.
        batch: rows, without padding.
        sliding: as in :func:`kvbits.cache_for`.
        source: tokens of an encoder's text, for models that have one.

    Raises:
        ValueError: where the scheme names layers that the model does not have, or does not fit its heads.
    """
    return of_layers(shape.layers, stores(shape, scheme, sliding), history, batch, scheme.needs_calibration, source)


def stores(shape: Shape, scheme: Scheme, sliding: bool = False) -> list[Scheme | None]:
    """For each layer the scheme that it is packed under; None where it keeps the model's own type."""
    count, found = len(shape.layers), []
    for index, layer in enumerate(shape.layers):
        window = None if layer.attention is None else layer.attention.window
        own = scheme.for_attention(index, count, window, sliding)
        found.append(None if layer.attention is None or shape.refusal is not None else own)
    return found


def of_layers(
    layers: Sequence[Layer],
    stored: Sequence[Scheme | None],
    history: History,
    batch: int,
    calibrated: bool,
    source: int = 0,
    shards: Shards = ALONE,
) -> Real:
    """What some layers take, each stored as :func:`stores` says. ``calibrated``, ``shards``: as for :func:`packed`."""
    held = Real()
    for (layer, own), times in Counter(zip(layers, stored, strict=True)).items():
        held += of_layer(layer, own, history, batch, calibrated, source, shards) * times
    return held


def of_layer(
    layer: Layer,
    own: Scheme | None,
    history: History,
    batch: int,
    calibrated: bool,
    source: int = 0,
    shards: Shards = ALONE,
) -> Real:
    """What one layer takes."""
    if own is None or layer.attention is None:
        return Real(ByteCount(other=own_bytes(layer, history, batch, source)))
    return packed(own, layer.attention, history, batch, calibrated, shards)


def own_bytes(layer: Layer, history: History, batch: int, source: int = 0) -> int:
    """Bytes of the model's own, exact type.

    A layer with a window keeps all that its last call concatenated: a prompt is there whole until the next call.
    """
    if not history.runs:
        return layer.fixed_bytes
    window = None if layer.attention is None else layer.attention.window
    held = stored = 0
    for tokens, calls in history.runs:
        if window is None:
            held = stored = held + tokens * calls
        else:
            stored = min(held + tokens * (calls - 1), window - 1) + tokens
            held = min(stored, window - 1)
    return layer.fixed_bytes + batch * (
        layer.row_bytes + layer.token_bytes * stored + layer.source_token_bytes * source
    )


@functools.cache
def record_of(scheme: Scheme, attention: Attention) -> Record:
    """A block of one KV head; see :meth:`kvbits.store.record.Record.of`."""
    return Record.of(
        scheme.key, scheme.value, scheme.block, attention.key_channels, attention.value_channels,
        attention.key_dtype, attention.value_dtype,
    )  # fmt: skip


def packed(
    scheme: Scheme, attention: Attention, history: History, batch: int, calibrated: bool, shards: Shards = ALONE
) -> Real:
    """What one :class:`kvbits.layer.cache.LayerCache` takes, under a scheme without overrides.

    Args:
        calibrated: whether the cache has a calibration, whose parameters it holds from the first token on.
        shards: which blocks are here, where several ranks share the context.
    """
    if shards.world > 1 and not scheme.packs:
        scheme = replace(scheme, residual=RESIDUAL_TOKENS)  # exact blocks can be shared; see kvbits.parallel
    record = record_of(scheme, attention)
    if not history.runs:
        return Real()
    filled = Filled(scheme.limits(attention.window), batch, attention.window, shards)
    for tokens, calls in history.runs:
        filled.run(tokens, calls)
    nbytes = filled.room_of_layer.nbytes(attention.token_bytes, attention.heads * record.nbytes)
    exact, sinks = filled.exact, min(filled.exact, filled.limits.sinks)
    count = record.count(filled.used * attention.heads, int(nbytes) - batch * exact * attention.token_bytes)
    count["sinks"] = batch * sinks * attention.token_bytes
    count["residual"] = batch * (exact - sinks) * attention.token_bytes
    count["scales"] += fitted_bytes(scheme, attention, calibrated, filled.packs)
    stored = exact + shards.count(filled.blocks) * scheme.block
    return Real(ByteCount(**count), batch * stored * attention.channels)


def fitted_bytes(scheme: Scheme, attention: Attention, calibrated: bool, packs: bool) -> int:
    """Bytes of what a layer has fitted: codecs' parameters, the mean of centred keys, and what balances it.

    Args:
        packs: whether it has packed anything yet, and so fitted from it.
    """
    heads, key, value = attention.heads, scheme.key, scheme.value
    known = 0
    for codec, channels in ((key, attention.key_channels), (value, attention.value_channels)):
        if (calibrated and codec.needs_calibration) or (packs and codec.is_fitted):
            shared, each = params_bytes(codec)
            known += shared + each * heads * channels
    vectors = int(scheme.centred and (calibrated or packs))
    vectors += int(scheme.centred and packs and key.rotates and not key.is_fitted)
    return known + vectors * heads * attention.key_channels * _FLOAT_BYTES


@functools.cache
def params_bytes(codec: Codec) -> tuple[int, int]:
    """Bytes of the parameters of a codec, of one side of a layer: for all of it, and for each channel of each head."""
    if not (codec.is_fitted or codec.needs_calibration):
        return 0, 0
    channels = 16
    samples = torch.randn(1, 2, 128, channels, generator=torch.Generator().manual_seed(0))
    one, two = (sum(x.nbytes for x in codec.fit(samples[:, :heads]).values()) for heads in (1, 2))
    return 2 * one - two, (two - one) // channels
