"""What a speed measurement reads: rows of a batch that differ, from one text, and as long as they have to be."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Prompts:
    """Rows of token ids, each from another place of a text. A text that is too short begins again at its end.

    Attributes:
        tokens: of the whole text, int64 ``[N]``.
    """

    tokens: torch.Tensor

    def __post_init__(self) -> None:
        if self.tokens.ndim != 1 or len(self.tokens) == 0:
            raise ValueError(f"the text has no tokens (shape {tuple(self.tokens.shape)}); give one with words in it")

    def take(self, batch: int, first: int, last: int) -> torch.Tensor:
        """Tokens ``first .. last - 1`` of every row, int64 ``[batch, last - first]``."""
        count = len(self.tokens)
        begin = torch.arange(batch)[:, None] * (count // batch)
        return self.tokens[(begin + torch.arange(first, last)[None]) % count]

    def repeats(self, batch: int, length: int) -> bool:
        """Whether rows of ``length`` tokens share parts of the text, or hold some of it twice."""
        return batch * length > len(self.tokens)
