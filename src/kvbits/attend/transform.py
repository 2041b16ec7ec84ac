"""``Transform``: what was done to keys or values before they were encoded, and is undone behind the decoder.

Packed is ``(unrotate(x) - mean) @ rotation``; decoding gives back ``rotate(packed @ rotation^T + mean)``. Kernels fold
most of it into the query and into the output, and never touch a packed element twice for it. The exact tokens of a
view are never transformed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvbits.numerics import rope


@dataclass(frozen=True)
class Rope:
    """Angles of a row's own tokens, for keys that are stored as they were before the rotary embedding.

    Attributes:
        cos, sin: float32 ``[B or 1, own tokens, R/2]``; row ``j`` belongs to own token ``j``, sinks included.
        interleaved: which channels make a pair; see :mod:`kvbits.numerics.rope`.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool = False


@dataclass(frozen=True)
class Transform:
    """See the module's docstring.

    Attributes:
        mean: float32 ``[H, D]``, subtracted before everything else but the rotary embedding.
        rotation: float32 orthogonal ``[D, D]``.
        rope: keys only.
    """

    mean: torch.Tensor | None = None
    rotation: torch.Tensor | None = None
    rope: Rope | None = None

    def undo(self, x: torch.Tensor, first: int) -> torch.Tensor:
        """Decoded blocks ``x [B, H, t, D]``, whose own tokens begin at ``first``, as attention sees them."""
        if self.rotation is not None:
            x = x @ self.rotation.to(x.dtype).t()
        if self.mean is not None:
            x = x + self.mean.to(x.dtype)[:, None]
        if self.rope is not None:
            tokens = slice(first, first + x.shape[2])
            cos, sin = (angle[:, None, tokens].to(x.dtype) for angle in (self.rope.cos, self.rope.sin))
            x = rope.rotate(x, cos, sin, self.rope.interleaved)
        return x
