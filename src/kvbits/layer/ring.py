"""``RingLayer``, exact tokens in buffers that never move: of a sliding window, or of a layer left exact.

The counterpart of :class:`kvbits.layer.frozen.FrozenLayerCache` where nothing is packed. Column ``c`` stands in slot
``c`` modulo their number, so a window overwrites the oldest token, and nothing is moved.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention


class RingLayer:
    """The newest columns of one layer, exact.

    Args:
        keys, values: the newest columns ``[B, H, n, Dk]`` and ``[B, H, n, Dv]``, which are copied.
        text: bool ``[B, n]``, which of them are no padding; None where all are.
        columns: held so far, older ones than those included.
        slots: columns that a token sees, itself included: the window, or the capacity.
        capacity: columns that may come in all.

    Attributes:
        keys, values: ``[B, H, slots, D]``.
        seen: bool ``[B, slots]``, which of them hold text.
        columns: int64 ``[1]`` on the device: columns held.
        tokens: columns that the host knows of.
    """

    def __init__(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        text: torch.Tensor | None,
        columns: int,
        slots: int,
        capacity: int,
    ) -> None:
        slots, device = min(slots, capacity), keys.device
        newest = min(keys.shape[2], slots)
        first = columns - newest
        self.tokens, self.capacity = columns, capacity
        with torch.inference_mode(False), torch.no_grad():
            where = torch.arange(first, columns, device=device) % slots
            self.keys, self.values = (x.new_zeros(*x.shape[:2], slots, x.shape[3]) for x in (keys, values))
            self.keys[:, :, where] = keys[:, :, keys.shape[2] - newest :].detach()
            self.values[:, :, where] = values[:, :, values.shape[2] - newest :].detach()
            self.seen = torch.zeros(keys.shape[0], slots, dtype=torch.bool, device=device)
            self.seen[:, where] = True if text is None else text[:, text.shape[1] - newest :].to(device)
            self.columns = torch.full((1,), columns, dtype=torch.int64, device=device)

    @property
    def buffers(self) -> list[torch.Tensor]:
        """All tensors that a step reads or writes."""
        return [self.keys, self.values, self.seen, self.columns]

    def step(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write one token, ``[B, H, 1, Dk]`` and ``[B, H, 1, Dv]``, in the place of the oldest. Device work only."""
        slot = self.columns % self.keys.shape[2]
        self.keys.index_copy_(2, slot, key.detach())
        self.values.index_copy_(2, slot, value.detach())
        self.seen.index_fill_(1, slot, True)
        self.columns.add_(1)

    def attend(
        self,
        query: torch.Tensor,
        scaling: float,
        softcap: float | None = None,
        sink_logits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of ``query [B, Hq, 1, Dk]`` over all slots that hold text: ``[B, Hq, 1, Dv]``. Device work only."""
        mask = self.seen[:, None, None]
        groups = query.shape[1] // self.keys.shape[1]
        if softcap is None and sink_logits is None:  # query heads that share a KV head as so many queries
            grouped = query.unflatten(1, (-1, groups)).squeeze(3)
            out = scaled_dot_product_attention(grouped, self.keys, self.values, attn_mask=mask, scale=scaling)
            return out.flatten(1, 2)[:, :, None]
        compute = torch.promote_types(query.dtype, torch.float32)
        grouped = query.to(compute).unflatten(1, (-1, groups)).squeeze(3)  # [B, H, G, Dk]
        scores = scaling * (grouped @ self.keys.to(compute).transpose(2, 3))
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~mask, -torch.inf)
        if sink_logits is not None:
            logits = sink_logits.to(compute).view(1, -1, groups, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, logits], dim=3)
        weights = torch.softmax(scores, dim=3)[..., : self.keys.shape[2]]
        return (weights @ self.values.to(compute)).to(query.dtype).flatten(1, 2)[:, :, None]

    def advance(self, columns: int | None = None) -> None:
        """As :meth:`kvbits.layer.frozen.FrozenLayerCache.advance`; nothing is packed."""
        self.count(int(self.columns) if columns is None else columns)

    def count(self, columns: int) -> None:
        """As :meth:`kvbits.layer.frozen.FrozenLayerCache.count`."""
        if columns > self.capacity:
            raise ValueError(f"the capacity of {self.capacity} tokens is full: make a larger one")
        self.tokens = columns

    def pack(self) -> None:
        """Nothing is packed."""

    def refuse_take_back(self) -> None:
        """Raise RuntimeError where steps have overwritten what a window would see again without them."""
        stepped, slots = int(self.columns), self.keys.shape[2]
        tokens = min(self.tokens, stepped)
        if stepped > max(slots, tokens + 1):  # a single step took the slot that the next one takes anyway
            raise RuntimeError(
                f"{stepped - tokens} steps without advance() cannot be taken back, for they have overwritten tokens "
                f"that the window of {slots} would see again; freeze the growing cache anew"
            )

    def take_back(self) -> None:
        """As :meth:`kvbits.layer.frozen.FrozenLayerCache.take_back`, where :meth:`refuse_take_back` does not."""
        self.refuse_take_back()
        stepped = int(self.columns)
        self.tokens = min(self.tokens, stepped)
        self.seen[:, torch.arange(self.tokens, stepped, device=self.seen.device) % self.keys.shape[2]] = False
        self.columns.fill_(self.tokens)

    def reset(self) -> None:
        """Forget all tokens; the buffers stay."""
        self.tokens = 0
        self.columns.zero_()
        self.seen.fill_(False)

    @property
    def nbytes(self) -> int:
        """Bytes allocated, the room for later tokens included."""
        return sum(x.nbytes for x in self.buffers)
