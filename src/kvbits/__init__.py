"""kvbits: the KV cache of language models in 2 to 8 bits, and attention straight from the stored bits.

Names are loaded at first use. ``cache_for``, ``freeze``, ``enable``, ``disable``, ``load_model``, ``load_tokenizer``,
``explain``, ``calibrate``, ``save``, ``load`` and ``PrefixStore`` need Transformers; everything else works without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # and to be imported from here, so each of them "as" itself
    from kvbits.calibration import calibrate as calibrate
    from kvbits.files import Calibration as Calibration
    from kvbits.files import load_calibration as load_calibration
    from kvbits.hf.attach import cache_for as cache_for
    from kvbits.hf.attach import disable as disable
    from kvbits.hf.attach import enable as enable
    from kvbits.hf.cache import KVCache as KVCache
    from kvbits.hf.cache import nbytes_of as nbytes_of
    from kvbits.hf.explain import explain as explain
    from kvbits.hf.frozen import StaticKVCache as StaticKVCache
    from kvbits.hf.frozen import freeze as freeze
    from kvbits.hf.loading import load_model as load_model
    from kvbits.hf.loading import load_tokenizer as load_tokenizer
    from kvbits.layer.cache import LayerCache as LayerCache
    from kvbits.schemes.catalogue import CATALOGUE as CATALOGUE
    from kvbits.schemes.catalogue import RECOMMENDED as RECOMMENDED
    from kvbits.schemes.scheme import Scheme as Scheme
    from kvbits.sessions.prefixes import PrefixStore as PrefixStore
    from kvbits.sessions.saving import Saved as Saved
    from kvbits.sessions.saving import load as load
    from kvbits.sessions.saving import save as save

__version__ = "0.1.0"

_NAMES = {
    "kvbits.calibration": ("calibrate",),
    "kvbits.files": ("Calibration", "load_calibration"),
    "kvbits.hf.attach": ("cache_for", "disable", "enable"),
    "kvbits.hf.cache": ("KVCache", "nbytes_of"),
    "kvbits.hf.explain": ("explain",),
    "kvbits.hf.frozen": ("StaticKVCache", "freeze"),
    "kvbits.hf.loading": ("load_model", "load_tokenizer"),
    "kvbits.layer.cache": ("LayerCache",),
    "kvbits.schemes.catalogue": ("CATALOGUE", "RECOMMENDED"),
    "kvbits.schemes.scheme": ("Scheme",),
    "kvbits.sessions.prefixes": ("PrefixStore",),
    "kvbits.sessions.saving": ("Saved", "load", "save"),
}
"""What is public, and where it stands."""

_HOMES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted(_HOMES)

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
    if name not in _HOMES:
        raise AttributeError(f"module 'kvbits' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
