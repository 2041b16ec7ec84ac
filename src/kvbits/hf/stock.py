"""Layers of a cache that stay the model's own: what they hold, and whether they can be cropped."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

ATTENTION = (DynamicLayer, DynamicSlidingWindowLayer)
"""Layers of keys and values that kvbits can stand in for."""


def is_croppable(layer: Any) -> bool:
    """Whether a layer of the model's own type can be cropped to any length: it has no state, and no full window."""
    if type(layer) is DynamicSlidingWindowLayer:
        return layer.get_seq_length() < layer.sliding_window
    return not any(isinstance(x, (torch.Tensor, dict)) for x in vars(layer).values())


def cropped(layer: DynamicLayer, columns: int) -> bool:
    """Take back what a layer of the model's own type got last, if it can."""
    if type(layer) not in ATTENTION:
        return False
    try:
        layer.crop(-columns)
    except (RuntimeError, ValueError):  # a full window that was not told to record
        return False
    return True


def storage_bytes(layer: Any) -> int:
    """Bytes of the distinct tensor storages that a stock layer holds, also inside tensors made of tensors."""
    seen: dict[int, int] = {}
    waiting: list[Any] = [vars(layer)]
    while waiting:
        thing = waiting.pop()
        if is_traceable_wrapper_subclass(thing):
            waiting.extend(getattr(thing, name) for name in thing.__tensor_flatten__()[0])
        elif isinstance(thing, torch.Tensor):
            # By the storage itself: on the meta device every address is 0.
            seen[thing.untyped_storage()._cdata] = thing.untyped_storage().nbytes()
        elif isinstance(thing, dict):
            waiting.extend(thing.values())
        elif isinstance(thing, (list, tuple)):
            waiting.extend(thing)
    return sum(seen.values())
