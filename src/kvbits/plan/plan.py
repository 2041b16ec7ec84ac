"""The plan itself: for each scheme the bytes of the cache, whether it fits, and how far it reaches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from kvbits.plan import memory, paper
from kvbits.plan.fit import Need, fits, largest_batch, longest_context, needs
from kvbits.plan.memory import Real
from kvbits.plan.paper import Named
from kvbits.plan.quality import Quality, recommend
from kvbits.plan.setting import Setting
from kvbits.plan.shapes import Shape
from kvbits.schemes.catalogue import ALIASES, RECOMMENDED
from kvbits.schemes.scheme import Scheme
from kvbits.types import ByteCount

CHUNK_TOKENS = 2048
"""Of a prompt read in chunks, in advice."""


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
            "setting": self.setting.to_json(),
            "schemes": [row.to_json() for row in self.rows],
            "recommended": recommended,
            "notes": list(self.notes),
        }


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
    rows = [_row(setting, one, quality) for one in named]
    recommended = None
    if setting.memory_bytes is not None:
        fitting = [row.named.scheme for row in rows if row.fits]
        asked = {row.named.scheme for row in rows}
        for alias in (RECOMMENDED, *ALIASES):
            other = Named.parse(alias)
            if other.scheme not in asked and setting.shape.refusal is None and fits(setting, other.scheme):
                fitting.append(other.scheme)
        found = recommend(fitting, quality)
        recommended = None if found is None else (_name_of(found[0], rows), found[1])
    return Plan(setting, tuple(rows), recommended, tuple(_notes(setting, rows)))


def _name_of(scheme: Scheme, rows: list[Row]) -> str:
    written = [row.named.name for row in rows if row.named.scheme == scheme]
    return next(iter([*written, *(alias for alias in ALIASES if Scheme.parse(alias) == scheme)]), str(scheme))


def _row(setting: Setting, named: Named, quality: Quality | None) -> Row:
    shape, scheme = setting.shape, named.scheme
    refuse(shape, named)
    try:
        held = tuple(needs(setting, scheme))
    except ValueError as error:
        raise ValueError(f"{named.name}: {error}") from None
    return Row(
        named,
        _paper_bits(shape, named, setting.context),
        paper.nbytes(named, shape, setting.context, setting.batch),
        sum((need.cache for need in held), Real()),
        _bytes_per_token(shape, scheme, setting.sliding),
        held,
        fits(setting, scheme),
        longest_context(setting, scheme),
        largest_batch(setting, scheme),
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


def _reach_in_chunks(setting: Setting, rows: list[Row]) -> list[str]:
    """How far the scheme that reaches furthest would reach if the peak of the prompt were small."""
    reaching = [row for row in rows if row.max_context is not None and row.fits]
    if not reaching:
        return []
    row = max(reaching, key=lambda one: one.max_context or 0)
    most = longest_context(replace(setting, chunk=CHUNK_TOKENS), row.named.scheme)
    if most is None or most <= (row.max_context or 0):
        return []
    return [f"{row.named.name} reaches {most:,} tokens if the prompt is read in chunks: --chunk {CHUNK_TOKENS}"]


def _notes(setting: Setting, rows: list[Row]) -> list[str]:
    shape, notes = setting.shape, list(setting.shape.notes)
    if shape.widths is None and setting.memory_bytes is not None:
        what = "the cache alone" if shape.weights is None else "weights and cache"
        notes.append(f"the model's widths are not known: {what} must fit, without the peak of reading a prompt")
    if shape.eager and shape.widths is not None and any(shape.kinds()):
        notes.append(
            "Transformers has no sdpa for this model: without a flash kernel, a matrix of scores of each of its heads "
            "comes on top of the peak"
        )
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
        how = {"tensor": "Transformers spreads heads: tp_plan='auto'", "context": "kvbits.parallel shares a context"}
        notes.append(f"{how[setting.split]}; one process for each device, started by torchrun")
    return notes
