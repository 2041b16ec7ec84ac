"""How close each scheme stays to the exact cache on a text: divergence, perplexity, the same first choice, real bits.

The text goes through the cache in small chunks, so every chunk attends to what was stored, not to the keys and values
just computed. Read in one piece, as perplexity usually is, a prompt attends to its own exact keys and values: that
regime says nothing of a cache, and is measured apart (``one_shot``). The reference is the same model with
Transformers' exact cache in the same chunks; its logits are computed once. Its own row compares it with itself in one
piece: the noise floor, below which no difference means anything.

::

    from kvbits.measure.quality import measure

    results = measure(model, open("book.txt").read(), ["default", "int4", "hf:quanto4"], tokenizer=tokenizer)
    for row in results.rows:
        print(row["scheme"], row["kl_mean"], row["bits_per_element"])

See ``docs/measure.md`` on how to read the figures.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from kvbits.calibration import Report
from kvbits.calibration.text import longest_text, refuse_foreign, sample_ids
from kvbits.files import Calibration, fingerprint, load_calibration
from kvbits.hf.attach import attached, disable, refuse_unless_served
from kvbits.hf.names import cache_name
from kvbits.measure import caches, guards
from kvbits.measure.bits import LONG_TOKENS, bits_at, bits_per_element, elements
from kvbits.measure.caches import EXACT
from kvbits.measure.divergence import Scores, divergence, log_probabilities
from kvbits.measure.exact import ExactLogits
from kvbits.measure.memory import Peak, peak_memory
from kvbits.measure.packed import Attended, packed_layers
from kvbits.measure.results import Results
from kvbits.measure.runner import wait_for
from kvbits.measure.setting import setting
from kvbits.measure.text import windows_of

CHUNK, WINDOWS, LENGTH = 16, 4, 1024
CHUNKED, IN_ONE = "chunked", "one-shot"
"""Regimes: in chunks through the cache, or each window in one forward."""

PIECE = 64
"""Tokens whose log probabilities are in memory at a time."""


def default_schemes() -> list[str]:
    """A short list that shows what there is: exact, the recommended, the usual, and a peer where one is installed."""
    return ["exact", "default", "small", "int4", "kivi2", *(["hf:quanto4"] if caches.installed("hf:quanto4") else [])]


def measure(
    model: PreTrainedModel,
    text: str | torch.Tensor,
    schemes: Sequence[str] | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    chunk: int = CHUNK,
    windows: int = WINDOWS,
    length: int = LENGTH,
    placement: str = "spread",
    one_shot: bool = False,
    calibration: str | Path | Calibration | None = None,
    json: str | Path | None = None,
    about: dict[str, Any] | None = None,
    tell: Callable[[str], None] | None = None,
    report: Report | None = None,
) -> Results:
    """Measure the quality of schemes, and of Transformers' own caches, on a text.

    Args:
        model: a decoder-only Transformers model, on its device and in its dtype; it is left as it was.
        text: a text, or token ids, int64 ``[W, T]``, each row a window.
        schemes: any kvbits schemes, and peers such as ``hf:quanto4`` (see :mod:`kvbits.measure.caches`); default:
            :func:`default_schemes`. Transformers' exact cache is measured in any case, as ``hf:dynamic``.
        tokenizer: the model's, for text.
        chunk: tokens of a forward. A token attends to at most so many that did not go through the cache.
        windows, length: how many windows of how many tokens, for text.
        placement: ``spread`` evenly over the text, or one after the other from its ``start``.
        one_shot: measure each scheme in the flattering regime too, in rows of their own.
        calibration: for schemes that need one; see :func:`kvbits.cache_for`.
        json: a file that is written after every row. If it is there, rows that it has are not measured again.
        about: what else to record in the setting, such as the names of model and text.
        tell: gets each warning once; default: :func:`warnings.warn`. Rows have their own in any case.
        report: gets what is being measured, tokens done and tokens in all, after every forward.

    Returns:
        Results of the kind ``quality``. A row has ``scheme``, ``regime``, and the figures that ``docs/measure.md``
        describes; ``missing`` has the reasons of figures that are None. A scheme that the model, or a library, refuses
        has a row with ``scheme``, ``regime`` and ``error``.

    Raises:
        TypeError: for what is no model, and for text without a tokenizer.
        ValueError: for an unknown scheme; a scheme of which nothing would be packed, or a chunk that holds a whole
            window, since both measure nothing; too little text; a model that cannot be served; a calibration that is
            missing or another model's; or a file of another setting.
    """
    refuse_unless_served(model)
    names = names_of(default_schemes() if schemes is None else schemes, calibration is not None)
    ids = _ids(model, text, tokenizer, windows, length, placement)
    refuse_dishonest(names, ids.shape[1], chunk)
    if calibration is not None and not isinstance(calibration, Calibration):
        calibration = load_calibration(calibration)
    if calibration is not None:
        calibration.check(model, tokenizer)
    how = {
        "windows": ids.shape[0],
        "length": ids.shape[1],
        "chunk": chunk,
        "placement": placement if isinstance(text, str) else None,
        "tokens_sha256": fingerprint.digest(ids),
        "calibration_sha256": None if calibration is None else calibration.about.get("sha256"),
        "schemes": names,
    }
    results = Results.resume(json, "quality", setting(model, **how | (about or {})))
    regimes = (CHUNKED, IN_ONE) if one_shot else (CHUNKED,)
    todo = [(EXACT, CHUNKED), *((name, regime) for name in names for regime in regimes)]
    todo = [(name, regime) for name, regime in todo if results.find(scheme=name, regime=regime) is None]
    if not todo:
        return results
    with _left_as_it_was(model), _Job(model, ids, chunk, calibration, todo, tell, report) as job:
        for row in job.rows():
            results.put(row)
            if json is not None:
                results.save(json)
    return results


def names_of(schemes: Sequence[str], calibrated: bool) -> list[str]:
    """The names to measure, each once; the exact cache of Transformers comes by itself. Raises as ``caches.check``."""
    return [name for name in dict.fromkeys(caches.check(name, calibrated) for name in schemes) if name != EXACT]


def refuse_dishonest(names: Sequence[str], length: int, chunk: int) -> None:
    """Raise ValueError where a measurement would say nothing; see :mod:`kvbits.measure.guards`."""
    guards.refuse_one_chunk(length, chunk)
    for name in names:
        guards.refuse_unpacked(name, length, chunk)


def _ids(
    model: PreTrainedModel,
    text: str | torch.Tensor,
    tokenizer: PreTrainedTokenizerBase | None,
    windows: int,
    length: int,
    placement: str,
) -> torch.Tensor:
    if isinstance(text, torch.Tensor) or tokenizer is None:
        ids = sample_ids(text, tokenizer, windows, length, what="windows")
    else:
        ids = windows_of(text, tokenizer, windows, length, placement, longest_text(model.config))
    refuse_foreign(model, ids)
    return ids


@contextlib.contextmanager
def _left_as_it_was(model: PreTrainedModel) -> Iterator[None]:
    """Without gradients and in evaluation mode; kvbits is taken off again if it was not on the model before."""
    training, found = model.training, attached(model)
    model.train(False)
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
        if not found:
            disable(model)


class _Job:
    """One run over all that is to do: pairs of a scheme and a regime."""

    def __init__(
        self,
        model: PreTrainedModel,
        ids: torch.Tensor,
        chunk: int,
        calibration: Calibration | None,
        todo: Sequence[tuple[str, str]],
        tell: Callable[[str], None] | None,
        report: Report | None,
    ) -> None:
        self.model, self.ids, self.chunk, self.calibration, self.todo = model, ids, chunk, calibration, todo
        self.tell, self.report = tell, report
        self.keep_attached, self.said = attached(model), set[str]()
        self.exact, self.reference, self.elements = ExactLogits(*ids.shape), Scores(), 0
        self.wants_floor = (EXACT, CHUNKED) in todo
        # The exact run comes first in any case: an interrupted one kept its row, and not its logits.
        self.done, self.total = 0, (1 + len(todo)) * ids.numel()

    def __enter__(self) -> _Job:
        return self

    def __exit__(self, *_: Any) -> None:
        self.exact.close()

    def rows(self) -> Iterator[dict[str, Any]]:
        """One for each that is to do, as soon as it is measured."""
        run = _Run(self, EXACT, CHUNKED)
        run.over_all(keep=True)
        self.reference, self.elements = run.scores, elements(run.cache)
        if self.wants_floor:
            yield self._exact_row(run)
        del run
        for name, regime in self.todo:
            if name == EXACT:
                continue
            done = self.done + self.ids.numel()
            try:
                row = self._row(name, regime)
            except Exception as error:  # a peer's library, a model, no memory left: one row has failed, not all
                row = {"scheme": name, "regime": regime, "error": f"{type(error).__name__}: {error}"}
                self.say(f"{name}: {row['error']}")
            self.advance(name, done - self.done)
            yield row

    def _exact_row(self, run: _Run) -> dict[str, Any]:
        """The exact cache in chunks, compared with itself in one piece: the noise floor."""
        floor = _Run(self, EXACT, IN_ONE)
        floor.over_all()
        run.scores.kl, run.scores.same = floor.scores.kl, floor.scores.same
        return self._finished(run)

    def _row(self, name: str, regime: str) -> dict[str, Any]:
        run = _Run(self, name, regime)
        run.over_all()
        if regime == CHUNKED and not caches.is_exact(name) and name not in caches.PEERS and not run.attended.share:
            raise ValueError(
                f"nothing was packed, so there is nothing to measure: no layer of {type(self.model).__name__} that "
                "kvbits stores has kept more than the scheme leaves exact"
            )
        return self._finished(run)

    def _finished(self, run: _Run) -> dict[str, Any]:
        figures, missing = run.scores.figures(self.reference)
        if run.peak.nbytes is None:
            missing["peak_bytes"] = run.peak.what
        found = run.warnings()
        for text in found:
            self.say(text)
        return {
            "scheme": run.name,
            "regime": run.regime,
            **figures,
            "bits_per_element": bits_per_element(run.cache, self.elements),
            f"bits_at_{LONG_TOKENS}": bits_at(run.cache),
            "kv_bytes": run.kv_bytes,
            "peak_bytes": run.peak.nbytes,
            "seconds": run.seconds,
            "kernel": ", ".join(sorted(run.kernels - {"stock"} or {"stock"})),
            "packed_share": run.attended.share,
            "packed_layers": packed_layers(run.cache),
            "warnings": found,
            **({"missing": missing} if missing else {}),
        }

    def say(self, text: str) -> None:
        """Pass a warning on, once."""
        if text in self.said:
            return
        self.said.add(text)
        if self.tell is None:
            warnings.warn(text, UserWarning, stacklevel=2)
        else:
            self.tell(text)

    def advance(self, name: str, tokens: int) -> None:
        """Note that so many more tokens are read, and say so."""
        self.done += tokens
        if self.report is not None:
            self.report(name, self.done, self.total)


class _Run:
    """One scheme in one regime over all windows: what it said of each token, and what it took."""

    def __init__(self, job: _Job, name: str, regime: str) -> None:
        self.job, self.name, self.regime = job, name, regime
        self.scores, self.attended, self.peak = Scores(), Attended(), Peak("nothing has run yet")
        self.seconds, self.kv_bytes = 0.0, 0
        self.kernels: set[str] = set()
        self.cache: Cache = DynamicCache()

    def over_all(self, keep: bool = False) -> None:
        """Read all windows; ``keep`` what it says of them, as that of the exact run, rather than compare it."""
        ids, warm = self.job.ids, 2 * self.job.chunk
        for _ in self._forwards(ids[0, :warm], self.job.chunk):
            pass  # a first call compiles, loads and allocates what later ones find there
        self.seconds, self.attended, self.kernels = 0.0, Attended(), set()
        with peak_memory(self.job.model.device) as self.peak:
            for number, window in enumerate(ids):
                step = self.job.chunk if self.regime == CHUNKED else len(window)
                scored = _Window(window, number, self.job.exact)
                for first, logits in self._forwards(window, step, last=number == len(ids) - 1):
                    scored.add(first, logits, keep)
                    self.job.advance(self.name, len(logits))
                scored.finish(self.scores)

    def _forwards(self, ids: torch.Tensor, step: int, last: bool = False) -> Iterator[tuple[int, torch.Tensor]]:
        """A new cache, and through it ``ids [T]``, ``step`` at a time: the first token of each, and logits ``[q, V]``.

        With ``last``, the forward at the end notes why each kernel ran or did not.
        """
        model = self.job.model
        self.cache = DynamicCache()  # the one before is gone when the next one is made
        if not self.job.keep_attached:
            disable(model)  # so that peers run on the stock attention; a kvbits cache attaches itself
        self.cache = cache = caches.make(model, self.name, self.job.calibration)
        for first in range(0, len(ids), step):
            given = ids[None, first : first + step].to(model.device)
            self.attended = self.attended.after(cache, first, given.shape[1])
            if last and first + step >= len(ids):
                guards.ask_for_reasons(cache)
            wait_for(model.device)
            start = time.perf_counter()
            logits = model(input_ids=given, use_cache=True, **{cache_name(model): cache}).logits[0]
            wait_for(model.device)
            self.seconds += time.perf_counter() - start
            if len(logits) != given.shape[1]:
                raise ValueError(f"{type(model).__name__} gave logits for {len(logits)} of {given.shape[1]} tokens")
            self.kernels |= caches.outcomes(cache)
            yield first, logits
        self.kv_bytes = max(self.kv_bytes, caches.nbytes(cache))

    def warnings(self) -> list[str]:
        """What makes its figures say less than they seem to."""
        found = [guards.ONE_WINDOW] if len(self.job.ids) < 2 else []
        if self.regime == IN_ONE:
            return [*found, guards.ONE_SHOT]
        return [*found, *self.attended.warnings(), *guards.slow_kernels(self.job.model, self.cache)]


class _Window:
    """What one run says of one window ``ids [T]``, beside what the exact run said of it."""

    def __init__(self, ids: torch.Tensor, number: int, exact: ExactLogits) -> None:
        self.ids, self.number, self.exact = ids, number, exact
        self.parts: tuple[list[torch.Tensor], ...] = ([], [], [])

    def add(self, first: int, logits: torch.Tensor, keep: bool) -> None:
        """The next logits, ``[q, V]`` from token ``first`` on."""
        for begin, piece in enumerate(logits.split(PIECE)):
            self._add(first + begin * PIECE, piece, keep)

    def _add(self, first: int, logits: torch.Tensor, keep: bool) -> None:
        last = first + len(logits)
        found, (nll, kl, same) = log_probabilities(logits), self.parts
        following = self.ids[first + 1 : last + 1].to(found.device)
        nll.append(-found[: len(following)].gather(1, following[:, None])[:, 0])
        if keep:
            self.exact.write(logits)
            return
        exact = log_probabilities(self.exact.read(self.number, first, last).to(found.device))
        kl.append(divergence(exact, found))
        same.append(exact.argmax(-1) == found.argmax(-1))

    def finish(self, scores: Scores) -> None:
        """Hand over what was added."""
        for parts, whole in zip(self.parts, (scores.nll, scores.kl, scores.same), strict=True):
            if parts:
                whole.append(torch.cat(parts).cpu().double())
