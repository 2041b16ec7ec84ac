"""``KVCache``: a Transformers ``Cache`` whose full-attention layers are kvbits layers. Others stay the model's own."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from kvbits.hf.columns import Columns
from kvbits.hf.forwards import Forwards
from kvbits.hf.layer import PackedLayer, columns_to_crop, refuse_offloading
from kvbits.hf.stock import is_croppable, storage_bytes
from kvbits.hf.tokens import TokenIds
from kvbits.numerics.modes import outside_graphs
from kvbits.schemes.scheme import Scheme
from kvbits.store.rows import Rows
from kvbits.types import ByteCount


class OfModel(Cache):
    """A cache that knows its model, which is not kept alive.

    Attributes:
        model: the one that the cache was made for, or that took it while it was empty; None where that is gone.
    """

    def __init__(self, layers: list[Any], model: PreTrainedModel | None) -> None:
        super().__init__(layers=layers)
        self.hand_to(model)

    @property
    def model(self) -> PreTrainedModel | None:
        """See above."""
        return self._model()

    def hand_to(self, model: Any) -> None:
        """An empty cache is another model's from now on."""
        self._model = no_model if model is None else weakref.ref(model)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_model": no_model}  # a weak reference cannot be pickled


class KVCache(OfModel):
    """The KV cache of one model under one scheme. Made by :func:`kvbits.cache_for`.

    Args:
        layers: one per layer of the model: :class:`PackedLayer`, or the model's own type.
        scheme: what the packed layers were made from.
        columns: what they share.
        model: the model, which is not kept alive.

    Attributes:
        unsaved: why a cache of this kind cannot be written to a file; empty where it can.
    """

    unsaved = ""
    layers: list[Any]

    def __init__(self, layers: list[Any], scheme: Scheme, columns: Columns, model: PreTrainedModel) -> None:
        super().__init__(layers, model)
        self.scheme = scheme
        self.columns = columns
        self._unused = {i: copy.deepcopy(x) for i, x in enumerate(layers) if not isinstance(x, PackedLayer)}
        self._forwards = Forwards()

    def __deepcopy__(self, memo: dict[int, Any]) -> KVCache:
        memo[id(self)] = twin = object.__new__(type(self))
        vars(twin).update(copy.deepcopy(vars(self), memo))
        return twin

    def __repr__(self) -> str:
        return f"KVCache({self.scheme}, {len(self.layers)} layers, {self.get_seq_length()} tokens)"

    @outside_graphs
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As in every Transformers cache.

        Raises:
            ValueError: for a layer or a number of rows that this cache does not have, before anything changes.
        """
        if layer_idx >= len(self.layers):
            raise ValueError(
                f"this cache was made for a model of {len(self.layers)} layers and got layer {layer_idx}; use "
                "kvbits.cache_for(model, scheme) with the very model that runs"
            )
        batch, rows = key_states.shape[0], self.columns.rows.batch
        if rows not in (0, batch):
            raise ValueError(f"this cache holds {rows} rows and got {batch}; reset() it or make a new one")
        self._forwards.touch(layer_idx, None)  # if it fails, it may have changed
        result = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        self._forwards.touch(layer_idx, key_states.shape[2])
        return result

    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """As in every Transformers cache (linear attention, state spaces)."""
        self._forwards.touch(layer_idx, None)
        return super().update_conv_state(conv_states, layer_idx, *args, **kwargs)

    def update_recurrent_state(self, recurrent_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """As in every Transformers cache (linear attention, state spaces)."""
        self._forwards.touch(layer_idx, None)
        return super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)

    # -- whole forwards --------------------------------------------------------------------------------------------

    def begin(self, forward_of: int) -> None:
        """A forward begins: of the model ``forward_of`` (its hook's id), or of a decoder inside one that runs already.

        Raises:
            ValueError: if the forward before this one stopped in the middle.
        """
        if self._forwards.is_inside(forward_of):
            return
        self.settle()
        self.columns.void()
        self._forwards.begin(forward_of, self.columns.rows)

    def end(self, forward_of: int, failed: bool) -> None:
        """A forward ends. What one that failed has stored is taken back, so that it can simply be repeated."""
        if forward_of == self._forwards.of:
            self._end(failed)

    def _end(self, failed: bool) -> None:
        if failed and self._forwards.used:
            self.columns.replace(self._forwards.take_back(self.layers))
        elif failed:
            self.reset()
        self._forwards.end(failed)
        for layer in self.packed_layers:
            layer.before = None

    def settle(self) -> None:
        """Refuse to go on from a forward that neither ended nor failed (an interruption), or that was not undone."""
        if self._forwards.interrupted:
            self._end(failed=True)
            if self.usable:
                raise ValueError(
                    "the call before this one was interrupted; what it had stored was taken back just now, and the "
                    f"cache holds {self.get_seq_length()} columns again: repeat that call, or go on from there"
                )
        self._forwards.of = None
        if not self.usable:
            raise ValueError(
                "an earlier call failed halfway and could not be taken back, because layers with a sliding window or "
                "a state of their own have already dropped older tokens; reset() the cache and pass the "
                "whole text again, or make a new one"
            )

    def hold(self, rows: Rows, ids: TokenIds) -> None:
        """Go on from what the layers were given elsewhere."""
        self.columns.rows, self.columns.ids = rows, ids
        self._forwards = Forwards(used=rows.columns > 0)

    # -- operations ------------------------------------------------------------------------------------------------

    @property
    def usable(self) -> bool:
        """Whether the cache can go on; not so after a call that failed and could not be taken back, until ``reset``."""
        return not self._forwards.broken

    @property
    def packed_layers(self) -> list[PackedLayer]:
        """The layers that kvbits stores."""
        return [layer for layer in self.layers if isinstance(layer, PackedLayer)]

    @property
    def nbytes(self) -> ByteCount:
        """Bytes really allocated, by part; ``int(cache.nbytes)`` or ``.total`` is their sum.

        A fork counts the blocks that it refers to, whoever else does; :func:`nbytes_of` counts several caches together.
        Not counted are the ids of what was read (:attr:`tokens`), 4 bytes a column.
        """
        return self._count(None)

    def _count(self, seen: set[int] | None) -> ByteCount:
        count = ByteCount()
        for layer in self.layers:
            if isinstance(layer, PackedLayer):
                count += ByteCount(**layer.core.nbytes(seen))
            else:
                count += ByteCount(other=storage_bytes(layer))
        return count + ByteCount(slack=self.columns.rows.nbytes)

    @property
    def tokens(self) -> torch.Tensor:
        """Ids that the cache has read, int64 ``[B, columns]`` on the CPU; -1 where they are not known."""
        columns = self.columns
        ids = columns.ids.all() if columns.ids.pieces else torch.empty(columns.rows.batch, 0)
        return ids.to("cpu", torch.int64)

    @property
    def bits_per_element(self) -> float:
        """Real bits, all parts included, per stored element of the packed layers; 0 while empty."""
        elements = sum(layer.core.elements for layer in self.packed_layers)
        count = self.nbytes
        return 8 * (count.total - count.other) / elements if elements else 0.0

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row ``i`` becomes what row ``beam_idx[i]`` was, in every layer."""
        self._select(beam_idx, "reorder_cache", beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows ``indices`` (int64, or a bool per row)."""
        indices = torch.as_tensor(indices)
        chosen = indices.nonzero().flatten() if indices.dtype == torch.bool else indices
        self._select(chosen, "batch_select_indices", indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row ``repeats`` times, one copy after the other."""
        index = torch.arange(self.columns.rows.batch).repeat_interleave(repeats)
        self._select(index, "batch_repeat_interleave", repeats)

    def _select(self, index: torch.Tensor, operation: str, argument: Any) -> None:
        self.settle()
        batch = self.columns.rows.batch
        if batch:  # 0 while empty, and where every layer keeps the model's own type
            if bool(((index < -batch) | (index >= batch)).any()):
                raise IndexError(f"rows {index.tolist()} are not all among the {batch} rows of the cache")
            index = index % batch
            self.columns.select(index)
        for layer in self.layers:
            if isinstance(layer, PackedLayer):
                if batch:
                    layer.core.select_rows(index, self.columns.rows)
            elif batch:  # of the three, states of linear attention have this one alone, and it does for all
                layer.reorder_cache(index)
            elif hasattr(layer, operation):
                getattr(layer, operation)(argument)

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last ``-tokens_to_remove`` columns of every layer.

        Cropping into a packed block decodes that block once. Layers of the model's own type crop by their own rules.
        """
        self.settle()
        gone = columns_to_crop(tokens_to_remove, self.columns.rows.columns)
        for layer in self.layers:
            if not isinstance(layer, PackedLayer):
                layer.crop(tokens_to_remove)
        rows = self.columns.rows.crop(gone)
        for layer in self.packed_layers:
            layer.core.crop(gone, rows)
        self.columns.replace(rows)

    def whole(self, columns: int) -> int:
        """How many of the first ``columns`` columns a crop may keep so that no packed block has to be decoded.

        After such a crop nothing is encoded twice. Layers of the model's own type
        that no crop can take back allow all columns or none.

        Raises:
            ValueError: for more than one row, or a padded one.
        """
        rows = self.columns.rows
        if rows.batch > 1 or rows.padded:
            raise ValueError(f"only a cache of one row without padding can be cropped like this, not of {rows.batch}")
        if columns >= rows.columns:
            return rows.columns
        if not all(isinstance(layer, PackedLayer) or is_croppable(layer) for layer in self.layers):
            return 0
        before = columns + 1
        while columns < before:  # where late sinks differ, blocks of one layer end elsewhere than those of another
            before, columns = columns, min(layer.core.whole(columns) for layer in self.packed_layers)
        return columns

    def fork(self) -> KVCache:
        """Another cache that holds the same and goes on by itself, as a copy does.

        Packed blocks are shared for good, also when either of them packs more, so n continuations of a prompt cost one
        prompt; exact tokens and the layers of the model's own type are copied. Forks may run in threads of their own.
        """
        self.settle()
        columns = self.columns.fork()
        layers: list[Any] = []
        for layer in self.layers:
            layers.append(layer.fork(columns) if isinstance(layer, PackedLayer) else copy.deepcopy(layer))
        twin = object.__new__(type(self))
        own = {"layers": layers, "columns": columns, "_forwards": Forwards(self._forwards.used)}
        vars(twin).update({**vars(self), **own})
        return twin

    __copy__ = fork

    offload = prefetch = refuse_offloading

    def reset(self) -> None:
        """Empty every layer; the cache can then hold another batch."""
        self._forwards = Forwards()
        for layer in self.packed_layers:
            layer.reset()
        for index, unused in self._unused.items():  # their own reset keeps the shapes, and before 5.24 zeroed tokens
            fresh: Any = copy.deepcopy(unused)
            if getattr(self.layers[index], "record_past", False):
                fresh.activate_past_recording()
            self.layers[index] = fresh
        self.columns.replace(Rows())


def nbytes_of(caches: Iterable[KVCache]) -> ByteCount:
    """Bytes really allocated by several caches together: what forks share counts once.

    Raises:
        TypeError: for anything else than a :class:`KVCache`.
    """
    seen, total = set[int](), ByteCount()
    for cache in caches:
        if not isinstance(cache, KVCache):
            raise TypeError(f"nbytes_of counts kvbits.KVCache objects, not {type(cache).__name__}; see its own nbytes")
        total += cache._count(seen)
    return total


def no_model() -> None:
    """In place of the reference to a model."""
