"""From the float32 that codecs decode to, down to the dtype of the model."""

from __future__ import annotations

import torch


def narrow(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Finite ``x`` as ``dtype``, saturating: a rounding error above 65,504 must not become infinity in float16."""
    limit = torch.finfo(dtype).max
    if x.dtype == dtype or limit >= torch.finfo(x.dtype).max:
        return x.to(dtype)
    return x.clamp(-limit, limit).to(dtype)
