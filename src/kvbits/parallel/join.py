"""How partial attention becomes attention over the whole context: by its log-sums (log-sum-exp).

What one rank sees of its own blocks is a softmax over these alone, and the log of the sum that it was divided by. The
softmax over all is the mean of them, weighted by the exponentials of those logs (Milakov & Gimelshein, arXiv
1805.02867). Both are exchanged in float32, in one collective for each layer. All ranks add up in the same order, so
what they have computed alike before they compute alike after.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from kvbits.attend import Call, Partial
from kvbits.numerics.cast import narrow
from kvbits.parallel.ranks import Ranks


class Together:
    """All ranks ask the same queries: decode steps, drafts, chunks that each rank computes as a whole.

    Args:
        ranks: who holds the rest.
        owns_tail: whether this rank is the one that attends to the exact tokens, which all of them hold.
    """

    def __init__(self, ranks: Ranks, owns_tail: bool) -> None:
        self.ranks, self.owns_tail = ranks, owns_tail

    def join(self, call: Call, partial: Partial) -> torch.Tensor:
        """See :class:`kvbits.attend.Shard`."""
        out, log_sums = partial(_over(call, "packed"))
        if self.owns_tail:
            out, log_sums = merge(*_stack((out, log_sums), partial(_over(call, "exact"))))
        out, log_sums = merge(*_parted(self.ranks.gather(_joined(out, log_sums))))
        return narrow(with_sinks(out, log_sums, call.sink_logits), call.query.dtype)


class Sliced:
    """Each rank asks for a slice of the newest tokens: rank 0 for the first, and so on.

    The queries visit all ranks for the packed blocks. The exact tokens, the slices of the others among them, are here.
    """

    def __init__(self, ranks: Ranks, anything_packed: bool) -> None:
        self.ranks, self.anything_packed = ranks, anything_packed

    def join(self, call: Call, partial: Partial) -> torch.Tensor:
        """See :class:`kvbits.attend.Shard`. ``call`` has the queries of this rank's slice."""
        tokens = call.query.shape[2]
        newer = (self.ranks.world - 1 - self.ranks.rank) * tokens
        parts = [partial(_over(call, "exact", newer))]
        if self.anything_packed:
            everyone = replace(_over(call, "packed"), query=self.ranks.gather_tokens(call.query))
            own = _joined(*partial(everyone)).unflatten(2, (-1, tokens)).movedim(2, 0)
            parts.append(merge(*_parted(self.ranks.exchange(own))))
        out, log_sums = merge(*_stack(*parts))
        return narrow(with_sinks(out, log_sums, call.sink_logits), call.query.dtype)


def _over(call: Call, what: str, newest: int = 0) -> Call:
    """The call over packed blocks or exact tokens alone, causal, without sinks in its denominator."""
    view = call.view.packed_only() if what == "packed" else call.view.exact_only(newest)
    return replace(call, view=view, mask=None, sink_logits=None)


def merge(outs: torch.Tensor, log_sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over several pieces of a context from that over each.

    Args:
        outs: ``[pieces, ..., D]``.
        log_sums: ``[pieces, ...]``; -inf where a piece has nothing to see.

    Returns:
        The output ``[..., D]`` and its log-sums ``[...]``; zero and -inf where no piece has.
    """
    top = log_sums.amax(0)
    share = (log_sums - top.masked_fill(top == -torch.inf, 0.0)).exp()
    total = share.sum(0)
    out = (outs * share[..., None]).sum(0) / total.masked_fill(total == 0, 1.0)[..., None]
    return out, top + total.log()


def with_sinks(out: torch.Tensor, log_sums: torch.Tensor, sink_logits: torch.Tensor | None) -> torch.Tensor:
    """``out [B, Hq, q, D]`` with one more score for each head, ``[Hq]``, in the softmax's denominator."""
    if sink_logits is None:
        return out
    return out * torch.sigmoid(log_sums - sink_logits.to(log_sums.dtype)[:, None])[..., None]


def _joined(out: torch.Tensor, log_sums: torch.Tensor) -> torch.Tensor:
    return torch.cat([out, log_sums[..., None]], dim=-1)


def _parted(joined: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return joined[..., :-1], joined[..., -1]


def _stack(*parts: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    outs, log_sums = zip(*parts, strict=True)
    return torch.stack(outs), torch.stack(log_sums)
