"""Stop sequences: a text that comes in pieces ends before the first of them, and none of it is shown."""

from __future__ import annotations

from collections.abc import Sequence


class Stops:
    """Passes on a text up to the stop sequence that is complete first.

    What may be the beginning of one is held back until more text decides. How the text is cut into pieces makes no
    difference.

    Args:
        sequences: not empty, any number of them.

    Attributes:
        found: whether one of them has come; nothing is passed on any more.
    """

    def __init__(self, sequences: Sequence[str] = ()) -> None:
        assert all(sequences)
        self.sequences = tuple(sequences)
        self.found = False
        self._held = ""

    def feed(self, text: str) -> str:
        """What can be shown once ``text`` has come."""
        if self.found:
            return ""
        text = self._held + text
        begins = [(text.find(stop), len(stop)) for stop in self.sequences]
        matches = [(begin + length, begin) for begin, length in begins if begin >= 0]
        if matches:
            self.found, self._held = True, ""
            return text[: min(matches)[1]]
        show = len(text) - max((_beginning(stop, text) for stop in self.sequences), default=0)
        self._held = text[show:]
        return text[:show]

    def rest(self) -> str:
        """What was held back, where the text ends."""
        held, self._held = self._held, ""
        return held


def _beginning(stop: str, text: str) -> int:
    """The most characters at the end of ``text`` that ``stop`` begins with."""
    longest = min(len(stop) - 1, len(text))
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
