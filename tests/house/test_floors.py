"""The walls of the house: who may import whom, and that importing kvbits needs neither Transformers nor others."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import kvbits
from rooms import EXTRAS, ROOMS

ROOT = Path(kvbits.__file__).parent

STANDARD = set(sys.stdlib_module_names)


@dataclass(frozen=True)
class Import:
    """One import statement of one module: which module, and where it stands."""

    source: str
    target: str
    line: int
    lazy: bool
    typing: bool
    names: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return f"{self.source}:{self.line} imports {self.target}"


def name_of(path: Path) -> str:
    parts = ("kvbits", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted([*ROOT.rglob("*.py"), *ROOT.rglob("*.pyi")])}


def room_of(module: str) -> str:
    """The room that a module stands in; empty for the package itself, which names what is public."""
    return [*module.split("."), ""][1]


def imports_of(module: str, source: str) -> Iterator[Import]:
    """Every import of a module, inside functions and for type checkers too."""

    def walk(node: ast.AST, lazy: bool, typing: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(module, alias.name, child.lineno, lazy, typing)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{module}:{child.lineno} is a relative import"
                for alias in child.names:
                    full = f"{child.module}.{alias.name}"
                    target = full if full in MODULES else str(child.module)
                    yield Import(module, target, child.lineno, lazy, typing, frozenset({alias.name}))
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                yield from walk(child, lazy, True)
            else:
                inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
                yield from walk(child, lazy or inside, typing)

    yield from walk(ast.parse(source), False, False)


def faults_of(module: str, source: str) -> list[str]:
    """What a module may not import."""
    name, faults = room_of(module), []
    room = ROOMS.get(name)
    for found in imports_of(module, source):
        package = found.target.partition(".")[0]
        if package == "kvbits":
            target = room_of(found.target)
            if room is None:  # the package itself names what is public for type checkers, and imports at first use
                if not found.typing:
                    faults.append(f"{found}: the package imports nothing")
            elif not target:
                if not (name == "cli" or found.names == {"__version__"}):
                    faults.append(f"{found}: public names are for users")
            elif target != name and ROOMS[target].floor >= room.floor:
                faults.append(f"{found}: floor {ROOMS[target].floor} from floor {room.floor}")
        elif package not in STANDARD | {"torch"} | (room.outside if room else set()) and not (
            package in EXTRAS.get(module.removeprefix("kvbits."), set())
            or (room is not None and package in room.inside_functions and (found.lazy or found.typing))
        ):
            faults.append(f"{found}: not among what this room may use")
    return faults


KNOWN_CIRCLES = []


def circles_of(imports: dict[str, set[str]]) -> list[list[str]]:
    """The groups of modules that reach each other: strongly connected, by Tarjan's algorithm."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    waiting: list[str] = []
    circles: list[list[str]] = []

    def visit(module: str) -> None:
        order[module] = lowest[module] = len(order)
        waiting.append(module)
        for target in imports.get(module, set()):
            if target not in order:
                visit(target)
                lowest[module] = min(lowest[module], lowest[target])
            elif target in waiting:
                lowest[module] = min(lowest[module], order[target])
        if lowest[module] == order[module]:
            place = waiting.index(module)
            circle, waiting[place:] = waiting[place:], []
            if len(circle) > 1:
                circles.append(sorted(circle))

    for module in imports:
        if module not in order:
            visit(module)
    return circles


def imported() -> dict[str, set[str]]:
    """Who imports whom, inside functions and for type checkers too; the package itself aside."""
    return {
        module: {found.target for found in imports_of(module, path.read_text(encoding="utf-8"))}
        & (set(MODULES) - {"kvbits"})
        for module, path in MODULES.items()
        if module != "kvbits"
    }


def test_modules_import_only_from_below() -> None:
    faults = [
        fault for module, path in MODULES.items() for fault in faults_of(module, path.read_text(encoding="utf-8"))
    ]
    assert faults == []


def test_every_room_has_a_floor() -> None:
    assert {room_of(module) for module in MODULES} - {""} == set(ROOMS)
    assert all(isinstance(room.floor, int) for room in ROOMS.values())


def test_no_imports_go_in_circles() -> None:
    assert circles_of(imported()) == KNOWN_CIRCLES
    between = {name: set[str]() for name in ROOMS}
    for module, targets in imported().items():
        between[room_of(module)] |= {room_of(target) for target in targets} - {room_of(module)}
    assert circles_of(between) == []


def test_a_circle_is_found() -> None:
    assert circles_of({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}) == [["b", "c"]]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kvbits.numerics.affine", "from kvbits.codecs import Affine"),
        ("kvbits.numerics.affine", "def f():\n    import kvbits.layer.cache"),
        ("kvbits.codecs.affine", "from kvbits.schemes import scheme"),
        ("kvbits.store.record", "from kvbits.schemes.scheme import Scheme"),
        ("kvbits.store.blocks", "from kvbits.attend import attend"),
        ("kvbits.attend.reference", "from kvbits.layer.cache import LayerCache"),
        ("kvbits.attend.native", "from kvbits.encode import native"),
        ("kvbits.encode.native", "from kvbits.attend import Call"),
        ("kvbits.layer.cache", "import transformers"),
        ("kvbits.layer.cache", "def f():\n    from transformers import Cache"),
        ("kvbits.layer.cache", "import numpy"),
        ("kvbits.cli", "import transformers"),
        ("kvbits.measure.tasks", "import lm_eval"),
        ("kvbits.measure.tasks", "from kvbits.cli import app"),
        ("kvbits.hf.cache", "from kvbits.cli import app"),
        ("kvbits.hf.cache", "import kvbits"),
        ("kvbits.hf.cache", "from kvbits import Scheme"),
        ("kvbits", "from kvbits.cli import app"),
    ],
)
def test_a_breach_is_found(module: str, source: str) -> None:
    assert faults_of(module, source)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kvbits.schemes.scheme", "from kvbits.schemes.catalogue import CATALOGUE\nimport re"),
        ("kvbits.codecs.affine", "from kvbits.codecs.grouped import Grouped\nfrom kvbits.types import Part"),
        ("kvbits.hf.cache", "from transformers import Cache"),
        ("kvbits.cli", "def f():\n    from transformers.utils import logging\n    from kvbits.hf.run import run"),
        ("kvbits.cli", "from kvbits import __version__"),
    ],
)
def test_what_is_allowed_is_not_called_a_breach(module: str, source: str) -> None:
    assert faults_of(module, source) == []


# -- without Transformers ----------------------------------------------------------------------------------------------


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_core_works_without_transformers() -> None:
    """Blocked in sys.modules: schemes, cache and attention run, and what needs Transformers says so."""
    out = run_python(
        """
        import sys
        for name in ("transformers", "safetensors", "typer", "rich"):
            sys.modules[name] = None

        import torch
        import kvbits
        from kvbits.attend import Call, attend

        cache = kvbits.LayerCache(kvbits.Scheme.parse(kvbits.RECOMMENDED))
        cache.append(torch.randn(1, 2, 400, 64), torch.randn(1, 2, 400, 64))
        view = cache.append(torch.randn(1, 2, 1, 64), torch.randn(1, 2, 1, 64))
        out = attend(Call(torch.randn(1, 4, 1, 64), view, 0.125))
        assert view.blocks.longest == 4 and out.shape == (1, 4, 1, 64) and bool(out.isfinite().all())
        assert len(kvbits.CATALOGUE) > 10

        for name in ("cache_for", "enable", "disable", "explain", "load_model", "KVCache"):
            try:
                getattr(kvbits, name)
            except ImportError as error:
                assert "transformers" in str(error), error
            else:
                raise AssertionError(f"{name} did not need transformers")
        print("done")
        """
    )
    assert out == "done\n"


def test_importing_kvbits_imports_nothing_more_than_torch_does() -> None:
    out = run_python(
        """
        import sys
        import torch
        before = {name.partition(".")[0] for name in sys.modules}
        import kvbits
        after = {name.partition(".")[0] for name in sys.modules}
        print(sorted(after - before - set(sys.stdlib_module_names)))
        """
    )
    assert out == "['kvbits']\n"


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="module 'kvbits' has no attribute 'cache_fro'"):
        kvbits.cache_fro  # noqa: B018


def test_every_public_name_is_there() -> None:
    pytest.importorskip("transformers", reason="the lazy names need Transformers")
    for name in kvbits.__all__:
        assert getattr(kvbits, name) is not None
