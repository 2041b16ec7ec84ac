"""What every benchmark records beside its figures, and how it times."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

from kvbits.files import row_lines
from kvbits.measure.bench import Bench
from kvbits.measure.setting import setting
from kvbits.measure.text import prose as prose  # for the other scripts

RESULTS = Path(__file__).parent / "results"


def write(name: str, rows: list[dict[str, Any]], **more: Any) -> Path:
    """Write ``bench/results/<name>.json``."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    here = setting(commit=commit())
    here["command"] = f"python bench/{here['command']}"
    path.write_text(row_lines({"setting": here, **more, "rows": rows}), encoding="utf-8")
    return path


def commit() -> str:
    """What is measured, if this is a clone."""
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def require_green(*tests: str) -> None:
    """Refuse to measure what is wrong: run these test files first, and end the program if one fails."""
    if importlib.util.find_spec("pytest") is None:
        raise SystemExit(f"{' '.join(tests)} must pass first, and pytest is not installed: pip install 'kvbits[dev]'")
    root = Path(__file__).parent.parent
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(tests)}: a test fails, so nothing is measured\n{done.stdout[-2000:]}")


def measured(plan: Bench) -> list[dict[str, Any]]:
    """The rows of a plan, printed as they come; the end of the program where one of them failed."""
    rows = plan.run(show=lambda cell, rows: print(*rows, sep="\n", flush=True)).rows
    failed = [row for row in rows if "error" in row]
    if failed:
        raise SystemExit(f"{failed[0]['scheme']} failed, so nothing is written: {failed[0]['error']}")
    return rows
