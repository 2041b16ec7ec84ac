"""Triton's kernels run compiled on a GPU, and interpreted elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvbits.attend.triton import decode as triton_decode
from kvbits.attend.triton.tuning import Tuning, tuned
from kvbits.backends import OPT_IN
from triton_calls import GPU


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Interpret where there is no GPU, in these tests alone; about four programs a call, so that splits are merged."""
    if not GPU:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        monkeypatch.setattr(triton_decode, "_processor", lambda device: ("test", 1))
    monkeypatch.setenv(OPT_IN, "1")
    with tuned(Tuning(rows=32, programs=4, exact_tokens=32)):
        yield
