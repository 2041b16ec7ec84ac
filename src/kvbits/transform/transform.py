"""``Transform``: what was done to keys or values before they were encoded, and is undone behind the decoder.

Packed is ``(unrope(x) - mean) @ rotation``; decoding gives back ``rope(packed @ rotation^T + mean)``. Where the rotary
embedding was taken off the mean alone, packed is ``(x - rope(mean)) / balance @ rotation``. Kernels fold most
of it into the query and into the output, and never touch a packed element twice for it. The exact tokens of a view
are never transformed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kvbits.numerics import rope
from kvbits.transform.rotate import rotate

NO_ROPE, UNROPED_KEYS, UNROPED_MEAN = range(3)
"""What of packed keys was unroped before they were encoded, as kernels know it."""


@dataclass(frozen=True)
class Rope:
    """Rotary angles of packed keys: where each block begins, and how much is added for each token of a block.

    The angle of token ``m`` of block ``n`` is ``base[n] + step[m]``, so no angle is stored for each token.

    Attributes:
        base_cos, base_sin: float32 ``[B or 1, N, R/2]``, of the first token of each packed block.
        step_cos, step_sin: float32 ``[tokens of a block, R/2]``; row 0 is angle 0.
        interleaved: which channels make a pair; see :mod:`kvbits.numerics.rope`.
    """

    base_cos: torch.Tensor
    base_sin: torch.Tensor
    step_cos: torch.Tensor
    step_sin: torch.Tensor
    interleaved: bool = False

    @property
    def steps(self) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """All that the angles within a block are."""
        return self.step_cos, self.step_sin, self.interleaved

    def has(self, steps: tuple[torch.Tensor, torch.Tensor, bool]) -> bool:
        """Whether :attr:`steps` are these very tensors."""
        return self.step_cos is steps[0] and self.step_sin is steps[1] and self.interleaved == steps[2]

    def angles(self, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of the tokens of blocks ``first .. last - 1``: ``[B or 1, n * tokens, R/2]`` each."""
        base_cos, base_sin = (x[:, first:last, None] for x in (self.base_cos, self.base_sin))
        cos = base_cos * self.step_cos - base_sin * self.step_sin
        sin = base_sin * self.step_cos + base_cos * self.step_sin
        return cos.flatten(1, 2), sin.flatten(1, 2)


@dataclass(frozen=True)
class Transform:
    """See the module's docstring.

    Attributes:
        mean: float32 ``[H, D]``, subtracted before the rotation.
        balance: float32 ``[H, D]``, what channels are divided by before the rotation, of keys without ``whole``.
        rotation: float32 ``[D, D]``: :func:`kvbits.numerics.hadamard.rotation`.
        rope: keys only.
        whole: the rotary embedding was taken off the whole key; else off its mean alone.
    """

    mean: torch.Tensor | None = None
    rotation: torch.Tensor | None = None
    rope: Rope | None = None
    whole: bool = True
    balance: torch.Tensor | None = None

    @property
    def is_nothing(self) -> bool:
        """Whether packed is just what it was."""
        changes = (self.mean, self.rotation, self.balance)
        return all(change is None for change in changes) and (self.rope is None or not self.whole)

    def query(self, query: torch.Tensor) -> torch.Tensor | None:
        """What queries ``[B, Hq, q, D]`` meet packed keys with, beside their mean: float32, or None where unchanged."""
        if self.rotation is None and self.balance is None:
            return None
        query = query.float()
        if self.balance is not None:
            grouped = query.unflatten(1, (self.balance.shape[0], -1))
            query = (grouped * self.balance[:, None, None]).flatten(1, 2)
        return query if self.rotation is None else query @ self.rotation

    def of_row(self, row: int | None) -> Transform:
        """The same for one row of the batch; None is all of them."""
        if row is None or self.rope is None or self.rope.base_cos.shape[0] == 1:
            return self
        base_cos, base_sin = (x[row : row + 1] for x in (self.rope.base_cos, self.rope.base_sin))
        return replace(self, rope=replace(self.rope, base_cos=base_cos, base_sin=base_sin))

    def apply(self, x: torch.Tensor, first: int) -> torch.Tensor:
        """Exact blocks ``x [B, H, t, D]``, the first of them block ``first``, as they are encoded: float32.

        Every step is rounded as it stands here, so that an encoder that takes them itself gives the same bits.
        """
        if self.rope is not None or self.mean is not None or self.balance is not None:
            x = x.float()
        cos_sin = None if self.rope is None else self._cos_sin(first, x)
        if self.rope is not None and cos_sin is not None and self.whole:
            x = rope.unrope(x, *cos_sin, self.rope.interleaved)
        if self.mean is not None:
            x = x - self._mean(x, cos_sin)
        if self.balance is not None:
            x = x / self.balance[:, None]
        return x.float() if self.rotation is None else rotate(x)

    def apply_to_blocks(self, x: torch.Tensor, first: int) -> torch.Tensor:
        """The same of whole blocks: ``x [B, H, n, T, D]``; as they came where nothing is done to them."""
        return x if self.is_nothing else self.apply(x.flatten(2, 3), first).unflatten(2, (-1, x.shape[3]))

    def undo(self, x: torch.Tensor, first: int) -> torch.Tensor:
        """Decoded blocks ``x [B, H, t, D]``, the first of them block ``first``, as attention sees them."""
        cos_sin = None if self.rope is None else self._cos_sin(first, x)
        if self.rotation is not None:
            x = x @ self.rotation.to(x.dtype).t()
        if self.balance is not None:
            x = x * self.balance[:, None].to(x.dtype)
        if self.mean is not None:
            x = x + self._mean(x, cos_sin)
        if self.rope is not None and cos_sin is not None and self.whole:
            x = rope.apply(x, *cos_sin, self.rope.interleaved)
        return x

    def _cos_sin(self, first: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.rope is not None
        last = first + x.shape[2] // self.rope.step_cos.shape[0]
        cos, sin = self.rope.angles(first, last)
        return cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)

    def _mean(self, x: torch.Tensor, cos_sin: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
        """What is subtracted: ``[H, 1, D]``, or ``[B or 1, H, t, D]`` where it is roped."""
        assert self.mean is not None
        mean = self.mean.to(x.dtype)[:, None]
        if self.rope is None or cos_sin is None or self.whole:
            return mean
        return rope.apply(mean.expand(cos_sin[0].shape[0], -1, x.shape[2], -1), *cos_sin, self.rope.interleaved)


NOTHING = Transform()
"""Elements as they came."""
