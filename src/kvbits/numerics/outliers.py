"""The sparse part of a block: a fixed number of entries that are added to its decoded dense part (KVQuant, 3.4).

An entry is an index ``token * D + channel`` (uint16, ascending) and a bfloat16 value, the difference to the decoded
dense value there, so that dense and sparse sums simply add. Unused entries are (0, 0).
"""

from __future__ import annotations

import torch

INDEX_DTYPE = torch.uint16
VALUE_DTYPE = torch.bfloat16
MOST_ELEMENTS = 2**16
"""Elements of a block that an index reaches."""


def pick(rest: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` entries of ``rest [..., T, D]`` (exact minus decoded) that are largest in magnitude.

    Returns:
        Indices, ascending, and values, both ``[..., count]``.

    Raises:
        ValueError: if an index cannot reach every element of a block.
    """
    tokens, channels = rest.shape[-2:]
    if tokens * channels > MOST_ELEMENTS:
        raise ValueError(f"outliers index at most {MOST_ELEMENTS} elements, but a block has {tokens} x {channels}")
    flat = rest.flatten(-2)
    index = flat.abs().topk(count, dim=-1).indices.sort(-1).values
    return index.to(INDEX_DTYPE), flat.gather(-1, index).to(VALUE_DTYPE)


def add_into(out: torch.Tensor, index: torch.Tensor, value: torch.Tensor) -> None:
    """Add entries ``[..., k]`` to ``out [..., T, D]`` in place; ``out`` may have any strides."""
    sparse = torch.zeros(*out.shape[:-2], out.shape[-2] * out.shape[-1], dtype=out.dtype, device=out.device)
    sparse.scatter_add_(-1, index.to(torch.int64), value.to(out.dtype))
    out.add_(sparse.view(out.shape))
