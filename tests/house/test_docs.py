"""The documentation is true: its code runs, its names exist, its links lead somewhere, its tables match the code."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import re
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import kvbits
import kvbits.codecs
import kvbits.schemes.catalogue
import kvbits.schemes.names
import zoo
from kvbits.codecs import CODECS
from kvbits.schemes import help as pages
from kvbits.schemes.catalogue import ALIASES, CATALOGUE

ROOT = Path(__file__).parents[2]
METHOD_PAGES = sorted((ROOT / "src" / "kvbits" / "schemes" / "help").glob("*.md"))
FRONT = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md")]
PAGES = sorted([*FRONT, *(ROOT / "docs").glob("*.md"), *METHOD_PAGES])
ids = [str(page.relative_to(ROOT)) for page in PAGES]


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block: the words after its fence, its text, its first line, and the comment right above it, if any."""

    words: tuple[str, ...]
    text: str
    line: int
    comment: str

    def run(self, page: Path, namespace: dict[str, Any]) -> None:
        """Execute; errors point at the line in the page."""
        exec(compile("\n" * (self.line - 1) + self.text, page, "exec"), namespace)


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page."""
    found: list[Block] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    start = None
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if start is None:
            start = number
            continue
        above = re.fullmatch(r"<!-- (.*) -->", lines[start - 1]) if start else None
        text = "\n".join(lines[start + 1 : number]) + "\n"
        found.append(Block(tuple(lines[start][3:].split()), text, start + 2, above[1] if above else ""))
        start = None
    assert start is None, f"{page.name}: the fence in line {(start or 0) + 1} is not closed"
    return found


def python(page: Path) -> list[Block]:
    """The Python blocks that run."""
    return [block for block in blocks(page) if block.words[:1] == ("python",) and "no-run" not in block.words]


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)


@pytest.fixture
def generate() -> types.ModuleType:
    """docs/generate.py as a module, and with it what it imports from there."""
    return importlib.import_module("generate")


# -- code ------------------------------------------------------------------------------------------------------------


@pytest.mark.model
@pytest.mark.usefixtures("smollm2_from_folder")
def test_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    import transformers

    if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 24):
        pytest.skip("README writes cache=, which is past_key_values= before Transformers 5.24")
    page = ROOT / "README.md"
    snippets, namespace = python(page), {"__name__": "readme"}
    assert snippets
    for snippet in snippets:
        snippet.run(page, namespace)
        if "cache" in namespace:  # each snippet that makes a cache fills it with packed blocks
            assert namespace["cache"].nbytes.codes > 0
    assert zoo.RUNS in capsys.readouterr().out
    assert namespace["output"].shape[1] == namespace["inputs"].input_ids.shape[1] + 4
    assert kvbits.disable(namespace["model"]) is namespace["model"]


def test_readme_fits_and_shows_no_internal_module() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 160
    code = "".join(block.text for page in FRONT for block in blocks(page) if block.words[:1] == ("python",))
    assert re.findall(r"(?:from|import) kvbits\.\S+", code) == []


@pytest.mark.parametrize("name", ["calibration", "journey", "measure", "plan", "schemes"])
def test_snippets_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_snippets(name, tmp_path, monkeypatch)


@pytest.mark.model
@pytest.mark.usefixtures("smollm2_from_folder")
@pytest.mark.parametrize("name", ["chat", "save", "static"])
def test_snippets_with_smollm2_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_snippets(name, tmp_path, monkeypatch)


def run_snippets(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The snippets of one page, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs" / f"{name}.md"
    torch.manual_seed(0)
    assert python(page)
    namespace: dict[str, Any] = {"__name__": name}
    for snippet in python(page):
        snippet.run(page, namespace)


def test_every_runnable_snippet_has_a_test() -> None:
    names = {page.name for page in PAGES if python(page)}
    plain = {"README", "calibration", "chat", "journey", "measure", "plan", "save", "schemes", "static", "add-a-method"}
    assert names == {f"{name}.md" for name in plain}


class Example:
    """The codec of docs/add-a-method.md, registered in the tables as the page says, for the length of one test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.page = ROOT / "docs" / "add-a-method.md"
        self.file, self.entry, self.rows, self.trial, self.recipe = python(self.page)
        match = re.fullmatch(r"file: src/(.*)\.py", self.file.comment)
        assert match is not None
        name = match[1].replace("/", ".")
        module = types.ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)  # dataclasses look their module up
        self.file.run(self.page, vars(module))

        assert self.entry.comment == "into: kvbits.codecs"
        self.before = kvbits.codecs.CODECS
        table = dict(vars(kvbits.codecs))
        self.entry.run(self.page, table)
        self.codecs = table["CODECS"]

        assert self.rows.comment == "into: kvbits.schemes.catalogue"
        names = {**vars(kvbits.schemes.catalogue), "Clipped": table["Clipped"]}
        self.rows.run(self.page, names)
        self.entries = names["CATALOGUE"][len(CATALOGUE) :]
        assert self.entries and names["CATALOGUE"][: len(CATALOGUE)] == CATALOGUE

        monkeypatch.setattr(kvbits.codecs, "CODECS", self.codecs)
        for owner in (kvbits, kvbits.schemes.catalogue, kvbits.schemes.names):
            monkeypatch.setattr(owner, "CATALOGUE", (*CATALOGUE, *self.entries))
        for entry in self.entries:
            monkeypatch.setitem(kvbits.schemes.catalogue.BY_NAME, entry.name, entry)
        self.module = module


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Example:
    return Example(monkeypatch)


def test_method_example_runs(example: Example) -> None:
    namespace: dict[str, Any] = {"__name__": "trial"}
    example.trial.run(example.page, namespace)
    example.recipe.run(example.page, namespace)


def test_method_example_is_a_full_member(example: Example) -> None:
    new = example.module.Clipped
    assert example.codecs == (*example.before, new), "the page shows another CODECS than the code has"
    for text in [*new.examples, *(entry.name for entry in example.entries), "k=clip2-channel,v=clip2"]:
        scheme = kvbits.Scheme.parse(text)
        assert str(scheme) == text and kvbits.Scheme.from_json(scheme.to_json()) == scheme
    with pytest.raises(ValueError, match="clip4"):
        kvbits.Scheme.parse("clip5")
    codec = new(4)
    encoded = codec.encode(torch.full((2, 32, 80), 0.3).bfloat16(), {})
    assert {name: (part.dtype, part.shape[1:]) for name, part in encoded.items()} == {
        part.name: (part.dtype, part.shape) for part in codec.layout(32, 80, torch.bfloat16)
    }
    assert torch.equal(codec.decode(encoded, {}).bfloat16(), torch.full((2, 32, 80), 0.3).bfloat16())


def test_method_example_fails_without_its_idea(example: Example, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example.module, "RATIOS", (1.0,))
    with pytest.raises(AssertionError):
        example.trial.run(example.page, {"__name__": "trial"})


# -- names -----------------------------------------------------------------------------------------------------------


def exists(name: str) -> bool:
    """Whether ``module.Class.attribute``, relative to kvbits, is there; a field of a dataclass counts."""
    found: Any = kvbits
    path = "kvbits"
    for part in name.split("."):
        path = f"{path}.{part}"
        if hasattr(found, "__path__") and importlib.util.find_spec(path) is not None:
            found = importlib.import_module(path)
        elif hasattr(found, part):
            found = getattr(found, part)
        else:
            return part in getattr(found, "__annotations__", {})
    return True


def test_names_in_the_journey_exist() -> None:
    names = re.findall(r"`([a-z]\w*(?:\.\w+)+)`", prose(ROOT / "docs" / "journey.md"))
    names = [name for name in names if not name.startswith("kvbits.")]  # the next test has these
    assert len(set(names)) > 40
    assert [name for name in names if not exists(name)] == []
    assert not exists("cache.LayerCache.appendix") and not exists("caches.LayerCache.append")
    assert exists("store.Blocks.in_order") and not exists("store.Blocks.in_disorder")


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_names_of_files_and_of_the_package_exist(page: Path) -> None:
    text = prose(page)
    for name in re.findall(r"`kvbits\.(\w+(?:\.\w+)*)`", text):
        assert exists(name), f"kvbits.{name}"
    places = (ROOT, ROOT / "src" / "kvbits")
    for name in re.findall(r"`((?:[\w.]+/)*[\w-]+\.(?:py|md|txt|toml))`", text):
        if name not in ("src/kvbits/codecs/clipped.py", "src/kvbits/schemes/help/clipped.md"):
            assert any((place / name).is_file() for place in places), name


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_commands_exist(page: Path) -> None:
    typer = pytest.importorskip("typer")
    from kvbits.cli import app

    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M)
    shell = "".join(block.text for block in blocks(page) if block.words[:1] == ("sh",))
    for line in shell.splitlines():
        words = line.partition("#")[0].split()
        assert words[:1] in (["make"], ["kvbits"]) or words[:2] == ["pip", "install"] or words[0] == "python", line
        if words[0] == "make":
            assert words[1] in targets, line
        if words[0] != "kvbits":
            continue
        if commands[words[1]].context_settings.get("ignore_unknown_options"):
            continue  # they are another program's
        options = {option for parameter in commands[words[1]].params for option in parameter.opts}
        assert {word for word in words if word.startswith("-")} <= options, line
    for target in re.findall(r"`make ([a-z]+)`", prose(page)):
        assert target in targets, target


# -- links -----------------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """The anchors that headings get."""
    titles = re.findall(r"^#+ (.*)$", prose(page), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(page: Path) -> list[str]:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"\n", " ", prose(page))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.is_relative_to(ROOT) or not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_every_page_is_reached_from_the_readme() -> None:
    waiting, reached = [ROOT / "README.md"], set()
    while waiting:
        page = waiting.pop()
        if page in reached:
            continue
        reached.add(page)
        links = re.findall(r"\]\(([^)#\s]+\.md)", prose(page))
        waiting += [(page.parent / link).resolve() for link in links if not link.startswith("http")]
    assert set(PAGES) <= reached


# -- tables ----------------------------------------------------------------------------------------------------------


def test_generated_sections_are_up_to_date(generate: types.ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main(["--check"]) == 0, "run python docs/generate.py:\n" + capsys.readouterr().out


def test_a_stale_section_is_noticed_and_rewritten(
    generate: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = "docs/formats.md"
    monkeypatch.setattr(generate, "SECTIONS", {page: generate.SECTIONS[page]})
    (tmp_path / "docs").mkdir()
    copy = Path(shutil.copy(ROOT / page, tmp_path / page))
    good = copy.read_text(encoding="utf-8")
    assert generate.main(["--check"], tmp_path) == 0

    stale = good.replace("| K | zero | 8704 | 512 |", "| K | zero | 8704 | 256 |")
    assert stale != good
    copy.write_text(stale, encoding="utf-8")
    assert generate.main(["--check"], tmp_path) == 1
    assert "| 256 |" in capsys.readouterr().out
    assert copy.read_text(encoding="utf-8") == stale
    assert generate.main([], tmp_path) == 0
    assert copy.read_text(encoding="utf-8") == good


def test_tables_of_quality_wait_for_their_measurement(
    generate: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate.measured, "RESULTS", tmp_path)
    assert (
        "Not measured yet" in generate.measured_quality.ablation()
        and "Not measured yet" in generate.measured_quality.altered()
    )
    assert generate.page_measured("lloyd_max") == "Not measured through a model yet."

    def row(scheme: str, kl: float, **more: Any) -> dict[str, Any]:
        figures = {"kl_mean": kl, "kl_se": kl / 10, "top1": 0.5, "ppl": 9.0, "ppl_se": 0.5, "bits_at_8000": 4.5}
        return {"scheme": scheme, **figures, **more}

    about = {"model": "m", "windows": 4, "length": 1024, "chunk": 16, "text": "t", "calibration": "c, 16 x 512 tokens"}
    keys = ("processor", "cores", "torch", "transformers", "date", "command")
    about["setting"] = dict.fromkeys(keys, "x")
    rows = [
        row("hf:dynamic", 0.0, bits=2, step=None, bits_at_8000=None),
        row("nuq2-1%", 0.25, bits=2, step="1 % outliers"),
        row("lm2", 0.75, bits=2, step=None, kl_se=None),
        row("lm2,centred,block=64", 0.375, bits=2, step=None),
        row("nuq2-1%", 0.125, bits=2, step=generate.measured_quality.UNWEIGHTED),
    ]
    (tmp_path / "ablation.json").write_text(json.dumps({**about, "rows": rows}))
    text = generate.measured_quality.ablation()
    assert "### 2 bits, one idea after the other" in text and "calibrated on c, 16 x 512 tokens" in text
    assert "| 1 % outliers | `nuq2-1%` | 0.25000 ± 0.02500 | 9.00 ± 0.50 | 50.0 % | 4.50 |" in text
    assert "| without sensitivity | `nuq2-1%` | 0.12500" in text and "| `lm2` | 0.75000 |" in text

    # A page has the schemes of its method; that of a modifier those that have it, and the same codecs without.
    assert re.findall(r"^\| `(.*?)` \| (\S+)", generate.page_measured("lloyd_max"), flags=re.M) == [
        ("lm2", "0.75000"), ("lm2,centred,block=64", "0.37500"),
    ]  # fmt: skip
    assert generate.page_measured("centred").count("`lm2") == 2 and "nuq" not in generate.page_measured("centred")
    assert "| `nuq2-1%` | 0.25000" in generate.page_measured("outliers")
    assert "0.12500" not in generate.page_measured("outliers") and "lm2" not in generate.page_measured("outliers")

    changed = [row("lm2", 0.5, altered="scaled 8"), row("lm2", 0.25, altered="offset 8")]
    (tmp_path / "altered.json").write_text(json.dumps({**about, "rows": changed}))
    assert "| scheme | scaled 8 | offset 8 |" in generate.measured_quality.altered()
    assert "| `lm2` | 0.50000 | 0.25000 |" in generate.measured_quality.altered()


def test_a_table_of_quality_from_a_file_of_kvbits_eval(
    generate: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate.measured, "RESULTS", tmp_path)
    figures = {"kl_median": 0.25, "kl_p999": 2.0, "top1": 0.5, "ppl": 9.0, "ppl_se": 0.5, "bits_per_element": 10.0}
    rows = [
        {"scheme": "hf:dynamic", "regime": "chunked", **figures, "kl_mean": -1e-9, "bits_at_8000": None},
        {"scheme": "int4", "regime": "chunked", **figures, "kl_mean": 0.125, "bits_at_8000": 4.9114},
        {"scheme": "int4", "regime": "one-shot", **figures, "kl_mean": 1e-9, "bits_at_8000": 4.9114},
        {"scheme": "hf:hqq4", "regime": "chunked", "error": "ImportError: no hqq"},
    ]
    names = (
        "processor",
        "cores",
        "torch",
        "transformers",
        "date",
        "command",
        "model",
        "windows",
        "length",
        "chunk",
        "text",
    )
    setting = {**dict.fromkeys(names, "x"), "dtype": "bfloat16"}
    (tmp_path / "quality.json").write_text(
        json.dumps({"format": 1, "kind": "quality", "setting": setting, "rows": rows})
    )
    text = generate.measured_quality.quality()
    assert "| `int4` | 0.12500 | 0.25000 | 2.000 | 50.0 % | 9.00 ± 0.50 | 4.91 |" in text
    assert "Model x in bfloat16, x, x windows" in text and text.count("`int4`") == 1 and "hqq" not in text


# -- pages of methods ------------------------------------------------------------------------------------------------


def test_every_codec_has_a_page() -> None:
    assert {page.stem for page in METHOD_PAGES} == {*pages.METHODS, *pages.MODIFIERS}
    assert {kind.__module__.rpartition(".")[2] for kind in CODECS} | {"kivi"} == set(pages.METHODS)
    for name in (*ALIASES, *(entry.name for entry in CATALOGUE), *(x for kind in CODECS for x in kind.examples)):
        methods, _ = pages.of_scheme(kvbits.Scheme.parse(name))
        assert len(methods) == 1, name


@pytest.mark.parametrize("page", METHOD_PAGES, ids=[page.stem for page in METHOD_PAGES])
def test_a_page_says_all_there_is_to_say(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert pages.read(page.stem) == text  # as it was installed
    titles = re.findall(r"^## (.*)$", text, flags=re.M)
    wanted = ["Bits", "Cost", "When", "When not", "Source"]
    assert [title for title in titles if title in wanted] == wanted
    assert page.stem == "exact" or "arxiv.org" in text or "HQQ" in text
    long = [line for block in blocks(page) for line in block.text.splitlines() if len(line) > 78]
    assert long == []  # a terminal of 80 columns shows them whole


@pytest.mark.parametrize(
    ("scheme", "methods", "modifiers"),
    [
        ("default", ["lloyd_max"], ["centred"]),
        ("kivi4", ["kivi"], []),
        ("kivi2-1%,pre-rope", ["kivi"], ["pre_rope", "outliers"]),
        ("int4-channel", ["affine"], []),
        ("k=int3-channel,v=nf3", ["affine", "normal_float"], []),
        ("int4,layers[0]=exact", ["affine", "exact"], []),
        ("nuq2-1%-qnorm,sinks=4+8", ["non_uniform"], ["pre_rope", "outliers", "qnorm", "sinks", "calibration"]),
        ("rot4-static", ["rotated"], ["calibration"]),
        ("fp8-static", ["fp8"], ["calibration"]),
    ],
)
def test_a_scheme_leads_to_its_pages(scheme: str, methods: list[str], modifiers: list[str]) -> None:
    assert pages.of_scheme(kvbits.Scheme.parse(scheme)) == (methods, modifiers)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["kivi4"], ["one scale and zero per channel and 32 tokens", "5.00 bits per element"]),
        (["nuq3-1%"], ["k=nuq3-static-1%,v=nuq3-token-1%,pre-rope", "kvbits calibrate MODEL", "3.56 at head_dim 128"]),
        (["default"], ["k=lm4,v=lm4,centred in blocks of 64 tokens", "kvbits schemes centred", "table[code]"]),
        (["outliers=1%"], ["a few elements beside the codes", "uint16"]),
        (["Pre-RoPE"], ["on which side of the rotary embedding"]),
        (["nuq"], ["levels fitted to the model"]),
        ([], ["lm4,centred,block=64", "the smallest to try", '"qnorm"', "table[code]"]),
    ],
)
def test_the_command_line_prints_pages(words: list[str], shown: list[str]) -> None:
    testing = pytest.importorskip("typer.testing")
    from kvbits.cli import app

    result = testing.CliRunner().invoke(app, ["schemes", *words], env={"COLUMNS": "400"})
    assert result.exit_code == 0, result.output
    assert all(text in result.output for text in shown), result.output
    assert "<!--" not in result.output and "../" not in result.output


def test_an_unknown_page_names_what_is_near() -> None:
    testing = pytest.importorskip("typer.testing")
    from kvbits.cli import app

    for name, near in (("lm5", "near: lm4"), ("centered", "pages on centred"), ("int4-gs48", "allowed are")):
        result = testing.CliRunner().invoke(app, ["schemes", name])
        assert result.exit_code == 2 and near in result.output, result.output


def test_every_scheme_is_documented() -> None:
    names = {*ALIASES, *(entry.name for entry in CATALOGUE)}
    rows = set(re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs" / "schemes.md").read_text(encoding="utf-8"), flags=re.M))
    assert names <= rows
