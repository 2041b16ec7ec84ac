"""What a cache stores of one row, as tests look at it: the parts of its blocks, its exact tokens, and its text."""

from __future__ import annotations

import torch

from kvbits.layer.cache import LayerCache


def blocks_of(core: LayerCache, row: int) -> torch.Tensor:
    """The bytes of all parts of the row's packed blocks, ``[blocks, H, bytes]``, without the gaps between parts."""
    store = core.store
    assert store is not None
    held = store.pool[store.table[row, : store.counts[row]]]
    slots = store.record.keys + store.record.values
    return torch.cat([held[..., slot.offset : slot.offset + slot.part.nbytes] for slot in slots], dim=-1)


def exact_of(core: LayerCache, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The row's sinks and recent tokens, keys and values ``[H, tokens, D]``."""
    assert core.keys is not None and core.values is not None
    return core.keys[row, :, : core.held[row]], core.values[row, :, : core.held[row]]


def text_of(core: LayerCache, row: int) -> torch.Tensor:
    """Which of the columns are the row's own, bool ``[columns]``."""
    valid = core.rows.valid
    return torch.ones(core.columns, dtype=torch.bool) if valid is None else valid[row]


def row_of(core: LayerCache, row: int) -> tuple[torch.Tensor, ...]:
    """All of the above, copied: blocks, keys, values, text."""
    parts = (blocks_of(core, row), *exact_of(core, row), text_of(core, row))
    return tuple(part.clone() for part in parts)


def assert_same(got: tuple[torch.Tensor, ...], right: tuple[torch.Tensor, ...]) -> None:
    """Two results of :func:`row_of` are the same, bit for bit."""
    for a, b in zip(got, right, strict=True):
        assert torch.equal(a, b)
