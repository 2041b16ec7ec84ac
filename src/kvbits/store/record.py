"""``Record``, the byte map of one block of one KV head: ``[K parts | V parts]``.

Each part and the record are aligned to 64 bytes; see docs/formats.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvbits.codecs import Codec
from kvbits.types import Packed, Part, Role

ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class Slot:
    """A part and where it lies in the record, in bytes."""

    part: Part
    offset: int


@dataclass(frozen=True)
class Record:
    """Byte map of one block of one head.

    Attributes:
        tokens: of a block.
        keys, values: the parts of either side.
        nbytes: of the whole record.
    """

    tokens: int
    keys: tuple[Slot, ...]
    values: tuple[Slot, ...]
    nbytes: int

    @staticmethod
    def of(
        key: Codec,
        value: Codec,
        tokens: int,
        key_channels: int,
        value_channels: int,
        key_dtype: torch.dtype,
        value_dtype: torch.dtype | None = None,
    ) -> Record:
        """Lay the parts of both codecs one after the other. The dtypes are those of exact K and V; one is for both."""
        sides, offset = [], 0
        value_dtype = value_dtype or key_dtype
        for codec, channels, dtype in ((key, key_channels, key_dtype), (value, value_channels, value_dtype)):
            slots = []
            for part in codec.layout(tokens, channels, dtype):
                slots.append(Slot(part, offset))
                offset = _align(offset + part.nbytes)
            sides.append(tuple(slots))
        return Record(tokens, sides[0], sides[1], offset)

    @property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Spans ``[first, last)`` of bytes that align the parts and hold nothing."""
        slots = self.keys + self.values
        begins = (*(slot.offset for slot in slots[1:]), self.nbytes)
        ends = (slot.offset + slot.part.nbytes for slot in slots)
        return tuple((end, begin) for end, begin in zip(ends, begins, strict=True) if end < begin)

    def role_bytes(self, role: Role) -> int:
        """Bytes of all parts with ``role``, K and V together."""
        return sum(slot.part.nbytes for slot in self.keys + self.values if slot.part.role == role)

    def count(self, written: int, total: int) -> dict[str, int]:
        """By part, what ``total`` bytes of a pool and its table hold of ``written`` records; the rest is ``slack``."""
        roles: Sequence[Role] = ("codes", "scales", "zeros", "outliers")
        parts: dict[str, int] = {role: written * self.role_bytes(role) for role in roles}
        return {**parts, "slack": total - sum(parts.values())}


def _align(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def unpack(tile: torch.Tensor, slots: tuple[Slot, ...]) -> Packed:
    """The parts of records ``[..., bytes]``, as views of them: ``[..., *part.shape]`` each."""
    packed = {}
    for slot in slots:
        part = tile[..., slot.offset : slot.offset + slot.part.nbytes]
        packed[slot.part.name] = part.view(slot.part.dtype).unflatten(-1, slot.part.shape)
    return packed
