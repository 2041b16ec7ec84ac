"""Floor 4: ``StaticLayer``, a layer of fixed capacity whose decode step can be captured in a CUDA graph.

Nothing in a step depends on how much is held: buffers have their final size, and lengths are counted on the device.
What cannot be captured is packing, once every ``block`` steps; the host does it between two replays::

    layer = StaticLayer.of(cache, capacity=32_768)      # a LayerCache that holds the prompt
    with torch.cuda.graph(graph):
        layer.step(key, value)
        out = layer.attend(query, scaling)
    for token in ...:
        graph.replay()
        layer.advance()                                 # counts the step, packs when a block is full

For a row-wise equal batch, without padding: what :func:`why_not` says no to stays with ``LayerCache``.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from kvbits.attend.triton_shape import outliers_in, why_not_format
from kvbits.cache import LayerCache
from kvbits.codecs import Codec
from kvbits.encode import Unsound, encode
from kvbits.encode import triton as fast
from kvbits.store import Record
from kvbits.types import Packed, Params


def why_not(cache: LayerCache) -> list[str]:
    """Reasons why a cache cannot go on as a :class:`StaticLayer`."""
    if cache.keys is None or cache.values is None:
        return ["it is empty: prefill it first"]
    reasons = []
    if not cache.scheme.packs:
        reasons.append(f"{cache.scheme} packs nothing")
    if cache.window is not None:
        reasons.append("a sliding window")
    if cache.late_sinks:
        reasons.append(f"late sinks ({cache.scheme})")
    if cache.rows.valid is not None:
        reasons.append("padded rows")
    elif len(set(cache.held)) > 1:
        reasons.append("rows of different lengths")
    if cache.keys.dtype != cache.values.dtype:
        reasons.append(f"{cache.keys.dtype} keys and {cache.values.dtype} values")
    view = cache.view()
    key_slots, value_slots = view.blocks.record.keys, view.blocks.record.values
    for side, x, slots, codec, params, fitted, transform in (
        ("keys", cache.keys, key_slots, cache.scheme.key, cache.key_params, cache.fitted[0], view.key_transform),
        (
            "values",
            cache.values,
            value_slots,
            cache.scheme.value,
            cache.value_params,
            cache.fitted[1],
            view.value_transform,
        ),
    ):
        if cache.scheme.packs:
            reasons += [f"{side}: {reason}" for reason in why_not_format(codec.format, x.shape[3], outliers_in(slots))]
        # What a layer learns is part of the captured step, so it must be known before.
        if not fitted and codec.learns:
            reasons.append(f"{side}: {codec} has seen no block to take its static scale from")
        if side == "keys" and cache.scheme.centred and transform.mean is None:
            reasons.append("keys: no block has been packed to take their mean from")
        if set(params) - {"scale", "mean", "balance"}:
            reasons.append(f"{side}: {codec} has learned more than a scale")
    return reasons


class StaticLayer:
    """Keys and values of one layer in buffers that never move. Made by :meth:`of`.

    Attributes:
        scheme: how they are stored.
        keys, values: exact slots ``[B, H, sinks + residual + block, D]``.
        pool: uint8 ``[N * B, H, record bytes]``.
        counts, held: int32 ``[B]`` on the device: blocks and exact slots in use.
        tokens: tokens that the host has counted.
    """

    def __init__(self, cache: LayerCache, capacity: int) -> None:
        if reasons := why_not(cache):
            raise ValueError(f"{cache.name} cannot have a fixed capacity: {', '.join(reasons)}")
        assert cache.keys is not None and cache.values is not None and cache.store is not None
        if capacity < cache.columns:
            raise ValueError(f"{cache.name} holds {cache.columns} tokens, more than the capacity of {capacity}")
        scheme, view = cache.scheme, cache.view()
        batch, heads, _, key_channels = view.keys.shape
        self.scheme, self.capacity, self.tokens = scheme, capacity, cache.columns
        self.key_params, self.value_params = cache.key_params, cache.value_params
        self.key_transform, self.value_transform = view.key_transform, view.value_transform
        assert scheme.residual is not None
        slots = scheme.sinks + scheme.residual + scheme.block
        self.record: Record = cache.store.record
        self._exact, self._blocks = cache.held[0], cache.store.longest
        most = max(self._blocks, -(-max(0, capacity - scheme.sinks - scheme.residual) // scheme.block))
        if cache.rotary is not None:  # the angles of all blocks that there will be
            rope = cache.rotary.rope(cache.rows, scheme.sinks, scheme.block, most, view.keys.device)
            self.key_transform = replace(self.key_transform, rope=rope)
        self.keys = view.keys.new_zeros(batch, heads, slots, key_channels)
        self.values = view.values.new_zeros(batch, heads, slots, view.values.shape[3])
        self.keys[:, :, : self._exact] = view.keys[:, :, : self._exact]
        self.values[:, :, : self._exact] = view.values[:, :, : self._exact]
        self.pool = view.blocks.pool.new_zeros(most * batch, heads, self.record.nbytes)
        self.pool[: self._blocks * batch] = view.blocks.pool[view.blocks.table.t().flatten()]
        device = self.keys.device
        self.counts = torch.full((batch,), self._blocks, dtype=torch.int32, device=device)
        self.held = torch.full((batch,), self._exact, dtype=torch.int32, device=device)

    @staticmethod
    def of(cache: LayerCache, capacity: int) -> StaticLayer:
        """Copy what ``cache`` holds into buffers for ``capacity`` tokens.

        Raises:
            ValueError: for what :func:`why_not` says, or a capacity below what is held.
        """
        return StaticLayer(cache, capacity)

    def step(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write one token, ``[B, H, 1, Dk]`` and ``[B, H, 1, Dv]``, into the next slot. Device work only."""
        slot = self.held[:1].long()
        self.keys.index_copy_(2, slot, key)
        self.values.index_copy_(2, slot, value)
        self.held += 1

    def attend(
        self,
        query: torch.Tensor,
        scaling: float,
        softcap: float | None = None,
        sink_logits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of ``query [B, Hq, 1, Dk]`` over all tokens: ``[B, Hq, 1, Dv]``. Device work only."""
        from kvbits.attend.triton_op import attend_static

        transform, rope = self.key_transform, self.key_transform.rope
        angles = [] if rope is None else [rope.base_cos, rope.base_sin, rope.step_cos, rope.step_sin]
        out: torch.Tensor = attend_static(
            query, self.keys, self.values, self.pool, self.counts, self.held, self.key_params.get("scale"),
            self.value_params.get("scale"), transform.mean, transform.balance, angles, sink_logits, str(self.scheme),
            rope is not None and rope.interleaved, scaling, softcap,
        )  # fmt: skip
        return out

    def advance(self) -> None:
        """Count one step on the host; pack the oldest recent tokens once a block of them is full.

        Raises:
            ValueError: if the next step would not fit, or a value to be packed is not finite.
        """
        if self.tokens >= self.capacity:
            raise ValueError(f"the capacity of {self.capacity} tokens is full: make a StaticLayer with more")
        self.tokens, self._exact = self.tokens + 1, self._exact + 1
        if self._exact == self.keys.shape[2]:
            self._pack()

    def _pack(self) -> None:
        """Encode the oldest block and move what stays to the front, all in place."""
        sinks, block = self.scheme.sinks, self.scheme.block
        sides = (
            ("keys", self.keys, self.scheme.key, self.key_params, self.key_transform),
            ("values", self.values, self.scheme.value, self.value_params, self.value_transform),
        )
        encoded: list[Packed] = []
        for side, buffer, codec, params, transform in sides:
            oldest = buffer[:, :, sinks : sinks + block]
            if not transform.is_nothing:
                oldest = transform.apply(oldest, self._blocks)
            try:
                encoded.append(_encode(codec, oldest.unflatten(2, (1, block)), params))
            except Unsound as found:
                raise ValueError(
                    f"{found.count} of the {side} to be packed are NaN, infinite or above {found.limit:g}, which "
                    f"{codec} blocks cannot hold without spoiling their neighbours"
                ) from None
        batch = self.keys.shape[0]
        target = self.pool[self._blocks * batch : (self._blocks + 1) * batch]  # [B, H, bytes]
        for slots, packed in zip((self.record.keys, self.record.values), encoded, strict=True):
            for slot in slots:
                part = packed[slot.part.name][:, :, 0].flatten(2).contiguous().view(torch.uint8)
                target[..., slot.offset : slot.offset + slot.part.nbytes] = part
        for _, buffer, _, _, _ in sides:
            buffer[:, :, sinks:-block] = buffer[:, :, sinks + block :].clone()
            buffer[:, :, -block:] = 0
        self._exact, self._blocks = self._exact - block, self._blocks + 1
        self.held -= block
        self.counts += 1


def _encode(codec: Codec, x: torch.Tensor, params: Params) -> Packed:
    """With Triton where it runs: it is not in ``encode.KERNELS`` while it has not been tested on a GPU."""
    return encode(codec, x, params) if fast.why_not(codec, x) else fast.run(codec, x, params)
