"""One cache that is measured: it reads a prompt, steps token by token, and steps into its next block.

Every forward is the one that ``generate`` makes, with the mask of all columns, and is timed until the next token is
known on the host. Tokens are those of the text, whatever the model would say, so that all caches read the same.

Most steps copy one token; one in every ``block`` (kvbits) or ``residual_length`` (Transformers) packs, which takes much
longer. Such steps, *flushes*, are told apart by what the cache has packed before and after.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import QuantizedLayer

from kvbits.files import Calibration
from kvbits.hf.cache import KVCache
from kvbits.hf.names import cache_name
from kvbits.measure import guards
from kvbits.measure.caches import make
from kvbits.measure.packed import packed_tokens


@dataclass(frozen=True)
class Prompts:
    """Rows of token ids, each from another place of a text. A text that is too short begins again at its end.

    Attributes:
        tokens: of the whole text, int64 ``[N]``.
    """

    tokens: torch.Tensor

    def __post_init__(self) -> None:
        if self.tokens.ndim != 1 or len(self.tokens) == 0:
            raise ValueError(f"the text has no tokens (shape {tuple(self.tokens.shape)}); give one with words in it")

    def take(self, batch: int, first: int, last: int) -> torch.Tensor:
        """Tokens ``first .. last - 1`` of every row, int64 ``[batch, last - first]``."""
        count = len(self.tokens)
        begin = torch.arange(batch)[:, None] * (count // batch)
        return self.tokens[(begin + torch.arange(first, last)[None]) % count]

    def repeats(self, batch: int, length: int) -> bool:
        """Whether rows of ``length`` tokens share parts of the text, or hold some of it twice."""
        return batch * length > len(self.tokens)


@dataclass(frozen=True)
class Reading:
    """What is read.

    Attributes:
        prompts: the text.
        batch: rows, each from another place of the text.
        context: tokens of the prompt of each.
        chunk: tokens of the prompt that go through the model at once; None is all of them.
    """

    prompts: Prompts
    batch: int
    context: int
    chunk: int | None = None


class Step(NamedTuple):
    """One decode step: how long it took, and whether the cache packed something in it."""

    seconds: float
    packed: bool


class Runner:
    """One cache over one model.

    Args:
        model: with kvbits attached or not.
        name: of the cache; see :mod:`kvbits.measure.caches`.
        reading: what it reads.
        calibration: for schemes that need one.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        name: str,
        reading: Reading,
        calibration: str | Path | Calibration | None = None,
    ) -> None:
        self.model, self.name, self.reading, self.calibration = model, name, reading, calibration
        self.cache: Cache | None = None
        self.position = 0
        parameters = inspect.signature(model.forward).parameters
        self._options = {"use_cache": True, **({"logits_to_keep": 1} if "logits_to_keep" in parameters else {})}

    def prefill(self) -> float:
        """Read the prompt into a new cache: seconds until the first new token is known."""
        self.cache = None  # the old one makes room before there is a new one
        self.cache, self.position = make(self.model, self.name, self.calibration), 0
        chunk = self.reading.chunk or self.reading.context
        ends = [*range(chunk, self.reading.context, chunk), self.reading.context]
        return sum(self.read(end - self.position) for end in ends)

    def step(self) -> Step:
        """Read one more token of every row."""
        assert self.cache is not None
        packs, before = tokens_between(self.cache) is not None, packed_tokens(self.cache)
        seconds = self.read(1)
        return Step(seconds, packs and packed_tokens(self.cache) > before)

    def flush(self) -> Step | None:
        """Read on, at once, to where one more token makes the cache pack, and step; None where it never does."""
        assert self.cache is not None
        left = tokens_to_flush(self.cache)
        if left is None:
            return None
        if left > 1:
            self.read(left - 1)
        return self.step()

    def why_slow(self) -> list[str]:
        """Read one more token, and say where attention over packed history ran on no fast kernel, and why."""
        assert self.cache is not None
        guards.ask_for_reasons(self.cache)
        self.read(1)
        return guards.slow_kernels(self.model, self.cache)

    def read(self, count: int) -> float:
        """Put the next ``count`` tokens of every row through the model; seconds."""
        device, batch, end = self.model.device, self.reading.batch, self.position + count
        ids = self.reading.prompts.take(batch, self.position, end).to(device)
        mask = torch.ones(batch, end, dtype=torch.int64, device=device)
        caches = {cache_name(self.model): self.cache}
        wait_for(device)
        with torch.no_grad(), without_garbage_collection():
            start = time.perf_counter()
            logits = self.model(input_ids=ids, attention_mask=mask, **self._options, **caches).logits
            logits[:, -1].argmax(dim=-1).tolist()
            wait_for(device)
            seconds = time.perf_counter() - start
        self.position = end
        return seconds


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """No search for reference cycles, which with so many modules takes longer than a step, as ``timeit`` has it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def wait_for(device: torch.device) -> None:
    """Until a device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


# -- steps that pack ---------------------------------------------------------------------------------------------------


def tokens_to_flush(cache: Cache) -> int | None:
    """How many more tokens until a step packs, that step's own included; None where none ever will.

    Args:
        cache: one that has read a prompt without padding.
    """
    if not isinstance(cache, KVCache):
        return min((layer.residual_length - _residual(layer) for layer in _requantizing(cache)), default=None)
    found = []
    for core in (layer.core for layer in cache.packed_layers):
        residual = core.scheme.residual
        if core.scheme.packs and residual is not None:
            first = core.sinks + core.late_sinks + residual + core.scheme.block
            found.append(first - max(core.held, default=0))
    return min(found, default=None)


def tokens_between(cache: Cache) -> int | None:
    """How many tokens lie between two steps that pack; None where none does."""
    if isinstance(cache, KVCache):
        return min((x.core.scheme.block for x in cache.packed_layers if x.core.scheme.packs), default=None)
    return min((layer.residual_length for layer in _requantizing(cache)), default=None)


def _requantizing(cache: Cache) -> list[QuantizedLayer]:
    """Layers that quantize anew all that they hold whenever their residual is full; ``hf:fp8`` has none."""
    return [layer for layer in cache.layers if isinstance(layer, QuantizedLayer)]


def _residual(layer: QuantizedLayer) -> int:
    """Exact tokens of a layer."""
    return layer.keys.shape[-2] if layer.keys is not None and layer.keys.ndim == 4 else 0
