"""The native kernel: attention of any number of query tokens straight from packed blocks, in C++ on the CPU.

This file says which calls it takes and hands their tensors over as they lie; ``native/`` holds the arithmetic. Packed
codes are multiplied with the query in integer dot products with 16-bit factors and float32 sums per block (see
docs/kernels.md).
"""

from __future__ import annotations

import functools
import warnings
from typing import Any, NamedTuple

import torch

from kvbits.attend.call import Call
from kvbits.attend.view import KVView
from kvbits.backends import DTYPES, LEVELS, PER, library
from kvbits.codecs import Codec
from kvbits.numerics import groups
from kvbits.store.derived import Kept
from kvbits.store.record import Slot
from kvbits.transform import Rope
from kvbits.types import Params

QUERIES_AT_ONCE = 256
"""Query tokens at a time: memory beside the cache does not grow with a longer chunk."""

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def why_not(call: Call) -> list[str]:
    """Reasons against this kernel."""
    module, _, reason = library()
    if module is None:
        return [reason]
    reasons = why_not_view(call.view)
    if call.query.dtype not in _FLOATS:
        reasons.append(f"{call.query.dtype} is computed in full only by the reference")
    key = call.view.key_transform
    if key.rope is not None and key.whole and key.rotation is not None:
        reasons.append("keys are rotated and stored before the rotary embedding")
    if call.view.value_transform.rope is not None:
        reasons.append("values have a rotary embedding")
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
    if not reasons and (refused := _layout(view).refused):
        reasons.append(f"{view.scheme.key} keys and {view.scheme.value} values: {refused}")
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


def partial(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sums of one piece of the context; see :data:`kvbits.attend.call.Partial`."""
    view, query = call.view, call.query
    batch, heads, queries, _ = query.shape
    out = query.new_empty(batch, heads, queries, view.values.shape[3], dtype=torch.float32)
    log_sums = query.new_empty(batch, heads, queries, dtype=torch.float32)
    for first in range(0, queries, QUERIES_AT_ONCE):
        last = min(queries, first + QUERIES_AT_ONCE)
        mask = None if call.mask is None else call.mask[:, :, first:last]
        column = view.rows.columns - queries + first
        sums = log_sums.new_empty(batch, heads, last - first)
        _attend(call, query[:, :, first:last], out[:, :, first:last], mask, column, sums)
        log_sums[:, :, first:last] = sums
    return out, log_sums


def _attend(
    call: Call,
    query: torch.Tensor,
    out: torch.Tensor,
    mask: torch.Tensor | None,
    column: int,
    log_sums: torch.Tensor | None = None,
) -> None:
    """Attention of the query tokens from ``column`` on, into ``out``, and where asked for its log-sums."""
    module, isa, _ = library()
    assert module is not None
    view = call.view
    blocks = view.blocks
    layout = _layout(view)
    query, keys, values = _lines(query), _lines(view.keys), _lines(view.values)
    if mask is not None:
        mask = _lines(mask.float() if mask.dtype == torch.float64 else mask)
    plain = mask is None and call.window is None and view.rows.valid is None and view.offset == 0
    module.attend(
        layout=layout.blocks,
        isa=isa,
        threads=torch.get_num_threads(),
        output=out,
        query=query,
        keys=keys,
        values=values,
        exact_counts=view.held,
        pool=blocks.pool if blocks.longest else blocks.pool[:0],
        table=blocks.table,
        counts=blocks.counts,
        sinks=view.sinks,
        dropped=view.dropped,
        key_scale=layout.key_scale,
        key_zero=layout.key_zero,
        value_scale=layout.value_scale,
        value_zero=layout.value_zero,
        transforms=_transforms(view),
        mask=mask,
        column_of=None if plain else view.column_of,
        offset=view.offset,
        first_query_column=column,
        window=call.window,
        scaling=call.scaling,
        softcap=call.softcap,
        sink_logits=None if call.sink_logits is None else call.sink_logits.float().contiguous(),
        log_sums=log_sums,
    )


def _lines(x: torch.Tensor) -> torch.Tensor:
    """``x`` with the elements of its last dimension side by side; any other stride the module takes as it is."""
    return x if x.stride(-1) == 1 else x.contiguous()


class _Layout(NamedTuple):
    """What the module knows of a layer's blocks, and the layer's static parameters.

    Attributes:
        key_params, value_params: what it was made from; a layer gets others when it is fitted again.
        blocks: the module's own, or None.
        refused: why there is none.
        key_scale, key_zero, value_scale, value_zero: static ones.
    """

    key_params: Params
    value_params: Params
    blocks: Any
    refused: str = ""
    key_scale: torch.Tensor | None = None
    key_zero: torch.Tensor | None = None
    value_scale: torch.Tensor | None = None
    value_zero: torch.Tensor | None = None


def _layout(view: KVView) -> _Layout:
    """Made once for a layer. Where nothing is packed, codecs may have nothing to say yet, and are not asked."""
    derived, packed = view.blocks.derived, view.blocks.longest
    held: _Layout | None = derived.layout if packed else derived.empty_layout
    if held is None or held.key_params is not view.key_params or held.value_params is not view.value_params:
        if packed:
            derived.layout = held = _make_layout(view)
        else:
            derived.empty_layout = held = _empty_layout(view)
    return held


def _make_layout(view: KVView) -> _Layout:
    module = library()[0]
    assert module is not None
    record, key, value = view.blocks.record, view.scheme.key, view.scheme.value
    try:
        blocks = module.Layout(
            tokens=record.tokens,
            bytes=record.nbytes,
            key=side_of(key, record.keys, view.key_params, record.tokens),
            value=side_of(value, record.values, view.value_params, record.tokens),
        )
    except ValueError as error:
        return _Layout(view.key_params, view.value_params, None, str(error))
    statics = *static_of(key, view.key_params), *static_of(value, view.value_params)
    return _Layout(view.key_params, view.value_params, blocks, "", *statics)


def _empty_layout(view: KVView) -> _Layout:
    module = library()[0]
    assert module is not None
    side = {
        "bits": 0, "levels": LEVELS.index("exact"), "per": PER.index("element"), "type": DTYPES.index(torch.float32),
        "length": 0, "groups": 0, "zero": False, "fixed": False, "outliers": 0, "codes": 0,
    }  # fmt: skip
    channels = view.keys.shape[3], view.values.shape[3]
    blocks = module.Layout(8, 8 * 4 * max(channels), *({**side, "channels": count} for count in channels))
    return _Layout(view.key_params, view.value_params, blocks)


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
        "outliers": at["outlier_index"].part.shape[0] if form.outliers else 0,
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


def _transforms(view: KVView) -> dict[str, Any]:
    """What was done to packed keys and values, as the module takes it; empty for nothing."""
    key, value = view.key_transform, view.value_transform
    parts = {
        "key_mean": key.mean,
        "key_balance": key.balance,
        "key_rotation": key.rotation,
        "value_mean": value.mean,
        "value_unrotation": _unrotation(view, value.rotation),
    }
    transforms: dict[str, Any] = {name: x.float().contiguous() for name, x in parts.items() if x is not None}
    if key.rope is not None:
        transforms["steps"] = _steps(view, key.rope)
        transforms["base_cos"] = _lines(key.rope.base_cos.float())
        transforms["base_sin"] = _lines(key.rope.base_sin.float())
        transforms["unroped"] = key.whole
    return transforms


def _unrotation(view: KVView, rotation: torch.Tensor | None) -> torch.Tensor | None:
    """The inverse of a rotation, its rows side by side: made once for a layer."""
    if rotation is None:
        return None
    derived = view.blocks.derived
    kept = derived.value_unrotation
    if kept is None or kept.source is not rotation:
        derived.value_unrotation = kept = Kept(rotation, rotation.float().t().contiguous())
    made: torch.Tensor = kept.made
    return made


def _steps(view: KVView, rope: Rope) -> Any:
    """The angles within a block, as the module lays them out: made once for a layer, like its layout."""
    derived = view.blocks.derived
    kept = derived.steps
    if kept is None or not rope.has(kept.source):
        module = library()[0]
        assert module is not None
        steps = module.Steps(rope.step_cos.float().contiguous(), rope.step_sin.float().contiguous(), rope.interleaved)
        derived.steps = kept = Kept(rope.steps, steps)
    return kept.made


def decode(view: KVView) -> tuple[torch.Tensor, torch.Tensor]:
    """All packed tokens of every row, decoded in the types of the exact tokens: ``[B, H, N * block, D]`` each.

    Without the transforms; beyond a row's own count the content is some other block's. Bit for bit what the codecs
    decode, rounded once.
    """
    module, isa, _ = library()
    assert module is not None
    layout, blocks = _layout(view), view.blocks
    tokens = blocks.longest * blocks.record.tokens
    keys, values = (like.new_empty(*like.shape[:2], tokens, like.shape[3]) for like in (view.keys, view.values))
    for output, scale, zero in (
        (keys, layout.key_scale, layout.key_zero),
        (values, layout.value_scale, layout.value_zero),
    ):
        module.decode(
            layout=layout.blocks,
            value_side=output is values,
            isa=isa,
            threads=torch.get_num_threads(),
            output=output,
            pool=blocks.pool,
            table=blocks.table,
            scale=scale,
            zero=zero,
        )
    return keys, values


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
