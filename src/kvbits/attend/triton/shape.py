"""What the Triton kernels are compiled for: formats, tiles and ropings, as frozen constants.

Each is one compile-time argument of ``attend_split``. Offsets in a record count 2 bytes, as the kernel reads it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from kvbits.attend.triton.tuning import Tuning
from kvbits.backends import LEVELS
from kvbits.numerics import groups
from kvbits.numerics.groups import power_of_two
from kvbits.store.record import Record, Slot
from kvbits.transform import NO_ROPE, UNROPED_KEYS, UNROPED_MEAN
from kvbits.types import Format

MOST_CHANNELS = 512
MOST_COLUMNS = 128
"""Columns of a product: query rows times groups. More would not fit in registers."""

MOST_OUTLIERS = 512

MOST_ROWS = 64
"""Query rows that one program takes."""

_USUAL_SUMS = 4096
"""Columns times channels up to which the tunings of the table were made."""

TOKEN, CHANNEL, LAYER, STATIC = range(4)


def why_not_format(form: Format, channels: int, outliers: int) -> list[str]:
    """Reasons against keys or values of one format and head_dim, with so many outliers in a block."""
    reasons = []
    if form.levels == "exact":
        reasons.append("packed blocks of exact elements")
    if outliers > MOST_OUTLIERS:
        reasons.append(f"{outliers} outliers in a block (up to {MOST_OUTLIERS} run)")
    if form.per == "layer" and form.zero:
        reasons.append("one zero per layer")
    if channels % 2 or channels > MOST_CHANNELS:
        reasons.append(f"head_dim {channels} (even ones up to {MOST_CHANNELS} run)")
    elif form.per == "token" and 8 * power_of_two(-(-channels // _group_length(form, channels))) > MOST_COLUMNS:
        reasons.append(f"{-(-channels // _group_length(form, channels))} groups in a token")
    return reasons


def outliers_in(slots: tuple[Slot, ...]) -> int:
    """Entries of the sparse part of a block."""
    return next((slot.part.shape[0] for slot in slots if slot.part.name == "outlier_index"), 0)


def padded_channels(channels: int) -> int:
    """The power of two from 32 that holds them: what tiles have."""
    return max(32, power_of_two(channels))


def static_zero(form: Format) -> bool:
    """Whether a layer's channels have zeros that are the same in all blocks."""
    return form.zero and form.per == "channel" and not form.group


def _group_length(form: Format, channels: int) -> int:
    return groups.group_length(channels, form.group) if form.group else channels


@dataclass(frozen=True)
class Side:
    """Keys or values.

    Attributes:
        bits, levels, per, zero: of the format.
        exact: whether levels of uniform codes come without their offset of 128.
        channels, padded: of a head, and the power of two from 32 that holds them.
        group: channels or tokens of a group.
        count, columns: groups of a token, and columns that the groups of a slice take in a product.
        slice_groups: groups of tokens of one block in a slice.
        sub: slices of a tile that share a slot of the codes: the other side has fewer bits.
        codes_at, scale_at, zero_at, index_at, value_at: where the parts begin.
        outliers, entries: of a block, and the power of two that holds them.
    """

    bits: int
    levels: int
    per: int
    zero: bool
    exact: bool
    channels: int
    padded: int
    group: int
    count: int
    columns: int
    slice_groups: int
    sub: int
    codes_at: int
    scale_at: int
    zero_at: int
    outliers: int
    entries: int
    index_at: int
    value_at: int

    @property
    def offset(self) -> float:
        """What levels of uniform codes are more than their codes."""
        return 128.0 if self.bits < 8 and self.levels == LEVELS.index("uniform") and not self.exact else 0.0

    @property
    def fields(self) -> int:
        """Whether codes of 2 bits stay where they lie in a byte, 1 or 0."""
        return int(self.bits == 2 and self.offset > 0)

    @property
    def zeroed(self) -> bool:
        """Whether anything is to be taken off the levels."""
        return self.zero or self.offset > 0

    @property
    def units(self) -> int:
        """16-bit units of a byte row."""
        return self.channels // 2

    @staticmethod
    def of(form: Format, slots: tuple[Slot, ...], channels: int, rows: int, blocks: int, sub: int, exact: bool) -> Side:
        """Read a format and where its parts lie, for tiles of ``rows`` tokens of each of ``blocks`` blocks."""
        at = {slot.part.name: slot.offset // 2 for slot in slots}
        group, count, columns, slice_groups = 1, 1, 1, 1
        if form.per == "token":
            per, group = TOKEN, _group_length(form, channels)
            count = -(-channels // group)
            columns = power_of_two(count)
        elif form.per == "channel" and form.group:
            per, group = CHANNEL, form.group
            slice_groups = max(1, rows // group)
            columns = blocks * slice_groups
        else:
            per = LAYER if form.per == "layer" else STATIC
        outliers = outliers_in(slots)
        return Side(
            form.bits, LEVELS.index(form.levels), per, form.zero, exact, channels, padded_channels(channels),
            group, count, columns, slice_groups, sub, at["codes"], at.get("scale", 0), at.get("zero", 0),
            outliers, max(16, power_of_two(outliers)) if outliers else 0,
            at.get("outlier_index", 0), at.get("outlier_value", 0),
        )  # fmt: skip


@dataclass(frozen=True)
class Tile:
    """Blocks, and how many of their tokens meet how many queries at once.

    Attributes:
        tokens, record: of a block, and 2-byte elements of its record.
        slices: that a block is met in, one after the other.
        blocks: that are met together.
        queries: query rows.
        parts: bfloat16 parts of queries and weights.
    """

    tokens: int
    record: int
    slices: int
    blocks: int
    queries: int
    parts: int

    @property
    def slice(self) -> int:
        """Tokens of a block in one slice."""
        return self.tokens // self.slices

    @property
    def rows(self) -> int:
        """Tokens that are met at once."""
        return self.slice * self.blocks


@dataclass(frozen=True)
class Roping:
    """Whether the kernel ropes keys or the mean of keys, and which channels make a pair.

    Attributes:
        kind: NO_ROPE, UNROPED_KEYS (keys are stored before RoPE) or UNROPED_MEAN (the mean alone is).
        mean: whether packed keys lack a mean; of UNROPED_KEYS the static zeros of channels are a part of the mean.
        half, padded: number of rotary pairs, and the power of two from 16 that holds it. Without pairs a mean is added
            as it is.
        interleaved: whether neighbouring channels make a pair, rather than those half the rotary channels apart.
        halves: whether the first channels of all pairs are one half of a head and the second channels the other, so
            that each half is a tile. For UNROPED_KEYS alone.
    """

    kind: int = NO_ROPE
    mean: bool = False
    half: int = 0
    padded: int = 16
    interleaved: bool = False
    halves: bool = False

    @property
    def families(self) -> int:
        """Kinds of channels that share no cosines: both parities, unless those make the pairs."""
        return 1 if self.interleaved else 2

    @property
    def pieces(self) -> int:
        """Tiles of channels of a family."""
        return 2 if self.interleaved or self.halves else 1

    @staticmethod
    def of(kind: int, mean: bool, half: int, interleaved: bool, channels: int) -> Roping:
        """Of ``half`` pairs of keys of ``channels``."""
        padded = max(16, power_of_two(half))
        halves = kind == UNROPED_KEYS and not interleaved and half >= 32 and 2 * half == 2 * padded == channels
        return Roping(kind, mean, half, padded, interleaved, halves)


@dataclass(frozen=True)
class Flags:
    """What one call asks for, beside formats, tiles and the rotary embedding.

    Attributes:
        group_rows: query heads of a KV head.
        single: whether there is one query a row.
        in_order: whether blocks lie in the pool in the order of the table.
        ragged: whether rows hold different numbers of tokens.
        padded: whether the columns of tokens are looked up.
        mask: 0 none, 1 bool, 2 additive.
        window, softcap: whether there is one.
        plain: whether all queries see all packed tokens.
    """

    group_rows: int
    single: bool = True
    in_order: bool = True
    ragged: bool = False
    padded: bool = False
    mask: int = 0
    window: bool = False
    softcap: bool = False
    plain: bool = True


@dataclass(frozen=True)
class Shape:
    """What stays the same from step to step in one layer."""

    key: Side
    value: Side
    tile: Tile
    tuning: Tuning


@functools.lru_cache(maxsize=256)
def shape_for(
    record: Record,
    key: Format,
    value: Format,
    key_channels: int,
    value_channels: int,
    rows: int,
    parts: int,
    tuning: Tuning,
    rope: int = NO_ROPE,
) -> Shape:
    """Choose tiles for ``rows`` query rows of a KV head."""
    slices = max(_slots(key.bits), _slots(value.bits))
    length = record.tokens // slices
    if rope == UNROPED_MEAN:
        tuning = replace(tuning, registers=None)
    blocks = max(1, tuning.rows // length)
    # float32 is too fine for sums of codes with an offset; static zeros meet the weights once, at the end.
    static = value.per == "channel" and not value.group
    exact = parts == 3 or rope == UNROPED_KEYS
    sides = (
        Side.of(key, record.keys, key_channels, length, blocks, slices // _slots(key.bits), exact),
        Side.of(
            value, record.values, value_channels, length, blocks, slices // _slots(value.bits), parts == 3 or static
        ),
    )
    widest = max(side.columns for side in sides)
    if rope != NO_ROPE:  # queries are roped to each block by itself
        widest = max(widest, blocks * (sides[0].columns if sides[0].per == TOKEN and rope == UNROPED_KEYS else 1))
    queries = min(max(8, power_of_two(rows)), MOST_ROWS)
    while queries > 8 and queries * widest > MOST_COLUMNS:
        queries //= 2
    if queries * widest * max(key_channels, value_channels) > _USUAL_SUMS:
        # Sums that fill the registers of twice the warps; without a second tile in shared memory, which is full too.
        tuning = replace(tuning, warps=2 * tuning.warps, registers=None, stages=1)
    elif rope == UNROPED_KEYS or key.outliers or value.outliers:
        tuning = replace(tuning, registers=None, stages=1)  # what these read element by element has no tile
    return Shape(*sides, Tile(record.tokens, record.nbytes // 2, slices, blocks, queries, parts), tuning)


def _slots(bits: int) -> int:
    """Slices that a block's codes lie in; 3 bits follow their plane of 2."""
    return 4 if bits == 3 else 8 // bits
