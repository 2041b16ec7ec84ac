"""The examples run as a reader runs them, and codecs of other packages are full members."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

import kvbits
from kvbits import codecs
from kvbits.codecs.check import RESERVED, check
from kvbits.schemes.catalogue import ALIASES, BY_NAME

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def main() -> Any:
    """Loads an example's ``main``; codecs that it registers are gone afterwards."""
    before = codecs.known()
    yield lambda name: runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]
    for kind in codecs.known()[len(before) :]:
        codecs.unregister(kind)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("document_qa", ["tokens in a file of", "Which boats use the north pier? ->"]),
        ("batch", ["The capital of France is", "and no padding"]),
        ("chat", ["(0 of ", "user: Is it larger than Earth?"]),
        ("choose_scheme", ["exact", "KL to exact 0.00000", "small"]),
        ("custom_codec", ["po4: error", "at 4.50 bits"]),
    ],
)
@pytest.mark.usefixtures("smollm2_from_folder")
def test_an_example_runs(name: str, shown: list[str], main: Any, capsys: pytest.CaptureFixture[str]) -> None:
    import transformers

    if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 24):
        pytest.skip("the examples write cache=, which is past_key_values= before Transformers 5.24")
    main(name)()
    out = capsys.readouterr().out
    assert [text for text in shown if text not in out] == [], out


@pytest.mark.model
@pytest.mark.slow
def test_the_notebook_runs_and_draws(smollm2_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    matplotlib = pytest.importorskip("matplotlib", reason="the notebook draws")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn: list[list[str]] = []
    monkeypatch.setattr(pyplot, "show", lambda: drawn.append([axes.get_title() for axes in pyplot.gcf().axes]))
    names: dict[str, Any] = {}
    for cell in json.loads((EXAMPLES / "tour.ipynb").read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            source = "".join(cell["source"]).replace('MODEL = "smollm2"', f"MODEL = {str(smollm2_folder)!r}")
            exec(compile(source, cell["id"], "exec"), names)
    pyplot.close("all")
    assert [titles[0].partition(" (")[0] for titles in drawn] == [
        "Quality against bits: lower left is better", "Speed against context", "512 tokens",
    ]  # fmt: skip
    quality = {scheme: (bits, kl) for bits, kl, scheme in names["points"]}
    assert quality["int8"][1] < quality["default"][1] < quality["small"][1] < quality["int2"][1]
    assert quality["small"][0] < quality["default"][0] < quality["int8"][0]


def test_every_example_is_listed_and_run() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    (cases,) = (mark.args[1] for mark in test_an_example_runs.pytestmark if mark.name == "parametrize")
    assert {case[0] for case in cases} == names
    assert all(f"({name}.py)" in listed for name in names)


def test_a_registered_codec_is_spelled_stored_and_attended_to(main: Any) -> None:
    main("custom_codec")
    scheme = kvbits.Scheme.parse("k=po4-channel,v=po4,residual=64")
    assert str(scheme) == "k=po4-channel,v=po4,residual=64" and kvbits.Scheme.from_json(scheme.to_json()) == scheme
    layer = kvbits.LayerCache(scheme)
    keys, values = torch.randn(2, 1, 2, 400, 64, generator=torch.Generator().manual_seed(0))
    layer.append(keys, values)
    assert layer.store.counts == [2]
    codec = scheme.value
    constant = torch.full((2, 32, 64), 0.25)
    assert torch.equal(codec.decode(codec.encode(constant, {}), {}), constant)
    scale = codec.encode(values[0, :, :128], {})["scale"].float()
    assert torch.equal(scale.log2(), scale.log2().round())


def variant(base: type[codecs.Codec], **changes: Any) -> type[codecs.Codec]:
    """A codec ``zz4`` that differs from ``base`` in some attributes."""
    return type("Other", (base,), {"pattern": re.compile("zz4"), "examples": ("zz4",), "name": "zz", **changes})


def made(kind: Any, match: Any) -> Any:
    return kind(4)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"decode": lambda self, packed, params: codecs.Affine(4).decode(packed, params) * 2}, "its format .* says"),
        (
            {"layout": lambda self, *block: codecs.Affine(4).layout(*block)[:-1]},
            "encode makes .*, but layout says",
        ),
        ({"examples": ()}, "has no examples"),
        ({"examples": ("Zz4",), "pattern": re.compile("Zz4")}, "no name of a codec"),
        ({"pattern": re.compile("zz4|kivi4")}, "also matches 'kivi4'"),
        ({"pattern": re.compile("zz4|n.*")}, "also matches 'nf4'"),
        ({"pattern": re.compile("zz4|.{11}")}, "also matches"),
    ],
)
def test_a_codec_that_would_be_misread_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        codecs.register(variant(codecs.Affine, from_match=classmethod(made), **changes))
    assert codecs.known() == codecs.CODECS


def test_the_codecs_of_kvbits_are_sound_and_reserved_names_are_those_of_the_catalogue() -> None:
    for kind in codecs.CODECS:
        check(kind, [other for other in codecs.CODECS if other is not kind])
    named = {*BY_NAME, *ALIASES}
    assert {name for name in named if not any(k.pattern.fullmatch(name) for k in codecs.CODECS)} - set(
        name for name in named if "nuq" in name
    ) == set(RESERVED)


def test_what_cannot_be_registered_is_refused_and_a_codec_can_be_taken_away(main: Any) -> None:
    main("custom_codec")
    new = codecs.known()[-1]
    assert codecs.register(new) is new and codecs.known().count(new) == 1
    with pytest.raises(ValueError, match="already is a PowerOfTwo"):
        codecs.register(type("Other", (new,), {}))
    with pytest.raises(ValueError, match="does not match its example 'zz9'"):
        codecs.register(type("Other", (new,), {"examples": ("zz9",)}))
    with pytest.raises(TypeError, match="not a codec; give a subclass"):
        codecs.register(int)  # type: ignore[type-var]
    codecs.unregister(new)
    with pytest.raises(ValueError, match="unknown scheme 'po4'"):
        kvbits.Scheme.parse("po4")
    with pytest.raises(ValueError, match="is not registered"):
        codecs.unregister(new)
    codecs.register(new)
