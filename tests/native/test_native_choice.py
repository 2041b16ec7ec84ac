"""Without the native module, or with less of it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from kernel_calls import ISAS, PLAIN, _native, assert_native, decoded, same
from kvbits.attend import Call, attend, explain, native
from kvbits.attend.dense import dense
from kvbits.backends import instruction_set
from views import NATIVE_ERROR, Shape, plain_attention, query_for, view_of

pytestmark = pytest.mark.usefixtures("threads_stay")


def in_another_process(isa: str) -> subprocess.CompletedProcess[str]:
    code = "from kvbits.backends import instruction_set; print(instruction_set())"
    environment = {**os.environ, "KVBITS_ISA": isa}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_an_unknown_instruction_set_is_refused() -> None:
    result = in_another_process("mmx")
    assert result.returncode != 0
    assert f"ValueError: KVBITS_ISA='mmx' is not available here; allowed are {', '.join(ISAS)}" in result.stderr


def test_an_instruction_set_can_be_chosen() -> None:
    result = in_another_process("scalar")
    assert (result.returncode, result.stdout.strip()) == (0, "scalar"), result.stderr


def test_the_best_instruction_set_runs() -> None:
    if "KVBITS_ISA" not in os.environ:
        assert instruction_set() == ISAS[0]
    assert ISAS[-1] == "scalar" and len(set(ISAS)) == len(ISAS)
    assert _native.pool() in ("openmp", "own")


@pytest.mark.parametrize("queries", (1, 5))
def test_without_the_module_the_reference_runs(queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    view = view_of(PLAIN, (150, queries))
    call = Call(query_for(view, PLAIN, queries), view, 0.125)
    right = assert_native(call)
    why = "it was not built: no C++ compiler when kvbits was installed"
    monkeypatch.setattr(native, "library", lambda: (None, 0, why))
    assert (explain(call)[0], explain(call)[-1]) == (f"native: {why}", "reference: runs")
    assert same(attend(call), right, NATIVE_ERROR)
    for got, expected in zip(dense(view), decoded(view), strict=True):
        assert torch.equal(got.double(), expected)


def test_what_the_kernel_leaves_to_the_reference() -> None:
    for shape, dtype, reason in (
        (Shape(2, 3, 20, 20), torch.float32, "head_dim 20 is not a multiple of 8 up to 512"),
        (Shape(1, 1, 520, 64), torch.float32, "head_dim 520 is not a multiple of 8 up to 512"),
        (PLAIN, torch.float64, "torch.float64 is computed in full only by the reference"),
    ):
        view = view_of(shape, (150, 1), dtype=dtype)
        call = Call(query_for(view, shape, 1), view, 0.125)
        lines = explain(call)
        assert reason in lines[0] and lines[-1] == "reference: runs"
        assert same(attend(call).double(), plain_attention(call, torch.float64, *decoded(view)), 1e-6)
