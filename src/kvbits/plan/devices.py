"""Memory of devices by name, and how sizes are written."""

from __future__ import annotations

import difflib
import math
import os
import re

MIB = 2**20

GPU_MIB: dict[str, int] = {
    "t4": 15_360,
    "v100-16gb": 16_384,
    "v100-32gb": 32_768,
    "a10": 23_028,
    "l4": 23_034,
    "l40s": 46_068,
    "a100-40gb": 40_960,
    "a100-80gb": 81_920,
    "h100": 81_559,
    "h200": 143_771,
    "b200": 183_359,
    "rtx-3090": 24_576,
    "rtx-4090": 24_564,
    "rtx-5090": 32_607,
    "mi250": 65_520,
    "mi300x": 196_592,
}
"""MiB that the driver reports in all, with error correction where it cannot be turned off. Less is free: the driver and
the runtime keep 0.3 to 1 GiB. An MI250 is two devices; this is one of them."""

_ALIASES = {"a10g": "a10", "h100-80gb": "h100", "h200-141gb": "h200", "3090": "rtx-3090", "4090": "rtx-4090",
            "5090": "rtx-5090", "t4-16gb": "t4", "l4-24gb": "l4", "a10-24gb": "a10", "l40s-48gb": "l40s",
            "b200-192gb": "b200", "mi300x-192gb": "mi300x"}  # fmt: skip
_AMBIGUOUS = {"a100": ("a100-40gb", "a100-80gb"), "v100": ("v100-16gb", "v100-32gb")}

_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": MIB, "gib": 2**30, "tib": 2**40,
          "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}  # fmt: skip
_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
MOST_BYTES = 2**53


def gpu_bytes(name: str) -> int:
    """Memory of a device by its name; ``cpu`` is this machine.

    Raises:
        ValueError: for a name that is not known, naming near ones.
    """
    plain = re.sub(r"^(nvidia|amd|apple|geforce|tesla)-", "", re.sub(r"[\s_]+", "-", name.strip().lower()))
    plain = _ALIASES.get(plain, plain)
    if plain == "cpu":
        return machine_bytes()
    if match := re.fullmatch(r"m[1-9](?:-(?:pro|max|ultra))?-([1-9]\d{0,2})gb", plain):
        return _unified_bytes(int(match[1]) * 2**30)
    if plain in GPU_MIB:
        return GPU_MIB[plain] * MIB
    if re.fullmatch(r"m[1-9](-(pro|max|ultra))?", plain):
        raise ValueError(f"{name} comes with memories of many sizes: give it, too, such as {plain}-32gb")
    if plain in _AMBIGUOUS:
        raise ValueError(f"there are two kinds of {name}: give {' or '.join(_AMBIGUOUS[plain])}")
    near = difflib.get_close_matches(plain, [*GPU_MIB, *_ALIASES], 3, 0.5)
    hint = f"near: {', '.join(near)}" if near else f"known: {', '.join(GPU_MIB)}, m4-max-64gb and its like, cpu"
    raise ValueError(f"unknown GPU {name!r}; {hint}. Of any other give the memory itself, such as --memory 24GiB")


def _unified_bytes(total: int) -> int:
    """What an Apple GPU may use of unified memory by default: two thirds, or three quarters of more than 36 GiB."""
    return total * 2 // 3 if total <= 36 * 2**30 else total * 3 // 4


def machine_bytes() -> int:
    """Physical memory of this machine, or what its control group may use of it."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:
            return min(total, int(file.read()))
    except (OSError, ValueError):  # no control group, or "max"
        return total


def bytes_of(text: str, least: int = 1) -> int:
    """Read ``24GiB``, ``80GB`` or a number of bytes, a MiB at least; ``least`` or more.

    Raises:
        ValueError: for anything else, and for sizes that no device has.
    """
    match = re.fullmatch(r"(\d{1,99}(?:\.\d+)?)([a-z]*)", re.sub(r"[\s_,]", "", text.lower()))
    if match is None or match[2] not in _UNITS:
        near = f"; {text}ib is binary, {text}b decimal" if match is not None and match[2] in "kmgt" else ""
        raise ValueError(f"{text!r} is no size of a memory; write it as 24GiB (2^30 bytes) or 24GB (10^9 bytes){near}")
    size = math.floor(float(match[1]) * _UNITS[match[2]])
    if not match[2] and 0 < size < 2**20:
        raise ValueError(f"{text} without a unit is {text} bytes, no size of a memory; write {text}GiB or {text}GB")
    if not least <= size <= MOST_BYTES:
        raise ValueError(f"a memory of {text} is no device's; give {least} B to {MOST_BYTES // 2**50} PiB")
    return size


def count_of(text: str) -> int:
    """Read a number of parameters: ``6.7b``, ``350m``, ``6738415616``.

    Raises:
        ValueError: for anything else.
    """
    match = re.fullmatch(r"(\d{1,99}(?:\.\d+)?)([kmbt]?)", re.sub(r"[\s_,]", "", text.lower()))
    number = round(float(match[1]) * _COUNTS[match[2]]) if match else 0
    if not 1 <= number <= 10**15:
        raise ValueError(f"{text!r} is no number of parameters; write it as 6.7b or 350m")
    return number


def gib(nbytes: float) -> str:
    """``1.25 GiB``, or MiB or KiB where that is too small to see."""
    for unit, size in (("GiB", 2**30), ("MiB", MIB)):
        if nbytes >= size / 10:
            return f"{nbytes / size:,.2f} {unit}"
    return f"{nbytes / 2**10:,.1f} KiB"
