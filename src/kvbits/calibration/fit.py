"""Fit codecs to the samples of one layer, in every form in which a scheme encodes them.

Keys are fitted before or after their rotary embedding, centred or not, and both sides rotated where the codec asks for
it. Gradients go through the same orthogonal steps as the values themselves, and are squared in the end: the weight of
an element is the squared gradient with respect to that very element (KVQuant, arXiv 2401.18079, appendix E, eq. 7).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kvbits.codecs import Codec
from kvbits.files import Calibration, Side, load_tensors, variant
from kvbits.numerics import hadamard, rope
from kvbits.schemes.scheme import BLOCK_TOKENS
from kvbits.transform.rotary import Rotary

SHORTEST = 32
"""Tokens of a sample, beside the sinks, that a fit needs at least."""


@dataclass(frozen=True)
class Fit:
    """One codec to be fitted to one side of a layer, and what its values are put through before."""

    side: Side
    codec: Codec
    pre_rope: bool = False
    centred: bool = False

    @property
    def form(self) -> tuple[str, bool, bool, bool]:
        """Fits of the same form see the same samples."""
        return self.side, self.pre_rope, self.centred, self.codec.rotates

    def prefix(self, layer: int) -> str:
        """What its parameters are called, in :mod:`kvbits.files`, up to their own names."""
        kind = f".{variant(self.pre_rope, self.centred)}" if self.side == "key" else ""
        return f"{layer}.{self.side}{kind}.{self.codec}."

    def is_in(self, calibration: Calibration, layer: int) -> bool:
        """Whether it has been fitted."""
        return calibration.has(layer, self.side, self.codec, pre_rope=self.pre_rope, centred=self.centred)


def fit_layer(
    sides: Mapping[Side, Samples], layer: int, fits: Sequence[Fit], weighted: bool = True
) -> dict[str, torch.Tensor]:
    """Parameters of one layer under their names in :mod:`kvbits.files`, float32 on the CPU."""
    found = {}
    for form, group in itertools.groupby(sorted(fits, key=lambda fit: fit.form), key=lambda fit: fit.form):
        side, pre_rope, centred, rotates = form
        x, weights = sides[side].form(pre_rope, centred, rotates)
        for fit in group:
            params = fit.codec.fit(_blocks(fit.codec, x), _blocks(fit.codec, weights) if weighted else None)
            found.update({fit.prefix(layer) + name: value.float().cpu() for name, value in params.items()})
    return found


class Samples:
    """One side of one layer, all samples: float32 ``[N, H, T, D]`` on a device, without sinks.

    Attributes:
        x, gradient: keys as they were before their rotary embedding, where it can be taken off.
        mean: of each channel of ``x``, float32 ``[H, D]``.

    Args:
        files: safetensors, one a sample, as :mod:`kvbits.calibration` has collected them.
        layer, side: which.
        sinks: first tokens of each that are left out.
        interleaved: how the keys' rotary embedding pairs channels, None where it is not taken off.
        device: where to compute.
    """

    def __init__(
        self,
        files: Sequence[Path],
        layer: int,
        side: Side,
        sinks: int,
        interleaved: bool | None,
        device: torch.device,
    ) -> None:
        name = f"{layer}.{side}"
        names = (name, f"{name}.gradient")
        loaded = [load_tensors(file, names) for file in files]
        self.x, self.gradient = (torch.stack([one[n][:, sinks:] for one in loaded]).to(device).float() for n in names)
        # Only ratios matter, and the square of a tiny one would vanish.
        self.gradient /= self.gradient.abs().amax().clamp(min=1e-30)
        self.rotary: Rotary | None = None
        if interleaved is not None:
            frequencies = load_tensors(files[0], (f"{name}.frequencies",))[f"{name}.frequencies"]
            self.rotary = Rotary(frequencies, interleaved)
            self.cos, self.sin = self.rotary.cos_sin(torch.arange(sinks, sinks + self.x.shape[2], device=device))
            self.x, self.gradient = (self._roped(x, rope.unrope) for x in (self.x, self.gradient))
        self.mean = self.x.mean((0, 2), dtype=torch.float64).float()

    def _roped(self, x: torch.Tensor, how: Callable[..., torch.Tensor]) -> torch.Tensor:
        return how(x, self.cos, self.sin, self.rotary.interleaved) if self.rotary is not None else x

    def form(self, pre_rope: bool, centred: bool, rotates: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Samples as a codec sees them, and the squared gradients with respect to these."""
        x = self.x - self.mean[:, None] if centred else self.x
        gradient = self.gradient
        if not pre_rope:
            x, gradient = self._roped(x, rope.apply), self._roped(gradient, rope.apply)
        if rotates:
            rotation = hadamard.rotation(x.shape[-1]).to(x.device)
            x, gradient = x @ rotation, gradient @ rotation
        return x, gradient.square()


def _blocks(codec: Codec, x: torch.Tensor) -> torch.Tensor:
    """``[N, H, T, D]`` as blocks ``[n, H, block, D]`` for a codec whose scales or outliers are a block's own."""
    if codec.format.group == 0 and codec.format.per in ("channel", "layer"):
        return x
    tokens = x.shape[2]
    block = next(size for size in (BLOCK_TOKENS, 64, SHORTEST) if size <= tokens)
    if block % codec.block_multiple:
        raise ValueError(f"{codec} needs samples of {codec.block_multiple} tokens beside the sinks, not {tokens}")
    whole = x[:, :, : tokens // block * block].unflatten(2, (-1, block))
    blocks: torch.Tensor = whole.transpose(1, 2).flatten(0, 1)
    return blocks
