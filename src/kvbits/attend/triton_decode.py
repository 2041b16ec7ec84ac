"""The Triton kernel: attention over packed blocks on CUDA and ROCm GPUs, for decode steps and chunks of a prompt.

This file decides whether it fits (:func:`why_not`) and cuts the work; :mod:`kvbits.attend.triton_kernel` does it.
Triton is imported when a call runs, not before: without it ``explain`` says so and another kernel runs. With
``TRITON_INTERPRET=1`` it runs on a CPU, for tests.

A step makes no device synchronisation and, at equal lengths of all rows, copies nothing to the device, so it can be
captured in a CUDA graph. Batches whose rows hold different numbers of blocks copy two short lists.
"""

from __future__ import annotations

import functools
import math
import os
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

import torch
from torch.nn.functional import pad

from kvbits.attend.call import Call
from kvbits.attend.transform import Transform
from kvbits.attend.triton_tuning import Tuning, tuning_for
from kvbits.codecs import Codec
from kvbits.library import interpreted, why_no_triton
from kvbits.numerics import groups
from kvbits.store import Record, Slot
from kvbits.types import Format, Params

OPT_IN = "KVBITS_TRITON"
"""Environment variable that lets the kernel run on a device, while only the interpreter has shown that it is right."""

MOST_CHANNELS = 512
MOST_COLUMNS = 128
"""Columns of a product: query rows times groups. More would not fit in registers."""

_USUAL_SUMS = 4096
"""Columns times channels up to which the tunings of the table were made."""

MOST_OUTLIERS = 512

MOST_ROWS = 64
"""Query rows that one program takes."""

PARTS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}
"""Bfloat16 parts that queries and weights are split into, so that their own precision is kept."""

_LEVELS = {"uniform": 0, "table": 1, "e4m3": 2}
_TOKEN, _CHANNEL, _LAYER, _STATIC = range(4)


def why_not(call: Call) -> list[str]:
    """Reasons against: no Triton, no GPU, or what the kernel does not do."""
    view, query = call.view, call.query
    if reasons := why_no_triton(query.device):
        return reasons
    if not interpreted() and os.environ.get(OPT_IN) != "1":
        reasons.append(f"it has not been verified on a GPU yet ({OPT_IN}=1 tries it)")
    if query.dtype not in PARTS:
        reasons.append(f"{query.dtype} queries (bfloat16, float16 or float32 run)")
    elif view.keys.dtype != query.dtype or view.values.dtype != query.dtype:
        reasons.append(f"{query.dtype} queries over {view.keys.dtype} keys and {view.values.dtype} values")
    if torch.is_grad_enabled() and query.requires_grad:
        reasons.append("gradients of the query")
    if view.late:
        reasons.append("late sinks")
    record = view.blocks.record
    for side, codec, x, slots, transform in (
        ("keys", view.scheme.key, view.keys, record.keys, view.key_transform),
        ("values", view.scheme.value, view.values, record.values, view.value_transform),
    ):
        reasons += [f"{side}: {reason}" for reason in why_not_format(codec.format, x.shape[3], outliers_in(slots))]
        if transform.rope is not None and not transform.whole:
            reasons.append(f"{side}: the rotary embedding was taken off their mean alone")
        elif transform.rope is not None and transform.rotation is not None:
            reasons.append(f"{side}: rotated before the rotary embedding")
    return reasons


def outliers_in(slots: tuple[Slot, ...]) -> int:
    """Entries of the sparse part of a block."""
    return next((slot.part.shape[0] for slot in slots if slot.part.name == "outlier_index"), 0)


def why_not_format(form: Format, channels: int, outliers: int) -> list[str]:
    """Reasons against keys or values of one format and head_dim, with so many outliers in a block."""
    reasons = []
    if form.levels not in _LEVELS:
        reasons.append("packed blocks of exact elements")
    if outliers > MOST_OUTLIERS:
        reasons.append(f"{outliers} outliers in a block (up to {MOST_OUTLIERS} run)")
    if form.per == "layer" and form.zero:
        reasons.append("one zero per layer")
    if channels % 2 or channels > MOST_CHANNELS:
        reasons.append(f"head_dim {channels} (even ones up to {MOST_CHANNELS} run)")
    elif form.per == "token" and 8 * _power_of_two(-(-channels // _group_length(form, channels))) > MOST_COLUMNS:
        reasons.append(f"{-(-channels // _group_length(form, channels))} groups in a token")
    return reasons


def _group_length(form: Format, channels: int) -> int:
    return groups.group_length(channels, form.group) if form.group else channels


@dataclass(frozen=True)
class Side:
    """Keys or values as the kernel's compile-time constants; see ``attend_split`` there."""

    bits: int
    levels: int
    per: int
    group: int
    count: int
    columns: int
    zero: bool
    codes_at: int
    scale_at: int
    zero_at: int
    outliers: int
    entries: int
    index_at: int
    value_at: int

    def constants(self, prefix: str) -> dict[str, Any]:
        """Keyword arguments of the kernel."""
        return {f"{prefix}_{name.upper()}": value for name, value in asdict(self).items()}

    @staticmethod
    def of(form: Format, slots: tuple[Slot, ...], channels: int, rows: int, blocks: int) -> Side:
        """Read a format and where its parts lie, for tiles of ``rows`` tokens of each of ``blocks`` blocks."""
        at = {slot.part.name: slot.offset // 2 for slot in slots}
        group, count, columns = 1, 1, 1
        if form.per == "token":
            per, group = _TOKEN, _group_length(form, channels)
            count = -(-channels // group)
            columns = _power_of_two(count)
        elif form.per == "channel" and form.group:
            per, group = _CHANNEL, form.group
            columns = blocks * max(1, rows // group)
        else:
            per = _LAYER if form.per == "layer" else _STATIC
        outliers = outliers_in(slots)
        return Side(
            form.bits, _LEVELS[form.levels], per, group, count, columns, form.zero,
            at["codes"], at.get("scale", 0), at.get("zero", 0),
            outliers, max(16, _power_of_two(outliers)) if outliers else 0,
            at.get("outlier_index", 0), at.get("outlier_value", 0),
        )  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """What stays the same from step to step in one layer: most of the kernel's compile-time constants."""

    key: Side
    value: Side
    query_rows: int
    slices: int
    blocks: int
    tuning: Tuning


@functools.lru_cache(maxsize=256)
def _shape(
    record: Record,
    key: Format,
    value: Format,
    key_channels: int,
    value_channels: int,
    rows: int,
    tuning: Tuning,
    roped: bool = False,
) -> Shape:
    """Choose tiles for ``rows`` query rows of a KV head."""
    slices = max(_slots(key.bits), _slots(value.bits))
    length = record.tokens // slices
    blocks = max(1, tuning.rows // length)
    sides = (
        Side.of(key, record.keys, key_channels, length, blocks),
        Side.of(value, record.values, value_channels, length, blocks),
    )
    widest = max(side.columns for side in sides)
    query_rows = min(max(8, _power_of_two(rows)), MOST_ROWS)
    while query_rows > 8 and query_rows * widest > MOST_COLUMNS:
        query_rows //= 2
    if query_rows * widest * max(key_channels, value_channels) > _USUAL_SUMS:
        # Sums that fill the registers of twice the warps; without a second tile in shared memory, which is full too.
        tuning = replace(tuning, warps=2 * tuning.warps, registers=None, stages=1)
    elif roped or key.outliers or value.outliers:
        tuning = replace(tuning, registers=None, stages=1)  # what these read element by element has no tile
    return Shape(*sides, query_rows, slices, blocks, tuning)


def _slots(bits: int) -> int:
    """Slices that a block's codes lie in; 3 bits follow their plane of 2."""
    return 4 if bits == 3 else 8 // bits


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


@functools.cache
def _processor(device: torch.device) -> tuple[str, int]:
    """Architecture and number of multiprocessors."""
    if device.type != "cuda":
        return "interpreter", 1
    properties = torch.cuda.get_device_properties(device)
    architecture = getattr(properties, "gcnArchName", "") or f"sm_{properties.major}{properties.minor}"
    return architecture.split(":")[0], properties.multi_processor_count


Lengths: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Blocks and exact tokens of each row, int32 ``[B]`` on the device."""


def run(call: Call, lengths: Lengths | None = None) -> torch.Tensor:
    """``[B, Hq, q, Dv]`` in the query's dtype. See :class:`kvbits.attend.Call`.

    Args:
        call: what to compute.
        lengths: where they are known on the device alone, as in a captured graph. The counts of the view are then the
            most that there can be, and the work is cut for those.
    """
    view, query = call.view, call.query
    if query.shape[2] == 0 or query.shape[0] == 0:
        return query.new_zeros(*query.shape[:3], view.values.shape[3])
    turned, bias = _for_packed_keys(view.key_transform, query, view.keys.shape[1], call.scaling)
    partial, tops, weights, splits = _split(call, turned, bias, lengths)
    if view.value_transform.rotation is None and view.value_transform.mean is None:
        return _merge(call, partial, tops, weights, 0, partial.shape[0])[0]
    return _merge_transformed(call, partial, tops, weights, splits)[0].to(query.dtype)


def partial(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sums of one piece of the context; see :data:`kvbits.attend.call.Partial`."""
    view, query = call.view, call.query
    if not query.numel() or not view.blocks.longest + view.keys.shape[2]:
        out = query.new_zeros(*query.shape[:3], view.values.shape[3], dtype=torch.float32)
        return out, query.new_full(query.shape[:3], -torch.inf, dtype=torch.float32)
    turned, bias = _for_packed_keys(view.key_transform, query, view.keys.shape[1], call.scaling)
    splits, tops, weights, packed = _split(call, turned, bias, None)
    if view.value_transform.rotation is None and view.value_transform.mean is None:
        found = query.new_empty(*query.shape[:3], 1, dtype=torch.float32)
        out, _ = _merge(call, splits, tops, weights, 0, splits.shape[0], found)
    else:
        out, both = _merge_transformed(call, splits, tops, weights, packed)
        found = torch.logsumexp(both * math.log(2), -1, keepdim=True) / math.log(2)
    return out, found.squeeze(-1) * math.log(2)


def _for_packed_keys(
    transform: Transform, query: torch.Tensor, heads: int, scaling: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The queries that meet packed keys, and what the keys' mean adds to their scores, ``[B, Hq, q]``."""
    bias = None
    if transform.mean is not None and transform.rope is None:  # else it is added before the angles, in the kernel
        grouped = query.float().unflatten(1, (heads, -1))
        bias = (grouped * transform.mean[:, None, None]).sum(-1).flatten(1, 2).mul_(scaling)
    turned = transform.query(query)  # float32 stays: the kernel rounds it once
    return query if turned is None else turned, bias


def _split(
    call: Call, turned: torch.Tensor, bias: torch.Tensor | None, lengths: Lengths | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Run the splits: their outputs ``[S, B * H, rows, Dv]``, maxima, sums, and how many of them are packed ones."""
    from kvbits.attend.triton_kernel import attend_split

    view, query = call.view, call.query
    blocks, scheme = view.blocks, view.scheme
    batch, heads, slots, key_channels = view.keys.shape
    value_channels, queries = view.values.shape[3], query.shape[2]
    group_rows = query.shape[1] // heads
    rows = group_rows * queries
    architecture, processors = _processor(query.device)
    key, value = scheme.key.format, scheme.value.format
    tuning = tuning_for(architecture, max(key.bits, value.bits), "channel" in (key.per, value.per))
    shape = _shape(
        blocks.record, key, value, key_channels, value_channels, rows, tuning, view.key_transform.rope is not None
    )
    tuning = shape.tuning
    row_tiles = -(-rows // shape.query_rows)
    per_split, exact_per_split = _cut(
        blocks.longest, slots, batch * heads * row_tiles, processors * tuning.programs, shape
    )
    splits = -(-blocks.longest // per_split)
    total = splits + -(-slots // exact_per_split)
    partial = query.new_empty(total, batch * heads, rows, value_channels, dtype=torch.float32)
    tops, weights = (query.new_empty(total, batch * heads, rows, dtype=torch.float32) for _ in range(2))
    pool = blocks.pool
    ragged = lengths is not None or len(set(blocks.counts)) > 1 or len(set(view.held)) > 1
    counts = held = column_of = mask = None
    if lengths is not None:
        counts, held = lengths
    elif ragged:
        counts, held = torch.tensor([blocks.counts, view.held], dtype=torch.int32, device=query.device)
    if view.rows.column_of is not None:
        column_of = view.rows.column_of.to(query.device)
    if call.mask is not None:
        mask = call.mask.expand(batch, query.shape[1], -1, -1)
        mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    unused = tops
    rope, mean = view.key_transform.rope, view.key_transform.mean
    key_params, key_table = _params(scheme.key, view.key_params, query.device, PARTS[query.dtype], unused)
    value_params, value_table = _params(scheme.value, view.value_params, query.device, PARTS[query.dtype], unused)
    cos, sin = unused, unused
    if rope is not None:  # for every own token, as the kernel counts them
        cos, sin = (pad(x, (0, 0, view.sinks + view.dropped, 0)) for x in rope.angles(0, blocks.longest))
    plain = call.mask is None and call.window is None and column_of is None and view.offset == 0
    attend_split[(total, batch * heads, row_tiles)](
        turned, query, unused if bias is None else bias, view.keys, view.values, pool.view(torch.int16),
        pool.view(torch.int32), pool.view(torch.bfloat16), pool.view(torch.float16), blocks.table,
        unused if counts is None else counts,
        unused if held is None else held, unused if column_of is None else column_of,
        unused if mask is None else mask, *key_params, key_table, *value_params, value_table,
        cos, sin, unused if mean is None else mean,
        partial, tops, weights,
        blocks.counts[0], view.held[0], splits, per_split, exact_per_split, view.rows.columns - queries, view.offset,
        call.window or 0, view.sinks + view.dropped, queries,
        batch, heads, view.sinks, call.scaling, call.softcap or 1.0,
        *turned.stride()[:3], *query.stride()[:3], *view.keys.stride()[:3], *view.values.stride()[:3],
        blocks.table.stride(0), 0 if column_of is None else column_of.stride(0),
        0 if rope is None or cos.shape[0] == 1 else cos.stride(0),
        *((0, 0, 0, 0) if mask is None else mask.stride()),
        GROUP_ROWS=group_rows, SINGLE=queries == 1, NR=shape.query_rows,
        K_CHANNELS=key_channels, K_PADDED=max(32, _power_of_two(key_channels)),
        V_CHANNELS=value_channels, V_PADDED=max(32, _power_of_two(value_channels)),
        BLOCK=blocks.record.tokens, NS=shape.slices, BPI=shape.blocks, RECORD=blocks.record.nbytes // 2,
        **shape.key.constants("K"), **shape.value.constants("V"),
        PARTS=PARTS[query.dtype], IN_ORDER=blocks.in_order, RAGGED=ragged, PADDED=column_of is not None,
        MASK=0 if mask is None else 1 if mask.dtype == torch.uint8 else 2, WINDOW=call.window is not None, PLAIN=plain,
        SOFTCAP=call.softcap is not None, BIAS=bias is not None,
        ROPE=0 if rope is None else 2 if rope.interleaved else 1, HALF=0 if rope is None else cos.shape[-1],
        MEAN=rope is not None and mean is not None,
        EXACT_TILE=32,
        num_warps=tuning.warps, num_stages=tuning.stages,
        **({"maxnreg": tuning.registers} if tuning.registers and torch.version.cuda else {}),
    )  # fmt: skip
    return partial, tops, weights, splits


def _cut(blocks: int, exact: int, tiles: int, wanted: int, shape: Shape) -> tuple[int, int]:
    """Blocks and exact tokens of one split, so that about ``wanted`` programs run."""
    splits = max(1, wanted // tiles)
    per_split = -(-max(1, blocks) // splits)
    per_split = -(-per_split // shape.blocks) * shape.blocks
    # Exact tokens are many times a block's bytes each: several programs share them where few run anyway.
    exact_per_split = shape.tuning.exact_tokens if splits > 1 else max(1, exact)
    return per_split, exact_per_split


@functools.lru_cache(maxsize=64)
def _constant_table(codec: Codec, device: torch.device, parts: int) -> torch.Tensor:
    """The table of a codec that learns none."""
    table = codec.table({})
    assert table is not None
    return _table_parts(table.to(device), parts)


def _table_parts(table: torch.Tensor, parts: int) -> torch.Tensor:
    """Bfloat16 parts of a table, ``[parts * 16]``, part by part."""
    found = torch.zeros(parts, 16, dtype=torch.bfloat16, device=table.device)
    rest = table.float()
    for part in range(parts):
        found[part, : len(table)] = rest.to(torch.bfloat16)
        rest = rest - found[part, : len(table)].float()
    return found.flatten()


def _params(
    codec: Codec, params: Params, device: torch.device, parts: int, unused: torch.Tensor
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Static scale and zero, and the table, of one side."""
    scale, zero = params.get("scale", unused), params.get("zero", unused)
    if codec.format.levels != "table":
        return (scale, zero), unused
    if not params:
        return (scale, zero), _constant_table(codec, device, parts)
    table = codec.table(params)
    assert table is not None
    return (scale, zero), _table_parts(table, parts)


def _merge(
    call: Call,
    partial: torch.Tensor,
    tops: torch.Tensor,
    weights: torch.Tensor,
    first: int,
    last: int,
    log_sums: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weighted mean over splits ``first .. last - 1``: ``[B, Hq, q, Dv]``."""
    from kvbits.attend.triton_kernel import merge_splits

    query = call.query
    _, pairs, rows, channels = partial.shape
    heads = call.view.keys.shape[1]
    dtype = query.dtype if log_sums is None else torch.float32
    out = query.new_empty(*query.shape[:3], channels, dtype=dtype)
    sinks = call.sink_logits if log_sums is None else None
    merge_splits[(pairs, rows)](
        partial, tops, weights, tops if sinks is None else sinks, out, tops if log_sums is None else log_sums,
        first, last, query.shape[2], pairs, heads, *out.stride()[:3],
        GROUP_ROWS=query.shape[1] // heads, CHANNELS=channels, PADDED=_power_of_two(channels),
        SINKS=sinks is not None, LOG_SUMS=log_sums is not None, SPLITS=16, num_warps=4,
    )  # fmt: skip
    return out, log_sums


def _merge_transformed(
    call: Call, partial: torch.Tensor, tops: torch.Tensor, weights: torch.Tensor, splits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed and exact splits apart, so that the packed values' rotation and mean are undone once, on the output.

    Returns:
        Float32 ``[B, Hq, q, Dv]``, and the log-sums (base 2) of either and of sinks, if any: ``[B, Hq, q, 2 or 3]``.
    """
    transform, heads = call.view.value_transform, call.view.keys.shape[1]
    shape = (*call.query.shape[:3], 1)
    sides = []
    for first, last in ((0, splits), (splits, partial.shape[0])):
        log_sums = call.query.new_empty(*shape, dtype=torch.float32)
        sides.append(_merge(call, partial, tops, weights, first, last, log_sums))
    (packed, packed_sum), (exact, exact_sum) = sides
    assert packed_sum is not None and exact_sum is not None
    if transform.rotation is not None:
        packed = packed @ transform.rotation.t()
    if transform.mean is not None:
        packed = (packed.unflatten(1, (heads, -1)) + transform.mean[:, None, None]).flatten(1, 2)
    sums = [packed_sum, exact_sum]
    if call.sink_logits is not None:
        sums.append((call.sink_logits.float() / math.log(2)).view(1, -1, 1, 1).expand(shape))
    log_sums = torch.cat(sums, -1)
    seen_nothing = log_sums.amax(-1, keepdim=True) == -torch.inf
    share = torch.softmax(log_sums.masked_fill(seen_nothing, 0.0) * math.log(2), -1)
    return packed * share[..., :1] + exact * share[..., 1:2], log_sums
