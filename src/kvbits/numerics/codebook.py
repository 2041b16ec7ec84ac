"""Tables of levels: the NormalFloat and Lloyd-Max codebooks, and nearest-entry search.

NormalFloat (QLoRA, arXiv 2305.14314, section 3): quantiles of N(0, 1), ``2**(b-1)`` on the negative side and
``2**(b-1) + 1`` on the positive, sharing 0, each half normalised to +-1.
"""

from __future__ import annotations

import functools
import itertools
import math
from statistics import NormalDist

import torch

# Offset of the outermost quantile, so that it stays finite: the average of 1/30 and 1/32 for 4 bits (QLoRA), and the
# same construction, half of 1/(2 * 2^b - 2) + 1/(2 * 2^b), for the others.


def _offset(bits: int) -> float:
    count = float(2**bits)
    return 1 - 0.5 * (1 / (2 * count) + 1 / (2 * (count - 1)))


@functools.cache
def normal_float(bits: int) -> tuple[float, ...]:
    """The ``2**bits`` ascending NormalFloat levels in [-1, 1], with an exact 0."""
    half, top = 2 ** (bits - 1), _offset(bits)
    quantile = NormalDist().inv_cdf

    def side(count: int) -> list[float]:  # count levels from 0 up to the outermost quantile, 0 included
        return [quantile(0.5 + (top - 0.5) * i / (count - 1)) for i in range(count)]

    negative, positive = side(half), side(half + 1)
    levels = [-x / negative[-1] for x in reversed(negative[1:])] + [x / positive[-1] for x in positive]
    return tuple(levels)


@functools.cache
def lloyd_max(bits: int) -> tuple[float, ...]:
    """The ``2**bits`` ascending levels with the least squared error for N(0, 1) (Max 1960, table I)."""
    normal, count = NormalDist(), 2**bits
    levels = [normal.inv_cdf((i + 0.5) / count) for i in range(count)]
    for _ in range(5000):
        edges = [-math.inf, *((a + b) / 2 for a, b in itertools.pairwise(levels)), math.inf]
        density = [0.0 if math.isinf(edge) else normal.pdf(edge) for edge in edges]
        below = [normal.cdf(edge) for edge in edges]
        # The mean of a normal variable within an interval is the fall of its density over its probability.
        moved = [(density[i] - density[i + 1]) / (below[i + 1] - below[i]) for i in range(count)]
        change, levels = max(abs(a - b) for a, b in zip(levels, moved, strict=True)), moved
        if change < 1e-12:
            break
    return tuple((a - b) / 2 for a, b in zip(levels, reversed(levels), strict=True))  # symmetric to the last bit


def nearest(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Index (uint8) of the entry of the ascending 1-D ``table`` nearest to each element of ``x``."""
    return between(x, midpoints(table))


def midpoints(table: torch.Tensor) -> torch.Tensor:
    """The edges between neighbouring entries of an ascending 1-D ``table``."""
    return (table[1:] + table[:-1]) / 2


def between(x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
    """How many of the ascending ``edges`` lie below each element of ``x`` (uint8)."""
    return torch.bucketize(x.contiguous(), edges).to(torch.uint8)
