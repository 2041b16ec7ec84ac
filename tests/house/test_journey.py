"""docs/journey.md is true: a small model goes its way, and what each section names is what runs, in that order."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import kvbits
import zoo
from kvbits.backends import instruction_set
from kvbits.hf.names import cache_name
from kvbits.numerics import hadamard

PAGE = Path(__file__).parents[2] / "docs" / "journey.md"
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE.read_text(encoding="utf-8"), flags=re.S | re.M))

ELSEWHERE = {
    "files.Calibration.of_layer", "codecs.base.Codec.fit",  # a codec that has something to fit
    "codecs.affine.Affine.encode", "numerics.groups.split", "numerics.affine.choose_qparams",
    "numerics.affine.quantize", "numerics.bitpack.pack",  # without a native encoder
    "attend.reference.run", "attend.dense.decode_into", "codecs.grouped.Grouped.decode_into",
    "attend.reference._OnlineSoftmax.add", "attend.reference._OnlineSoftmax.finish",  # without a native kernel
    "hf.handle.KVHandle.__torch_dispatch__", "hf.handle.Pair.dense", "attend.dense.dense", "hf.explain.explain",
    "layer.held.Layer.exact", "store.late_sinks.choose", "store.late_sinks.own_numbers",
    "layer.cache.LayerCache.undo", "store.blocks.BlockStore._compact",
    "hf.cache.KVCache.batch_repeat_interleave", "hf.cache.KVCache.batch_select_indices",
}  # fmt: skip
"""Functions that the page tells of beside the way: none of them runs on it."""


def code_of(name: str) -> types.CodeType | None:
    """The code of a function by its name relative to kvbits; None for what is no function."""
    found: Any = kvbits
    path = "kvbits"
    for part in name.split("."):
        path = f"{path}.{part}"
        module = hasattr(found, "__path__") and importlib.util.find_spec(path) is not None
        found = importlib.import_module(path) if module else inspect.getattr_static(found, part, None)
        found = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
    return getattr(inspect.unwrap(found), "__code__", None) if callable(found) else None


def traced(run: Callable[[], object]) -> list[types.CodeType]:
    """The code of each Python function, as it is entered."""
    entered: list[types.CodeType] = []

    def note(frame: types.FrameType, event: str, argument: object) -> None:
        if event == "call":
            entered.append(frame.f_code)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return entered


def walk_of(section: str) -> list[str]:
    """The names in the walk of a section."""
    found = re.search(r"<!-- walk -->\n```text\n(.*?)```", SECTIONS[section], flags=re.S)
    assert found, f"{section}: no walk"
    return re.split(r"\s*->\s*", found[1].strip())


def missed(names: Iterable[str], entered: Iterable[types.CodeType]) -> str | None:
    """The first of ``names`` that was not entered after the one before it."""
    events = iter(entered)
    return next((name for name in names if not any(code is code_of(name) for code in events)), None)


class Journey:
    """The page's example on a tiny model, by section; each continues the one before."""

    def __init__(self) -> None:
        self.model = zoo.build("llama", head_dim=64, max_position_embeddings=4096)
        self.ids = zoo.prompt(1, 2052)
        self.cache: Any = None
        hadamard.rotation.cache_clear()  # made once for a process, perhaps by another test

    def call(self, first: int, last: int) -> None:
        with torch.no_grad():
            self.model(input_ids=self.ids[:, first:last], use_cache=True, **{cache_name(self.model): self.cache})

    def start(self, scheme: str) -> None:
        self.cache = kvbits.cache_for(self.model, scheme)

    def transformed(self) -> None:
        self.start("default")
        self.call(0, 2000)
        self.call(2000, 2001)

    def run(self) -> dict[str, list[types.CodeType]]:
        """What each section enters."""
        entered = {}
        for section, prepare, run in (
            ("Before the first token", None, lambda: self.start("kivi4")),
            ("The prompt", None, lambda: self.call(0, 2000)),
            ("A decode step", None, lambda: self.call(2000, 2001)),
            ("A block fills", lambda: self.call(2001, 2051), lambda: self.call(2051, 2052)),
            ("Beam search", None, lambda: self.cache.reorder_cache(torch.tensor([0]))),
            ("Crop", None, lambda: self.cache.crop(-200)),
            ("A scheme that transforms", None, self.transformed),
        ):
            if prepare is not None:
                prepare()
            entered[section] = traced(run)
        return entered


@functools.cache
def journey() -> dict[str, list[types.CodeType]]:
    return Journey().run()


pytestmark = pytest.mark.skipif(not instruction_set(), reason="the page walks through the native kernels")


def test_each_section_names_what_runs_in_the_order_in_which_it_runs() -> None:
    assert set(SECTIONS) == {*journey(), "The same in code"}
    for section, entered in journey().items():
        names = walk_of(section)
        assert len(names) >= 5 and (wrong := missed(names, entered)) is None, f"{section}: {wrong} does not run there"
        # and the test can fail: neither another order nor another function would pass
        assert missed(reversed(names), entered) is not None, section
        assert missed([*names, "hf.explain.explain"], entered) == "hf.explain.explain", section


def test_what_the_page_tells_of_besides_does_not_run() -> None:
    ran = {code for entered in journey().values() for code in entered}
    prose = re.sub(r"^```.*?^```$", "", PAGE.read_text(encoding="utf-8"), flags=re.S | re.M)
    functions = {name: code_of(name) for name in re.findall(r"`([a-z]\w*(?:\.\w+)+)`", prose)}
    assert {name for name, code in functions.items() if code is not None and code not in ran} == ELSEWHERE
