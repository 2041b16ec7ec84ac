"""How the Triton kernels are cut, per architecture: a small table instead of an autotuner that runs at first use.

An autotuner would compile a dozen variants of each kernel before the first token, and hide which one was measured. The
table has one entry per architecture and kind of format; whoever finds better figures passes them with :func:`tuned`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tuning:
    """One way to cut the work.

    Attributes:
        rows: rows of a packed tile: tokens of one slice, of as many blocks as it takes.
        warps: warps of a program.
        stages: depth of the software pipeline over blocks.
        registers: at most so many in a thread (CUDA only), or None for as many as the compiler likes. Fewer let more
            programs share a multiprocessor.
        programs: programs wanted per multiprocessor, over which the context is split.
        exact_tokens: exact tokens that one program takes.
    """

    rows: int = 64
    warps: int = 4
    stages: int = 2
    registers: int | None = None
    programs: int = 4
    exact_tokens: int = 128


DEFAULT = Tuning()

_BY_BITS: dict[tuple[int, bool], Tuning] = {
    # (bits of the wider side, keys or values per channel) -> how. From the compiler's counts, not from timings
    # (bench/gpu_compile.py): the fewest registers at which the loop over blocks spills little or nothing, and as many
    # programs as they let run.
    (2, False): Tuning(registers=168, programs=3),
    (2, True): Tuning(programs=2),
    (3, False): Tuning(registers=168, programs=3),
    (3, True): Tuning(programs=2),
    (4, False): Tuning(registers=168, programs=3),
    (4, True): Tuning(registers=168, programs=3),
    (8, False): Tuning(registers=168, programs=3),
    (8, True): Tuning(programs=2),
}

TABLE: dict[str, dict[tuple[int, bool], Tuning]] = {
    "sm_80": _BY_BITS,
    "sm_89": _BY_BITS,
    "sm_90": {**_BY_BITS, (4, False): Tuning(registers=128, programs=4)},  # its matrix instructions read memory
}
"""Architectures that were looked at; what is not here takes DEFAULT."""

_OVERRIDE: ContextVar[Tuning | None] = ContextVar("kvbits_triton_tuning", default=None)


def tuning_for(architecture: str, bits: int, per_channel: bool) -> Tuning:
    """The entry for an architecture (``sm_90``, ``gfx942``) and a format, or what :func:`tuned` says.

    Args:
        architecture: of the device.
        bits: of the wider of keys and values.
        per_channel: whether either is grouped per channel.
    """
    return _OVERRIDE.get() or TABLE.get(architecture, {}).get((bits, per_channel), DEFAULT)


@contextmanager
def tuned(tuning: Tuning) -> Iterator[None]:
    """Use ``tuning`` in this context, whatever the table says."""
    token = _OVERRIDE.set(tuning)
    try:
        yield
    finally:
        _OVERRIDE.reset(token)
