"""What is refused, in the shape in which OpenAI's clients expect errors."""

from __future__ import annotations

from typing import Any


class Refused(Exception):
    """A request that gets no answer, and why.

    Args:
        message: what was asked, what is allowed, and a near fix.
        status: of HTTP.
        param: the field of the request that is at fault, if one is.
        code: for programs; OpenAI's own where there is one.
        headers: of the response, beside the usual ones.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers

    @property
    def body(self) -> dict[str, Any]:
        """``{"error": {...}}``."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": {name: None if value is None else _sendable(value) for name, value in error.items()}}


def _sendable(text: str) -> str:
    """What was asked may be no text that UTF-8 could send back: half of a surrogate pair."""
    return text.encode(errors="backslashreplace").decode()


def failed() -> Refused:
    """All that a client sees of an error that is not its own."""
    return Refused("the server failed to answer; its log has the reason", 500, code="internal_error")


def stopped() -> Refused:
    """The answer to requests that wait when the server ends."""
    return Refused("the server is shutting down", 503, code="shutting_down")
