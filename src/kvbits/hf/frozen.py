"""``StaticKVCache``: a Transformers ``Cache`` of fixed capacity, for ``torch.compile`` and CUDA graphs.

Made by :func:`freeze` from a ``KVCache`` that has read a prompt. A forward of one token then does work on the device
alone, always the same: it can be one graph, without breaks and without recompilation. Between two forwards
:meth:`StaticKVCache.advance` packs; ``generate`` and forwards that are not compiled call it by themselves.

Masks are not read: a new token sees all text of its row, or its window of it. Padding of the prompt is not stored, or
known to be padding.
"""

from __future__ import annotations

import copy
import operator
import warnings
from typing import Any, NoReturn

import torch
from transformers.cache_utils import CacheLayerMixin

from kvbits.backends import why_triton_is_off
from kvbits.hf.cache import KVCache, OfModel
from kvbits.hf.layer import PackedLayer
from kvbits.hf.stock import ATTENTION
from kvbits.layer.frozen import FrozenLayerCache, why_not
from kvbits.layer.ring import RingLayer


class Frozen:
    """What ``update`` returns in place of keys and values: the layer to attend to, and no tensor."""

    def __init__(self, core: FrozenLayerCache | RingLayer, name: str) -> None:
        self.core, self.name = core, name

    def attend(
        self,
        query: torch.Tensor,
        scaling: float | None,
        softcap: float | None,
        sink_logits: torch.Tensor | None,
        reasons: list[str],
    ) -> torch.Tensor:
        """Attention of ``query [B, Hq, 1, D]``: ``[B, 1, Hq, D]``. Raises ValueError for ``reasons`` to decode."""
        if reasons:
            raise ValueError(f"{self.name} is frozen and cannot serve this call: {', '.join(reasons)}")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return self.core.attend(query, scale, softcap, sink_logits).transpose(1, 2).contiguous()

    def _refuse(self, what: str) -> NoReturn:
        raise TypeError(
            f"{self.name} is frozen, and something else than kvbits' attention asks for {what} of its keys or values: "
            "this model computes with them, or kvbits was disabled on it; use a kvbits.KVCache, which decodes them"
        )

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse(f"'{name}'")

    def __getitem__(self, index: Any) -> NoReturn:
        self._refuse("a part")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        frozen = next((x for x in args if isinstance(x, Frozen)), None)
        if frozen is None:
            raise TypeError("keys and values of a frozen kvbits cache are no tensors; use a kvbits.KVCache")
        frozen._refuse(f"'{getattr(func, '__name__', func)}'")


class FrozenLayer(CacheLayerMixin):
    """The Transformers face of one layer of fixed capacity."""

    is_compileable = True
    is_croppable = False

    def __init__(self, core: FrozenLayerCache | RingLayer, name: str, is_sliding: bool) -> None:
        # Not CacheLayerMixin.__init__: there are no keys and values to show.
        self.core, self.name, self.is_sliding = core, name, is_sliding
        self.is_initialized = True
        self.handle = Frozen(core, name)

    def __repr__(self) -> str:
        return f"FrozenLayer({self.name}, capacity={self.core.capacity})"

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to prepare."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Write one token of each row.

        Raises:
            ValueError: for more tokens than one, or other rows, heads, channels or dtypes than those that are held.
        """
        rows = self.core.keys.shape[0]
        if key_states.shape[0] != rows or key_states.shape[2] != 1:
            raise ValueError(
                f"a frozen cache takes one token of each of its {rows} rows at a time, and got {key_states.shape[2]} "
                f"of {key_states.shape[0]}; let the kvbits.KVCache read all but the last token of a prompt, then "
                "freeze it"
            )
        held, new = _kind(self.core.keys, self.core.values), _kind(key_states, value_states)
        if held != new:
            raise ValueError(
                f"{self.name} holds (heads, key channels, value channels, dtypes) = {held} and got {new}; use a frozen "
                "cache with the model that it was made for, in its dtype, in or out of torch.autocast as before"
            )
        self.core.step(key_states, value_states)
        return self.handle, self.handle

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """The capacity: a mask that Transformers makes has the same shape at every step. It is not read."""
        return self.core.capacity, 0

    def get_seq_length(self) -> torch.Tensor:  # type: ignore[override]
        """Columns seen so far, padding included; on the device, as in every cache that can be compiled."""
        return self.core.columns[0]

    def get_max_length(self) -> int:
        """The capacity."""
        return self.core.capacity

    get_max_cache_shape = get_max_length  # its name before Transformers 5.10

    def reset(self) -> None:
        """Forget all tokens; the buffers stay where they are."""
        self.core.reset()


def _kind(keys: torch.Tensor, values: torch.Tensor) -> tuple[int, int, int, torch.dtype, torch.dtype]:
    return keys.shape[1], keys.shape[3], values.shape[3], keys.dtype, values.dtype


def _refused(operation: str) -> Any:
    def refuse(self: StaticKVCache, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(
            f"a frozen cache has no {operation}: its rows and buffers stay where they are; use the kvbits.KVCache that "
            "it was made from (for beams, drafts and selected rows), and freeze it afterwards"
        )

    refuse.__name__ = operation
    return refuse


class StaticKVCache(OfModel):
    """Made by :func:`freeze`.

    Attributes:
        scheme: what packed layers are stored by.
        capacity: columns that each row can hold, padding included.
        tokens: ids that had been read when it was frozen, as :attr:`KVCache.tokens`.
    """

    layers: list[FrozenLayer]  # type: ignore[assignment]  # Transformers' may mix several types, and these do not

    def __init__(self, cache: KVCache, capacity: int) -> None:
        super().__init__([*_frozen_layers(cache, capacity)], cache.model)
        self.scheme, self.capacity, self.tokens = cache.scheme, capacity, cache.tokens
        self._forward_of: int | None = None
        self._text = cache.columns.rows.valid
        device = self.layers[0].core.keys.device
        if device.type == "cuda" and (reasons := why_triton_is_off(device)):
            warnings.warn(
                f"a frozen cache runs on the reference kernel here, which waits for {device} at each step and cannot "
                f"be captured in a CUDA graph: the Triton kernel does not run, {', '.join(reasons)}",
                RuntimeWarning,
                stacklevel=3,
            )
        for layer in self.layers:
            for x in layer.core.buffers:
                if x.is_cuda:  # else torch.compile(mode="reduce-overhead") would refuse to capture what is written to
                    torch._dynamo.mark_static_address(x)

    def __deepcopy__(self, memo: dict[int, Any]) -> StaticKVCache:
        memo[id(self)] = twin = object.__new__(type(self))
        with torch.inference_mode(False), torch.no_grad():  # copies made in that mode could not be written to outside
            vars(twin).update(copy.deepcopy(vars(self), memo))
        return twin

    def __copy__(self) -> StaticKVCache:
        return copy.deepcopy(self)  # two that share their buffers would step each other

    def __repr__(self) -> str:
        return f"StaticKVCache({self.scheme}, {len(self.layers)} layers, {self.columns} of {self.capacity} tokens)"

    @property
    def columns(self) -> int:
        """Columns of a row that the host knows of."""
        return self.layers[0].core.tokens

    def advance(self, steps: int | None = None) -> None:
        """Pack what is due, between two forwards. The exact slots take ``block`` tokens before that has to be.

        Args:
            steps: forwards since the last call. None asks the device, which on a GPU waits for it; then a call more
                does no harm.

        Raises:
            ValueError: for less than 0 steps; beyond the capacity; where the device has counted other steps than those
                that were told; or if a value to be packed is not finite.
            RuntimeError: if a forward was interrupted; what it had stored is taken back.
        """
        if steps is not None:
            if not isinstance(steps, int) or steps < 0:
                raise ValueError(
                    f"advance takes a number of forwards, 0 or more, or None to ask the device, not {steps!r}"
                )
            columns = self.columns + steps
        else:
            held = torch.cat([layer.core.columns for layer in self.layers]).tolist()
            columns = min(held)
            if max(held) != columns or (self._forward_of is not None and columns != self.columns):
                self.take_back()
                raise RuntimeError(
                    "a forward was interrupted, or reached some layers only; what it had stored was taken back just "
                    f"now, and the cache holds {self.columns} columns again: repeat that call"
                )
        for layer in self.layers:
            layer.core.count(columns)
        for layer in self.layers:
            layer.core.pack()

    def make_room(self, steps: int | None = None) -> None:
        """As :meth:`advance`, before a forward that needs room for one token more."""
        self.advance(steps)
        if self.columns >= self.capacity:
            raise ValueError(
                f"the capacity of {self.capacity} tokens is full; freeze the cache with more, "
                f"kvbits.freeze(cache, {2 * self.capacity}) for one"
            )

    def refuse_mask(self, mask: Any) -> None:
        """Check the mask of a forward that is not compiled: none is read, so there must be nothing to read in it.

        Raises:
            ValueError: for a 2-D mask ``[B, columns]`` of other text than that of the rows and one token more of each,
                and for a 4-D mask that is none of those that Transformers makes, of the whole capacity.
        """
        if not isinstance(mask, torch.Tensor) or (mask.ndim == 4 and mask.shape[-1] == self.capacity):
            return
        shape = self.layers[0].core.keys.shape[0], self.columns + 1
        if mask.ndim != 2 or tuple(mask.shape) != shape:
            raise ValueError(
                f"attention_mask {tuple(mask.shape)} must cover the columns in the frozen cache and the new one, "
                f"{shape}; pass that or none"
            )
        text = mask != 0
        if not bool(text[:, -1].all()):
            raise ValueError(
                "attention_mask calls a new token padding; a frozen cache takes one token of text in each row"
            )
        known = torch.ones_like(text)
        if self._text is not None:
            known[:, : self._text.shape[1]] = self._text
        if not torch.equal(text, known):
            raise ValueError(
                "attention_mask calls other columns text than the calls before it did; a token of a frozen cache sees "
                "all text of its row. Use the kvbits.KVCache for masks that hide some of it. (Where generate is given "
                "none it makes one, in which pad_token_id is padding: pass a mask of ones where it is text)"
            )

    def begin(self, forward_of: int) -> None:
        """A forward begins that is not compiled: of the model ``forward_of`` (its hook's id), or of one inside it."""
        self.make_room()
        if self._forward_of is None:
            self._forward_of = forward_of

    def end(self, forward_of: int, failed: bool) -> None:
        """It ends. One that neither ends nor fails was interrupted, even where it had reached all layers."""
        if failed:
            self.take_back()
        elif forward_of == self._forward_of:
            self._forward_of = None

    def take_back(self) -> None:
        """Forget what was stepped since :meth:`advance`; the model's hooks call it where a forward fails.

        Raises:
            RuntimeError: if several steps have overwritten what a window would see again; nothing has changed then.
        """
        for layer in self.layers:
            if isinstance(layer.core, RingLayer):
                layer.core.refuse_take_back()
        self._forward_of = None
        for layer in self.layers:
            layer.core.take_back()

    def reset(self) -> None:
        """Forget all tokens; the buffers stay where they are."""
        for layer in self.layers:
            layer.reset()
        self._text = None
        self.tokens = self.tokens[:, :0]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        """As in every Transformers cache. Raises ValueError for a layer that this cache does not have."""
        if layer_idx >= len(self.layers):
            raise ValueError(
                f"this cache was made for a model of {len(self.layers)} layers and got layer {layer_idx}; use it with "
                "that very model"
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    @property
    def nbytes(self) -> int:
        """Bytes allocated, the room for later tokens included."""
        return sum(layer.core.nbytes for layer in self.layers)

    reorder_cache, crop = _refused("reorder_cache"), _refused("crop")
    batch_repeat_interleave, batch_select_indices = (
        _refused("batch_repeat_interleave"),
        _refused("batch_select_indices"),
    )
    offload = prefetch = _refused("offloading")


def freeze(cache: KVCache, capacity: int) -> StaticKVCache:
    """A cache of fixed capacity that goes on from what ``cache`` holds, in buffers that never move.

    For forwards of one token, which ``torch.compile(model.forward, fullgraph=True)`` takes whole, and CUDA graphs can
    capture. The old cache is copied, not changed; drop it to have its memory back.

    Args:
        cache: from :func:`kvbits.cache_for`, and it has read a prompt (all but its last token, for ``generate``).
        capacity: columns that each row can hold, those of ``cache`` included. Memory for them is taken now.

    Raises:
        TypeError: for another kind of cache, or a capacity that is no whole number.
        ValueError: if the cache is empty or holds more than ``capacity``, or if a layer cannot be frozen: packed
            sliding windows, layers with other states than keys and values, chunked attention, or what
            :func:`kvbits.layer.frozen.why_not` names.
    """
    if type(cache) is not KVCache:
        raise TypeError(f"freeze takes a kvbits.KVCache, not {type(cache).__name__}; make one with kvbits.cache_for")
    if isinstance(capacity, bool) or not hasattr(capacity, "__index__"):
        raise TypeError(f"capacity={capacity!r} is no number of tokens: give an int, such as 4096")
    cache.settle()
    if not cache.packed_layers:
        raise ValueError(
            "no layer of this cache is packed: take Transformers' StaticCache, or pass sliding=True to kvbits.cache_for"
        )
    if not cache.columns.rows.columns:
        raise ValueError("the cache is empty: let it read a prompt before it is frozen, all but its last token")
    return StaticKVCache(cache, operator.index(capacity))


def _frozen_layers(cache: KVCache, capacity: int) -> list[FrozenLayer]:
    rows = cache.columns.rows
    if rows.columns > capacity:
        raise ValueError(f"the cache holds {rows.columns} tokens, more than the capacity of {capacity}")
    layers = []
    for index, (layer, kind) in enumerate(zip(cache.layers, _kinds(cache), strict=True)):
        name = f"layer {index}"
        core: FrozenLayerCache | RingLayer
        if isinstance(layer, PackedLayer) and not _is_exact(layer):
            if reasons := why_not(layer.core):
                raise ValueError(f"{name} cannot be frozen: {', '.join(reasons)}")
            core = FrozenLayerCache(layer.core, capacity)
        elif isinstance(layer, PackedLayer) or type(layer) in ATTENTION:
            if "chunked" in kind:
                raise ValueError(f"{name} cannot be frozen: it attends to chunks ({kind})")
            if layer.keys is None or layer.values is None:
                raise ValueError(f"{name} cannot be frozen: it is empty")
            window = layer.core.window if isinstance(layer, PackedLayer) else getattr(layer, "sliding_window", None)
            text = None if rows.valid is None else rows.valid[:, rows.columns - layer.keys.shape[2] :]
            core = RingLayer(layer.keys, layer.values, text, rows.columns, window or capacity, capacity)
        else:
            raise ValueError(f"{name} cannot be frozen: it is a {type(layer).__name__}")
        layers.append(FrozenLayer(core, name, bool(layer.is_sliding)))
    return layers


def _is_exact(layer: PackedLayer) -> bool:
    """Whether nothing is lost in a ring of what the layer holds."""
    scheme = layer.core.scheme
    return scheme.is_exact


def _kinds(cache: KVCache) -> list[str]:
    """What the model calls the attention of its layers, where it says."""
    config = None if cache.model is None else cache.model.config.get_text_config(decoder=True)
    return list(getattr(config, "layer_types", None) or [""] * len(cache.layers))
