"""From the ``cache_config`` of Transformers' quantized cache to a scheme."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvbits.schemes.scheme import RESIDUAL_TOKENS, Scheme

_GROUPED = {"nbits": 4, "q_group_size": 64, "residual_length": RESIDUAL_TOKENS, "axis_key": 0, "axis_value": 0}
_BACKENDS = {"quanto": ("int", (2, 4), 0), "hqq": ("hqq", (2, 3, 4, 8), 1), "kvbits": ("int", (2, 3, 4, 8), 0)}
"""Backend: codec family, bits, and the axis whose groups are neighbouring channels of one token."""


def scheme_of_cache_config(cache_config: Mapping[str, Any] | None) -> Scheme:
    """The scheme that stores what ``generate(cache_implementation="quantized", cache_config=...)`` asks for.

    ``quanto`` and ``kvbits`` become ``int``, ``hqq`` becomes ``hqq``, ``fp8`` becomes ``fp8`` (scale per token).
    Along the axis whose groups are neighbouring channels (quanto 0, hqq 1; hqq's default here) a group is
    ``q_group_size`` channels of a token; along the other it is ``q_group_size`` tokens of a channel. ``kvbits`` also
    takes ``{"backend": "kvbits", "scheme": "kivi2"}``. The mapping is not changed.

    Raises:
        TypeError: if it is neither a mapping nor None.
        ValueError: for an unknown backend, option or value.
    """
    if cache_config is not None and not isinstance(cache_config, Mapping):
        raise TypeError(f"cache_config must be a dict, not {type(cache_config).__name__}")
    given = {name: value for name, value in (cache_config or {}).items() if value is not None}
    given.pop("config", None)  # Transformers lets callers pass the model config along
    backend = str(given.pop("backend", "quanto")).lower()
    if backend == "fp8":
        _refuse(given, (), backend)
        return Scheme.parse("fp8")
    if backend not in _BACKENDS:
        raise ValueError(f"cache_config backend {backend!r} is unknown; allowed are quanto, hqq, fp8, kvbits")
    if backend == "kvbits" and "scheme" in given:
        _refuse(given, ("scheme",), backend)
        return Scheme.parse(given["scheme"])
    _refuse(given, tuple(_GROUPED), backend)
    family, bits, token_axis = _BACKENDS[backend]
    options = {**_GROUPED, "axis_key": token_axis, "axis_value": token_axis, **given}
    if options["nbits"] not in bits:
        raise ValueError(f"cache_config nbits={options['nbits']!r}: the {backend} backend has {bits}")
    axes = (0, 1) if backend == "hqq" else (0, -1)
    sides = []
    for name in ("axis_key", "axis_value"):
        if options[name] not in axes:
            raise ValueError(f"cache_config {name}={options[name]!r}: the {backend} backend has {axes}")
        direction = "" if options[name] == token_axis else "-channel"
        sides.append(f"{family}{options['nbits']}{direction}-gs{options['q_group_size']}")
    return Scheme.parse(f"k={sides[0]},v={sides[1]},residual={options['residual_length']}")


def _refuse(given: Mapping[str, Any], allowed: tuple[str, ...], backend: str) -> None:
    unknown = sorted(set(given) - set(allowed))
    if unknown:
        raise ValueError(f"cache_config has {unknown}, which the {backend} backend does not take; allowed: {allowed}")
