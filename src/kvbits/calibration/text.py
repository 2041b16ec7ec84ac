"""The text of a calibration or a measurement: windows of token ids, and what a model can read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


def sample_ids(
    texts: str | Sequence[str] | torch.Tensor,
    tokenizer: PreTrainedTokenizerBase | None,
    samples: int,
    length: int,
    longest: int | None = None,
    *,
    what: str = "samples",
    spread: bool = True,
) -> torch.Tensor:
    """Token ids of the samples, int64 ``[N, T]``: windows evenly spaced over the text, the same every time.

    Each begins with what the tokenizer puts before a text (Llama's ``<s>``), as in use. Ids are taken as they are.

    Args:
        texts: one or several, which are joined; or token ids.
        tokenizer: the model's, for text.
        samples, length: how many windows of how many tokens.
        longest: tokens that the model was made for, if that is known.
        what: what errors call the samples.
        spread: False takes windows one after the other from the start of the text.
    """
    if isinstance(texts, torch.Tensor):
        if texts.ndim != 2 or texts.is_floating_point() or not texts.numel():
            raise ValueError(f"token ids are int64 [N, T], not {texts.dtype} {tuple(texts.shape)}")
        return texts.detach().cpu().long()
    if tokenizer is None:
        raise TypeError("text needs the model's tokenizer: pass tokenizer=, or token ids in place of text")
    if samples < 1 or length < 1:
        raise ValueError(f"{samples} {what} of {length} tokens are none; give 1 or more")
    if longest is not None and length > longest:
        raise ValueError(f"length {length} is more than the {longest} tokens that the model was made for")
    text = texts if isinstance(texts, str) else "\n\n".join(texts)
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.int64)
    first = [x for x in tokenizer("")["input_ids"] if x == tokenizer.bos_token_id][:1]
    body = length - len(first)
    windows = len(ids) // body if body else 0
    if windows < samples:
        shorter = len(ids) // samples + len(first)
        hints = ["a longer text", *([f"{what} {windows}"] if windows else [])]
        hints += [f"length {shorter}"] if shorter > 1 + len(first) else []
        raise ValueError(
            f"the text has {len(ids)} tokens, enough for {windows} {what} of {length}; give {', or '.join(hints)}"
        )
    starts = [(i * windows // samples if spread else i) * body for i in range(samples)]
    return torch.stack([torch.cat([torch.tensor(first, dtype=torch.int64), ids[s : s + body]]) for s in starts])


def longest_text(config: PretrainedConfig) -> int | None:
    """Tokens that a model was made for; None where its configuration does not say."""
    longest = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return longest if isinstance(longest, int) and longest > 0 else None


def refuse_foreign(model: PreTrainedModel, ids: torch.Tensor) -> None:
    """Raise ValueError for token ids that a model does not know."""
    vocabulary = getattr(model.get_input_embeddings(), "num_embeddings", None)
    if vocabulary is not None and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        raise ValueError(
            f"token ids from {int(ids.min())} to {int(ids.max())} are not all among the {vocabulary} that the model "
            "knows: they are another model's"
        )
