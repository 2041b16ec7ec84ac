"""An axis: where a value lies in pixels, and which values to write at it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """Values ``low`` to ``high`` on pixels ``start`` to ``end``, evenly or (``log``) by their logarithm."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    @classmethod
    def around(
        cls, values: Iterable[float], start: float, end: float, log: bool = False, margin: float = 0.06
    ) -> Scale:
        """One with room for all of some values (positive ones, with ``log``), and a margin, as a share of the range."""
        found = [math.log(value) if log else value for value in values]
        low, high = min(found, default=0.0), max(found, default=1.0)
        room = margin * (high - low) or (0.5 if log else 0.1 * abs(high) or 0.5)
        low, high = low - room, high + room
        return cls(math.exp(low), math.exp(high), start, end, True) if log else cls(low, high, start, end)

    def __call__(self, value: float) -> float:
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        share = ((math.log(value) if self.log else value) - low) / (high - low)
        return self.start + share * (self.end - self.start)

    def ticks(self, most: int = 7) -> list[float]:
        """Round values inside, at the most this many: such as 1, 2 and 5 with zeros, powers of ten, or even steps."""
        if self.log:
            for steps in ((1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
                found = self._decades(steps, 1)
                if 2 <= len(found) <= most:
                    return found
            for every in range(2, 20):
                found = self._decades((1,), every)
                if 2 <= len(found) <= most:
                    return found
        return self._even(most)

    def _decades(self, steps: tuple[float, ...], every: int) -> list[float]:
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        powers = [power for power in range(first, last + 1) if power % every == 0]
        return [x for power in powers for step in steps if self.low <= (x := float(f"{step}e{power}")) <= self.high]

    def _even(self, most: int) -> list[float]:
        rough = (self.high - self.low) / most
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough)
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        return [float(f"{place * step:.12g}") for place in range(first, last + 1)]
