"""What of a model bears on memory: for each layer what it keeps of a token, and how many weights there are.

A :class:`Shape` is made from a Transformers config (:mod:`kvbits.plan.models`), from the header of a GGUF file
(:mod:`kvbits.plan.gguf`) or from numbers (:func:`of_numbers`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import groupby
from typing import Any

import torch

MOST_LAYERS, MOST_HEADS, MOST_CHANNELS = 10_000, 100_000, 65_536
"""Above these a number of the user's is a slip."""


@dataclass(frozen=True)
class Attention:
    """The keys and values that one layer hands to its cache.

    Attributes:
        heads: KV heads.
        key_channels, value_channels: of a head. In multi-head latent attention the latent and the rotated part of the
            keys stand in their places (one head), as in Transformers.
        key_dtype, value_dtype: of exact ones.
        window: tokens that the layer sees back to, its own included; None is all of them.
    """

    heads: int
    key_channels: int
    value_channels: int
    key_dtype: torch.dtype
    value_dtype: torch.dtype
    window: int | None = None

    @property
    def channels(self) -> int:
        """Elements of K and V of one token."""
        return self.heads * (self.key_channels + self.value_channels)

    @property
    def token_bytes(self) -> int:
        """Bytes of exact K and V of one token."""
        key, value = (self.key_channels, self.key_dtype), (self.value_channels, self.value_dtype)
        return self.heads * sum(channels * dtype.itemsize for channels, dtype in (key, value))


@dataclass(frozen=True)
class Layer:
    """One layer of the model's cache.

    Attributes:
        attention: what kvbits can store of it; None of layers that keep the model's own type whatever the scheme
            (linear attention, state spaces, attention to a picture).
        fixed_bytes: of the model's own type before it holds anything.
        row_bytes: that it holds for each row of a batch, however long the text (states).
        token_bytes: that it holds for each token of a row; with ``attention``, its keys and values.
        source_token_bytes: that it holds for each token of an encoder's text (cross-attention).
    """

    attention: Attention | None
    fixed_bytes: int = 0
    row_bytes: int = 0
    token_bytes: int = 0
    source_token_bytes: int = 0


@dataclass(frozen=True)
class Weights:
    """Parameters of a model, by where they lie.

    Attributes:
        embedding: the table of tokens, with all that stands outside the layers (last norm, vision tower, encoder).
        layers: of each layer.
        head: the matrix of logits; 0 where the table of tokens serves for it.
        table: the table of tokens alone.
        file_bytes: of the files that the weights are in; None where they are not at hand.
        bits: per weight, that the model itself says (a quantized checkpoint); None is the plan's.
    """

    embedding: int
    layers: tuple[int, ...]
    head: int
    table: int = 0
    file_bytes: int | None = None
    bits: float | None = None

    @property
    def total(self) -> int:
        """All of them."""
        return self.embedding + sum(self.layers) + self.head


@dataclass(frozen=True)
class Widths:
    """What the activations of a forward are made of, for the peak of reading a prompt: elements of one token.

    Attributes:
        hidden: of the residual stream.
        intermediate: of the widest MLP; of the experts that a token goes through together.
        query: of all query heads.
        vocabulary: logits.
        expanded: keys and values of all query heads, where a call makes them of every latent in the cache; else 0.
    """

    hidden: int
    intermediate: int
    query: int
    vocabulary: int
    expanded: int = 0


@dataclass(frozen=True)
class Shape:
    """A model, as far as memory is concerned.

    Attributes:
        name: what the user called it.
        layers: of its cache, in order.
        dtype: that it is made for.
        weights, widths: None where only the cache is known.
        trained: tokens that it was made for, if it says so.
        source: where this was read.
        refusal: why kvbits does not serve it; its own exact cache can be planned.
        unrotatable: why no scheme can store its keys before their rotary embedding; None if one can, or nobody looked.
        encodes: whether it has an encoder, whose text its layers hold, too.
        eager: whether Transformers computes its attention with a matrix of scores, for want of sdpa.
        notes: what a reader should know of the figures.
    """

    name: str
    layers: tuple[Layer, ...]
    dtype: torch.dtype = torch.bfloat16
    weights: Weights | None = None
    widths: Widths | None = None
    trained: int | None = None
    source: str = "numbers"
    refusal: str | None = None
    unrotatable: str | None = None
    encodes: bool = False
    eager: bool = False
    notes: tuple[str, ...] = field(default=())

    def kinds(self) -> dict[Attention | None, int]:
        """How many layers of each kind there are, the most frequent first."""
        return dict(Counter(layer.attention for layer in self.layers).most_common())


def to_json(shape: Shape) -> dict[str, Any]:
    """Plain JSON data of a shape in which every exact element has the shape's dtype; :func:`from_json` reads it."""
    data = {field.name: getattr(shape, field.name) for field in fields(Shape)}
    data["dtype"] = str(shape.dtype).removeprefix("torch.")
    data["layers"] = [[len(list(run)), _layer_to_json(layer)] for layer, run in groupby(shape.layers)]
    data["notes"] = list(shape.notes)
    data["widths"] = None if shape.widths is None else asdict(shape.widths)
    if shape.weights is not None:
        runs = [[len(list(run)), number] for number, run in groupby(shape.weights.layers)]
        data["weights"] = {**asdict(shape.weights), "layers": runs}
    return data


def _layer_to_json(layer: Layer) -> dict[str, Any]:
    data = asdict(layer)
    if layer.attention is not None:
        assert layer.attention.key_dtype == layer.attention.value_dtype
        data["attention"] = {name: x for name, x in data["attention"].items() if not name.endswith("dtype")}
    return data


def from_json(data: Mapping[str, Any], dtype: torch.dtype | None = None) -> Shape:
    """Inverse of :func:`to_json`; in another dtype, if one is given, for shapes without states beside K and V."""
    own = getattr(torch, data["dtype"])
    dtype = dtype or own
    layers: list[Layer] = []
    for count, one in data["layers"]:
        attention = None
        if one["attention"] is not None:
            attention = Attention(**one["attention"], key_dtype=dtype, value_dtype=dtype)
            one = {**one, "token_bytes": attention.token_bytes}
        assert dtype == own or not one["row_bytes"]
        layers += [Layer(**{**one, "attention": attention})] * count
    weights = widths = None
    if data["weights"] is not None:
        runs = tuple(number for count, number in data["weights"]["layers"] for _ in range(count))
        weights = Weights(**{**data["weights"], "layers": runs})
    if data["widths"] is not None:
        widths = Widths(**data["widths"])
    read = {"layers": tuple(layers), "dtype": dtype, "weights": weights, "widths": widths}
    return Shape(**{**data, **read, "notes": tuple(data["notes"])})


def of_numbers(
    layers: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    parameters: int | None = None,
) -> Shape:
    """A model of equal layers of full attention.

    Args:
        layers, kv_heads, head_dim: of the model.
        value_dim: channels of a head of values, where they differ from those of keys.
        dtype: of exact keys and values.
        parameters: weights of the model, if they are to be counted.

    Raises:
        ValueError: for numbers that no model has.
    """
    value_dim = head_dim if value_dim is None else value_dim
    for name, number, most in (
        ("layers", layers, MOST_LAYERS),
        ("kv-heads", kv_heads, MOST_HEADS),
        ("head-dim", head_dim, MOST_CHANNELS),
        ("value-dim", value_dim, MOST_CHANNELS),
    ):
        if not 1 <= number <= most:
            raise ValueError(f"--{name} {number} is no size of a model; give 1 to {most:,}")
    attention = Attention(kv_heads, head_dim, value_dim, dtype, dtype)
    layer = Layer(attention, token_bytes=attention.token_bytes)
    weights = None if parameters is None else spread(parameters, layers)
    return Shape(f"{layers} x {kv_heads} x {head_dim}", (layer,) * layers, dtype, weights)


def spread(parameters: int, layers: int) -> Weights:
    """Weights of which only the sum is known, as if all were in the layers and these were equal."""
    each, rest = divmod(parameters, layers)
    return Weights(0, tuple(each + (index < rest) for index in range(layers)), 0)
