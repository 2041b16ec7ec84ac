"""Weighted k-means in one dimension, on a histogram: levels that are fitted rather than assumed.

KVQuant (arXiv 2401.18079, section 3.3 and appendix E) fits 2^b levels to the values that a layer really produces,
each weighted by how much its error costs. In one dimension the clusters are intervals, and a fine histogram loses
nothing: a step of Lloyd's algorithm is one pass over the bins, whatever the number of samples.
"""

from __future__ import annotations

import torch

BINS = 4096
STEPS = 200


def fit(x: torch.Tensor, weights: torch.Tensor | None, count: int) -> torch.Tensor:
    """Ascending levels, float32 ``[count]``, with the least weighted squared error that Lloyd's algorithm finds.

    Args:
        x: float, any shape, within [-1, 1].
        weights: not negative, as ``x``; default: all the same. Where all are zero they say nothing, and are left out.
        count: of levels. They begin at the weighted quantiles, and a level that meets no sample stays where it is.
    """
    x = x.flatten().double().clamp(-1, 1)
    w = torch.ones_like(x) if weights is None else weights.flatten().double()
    if not bool(w.sum() > 0):
        w = torch.ones_like(x)
    bins = ((x + 1) * (BINS / 2)).long().clamp_(max=BINS - 1)
    mass = torch.zeros(BINS, dtype=torch.float64, device=x.device).index_add_(0, bins, w)
    moment = torch.zeros_like(mass).index_add_(0, bins, w * x)
    centre = torch.where(
        mass > 0, moment / mass.clamp(min=1e-300), (torch.arange(BINS, device=x.device) + 0.5) * 2 / BINS - 1
    )
    total = mass.cumsum(0)
    quantile = (torch.arange(count, device=x.device) + 0.5) / count * total[-1]
    levels = centre[torch.searchsorted(total, quantile).clamp(max=BINS - 1)]
    zero = mass.new_zeros(1)
    masses, moments = torch.cat([zero, total]), torch.cat([zero, moment.cumsum(0)])
    for _ in range(STEPS):
        edges = torch.searchsorted(centre, (levels[1:] + levels[:-1]) / 2)
        cuts = torch.cat([edges.new_zeros(1), edges, edges.new_full((1,), BINS)])
        inside, sums = masses[cuts].diff(), moments[cuts].diff()
        moved = torch.where(inside > 0, sums / inside.clamp(min=1e-300), levels)
        if torch.equal(moved, levels):
            break
        levels = moved.sort().values
    return levels.float()
