"""From a model to a server that listens, and to its end."""

from __future__ import annotations

import asyncio
import ipaddress
import math
import socket
import sys
from typing import Any

import uvicorn
from transformers import PreTrainedTokenizerBase

from kvbits.serve.app import CANCEL_SECONDS
from kvbits.serve.engine import Engine
from kvbits.serve.handlers import Serving
from kvbits.serve.metrics import Metrics
from kvbits.serve.queue import RequestQueue


def serving(engine: Engine, tokenizer: PreTrainedTokenizerBase, name: str, limit: int, answer_tokens: int) -> Serving:
    """All that the requests of one model share.

    Raises:
        ValueError: if the tokenizer is not one of the fast kind, which alone can decode token by token.
    """
    if not tokenizer.is_fast:
        raise ValueError(
            f"{type(tokenizer).__name__} is a slow tokenizer; the model needs a tokenizer.json to be served"
        )
    queue = RequestQueue(limit)
    return Serving(engine, tokenizer, name, queue, Metrics(queue, engine.pool), answer_tokens)


def bind(host: str, port: int) -> socket.socket:
    """A socket with an address, which does not listen yet; port 0 takes a free one. Raises OSError where it cannot."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        if sys.platform != "win32":  # there it would share the port with another server
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Server(uvicorn.Server):
    """A server that lets requests go on for some seconds once it is to end, and then tells the rest that it does."""

    def __init__(self, app: Any, queue: RequestQueue, grace_seconds: float, log_level: str = "warning") -> None:
        longest = math.ceil(grace_seconds + CANCEL_SECONDS)
        super().__init__(uvicorn.Config(app, log_level=log_level, timeout_graceful_shutdown=longest, lifespan="on"))
        self.queue, self.grace_seconds = queue, grace_seconds

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Called on SIGINT and SIGTERM."""
        last = asyncio.get_running_loop().call_later(self.grace_seconds, self.queue.stop)
        await super().shutdown(sockets)
        last.cancel()
