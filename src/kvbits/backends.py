"""What attention kernels and encoders both stand on: the compiled module ``kvbits._native``, and Triton.

The module knows formats by numbers: places in the tuples here, which are the enums of ``native/format.hpp``.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
from types import ModuleType

import torch

DTYPES = (None, torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int64, torch.bool, torch.uint16)
LEVELS = ("uniform", "table", "e4m3", "exact")
OLDEST_TRITON = (3, 5)
"""Earlier compilers refuse tuples of tensors and chains of conditions. It comes with torch 2.9."""

OPT_IN = "KVBITS_TRITON"
"""Environment variable that lets Triton's kernels run on a device, while only the interpreter has shown them right."""

PER = ("token", "channel", "layer", "element")


@functools.cache
def library() -> tuple[ModuleType | None, int, str]:
    """The compiled module, the instruction set in use, and why there is none.

    ``KVBITS_ISA`` names another instruction set than the best, for debugging only.

    Raises:
        ValueError: if it names one that this build or this processor does not have.
    """
    try:
        module = importlib.import_module("kvbits._native")
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError)
        return None, 0, "it was not built: no C++ compiler when kvbits was installed" if missing else str(error)
    module.set_dtypes(list(DTYPES))
    names: list[str] = module.names()
    wanted = os.environ.get("KVBITS_ISA", names[0])
    if wanted not in names:
        raise ValueError(f"KVBITS_ISA={wanted!r} is not available here; allowed are {', '.join(names)}")
    return module, names.index(wanted), wanted


def instruction_set() -> str | None:
    """The instruction set that the kernel uses here, such as ``avx512``; None where it is not built."""
    module, _, name = library()
    return name if module else None


@functools.cache
def triton_version() -> str | None:
    """The installed release, or None. Read from its metadata: importing it would take a second."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None


def interpreted() -> bool:
    """Whether Triton was told to interpret its kernels, which it then does on a CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def why_no_triton(device: torch.device) -> list[str]:
    """Reasons against Triton's kernels for tensors on ``device``: the device, no Triton, or one too old."""
    if device.type != "cuda" and not interpreted():
        return [f"tensors on {device.type} (CUDA and ROCm GPUs run)"]
    version = triton_version()
    if version is None:
        return ["triton is not installed"]
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_TRITON:
        return [f"triton {version} (3.5 and later run)"]
    return []


def why_triton_is_off(device: torch.device) -> list[str]:
    """The same, and that they have not run on a device yet, where nobody asked for them to be tried."""
    reasons = why_no_triton(device)
    if not reasons and not interpreted() and os.environ.get(OPT_IN) != "1":
        reasons.append(f"it has not been verified on a GPU yet ({OPT_IN}=1 tries it)")
    return reasons
