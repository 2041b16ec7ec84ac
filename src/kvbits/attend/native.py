"""The native kernel: attention of any number of query tokens straight from packed blocks, in C++ on the CPU.

This file says which calls it takes and hands their tensors over as they lie; ``native/`` holds the arithmetic. Packed
codes meet the query in integer dot products with 16-bit factors and float32 sums per block (see docs/kernels.md).
"""

from __future__ import annotations

import functools
import warnings
from typing import TYPE_CHECKING, Any

import torch

from kvbits.codecs import Codec
from kvbits.library import DTYPES, LEVELS, PER, library
from kvbits.numerics import groups
from kvbits.store import Slot
from kvbits.types import Params

if TYPE_CHECKING:  # a view decodes itself with this kernel
    from kvbits.attend.call import Call
    from kvbits.attend.view import KVView

QUERIES_AT_ONCE = 256
"""Query tokens that meet the history together: memory beside the cache does not grow with a longer chunk."""

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def why_not(call: Call) -> list[str]:
    """Reasons against this kernel."""
    module, _, reason = library()
    if module is None:
        return [reason]
    reasons = why_not_view(call.view)
    if call.query.dtype not in _FLOATS:
        reasons.append(f"{call.query.dtype} is computed in full only by the reference")
    if call.view.key_transform.rotation is not None and call.view.key_transform.rope is not None:
        reasons.append("keys are rotated and stored before the rotary embedding")
    return reasons


def why_not_view(view: KVView) -> list[str]:
    """Reasons against reading this view natively."""
    module, _, reason = library()
    if module is None:
        return [reason]
    device = view.keys.device.type
    if device != "cpu":
        return [f"tensors are on {device}"]
    reasons, types = [], (view.keys.dtype, view.values.dtype)
    if types[0] not in _FLOATS or types[1] not in _FLOATS:
        reasons.append(f"{types[0]} keys and {types[1]} values")
    for channels in (view.keys.shape[3], view.values.shape[3]):
        if channels % 8 or not 0 < channels <= 512:
            reasons.append(f"head_dim {channels} is not a multiple of 8 up to 512")
    if view.blocks.record.tokens > 4096:
        reasons.append(f"blocks of {view.blocks.record.tokens} tokens are longer than 4096")
    return reasons


def run(call: Call) -> torch.Tensor:
    """``[B, Hq, q, Dv]`` in the query's dtype. See :class:`kvbits.attend.Call`."""
    view, query = call.view, call.query
    batch, heads, queries, _ = query.shape
    out = query.new_empty(batch, queries, heads, view.values.shape[3]).transpose(1, 2)  # as the model wants it next
    for first in range(0, queries, QUERIES_AT_ONCE):
        last = min(queries, first + QUERIES_AT_ONCE)
        mask = None if call.mask is None else call.mask[:, :, first:last]
        _attend(call, query[:, :, first:last], out[:, :, first:last], mask, view.rows.columns - queries + first)
    return out


def _attend(call: Call, query: torch.Tensor, out: torch.Tensor, mask: torch.Tensor | None, column: int) -> None:
    """Attention of the query tokens from ``column`` on, into ``out``."""
    module, isa, _ = library()
    assert module is not None
    view = call.view
    blocks, record = view.blocks, view.blocks.record
    layout, statics = _layout(view)
    if query.stride(3) != 1:
        query = query.contiguous()
    if mask is not None and (mask.stride(3) != 1 or mask.dtype == torch.float64):
        mask = mask.to(
            torch.promote_types(mask.dtype, torch.float32) if mask.dtype != torch.bool else None
        ).contiguous()
    packed_query, transforms = _transforms(view, query)
    first_token = view.sinks + view.dropped
    plain = call.window is None and view.rows.valid is None and view.offset == 0
    table = blocks.table
    module.attend(
        layout, isa, torch.get_num_threads(), out, query, packed_query, blocks.pool, table, blocks.counts, first_token,
        view.keys, view.values, view.held, view.sinks, view.dropped, statics, transforms, mask, view.rows.column_of,
        view.offset, column, call.window or 0,
        plain and first_token + blocks.longest * record.tokens <= column + 1, plain and column == view.rows.columns - 1,
        call.scaling, call.softcap or 0.0, None if call.sink_logits is None else call.sink_logits.float().contiguous(),
    )  # fmt: skip


def _layout(view: KVView) -> tuple[Any, tuple[torch.Tensor | None, ...]]:
    """What the module knows of the layer's blocks, and its static parameters; made once for a layer."""
    record, memo = view.blocks.record, view.blocks.record.memo
    held = memo.get("native")
    if held is not None and held[0] is view.key_params and held[1] is view.value_params:
        return held[2], held[3]
    module = library()[0]
    assert module is not None
    scheme = view.scheme
    layout = module.Layout(
        record.tokens,
        record.nbytes,
        side_of(scheme.key, record.keys, view.key_params, record.tokens),
        side_of(scheme.value, record.values, view.value_params, record.tokens),
    )
    statics = (*static_of(scheme.key, view.key_params), *static_of(scheme.value, view.value_params))
    memo["native"] = (view.key_params, view.value_params, layout, statics)
    return layout, statics


def side_of(codec: Codec, slots: tuple[Slot, ...], params: Params, tokens: int) -> dict[str, Any]:
    """Keys or values of a block, in the words of ``native/format.hpp``."""
    form = codec.format
    at = {slot.part.name: slot for slot in slots}
    channels = at["codes"].part.shape[-1]
    fixed = form.per == "layer" or (form.per == "channel" and form.group == 0)
    length = tokens if fixed else form.group
    if form.per == "token":
        length = groups.group_length(channels, form.group) if form.group else channels
    across = channels if form.per == "token" else tokens
    table = codec.table(params)
    return {
        "bits": form.bits,
        "levels": LEVELS.index(form.levels),
        "per": PER.index(form.per),
        "type": DTYPES.index(at["codes"].part.dtype) if form.levels == "exact" else 0,
        "channels": channels,
        "length": length,
        "groups": -(-across // length) if length else 0,
        "zero": form.zero,
        "fixed": fixed,
        "outliers": form.outliers,
        "table": [] if table is None else table.tolist(),
        "codes": at["codes"].offset,
        "scale": at["scale"].offset if "scale" in at else -1,
        "zeros": at["zero"].offset if "zero" in at else -1,
        "outlier_index": at["outlier_index"].offset if "outlier_index" in at else -1,
        "outlier_value": at["outlier_value"].offset if "outlier_value" in at else -1,
    }


def static_of(codec: Codec, params: Params) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Scale and zero that hold for the whole layer, float32: ``[1]`` per layer, ``[H, D]`` per channel."""
    if codec.format.per == "layer":
        return params["scale"].float().reshape(1), None
    if codec.format.per == "channel" and codec.format.group == 0:
        zero = params["zero"].float().contiguous() if codec.format.zero else None
        return params["scale"].float().contiguous(), zero
    return None, None


def _transforms(view: KVView, query: torch.Tensor) -> tuple[torch.Tensor | None, tuple[Any, ...] | None]:
    """The query as packed keys need it, and the rest of what was done to packed keys and values."""
    key, value = view.key_transform, view.value_transform
    if key is value:  # neither has any
        return None, None
    rotated = None if key.rotation is None else query.float() @ key.rotation
    cos, sin = (None, None) if key.rope is None else (key.rope.cos, key.rope.sin)
    interleaved = key.rope is not None and key.rope.interleaved
    return rotated, (key.mean, value.mean, value.rotation, cos, sin, interleaved)


def decode(view: KVView) -> tuple[torch.Tensor, torch.Tensor]:
    """All packed tokens of every row, decoded in the types of the exact tokens: ``[B, H, N * block, D]`` each.

    Without the transforms; beyond a row's own count the content is some other block's. Bit for bit what the codecs
    decode, rounded once.
    """
    module, isa, _ = library()
    assert module is not None
    layout, statics = _layout(view)
    blocks = view.blocks
    sides = []
    for value_side, like in enumerate((view.keys, view.values)):
        tokens = blocks.longest * blocks.record.tokens
        out = like.new_empty(*like.shape[:2], tokens, like.shape[3])
        parameters = statics[2 * value_side : 2 * value_side + 2]
        module.decode(
            layout, bool(value_side), isa, torch.get_num_threads(), out, blocks.pool, blocks.table, 0, *parameters
        )
        sides.append(out)
    return sides[0], sides[1]


@functools.cache
def warn_if_missing() -> None:
    """Say once why a cache on a CPU will be slow, where the module was not built."""
    module, _, reason = library()
    if module is None:
        warnings.warn(
            f"kvbits' native kernel does not run here ({reason}): decoding uses the reference kernel, which is several "
            "times as slow; install a C++ compiler (GCC 12 or Clang 14 and later) and reinstall kvbits",
            RuntimeWarning,
            stacklevel=3,
        )
