"""Scores on tasks, scheme by scheme: lm-evaluation-harness as the engine, paired tests, one row for each metric."""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvbits.files import Calibration, load_calibration
from kvbits.measure import caches
from kvbits.measure.pairs import Scores, pair_rows
from kvbits.measure.results import Results
from kvbits.measure.setting import CHUNK_TOKENS, SEED, setting
from kvbits.measure.task_data import LocalTask, local_tasks, read

ROW = (
    "scheme", "task", "metric", "value", "stderr", "samples", "packed_share", "packed_requests", "truncated",
    "bits_per_element", "kv_bytes", "seconds", "kernel", "p_value", "wins", "losses", "advice", "data_sha256",
    "sample_hash", "scores",
)  # fmt: skip
"""Fields of a row, in this order.

``value`` and ``stderr`` are of the metric; ``packed_share`` to ``kv_bytes`` are those of :class:`packed.Tally`, the
last the largest cache once it had read its context; ``seconds`` are of all of the task; ``p_value``, ``wins`` and
``losses`` are beside the exact cache (:mod:`pairs`), None where it was not measured; ``data_sha256`` is the digest of
local samples, None of others; ``scores`` are of each sample, and ``sample_hash`` says of which samples.
"""


SHOTS_SEED = 1234
"""The harness's own: its tasks then get the shots that they get there."""


@dataclass(frozen=True)
class Task:
    """A task as the harness has loaded it.

    Attributes:
        name: as it was asked for.
        loaded: what ``TaskManager.load`` returns.
        data_sha256: digest of local samples.
    """

    name: str
    loaded: dict[str, Any]
    data_sha256: str | None = None

    @property
    def reported(self) -> dict[str, list[str]]:
        """Under which names there are scores, each with the parts whose samples make it up: groups, or single tasks."""
        parts: dict[str, Any] = self.loaded["tasks"]
        if self.name in self.loaded.get("groups", {}):
            return {self.name: list(parts)}
        return {part: [part] for part in parts}


def load_tasks(names: Sequence[str], data: str | Path | None = None, shots: int | None = None) -> list[Task]:
    """Load tasks and their samples.

    Args:
        names: of local tasks (:func:`local_tasks`) where ``data`` is given, and of any that the harness ships.
        data: folder that local tasks read; the others load theirs from the hub.
        shots: solved samples before each question; default: as many as the task says.

    Raises:
        ImportError: if lm-evaluation-harness is not installed.
        ValueError: for an unknown task, or samples that will not do.
        FileNotFoundError: for a folder or a file that is not there.
        RuntimeError: if samples cannot be loaded from the hub.
    """
    from kvbits.measure import harness  # noqa: F401  first, for its one clear error

    if not names:
        raise ValueError(f"no tasks; give some, such as {', '.join(local_tasks())}")
    local = {name: task for name, task in local_tasks().items() if data is not None and name in names}
    samples = {name: read(task, Path(str(data))) for name, task in local.items()}
    with _quiet():
        shipped = [name for name in names if name not in local]
        found = _load_shipped(shipped, data) if shipped else {}
        found |= {name: _load_local(task, samples[name]) for name, task in local.items()}
        for loaded in found.values():
            _set_shots(loaded, shots)
    return [found[name] for name in dict.fromkeys(names)]


def _refuse_unknown(names: Sequence[str], known: Sequence[str], data: str | Path | None) -> None:
    for name in names:
        if name in known:
            continue
        if name in local_tasks() and data is None:
            raise ValueError(f"{name!r} is a task of local data: give --data FOLDER")
        near = difflib.get_close_matches(name, sorted({*local_tasks(), *known}), 3, 0.6)
        hint = f"near: {', '.join(near)}" if near else f"known are {', '.join(local_tasks())}, and 'lm_eval ls tasks'"
        raise ValueError(f"unknown task {name!r}; {hint}")


def _load_shipped(names: Sequence[str], data: str | Path | None) -> dict[str, Task]:
    """Tasks of the harness's own."""
    from lm_eval.tasks import TaskManager

    manager, found = TaskManager(), {}
    _refuse_unknown(names, manager.all_tasks, data)
    for name in names:
        try:
            found[name] = Task(name, manager.load([name]))
        except Exception as error:  # of a dozen kinds, from datasets, the hub's client or the task's own code
            raise RuntimeError(
                f"cannot load the task {name}: {str(error).splitlines()[0]}; without a network only tasks of local "
                f"data work: {', '.join(local_tasks())}, with --data FOLDER"
            ) from error
    return found


def _load_local(task: LocalTask, samples: list[dict[str, Any]]) -> Task:
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask

    split = {"test": Dataset.from_list(samples)}
    loaded = ConfigurableTask(config={**task.config, "custom_dataset": lambda **_: split})
    digest = hashlib.sha256(json.dumps(samples).encode()).hexdigest()
    return Task(task.name, {"tasks": {task.name: loaded}}, digest)


def _set_shots(task: Task, shots: int | None) -> None:
    for part in task.loaded["tasks"].values():
        wanted = part.get_config("num_fewshot") or 0 if shots is None else shots
        pool = len(part.fewshot_docs() or ()) if wanted else 0
        if wanted and pool <= wanted:
            raise ValueError(f"{task.name} has {pool} samples to take {wanted} shots from; give fewer --shots")
        part.set_config(key="num_fewshot", value=wanted)


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    schemes: Sequence[str],
    tasks: Sequence[Task],
    *,
    limit: int | None = None,
    chunk: int = CHUNK_TOKENS,
    batch: int = 1,
    calibration: str | Path | Calibration | None = None,
    path: str | Path | None = None,
    report: Callable[[str], None] = lambda line: None,
    about: Mapping[str, Any] | None = None,
) -> Results:
    """Score a model on tasks under each scheme.

    Args:
        model, tokenizer: of a decoder-only Transformers model.
        schemes: kvbits schemes and Transformers' own caches (:mod:`kvbits.measure.caches`); an exact one among them
            is what the paired tests compare with.
        tasks: from :func:`load_tasks`.
        limit: samples of each task, the first ones; default: all.
        chunk: see :class:`kvbits.measure.harness.KvbitsLM`.
        batch: rows at a time.
        calibration: for schemes that need one.
        path: file that the results are written to after each task of each scheme; what stands there already, measured
            in the same setting, is not measured again.
        report: called with what is measured next.
        about: what else the setting of the results shall say: model, data, shots, ...

    Returns:
        One row for each scheme, task and metric, with the fields :data:`ROW`. A scheme that fails on a task has one
        row with ``error`` instead.

    Raises:
        ValueError: for an unknown scheme, or a file of other results.
    """
    schemes = [caches.check(scheme, calibrated=calibration is not None) for scheme in schemes]
    if isinstance(calibration, (str, Path)):
        calibration = load_calibration(calibration)
    digest = None if calibration is None else calibration.about.get("sha256")
    how = {"limit": limit, "chunk": chunk, "batch": batch, "calibration_sha256": digest}
    measured = setting(model, lm_eval=version("lm-eval"), **how | dict(about or {}))
    results = Results.resume(path, "tasks", measured)
    for task in tasks:
        for scheme in schemes:
            if all(results.find(scheme=scheme, task=name, data_sha256=task.data_sha256) for name in task.reported):
                continue
            report(f"{task.name}, {scheme}")
            rows = _measure(
                task, limit, scheme=scheme, pretrained=model, tokenizer=tokenizer, chunk=chunk, batch_size=batch,
                calibration=calibration,
            )  # fmt: skip
            replaced = {(row["scheme"], row["task"]) for row in rows}
            results.rows = [row for row in results.rows if (row["scheme"], row["task"]) not in replaced] + rows
            pair_rows(results.rows)
            if path is not None:
                results.save(path)
    return results


def _measure(task: Task, limit: int | None, scheme: str, **options: Any) -> list[dict[str, Any]]:
    """The rows of one task under one scheme; ``options`` are those of ``KvbitsLM``."""
    with _quiet():
        import lm_eval

        from kvbits.measure.harness import KvbitsLM

        start = time.perf_counter()
        try:
            lm = KvbitsLM(scheme=scheme, **options)
            for part in task.loaded["tasks"].values():
                part.set_fewshot_seed(seed=SHOTS_SEED)  # anew, so that all schemes see the same shots
            torch.manual_seed(SEED)
            found = lm_eval.evaluate(lm, task.loaded, limit=limit, log_samples=True, bootstrap_iters=0)
        except Exception as error:  # of a peer's library, or of a scheme that this model or task is too much for
            reason = f"{type(error).__name__}: {error}"
            return [{"scheme": scheme, "task": name, "error": reason} for name in task.reported]
    tally = lm.tally
    shared = {
        "packed_share": tally.packed_share,
        "packed_requests": tally.packed_requests / max(1, tally.requests),
        "truncated": tally.truncated,
        "bits_per_element": tally.bits_per_element,
        "kv_bytes": tally.largest,
        "seconds": time.perf_counter() - start,
        "kernel": ", ".join(sorted(tally.kernels)),
        "advice": tally.advice(scheme),
        "data_sha256": task.data_sha256,
    }
    rows = []
    for name, parts in task.reported.items():
        figures = found["results"].get(name) or found.get("groups", {}).get(name) or found["results"][parts[0]]
        samples = [sample for part in parts for sample in found["samples"][part]]
        for key, value in figures.items():
            metric, comma, kind = key.partition(",")
            if comma and not metric.endswith("_stderr"):
                better = found["higher_is_better"].get(parts[0], {}).get(metric, True)
                row = {"scheme": scheme, "task": name, **shared, **_score(samples, metric, kind, value, better)}
                rows.append({field: row.get(field) for field in ROW})
    return rows


def _score(samples: list[dict[str, Any]], metric: str, kind: str, value: float, more_is_better: bool) -> dict[str, Any]:
    """What a row says of one metric; ``kind`` is the filter that answers went through before it."""
    mine = [sample for sample in samples if sample["filter"] == kind]
    asked = hashlib.sha256("".join(x["prompt_hash"] + x["target_hash"] for x in mine).encode())
    single = [sample.get(metric) for sample in mine]
    scores = [float(x) for x in single if isinstance(x, (int, float))]
    whole = len(scores) == len(mine)
    sign = 1 if more_is_better or metric == "perplexity" else -1  # whose samples are log-likelihoods
    return {
        "metric": metric if kind == "none" else f"{metric},{kind}",
        "value": _finite(value),
        "stderr": _stderr(scores, metric, value) if whole else None,
        "samples": len(mine),
        "sample_hash": asked.hexdigest()[:16],
        "scores": _compact([sign * score for score in scores]) if whole else None,
    }


def _stderr(scores: list[float], metric: str, value: float) -> float | None:
    """Standard error of a mean, or of a perplexity from its samples' log-likelihoods; None of anything else."""
    if len(scores) < 2 or not all(map(math.isfinite, scores)):
        return None
    error = statistics.stdev(scores) / math.sqrt(len(scores))
    if metric == "perplexity":
        return _finite(error * value)  # of exp(-mean), to first order
    return error if math.isclose(statistics.fmean(scores), value, rel_tol=1e-6, abs_tol=1e-9) else None


def _compact(scores: list[float]) -> Scores | None:
    """A string of 0 and 1 where they are nothing else."""
    if not all(map(math.isfinite, scores)):
        return None
    if all(score in (0, 1) for score in scores):
        return "".join(str(int(score)) for score in scores)
    return [round(score, 6) for score in scores]


def _finite(value: float) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the harness from logging what a caller of these functions cannot change."""
    log = logging.getLogger("lm_eval")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
