"""``PackedLayer``: a kvbits layer as Transformers sees it, among the layers of a cache."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from kvbits.attend import KVView
from kvbits.attend.dense import dense
from kvbits.hf.columns import Columns
from kvbits.hf.gradient import end_of_gradients
from kvbits.hf.handle import Pair, Trace
from kvbits.layer.cache import Before, LayerCache


def refuse_offloading(*_: Any, **__: Any) -> None:
    """Packed layers stay on their device."""
    raise NotImplementedError(
        "kvbits caches stay on the model's device; use an exact cache with cache_implementation='offloaded', or "
        "a smaller scheme"
    )


class PackedLayer(CacheLayerMixin):
    """The Transformers face of one :class:`kvbits.layer.cache.LayerCache`."""

    is_compileable = False
    is_croppable = True

    def __init__(self, core: LayerCache, columns: Columns, name: str) -> None:
        # Not CacheLayerMixin.__init__: keys and values are properties here.
        self.core, self.columns, self.name = core, columns, name
        self.is_sliding = core.window is not None
        self.is_initialized = False
        self.trace = Trace()
        self.before: Before | None = None
        self.swallowed = False
        self._forward = 0

    def __repr__(self) -> str:
        return f"PackedLayer({self.core.scheme})"

    @property
    def keys(self) -> torch.Tensor | None:  # type: ignore[override]
        """Decoded keys ``[B, H, T, D]``, computed anew at each look; None while empty."""
        return None if self.core.keys is None else dense(self.core.view())[0]

    @property
    def values(self) -> torch.Tensor | None:  # type: ignore[override]
        """Decoded values ``[B, H, T, D]``, computed anew at each look; None while empty."""
        return None if self.core.keys is None else dense(self.core.view())[1]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to prepare: the first update sees the real shapes."""
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new columns and return what attention sees, as tensors or as handles."""
        before = self.core.columns
        view = self.take(key_states, value_states)
        if before == 0:
            return key_states, value_states  # attention over a prompt uses the exact K and V it has just computed
        return self.seen(view)

    def seen(self, view: KVView | None) -> tuple[torch.Tensor, torch.Tensor]:
        """What attention sees: handles around ``view`` where any of it is packed, else tensors.

        Args:
            view: None stands for all that the layer holds now.
        """
        ends = self.swallowed and torch.is_grad_enabled()
        packed = any(self.core.packed_blocks) if view is None else view.blocks.longest > 0 or view.shard is not None
        if packed:
            return Pair(self.core.view() if view is None else view, self.trace, ends).handles()
        keys, values = self.core.exact() if view is None else dense(view)
        return (end_of_gradients(keys), end_of_gradients(values)) if ends else (keys, values)

    def take(self, key_states: torch.Tensor, value_states: torch.Tensor) -> KVView | None:
        """Store the new columns. Returns what attention sees, or None where that is all that the layer holds now."""
        if self.columns.forward == self._forward:
            raise RuntimeError(
                f"{self.name}: updated outside of a forward of the model that this cache was made for; use "
                "kvbits.cache_for(model, scheme) with the very model that runs, and keep it enabled"
            )
        before, (batch, _, added, _) = self.core.columns, key_states.shape
        rows = self.columns.advance(before, batch, added)
        undo, view = self.core.before(), None
        self.before = undo  # an interruption may come anywhere below
        if not self.core.step(key_states, value_states, rows):
            view = self.core.append(key_states, value_states, rows)
            # Until the forward ends. Where nothing was packed, undoing needs no buffer, and an outgrown one may go.
            grown = undo.counts == tuple(self.core.packed_blocks) and undo.keys is not None
            self.before = undo._replace(keys=self.core.keys, values=self.core.values) if grown else undo
        self._forward, self.is_initialized = self.columns.forward, True
        self.trace.outcome = "stock"
        if torch.is_grad_enabled():
            self.swallowed = self.swallowed or key_states.requires_grad or value_states.requires_grad
        return view

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """Length and offset of the mask for the next call."""
        if isinstance(query_length, torch.Tensor):  # Transformers before 5.5 hands over cache positions
            query_length = query_length.shape[0]
        if self.core.window is None:
            return self.core.columns + query_length, 0
        offset = max(0, self.core.columns - self.core.window + 1)
        return self.core.columns - offset + query_length, offset

    def get_seq_length(self) -> int:
        """Columns seen so far, padding included."""
        return self.core.columns

    def get_max_length(self) -> int:
        """-1: no limit; the window of a sliding layer."""
        return -1 if self.core.window is None else self.core.window

    get_max_cache_shape = get_max_length  # its name before Transformers 5.10

    offload = prefetch = refuse_offloading

    def fork(self, columns: Columns) -> PackedLayer:
        """The same for another cache; see :meth:`KVCache.fork`."""
        twin = type(self)(self.core.fork(), columns, self.name)
        twin.is_initialized, twin.swallowed = self.is_initialized, self.swallowed
        return twin

    def reset(self) -> None:
        """Forget everything."""
        self.core.reset()
        self.is_initialized, self.before, self.swallowed = False, None, False
        self._forward = self.columns.forward

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Select rows of this layer alone; use the method of the cache, which keeps all layers in step."""
        self.core.select_rows(beam_idx)

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat rows of this layer alone; use the method of the cache."""
        self.core.select_rows(torch.arange(self.core.rows.batch).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Crop this layer alone; use the method of the cache."""
        self.core.crop(columns_to_crop(tokens_to_remove, self.core.columns))


def columns_to_crop(tokens: int, columns: int) -> int:
    """How many of ``columns`` to take back: ``-tokens`` if negative, else all beyond the first ``tokens``.

    Transformers counts what to remove, as a negative number; before 5.13 a positive one was the length to keep.
    """
    return min(-tokens, columns) if tokens <= 0 else max(0, columns - tokens)
