"""The attention functions that kvbits registers with Transformers, each beside the stock one it stands in for.

Given handles they compute straight from the packed bits; given ordinary tensors they hand over to the stock function
(``sdpa``, or the model's own ``eager``), with the stock mask: both names are registered with the mask interface too,
without which Transformers would silently pass no mask at all.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvbits.attend import Call, choose, explain
from kvbits.hf.frozen import Frozen
from kvbits.hf.gradient import end_of_gradients
from kvbits.hf.handle import Pair, packed_pair
from kvbits.numerics.modes import outside_graphs, without_autocast

STOCK_OF = {"kvbits": "sdpa", "kvbits_eager": "eager"}
"""Our implementations, and the stock one that each hands over to."""


_CHOOSES_BY_NAME = not hasattr(AttentionInterface, "get_interface")
"""Early releases: model code looks an attention function up only where its name ``!= "eager"``."""


class Implementation(str):
    """One of our names, which also answers to the stock name that it stands in for.

    Model code asks ``config._attn_implementation == "sdpa"`` before it slices queries or casts a mask (Gemma 4, GPT-2,
    the sparse-attention families), and must get the answer that it would get without kvbits.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and str(other) in (str(self), STOCK_OF[str(self)])

    def __ne__(self, other: object) -> bool:
        if _CHOOSES_BY_NAME:
            return not isinstance(other, str) or str(self) != str(other)
        return not self == other

    def __hash__(self) -> int:  # dictionaries of implementations must find ours, not the stock one
        return hash(str(self))

    def __str__(self) -> str:
        return self.lower()  # as it is, but an ordinary string; torch.compile follows this, and not str.__str__

    def __format__(self, spec: str) -> str:
        """The stock name, where it becomes part of another: ``paged|sdpa`` of early releases' continuous batching."""
        return format(STOCK_OF[str(self)], spec)

    def __reduce__(self) -> tuple[Any, ...]:
        """So that a model or a config that is loaded in a fresh process finds the name known to Transformers."""
        return _restored, (str(self),)


def _restored(name: str) -> Implementation:
    register()
    return Implementation(name)


def ours_for(stock: str | None) -> Implementation:
    """The implementation to put in the place of ``stock``."""
    return Implementation("kvbits_eager" if stock == "eager" else "kvbits")


def register() -> None:
    """Make both names known to Transformers. Harmless to repeat."""
    for ours, stock in STOCK_OF.items():
        AttentionInterface.register(ours, partial(attention, stock=stock))
        AttentionMaskInterface.register(ours, ALL_MASK_ATTENTION_FUNCTIONS[stock])


def stock_function(module: torch.nn.Module, stock: str) -> Callable[..., Any]:
    """The stock attention function; ``eager`` is the one in the model's own file."""
    if stock != "eager":
        named: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[stock]
        return named
    for kind in type(module).__mro__:
        eager: Callable[..., Any] | None = getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)
        if eager is not None:
            return eager
    raise NotImplementedError(f"{type(module).__name__} has no eager attention beside it; load the model with 'sdpa'")


def why_decode(module: torch.nn.Module, dropout: float, options: dict[str, Any]) -> list[str]:
    """Reasons why packed keys and values must be decoded for the stock function."""
    wants_weights = options.get("output_attentions") or getattr(module.config, "output_attentions", False)
    is_causal = options.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    reasons = {
        "dropout": dropout > 0,
        "output_attentions asks for the weights": bool(wants_weights),
        "position_bias": options.get("position_bias") is not None,
        "not causal": not is_causal,
    }
    return [reason for reason, holds in reasons.items() if holds]


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    *,
    stock: str,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention as Transformers calls it.

    Args:
        query: ``[B, Hq, q, D]``.
        key, value: handles, a frozen layer, or ordinary ``[B, H, T, D]``.
        attention_mask: None, or bool or additive ``[B, 1 or Hq, q, T]``.
        stock: which stock function takes ordinary tensors.
        options: ``softcap`` and ``s_aux`` (gpt-oss) are used; the window of a sliding layer is in the mask.

    Returns:
        ``[B, q, Hq, D]`` and None (or the weights, from the stock function).
    """
    if isinstance(key, Frozen):
        reasons = why_decode(module, dropout, options)
        return key.attend(query, scaling, options.get("softcap"), options.get("s_aux"), reasons), None
    pair = packed_pair(key, value)
    if pair is None or why_decode(module, dropout, options):
        out: tuple[torch.Tensor, torch.Tensor | None] = stock_function(module, stock)(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
        return out
    sinks = options.get("s_aux")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return _over_packed(query, pair, scale, attention_mask, options.get("softcap"), sinks), None


@outside_graphs
def _over_packed(
    query: torch.Tensor,
    pair: Pair,
    scaling: float,
    mask: torch.Tensor | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Run a kernel."""
    call = Call(
        query.detach(),
        pair.view,
        scaling,
        mask=None if mask is None or pair.view.shard is not None else mask.detach(),  # shards are causal, unpadded
        softcap=softcap,
        sink_logits=None if sinks is None else sinks.detach(),
    )
    kernel = choose(call)
    pair.trace.outcome = f"kernel {kernel.name}"
    if pair.trace.asked:
        pair.trace.kernels = explain(call)
    if torch.is_grad_enabled() or torch.is_autocast_enabled(query.device.type):
        with torch.no_grad(), without_autocast():
            out = kernel.run(call)
    else:
        out = kernel.run(call)
    if torch.is_grad_enabled() and (query.requires_grad or pair.ends_gradients):
        out = end_of_gradients(out)
    return out.transpose(1, 2).contiguous()
