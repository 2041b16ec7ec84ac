"""Where a model reads ids, and where the keys and values of each of its layers are computed."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel


def device_of_ids(model: PreTrainedModel) -> torch.device:
    """The device that token ids have to be on."""
    weight: torch.Tensor = model.get_input_embeddings().get_parameter("weight")
    return weight.device


def devices_of_layers(model: PreTrainedModel, count: int) -> list[torch.device]:
    """The device of each of ``count`` layers: that of the modules that know its number, or else the model's."""
    devices = [model.device] * count
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        weight = next(module.parameters(), None)
        if isinstance(layer, int) and 0 <= layer < count and weight is not None:
            hook = getattr(module, "_hf_hook", None)  # of accelerate, where weights are brought in for each call
            device = weight.device if weight.device.type != "meta" else getattr(hook, "execution_device", model.device)
            devices[layer] = torch.device(device)
    return devices
