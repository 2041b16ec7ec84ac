"""``nuq4 nuq3 nuq2``: levels fitted to the layer's own values, weighted by sensitivity (KVQuant, arXiv 2401.18079).

One table of 2^b levels for each layer and tensor, in [-1, 1], is stretched to the range of each vector:
``x ~ scale * (table[code] - zero)`` (section 3.3). Calibration finds it by k-means, each value weighted by
``F s^2``: the squared gradient of the loss with respect to it, and the half-range that its error is stretched by
(appendix E, eq. 7). Q-Norm (section 3.6) shifts and stretches the levels on decoding, so that values have the mean
and the deviation again that they had before.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from kvbits.codecs.grouped import Grouped, grouped_pattern
from kvbits.numerics import affine, codebook, groups, kmeans, outliers
from kvbits.types import Params


@dataclass(frozen=True)
class NonUniform(Grouped):
    """Calibrated tables of 2, 3 or 4 bits. See :class:`Grouped`.

    Attributes:
        qnorm: decode with levels that restore mean and deviation.
    """

    name: ClassVar[str] = "nuq"
    chooses = "open range"
    allowed_bits: ClassVar[tuple[int, ...]] = (2, 3, 4)
    levels: ClassVar[Literal["uniform", "table"]] = "table"
    pattern = re.compile(grouped_pattern("nuq", allowed_bits, "-token|-channel|-static").pattern + "(?P<qnorm>-qnorm)?")
    examples = (
        "nuq4-static", "nuq3-static", "nuq2-static", "nuq4-token", "nuq3-token-gs32", "nuq2-channel-gs128",
        "nuq4-static-1%", "nuq3-token-1%", "nuq2-static-1%-qnorm", "nuq2-token-2%-qnorm",
    )  # fmt: skip

    qnorm: bool = False

    def __post_init__(self) -> None:
        if self.calibrated:
            raise ValueError("nuq is always calibrated: leave calibrated= out")
        super().__post_init__()

    @classmethod
    def from_match(cls, match: re.Match[str]) -> NonUniform:
        plain = super().from_match(match)
        return cls(plain.bits, plain.per, plain.group, plain.outliers, qnorm=bool(match["qnorm"]))

    def __str__(self) -> str:
        return super().__str__() + ("-qnorm" if self.qnorm else "")

    def spell_groups(self) -> str:
        return "-token" + super().spell_groups() if self.per == "token" else super().spell_groups()

    @property
    def is_fitted(self) -> bool:
        return True

    @property
    def needs_calibration(self) -> bool:
        return True

    def fit(self, samples: torch.Tensor, weights: torch.Tensor | None = None) -> Params:
        params = super().fit(samples, weights)
        if self.per == "channel" and not self.static:  # whole groups
            whole = samples.shape[-2] // self.group * self.group
            samples, weights = samples[..., :whole, :], None if weights is None else weights[..., :whole, :]
        x = samples.float()
        error = torch.ones_like(x) if weights is None else weights.float()
        if self.static:
            scale, zero, dim = params["scale"][:, None], params["zero"][:, None], -1  # [H, 1, D]
            levels = affine.to_levels(x, scale, zero)
            inside = levels.abs() <= 1 + 1e-5
        else:
            tokens, channels = x.shape[-2:]
            grouped, dim = groups.split(x, self.per, self.group)
            error, _ = groups.split(error, self.per, self.group)
            real = groups.weights(channels, self.per, self.group, x.device)
            count = round(self.outliers * tokens * channels)  # of a sample, which is longer than a block
            chosen = outliers.find(grouped, dim, count, real) if count else None
            scale, zero = self.choose(grouped, dim, real, chosen)
            levels = affine.to_levels(grouped, scale, zero)
            inside = torch.ones_like(levels, dtype=torch.bool) if chosen is None else ~chosen
            if real is not None:
                inside &= real > 0
        # Relative to the largest: squares of 1e30 overflow, and those of 1e-30 vanish. Weight 0 rather than a selection
        # gives the same sums at a third of the time.
        stretch = scale.float() / affine.safe_divisor(scale.abs().amax())
        table = kmeans.fit(levels, (error * stretch.square()).mul_(inside), 2**self.bits)
        params["table"] = table
        if self.qnorm:
            before, after = levels[inside], table[codebook.nearest(levels[inside], table).long()]
            ratio = before.std(correction=0) / after.std(correction=0).clamp(min=1e-12)
            params["levels"] = table * ratio + before.mean() - after.mean() * ratio
        return params

    def table(self, params: Params) -> torch.Tensor:
        return params["levels" if self.qnorm else "table"]

    def edges(self, params: Params) -> torch.Tensor:
        return codebook.midpoints(params["table"])  # also where Q-Norm decodes with other levels

    def choose(
        self, grouped: torch.Tensor, dim: int, weights: torch.Tensor | None, chosen: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # A fitted table need not have a level of 1, by which constant groups are exact elsewhere.
        return affine.choose_qparams(grouped, dim, *self.span, outside=chosen, exact_constants=False)
