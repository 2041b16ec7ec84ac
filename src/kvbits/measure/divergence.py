"""What two runs say of the same tokens, compared: divergence, perplexity, the same first choice.

All sums over a vocabulary are float32, as models compute them; everything over tokens is float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch


def log_probabilities(logits: torch.Tensor) -> torch.Tensor:
    """Logits of any dtype as float32 log probabilities, ``[..., V]``."""
    return logits.float().log_softmax(-1)


def divergence(exact: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """Kullback-Leibler divergence of ``found`` from ``exact``, in nats for each token.

    Args:
        exact, found: log probabilities ``[..., V]``. A token that ``exact`` rules out (-inf) adds nothing.

    Returns:
        ``[...]``; infinite where ``found`` rules out what ``exact`` does not.
    """
    probability = exact.exp()
    return torch.where(probability == 0, 0.0, probability * (exact - found)).sum(-1)  # NaN stays NaN


@dataclass
class Scores:
    """What one run said of every token, window by window.

    Attributes:
        nll: of each token but the first of a window, given those before it: float64 ``[T - 1]``, in nats.
        kl: divergence from the exact run of what it expects after each token: float64 ``[T]``.
        same: whether both expect the same token next: bool ``[T]``.
    """

    nll: list[torch.Tensor] = field(default_factory=list)
    kl: list[torch.Tensor] = field(default_factory=list)
    same: list[torch.Tensor] = field(default_factory=list)

    def figures(self, exact: Scores) -> tuple[dict[str, float | None], dict[str, str]]:
        """The figures, and for each that is None the reason.

        Perplexity has the standard error over tokens; ``nll_change`` is the mean over tokens of how much more
        surprising each became (the logarithm of the ratio of perplexities), with that of the paired differences.
        ``kl_se`` is the standard error over windows, whose tokens are not independent.
        """
        nll, change = torch.cat(self.nll), torch.cat(self.nll) - torch.cat(exact.nll)
        kl, windows = torch.cat(self.kl), torch.stack([one.mean() for one in self.kl])
        mean = float(nll.mean())
        ppl = math.exp(mean) if mean < math.log(1e300) else math.inf
        found: dict[str, float | None] = {
            "ppl": ppl,
            "ppl_se": ppl * _standard_error(nll),
            "nll_change": float(change.mean()),
            "nll_change_se": _standard_error(change),
            "kl_mean": float(kl.mean()),
            "kl_se": _standard_error(windows),
            "kl_median": float(kl.quantile(0.5)),
            "kl_p999": float(kl.quantile(0.999)),
            "top1": float(torch.cat(self.same).double().mean()) if not bool(kl.isnan().any()) else math.nan,
        }
        return found, _without_the_infinite(found, nll, kl, len(windows))


def _without_the_infinite(found: dict[str, Any], nll: torch.Tensor, kl: torch.Tensor, windows: int) -> dict[str, str]:
    """Replace what is no finite number by None, and say why."""
    missing = {}
    for name, value in found.items():
        if math.isfinite(value):
            continue
        found[name] = None
        values, what = (kl, "divergence") if name.startswith(("kl", "top1")) else (nll, "surprise")
        wrong = int((~values.isfinite()).sum())
        if wrong:
            missing[name] = f"the {what} of {wrong:,} of {len(values):,} tokens is no finite number"
        elif name == "kl_se" and windows < 2:
            missing[name] = "one window has no spread"
        else:
            missing[name] = "too large for a number" if len(values) > 1 else "one token has no spread"
    return missing


def _standard_error(values: torch.Tensor) -> float:
    """Of the mean of independent values; NaN for fewer than two."""
    return float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else math.nan
