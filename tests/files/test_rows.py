"""Results are written one row a line, and read back as they were."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvbits.files import row_lines


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        ({"format": 1, "setting": {"a": {"b": [1, 2]}}, "rows": [{"x": 1}, {"x": None}]}, 8),
        ({"rows": []}, 3),
        ([{"x": "\n"}, {"y": 1e-30}], 4),
        ({"numbers": [1, 2], "mixed": [{"x": 1}, 2]}, 4),
    ],
)
def test_rows_have_lines_of_their_own(data: Any, lines: int) -> None:
    text = row_lines(data)
    assert json.loads(text) == data and len(text.splitlines()) == lines and text.endswith("\n")


@pytest.mark.parametrize("wrong", [float("nan"), float("-inf")])
def test_what_json_has_no_words_for_is_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        row_lines({"rows": [{"x": wrong}]})
