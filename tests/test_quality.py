"""The orderings that the methods' papers report, each through SmolLM2 on real text, at equal bits.

Measured as ``bench/quality.py`` does: KL to the exact cache, text fed through the cache in chunks of 16, sinks and
residual at their defaults, one window of 768 tokens; the figures over more text are in ``bench/results``. Calibration
reads another text than the one that is measured.
"""

from __future__ import annotations

import itertools
import pydoc_data.topics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import altered
import pytest
import quality
import torch

import kvbits
from kvbits.calibration import calibrate

pytestmark = [pytest.mark.model, pytest.mark.slow]

LENGTH, CHUNK = 768, 16
MEASURED = ("specialnames",)
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

    def __init__(self, model: Any, tokenizer: Any, calibration: Path | None = None) -> None:
        self.model, self.calibration, self.found = kvbits.disable(model), calibration, {}
        self.window = tokenizer(topics(*MEASURED), return_tensors="pt").input_ids[:, :LENGTH]
        assert self.window.shape[1] == LENGTH
        self.exact = self.read("hf:dynamic")

    @torch.no_grad()
    def read(self, scheme: str) -> torch.Tensor:
        cache = quality.make(self.model, scheme, self.calibration)
        return quality.log_probabilities(self.model, self.window, cache, CHUNK)

    def of(self, scheme: str) -> float:
        if scheme not in self.found:
            self.found[scheme] = float(quality.divergence(self.exact, self.read(scheme)).mean())
        return self.found[scheme]

    def in_order(self, *schemes: str, factor: float = 1.0) -> None:
        """That each scheme is better than the next one by ``factor``."""
        kl = [self.of(scheme) for scheme in schemes]
        assert all(factor * a < b for a, b in itertools.pairwise(kl)), dict(zip(schemes, kl, strict=True))


@pytest.fixture(scope="module")
def calibrations(smollm2: Any, tmp_path_factory: Any) -> dict[bool, Path]:
    """Of the same text, weighted by sensitivity and not."""
    model, tokenizer = smollm2
    folders = {}
    for weighted, schemes in ((True, CALIBRATED), (False, ["nuq3", "nuq2"])):
        folders[weighted] = tmp_path_factory.mktemp("calibration")
        options = dict(tokenizer=tokenizer, samples=4, length=512, weighted=weighted, out=folders[weighted])
        calibrate(kvbits.disable(model), topics(*READ), schemes, **options)
    return folders


@pytest.fixture(scope="module")
def kl(smollm2: Any, calibrations: dict[bool, Path]) -> Iterator[Measured]:
    yield Measured(*smollm2, calibrations[True])
    kvbits.disable(smollm2[0])


@pytest.mark.parametrize("bits", (3, 2))
def test_keys_per_channel_beat_keys_per_token(kl: Measured, bits: int) -> None:
    kl.in_order(f"k=int{bits}-channel-gs64,v=int{bits}", f"int{bits}", factor=1.2)


def test_keys_before_rope_beat_keys_after_it(kl: Measured) -> None:
    kl.in_order(static(3), static(3, place="post-rope"))


@pytest.mark.parametrize("bits", (3, 2))
def test_fitted_levels_and_outliers_beat_plain_levels(kl: Measured, bits: int) -> None:
    kl.in_order(f"nuq{bits}-1%", f"nuq{bits}", static(bits, "nf"), static(bits, "int"))


def test_sinks_help(kl: Measured) -> None:
    kl.in_order("int3", "int3,sinks=0", factor=1.05)


@pytest.mark.parametrize("bits", (3,))
def test_levels_weighted_by_sensitivity_beat_unweighted_ones(
    smollm2: Any, kl: Measured, calibrations: dict[bool, Path], bits: int
) -> None:
    """Where outliers are kept apart, levels hardly matter: ``bench/results/ablation.json``."""
    plain = Measured(*smollm2, calibrations[False])
    assert kl.of(f"nuq{bits}") < plain.of(f"nuq{bits}")


@pytest.mark.parametrize("family", ("lm", "rot"))
def test_centred_keys_make_rotations_good(kl: Measured, family: str) -> None:
    kl.in_order(f"{family}3,centred", f"{family}3", factor=1.2)


def test_the_exact_cache_in_one_piece_is_the_noise_floor(kl: Measured) -> None:
    with torch.no_grad():
        once = quality.log_probabilities(kl.model, kl.window, quality.make(kl.model, "hf:dynamic"), LENGTH)
    assert abs(float(quality.divergence(kl.exact, once).mean())) < 1e-6 < kl.of("default") / 10


def test_the_named_schemes_reach_their_targets(kl: Measured) -> None:
    """About 4.5 and 2.6 bits, everything that a layer of SmolLM2 allocates at 8,000 tokens included."""
    for name, most_bits, most_kl in (("default", 4.6, 0.006), ("small", 2.6, 0.16)):
        assert quality.bits_at(kl.model, name) <= most_bits
        assert kl.of(name) <= most_kl


# -- keys as other models have them ------------------------------------------------------------------------------------


def test_altered_models_compute_the_same(smollm2: Any) -> None:
    """Scaling pairs of keys up and of queries down changes nothing but the keys."""
    model, tokenizer = smollm2
    ids = tokenizer(topics(*MEASURED), return_tensors="pt").input_ids[:, :64]
    with torch.no_grad():
        right, got = model(ids).logits, altered.scaled(model, 64.0)(ids).logits
    assert float((got - right).abs().max() / right.abs().max()) < 1e-3


@pytest.mark.parametrize("size", (8.0, 64.0))
def test_outlier_channels_do_not_break_the_default(smollm2: Any, size: float) -> None:
    kl = Measured(altered.scaled(smollm2[0], size), smollm2[1])
    kl.in_order("default", "int4", factor=2.0)
    assert kl.of("default") < 0.05


def test_a_huge_constant_offset_does_not_break_the_default(smollm2: Any) -> None:
    """Eight times as large as the keys, in slow rotary pairs: the model reads as well as before."""
    model, tokenizer = altered.offset(smollm2[0], 8.0), smollm2[1]
    ids = tokenizer(topics(*MEASURED), return_tensors="pt").input_ids[:, :256]
    with torch.no_grad():
        before, after = (
            torch.nn.functional.cross_entropy(m(ids).logits[0, :-1], ids[0, 1:]) for m in (smollm2[0], model)
        )
    assert abs(float(after - before)) < 0.02
    kl = Measured(model, tokenizer)
    kl.in_order("default", "lm4", factor=100.0)
    kl.in_order("default", "int4", factor=100.0)
    assert kl.of("default") < 0.006
