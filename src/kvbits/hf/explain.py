"""``explain``: which kernel runs in each layer, found by running a few tokens through the model itself."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from kvbits.backends import instruction_set
from kvbits.files import Calibration
from kvbits.hf.attach import attached, cache_for, disable, refuse_unless_served
from kvbits.hf.attention import STOCK_OF
from kvbits.hf.layer import PackedLayer
from kvbits.hf.names import cache_name
from kvbits.schemes.scheme import Scheme
from kvbits.tensor_parallel import Heads

PROBE_STEPS = 1


@dataclass(frozen=True)
class LayerPath:
    """What happens in one layer.

    Attributes:
        layer: index.
        stored: the scheme, or the model's own layer type.
        step: what computes attention once history is packed: ``kernel NAME``, ``decoded``, ``stock``, ``own``.
        why: the reason.
    """

    layer: int
    stored: str
    step: str
    why: str


@dataclass(frozen=True)
class Explanation:
    """One :class:`LayerPath` a layer; ``str()`` groups equal neighbours."""

    model: str
    scheme: str
    prompt: str
    layers: tuple[LayerPath, ...]

    def __str__(self) -> str:
        lines = [
            f"{self.model} under {self.scheme}",
            f"prompt: stock attention ({self.prompt}) over the exact keys and values; they are packed right after",
        ]
        first = 0
        for index, path in enumerate(self.layers):
            after = self.layers[index + 1] if index + 1 < len(self.layers) else None
            if after is None or replace(after, layer=path.layer) != path:
                span = f"layer {first}" if first == path.layer else f"layers {first}-{path.layer}"
                lines.append(f"{span}: {path.stored}; steps: {path.step} ({path.why})")
                first = index + 1
        return "\n".join(lines)


def explain(
    model: PreTrainedModel,
    scheme: str | Scheme,
    *,
    sliding: bool = False,
    calibration: str | Path | Calibration | None = None,
) -> Explanation:
    """Run one block of tokens and a step through ``model`` and report what each layer did.

    Args:
        model: the model, on its device. It is left as it was found, attached or not.
        scheme: what to explain.
        sliding, calibration: as for :func:`kvbits.cache_for`.

    Raises:
        ValueError: as :func:`kvbits.cache_for`.
    """
    scheme = Scheme.parse(scheme)
    refuse_unless_served(model)
    found = attached(model)
    try:
        return _explain(model, scheme, {"sliding": sliding, "calibration": calibration})
    finally:
        if not found:
            disable(model)


def _explain(model: PreTrainedModel, scheme: Scheme, options: dict[str, Any]) -> Explanation:
    shown = cache_for(model, scheme, **options)  # first, so that what is wrong is said of the scheme that was given
    # The same codecs, with nothing kept back: one block of tokens is then enough to have packed history.
    probe = replace(scheme, residual=0, sinks=0, late_sinks=0) if scheme.packs else scheme
    cache = cache_for(model, probe, **options)
    for layer in cache.packed_layers:
        layer.trace.asked = True
    _probe(model, cache_name(model), cache, probe.block)
    paths = []
    for index, (layer, real) in enumerate(zip(cache.layers, shown.layers, strict=True)):
        if isinstance(layer, PackedLayer) and isinstance(real, PackedLayer):
            step, core = layer.trace.outcome, real.core
            why = reason(model, step, layer.trace.kernels)
            if core.rotary is None and (core.scheme.pre_rope or core.scheme.centred):
                why += "; its rotary embedding cannot be taken off: keys are stored as they come"
            paths.append(LayerPath(index, str(core.scheme), step, why))
        else:
            kind = type(real).__name__
            paths.append(LayerPath(index, f"{kind}, exact", "own", "not a full-attention layer: the model's own cache"))
    implementation = model.config.get_text_config(decoder=True)._attn_implementation
    prompt = STOCK_OF.get(implementation, implementation)
    heads = Heads.of(model)
    name = type(model).__name__ + (f", {heads}," if heads.world > 1 else "")
    return Explanation(name, str(scheme), prompt, tuple(paths))


def _probe(model: PreTrainedModel, name: str, cache: object, block: int) -> None:
    plain = _plain_tokens(model.config, block + 1 + PROBE_STEPS)
    ids = torch.tensor(plain, device=model.device)[None]
    with torch.no_grad():
        model(input_ids=ids[:, :-PROBE_STEPS], use_cache=True, **{name: cache})
        model(input_ids=ids[:, -PROBE_STEPS:], use_cache=True, **{name: cache})


def _plain_tokens(config: PretrainedConfig, count: int) -> list[int]:
    """Ids that stand for text: in models that see or hear, some stand for a picture that the probe does not have."""
    vocabulary = config.get_text_config(decoder=True).vocab_size
    special = _special_tokens(config.to_dict())
    plain = list(itertools.islice((token for token in range(vocabulary) if token not in special), count)) or [0]
    return [plain[i % len(plain)] for i in range(count)]


def _special_tokens(config: Mapping[Any, Any]) -> set[int]:
    """All ids that a config names, in its parts too: ``eos_token_id``, ``image_token_index`` and so on."""
    found = set()
    for name, value in config.items():
        if isinstance(value, Mapping):
            found |= _special_tokens(value)
        elif "token_id" in str(name) or "token_index" in str(name):
            found |= {token for token in (value if isinstance(value, (list, tuple)) else [value]) if type(token) is int}
    return found


def reason(model: PreTrainedModel, step: str, kernels: list[str]) -> str:
    """Why a layer's last step went the way it did, from its trace: its outcome, and what each kernel said of it."""
    if step.startswith("kernel"):
        passed_over = itertools.takewhile(lambda line: not line.endswith(": runs"), kernels)
        where = f", {instruction_set()}" if step == "kernel native" else ""
        return "; ".join(
            [f"attention straight from the packed blocks{where}", *(f"not {line}" for line in passed_over)]
        )
    if step == "stock":
        return "this scheme packs nothing: attention over the exact buffer"
    if not model._can_set_attn_implementation():
        return f"{type(model).__name__} does not go through Transformers' attention interface: all is decoded each step"
    if getattr(model.config, "output_attentions", False):
        return "output_attentions asks for the weights: all is decoded each step"
    return f"{type(model).__name__} works on keys and values after the cache: all is decoded each step"
