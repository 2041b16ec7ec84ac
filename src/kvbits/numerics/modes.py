"""The state of torch that kvbits computes in, whatever state its caller is in."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


def outside_graphs(function: _Function) -> _Function:
    """Leave ``function`` out of the graphs of ``torch.compile``: what it does depends on what a cache holds by then."""
    options = {}
    if "reason" in inspect.signature(torch.compiler.disable).parameters:  # not in early releases
        options["reason"] = (
            "a kvbits cache is no part of a compiled graph; freeze it, kvbits.freeze(cache, capacity), or compile the "
            "model without fullgraph=True"
        )
    disabled: _Function = torch.compiler.disable(function, **options)
    return disabled


def host_runs() -> bool:
    """Whether Python runs at each step; not while ``torch.compile`` traces it or a CUDA graph records it."""
    if torch.compiler.is_compiling():
        return False
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


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
