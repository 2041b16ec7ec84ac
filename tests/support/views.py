"""Views, calls and masks of packed layers, and plain attention over them decoded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kvbits.attend import Call, KVView
from kvbits.attend.dense import dense
from kvbits.layer.cache import LayerCache
from kvbits.schemes.scheme import Scheme
from kvbits.store.rows import Rows
from kvbits.types import Params

SMALL = "residual=20,sinks=4,block=32"


@dataclass(frozen=True)
class Shape:
    """Heads and channels of one layer."""

    heads: int
    groups: int
    key_channels: int
    value_channels: int

    def __str__(self) -> str:
        return f"H{self.heads}x{self.groups}-D{self.key_channels}-{self.value_channels}"


PLAIN = Shape(2, 3, 20, 12)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def view_of(
    shape: Shape,
    counts: tuple[int, ...],
    scheme: str = f"kivi4,{SMALL}",
    batch: int = 2,
    dtype: torch.dtype = torch.float32,
    text: torch.Tensor | None = None,
    window: int | None = None,
) -> KVView:
    """What attention sees in the last of several calls with ``counts`` new columns each."""
    parsed, rows, view, first = Scheme.parse(scheme), Rows(), None, 0
    cache = LayerCache(parsed, window=window, calibrated=calibrated(parsed, shape))
    for seed, count in enumerate(counts):
        rows = rows.extend(batch, count, None if text is None else text[:, first : first + count])
        keys = random(batch, shape.heads, count, shape.key_channels, seed=2 * seed, dtype=dtype)
        values = random(batch, shape.heads, count, shape.value_channels, seed=2 * seed + 1, dtype=dtype)
        view, first = cache.append(keys, values, rows), first + count
    assert view is not None
    return view


def calibrated(scheme: Scheme, shape: Shape) -> tuple[Params, Params]:
    """What calibration teaches those codecs that need it."""
    sides = ((scheme.key, shape.key_channels, 50), (scheme.value, shape.value_channels, 51))
    keys, values = (
        codec.fit(random(1, shape.heads, 256, channels, seed=seed)) if codec.needs_calibration else {}
        for codec, channels, seed in sides
    )
    return keys, values


def query_for(view: KVView, shape: Shape, count: int) -> torch.Tensor:
    batch = view.keys.shape[0]
    return random(batch, shape.heads * shape.groups, count, shape.key_channels, seed=99, dtype=view.keys.dtype)


def unrounded(view: KVView) -> tuple[torch.Tensor, torch.Tensor]:
    """All columns in float64, decoded values not rounded to the cache's type on the way."""
    wide = torch.promote_types(view.keys.dtype, torch.float32)
    keys, values = dense(dataclasses.replace(view, keys=view.keys.to(wide), values=view.values.to(wide)))
    return keys.double(), values.double()


def visible(call: Call) -> torch.Tensor:
    """Which columns each query may see, bool ``[B or 1, 1, q, columns]``, apart from ``call.mask``."""
    view, queries = call.view, call.query.shape[2]
    column = torch.arange(view.offset, view.rows.columns)
    query = torch.arange(view.rows.columns - queries, view.rows.columns)[:, None]
    seen = torch.ones(queries, len(column), dtype=torch.bool)
    if call.mask is None:
        seen = seen & (column <= query)
    if call.window is not None:
        seen = seen & (column > query - call.window)
    if view.rows.valid is None:
        return seen[None, None]
    return seen[None, None] & view.rows.valid[:, None, None, view.offset :]


def plain_attention(call: Call, dtype: torch.dtype, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Attention by its formula, with all scores at once and every key repeated: ``[B, Hq, q, Dv]``."""
    groups = call.query.shape[1] // keys.shape[1]
    keys, values = (x.to(dtype).repeat_interleave(groups, dim=1) for x in (keys, values))
    scores = call.query.to(dtype) @ keys.transpose(-1, -2) * call.scaling
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if call.mask is not None and call.mask.dtype != torch.bool:
        scores = scores + call.mask.to(dtype)
    seen = visible(call)
    if call.mask is not None and call.mask.dtype == torch.bool:
        seen = seen & call.mask
    scores = scores.masked_fill(~seen, -torch.inf)
    if call.sink_logits is not None:
        sinks = call.sink_logits.to(dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        return (torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]).nan_to_num(0.0) @ values
    return scores.softmax(-1).nan_to_num(0.0) @ values


NATIVE_ERROR = 1e-3
"""Of the native kernel, relative in the maximum norm; less where torch's own error in bfloat16 is below half of it."""


def causal(view: KVView, queries: int) -> torch.Tensor:
    columns = view.rows.columns
    return torch.arange(view.offset, columns) <= torch.arange(columns - queries, columns)[:, None]


def boolean(view: KVView, heads: int, queries: int, batch: int) -> torch.Tensor:
    """A causal mask with holes, the same for no two rows, heads or queries; every query sees its own column."""
    holes = random(batch, heads, queries, view.kv_columns, seed=5) > -0.5
    own = torch.arange(view.kv_columns) == torch.arange(view.kv_columns - queries, view.kv_columns)[:, None]
    return (holes | own) & causal(view, queries)


def additive(view: KVView, heads: int, queries: int, batch: int, hidden: float = -torch.inf) -> torch.Tensor:
    """A bias, and ``hidden`` for what a boolean mask would hide."""
    bias = random(batch, heads, queries, view.kv_columns, seed=6).to(view.keys.dtype) / 3
    return bias.masked_fill(~boolean(view, heads, queries, batch), hidden)


FEATURES: dict[str, Callable[[KVView, int, int], dict[str, Any]]] = {
    "softcap": lambda view, heads, queries: {"softcap": 1.5},
    "window of 40": lambda view, heads, queries: {"window": 40},
    "window of 1": lambda view, heads, queries: {"window": 1},
    "bool mask": lambda view, heads, queries: {"mask": boolean(view, 1, queries, 2)},
    "bool mask for all rows": lambda view, heads, queries: {"mask": boolean(view, 1, queries, 1)},
    "bool mask per head": lambda view, heads, queries: {"mask": boolean(view, heads, queries, 2)},
    "additive mask": lambda view, heads, queries: {"mask": additive(view, 1, queries, 2)},
    "additive mask per head": lambda view, heads, queries: {"mask": additive(view, heads, queries, 1)},
    "additive mask of finite lowest": lambda view, heads, queries: {
        "mask": additive(view, heads, queries, 2, torch.finfo(view.keys.dtype).min)
    },
    "sink logits": lambda view, heads, queries: {"sink_logits": random(heads, seed=7) * 3},
    "large sink logits": lambda view, heads, queries: {"sink_logits": random(heads, seed=7) + 80},
    "everything": lambda view, heads, queries: {
        "softcap": 2.0,
        "window": 50,
        "mask": additive(view, heads, queries, 2),
        "sink_logits": random(heads, seed=7),
    },
}


def padded_text(kind: str, columns: int) -> torch.Tensor:
    text = torch.ones(3, columns, dtype=torch.bool)
    if kind == "left":
        text[1, :40], text[2, :130] = False, False
    else:
        text[1, 3::5] = False
        text[2] = random(columns) > 0
        text[:, -1] = True
    return text
