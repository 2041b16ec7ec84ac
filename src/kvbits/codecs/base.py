"""What a codec is: three verbs and one declaration. To add a method, write one file like ``affine.py``."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

import torch

from kvbits.numerics import codebook
from kvbits.types import Format, Packed, Params, Part

Choice: TypeAlias = Literal["range", "half-quadratic", "magnitude", "fixed", "norm", "open range"]
"""How an encoder chooses scale and zero of a group.

- ``range``: its smallest and its largest element meet the lowest and the highest level.
- ``open range``: as ``range``, also for constant groups, where no level may be 1 (:mod:`kvbits.codecs.non_uniform`).
- ``half-quadratic``: the scale of ``range``, and the zero that HQQ finds.
- ``magnitude``: the largest magnitude meets the largest level; no zero.
- ``norm``: see :mod:`kvbits.codecs.lloyd_max`; no zero.
- ``fixed``: given by the params.
"""

_DECIDES = ("encode", "choose", "to_codes", "statics", "span", "layout", "format", "_decode_dense")
"""What makes the bits of a codec."""


@dataclass(frozen=True)
class Codec(ABC):
    """A method that turns blocks of exact K or V into few bits and back. Stateless and frozen.

    Every verb takes leading dimensions of any number and size; a *block* is the last two, ``[T, D]``. Blocks, heads
    and rows are encoded independently of each other: nothing but ``params`` is shared. Where those hold something for
    each head, the leading dimensions end with heads and blocks: ``[..., H, N, T, D]``.
    """

    pattern: ClassVar[re.Pattern[str]]
    """The spellings that :meth:`parse` accepts; its groups are what :meth:`from_match` gets."""

    examples: ClassVar[tuple[str, ...]]
    """Spellings that name every variant, for error messages and for tests."""

    rotates: ClassVar[bool] = False
    """Whether the cache rotates blocks (Hadamard with random signs, over head_dim) before it encodes them."""

    chooses: ClassVar[Choice | None] = None
    """How :meth:`encode` chooses, as the native and the Triton encoder do it; None: no kernel encodes this codec.

    A subclass that overrides anything of :meth:`encode` encodes by itself until it says how it ``chooses``.
    """

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        for base in cls.__mro__:  # whatever comes before the class that says so: an override, a mixin
            if "chooses" in vars(base):
                break
            if any(name in vars(base) for name in _DECIDES):
                cls.chooses = None
                break

    @property
    def is_fitted(self) -> bool:
        """Whether :meth:`fit` returns anything."""
        return False

    @property
    def needs_calibration(self) -> bool:
        """Whether :meth:`fit` has to see calibration samples, rather than the first tokens that are packed."""
        return False

    @classmethod
    @abstractmethod
    def from_match(cls, match: re.Match[str]) -> Codec:
        """Build the codec from a match of :attr:`pattern`; raise ValueError for an impossible one."""

    @abstractmethod
    def __str__(self) -> str:
        """The canonical spelling, which parses back to an equal codec."""

    @property
    @abstractmethod
    def format(self) -> Format:
        """How the bits lie."""

    @property
    def block_multiple(self) -> int:
        """A block must be a multiple of this many tokens."""
        return 8

    @abstractmethod
    def layout(self, tokens: int, channels: int, dtype: torch.dtype) -> tuple[Part, ...]:
        """The parts of one block ``[tokens, channels]``; ``dtype`` is that of the exact K and V."""

    def table(self, params: Params) -> torch.Tensor | None:
        """The levels of a format with a table, float32 ``[2**bits]`` ascending; None for other formats."""
        return None

    def edges(self, params: Params) -> torch.Tensor | None:
        """What lies between the levels of a table as codes are chosen, float32 ``[2**bits - 1]``: the midpoints."""
        table = self.table(params)
        return None if table is None else codebook.midpoints(table)

    def fit(self, samples: torch.Tensor, weights: torch.Tensor | None = None) -> Params:
        """Fit static parameters of one layer and tensor. Default: none.

        Samples that are all zero say nothing of what will come: the cache asks again at the next block.

        Args:
            samples: ``[N, H, T, D]``, of any dtype.
            weights: how much the error of each sample matters, as ``samples``; default: all the same.
        """
        return {}

    @property
    def saturates(self) -> bool:
        """Whether :meth:`saturation` may have something to say, and elements are kept for it."""
        return type(self).saturation is not Codec.saturation

    def saturation(self, x: torch.Tensor, params: Params) -> str | None:
        """What to warn of, once per layer and tensor, if values of ``x`` do not fit into the static parameters."""
        return None

    @abstractmethod
    def encode(self, x: torch.Tensor, params: Params) -> Packed:
        """Encode finite ``x [..., T, D]``; each returned tensor is ``[..., *part.shape]``."""

    @abstractmethod
    def decode(self, packed: Packed, params: Params) -> torch.Tensor:
        """Decode to ``[..., T, D]``, in float32 unless the codec stores elements exactly."""

    def decode_into(self, out: torch.Tensor, packed: Packed, params: Params) -> None:
        """As :meth:`decode`, into float ``out [..., T, D]`` of any strides."""
        out.copy_(self.decode(packed, params))

    def bits_per_element(self, tokens: int, channels: int, dtype: torch.dtype = torch.bfloat16) -> float:
        """Bits per element of one block, every part included, from :meth:`layout`."""
        return 8 * sum(part.nbytes for part in self.layout(tokens, channels, dtype)) / (tokens * channels)
