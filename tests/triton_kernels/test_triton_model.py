"""A whole model on a GPU: what it generates over packed history is what the reference kernels give."""

from __future__ import annotations

import pytest
import torch

import kvbits
import zoo
from kvbits import attend, encode
from kvbits.backends import OPT_IN
from kvbits.hf.run import run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="whole models need a GPU")


@pytest.mark.parametrize("scheme", ("int4", "kivi4"))
def test_generation_is_that_of_the_reference_kernels(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are packed before and during the steps."""
    monkeypatch.setenv(OPT_IN, "1")
    model = zoo.build("llama").cuda()
    ids, small = zoo.prompt(tokens=100).cuda(), f"{scheme},residual=6,sinks=2,block=32"
    assert {layer.step for layer in kvbits.explain(model, small).layers} == {"kernel triton"}
    got = run(model, ids, small, 80).tokens
    for module in (attend, encode):
        monkeypatch.setattr(module, "KERNELS", module.KERNELS[-1:])
    assert {layer.step for layer in kvbits.explain(model, small).layers} == {"kernel reference"}
    assert got == run(model, ids, small, 80).tokens
    assert len(got) == 80 and len(set(got)) > 1
