"""The Triton kernel: attention over packed blocks on CUDA and ROCm GPUs, for decode steps and chunks of a prompt.

This file decides whether it fits (:func:`why_not`) and cuts the work; :mod:`kvbits.attend.triton.kernel` does it.
Triton is imported when a call runs, not before: without it ``explain`` says so and another kernel runs. With
``TRITON_INTERPRET=1`` it runs on a CPU, for tests.

A step makes no device synchronisation and, at equal lengths of all rows, copies nothing to the device, so it can be
captured in a CUDA graph. Batches whose rows hold different numbers of blocks copy two short lists.
"""

from __future__ import annotations

import functools
import math
from typing import TypeAlias

import torch
from torch.nn.functional import pad

from kvbits.attend.call import Call
from kvbits.attend.triton.shape import (
    Flags,
    Roping,
    Shape,
    outliers_in,
    padded_channels,
    shape_for,
    static_zero,
    why_not_format,
)
from kvbits.attend.triton.tuning import tuning_for
from kvbits.attend.view import KVView
from kvbits.backends import why_no_triton, why_triton_is_off
from kvbits.codecs import Codec
from kvbits.numerics.groups import power_of_two
from kvbits.store.derived import Derived, Kept
from kvbits.transform import NO_ROPE, UNROPED_KEYS, UNROPED_MEAN, Rope, Transform
from kvbits.types import Format, Params

PARTS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}
"""Bfloat16 parts that queries and weights are split into, so that their own precision is kept."""


def why_not(call: Call) -> list[str]:
    """Reasons against: no Triton, no GPU, or what the kernel does not do."""
    view, query = call.view, call.query
    if reasons := why_no_triton(query.device):
        return reasons
    reasons = why_triton_is_off(query.device)
    if query.dtype not in PARTS:
        reasons.append(f"{query.dtype} queries (bfloat16, float16 or float32 run)")
    elif view.keys.dtype != query.dtype or view.values.dtype != query.dtype:
        reasons.append(f"{query.dtype} queries over {view.keys.dtype} keys and {view.values.dtype} values")
    if torch.is_grad_enabled() and query.requires_grad:
        reasons.append("gradients of the query")
    record = view.blocks.record
    for side, codec, x, slots, transform in (
        ("keys", view.scheme.key, view.keys, record.keys, view.key_transform),
        ("values", view.scheme.value, view.values, record.values, view.value_transform),
    ):
        reasons += [f"{side}: {reason}" for reason in why_not_format(codec.format, x.shape[3], outliers_in(slots))]
        if transform.rope is not None and transform.whole and transform.rotation is not None:
            reasons.append(f"{side}: rotated before the rotary embedding")
    if view.value_transform.rope is not None or view.value_transform.balance is not None:
        reasons.append("values: a rotary embedding, or channels that were divided")
    return reasons


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
    partial, tops, weights, splits = _split(call, lengths)
    if view.value_transform.rotation is None and view.value_transform.mean is None:
        return _merge(call, partial, tops, weights, 0, partial.shape[0])[0]
    return _merge_transformed(call, partial, tops, weights, splits)[0].to(query.dtype)


def partial(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sums of one piece of the context; see :data:`kvbits.attend.call.Partial`."""
    view, query = call.view, call.query
    if not query.numel() or not view.blocks.longest + view.keys.shape[2]:
        out = query.new_zeros(*query.shape[:3], view.values.shape[3], dtype=torch.float32)
        return out, query.new_full(query.shape[:3], -torch.inf, dtype=torch.float32)
    splits, tops, weights, packed = _split(call, None)
    if view.value_transform.rotation is None and view.value_transform.mean is None:
        found = query.new_empty(*query.shape[:3], 1, dtype=torch.float32)
        out, _ = _merge(call, splits, tops, weights, 0, splits.shape[0], found)
    else:
        out, both = _merge_transformed(call, splits, tops, weights, packed)
        found = torch.logsumexp(both * math.log(2), -1, keepdim=True) / math.log(2)
    return out, found.squeeze(-1) * math.log(2)


def roping_of(transform: Transform, form: Format, channels: int) -> Roping:
    """What the kernel does with the rotary embedding and mean of keys of a format and ``channels``."""
    rope, mean = transform.rope, transform.mean is not None
    half = 0 if rope is None else rope.base_cos.shape[-1]
    interleaved = rope is not None and rope.interleaved
    if rope is not None and transform.whole:
        return Roping.of(UNROPED_KEYS, mean or static_zero(form), half, interleaved, channels)
    return Roping.of(UNROPED_MEAN, mean, half, interleaved, channels) if mean else Roping()


def _angles(view: KVView, roping: Roping, parts: int, unused: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cosines and sines of the blocks ``[B or 1, N, half]``, and within a block, as the kernel reads them."""
    rope = view.key_transform.rope
    if rope is None or roping.kind == NO_ROPE:
        return unused, unused, unused, unused
    bases = (x if x.stride()[1:] == (roping.half, 1) else x.contiguous() for x in (rope.base_cos, rope.base_sin))
    return (*bases, *_step_tables(view, rope, roping, parts))


def _step_tables(view: KVView, rope: Rope, roping: Roping, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Bfloat16 parts of cosines and of sines of the angles within a block, made once for a layer.

    Of pairs ``[parts, tokens, padded]``; of keys before RoPE, ahead of them, those of the even and the odd channels,
    ``[parts, 2, tokens, U]``.
    """
    kept = view.blocks.derived.triton_steps.get((roping.kind, parts))
    if kept is None or not rope.has(kept.source):
        channels, padding = padded_channels(view.keys.shape[3]), (0, roping.padded - roping.half)
        tables = []
        for x, still in ((rope.step_cos, 1.0), (rope.step_sin, 0.0)):
            table = split_in_parts(pad(x, padding), parts).flatten()
            if roping.kind == UNROPED_KEYS:
                keys = split_in_parts(_by_channel(x, roping, channels, still), parts).flatten()
                table = torch.cat([keys, table])
            tables.append(table)
        kept = Kept(rope.steps, tables)
        view.blocks.derived.triton_steps[roping.kind, parts] = kept
    return kept.made[0], kept.made[1]


def _by_channel(x: torch.Tensor, roping: Roping, channels: int, still: float) -> torch.Tensor:
    """Of pairs ``[tokens, half]`` their channels' numbers, ``still`` in the others: ``[2, tokens, channels / 2]``."""
    both = x.repeat_interleave(2, 1) if roping.interleaved else x.repeat(1, 2)
    wide = pad(both, (0, channels - 2 * roping.half), value=still)
    by_parity: torch.Tensor = wide.unflatten(1, (-1, 2)).permute(2, 0, 1)
    return by_parity


def _mean(view: KVView, roping: Roping) -> torch.Tensor | None:
    """The mean of all packed keys, float32 ``[H, D]``; that of keys before RoPE contains the zeros of the layer."""
    mean, params = view.key_transform.mean, view.key_params
    if roping.kind != UNROPED_KEYS or not static_zero(view.scheme.key.format):
        return None if mean is None else mean.float().contiguous()
    # Not kept: a frozen cache fills in what it fits later.
    zeros = -params["scale"].float() * params["zero"].float()
    return (zeros if mean is None else zeros + mean).contiguous()


def _split(call: Call, lengths: Lengths | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Run the splits: their outputs ``[S, B * H, rows, Dv]``, maxima, sums, and how many of them are packed ones."""
    from kvbits.attend.triton.kernel import attend_split

    view, query = call.view, call.query
    blocks, scheme = view.blocks, view.scheme
    batch, heads, slots, key_channels = view.keys.shape
    value_channels, queries = view.values.shape[3], query.shape[2]
    group_rows = query.shape[1] // heads
    rows, parts = group_rows * queries, PARTS[query.dtype]
    architecture, processors = _processor(query.device)
    key, value = scheme.key.format, scheme.value.format
    tuning = tuning_for(architecture, max(key.bits, value.bits), "channel" in (key.per, value.per))
    roping = roping_of(view.key_transform, key, key_channels)
    shape = shape_for(blocks.record, key, value, key_channels, value_channels, rows, parts, tuning, roping.kind)
    tuning = shape.tuning
    row_tiles = -(-rows // shape.tile.queries)
    per_split, exact_per_split = _cut(
        blocks.longest, slots, batch * heads * row_tiles, processors * tuning.programs, shape
    )
    splits = -(-blocks.longest // per_split)
    total = splits + -(-slots // exact_per_split)
    partial = query.new_empty(total, batch * heads, rows, value_channels, dtype=torch.float32)
    tops, weights = (query.new_empty(total, batch * heads, rows, dtype=torch.float32) for _ in range(2))
    unused = tops
    plain = call.mask is None and call.window is None and view.rows.valid is None and view.offset == 0
    column_of = None if plain or view.column_of is None else view.column_of.to(query.device)
    counts, exact_counts = _lengths(view, query.device) if lengths is None else lengths
    mask = None
    if call.mask is not None:
        mask = call.mask.expand(batch, query.shape[1], -1, -1)
        mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    packed_query, mean = view.key_transform.query(query), _mean(view, roping)
    packed_query = query if packed_query is None else packed_query  # float32 stays: the kernel rounds it once
    angles = _angles(view, roping, parts, unused)
    pool = blocks.pool
    flags = Flags(
        group_rows,
        single=queries == 1,
        in_order=blocks.in_order,
        ragged=counts is not None,
        padded=column_of is not None,
        mask=0 if mask is None else 1 if mask.dtype == torch.uint8 else 2,
        window=call.window is not None,
        softcap=call.softcap is not None,
        plain=plain,
    )
    attend_split[(total, batch * heads, row_tiles)](
        packed_query,
        (query, view.keys, view.values),
        (pool.view(torch.int16), pool.view(torch.int32), pool.view(torch.bfloat16), pool.view(torch.float16)),
        (blocks.table, *(unused if x is None else x for x in (counts, exact_counts, column_of))),
        unused if mask is None else mask,
        _params(scheme.key, view.key_params, "keys", blocks.derived, parts, unused),
        _params(scheme.value, view.value_params, "values", blocks.derived, parts, unused),
        angles,
        unused if mean is None else mean,
        (partial, tops, weights),
        blocks.counts[0], view.held[0], splits, per_split, exact_per_split, view.rows.columns - queries, view.offset,
        call.window or 0, view.sinks + view.dropped, queries,
        blocks.table.stride(0), 0 if column_of is None else column_of.stride(0),
        0 if angles[0].shape[0] == 1 else angles[0].stride(0), *((0, 0, 0, 0) if mask is None else mask.stride()),
        (batch, heads, view.sinks),
        tuple(x.stride()[:3] for x in (packed_query, query, view.keys, view.values)),
        (call.scaling, call.softcap or 1.0),
        KEY=shape.key, VALUE=shape.value, TILE=shape.tile, ROPE=roping, FLAGS=flags,
        num_warps=tuning.warps, num_stages=tuning.stages,
        **({"maxnreg": tuning.registers} if tuning.registers and torch.version.cuda else {}),
    )  # fmt: skip
    return partial, tops, weights, splits


def _lengths(view: KVView, device: torch.device) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Blocks and exact tokens of each row on the device, where rows differ."""
    if view.even:
        return None, None
    counts, exact_counts = torch.tensor([view.blocks.counts, view.held], dtype=torch.int32, device=device)
    return counts, exact_counts


def _cut(blocks: int, exact: int, tiles: int, wanted: int, shape: Shape) -> tuple[int, int]:
    """Blocks and exact tokens of one split, so that about ``wanted`` programs run."""
    splits = max(1, wanted // tiles)
    per_split = -(-max(1, blocks) // splits)
    per_split = -(-per_split // shape.tile.blocks) * shape.tile.blocks
    # Exact tokens are many times a block's bytes each: several programs share them where few run anyway.
    exact_per_split = shape.tuning.exact_tokens if splits > 1 else max(1, exact)
    return per_split, exact_per_split


@functools.lru_cache(maxsize=64)
def _constant_table(codec: Codec, device: torch.device, parts: int) -> torch.Tensor:
    """The table of a codec whose table is fixed."""
    return _table_of(codec, {}, device, parts)


def _table_of(codec: Codec, params: Params, device: torch.device, parts: int) -> torch.Tensor:
    table = codec.table(params)
    assert table is not None
    return table_parts(table.to(device), parts)


def table_parts(table: torch.Tensor, parts: int) -> torch.Tensor:
    """A table of up to 16 levels as ``kernel/tables.py`` reads it, bfloat16 ``[parts, 32]``."""
    levels = split_in_parts(pad(table, (0, 16 - len(table))), parts)
    halves = levels.view(torch.uint8).unflatten(1, (16, 2)).mT.flatten(1).view(torch.bfloat16)
    return torch.cat([levels, halves], 1)


def split_in_parts(x: torch.Tensor, parts: int) -> torch.Tensor:
    """Bfloat16 parts of float32 ``x``, ``[parts, *x.shape]``: each what those before it have left, rounded."""
    found, rest = [], x.float()
    for _ in range(parts):
        found.append(rest.to(torch.bfloat16))
        rest = rest - found[-1].float()
    return torch.stack(found)


def _params(
    codec: Codec, params: Params, side: str, derived: Derived, parts: int, unused: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Static scale and zero, and the table ``[parts, 32]``, of one side."""
    scale, zero, table = params.get("scale", unused), params.get("zero", unused), unused
    if codec.format.levels == "table" and not codec.is_fitted:
        table = _constant_table(codec, unused.device, parts)
    elif codec.format.levels == "table":
        kept = derived.triton_tables.get((side, parts))
        if kept is None or kept.source is not params:
            with torch.inference_mode(False):  # it may be filled anew
                kept = Kept(params, _table_of(codec, params, unused.device, parts))
            derived.triton_tables[side, parts] = kept
        table = kept.made
    return scale, zero, table


def refresh(derived: Derived, codecs: tuple[Codec, Codec], params: tuple[Params, Params]) -> None:
    """Fill anew, in place, the tables that were derived of params whose tensors have been filled since."""
    for side, codec, fitted in zip(("keys", "values"), codecs, params, strict=True):
        for (of, parts), kept in derived.triton_tables.items():
            if of == side and kept.source is fitted:
                kept.made.copy_(_table_of(codec, fitted, kept.made.device, parts))


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
    from kvbits.attend.triton.kernel import merge_splits

    query = call.query
    _, pairs, rows, channels = partial.shape
    heads = call.view.keys.shape[1]
    dtype = query.dtype if log_sums is None else torch.float32
    out = query.new_empty(*query.shape[:3], channels, dtype=dtype)
    sinks = call.sink_logits if log_sums is None else None
    merge_splits[(pairs, rows)](
        partial, tops, weights, tops if sinks is None else sinks, out, tops if log_sums is None else log_sums,
        first, last, query.shape[2], pairs, heads, *out.stride()[:3],
        GROUP_ROWS=query.shape[1] // heads, CHANNELS=channels, PADDED=power_of_two(channels),
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
