"""``Conversation``, messages and the cache that has read them; what ``kvbits chat`` is made of.

A model's chat template renders all messages at every turn. The cache goes on where that begins with what it has read;
where it does not (templates that leave out earlier thoughts, texts that are split into tokens otherwise than they were
generated) it is cropped to what is in common, never through a packed block, and the rest is read again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import TextStreamer

from kvbits.hf.cache import KVCache
from kvbits.hf.names import cache_name
from kvbits.sessions.prefixes import in_common
from kvbits.sessions.saving import Saved, save

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NOTE = "kvbits chat"
"""What the note of a session's file is called."""


class ContextFull(ValueError):
    """The messages are longer than what the model was made for."""


@dataclass(frozen=True)
class Answer:
    """What came of one turn.

    Attributes:
        text: of the answer; of a part of it where it was stopped.
        tokens: new ones.
        read: tokens of the prompt that had to be read.
        again: those of them that the cache had read before, and that were rendered otherwise this time.
        end: what ended it: the model itself ("end"), the caller ("stopped"), ``max_new_tokens`` ("length"), or the
            model's context ("context").
        seconds: until the first token, and from then on.
    """

    text: str
    tokens: int
    read: int
    again: int
    end: Literal["end", "stopped", "length", "context"]
    seconds: tuple[float, float]

    @property
    def rate(self) -> float | None:
        """Tokens per second after the first; None if there is only one."""
        return (self.tokens - 1) / self.seconds[1] if self.tokens > 1 and self.seconds[1] > 0 else None


class Conversation:
    """Messages and their cache.

    Args:
        model, tokenizer: of a model that has a chat template.
        cache: of the model; an empty one, or one that has read what the messages begin with.
        messages: so far, such as ``{"role": "system", "content": "Be brief."}``.

    Raises:
        ValueError: if there is no chat template.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        cache: KVCache,
        messages: Sequence[dict[str, str]] = (),
    ) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError("this model has no chat template, so it cannot chat; use kvbits generate")
        self.model, self.tokenizer, self.cache = model, tokenizer, cache
        self.messages = list(messages)
        self._files: dict[Path, tuple[int, int, int]] = {}

    @property
    def context(self) -> int | None:
        """Tokens that the model was made for; None if its configuration does not say."""
        config = self.model.config.get_text_config(decoder=True)
        return getattr(config, "max_position_embeddings", None)

    @property
    def used(self) -> int:
        """Tokens that the cache has read."""
        return self.cache.get_seq_length()

    # -- turns -----------------------------------------------------------------------------------------------------

    def ask(
        self,
        text: str,
        show: Callable[[str], None] = lambda text: None,
        stop: Callable[[], bool] = lambda: False,
        max_new_tokens: int = 512,
        **options: Any,
    ) -> Answer:
        """One turn: the user says ``text``, and the model answers.

        An answer that is stopped is kept as far as it came. If it fails, or is stopped before its first token, the turn
        never happened.

        Args:
            show: gets the answer as it comes.
            stop: asked after every token.
            max_new_tokens: of the answer.
            options: for ``generate``.

        Raises:
            ContextFull: if the messages leave no room for an answer; the turn never happened.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        ids = self._rendered(messages)
        room = max_new_tokens if self.context is None else min(max_new_tokens, self.context - ids.shape[1])
        if room < 1:
            raise ContextFull(
                f"the messages have {ids.shape[1]:,} tokens, and the model was made for {self.context:,}: begin anew"
            )
        again, start = self._go_back(ids), time.perf_counter()
        read = ids.shape[1] - self.used
        listener, model = _Listener(self.tokenizer, show, stop), cast(Any, self.model)
        pad = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else self.tokenizer.eos_token_id
        try:
            with torch.no_grad():
                model.generate(
                    ids.to(model.device),
                    attention_mask=torch.ones_like(ids).to(model.device),
                    max_new_tokens=room,
                    streamer=listener,
                    stopping_criteria=StoppingCriteriaList([listener.criterion]),
                    pad_token_id=pad,
                    **{cache_name(model): self.cache, **options},
                )
        except KeyboardInterrupt:
            listener.stopped = True
            listener.end()  # type: ignore[no-untyped-call]  # shows what waits for the end of a word
            self._settle()
        except BaseException:
            self._settle()
            raise
        new = listener.ids
        answer = str(self.tokenizer.decode(new, skip_special_tokens=True))
        if new:
            self.messages = [*messages, {"role": "assistant", "content": answer}]
        times = listener.times or [time.perf_counter()]
        seconds = (times[0] - start, times[-1] - times[0])
        return Answer(answer, len(new), read, again, self._end_of(listener, room, max_new_tokens), seconds)

    def reset(self) -> None:
        """Forget all messages but a system message at the beginning, and what the cache has read."""
        self.cache.reset()
        self.messages = [message for message in self.messages[:1] if message["role"] == "system"]

    def _rendered(self, messages: list[dict[str, str]]) -> torch.Tensor:
        """Ids ``[1, T]`` of messages, up to where the answer begins."""
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids: torch.Tensor = self.tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        return ids

    def _go_back(self, ids: torch.Tensor) -> int:
        """Crop the cache to what it has in common with ``ids``. Returns how many of its tokens that takes back."""
        if not self.used:
            return 0
        before, common = self.used, in_common(self.cache.tokens[0], ids[0, :-1])
        kept = self.cache.whole(common)
        if kept == 0:
            self.cache.reset()
        elif kept < before:
            try:
                self.cache.crop(kept - before)
            except BaseException:  # an interruption, once some layers were cropped and others not
                self.cache.reset()
                raise
        return before - kept

    def _settle(self) -> None:
        """After a forward that stopped in the middle: what it stored is taken back, or else all is read again."""
        with contextlib.suppress(ValueError):  # it says once that it was interrupted
            self.cache.settle()
        if not self.cache.usable:
            self.cache.reset()

    def _end_of(self, listener: _Listener, room: int, wanted: int) -> Literal["end", "stopped", "length", "context"]:
        if listener.stopped:
            return "stopped"
        if len(listener.ids) < room or listener.ids[-1] in _list_of(self.model.generation_config.eos_token_id):
            return "end"
        return "context" if room < wanted else "length"

    # -- sessions --------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write messages and cache into one file; see :func:`kvbits.save`.

        Raises:
            ValueError: if somebody else has written the file since this conversation read or wrote it.
            OSError: if it cannot be written; what is there is as it was.
        """
        path = Path(path).absolute()
        if self.knows(path) and path.exists() and _state(path) != self._files[path]:
            raise ValueError(f"another program has changed {path} meanwhile; it is left as it is: save to another file")
        save(self.cache, path, tokenizer=self.tokenizer, note={NOTE: 1, "messages": self.messages})
        self._files[path] = _state(path)

    def knows(self, path: str | Path) -> bool:
        """Whether this conversation has read or written the file."""
        return Path(path).absolute() in self._files

    @classmethod
    def resume(cls, path: str | Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Conversation:
        """Go on where :meth:`save` was called.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: as :func:`kvbits.load`, and for the file of a cache that no conversation has written.
        """
        path = Path(path).absolute()
        state = _state(path) if path.exists() else (0, 0, 0)
        saved = Saved(path)
        found = cls(model, tokenizer, saved.cache(model, tokenizer=tokenizer), messages_in(saved.note, path))
        found._files[path] = state
        return found


def messages_in(note: Any, path: Path) -> list[dict[str, str]]:
    """The messages in the note of a session's file. Raises ValueError for the file of another cache."""
    messages = note.get("messages") if isinstance(note, dict) and NOTE in note else None
    if not isinstance(messages, list) or any(not isinstance(x, dict) or {"role", "content"} - set(x) for x in messages):
        raise ValueError(f"{path} is a cache, but not the session of a chat")
    return messages


def _list_of(ids: int | list[int] | None) -> list[int]:
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


def _state(path: Path) -> tuple[int, int, int]:
    """What tells a file from another one that took its place."""
    status = path.stat()
    return status.st_ino, status.st_mtime_ns, status.st_size


class _Listener(TextStreamer):
    """Hears every token of an answer: notes it, shows it, and asks whether to stop."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, show: Callable[[str], None], stop: Callable[[], bool]
    ) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.show, self.stop = show, stop
        self.ids: list[int] = []
        self.times: list[float] = []
        self.stopped = False
        self.criterion = _Stop(self)

    def put(self, value: torch.Tensor) -> None:
        if not self.next_tokens_are_prompt:
            self.times.append(time.perf_counter())
            self.ids += value.flatten().tolist()
        super().put(value)  # type: ignore[no-untyped-call]

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self.show(text)


class _Stop(StoppingCriteria):
    def __init__(self, listener: _Listener) -> None:
        self.listener = listener

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.listener.stopped = self.listener.stopped or self.listener.stop()
        return torch.full((input_ids.shape[0],), self.listener.stopped, dtype=torch.bool, device=input_ids.device)
