"""Gradients end at a cache, and say so: calls run with or without ``torch.no_grad()``, but no backward passes by one.

A cache holds keys and values apart from the graph that made them. Detached tensors in their place would let a backward
go through with a part of the gradient missing, in silence; so what comes out of a cache raises when one arrives.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

_MESSAGE = (
    "gradients do not flow through a kvbits cache: it holds keys and values apart from the graph that made them, and "
    "this backward would miss a part. Run calls on a cache under torch.no_grad() or torch.inference_mode(), or train "
    "with use_cache=False"
)


def refuse(*_: Any) -> NoReturn:
    """What a backward runs into."""
    raise RuntimeError(_MESSAGE)


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x.data  # which has a version of its own: torch would complain of later appends to the buffer first

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> NoReturn:
        refuse()


def end_of_gradients(x: torch.Tensor) -> torch.Tensor:
    """``x`` as the result of something that cannot be differentiated."""
    end: torch.Tensor = _End.apply(torch.empty(0, requires_grad=True), x)  # type: ignore[no-untyped-call]  # of torch
    return end
