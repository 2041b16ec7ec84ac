"""``kvbits serve``: an OpenAI-compatible server of one model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from kvbits.cli.common import Calibrated, Device, DType, Model, attempt, err, fail, load
from kvbits.files import load_calibration, refuse_uncalibrated
from kvbits.schemes.catalogue import RECOMMENDED
from kvbits.schemes.scheme import Scheme

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def serve(
    model: Model = "smollm2",
    scheme: Annotated[str, typer.Option("--scheme", "-s", help="The scheme of all caches.")] = RECOMMENDED,
    memory: Annotated[str, typer.Option(help="What all caches together may take, such as 500MB or 4GiB.")] = "4GiB",
    queue: Annotated[int, typer.Option(min=1, help="Requests that may wait; more are refused.")] = 64,
    context: Annotated[
        int | None, typer.Option(min=2, help="Most tokens of prompt and answer; default: as the model was made for.")
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens of a chat answer, where a request does not say.")
    ] = 1024,
    max_body: Annotated[str, typer.Option(help="Most bytes of a request.")] = "4MiB",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="KVBITS_API_KEY", help="Key that requests must bring. Others see options, not variables."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the model for clients; default: from MODEL.")] = None,
    prefix_folder: Annotated[
        Path | None, typer.Option(help="Folder for caches that have no room in memory, and for all of them in the end.")
    ] = None,
    prefix_budget: Annotated[str, typer.Option(help="What that folder may take.")] = "20GiB",
    grace: Annotated[int, typer.Option(min=0, help="Seconds for what is in progress, once asked to stop.")] = 10,
    dtype: DType = "auto",
    device: Device = "cpu",
    calibration: Calibrated = None,
) -> None:
    """Serve a model to OpenAI clients, with a quantized cache for each conversation.

    A prompt that begins as an earlier one did, as the next turn of a conversation does, is read from where they part.
    Requests are answered one at a time, in the order in which they came.
    """
    parsed = attempt(Scheme.parse, scheme)
    if calibration is None:
        attempt(refuse_uncalibrated, parsed)
    else:
        attempt(load_calibration, calibration)
    budget, body = _bytes("--memory", memory), _bytes("--max-body", max_body)
    on_disk = _bytes("--prefix-budget", prefix_budget)
    if api_key is not None and not api_key.strip():
        fail("the API key is empty; give one, or leave out --api-key and KVBITS_API_KEY")
    from kvbits import serve as serving

    attempt(serving.require)
    from kvbits.serve import app, engine, server
    from kvbits.sessions.prefixes import PrefixStore

    cannot = f"cannot listen on {host} port {port}: "
    bound = attempt(server.bind, host, port, what=cannot)
    if not server.is_loopback(host) and api_key is None:
        err.print(f"warning: whoever can reach {host} can use this server; give an --api-key", markup=False)
    loaded, tokenizer = load(model, dtype, device)
    folder = None
    if prefix_folder is not None:
        folder = attempt(PrefixStore, prefix_folder, on_disk, loaded, parsed, calibration=calibration)
    ready = attempt(engine.Engine, loaded, parsed, budget, calibration, context, folder)
    name = name or _friendly(model)
    shared = attempt(server.serving, ready, tokenizer, name, queue, max_tokens)
    attempt(bound.listen, what=cannot)  # another server may have had the address as well, and been ready before
    address = f"http://{f'[{host}]' if ':' in host else host}:{bound.getsockname()[1]}"
    err.print(
        f"{name} under {parsed} at {address}/v1\n{budget:,} bytes for caches: one of {ready.room_tokens:,} tokens, "
        f"or {budget // ready.sizes.at(min(1024, ready.room_tokens)):,} of {min(1024, ready.room_tokens):,}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    server.Server(app.application(shared, api_key, body), shared.queue, grace).run(sockets=[bound])


def _bytes(option: str, text: str) -> int:
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", text, re.IGNORECASE)
    if found is None or found[2].lower() not in _UNITS:
        fail(f"{option} {text!r} is no size; allowed are a number and one of B, kB, MB, GB, TB, KiB, MiB, GiB, TiB")
    size = int(float(found[1]) * _UNITS[found[2].lower()])
    return size if size > 0 else fail(f"{option} {text!r} must be more than 0")


def _friendly(model: str) -> str:
    """The hub id, or the last part of a path."""
    path = Path(model)
    if path.suffix == ".gguf":
        return path.stem
    return path.resolve().name if path.is_dir() else model
