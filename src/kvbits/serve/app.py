"""The application: routes, and what stands before all of them: a key, a limit on the body, and errors as JSON."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from kvbits.serve.errors import Refused, failed
from kvbits.serve.handlers import Chat, Serving, Text

BODY_SECONDS = 30
"""How long a body may take to arrive."""

CANCEL_SECONDS = 10
"""How long one layer of the model may take to notice that it is not wanted any more."""

_GONE = 499
"""What logs and metrics call a client that did not wait for its answer."""

PATHS = ("/health", "/metrics", "/v1/models", "/v1/chat/completions", "/v1/completions")


def application(serving: Serving, api_key: str | None, body_bytes: int) -> FastAPI:
    """The ASGI application of one model.

    Args:
        serving: the model, and the queue before it.
        api_key: that every request but ``/health`` must bring as a bearer token; None: none.
        body_bytes: of a request at most.
    """
    created = int(time.time())

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        serving.queue.stop()
        await asyncio.to_thread(serving.queue.join, CANCEL_SECONDS)
        await asyncio.to_thread(serving.engine.pool.save)

    # Documentation pages would load scripts from elsewhere.
    app = FastAPI(title="kvbits", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(_Counted, serving=serving)
    app.add_exception_handler(Refused, _refused)
    app.add_exception_handler(HTTPException, _unknown)
    app.add_exception_handler(ClientDisconnect, _left)
    app.add_exception_handler(Exception, _failed)

    async def answer(kind: type[Chat] | type[Text], prefix: str, request: Request) -> Response:
        authorize(request, api_key)
        serving.queue.refuse_if_full()  # before a body is read, and again once it has become tokens
        handler = kind(serving, await read(request, body_bytes), f"{prefix}-{uuid.uuid4().hex}")
        return await unless_gone(request, handler.answer())

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await answer(Chat, "chatcmpl", request)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await answer(Text, "cmpl", request)

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        authorize(request, api_key)
        return JSONResponse({"object": "list", "data": [model]})

    @app.get("/v1/models/{name:path}")
    async def one_model(request: Request, name: str) -> Response:
        authorize(request, api_key)
        serving.refuse_unless_served(name)
        return JSONResponse(model)

    model = {"id": serving.name, "object": "model", "created": created, "owned_by": "kvbits"}

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        authorize(request, api_key)
        return Response(serving.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    return app


def authorize(request: Request, key: str | None) -> None:
    """Refuse a request that does not bring the key."""
    if key is None:
        return
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    if kind.lower() != "bearer" or not hmac.compare_digest(given.strip().encode("latin-1"), key.encode()):
        raise Refused(
            "this server needs its key: send the header 'Authorization: Bearer KEY'",
            401,
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


async def read(request: Request, most_bytes: int) -> dict[str, Any]:
    """The JSON object in the body of a request."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # which also keeps out pages in a browser: for this type it asks first
        raise Refused(f"the content type is {kind!r}; send application/json", 415)
    too_large = Refused(f"the body is larger than the {most_bytes:,} bytes that are read", 413, code="body_too_large")
    with contextlib.suppress(ValueError):
        if int(request.headers.get("content-length", 0)) > most_bytes:
            raise too_large
    body = bytearray()

    async def collect() -> None:
        async for piece in request.stream():
            body.extend(piece)
            if len(body) > most_bytes:
                raise too_large

    try:
        await asyncio.wait_for(collect(), BODY_SECONDS)
    except asyncio.TimeoutError:  # not the built-in one before Python 3.11
        raise Refused(f"the body did not arrive within {BODY_SECONDS} seconds", 408) from None
    try:
        data = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise Refused(f"the body is no JSON: {error}", code="invalid_json") from None
    if not isinstance(data, dict):
        raise Refused(f"the body is no JSON object, but {type(data).__name__}", code="invalid_json")
    return data


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number in JSON")


async def unless_gone(request: Request, answer: Any) -> Response:
    """Wait for an answer as long as the client does."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, waiting = asyncio.ensure_future(answer), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else await _left()
    finally:
        for task in (working, waiting):
            task.cancel()
        await asyncio.gather(working, waiting, return_exceptions=True)


async def _refused(_: Request, error: Any) -> Response:
    return JSONResponse(error.body, error.status, headers=error.headers)


async def _unknown(request: Request, error: Any) -> Response:
    message = f"there is no {request.method} {request.url.path} here; known are {', '.join(PATHS)}"
    return await _refused(request, Refused(message, error.status_code, code="unknown_url", headers=error.headers))


async def _left(*_: Any) -> Response:
    return Response(status_code=_GONE)


async def _failed(request: Request, _: Exception) -> Response:
    return await _refused(request, failed())


class _Counted:
    """ASGI middleware: counts responses by path and status."""

    def __init__(self, app: Any, serving: Serving) -> None:
        self.app, self.serving = app, serving

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = _GONE

        async def note(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, note)
        except Exception:  # which those outside of this one answer
            status = 500 if status == _GONE else status
            raise
        finally:
            path = scope["path"] if scope["path"] in PATHS else "other"
            self.serving.metrics.requests.labels(path, str(status)).inc()
