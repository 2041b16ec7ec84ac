"""An OpenAI-compatible server of one model, whose conversations keep their quantized caches.

One file an idea: ``stops`` (where a text ends), ``fields`` (what a request may ask), ``sizes`` (what a cache may take),
``pool`` (caches between requests), ``engine`` (one answer after the other), ``queue`` (which request is next),
``template`` (from messages to tokens), ``handlers`` (Transformers' own, on the engine), ``metrics``, ``app`` (routes),
``server`` (a socket and its end). Importing this module needs none of the packages of the extra ``serve``.
"""

from __future__ import annotations

import importlib.util

import transformers

PACKAGES = ("fastapi", "uvicorn", "openai", "prometheus_client")
"""What the extra ``serve`` installs."""

OLDEST = (5, 24)
"""The first release of Transformers whose server has the parts that ours is made of."""


def require() -> None:
    """Raise ImportError, with the remedy, where a package that serving needs is missing or too old."""
    release = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if release < OLDEST:
        raise ImportError(
            f"serving needs Transformers {'.'.join(map(str, OLDEST))} or later, and Python 3.11 or later with it; "
            f"installed is {transformers.__version__}: pip install -U 'kvbits[serve]'"
        )
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"serving needs the packages {', '.join(missing)}: pip install 'kvbits[serve]'")
