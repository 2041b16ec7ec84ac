"""One model that answers one request after the other, each with a cache from the pool. Knows nothing of HTTP."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList
from transformers.modeling_layers import GradientCheckpointingLayer

from kvbits.hf.attach import cache_for
from kvbits.hf.cache import KVCache
from kvbits.hf.names import cache_name
from kvbits.schemes.scheme import Scheme
from kvbits.serve.errors import Refused
from kvbits.serve.pool import Pool
from kvbits.serve.sizes import Sizes
from kvbits.sessions.prefixes import PrefixStore

MEASURE_TOKENS = 64
"""How often the bytes of the cache in use are looked at."""


class Aborted(Exception):
    """Raised in the middle of an answer that nobody waits for any more."""


@dataclass
class Job:
    """One request, as the engine sees it.

    Args:
        prompt: int64 ``[T]``.
        config: for ``generate``; ``max_new_tokens`` is set.
        see: gets each new token id as it comes; True ends the answer.
        aborted: whether to stop at once; asked before every layer.
        seed: of what is drawn at random.

    Attributes:
        reused_tokens: of the prompt, which the cache had read before.
        first_token: when it came, as ``time.perf_counter``; None before.
        ended: whether the text ended by itself, not at the limit.
    """

    prompt: torch.Tensor
    config: GenerationConfig
    see: Callable[[int], bool]
    aborted: Callable[[], bool] = lambda: False
    seed: int | None = None
    reused_tokens: int = 0
    first_token: float | None = None
    ended: bool = False
    tokens: list[int] = field(default_factory=list)


class Engine:
    """A model, a scheme and the pool of caches.

    Args:
        model: a decoder-only Transformers model; kvbits is attached to it.
        scheme: of its caches.
        budget_bytes: of all of them.
        calibration: as for :func:`kvbits.cache_for`.
        context: most tokens of a prompt and its answer; default: what the model was made for.
        folder: for caches that have no room in memory, made for the same model, scheme and calibration.

    Raises:
        ValueError: as :func:`kvbits.cache_for`, and for a budget in which not even a short text has room.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        scheme: str | Scheme,
        budget_bytes: int,
        calibration: Any = None,
        context: int | None = None,
        folder: PrefixStore | None = None,
    ) -> None:
        self.model = model
        longest = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if context is not None and longest is not None and context > longest:
            raise ValueError(f"a context of {context} tokens is more than the {longest} that the model was made for")
        self.context = context or longest or 2**20
        self.sizes = Sizes(model, cache_for(model, scheme, calibration=calibration))
        self.pool = Pool(lambda: cache_for(model, scheme, calibration=calibration), self.sizes, budget_bytes, folder)
        self.room_tokens = self.sizes.most_tokens(budget_bytes, self.context)
        if self.room_tokens < 2:
            raise ValueError(
                f"a budget of {budget_bytes:,} bytes has no room for a cache of 2 tokens, which may take "
                f"{self.sizes.at(2):,}; give more"
            )
        self._job: Job | None = None
        self._hooks = [
            layer.register_forward_pre_hook(self._check)
            for layer in model.modules()
            if isinstance(layer, GradientCheckpointingLayer)  # what Transformers' decoder layers are
        ]

    def close(self) -> None:
        """Forget all caches, and leave the model as it was but for kvbits, which :func:`kvbits.disable` takes off."""
        for hook in self._hooks:
            hook.remove()
        self.pool.kept.clear()

    def admit(self, prompt_tokens: int, new_tokens: int | None, default: int) -> int:
        """How many tokens an answer may have.

        Args:
            prompt_tokens: of the prompt.
            new_tokens: asked for; None: ``default``, or as many as there is room for.

        Raises:
            Refused: if prompt and answer are longer than the context, or their cache larger than the budget.
        """
        asked = new_tokens or 1
        text = f"{prompt_tokens} tokens of prompt and {asked} of answer"
        if prompt_tokens + asked > self.context:
            raise Refused(
                f"{text} are more than the {self.context} that there is room for; {self._near(prompt_tokens)}",
                code="context_length_exceeded",
            )
        if prompt_tokens + asked > self.room_tokens:
            nbytes = self.sizes.at(prompt_tokens + asked)
            raise Refused(
                f"{text} may take a cache of {nbytes:,} bytes, and the budget of all caches is "
                f"{self.pool.budget_bytes:,}: room for {self.room_tokens} tokens; {self._near(prompt_tokens)}",
                code="memory_budget_exceeded",
            )
        return new_tokens or min(default, self.room_tokens - prompt_tokens)

    def _near(self, prompt_tokens: int) -> str:
        left = self.room_tokens - prompt_tokens
        return f"ask for at most {left}" if left > 0 else "shorten the prompt"

    def run(self, job: Job) -> None:
        """Answer one request, in the thread of all of them; the job says what became of it.

        Raises:
            Aborted: where the job was.
            Exception: whatever a model raises. The cache is then dropped.
        """
        limit = len(job.prompt) + (job.config.max_new_tokens or 0)
        cache, job.reused_tokens = self.pool.take(job.prompt, limit)
        self._job, job.tokens = job, job.prompt.tolist()
        kept = False
        try:
            self._generate(job, cache)
            kept = True
        except Aborted:
            with contextlib.suppress(ValueError):  # what the call in progress has stored cannot be taken back
                cache.settle()
                kept = True
            raise
        finally:
            self._job = None
            if kept and cache.get_seq_length():
                self.pool.give(cache, len(job.prompt))
            else:
                self.pool.measure()

    def _generate(self, job: Job, cache: KVCache) -> None:
        ids = job.prompt[None].to(self.model.device)
        with _seeded(job.seed, self.model.device):
            self.model.generate(  # type: ignore[operator]
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                generation_config=job.config,
                stopping_criteria=StoppingCriteriaList([_Watch(job, lambda: self.pool.measure(cache))]),
                **{cache_name(self.model): cache},
            )

    def _check(self, *_: Any) -> None:
        """Before every layer, so that nobody waits for a long prompt that nobody wants."""
        if self._job is not None and self._job.aborted():
            raise Aborted


class _Watch(StoppingCriteria):
    """Shows each new token to the job, and ends its answer."""

    def __init__(self, job: Job, measure: Callable[[], object]) -> None:
        self.job, self.measure = job, measure
        eos = job.config.eos_token_id
        self.eos = set(eos if isinstance(eos, list) else [eos])

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        job = self.job
        done = len(job.tokens) - len(job.prompt)
        if not job.ended and done < job.config.max_new_tokens:  # on some devices one step more is made than is wanted
            token = int(input_ids[0, -1])
            if done == 0:
                job.first_token = time.perf_counter()
            if done % MEASURE_TOKENS == 0:
                self.measure()
            job.tokens.append(token)
            job.ended = job.see(token) or token in self.eos
        if job.aborted():
            raise Aborted
        return torch.full((len(input_ids),), job.ended, dtype=torch.bool, device=input_ids.device)


@contextlib.contextmanager
def _seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    """Random numbers from a seed, which those who come later do not depend on."""
    if seed is None:
        yield
        return
    kind = "cuda" if device.type == "cpu" else device.type
    with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=kind):
        torch.manual_seed(seed)
        yield
