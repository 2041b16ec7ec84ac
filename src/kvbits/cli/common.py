"""What all commands share: options, the two consoles, loading a model, and one message in place of a traceback."""

from __future__ import annotations

import contextlib
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.status import Status

if TYPE_CHECKING:
    from kvbits.measure.text import Text

out, err = Console(), Console(stderr=True)

Model = Annotated[str, typer.Argument(help="Hub id, local folder, .gguf file, or smollm2, the embedded small model.")]
Schemes = Annotated[list[str] | None, typer.Option("--scheme", "-s", help="A scheme; repeat it to compare several.")]
DType = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option(help="Device for the model, such as cpu, cuda or mps.")]
Calibrated = Annotated[
    Path | None, typer.Option("--calibration", help="Folder that 'kvbits calibrate' wrote, for schemes that need one.")
]


_T = TypeVar("_T")


def load(name: str, dtype: str, device: str) -> tuple[Any, Any]:
    """A model and its tokenizer."""
    check_model(name, dtype, device)
    tokenizer = load_tokenizer(name)
    return load_model(name, dtype, device), tokenizer


JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the rows here; a run that stopped goes on there.")]


def check_model(name: str, dtype: str, device: str) -> None:
    """End with a message for what is wrong with these without a look at any weights."""
    path = Path(name)
    if path.is_dir() and not (path / "config.json").is_file():
        fail(f"the folder {name} has no config.json: it is no model")
    if path.is_file() and path.suffix != ".gguf":
        fail(f"{name} is a file, but no .gguf file; give a hub id, a folder with a model, or a .gguf file")
    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        fail(f"--dtype {dtype} is unknown; allowed are auto, float32, bfloat16, float16")
    attempt(torch.empty, 0, device=device, what=f"cannot use the device {device!r}: ")


def load_tokenizer(name: str) -> Any:
    """The tokenizer that belongs to a model, which takes seconds at most."""
    from transformers.utils import logging

    from kvbits.hf.loading import load_tokenizer as load_one

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    missing = f"{name} has a model, but no tokenizer that can be loaded, and text needs one: "
    what = missing if Path(name).is_dir() else f"cannot load {name!r}: "
    with working(f"loading the tokenizer of {name}"):
        return attempt(load_one, name, what=what)


def load_model(name: str, dtype: str, device: str) -> Any:
    """The model itself, on its device."""
    from kvbits.hf.loading import load_model as load_one

    with working(f"loading {name}"):
        kind = dtype if dtype == "auto" else getattr(torch, dtype)
        model = attempt(load_one, name, dtype=kind, what=f"cannot load {name!r}: ")
        return attempt(model.to, device, what=f"cannot use the device {device!r}: ")


def say(text: str, to: Console = out) -> None:
    """Print a text as it is: no markup, no colours, no line breaks of its own."""
    to.print(text, markup=False, highlight=False, soft_wrap=True)


def working(what: str) -> Status:
    """A sign on standard error that something is being done, in words that may be a user's."""
    return err.status(escape(what))


def bars() -> Progress:
    """Progress bars with what is left, on standard error."""
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"),
        TimeRemainingColumn(), console=err, speed_estimate_period=3600,  # one forward may take minutes
    )  # fmt: skip


def results_file(file: Path | None, kind: str | None = None) -> None:
    """End with a message for a --json that cannot be written, or that holds anything else than results of a kind.

    Whether their setting is the same is seen once the model is loaded.
    """
    if file is None:
        return
    if not file.absolute().parent.is_dir():
        fail(f"--json {file}: there is no folder {file.parent}")
    if file.exists() and not file.is_file():
        fail(f"--json {file}: this is a folder or a device; give the name of a file")
    try:
        tempfile.TemporaryFile(dir=file.absolute().parent).close()
    except OSError as error:
        fail(f"--json {file}: cannot write into the folder {file.parent}: {str(error.strerror).lower()}")
    if kind is not None and file.exists():
        from kvbits.measure.results import Results

        if attempt(Results.load, file).kind != kind:
            fail(f"--json {file}: it holds results of another kind; give another file")


@contextlib.contextmanager
def going_on(file: Path | None) -> Iterator[None]:
    """Say, where a measurement is interrupted, how it goes on."""
    try:
        yield
    except KeyboardInterrupt:
        text = "with --json FILE what is finished is kept, and the same command goes on from there"
        if file is not None:
            text = f"the same command goes on from the rows in {file}"
        say(f"interrupted; {text}", err)
        raise


def read_source(file: Path | None, field: str | None = None) -> Text:
    """The text of a file, or Python's help topics."""
    from kvbits.measure import text

    return text.builtin() if file is None else attempt(text.read, file, field)


def read_text(prompt: str | None, file: Path | None) -> str:
    if prompt is not None and file is not None:
        fail("give --prompt or --prompt-file, not both")
    if prompt is not None:
        return prompt
    if file is None:
        return topics()
    try:
        return sys.stdin.read() if str(file) == "-" else str(attempt(file.read_text, encoding="utf-8"))
    except UnicodeDecodeError as error:
        fail(f"{file} is not text in UTF-8: {error.reason} at byte {error.start}")


def tokens_of(text: str) -> int:
    """A number of tokens such as ``512``, ``2k`` or ``1m``: k is 1,024, and m is 1,024 k.

    Raises:
        ValueError: for anything else, and for 0.
    """
    match = re.fullmatch(r"0*([1-9]\d{0,99})([km]?)", text.strip().lower())
    if match is None:
        raise ValueError(f"{text.strip()!r} is not a number of tokens; give one such as 512, 2k (2,048) or 1m")
    return int(match[1]) * {"": 1, "k": 1 << 10, "m": 1 << 20}[match[2]]


def topics() -> str:
    """Real English on any Python: the prose of its own help topics on objects and execution, about 5,000 tokens."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in ("objects", "execmodel", "exceptions", "types"))[:20_000]


def attempt(function: Callable[..., _T], *args: Any, what: str = "", **kwargs: Any) -> _T:
    """Call; turn what a user can cause into one message, with ``what`` before it, and exit status 2."""
    try:
        return function(*args, **kwargs)
    except (BrokenPipeError, UnicodeDecodeError, typer.Exit):
        raise
    except Exception as error:  # a user sees what is wrong, never a traceback; the library is for those who debug
        fail(f"{what}{reason(error)}")


def reason(error: Exception) -> str:
    """What an error says, without the number that the system has for it."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror.lower()}"
    return str(error) or type(error).__name__


def fail(message: str) -> NoReturn:
    say(f"error: {message}", err)
    raise typer.Exit(2)
