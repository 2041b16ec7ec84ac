"""kvbits: the KV cache of language models in 2 to 8 bits, and attention straight from the stored bits.

``cache_for``, ``enable``, ``disable``, ``load_model`` and ``explain`` need Transformers and are loaded at first use;
everything else imports without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvbits.cache import LayerCache
from kvbits.catalogue import CATALOGUE, RECOMMENDED
from kvbits.scheme import Scheme

if TYPE_CHECKING:
    from kvbits.hf.attach import cache_for, disable, enable
    from kvbits.hf.cache import KVCache
    from kvbits.hf.explain import explain
    from kvbits.hf.loading import load_model

__version__ = "0.1.0"

__all__ = [
    "CATALOGUE",
    "RECOMMENDED",
    "KVCache",
    "LayerCache",
    "Scheme",
    "cache_for",
    "disable",
    "enable",
    "explain",
    "load_model",
]

_LAZY = {
    "KVCache": "kvbits.hf.cache",
    "cache_for": "kvbits.hf.attach",
    "disable": "kvbits.hf.attach",
    "enable": "kvbits.hf.attach",
    "explain": "kvbits.hf.explain",
    "load_model": "kvbits.hf.loading",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'kvbits' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return __all__
