"""The reference: ``codec.encode`` in PyTorch, for every codec, dtype and device, once its input is found sound."""

from __future__ import annotations

import torch

from kvbits.codecs import Codec
from kvbits.encode.sound import Unsound, limit_of
from kvbits.transform import NOTHING, Transform
from kvbits.types import Packed, Params


def why_not(codec: Codec, x: torch.Tensor, transform: Transform = NOTHING) -> list[str]:
    """No reasons: it takes everything."""
    return []


def run(codec: Codec, x: torch.Tensor, params: Params, transform: Transform = NOTHING, first: int = 0) -> Packed:
    """See :func:`kvbits.encode.encode`."""
    x = transform.apply_to_blocks(x, first)
    codec.layout(x.shape[-2], x.shape[-1], x.dtype)  # raises where the block does not suit the codec
    limit = limit_of(x.dtype)
    sound = x.abs() <= limit  # False for NaN too
    if not bool(sound.all()):
        raise Unsound(int((~sound).sum()), limit)
    return codec.encode(x, params)
