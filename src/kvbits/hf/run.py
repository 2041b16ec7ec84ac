"""One timed ``generate`` under one scheme: what the command line shows in its table."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from kvbits.hf.attach import cache_for
from kvbits.hf.cache import KVCache
from kvbits.hf.names import cache_name
from kvbits.hf.stock import storage_bytes
from kvbits.schemes.scheme import Scheme


@dataclass(frozen=True)
class Run:
    """What one generation did.

    Attributes:
        scheme: name of the scheme; ``exact`` is Transformers' own ``DynamicCache``.
        tokens: new token ids.
        prompt_tokens: length of the prompt.
        kv_bytes: bytes really allocated by the cache at the end.
        prefill_seconds: until the first token was there.
        decode_seconds: from the first token to the last.
    """

    scheme: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    kv_bytes: int
    prefill_seconds: float
    decode_seconds: float

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second."""
        return self.prompt_tokens / self.prefill_seconds

    @property
    def decode_rate(self) -> float | None:
        """New tokens per second after the first; None if there is only one."""
        steps = len(self.tokens) - 1
        return steps / self.decode_seconds if steps > 0 and self.decode_seconds > 0 else None

    def agreement(self, other: Run) -> int:
        """How many leading tokens equal those of ``other``."""
        pairs = zip(self.tokens, other.tokens, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(self.tokens), len(other.tokens)))


class _Clock(BaseStreamer):
    """Notes when each token came, and passes it on."""

    def __init__(self, show: Callable[[int], None]) -> None:
        self.show = show
        self.times: list[float] = []
        self.tokens: list[int] = []
        self.prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if not self.prompt_seen:  # generate shows the prompt first
            self.prompt_seen = True
            return
        self.times.append(time.perf_counter())
        for token in value.flatten().tolist():
            self.tokens.append(token)
            self.show(token)

    def end(self) -> None:
        pass


def run(
    model: PreTrainedModel,
    ids: torch.Tensor,
    scheme: str | Scheme,
    max_new_tokens: int,
    show: Callable[[int], None] = lambda token: None,
    calibration: str | Path | None = None,
    **options: Any,
) -> Run:
    """Generate from ``ids [1, T]`` and measure; ``show`` gets each new token id as it comes.

    Args:
        scheme: any scheme; ``exact`` runs Transformers' own ``DynamicCache``, the yardstick.
        calibration: as for :func:`kvbits.cache_for`; for schemes that need one.
        options: for ``generate``; greedy by default.
    """
    scheme = Scheme.parse(scheme)
    if scheme.packs or scheme.overrides:
        cache: Cache = cache_for(model, scheme, calibration=calibration)
    else:
        cache = DynamicCache(config=model.config)
    clock, generate = _Clock(show), cast(Callable[..., Any], model.generate)
    start = time.perf_counter()
    with torch.no_grad():
        generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            streamer=clock,
            **{cache_name(model): cache, "do_sample": False, **options},
        )
    kv_bytes = cache.nbytes.total if isinstance(cache, KVCache) else sum(map(storage_bytes, cache.layers))
    first, last = clock.times[0], clock.times[-1]
    return Run(str(scheme), tuple(clock.tokens), ids.shape[1], kv_bytes, first - start, last - first)
