"""Whether a speed measurement fits in memory, said before it starts: estimates from the shapes that a model caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from transformers import DynamicCache, PreTrainedModel

from kvbits.calibration.plan import available_bytes
from kvbits.hf.names import cache_name
from kvbits.measure.caches import EXACT, PEERS
from kvbits.schemes.scheme import Scheme
from kvbits.store.record import Record
from kvbits.store.room import most_room

_GROUP = 64
"""Elements that share a scale and a zero in Transformers' quantized caches."""


class Layer(NamedTuple):
    """What the exact cache of one layer stores of a token: heads, channels of K and of V.

    A sliding one holds a whole prompt too, until the first step after it, and stays exact.
    """

    heads: int
    key: int
    value: int
    sliding: bool


@dataclass(frozen=True)
class Shapes:
    """What decides how much memory a model's caches and forwards take.

    Attributes:
        layers: those that store keys and values.
        size: bytes of an element.
        vocabulary, hidden, intermediate: widths.
        eager_heads: query heads whose scores are in memory in full, 0 where attention is tiled.
        weights_bytes: parameters and buffers.
    """

    layers: tuple[Layer, ...]
    size: int
    vocabulary: int
    hidden: int
    intermediate: int
    eager_heads: int
    weights_bytes: int

    @staticmethod
    def of(model: PreTrainedModel) -> Shapes:
        """Found by running two tokens through the model."""
        cache = DynamicCache(config=model.config)
        ids = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
        with torch.no_grad():
            model(input_ids=ids, use_cache=True, **{cache_name(model): cache})
        found = []
        for layer in cache.layers:
            keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
            if keys is not None and values is not None and keys.ndim == 4:
                sliding = bool(getattr(layer, "is_sliding", False))
                found.append(Layer(keys.shape[1], keys.shape[-1], values.shape[-1], sliding))
        config = model.config.get_text_config(decoder=True)
        widths = (getattr(config, name, None) for name in ("intermediate_size", "ffn_dim", "n_inner"))
        return Shapes(
            tuple(found),
            model.dtype.itemsize,
            config.vocab_size,
            config.hidden_size,
            next((width for width in widths if isinstance(width, int)), 4 * config.hidden_size),
            config.num_attention_heads if str(config._attn_implementation) in ("eager", "kvbits_eager") else 0,
            sum(x.nbytes for x in (*model.parameters(), *model.buffers())),
        )

    def cache_bytes(self, name: str, batch: int, tokens: int) -> int:
        """About what a cache of that name holds of ``tokens`` in each of ``batch`` rows."""
        if name in PEERS:
            bits = PEERS[name].get("nbits", 8) + 2 * 8 * self.size / _GROUP
            exact = sum(self._exact(layer, batch, tokens) for layer in self.layers)
            residual = sum(self._exact(layer, batch, min(tokens, 128)) for layer in self.layers)
            return int(exact * bits / (8 * self.size)) + residual
        whole = None if name == EXACT else Scheme.parse(name)
        total = 0
        for index, layer in enumerate(self.layers):
            scheme = None if whole is None else whole.for_layer(index, len(self.layers))
            total += self._layer_bytes(scheme, layer, batch, tokens)
        return total

    def _layer_bytes(self, scheme: Scheme | None, layer: Layer, batch: int, tokens: int) -> int:
        if scheme is None or scheme.residual is None or layer.sliding:
            return self._exact(layer, batch, tokens)
        dtype = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[self.size]
        record = Record.of(scheme.key, scheme.value, scheme.block, layer.key, layer.value, dtype)
        room = most_room(scheme.limits(), tokens, batch)
        return int(room.nbytes(self._exact(layer, 1, 1), layer.heads * record.nbytes))

    def _exact(self, layer: Layer, batch: int, tokens: int) -> int:
        return batch * layer.heads * tokens * (layer.key + layer.value) * self.size

    def forward_bytes(self, batch: int, tokens: int, history: int, last_only: bool) -> int:
        """About what a forward of ``tokens`` takes beside the cache: activations, logits, and the scores of eager."""
        activations = batch * tokens * (6 * self.hidden + 3 * self.intermediate) * self.size
        scores = batch * self.eager_heads * tokens * history * (self.size + 4)
        return activations + scores + self.logits_bytes(batch, 1 if last_only else tokens)

    def logits_bytes(self, batch: int, tokens: int) -> int:
        """Of the logits of that many tokens, and once more in float32."""
        return batch * tokens * self.vocabulary * (self.size + 4)


@dataclass(frozen=True)
class Room:
    """What one run needs.

    Attributes:
        batch, context: of the run.
        exact: bytes of one exact cache; there are two.
        others: bytes of all other caches together.
        forward: bytes of the largest forward.
        child: bytes of the process that measures peak memory, with a model of its own; 0 without one.
    """

    batch: int
    context: int
    exact: int
    others: int
    forward: int
    child: int

    @property
    def needed(self) -> int:
        """The most that is in memory at one time above the loaded model."""
        return max(2 * self.exact + self.others + self.forward, self.child)

    def refuse_over(self, available: int) -> None:
        """Raise ValueError, with the figures, where that is more than ``available`` bytes."""
        if self.needed > available:
            raise ValueError(
                f"{self.batch} x {self.context:,} tokens need about {size(self.needed)}: two exact caches of "
                f"{size(self.exact)}, {size(self.others)} for the other caches, {size(self.forward)} for a forward and "
                f"its logits{f', or {size(self.child)} for a second process' if self.child else ''}; only "
                f"{size(available)} of memory are free. Give a shorter --context, a smaller --batch, fewer --schemes "
                "or a --chunk of the prompt"
            )


def room(
    shapes: Shapes, names: Sequence[str], batch: int, context: int, chunk: int | None, last_only: bool, child: bool
) -> Room:
    """What a run of these caches, all in memory together, needs.

    Args:
        shapes: of the model.
        names: the caches beside the exact one.
        batch, context, chunk: as in :class:`kvbits.measure.runner.Reading`.
        last_only: whether the model can keep the logits of the last token alone.
        child: whether peak memory is measured, in a process of its own.
    """
    exact = shapes.cache_bytes(EXACT, batch, context)
    others = sum(shapes.cache_bytes(name, batch, context) for name in names if name != EXACT)
    forward = shapes.forward_bytes(batch, min(chunk or context, context), context, last_only)
    second = 2 * shapes.weights_bytes + exact + forward if child else 0  # loading holds weights twice for a while
    return Room(batch, context, exact, others, forward, second)


def refuse_unless_it_fits(model: PreTrainedModel, rooms: Sequence[Room]) -> None:
    """Raise ValueError for the first run that needs more than is free; where that is not known, nothing is said."""
    available = available_bytes(model.device)
    if available is not None:
        for one in rooms:
            one.refuse_over(available)


def size(count: float) -> str:
    """Bytes in words."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
