"""The sparse part of a block: a fixed number of entries that are added to its decoded dense part (KVQuant, 3.4).

An entry is an index ``token * D + channel`` (uint16, ascending) and a bfloat16 value, the difference to the decoded
dense value there, so that dense and sparse sums simply add. Unused entries are (0, 0).

The paper keeps a fraction of every vector; here the vectors of a block share its entries, so that memory is known and
a vector without outliers leaves its share to others.
"""

from __future__ import annotations

import torch

INDEX_DTYPE = torch.uint16
VALUE_DTYPE = torch.bfloat16
MOST_ELEMENTS = 2**16
"""Elements of a block that an index reaches."""


def entries(fraction: float, tokens: int, channels: int) -> int:
    """Entries of a block: the fraction of its elements, rounded to a multiple of 8, and at least 8 where not 0.

    Raises:
        ValueError: if an index cannot reach every element of a block.
    """
    if not fraction:
        return 0
    if tokens * channels > MOST_ELEMENTS:
        raise ValueError(
            f"outliers index at most {MOST_ELEMENTS} elements, but a block has {tokens} x {channels}; "
            f"give block={MOST_ELEMENTS // channels} or less"
        )
    return min(tokens * channels, max(8, 8 * round(fraction * tokens * channels / 8)))


def find(grouped: torch.Tensor, dim: int, count: int, weights: torch.Tensor | None = None) -> torch.Tensor:
    """The elements of each block that lie farthest from the mean of their own group, in its standard deviations.

    Args:
        grouped: float32 ``[..., T, n, g]`` or ``[..., n, g, D]``, blocks cut into groups.
        dim: the dimension that a group runs along, -1 or -2.
        count: how many of each block.
        weights: 0 for padding of short groups; see :func:`kvbits.numerics.groups.weights`.

    Returns:
        bool, as ``grouped``; also True for padding, which repeats an element. Where some are equally far, which of
        them is not defined.
    """
    x = grouped.double()
    real = torch.ones_like(x) if weights is None else weights.double().expand_as(x)
    size = real.sum(dim, keepdim=True)
    mean = (x * real).sum(dim, keepdim=True) / size
    spread = (((x - mean) * real).square().sum(dim, keepdim=True) / size).sqrt()
    far = (x - mean).abs() / spread.clamp(min=1e-300)
    flat = far.float().masked_fill(real == 0, -1).flatten(-3)
    chosen = torch.zeros_like(flat, dtype=torch.bool)
    chosen = chosen.scatter_(-1, flat.topk(count, dim=-1).indices, True).view(grouped.shape)
    return chosen.masked_fill_(real == 0, True)


def at(chosen: torch.Tensor, rest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The entries of ``rest [..., T, D]`` (exact minus decoded) where ``chosen``, as many in every block.

    Returns:
        Indices, ascending, and values, both ``[..., count]``.
    """
    flat, where = rest.flatten(-2), chosen.flatten(-2)
    count = int(where[(0,) * (where.ndim - 1)].sum())
    index = where.nonzero()[:, -1].view(*where.shape[:-1], count)
    return index.to(INDEX_DTYPE), flat.gather(-1, index).to(VALUE_DTYPE)


def pick(rest: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` entries of ``rest [..., T, D]`` (exact minus decoded) that are largest in magnitude.

    Returns:
        Indices, ascending, and values, both ``[..., count]``.
    """
    flat = rest.flatten(-2)
    index = flat.abs().topk(count, dim=-1).indices.sort(-1).values
    return index.to(INDEX_DTYPE), flat.gather(-1, index).to(VALUE_DTYPE)


def add_into(out: torch.Tensor, index: torch.Tensor, value: torch.Tensor) -> None:
    """Add entries ``[..., k]`` to ``out [..., T, D]`` in place; ``out`` may have any strides."""
    sparse = torch.zeros(*out.shape[:-2], out.shape[-2] * out.shape[-1], dtype=out.dtype, device=out.device)
    sparse.scatter_add_(-1, index.to(torch.int64), value.to(out.dtype))
    out.add_(sparse.view(out.shape))
