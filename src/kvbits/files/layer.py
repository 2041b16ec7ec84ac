"""What one layer of a cache holds, as JSON data and tensors, and back again bit for bit.

Tensors, after the number of the layer: ``pool`` (uint8 ``[blocks, H, record bytes]``, those that some row refers to, in
the order of the table), ``table`` (int32 ``[B, blocks]``, where the order alone does not tell), ``keys`` and ``values``
(the exact tokens, ``[B, H, T, D]``), and what was fitted: ``key.scale``, ``key.mean``, ``value.table``, ...

Room to grow is not written. Whatever a file says is checked against itself before a kernel may rely on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch

from kvbits.files.sealed import Content, Damaged, Selection
from kvbits.layer.cache import LayerCache
from kvbits.store.blocks import BlockStore
from kvbits.store.record import Record, Slot
from kvbits.store.rows import Rows

_SIDES = ("key", "value")


def state_of(core: LayerCache, name: str) -> tuple[dict[str, Any], dict[str, Content]]:
    """JSON data and tensors, the latter under names that begin with ``name``."""
    params = dict(zip(_SIDES, (core.key_params, core.value_params), strict=True))
    tensors: dict[str, Content] = {f"{name}.{side}.{p}": x for side in _SIDES for p, x in sorted(params[side].items())}
    state: dict[str, Any] = {
        "scheme": str(core.scheme),
        "window": core.window,
        "params": {side: sorted(params[side]) for side in _SIDES},
        "learned": {side: sorted(core.calibrated[i]) for i, side in enumerate(_SIDES)},
        "fitted": list(core.is_final),
        "held": None,
    }
    if core.keys is None or core.values is None or core.store is None:
        return state, tensors
    index, table = core.store.in_table_order()
    used = table.numel() if index is None else len(index)
    tensors[f"{name}.pool"] = Selection(core.store.pool, index, used, core.store.record.gaps)
    if index is not None:
        tensors[f"{name}.table"] = table.int()
    longest = max(core.held, default=0)
    tensors |= {f"{name}.keys": core.keys[:, :, :longest], f"{name}.values": core.values[:, :, :longest]}
    state |= {
        "held": core.held,
        "counts": core.store.counts,
        "blank": core.store.blank,
        "dropped": core.dropped,
        "ordered": index is None,
        "late": [list(row) for row in core.late],
    }
    return state, tensors


def restore(
    core: LayerCache,
    state: Mapping[str, Any],
    name: str,
    tensor: Callable[[str], torch.Tensor],
    rows: Rows,
    device: torch.device,
) -> None:
    """Fill an empty layer with the state that :func:`state_of` gave of one of the same scheme.

    The pool is used where it lies, if that is on ``device``; everything else is copied.

    Raises:
        Damaged: if the parts do not belong together.
    """
    read = _Reader(name, tensor, device)
    params = [{p: read.param(f"{side}.{p}") for p in state["params"][side]} for side in _SIDES]
    fitted = [{p: params[i][p] for p in state["learned"][side]} for i, side in enumerate(_SIDES)]
    core.calibrated = (fitted[0], fitted[1])
    core.reset()
    core.key_params, core.value_params = params
    core.is_final = (bool(state["fitted"][0]), bool(state["fitted"][1]))
    if state["held"] is None:
        return
    keys, values = read.exact("keys"), read.exact("values")
    counts, blank, held = (_numbers(state[what]) for what in ("counts", "blank", "held"))
    late, dropped = tuple(tuple(_numbers(row)) for row in state["late"]), int(state["dropped"])
    scheme, block = core.scheme, core.scheme.block
    read.require(len(counts) == len(blank) == len(held) == len(late) == rows.batch == keys.shape[0], "rows")
    read.require(keys.shape[:3] == values.shape[:3] and keys.shape[2] == max(held, default=0), "exact tokens")
    for row, tokens in enumerate(rows.counts):
        read.require(tokens == dropped + counts[row] * block + held[row] and blank[row] <= counts[row], "tokens")
        first, last = min(core.sinks, tokens), core.sinks + counts[row] * block + len(late[row])
        ascending = all(a < b for a, b in pairwise((first - 1, *late[row], last)))
        read.require(not late[row] or (ascending and core.sinks + len(late[row]) <= held[row]), "late sinks")
    record = Record.of(scheme.key, scheme.value, block, keys.shape[3], values.shape[3], keys.dtype, values.dtype)
    pool = read.pool(record, keys.shape[1])
    table = read.table(len(counts), counts, pool, state["ordered"] is True)
    store = BlockStore.of(record, pool, table, counts, blank)
    core.restore(rows, keys, values, held, late, store, dropped)


class _Reader:
    """Takes the tensors of one layer, and refuses what kernels could not do with."""

    def __init__(self, name: str, tensor: Callable[[str], torch.Tensor], device: torch.device) -> None:
        self.name, self.tensor, self.device = name, tensor, device

    def require(self, true: bool, what: str) -> None:
        if not true:
            raise Damaged(f"the file contradicts itself: the {what} of layer {self.name}")

    def param(self, name: str) -> torch.Tensor:
        x = self.tensor(f"{self.name}.{name}")
        self.require(x.dtype is torch.float32, name)
        return x.to(self.device, copy=True)

    def exact(self, name: str) -> torch.Tensor:
        x = self.tensor(f"{self.name}.{name}")
        self.require(x.ndim == 4 and x.dtype.is_floating_point, name)
        return x.to(self.device)

    def pool(self, record: Record, heads: int) -> torch.Tensor:
        pool = self.tensor(f"{self.name}.pool")
        self.require(pool.ndim == 3 and pool.dtype is torch.uint8, "pool")
        self.require(pool.shape[1:] == (heads, record.nbytes), "pool")
        for slots in (record.keys, record.values):
            at = {slot.part.name: slot for slot in slots}
            if "outlier_index" in at:
                index = _part(pool, at["outlier_index"]).int() & 0xFFFF
                elements = record.tokens * at["codes"].part.shape[-1]
                self.require(not index.numel() or int(index.max()) < elements, "outliers")
        return pool.to(self.device)

    def table(self, rows: int, counts: list[int], pool: torch.Tensor, ordered: bool) -> torch.Tensor:
        longest, blocks = max(counts, default=0), pool.shape[0]
        if ordered:
            self.require(blocks == rows * longest and min(counts, default=0) == longest, "table")
            return torch.arange(blocks, device=self.device).reshape(longest, rows).t()
        table = self.tensor(f"{self.name}.table")
        self.require(table.shape == (rows, longest) and not table.dtype.is_floating_point, "table")
        self.require(not table.numel() or 0 <= int(table.min()) <= int(table.max()) < blocks, "table")
        return table.to(self.device, torch.int64)


def _part(pool: torch.Tensor, slot: Slot) -> torch.Tensor:
    return pool[..., slot.offset : slot.offset + slot.part.nbytes].view(torch.int16)


def _numbers(values: Any) -> list[int]:
    """Whole numbers from 0 on."""
    if not isinstance(values, list) or not all(type(x) is int and x >= 0 for x in values):
        raise Damaged(f"the file contradicts itself: {str(values)[:60]} are no counts")
    return values
