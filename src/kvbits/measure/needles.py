"""Prompts that hide facts in a haystack and ask for them: pass key, one or all of several keys, chains of variables.

The tasks are those of the passkey test (arXiv 2305.16300) and of RULER (arXiv 2404.06654): ``passkey`` is its
single needle, ``multikey`` one key among several, ``multikey-all`` all of them at once, ``variables`` its variable
tracking with a second chain that must be left out. Every answer is drawn at random and stands nowhere in the haystack.

A prompt is laid out as ::

    [ template, instruction | haystack with the needles, each on a line of its own | question, template, lead ]

``lead`` begins the model's answer (``The pass key is``), so that also a model that follows no instructions can go on.
What is asked for begins at the wanted depth; where it takes several needles, they are spread evenly from there to the
end. Other needles lie anywhere. With the same seed the same prompt comes out, and prompts that differ only in depth
have the same haystack and needles.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any

from kvbits.measure.haystack import Haystack
from kvbits.measure.setting import SEED

PAIRS = 4
"""Keys of ``multikey`` and ``multikey-all``."""

HOPS = 4
"""Assignments after the first of each chain of ``variables``."""

LEAST = 32
"""Tokens of haystack that a prompt must have room for."""

_SPARE = 8
"""Tokens that a model may write beside the answer: quotes, a colon, an article."""

_TRIES = 1000

_KINDS = "amber bronze copper crystal golden ivory marble mossy painted purple rusty scarlet silver velvet wooden woven"
_THINGS = (
    "anchor basket bridge candle castle drum engine falcon garden kettle lantern mirror needle orchard pillow sail"
)


@dataclass(frozen=True)
class Riddle:
    """What one prompt plants and asks, as text.

    Attributes:
        instruction: what stands before the haystack.
        asked: the needles that the answer needs, in their order in the text.
        others: needles that it does not need.
        question: what stands after the haystack.
        lead: how the answer begins.
        wanted: what the answer must hold, in the order of the exemplary answer.
        unwanted: what it must not hold.
    """

    instruction: str
    asked: tuple[str, ...]
    others: tuple[str, ...]
    question: str
    lead: str
    wanted: tuple[str, ...]
    unwanted: tuple[str, ...] = ()

    @property
    def answer(self) -> str:
        """What a model writes that answers as it should; it goes on from ``lead``."""
        return " " + ", ".join(self.wanted)

    def solved_by(self, text: str) -> bool:
        """Whether all that is wanted stands in ``text``, as words of their own, and nothing that is unwanted."""
        words = set(re.findall(r"\w+", text))
        return words.issuperset(self.wanted) and words.isdisjoint(self.unwanted)


@dataclass(frozen=True)
class Prompt:
    """One prompt as token ids.

    Attributes:
        riddle: what it asks.
        context: what is read before the question.
        question: the rest, up to the lead of the answer.
        answer: the exemplary answer.
        room: tokens that the model may write.
        needles: the range of each needle that the answer needs, in ``context``.
    """

    riddle: Riddle
    context: list[int]
    question: list[int]
    answer: list[int]
    room: int
    needles: list[range]

    @property
    def length(self) -> int:
        """All tokens, those that the model may write included: what the context window must hold."""
        return len(self.context) + len(self.question) + self.room


class Draw:
    """Random numbers, names and things that stand nowhere in a haystack, and none of them twice."""

    def __init__(self, random: Random, text: str) -> None:
        self.random, self._text, self._taken = random, text, set[str]()

    def number(self, digits: int) -> str:
        """A whole number of so many digits."""
        return self._unseen(lambda: str(self.random.randrange(10 ** (digits - 1), 10**digits)))

    def name(self) -> str:
        """Five capital letters."""
        return self._unseen(lambda: "".join(self.random.choices(string.ascii_uppercase, k=5)))

    def thing(self) -> str:
        """Such as ``amber anchor``."""
        return self._unseen(lambda: f"{self.random.choice(_KINDS.split())} {self.random.choice(_THINGS.split())}")

    def _unseen(self, make: Callable[[], str]) -> str:
        for _ in range(_TRIES):
            word = make()
            if word not in self._taken and word not in self._text:
                self._taken.add(word)
                return word
        raise ValueError(f"the haystack is full of answers such as {word!r}; give another text")


def _passkey(draw: Draw) -> Riddle:
    number = draw.number(5)
    return Riddle(
        "A pass key is hidden in this text. Remember it.",
        (f"The pass key is {number}. Remember it.",),
        (),
        "What is the pass key that is hidden in the text?",
        "The pass key is",
        (number,),
    )


def _pairs(draw: Draw) -> tuple[str, list[tuple[str, str]]]:
    pairs = [(draw.thing(), draw.number(6)) for _ in range(PAIRS)]
    return f"Numbers of {PAIRS} things are hidden in this text. Remember them.", pairs


def _sentences(pairs: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    return tuple(f"The number of the {thing} is {number}." for thing, number in pairs)


def _multikey(draw: Draw) -> Riddle:
    instruction, pairs = _pairs(draw)
    thing, number = pairs[0]
    question = f"What is the number of the {thing} that is hidden in the text?"
    lead = f"The number of the {thing} is"
    return Riddle(instruction, _sentences(pairs[:1]), _sentences(pairs[1:]), question, lead, (number,))


def _multikey_all(draw: Draw) -> Riddle:
    instruction, pairs = _pairs(draw)
    asked = draw.random.sample(pairs, len(pairs))
    things = ", ".join(f"the {thing}" for thing, _ in asked)
    question = f"What are the numbers, hidden in the text, of {things}, in this order?"
    return Riddle(instruction, _sentences(pairs), (), question, "The numbers are", tuple(n for _, n in asked))


def _variables(draw: Draw) -> Riddle:
    chains, values = [], [draw.number(5), draw.number(5)]
    for value in values:
        names = tuple(draw.name() for _ in range(1 + HOPS))
        links = [f"VAR {b} = VAR {a}" for a, b in pairwise(names)]
        chains.append((names, (f"VAR {names[0]} = {value}", *links)))
    (names, asked), (unwanted, others) = chains
    return Riddle(
        "Variables are assigned in this text. Remember them, and what they are equal to.",
        asked,
        others,
        f"Which {len(names)} variables in the text are equal to {values[0]}, at once or by way of others?",
        f"The variables that are equal to {values[0]} are",
        names,
        unwanted,
    )


TASKS: dict[str, Callable[[Draw], Riddle]] = {
    "passkey": _passkey,
    "multikey": _multikey,
    "multikey-all": _multikey_all,
    "variables": _variables,
}
"""The tasks by name."""


@dataclass(frozen=True)
class _Parts:
    """A prompt without its haystack, as token ids."""

    riddle: Riddle
    head: list[int]
    question: list[int]
    answer: list[int]
    asked: list[list[int]]
    others: list[list[int]]

    @property
    def room(self) -> int:
        return len(self.answer) + _SPARE

    @property
    def tokens(self) -> int:
        return sum(map(len, (self.head, self.question, *self.asked, *self.others))) + self.room


class Prompts:
    """Prompts over one haystack, for one tokenizer.

    Args:
        haystack: the text.
        tokenizer: its tokenizer.
        chat: whether the prompt is wrapped in the tokenizer's chat template; None: where it has one.
        seed: of all that is drawn.

    Raises:
        ValueError: if ``chat`` is asked of a tokenizer without a template, or its template does not take a user's turn.
    """

    def __init__(self, haystack: Haystack, tokenizer: Any, chat: bool | None = None, seed: int = SEED) -> None:
        self.haystack, self.tokenizer, self.seed = haystack, tokenizer, seed
        self.chat = bool(getattr(tokenizer, "chat_template", None)) if chat is None else chat
        self._before, self._after = _template(tokenizer) if self.chat else ("", "\n")
        self._bos = [] if self.chat else _begin(tokenizer)

    def check(self, task: str, length: int, repeats: int) -> None:
        """Raise ValueError where a length leaves no room for a haystack."""
        taken = length - min(self.free(task, length, repeat) for repeat in range(repeats))
        if length < taken + LEAST:
            raise ValueError(
                f"length {length} leaves no room for a haystack: template, needles, question and answer of {task} "
                f"take {taken} tokens; give {taken + LEAST} or more"
            )

    def free(self, task: str, length: int, repeat: int = 0) -> int:
        """Tokens of haystack in a prompt."""
        return length - self._parts(task, length, repeat)[0].tokens

    def make(self, task: str, length: int, depth: float, repeat: int = 0) -> Prompt:
        """A prompt whose :attr:`Prompt.length` is exactly ``length``.

        Args:
            task: one of :data:`TASKS`.
            length: tokens in all, with those that the model may write.
            depth: 0 to 1: where in the haystack the needles that are asked for begin.
            repeat: another number is another prompt: other needles in another piece of the haystack.
        """
        parts, random = self._parts(task, length, repeat)
        free = length - parts.tokens
        start = self.haystack.start(free, random)
        steps = [depth + i * (1 - depth) / len(parts.asked) for i in range(len(parts.asked))]
        others = sorted(random.random() for _ in parts.others)
        planted = sorted(
            (self.haystack.border(start, free, round(share * free)), number, needle)
            for number, (share, needle) in enumerate(zip([*steps, *others], [*parts.asked, *parts.others], strict=True))
        )
        hay, context, needles, done = self.haystack.piece(start, free), list(parts.head), [], 0
        for place, number, needle in planted:
            context += hay[done:place]
            done = place
            if number < len(parts.asked):
                needles.append(range(len(context), len(context) + len(needle)))
            context += needle
        context += hay[done:]
        return Prompt(parts.riddle, context, parts.question, parts.answer, parts.room, needles)

    def _parts(self, task: str, length: int, repeat: int) -> tuple[_Parts, Random]:
        random = Random(f"{self.seed}/{task}/{length}/{repeat}")
        riddle = TASKS[task](Draw(random, self.haystack.text))
        tail = f"\n\n{riddle.question}{self._after}{riddle.lead}"
        question, whole = self._ids(tail), self._ids(tail + riddle.answer)
        goes_on = whole[: len(question)] == question
        answer = whole[len(question) :] if goes_on else self._ids(riddle.answer)
        if not answer:
            raise ValueError(f"the tokenizer makes no token of the answer {riddle.answer!r}")
        head = self._bos + self._ids(f"{self._before}{riddle.instruction}\n\n")
        asked, others = ([self._ids(f"\n{x}\n") for x in texts] for texts in (riddle.asked, riddle.others))
        return _Parts(riddle, head, question, answer, asked, others), random

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def _template(tokenizer: Any) -> tuple[str, str]:
    """What a chat template writes before and after a user's words."""
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("this tokenizer has no chat template; leave out --chat")
    mark = "HAYSTACK"
    turn = [{"role": "user", "content": mark}]
    parts = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True).split(mark)
    if len(parts) != 2:
        raise ValueError(f"the chat template writes a user's words {len(parts) - 1} times, not once; give --no-chat")
    return parts[0], parts[1]


def _begin(tokenizer: Any) -> list[int]:
    """The special tokens that a tokenizer puts before a text."""
    plain, full = tokenizer("a", add_special_tokens=False).input_ids, list(tokenizer("a").input_ids)
    return full[: full.index(plain[0])] if plain and plain[0] in full else []
