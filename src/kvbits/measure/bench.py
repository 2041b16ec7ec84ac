"""``kvbits bench``: speed and memory of many caches over contexts, batches and weights, into one file of results.

What is measured side by side (:mod:`kvbits.measure.speed`) is all caches of one *cell*: one kind of weights, one batch
and one context. Rows are written cell by cell, so an interrupted run loses the cell it was in and goes on with it.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvbits.files import load_calibration
from kvbits.hf.attach import enable
from kvbits.hf.loading import load_model, load_tokenizer
from kvbits.measure import caches
from kvbits.measure import weights as kinds
from kvbits.measure.breakeven import with_break_even
from kvbits.measure.caches import EXACT
from kvbits.measure.memory import Peak
from kvbits.measure.peak import PeakJob, peak_here, peak_of
from kvbits.measure.results import Results
from kvbits.measure.room import Shapes, refuse_unless_it_fits, room
from kvbits.measure.runner import Prompts, Reading
from kvbits.measure.setting import model_name, setting
from kvbits.measure.speed import QUANTO4, WARM_ROUNDS, measure, reason, work_tokens
from kvbits.measure.text import prose

_LEAST = {"contexts": 2, "batches": 1, "steps": 4, "prefills": 1, "chunk": 1}

Load = Callable[[], tuple[PreTrainedModel, PreTrainedTokenizerBase]]


class Cell(NamedTuple):
    """What is measured side by side."""

    weights: str
    batch: int
    context: int

    def __str__(self) -> str:
        batch = f", batch {self.batch}" if self.batch > 1 else ""
        weights = f", {self.weights} weights" if self.weights != "none" else ""
        return f"{self.context:,} tokens{batch}{weights}"


@dataclass(frozen=True)
class Bench:
    """What to measure.

    Attributes:
        model: hub id, local folder, ``.gguf`` file or ``smollm2``.
        schemes: caches by name; the exact one is measured in any case.
        contexts: tokens of the prompt.
        batches: rows, each with a text of its own.
        weights: see :data:`kvbits.measure.weights.WEIGHTS`.
        dtype: ``auto``, ``float32``, ``bfloat16`` or ``float16``.
        device: of the model.
        steps: timed decode steps of each cache.
        prefills: how often each cache reads the prompt.
        chunk: tokens of a prompt that are read at once; None is all of them.
        calibration: a folder that ``kvbits calibrate`` wrote.
        text: what is read; None is :func:`kvbits.measure.text.prose`.
        text_name: what the results call it.
        allow_long: measure also beyond the positions that the model was made for.
        peak: whether to measure peak memory too: on a CPU in one more process for each row, which loads the model.

    Raises:
        ValueError: for names, numbers and texts that are none, with what is allowed.
        ModuleNotFoundError: where weights need a package that is missing.
        FileNotFoundError: for a calibration that is not there.
    """

    model: str
    schemes: Sequence[str]
    contexts: Sequence[int]
    batches: Sequence[int] = (1,)
    weights: Sequence[str] = ("none",)
    dtype: str = "auto"
    device: str = "cpu"
    steps: int = 16
    prefills: int = 3
    chunk: int | None = None
    calibration: str | Path | None = None
    text: str | None = None
    text_name: str = "the help topics of Python"
    allow_long: bool = False
    peak: bool = True

    def __post_init__(self) -> None:
        for field in ("schemes", "contexts", "batches", "weights"):
            if not getattr(self, field):
                raise ValueError(f"no {field} were given")
        for field, least in _LEAST.items():
            given = getattr(self, field)
            for number in given if isinstance(given, Sequence) else [given]:
                if number is not None and number < least:
                    raise ValueError(f"{field}: {number} is too few; give {least} or more")
        for name in self.weights:
            kinds.check(name)
        if self.calibration is not None:
            load_calibration(self.calibration)
        for name in self.schemes:
            caches.check(name, calibrated=self.calibration is not None)
        if self.text is not None and not self.text.strip():
            raise ValueError("the text is empty; give one with words in it")

    @property
    def names(self) -> list[str]:
        """The caches, each once, the exact one first."""
        return list(dict.fromkeys([EXACT, *map(str.strip, self.schemes)]))

    @property
    def cells(self) -> list[Cell]:
        """In the order in which they are measured: short contexts first, so that something is there soon."""
        ways, batches, contexts = dict.fromkeys(self.weights), sorted(set(self.batches)), sorted(set(self.contexts))
        return [Cell(weights.strip(), b, c) for weights in ways for b in batches for c in contexts]

    def run(
        self,
        path: str | Path | None = None,
        load: Load | None = None,
        report: Callable[[str, int, int], None] = lambda what, done, count: None,
        show: Callable[[Cell, list[dict[str, Any]]], None] = lambda cell, rows: None,
    ) -> Results:
        """Measure, and write the file of results after each cell.

        Args:
            path: the file; one that is there is gone on with. None writes none.
            load: makes the model and its tokenizer, in place of :func:`kvbits.load_model`; called once for each kind
                of weights, since they are quantized in place.
            report: gets what is being done, and how many tokens of how many are.
            show: gets the rows of each cell, those found in the file too.

        Returns:
            Results of the kind ``speed``; docs/speed.md describes their rows.

        Raises:
            ValueError: before anything is measured, for a context beyond the model's positions, for what does not fit
                in memory, and for a file of another setting. What fails later is a row with ``"error"``.
        """
        load = load or self._load
        model: PreTrainedModel | None
        model, tokenizer = load()
        run = _Run(self, model, tokenizer, path, report)
        for weights in dict.fromkeys(cell.weights for cell in run.todo):
            cells = [cell for cell in run.todo if cell.weights == weights]
            busy, failure = any(run.todo[cell] for cell in cells), None
            if busy:
                if model is None:
                    gc.collect()  # the last one's room
                    model = load()[0]
                failure = run.prepare(model, weights)
            for cell in cells:
                run.measure(model, cell, failure)
                show(cell, run.rows_of(cell))
            if busy:
                model = None  # its weights are no longer as they were loaded
        return run.results

    def _load(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        dtype = self.dtype if self.dtype == "auto" else getattr(torch, self.dtype)
        model = load_model(self.model, dtype=dtype)
        return model.to(torch.device(self.device)), load_tokenizer(self.model)  # type: ignore[arg-type]


class _Run:
    """One run of a :class:`Bench`, and what is left of it to do."""

    def __init__(
        self,
        bench: Bench,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        path: str | Path | None,
        report: Callable[[str, int, int], None],
    ) -> None:
        self.bench, self.path, self.report = bench, path, report
        self.prompts = Prompts(tokenizer(bench.text or prose(), return_tensors="pt").input_ids[0])
        self.calibration = None if bench.calibration is None else load_calibration(bench.calibration)
        about = {
            "model": model_name(bench.model),
            "text": bench.text_name,
            "text_tokens": len(self.prompts.tokens),
            "steps": bench.steps,
            "prefills": bench.prefills,
            "chunk": bench.chunk,
            "calibration": None if bench.calibration is None else Path(bench.calibration).name,
            "calibration_sha256": None if self.calibration is None else self.calibration.about.get("sha256"),
            "peak": bench.peak,
        }
        self.results = Results.resume(path, "speed", {**setting(model), **about})
        self.dtype = str(model.dtype).removeprefix("torch.")
        self.todo = {
            cell: [name for name in bench.names if self.results.find(scheme=name, **self._place(cell)) is None]
            for cell in bench.cells
        }
        self._refuse_too_long(model)
        self._refuse_too_large(model)
        self.done, self.count = 0, sum(self._tokens(cell) for cell in self.todo)

    def prepare(self, model: PreTrainedModel, weights: str) -> str | None:
        """Check the calibration against the weights as they were loaded, then quantize them; the reason if that fails.

        The calibration fits the model all the same, only no longer its fingerprint.
        """
        if self.calibration is not None:
            enable(model, calibration=self.calibration)
        try:
            kinds.quantize(model, weights)
        except Exception as error:  # a combination that does not work is a result
            return reason(error)
        return None

    def measure(self, model: PreTrainedModel | None, cell: Cell, failure: str | None) -> None:
        """Measure what is missing of a cell, and write it."""
        names = self.todo[cell]
        if not names:
            return
        assert model is not None
        before, bench = self.done, self.bench
        rows: list[dict[str, Any]] = [{"scheme": name, "error": failure} for name in names]
        if failure is None:
            self._advance(cell, 0)
            beside = [QUANTO4] if QUANTO4 in bench.names else []
            rows = measure(
                model, names, self._reading(cell), beside=beside, steps=bench.steps, prefills=bench.prefills,
                calibration=self.calibration, report=lambda tokens: self._advance(cell, tokens),
            )  # fmt: skip
        for row in rows:
            if "error" in row:
                row["error"] += self._hint(model, cell)
            elif bench.peak:
                row |= self._peak(model, cell, row["scheme"], row["warnings"])
                self._advance(cell, cell.batch * cell.context)
            self.results.put({"scheme": row["scheme"], **self._place(cell), **row})
        self.results.rows = with_break_even(self.results.rows)
        self._advance(cell, before + self._tokens(cell) - self.done)  # what failed was left out
        if self.path is not None:
            self.results.save(self.path)

    def rows_of(self, cell: Cell) -> list[dict[str, Any]]:
        """The rows of a cell, those of a file that is gone on with too."""
        wanted = self._place(cell)
        return [row for row in self.results.rows if all(row[key] == value for key, value in wanted.items())]

    def _place(self, cell: Cell) -> dict[str, Any]:
        """The fields that tell the rows of a cell from others."""
        return {**cell._asdict(), "dtype": self.dtype}

    def _reading(self, cell: Cell) -> Reading:
        return Reading(self.prompts, cell.batch, cell.context, self.bench.chunk)

    def _peak(self, model: PreTrainedModel, cell: Cell, name: str, warnings: list[str]) -> dict[str, Any]:
        """Columns of a row; ``warnings`` gets the reason where there is no figure."""
        if model.device.type == "cpu":
            peak = peak_of(self._job(cell, name))
        else:
            try:
                peak = peak_here(model, name, self._reading(cell), self.calibration)
            except Exception as error:  # out of memory, for one: the other figures are there
                peak = Peak(reason(error))
        if peak.nbytes is None:
            warnings.append(f"no peak memory: {peak.what}")
        return {"peak_bytes": peak.nbytes, "peak_of": peak.what}

    def _job(self, cell: Cell, name: str) -> PeakJob:
        bench, folder = self.bench, self.bench.calibration
        return PeakJob(
            model=bench.model,
            dtype=self.dtype,
            weights=cell.weights,
            scheme=name,
            calibration=None if folder is None else str(folder),
            tokens=self.prompts.tokens.tolist(),
            batch=cell.batch,
            context=cell.context,
            chunk=bench.chunk,
            threads=torch.get_num_threads(),
        )

    def _tokens(self, cell: Cell) -> int:
        """What a cell counts as in reports."""
        names, bench = self.todo[cell], self.bench
        peaks = len(names) * cell.batch * cell.context if bench.peak else 0
        return work_tokens(names, self._reading(cell), bench.steps, bench.prefills) + peaks if names else 0

    def _advance(self, cell: Cell, tokens: int) -> None:
        self.done = min(self.count, self.done + tokens)
        self.report(str(cell), self.done, self.count)

    def _hint(self, model: PreTrainedModel, cell: Cell) -> str:
        """What may be behind an error, for a model whose positions are fitted and end."""
        longest = _positions(model)
        if longest is None or cell.context + WARM_ROUNDS + self.bench.steps <= longest:
            return ""
        return f" (the steps after the prompt pass the {longest:,} positions of this model: give a shorter context)"

    def _refuse_too_long(self, model: PreTrainedModel) -> None:
        longest, long = _positions(model), max(self.bench.contexts)
        if longest is not None and long > longest and not self.bench.allow_long:
            raise ValueError(
                f"a context of {long:,} tokens is beyond the {longest:,} positions that {self.bench.model} was made "
                f"for; give --context {longest} or less, or --allow-long, which measures speed over text that the "
                "model no longer understands"
            )

    def _refuse_too_large(self, model: PreTrainedModel) -> None:
        shapes, bench = Shapes.of(model), self.bench
        last_only = "logits_to_keep" in inspect.signature(model.forward).parameters
        child = bench.peak and model.device.type == "cpu"
        rooms = [
            room(shapes, names, cell.batch, cell.context, bench.chunk, last_only, child)
            for cell, names in self.todo.items()
            if names
        ]
        refuse_unless_it_fits(model, rooms)


def _positions(model: PreTrainedModel) -> int | None:
    """How many positions a model was made for, where it says so."""
    longest = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return longest if isinstance(longest, int) and longest > 0 else None
