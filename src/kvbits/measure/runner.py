"""One cache that is measured: it reads a prompt, steps token by token, and steps into its next block.

Every forward is the one that ``generate`` makes, with the mask of all columns, and is timed until the next token is
known on the host. Tokens are those of the text, whatever the model would say, so that all caches read the same.
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

from kvbits.files import Calibration
from kvbits.hf.names import cache_name
from kvbits.measure import guards
from kvbits.measure.caches import make
from kvbits.measure.flush import tokens_between, tokens_to_flush
from kvbits.measure.packed import packed_tokens
from kvbits.measure.prompts import Prompts


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
