"""Good calls of the native module itself, for tests that change one thing."""

from __future__ import annotations

from typing import Any

import torch

from kernel_calls import _native


def good_side() -> dict[str, Any]:
    """A side of int4 per token with one group, for blocks of 32 tokens and 64 channels."""
    return {
        "bits": 4, "levels": 0, "per": 0, "type": 0, "channels": 64, "length": 64, "groups": 1, "zero": True,
        "fixed": False, "outliers": 0, "table": [], "codes": 0, "scale": 1024, "zeros": 1088,
        "outlier_index": -1, "outlier_value": -1,
    }  # fmt: skip


RECORD_BYTES = 2 * 1152
EXACT = {"bits": 0, "levels": 3, "per": 3, "type": 1, "length": 0, "groups": 0, "zero": False, "codes": 0}
TABLE = {"levels": 1, "table": [float(i) for i in range(16)]}
FIXED = {"per": 1, "fixed": True, "length": 32, "groups": 1}


def arguments(**changes: Any) -> dict[str, Any]:
    """A good call of the module, two rows with two KV heads each, with ``changes``."""
    good: dict[str, Any] = {
        "layout": layout(),
        "isa": 0,
        "threads": 1,
        "output": torch.zeros(2, 6, 3, 64),
        "query": torch.zeros(2, 6, 3, 64),
        "keys": torch.zeros(2, 2, 24, 64),
        "values": torch.zeros(2, 2, 24, 64),
        "exact_counts": (24, 24),
        "pool": torch.zeros(4, 2, RECORD_BYTES, dtype=torch.uint8),
        "table": torch.tensor([[0, 1], [2, 3]]),
        "counts": (2, 2),
        "sinks": 4,
        "dropped": 0,
        "transforms": {},
        "offset": 0,
        "first_query_column": 85,
        "window": None,
        "scaling": 0.125,
        "softcap": None,
    }
    return {**good, **changes}


def unaligned(x: torch.Tensor) -> torch.Tensor:
    """A tensor like ``x`` one byte off."""
    memory = torch.zeros(x.nbytes + 1, dtype=torch.uint8)
    # torch refuses such views; numpy does not.
    return torch.from_numpy(memory.numpy()[1:].view(x.numpy().dtype)).view(x.shape)


def roped(**changes: Any) -> dict[str, Any]:
    """Rotary angles of two blocks of 32 tokens, 32 pairs of channels, as the transforms of a call."""
    good = {"steps": steps(32, 32), "base_cos": BASE, "base_sin": BASE, "unroped": True}
    return {"transforms": {**good, **changes}}


def steps(tokens: int, pairs: int) -> Any:
    return _native.Steps(torch.zeros(tokens, pairs), torch.zeros(tokens, pairs), False)


def layout(**changes: Any) -> Any:
    return _native.Layout(32, RECORD_BYTES, {**good_side(), **changes}, good_side())


BASE, MASK = torch.zeros(1, 2, 32), torch.zeros(2, 1, 3, 88)
