"""Weights in few bits beside the cache in few bits: users combine both, and each changes what the other is worth.

Every entry quantizes the linear layers of a loaded model in place, all but the output embedding, as Transformers'
own integrations do. ``int8-dynamic`` comes with torch; the others with packages that kvbits does not need otherwise.
"""

from __future__ import annotations

import difflib
import importlib.util
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Weights:
    """One way to store weights.

    Attributes:
        package: what has to be installed; None for what torch brings.
        about: one line.
        apply: quantizes a model in place.
    """

    package: str | None
    about: str
    apply: Callable[[PreTrainedModel], None]


def linear_layers(model: PreTrainedModel) -> Iterator[tuple[str, torch.nn.Linear]]:
    """Names and modules of all ``torch.nn.Linear`` layers but the output embedding."""
    output = model.get_output_embeddings()
    return ((n, x) for n, x in model.named_modules() if type(x) is torch.nn.Linear and x is not output)


def _unchanged(model: PreTrainedModel) -> None:
    """Weights as they were loaded."""


def _int8_dynamic(model: PreTrainedModel) -> None:
    if model.dtype != torch.float32 or model.device.type != "cpu":
        here = f"{str(model.dtype).removeprefix('torch.')} on {model.device.type}"
        raise ValueError(f"int8-dynamic is for float32 on a CPU, not {here}; give --dtype float32, or torchao-int8")
    from torch.ao.quantization import default_dynamic_qconfig, quantize_dynamic

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch points to torchao, which is measured beside it
        warnings.simplefilter("ignore", UserWarning)
        quantize_dynamic(model, {name: default_dynamic_qconfig for name, _ in linear_layers(model)}, inplace=True)


def _torchao(config: str, **options: Any) -> Callable[[PreTrainedModel], None]:
    def apply(model: PreTrainedModel) -> None:
        from torchao import quantization

        names = {name for name, _ in linear_layers(model)}
        chosen = getattr(quantization, config)(**options)
        quantization.quantize_(model, chosen, filter_fn=lambda _, name: name in names)

    return apply


def _bitsandbytes(bits: int) -> Callable[[PreTrainedModel], None]:
    def apply(model: PreTrainedModel) -> None:
        from bitsandbytes import nn

        for name, old in list(linear_layers(model)):
            shape, bias = (old.in_features, old.out_features), old.bias is not None
            new: torch.nn.Linear
            if bits == 8:
                new = nn.Linear8bitLt(*shape, bias, has_fp16_weights=False)
                new.weight = nn.Int8Params(old.weight.data, requires_grad=False, has_fp16_weights=False)
            else:
                new = nn.Linear4bit(*shape, bias, compute_dtype=old.weight.dtype, quant_type="nf4")
                new.weight = nn.Params4bit(old.weight.data, requires_grad=False, quant_type="nf4")
            new.bias = old.bias
            model.set_submodule(name, new.to(old.weight.device))

    return apply


WEIGHTS: dict[str, Weights] = {
    "none": Weights(None, "as they were loaded", _unchanged),
    "int8-dynamic": Weights(None, "torch's dynamic int8, with activations in int8 too; float32, CPU", _int8_dynamic),
    "torchao-int8": Weights("torchao", "int8 weights alone", _torchao("Int8WeightOnlyConfig")),
    "torchao-int8-dynamic": Weights(
        "torchao", "int8 weights and activations", _torchao("Int8DynamicActivationInt8WeightConfig")
    ),
    "torchao-int4": Weights("torchao", "int4 weights in groups of 64", _torchao("Int4WeightOnlyConfig", group_size=64)),
    "bnb-int8": Weights("bitsandbytes", "LLM.int8()", _bitsandbytes(8)),
    "bnb-nf4": Weights("bitsandbytes", "NF4, as in QLoRA", _bitsandbytes(4)),
}
"""Every value of ``--weights``."""


def check(name: str) -> str:
    """The name, once it is known to be one and its package is there.

    Raises:
        ValueError: for an unknown name, with what is near.
        ModuleNotFoundError: where its package is missing, with the command that installs it.
    """
    name = name.strip()
    if name not in WEIGHTS:
        near = difflib.get_close_matches(name, WEIGHTS, 1, 0.4)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"unknown weights {name!r}; {hint}Known are {', '.join(WEIGHTS)}")
    package = WEIGHTS[name].package
    if package is not None and importlib.util.find_spec(package) is None:
        raise ModuleNotFoundError(f"--weights {name} needs the package {package}: pip install 'kvbits[weights]'")
    return name


def quantize(model: PreTrainedModel, name: str) -> PreTrainedModel:
    """Quantize the weights of ``model`` in place, and return it.

    Args:
        model: on its device, in the dtype that it computes in.
        name: key of :data:`WEIGHTS`.

    Raises:
        ValueError, ModuleNotFoundError: as :func:`check`; ValueError where there is nothing to quantize, or this way
            cannot do it for the model's dtype or device.
    """
    name = check(name)
    if name != "none" and not any(linear_layers(model)):
        raise ValueError(f"{type(model).__name__} has no torch.nn.Linear layers, whose weights {name} could quantize")
    WEIGHTS[name].apply(model)
    return model
