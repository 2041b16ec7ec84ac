"""A small model that answers with certainty."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

import zoo


def loud(family: str = "llama", dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """A tiny model whose head makes much of small differences."""
    model = zoo.build(family, dtype, **changes)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(10)
    return model
