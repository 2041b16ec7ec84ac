"""The peak of memory while something runs: of the GPU, or of this whole process.

- On CUDA it is ``torch.cuda.max_memory_allocated``: everything that torch holds there, weights included.
- On Linux it is the resident set of the process: weights, cache, activations, the interpreter and its libraries. The
  kernel keeps its highest value (``VmHWM``) and lets a process reset it (``/proc/self/clear_refs``). What was freed
  before is given back first, so that one run does not count what an earlier one has left.
- Elsewhere nothing can be reset: a process knows only the peak of its whole life, which says nothing of one run in it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"

ON_CUDA = "allocated on the device by torch, weights included"
ON_LINUX = "resident set of the process, weights and libraries included"
UNKNOWN = "this system does not let a process reset its peak"


@dataclass
class Peak:
    """Attributes:
    nbytes: the highest use; None until the block is left, and where it cannot be measured.
    what: what is counted, or why nothing is.
    """

    what: str
    nbytes: int | None = None


@contextlib.contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """Measure what runs inside the ``with`` block on ``device``."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        peak = Peak(ON_CUDA)
        yield peak
        peak.nbytes = torch.cuda.max_memory_allocated(device)
        return
    peak = Peak(ON_LINUX if device.type == "cpu" and _reset() else UNKNOWN)
    yield peak
    if peak.what == ON_LINUX:
        peak.nbytes = _highest()


def _reset() -> bool:
    """Let the peak begin at what is in use now; False where the system has no such thing or forbids it."""
    if not sys.platform.startswith("linux"):
        return False
    with contextlib.suppress(AttributeError, OSError):  # another C library than glibc keeps what was freed
        ctypes.CDLL(None).malloc_trim(0)
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
    except OSError:
        return False
    return True


def _highest() -> int:
    """Peak of the resident set in bytes."""
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    return 1024 * int(line.split()[1])
