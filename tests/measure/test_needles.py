"""Prompts with planted facts: as long as wanted, at the wanted depth, and with an answer that is nowhere else."""

from __future__ import annotations

import pydoc_data.topics
import re
from random import Random
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from kvbits.measure.haystack import Haystack
from kvbits.measure.needles import HOPS, LEAST, PAIRS, TASKS, Draw, Prompt, Prompts

ENGLISH = "\n\n".join(pydoc_data.topics.topics[name] for name in ("objects", "execmodel"))
TEXTS = {
    "english": ENGLISH,
    "multi-byte": "Зимой море тихое 🌊. 海は深い。港は近い！ Ça va, l'été? 👩‍👩‍👧 " * 60,
    "no sentences": "🌊🐚" * 900,
    "short": "The sea is deep.",
    "one token": "a",
}
TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}<|assistant|>"
"""For ``apply_chat_template``; a user's words stand once in it."""

LEARNED = [*TEXTS.values(), "0 1 2 3 4 5 6 7 8 9", "A B C D E F G H I J K L M N O P Q R S T U V W X Y Z"]


def by_bytes() -> PreTrainedTokenizerFast:
    """As those of GPT-2, Llama 3 and Qwen; it splits characters. With a chat template."""
    found = Tokenizer(models.BPE())
    found.pre_tokenizer, found.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|user|>", "<|assistant|>", "<|end|>"]
    letters = pre_tokenizers.ByteLevel.alphabet()
    found.train_from_iterator(
        LEARNED[:1], trainers.BpeTrainer(vocab_size=600, special_tokens=special, initial_alphabet=letters)
    )
    made = PreTrainedTokenizerFast(tokenizer_object=found, eos_token="<|end|>")
    made.chat_template = TEMPLATE
    return made


def by_pieces() -> PreTrainedTokenizerFast:
    """As those of SentencePiece: blanks are letters, and a token begins each text."""
    found = Tokenizer(models.Unigram())
    found.pre_tokenizer, found.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    found.train_from_iterator(
        LEARNED, trainers.UnigramTrainer(vocab_size=700, special_tokens=["<s>", "<unk>"], unk_token="<unk>")
    )
    found.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=found, bos_token="<s>", unk_token="<unk>")


def by_words() -> PreTrainedTokenizerFast:
    """Of few words; most of a prompt is unknown to it."""
    found = Tokenizer(models.WordLevel({"<unk>": 0, "the": 1, ".": 2, "is": 3}, unk_token="<unk>"))
    found.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=found, unk_token="<unk>")


def by_characters() -> Any:
    """Pure Python, with no offsets."""
    from transformers import PreTrainedTokenizer

    class Characters(PreTrainedTokenizer):
        vocab_size = 0x110000

        def get_vocab(self) -> dict[str, int]:
            return dict(self.added_tokens_encoder)

        def _tokenize(self, text: str, **_: Any) -> list[str]:
            return list(text)

        def _convert_token_to_id(self, token: str) -> int:
            return ord(token)

        def _convert_id_to_token(self, index: int) -> str:
            return chr(index)

        def convert_tokens_to_string(self, tokens: list[str]) -> str:
            return "".join(tokens)

    return Characters()


MADE = {"bytes": by_bytes, "pieces": by_pieces, "words": by_words, "characters": by_characters}


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Any]:
    return {name: make() for name, make in MADE.items()}


def text_of(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False))


def planted(tokenizer: Any, prompt: Prompt) -> list[str]:
    """The needles that are asked for, as they stand in the context."""
    return [text_of(tokenizer, prompt.context[one.start : one.stop]).strip() for one in prompt.needles]


# -- length ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("text", TEXTS)
def test_prompts_are_exactly_as_long_as_wanted(tokenizers: dict[str, Any], kind: str, text: str) -> None:
    prompts = Prompts(Haystack(TEXTS[text], tokenizers[kind]), tokenizers[kind])
    for task in TASKS:
        for length in (1100, 1537):
            prompts.check(task, length, repeats=2)
            for depth in (0, 0.3, 1):
                prompt = prompts.make(task, length, depth)
                assert len(prompt.context) + len(prompt.question) + prompt.room == prompt.length == length
                assert len(prompt.answer) < prompt.room
                assert len(prompt.needles) == len(prompt.riddle.asked)


@pytest.mark.parametrize("task", TASKS)
def test_the_least_length_is_named_and_works(tokenizers: dict[str, Any], task: str) -> None:
    prompts = Prompts(Haystack(ENGLISH, tokenizers["bytes"]), tokenizers["bytes"])
    with pytest.raises(ValueError, match=f"length 8 leaves no room.* of {task} take") as refused:
        prompts.check(task, 8, repeats=1)
    taken = int(re.search(r"take (\d+) tokens", str(refused.value))[1])  # type: ignore[index]
    prompts.check(task, taken + LEAST, repeats=1)  # another length draws other needles, of as many digits and letters
    with pytest.raises(ValueError, match="leaves no room"):
        prompts.check(task, taken, repeats=1)


# -- depth -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", (0, 0.1, 0.5, 0.75, 1))
@pytest.mark.parametrize("task", TASKS)
def test_needles_begin_at_their_depth(tokenizers: dict[str, Any], task: str, depth: float) -> None:
    tokenizer = tokenizers["bytes"]
    prompts = Prompts(Haystack(ENGLISH, tokenizer), tokenizer)
    for repeat in range(3):
        prompt = prompts.make(task, 3000, depth, repeat)
        asked = sum(map(len, prompt.needles))
        free = len(prompt.context) - asked  # a few of these are not haystack
        count = len(prompt.needles)
        assert planted(tokenizer, prompt) == list(prompt.riddle.asked)
        for i, needle in enumerate(prompt.needles):
            before = needle.start - sum(len(other) for other in prompt.needles[:i])
            assert before / free == pytest.approx(depth + i * (1 - depth) / count, abs=0.08)


def test_needles_stand_between_sentences(tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers["bytes"]
    text = (
        "Mr. Hale said: \"Go on.\" She went. The sum is 3.14 in all, said Mrs. Hale! 'Is it?' (It is.) So be it. " * 90
    )
    prompts = Prompts(Haystack(text, tokenizer), tokenizer)
    allowed = ('on."', "went.", "Hale!", "it?'", "is.)", "it.")
    for repeat in range(4):
        for depth in (i / 16 for i in range(1, 16)):
            prompt = prompts.make("passkey", 700, depth, repeat)
            before = text_of(tokenizer, prompt.context[: prompt.needles[0].start]).rstrip()
            assert before.endswith(allowed), before[-40:]


def test_without_sentences_no_character_is_split(tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers["bytes"]
    prompts = Prompts(Haystack(TEXTS["no sentences"], tokenizer), tokenizer)
    assert "\N{REPLACEMENT CHARACTER}" in text_of(tokenizer, prompts.haystack.ids[:3])
    for depth in (0, 0.31, 0.5, 0.77, 1):
        prompt = prompts.make("passkey", 1001, depth)
        pieces = text_of(tokenizer, prompt.context).split(f"\n{prompt.riddle.asked[0]}\n")
        assert len(pieces) == 2
        # 1,001 tokens need not hold whole characters only: the last one may be cut.
        assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces).rstrip("\N{REPLACEMENT CHARACTER}")
    assert 451 - 8 < prompts.haystack.border(0, 900, 451) < 451 + 8
    assert prompts.haystack.border(0, 900, 451) % 4 == 0  # four bytes each


# -- what is drawn -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
def test_prompts_are_drawn_once_and_for_all(tokenizers: dict[str, Any], task: str) -> None:
    def make(seed: int = 0, repeat: int = 0, depth: float = 0.5) -> Prompt:
        return Prompts(Haystack(ENGLISH, tokenizers["bytes"]), tokenizers["bytes"], seed=seed).make(
            task, 900, depth, repeat
        )

    first = make()
    assert make() == first
    assert make(seed=1).riddle != first.riddle != make(repeat=1).riddle
    deep = make(depth=1)
    assert deep.riddle == first.riddle and deep.context != first.context
    assert sorted(deep.context) == sorted(first.context)  # the same haystack and needles


def test_the_first_pass_key_is_what_it_always_was(tokenizers: dict[str, Any]) -> None:
    """Figures of two releases are of the same prompts."""
    prompts = Prompts(Haystack("The sea is deep.", tokenizers["bytes"]), tokenizers["bytes"])
    riddle = prompts.make("passkey", 512, 0.5).riddle
    assert riddle.asked == (f"The pass key is {riddle.wanted[0]}. Remember it.",)
    assert riddle.wanted == (str(Random("0/passkey/512/0").randrange(10**4, 10**5)),)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("kind", ("bytes", "characters"))
def test_every_answer_stands_in_the_prompt_and_nowhere_else(tokenizers: dict[str, Any], kind: str, task: str) -> None:
    tokenizer = tokenizers[kind]
    prompts = Prompts(Haystack(ENGLISH, tokenizer), tokenizer)
    prompt = prompts.make(task, 2500, 0.3)
    text, question = text_of(tokenizer, prompt.context), text_of(tokenizer, prompt.question)
    riddle = prompt.riddle
    for needle in (*riddle.asked, *riddle.others):
        assert text.count(f"\n{needle}\n") == 1
    for word in (*riddle.wanted, *riddle.unwanted):
        needles = [needle for needle in (*riddle.asked, *riddle.others) if word in needle]
        assert needles and text.count(word) == len(needles)
        assert word not in ENGLISH and word not in question
    assert riddle.question in question and question.endswith(riddle.lead)
    assert text_of(tokenizer, prompt.question + prompt.answer).endswith(riddle.lead + riddle.answer)
    assert riddle.solved_by(riddle.answer)


def test_what_the_haystack_holds_is_no_answer(tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers["bytes"]
    for task in TASKS:
        usual = Prompts(Haystack(ENGLISH, tokenizer), tokenizer).make(task, 900, 0.5).riddle
        spoiled = Haystack(ENGLISH + " ".join(usual.wanted), tokenizer)
        assert set(Prompts(spoiled, tokenizer).make(task, 900, 0.5).riddle.wanted).isdisjoint(usual.wanted)
    with pytest.raises(ValueError, match="the haystack is full of answers"):
        Draw(Random(0), " ".join(map(str, range(10, 100)))).number(2)


def test_the_tasks_are_what_they_are_called() -> None:
    riddles = {name: task(Draw(Random(0), "")) for name, task in TASKS.items()}
    assert len(riddles["multikey"].asked) == 1 and len(riddles["multikey"].others) == PAIRS - 1
    assert len(riddles["multikey-all"].asked) == PAIRS == len(set(riddles["multikey-all"].wanted))
    chain = riddles["variables"]
    assert len(chain.asked) == len(chain.others) == 1 + HOPS
    value, known = re.fullmatch(r"VAR (\w+) = (\d+)", chain.asked[0]), []
    assert value is not None and value[2] in chain.question and value[2] not in chain.others[0]
    known.append(value[1])
    for link in chain.asked[1:]:
        pair = re.fullmatch(r"VAR (\w+) = VAR (\w+)", link)
        assert pair is not None and pair[2] == known[-1]
        known.append(pair[1])
    assert tuple(known) == chain.wanted and set(known).isdisjoint(chain.unwanted)


def test_an_answer_is_right_by_its_words() -> None:
    riddle = TASKS["variables"](Draw(Random(0), ""))
    assert riddle.solved_by(" and ".join(reversed(riddle.wanted)))
    assert not riddle.solved_by(" ".join(riddle.wanted[1:]))
    assert not riddle.solved_by(" ".join((*riddle.wanted, riddle.unwanted[2])))
    (key,) = (riddle := TASKS["passkey"](Draw(Random(0), ""))).wanted
    assert riddle.solved_by(f": '{key}'.") and not riddle.solved_by(f" {key}1") and not riddle.solved_by("")


# -- templates and special tokens --------------------------------------------------------------------------------------


def test_the_chat_template_is_around_it(tokenizers: dict[str, Any]) -> None:
    haystack = Haystack(ENGLISH, tokenizers["bytes"])
    chat = Prompts(haystack, tokenizers["bytes"]).make("passkey", 600, 0.5)
    assert text_of(tokenizers["bytes"], chat.context).startswith("<|user|>A pass key")
    assert text_of(tokenizers["bytes"], chat.question).endswith("<|end|><|assistant|>The pass key is")
    plain = Prompts(haystack, tokenizers["bytes"], chat=False).make("passkey", 600, 0.5)
    assert "<|" not in text_of(tokenizers["bytes"], plain.context + plain.question)


def test_a_missing_or_strange_template_is_refused(tokenizers: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="no chat template; leave out --chat"):
        Prompts(Haystack(ENGLISH, tokenizers["words"]), tokenizers["words"], chat=True)
    monkeypatch.setattr(tokenizers["bytes"], "chat_template", TEMPLATE * 2)
    with pytest.raises(ValueError, match="2 times, not once; give --no-chat"):
        Prompts(Haystack(ENGLISH, tokenizers["bytes"]), tokenizers["bytes"])


def test_a_text_begins_with_the_token_that_its_tokenizer_puts_there(tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers["pieces"]
    prompt = Prompts(Haystack(ENGLISH, tokenizer), tokenizer).make("multikey", 800, 0.5)
    assert (prompt.context + prompt.question).count(tokenizer.bos_token_id) == 1
    assert prompt.context[0] == tokenizer.bos_token_id


def test_special_tokens_of_a_haystack_are_text(tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers["bytes"]
    haystack = Haystack("It ends.<|end|> " * 50, tokenizer)
    assert tokenizer.eos_token_id not in haystack.ids
    assert text_of(tokenizer, haystack.ids).startswith("It ends.<|end|>")


@pytest.mark.parametrize("text", ("", " \n\t"))
def test_an_empty_haystack_is_refused(tokenizers: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match="the haystack is empty"):
        Haystack(text, tokenizers["bytes"])


def test_a_short_haystack_is_read_round_and_round(tokenizers: dict[str, Any]) -> None:
    haystack = Haystack("The sea is deep. ", tokenizers["characters"])
    assert text_of(tokenizers["characters"], haystack.piece(4, 40)) == "sea is deep. The sea is deep. The sea is"
