"""``SharedCache``: the KV cache of one model whose packed context is spread over several ranks."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from kvbits.files import Calibration
from kvbits.files.fingerprint import digest, weights
from kvbits.hf.attach import Kind, fitted_by, make_cache, refuse_unless_served
from kvbits.hf.cache import KVCache
from kvbits.hf.columns import Columns
from kvbits.hf.handle import Pair
from kvbits.hf.layer import PackedLayer, columns_to_crop
from kvbits.hf.rotation.rotary import Rotaries
from kvbits.hf.tokens import TokenIds
from kvbits.parallel import slices
from kvbits.parallel.layer import SharedLayer
from kvbits.parallel.ranks import TIMEOUT_SECONDS, Ranks
from kvbits.schemes.catalogue import RECOMMENDED
from kvbits.schemes.scheme import RESIDUAL_TOKENS, Scheme
from kvbits.store.shards import RUN_BLOCKS, Shards
from kvbits.tensor_parallel import Heads
from kvbits.transform.rotary import Rotary
from kvbits.types import Params

CHUNK_TOKENS = 4096
"""Of a prompt, read at a time by all ranks together."""


def cache_for(
    model: PreTrainedModel,
    scheme: str | Scheme = RECOMMENDED,
    *,
    mesh: DeviceMesh | dist.ProcessGroup | None = None,
    calibration: str | Path | Calibration | None = None,
    run: int = RUN_BLOCKS,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> SharedCache:
    """A new, empty cache for ``model`` whose packed context is spread over the ranks of ``mesh``.

    Each rank has the same model and makes the same calls with the same ids, ``generate`` among them; each then has the
    same logits. Batches without padding. Layers with a sliding window stay exact, on every rank.

    Args:
        model: as for :func:`kvbits.cache_for`.
        scheme: as there; ``exact`` shares exact blocks.
        mesh: one dimension of a device mesh, or a process group; all processes by default. With tensor parallel it
            is the other dimension of a 2-D mesh.
        calibration: as there.
        run: neighbouring blocks that go to the same rank.
        timeout_seconds: how long ranks wait for each other; see :class:`Ranks`.

    Raises:
        RuntimeError: if ``torch.distributed`` has not been initialized.
        TypeError, ValueError: as there, for a mesh of several dimensions or a ``run`` below 1, and where the ranks
            have different KV heads (a mesh for the context is another dimension than that of tensor parallel), or
            another model, scheme, calibration or ``run`` than each other.
    """
    scheme = Scheme.parse(scheme)
    refuse_unless_served(model)
    ranks = Ranks.of(mesh, timeout_seconds)
    turns = Shards(ranks.rank, ranks.world, run)
    ranks.require_alike("the parts of the KV heads (number, of how many)", *Heads.of(model), device=model.device)
    columns = partial(SharedColumns, ranks, model.device)
    kind = Kind(SharedCache, columns, SharedPackedLayer, partial(_core, ranks, turns))
    cache = cast(SharedCache, make_cache(model, scheme, False, fitted_by(model, scheme, calibration), kind))
    what = "the scheme, run=, and the model, its weights and what a calibration knows of it (by their digests)"
    ranks.require_same(what, f"{scheme}, {run}, {_model_in_words(model, cache)}", device=model.device)
    return cache


def _model_in_words(model: PreTrainedModel, cache: SharedCache) -> str:
    """The class and dtype of a model, and digests of its weights and of what its layers begin with."""
    fitted = [x for layer in cache.shared_layers for params in layer.calibrated for x in params.values()]
    known = digest(torch.cat([x.to("cpu", torch.float32).flatten() for x in fitted]))[:8] if fitted else "none"
    return f"{type(model).__name__} in {model.dtype}, {digest(weights(model))[:8]}, {known}"


def _core(
    ranks: Ranks,
    turns: Shards,
    scheme: Scheme,
    window: int | None,
    name: str,
    rotary: Rotary | None,
    fitted: tuple[Params, Params],
) -> SharedLayer:
    assert window is None, "such layers are never packed here"
    if not scheme.packs:
        scheme = replace(scheme, residual=RESIDUAL_TOKENS)  # what is packed, here as it is, can be shared
    return SharedLayer(scheme, name, rotary, fitted, ranks, turns)


def padded(mask: torch.Tensor | None) -> bool:
    """Whether a mask calls any column padding."""
    return mask is not None and not bool((mask != 0).all())


def _follows(first: int, ids: torch.Tensor, mask: Any, positions: torch.Tensor | None) -> bool:
    """Whether ``ids [B, n]`` are columns from ``first`` on, with the mask and the positions that a model would take."""
    last = first + ids.shape[1]
    whole = mask is None or (isinstance(mask, torch.Tensor) and tuple(mask.shape) == (len(ids), last))
    if not whole or padded(mask):
        return False
    columns = torch.arange(first, last, device=ids.device)
    return positions is None or (positions.shape[-1:] == columns.shape and bool((positions == columns).all()))


class SharedColumns(Columns):
    """As :class:`Columns`, and sees to it that all ranks read the same.

    Attributes:
        chunk: the ids ``[B, q]`` of which each rank reads a slice in the call to come; None where each reads them all.
    """

    def __init__(
        self, ranks: Ranks, device: torch.device, rotaries: Rotaries | None = None, strict: bool = False
    ) -> None:
        super().__init__(rotaries, strict)
        self.ranks, self.device = ranks, device
        self.chunk: torch.Tensor | None = None

    def place(self, positions: torch.Tensor | None) -> None:
        """As there; slices of a chunk, which each rank places for itself, are together where the model would count."""
        super().place(positions if self.chunk is None else None)

    def begin(self, mask: torch.Tensor | None, ids: torch.Tensor | None = None) -> None:
        """Announce a forward.

        Raises:
            ValueError: on every rank, for padding, for more than ids, or where ranks read different ids.
        """
        if not self.waiting:
            ids = ids if self.chunk is None else self.chunk
            self._require_alike(mask, ids)
        super().begin(mask, ids)

    def _require_alike(self, mask: torch.Tensor | None, ids: torch.Tensor | None) -> None:
        refusal = None
        if ids is None:
            refusal = (
                "a shared context is read from input_ids alone: no embeddings, no pictures and no mask of one's own"
            )
        elif padded(mask):
            refusal = (
                "a shared context has no padding: pass prompts of one length, or one by one (attention_mask all ones)"
            )
        try:  # also by a rank that refuses: others may not, and would wait for it
            self._compare(ids, refusal is not None)
        except ValueError:
            if refusal is None:
                raise
        if refusal is not None:
            raise ValueError(refusal)

    def _compare(self, ids: torch.Tensor | None, refused: bool) -> None:
        ids = torch.empty(0, 0) if ids is None else ids
        checksum = zlib.crc32(ids.detach().to("cpu", torch.int64).contiguous().numpy().tobytes())
        self.ranks.require_alike(
            "the columns held, the shape and checksum of the new ids, and whether this rank refuses the call,",
            self.rows.columns, *ids.shape, checksum, int(refused), device=self.device,
        )  # fmt: skip

    def fork(self) -> Columns:
        """The same for another cache."""
        twin = SharedColumns(self.ranks, self.device, self.rotaries, self.strict)
        twin.rows, twin.ids = self.rows, TokenIds(*self.ids.pieces)
        return twin


class SharedPackedLayer(PackedLayer):
    """The Transformers face of one :class:`SharedLayer`."""

    core: SharedLayer

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new columns, those of all ranks where each computed a slice, and return what attention sees."""
        if not self.core.sliced:
            return super().update(key_states, value_states, *args, **kwargs)
        ranks = self.core.ranks
        view = self.take(ranks.gather_tokens(key_states), ranks.gather_tokens(value_states))
        return Pair(self.core.view() if view is None else view, self.trace).handles()


class SharedCache(KVCache):
    """The cache of one rank. Made by :func:`cache_for`.

    ``nbytes`` are those of this rank. Forks, selection of rows (beam search) and crops that cut no packed block work,
    where all ranks call them alike.
    """

    unsaved = (
        "this cache holds one rank's share of a context, and a file holds a whole one; save the ids "
        "(cache.tokens) and read them again, or use a cache of kvbits.cache_for"
    )

    columns: SharedColumns

    def __repr__(self) -> str:
        ranks = self.columns.ranks
        return f"SharedCache({self.scheme}, rank {ranks.rank} of {ranks.world}, {self.get_seq_length()} tokens)"

    @property
    def shared_layers(self) -> list[SharedLayer]:
        """The layers whose blocks are spread."""
        return [cast(SharedLayer, layer.core) for layer in self.packed_layers]

    @contextmanager
    def slices_of(self, chunk: torch.Tensor, hold: bool = False) -> Iterator[None]:
        """Let each rank compute its slice of the ids ``chunk [B, world * t]`` in the one call within.

        Args:
            chunk: the same on all ranks.
            hold: pack none of it before the call after, which reads the rest of the same chunk and sees it exact.
        """
        self.columns.chunk = chunk
        for layer in self.shared_layers:
            layer.sliced = True
            layer.hold(hold)
        try:
            yield
        finally:
            self.columns.chunk = None
            for layer in self.shared_layers:
                layer.sliced = False
                layer.hold(False)

    def read_ahead(
        self,
        model: PreTrainedModel,
        ids: torch.Tensor,
        keep: int,
        mask: torch.Tensor | None,
        positions: torch.Tensor | None,
    ) -> int:
        """See :meth:`KVCache.read_ahead`: each rank computes its slice of the prompt, as :func:`prefill` does.

        Not of a call that is not plain text behind what is held: it is made as it is, and refused where it is wrong.
        """
        usual = self.columns.chunk is None and not slices.why_not(model, self)
        if not usual or not _follows(self.get_seq_length(), ids, mask, positions):
            return 0
        return slices.read(model, ids, self, CHUNK_TOKENS, keep)

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last ``-tokens_to_remove`` columns.

        Raises:
            ValueError: if that cuts through a packed block; nothing has changed then.
        """
        gone = columns_to_crop(tokens_to_remove, self.columns.rows.columns)
        for layer in self.shared_layers:
            layer.refuse_crop(gone)
        super().crop(tokens_to_remove)
