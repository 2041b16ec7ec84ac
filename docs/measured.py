"""Tables of what was measured, from ``bench/results``, for :mod:`generate` to put into the documentation."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "bench" / "results"


def table(head: Sequence[str], rows: Iterable[Sequence[object]], right: Sequence[int] = ()) -> str:
    """A Markdown table; columns ``right`` hold numbers."""
    lines = [list(head), ["--:" if i in right else "---" for i in range(len(head))]]
    lines += [[str(cell).replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def code(text: object) -> str:
    """``text`` in backticks."""
    return f"`{text}`"


def result(name: str) -> dict[str, Any]:
    """What ``bench/<name>.py``, or ``kvbits`` with ``--json``, last wrote; with its setting also on the top level."""
    data: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return {**data["setting"], **data}


def result_if_any(name: str) -> dict[str, Any] | None:
    """The same, or None where it has not been run."""
    return result(name) if (RESULTS / f"{name}.json").is_file() else None


def measured_on(data: dict[str, Any], what: str) -> str:
    """One sentence about where figures come from."""
    s = data["setting"]
    text = (
        f"{what} {s['processor']}, {s['cores']} threads, torch {s['torch']}, Transformers {s['transformers']}, "
        f"{s['date']}; `{s['command']}`."
    )
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def missing(name: str, command: str) -> str:
    """What stands in the place of a table that nobody has measured."""
    return f"Not measured yet: `{command}` writes `{name}.json`, and `python docs/generate.py` the table."
