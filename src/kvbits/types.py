"""The words every floor shares: parts of a packed block, and the format its bits lie in.

A *codec* (``kvbits.codecs``) decides scales, zeros and levels. A *format* says how the result lies in memory,
and is all that a kernel needs to know. Letters: B batch, H KV heads, T tokens, D head_dim, N blocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal, TypeAlias

import torch

Tensors: TypeAlias = Mapping[str, torch.Tensor]
Packed: TypeAlias = dict[str, torch.Tensor]
"""One tensor per :class:`Part`, each ``[..., *part.shape]`` with the same leading dimensions."""

Params: TypeAlias = dict[str, torch.Tensor]
"""What a codec fitted for one layer and tensor (static scales, tables); empty for most codecs."""

Role: TypeAlias = Literal["codes", "scales", "zeros", "outliers"]


@dataclass(frozen=True, slots=True)
class Part:
    """One named array of a packed block.

    Attributes:
        name: key in :data:`Packed`, and later in files.
        role: which line of ``nbytes`` it counts towards.
        dtype: element type in memory.
        shape: shape for one block of one head.
    """

    name: str
    role: Role
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of this part for one block of one head."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Format:
    """How the bits of one tensor lie; the closed set that kernels match on.

    Attributes:
        bits: bits per code (2, 3, 4, 8), or 0 where the elements are stored exactly.
        levels: what a code means: ``uniform`` (the code itself), ``table`` (a codebook entry), ``e4m3``, ``exact``.
        per: ``token`` (a group is neighbouring channels of one token), ``channel`` (neighbouring tokens of one
            channel), ``layer`` (one static scale) or ``element`` (no scale).
        group: elements per group along that direction; 0 where there is no group: ``channel`` then means one static
            scale (and zero) per channel, in the params ``[H, D]``, and ``token`` one per token and head.
        zero: whether there is a zero beside each scale.
        outliers: whether a block has a sparse part, added to its decoded dense part: ``outlier_index`` (uint16,
            ``token * D + channel``, ascending) and ``outlier_value`` (bfloat16), as many as its parts hold. Unused
            entries are (0, 0).
    """

    bits: int
    levels: Literal["uniform", "table", "e4m3", "exact"]
    per: Literal["token", "channel", "layer", "element"]
    group: int
    zero: bool
    outliers: bool = False


@dataclass(frozen=True, slots=True)
class ByteCount:
    """Bytes really allocated by a cache, by part.

    Attributes:
        codes, scales, zeros, outliers: of the packed blocks.
        sinks, residual: exact tokens.
        slack: alignment, spare room, tables.
        other: layers that keep the model's own type (sliding windows, linear attention).
    """

    codes: int = 0
    scales: int = 0
    zeros: int = 0
    outliers: int = 0
    sinks: int = 0
    residual: int = 0
    slack: int = 0
    other: int = 0

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return sum(getattr(self, field.name) for field in fields(self))

    def __int__(self) -> int:
        return self.total

    def __add__(self, more: ByteCount) -> ByteCount:
        return ByteCount(*(getattr(self, f.name) + getattr(more, f.name) for f in fields(self)))
