"""Late sinks, tokens behind the first ones that are found to be sinks and kept exact, at most so many.

Attention sinks are not only a text's first tokens. Su et al. (KVSink, arXiv 2508.04257) find others, tell them by what
is abnormal in them, and keep them out of the quantized cache. What a cache sees is keys, and the keys of a sink are
much shorter than others, now and then much longer. In SmolLM2-135M the first key of a text has 0.2 to 0.3 times the
median norm in most layers; in layers 3 to 10 a dozen tokens of 1,500 (blanks, some articles) have 0.33 to 0.6 times;
98% of all keys are within a factor of 1.6 of the median in every layer, and in most layers all but the first are.

The rule looks at the keys about to be packed of one row, and at nothing else, so it is the same beside other rows.

Late sinks of a row stand behind its first sinks, in ascending order, and always before the last packed token. *Stored
order* is: first sinks, packed tokens, late sinks, the rest. :func:`own_numbers` leads from it back to the text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import torch

from kvbits.store.room import Limits

Late: TypeAlias = tuple[tuple[int, ...], ...]
"""Own token numbers of the late sinks of each row, ascending."""

FACTOR = 1.6
"""A norm within this factor of the median is none of a sink's."""

DEVIATIONS = 4.0
"""Nor is one within so many median absolute deviations, where norms of all tokens differ as much."""

_NEVER = 2**62


def choose(keys: torch.Tensor, packed: int, most: int) -> list[list[int]]:
    """Which of a row's keys to keep exact: positions in ascending order, for each row.

    Each head's norms are measured against their median; a token's score is the mean over heads of the logarithms. The
    most abnormal tokens are taken, and of these the ones before the last token that is packed: later ones need not be
    decided yet.

    Args:
        keys: the oldest keys ``[B, H, n, D]`` that are not stored yet.
        packed: how many of them will be packed; ``n >= packed + most``.
        most: how many may be taken.
    """
    if not packed or most <= 0:
        return [[] for _ in range(keys.shape[0])]
    score = abnormality(keys)
    strength, position = score.topk(min(most, score.shape[1]), dim=1)
    chosen = []
    for row, marks in zip(position.tolist(), (strength > 0).tolist(), strict=True):
        found = sorted(at for at, abnormal in zip(row, marks, strict=True) if abnormal)
        # Token `at` has `at - i` packed ones before it, if `i` are taken before it.
        chosen.append([at for i, at in enumerate(found) if at - i < packed])
    return chosen


def take_out(
    keys: torch.Tensor, late: Late, total: Sequence[int], packed: Sequence[int], count: Sequence[int], limits: Limits
) -> tuple[Late, torch.Tensor | None]:
    """The late sinks of each row once more of its tokens are packed, and the order of its exact slots then.

    Args:
        keys: exact ones ``[B, H, T, D]``, those that will be packed among them.
        late: late sinks so far.
        total: exact tokens of each row.
        packed, count: tokens that each row has packed, and how many more it packs now.
        limits: of the layer.

    Returns:
        The order is ``[sinks | tokens to pack | late | the rest]``, int64 ``[B, T]`` on the CPU, or None where that is
        how they lie.
    """
    if not limits.late_sinks:
        return late, None
    begin = [min(tokens, limits.sinks) + len(row) for tokens, row in zip(total, late, strict=True)]
    same = len(set(zip(begin, count, strict=True))) == 1
    found: list[list[int]] = []  # counted from `begin` on
    for row in range(1 if same else len(total)):
        room = limits.late_sinks + limits.sinks - begin[row]
        rows = keys if same else keys[row : row + 1]
        found += choose(rows[:, :, begin[row] : begin[row] + count[row] + room], count[row], room)
    # Recent tokens lie as in the text.
    after = tuple(
        (*late[row], *(begin[row] + packed[row] + position for position in at)) for row, at in enumerate(found)
    )
    if not any(after):
        return after, None
    order = torch.arange(keys.shape[2]).repeat(len(total), 1)
    for row, at in enumerate(found):
        sinks, last = min(total[row], limits.sinks), begin[row] + count[row] + len(at)
        order[row, :last] = _order(sinks, begin[row], [begin[row] + position for position in at], last)
    return after, order


def _order(sinks: int, begin: int, chosen: list[int], last: int) -> torch.Tensor:
    """Slots ``0 .. last - 1`` of a row as ``[sinks | from begin on, without the chosen | late before | chosen]``."""
    slots = torch.arange(last)
    packed = torch.ones(last, dtype=torch.bool)
    packed[:begin] = False
    packed[chosen] = False
    kept = ~packed
    kept[:sinks] = False
    return torch.cat([slots[:sinks], slots[packed], slots[kept]])


def abnormality(keys: torch.Tensor) -> torch.Tensor:
    """How far each key's norm is from the others', ``[B, n]``; 0 for ordinary keys, and where any is not finite."""
    norm = torch.linalg.vector_norm(keys, dim=-1, dtype=torch.promote_types(keys.dtype, torch.float32))
    median = norm.median(dim=2, keepdim=True).values
    # A head whose keys are mostly zero says nothing; a single zero key is as short as can be.
    ratio = torch.where(median > 0, norm / median, 1.0).clamp(min=1e-6)
    score = ratio.log().mean(dim=1)
    score = (score - score.median(dim=1, keepdim=True).values).abs()
    deviation = score.median(dim=1, keepdim=True).values
    abnormal = (score > math.log(FACTOR)) & (score > DEVIATIONS * deviation)
    finite = norm.isfinite().flatten(1).all(dim=1, keepdim=True)  # what is not is refused when it is packed
    return torch.where(abnormal & finite, score, 0.0)


def not_late(late: Late, sinks: int, rank: torch.Tensor) -> torch.Tensor:
    """Own numbers ``[B, n]`` of the tokens behind the sinks that are not late: number ``rank [n]`` of them, from 0."""
    rank = rank.expand(len(late), -1)
    if not any(late):
        return rank + sinks
    numbers = _table(late, rank.device)
    before = numbers - sinks - torch.arange(numbers.shape[1], device=rank.device)  # of the others, before each
    return rank + sinks + torch.searchsorted(before, rank.contiguous(), right=True)


def listed(late: Late, index: torch.Tensor) -> torch.Tensor:
    """Own numbers of late sinks ``index [B, n]`` of each row; meaningless beyond a row's last."""
    numbers = _table(late, index.device)
    return numbers.gather(1, index.clamp(0, numbers.shape[1] - 1))


def own_numbers(late: Late, sinks: int, packed: Sequence[int], tokens: int, device: torch.device) -> torch.Tensor:
    """Own numbers ``[B, tokens]`` of what is stored first, second and so on: see the module's docstring.

    Args:
        late, sinks: of the layer.
        packed: tokens that each row has packed.
        tokens: of the longest row.
        device: of the result.
    """
    stored = torch.arange(tokens, device=device).expand(len(late), -1)
    end = torch.tensor(packed, device=device)[:, None] + sinks
    behind = end + torch.tensor([len(row) for row in late], device=device)[:, None]
    number = torch.where(stored < end, not_late(late, sinks, stored[0] - sinks), listed(late, stored - end))
    return torch.where((stored < sinks) | (stored >= behind), stored, number)


def _table(late: Late, device: torch.device) -> torch.Tensor:
    """int64 ``[B, most of a row]``, with numbers beyond all others where a row has fewer."""
    most = max(map(len, late))
    return torch.tensor([[*row, *[_NEVER] * (most - len(row))] for row in late], device=device)
