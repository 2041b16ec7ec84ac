"""SmolLM2 with keys as other models have them: outlier channels, and large constant offsets (as of a bias in k_proj).

Made from the real weights. Scaling a rotary pair of k_proj by s and the same pair of q_proj by 1/s leaves every score,
and so the whole function of the model, as it is; per-token scales of its keys must then span channels s times as
large as the others. A constant added to slow rotary pairs of every key adds nearly the same to all scores of a query,
which a softmax does not see; Qwen2 and Qwen2.5 have such biases. Each model is compared with its own exact cache.
"""

from __future__ import annotations

import copy
from typing import Any

import torch


def scaled(model: Any, factor: float, pairs: tuple[int, ...] = (20, 27)) -> Any:
    """The same function of the text, with keys ``factor`` times as large in some rotary pairs of every head."""
    altered = copy.deepcopy(model)
    for attention, half in _attentions(altered):
        channels = torch.tensor([p + side * half for p in pairs for side in (0, 1)])
        for projection, by in ((attention.k_proj, factor), (attention.q_proj, 1 / factor)):
            heads = projection.weight.data.unflatten(0, (-1, 2 * half))
            heads[:, channels] *= by
    return altered


def offset(model: Any, size: float, pairs: tuple[int, ...] = (28, 29, 30, 31)) -> Any:
    """With ``size`` times the mean norm of a key added to all keys, spread over slow rotary pairs of every head."""
    altered = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    for attention, half in _attentions(altered):
        weight = attention.k_proj.weight
        heads = weight.shape[0] // (2 * half)
        channels = torch.tensor([p + side * half for p in pairs for side in (0, 1)])
        bias = torch.zeros(heads, 2 * half)
        direction = torch.randn(heads, len(channels), generator=generator)
        # A normed hidden state has about unit elements, so a row of weights is about as large as its channel.
        norm = weight.data.float().unflatten(0, (heads, -1)).norm(dim=(1, 2), keepdim=False)[:, None]
        bias[:, channels] = size * norm * direction / direction.norm(dim=-1, keepdim=True)
        attention.k_proj.bias = torch.nn.Parameter(bias.flatten().to(weight.dtype), requires_grad=False)
    return altered


def _attentions(model: Any) -> list[tuple[Any, int]]:
    """The attention modules of a Llama, each with half its head_dim."""
    return [(layer.self_attn, layer.self_attn.head_dim // 2) for layer in model.model.layers]
