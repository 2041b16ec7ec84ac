"""The line of requests: first come, first served, so many and no more, by the one thread that runs the model."""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import Protocol

from kvbits.serve.errors import Refused, stopped

log = logging.getLogger("kvbits.serve")

LONGEST_RETRY_SECONDS = 600


class Turn(Protocol):
    """What waits. Each method tells whoever waits for it how it ended."""

    def run(self) -> None: ...

    def refuse(self, why: Refused) -> None:
        """It will not be run, or no longer."""


class Line:
    """Shards that wait, and the thread that takes them one at a time.

    Args:
        limit: turns that may wait, beside the one that runs.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.running: Turn | None = None
        self._waiting: dict[Turn, None] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._seconds = 1.0  # that a turn takes, the last ones above all
        self._thread = threading.Thread(target=self._work, name="kvbits-engine", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """Shards that wait."""
        return len(self._waiting)

    def refuse_if_full(self) -> None:
        """Raise :class:`Refused`, with the seconds after which to try again, where no more may wait."""
        if self._closed:
            raise stopped()
        if len(self._waiting) >= self.limit:
            seconds = min(LONGEST_RETRY_SECONDS, math.ceil(self._seconds * self.limit))
            raise Refused(
                f"{self.limit} requests are waiting, which is as many as may; try again in {seconds} seconds",
                503,
                code="overloaded",
                headers={"Retry-After": str(seconds)},
            )

    def enter(self, turn: Turn) -> None:
        """Wait, behind all others.

        Raises:
            Refused: where too many do.
        """
        with self._changed:
            self.refuse_if_full()
            self._waiting[turn] = None
            self._changed.notify()

    def leave(self, turn: Turn) -> None:
        """Wait no longer; harmless for a turn that does not."""
        with self._changed:
            self._waiting.pop(turn, None)

    def stop(self) -> None:
        """Take no more turns: refuse those that wait, and the one that runs."""
        with self._changed:
            turns = [*self._waiting, *([] if self.running is None else [self.running])]
            self._waiting.clear()
            self._closed = True
            self._changed.notify()
        for turn in turns:
            turn.refuse(stopped())

    def join(self, seconds: float) -> None:
        """Once stopped, wait so long for the one that runs."""
        self._thread.join(seconds)

    def _work(self) -> None:
        while True:
            with self._changed:
                self.running = None
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                turn = self.running = next(iter(self._waiting))
                del self._waiting[turn]
            start = time.perf_counter()
            try:
                turn.run()
            except Exception:  # such as that the event loop is closed
                log.exception("a request could not be told of its end")
            self._seconds += 0.2 * (time.perf_counter() - start - self._seconds)
            del turn  # with its prompt, before the next one comes
