"""The orderings that the methods' papers report, each through SmolLM2 on real text, at equal bits.

A prompt is read once, by the exact cache, and packed under every scheme; what follows is read through each of them, and
compared with the exact cache token by token, as ``kvbits eval`` does. So every token that counts attends to a packed
prompt, and few tokens say as much as whole windows. Sinks and residual are at their defaults; calibration reads another
text. The figures over more text are in ``bench/results``.
"""

from __future__ import annotations

import itertools
import json
import pydoc_data.topics
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import altered
import pytest
import torch
from transformers import Cache

import kvbits
from kvbits.calibration import calibrate
from kvbits.hf.cache import KVCache
from kvbits.hf.names import cache_name
from kvbits.measure.bits import bits_at
from kvbits.measure.caches import EXACT, make
from kvbits.measure.divergence import divergence, log_probabilities

pytestmark = [pytest.mark.model, pytest.mark.slow]

PROMPT, SCORED, CHUNK = 1028, 240, 48
"""4 sinks, 7 blocks of 128 packed, 128 recent; then five chunks. The text differs between releases of Python."""

MEASURED = ("specialnames", "types")
READ = ("formatstrings", "strings", "class", "function", "try", "assignment", "comparisons", "objects", "execmodel")


def topics(*names: str) -> str:
    return "\n\n".join(pydoc_data.topics.topics[name] for name in names)


def static(bits: int, family: str = "int", place: str = "pre-rope") -> str:
    """KVQuant's arrangement with other levels: static ranges of keys before RoPE, values per token."""
    return f"k={family}{bits}-calibrated,v={family}{bits},{place}"


CALIBRATED = [
    *(static(bits, family) for bits in (3, 2) for family in ("int", "nf")),
    *(f"nuq{bits}{more}" for bits in (3, 2) for more in ("", "-1%")),
    static(3, place="post-rope"),
]


class Measured:
    """KL of schemes on one model, each measured once against the same exact run."""

    def __init__(
        self, model: Any, tokenizer: Any, calibration: Path | None = None, prompt: int = PROMPT, scored: int = SCORED
    ) -> None:
        self.model, self.calibration = kvbits.disable(model), calibration
        ids = tokenizer(topics(*MEASURED), return_tensors="pt").input_ids[:, : prompt + scored]
        assert ids.shape[1] == prompt + scored
        self.prompt, self.scored = ids[:, :prompt], ids[:, prompt:]
        self.found: dict[str, torch.Tensor] = {}
        self.source = make(self.model, EXACT)
        with torch.no_grad():
            self.model(input_ids=self.prompt, use_cache=True, logits_to_keep=1, **{cache_name(model): self.source})
        self.exact = self.read(EXACT)

    def filled(self, scheme: str) -> Cache:
        """A cache that holds the prompt."""
        cache = make(self.model, scheme, self.calibration)
        if isinstance(cache, KVCache):
            cache.columns.begin(None)
        for index, layer in enumerate(self.source.layers):
            cache.update(layer.keys.clone(), layer.values.clone(), index)
        return cache

    @torch.no_grad()
    def read(self, scheme: str) -> torch.Tensor:
        """Log probabilities of what follows the prompt, ``[T, vocabulary]``."""
        given = {"use_cache": True, cache_name(self.model): self.filled(scheme)}
        found = [self.model(input_ids=ids, **given).logits[0] for ids in self.scored.split(CHUNK, dim=1)]
        return log_probabilities(torch.cat(found))

    def tokens(self, scheme: str) -> torch.Tensor:
        """KL of each token, ``[T]``."""
        if scheme not in self.found:
            self.found[scheme] = divergence(self.exact, self.read(scheme))
        return self.found[scheme]

    def of(self, scheme: str) -> float:
        return float(self.tokens(scheme).mean())

    def in_order(self, *schemes: str, factor: float = 1.0) -> None:
        """That each scheme is better than the next one, by ``factor`` in the mean, and beyond chance."""
        for better, worse in itertools.pairwise(schemes):
            certainty = beyond_chance(self.tokens(better), self.tokens(worse))
            kl = {scheme: self.of(scheme) for scheme in (better, worse)}
            assert certainty > 2 and factor * kl[better] < kl[worse], (certainty, kl)


def beyond_chance(better: torch.Tensor, worse: torch.Tensor) -> float:
    """By how many of its standard errors the mean of the logarithms of the ratios lies above 0.

    Token by token, since some tokens are hard under every scheme; logarithms, since a mean is ruled by a few of them.
    """
    gain = worse.clamp(min=1e-9).log() - better.clamp(min=1e-9).log()
    return float(gain.mean() / gain.std()) * len(gain) ** 0.5


@pytest.fixture(scope="module")
def calibrations(smollm2: Any, tmp_path_factory: Any) -> dict[bool, Path]:
    """Of the same text, weighted by sensitivity and not."""
    model, tokenizer = smollm2
    folders = {weighted: tmp_path_factory.mktemp("calibration") for weighted in (True, False)}
    options = dict(tokenizer=tokenizer, samples=2, length=512)
    given = kvbits.disable(model), topics(*READ)
    calibrate(*given, CALIBRATED, **options, out=folders[True], keep_samples=True)
    # Samples take most of the time, and are the same: only what they are used for differs.
    shutil.copytree(folders[True] / "samples", folders[False] / "samples")
    run = folders[False] / "samples" / "run.json"
    run.write_text(json.dumps({**json.loads(run.read_text()), "weighted": False}))
    calibrate(*given, ["nuq3"], **options, out=folders[False], weighted=False)
    return folders


@pytest.fixture(scope="module")
def kl(smollm2: Any, calibrations: dict[bool, Path]) -> Iterator[Measured]:
    yield Measured(*smollm2, calibrations[True])
    kvbits.disable(smollm2[0])


@pytest.mark.parametrize("bits", (3, 2))
def test_keys_per_channel_beat_keys_per_token(kl: Measured, bits: int) -> None:
    kl.in_order(f"k=int{bits}-channel-gs64,v=int{bits}", f"int{bits}", factor=2.0)


def test_keys_before_rope_beat_keys_after_it(kl: Measured) -> None:
    kl.in_order(static(3), static(3, place="post-rope"))


@pytest.mark.parametrize("bits", (3, 2))
def test_fitted_levels_beat_given_ones(kl: Measured, bits: int) -> None:
    kl.in_order(f"nuq{bits}", static(bits, "nf"), factor=1.2)


def test_outliers_beside_the_codes_help(kl: Measured) -> None:
    """Most where bits are few."""
    kl.in_order("nuq2-1%", "nuq2", factor=2.0)
    kl.in_order("nuq3-1%", static(3, "nf"), factor=1.2)


def test_normal_float_levels_are_as_good_as_evenly_spaced_ones(kl: Measured) -> None:
    """Neither is better on this model beyond chance, here and in ``bench/results/ablation.json``."""
    assert 0.5 < kl.of(static(3, "nf")) / kl.of(static(3)) < 2


def test_sinks_help(kl: Measured) -> None:
    kl.in_order("int3", "int3,sinks=0", factor=1.2)


def test_levels_weighted_by_sensitivity_beat_unweighted_ones(kl: Measured, calibrations: dict[bool, Path]) -> None:
    """Where outliers are kept apart, levels hardly matter: ``bench/results/ablation.json``."""
    weighted = kl.tokens("nuq3")
    kl.calibration = calibrations[False]
    plain = divergence(kl.exact, kl.read("nuq3"))
    kl.calibration = calibrations[True]
    assert beyond_chance(weighted, plain) > 2 and 1.2 * float(weighted.mean()) < float(plain.mean())


@pytest.mark.parametrize("family", ("lm", "rot"))
def test_centred_keys_make_rotations_good(kl: Measured, family: str) -> None:
    kl.in_order(f"{family}3,centred", f"{family}3", factor=1.2)


def test_the_named_schemes_reach_their_targets(kl: Measured) -> None:
    """About 4.5 and 2.6 bits, everything that a layer of SmolLM2 allocates at 8,000 tokens included."""
    for name, least_bits, most_bits, most_kl in (("default", 4.4, 4.6, 0.004), ("small", 2.4, 2.6, 0.1)):
        assert kl.of(name) <= most_kl
        assert least_bits <= bits_at(kl.filled(name)) <= most_bits
    assert kl.of("exact") == 0 < kl.of("default") / 10


# -- keys as other models have them ------------------------------------------------------------------------------------

SHORT = {"prompt": 388, "scored": 48}
"""Here schemes differ by factors, not by shares."""


def test_altered_models_compute_the_same(smollm2: Any) -> None:
    """Scaling pairs of keys up and of queries down changes nothing but the keys."""
    model, tokenizer = smollm2
    ids = tokenizer(topics(*MEASURED), return_tensors="pt").input_ids[:, :64]
    with torch.no_grad():
        right, got = model(ids).logits, altered.scaled(model, 64.0)(ids).logits
    assert float((got - right).abs().max() / right.abs().max()) < 1e-3


@pytest.mark.parametrize("size", (8.0, 64.0))
def test_outlier_channels_do_not_break_the_default(smollm2: Any, size: float) -> None:
    kl = Measured(altered.scaled(smollm2[0], size), smollm2[1], **SHORT)
    kl.in_order("default", "int4", factor=2.0)
    assert kl.of("default") < 0.05


def test_a_huge_constant_offset_does_not_break_the_default(smollm2: Any) -> None:
    """Eight times as large as the keys, in slow rotary pairs: the model reads as well as before."""
    model, tokenizer = altered.offset(smollm2[0], 8.0), smollm2[1]
    ids = tokenizer(topics(*MEASURED), return_tensors="pt").input_ids[:, :128]
    with torch.no_grad():
        before, after = (
            torch.nn.functional.cross_entropy(m(ids).logits[0, :-1], ids[0, 1:]) for m in (smollm2[0], model)
        )
    assert abs(float(after - before)) < 0.02
    kl = Measured(model, tokenizer, **SHORT)
    kl.in_order("default", "lm4", factor=100.0)
    kl.in_order("default", "int4", factor=100.0)
    assert kl.of("default") < 0.006
