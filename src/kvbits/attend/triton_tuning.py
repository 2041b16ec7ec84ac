"""How the Triton kernels are cut, per architecture: a small table instead of an autotuner that runs at first use.

An autotuner would compile a dozen variants of each kernel before the first token, and hide which one was measured. The
table has one entry per architecture and code width; whoever finds better figures passes them with :func:`tuned`.
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
        programs: programs wanted per multiprocessor, over which the context is split.
        exact_tokens: exact tokens that one program takes.
    """

    rows: int = 64
    warps: int = 4
    stages: int = 2
    programs: int = 4
    exact_tokens: int = 128


DEFAULT = Tuning()

TABLE: dict[tuple[str, int], Tuning] = {
    # (architecture, bits of the wider side) -> how; what is not here takes DEFAULT.
}

_OVERRIDE: ContextVar[Tuning | None] = ContextVar("kvbits_triton_tuning", default=None)


def tuning_for(architecture: str, bits: int) -> Tuning:
    """The entry for an architecture (``sm_90``, ``gfx942``) and the wider side's bits, or what :func:`tuned` says."""
    return _OVERRIDE.get() or TABLE.get((architecture, bits), DEFAULT)


@contextmanager
def tuned(tuning: Tuning) -> Iterator[None]:
    """Use ``tuning`` in this context, whatever the table says."""
    token = _OVERRIDE.set(tuning)
    try:
        yield
    finally:
        _OVERRIDE.reset(token)
