"""kvbits: the KV cache of language models in 2 to 8 bits, and attention straight from the stored bits.

Names are loaded at first use. ``cache_for``, ``freeze``, ``enable``, ``disable``, ``load_model``, ``load_tokenizer``,
``explain``, ``calibrate``, ``save``, ``load`` and ``PrefixStore`` need Transformers; everything else works without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvbits.calibration import calibrate
    from kvbits.files import Calibration, load_calibration
    from kvbits.hf.attach import cache_for, disable, enable
    from kvbits.hf.cache import KVCache, nbytes_of
    from kvbits.hf.explain import explain
    from kvbits.hf.frozen import StaticKVCache, freeze
    from kvbits.hf.loading import load_model, load_tokenizer
    from kvbits.layer.cache import LayerCache
    from kvbits.schemes.catalogue import CATALOGUE, RECOMMENDED
    from kvbits.schemes.scheme import Scheme
    from kvbits.sessions.prefixes import PrefixStore
    from kvbits.sessions.saving import Saved, load, save

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
    "load_tokenizer",
    "nbytes_of",
    "save",
]

_LAZY = {
    "CATALOGUE": "kvbits.schemes.catalogue",
    "RECOMMENDED": "kvbits.schemes.catalogue",
    "Calibration": "kvbits.files",
    "KVCache": "kvbits.hf.cache",
    "LayerCache": "kvbits.layer.cache",
    "PrefixStore": "kvbits.sessions.prefixes",
    "Saved": "kvbits.sessions.saving",
    "Scheme": "kvbits.schemes.scheme",
    "StaticKVCache": "kvbits.hf.frozen",
    "cache_for": "kvbits.hf.attach",
    "calibrate": "kvbits.calibration",
    "disable": "kvbits.hf.attach",
    "enable": "kvbits.hf.attach",
    "explain": "kvbits.hf.explain",
    "freeze": "kvbits.hf.frozen",
    "load": "kvbits.sessions.saving",
    "load_calibration": "kvbits.files",
    "load_model": "kvbits.hf.loading",
    "load_tokenizer": "kvbits.hf.loading",
    "nbytes_of": "kvbits.hf.cache",
    "save": "kvbits.sessions.saving",
}

_MODULES = {
    "attend": "kvbits.attend",
    "codecs": "kvbits.codecs",
    "parallel": "kvbits.parallel",
    "store": "kvbits.store",
    # Where these modules stood before they had rooms.
    "cache": "kvbits.layer.cache",
    "catalogue": "kvbits.schemes.catalogue",
    "scheme": "kvbits.schemes.scheme",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name not in _LAZY:
        raise AttributeError(f"module 'kvbits' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return __all__
