"""Small models, and frozen caches of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

import kvbits
import zoo
from kvbits.hf.names import cache_name

SMALL = "residual=6,sinks=2,block=32"

CONTIGUOUS = torch.contiguous_format
"""Arguments with other strides would be another graph."""

Step = Callable[..., Any]

MAGNIFIED = 100
"""Roundings of the largest logit that may come of one in a window."""


def built(name: str, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """In float64 where layers have windows, unless said otherwise; :func:`same` says why."""
    dtype = dtype or (torch.float64 if name in zoo.SLIDING else torch.float32)
    model = zoo.build(name, dtype)
    if dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # grouped products know no float64
    return model


def prefilled(model: PreTrainedModel, scheme: str, ids: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
    """A growing cache that has read all but the last token."""
    cache = kvbits.cache_for(model, scheme)
    options = {} if mask is None else {"attention_mask": mask[:, :-1], "position_ids": zoo.positions(mask)[:, :-1]}
    with torch.no_grad():
        model(input_ids=ids[:, :-1], **options, **{cache_name(model): cache})
    return cache


def twins(
    tokens: int, name: str = "llama", scheme: str = "int4", capacity: int = 90, batch: int = 1
) -> tuple[PreTrainedModel, torch.Tensor, Any, Any]:
    """A model, a prompt, a growing cache that has read all but its last token, and what it is frozen to."""
    model, ids = built(name), zoo.prompt(batch, tokens)
    cache = prefilled(model, f"{scheme},{SMALL}", ids)
    return model, ids, cache, kvbits.freeze(cache, capacity)


def decode(
    model: PreTrainedModel, cache: Any, ids: torch.Tensor, steps: int, mask: torch.Tensor | None = None,
    forward: Step | None = None, advance: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Logits ``[steps, B, V]`` of greedy steps; masks are for growing caches alone, which cannot do without."""
    forward = model if forward is None else forward
    token, found = ids[:, -1:].clone(memory_format=CONTIGUOUS), []
    growing = isinstance(cache, kvbits.KVCache)
    with torch.no_grad():
        for _ in range(steps):
            options = {}
            if mask is not None:
                options["position_ids"] = zoo.positions(mask)[:, -1:].clone(memory_format=CONTIGUOUS)
            if mask is not None and growing:
                options["attention_mask"] = mask
            found.append(forward(input_ids=token, **options, **{cache_name(model): cache}).logits[:, -1])
            if advance:
                cache.advance()
            token = found[-1].argmax(-1, keepdim=True)
            mask = None if mask is None else torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
    return torch.stack(found)


def padded(*counts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and a mask of rows with so many own tokens, to the right."""
    ids = zoo.prompt(len(counts), max(counts))
    return ids, torch.stack([(torch.arange(max(counts)) >= max(counts) - count).long() for count in counts])


def same(got: torch.Tensor, expected: torch.Tensor, window: torch.dtype | None = None) -> None:
    """Logits of a frozen cache are those of a growing one.

    Layers without a window run the same kernel over the same bits. A frozen window is a ring of slots, whose sums have
    another order than the growing window's: a rounding of the output, of which the layers behind it make up to 44 of
    the largest logit in these models, and which may move a value on the edge of a code to the other side. So models
    with windows are compared in float64, where no value is that near to an edge, and whose roundings their own norms,
    in float32, swallow.

    Args:
        window: the type of the sums that a growing window rounds, float64 in models of that type.
    """
    assert torch.equal(got.argmax(-1), expected.argmax(-1))
    if window is None and got.dtype == torch.float64:
        window = torch.float64
    tolerance = dict(rtol=1e-4, atol=1e-5)
    if window is not None:
        tolerance = dict(rtol=0, atol=MAGNIFIED * torch.finfo(window).eps * float(expected.abs().max()))
    torch.testing.assert_close(got, expected, **tolerance)
