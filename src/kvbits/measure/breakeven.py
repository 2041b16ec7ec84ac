"""From how many tokens of context on a scheme's tokens come faster than those of the exact cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvbits.measure.caches import EXACT


class Gain(NamedTuple):
    """One measured context.

    Attributes:
        context: tokens.
        exact_ms, scheme_ms: milliseconds that a token takes, steps that pack included by their share.
        noise: how far apart two exact caches were in the same run, as a ratio; 1 is none.
    """

    context: int
    exact_ms: float
    scheme_ms: float
    noise: float = 1.0

    @property
    def saved_ms(self) -> float:
        """Positive where the scheme is faster."""
        return self.exact_ms - self.scheme_ms

    @property
    def verdict(self) -> int:
        """1 where the scheme is faster, -1 where it is slower, 0 where the noise would explain the difference."""
        margin = abs(self.noise - 1) * self.exact_ms
        return (self.saved_ms > margin) - (self.saved_ms < -margin)


class BreakEven(NamedTuple):
    """Where a scheme becomes faster.

    Attributes:
        tokens: of context; None where no crossing was measured.
        words: ``always``, ``never within 8,192``, ``at about 1,200``, ...
    """

    tokens: int | None
    words: str


def break_even(gains: Sequence[Gain]) -> BreakEven:
    """The context from which on a scheme is faster at every longer one that was measured.

    Between two measured contexts the difference of the times is taken to be a straight line, as both times nearly are.
    Where it goes back and forth, or stays within the noise, no number is given.
    """
    gains = sorted(gains)
    if not gains:
        return BreakEven(None, "not measured")
    verdicts = [gain.verdict for gain in gains]
    if not any(verdicts):
        return BreakEven(None, "no difference beyond the noise")
    if 1 not in verdicts:
        return BreakEven(None, f"never within {gains[-1].context:,}")
    if verdicts[-1] != 1:
        last = max(gain.context for gain in gains if gain.verdict == 1)
        return BreakEven(None, f"unclear: faster at {last:,}, not at {gains[-1].context:,}")
    if all(verdict == 1 for verdict in verdicts):
        return BreakEven(None, "always")
    before = max(place for place, verdict in enumerate(verdicts) if verdict != 1)
    low, high = gains[before], gains[before + 1]
    lost = max(0.0, -low.saved_ms)
    tokens = round(low.context + (high.context - low.context) * lost / (lost + high.saved_ms))
    return BreakEven(tokens, f"at about {float(f'{tokens:.2g}'):,.0f}")


GROUP = ("scheme", "weights", "dtype", "batch")
"""What rows have in common that differ in their context alone."""


def with_break_even(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of ``kvbits bench`` with ``break_even`` and ``break_even_tokens``, the same in all rows of a scheme.

    Rows of errors, and those of the exact cache itself, have neither.
    """
    groups: dict[tuple[Any, ...], list[Gain]] = {}
    for row in rows:
        if _compared(row):
            token_ms = 1e3 * row["batch"] / row["decode_tokens_per_second"]
            gain = Gain(row["context"], token_ms * row["speed_against_exact"], token_ms, row["noise"])
            groups.setdefault(_group(row), []).append(gain)
    found = {group: break_even(gains) for group, gains in groups.items()}
    named = (found[_group(row)] if _compared(row) else None for row in rows)
    return [
        dict(row) if own is None else {**row, "break_even": own.words, "break_even_tokens": own.tokens}
        for row, own in zip(rows, named, strict=True)
    ]


def verdicts(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line for each scheme, with its batch and its weights where those differ: ``int4: at about 1,200``."""
    several = [name for name in ("weights", "dtype", "batch") if len({row.get(name) for row in rows}) > 1]
    lines = {}
    for row in rows:
        if "break_even" in row:
            which = "".join(f", {name} {row[name]}" for name in several)
            lines[_group(row)] = f"{row['scheme']}{which}: {row['break_even']}"
    return list(lines.values())


def _compared(row: Mapping[str, Any]) -> bool:
    """Whether a row has a figure against the exact cache, and is not that cache's own."""
    return row.get("speed_against_exact") is not None and row["scheme"] != EXACT


def _group(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in GROUP)
