"""Weighted k-means in one dimension, on a histogram: levels that are fitted rather than assumed.

KVQuant (arXiv 2401.18079, section 3.3 and appendix E) fits 2^b levels to the values that a layer really produces,
each weighted by how much its error costs. In one dimension the clusters are intervals, and a fine histogram loses
nothing: a step of Lloyd's algorithm is one pass over the bins, whatever the number of samples. Where it begins decides
where it ends, above all under weights of very different sizes, as squared gradients are: it begins at the best
intervals of a coarser histogram, found by dynamic programming (Wu 1991), and so ends close to the best there is.
"""

from __future__ import annotations

import torch

BINS = 4096
COARSE = 8
"""Bins that are one to the dynamic programming."""
STEPS = 200


def fit(x: torch.Tensor, weights: torch.Tensor | None, count: int) -> torch.Tensor:
    """Ascending levels, float32 ``[count]``, with the least weighted squared error, but for the width of bins.

    Args:
        x: float, any shape, within [-1, 1].
        weights: not negative, as ``x``; default: all the same. Where all are zero they say nothing, and are left out.
        count: of levels. Where there are fewer values than that, some levels are the same.
    """
    x = x.flatten().double().clamp(-1, 1)
    w = torch.ones_like(x) if weights is None else weights.flatten().double()
    largest = w.max() if len(w) else w.sum()
    w = w / largest if bool(largest > 0) else torch.ones_like(x)  # a sum of the smallest would be rounded to zero
    bins = ((x + 1) * (BINS / 2)).long().clamp_(max=BINS - 1)
    mass = torch.zeros(BINS, dtype=torch.float64, device=x.device).index_add_(0, bins, w)
    moment = torch.zeros_like(mass).index_add_(0, bins, w * x)
    centre = torch.where(
        mass > 0, moment / mass.clamp(min=1e-300), (torch.arange(BINS, device=x.device) + 0.5) * 2 / BINS - 1
    )
    masses, moments = _sums(mass), _sums(moment)
    edges = COARSE * _best_edges(mass, moment, centre * moment, count)
    levels = centre[edges.clamp(max=BINS - 1)]  # of an interval without samples
    for _ in range(STEPS):
        cuts = torch.cat([edges, edges.new_full((1,), BINS)])
        inside, sums = masses[cuts].diff(), moments[cuts].diff()
        moved = torch.where(inside > 0, sums / inside.clamp(min=1e-300), levels).sort().values
        if torch.equal(moved, levels):
            break
        levels = moved
        edges[1:] = torch.searchsorted(centre, (levels[1:] + levels[:-1]) / 2)
    return levels.float()


def _sums(x: torch.Tensor) -> torch.Tensor:
    """Of the first 0, 1, 2, ... elements."""
    return torch.cat([x.new_zeros(1), x.cumsum(0)])


def _best_edges(mass: torch.Tensor, moment: torch.Tensor, square: torch.Tensor, count: int) -> torch.Tensor:
    """Where each of the ``count`` best intervals begins, in coarse bins: int64 ascending, the first one 0.

    ``moment`` and ``square`` are the sums of each bin's mass times its position, and times the square of that.
    """
    w, m, s = (_sums(x.view(-1, COARSE).sum(1)) for x in (mass, moment, square))
    w, m, s = (x - x[:, None] for x in (w, m, s))  # of bins i .. j - 1
    cost = (s - m.square() / w.clamp(min=1e-300)).clamp(min=0)
    cost = cost.masked_fill(torch.ones_like(cost, dtype=torch.bool).tril(-1), torch.inf)
    best, steps = cost[0], []
    for _ in range(count - 1):
        best, begins = (best[:, None] + cost).min(0)
        steps.append(begins)
    edges = [mass.new_tensor(len(best) - 1, dtype=torch.int64)]
    for begins in reversed(steps):
        edges.insert(0, begins[edges[0]])
    return torch.stack([torch.zeros_like(edges[0]), *edges[:-1]])
