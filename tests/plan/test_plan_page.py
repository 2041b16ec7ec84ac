"""The page of a plan, in a browser: the numbers of Python, whatever is set, and an address that keeps them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from browser import Page
from kvbits.plan import page
from kvbits.plan.devices import GPU_MIB, MIB
from kvbits.plan.models import shape_of_config
from kvbits.plan.names import shape_of
from kvbits.plan.plan import plan
from kvbits.plan.setting import WEIGHTS, Setting
from kvbits.plan.shapes import Shape, of_numbers
from kvbits.schemes.scheme import Scheme

GIB = 2**30
OWN = "int4,layers[1,-2]=fp8/int8,residual=300"
MODELS = ("llama-7b", "llama-3.1-8b", "gemma-2-9b", "gpt-oss-20b", "deepseek-v3", "smollm2-135m")


@pytest.fixture(scope="module")
def shapes() -> dict[str, Shape]:
    """Presets, and a tiny hybrid of linear attention and head dimensions of its own."""
    tiny = zoo.build_any("qwen3-next")
    planned = shape_of_config(tiny.config, "tiny")
    assert planned.weights is not None
    planned = replace(planned, weights=replace(planned.weights, file_bytes=123_456_789))
    return {**{name: shape_of(name) for name in MODELS}, "planned": planned}


@pytest.fixture(scope="module")
def file(shapes: dict[str, Shape], tmp_path_factory: pytest.TempPathFactory) -> Path:
    setting = Setting(shapes["planned"], 5000, memory_bytes=80 * GIB)
    names = ["exact", "default", OWN, "kivi2,sinks=9,block=32", "nuq3-1%"]
    return page.write(plan(setting, names), tmp_path_factory.mktemp("page") / "plan.html", MODELS)


@pytest.fixture(scope="module")
def shown(file: Path) -> Iterator[Page]:
    """The page, opened once."""
    with Page() as opened:
        opened.open(file)
        yield opened


def test_the_page_is_one_file_that_asks_for_nothing(shown: Page, file: Path) -> None:
    assert shown.errors == [] and shown.requests == [file.as_uri()]
    text = file.read_text()
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert not [name for name in ("STYLE", "DATA", "SCRIPT") if f"/*{name}*/" in text]


def settings(names: list[str]) -> list[dict[str, Any]]:
    """For each scheme random ones: contexts on the page's grid, one before, and between; memories where little fits."""
    choose = random.Random(7)
    found = []
    for name in names:
        scheme = Scheme.parse(name)
        first = scheme.sinks + scheme.late_sinks + (scheme.residual or 0) + scheme.block
        blocks, back = choose.choice([0, 1, 7, 8, 9, 1000, 65_000]), choose.choice([0, 0, first // 2])
        found.append({
            "model": choose.choice([*MODELS, "planned", "own"]),
            "context": first + blocks * scheme.block + choose.choice([-1, 0, 1, 17]) - back,
            "batch": choose.choice([1, 2, 7, 64]),
            "memory": round(2 ** choose.uniform(20, 40)),
            "weights": choose.choice(WEIGHTS),
            "name": name,
            "layers": choose.choice([1, 2, 33]), "heads": choose.choice([1, 5, 32]),
            "dim": choose.choice(page.HEAD_DIMS), "parameters": choose.choice([0, 10**9 + 7]),
        })  # fmt: skip
    return found


def in_python(one: dict[str, Any], shapes: dict[str, Shape]) -> dict[str, Any]:
    shape = shapes.get(one["model"])
    if shape is None:
        shape = of_numbers(one["layers"], one["heads"], one["dim"], parameters=one["parameters"] or None)
    try:
        setting = Setting(
            shape, one["context"], batch=one["batch"], memory_bytes=one["memory"], weights=one["weights"],
            source_tokens=one["context"] if shape.encodes else 0,
        )  # fmt: skip
        (row,) = plan(setting, [one["name"]]).rows
    except ValueError as error:
        return {"error": str(error)}
    data, (need,) = row.to_json(), row.needs
    same = ("paper_bits", "paper_gib", "real_bits", "real_bytes", "fits", "max_context", "max_batch")
    return {name: data[name] for name in same} | {"weights": need.weights, "peak": need.peak, "total": need.total}


def test_the_page_has_the_numbers_of_python(shown: Page, shapes: dict[str, Shape]) -> None:
    names = shown.evaluate("Object.keys(DATA.schemes)")
    assert len(names) > 30 and {"default", "nuq2-1%", OWN} <= set(names)
    asked = settings([*names, OWN])
    asked.append({**asked[0], "model": "own", "layers": 1, "name": OWN})
    got = shown.evaluate(
        f"""{json.dumps(asked)}.map(one => {{
            const model = one.model === "own" ? modelOfNumbers(one) : DATA.models[one.model];
            const {{at, name, ...rest}} = planOne(model, one.name, one);
            return rest;
        }})"""
    )
    errors = 0
    for one, found in zip(asked, got, strict=True):
        right = in_python(one, shapes)
        if "error" in right:
            errors += 1
            assert "error" in found, one
            continue
        assert set(found) == set(right), one
        for name, value in right.items():
            if name in ("paper_bits", "paper_gib", "real_bits"):
                assert found[name] == pytest.approx(value, rel=1e-12), (one, name)
            else:
                assert found[name] == value, (one, name)
    assert 0 < errors < len(asked) // 4  # overrides of layers that there are not


def test_an_encoder_s_text_counts_on_the_page(shown: Page) -> None:
    """Its keys and values, and the peak of reading it, also where fewer tokens follow."""
    shape = shape_of_config(zoo.build_any("t5").config, "t5", torch.float32)
    asked = {"context": 3000, "batch": 2, "memory": GIB // 4, "weights": "none"}
    data = page.data(plan(Setting(shape, 3000, source_tokens=3000), ["exact"]), [])
    shown.evaluate(f"DATA.schemes.t5 = {json.dumps(data['schemes']['exact'])}, 0")
    found = shown.evaluate(
        f"planOne({json.dumps(data['models']['planned'] | {'refusal': None})}, 't5', {json.dumps(asked)})"
    )
    shown.evaluate("delete DATA.schemes.t5")
    right = in_python({**asked, "model": "t5", "name": "exact"}, {"t5": shape})
    assert right["max_context"] > 3000
    for name in ("real_bytes", "peak", "total", "max_context", "max_batch"):
        assert found[name] == right[name], name


def test_the_page_begins_with_the_setting(shapes: dict[str, Shape]) -> None:
    start = Setting(shapes["planned"], 5000, memory_bytes=3 * GIB, reserve_bytes=GIB, weights="file")
    data = page.data(plan(start, ["exact"]), [])
    assert (data["start"]["memory"], data["start"]["weights"]) == (2 * GIB, "file")
    assert "file" not in page.data(plan(Setting(shapes["llama-7b"], 9), ["exact"]), [])["weights"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"devices": 2}, "--devices"),
        ({"steps": 9, "chunk": 9}, "--new-tokens, --chunk"),
        ({"sliding": True}, "--sliding"),
        ({"logits": "all"}, "--logits"),
    ],
)
def test_what_is_not_on_the_page_is_refused(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"on one device: leave out --page, or {named}$"):
        page.write(plan(Setting(shape_of("llama-7b"), 100, **changes), ["exact"]), tmp_path / "x.html", [])
    assert not list(tmp_path.iterdir())


def test_what_the_page_writes_is_what_it_computes(shown: Page, shapes: dict[str, Shape]) -> None:
    """The sliders and fields are moved, and the table is read."""
    shown.set("#model", "llama-3.1-8b")
    shown.set("#context-number", 100_000)
    shown.set("#batch", 1)  # a power of two
    shown.set("#gpu", "h100")
    shown.set("#weights", "int8")
    for box in shown.evaluate("[...document.querySelectorAll('#schemes input:checked')].map(box => box.value)"):
        shown.set(f"#schemes input[value='{box}']", False)
    for name in ("exact", "small", "nuq3-1%"):
        shown.set(f"#schemes input[value='{name}']", True)
    setting = Setting(
        shapes["llama-3.1-8b"], 100_000, batch=2, memory_bytes=GPU_MIB["h100"] * MIB, weights="int8"
    )  # fmt: skip
    rows = shown.evaluate(
        "[...document.querySelectorAll('#numbers tbody tr')].map(row => [...row.children].map(x => x.textContent))"
    )
    expected = []
    for row in plan(setting, ["exact", "small", "nuq3-1%"]).rows:
        need = row.needs[0]
        sizes = [size / GIB for size in (row.real.count.total, need.weights, need.peak, need.total)]
        figures = [row.paper_bits, row.paper_bytes / GIB, row.real.bits_per_element, *sizes]
        counts = [f"{n:,}" if n else "none" for n in (row.max_context, row.max_batch)]
        expected.append([row.named.name, *(f"{figure:,.2f}" for figure in figures), *counts])
    assert rows == expected
    assert "100,000 tokens in each of 2 rows" in shown.evaluate("document.getElementById('lead').textContent")
    assert shown.evaluate("document.querySelectorAll('#chart polyline').length") == 3
    assert shown.errors == []


def test_the_address_keeps_what_is_set(shown: Page, file: Path) -> None:
    shown.set("#model", "own")
    shown.set("#layers", 10)
    shown.set("#heads", 3)
    shown.set("#dim", 80)
    shown.set("#parameters", 1.5)
    shown.set("#context-number", 4321)
    shown.set("#schemes input[value='default']", True)
    address, table = shown.evaluate("location.href"), shown.evaluate("document.getElementById('numbers').textContent")
    with Page() as other:
        other.open(file)
        other.evaluate(f"location.replace({json.dumps(address)})")
        other.settle()
        assert other.evaluate("document.getElementById('numbers').textContent") == table
        fields = ["layers", "heads", "dim", "parameters", "context-number"]
        held = other.evaluate(f"{json.dumps(fields)}.map(id => document.getElementById(id).value)")
        assert held == ["10", "3", "80", "1.5", "4321"]
        for nonsense in ("#context=-5&batch=x&memory=1e99&model=none&schemes=what", "#schemes=", "#%E0%A4%A"):
            other.evaluate(f"location.hash = {json.dumps(nonsense)}")
            other.settle()
        assert other.errors == []
        assert other.evaluate("document.getElementById('answer').textContent") != ""


def test_the_page_fits_a_phone_and_a_desk(shown: Page) -> None:
    for width in (360, 390, 768, 1280):
        shown.resize(width, 800)
        shown.settle()
        assert shown.evaluate("document.documentElement.scrollWidth") <= width
    shown.resize(1280, 900)


def test_every_control_has_a_name(shown: Page) -> None:
    nameless = shown.evaluate(
        "[...document.querySelectorAll('input, select')].filter(x => !x.labels.length && !x.ariaLabel).map(x => x.id)"
    )
    assert [name for name in nameless if name not in ("context", "batch", "memory")] == []


def test_schemes_that_a_model_refuses_say_why(tmp_path: Path) -> None:
    shape = shape_of_config(zoo.build_any("mamba").config, "mamba", torch.float32)
    data = page.data(plan(Setting(shape, 100, memory_bytes=GIB), ["exact"]), ["smollm2-135m"])
    assert data["models"]["planned"]["refusal"] == shape.refusal
    assert list(data["schemes"]) == ["exact"]


def test_a_scheme_of_overrides_has_a_form_for_each() -> None:
    scheme = Scheme.parse("int4,layers[0,-1]=fp8,layers[2]=exact")
    forms = page.scheme(page.Named(str(scheme), scheme), [(64, 64, 2)])["forms"]
    assert [form["layers"] for form in forms] == [None, [0, -1], [2]]
    for form, layer in zip(forms, (1, 0, 2), strict=True):
        assert form["real"] == {"64/64/2": page.real(scheme.for_layer(layer, 5), (64, 64, 2), False)}
    assert forms[2]["real"]["64/64/2"][3] == 0  # which packs nothing, so nothing repeats
