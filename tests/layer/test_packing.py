"""A packing in three steps: it makes one transform, and whatever fails on the way leaves the layer as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kvbits.layer.cache as cache_module
from kvbits.attend.dense import dense
from kvbits.layer.cache import LayerCache
from kvbits.layer.first_fit import Transforms
from kvbits.schemes.scheme import Scheme
from kvbits.store.rows import Rows
from kvbits.transform.rotary import Rotary
from stored import assert_same, row_of
from views import random

SMALL = "residual=20,sinks=4,block=32"


def layer_of(scheme: str) -> LayerCache:
    rotary = Rotary(100.0 ** -torch.linspace(0, 1, 8))
    return LayerCache(Scheme.parse(f"{scheme},{SMALL}" if "sinks" not in scheme else scheme), rotary=rotary)


def append(layer: LayerCache, tokens: int, padding: int, seed: int) -> None:
    """``tokens`` columns of two rows, of which the second has ``padding`` first."""
    keys, values = (random(2, 2, tokens, 16, seed=2 * seed + side) for side in (0, 1))
    text = torch.ones(2, tokens, dtype=torch.bool)
    text[1, :padding] = False
    layer.append(keys, values, layer.rows.extend(2, tokens, text if padding or layer.rows.valid is not None else None))


class FailsAt(TorchDispatchMode):
    """Raises at the n-th call of torch or of an encoder."""

    def __init__(self, call: int) -> None:
        super().__init__()
        self.left = call

    def count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise MemoryError

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count()
        return func(*args, **kwargs or {})

    def counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self.count()
            return function(*args, **kwargs)

        return run


@pytest.mark.parametrize(("prompt", "padding"), ((0, 0), (120, 3)), ids=("first", "later, padded"))
@pytest.mark.parametrize(
    "scheme",
    ("fp8-static", "rot4,centred", "int4,pre-rope", "int4,sinks=2+3,residual=20,block=32"),
)
def test_a_packing_that_fails_at_any_call_changes_nothing(
    scheme: str, prompt: int, padding: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = layer_of(scheme)
    if prompt:
        append(start, prompt, padding, 0)
    right = copy.deepcopy(start)
    append(right, 100, 0 if prompt else padding, 1)
    failed = 0
    while True:
        layer = copy.deepcopy(start)
        before, mode = layer.before(), FailsAt(failed)
        with ExitStack() as stack:
            patch = stack.enter_context(monkeypatch.context())
            patch.setattr(cache_module, "encode", mode.counted(cache_module.encode))
            stack.enter_context(mode)
            try:
                append(layer, 100, 0 if prompt else padding, 1)
            except MemoryError:
                failed += 1
            else:
                break
        if prompt:
            now = layer.before()
            assert now.rows is before.rows and now.keys is before.keys and now.values is before.values
            assert now[3:] == before[3:]
            for row in (0, 1):
                assert_same(row_of(layer, row), row_of(start, row))
        else:
            assert layer.columns == 0 and layer.keys is None
    assert failed > 30
    for row in (0, 1):
        assert_same(row_of(layer, row), row_of(right, row))
    append(layer, 40, 0, 2)
    append(right, 40, 0, 2)
    assert all(torch.equal(a, b) for a, b in zip(dense(layer.view()), dense(right.view()), strict=True))


@pytest.mark.parametrize("scheme", ("int4", "rot4,centred", "int4,pre-rope"))
def test_a_packing_makes_one_transform(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    make = Transforms.make
    monkeypatch.setattr(Transforms, "make", lambda *args: made.append(args[4]) or make(*args))
    layer, rows = layer_of(scheme), Rows()
    for call in range(200):
        tokens = 120 if call == 0 else 1
        rows = rows.extend(1, tokens)
        keys, values = (random(1, 2, tokens, 16, seed=2 * call + side) for side in (0, 1))
        if not layer.step(keys, values, rows):
            layer.append(keys, values, rows)
        layer.view()
    assert layer.packed_blocks == [9] and made == [3, 4, 5, 6, 7, 8, 9]


def test_rotations_are_made_once() -> None:
    layer = layer_of("rot4,centred")
    append(layer, 120, 0, 0)
    first = layer.view()
    append(layer, 100, 0, 1)
    second = layer.view()
    assert second.key_transform is not first.key_transform
    assert second.key_transform.rotation is first.key_transform.rotation is not None
    assert second.value_transform.rotation is first.value_transform.rotation is not None
