"""Views of ``[..., T, D]`` as groups that share one scale, along channels or along tokens.

A group never straddles tokens *and* channels. Channels are cut into ``ceil(D / group)`` groups of equal length
(80 channels at group 64 become 40 + 40); where D does not divide, the last group is short and is padded with its own
last channel, which does not change its range; a fit over the group leaves it out by :func:`weights`.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch

Along: TypeAlias = Literal["token", "channel"]


def group_length(size: int, group: int) -> int:
    """Length of each group when ``size`` channels are cut evenly into groups of at most ``group``."""
    count = -(-size // group)
    return -(-size // count)


def group_shape(tokens: int, channels: int, per: Along, group: int) -> tuple[int, int]:
    """Shape of the scales of one block: ``[T, groups of channels]`` per token, ``[groups of tokens, D]`` per channel.

    Raises:
        ValueError: if groups of tokens do not divide the block.
    """
    if per == "token":
        return tokens, -(-channels // group_length(channels, group))
    if tokens % group:
        raise ValueError(f"a block of {tokens} tokens cannot be cut into groups of {group} tokens")
    return tokens // group, channels


def split(x: torch.Tensor, per: Along, group: int) -> tuple[torch.Tensor, int]:
    """Cut ``x [..., T, D]`` into groups.

    Returns:
        The grouped view and the dimension to reduce: per token ``[..., T, n, g]`` and -1, per channel
        ``[..., n, g, D]`` and -2.
    """
    if per == "channel":
        return x.unflatten(-2, (-1, group)), -2
    channels = x.shape[-1]
    length = group_length(channels, group)
    short = -channels % length
    if short:
        x = torch.cat([x, x[..., -1:].expand(*x.shape[:-1], short)], dim=-1)
    return x.unflatten(-1, (-1, length)), -1


def weights(channels: int, per: Along, group: int, device: torch.device) -> torch.Tensor | None:
    """1 for each channel of ``split(x, per, group)`` and 0 for padding, ``[n, g]``; None where nothing is padded."""
    length = group_length(channels, group)
    if per == "channel" or channels % length == 0:
        return None
    real = torch.arange(-(-channels // length) * length, device=device) < channels
    return real.float().view(-1, length)


def join(x: torch.Tensor, per: Along, channels: int) -> torch.Tensor:
    """Inverse of :func:`split`: back to ``[..., T, D]``, dropping the padding of a short last group."""
    if per == "channel":
        return x.flatten(-3, -2)
    x = x.flatten(-2)
    return x if x.shape[-1] == channels else x[..., :channels]


def power_of_two(number: int) -> int:
    """The smallest that is not below ``number``."""
    return 1 << (number - 1).bit_length()
