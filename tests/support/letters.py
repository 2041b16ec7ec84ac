"""A tokenizer of letters."""

from __future__ import annotations

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import zoo

WORDS = [f"word{i}" for i in range(zoo.VOCABULARY - 2)]


def tokenizer(first: str = "word") -> PreTrainedTokenizerFast:
    vocabulary = {"<pad>": 0, "<s>": 1, **{word.replace("word", first): i + 2 for i, word in enumerate(WORDS)}}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", bos_token="<s>")
