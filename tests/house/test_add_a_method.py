"""docs/add-a-method.md can be followed: what it says, done in a copy of the tree, passes the tests that it names."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "add-a-method.md"


class Block(NamedTuple):
    """A fenced block of the page below a comment ``<!-- kind: path -->``."""

    kind: str
    path: str
    text: str


BLOCKS = [
    Block(*found)
    for found in re.findall(
        r"^<!-- (\w+)(?:: (\S+))? -->\n```[^\n]*\n(.*?)^```$", PAGE.read_text("utf-8"), flags=re.S | re.M
    )
]


def texts(kind: str) -> list[str]:
    return [block.text for block in BLOCKS if block.kind == kind]


def patched(text: str, diff: str) -> str:
    """``text`` with each hunk of ``diff`` applied where its old lines stand, which must be in one place."""
    for hunk in diff.split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        old, new = ("".join(line[1:] for line in lines if line[0] in signs) for signs in (" -", " +"))
        assert text.count(old) == 1, f"stands {text.count(old)} times:\n{old}"
        text = text.replace(old, new)
    return text


def python(tree: Path, *words: str) -> str:
    """What a Python program prints in the copy; it must succeed."""
    paths = os.pathsep.join(str(tree / folder) for folder in (".", "src", "tests/support"))
    done = subprocess.run(
        [sys.executable, *words], cwd=tree, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{shlex.join(words)}:\n{done.stdout[-4000:]}{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree in which the page was followed up to its tests."""
    copy = tmp_path_factory.mktemp("tree")
    for name in ("src", "tests", "docs", "bench", "examples"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    # An editable installation finds the tree that it was made from before any other path.
    (copy / "sitecustomize.py").write_text(
        "import sys; sys.meta_path[:] = [x for x in sys.meta_path if '_editable' not in type(x).__module__]\n", "utf-8"
    )
    native = importlib.util.find_spec("kvbits._native")
    if native is not None and native.origin is not None and native.origin.endswith(".so"):
        shutil.copy(native.origin, copy / "src" / "kvbits")
    for kind, path, text in BLOCKS:
        if kind == "file":
            assert not (copy / path).exists(), f"{path} is there"
            (copy / path).write_text(text, "utf-8")
        elif kind == "diff":
            (copy / path).write_text(patched((copy / path).read_text("utf-8"), text), "utf-8")
    return copy


@pytest.mark.slow
def test_the_page_can_be_followed(tree: Path) -> None:
    (trial,), (commands,) = texts("try"), texts("run")
    assert str(tree) in python(tree, "-c", "import kvbits; print(kvbits.__file__)")
    assert "clip2" in python(tree, "-c", trial)
    for command in commands.splitlines():
        program, *words = shlex.split(command)
        assert program == "python"
        out = python(tree, *words)
        assert "pytest" not in words or int(re.findall(r"(\d+) passed", out)[0]) >= 10, out


@pytest.mark.slow
def test_each_part_of_the_page_is_needed(tree: Path) -> None:
    program = "import sys; import kvbits.codecs.clipped as c; c.RATIOS = (1.0,); exec(sys.argv[1])"
    with pytest.raises(AssertionError, match="error"):
        python(tree, "-c", program, texts("try")[0])
    table = tree / "tests" / "support" / "table.py"
    good = table.read_text("utf-8")
    try:
        table.write_text("".join(line for line in good.splitlines(keepends=True) if '"clip2": (' not in line), "utf-8")
        with pytest.raises(AssertionError, match="clip2"):
            python(tree, "-m", "pytest", "-q", "tests/codecs/test_codecs.py", "-k", "names_every_method")
    finally:
        table.write_text(good, "utf-8")


@pytest.mark.slow
def test_the_figures_are_what_the_recipe_prints(tree: Path) -> None:
    printed = dict(line.split(maxsplit=1) for line in python(tree, "-c", texts("recipe")[0]).splitlines())
    (table,) = (block.text for block in BLOCKS if block.path == "tests/support/table.py")
    assert printed == {
        name: " ".join(row.split(", ")) for name, row in re.findall(r'^\+ +"(\w+)": \((.*)\)', table, flags=re.M)
    }
