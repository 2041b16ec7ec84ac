"""The plan itself: for each scheme the bytes of the cache, whether it fits, and how far it reaches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from kvbits.catalogue import ALIASES, RECOMMENDED
from kvbits.plan import memory, paper, peak
from kvbits.plan.memory import History, Real
from kvbits.plan.paper import Named
from kvbits.plan.quality import Quality, recommend
from kvbits.plan.shapes import Shape, Weights
from kvbits.plan.split import Share, shares
from kvbits.scheme import Scheme
from kvbits.types import ByteCount

MOST_TOKENS, MOST_BATCH = 2**40, 2**24
"""Longer contexts and larger batches are not planned: a number beyond is a slip, and one that fits is no limit."""

CHUNK_TOKENS = 2048
"""Of a prompt read in chunks, in advice."""

WEIGHT_BITS = {"fp32": 32.0, "bf16": 16.0, "fp16": 16.0, "fp8": 8.0, "int8": 8.0, "int4": 4.5}
"""Bits per weight in the layers. ``int4`` has a 16-bit scale and a zero for each 64. Below 16 bits, the table of tokens
and the matrix of logits stay in 16."""

WEIGHTS = ("auto", *WEIGHT_BITS, "file", "none")


@dataclass(frozen=True)
class Setting:
    """What is planned.

    Attributes:
        shape: the model.
        context: tokens in the cache.
        steps: of these, the last ones that came one by one; the others came as a prompt.
        chunk: tokens of the prompt that are read at a time; None is all of them.
        batch: rows.
        source_tokens: of an encoder's text.
        sliding: pack layers with windows, too.
        memory_bytes: of each device; None where there is no limit.
        reserve_bytes: of these, what is left to the driver and to whatever else runs.
        devices, split: see :mod:`kvbits.plan.split`.
        weights: their precision; ``auto`` is the checkpoint's, or the model's dtype.
        logits: ``last`` or ``all``; see :mod:`kvbits.plan.peak`.
    """

    shape: Shape
    context: int
    steps: int = 0
    chunk: int | None = None
    batch: int = 1
    source_tokens: int = 0
    sliding: bool = False
    memory_bytes: int | None = None
    reserve_bytes: int = 0
    devices: int = 1
    split: str = "pipeline"
    weights: str = "auto"
    logits: str = "last"

    def __post_init__(self) -> None:
        for name, number, most in (
            ("context", self.context, MOST_TOKENS),
            ("batch", self.batch, MOST_BATCH),
            ("chunk", 1 if self.chunk is None else self.chunk, MOST_TOKENS),
        ):
            if not 1 <= number <= most:
                raise ValueError(f"--{name} {number} is nothing to plan; give 1 to {most:,}")
        if not 0 <= self.steps < self.context:
            raise ValueError(f"of {self.context:,} tokens, {self.steps:,} cannot be new ones; give fewer")
        if self.weights not in WEIGHTS:
            raise ValueError(f"--weights {self.weights} is unknown; allowed are {', '.join(WEIGHTS)}")
        if self.logits not in ("last", "all"):
            raise ValueError(f"--logits {self.logits} is unknown; allowed are last, all")
        if self.memory_bytes is not None and self.reserve_bytes >= self.memory_bytes:
            raise ValueError("--reserve takes all of the memory; give less")
        weights_bytes(self.shape.weights, self.weights, self.shape.dtype)

    def history(self, context: int) -> History:
        """How a cache of so many tokens is filled."""
        return History.of(context, min(self.steps, context - 1), self.chunk)


@dataclass(frozen=True)
class Need:
    """What one device has to hold, in bytes."""

    weights: int
    cache: Real
    peak: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.cache.count.total + self.peak


@dataclass(frozen=True)
class Row:
    """One scheme.

    Attributes:
        named: the scheme.
        paper_bits, paper_bytes: in the papers' accounting.
        real: what a live cache would take, on all devices together.
        bytes_per_token: of a row, once it is long.
        needs: of each device.
        fits: whether all of that fits; None without a limit.
        max_context, max_batch: largest that fit; 0 if none does, None without a limit or where there is no end.
        figures: measured quality.
    """

    named: Named
    paper_bits: float
    paper_bytes: float
    real: Real
    bytes_per_token: float
    needs: tuple[Need, ...]
    fits: bool | None
    max_context: int | None
    max_batch: int | None
    figures: dict[str, float] | None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {
            "name": self.named.name,
            "scheme": str(self.named.scheme),
            "paper_bits": self.paper_bits,
            "paper_gib": self.paper_bytes / 2**30,
            "real_bits": self.real.bits_per_element,
            "real_bytes": self.real.count.total,
            "real_parts": {part.name: getattr(self.real.count, part.name) for part in fields(ByteCount)},
            "bytes_per_token": self.bytes_per_token,
            "devices": [
                {"weights": need.weights, "cache": need.cache.count.total, "peak": need.peak, "total": need.total}
                for need in self.needs
            ],
            "fits": self.fits,
            "max_context": self.max_context,
            "max_batch": self.max_batch,
            "quality": self.figures,
        }


@dataclass(frozen=True)
class Plan:
    """What :func:`plan` found.

    Attributes:
        recommended: a scheme and why; None without a limit, or where nothing fits.
        notes: what a reader should know of the figures.
    """

    setting: Setting
    rows: tuple[Row, ...]
    recommended: tuple[str, str] | None
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """``{setting, schemes: [{name, paper_bits, paper_gib, real_bits, real_bytes, ...}], recommended, notes}``."""
        recommended = self.recommended and {"scheme": self.recommended[0], "why": self.recommended[1]}
        return {
            "setting": setting_to_json(self.setting),
            "schemes": [row.to_json() for row in self.rows],
            "recommended": recommended,
            "notes": list(self.notes),
        }


def setting_to_json(setting: Setting) -> dict[str, Any]:
    """Plain JSON data: all but the shape itself, of which the sizes are given."""
    shape = setting.shape
    plain = {f.name: getattr(setting, f.name) for f in fields(Setting) if f.name != "shape"}
    kinds = [
        {
            "layers": count, "kv_heads": kind.heads, "key_dim": kind.key_channels, "value_dim": kind.value_channels,
            "window": kind.window,
        }
        for kind, count in shape.kinds().items() if kind is not None
    ]  # fmt: skip
    return {
        "model": shape.name,
        "source": shape.source,
        "layers": len(shape.layers),
        "attention": kinds,
        "dtype": str(shape.dtype).removeprefix("torch."),
        "parameters": None if shape.weights is None else shape.weights.total,
        "weights_bytes": weights_bytes(shape.weights, setting.weights, shape.dtype),
        "trained_context": shape.trained,
        **plain,
    }


def weights_bytes(weights: Weights | None, how: str, dtype: torch.dtype) -> int:
    """Bytes of the weights of a device, in a precision of :data:`WEIGHTS`.

    Raises:
        ValueError: where it is the files' own, and there are none.
    """
    if how == "file" and (weights is None or weights.file_bytes is None):
        raise ValueError("--weights file is for a GGUF file or a folder with .safetensors files; there are none here")
    if weights is None or how == "none":
        return 0
    if how == "file":
        assert weights.file_bytes is not None
        return weights.file_bytes
    bits = WEIGHT_BITS.get(how)
    if bits is None:
        bits = weights.bits or 8.0 * dtype.itemsize
    outside = bits if bits >= 16 else 16.0
    return -int(-(outside * (weights.embedding + weights.head) + bits * sum(weights.layers)) // 8)


def plan(setting: Setting, names: Iterable[str], quality: Quality | None = None) -> Plan:
    """Plan each of some schemes.

    Args:
        setting: what to plan.
        names: of schemes; ``fp16`` is ``exact`` by the name that the papers' tables give it.
        quality: what was measured of them.

    Raises:
        ValueError: for a scheme that is unknown or that the model refuses, and what :mod:`kvbits.plan.split` refuses.
    """
    named = [Named.parse(name) for name in names]
    if not named:
        raise ValueError("no scheme is named; give a list such as --schemes exact,default,small")
    split = shares(setting.shape, setting.devices, setting.split)
    rows = [_row(setting, one, split, quality) for one in named]
    recommended = None
    if setting.memory_bytes is not None:
        fitting = [row.named.scheme for row in rows if row.fits]
        asked = {row.named.scheme for row in rows}
        for alias in (RECOMMENDED, *ALIASES):
            other = Named.parse(alias)
            if other.scheme not in asked and setting.shape.refusal is None and _fits(setting, other.scheme, split):
                fitting.append(other.scheme)
        found = recommend(fitting, quality)
        recommended = None if found is None else (_name_of(found[0], rows), found[1])
    return Plan(setting, tuple(rows), recommended, tuple(_notes(setting, rows)))


def _name_of(scheme: Scheme, rows: list[Row]) -> str:
    written = [row.named.name for row in rows if row.named.scheme == scheme]
    return next(iter([*written, *(alias for alias in ALIASES if Scheme.parse(alias) == scheme)]), str(scheme))


def _row(setting: Setting, named: Named, split: list[Share], quality: Quality | None) -> Row:
    shape, scheme = setting.shape, named.scheme
    refuse(shape, named)
    try:
        needs = tuple(_needs(setting, scheme, split, setting.context, setting.batch))
    except ValueError as error:
        raise ValueError(f"{named.name}: {error}") from None
    real = sum((need.cache for need in needs), Real())
    limited = setting.memory_bytes is not None
    return Row(
        named,
        _paper_bits(shape, named, setting.context),
        paper.nbytes(named, shape, setting.context, setting.batch),
        real,
        _bytes_per_token(shape, scheme, setting.sliding),
        needs,
        _fits(setting, scheme, split) if limited else None,
        _most(lambda n: _fits(setting, scheme, split, context=n), MOST_TOKENS) if limited else None,
        _most(lambda n: _fits(setting, scheme, split, batch=n), MOST_BATCH) if limited else None,
        None if quality is None else quality.of(scheme),
    )


def refuse(shape: Shape, named: Named) -> None:
    """Raise ValueError where a model cannot run under a scheme, saying why."""
    if shape.refusal is not None and named.scheme != Scheme.parse("exact"):
        raise ValueError(f"{named.name}: {shape.refusal}; its own exact cache can be planned: --schemes exact")
    if named.scheme.pre_rope and shape.unrotatable is not None:
        raise ValueError(f"{named.name} stores keys before their rotary embedding, and {shape.unrotatable}")


def _paper_bits(shape: Shape, named: Named, tokens: int) -> float:
    """Of the layers of the most frequent kind without a window, or with one where all have one."""
    kinds = [kind for kind in shape.kinds() if kind is not None]
    whole = [kind for kind in kinds if kind.window is None]
    if not whole:
        return float(paper.EXACT_BITS)
    return paper.bits(named, whole[0], tokens)


def _bytes_per_token(shape: Shape, scheme: Scheme, sliding: bool) -> float:
    total = 0.0
    for layer, own in zip(shape.layers, memory.stores(shape, scheme, sliding), strict=True):
        window = None if layer.attention is None else layer.attention.window
        if window is not None:
            continue
        if own is None or layer.attention is None or not own.packs:
            total += layer.token_bytes
        else:
            record = memory.record_of(own, layer.attention)
            total += (layer.attention.heads * record.nbytes + torch.int64.itemsize) / own.block
    return total


def need_of(setting: Setting, named: Named, context: int) -> list[Need]:
    """What each device has to hold at another length of the context."""
    split = shares(setting.shape, setting.devices, setting.split)
    return _needs(setting, named.scheme, split, context, setting.batch)


def _needs(setting: Setting, scheme: Scheme, split: list[Share], context: int, batch: int) -> list[Need]:
    """What each device has to hold. Devices with the same share are counted once."""
    stored = memory.stores(setting.shape, scheme, setting.sliding)
    known: dict[tuple[object, ...], Need] = {}
    needs = []
    for share in split:
        layers = share.shape.layers
        own = tuple(stored[share.first : share.first + len(layers)])
        key = (layers, own, share.shape.weights, share.shape.widths, share.parts)
        if key not in known:
            known[key] = _need(setting, share, own, scheme.needs_calibration, context, batch)
        needs.append(known[key])
    return needs


def _need(
    setting: Setting, share: Share, own: tuple[Scheme | None, ...], calibrated: bool, context: int, batch: int
) -> Need:
    shape, source = share.shape, share.tokens(setting.source_tokens)
    history = setting.history(share.tokens(context))
    held = memory.of_layers(shape.layers, own, history, batch, calibrated, source)
    extra = 0
    if shape.widths is not None:
        piece, packs = max(tokens for tokens, _ in history.runs), any(one is not None and one.packs for one in own)
        extra = peak.activation_bytes(shape, piece, history.tokens, batch, packs, setting.logits)
        pairs = set(zip(shape.layers, own, strict=True))
        each = (memory.of_layer(*pair, history, batch, calibrated, source).count.total for pair in pairs)
        extra += max(each, default=0)
    if setting.weights == "file" and setting.shape.weights is not None and shape.weights is not None:
        whole = weights_bytes(setting.shape.weights, "file", shape.dtype)
        weights = -(-whole * shape.weights.total // setting.shape.weights.total)
    else:
        weights = weights_bytes(shape.weights, setting.weights, shape.dtype)
    return Need(weights, held, extra)


def _fits(
    setting: Setting, scheme: Scheme, split: list[Share], context: int | None = None, batch: int | None = None
) -> bool:
    assert setting.memory_bytes is not None
    limit = setting.memory_bytes - setting.reserve_bytes
    needs = _needs(setting, scheme, split, context or setting.context, batch or setting.batch)
    return all(need.total <= limit for need in needs)


def _most(fits: Callable[[int], bool], end: int) -> int | None:
    """A number that fits while one more does not; 0 if 1 does not, None if ``end`` does."""
    low, high = 0, 1
    while high <= end and fits(high):
        low, high = high, 2 * high
    if low >= end:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _reach_in_chunks(setting: Setting, rows: list[Row]) -> list[str]:
    """How far the scheme that reaches furthest would reach if the peak of the prompt were small."""
    reaching = [row for row in rows if row.max_context is not None and row.fits]
    if not reaching:
        return []
    row = max(reaching, key=lambda one: one.max_context or 0)
    changed = replace(setting, chunk=CHUNK_TOKENS)
    split = shares(setting.shape, setting.devices, setting.split)
    most = _most(lambda n: _fits(changed, row.named.scheme, split, context=n), MOST_TOKENS)
    if most is None or most <= (row.max_context or 0):
        return []
    return [f"{row.named.name} reaches {most:,} tokens if the prompt is read in chunks: --chunk {CHUNK_TOKENS}"]


def _notes(setting: Setting, rows: list[Row]) -> list[str]:
    shape, notes = setting.shape, list(setting.shape.notes)
    if shape.widths is None and setting.memory_bytes is not None:
        what = "the cache alone" if shape.weights is None else "weights and cache"
        notes.append(f"the model's widths are not known: {what} must fit, without the peak of reading a prompt")
    windows = sum(layer.attention is not None and layer.attention.window is not None for layer in shape.layers)
    if windows and not setting.sliding:
        notes.append(
            f"{windows} of {len(shape.layers)} layers have a window and stay exact; after a prompt in one piece they "
            "hold all of it until the next step"
        )
    if shape.trained is not None and setting.context > shape.trained:
        notes.append(f"the model was made for {shape.trained:,} tokens")
    if calibrated := [row.named.name for row in rows if row.named.scheme.needs_calibration]:
        notes.append(f"{', '.join(calibrated)} {'need' if len(calibrated) > 1 else 'needs'} a calibration of the model")
    if any(row.fits and not row.named.scheme.packs for row in rows):
        notes.append("the exact cache fits: what a packed one saves is room for a longer context or a larger batch")
    if setting.memory_bytes is not None and not setting.reserve_bytes:
        notes.append("nothing is set aside for the driver and the allocator: --reserve 1GiB")
    if setting.memory_bytes is not None and setting.chunk is None and shape.widths is not None:
        notes += _reach_in_chunks(setting, rows)
    if setting.devices > 1 and setting.split != "pipeline":
        notes.append(f"kvbits does not run a {setting.split} split by itself: these are the bytes that it would take")
    return notes
