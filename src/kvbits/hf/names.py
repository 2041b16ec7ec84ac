"""What Transformers calls the cache among the arguments of a model."""

from __future__ import annotations

import inspect

import torch

CACHE_NAMES = ("cache", "past_key_values")  # the second is the name before Transformers 5.24


def cache_name(model: torch.nn.Module) -> str:
    """What ``model.forward`` calls its cache: ``cache`` or ``past_key_values``."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in CACHE_NAMES if name in parameters), CACHE_NAMES[0])
