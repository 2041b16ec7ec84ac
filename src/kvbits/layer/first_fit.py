"""What a layer does to its tokens before they are encoded, and what it fits for that.

What no calibration has told is fitted once, from the first tokens that are packed: the mean and the balance of centred
keys, and what static codecs fit. It never changes once a block refers to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from kvbits.numerics import hadamard
from kvbits.schemes.scheme import Scheme
from kvbits.store.rows import Rows
from kvbits.transform import Transform
from kvbits.transform.rotary import Rotary
from kvbits.types import Params


class Transforms:
    """What is done to keys and values of one layer before they are encoded, kept until something in it changes.

    Args:
        scheme: of the layer.
        rotary: of its keys, where the scheme takes their rotary embedding off.
        sinks: tokens before the first block.
    """

    def __init__(self, scheme: Scheme, rotary: Rotary | None, sinks: int) -> None:
        self.scheme, self.rotary, self.sinks = scheme, rotary, sinks
        self._held: tuple[Transform, Transform, object] | None = None

    def of(
        self,
        key_params: Params,
        rows: Rows,
        dropped: int,
        blocks: int,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> tuple[Transform, Transform]:
        """Those of keys and of values.

        Args:
            key_params: what has been fitted of keys.
            rows: the columns.
            dropped: tokens that every row has left behind its window.
            blocks: of every row.
            keys, values: whose channels and device are meant; always the same.
        """
        mean, balance = key_params.get("mean"), key_params.get("balance")
        place = (rows.runs, rows.first_epoch, dropped, blocks)
        held = self._held
        if held is not None and held[0].mean is mean and held[0].balance is balance and held[2] == place:
            return held[0], held[1]
        scheme, device = self.scheme, keys.device
        rotations = [
            hadamard.rotation(x.shape[3]).to(device) if codec.rotates else None
            for codec, x in ((scheme.key, keys), (scheme.value, values))
        ]
        rope = None
        if self.rotary is not None and blocks:
            rope = self.rotary.rope(rows, self.sinks + dropped, scheme.block, blocks, device)
        pair = Transform(mean, rotations[0], rope, scheme.pre_rope, balance), Transform(rotation=rotations[1])
        self._held = (*pair, place)
        return pair


def fit_first(
    scheme: Scheme,
    side: int,
    fitted: Params,
    mean: torch.Tensor | None,
    samples: Callable[[Transform], torch.Tensor],
    transform: Callable[[Params], Transform],
) -> tuple[Params, bool]:
    """What to fit of one side from the first tokens that are packed, and whether that is final.

    Args:
        scheme: of the layer.
        side: 0 for keys, 1 for values.
        fitted: params from a calibration.
        mean: of keys, where it has been taken before.
        samples: these tokens ``[N, H, T, D]``, behind a transform.
        transform: what is done to them before they are encoded, given the params of keys.
    """
    codec, params = (scheme.key, scheme.value)[side], dict(fitted)
    if side == 0 and mean is not None:
        params["mean"] = mean
    if side == 0 and scheme.centred and "mean" not in params:
        before_rope = replace(transform({}), rotation=None, whole=True)
        params["mean"] = samples(before_rope).float().mean(dim=(0, 2))
    if side == 0 and scheme.centred and codec.rotates and not codec.is_fitted:
        params["balance"] = _balance(samples(replace(transform(params), rotation=None)))
    if not codec.is_fitted or set(fitted) - {"mean"}:
        return params, True
    first = samples(transform(params))
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
