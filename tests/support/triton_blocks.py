"""The Triton encoder, compiled or interpreted, and what it is given."""

from __future__ import annotations

import torch

from kvbits.types import Packed
from triton_calls import DEVICE

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def there(tensors: Packed) -> Packed:
    return {name: x.to(DEVICE) for name, x in tensors.items()}
