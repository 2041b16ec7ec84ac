"""What a layer does to its tokens before they are encoded, and what it fits for that.

What no calibration has is fitted once, from the first tokens that are packed: the mean and the balance of centred
keys, and what static codecs fit. It never changes once a block refers to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from kvbits.codecs import Codec
from kvbits.numerics import hadamard
from kvbits.schemes.scheme import Scheme
from kvbits.store.rows import Rows
from kvbits.transform import NOTHING, Transform
from kvbits.transform.rotary import Rotary
from kvbits.types import Params


class Pair(NamedTuple):
    """Transforms of keys and of values, and the blocks that their angles are of."""

    key: Transform
    value: Transform
    place: object = None


class Transforms:
    """What is done to keys and values of one layer before they are encoded, kept until something in it changes.

    Args:
        scheme: of the layer.
        rotary: of its keys, where the scheme takes their rotary embedding off.
        sinks: tokens before the first block.
    """

    def __init__(self, scheme: Scheme, rotary: Rotary | None, sinks: int) -> None:
        self.scheme, self.rotary, self.sinks = scheme, rotary, sinks
        self._kept: Pair | None = None
        self._rotations: tuple[torch.Tensor | None, torch.Tensor | None] | None = None

    def of(
        self, params: Params, rows: Rows, dropped: int, blocks: int, keys: torch.Tensor, values: torch.Tensor
    ) -> Pair:
        """Those of ``blocks`` in every row; nothing where there are none.

        Args:
            params: what has been fitted to keys.
            rows: the columns.
            dropped: tokens that every row has dropped behind its window.
            blocks: of the longest row.
            keys, values: whose channels and device are meant; always the same.
        """
        if not blocks:
            return _NOTHING
        kept, place = self._kept, (rows.runs, rows.first_epoch, dropped, blocks)
        if kept is None or kept.place != place or fitted_in(kept.key, params) is not kept.key:
            self._kept = kept = self.make(params, rows, dropped, blocks, keys, values)
        return kept

    def make(
        self, params: Params, rows: Rows, dropped: int, blocks: int, keys: torch.Tensor, values: torch.Tensor
    ) -> Pair:
        """The same made anew; nothing changes until :meth:`keep` but the rotations, which hold for good."""
        if self._rotations is None:
            self._rotations = _rotation(self.scheme.key, keys), _rotation(self.scheme.value, values)
        rope, place = None, (rows.runs, rows.first_epoch, dropped, blocks)
        if self.rotary is not None:
            rope = self.rotary.rope(rows, self.sinks + dropped, self.scheme.block, blocks, keys.device)
        key_rotation, value_rotation = self._rotations
        key = Transform(params.get("mean"), key_rotation, rope, self.scheme.pre_rope, params.get("balance"))
        return Pair(key, Transform(rotation=value_rotation), place)

    def keep(self, made: Pair) -> None:
        """Hand these out from now on."""
        self._kept = made


_NOTHING = Pair(NOTHING, NOTHING)


def _rotation(codec: Codec, x: torch.Tensor) -> torch.Tensor | None:
    return hadamard.rotation(x.shape[3]).to(x.device) if codec.rotates else None


def fitted_in(transform: Transform, params: Params) -> Transform:
    """The transform of keys with the mean and the balance that ``params`` have."""
    mean, balance = params.get("mean"), params.get("balance")
    same = transform.mean is mean and transform.balance is balance
    return transform if same else replace(transform, mean=mean, balance=balance)


def fit_first(
    scheme: Scheme,
    side: int,
    fitted: Params,
    mean: torch.Tensor | None,
    samples: Callable[[Transform], torch.Tensor],
    transform: Transform,
) -> tuple[Params, bool]:
    """What to fit of one side from the first tokens that are packed, and whether that is final.

    Args:
        scheme: of the layer.
        side: 0 for keys, 1 for values.
        fitted: params from a calibration.
        mean: of keys, where it has been taken before.
        samples: these tokens ``[N, H, T, D]``, behind a transform.
        transform: what is done to them before they are encoded, but for what is fitted here.
    """
    codec, params = (scheme.key, scheme.value)[side], dict(fitted)
    if side == 0 and mean is not None:
        params["mean"] = mean
    if side == 0 and scheme.centred and "mean" not in params:
        before_rope = replace(transform, mean=None, balance=None, rotation=None, whole=True)
        params["mean"] = samples(before_rope).float().mean(dim=(0, 2))
    if side == 0 and scheme.centred and codec.rotates and not codec.is_fitted:
        params["balance"] = _balance(samples(replace(fitted_in(transform, params), rotation=None)))
    if not codec.is_fitted or set(fitted) - {"mean"}:
        return params, True
    first = samples(fitted_in(transform, params) if side == 0 else transform)
    params.update(codec.fit(first))
    # All zeros say nothing of what will come. They stay zeros under any other scale, but not beside a zero.
    return params, codec.format.zero or bool(first.any())


def _balance(x: torch.Tensor) -> torch.Tensor:
    """What channels of centred keys ``x [N, H, T, D]`` are divided by before they are rotated: float32 ``[H, D]``.

    A rotation mixes channels, so that a large one takes the bits of all. Divided by their deviations all would be
    equal, but large keys often meet large queries, and deserve more than that: the square root is between.
    """
    deviation = x.float().square().mean(dim=(0, 2)).sqrt()
    least = 0.01 * deviation.mean(dim=-1, keepdim=True)  # what hardly moves in so few tokens may do so later
    return torch.where(least > 0, deviation.maximum(least), 1.0).sqrt()
