"""Rotary position embedding of the first channels of each head (RoFormer, arXiv 2104.09864, eq. 34).

Cosines and sines come from the model's own rotary module, one row per token, so every scaling variant is the model's.
A pair of channels is ``(i, i + R/2)`` (Llama, GPT-NeoX) or, interleaved, ``(2i, 2i + 1)`` (GPT-J, Cohere, GLM), where
the first ``R`` channels are roped and the others pass (partial rotary).
"""

from __future__ import annotations

import torch


def apply(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rope ``x [..., T, D]`` by the angles of its tokens.

    Args:
        x: float tensor.
        cos, sin: ``[..., T, R/2]``, one angle per pair; may carry the model's attention scaling.
        interleaved: which channels make a pair.
    """
    half = cos.shape[-1]
    paired, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        first, second = paired[..., 0::2], paired[..., 1::2]
    else:
        first, second = paired[..., :half], paired[..., half:]
    pair = (first * cos - second * sin, second * cos + first * sin)
    paired = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat([paired, rest], dim=-1)


def unrope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Inverse of :func:`apply`, also where ``cos`` and ``sin`` carry a scaling: divides by its square."""
    square = cos.square() + sin.square()
    return apply(x, cos / square, -sin / square, interleaved)
