"""The queue of requests: first come, first served, so many and no more, by the one thread that runs the model."""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import Protocol

from kvbits.serve.errors import Refused, stopped

log = logging.getLogger("kvbits.serve")

LONGEST_RETRY_SECONDS = 600


class Request(Protocol):
    """A request that waits. Each method lets its client know how it ended."""

    def run(self) -> None: ...

    def refuse(self, why: Refused) -> None:
        """It will not be run, or no longer."""


class RequestQueue:
    """Requests that wait, and the thread of the engine, which takes them one at a time.

    Args:
        limit: requests that may wait, beside the one that runs.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.running: Request | None = None
        self._waiting: dict[Request, None] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._seconds = 1.0  # that a request takes, the last ones above all
        self._thread = threading.Thread(target=self._work, name="kvbits-engine", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """Requests that wait."""
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

    def enter(self, request: Request) -> None:
        """Wait, behind all others.

        Raises:
            Refused: where too many do.
        """
        with self._changed:
            self.refuse_if_full()
            self._waiting[request] = None
            self._changed.notify()

    def leave(self, request: Request) -> None:
        """Wait no longer; harmless for a request that does not."""
        with self._changed:
            self._waiting.pop(request, None)

    def stop(self) -> None:
        """Take no more requests: refuse those that wait, and the one that runs."""
        with self._changed:
            requests = [*self._waiting, *([] if self.running is None else [self.running])]
            self._waiting.clear()
            self._closed = True
            self._changed.notify()
        for request in requests:
            request.refuse(stopped())

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
                request = self.running = next(iter(self._waiting))
                del self._waiting[request]
            start = time.perf_counter()
            try:
                request.run()
            except Exception:  # such as that the event loop is closed
                log.exception("an answer could not be brought to its end")
            self._seconds += 0.2 * (time.perf_counter() - start - self._seconds)
            del request  # with its prompt, before the next one comes
