"""How fast each cache is at one batch and one context: all of them side by side, step by step, in one process.

Every cache reads the same prompt through the model, several times over; then all of them are stepped in rounds, one
token each, in an order that moves on by one each time. The exact cache runs first and once more last: what two
identical caches differ by is what no difference between two others can be told from. Steps that pack something are
timed apart (:mod:`kvbits.measure.runner`).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from transformers import PreTrainedModel

from kvbits.files import Calibration
from kvbits.measure.bits import bits_per_element, elements_of_a_token
from kvbits.measure.caches import EXACT, check, is_exact, kernels, nbytes
from kvbits.measure.packed import packed_tokens
from kvbits.measure.runner import Reading, Runner, tokens_between

WARM_ROUNDS = 2
"""Untimed steps of each cache before the timed ones: quanto compiles its extension at first use, and so on."""
WARM_TOKENS = 512
"""Of the untimed prompt that comes first, at the most."""
STEP_TOKENS = 16
"""What a step counts as, beside a token of a prompt, in reports of progress."""
NOISY = 1.1
"""Where two exact caches differ by more than this, a warning says so."""
QUANTO4 = "hf:quanto4"

_Item = TypeVar("_Item")


@dataclass
class Samples:
    """What was measured of one cache.

    Attributes:
        prefills, steps, flushes: seconds of each; a step that packs something is a flush.
        every: a step in so many is a flush; None where none is.
        elements: of K and V for each token of the batch; see :mod:`kvbits.measure.bits`.
        kv_bytes, bits: of the cache, and of each element; after the first steps, since sliding layers hold the whole
            prompt until then.
        packed: whether anything was packed then.
        kernel: what computed attention in the last ordinary step.
        slow: why that was no fast kernel.
        error: the reason where the cache failed; the rest is void then.
    """

    prefills: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    flushes: list[float] = field(default_factory=list)
    every: int | None = None
    elements: int = 0
    kv_bytes: int = 0
    bits: float | None = None
    packed: bool = False
    kernel: str = ""
    slow: list[str] = field(default_factory=list)
    error: str | None = None

    @property
    def token_seconds(self) -> float:
        """Of a decode step, flushes included by their share."""
        usual = statistics.median(self.steps)
        if not self.flushes or self.every is None:
            return usual
        return usual + (statistics.median(self.flushes) - usual) / self.every


_Work: TypeAlias = Callable[[Runner, Samples], None]


def measure(
    model: PreTrainedModel,
    names: Sequence[str],
    reading: Reading,
    *,
    beside: Sequence[str] = (),
    steps: int = 16,
    prefills: int = 3,
    calibration: str | Path | Calibration | None = None,
    report: Callable[[int], None] = lambda tokens: None,
) -> list[dict[str, Any]]:
    """Rows for ``names``, measured side by side and beside the exact cache.

    Args:
        model: on its device. It is left with kvbits attached.
        names: caches by name.
        reading: the text, the batch and the context.
        beside: more caches that run with them, as yardsticks; the exact one does so in any case.
        steps: timed decode steps of each, 4 or more; a step that packs comes after each prompt.
        prefills: how often each reads the prompt.
        calibration: for schemes that need one.
        report: gets the number of tokens after each piece of work; see :func:`work_tokens`.

    Returns:
        A row for each, with the columns of docs/speed.md that need no other run; of a cache that failed, with
        ``"error"`` in their place.

    Raises:
        ValueError: for unknown names. What fails later is a row.
    """
    names = [check(name, calibrated=calibration is not None) for name in names]
    every = list(dict.fromkeys([EXACT, *names, *beside]))
    elements = reading.batch * elements_of_a_token(model)
    runners = [(Runner(model, name, reading, calibration), Samples(elements=elements)) for name in [*every, EXACT]]

    def each(work: _Work, tokens: int, number: int = 0) -> None:
        for runner, samples in shifted([pair for pair in runners if pair[1].error is None], number):
            try:
                work(runner, samples)
            except Exception as error:  # is a result, and the others go on; an interruption passes
                samples.error, runner.cache = reason(error), None
            report(reading.batch * tokens)

    each(_warm_up, 0)
    if not any(samples.error is None for runner, samples in runners if runner.name in names):
        return [_failed(runner.name, samples, reading) for runner, samples in runners[:-1] if runner.name in names]
    for number in range(prefills - 1):
        each(_prompt_alone, reading.context, number)
    each(_prompt, reading.context, prefills - 1)
    for number in range(WARM_ROUNDS + steps):
        each(_step if number >= WARM_ROUNDS else _warm_step, STEP_TOKENS, number)
    each(_last, STEP_TOKENS)
    rows = _rows(every, [samples for _, samples in runners], reading)
    return [row for row in rows if row["scheme"] in names]


def work_tokens(names: Sequence[str], reading: Reading, steps: int, prefills: int) -> int:
    """All that :func:`measure` reports, if nothing fails."""
    runners = len(dict.fromkeys([EXACT, *names])) + 1
    return runners * reading.batch * (prefills * reading.context + (WARM_ROUNDS + steps + 1) * STEP_TOKENS)


def shifted(items: Sequence[_Item], number: int) -> list[_Item]:
    """The same in another order each round, so that no cache always runs after the same one."""
    place = number % len(items) if items else 0
    return [*items[place:], *items[:place]]


def reason(error: Exception) -> str:
    """An error as it stands in a row: one line of bounded length."""
    words = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {words}"[:400]


# -- what is done with one cache ---------------------------------------------------------------------------------------


def _warm_up(runner: Runner, samples: Samples) -> None:
    whole = runner.reading
    short = Reading(whole.prompts, whole.batch, min(WARM_TOKENS, whole.context), whole.chunk)
    warm = Runner(runner.model, runner.name, short, runner.calibration)
    warm.prefill()
    warm.step()


def _prompt(runner: Runner, samples: Samples) -> None:
    samples.prefills.append(runner.prefill())


def _prompt_alone(runner: Runner, samples: Samples) -> None:
    """With no other cache in memory."""
    _prompt(runner, samples)
    _flush(runner, samples)
    runner.cache = None


def _flush(runner: Runner, samples: Samples) -> None:
    step = runner.flush()
    if step is not None and not step.packed:
        raise RuntimeError("the step that was to pack something did not")
    if step is not None:
        samples.flushes.append(step.seconds)


def _warm_step(runner: Runner, samples: Samples) -> None:
    runner.step()
    cache = runner.cache
    assert cache is not None
    samples.kv_bytes, samples.every, samples.packed = nbytes(cache), tokens_between(cache), packed_tokens(cache) > 0
    samples.bits = bits_per_element(cache, samples.elements * runner.position)


def _step(runner: Runner, samples: Samples) -> None:
    step = runner.step()
    (samples.flushes if step.packed else samples.steps).append(step.seconds)
    assert runner.cache is not None
    samples.kernel = kernels(runner.cache)


def _last(runner: Runner, samples: Samples) -> None:
    samples.slow = runner.why_slow()
    _flush(runner, samples)
    runner.cache = None


# -- rows --------------------------------------------------------------------------------------------------------------


def _rows(names: Sequence[str], samples: list[Samples], reading: Reading) -> list[dict[str, Any]]:
    """``samples`` are those of ``names``, whose first is the exact cache, and once more of that."""
    exact, noise = _together(samples[0], samples[-1])
    found = {**dict(zip(names, samples, strict=False)), EXACT: exact}
    quanto = found.get(QUANTO4)
    rows = []
    for name, own in found.items():
        if own.error is not None:
            rows.append(_failed(name, own, reading))
            continue
        row = _figures(name, own, reading)
        row["speed_against_exact"], row["speed_against_quanto4"] = _ratio(exact, own), _ratio(quanto, own)
        row["noise"] = noise
        row["warnings"] = _warnings(name, own, noise, reading)
        rows.append(row)
    return rows


def _together(first: Samples, last: Samples) -> tuple[Samples, float | None]:
    """The exact cache's two runs as one, and how far apart they were: the longer step over the shorter one."""
    if first.error is not None or last.error is not None:
        return (last if last.error is not None else first), None
    short, long = sorted(statistics.median(one.steps) for one in (first, last))
    prefills, steps = first.prefills + last.prefills, first.steps + last.steps
    return Samples(prefills, steps, kv_bytes=first.kv_bytes, bits=first.bits, kernel=first.kernel), long / short


def _ratio(yardstick: Samples | None, own: Samples) -> float | None:
    """How many tokens come in the time of one of the yardstick's; None where that was not measured."""
    if yardstick is None or yardstick.error is not None:
        return None
    return yardstick.token_seconds / own.token_seconds


def _failed(name: str, own: Samples, reading: Reading) -> dict[str, Any]:
    return {"scheme": name, "batch": reading.batch, "context": reading.context, "error": own.error}


def _figures(name: str, own: Samples, reading: Reading) -> dict[str, Any]:
    low, middle, high = statistics.quantiles(own.steps, n=4, method="inclusive")
    first_token = statistics.median(own.prefills)
    return {
        "scheme": name,
        "batch": reading.batch,
        "context": reading.context,
        "prefill_tokens_per_second": reading.batch * reading.context / first_token,
        "first_token_seconds": first_token,
        "first_token_seconds_low": min(own.prefills),
        "first_token_seconds_high": max(own.prefills),
        "step_ms": 1e3 * middle,
        "step_ms_low": 1e3 * low,
        "step_ms_high": 1e3 * high,
        "step_ms_min": 1e3 * min(own.steps),
        "step_ms_max": 1e3 * max(own.steps),
        "steps": len(own.steps),
        "flush_ms": 1e3 * max(own.flushes) if own.flushes else None,
        "flushes": len(own.flushes),
        "flush_every": own.every,
        "decode_tokens_per_second": reading.batch / own.token_seconds,
        "kv_bytes": own.kv_bytes,
        "bits_per_element": own.bits,
        "kernel": own.kernel,
    }


def _warnings(name: str, own: Samples, noise: float | None, reading: Reading) -> list[str]:
    """What a reader of the figures has to know."""
    found = list(own.slow)
    if not name.startswith("hf:") and not is_exact(name) and not own.packed:
        found.append(f"nothing is packed at {reading.context:,} tokens: all of them are exact")
    if name == EXACT and noise is not None and noise > NOISY:
        found.append(f"two exact caches differ by {noise - 1:.0%} in this run: no smaller difference means anything")
    if reading.prompts.repeats(reading.batch, reading.context):
        found.append(f"the text has only {len(reading.prompts.tokens):,} tokens: rows share parts of it")
    return found
