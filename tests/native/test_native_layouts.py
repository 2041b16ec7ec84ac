"""Layouts that make no sense are refused by the native module, and so are calls of its decoder."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kernel_calls import _native
from module_calls import EXACT, FIXED, RECORD_BYTES, TABLE, arguments, good_side, layout, unaligned

pytestmark = pytest.mark.usefixtures("threads_stay")


@pytest.mark.parametrize("side", ("key", "value"))
@pytest.mark.parametrize(
    ("change", "message"),
    [
        *[({"channels": n}, "multiple of 8 up to 512") for n in (0, -8, 4, 60, 520, 2**30)],
        *[({"bits": n}, "2, 3, 4 or 8 bits") for n in (0, -1, 1, 5, 16, 64)],
        *[({"levels": n}, "levels do not fit") for n in (-1, 4, 2**31 - 1)],
        ({"levels": 2}, "levels do not fit"),
        *[({"per": n}, "direction of groups") for n in (-1, 3, 4, 9)],
        ({"per": 2, "fixed": True, "length": 32}, "only e4m3"),
        ({"per": 2, "length": 32}, "only e4m3"),
        ({"levels": 2, "bits": 8, "zero": False, "per": 2, "length": 32}, "static scales are per layer"),
        ({"levels": 2, "bits": 8}, "e4m3 has one scale"),
        ({"fixed": True}, "static scales are per layer or per channel"),
        ({**FIXED, "length": 16, "groups": 2}, "static scales are per layer or per channel"),
        *[({"length": n}, "groups") for n in (0, -64, 32, 128, 2**31 - 1)][:3],
        *[({"groups": n}, "groups") for n in (0, -1, 2, 2**31 - 1)],
        ({"per": 1, "length": 8, "groups": 4}, "multiples of 16"),
        ({"per": 1, "length": 24, "groups": 2}, "multiples of 16"),
        *[({"codes": n}, "codes does not lie inside") for n in (-2, 1, RECORD_BYTES - 1022, 2**40, 2**63 - 2)],
        *[({"scale": n}, "scale does not lie inside") for n in (-1, 1025, RECORD_BYTES - 62, 2**63 - 2)],
        *[({"zeros": n}, "zero does not lie inside") for n in (-1, 1089, RECORD_BYTES - 62, 2**63 - 2)],
        *[({"levels": 1, "table": [0.0] * n}, "table has the wrong length") for n in (0, 4, 15, 17)],
        *[({**TABLE, "table": [bad, *TABLE["table"][1:]]}, "not finite") for bad in (math.nan, math.inf, -math.inf)],  # type: ignore[misc, index]
        ({"outliers": -1}, "negative number of outliers"),
        ({"outliers": 4}, "outlier_index does not lie inside"),
        ({"outliers": 4, "outlier_index": 0}, "outlier_value does not lie inside"),
        ({"outliers": 2**31 - 1, "outlier_index": 0, "outlier_value": 0}, "outlier_index does not lie inside"),
        ({"outliers": 4, "outlier_index": 1, "outlier_value": 0}, "outlier_index does not lie inside"),
        ({**EXACT, "type": 0}, "exact elements of an unknown type"),
        ({**EXACT, "type": 4}, "exact elements of an unknown type"),
        ({**EXACT, "bits": 40}, "exact elements have no codes"),
        ({**EXACT, "outliers": 4}, "outliers|does not lie inside"),
        (EXACT, "codes does not lie inside"),
    ],
    ids=str,
)
def test_layouts_that_make_no_sense_are_refused(change: dict[str, Any], message: str, side: str) -> None:
    sides = {"key": good_side(), "value": good_side()}
    _native.Layout(32, RECORD_BYTES, sides["key"], sides["value"])
    sides[side].update(change)
    with pytest.raises(ValueError, match=message):
        _native.Layout(32, RECORD_BYTES, sides["key"], sides["value"])


@pytest.mark.filterwarnings("ignore:nanobind. attempted to access an uninitialized:RuntimeWarning")
def test_layouts_of_wrong_words_are_refused() -> None:
    side = good_side()
    for tokens, size in ((0, RECORD_BYTES), (-32, RECORD_BYTES), (12, RECORD_BYTES), (8192, RECORD_BYTES), (32, 100)):
        with pytest.raises(ValueError, match=r"block must be a multiple|record must be a multiple"):
            _native.Layout(tokens, size, side, side)
    for name in good_side():
        if name.startswith("outlier_"):
            continue
        with pytest.raises(ValueError, match=f"lacks {name}"):
            _native.Layout(32, RECORD_BYTES, {k: v for k, v in side.items() if k != name}, side)
        with pytest.raises(TypeError, match=f"{name} cannot be "):
            _native.Layout(32, RECORD_BYTES, {**side, name: "four"}, side)
    with pytest.raises(TypeError, match="bits cannot be 1099511627776"):
        _native.Layout(32, RECORD_BYTES, {**side, "bits": 2**40}, side)
    with pytest.raises(TypeError, match="table cannot be"):
        _native.Layout(32, RECORD_BYTES, {**side, "levels": 1, "table": ["a"] * 16}, side)
    with pytest.raises(ValueError, match="at most 65536 elements"):
        _native.Layout(2048, 2**20, {**side, "per": 1, "length": 32, "groups": 64, "outliers": 1}, side)
    with pytest.raises(TypeError):
        _native.Layout(32, RECORD_BYTES, None, side)
    with pytest.raises(TypeError):
        _native.attend(**arguments(layout=_native.Layout.__new__(_native.Layout)))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"output": torch.zeros(2, 2, 60, 64)}, ValueError, "output does not fit"),
        ({"output": torch.zeros(2, 2, 64, 56)}, ValueError, "output does not fit"),
        ({"output": torch.zeros(2, 2, 64, 64).double()}, ValueError, "output is torch.float64"),
        ({"output": torch.zeros(2, 1, 64, 64)}, ValueError, "pool does not fit"),
        ({"output": torch.zeros(1, 2, 64, 64)}, ValueError, "table does not have"),
        ({"output": torch.zeros(2, 2, 96, 64)}, ValueError, "table does not have"),
        ({"table": torch.tensor([[0, 9], [0, 0]])}, ValueError, "the pool does not have"),
        ({"table": torch.tensor([[0, -9], [0, 0]])}, ValueError, "the pool does not have"),
        ({"pool": unaligned(torch.zeros(4, 2, RECORD_BYTES, dtype=torch.uint8))}, ValueError, "pool is not aligned"),
        ({"layout": layout(**FIXED)}, ValueError, "scale is missing"),
        ({"layout": layout(**FIXED), "scale": torch.zeros(2, 64)}, ValueError, "zero is missing"),
        ({"layout": layout(**FIXED), "scale": torch.zeros(64)}, ValueError, "scale has 1 dimensions"),
        ({"isa": 99}, ValueError, "no instruction set"),
        ({"output": None}, (ValueError, TypeError), "output|incompatible"),
    ],
)
def test_bad_calls_of_decode_are_refused(changes: dict[str, Any], error: Any, message: str) -> None:
    good: dict[str, Any] = {
        "layout": layout(),
        "value_side": False,
        "isa": 0,
        "threads": 1,
        "output": torch.zeros(2, 2, 64, 64),
        "pool": torch.zeros(4, 2, RECORD_BYTES, dtype=torch.uint8),
        "table": torch.tensor([[0, 1], [2, 3]]),
    }
    _native.decode(**good)
    with pytest.raises(error, match=message):
        _native.decode(**{**good, **changes})
