"""Which scheme to take: a rule, and what it makes of what was measured of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvbits.measure.results import KINDS
from kvbits.report import words
from kvbits.report.merge import Measured, Run
from kvbits.report.standing import Standing, bits_field, standings


@dataclass(frozen=True)
class Rule:
    """The fewest bits among schemes that keep these limits. What was not measured does not count against a scheme.

    Attributes:
        max_kl: the mean KL divergence to the exact cache, in nats.
        min_top1: the share of tokens for which the likeliest next one is that of the exact cache.
        min_speed: decode speed against the exact cache, at the longest context that was measured.
        max_lost: of retrieval, the accuracy that may be lost against the exact cache, as a share.
        significance: a task is lost where McNemar's test against the exact cache gives a p below this.
        loose_kl, loose_top1: the limits of the scheme that is named where memory is scarce.
    """

    max_kl: float = 0.01
    min_top1: float = 0.97
    min_speed: float = 0.95
    max_lost: float = 0.05
    significance: float = 0.01
    loose_kl: float = 0.05
    loose_top1: float = 0.90

    def __post_init__(self) -> None:
        for name, low, high in (("max_kl", 0, None), ("min_top1", 0, 1), ("min_speed", 0, None), ("max_lost", 0, 1)):
            value = getattr(self, name)
            if not low <= value <= (float("inf") if high is None else high):
                allowed = f"at least {low}" if high is None else f"between {low} and {high}"
                raise ValueError(
                    f"{name}={value} is {'no limit' if value != value else 'out of range'}; give {allowed}"
                )

    @property
    def conditions(self) -> list[str]:
        """The rule in words, one condition each."""
        return [
            f"mean KL to the exact cache at most {self.max_kl:g} nats",
            f"the same likeliest token at least {words.percent(self.min_top1, 0)} of the time",
            f"decoding at least {self.min_speed:g}× as fast as the exact cache, at the longest context measured",
            f"retrieval at most {100 * self.max_lost:g} points below the exact cache (95 % interval)",
            f"no task lost to the exact cache (McNemar, p < {self.significance:g})",
        ]


@dataclass(frozen=True)
class Choice:
    """What the rule makes of one model.

    Attributes:
        standings: all schemes, the exact ones first, then by bits.
        bits_field: the field that bits are from.
        take: the scheme to take, or None where none can be named; ``why`` says why.
        closest: the one nearest to the exact cache.
        smallest: the one of the fewest bits within the loose limits.
        caveats: what a reader must know of ``take``, or of ``closest`` where there is none.
        missing: kinds that were not measured for ``take``, or at all.
    """

    standings: list[Standing]
    bits_field: str
    take: Standing | None = None
    closest: Standing | None = None
    smallest: Standing | None = None
    why: str = ""
    caveats: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def exact(self) -> Standing | None:
        """The exact cache, with its quality if that was measured."""
        found = [one for one in self.standings if one.exact]
        return next((one for one in found if one.quality), found[0] if found else None)

    def of(self, scheme: str) -> Standing:
        """What is known of a scheme."""
        return next(one for one in self.standings if one.scheme == scheme)


def choose(measured: Measured, rule: Rule, bits: str | None = None) -> Choice:
    """Apply the rule to what was measured of one model. ``bits`` is the field to take bits from, if not the best."""
    quality = measured.main("quality")
    bits = bits or bits_field(quality)
    every = _with_front([_judged(one, rule) for one in standings(measured, bits)])
    every.sort(key=lambda one: (not one.exact, one.bits is None, one.bits or 0.0, one.scheme))
    choice = Choice(every, bits)
    candidates = [one for one in every if one.point is not None]
    if not candidates:
        missing = [kind for kind in KINDS if kind not in measured.runs]
        return replace(choice, why=_why_none(quality, every), missing=missing)
    slow = [one for one in candidates if set(one.failed) == {"speed"}]
    take = _fewest([one for one in candidates if not one.failed]) or _fewest(slow)
    closest = min(candidates, key=lambda one: (one.kl or 0.0, one.bits or 0.0))
    smallest = _fewest([one for one in candidates if _within(one, rule.loose_kl, rule.loose_top1)])
    why = "" if take else f"No scheme keeps the rule. The closest is {closest.scheme}: {'; '.join(closest.reasons)}."
    missing = [kind for kind in KINDS if kind not in (take or closest).measured]
    return replace(
        choice,
        take=take,
        closest=closest,
        smallest=smallest,
        why=why,
        caveats=[*_caveats(take or closest, take is not None), *_left_out(measured)],
        missing=missing,
    )


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Places of the points that no other beats: none is as low in both coordinates and lower in one. By the first."""
    best = float("inf")
    found: list[int] = []
    for place in sorted(range(len(points)), key=lambda place: points[place]):
        if points[place][1] < best or (found and points[place] == points[found[-1]]):
            best = points[place][1]
            found.append(place)
    return found


def _with_front(every: list[Standing]) -> list[Standing]:
    points = [(place, one.point) for place, one in enumerate(every)]
    known = [(place, point) for place, point in points if point is not None]
    best = {known[place][0] for place in front([point for _, point in known])}
    return [replace(one, front=place in best) for place, one in enumerate(every)]


def _judged(one: Standing, rule: Rule) -> Standing:
    """The same with the conditions that it does not keep."""
    if one.exact:
        return one
    failed = {}
    if one.kl is not None and one.kl > rule.max_kl:
        failed["KL"] = f"KL {words.small(one.kl)} > {rule.max_kl:g}"
    if one.top1 is not None and one.top1 < rule.min_top1:
        failed["token"] = f"same token {words.percent(one.top1)} < {words.percent(rule.min_top1, 0)}"
    if one.speed is not None and one.speed < rule.min_speed:
        failed["speed"] = f"decodes at {words.times(one.speed)}"
    if one.found_most is not None and one.found_exact is not None and one.found_exact - one.found_most > rule.max_lost:
        failed["retrieval"] = f"retrieval {words.percent(one.found, 0)} (exact {words.percent(one.found_exact, 0)})"
    lost = tuple(
        f"{row.get('task')} (p = {words.chance(words.real(row, 'p_value'))})"
        for row in one.compared
        if row["p_value"] < rule.significance and (row.get("losses") or 0) > (row.get("wins") or 0)
    )
    if lost:
        failed["tasks"] = f"loses {words.listed(list(lost))}"
    return replace(one, failed=failed, lost=lost)


def _fewest(every: list[Standing]) -> Standing | None:
    """The one of the fewest bits; those that were measured without a warning come first."""
    return min(every, key=lambda one: (bool(one.warnings), one.bits or 0.0, one.kl or 0.0), default=None)


def _within(one: Standing, kl: float, top1: float) -> bool:
    return one.kl is not None and one.kl <= kl and (one.top1 is None or one.top1 >= top1)


def _caveats(shown: Standing, taken: bool) -> list[str]:
    slow = f"None that is close enough is as fast as the rule asks; this one is at {words.times(shown.speed)}."
    warned = [f"Measured with a warning: {text}" for text in shown.warnings]
    return [slow, *warned] if taken and shown.failed else warned


def _left_out(measured: Measured) -> list[str]:
    """Schemes whose quality is known from other runs alone, which cannot be compared with that of the main one."""
    main, *others = [{row["scheme"] for row in run.figures} for run in measured.runs["quality"]]
    left = dict.fromkeys(scheme for run in others for scheme in sorted(run - main))
    return [
        f"Not in the choice, since measured on another text or in another setting: {words.listed(list(left))}."
    ] * bool(left)


def _why_none(quality: Run | None, standings: list[Standing]) -> str:
    if quality is None:
        return "Quality was not measured, so no scheme can be named."
    if any(one.failures for one in standings if not one.exact):
        return "No scheme has figures of quality: all failed, or were not measured."
    if standings and all(one.exact for one in standings):
        return "Only the exact cache was measured."
    return "No scheme has both its KL and its bits measured."
