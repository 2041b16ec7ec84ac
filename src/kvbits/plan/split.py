"""What each of several devices holds.

* ``pipeline``: each has consecutive layers, with their weights and their part of the cache, as even in number as can
  be. The first has the table of tokens, the last the matrix of logits, and a copy of the table where the two are one.
* ``tensor``: each has all layers, and its share of the KV heads, of the query heads and of every matrix. Where there
  are fewer KV heads than devices, heads are there more than once; a latent (one head) is there on every device.
* ``context``: each has all weights and all exact tokens, and every so many runs of the packed blocks.

All three run: the first two where Transformers spreads a model (``device_map``, ``tp_plan``), the third is
:mod:`kvbits.parallel`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from kvbits.plan.shapes import Layer, Shape, Weights, Widths
from kvbits.store.shards import ALONE, RUN_BLOCKS, Shards

SPLITS = ("pipeline", "tensor", "context")
MOST_DEVICES = 4096


@dataclass(frozen=True)
class Share:
    """What one device has to do.

    Attributes:
        shape: its part of the model.
        first: its first layer, for schemes that name layers.
        shards: which packed blocks it holds.
    """

    shape: Shape
    first: int = 0
    shards: Shards = ALONE

    def tokens(self, tokens: int) -> int:
        """Of so many of a prompt, those that it computes."""
        return -(-tokens // self.shards.world)


def shares(shape: Shape, devices: int, split: str) -> list[Share]:
    """The devices' shares, in order.

    Raises:
        ValueError: for a number of devices, or a way to split, that there is not, or more devices than layers.
    """
    if split not in SPLITS:
        raise ValueError(f"--split {split} is unknown; allowed are {', '.join(SPLITS)}")
    if not 1 <= devices <= MOST_DEVICES:
        raise ValueError(f"--devices {devices} is no number of devices; give 1 to {MOST_DEVICES:,}")
    if devices == 1:
        return [Share(shape)]
    by: dict[str, Callable[[Shape, int], list[Share]]] = {
        "pipeline": _pipeline, "tensor": _tensor, "context": _context,
    }  # fmt: skip
    return by[split](shape, devices)


def _even(count: int, devices: int) -> list[int]:
    return [count // devices + (index < count % devices) for index in range(devices)]


def _pipeline(shape: Shape, devices: int) -> list[Share]:
    count = len(shape.layers)
    if devices > count:
        raise ValueError(f"{count} layers cannot be split over {devices} devices; give {count} or fewer, or tensor")
    found, first = [], 0
    for index, layers in enumerate(_even(count, devices)):
        weights = shape.weights
        if weights is not None:
            last = index == devices - 1
            head = weights.head or (weights.table if last else 0)
            weights = replace(
                weights, embedding=weights.embedding if index == 0 else 0, head=head if last else 0,
                layers=weights.layers[first : first + layers], file_bytes=None,
            )  # fmt: skip
        found.append(Share(replace(shape, layers=shape.layers[first : first + layers], weights=weights), first))
        first += layers
    return found


def _tensor(shape: Shape, devices: int) -> list[Share]:
    weights, widths = shape.weights, shape.widths
    if weights is not None:
        weights = Weights(
            -(-weights.embedding // devices), tuple(-(-x // devices) for x in weights.layers),
            -(-weights.head // devices), weights.table, None, weights.bits,
        )  # fmt: skip
    if widths is not None:
        whole = (widths.intermediate, widths.query, widths.vocabulary, widths.expanded)
        widths = Widths(widths.hidden, *(-(-width // devices) for width in whole))
    kinds, found = set(shape.layers), []
    made: dict[tuple[Layer, ...], Share] = {}  # many devices, few that differ
    for index in range(devices):
        part = {layer: _part_of_layer(layer, index, devices) for layer in kinds}
        one = tuple(part.values())
        if one not in made:
            layers = tuple(part[layer] for layer in shape.layers)
            made[one] = Share(replace(shape, layers=layers, weights=weights, widths=widths))
        found.append(made[one])
    return found


def _part_of_layer(layer: Layer, index: int, devices: int) -> Layer:
    attention = layer.attention
    if attention is None:
        rows, tokens = -(-layer.row_bytes // devices), -(-layer.token_bytes // devices)
        return replace(layer, row_bytes=rows, token_bytes=tokens)
    heads = max(1, _even(attention.heads, devices)[index])
    part = replace(attention, heads=heads)
    other = layer.token_bytes - attention.token_bytes  # of a cache of the model's own making, beside K and V
    return replace(
        layer, attention=part, token_bytes=part.token_bytes + other,
        source_token_bytes=-(-layer.source_token_bytes // devices),
    )  # fmt: skip


def _context(shape: Shape, devices: int) -> list[Share]:
    if shape.encodes:
        raise ValueError(f"{shape.name} has an encoder, and kvbits.parallel shares the context of decoders only; "
                         "split it by pipeline or tensor")  # fmt: skip
    return [Share(shape, shards=Shards(rank, devices, RUN_BLOCKS)) for rank in range(devices)]
