"""Memory for packed blocks: whole cache lines, and on Linux in huge pages, which spare a long read its page walks."""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from collections.abc import Callable

import torch

HUGE_PAGE_BYTES = 2**21
_MADV_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", 14)


@functools.cache
def _madvise() -> Callable[..., int] | None:
    if not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None), "madvise", None)


def allocate(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Uninitialised uint8, aligned to 64 bytes; large ones on a CPU lie in huge pages where the system grants them."""
    memory = torch.empty(shape, dtype=torch.uint8, device=device)
    madvise = _madvise() if device.type == "cpu" and memory.nbytes >= 2 * HUGE_PAGE_BYTES else None
    if madvise is not None:
        first = -(-memory.data_ptr() // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        last = (memory.data_ptr() + memory.nbytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        # Advice only: a system that refuses it serves small pages, and nothing else changes.
        madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), ctypes.c_int(_MADV_HUGEPAGE))
    return memory
