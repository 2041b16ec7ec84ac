"""The scripts of ``bench/`` start: what they take from the package and from each other is there."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
OPTIONAL = {"openai", "triton"}
"""Libraries that not every script needs and not every machine has."""


@pytest.mark.parametrize("script", sorted(path.name for path in BENCH.glob("*.py")))
def test_a_script_starts(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    before = set(sys.modules)
    try:
        runpy.run_path(str(BENCH / script), run_name="__main__")
    except SystemExit as end:
        assert end.code == 0
    except ImportError as error:
        if error.name not in OPTIONAL:
            raise
        pytest.skip(str(error))
    finally:  # scripts import each other by names that other tests may mean differently
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCH)):
                del sys.modules[name]
