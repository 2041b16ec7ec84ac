"""A tiny model with a tokenizer of words and a chat template, and servers of it on free ports."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import zoo

SPECIAL = ("<pad>", "<end>", "<system>", "<user>", "<assistant>", "<tool>")
WORDS = [f"w{i}" for i in range(zoo.VOCABULARY - len(SPECIAL))]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'developer' %}{{ raise_exception('no developers') }}{% endif %}"
    "<{{ m.role }}> {{ m.content }} <end> {% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    "{% if loud %} w1{% endif %}"
)


def skip_unless_serving() -> None:
    """Skip where what serving needs is not installed, saying what."""
    from kvbits import serve

    try:
        serve.require()
    except ImportError as missing:
        pytest.skip(str(missing), allow_module_level=True)


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word; what it decodes it encodes to the same tokens again."""
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>")
    made.chat_template = TEMPLATE
    return made


def save(folder: Path, **changes: Any) -> str:
    """The tiny model and its tokenizer as a folder."""
    zoo.build("llama", eos_token_id=1, **changes).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Address:
    """Where a server listens."""

    port: int
    key: str | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, key: str | None = None, **options: Any) -> Any:
        """A client of OpenAI's that does not try again."""
        import openai

        options = {"max_retries": 0, "timeout": 60, **options}
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key or self.key or "none", **options)

    def metrics(self) -> dict[str, float]:
        """Every metric by its name and labels, and by its name alone the sum of those."""
        request = urllib.request.Request(f"{self.url}/metrics")
        if self.key is not None:
            request.add_header("Authorization", f"Bearer {self.key}")
        found: dict[str, float] = {}
        for line in urllib.request.urlopen(request, timeout=60).read().decode().splitlines():
            if not line.startswith("#"):
                labelled, value = line.rsplit(" ", 1)
                for name in {labelled, labelled.partition("{")[0]}:
                    found[name] = found.get(name, 0) + float(value)
        return found

    def wait_for(self, name: str, value: float, seconds: float = 20) -> None:
        """Until a metric has a value."""
        end = time.monotonic() + seconds
        while (found := self.metrics().get(name, 0)) != value:
            assert time.monotonic() < end, f"{name} is {found}, not {value}, after {seconds} s"
            time.sleep(0.02)


@dataclass
class Local(Address):
    """A server in a thread of this process, with what it is made of."""

    engine: Any = None
    serving: Any = None


@contextlib.contextmanager
def in_thread(
    engine: Any, words: Any, *, queue: int = 64, key: str | None = None, body_bytes: int = 2**20, grace: float = 5
) -> Iterator[Local]:
    """Serve an engine by a real uvicorn over TCP."""
    from kvbits.serve.app import application
    from kvbits.serve.server import Server, bind, serving

    shared = serving(engine, words, "tiny", queue, 32)
    bound = bind("127.0.0.1", 0)
    server = Server(application(shared, key, body_bytes), shared.queue, grace, "error")
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield Local(bound.getsockname()[1], key, engine, shared)
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


@dataclass
class Process(Address):
    """``kvbits serve`` as a process of its own."""

    process: Any = None

    def stop(self, number: int, seconds: float = 60) -> int:
        """Send a signal, wait, and return the exit status."""
        self.process.send_signal(number)
        return int(self.process.wait(seconds))


def start(model: str, *options: str, port: int | None = None, log: Path, seconds: float = 180) -> Process:
    """Start ``kvbits serve`` and wait until it answers."""
    port = free_port() if port is None else port
    command = [sys.executable, "-m", "kvbits.cli", "serve", model, "--port", str(port), *options]
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, "OMP_NUM_THREADS": "1"})
    end = time.monotonic() + seconds
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
            return Process(port, None, process)
        except (urllib.error.URLError, OSError):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, f"no server after {seconds} s: {log.read_text()}"
            time.sleep(0.1)
