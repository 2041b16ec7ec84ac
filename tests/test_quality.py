"""The orderings that the methods' papers report, each through SmolLM2 on real text, at equal bits.

Measured as ``bench/quality.py`` does: KL to the exact cache, text fed through the cache in chunks of 16, sinks and
residual at their defaults. Two windows of 768 tokens; the figures over more text are in ``bench/results``. Every
comparison asks for a margin, so that it can fail. Calibration reads another text than the one measured.
"""

from __future__ import annotations

import functools
import pydoc_data.topics
from pathlib import Path
from typing import Any

import pytest
import torch

import altered
import kvbits
import quality

pytestmark = [pytest.mark.model, pytest.mark.slow]

WINDOWS, LENGTH, CHUNK = 2, 768, 16
CALIBRATION = dict(samples=4, length=512)
CALIBRATED = (
    "nuq3-1%", "nuq2-1%", "nuq3", "nuq2", "nuq2-1%-qnorm", "nf3-calibrated", "int3-calibrated", "nf2-calibrated",
    "int2-calibrated",
)  # fmt: skip


def topics(*names: str) -> str:
    return "\n\n".join(pydoc_data.topics.topics[name] for name in names)


MEASURED = topics("typesmapping", "specialnames", "imports", "with", "yield")
READ = topics("formatstrings", "strings", "classes", "function", "try", "assignment", "comparisons")


class Measured:
    """KL of schemes, each measured once."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model = kvbits.disable(model)
        ids = tokenizer(MEASURED, return_tensors="pt").input_ids[0]
        self.windows = ids[: WINDOWS * LENGTH].unflatten(0, (WINDOWS, LENGTH))
        self.exact = None
        self.calibration: Path | None = None
        self.of = functools.cache(self._measure)

    def _measure(self, scheme: str) -> float:
        rows = quality.measure(self.model, self.windows, [scheme], CHUNK, self.calibration)
        assert abs(rows[0]["kl_mean"]) < 1e-4  # the exact cache in one piece: the noise floor
        return float(rows[1]["kl_mean"])

    def better(self, one: str, other: str, factor: float = 1.0) -> None:
        """That ``one`` is better than ``other`` by ``factor``."""
        assert factor * self.of(one) < self.of(other), f"{one} {self.of(one):.4f}, {other} {self.of(other):.4f}"


@pytest.fixture(scope="module")
def kl(smollm2: Any) -> Measured:
    return Measured(*smollm2)


def test_keys_per_channel_beat_keys_per_token(kl: Measured) -> None:
    for bits in (3, 2):  # 3.5 bits each at 3 bits, and 2.5: groups of 64 tokens or of 64 channels
        kl.better(f"k=int{bits}-channel-gs64,v=int{bits}", f"int{bits}", 1.2)
