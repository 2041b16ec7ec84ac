"""What the Triton encoder is compiled for: a codec, a block, and the tile that a program holds of it."""

from __future__ import annotations

from dataclasses import dataclass

from kvbits.codecs import (
    Affine,
    Codec,
    Fp8,
    Fp8Static,
    Grouped,
    HalfQuadratic,
    LloydMax,
    NonUniform,
    NormalFloat,
    Rotated,
)
from kvbits.library import LEVELS
from kvbits.numerics import groups, outliers
from kvbits.numerics.groups import power_of_two

RANGE, HALF_QUADRATIC, NORM, FIXED = range(4)
"""How scales are chosen."""

CHOICES: dict[type[Codec], int] = {
    Affine: RANGE, Rotated: RANGE, NormalFloat: RANGE, NonUniform: RANGE, HalfQuadratic: HALF_QUADRATIC, Fp8: RANGE,
    LloydMax: NORM, Fp8Static: FIXED,
}  # fmt: skip

SMALLEST = 16
"""Elements of a tile's last dimension at least."""

WARP_ELEMENTS, BUSY_WARP_ELEMENTS, SPARSE_WARP_ELEMENTS = 2048, 1024, 512
"""Elements that one warp holds, 64 in each of its threads. Norms and HQQ's zeros keep more beside each element, and the
choice of outliers still more."""

MOST_WARPS = 16


@dataclass(frozen=True)
class Shape:
    """One compile-time argument of ``encode_block``.

    Attributes:
        tokens, channels: of a block.
        bits, levels, choice: of a code, what it means, how scales are chosen.
        exact_constants: see :func:`kvbits.numerics.affine.choose_qparams`.
        per_token: whether a group is neighbouring channels, else tokens.
        length, groups: elements of a group, and groups of a token or of a block.
        outliers: entries of the sparse part.
        first, second, third: the tile, powers of two: ``[T, groups, length]`` or ``[groups, length, D]``.
    """

    tokens: int
    channels: int
    bits: int
    levels: int
    choice: int
    exact_constants: bool
    per_token: bool
    length: int
    groups: int
    outliers: int
    first: int
    second: int
    third: int

    @staticmethod
    def of(codec: Codec, tokens: int, channels: int) -> Shape:
        """For blocks that suit the codec, of a number of tokens that is a power of two."""
        form, choice = codec.format, CHOICES[type(codec)]
        per_channel = form.per == "channel"
        count = outliers.entries(codec.outliers, tokens, channels) if isinstance(codec, Grouped) else 0
        if per_channel:
            length = form.group or tokens
            choice = choice if form.group else FIXED
            many = tokens // length
            tile = many, length, max(SMALLEST, power_of_two(channels))
        else:
            length = groups.group_length(channels, form.group) if form.group else channels
            many = -(-channels // length)
            tile = tokens, power_of_two(many), max(SMALLEST, power_of_two(length))
        exact = not isinstance(codec, NonUniform)
        return Shape(
            tokens,
            channels,
            form.bits,
            LEVELS.index(form.levels),
            choice,
            exact,
            not per_channel,
            length,
            many,
            count,
            *tile,
        )

    @property
    def axis(self) -> int:
        """The dimension of the tile that a group runs along."""
        return 2 if self.per_token else 1

    @property
    def columns(self) -> int:
        """Columns of the tile as ``[T, columns]``."""
        return self.first * self.second * self.third // self.tokens

    @property
    def scales(self) -> int:
        """Scales of a block."""
        return self.groups * (self.tokens if self.per_token else self.channels)

    @property
    def edges(self) -> int:
        """Midpoints between the levels of a table."""
        return (1 << self.bits) - 1

    @property
    def bottom(self) -> float:
        """The lowest level."""
        return 0.0 if self.levels == LEVELS.index("uniform") else -1.0

    @property
    def top(self) -> float:
        """The highest level."""
        return (1 << self.bits) - 1.0 if self.levels == LEVELS.index("uniform") else 1.0

    @property
    def warps(self) -> int:
        """Warps of a program."""
        each = BUSY_WARP_ELEMENTS if self.choice in (NORM, HALF_QUADRATIC) else WARP_ELEMENTS
        each = SPARSE_WARP_ELEMENTS if self.outliers else each
        return min(MOST_WARPS, max(4, self.tokens * self.columns // each))
