"""``SharedColumns``: the columns of a context that several ranks share, who must all read the same."""

from __future__ import annotations

import zlib

import torch

from kvbits.hf.columns import Columns
from kvbits.hf.rotation.rotary import Rotaries
from kvbits.parallel.ranks import Ranks


def padded(mask: torch.Tensor | None) -> bool:
    """Whether a mask calls any column padding."""
    return mask is not None and not bool((mask != 0).all())


class SharedColumns(Columns):
    """As :class:`Columns`, and sees to it that all ranks read the same.

    Attributes:
        chunk: the ids ``[B, q]`` of which each rank reads a slice in the call to come; None where each reads them all.
    """

    def __init__(
        self, ranks: Ranks, device: torch.device, rotaries: Rotaries | None = None, strict: bool = False
    ) -> None:
        super().__init__(rotaries, strict)
        self.ranks, self.device = ranks, device
        self.chunk: torch.Tensor | None = None

    def place(self, positions: torch.Tensor | None) -> None:
        """As there; slices of a chunk, which each rank places for itself, are together where the model would count."""
        super().place(positions if self.chunk is None else None)

    def begin(self, mask: torch.Tensor | None, ids: torch.Tensor | None = None) -> None:
        """Announce a forward.

        Raises:
            ValueError: on every rank, for padding, for more than ids, or where ranks read different ids.
        """
        if not self.waiting:
            ids = ids if self.chunk is None else self.chunk
            self._require_alike(mask, ids)
        super().begin(mask, ids)

    def _require_alike(self, mask: torch.Tensor | None, ids: torch.Tensor | None) -> None:
        refusal = None
        if ids is None:
            refusal = (
                "a shared context is read from input_ids alone: no embeddings, no pictures and no mask of one's own"
            )
        elif padded(mask):
            refusal = (
                "a shared context has no padding: pass prompts of one length, or one by one (attention_mask all ones)"
            )
        try:  # also by a rank that refuses: others may not, and would wait for it
            self._compare(ids, refusal is not None)
        except ValueError:
            if refusal is None:
                raise
        if refusal is not None:
            raise ValueError(refusal)

    def _compare(self, ids: torch.Tensor | None, refused: bool) -> None:
        ids = torch.empty(0, 0) if ids is None else ids
        checksum = zlib.crc32(ids.detach().to("cpu", torch.int64).contiguous().numpy().tobytes())
        self.ranks.require_alike(
            "the columns held, the shape and checksum of the new ids, and whether this rank refuses the call,",
            self.rows.columns, *ids.shape, checksum, int(refused), device=self.device,
        )  # fmt: skip

    def _empty(self) -> Columns:
        return SharedColumns(self.ranks, self.device, self.rotaries, self.strict)
