"""``torch.ops.kvbits.attend_static``: a decode step over a fixed capacity, as one operator for ``torch.compile``.

Importing this file registers the operator. Everything that changes from step to step is in tensors, so a compiled or
captured step stays valid as the context grows. Where Triton runs, the lengths stay on the device; elsewhere the host
reads them, which costs nothing on a CPU, and the best kernel of :data:`kvbits.attend.KERNELS` that fits runs.
"""

# The schema is read from the annotations: no ``from __future__ import annotations`` here.

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from kvbits.attend import choose
from kvbits.attend.call import Call
from kvbits.attend.triton import decode as triton_decode
from kvbits.attend.view import KVView
from kvbits.backends import why_triton_is_off
from kvbits.numerics import hadamard
from kvbits.numerics.modes import without_autocast
from kvbits.schemes.scheme import Scheme
from kvbits.store.blocks import Blocks
from kvbits.store.derived import Derived
from kvbits.store.record import Record
from kvbits.store.rows import Rows
from kvbits.transform import Rope, Transform
from kvbits.types import Params

parse = functools.lru_cache(maxsize=64)(Scheme.parse)


@torch.library.custom_op("kvbits::attend_static", mutates_args=())
def attend_static(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    pool: torch.Tensor,
    table: torch.Tensor,
    counts: torch.Tensor,
    held: torch.Tensor,
    fitted: Sequence[torch.Tensor],
    names: str,
    sink_logits: Optional[torch.Tensor],  # noqa: UP045 - old releases of torch know no X | None here
    scheme: str,
    in_order: bool,
    interleaved: bool,
    scaling: float,
    softcap: Optional[float],  # noqa: UP045
) -> torch.Tensor:
    """Attention of one new token over a :class:`kvbits.layer.frozen.FrozenLayerCache`.

    Args:
        query: ``[B, Hq, 1, Dk]``.
        keys, values: exact slots ``[B, H, L, Dk]`` and ``[B, H, L, Dv]``, the new token among them.
        pool: uint8 ``[P, H, record bytes]``.
        table, in_order: see :class:`kvbits.store.blocks.Blocks`; the table has a column for each block that there can
            be.
        counts, held: int32 ``[B]``, blocks and exact slots in use.
        fitted: what the layer has fitted, and the angles of all blocks that there can be, if keys have any.
        names: of ``fitted``, with commas between: ``key.<name>`` and ``value.<name>`` of the codecs' params (``mean``
            and ``balance`` among the keys'), and ``base_cos``, ``base_sin``, ``step_cos``, ``step_sin``.
        sink_logits: ``[Hq]``.
        scheme: as ``Scheme.parse`` reads it.
        interleaved: which channels make a rotary pair.
        scaling, softcap: see :class:`kvbits.attend.Call`.

    Returns:
        ``[B, Hq, 1, Dv]``.

    Raises:
        ValueError: on a CPU, if more tokens were written than there are slots.
    """
    layer = _layer_of(pool, keys, values, fitted, names, scheme, interleaved)
    with without_autocast():
        if not why_triton_is_off(query.device):
            most = (table.shape[1],) * len(counts), (keys.shape[2],) * len(held)
            view = layer.view(
                keys, values, Blocks(layer.record, pool, table, most[0], in_order, layer.derived), most[1]
            )
            call = Call(query, view, scaling, softcap=softcap, sink_logits=sink_logits)
            return triton_decode.run(call, (counts, held))
        blocks, exact = tuple(counts.tolist()), tuple(held.tolist())
        if max(exact) > keys.shape[2]:
            raise ValueError(
                f"a row holds {max(exact)} exact tokens, and there is room for {keys.shape[2]}: call advance() after "
                "each step, so that they are packed"
            )
        recent = slice(0, max(exact))
        seen = Blocks(layer.record, pool, table[:, : max(blocks)], blocks, in_order, layer.derived)
        view = layer.view(keys[:, :, recent], values[:, :, recent], seen, exact)
        call = Call(query, view, scaling, softcap=softcap, sink_logits=sink_logits)
        return choose(call).run(call).contiguous()


@attend_static.register_fake
def _(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    pool: torch.Tensor,
    table: torch.Tensor,
    counts: torch.Tensor,
    held: torch.Tensor,
    fitted: Sequence[torch.Tensor],
    names: str,
    sink_logits: Optional[torch.Tensor],  # noqa: UP045
    scheme: str,
    in_order: bool,
    interleaved: bool,
    scaling: float,
    softcap: Optional[float],  # noqa: UP045
) -> torch.Tensor:
    return query.new_empty(*query.shape[:3], values.shape[3])


@dataclass(frozen=True)
class _Layer:
    """What stays the same in a layer from step to step, and what kernels derive from it."""

    scheme: Scheme
    record: Record
    derived: Derived
    fitted: tuple[torch.Tensor, ...]
    params: tuple[Params, Params]
    transforms: tuple[Transform, Transform]

    def view(self, keys: torch.Tensor, values: torch.Tensor, blocks: Blocks, held: tuple[int, ...]) -> KVView:
        """All that is held, without padding: every row's own tokens, as many as it has."""
        transforms = self.transforms if blocks.longest else (Transform(), Transform())
        most = max(n * self.record.tokens + m for n, m in zip(blocks.counts, held, strict=True))
        return KVView(
            self.scheme, keys, values, held, self.scheme.sinks, blocks, *self.params, Rows(len(held), most),
            key_transform=transforms[0], value_transform=transforms[1],
        )  # fmt: skip


_LAYERS = WeakTensorKeyDictionary()
"""By pool. A pool belongs to one layer for good."""


def refresh(pool: torch.Tensor) -> None:
    """Tell the layer with this pool that what it fitted was filled in: captured graphs read what is derived of it."""
    layer: _Layer | None = _LAYERS.get(pool)
    if layer is not None:
        triton_decode.refresh(layer.derived, (layer.scheme.key, layer.scheme.value), layer.params)


def _layer_of(
    pool: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    fitted: Sequence[torch.Tensor],
    names: str,
    scheme: str,
    interleaved: bool,
) -> _Layer:
    """Made at the first step: tables and layouts that kernels derive are not made anew at each."""
    held: _Layer | None = _LAYERS.get(pool)
    if held is not None and list(map(id, held.fitted)) == list(map(id, fitted)):
        return held
    _LAYERS[pool] = made = _make_layer(keys, values, fitted, names, parse(scheme), interleaved)
    return made


def _make_layer(
    keys: torch.Tensor, values: torch.Tensor, fitted: Sequence[torch.Tensor], names: str, scheme: Scheme, pairs: bool
) -> _Layer:
    channels = keys.shape[3], values.shape[3]
    record = Record.of(scheme.key, scheme.value, scheme.block, *channels, keys.dtype, values.dtype)
    known = dict(zip(names.split(",") if names else (), fitted, strict=True))
    params = [{name[len(side) :]: x for name, x in known.items() if name.startswith(side)} for side in _SIDES]
    rotations = [
        hadamard.rotation(size).to(keys.device) if codec.rotates else None
        for codec, size in zip((scheme.key, scheme.value), channels, strict=True)
    ]
    rope = None
    if "base_cos" in known:
        rope = Rope(known["base_cos"], known["base_sin"], known["step_cos"], known["step_sin"], pairs)
    key = Transform(params[0].get("mean"), rotations[0], rope, scheme.pre_rope, params[0].get("balance"))
    transforms = key, Transform(rotation=rotations[1])
    return _Layer(scheme, record, Derived(), tuple(fitted), (params[0], params[1]), transforms)


ANGLES = ("base_cos", "base_sin", "step_cos", "step_sin")
"""Fields of :class:`kvbits.attend.Rope`."""

_SIDES = ("key.", "value.")
