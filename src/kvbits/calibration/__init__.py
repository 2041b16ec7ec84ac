"""Calibrate: fit static scales, outlier thresholds, tables and key means of one model to a text.

Two stages. *Collecting* runs one sample at a time forwards and backwards (:mod:`kvbits.hf.collect`) and writes the
keys, values and gradients of its layers to a file of its own, so that an interrupted run goes on at the sample where it
stopped. *Fitting* takes one layer at a time from those files, in every form (before or after the rotary embedding,
centred, rotated) in which a scheme encodes it, and asks each codec to :meth:`~kvbits.codecs.Codec.fit` (KVQuant, arXiv
2401.18079, section 3 and appendix E). Neither stage holds more than one sample, or one layer of all samples.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from kvbits import __version__
from kvbits.calibration.fit import SHORTEST, Fit, Samples, fit_layer
from kvbits.calibration.plan import Checkpointing, foresee, size
from kvbits.calibration.text import longest_text, refuse_foreign, sample_ids
from kvbits.codecs import Codec
from kvbits.files import (
    ABOUT,
    FORMAT,
    WEIGHTS,
    Calibration,
    Side,
    about_tensors,
    alone,
    fingerprint,
    replacing,
    save_tensors,
)
from kvbits.schemes.catalogue import CATALOGUE
from kvbits.schemes.names import parse_codec
from kvbits.schemes.scheme import SINK_TOKENS, Scheme
from kvbits.tensor_parallel import Heads

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SAMPLES, LENGTH = 16, 2048
"""As in KVQuant, section 4.1."""

_NUQ = [f"nuq{bits}-static{more}" for bits in (4, 3, 2) for more in ("", "-1%")]
KEYS = (*_NUQ, "nuq2-static-1%-qnorm")
VALUES = tuple(name.replace("-static", "-token") for name in KEYS)
BOTH = ("int4-calibrated", "fp8-calibrated")
"""What is fitted where no scheme is named, beside what the catalogue has."""

Report: TypeAlias = Callable[[str, int, int], None]

_SAMPLES, _RUN = "samples", "run.json"


def calibrate(
    model: PreTrainedModel,
    texts: str | Sequence[str] | torch.Tensor,
    scheme: str | Scheme | Sequence[str | Scheme] | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    samples: int = SAMPLES,
    length: int = LENGTH,
    sinks: int = SINK_TOKENS,
    weighted: bool = True,
    out: str | Path | None = None,
    checkpointing: Checkpointing = "auto",
    keep_samples: bool = False,
    tell: Callable[[str], None] | None = None,
    report: Report | None = None,
) -> Calibration:
    """Fit what calibrated schemes need to know of ``model``.

    Args:
        model: a decoder-only Transformers model, on its device and in its dtype; it is left as it was.
        texts: a text, or several, which are joined; or token ids, int64 ``[N, T]``, each row a sample.
        scheme: one or more schemes; default: every calibrated codec of the catalogue, and others like them.
        tokenizer: the model's, for text.
        samples, length: how many windows of how many tokens, evenly spaced over the text.
        sinks: first tokens of each sample that are left out, because the cache keeps them exact.
        weighted: weigh errors by the squared gradients of the loss; False, for comparison: all the same.
        out: folder for the result. If it holds one of the same model and text, what is missing there is added; if a
            run was interrupted there, it goes on. None keeps nothing on disk.
        checkpointing: compute activations twice: ``on``, ``off``, or ``auto``, where memory would not do otherwise.
        keep_samples: leave the samples in ``out/samples``, so that more can be fitted without collecting again.
        tell: gets one sentence on what it will take, before it starts (see :class:`kvbits.calibration.plan.Plan`).
        report: gets stage, steps done and steps in all, after each step.

    Raises:
        TypeError: for what is no model, and for text without a tokenizer.
        ValueError: for an unknown scheme, one that needs no calibration, too little text or that of another model's
            tokenizer, a model that cannot be served, or an ``out`` that holds something else or is in use.
    """
    from kvbits.hf.attach import refuse_unless_served

    refuse_unless_served(model)
    if checkpointing not in ("auto", "on", "off"):
        raise ValueError(f"checkpointing={checkpointing!r} is unknown; allowed are 'auto', 'on', 'off'")
    schemes = _schemes(scheme)
    if (heads := Heads.of(model)).world > 1:
        raise ValueError(
            f"this process has {heads}, and a calibration is of all of them: calibrate in one process (device_map "
            "spreads a model that is too large), and give the result to cache_for on every rank, which takes its part"
        )
    ids = sample_ids(texts, tokenizer, samples, length, longest_text(model.config))
    refuse_foreign(model, ids)
    if ids.shape[1] < sinks + SHORTEST:
        raise ValueError(f"samples of {ids.shape[1]} tokens, {sinks} of them sinks, are too short; give 128 or more")
    about = {
        "format": FORMAT,
        "kvbits": __version__,
        "model": fingerprint.of_model(model),
        "tokenizer": fingerprint.of_tokenizer(tokenizer),
        "text": fingerprint.digest(ids),
        "samples": ids.shape[0],
        "length": ids.shape[1],
        "sinks": sinks,
        "weighted": weighted,
    }
    with tempfile.TemporaryDirectory(prefix="kvbits-") if out is None else alone(Path(out)) as folder:
        folder = Path(folder)
        before = _earlier(folder, about)
        job = _Job(model, ids, schemes, about, folder / _SAMPLES, report or (lambda *_: None))
        if before is not None and not job.missing(before):
            return before
        job.begin(checkpointing, tell)
        job.collect()
        found = job.fit(before)
        if out is not None:
            found.save(folder)
            if not keep_samples:
                shutil.rmtree(folder / _SAMPLES)
    return found


class _Job:
    """One run: the samples in ``folder``, then the fits."""

    def __init__(
        self,
        model: PreTrainedModel,
        ids: torch.Tensor,
        schemes: list[Scheme] | None,
        about: dict[str, Any],
        folder: Path,
        report: Report,
    ) -> None:
        from kvbits.hf.rotation.rotary import rotaries

        self.model, self.ids, self.schemes, self.about, self.folder = model, ids, schemes, about, folder
        self.report, self.checkpointing = report, False
        self.rotaries = rotaries(model)

    @property
    def files(self) -> list[Path]:
        """One for each sample."""
        return [self.folder / f"{i:04}.safetensors" for i in range(len(self.ids))]

    def done(self) -> list[bool]:
        """Which samples are there, and whole."""
        return [about_tensors(file) is not None for file in self.files]

    def wanted(self, layer: int) -> list[Fit]:
        """What a layer is to be fitted with."""
        fits: list[Fit] = []
        if self.schemes is None:
            forms = (True, False) if self.unrotatable(layer) is None else (False,)
            fits += [Fit("key", codec, pre_rope) for codec in _default("key") for pre_rope in forms]
            fits += [Fit("value", codec) for codec in _default("value")]
        for scheme in self.schemes or ():
            own = scheme.for_layer(layer, len(self.rotaries))
            if own.key.needs_calibration:
                fits.append(Fit("key", own.key, own.pre_rope, own.centred))
            if own.value.needs_calibration:
                fits.append(Fit("value", own.value))
        return list(dict.fromkeys(fits))

    def unrotatable(self, layer: int) -> ValueError | None:
        """Why the rotary embedding of a layer cannot be taken off; None where it can, or where there is none."""
        found = self.rotaries.layers[layer] if layer < len(self.rotaries) else None
        return found if isinstance(found, ValueError) else None

    def missing(self, before: Calibration) -> bool:
        """Whether a calibration lacks anything that is wanted of the layers it has."""
        return any(not fit.is_in(before, layer) for layer in before.about["layers"] for fit in self.wanted(layer))

    def begin(self, checkpointing: Checkpointing, tell: Callable[[str], None] | None) -> None:
        """Plan, say so, and see that what is on disk belongs to this run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        run = self.folder / _RUN
        if run.is_file():
            _refuse_other(f"{self.folder} holds samples of another run", json.loads(run.read_text("utf-8")), self.about)
        else:
            with replacing(run) as beside:
                beside.write_text(json.dumps(self.about), encoding="utf-8")
        done = sum(self.done())
        plan = foresee(self.model, self.ids, done, checkpointing, self.about["sinks"])
        self.checkpointing = plan.checkpointing
        if tell is not None:
            tell(str(plan))
        needed, free = plan.disk_bytes * (len(self.ids) - done) // len(self.ids), shutil.disk_usage(self.folder).free
        if needed > free:
            raise ValueError(
                f"the samples need {size(needed)} on disk, but {self.folder} has {size(free)} free; give another "
                "out, or fewer samples"
            )

    def collect(self) -> None:
        """Collect the samples that are not there yet."""
        self.report("collecting", sum(self.done()), len(self.ids))
        for file, ids, done in zip(self.files, self.ids, self.done(), strict=True):
            if not done:
                save_tensors(file, self.sample(ids))
                self.report("collecting", sum(self.done()), len(self.ids))

    def sample(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """States and gradients of one sample, and the frequencies of the rotary embedding of its keys."""
        from kvbits.hf.collect import collect

        tensors = collect(self.model, ids, self.checkpointing)
        epoch = self.rotaries.epoch(0, len(ids), len(ids))  # some models change them with the length of a text
        for layer, rotary in enumerate(self.rotaries.layers):
            if f"{layer}.key" in tensors and rotary is not None and not isinstance(rotary, ValueError):
                tensors[f"{layer}.key.frequencies"] = rotary.epochs[epoch]
        return tensors

    def fit(self, before: Calibration | None) -> Calibration:
        """Fit every layer, beside what was fitted before."""
        names = about_tensors(self.files[0])
        assert names is not None
        layers = sorted({int(name.split(".")[0]) for name in names})
        if not layers:
            raise ValueError(f"no layer of {type(self.model).__name__} hands keys and values to its cache")
        tensors = {WEIGHTS: fingerprint.weights(self.model), **({} if before is None else before.tensors)}
        for count, layer in enumerate(layers, 1):
            fits = [fit for fit in self.wanted(layer) if before is None or not fit.is_in(before, layer)]
            tensors.update(self.fit_layer(layer, fits, f"{layer}.key.frequencies" in names))
            self.report("fitting", count, len(layers))
        return Calibration(tensors, {**self.about, "layers": layers})

    def fit_layer(self, layer: int, fits: list[Fit], rotated: bool) -> dict[str, torch.Tensor]:
        """Fit one layer, whose keys are ``rotated`` in a way that can be taken off, or not."""
        why = self.unrotatable(layer)
        if why is not None and any(fit.pre_rope or fit.centred for fit in fits):
            raise why
        rotary = self.rotaries[layer] if rotated else None
        interleaved, sinks = None if rotary is None else rotary.interleaved, self.about["sinks"]
        # Sums are float64, which other accelerators do not have.
        device = self.model.device if self.model.device.type == "cuda" else torch.device("cpu")
        keys = Samples(self.files, layer, "key", sinks, interleaved, device)
        values = Samples(self.files, layer, "value", sinks, None, device)
        found = {} if why is not None else {f"{layer}.key.mean": keys.mean.cpu()}
        return {**found, **fit_layer({"key": keys, "value": values}, layer, fits, self.about["weighted"])}


def _schemes(scheme: str | Scheme | Sequence[str | Scheme] | None) -> list[Scheme] | None:
    if scheme is None:
        return None
    given = [Scheme.parse(one) for one in ([scheme] if isinstance(scheme, (str, Scheme)) else scheme)]
    for one in given:
        if not one.needs_calibration and not one.centred:
            raise ValueError(f"{one} needs no calibration; those that do are {', '.join((*KEYS, *VALUES, *BOTH))}")
    return given


def _default(side: Side) -> list[Codec]:
    known = [parse_codec(name) for name in ((*KEYS, *BOTH) if side == "key" else (*VALUES, *BOTH))]
    listed = [getattr(entry, side) for entry in CATALOGUE]
    return list(dict.fromkeys(known + [codec for codec in listed if codec.needs_calibration]))


def _earlier(folder: Path, about: dict[str, Any]) -> Calibration | None:
    """The calibration in ``folder``, if there is one; refused where it is of something else."""
    if not (folder / ABOUT).is_file():
        return None
    found = Calibration.load(folder)
    _refuse_other(f"{folder} holds another calibration", found.about, about)
    return found


def _refuse_other(what: str, there: Any, here: dict[str, Any]) -> None:
    here = json.loads(json.dumps(here))
    differs = [name for name in here if not isinstance(there, dict) or there.get(name) != here[name]]
    if differs:
        raise ValueError(f"{what}, which differs in {', '.join(differs)}; give another folder, or delete it")
