"""Calls that make no sense are refused by the native module."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kernel_calls import ISAS, _native
from module_calls import (
    BASE,
    FIXED,
    MASK,
    RECORD_BYTES,
    arguments,
    good_side,
    layout,
    roped,
    steps,
    unaligned,
)

pytestmark = pytest.mark.usefixtures("threads_stay")

BAD_CALLS: dict[str, tuple[dict[str, Any], str]] = {
    # shapes
    "output of other rows": ({"output": torch.zeros(1, 6, 3, 64)}, "output does not fit"),
    "output of other heads": ({"output": torch.zeros(2, 5, 3, 64)}, "output does not fit"),
    "output of other queries": ({"output": torch.zeros(2, 6, 2, 64)}, "output does not fit"),
    "output of other channels": ({"output": torch.zeros(2, 6, 3, 56)}, "output does not fit"),
    "output of 3 dimensions": ({"output": torch.zeros(6, 3, 64)}, "output has 3 dimensions instead of 4"),
    "output of 5 dimensions": ({"output": torch.zeros(2, 1, 6, 3, 64)}, "output has 5 dimensions instead of 4"),
    "query of other rows": ({"query": torch.zeros(3, 6, 3, 64)}, "query does not fit the keys"),
    "query of heads that do not divide": (
        {"query": torch.zeros(2, 5, 3, 64), "output": torch.zeros(2, 5, 3, 64)},
        "query does not fit the keys",
    ),
    "query without heads": ({"query": torch.zeros(2, 0, 3, 64), "output": torch.zeros(2, 0, 3, 64)}, "query|empty"),
    "query without tokens": ({"query": torch.zeros(2, 6, 0, 64), "output": torch.zeros(2, 6, 0, 64)}, "empty"),
    "query of other channels": ({"query": torch.zeros(2, 6, 3, 72)}, "query does not fit the keys"),
    "an enormous query": (
        {"query": torch.zeros(1).expand(2, 2**16, 2**16, 64), "output": torch.zeros(1).expand(2, 2**16, 2**16, 64)},
        "stride 0|enormous",
    ),
    "a query of enormous heads": (
        {
            "query": torch.zeros(64).expand(2, 2**16, 2**16, 64),
            "output": torch.zeros(64).expand(2, 2**16, 2**16, 64),
        },
        "enormous",
    ),
    "balance of query heads": ({"transforms": {"key_balance": torch.zeros(6, 64)}}, "key balance has the wrong shape"),
    "key rotation of other channels": (
        {"transforms": {"key_rotation": torch.zeros(32, 32)}},
        "key rotation has the wrong shape",
    ),
    "keys of other channels": ({"keys": torch.zeros(2, 2, 24, 56)}, "layout's channels"),
    "values of other channels": ({"values": torch.zeros(2, 2, 24, 72)}, "layout's channels"),
    "values of fewer tokens": ({"values": torch.zeros(2, 2, 20, 64)}, "keys and values differ"),
    "values of other heads": ({"values": torch.zeros(2, 1, 24, 64)}, "keys and values differ"),
    "no rows": ({"keys": torch.zeros(0, 2, 24, 64), "values": torch.zeros(0, 2, 24, 64)}, "empty"),
    "pool of other heads": ({"pool": torch.zeros(4, 1, RECORD_BYTES, dtype=torch.uint8)}, "pool does not fit"),
    "pool of shorter records": ({"pool": torch.zeros(4, 2, 2240, dtype=torch.uint8)}, "pool does not fit"),
    "pool with gaps": ({"pool": torch.zeros(4, 4, RECORD_BYTES, dtype=torch.uint8)[:, ::2]}, "pool does not fit"),
    "pool with gaps between blocks": (
        {"pool": torch.zeros(8, 2, RECORD_BYTES, dtype=torch.uint8)[::2]},
        "pool does not fit",
    ),
    "table of fewer rows": ({"table": torch.tensor([[0, 1]])}, "table must have one row"),
    "table of one dimension": ({"table": torch.tensor([0, 1])}, "table has 1 dimensions instead of 2"),
    "cos without sin": (roped(base_sin=None), "base sin is missing"),
    "sin without cos": (roped(base_cos=None), "base cos is missing"),
    "cos and sin of other shapes": (roped(base_sin=BASE[..., :8]), "base cos and base sin differ|base cos and sin"),
    "too many pairs": (roped(steps=steps(32, 33), base_cos=torch.zeros(1, 2, 33), base_sin=BASE), "steps do not fit"),
    "steps of other blocks": (roped(steps=steps(16, 32)), "steps do not fit"),
    "bases of other pairs": (roped(steps=steps(32, 16)), "base cos does not fit"),
    "too few bases": (roped(base_cos=BASE[:, :1], base_sin=BASE[:, :1]), "base cos has too few rows"),
    "bases of other rows": (
        roped(base_cos=BASE.expand(3, -1, -1), base_sin=BASE.expand(3, -1, -1)),
        "base cos does not fit",
    ),
    "rotation and rope": (roped(key_rotation=torch.zeros(64, 64)), "rotated keys cannot"),
    "balance and rope": (roped(key_balance=torch.zeros(2, 64)), "rotated keys cannot"),
    "steps that are a tensor": (roped(steps=BASE), "steps are not Steps"),
    "key mean of one head": ({"transforms": {"key_mean": torch.zeros(1, 64)}}, "key mean has the wrong shape"),
    "value mean of other channels": (
        {"transforms": {"value_mean": torch.zeros(2, 56)}},
        "value mean has the wrong shape",
    ),
    "rotation that is not square": (
        {"transforms": {"value_unrotation": torch.zeros(64, 32)}},
        "value unrotation has the wrong shape",
    ),
    "rotation that is transposed": (
        {"transforms": {"value_unrotation": torch.zeros(64, 64).t()}},
        "value unrotation: its last",
    ),
    "a transform of another name": ({"transforms": {"key_means": torch.zeros(2, 64)}}, "transforms are key_mean"),
    "a rope without its place": ({"transforms": {"steps": steps(32, 32)}}, "base cos is missing"),
    "mask of other rows": ({"mask": MASK[:1].expand(3, -1, -1, -1)}, "mask does not fit"),
    "mask of other heads": ({"mask": MASK.expand(-1, 2, -1, -1)}, "mask does not fit"),
    "mask of other queries": ({"mask": MASK[:, :, :2]}, "mask does not fit"),
    "mask of 3 dimensions": ({"mask": MASK[0]}, "mask has 3 dimensions"),
    "column_of of other rows": ({"column_of": torch.zeros(1, 88, dtype=torch.int64)}, "column_of must be"),
    "column_of with gaps": ({"column_of": torch.zeros(2, 100, dtype=torch.int64)[:, :88]}, "column_of must be"),
    "empty sink logits": ({"sink_logits": torch.zeros(0)}, "sink_logits has the wrong shape"),
    "an empty mask": ({"mask": MASK[..., :0]}, "mask does not fit"),
    "an empty rotation": ({"transforms": {"key_rotation": torch.zeros(0, 0)}}, "key rotation has the wrong shape"),
    "empty bases": (roped(base_cos=BASE[..., :0], base_sin=BASE[..., :0]), "base cos does not fit"),
    "few sink logits": ({"sink_logits": torch.zeros(2)}, "sink_logits has the wrong shape"),
    "static scale is missing": ({"layout": layout(**FIXED)}, "key scale is missing"),
    "static zero is missing": (
        {"layout": layout(**FIXED), "key_scale": torch.zeros(2, 64)},
        "key zero is missing",
    ),
    "static scale of one head": (
        {"layout": layout(**FIXED), "key_scale": torch.zeros(1, 64), "key_zero": torch.zeros(2, 64)},
        "key scale has the wrong shape",
    ),
    # types
    "query of float64": ({"query": torch.zeros(2, 6, 3, 64).double()}, "query is torch.float64; allowed are float32"),
    "output of int32": ({"output": torch.zeros(2, 6, 3, 64, dtype=torch.int32)}, "output is torch.int32"),
    "keys of float64": ({"keys": torch.zeros(2, 2, 24, 64).double()}, "keys is torch.float64"),
    "values of uint8": ({"values": torch.zeros(2, 2, 24, 64, dtype=torch.uint8)}, "values is torch.uint8"),
    "pool of int8": ({"pool": torch.zeros(4, 2, RECORD_BYTES, dtype=torch.int8)}, "pool is torch.int8"),
    "table of int32": ({"table": torch.zeros(2, 2, dtype=torch.int32)}, "table is torch.int32; allowed are int64"),
    "mask of int64": ({"mask": MASK.long()}, "mask is torch.int64"),
    "mask of float64": ({"mask": MASK.double()}, "mask is torch.float64"),
    "column_of of int32": ({"column_of": torch.zeros(2, 88, dtype=torch.int32)}, "column_of is torch.int32"),
    "sink logits of bfloat16": ({"sink_logits": torch.zeros(6).bfloat16()}, "sink_logits is torch.bfloat16"),
    "angles of bfloat16": (roped(base_cos=BASE.bfloat16(), base_sin=BASE.bfloat16()), "base cos is torch.bfloat16"),
    "mean of bfloat16": ({"transforms": {"key_mean": torch.zeros(2, 64).bfloat16()}}, "key mean is torch.bfloat16"),
    "query on meta": ({"query": torch.zeros(2, 6, 3, 64, device="meta")}, "query is not on the CPU"),
    "a numpy array": ({"query": torch.zeros(2, 6, 3, 64).numpy()}, "query is float32"),
    # strides and alignment
    "output channels apart": ({"output": torch.zeros(2, 6, 64, 3).transpose(2, 3)}, "output: its last dimension"),
    "query channels apart": ({"query": torch.zeros(2, 6, 3, 128)[..., ::2]}, "query: its last dimension has stride 2"),
    "keys channels apart": ({"keys": torch.zeros(2, 2, 64, 24).transpose(2, 3)}, "keys: its last dimension"),
    "mask columns apart": ({"mask": MASK[..., :1].expand(-1, -1, -1, 88)}, "mask: its last dimension has stride 0"),
    "table columns apart": ({"table": torch.zeros(2, 4, dtype=torch.int64)[:, ::2]}, "table: its last dimension"),
    "unaligned query": ({"query": unaligned(torch.zeros(2, 6, 3, 64))}, "query is not aligned"),
    "unaligned pool": ({"pool": unaligned(torch.zeros(4, 2, RECORD_BYTES, dtype=torch.uint8))}, "pool is not aligned"),
    "unaligned half keys": ({"keys": unaligned(torch.zeros(2, 2, 24, 64).half())}, "keys is not aligned"),
    "unaligned table": ({"table": unaligned(torch.zeros(2, 2, dtype=torch.int64))}, "table is not aligned"),
    # numbers
    "a block beyond the pool": ({"table": torch.tensor([[0, 1], [2, 4]])}, "the pool does not have"),
    "a block far beyond": ({"table": torch.tensor([[0, 1], [2, 2**62]])}, "the pool does not have"),
    "a negative block": ({"table": torch.tensor([[0, -1], [2, 3]])}, "the pool does not have"),
    "blocks of an empty pool": ({"pool": torch.zeros(0, 2, RECORD_BYTES, dtype=torch.uint8)}, "the pool does not have"),
    "more blocks than the table has": ({"counts": (2, 3)}, "counts is out of range"),
    "negative blocks": ({"counts": (-1, 2)}, "counts is out of range"),
    "blocks of one row": ({"counts": (2,)}, "counts must have one number for each row"),
    "more exact tokens than there are": ({"exact_counts": (24, 25)}, "exact_counts is out of range"),
    "negative exact tokens": ({"exact_counts": (24, -1)}, "exact_counts is out of range"),
    "exact tokens of three rows": ({"exact_counts": (24, 24, 24)}, "exact_counts must have one number"),
    "negative sinks": ({"sinks": -1}, "negative token numbers"),
    "enormously many sinks": ({"sinks": 2**31 - 1}, "more tokens than can be numbered"),
    "negative dropped": ({"dropped": -1}, "negative token numbers"),
    "enormously many dropped": (
        {"dropped": 2**31 - 1, "column_of": torch.zeros(2, 88, dtype=torch.int64)},
        "more tokens than can be numbered",
    ),
    "a negative offset": ({"offset": -1}, "out of range"),
    "an enormous offset": ({"offset": 2**63 - 1}, "out of range"),
    "a negative window": ({"window": -1}, "out of range"),
    "a negative column": ({"first_query_column": -(2**63)}, "out of range"),
    "an enormous column": ({"first_query_column": 2**63 - 1}, "out of range"),
    "a negative softcap": ({"softcap": -1.0}, "negative softcap"),
    "a softcap that is NaN": ({"softcap": math.nan}, "negative softcap"),
    "no such instruction set": ({"isa": len(ISAS)}, "there is no instruction set"),
    "a negative instruction set": ({"isa": -1}, "there is no instruction set"),
}
BAD_TYPES: dict[str, tuple[dict[str, Any], str]] = {
    "counts of words": ({"counts": ("a", "b")}, "counts cannot be"),
    "counts too large": ({"counts": (2, 2**40)}, "counts cannot be"),
    "counts that are missing": ({"counts": None}, "incompatible function arguments|counts cannot be"),
    "exact tokens in floats": ({"exact_counts": (24.5, 24.5)}, "exact_counts cannot be"),
    "transforms in a list": ({"transforms": [None] * 9}, "incompatible function arguments"),
    "unroped is a word": (roped(unroped="no"), "unroped cannot be"),
    "an argument of another name": ({"held": (24, 24)}, "incompatible function arguments"),
    "dtypes for a window": ({"window": torch.float32}, "incompatible function arguments"),
    "a layout of another kind": ({"layout": good_side()}, "incompatible function arguments"),
    "sinks in words": ({"sinks": "four"}, "incompatible function arguments"),
    "a number as a query": ({"query": 1.5}, "query is not a tensor"),
    "a list as keys": ({"keys": [1, 2]}, "keys is not a tensor"),
}


def test_the_good_call_is_good() -> None:
    """Else the bad ones below could be refused for something else."""
    call = arguments(output=torch.ones(2, 6, 3, 64))
    _native.attend(**call)
    assert not call["output"].any()
    _native.attend(**arguments(mask=MASK, column_of=torch.arange(88).repeat(2, 1), **roped()))
    rotated = {"key_rotation": torch.zeros(64, 64), "key_balance": torch.zeros(2, 64)}
    _native.attend(**arguments(**roped(unroped=False, **rotated)))
    _native.attend(**arguments(window=2**63 - 1))
    statics = {"key_scale": torch.zeros(2, 64), "key_zero": torch.zeros(2, 64)}
    _native.attend(**arguments(layout=layout(**FIXED), **statics))


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls_are_refused(name: str) -> None:
    changes, message = BAD_CALLS[name]
    with pytest.raises(ValueError, match=message):
        _native.attend(**arguments(**changes))


@pytest.mark.parametrize(
    ("cos", "sin", "message"),
    [
        (torch.zeros(0, 32), torch.zeros(0, 32), "no or too many"),
        (torch.zeros(32, 0), torch.zeros(32, 0), "no or too many"),
        (torch.zeros(8, 257), torch.zeros(8, 257), "no or too many"),
        (torch.zeros(4104, 8), torch.zeros(4104, 8), "no or too many"),
        (torch.zeros(32, 32), torch.zeros(32, 31), "step sin has the wrong shape"),
        (torch.zeros(32, 32), None, "step sin is missing"),
        (None, torch.zeros(32, 32), "step cos is missing"),
        (torch.zeros(32, 64)[:, :32], torch.zeros(32, 32), "step cos is not contiguous"),
        (torch.zeros(32, 32).half(), torch.zeros(32, 32), "step cos is torch.float16"),
        (torch.zeros(32), torch.zeros(32), "step cos has 1 dimensions"),
    ],
    ids=str,
)
def test_steps_that_make_no_sense_are_refused(cos: Any, sin: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _native.Steps(cos, sin, False)


@pytest.mark.parametrize("name", BAD_TYPES)
def test_arguments_of_other_types_are_refused(name: str) -> None:
    changes, message = BAD_TYPES[name]
    with pytest.raises(TypeError, match=message):
        _native.attend(**arguments(**changes))


OPTIONAL = ("key_scale", "mask", "column_of", "sink_logits", "log_sums")


@pytest.mark.parametrize("name", (*arguments(), *OPTIONAL))
def test_nonsense_in_the_place_of_any_argument(name: str) -> None:
    """Refused, or as if it were not there; never a crash, and never an error without a word."""
    static = {"layout": layout(**FIXED), "key_scale": torch.zeros(2, 64), "key_zero": torch.zeros(2, 64)}
    call = arguments(**(static if name == "key_scale" else {}))
    for wrong in (None, "word", 2**70, -(2**40), 0.5, torch.zeros(0), torch.zeros(1, 1, 1, 1), object(), (), {}):
        if name in ("scaling", "softcap") and hasattr(wrong, "__float__"):
            continue  # any number is one
        if (wrong is None and name in ("window", "softcap", *OPTIONAL[1:])) or (wrong == {} and name == "transforms"):
            continue
        with pytest.raises((ValueError, TypeError), match=r"."):
            _native.attend(**{**call, name: wrong})


def test_columns_that_do_not_exist_are_not_read() -> None:
    """``column_of`` and a mask that do not cover all tokens: the rest is hidden."""
    wild = torch.tensor([[0, 1, 2**62, -(2**62), -1, 7] + [10**9] * 82] * 2)
    call = arguments(query=torch.ones(2, 6, 3, 64), values=torch.ones(2, 2, 24, 64), mask=MASK[..., :2], column_of=wild)
    _native.attend(**call)
    assert torch.allclose(call["output"], torch.ones(()))  # of the first two sinks
    _native.attend(**arguments(column_of=torch.zeros(2, 0, dtype=torch.int64)))


@pytest.mark.parametrize("threads", (-5, 0, 7, 2**31 - 1))
def test_any_number_of_threads_is_taken(threads: int) -> None:
    call = arguments(output=torch.ones(2, 6, 3, 64), threads=threads)
    _native.attend(**call)
    assert not call["output"].any()
