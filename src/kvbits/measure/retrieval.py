"""Retrieval through the cache: does a model still find a fact that was planted in its context?

The context goes through the cache in chunks, then the question in chunks of at most :data:`STEP` tokens, however long
those of the context are: question and answer always read the needles from what is stored. Two answers are taken:

- Greedy. A *hit* is one that holds all that is wanted, and nothing that is unwanted.
- Forced: the exemplary answer, token by token. The mean log probability of its tokens, and their mean rank (1 is the
  likeliest), say how near the answer is also where a model fails the task with its exact cache.

Prompts are the same for all caches, and the exact cache comes first: *agreement* is the share of its hits that a scheme
hits too.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from transformers import Cache, PreTrainedModel

from kvbits.files import Calibration, load_calibration
from kvbits.hf.names import cache_name
from kvbits.measure import caches
from kvbits.measure.bits import bits_per_element, elements_of_a_token
from kvbits.measure.haystack import Haystack
from kvbits.measure.needles import HOPS, PAIRS, TASKS, Prompt, Prompts
from kvbits.measure.results import KEYS, Results
from kvbits.measure.setting import SEED, setting
from kvbits.schemes.scheme import Scheme

STEP = 16
"""Tokens of the question that are read at a time, at most; also the usual chunk of the context."""

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
DEFAULT_TASKS = ("passkey", "multikey", "variables")


@dataclass(frozen=True)
class Plan:
    """What is measured. Lengths are in tokens; ``length`` holds everything, the room for the answer included.

    Attributes:
        tasks: names of :data:`kvbits.measure.needles.TASKS`.
        lengths: of the whole prompts.
        depths: 0 to 1, of the needles in the haystack.
        repeats: prompts for each cell, with other needles and another piece of the haystack.
        chunk: tokens of the context that are read at a time.
        chat: whether prompts are wrapped in the chat template; None: where there is one.
        seed: of all that is drawn.

    Raises:
        ValueError: for an unknown task, or a number that is out of range.
    """

    tasks: tuple[str, ...] = DEFAULT_TASKS
    lengths: tuple[int, ...] = (512, 2048)
    depths: tuple[float, ...] = DEPTHS
    repeats: int = 5
    chunk: int = STEP
    chat: bool | None = None
    seed: int = SEED

    def __post_init__(self) -> None:
        for name in ("tasks", "lengths", "depths"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty; give one or more")
            object.__setattr__(self, name, tuple(dict.fromkeys(getattr(self, name))))
        for task in self.tasks:
            if task not in TASKS:
                raise ValueError(f"unknown task {task!r}; known are {', '.join(TASKS)}")
        for depth in self.depths:
            if not 0 <= depth <= 1:
                raise ValueError(f"depth {depth} is not between 0, the beginning of the haystack, and 1, its end")
        for name, number in (("repeats", self.repeats), ("chunk", self.chunk), *(("length", n) for n in self.lengths)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ValueError(f"{name}={number!r} is not a whole number above 0")

    def cells(self) -> Iterator[tuple[str, int, float]]:
        """Task, length and depth of each, as they are measured."""
        for task in self.tasks:
            for length in self.lengths:
                for depth in self.depths:
                    yield task, length, depth


class Score(NamedTuple):
    """What came of one prompt.

    Attributes:
        hit: whether the greedy answer holds what is wanted.
        logprob: mean log probability of the exemplary answer's tokens, in nats.
        rank: their mean rank among all tokens; 1 is the likeliest.
        exact_share: of the needles' tokens, those that were exact tokens when the question began.
        text: the greedy answer.
    """

    hit: bool
    logprob: float
    rank: float
    exact_share: float
    text: str


class Scorer:
    """Reads prompts through caches of one model.

    Args:
        model: a decoder-only Transformers model; it runs on whatever device it is on, one prompt at a time.
        tokenizer: to read greedy answers.
        chunk: tokens of the context at a time.
    """

    def __init__(self, model: Any, tokenizer: Any, chunk: int = STEP) -> None:
        self.model, self.tokenizer, self.chunk = model, tokenizer, chunk
        stops = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
        self._stops = {getattr(tokenizer, "eos_token_id", None), *(stops if isinstance(stops, list) else [stops])}
        short = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._options = {"logits_to_keep": 1} if short else {}

    @torch.no_grad()
    def score(self, prompt: Prompt, cache: Cache) -> Score:
        """Read a prompt into an empty cache, and answer. The cache then holds it with the exemplary answer."""
        self._read(prompt.context, cache, self.chunk)
        share = _share(prompt, caches.exact_ends(cache))
        found = self._read(prompt.question, cache, min(self.chunk, STEP))
        logprobs, ranks, differs = [], [], False
        written: list[int] = []
        for token in prompt.answer:
            if not math.isfinite(found[token]):
                raise ValueError(f"the model gives the answer a log probability of {float(found[token])}")
            logprobs.append(float(found[token]))
            ranks.append(1 + int((found > found[token]).sum()))
            likeliest = int(found.argmax())
            if likeliest != token and not differs:  # until here, the greedy answer was the exemplary one
                differs = True
                written += self._write(likeliest, caches.branch(cache), prompt.room - len(written))
            elif not differs:
                written.append(token)
            found = self._read([token], cache, 1)
        if not differs:
            rest = prompt.room - len(written)
            written += self._write(int(found.argmax()), caches.branch(cache), rest)
        text = self.tokenizer.decode(written, skip_special_tokens=True)
        return Score(prompt.riddle.solved_by(text), fmean(logprobs), fmean(ranks), share, text)

    def _read(self, ids: Sequence[int], cache: Cache, chunk: int) -> torch.Tensor:
        """Log probabilities ``[vocabulary]``, float32, of the token after ``ids``."""
        for first in range(0, len(ids), chunk):
            given = torch.tensor([ids[first : first + chunk]], device=self.model.device)
            result = self.model(input_ids=given, use_cache=True, **{cache_name(self.model): cache}, **self._options)
            logits: torch.Tensor = result.logits[0, -1]
        return logits.float().log_softmax(-1)

    def _write(self, token: int, cache: Cache, most: int) -> list[int]:
        """Greedy tokens, from ``token`` on, until one that stops."""
        written: list[int] = []
        while token not in self._stops and len(written) < most:
            written.append(token)
            if len(written) < most:
                token = int(self._read([token], cache, 1).argmax())
        return written


def _share(prompt: Prompt, ends: tuple[int, int]) -> float:
    """Of the tokens of the needles, those among the first or the last of the context."""
    first, last = ends[0], len(prompt.context) - ends[1]
    tokens = [token for needle in prompt.needles for token in needle]
    return sum(token < first or token >= last for token in tokens) / len(tokens)


def wilson(hits: int, tries: int, z: float = 1.96) -> tuple[float, float]:
    """The interval of a share, 95 % by default (Wilson 1927); it holds also for few tries and shares of 0 and 1."""
    share, spread = hits / tries, z * z / tries
    middle = (share + spread / 2) / (1 + spread)
    half = math.sqrt(share * (1 - share) * spread + spread * spread / 4) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)


@dataclass
class Measurement:
    """Retrieval of one model over one haystack: checks first, then rows, one cell of one scheme at a time.

    Args:
        model, tokenizer: a decoder-only Transformers model and its tokenizer.
        text: the haystack.
        schemes: names of kvbits schemes and peers (:mod:`kvbits.measure.caches`). The exact cache is measured first
            even if it is not among them.
        plan: what is measured.
        calibration: for schemes that need one.

    Raises:
        ValueError: for an empty haystack, a length that the model or the task has no room for, an unknown or
            uncalibrated scheme, one that does not fit the model, or a wish for a chat template where there is none.
        What a peer cannot do becomes a row with the error.
    """

    model: PreTrainedModel
    tokenizer: Any
    text: str
    schemes: Sequence[str]
    plan: Plan = field(default_factory=Plan)
    calibration: str | Path | Calibration | None = None

    def __post_init__(self) -> None:
        if isinstance(self.calibration, (str, Path)):
            self.calibration = load_calibration(self.calibration)
        names = list(dict.fromkeys(caches.check(name, self.calibration is not None) for name in self.schemes))
        self.baseline = next(filter(caches.is_exact, names), caches.EXACT)
        self.schemes = [self.baseline, *(name for name in names if name != self.baseline)]
        for name in self.schemes:
            if not name.startswith("hf:"):
                caches.make(self.model, name, self.calibration)
        self.haystack = Haystack(self.text, self.tokenizer)
        self.prompts = Prompts(self.haystack, self.tokenizer, self.plan.chat, self.plan.seed)
        limit = getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        for length in self.plan.lengths:
            if limit is not None and length > limit:
                raise ValueError(
                    f"length {length:,} is more than the {limit:,} tokens that this model was made for; {limit:,} is "
                    "the largest possible"
                )
            for task in self.plan.tasks:
                self.prompts.check(task, length, self.plan.repeats)

    def setting(self, **more: Any) -> dict[str, Any]:
        """What is recorded beside the rows, for :class:`kvbits.measure.results.Results`."""
        return {
            **setting(self.model),
            "seed": self.plan.seed,
            "chunk": self.plan.chunk,
            "chat": self.prompts.chat,
            "pairs": PAIRS,
            "hops": HOPS,
            "haystack_tokens": len(self.haystack.ids),
            "haystack_sha256": hashlib.sha256(self.text.encode()).hexdigest(),
            **more,
        }

    def warnings(self) -> list[str]:
        """What makes figures mean less than they seem to, as far as it is known before they are measured."""
        found = []
        longest, tokens = max(self.plan.lengths), len(self.haystack.ids)
        most = max(self.prompts.free(task, longest) for task in self.plan.tasks)
        if most > tokens:
            found.append(f"the haystack has {tokens:,} tokens only, and is repeated to make {most:,}")
        if self.plan.chunk > STEP and self.plan.chunk >= longest / 2:
            found.append(
                f"chunks of {self.plan.chunk:,} tokens attend to their own exact keys and values, so only question and "
                f"answer go through the cache; give chunk {STEP}"
            )
        for name in self.schemes:
            if caches.is_exact(name):
                continue
            whole = [length for length in self.plan.lengths if not caches.would_pack(name, length)]
            if whole:
                found.append(
                    f"{name} packs nothing of {', '.join(f'{n:,}' for n in whole)} tokens: it is exact there, because "
                    f"sinks and residual hold them all; give more than {_least_packed(name):,}, or a smaller residual="
                )
        return found

    def run(
        self,
        results: Results,
        keep: Callable[[Results], Any] = lambda results: None,
        report: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[dict[str, Any]]:
        """Measure what ``results`` does not hold yet, and return the rows of this plan, the exact cache's first.

        Args:
            results: of the kind ``retrieval``; rows are added to it.
            keep: called with ``results`` after each new row, to save it.
            report: called with the tokens that are read and those that there are to read.
        """
        cells = [(name, *cell) for name in self.schemes for cell in self.plan.cells()]
        missing = [cell for cell in cells if self._find(results, *cell) is None]
        total, before = self.plan.repeats * sum(length for _, _, length, _ in missing), 0
        scorer = Scorer(self.model, self.tokenizer, self.plan.chunk)
        per_token = elements_of_a_token(self.model) if missing else 0
        for name, task, length, depth in missing:
            try:
                scores = []
                start = time.perf_counter()
                for prompt in (self.prompts.make(task, length, depth, n) for n in range(self.plan.repeats)):
                    cache = caches.make(self.model, name, self.calibration)
                    scores.append(scorer.score(prompt, cache))
                    report(before + len(scores) * length, total)
                figures = {**_figures(scores), **_sizes(cache, per_token), "seconds": time.perf_counter() - start}
            except Exception as error:  # a peer or scheme that fails is a row: the others go on
                figures = {"error": " ".join(f"{type(error).__name__}: {error}".split())}
            row = {"scheme": name, "task": task, "length": length, "depth": depth, **figures}
            row.update(self._beside(results, row))
            results.put(row)
            keep(results)
            before += self.plan.repeats * length
            report(before, total)
        rows = {tuple(row.get(key) for key in KEYS["retrieval"]): row for row in results.rows}
        for cell in cells:  # once more: the exact cache's row may have failed in an earlier run, and not in this one
            rows[cell].update(self._beside(results, rows[cell]))
        keep(results)
        return [rows[cell] for cell in cells]

    def _beside(self, results: Results, row: dict[str, Any]) -> dict[str, Any]:
        """What a row says of its calibration, and of the exact cache on the same prompts; None if that failed."""
        if "error" in row:
            return {}
        known: dict[str, Any] = self._calibrated_by(row["scheme"])
        cell = row["task"], row["length"], row["depth"]
        exact = row if row["scheme"] == self.baseline else self._find(results, self.baseline, *cell)
        if exact is None:
            return {**known, "logprob_exact": None, "agreement": None}
        both = [here for here, there in zip(row["hits"], exact["hits"], strict=True) if there]
        return {**known, "logprob_exact": exact["logprob"], "agreement": fmean(both) if both else None}

    def _find(self, results: Results, name: str, task: str, length: int, depth: float) -> dict[str, Any] | None:
        """The row of a cell, measured with as many repeats and the same calibration."""
        wanted = {"repeats": self.plan.repeats, "calibration": None, **self._calibrated_by(name)}
        return results.find(scheme=name, task=task, length=length, depth=depth, **wanted)

    def _calibrated_by(self, name: str) -> dict[str, str]:
        if name.startswith("hf:") or not isinstance(self.calibration, Calibration):
            return {}
        scheme = Scheme.parse(name)
        digest = str(self.calibration.about["sha256"])
        return {"calibration": digest} if scheme.needs_calibration or scheme.centred else {}


def remarks(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What must be known beside a table: which cells failed, which are exact, and where the exact cache never hits."""
    failed: dict[tuple[str, str], int] = {}
    for row in rows:
        if "error" in row:
            failed[row["scheme"], row["error"]] = failed.get((row["scheme"], row["error"]), 0) + 1
    found = [
        f"{scheme} failed in {count} cells, which its sums and means leave out: {error}"
        for (scheme, error), count in failed.items()
    ]
    measured = [row for row in rows if "error" not in row]
    for task, length in dict.fromkeys((row["task"], row["length"]) for row in measured):
        here = [row for row in measured if (row["task"], row["length"]) == (task, length)]
        if not any(any(row["hits"]) for row in here if caches.is_exact(row["scheme"])):
            found.append(
                f"{task} at {length:,} tokens: the exact cache never hits, so the model cannot do it; hits say nothing "
                "of schemes there, and log probabilities do"
            )
    shares = [row for row in measured if row["exact_share"] and not caches.is_exact(row["scheme"])]
    if shares:
        found.append(
            "* what is asked for stood, at least in part, among the tokens that the scheme keeps exactly (sinks, "
            "residual) when the question began"
        )
    return found


def _least_packed(name: str) -> int:
    """Tokens of which a scheme packs the first block, less one."""
    scheme = Scheme.parse(name)
    return caches.exact_tokens(scheme) + scheme.block - 1


def _figures(scores: Sequence[Score]) -> dict[str, Any]:
    """A cell's figures, and below them what each prompt gave."""
    hits = [score.hit for score in scores]
    low, high = wilson(sum(hits), len(hits))
    return {
        "repeats": len(scores),
        "accuracy": fmean(hits),
        "accuracy_low": low,
        "accuracy_high": high,
        "logprob": fmean(score.logprob for score in scores),
        "rank": fmean(score.rank for score in scores),
        "exact_share": fmean(score.exact_share for score in scores),
        "hits": hits,
        "logprobs": [score.logprob for score in scores],
        "answers": [score.text for score in scores],
    }


def _sizes(cache: Cache, per_token: int) -> dict[str, Any]:
    """What the cache of a cell's last prompt took, and what computed attention."""
    bits = bits_per_element(cache, per_token * cache.get_seq_length())
    return {"bits_per_element": bits, "kv_bytes": caches.nbytes(cache), "kernel": caches.kernels(cache)}
