"""Measured quality beside planned bytes: a row of a file of results for each scheme, and which scheme to take."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvbits.schemes.catalogue import ALIAS_ADVICE, ALIASES, BY_NAME, RECOMMENDED
from kvbits.schemes.scheme import Scheme

FIGURES = ("kl_mean", "top1", "ppl")
"""What is shown: mean KL divergence to the exact model, share of equal best tokens, perplexity."""


@dataclass(frozen=True)
class Quality:
    """Figures by scheme, and what they were measured on.

    Attributes:
        rows: by the canonical spelling of the scheme.
        measured: model, text and file, in words.
    """

    rows: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    measured: str = ""

    def of(self, scheme: Scheme) -> dict[str, float] | None:
        """The figures of a scheme, or None where it was not measured."""
        found = self.rows.get(str(scheme))
        return None if found is None else dict(found)


def load(path: str | Path) -> Quality:
    """Read a file of results, ``{"rows": [{"scheme": ..., "kl_mean": ...}, ...]}``; of rows of one scheme the first.

    Raises:
        ValueError: for anything else, or a file without a figure of any scheme.
    """
    path = Path(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"), parse_int=float)
        rows = data["rows"]
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"{path} is no file of results: it has no rows of schemes with kl_mean, top1 or ppl") from None
    found: dict[str, dict[str, float]] = {}
    for row in rows if isinstance(rows, list) else ():
        figures = {} if not isinstance(row, dict) else _figures(row)
        scheme = _scheme(row.get("scheme")) if figures else None
        if scheme is not None:
            found.setdefault(str(scheme), figures)
    if not found:
        raise ValueError(f"{path} has no row of a scheme with {', '.join(FIGURES)}")
    setting = data.get("setting")
    about = {**(setting if isinstance(setting, dict) else {}), **data}
    parts = [str(about[name]) for name in ("model", "text") if about.get(name)]
    return Quality(found, ", ".join([*parts, path.name]))


def _figures(row: Mapping[str, Any]) -> dict[str, float]:
    numbers = {name: row.get(name) for name in FIGURES}
    return {name: number for name, number in numbers.items() if isinstance(number, float) and math.isfinite(number)}


def _scheme(name: object) -> Scheme | None:
    """None for peers and for schemes of another release."""
    try:
        return Scheme.parse(name)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None


def recommend(fitting: Sequence[Scheme], quality: Quality | None) -> tuple[Scheme, str] | None:
    """Which of the schemes that fit to take, and why; None where none fits.

    With figures, the one with the least divergence of those that were measured; else what the catalogue advises:
    ``default``, ``small`` where only that fits, or the first that does.
    """
    packed = [scheme for scheme in fitting if scheme.packs]
    if quality is not None:
        known = {scheme: (quality.of(scheme) or {}).get("kl_mean") for scheme in packed}
        measured = {scheme: divergence for scheme, divergence in known.items() if divergence is not None}
        if measured:
            scheme = min(measured, key=measured.__getitem__)
            return scheme, f"the least divergence of what fits, KL {measured[scheme]:.4f} ({quality.measured})"
    for alias in (RECOMMENDED, *(name for name in ALIASES if name != RECOMMENDED)):
        scheme = Scheme.parse(alias)
        if scheme in packed:
            return scheme, ALIAS_ADVICE[alias] + _unmeasured(quality)
    for scheme in (*packed, *fitting):
        entry = BY_NAME.get(str(scheme))
        advice = f" ({entry.advice})" if entry else ""
        return scheme, f"it fits{advice}, and {RECOMMENDED} does not" + _unmeasured(quality)
    return None


def _unmeasured(quality: Quality | None) -> str:
    return "; no measurement is at hand" if quality is None else f"; {quality.measured} has nothing of what fits"
