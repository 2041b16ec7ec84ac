"""``torch.ops.kvbits.attend_static``: a decode step over a fixed capacity, as one operator for ``torch.compile``.

Importing this file registers the operator. Everything that changes from step to step is in tensors, so a compiled or
captured step stays valid as the context grows.
"""

# The schema is read from the annotations: no ``from __future__ import annotations`` here.

import functools
from collections.abc import Sequence
from typing import Optional

import torch

from kvbits.attend import triton_decode
from kvbits.attend.call import Call
from kvbits.attend.transform import Rope, Transform
from kvbits.attend.view import KVView
from kvbits.numerics import hadamard
from kvbits.rows import Rows
from kvbits.scheme import Scheme
from kvbits.store import Blocks, Record
from kvbits.types import Params

parse = functools.lru_cache(maxsize=64)(Scheme.parse)


@torch.library.custom_op("kvbits::attend_static", mutates_args=())
def attend_static(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    pool: torch.Tensor,
    counts: torch.Tensor,
    held: torch.Tensor,
    key_scale: Optional[torch.Tensor],  # noqa: UP045 - old releases of torch know no X | None here
    value_scale: Optional[torch.Tensor],  # noqa: UP045
    key_mean: Optional[torch.Tensor],  # noqa: UP045
    key_balance: Optional[torch.Tensor],  # noqa: UP045
    angles: Sequence[torch.Tensor],
    sink_logits: Optional[torch.Tensor],  # noqa: UP045
    scheme: str,
    interleaved: bool,
    scaling: float,
    softcap: Optional[float],  # noqa: UP045
) -> torch.Tensor:
    """Attention of one new token over a :class:`kvbits.static.StaticLayer`.

    Args:
        query: ``[B, Hq, 1, Dk]``.
        keys, values: exact slots ``[B, H, L, Dk]`` and ``[B, H, L, Dv]``, the new token among them.
        pool: uint8 ``[N * B, H, record bytes]``; block ``n`` of row ``b`` is ``n * B + b``.
        counts, held: int32 ``[B]``, blocks and exact slots in use.
        key_scale, value_scale: static scales of codecs that have them.
        key_mean, key_balance: float32 ``[H, Dk]``, see :class:`kvbits.attend.Transform`.
        angles: the four tensors of :class:`kvbits.attend.Rope` for all blocks that there can be, or none.
        sink_logits: ``[Hq]``.
        scheme: as ``Scheme.parse`` reads it.
        interleaved: which channels make a rotary pair.
        scaling, softcap: see :class:`kvbits.attend.Call`.

    Returns:
        ``[B, Hq, 1, Dv]``.
    """
    layer = parse(scheme)
    batch, _, slots, channels = keys.shape
    record = Record.of(layer.key, layer.value, layer.block, channels, values.shape[3], keys.dtype, values.dtype)
    capacity = pool.shape[0] // batch
    blocks = Blocks(record, pool, counts.new_zeros(batch, 1, dtype=torch.int64), (capacity,) * batch, in_order=True)
    most = capacity * layer.block + slots
    key_rotation, value_rotation = (
        _rotation(x.shape[3], keys.device) if codec.rotates else None
        for codec, x in ((layer.key, keys), (layer.value, values))
    )
    rope = None
    if angles:
        base_cos, base_sin, step_cos, step_sin = angles
        rope = Rope(base_cos, base_sin, step_cos, step_sin, interleaved)
    view = KVView(
        layer, keys, values, (slots,) * batch, layer.sinks, blocks, _params(key_scale), _params(value_scale),
        Rows(batch, most), key_transform=Transform(key_mean, key_rotation, rope, layer.pre_rope, key_balance),
        value_transform=Transform(rotation=value_rotation),
    )  # fmt: skip
    return triton_decode.run(Call(query, view, scaling, softcap=softcap, sink_logits=sink_logits), (counts, held))


@functools.lru_cache(maxsize=16)
def _rotation(channels: int, device: torch.device) -> torch.Tensor:
    return hadamard.rotation(channels).to(device)


def _params(scale: Optional[torch.Tensor]) -> Params:  # noqa: UP045
    return {} if scale is None else {"scale": scale}


@attend_static.register_fake
def _(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    pool: torch.Tensor,
    counts: torch.Tensor,
    held: torch.Tensor,
    key_scale: Optional[torch.Tensor],  # noqa: UP045
    value_scale: Optional[torch.Tensor],  # noqa: UP045
    key_mean: Optional[torch.Tensor],  # noqa: UP045
    key_balance: Optional[torch.Tensor],  # noqa: UP045
    angles: Sequence[torch.Tensor],
    sink_logits: Optional[torch.Tensor],  # noqa: UP045
    scheme: str,
    interleaved: bool,
    scaling: float,
    softcap: Optional[float],  # noqa: UP045
) -> torch.Tensor:
    return query.new_empty(*query.shape[:3], values.shape[3])
