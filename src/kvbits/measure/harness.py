"""lm-evaluation-harness over packed caches: its model ``kvbits``. Needs ``lm-eval``; import it where it is used.

The harness's own ``HFLM`` scores a text in one forward without a cache, which no way of storing keys and values can
change. Here all but the last token of a context is read into a cache first, some tokens at a time, and is packed as in
any use of that cache. The last one and the continuation follow in steps, so every token that is scored or generated
has been predicted from what is stored. Everything else (tokenizers, truncation, chat templates, stop sequences) is
``HFLM``'s. Answers over contexts so short that nothing was packed are counted: see :mod:`kvbits.measure.packed`.
"""

from __future__ import annotations

import inspect
import logging
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import log_softmax
from transformers import Cache, DynamicCache, PreTrainedModel

try:
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
    from tqdm import tqdm
except ImportError as error:
    raise ImportError(f"tasks need lm-evaluation-harness: pip install 'kvbits[eval]' ({error})") from error

from kvbits.files import Calibration, load_calibration
from kvbits.hf.cache import KVCache
from kvbits.hf.loading import where
from kvbits.hf.names import cache_name
from kvbits.measure import caches
from kvbits.measure.packed import Tally, packed_share
from kvbits.measure.setting import CHUNK_TOKENS
from kvbits.schemes.catalogue import RECOMMENDED

_LOG = logging.getLogger("lm_eval.kvbits")


@dataclass
class _Request:
    """One log-likelihood that is asked for.

    Attributes:
        index: its place in the list of all.
        text: context and continuation as they were asked for, or None: the key of an answer that is kept.
        targets: tokens to score, at the positions before them.
    """

    index: int
    text: tuple[str, str] | None
    targets: tuple[int, ...]
    total: float = 0.0
    greedy: bool = True


@dataclass
class _Context:
    """Tokens that are read and packed first, and all that is asked about them.

    ``tails`` are tokens that are read next, the last one of the context and all but the last one of a continuation.
    Requests that differ in their last target alone, such as the letters of a multiple choice, share one.
    """

    history: tuple[int, ...]
    tails: dict[tuple[int, ...], list[_Request]] = field(default_factory=dict)


class _Reader:
    """Feeds a batch to a model through one cache, ``chunk`` columns at a time; 0 is all at once."""

    def __init__(self, lm: KvbitsLM, cache: Cache, rows: int) -> None:
        self.lm, self.cache = lm, cache
        self.mask = torch.ones(rows, 0, dtype=torch.long)

    def read_past(self, ids: torch.Tensor, text: torch.Tensor) -> None:
        """Feed columns ``ids [B, n]`` padded on the left; ``text [B, n]`` is 1 where they are no padding.

        Chunks are counted from the last column, so each row is read in the same pieces as it would be alone.
        """
        columns = ids.shape[1]
        chunk = self.lm.chunk or columns
        sizes = [*([columns % chunk] if columns % chunk else []), *[chunk] * (columns // chunk)]
        for logits in self._feed(ids.split(sizes, dim=1), text.split(sizes, dim=1), last=True):
            last = logits[:, -1]
        if bool(last.isnan().any()):  # of which the harness would make an answer like any other
            raise ValueError("the model has no answer: its logits are NaN")

    def read(self, ids: torch.Tensor, text: torch.Tensor) -> Iterator[torch.Tensor]:
        """Feed columns ``ids [B, n]`` padded on the right, and yield the logits ``[B, columns, V]`` of each chunk."""
        chunk = self.lm.chunk or ids.shape[1]
        return self._feed(ids.split(chunk, dim=1), text.split(chunk, dim=1), last=False)

    def _feed(
        self, pieces: Sequence[torch.Tensor], masks: Sequence[torch.Tensor], last: bool
    ) -> Iterator[torch.Tensor]:
        for piece, mask in zip(pieces, masks, strict=True):
            self.mask = torch.cat([self.mask, mask], dim=1)
            padded: dict[str, torch.Tensor] = {}
            if not bool(self.mask.all()):
                positions = (self.mask.cumsum(1) - 1).clamp(min=0)[:, -piece.shape[1] :]
                padded = {"attention_mask": self.mask, "position_ids": positions}
            yield self.lm.forward(piece, self.cache, last, **padded)

    def repeat(self, rows: torch.Tensor) -> None:
        """Row ``i`` becomes what row ``rows[i]`` was."""
        if not torch.equal(rows, torch.arange(len(self.mask))):
            self.cache.reorder_cache(rows.to(self.lm.device))  # type: ignore[arg-type]
            self.mask = self.mask[rows]


@register_model("kvbits")
class KvbitsLM(HFLM):  # type: ignore[misc]  # a class of theirs, without annotations
    """A Transformers model with its keys and values under a scheme.

    Args:
        pretrained: as for ``HFLM``, or a ``.gguf`` file, or ``smollm2``.
        scheme: any kvbits scheme, or one of Transformers' own caches (:mod:`kvbits.measure.caches`). A semicolon
            stands for a comma, which separates arguments on the command line of ``lm_eval``: ``lm4;centred``.
        residual, sinks, block, outliers: options of the scheme, since ``scheme=int2,residual=0`` arrives as two.
        calibration: a folder that ``kvbits calibrate`` wrote, for schemes that need one.
        chunk: tokens of a context or continuation that are read at a time; 0 reads each in one forward.
        options: for ``HFLM``.

    Raises:
        ValueError: for an unknown scheme, a model that kvbits cannot serve, or a ``chunk`` below 0.
    """

    def __init__(
        self,
        pretrained: str | PreTrainedModel,
        scheme: str = RECOMMENDED,
        calibration: str | Path | Calibration | None = None,
        chunk: int = CHUNK_TOKENS,
        residual: int | None = None,
        sinks: int | str | None = None,
        block: int | None = None,
        outliers: str | None = None,
        **options: Any,
    ) -> None:
        given = {"residual": residual, "sinks": sinks, "block": block, "outliers": outliers}
        spelled = [str(scheme).replace(";", ","), *(f"{name}={x}" for name, x in given.items() if x is not None)]
        if isinstance(calibration, (str, Path)):
            calibration = load_calibration(calibration)
        self.scheme, self.calibration = caches.check(",".join(spelled), calibration is not None), calibration
        if not isinstance(chunk, int) or chunk < 0:
            raise ValueError(f"chunk={chunk!r}: give a number of tokens, or 0 for all at once")
        self.chunk, self.tally = chunk, Tally()
        if isinstance(pretrained, str):
            pretrained, file = where(pretrained)
            device = "cuda" if torch.cuda.is_available() else "cpu"
            options = {"device": device, **file, **options}
        super().__init__(pretrained=pretrained, **options)
        if self.backend != "causal":
            raise ValueError(f"{type(self.model).__name__} is no decoder-only model, whose cache could be measured")
        self.new_cache()  # refuses what cannot be served now rather than at the first request

    def new_cache(self) -> Cache:
        """An empty cache."""
        return caches.make(self.model, self.scheme, self.calibration)

    def forward(self, ids: torch.Tensor, cache: Cache, last: bool, **padded: torch.Tensor) -> torch.Tensor:
        """Logits ``[B, n, V]`` of ``ids [B, n]``, read through ``cache``; of the last column alone if ``last``."""
        inputs: dict[str, Any] = {name: x.to(self.device) for name, x in {"input_ids": ids, **padded}.items()}
        if last and "logits_to_keep" in inspect.signature(self.model.forward).parameters:
            inputs["logits_to_keep"] = 1
        mixed = self.mixed_precision_dtype
        with torch.no_grad(), torch.autocast(self.device.type, dtype=mixed, enabled=mixed is not None):
            logits: torch.Tensor = self.model(**inputs, use_cache=True, **{cache_name(self.model): cache}).logits
        return logits

    # -- log-likelihoods -------------------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        size = override_bs or (self._detect_batch_size() if self.batch_size == "auto" else int(self.batch_size))
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        bar = tqdm(total=len(requests), disable=disable_tqdm or self.rank != 0, desc=f"{self.scheme}: log-likelihoods")
        for batch in _batches(self._contexts(requests), size):
            for request in self._score(batch):
                answers[request.index] = request.total, request.greedy
                if request.text is not None:
                    self.cache_hook.add_partial("loglikelihood", request.text, answers[request.index])
                bar.update()
        bar.close()
        return answers

    def _contexts(self, requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]]) -> list[_Context]:
        """The requests by what they have in common, the longest first."""
        found: dict[tuple[tuple[int, ...], tuple[int, ...]], _Context] = {}
        for index, (text, context, continuation) in enumerate(requests):
            scored = len(continuation)
            if not context or not 0 < scored <= self.max_length:
                raise ValueError(
                    f"a context of {len(context)} tokens and a continuation of {scored}: there must be a context, and "
                    f"1 to {self.max_length} tokens to score after it, the model's greatest length"
                )
            whole = (*context, *continuation)[-(self.max_length + 1) :]
            self.tally.truncated += len(whole) < len(context) + scored
            history, tail = whole[: -scored - 1], whole[-scored - 1 : -1]
            # Without a history there is nothing to share, and no end to how many there may be.
            asked = found.setdefault((history, () if history else tail), _Context(history))
            asked.tails.setdefault(tail, []).append(_Request(index, text, whole[-scored:]))
        return sorted(found.values(), key=lambda one: -len(one.history) - max(map(len, one.tails)))

    @torch.no_grad()
    def _score(self, batch: list[_Context]) -> list[_Request]:
        """Answer all that is asked about some contexts, through one cache."""
        cache = self.new_cache()
        rows = [(index, tail, asked) for index, one in enumerate(batch) for tail, asked in one.tails.items()]
        index = torch.tensor([row for row, _, _ in rows])
        histories = [one.history for one in batch]
        if not isinstance(cache, (KVCache, DynamicCache)):  # the others cannot repeat their rows
            histories, index = [histories[row] for row in index], torch.arange(len(rows))
        reader = _Reader(self, cache, len(histories))
        if any(histories):
            reader.read_past(*_padded(histories, left=True))
            self.tally.read(cache)
        reader.repeat(index)
        share = self._read_tails(reader, [tail for _, tail, _ in rows], [asked for _, _, asked in rows])
        if not any(histories):
            self.tally.read(cache)
        self.tally.kernels.add(caches.kernels(cache))
        answered = [request for _, _, asked in rows for request in asked]
        self.tally.answered(share, len(answered))
        return answered

    def _read_tails(self, reader: _Reader, tails: list[tuple[int, ...]], asked: list[list[_Request]]) -> float:
        """Score every row's requests while its tail is read; the largest share that was packed meanwhile."""
        done, most = 0, 0.0
        share = packed_share(reader.cache)
        for logits in reader.read(*_padded(tails)):
            logprobs = log_softmax(logits, dim=-1, dtype=self.softmax_dtype)
            best = logprobs.argmax(-1)
            end = done + logits.shape[1]
            for row, requests in enumerate(asked):
                for request in requests:
                    targets = torch.tensor(request.targets[done:end], dtype=torch.long, device=logits.device)
                    n = len(targets)
                    request.total += float(logprobs[row, :n].gather(1, targets[:, None]).sum())
                    request.greedy &= torch.equal(best[row, :n], targets)
            self.tally.predicted(share, sum(len(tail[done:end]) for tail in tails))
            if any(math.isnan(request.total) for requests in asked for request in requests):
                raise ValueError("the model has no answer: its log probabilities are NaN")
            done, most = end, max(most, share)
            share = packed_share(reader.cache)
        return most

    # -- generation ------------------------------------------------------------------------------------------------

    def tok_batch_encode(
        self, strings: list[str], padding_side: str = "left", left_truncate_len: int | None = None, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``HFLM``'s, and counts contexts that are cut."""
        if left_truncate_len:
            self.tally.truncated += sum(len(self.tok_encode(text)) > left_truncate_len for text in strings)
        encoded: tuple[torch.Tensor, torch.Tensor] = super().tok_batch_encode(
            strings, padding_side=padding_side, left_truncate_len=left_truncate_len, **options
        )
        return encoded

    def _model_generate(
        self, context: torch.Tensor, max_length: int, stop: list[str], **generation_kwargs: Any
    ) -> torch.Tensor:
        cache, rows = self.new_cache(), len(context)
        text = generation_kwargs.get("attention_mask", torch.ones_like(context))
        copies = max(generation_kwargs.get(name) or 1 for name in ("num_beams", "num_return_sequences"))
        if context.shape[1] > 1:
            ids, mask = (x[:, :-1].repeat_interleave(copies, 0).cpu() for x in (context, text))
            _Reader(self, cache, rows * copies).read_past(ids, mask)
        self.tally.read(cache)
        before = packed_share(cache)
        out: torch.Tensor = super()._model_generate(
            context, max_length, stop, **{**generation_kwargs, cache_name(self.model): cache}
        )
        after = packed_share(cache)
        self.tally.kernels.add(caches.kernels(cache))
        self.tally.predicted((before + after) / 2, rows * (out.shape[1] - context.shape[1]))
        self.tally.answered(after, rows)
        return out

    # -- what the harness asks besides -----------------------------------------------------------------------------

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Keep answers in a file (``lm_eval --use_cache``), one that holds those of this scheme only.

        The harness finds kept answers by the text of a request alone.

        Raises:
            ValueError: for a file with answers of another scheme, chunk or model.
        """
        kept = cache_hook.dbdict
        if kept is not None:
            here = f"{self.tokenizer_name} {type(self.model).__name__} {self.scheme} chunk={self.chunk}"
            there = kept.get("kvbits") if "kvbits" in kept or not len(kept) else "some other model"
            if there not in (None, here):
                raise ValueError(f"--use_cache names a file with answers of {there}, not of {here}; give another file")
            kept["kvbits"] = here
        super().set_cache_hook(cache_hook)

    def get_model_info(self) -> dict[str, Any]:
        """``HFLM``'s, and the scheme, and what the requests went through."""
        if advice := self.tally.advice(self.scheme):
            _LOG.warning(advice)
        tally = self.tally
        ours = {
            "scheme": self.scheme,
            "chunk": self.chunk,
            "packed_share": tally.packed_share,
            "packed_requests": f"{tally.packed_requests} of {tally.requests}",
            "truncated_requests": tally.truncated,
            "bits_per_element": tally.bits_per_element,
            "kv_bytes": tally.largest,
            "kernel": ", ".join(sorted(tally.kernels)),
        }
        return {**super().get_model_info(), "kvbits": ours}


def _batches(contexts: list[_Context], size: int) -> Iterator[list[_Context]]:
    """Contexts that are read together: as many as make up to ``size`` rows, and one at least."""
    batch: list[_Context] = []
    rows = 0
    for one in contexts:
        if batch and rows + len(one.tails) > size:
            yield batch
            batch, rows = [], 0
        batch.append(one)
        rows += len(one.tails)
    if batch:
        yield batch


def _padded(rows: Sequence[Sequence[int]], left: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask ``[B, longest]``, int64, of rows of tokens, padded with zeros on one side."""
    longest = max(map(len, rows))
    ids, mask = torch.zeros(2, len(rows), longest, dtype=torch.long)
    for row, tokens in enumerate(rows):
        where_it_is = slice(longest - len(tokens), longest) if left else slice(len(tokens))
        ids[row, where_it_is] = torch.tensor(tokens, dtype=torch.long)
        mask[row, where_it_is] = 1
    return ids, mask


def main(arguments: Sequence[str]) -> None:
    """The command ``lm_eval`` with these arguments, and ``--model kvbits`` unless they name a model."""
    from lm_eval.__main__ import cli_evaluate

    named = any(word in ("--model", "-M") or word.startswith("--model=") for word in arguments)
    runs = bool(arguments) and arguments[0] not in ("ls", "validate", "-h", "--help")
    sys.argv = ["lm_eval", *arguments, *([] if named or not runs else ["--model", "kvbits"])]
    cli_evaluate()
