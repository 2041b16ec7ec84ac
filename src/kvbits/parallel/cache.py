"""``SharedCache``: the KV cache of one model whose packed context is spread over several ranks.

A long prompt is read by all ranks together. A chunk of it is cut into one slice for each rank. Layer by layer, ranks
exchange the exact keys and values of their slices, so each holds those of one chunk; their queries visit all ranks for
the packed history; and each attends to the chunk itself for its own slice. Beside the cache a rank needs room for one
chunk of one layer, however long the prompt; for the last chunk, of all layers, where some tokens of it are left that
make no slices.
"""

from __future__ import annotations

import inspect
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
from kvbits.hf.attach import Parts, fitted_by, make_cache, refuse_unless_served
from kvbits.hf.cache import KVCache
from kvbits.hf.layer import PackedLayer, columns_to_crop
from kvbits.hf.names import cache_name
from kvbits.parallel.columns import SharedColumns, padded
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

_CHANGING = ("dynamic", "longrope")
"""Rotary embeddings whose frequencies follow the longest position of a call, of which each rank sees its own."""


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
    shards = Shards(ranks.rank, ranks.world, run)
    ranks.require_alike("the parts of the KV heads (number, of how many)", *Heads.of(model), device=model.device)
    columns = partial(SharedColumns, ranks, model.device)
    parts = Parts(SharedCache, columns, SharedPackedLayer, partial(_core, ranks, shards))
    cache = cast(SharedCache, make_cache(model, scheme, False, fitted_by(model, scheme, calibration), parts))
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
    shards: Shards,
    scheme: Scheme,
    window: int | None,
    name: str,
    rotary: Rotary | None,
    fitted: tuple[Params, Params],
) -> SharedLayer:
    assert window is None, "such layers are never packed here"
    if not scheme.packs:
        scheme = replace(scheme, residual=RESIDUAL_TOKENS)  # what is packed, here as it is, can be shared
    return SharedLayer(scheme, name, rotary, fitted, ranks, shards)


def _follows(first: int, ids: torch.Tensor, mask: Any, positions: torch.Tensor | None) -> bool:
    """Whether ``ids [B, n]`` are columns from ``first`` on, with the mask and the positions that a model would take."""
    last = first + ids.shape[1]
    whole = mask is None or (isinstance(mask, torch.Tensor) and tuple(mask.shape) == (len(ids), last))
    if not whole or padded(mask):
        return False
    columns = torch.arange(first, last, device=ids.device)
    return positions is None or (positions.shape[-1:] == columns.shape and bool((positions == columns).all()))


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
        return self.seen(self.core.view() if view is None else view)


class SharedCache(KVCache):
    """The cache of one rank. Made by :func:`cache_for`.

    ``nbytes`` are those of this rank. Forks, selection of rows (beam search) and crops between packed blocks work,
    where all ranks call them alike.
    """

    unsaved = (
        "this cache holds one rank's shard of a context, and a file holds a whole one; save the ids "
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

    def why_no_slices(self, model: PreTrainedModel) -> str | None:
        """The reason why ranks cannot read slices for ``model``, or None."""
        others = [index for index, layer in enumerate(self.layers) if layer not in self.packed_layers]
        if others:
            return (
                f"layers {others} of this model keep the model's own type (a window or a state), which a slice of the "
                "text does not fill"
            )
        if "position_ids" not in inspect.signature(model.forward).parameters:
            return f"{type(model).__name__} takes no position_ids, so no slice can be told where it stands"
        rope = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
        kinds = {str(x) for part in (rope, *rope.values()) if isinstance(part, dict) and (x := part.get("rope_type"))}
        if changing := kinds & set(_CHANGING):
            return (
                f"the rotary embedding is {', '.join(changing)}: its frequencies follow the length of the text, and "
                "those of slices would differ"
            )
        return None

    def read(self, model: PreTrainedModel, ids: torch.Tensor, chunk_tokens: int, keep: int = 0) -> int:
        """Read as much of ``ids [B, T]`` as makes slices of one length: all but fewer tokens than ranks.

        The rest of the last chunk is for the call after this, and sees the slices of that chunk exact.

        Args:
            model: see :func:`kvbits.parallel.prefill`.
            ids: the whole text.
            chunk_tokens: read at a time by all ranks together, rounded down to a multiple of their number.
            keep: so many ids at the end are not read in any case.

        Returns:
            How many columns have been read.
        """
        world, total = self.columns.ranks.world, ids.shape[1]
        done, most = 0, chunk_tokens // world
        while each := min(most, (total - keep - done) // world):
            after = done + each * world
            self._read_slice(model, ids[:, done:after], hold=after < total <= done + most * world)
            done = after
        return done

    def _read_slice(self, model: PreTrainedModel, chunk: torch.Tensor, hold: bool) -> None:
        ranks, each = self.columns.ranks, chunk.shape[1] // self.columns.ranks.world
        first = ranks.rank * each
        positions = torch.arange(first, first + each, device=chunk.device) + self.get_seq_length()
        with self.slices_of(chunk, hold):
            self.run(model, chunk[:, first : first + each], positions[None])

    @torch.no_grad()
    def run(self, model: PreTrainedModel, ids: torch.Tensor, positions: torch.Tensor | None = None) -> None:
        """Run the model on ``ids [B, n]``, at ``positions [1, n]`` of a slice, for its keys and values."""
        options: dict[str, Any] = {cache_name(model): self, "use_cache": True}
        if "logits_to_keep" in inspect.signature(model.forward).parameters:
            options["logits_to_keep"] = 1
        if positions is not None:
            options["position_ids"] = positions
            # Four dimensions: Transformers takes it for a mask that is ready, and makes none of slice x context.
            # Attention over a shared context needs none.
            options["attention_mask"] = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=ids.device)
        model(input_ids=ids, **options)

    def read_ahead(
        self,
        model: PreTrainedModel,
        ids: torch.Tensor,
        keep: int,
        mask: torch.Tensor | None,
        positions: torch.Tensor | None,
    ) -> int:
        """See :class:`kvbits.hf.announce.ReadsAhead`: each rank computes its slice of the prompt, as in ``prefill``.

        A call of anything else than plain text behind the cache's is made as it is, and refused where it is wrong.
        """
        usual = self.columns.chunk is None and not self.why_no_slices(model)
        if not usual or not _follows(self.get_seq_length(), ids, mask, positions):
            return 0
        return self.read(model, ids, CHUNK_TOKENS, keep)

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last ``-tokens_to_remove`` columns.

        Raises:
            ValueError: if that cuts through a packed block; nothing has changed then.
        """
        gone = columns_to_crop(tokens_to_remove, self.columns.rows.columns)
        for layer in self.shared_layers:
            layer.refuse_crop(gone)
        super().crop(tokens_to_remove)
