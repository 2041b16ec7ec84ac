"""``lm_eval --model kvbits`` without a command of ours: only after ``kvbits lm-eval --plug-in`` has asked for it.

lm-evaluation-harness 0.4 knows the models of one table in its own ``lm_eval.models``, and looks for no entry points.
So a line in a ``.pth`` file, which Python reads as it starts, puts a finder before all others. It waits for that
module, and adds one name to the table once it is there. Nothing else is imported or changed, and :func:`remove` ends
it.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
import sysconfig
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

_TABLE = "lm_eval.models"
_LINE = "import importlib.util as u; u.find_spec('kvbits') and __import__('kvbits.measure.plug').measure.plug.wait()\n"


def install(folder: str | Path | None = None) -> Path:
    """Write the file into the environment's ``site-packages`` (or ``folder``), and say where it is.

    Raises:
        OSError: if it cannot be written.
    """
    path = _path(folder)
    path.write_text(_LINE, encoding="utf-8")
    return path


def remove(folder: str | Path | None = None) -> Path:
    """Remove the file, and say where it was.

    Raises:
        FileNotFoundError: if it is not there.
    """
    path = _path(folder)
    if not path.exists():
        raise FileNotFoundError(f"there is no {path}: kvbits is not plugged in here")
    path.unlink()
    return path


def _path(folder: str | Path | None) -> Path:
    return Path(folder or sysconfig.get_path("purelib")) / "kvbits_lm_eval.pth"


def wait() -> None:
    """Add ``kvbits`` to the harness's models once the table of them is imported."""
    sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Of the table, what the other finders say, with one more step after it; of all else nothing."""
        if name != _TABLE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, own: Any) -> None:
        self.own = own

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As without us."""
        module: ModuleType | None = self.own.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Import the module, then add our name."""
        self.own.exec_module(module)
        from lm_eval.api.registry import model_registry

        model_registry.register("kvbits", target="kvbits.measure.harness:KvbitsLM")
