"""Calibrate: fit static scales, outlier thresholds, tables and key means of one model to a text.

Two stages. *Collecting* runs one sample at a time forwards and backwards (:mod:`kvbits.hf.collect`) and writes what
its layers held to a file of its own, so that an interrupted run goes on at the sample where it stopped. *Fitting* takes
one layer at a time from those files, in every form (before or after the rotary embedding, centred, rotated) in which a
scheme encodes it, and asks each codec to :meth:`~kvbits.codecs.Codec.fit` (KVQuant, arXiv 2401.18079, section 3 and
appendix E). Neither stage holds more than one sample, or one layer of all samples.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch

from kvbits import __version__, fingerprint
from kvbits.catalogue import CATALOGUE
from kvbits.codecs import Codec
from kvbits.files import ABOUT, FORMAT, WEIGHTS, Calibration, Side, about_tensors, alone, replacing, save_tensors
from kvbits.fitting import SHORTEST, Fit, Samples, fit_layer
from kvbits.heads import Heads
from kvbits.scheme import SINK_TOKENS, Scheme
from kvbits.spelling import parse_codec

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

SAMPLES, LENGTH = 16, 2048
"""As in KVQuant, section 4.1."""

_NUQ = [f"nuq{bits}-static{more}" for bits in (4, 3, 2) for more in ("", "-1%")]
KEYS = (*_NUQ, "nuq2-static-1%-qnorm")
VALUES = tuple(name.replace("-static", "-token") for name in KEYS)
BOTH = ("int4-calibrated", "fp8-calibrated")
"""What is fitted where no scheme is named, beside what the catalogue has."""

Checkpointing: TypeAlias = Literal["auto", "on", "off"]
Report: TypeAlias = Callable[[str, int, int], None]

_SAMPLES, _RUN = "samples", "run.json"
_BYTES_TO_FIT = 128
"""Per element of one layer's samples: the float32 forms of it, its gradients, and what sorting and k-means take."""

_BACKWARD = 1.5
"""Memory that a forward and its backward reach, over what is kept between them (SmolLM2, 512 tokens: 1.45)."""

_SPARE = 0.8
"""Share of the available memory that a run may take before it is checkpointed."""


@dataclass(frozen=True)
class Plan:
    """What a run will take, before it starts.

    Attributes:
        samples, length: how much text.
        done: samples that an earlier run has left.
        disk_bytes: of all samples together.
        peak_bytes: of memory above the model's, on its device: an estimate.
        available_bytes: of that memory; None where that is not known.
        checkpointing: whether layers are computed twice in order to need less.
    """

    samples: int
    length: int
    done: int
    disk_bytes: int
    peak_bytes: int
    available_bytes: int | None
    checkpointing: bool

    def __str__(self) -> str:
        gone = f", {self.done} of them already there" if self.done else ""
        room = "" if self.available_bytes is None else f" of {_size(self.available_bytes)} available"
        how = " with gradient checkpointing" if self.checkpointing else ""
        text = (
            f"{self.samples} x {self.length} tokens{gone}; about {_size(self.peak_bytes)} of memory above the model's"
            f"{room}{how}; {_size(self.disk_bytes)} on disk for the samples"
        )
        if self.available_bytes is not None and self.peak_bytes > self.available_bytes:
            text += ". That is more than there is: expect it to fail, and take a smaller length"
        return text


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
        tell: gets one sentence on what it will take, before it starts (see :class:`Plan`).
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
        from kvbits.hf.rotary import rotaries

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
        plan = _plan(self.model, self.ids, done, checkpointing, self.about["sinks"])
        self.checkpointing = plan.checkpointing
        if tell is not None:
            tell(str(plan))
        needed, free = plan.disk_bytes * (len(self.ids) - done) // len(self.ids), shutil.disk_usage(self.folder).free
        if needed > free:
            raise ValueError(
                f"the samples need {_size(needed)} on disk, but {self.folder} has {_size(free)} free; give another "
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
        """States and gradients of one sample, and the frequencies that its keys were turned by."""
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


# -- text --------------------------------------------------------------------------------------------------------------


def sample_ids(
    texts: str | Sequence[str] | torch.Tensor,
    tokenizer: PreTrainedTokenizerBase | None,
    samples: int,
    length: int,
    longest: int | None = None,
    *,
    what: str = "samples",
    spread: bool = True,
) -> torch.Tensor:
    """Token ids of the samples, int64 ``[N, T]``: windows evenly spaced over the text, the same every time.

    Each begins with what the tokenizer puts before a text (Llama's ``<s>``), as in use. Ids are taken as they are.

    Args:
        texts: one or several, which are joined; or token ids.
        tokenizer: the model's, for text.
        samples, length: how many windows of how many tokens.
        longest: tokens that the model was made for, if that is known.
        what: what errors call the samples.
        spread: False takes windows one after the other from the start of the text.
    """
    if isinstance(texts, torch.Tensor):
        if texts.ndim != 2 or texts.is_floating_point() or not texts.numel():
            raise ValueError(f"token ids are int64 [N, T], not {texts.dtype} {tuple(texts.shape)}")
        return texts.detach().cpu().long()
    if tokenizer is None:
        raise TypeError("text needs the model's tokenizer: pass tokenizer=, or token ids in place of text")
    if samples < 1 or length < 1:
        raise ValueError(f"{samples} {what} of {length} tokens are none; give 1 or more")
    if longest is not None and length > longest:
        raise ValueError(f"length {length} is more than the {longest} tokens that the model was made for")
    text = texts if isinstance(texts, str) else "\n\n".join(texts)
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.int64)
    first = [x for x in tokenizer("")["input_ids"] if x == tokenizer.bos_token_id][:1]
    body = length - len(first)
    windows = len(ids) // body if body else 0
    if windows < samples:
        shorter = len(ids) // samples + len(first)
        hints = ["a longer text", *([f"{what} {windows}"] if windows else [])]
        hints += [f"length {shorter}"] if shorter > 1 + len(first) else []
        raise ValueError(
            f"the text has {len(ids)} tokens, enough for {windows} {what} of {length}; give {', or '.join(hints)}"
        )
    starts = [(i * windows // samples if spread else i) * body for i in range(samples)]
    return torch.stack([torch.cat([torch.tensor(first, dtype=torch.int64), ids[s : s + body]]) for s in starts])


def longest_text(config: PretrainedConfig) -> int | None:
    """Tokens that a model was made for; None where its configuration does not say."""
    longest = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return longest if isinstance(longest, int) and longest > 0 else None


def refuse_foreign(model: PreTrainedModel, ids: torch.Tensor) -> None:
    """Raise ValueError for token ids that a model does not know."""
    vocabulary = getattr(model.get_input_embeddings(), "num_embeddings", None)
    if vocabulary is not None and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        raise ValueError(
            f"token ids from {int(ids.min())} to {int(ids.max())} are not all among the {vocabulary} that the model "
            "knows: they are another model's"
        )


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


# -- memory ------------------------------------------------------------------------------------------------------------


def _plan(model: PreTrainedModel, ids: torch.Tensor, done: int, checkpointing: Checkpointing, sinks: int) -> Plan:
    from kvbits.hf.collect import GRADIENT_DTYPE, LOGITS_TOKENS, decoder_layers, probe

    samples, tokens = ids.shape
    short, long = max(2, min(32, tokens // 2)), min(64, tokens)
    (few, _), (many, states) = probe(model, short), probe(model, long)
    # Activations grow with the text, and where attention keeps its weights also with its square.
    square = max(0.0, (many / long - few / short) / (long - short))
    activations = (few / short - square * short + square * tokens) * tokens
    elements = sum(x.numel() for x in states.values()) // long * tokens
    kept = elements * (model.dtype.itemsize + GRADIENT_DTYPE.itemsize)
    config, size = model.config.get_text_config(decoder=True), model.dtype.itemsize
    logits = config.vocab_size * (2 * size * tokens + 3 * 4 * min(tokens, LOGITS_TOKENS))
    layers = len(decoder_layers(model))
    host = kept if model.device.type == "cpu" else 0
    plain = int(_BACKWARD * (activations + logits) + host)
    inputs = layers * tokens * config.hidden_size * size
    twice = int(_BACKWARD * (2 * activations / layers + inputs + logits) + host) if layers else plain
    available = available_bytes(model.device)
    if checkpointing == "on" and not layers:
        raise ValueError(f"{type(model).__name__} has no layers that could be checkpointed; give checkpointing='off'")
    again = checkpointing == "on" or (
        checkpointing == "auto" and available is not None and plain > _SPARE * available and twice < plain
    )
    largest = max((x.numel() for x in states.values()), default=0) // long
    fitting = largest * (tokens - sinks) * samples * _BYTES_TO_FIT
    return Plan(samples, tokens, done, kept * samples, max(twice if again else plain, fitting), available, again)


def available_bytes(device: torch.device) -> int | None:
    """Memory that a process can still take on a device; None where that is not known."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    if device.type != "cpu":
        return None
    found = []
    with_text = _read(Path("/proc/meminfo"))
    if "MemAvailable:" in with_text:
        found.append(int(with_text.split("MemAvailable:")[1].split()[0]) * 1024)
    # A container's own limit (cgroup v2), of which the page cache gives way.
    limit, used = (_read(Path(f"/sys/fs/cgroup/memory.{name}")).strip() for name in ("max", "current"))
    if limit.isdigit() and used.isdigit():
        cache = _read(Path("/sys/fs/cgroup/memory.stat")).partition("inactive_file ")[2].split()
        found.append(max(0, int(limit) - int(used) + (int(cache[0]) if cache else 0)))
    return min(found) if found else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _size(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
