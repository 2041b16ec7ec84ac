"""Attention over packed blocks. ``KERNELS`` lists the kernels, best first; the first that fits runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from kvbits.attend import native, reference
from kvbits.attend.call import Call, Partial
from kvbits.attend.triton import decode as triton_decode
from kvbits.attend.view import KVView, Shard
from kvbits.numerics.modes import without_autocast

__all__ = [
    "KERNELS", "Call", "KVView", "Kernel", "Partial", "Shard", "attend", "choose", "explain",
]  # fmt: skip


@dataclass(frozen=True)
class Kernel:
    """A way to run a :class:`Call`.

    Attributes:
        name: for ``explain`` and for results.
        why_not: reasons why it cannot run this call; empty where it can.
        run: the call to ``[B, Hq, q, Dv]`` in the query's dtype.
        partial: the call to the output and the log-sums of what is held here, for contexts that are shared.
    """

    name: str
    why_not: Callable[[Call], list[str]]
    run: Callable[[Call], torch.Tensor]
    partial: Partial

    def joined(self) -> Kernel:
        """The same for a view of one rank's shard."""

        def run(call: Call) -> torch.Tensor:
            assert call.view.shard is not None
            return call.view.shard.join(call, self.partial)

        return replace(self, run=run)


KERNELS: tuple[Kernel, ...] = (
    Kernel("native", native.why_not, native.run, native.partial),
    Kernel("triton", triton_decode.why_not, triton_decode.run, triton_decode.partial),
    Kernel("reference", reference.why_not, reference.run, reference.partial),
)


def choose(call: Call) -> Kernel:
    """The first kernel without a reason against it."""
    for kernel in KERNELS:
        if not kernel.why_not(call):
            return kernel if call.view.shard is None else kernel.joined()
    raise ValueError("no kernel fits this call: " + "; ".join(explain(call)))


def explain(call: Call) -> list[str]:
    """One line for each kernel: ``name: runs``, ``name: fits, but a better one runs``, or its reasons against."""
    lines, found = [], False
    for kernel in KERNELS:
        reasons = kernel.why_not(call)
        fits = "fits, but a better one runs" if found else "runs"
        lines.append(f"{kernel.name}: {', '.join(reasons) if reasons else fits}")
        found = found or not reasons
    return lines


def attend(call: Call) -> torch.Tensor:
    """Run the best kernel: ``[B, Hq, q, Dv]`` in the query's dtype."""
    with without_autocast():
        return choose(call).run(call)
