"""Random Hadamard rotations over head_dim (QuaRot, arXiv 2404.00456, section 3; QuIP#, arXiv 2402.04396).

A rotation ``x -> (x * signs) H / sqrt(D)`` spreads an outlier over all channels and leaves inner products as they are.
Where D is no power of two it acts on blocks of the largest power of two that divides D (96 = 3 x 32, 80 = 5 x 16).
"""

from __future__ import annotations

import functools

import torch


def block_of(channels: int) -> int:
    """Channels that are mixed with one another: the largest power of two that divides ``channels``."""
    return channels & -channels


@functools.cache
def signs(channels: int) -> torch.Tensor:
    """float32 ``[D]`` of +-1, the same for all time and on every machine: files depend on them."""
    state, bits = 0x2545F491, []
    for _ in range(channels):  # xorshift32 (Marsaglia 2003)
        state ^= state << 13 & 0xFFFFFFFF
        state ^= state >> 17
        state ^= state << 5 & 0xFFFFFFFF
        bits.append(1.0 if state >> 16 & 1 else -1.0)
    with torch.inference_mode(False):  # what is kept must serve training too
        return torch.tensor(bits)


def transform(x: torch.Tensor) -> torch.Tensor:
    """Fast Walsh-Hadamard transform of the last dimension, orthonormal, in blocks: ``D log2(block)`` additions.

    The order of the sums is part of what it is: native and Triton encoders give the same bits. No gradients.
    """
    block = block_of(x.shape[-1])
    now = x.detach().unflatten(-1, (-1, block)).movedim(-1, 0).contiguous()  # so that sums run along what is long
    then = torch.empty_like(now)
    width = 1
    while width < block:
        pair, sums = (y.unflatten(0, (-1, 2, width)) for y in (now, then))
        torch.add(pair[:, 0], pair[:, 1], out=sums[:, 0])
        torch.sub(pair[:, 0], pair[:, 1], out=sums[:, 1])
        now, then = then, now
        width *= 2
    flat: torch.Tensor = (now * block**-0.5).movedim(0, -1).flatten(-2)
    return flat


@functools.cache
def rotation(channels: int) -> torch.Tensor:
    """The rotation as an orthogonal matrix, float32 ``[D, D]``: ``x @ rotation(D) == transform(x * signs(D))``."""
    with torch.inference_mode(False):
        return transform(torch.eye(channels) * signs(channels)[:, None])
