"""The scripts of ``bench/`` start: what they take from the package and from each other is there."""

from __future__ import annotations

import importlib
import importlib.util
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


def test_a_script_without_pytest_says_so_rather_than_that_a_test_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    common = importlib.import_module("common")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"test_x\.py must pass first, and pytest .* pip install 'kvbits\[dev\]'"):
        common.require_green("tests/test_x.py")


def test_a_script_measures_nothing_where_a_test_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    common = importlib.import_module("common")
    (tmp_path / "test_red.py").write_text("def test_red(): assert False")
    (tmp_path / "test_green.py").write_text("def test_green(): pass")
    common.require_green(str(tmp_path / "test_green.py"))
    with pytest.raises(SystemExit, match="a test fails, so nothing is measured"):
        common.require_green(str(tmp_path / "test_red.py"))
