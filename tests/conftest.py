"""Fixtures that several test files share."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from browser import Page


# A job in the background of a script ignores interruptions, and so would every program that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Processes that run tests side by side have it, and then consoles are as wide, whatever a test asks for.
os.environ.pop("COLUMNS", None)


@pytest.fixture(scope="session")
def smollm2() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """SmolLM2-135M-Instruct and its tokenizer, loaded once; tests leave the model disabled."""
    from kvbits.hf.loading import DEFAULT_MODEL, embedded_model, load_model, load_tokenizer

    try:
        embedded_model()
    except FileNotFoundError as missing:
        pytest.skip(str(missing))
    return load_model(DEFAULT_MODEL), load_tokenizer(DEFAULT_MODEL)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tiny models are faster on one thread, and do not suffer from whatever else the machine does."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def tab() -> Iterator[Page]:
    """A tab of a headless browser; skips where there is none."""
    from browser import Page

    with Page() as opened:
        yield opened
