"""Paired tests: whether a scheme answers the same questions worse than the exact cache does.

Two accuracies with a standard error of 2 % each say little of a scheme that changes one answer in a hundred. The
questions are the same, so only the ones count where the two differ: McNemar's test, in its exact form (a binomial test
on those; McNemar 1947, Psychometrika 12). Where answers are graded rather than right or wrong, it is the sign test.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvbits.measure.caches import EXACT, is_exact

Scores = str | list[float]
"""One for each sample, more is better: a string of 0 and 1 for wrong and right, else numbers."""


class Paired(NamedTuple):
    """One scheme beside another.

    Attributes:
        wins, losses: samples on which the scheme is better, and worse.
        p_value: how likely at least so large a difference between them is, were both equally good; two-sided.
    """

    wins: int
    losses: int
    p_value: float


def paired(scores: Scores, others: Scores) -> Paired:
    """The paired test of ``scores`` beside ``others``, of the same samples in the same order.

    Raises:
        ValueError: if they are not of as many samples.
    """
    if len(scores) != len(others):
        raise ValueError(f"paired tests need the same samples; there are {len(scores)} and {len(others)}")
    from scipy.stats import binomtest

    pairs = list(zip([float(one) for one in scores], [float(one) for one in others], strict=True))
    wins, losses = sum(one > other for one, other in pairs), sum(one < other for one, other in pairs)
    p_value = float(binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0
    return Paired(wins, losses, p_value)


def pair_rows(rows: Sequence[dict[str, Any]]) -> None:
    """Put ``wins``, ``losses`` and ``p_value`` into each row whose samples an exact cache has answered too.

    kvbits' exact cache comes before Transformers' where there are both. Rows are of the same samples where ``task``,
    ``metric`` and ``sample_hash`` agree, so rows of several runs may stand together.
    """
    exact: dict[tuple[Any, ...], dict[str, Any]] = {}
    scored = [row for row in rows if row.get("scores") is not None and row.get("sample_hash")]
    for row in sorted(scored, key=lambda row: row["scheme"] == EXACT):
        if is_exact(row["scheme"]):
            exact.setdefault(_same(row), row)
    for row in scored:
        beside = exact.get(_same(row))
        if beside is None or beside is row:
            continue
        row.update(paired(row["scores"], beside["scores"])._asdict())


def _same(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["task"], row["metric"], row["sample_hash"]
