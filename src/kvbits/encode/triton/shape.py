"""What the Triton encoder is compiled for: a codec, a block, and the tile that a program holds of it."""

from __future__ import annotations

from dataclasses import dataclass

from kvbits.backends import LEVELS
from kvbits.codecs import Choice, Codec, Grouped
from kvbits.numerics import groups, hadamard, outliers
from kvbits.numerics.groups import power_of_two
from kvbits.transform import NO_ROPE, UNROPED_KEYS, UNROPED_MEAN, Transform

RANGE, HALF_QUADRATIC, NORM, FIXED = range(4)
"""How scales are chosen."""

_CHOICES: dict[Choice, int] = {
    "range": RANGE, "open range": RANGE, "magnitude": RANGE, "half-quadratic": HALF_QUADRATIC, "norm": NORM,
    "fixed": FIXED,
}  # fmt: skip

SMALLEST = 16
"""Elements of a tile's last dimension at least."""

WARP_ELEMENTS, BUSY_WARP_ELEMENTS, SPARSE_WARP_ELEMENTS = 2048, 1024, 512
"""Elements that one warp holds, 64 in each of its threads. Norms, HQQ's zeros and what is done to elements first keep
more beside each, and the choice of outliers still more."""

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
        assert codec.chooses is not None
        form, choice = codec.format, _CHOICES[codec.chooses]
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
        exact = codec.chooses != "open range"
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
    def close(self) -> bool:
        """Whether columns of the tile are channels, with nothing between groups: what a rotation within it needs."""
        return not self.per_token or self.groups == 1 or self.third == self.length

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


@dataclass(frozen=True)
class Before:
    """What becomes of elements before they are encoded, the other compile-time argument: ``transform.Transform``.

    Attributes:
        unroped: whether the rotary embedding is taken off keys, off their mean alone, or off nothing.
        half, interleaved: rotary pairs, and which channels make one.
        mean, balance: whether there are any.
        rotated: channels that a rotation mixes with one another; 0 is no rotation.
    """

    unroped: int = NO_ROPE
    half: int = 0
    interleaved: bool = False
    mean: bool = False
    balance: bool = False
    rotated: int = 0

    @staticmethod
    def of(transform: Transform) -> Before:
        """For blocks under ``transform``."""
        rope, mean = transform.rope, transform.mean is not None
        # Nothing is unroped where the roped mean is missing, or pairs are.
        if rope is not None and (not (transform.whole or mean) or not rope.base_cos.shape[-1]):
            rope = None
        unroped = NO_ROPE if rope is None else UNROPED_KEYS if transform.whole else UNROPED_MEAN
        rotated = 0 if transform.rotation is None else hadamard.block_of(transform.rotation.shape[0])
        return Before(
            unroped,
            0 if rope is None else rope.base_cos.shape[-1],
            rope is not None and rope.interleaved,
            mean,
            transform.balance is not None,
            rotated,
        )

    @property
    def anything(self) -> bool:
        """Whether elements change at all."""
        return bool(self.unroped or self.mean or self.balance or self.rotated)

    @property
    def stages(self) -> int:
        """Sums and differences that a rotation takes, one after the other."""
        return self.rotated.bit_length() - 1

    @property
    def unit(self) -> float:
        """What keeps a rotation orthonormal."""
        return float(self.rotated**-0.5)


def warps_of(shape: Shape, before: Before) -> int:
    """Warps of a program."""
    each = BUSY_WARP_ELEMENTS if shape.choice in (NORM, HALF_QUADRATIC) or before.anything else WARP_ELEMENTS
    each = SPARSE_WARP_ELEMENTS if shape.outliers else each
    return min(MOST_WARPS, max(4, shape.tokens * shape.columns // each))
