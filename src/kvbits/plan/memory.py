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
from kvbits.store.room import Limits, pool_blocks, table_columns
from kvbits.store.shards import ALONE, Shards
from kvbits.types import ByteCount

_TABLE_BYTES = torch.int64.itemsize
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
    turns: Shards = ALONE,
) -> Real:
    """What some layers take, each stored as :func:`stores` says. ``calibrated``, ``turns``: as for :func:`packed`."""
    held = Real()
    for (layer, own), times in Counter(zip(layers, stored, strict=True)).items():
        held += of_layer(layer, own, history, batch, calibrated, source, turns) * times
    return held


def of_layer(
    layer: Layer,
    own: Scheme | None,
    history: History,
    batch: int,
    calibrated: bool,
    source: int = 0,
    turns: Shards = ALONE,
) -> Real:
    """What one layer takes."""
    if own is None or layer.attention is None:
        return Real(ByteCount(other=own_bytes(layer, history, batch, source)))
    return packed(own, layer.attention, history, batch, calibrated, turns)


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
    scheme: Scheme, attention: Attention, history: History, batch: int, calibrated: bool, turns: Shards = ALONE
) -> Real:
    """What one :class:`kvbits.layer.cache.LayerCache` takes, under a scheme without overrides.

    Args:
        calibrated: whether the cache has a calibration, whose parameters it holds from the first token on.
        turns: which blocks are here, where several ranks share the context.
    """
    if turns.world > 1 and not scheme.packs:
        scheme = replace(scheme, residual=RESIDUAL_TOKENS)  # exact blocks can be shared; see kvbits.parallel
    record = record_of(scheme, attention)
    if not history.runs:
        return Real()
    state = _State(scheme, batch, attention.window, turns)
    for tokens, calls in history.runs:
        state.run(tokens, calls)
    pool_bytes = state.capacity * attention.heads * record.nbytes
    count = record.count(state.used * attention.heads, pool_bytes + batch * state.columns * _TABLE_BYTES)
    sinks = min(state.held, state.limits.sinks)
    count["sinks"] = batch * sinks * attention.token_bytes
    count["residual"] = batch * (state.held - sinks) * attention.token_bytes
    count["slack"] += batch * (state.room - state.held) * attention.token_bytes
    count["scales"] += fitted_bytes(scheme, attention, calibrated, state.packs)
    held = state.held + turns.count(state.blocks) * scheme.block
    return Real(ByteCount(**count), batch * held * attention.channels)


class _State:
    """What :class:`kvbits.layer.cache.LayerCache` and :class:`kvbits.store.blocks.BlockStore` count, for rows of equal
    length.

    Attributes:
        held, room: exact tokens of a row, and those that its buffer has room for.
        blocks: that a row refers to, on all ranks.
        used, capacity, columns: blocks that are written, those that the pool has room for, columns of the table.
        tokens, dropped: of a row, so far; and those that a window has left behind.
        packs: whether anything was ever packed.
    """

    def __init__(self, scheme: Scheme, batch: int, window: int | None, turns: Shards) -> None:
        sinks = (scheme.sinks, scheme.late_sinks) if window is None else (0, 0)
        self.limits = Limits(*sinks, scheme.residual, scheme.block)
        self.batch, self.window, self.turns = batch, window, turns
        self.held = self.room = self.blocks = self.used = self.capacity = self.columns = 0
        self.tokens = self.dropped = 0
        self.packs = False

    def run(self, tokens: int, calls: int) -> None:
        """So many calls of as many tokens each. Those that find room are taken all at once."""
        while calls:
            fitting = min(calls, self._fitting(tokens))
            total = self.held + fitting * tokens
            self.tokens += fitting * tokens
            calls -= fitting
            self._take(total, self.limits.packable(total))
            if calls:
                self._append(tokens)
                calls -= 1

    def _fitting(self, tokens: int) -> int:
        """Calls after which nothing has grown or been dropped yet."""
        if not self.packs or self.window is not None:
            return (self.room - self.held) // tokens
        here = self.turns.count(self.blocks)
        here += min((self.capacity - self.used) // self.batch, self.columns - here)
        blocks = self.turns.number(here) - self.blocks
        first = self.limits.most + 1 + blocks * self.limits.block  # tokens at which one block too many is packed
        return (first - 1 - self.held) // tokens

    def _take(self, total: int, added: int) -> None:
        """Have ``total`` exact tokens, of which ``added`` blocks are packed."""
        self.held = total - added * self.limits.block
        self.used += self._here(added) * self.batch
        self.blocks += added

    def _here(self, added: int) -> int:
        """How many of the next ``added`` blocks this rank holds."""
        return self.turns.count(self.blocks + added) - self.turns.count(self.blocks)

    def _append(self, tokens: int) -> None:
        self.tokens += tokens
        total = self.held + tokens
        added = self.limits.packable(total)
        if not added:
            self.room, self.held = self.limits.room(self.room, self.held, total), total
            return
        self._reserve(added)
        self._take(total, added)
        self.packs = True
        self.room = self.limits.room_after_packing(self.held)
        self._slide()

    def _reserve(self, added: int) -> None:
        self.columns = table_columns(self.columns, self.turns.count(self.blocks + added))
        more = self._here(added) * self.batch
        if self.used + more > self.capacity and self.turns.count(self.blocks) * self.batch < self.used:
            self._compact()
        self.capacity = pool_blocks(self.capacity, self.used, more)

    def _slide(self) -> None:
        if self.window is None:
            return
        block = self.limits.block
        behind = min(max(0, self.tokens - (self.window - 1) - block - self.dropped) // block, self.blocks)
        self.blocks -= behind
        self.columns -= behind
        self.dropped += behind * block
        if 2 * self.blocks * self.batch < self.capacity - 2:
            self._compact()

    def _compact(self) -> None:
        self.used = self.capacity = self.blocks * self.batch


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
    """Bytes of what a codec is told of one side of a layer: for all of it, and for each channel of each head."""
    if not (codec.is_fitted or codec.needs_calibration):
        return 0, 0
    channels = 16
    samples = torch.randn(1, 2, 128, channels, generator=torch.Generator().manual_seed(0))
    one, two = (sum(x.nbytes for x in codec.fit(samples[:, :heads]).values()) for heads in (1, 2))
    return 2 * one - two, (two - one) // channels
