"""``KVHandle``: what ``Cache.update`` returns in place of keys and values while they are packed.

A handle has the shape, dtype and device of the decoded tensor but no storage. The kvbits attention function takes
the packed view out of it; any other operation (a model that touches K or V after ``update``, another attention
implementation) gets the decoded tensor, so every model computes the right thing. ``trace`` records which it was.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

from kvbits.attend import KVView
from kvbits.attend.dense import dense
from kvbits.hf.gradient import refuse
from kvbits.numerics.modes import outside_graphs, without_autocast


class Trace:
    """What became of a layer's last update: ``kernel``, ``stock`` or ``decoded``, for ``explain``.

    Attributes:
        outcome: which it was.
        asked: whether to note in ``kernels`` what each kernel said of the call.
        kernels: one line for each kernel.
    """

    def __init__(self) -> None:
        self.outcome = "nothing yet"
        self.asked = False
        self.kernels: list[str] = []


class Pair:
    """The view that two handles share, and its decoded tensors once something asked for them."""

    def __init__(self, view: KVView, trace: Trace, ends_gradients: bool = False) -> None:
        self.view = view
        self.ends_gradients = ends_gradients
        self.trace = trace
        self._dense: tuple[torch.Tensor, torch.Tensor] | None = None

    @outside_graphs
    def dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Decoded K and V, ``[B, H, columns, D]``, decoded once."""
        if self._dense is None:
            self.trace.outcome = "decoded"
            with without_autocast():
                keys, values = dense(self.view)
            self._dense = keys.contiguous(), values.contiguous()  # the strides that a handle claims to have
        return self._dense

    def handles(self) -> tuple[KVHandle, KVHandle]:
        """One handle for K and one for V."""
        return KVHandle(self, 0), KVHandle(self, 1)


class KVHandle(torch.Tensor):
    """A tensor that decodes when touched. See the module's docstring."""

    pair: Pair
    side: int

    @staticmethod
    def __new__(cls, pair: Pair, side: int) -> KVHandle:
        like = (pair.view.keys, pair.view.values)[side]
        shape = (like.shape[0], like.shape[1], pair.view.kv_columns, like.shape[3])
        handle = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=like.dtype, device=like.device, requires_grad=pair.ends_gradients
        )
        handle.pair, handle.side = pair, side
        if pair.ends_gradients:
            handle.register_hook(refuse)  # type: ignore[no-untyped-call]  # of torch
        return handle

    def __init__(self, pair: Pair, side: int) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # nameless in torch's stub
        return f"KVHandle({'KV'[self.side]}, {tuple(self.shape)}, {self.pair.view.scheme})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # which torch annotates without its first argument
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def decoded(x: Any) -> Any:
            return x.pair.dense()[x.side] if isinstance(x, KVHandle) else x

        return func(*tree_map(decoded, args), **tree_map(decoded, kwargs or {}))


def packed_pair(keys: torch.Tensor, values: torch.Tensor) -> Pair | None:
    """The pair that both tensors are untouched handles of, else None."""
    if not (isinstance(keys, KVHandle) and isinstance(values, KVHandle)):
        return None
    untouched = keys.pair is values.pair and (keys.side, values.side) == (0, 1)
    return keys.pair if untouched else None
