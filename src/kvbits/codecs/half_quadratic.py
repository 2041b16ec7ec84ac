"""``hqq8 hqq4 hqq3 hqq2``: the affine codes with a zero found by half-quadratic splitting (HQQ, Badri & Shaji 2023).

Minimises ``sum |x - scale (code - zero)|^p`` over the zero of each group, p = 0.7: the error is split off and shrunk
towards 0 (eq. 5), the zero is the mean that remains (eq. 6); beta grows by 1.01 a step. Every group keeps its own
best zero and stops by itself, so blocks, heads and rows never influence each other. (The published code stops all
groups together, on their mean error.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvbits.codecs.grouped import Grouped, grouped_pattern
from kvbits.numerics import affine

P_NORM = 0.7
BETA, BETA_GROWTH = 10.0, 1.01
STEPS = 20


def shrink(error: torch.Tensor, beta: float) -> torch.Tensor:
    """Generalised soft threshold of the l_p norm, ``sign(e) relu(|e| - |e|^(p-1) / beta)`` (HQQ, eq. 5)."""
    magnitude = error.abs()
    return error.sign() * (magnitude - magnitude.clamp(min=1e-12).pow(P_NORM - 1) / beta).relu_()


def lp_error(
    x: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    bits: int,
    dim: int,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Mean of ``|x - x^|^p`` over each group, in units of the scale: what HQQ minimises."""
    codes = affine.quantize(x, scale, zero, bits)
    error = (affine.dequantize(codes, scale, zero) - x) / affine.safe_divisor(scale)
    return _mean(error.abs_().pow_(P_NORM), dim, weights)


def _mean(x: torch.Tensor, dim: int, weights: torch.Tensor | None) -> torch.Tensor:
    """Mean over each group, without the padding of a short one (see :func:`groups.weights`)."""
    if weights is None:
        return x.mean(dim, keepdim=True)
    return (x * weights).sum(dim, keepdim=True) / weights.sum(dim, keepdim=True)


@dataclass(frozen=True)
class HalfQuadratic(Grouped):
    """Affine codes of 2, 3, 4 or 8 bits with a half-quadratic zero. See :class:`Grouped`."""

    name: ClassVar[str] = "hqq"
    chooses = "half-quadratic"
    allowed_bits: ClassVar[tuple[int, ...]] = (2, 3, 4, 8)
    dense_only = "its zero is found for all elements of a group, anew in every group"
    pattern = grouped_pattern("hqq", allowed_bits)
    examples = ("hqq8", "hqq4", "hqq3", "hqq2", "hqq4-gs32", "hqq2-channel")

    def choose(
        self, grouped: torch.Tensor, dim: int, weights: torch.Tensor | None, chosen: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scale, zero = super().choose(grouped, dim, weights, chosen)
        return scale, self.solve_zero(grouped, scale, zero, dim, weights)

    def solve_zero(
        self,
        x: torch.Tensor,
        scale: torch.Tensor,
        zero: torch.Tensor,
        dim: int,
        weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The zero with the least l_p error that the splitting visits, from the min/max one on.

        ``weights`` tells the padding of short groups: see :func:`groups.weights`.
        """
        # Work in levels: there the published beta means the same for every magnitude of x.
        levels = x / affine.safe_divisor(scale)
        unit = torch.ones_like(scale)
        best, best_error = zero, lp_error(levels, unit, zero, self.bits, dim, weights)
        beta, current = BETA, zero
        for _ in range(STEPS):
            codes = affine.quantize(levels, unit, current, self.bits)
            decoded = affine.dequantize(codes, unit, current)
            rest = levels - shrink(levels - decoded, beta)
            current = _mean(codes - rest, dim, weights).to(zero.dtype)
            error = lp_error(levels, unit, current, self.bits, dim, weights)
            better = error < best_error
            best, best_error = torch.where(better, current, best), torch.where(better, error, best_error)
            beta *= BETA_GROWTH
        constant = x.amin(dim, keepdim=True) == x.amax(dim, keepdim=True)
        return torch.where(constant, zero, best)  # a constant group already decodes exactly
