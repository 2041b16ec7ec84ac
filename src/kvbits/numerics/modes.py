"""The state of torch that kvbits computes in, whatever state its caller is in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

_DEVICES = ("cpu", "cuda", "mps", "xpu")


@contextmanager
def without_autocast() -> Iterator[None]:
    """Sums in the types that the code names: ``torch.autocast`` would quietly make bfloat16 of float32."""
    active = [device for device in _DEVICES if torch.is_autocast_enabled(device)]
    if not active:
        yield
        return
    with ExitStack() as stack:
        for device in active:
            stack.enter_context(torch.autocast(device, enabled=False))
        yield
