"""What makes a measurement say less than it seems to: refused where it would say nothing, else written beside it."""

from __future__ import annotations

import math
from dataclasses import replace

from transformers import Cache, PreTrainedModel

from kvbits.hf.explain import reason
from kvbits.measure import caches
from kvbits.measure.packed import packing_layers
from kvbits.schemes.scheme import BLOCKS, Scheme

SLOW = ("decoded", "kernel reference")
"""What computes attention where no fast kernel does."""

ONE_SHOT = (
    "the whole window in one forward attends to the exact keys and values it has just computed: this says nothing of "
    "the cache"
)
ONE_WINDOW = "one window: how much figures vary from text to text is not known; give 2 windows or more"


def refuse_one_chunk(length: int, chunk: int) -> None:
    """Raise ValueError where windows go through the cache in one piece, or there is nothing to go through it."""
    if chunk < 1 or length < 2:
        raise ValueError(
            f"windows of {length} tokens in chunks of {chunk} measure nothing; give 2 or more, and 1 or more"
        )
    if chunk >= length:
        raise ValueError(
            f"a chunk of {chunk} tokens holds a whole window of {length}, and {ONE_SHOT}. Give a smaller chunk, such "
            "as 16; one_shot (--one-shot) shows that regime beside the true one"
        )


def refuse_unpacked(name: str, length: int, chunk: int) -> None:
    """Raise ValueError for a scheme that would pack nothing of a window that is read again.

    Args:
        name: of a kvbits scheme; peers and schemes that pack nothing by intent pass.
        length, chunk: tokens of a window, and of the chunks in which it is read.
    """
    if name.startswith("hf:"):
        return
    scheme = Scheme.parse(name)
    if not scheme.packs and not scheme.overrides:
        return
    exact = caches.exact_tokens(scheme)
    seen = (math.ceil(length / chunk) - 1) * chunk  # by the last chunk, of the cache
    if seen >= exact + scheme.block:
        return
    needed = math.ceil((exact + scheme.block) / chunk) * chunk + 1
    raise ValueError(
        f"{name} would pack nothing that is read again in windows of {length} tokens in chunks of {chunk}: {exact} "
        f"tokens and more stay exact, and {scheme.block} are packed at a time. Give a length of {needed} at least, "
        f"better four times as much, or a scheme that keeps fewer exact, such as {_with_fewer_exact(scheme)}"
    )


def _with_fewer_exact(scheme: Scheme) -> Scheme:
    """The same codecs with the shortest residual and blocks that make sense for them."""
    for block in BLOCKS:
        if all(block % codec.block_multiple == 0 for codec in scheme.codecs):
            return replace(scheme, residual=min(BLOCKS), late_sinks=0, block=block)
    raise AssertionError(f"{scheme} fits no block")  # the scheme itself has one


def slow_kernels(model: PreTrainedModel, cache: Cache) -> list[str]:
    """A warning for each way in which layers computed attention without a fast kernel, and why.

    The reasons are those of the last forward, if its traces were asked for them.
    """
    found: dict[str, list[str]] = {}
    for layer in packing_layers(cache):
        if layer.trace.outcome in SLOW:
            text = f"{layer.trace.outcome}: {reason(model, layer.trace.outcome, layer.trace.kernels)}"
            found.setdefault(text, []).append(layer.name)
    return [
        f"{len(layers)} layers ran on no fast kernel, {text}; seconds are those of this"
        for text, layers in found.items()
    ]


def ask_for_reasons(cache: Cache) -> None:
    """Let the next forward note what each kernel says of it."""
    for layer in packing_layers(cache):
        layer.trace.asked = True
