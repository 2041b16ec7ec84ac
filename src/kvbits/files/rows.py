"""Results as JSON that a reader of differences can follow: one row a line."""

from __future__ import annotations

import json
from typing import Any


def row_lines(data: Any) -> str:
    """JSON text of plain data: each item of a list of rows, and each value of the outermost mapping, has its own line.

    Raises:
        ValueError: for NaN and infinity, which JSON has no words for.
    """
    if isinstance(data, dict):
        parts = [f"{json.dumps(name)}: {_value(value)}" for name, value in data.items()]
        return "{\n" + ",\n".join(parts) + "\n}\n"
    return _value(data) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return "[\n" + ",\n".join(_line(item) for item in value) + "\n]"
    return _line(value)


def _line(value: Any) -> str:
    return json.dumps(value, allow_nan=False)
