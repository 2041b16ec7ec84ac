"""kvbits: the KV cache of language models in 2 to 8 bits, and attention straight from the stored bits.

Names are loaded at first use. ``cache_for``, ``freeze``, ``enable``, ``disable``, ``load_model``, ``explain``,
``calibrate``, ``save``, ``load`` and ``PrefixStore`` need Transformers; everything else works without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvbits.cache import LayerCache
    from kvbits.calibration import calibrate
    from kvbits.catalogue import CATALOGUE, RECOMMENDED
    from kvbits.files import Calibration, load_calibration
    from kvbits.hf.attach import cache_for, disable, enable
    from kvbits.hf.cache import KVCache, nbytes_of
    from kvbits.hf.explain import explain
    from kvbits.hf.loading import load_model
    from kvbits.hf.static import StaticKVCache, freeze
    from kvbits.prefixes import PrefixStore
    from kvbits.saving import Saved, load, save
    from kvbits.scheme import Scheme

__version__ = "0.1.0"

__all__ = [
    "CATALOGUE",
    "RECOMMENDED",
    "Calibration",
    "KVCache",
    "LayerCache",
    "PrefixStore",
    "Saved",
    "Scheme",
    "StaticKVCache",
    "cache_for",
    "calibrate",
    "disable",
    "enable",
    "explain",
    "freeze",
    "load",
    "load_calibration",
    "load_model",
    "nbytes_of",
    "save",
]

_LAZY = {
    "CATALOGUE": "kvbits.catalogue",
    "RECOMMENDED": "kvbits.catalogue",
    "Calibration": "kvbits.files",
    "KVCache": "kvbits.hf.cache",
    "LayerCache": "kvbits.cache",
    "PrefixStore": "kvbits.prefixes",
    "Saved": "kvbits.saving",
    "Scheme": "kvbits.scheme",
    "StaticKVCache": "kvbits.hf.static",
    "cache_for": "kvbits.hf.attach",
    "calibrate": "kvbits.calibration",
    "disable": "kvbits.hf.attach",
    "enable": "kvbits.hf.attach",
    "explain": "kvbits.hf.explain",
    "freeze": "kvbits.hf.static",
    "load": "kvbits.saving",
    "load_calibration": "kvbits.files",
    "load_model": "kvbits.hf.loading",
    "nbytes_of": "kvbits.hf.cache",
    "save": "kvbits.saving",
}

_MODULES = ("attend", "cache", "catalogue", "codecs", "parallel", "scheme", "store")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"kvbits.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module 'kvbits' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return __all__
