"""``FrozenLayerCache``, a layer of fixed capacity whose decode step can be compiled, or captured in a CUDA graph.

Nothing in a step depends on how much is held: buffers have their final size, and lengths are counted on the device.
What cannot be captured is packing, once every ``block`` steps; the host does it between two steps, as a
:class:`LayerCache` whose pool has its final size from the start::

    layer = FrozenLayerCache(cache, capacity=32_768)         # a LayerCache that holds the prompt
    with torch.cuda.graph(graph):
        layer.step(key, value)
        out = layer.attend(query, scaling)
    for token in ...:
        graph.replay()
        layer.advance()                                 # packs where a block is full
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvbits.attend.operator import ANGLES, attend_static, refresh
from kvbits.attend.triton import decode as triton_decode
from kvbits.attend.triton.shape import outliers_in, why_not_format
from kvbits.backends import why_triton_is_off
from kvbits.layer.cache import LayerCache
from kvbits.store import huge_pages
from kvbits.store.blocks import BlockStore
from kvbits.store.exact import ExactTokens
from kvbits.store.rows import Rows


def why_not(cache: LayerCache) -> list[str]:
    """Reasons why a cache cannot go on as a :class:`FrozenLayerCache`."""
    if cache.keys is None or cache.values is None:
        return ["it is empty: prefill it first"]
    if not cache.scheme.packs:
        return [f"{cache.scheme} packs nothing"]
    reasons = []
    if cache.window is not None:
        reasons.append("blocks behind a sliding window are dropped")
    if not why_triton_is_off(cache.keys.device):
        reasons += _why_not_triton(cache, cache.keys.dtype, cache.values.dtype)
    return reasons


def _why_not_triton(cache: LayerCache, keys: torch.dtype, values: torch.dtype) -> list[str]:
    """Reasons against the one kernel that reads lengths where they are counted, on the device."""
    reasons = []
    if keys != values:
        reasons.append(f"{keys} keys and {values} values")
    elif keys not in triton_decode.PARTS:
        reasons.append(f"{keys} (bfloat16, float16 or float32 run)")
    view = cache.view()
    for side, codec, x, slots in (
        ("keys", cache.scheme.key, view.keys, view.blocks.record.keys),
        ("values", cache.scheme.value, view.values, view.blocks.record.values),
    ):
        reasons += [f"{side}: {reason}" for reason in why_not_format(codec.format, x.shape[3], outliers_in(slots))]
    return reasons


class FrozenLayerCache:
    """Keys and values of one layer in buffers that never move.

    Rows may hold different numbers of tokens; each step adds one token to every row.

    Args:
        cache: what it begins with, which is copied and stays as it is.
        capacity: columns that it can hold, those of ``cache`` included, padding too.

    Attributes:
        keys, values: exact slots ``[B, H, sinks + late sinks + residual + block, D]``.
        pool, table: see :class:`kvbits.store.blocks.Blocks`.
        counts, held: int32 ``[B]`` on the device: blocks and exact slots in use.
        columns: int64 ``[1]`` on the device: columns held.
        tokens: columns that the host knows of.

    Raises:
        ValueError: for what :func:`why_not` says, or a capacity below what is held.
    """

    def __init__(self, cache: LayerCache, capacity: int) -> None:
        if reasons := why_not(cache):
            raise ValueError(f"{cache.name} cannot have a fixed capacity: {', '.join(reasons)}")
        if capacity < cache.columns:
            raise ValueError(f"{cache.name} holds {cache.columns} tokens, more than the capacity of {capacity}")
        self.scheme, self.capacity, self.tokens = cache.scheme, capacity, cache.columns
        with torch.inference_mode(False), torch.no_grad():
            self._core = _roomy(cache, capacity)
            self._allocate()

    def _allocate(self) -> None:
        core = self._core
        assert core.keys is not None and core.values is not None and core.store is not None
        batch, slots, device = len(core.held), core.limits.most + 1, core.keys.device
        self.pool, self.table = core.store.pool, core.store.table
        # The kernel is compiled for it, so it holds for good: equal rows stay so, and others never are again.
        self._in_order = core.store.in_order and core.even
        self.keys, self.values = (x.new_zeros(*x.shape[:2], slots, x.shape[3]) for x in (core.keys, core.values))
        self.counts, self.held = (torch.zeros(batch, dtype=torch.int32, device=device) for _ in range(2))
        self.columns = torch.full((1,), self.tokens, dtype=torch.int64, device=device)
        fitted = {name: x.clone() for name, x in _to_fit(core)}
        self._fitted = fitted
        if core.rotary is not None:
            rope = core.rotary.rope(core.rows, core.sinks, self.scheme.block, max(1, self.table.shape[1]), device)
            fitted = {**fitted, **{name: getattr(rope, name).contiguous() for name in ANGLES}}
        self._tensors, self._names = list(fitted.values()), ",".join(fitted)
        self._interleaved = core.rotary is not None and core.rotary.interleaved
        self._text = str(self.scheme)
        self._settle()

    @property
    def buffers(self) -> list[torch.Tensor]:
        """All tensors that a step reads or writes."""
        own = [self.keys, self.values, self.pool, self.table, self.counts, self.held, self.columns]
        return own + self._tensors

    def step(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write one token, ``[B, H, 1, Dk]`` and ``[B, H, 1, Dv]``, into each row's next slot. Device work only."""
        slot = self.held.long()
        if self.keys.device.type == "cpu":  # where attention then says what is wrong; devices stop by themselves
            slot = slot.clamp(max=self.keys.shape[2] - 1)
        for buffer, new in ((self.keys, key), (self.values, value)):
            buffer.scatter_(2, slot.view(-1, 1, 1, 1).expand_as(new), new.detach())
        self.held.add_(1)
        self.columns.add_(1)

    def attend(
        self,
        query: torch.Tensor,
        scaling: float,
        softcap: float | None = None,
        sink_logits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of ``query [B, Hq, 1, Dk]`` over all tokens: ``[B, Hq, 1, Dv]``. Device work only."""
        out: torch.Tensor = attend_static(
            query, self.keys, self.values, self.pool, self.table, self.counts, self.held, self._tensors, self._names,
            sink_logits, self._text, self._in_order, self._interleaved, scaling, softcap,
        )  # fmt: skip
        return out

    def advance(self, columns: int | None = None) -> None:
        """Tell the host what was stepped, and pack the oldest recent tokens where a block of them is full.

        Args:
            columns: that are held now; None asks the device, and waits for it.

        Raises:
            ValueError: if they are more than the capacity, more or fewer than the device has counted, or if a value to
                be packed is not finite.
        """
        self.count(int(self.columns) if columns is None else columns)
        self.pack()

    def count(self, columns: int) -> None:
        """Note how many columns are held, the first half of :meth:`advance`. Raises ValueError beyond the capacity."""
        if columns > self.capacity:
            raise ValueError(f"the capacity of {self.capacity} tokens is full: make a larger one")
        self.tokens = columns

    def pack(self) -> None:
        """Pack what is due, the other half: the :class:`LayerCache` appends what has come since it last did."""
        core, since = self._core, self.tokens - self._core.columns
        if not core.limits.packable(max(core.held) + since):
            return
        if (counted := int(self.columns)) != self.tokens:
            raise ValueError(
                f"{core.name}: the host counts {self.tokens} columns and the device {counted}; tell advance() of every "
                "step that ran and of no other, or let it ask the device"
            )
        keys, values = (self._newest(x, since) for x in (self.keys, self.values))
        rows = core.rows.extend(len(core.held), since, epoch=core.rows.last_epoch)  # as the angles here foretell
        core.append(keys, values, rows)
        with torch.inference_mode(False), torch.no_grad():
            self._settle()

    def _newest(self, buffer: torch.Tensor, since: int) -> torch.Tensor:
        """The tokens that the :class:`LayerCache` has not been given, ``[B, H, since, D]``."""
        held = self._core.held
        if self._core.even:
            return buffer[:, :, held[0] : held[0] + since]
        return torch.stack([row[:, first : first + since] for row, first in zip(buffer, held, strict=True)])

    def _settle(self) -> None:
        """Take over, in place, what the :class:`LayerCache` holds now."""
        core = self._core
        assert core.buffers is not None and core.store is not None
        assert core.store.pool is self.pool and core.store.table is self.table
        kept, most = core.buffers, core.buffers.longest
        for buffer, exact in ((self.keys, kept.keys), (self.values, kept.values)):
            buffer[:, :, :most] = exact[:, :, :most]
            buffer[:, :, most:] = 0
        kept.keys, kept.values = self.keys, self.values
        self.held.copy_(torch.tensor(kept.held))
        self.counts.copy_(torch.tensor(core.packed_blocks))
        for name, x in _known(core):
            self._fitted[name].copy_(x)
        refresh(self.pool)

    def take_back(self) -> None:
        """Forget what was stepped since the host was last told, and of what it was told all that did not run."""
        self.tokens = min(self.tokens, int(self.columns))
        self.columns.fill_(self.tokens)
        since = self.tokens - self._core.columns
        self.held.copy_(torch.tensor(self._core.held) + since)

    def reset(self) -> None:
        """Forget all tokens, and what was fitted of them; the buffers stay.

        Raises:
            ValueError: where keys are turned by positions that another text would not have.
        """
        core = self._core
        if core.rotary is not None and (core.rows.runs is not None or core.rows.first_epoch):
            raise ValueError(
                f"{core.name} ropes keys by the positions of the text that it was frozen with, which did not begin at "
                "0 or did not go on by one; freeze a cache of the next text instead"
            )
        assert core.store is not None
        batch = len(core.held)
        core.rows, core.buffers = Rows(batch), ExactTokens(self.keys, self.values, [0] * batch, ((),) * batch)
        core.store.truncate([0] * batch)
        core.store.used = 0
        (core.key_params, core.value_params), core.is_final, core.warned = core.calibrated, (False, False), set()
        self.tokens = 0
        self.columns.zero_()
        self._settle()

    @property
    def nbytes(self) -> int:
        """Bytes allocated, the room for later tokens included."""
        return sum(x.nbytes for x in self.buffers)


def _roomy(cache: LayerCache, capacity: int) -> LayerCache:
    """A copy of ``cache`` whose pool and table need not grow before it holds ``capacity`` columns."""
    assert cache.keys is not None and cache.values is not None and cache.store is not None
    block, limits = cache.scheme.block, cache.limits
    most = [
        max(held, (tokens + capacity - cache.columns - limits.sinks - (limits.residual or 0)) // block)
        for held, tokens in zip(cache.packed_blocks, cache.rows.counts, strict=True)
    ]
    order, table = cache.store.in_table_order()
    blocks = cache.store.pool[: cache.store.used] if order is None else cache.store.pool[order]
    store = BlockStore.of(cache.store.record, blocks, table, cache.packed_blocks, cache.store.blank)
    room = len(blocks) + sum(most) - sum(cache.packed_blocks)
    pool = huge_pages.allocate((max(1, room), *blocks.shape[1:]), blocks.device)
    pool[: len(blocks)] = blocks
    wide = table.new_zeros(table.shape[0], max(1, *most))
    wide[:, : table.shape[1]] = table
    store.pool, store.table = pool, wide
    twin = LayerCache(cache.scheme, cache.window, cache.name, cache.rotary, cache.calibrated)
    twin.key_params, twin.value_params, twin.is_final = cache.key_params, cache.value_params, cache.is_final
    twin.restore(cache.rows, cache.keys, cache.values, cache.held, cache.late, store)
    return twin


def _known(core: LayerCache) -> Iterator[tuple[str, torch.Tensor]]:
    """Params of both sides, under the names that the operator takes them by."""
    for side, params in (("key", core.key_params), ("value", core.value_params)):
        for name, x in params.items():
            yield f"{side}.{name}", x


def _to_fit(core: LayerCache) -> Iterator[tuple[str, torch.Tensor]]:
    """The same, and before anything was packed also what will be fitted then: tensors of its shape."""
    known = dict(_known(core))
    assert core.keys is not None and core.values is not None
    for side, codec, x, fitted in (
        ("key", core.scheme.key, core.keys, core.calibrated[0]),
        ("value", core.scheme.value, core.values, core.calibrated[1]),
    ):
        batch, heads, _, channels = x.shape
        if side == "key" and core.scheme.centred:
            known.setdefault("key.mean", x.new_zeros(heads, channels, dtype=torch.float32))
            if codec.rotates and not codec.is_fitted:
                known.setdefault("key.balance", x.new_ones(heads, channels, dtype=torch.float32))
        if codec.is_fitted and not set(fitted) - {"mean"}:
            for name, found in codec.fit(x.new_ones(batch, heads, core.scheme.block, channels)).items():
                known.setdefault(f"{side}.{name}", found)
    yield from known.items()
