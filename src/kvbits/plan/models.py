"""Shapes from Transformers configs: a model is built and run on the meta device, which holds no weights and computes
nothing, and its layers hand to their caches what they always do.

So no list of families is kept, and what is read is what the model's own code does: grouped and multi-query attention,
latents, windows, states of linear attention, caches that layers share. A config is all that it takes.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    AutoConfig,
    DynamicCache,
    EncoderDecoderCache,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as verbosity

from kvbits.hf.attach import refuse_unless_served, storable
from kvbits.hf.names import cache_name
from kvbits.hf.rotation.frequencies import CannotUnrope
from kvbits.hf.rotation.probe import Recorder
from kvbits.hf.rotation.rotary import Unreadable, rotaries
from kvbits.hf.stock import storage_bytes
from kvbits.plan.presets import PRESETS
from kvbits.plan.shapes import MOST_LAYERS, Attention, Layer, Shape, Weights, Widths

_TOKENS = 5
"""Of a probe, and of an encoder's text; one more of either shows what grows with it."""

_KINDS = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING)

_STOPS = (RuntimeError, NotImplementedError, TypeError, ValueError)
"""What models raise that look for values where there are none."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_TWIN_SIZES = {
    "vocab_size": 64, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 64,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "intermediate_size_mlp": 64, "num_experts": 4,
    "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "pad_token_id": 0, "max_position_embeddings": 4096,
}  # fmt: skip
"""What does not bear on how keys are rotated, small."""


def shape_of_model(name: str, dtype: torch.dtype | None = None, rotary: bool = False) -> Shape:
    """The shape of a folder with a ``config.json``, of such a file, or of a hub id.

    Args:
        name: what the user wrote.
        dtype: of its exact keys and values; None is what the config says, or bfloat16.
        rotary: also find out whether its keys can be stored before their rotary embedding.

    Raises:
        ValueError: if there is no such model, or it generates no text.
    """
    path = Path(name)
    if path.is_dir() and not (path / "config.json").is_file():
        raise ValueError(f"the folder {name} has no config.json: it is no model")
    if path.exists():
        file = path / "config.json" if path.is_dir() else path
        config, source = config_of_dict(_read(file), str(file)), str(file)
    else:
        config, source = _config_of_hub(name), f"the hub's config of {name}"
    shape = shape_of_config(config, name, dtype, source)
    files = sum(file.stat().st_size for file in path.glob("*.safetensors")) if path.is_dir() else 0
    if files and shape.weights is not None:
        shape = replace(shape, weights=replace(shape.weights, file_bytes=files))
    return replace(shape, unrotatable=unrotatable(config)) if rotary and shape.refusal is None else shape


def _config_of_hub(name: str) -> PreTrainedConfig:
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(name)
        return config
    except Exception as error:  # a missing file, no network, a gated repository, a config that no class reads
        near = difflib.get_close_matches(name.lower().rpartition("/")[2], PRESETS, 3, 0.5)
        hint = f"near: {', '.join(near)}" if near else f"known without the hub: {', '.join(PRESETS)}"
        reason = str(error).strip().splitlines()[0].rstrip(".")  # the rest is what to do with a network
        raise ValueError(
            f"there is no file, folder or preset {name!r}, and the hub gave no config ({reason}); {hint}"
        ) from None


def _in_a_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _read(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} is no config.json: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{file} is no config.json: it holds no fields")
    return data


def config_of_dict(data: dict[str, Any], where: str) -> PreTrainedConfig:
    """The config in a ``config.json``. Raises ValueError, beginning with ``where``, if no class reads it."""
    kind = str(data.get("model_type"))
    if kind not in CONFIG_MAPPING:
        near = difflib.get_close_matches(kind, list(CONFIG_MAPPING), 3, 0.6)
        hint = f"; near: {', '.join(near)}" if near else "; 'model_type' says which architecture it is"
        raise ValueError(f"{where}: this Transformers knows no model_type {kind!r}{hint}")
    try:
        config: PreTrainedConfig = CONFIG_MAPPING[kind].from_dict(data)
    except Exception as error:
        raise ValueError(f"{where}: {_in_a_line(error)}") from None
    return config


def shape_of_config(
    config: PreTrainedConfig, name: str | None = None, dtype: torch.dtype | None = None, source: str = "a config"
) -> Shape:
    """The shape of the model that ``config`` makes; see this module. Raises ValueError as :func:`shape_of_model`."""
    text = _decoder(config)
    count = _field(text, "num_hidden_layers") or 0
    if not 1 <= count <= MOST_LAYERS:
        raise ValueError(f"{source}: {count:,} layers are no model's; 1 to {MOST_LAYERS:,} are planned")
    if dtype is None:
        dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.bfloat16
    if dtype not in _DTYPES:
        what = str(dtype).removeprefix("torch.")
        raise ValueError(f"{source}: keys and values of {what} are not planned; give --dtype bfloat16 or another")
    before = verbosity.get_verbosity()
    verbosity.set_verbosity(logging.ERROR)
    try:
        model, layers, notes = _observed(config, dtype)
        refusal = None
        try:
            refuse_unless_served(model)
        except ValueError as error:
            refusal = str(error)
    finally:
        verbosity.set_verbosity(before)
    bits = _bits(getattr(config, "quantization_config", None))
    return Shape(
        name or type(model).__name__, tuple(layers), dtype, _weights(model, count, bits), _widths(text),
        _field(text, "max_position_embeddings"), source, refusal, encodes=config.is_encoder_decoder,
        eager=not model._supports_sdpa, notes=tuple(notes),
    )  # fmt: skip


def _decoder(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of what generates. That of T5 and its kin counts the layers of the encoder."""
    text = config.get_text_config(decoder=True)
    if config.is_encoder_decoder and (count := _field(text, "num_decoder_layers")):
        text = copy.deepcopy(text)
        text.num_hidden_layers = count
    return text


def _observed(config: PreTrainedConfig, dtype: torch.dtype) -> tuple[PreTrainedModel, list[Layer], list[str]]:
    """The model without weights, its layers, and a note where these could not be seen at work."""
    with torch.device("meta"):
        model = build(config, dtype)
    reasons: list[Exception] = []
    try:
        return model, _layers(model), []
    except _STOPS as error:
        reasons.append(error)
    try:  # early releases ask for the type of the device, and "meta" is none that they know
        with FakeTensorMode(allow_non_fake_inputs=True):
            return model, _layers(build(config, dtype)), []
    except _STOPS as error:
        reasons.append(error)
    note = (
        f"{type(model).__name__} does not run without weights ({_in_a_line(reasons[0])}): its heads and channels are "
        "those that its config names, and states beside them are not counted"
    )
    return model, _named_layers(_decoder(config), dtype), [note]


def build(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model of a config, with random weights, or with none where torch makes tensors without memory.

    Raises:
        ValueError: if it generates no text.
    """
    kinds = [kind for kind in _KINDS if type(config) in kind]
    if config.is_encoder_decoder:
        kinds = [kind for kind in kinds if kind is not MODEL_FOR_CAUSAL_LM_MAPPING] or kinds
    if not kinds:
        raise ValueError(f"a model of the type {config.model_type!r} generates no text, so it has no KV cache to plan")
    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    made: Any = kinds[0][type(config)]
    if isinstance(made, tuple):
        made = made[0]
    try:
        # Others than eager attention look whether masks hide anything; what it is does not change the shapes.
        model: PreTrainedModel = made._from_config(config, dtype=dtype, attn_implementation="eager").eval()
        model.tie_weights()  # early releases do so later
    except Exception as error:
        raise ValueError(f"no model can be built from this config: {_in_a_line(error)}") from None
    return model


def _layers(model: PreTrainedModel) -> list[Layer]:
    """What each layer of the model's own cache holds, from short forwards."""
    # Some models look for padding, and what they see has no values here.
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.config.pad_token_id = None
    if hasattr(model, "set_experts_implementation"):
        with contextlib.suppress(ValueError):
            model.set_experts_implementation("batched_mm")  # others ask which expert a token goes to
    empty = DynamicCache(config=_decoder(model.config)).layers
    recorder, first = _held(model, _TOKENS, _TOKENS)
    _, more = _held(model, _TOKENS + 1, _TOKENS)
    source = _held(model, _TOKENS, _TOKENS + 1)[1] if model.config.is_encoder_decoder else first
    layers = []
    for index, (stock, able) in enumerate(zip(empty, storable(model.config, empty), strict=True)):
        fixed, total = storage_bytes(stock), first[index]
        per_token, per_source = more[index] - total, source[index] - total
        row = total - fixed - (per_token + per_source) * _TOKENS
        attention = None
        if able and index in recorder.seen:
            key, value = recorder.seen[index]
            window = getattr(stock, "sliding_window", None)
            attention = Attention(key.shape[1], key.shape[3], value.shape[3], key.dtype, value.dtype, window)
        layers.append(Layer(attention, fixed, row, per_token, per_source))
    return layers


def _held(model: PreTrainedModel, tokens: int, source: int) -> tuple[Recorder, list[int]]:
    """What the layers handed over in a forward of one row, and the bytes that each holds afterwards."""
    text = _decoder(model.config)
    ids = torch.zeros(1, tokens, dtype=torch.int64, device=model.device)
    recorder: Any = Recorder(text)
    cache, inputs = recorder, {"input_ids": ids}
    if model.config.is_encoder_decoder:
        cache = EncoderDecoderCache(recorder, DynamicCache(config=text))
        inputs = {"input_ids": ids.new_zeros(1, source), "decoder_input_ids": ids}
    with torch.no_grad():
        model(**inputs, use_cache=True, **{cache_name(model): cache})
    held = [storage_bytes(layer) for layer in recorder.layers]
    if cache is not recorder:
        held = [a + storage_bytes(b) for a, b in zip(held, cache.cross_attention_cache.layers, strict=True)]
    return recorder, held


def _named_layers(text: PreTrainedConfig, dtype: torch.dtype) -> list[Layer]:
    """Layers by what a config names, for models that cannot be run."""
    heads = _field(text, "num_key_value_heads") or _field(text, "num_attention_heads")
    channels = _field(text, "head_dim")
    if heads and not channels and _field(text, "hidden_size"):
        channels = text.hidden_size // text.num_attention_heads
    if not heads or not channels:
        raise ValueError(f"{type(text).__name__} does not say how many KV heads and channels its layers have")
    layers = []
    stock_layers = DynamicCache(config=text).layers
    for stock, able in zip(stock_layers, storable(text, stock_layers), strict=True):
        window = getattr(stock, "sliding_window", None)
        attention = Attention(heads, channels, channels, dtype, dtype, window) if able else None
        per_token = 0 if attention is None else attention.token_bytes
        layers.append(Layer(attention, storage_bytes(stock), token_bytes=per_token))
    return layers


def _weights(model: Any, count: int, bits: float | None) -> Weights:
    """Parameters by where they lie. What stands neither in a layer nor in the head is counted with the embedding."""
    counted: set[int] = set()

    def new(module: torch.nn.Module | None) -> int:
        found = [] if module is None else [x for x in module.parameters() if id(x) not in counted]
        counted.update(map(id, found))
        return sum(x.numel() for x in {id(x): x for x in found}.values())

    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    blocks = [
        module
        for module in (decoder or model).modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == count
    ]
    layers = tuple(new(layer) for layer in blocks[0]) if blocks else ()
    table = new(model.get_input_embeddings())
    head = new(model.get_output_embeddings())
    return Weights(table + new(model), layers, head, table, bits=bits)


def _bits(quantization: Any) -> float | None:
    """Bits per weight of a quantized checkpoint, as its config says; None of others."""
    if quantization is None:
        return None
    fields = quantization if isinstance(quantization, dict) else quantization.to_dict()
    if fields.get("load_in_8bit"):
        return 8.0
    if fields.get("load_in_4bit"):
        return 4.5
    method = str(fields.get("quant_method", ""))
    if "fp8" in method:
        return 8.0
    if method == "mxfp4":
        return 4.25
    bits = fields.get("bits") or fields.get("w_bit")
    if bits is None:
        return None
    if not isinstance(bits, (int, float)) or not 1 <= bits <= 32:
        raise ValueError(f"a quantization_config of {bits!r} bits is no model's; 1 to 32 are planned")
    return float(bits) + 0.25  # a 16-bit scale and a zero for each 128


def _widths(text: PreTrainedConfig) -> Widths | None:
    hidden, vocabulary, heads = (_field(text, name) for name in ("hidden_size", "vocab_size", "num_attention_heads"))
    if not hidden or not vocabulary or not heads:
        return None
    names = ("intermediate_size", "ffn_dim", "n_inner", "d_ff", "decoder_ffn_dim")
    given = [width for name in names if (width := _field(text, name))]
    widest = [max(width) if isinstance(width, (list, tuple)) else width for width in given]
    if experts := _field(text, "num_experts_per_tok"):  # of experts, those that a token goes through
        each = _field(text, "moe_intermediate_size") or max(widest, default=4 * hidden)
        widest.append(experts * each)
    query = heads * (_field(text, "head_dim") or hidden // heads)
    expanded = 0
    if _field(text, "kv_lora_rank"):
        query = heads * (text.qk_nope_head_dim + text.qk_rope_head_dim)
        expanded = query + heads * text.v_head_dim
    return Widths(hidden, max(widest, default=4 * hidden), query, vocabulary, expanded)


def _field(text: PreTrainedConfig, name: str) -> Any:
    """A field of a config, or None where it has none, or another one for each layer."""
    try:
        return getattr(text, name, None)
    except RuntimeError:
        return None


def unrotatable(config: PreTrainedConfig) -> str | None:
    """Why the keys of a model of this config cannot be stored before their rotary embedding; None if they can.

    Twins with its head_dim, random weights and little else are run (:mod:`kvbits.hf.rotation.rotary`): one layer of
    each kind, or all layers where that is no model. None, too, if no twin runs: ``cache_for`` has the last word.
    """
    for layers in (True, False):
        try:
            found = rotaries(build(_twin(config, few_layers=layers), torch.float32))
        except Exception:  # whatever the model's code makes of sizes that are not its own
            continue
        errors = [layer for layer in found.layers if isinstance(layer, CannotUnrope)]
        if not any(isinstance(error, Unreadable) for error in errors):
            return str(errors[0]) if errors else None
    return None


def _twin(config: PreTrainedConfig, few_layers: bool) -> PreTrainedConfig:
    """A config of a small model with the same head_dim."""
    config = copy.deepcopy(config)
    text = config.get_text_config(decoder=True)
    if getattr(text, "head_dim", None) is None and "kv_lora_rank" not in vars(text):
        text.head_dim = text.hidden_size // text.num_attention_heads
    for name, value in list(vars(text).items()):
        if name in _TWIN_SIZES and isinstance(value, int):
            setattr(text, name, min(value, _TWIN_SIZES[name]))
    if few_layers:
        count = text.num_hidden_layers
        kinds = getattr(text, "layer_types", None) or [None] * count
        keep = 1 + max(kinds.index(kind) for kind in set(kinds))
        for name, value in list(vars(text).items()):
            if isinstance(value, list) and len(value) == count:
                setattr(text, name, value[:keep])
        text.num_hidden_layers = keep
    return config
