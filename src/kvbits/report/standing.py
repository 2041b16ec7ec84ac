"""What is known of each scheme of a model, out of the main run of each kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvbits.measure.retrieval import wilson
from kvbits.report.merge import Measured, Row, Run
from kvbits.report.words import real

EXACT = ("hf:dynamic", "exact")
"""Schemes that quantize nothing: what the others are compared with."""

COMBINATION = ("weights", "dtype", "batch")
"""What rows of speed have besides their scheme and context."""


@dataclass(frozen=True)
class Standing:
    """One scheme. None where something was not measured.

    Attributes:
        exact: whether it quantizes nothing.
        quality: its row.
        bits: per element of K and V, everything stored.
        speed_row: its row at the longest context that has a speed, in the main combination of the run of speed.
        timed: whether the main run of speed has a figure of it.
        found, found_exact: accuracy of retrieval, and that of the exact cache in the same cells.
        found_most: what it may be, by the 95 % interval of as many prompts.
        compared: its rows of tasks that were tested against the exact cache.
        failures: kinds that failed, each with the reason.
        warnings: what measuring its quality and speed warned of.
        failed: conditions of the rule that it does not keep (KL, token, speed, retrieval, tasks), with figures.
        lost: tasks that the rule calls lost, of those compared.
        front: whether no other scheme has both fewer bits and a lower KL.
    """

    scheme: str
    exact: bool
    quality: Row | None = None
    bits: float | None = None
    speed_row: Row | None = None
    timed: bool = False
    found: float | None = None
    found_exact: float | None = None
    found_most: float | None = None
    compared: tuple[Row, ...] = ()
    failures: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)
    lost: tuple[str, ...] = ()
    front: bool = False

    @property
    def kl(self) -> float | None:
        """Mean KL divergence to the exact cache, nats."""
        return real(self.quality, "kl_mean")

    @property
    def top1(self) -> float | None:
        """Share of tokens whose likeliest next one is that of the exact cache."""
        return real(self.quality, "top1")

    @property
    def speed(self) -> float | None:
        """Of decoding, against the exact cache."""
        return real(self.speed_row, "speed_against_exact")

    @property
    def reasons(self) -> list[str]:
        """What speaks against it."""
        return list(self.failed.values())

    @property
    def point(self) -> tuple[float, float] | None:
        """Bits and KL, where both are known: its place in the picture."""
        return None if self.exact or self.bits is None or self.kl is None else (self.bits, self.kl)

    @property
    def measured(self) -> set[str]:
        """Kinds that say something of it."""
        known = {"quality": self.quality, "speed": self.speed, "retrieval": self.found, "tasks": self.compared or None}
        return {kind for kind, value in known.items() if value is not None}


def standings(measured: Measured, bits: str) -> list[Standing]:
    """All schemes that any main run names. ``bits`` is the field of rows of quality that bits are taken from."""
    quality, speed, retrieval, tasks = map(measured.main, ("quality", "speed", "retrieval", "tasks"))
    runs = [run for run in (quality, speed, retrieval, tasks) if run]
    best = {row["scheme"]: row for row in _figures(quality) if not one_shot(row)}
    fastest, timed = _longest(speed), {row["scheme"] for row in _figures(speed)}
    found, compared = _accuracies(retrieval), _compared(tasks)
    failures: dict[str, dict[str, None]] = {}
    for run in runs:
        for row in run.failures:
            failures.setdefault(row["scheme"], {})[f"{run.kind}: {row['error']}"] = None
    every = []
    for scheme in dict.fromkeys(row["scheme"] for run in runs for row in run.rows):
        rows = (best.get(scheme), fastest.get(scheme))
        share, share_exact, most = found.get(scheme, (None, None, None))
        one = Standing(
            scheme, scheme in EXACT, quality=rows[0], bits=_bits(scheme, rows[0], bits), speed_row=rows[1],
            timed=scheme in timed, found=share, found_exact=share_exact, found_most=most,
            compared=compared.get(scheme, ()),
            failures=tuple(failures.get(scheme, ())),
            warnings=tuple(dict.fromkeys(text for row in rows for text in warnings_of(row))),
        )  # fmt: skip
        every.append(one)
    return every


LONG, MEASURED = "bits_at_8000", "bits_per_element"
"""Fields of bits: after 8,000 tokens, where exact ones count 16 bits, and of the windows that were measured."""


def bits_field(run: Run | None) -> str:
    """Bits at 8,000 tokens, if at least half of the schemes that quantize have them, else those that were measured."""
    rows = [row for row in _figures(run) if row["scheme"] not in EXACT and not one_shot(row)]
    long = sum(row.get(LONG) is not None for row in rows)
    return LONG if rows and 2 * long >= len(rows) else MEASURED


def _bits(scheme: str, row: Row | None, field: str) -> float | None:
    """Of a row of quality. A long exact cache has 16 bits by the definition of the field, whatever its dtype."""
    bits = real(row, field)
    return 16.0 if bits is None and row is not None and field == LONG and scheme in EXACT else bits


def one_shot(row: Row) -> bool:
    """Whether a row of quality is of the regime in which the whole text is one chunk, and most of it meets no bits."""
    return "one" in str(row.get("regime") or "")


def warnings_of(row: Row | None) -> tuple[str, ...]:
    """The warnings of a row, which may be a text, a list, or missing."""
    found = row.get("warnings") if row else None
    return tuple(map(str, found)) if isinstance(found, list) else (str(found),) if found else ()


def combination(run: Run | None) -> dict[str, object]:
    """The weights, dtype and batch of which a run of speed has the most rows; of the smallest batch where some tie."""
    counts = Counter(tuple(row.get(name) for name in COMBINATION) for row in _figures(run))
    if not counts:
        return {}
    most = max(counts.values())
    best = min((key for key in counts if counts[key] == most), key=lambda key: float(key[2] or 0))
    return dict(zip(COMBINATION, best, strict=True))


def _figures(run: Run | None) -> list[Row]:
    return run.figures if run else []


def _longest(run: Run | None) -> dict[str, Row]:
    """Of each scheme, the row of the longest context that has a speed, in the main combination."""
    wanted = combination(run)
    found: dict[str, Row] = {}
    for row in sorted(_figures(run), key=lambda row: float(row.get("context") or 0)):
        if all(row.get(name) == value for name, value in wanted.items()) and row.get("speed_against_exact") is not None:
            found[row["scheme"]] = row
    return found


def _accuracies(run: Run | None) -> dict[str, tuple[float, float | None, float]]:
    """Of each scheme the mean accuracy over the cells that the exact cache has too, that of the exact cache there, and
    the most that the scheme's may be.

    Where the exact cache has none of its cells, the mean over all of them, and None.
    """
    cells: dict[str, dict[tuple[object, ...], float]] = {}
    prompts: dict[tuple[str, tuple[object, ...]], int] = {}
    for row in _figures(run):
        if row.get("accuracy") is not None:
            place = tuple(row.get(name) for name in ("task", "length", "depth"))
            cells.setdefault(row["scheme"], {})[place] = float(row["accuracy"])
            prompts[row["scheme"], place] = int(row.get("repeats") or 0)
    exact = next((cells[name] for name in EXACT if name in cells), {})
    found: dict[str, tuple[float, float | None, float]] = {}
    for scheme, mine in cells.items():
        shared = [place for place in mine if place in exact] or list(mine)
        mean = sum(mine[place] for place in shared) / len(shared)
        known = shared[0] in exact
        asked = sum(prompts[scheme, place] for place in shared)
        most = wilson(round(mean * asked), asked)[1] if asked else mean
        found[scheme] = (mean, sum(exact[place] for place in shared) / len(shared) if known else None, most)
    return found


def _compared(run: Run | None) -> dict[str, tuple[Row, ...]]:
    found: dict[str, tuple[Row, ...]] = {}
    for row in _figures(run):
        if row.get("p_value") is not None:
            found[row["scheme"]] = (*found.get(row["scheme"], ()), row)
    return found
