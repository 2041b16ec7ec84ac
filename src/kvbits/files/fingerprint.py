"""What a calibration or a cache belongs to: a model's configuration, a sample of its weights, its rotary frequencies.

Tables fitted for one model silently spoil another one of the same shape, such as its own finetune. So a calibration
carries a fingerprint, and is compared with the model it is loaded onto. Nothing here imports Transformers: a model is
whatever has ``config``, parameters and buffers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from kvbits.tensor_parallel import Heads, elements

ELEMENTS = 32
"""Of each parameter that are compared, evenly spaced: a finetune of a single layer differs in some of them."""

_NOT_THE_MODEL = {
    "architectures", "dtype", "id2label", "label2id", "output_attentions", "output_hidden_states",
    "quantization_config", "return_dict", "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip
"""Fields of a configuration that say how a model is called or loaded. Its weights are compared anyway."""

_FREQUENCIES_TOLERANCE = 1e-2
"""Relative. A model cast to bfloat16 as a whole has rounded frequencies, which change no table."""


def of_model(model: Any) -> dict[str, Any]:
    """Plain JSON data: class, configuration, digest of :func:`weights`, rotary frequencies, and which part it is."""
    sampled = weights(model)
    return {
        "class": _class_of(model),
        "config": dict(_flat(model.config.to_diff_dict())),
        "weights": digest(sampled),
        "dtype": str(next((p.dtype for p in model.parameters() if p.is_floating_point()), None)).removeprefix("torch."),
        "rotary": {name: [float(f"{x:.6g}") for x in values] for name, values in _frequencies(model)},
        **({"heads": list(heads)} if (heads := Heads.of(model)).world > 1 else {}),
    }


def _class_of(model: Any) -> str:
    """Its class; FSDP puts one of its own before it."""
    return next(kind.__name__ for kind in type(model).__mro__ if not kind.__name__.startswith("FSDP"))


def weights(model: Any) -> torch.Tensor:
    """Up to :data:`ELEMENTS` elements of each parameter that is in memory, bfloat16, on the CPU.

    Rounded to bfloat16, a model is the same whether it was loaded in float32 or in bfloat16. Quantized weights are
    whole numbers, in parameters or in buffers. Where tensor parallel spreads a parameter, what another rank has is NaN.
    """
    parts = [_spread(x.detach()) for x in (*model.parameters(), *_whole_numbers(model)) if x.device.type != "meta"]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.bfloat16)


def _whole_numbers(model: Any) -> Iterator[torch.Tensor]:
    """Buffers of a checkpoint that are no floating-point numbers."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if not buffer.is_floating_point() and name not in module._non_persistent_buffers_set:
                yield buffer


def adapters(model: Any) -> list[str]:
    """Names of the adapters (LoRA and others of PEFT) that work in a model right now."""
    layers = [module for module in model.modules() if isinstance(getattr(module, "disable_adapters", None), bool)]
    return sorted({str(name) for layer in layers if not layer.disable_adapters for name in layer.active_adapters})


def of_tokenizer(tokenizer: Any) -> str | None:
    """Digest of the vocabulary; None without a tokenizer."""
    if tokenizer is None:
        return None
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()


def digest(x: torch.Tensor) -> str:
    """SHA-256 of a tensor's elements."""
    return hashlib.sha256(x.contiguous().cpu().view(torch.uint8).numpy().tobytes()).hexdigest()


def differences(
    here: Mapping[str, Any],
    there: Mapping[str, Any],
    weights_here: torch.Tensor | None = None,
    weights_there: torch.Tensor | None = None,
) -> list[str]:
    """How the model ``here`` differs from the one something was made for, in words; empty where it does not.

    With their :func:`weights`, one that was loaded in float16 does not differ from itself in another type, and one
    rank of a model does not differ from the whole.
    """
    if here["class"] != there["class"]:
        return [f"this is a {here['class']}, not a {there['class']}"]
    found = []
    for name in sorted(here["config"].keys() | there["config"].keys()):
        known = name in here["config"] and name in there["config"]
        if not known and "rope" not in name:
            continue  # a field that one release of Transformers has and another has not
        ours, theirs = (config.get(name, "the default") for config in (here["config"], there["config"]))
        if ours != theirs:
            found.append(f"{name} is {_short(ours)}, not {_short(theirs)}")
    if not found and _other_frequencies(here["rotary"], there["rotary"]):
        found.append("its rotary frequencies are others")
    same = here["weights"] == there["weights"]
    if not same and weights_here is not None and weights_there is not None:
        if weights_here.shape == weights_there.shape:
            present = ~weights_here.isnan()
            weights_here, weights_there = weights_here[present], weights_there[present]
            same = bool(present.any()) and torch.equal(weights_here, weights_there)
        same = same or _equal_in_half(here, there, weights_here, weights_there)
    if not found and not same:
        found.append("its weights are others: a finetune, another checkpoint or another quantization of them")
    return found


def _equal_in_half(
    here: Mapping[str, Any], there: Mapping[str, Any], weights_here: torch.Tensor, weights_there: torch.Tensor
) -> bool:
    """Whether two differ by no more than loading one of them in float16 explains: it has no room for tiny weights."""
    if "float16" not in (here["dtype"], there["dtype"]) or weights_here.shape != weights_there.shape:
        return False
    return torch.allclose(weights_here.float(), weights_there.float(), rtol=2**-7, atol=2**-24)


def _other_frequencies(here: Mapping[str, list[float]], there: Mapping[str, list[float]]) -> bool:
    if here.keys() != there.keys() or any(len(here[name]) != len(there[name]) for name in here):
        return True
    pairs = ((a, b) for name in here for a, b in zip(here[name], there[name], strict=True))
    return any(abs(a - b) > _FREQUENCIES_TOLERANCE * max(abs(a), abs(b)) for a, b in pairs)


def _flat(data: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested mappings as ``outer.inner``, in types that JSON gives back as they were."""
    if not isinstance(data, Mapping):
        yield name, json.loads(json.dumps(data, default=str))
        return
    for key, value in data.items():
        # Token ids are set by those who only want to generate, and say nothing of K and V.
        if key in _NOT_THE_MODEL or any(part in str(key) for part in ("attn_impl", "name_or_path", "token_id")):
            continue
        yield from _flat(value, f"{name}.{key}" if name else str(key))


def _spread(x: torch.Tensor) -> torch.Tensor:
    """Evenly spaced elements of a tensor, bfloat16 on the CPU."""
    index = torch.linspace(0, max(0, x.numel() - 1), min(ELEMENTS, x.numel()), dtype=torch.float64).long()
    return elements(x, index).to("cpu", torch.bfloat16)


def _frequencies(model: Any) -> Iterator[tuple[str, list[float]]]:
    """Rotary frequencies as first set: some models replace them where a text grows long, and keep the original."""
    for name, module in model.named_modules():
        for own, buffer in module.named_buffers(recurse=False):
            if own.endswith("inv_freq") and "original" not in own:
                original = getattr(module, own.removesuffix("inv_freq") + "original_inv_freq", buffer)
                if original.device.type != "meta":
                    yield f"{name}.{own}", original.detach().float().flatten().tolist()


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
