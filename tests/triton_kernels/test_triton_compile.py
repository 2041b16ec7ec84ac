"""What Triton's interpreter lets pass and its compiler does not: every kind of kernel is lowered, without a GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Not imported here: an import before the interpreter is asked for leaves the kernels of other tests uninterpreted.
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
BENCH = Path(__file__).parents[2] / "bench"


@pytest.mark.slow
@pytest.mark.parametrize("script", ("gpu_compile.py", "gpu_compile_encode.py"))
def test_every_kind_of_kernel_lowers(script: str) -> None:
    """In a process of its own: the interpreter, once asked for, stays for good."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(BENCH / script), "--check"], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("lowers") >= 10
