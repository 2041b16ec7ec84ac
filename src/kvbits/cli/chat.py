"""``kvbits chat``: a conversation in the terminal, or line by line from a pipe, whose cache outlives it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvbits.cli.common import Calibrated, Device, DType, Model, attempt, err, fail, load
from kvbits.files import refuse_uncalibrated
from kvbits.files.sealed import Sealed
from kvbits.schemes.catalogue import RECOMMENDED
from kvbits.schemes.scheme import Scheme

if TYPE_CHECKING:
    from kvbits.sessions.conversation import Answer, Conversation

HELP = """/exit          leave (or Ctrl-D)
/reset         begin anew, with the same system message
/save [FILE]   write messages and cache into the session's file, or into a new one
/help          this
//text         say /text
Ctrl-C         stop the answer; what is there of it is kept"""

_LEAVES = "/exit or Ctrl-D leaves"


def chat(
    model: Model = "smollm2",
    scheme: Annotated[
        str | None, typer.Option("--scheme", "-s", help=f"The scheme of a new session; default: {RECOMMENDED}.")
    ] = None,
    session: Annotated[
        Path | None, typer.Option(help="A file that keeps messages and cache; what is in it is gone on with.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="The system message of a new session.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 512,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="Of sampling; 0 takes the likeliest token. Default: the model's own.")
    ] = None,
    top_p: Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Of sampling: nucleus.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of sampling.")] = None,
    calibration: Calibrated = None,
    dtype: DType = "auto",
    device: Device = "cpu",
) -> None:
    """Talk to a model whose cache is kept between turns, and with --session between runs.

    Lines from a pipe are one turn each. Answers go to standard output, all else to standard error. /help lists what
    else there is.
    """
    parsed = None if scheme is None else attempt(Scheme.parse, scheme)
    held = _session_of(session, parsed, system, calibration)
    if calibration is None and held is None:
        attempt(refuse_uncalibrated, parsed or Scheme.parse(RECOMMENDED))
    loaded, tokenizer = load(model, dtype, device)
    import torch

    from kvbits.hf.attach import cache_for
    from kvbits.sessions.conversation import Conversation

    if seed is not None:
        torch.manual_seed(seed)
    if held is not None:
        conversation = attempt(Conversation.resume, session, loaded, tokenizer)
    else:
        cache = attempt(cache_for, loaded, parsed or RECOMMENDED, calibration=calibration)
        messages = [] if system is None else [{"role": "system", "content": system}]
        conversation = attempt(Conversation, loaded, tokenizer, cache, messages)
    if held is not None:
        _say(f"{session}: {len(conversation.messages)} messages, {_fill(conversation)}")
    _Chat(conversation, session, max_new_tokens, _sampling(temperature, top_p)).run()


def _session_of(
    path: Path | None, scheme: Scheme | None, system: str | None, calibration: Path | None
) -> Sealed | None:
    """The session's file, if there is one, before a model is loaded for it."""
    if path is None or not path.exists():
        if path is not None and not path.absolute().parent.is_dir():
            fail(f"--session {path}: there is no folder {path.parent}")
        return None
    from kvbits.sessions.conversation import messages_in

    file: Sealed = attempt(Sealed, path)
    messages = attempt(messages_in, file.about["note"], path)
    found = Scheme.from_json(file.about["scheme"])
    if scheme is not None and scheme != found:
        fail(f"the session {path} is kept under {found}, not {scheme}; leave out --scheme, or give another --session")
    if calibration is not None:
        fail(f"the session {path} has what it needs of a calibration; leave out --calibration")
    if system is not None and messages[:1] != [{"role": "system", "content": system}]:
        fail(f"the session {path} began with another system message; leave out --system, or give another --session")
    return file


def _sampling(temperature: float | None, top_p: float | None) -> dict[str, Any]:
    """Options for ``generate``; none leaves the model its own."""
    if temperature == 0:
        if top_p is not None:
            fail("--temperature 0 takes the likeliest token, so --top-p means nothing beside it")
        return {"do_sample": False}
    given = {"temperature": temperature, "top_p": top_p}
    options = {name: value for name, value in given.items() if value is not None}
    return {"do_sample": True, **options} if options else {}


class _Chat:
    """Reads turns until there are no more."""

    def __init__(
        self, conversation: Conversation, session: Path | None, max_new_tokens: int, sampling: dict[str, Any]
    ) -> None:
        self.conversation, self.session = conversation, session
        self.options: dict[str, Any] = {"max_new_tokens": max_new_tokens, **sampling}
        self.typed, self.unsaved = sys.stdin.isatty(), False
        self.commands: dict[str, Callable[[str], None]] = {
            "/reset": self._reset,
            "/save": self._save,
            "/help": self._help,
        }

    def run(self) -> None:
        if self.typed:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  (lines can be edited, and called back)
            _say("/help lists commands; Ctrl-D leaves")
        for line in self._lines():
            text = line.strip()
            if text == "/exit":
                break
            try:
                self._hear(text)
            except KeyboardInterrupt:
                if not self.typed:
                    raise
                _say(f"\n{_LEAVES}")
        if self.unsaved:
            raise typer.Exit(2)

    def _hear(self, text: str) -> None:
        if text.startswith("/") and not text.startswith("//"):
            word, _, rest = text.partition(" ")
            self.commands.get(word, self._unknown)(rest.strip() if word in self.commands else word)
        elif text:
            self._turn(text.removeprefix("/") if text.startswith("//") else text)

    def _lines(self) -> Iterator[str]:
        """What is said, line by line."""
        while True:
            try:
                yield input("> ") if self.typed else next(sys.stdin)
            except (EOFError, StopIteration):
                if self.typed:
                    sys.stdout.write("\n")
                return
            except UnicodeDecodeError as error:
                if not self.typed:
                    fail(f"standard input is not text in UTF-8: {error.reason}")
                _say(f"error: that is not text in UTF-8: {error.reason}")
            except KeyboardInterrupt:
                if not self.typed:
                    raise
                _say(f"\n{_LEAVES}")

    def _turn(self, text: str) -> None:
        with _Interruption() as interruption:
            try:
                answer = self.conversation.ask(text, _write, lambda: interruption.asked, **self.options)
            except Exception as error:
                self._failed(error)
                return
            sys.stdout.write("\n")
            sys.stdout.flush()
            interruption.waits = True
            self._keep()
        _say(_facts(answer, self.conversation))
        if interruption.asked and not self.typed:
            raise KeyboardInterrupt

    def _failed(self, error: Exception) -> None:
        """Say why a turn did not come to be; lines from a pipe end there."""
        from kvbits.sessions.conversation import ContextFull

        way_out = (
            "; /reset does, and the session's file stays until the next answer"
            if isinstance(error, ContextFull)
            else ""
        )
        message = f"{error}{way_out}"
        if not self.typed:
            fail(message)
        _say(f"error: {message}")

    def _keep(self) -> None:
        if self.session is not None:
            try:
                self._put(self.session)
                self.unsaved = False
            except (OSError, ValueError) as error:
                self.unsaved = True
                _say(f"error: the session is not saved: {error}")

    def _put(self, path: Path) -> None:
        if path.exists() and not self.conversation.knows(path):
            raise ValueError(f"{path} is there already, and is not of this conversation; name another file")
        self.conversation.save(path)

    def _reset(self, _: str) -> None:
        self.conversation.reset()
        _say("begun anew")

    def _save(self, name: str) -> None:
        path = Path(name) if name else self.session
        if path is None:
            _say("error: name a file: /save FILE")
            return
        try:
            with _Interruption(waits=True):
                self._put(path)
        except (OSError, ValueError) as error:
            _say(f"error: {error}")
        else:
            self.unsaved = False
            _say(f"{path}: {path.stat().st_size:,} bytes")

    def _help(self, _: str) -> None:
        _say(HELP)

    def _unknown(self, word: str) -> None:
        _say(f"error: there is no {word}; /help lists commands, and //{word[1:]} says it")


class _Interruption:
    """While an answer comes, the first Ctrl-C asks to stop after its next token, and a second one stops at once.

    While it ``waits``, for what was said to be written, no Ctrl-C stops anything.
    """

    def __init__(self, waits: bool = False) -> None:
        self.asked, self.waits = False, waits

    def __enter__(self) -> _Interruption:
        self.before = signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self.before)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked and not self.waits:
            raise KeyboardInterrupt
        self.asked = True
        if sys.stderr.isatty() and not self.waits:
            os.write(2, b"\n(stops after this token; Ctrl-C again stops at once)\n")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _say(text: str) -> None:
    err.print(text, markup=False, highlight=False, soft_wrap=True, style="dim")


def _fill(conversation: Conversation) -> str:
    limit = "" if conversation.context is None else f" of {conversation.context:,}"
    return f"context {conversation.used:,}{limit} tokens, cache {conversation.cache.nbytes.total:,} bytes"


def _facts(answer: Answer, conversation: Conversation) -> str:
    """One line on an answer."""
    rate = "" if answer.rate is None else f", {answer.rate:.1f} tokens/s"
    ends = {
        "end": "",
        "stopped": "; stopped",
        "length": f"; cut off after {answer.tokens} tokens, see --max-new-tokens",
        "context": "; the context is full, /reset begins anew",
    }
    again = f"; {answer.again:,} tokens were rendered otherwise than before and read again" if answer.again else ""
    read = f"read {answer.read:,} in {answer.seconds[0]:.1f} s{rate}"
    return f"[{_fill(conversation)}; {read}{again}{ends[answer.end]}]"
