"""Triton kernels compiled or interpreted, and what they are called with."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest
import torch

from kvbits.attend import Call, KVView
from kvbits.attend.triton import decode as triton_decode
from kvbits.store.rows import Rows
from kvbits.transform.transform import Rope, Transform
from views import random

GPU = torch.cuda.is_available()

DEVICE = torch.device("cuda" if GPU else "cpu")


def _interpreter_fault() -> str | None:
    """Why Triton's interpreter cannot run here, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if GPU:
        return None
    numpy = pytest.importorskip("numpy", reason="Triton's interpreter needs numpy")
    major, minor = (int(part) for part in numpy.__version__.split(".")[:2])
    if (major, minor) >= (2, 4):
        return f"Triton's interpreter cannot loop under numpy {numpy.__version__} (2.3 and before run)"
    return None


_FAULT = _interpreter_fault()

needs_triton = pytest.mark.skipif(_FAULT is not None, reason=str(_FAULT))


def moved(view: KVView) -> KVView:
    """The view on the device of the tests."""
    if not GPU:
        return view
    blocks = dataclasses.replace(view.blocks, pool=view.blocks.pool.cuda(), table=view.blocks.table.cuda())
    valid = None if view.rows.valid is None else view.rows.valid.cuda()
    return dataclasses.replace(
        view,
        keys=view.keys.cuda(),
        values=view.values.cuda(),
        blocks=blocks,
        rows=Rows(view.rows.batch, view.rows.columns, valid),
        key_params={name: x.cuda() for name, x in view.key_params.items()},
        value_params={name: x.cuda() for name, x in view.value_params.items()},
        key_transform=_moved_transform(view.key_transform),
        value_transform=_moved_transform(view.value_transform),
    )


def _moved_transform(transform: Transform) -> Transform:
    mean = None if transform.mean is None else transform.mean.cuda()
    rotation = None if transform.rotation is None else transform.rotation.cuda()
    rope = transform.rope
    if rope is not None:
        angles = (x.cuda() for x in (rope.base_cos, rope.base_sin, rope.step_cos, rope.step_sin))
        rope = Rope(*angles, rope.interleaved)
    balance = None if transform.balance is None else transform.balance.cuda()
    return Transform(mean, rotation, rope, transform.whole, balance)


def run(call: Call) -> torch.Tensor:
    """What the kernel gives, on the CPU; outputs it does not write would be NaN."""
    there = dataclasses.replace(
        call,
        query=call.query.to(DEVICE),
        view=moved(call.view),
        mask=None if call.mask is None else call.mask.to(DEVICE),
        sink_logits=None if call.sink_logits is None else call.sink_logits.to(DEVICE),
    )
    assert triton_decode.why_not(there) == []
    return triton_decode.run(there).cpu()


def angles_for(view: KVView, pairs: int, rows: int = 1, interleaved: bool = False) -> Rope:
    """Angles of every packed token, with the scaling that some models put into them."""
    base, step = (
        random(rows, view.blocks.longest, pairs, seed=21) * 3,
        random(view.blocks.record.tokens, pairs, seed=22) * 3,
    )
    return Rope(1.25 * base.cos(), 1.25 * base.sin(), step.cos(), step.sin(), interleaved)
