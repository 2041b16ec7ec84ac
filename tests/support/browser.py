"""A headless Chromium for tests of HTML pages, driven over its DevTools pipe: no package, no port, no driver.

::

    from browser import Page

    with Page() as page:  # skips the test where no browser is installed
        page.open(tmp_path / "index.html")
        page.click("th")
        page.set("#context", 8192)  # and tells the page, as typing or sliding would
        assert page.evaluate("document.title") == "..."
        assert page.errors == [] and page.requests == [(tmp_path / "index.html").as_uri()]

The fixture ``tab`` of ``conftest.py`` is the same, as an argument of a test. Names that a page looks up lead nowhere,
so a page that asks for something outside is found out, and gets nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
TIMEOUT = 60.0
"""Seconds that the browser may take to answer; a busy machine starts it in ten."""

FLAGS = (
    "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
    "--disable-extensions", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--no-first-run", "--no-default-browser-check", "--hide-scrollbars", "--host-resolver-rules=MAP * ~NOTFOUND",
)  # fmt: skip


_RENUMBER = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def browser() -> str | None:
    """The path of a Chromium or Chrome on this machine."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One tab of one browser, 1280 x 900 at first. What it reports is complete as of the last call.

    Attributes:
        errors: what the page wrote to the console as an error or a warning, and exceptions that nothing caught.
        requests: addresses that the page asked for, its own first; ``data:`` is none.
    """

    def __init__(self) -> None:
        program = browser()
        if program is None:
            pytest.skip(f"no browser: none of {', '.join(NAMES)} is on the PATH")
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._loaded, self._scripts = False, True
        self._count = 0
        self._buffer = b""
        self._answers: dict[int, dict[str, Any]] = {}
        self._session: str | None = None
        self._profile = tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True)
        self._start([program, *FLAGS, f"--user-data-dir={self._profile.name}", "about:blank"])
        try:
            tab = next(x for x in self._call("Target.getTargets")["targetInfos"] if x["type"] == "page")
            attached = self._call("Target.attachToTarget", targetId=tab["targetId"], flatten=True)
            self._session = attached["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self._call(f"{domain}.enable")
            self.resize(1280, 900)
        except BaseException:
            self.close()
            raise

    def open(self, path: str | Path) -> None:
        """Load a file, and wait until it and what it asks for are there. Forgets errors and requests of the last."""
        self.errors.clear()
        self.requests.clear()
        self._loaded = False
        self._call("Page.navigate", url=Path(path).resolve().as_uri())
        end = time.monotonic() + TIMEOUT
        while not self._loaded:
            self._read(end)
        self.settle()

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, as JSON brings it over; a promise is awaited."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression}: {_described(found['exceptionDetails'])}")
        return found["result"].get("value")

    def click(self, selector: str) -> None:
        """Press the mouse in the middle of the first element that a CSS selector finds, scrolled into view."""
        x, y = self._within(selector, "x.scrollIntoView({block: 'center', behavior: 'instant'})")
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            button = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
            self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button)
        self.settle()

    def set(self, selector: str, value: Any) -> None:
        """Give an input, a select or a check box (True, False) its value, with the events that a hand would cause."""
        field = "checked" if isinstance(value, bool) else "value"
        events = "for (const kind of ['input', 'change']) x.dispatchEvent(new Event(kind, {bubbles: true}))"
        self._within(selector, f"x.{field} = {json.dumps(value)}; {events}")
        self.settle()

    def resize(self, width: int, height: int) -> None:
        """The size of the window, in CSS pixels."""
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def prefer(self, scheme: str = "light", medium: str = "screen") -> None:
        """``light`` or ``dark``, on a ``screen`` or in ``print``."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._call("Emulation.setEmulatedMedia", media=medium, features=features)

    def scripting(self, on: bool) -> None:
        """Whether the next page may run scripts of its own; :meth:`evaluate` always may."""
        self._scripts = on
        self._call("Emulation.setScriptExecutionDisabled", value=not on)

    def settle(self) -> None:
        """Wait for two frames, so that what the page does after an event is done and what it reports is here."""
        if self._scripts:  # else no frame calls back
            self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))")

    def close(self) -> None:
        """End the browser, which is in a process group of its own."""
        for end in (self._to, self._from):
            with contextlib.suppress(OSError):
                os.close(end)  # the browser takes the end of its pipe as the end of its work
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._profile.cleanup()

    def __enter__(self) -> Page:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- the pipe: JSON messages that end in a zero byte, to file descriptor 3 of the browser and from its 4 -----------

    def _start(self, command: Sequence[str]) -> None:
        there, self._to = os.pipe()
        self._from, back = os.pipe()
        # Out of the way of 3 and 4, which a process of its own gives them: a function that Popen calls between fork and
        # exec could hang a parent that has threads.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (there, back)]
        words = [sys.executable, "-S", "-E", "-c", _RENUMBER, *map(str, ends), *command]
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(
            words, stdin=quiet, stdout=quiet, stderr=quiet, pass_fds=ends, start_new_session=True
        )
        for end in (there, back, *ends):
            os.close(end)

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._count += 1
        number = self._count
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        rest = json.dumps(message).encode() + b"\0"
        while rest:
            rest = rest[os.write(self._to, rest) :]
        end = time.monotonic() + TIMEOUT
        while number not in self._answers:
            self._read(end)
        answer = self._answers.pop(number)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return dict(answer["result"])

    def _read(self, end: float) -> None:
        """Take what has come, or wait for it."""
        if not select.select([self._from], [], [], max(0.0, end - time.monotonic()))[0]:
            raise TimeoutError(f"the browser has not answered for {TIMEOUT:.0f} s")
        piece = os.read(self._from, 2**16)
        if not piece:
            raise RuntimeError(f"the browser has ended, with status {self._process.wait(TIMEOUT)}")
        *messages, self._buffer = (self._buffer + piece).split(b"\0")
        for message in map(json.loads, messages):
            if "id" in message:
                self._answers[message["id"]] = message
            else:
                self._note(message["method"], message["params"])

    def _note(self, event: str, about: dict[str, Any]) -> None:
        if event == "Page.loadEventFired":
            self._loaded = True
        elif event == "Network.requestWillBeSent" and not about["request"]["url"].startswith("data:"):
            self.requests.append(about["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.errors.append(_described(about["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert"):
            self.errors.append(" ".join(str(x.get("value", x.get("description"))) for x in about["args"]))
        elif event == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.errors.append(about["entry"]["text"])

    def _within(self, selector: str, action: str) -> tuple[float, float]:
        """Do something with the element ``x``; where its middle is afterwards."""
        found = self.evaluate(
            f"""(() => {{
                const x = document.querySelector({json.dumps(selector)});
                if (!x) return null;
                {action};
                const box = x.getBoundingClientRect();
                return [box.left + box.width / 2, box.top + box.height / 2];
            }})()"""
        )
        if found is None:
            raise LookupError(f"nothing on the page is {selector}")
        return found[0], found[1]


def _described(details: dict[str, Any]) -> str:
    return str(details.get("exception", {}).get("description") or details["text"])
