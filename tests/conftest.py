"""Fixtures that several test files share."""

from __future__ import annotations

import gc
import os
import signal
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from pathlib import Path

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from browser import Page


pytest.register_assert_rewrite("kernel_calls")  # whose assertions tell what they compared, as a test file's do

# A job in the background of a script ignores interruptions, and so would every program that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Processes that run tests side by side have it, and then consoles are as wide, whatever a test asks for.
os.environ.pop("COLUMNS", None)

# They share the cores of the machine, and so do the programs that they start.
if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(workers))))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Thousands of tests are objects that all stay: looking for garbage among them, now or later, is lost time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def smollm2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct and its tokenizer as a folder: see :mod:`small`."""
    import small
    from kvbits.hf.loading import embedded_model

    try:
        embedded_model()
    except FileNotFoundError as missing:
        pytest.skip(str(missing))
    return small.shared(tmp_path_factory)


@pytest.fixture(scope="session")
def smollm2(smollm2_folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """SmolLM2-135M-Instruct and its tokenizer, loaded once; tests leave the model disabled."""
    from kvbits.hf.loading import load_model, load_tokenizer

    return load_model(str(smollm2_folder)), load_tokenizer(str(smollm2_folder))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny Llama with a word tokenizer, as the command line is given it."""
    from command_line import write_model

    path = tmp_path_factory.mktemp("model")
    write_model(path)
    return str(path)


@pytest.fixture
def smollm2_from_folder(smollm2_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is called ``smollm2`` is read from that folder in this process."""
    from kvbits.hf import loading

    where = loading.where
    here = (str(smollm2_folder), {})
    monkeypatch.setattr(loading, "where", lambda name: here if name == loading.DEFAULT_MODEL else where(name))


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tiny models are faster on one thread, and do not suffer from whatever else the machine does."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def threads_stay() -> Iterator[None]:
    """Whatever number of threads a test sets."""
    import torch

    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The native kernel runs with the instruction set that the test's parameter names, whatever is the best."""
    from kvbits import _native
    from kvbits.attend import native

    name: str = request.param
    found = (_native, _native.names().index(name), name)
    monkeypatch.setattr(native, "library", lambda: found)
    return name


@pytest.fixture
def tab() -> Iterator[Page]:
    """A tab of a headless browser; skips where there is none."""
    from browser import Page

    with Page() as opened:
        yield opened
