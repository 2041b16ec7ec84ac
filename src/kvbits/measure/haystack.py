"""A text as the tokens that facts are hidden among: pieces of any length, and the places where sentences end.

Everything happens on tokens, so a piece has exactly the wanted number of them with any tokenizer. Where sentences end
is read off the text of single tokens, which needs neither offsets nor a grammar; some abbreviations end one, too.
"""

from __future__ import annotations

import re
from random import Random
from typing import Any

_ENDS, _CLOSERS = tuple(".!?…。！？"), "\"'”’»)]}*_"
_TITLE = re.compile(r"(Mr|Mrs|Ms|Dr|St)\.")
_REACH = 64
"""How many tokens a place may be moved to lie between sentences."""

_SPLIT = "\N{REPLACEMENT CHARACTER}"
"""What a decoder writes for half a character."""


class Haystack:
    """The tokens of ``text``. A text that is too short is read round and round.

    Args:
        text: any text; what its tokenizer takes for special tokens is text like all else.
        tokenizer: a Transformers tokenizer.

    Raises:
        ValueError: for a text without a token.
    """

    def __init__(self, text: str, tokenizer: Any) -> None:
        plain = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
        self.text, self._tokenizer = text, tokenizer
        self.ids: list[int] = list(tokenizer(text, **plain).input_ids) if text.strip() else []
        if not self.ids:
            raise ValueError("the haystack is empty; give a text, the longer the better")
        self._borders = _borders(self.ids, tokenizer)

    def piece(self, start: int, tokens: int) -> list[int]:
        """So many token ids, from the token ``start`` on."""
        found: list[int] = []
        while len(found) < tokens:
            first = (start + len(found)) % len(self.ids)
            found += self.ids[first : first + tokens - len(found)]
        return found

    def start(self, tokens: int, random: Random) -> int:
        """Where a piece of so many tokens begins: anywhere, with a sentence if one is near.

        It splits no character where it begins, and none where it ends if that can be.
        """
        room = len(self.ids) - tokens
        wanted = random.randrange(room + 1 if room >= 0 else len(self.ids))
        last = wanted + _REACH if room < 0 else min(wanted + _REACH, room)
        return max(
            range(wanted, last + 1),
            key=lambda i: (self._whole(i), self._whole(i + tokens), i % len(self.ids) in self._borders),
        )

    def border(self, start: int, tokens: int, near: int) -> int:
        """The place in a piece where a sentence ends, nearest to its token ``near``; its two ends are such places.

        Where no sentence ends within reach, the nearest place that splits no character.
        """
        places = [i for off in range(_REACH) for i in (near - off, near + off) if 0 <= i <= tokens]
        for place in places:
            if place in (0, tokens) or (start + place) % len(self.ids) in self._borders:
                return place
        return next((place for place in places if self._whole(start + place)), near)

    def _whole(self, place: int) -> bool:
        """Whether no character lies on both sides of a place."""
        return not self._tokenizer.decode(self.piece(place - 4, 4)).endswith(_SPLIT)


def _borders(ids: list[int], tokenizer: Any) -> frozenset[int]:
    """The tokens that begin a sentence or a paragraph."""
    texts = {i: tokenizer.decode([i]) for i in set(ids)}
    found, ended, spaced, word = {0}, True, True, ""
    for place, token in enumerate(ids):
        text = texts[token]
        bare, opens = text.strip(), spaced or text[:1].isspace()
        closes = bool(bare) and not bare.strip(_CLOSERS) and not opens
        if ended and not closes and not text[:1].isdigit():  # a digit: 3.14
            found.add(place)
        if bare and not closes:
            word = bare if opens else (word + bare)[-5:]
            ended = word.rstrip(_CLOSERS).endswith(_ENDS) and not _TITLE.fullmatch(word)
        elif not bare:
            ended = ended or "\n\n" in text
        spaced = text[-1:].isspace()
    return frozenset(found)
