"""A tokenizer of single characters."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def tokenizer(characters: str, **special: str) -> PreTrainedTokenizerFast:
    """One token for each of ``characters``, after those of ``special``; the first of these is what is unknown."""
    words = [*special.values(), *characters]
    found = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    found.pre_tokenizer, found.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=found, **special)
