"""Shapes from the header of a GGUF file: its metadata and the list of its tensors. No weights are read.

Keys are those of the GGUF specification, ``{architecture}.attention.head_count_kv`` and so on. Cached keys and values
are counted as Transformers keeps them once it has loaded the file (a latent, where the attention is over one); states
of recurrent layers as llama.cpp keeps them, in float32, since Transformers loads hardly any such file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from kvbits.plan.shapes import MOST_LAYERS, Attention, Layer, Shape, Weights, Widths

_EVERY = {"gemma2": 2, "gemma3": 6, "gemma3n": 5, "cohere2": 4, "gpt-oss": 2, "exaone4": 4}
"""Architectures whose files do not say which layers have the window: all but each n-th (llama.cpp, set_swa_pattern)."""

_REFUSED = {
    "t5": "T5 is an encoder-decoder, which kvbits does not serve",
    "falcon-h1": "every layer of Falcon-H1 is attention and state space at once, which kvbits does not serve",
}
"""Why, by architecture; their own exact cache can be planned."""

_STATE_BYTES = torch.float32.itemsize


def shape_of_gguf(path: str | Path, name: str | None = None, dtype: torch.dtype | None = None) -> Shape:
    """The shape of the model in a file, or in all parts of one that was split.

    Args:
        path: of the file, or of the first of several.
        name: what the user calls it.
        dtype: of exact keys and values; None is float32, as which Transformers loads the weights.

    Raises:
        ValueError: for a file that is not GGUF, or does not say what a plan needs, or whose model generates no text.
        ModuleNotFoundError: if the package gguf is not installed.
    """
    path, dtype = Path(path), dtype or torch.float32
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    readers = [_open(part) for part in _parts(path)]
    fields = _Fields(readers[0], path)
    if fields.architecture == "t5encoder" or not fields.number("attention.causal", 1):
        raise ValueError(f"{path}: {fields.architecture!r} generates no text, so it has no KV cache to plan")
    count = fields.number("decoder_block_count", fields.number("block_count"))
    if not 1 <= count <= MOST_LAYERS:
        raise ValueError(f"{path}: {count:,} layers are no model's; 1 to {MOST_LAYERS:,} are planned")
    layers, notes = _layers(fields, count, dtype)
    tensors = [tensor for reader in readers for tensor in reader.tensors]
    return Shape(
        name or path.name, tuple(layers), dtype, _weights(tensors, count), _widths(fields),
        fields.number("context_length", 0) or None, str(path), _REFUSED.get(fields.architecture),
        encodes=fields.architecture == "t5", notes=tuple(notes),
    )  # fmt: skip


def _parts(path: Path) -> list[Path]:
    """The files of a model that was split, or the one that was not."""
    match = re.fullmatch(r"(.+)-00001-of-(\d{5})", path.stem)
    if match is None:
        return [path]
    parts = [path.with_name(f"{match[1]}-{number:05}-of-{match[2]}.gguf") for number in range(1, int(match[2]) + 1)]
    if missing := [part.name for part in parts if not part.is_file()]:
        raise ValueError(f"{path} is one of {len(parts)} parts, and {missing[0]} is not beside it")
    return parts


def _open(path: Path) -> Any:
    try:
        from gguf import GGUFReader
    except ModuleNotFoundError:
        raise ModuleNotFoundError("reading GGUF files needs the package gguf: pip install 'kvbits[gguf]'") from None
    try:
        return GGUFReader(str(path))
    except Exception as error:  # truncated, of another byte order, or something else altogether
        raise ValueError(f"{path} is no GGUF file, or damaged: {error}") from None


class _Fields:
    """Metadata by names without the architecture before them."""

    def __init__(self, reader: Any, path: Path) -> None:
        self.reader, self.path = reader, path
        self.architecture = str(self._contents("general.architecture"))

    def _contents(self, key: str) -> Any:
        field = self.reader.fields.get(key)
        if field is None:
            raise ValueError(f"{self.path} does not say its {key}, which a plan needs")
        return field.contents()

    def has(self, name: str) -> bool:
        return f"{self.architecture}.{name}" in self.reader.fields

    def number(self, name: str, default: int | None = None) -> int:
        """One number; of a list, its largest."""
        if default is not None and not self.has(name):
            return default
        found = self._contents(f"{self.architecture}.{name}")
        return max(map(int, found)) if isinstance(found, list) else int(found)

    def per_layer(self, name: str, count: int, default: int) -> list[int]:
        """A number for each layer: a list, or one for all."""
        if not self.has(name):
            return [default] * count
        found = self._contents(f"{self.architecture}.{name}")
        if not isinstance(found, list):
            return [int(found)] * count
        if len(found) != count:
            raise ValueError(f"{self.path}: {name} has {len(found)} entries for {count} layers")
        return [int(x) for x in found]


def _layers(fields: _Fields, count: int, dtype: torch.dtype) -> tuple[list[Layer], list[str]]:
    heads = fields.number("attention.head_count", 0)
    kv_heads = fields.per_layer("attention.head_count_kv", count, heads)
    channels = fields.number("embedding_length") // heads if heads else 0
    key, value = (fields.number(f"attention.{side}_length", channels) for side in ("key", "value"))
    windows, notes = _windows(fields, count)
    shared = fields.number("attention.shared_kv_layers", 0)
    every = fields.number("full_attention_interval", 0)
    layers = []
    for index, own in enumerate(kv_heads):
        if not own or (every and (index + 1) % every):
            layers.append(Layer(None, row_bytes=_state_bytes(fields)))
            continue
        if index >= count - shared:
            layers.append(Layer(None))  # it looks into another layer's cache
            continue
        here, there = key, value
        if windows[index] is not None:
            here, there = (fields.number(f"attention.{s}_length_swa", x) for s, x in (("key", key), ("value", value)))
        if fields.has("attention.kv_lora_rank"):
            own, here, there = 1, fields.number("attention.kv_lora_rank"), fields.number("rope.dimension_count")
        attention = Attention(own, here, there, dtype, dtype, windows[index])
        # A layer with a window keeps its length in a tensor of its own.
        fixed, token = 8 * (windows[index] is not None), attention.token_bytes
        states = _state_bytes(fields) if fields.architecture == "falcon-h1" else 0
        layers.append(Layer(attention, fixed, states, token, token if fields.architecture == "t5" else 0))
    return layers, notes


def _windows(fields: _Fields, count: int) -> tuple[list[int | None], list[str]]:
    window = fields.number("attention.sliding_window", 0)
    if not window:
        return [None] * count, []
    name = "attention.sliding_window_pattern"
    pattern = fields.per_layer(name, count, _EVERY.get(fields.architecture, 0))
    if set(pattern) - {0, 1}:  # every n-th sees all
        pattern = [(index + 1) % every != 0 for index, every in enumerate(pattern)]
    elif not fields.has(name):
        return [None] * count, [
            f"{fields.path.name} has a window of {window:,} tokens and does not say for which layers: all are planned "
            "without it"
        ]
    return [window if slides else None for slides in pattern], []


def _state_bytes(fields: _Fields) -> int:
    """Of a recurrent layer and a row: llama.cpp, ``n_embd_r`` and ``n_embd_s``."""
    hidden, heads = fields.number("embedding_length"), fields.number("attention.head_count", 0)
    if head := fields.number("wkv.head_size", 0):
        return _STATE_BYTES * hidden * (fields.number("token_shift_count", 2) + head)
    if fields.has("shortconv.l_cache"):
        return _STATE_BYTES * hidden * (fields.number("shortconv.l_cache") - 1)
    if head := fields.number("kda.head_dim", 0):
        return _STATE_BYTES * heads * head * (3 * (fields.number("ssm.conv_kernel", 4) - 1) + head)
    inner, state = fields.number("ssm.inner_size", 0), fields.number("ssm.state_size", 0)
    mixed = inner + 2 * fields.number("ssm.group_count", 0) * state
    return _STATE_BYTES * (max(0, fields.number("ssm.conv_kernel", 1) - 1) * mixed + state * inner)


def _weights(tensors: list[Any], count: int) -> Weights:
    embedding, head, table, layers = 0, 0, 0, [0] * count
    for tensor in tensors:
        elements = int(tensor.n_elements)
        match = re.match(r"(?:dec\.)?blk\.(\d+)\.", tensor.name)
        if match and int(match[1]) < count:
            layers[int(match[1])] += elements
        elif tensor.name.startswith("output"):
            head += elements
        else:
            embedding += elements
            table += elements if tensor.name == "token_embd.weight" else 0
    return Weights(embedding, tuple(layers), head, table, sum(int(tensor.n_bytes) for tensor in tensors))


def _widths(fields: _Fields) -> Widths | None:
    heads, hidden = fields.number("attention.head_count", 0), fields.number("embedding_length")
    if not heads:
        return None
    key, value = (fields.number(f"attention.{side}_length", hidden // heads) for side in ("key", "value"))
    expanded = 0
    if fields.has("attention.kv_lora_rank"):  # earlier files give the lengths of whole heads without a suffix
        key, value = (fields.number(f"attention.{s}_length_mla", x) for s, x in (("key", key), ("value", value)))
        expanded = heads * (key + value)
    width = fields.number("feed_forward_length", 4 * hidden)
    experts = fields.number("expert_used_count", 0)
    if experts:
        width = max(width, experts * fields.number("expert_feed_forward_length", width))
    vocabulary = fields.number("vocab_size", 0)
    if not vocabulary and "tokenizer.ggml.tokens" in fields.reader.fields:
        vocabulary = len(fields.reader.fields["tokenizer.ggml.tokens"].data)
    return Widths(hidden, width, heads * key, vocabulary, expanded)
