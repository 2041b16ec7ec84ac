"""Whether a scheme fits: what each device has to hold, and the longest context and the largest batch that do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvbits.plan import memory, peak
from kvbits.plan.memory import Real
from kvbits.plan.setting import MOST_BATCH, MOST_TOKENS, Setting, weights_bytes
from kvbits.plan.split import Share, shares
from kvbits.schemes.scheme import Scheme


@dataclass(frozen=True)
class Need:
    """What one device has to hold, in bytes."""

    weights: int
    cache: Real
    peak: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.cache.count.total + self.peak


def needs(setting: Setting, scheme: Scheme, context: int | None = None, batch: int | None = None) -> list[Need]:
    """What each device has to hold, also at another length of the context, or with another batch.

    Raises:
        ValueError: where the scheme does not fit the model, or the model cannot be split so.
    """
    split = shares(setting.shape, setting.devices, setting.split)
    return _needs(setting, scheme, split, context or setting.context, batch or setting.batch)


def fits(setting: Setting, scheme: Scheme) -> bool | None:
    """Whether every device has the memory; None where there is no limit."""
    limit = setting.limit_bytes
    return None if limit is None else all(need.total <= limit for need in needs(setting, scheme))


def longest_context(setting: Setting, scheme: Scheme) -> int | None:
    """The longest context that fits; 0 if none does, None where there is no limit, or no end."""
    return _most(setting, scheme, lambda split, n: _needs(setting, scheme, split, n, setting.batch), MOST_TOKENS)


def largest_batch(setting: Setting, scheme: Scheme) -> int | None:
    """The largest batch that fits; 0 if none does, None where there is no limit, or no end."""
    return _most(setting, scheme, lambda split, n: _needs(setting, scheme, split, setting.context, n), MOST_BATCH)


def _most(setting: Setting, scheme: Scheme, needed: Callable[[list[Share], int], list[Need]], end: int) -> int | None:
    """A number that fits while one more does not; 0 if 1 does not, None if ``end`` does."""
    limit = setting.limit_bytes
    if limit is None:
        return None
    split = shares(setting.shape, setting.devices, setting.split)

    def enough(number: int) -> bool:
        return all(need.total <= limit for need in needed(split, number))

    low, high = 0, 1
    while high <= end and enough(high):
        low, high = high, 2 * high
    if low >= end:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if enough(middle) else (low, middle)
    return low


def _needs(setting: Setting, scheme: Scheme, split: list[Share], context: int, batch: int) -> list[Need]:
    """What each device has to hold. Devices with the same share are counted once."""
    sliding = setting.sliding and setting.split != "context"  # layers with a window are not shared
    stored = memory.stores(setting.shape, scheme, sliding)
    known: dict[tuple[object, ...], Need] = {}
    needs = []
    for share in split:
        layers = share.shape.layers
        own = tuple(stored[share.first : share.first + len(layers)])
        key = (layers, own, share.shape.weights, share.shape.widths, share.shards)
        if key not in known:
            known[key] = _need(setting, share, own, scheme.needs_calibration, context, batch)
        needs.append(known[key])
    return needs


def _need(
    setting: Setting, share: Share, own: tuple[Scheme | None, ...], calibrated: bool, context: int, batch: int
) -> Need:
    shape, source, shards = share.shape, setting.source_tokens, share.shards
    history = setting.history(context)
    held = memory.of_layers(shape.layers, own, history, batch, calibrated, source, shards)
    extra = 0
    if shape.widths is not None:
        piece = max([source, *(tokens for tokens, _ in history.runs)])
        packs = any(one is not None and (one.packs or shards.world > 1) for one in own)
        extra = peak.activation_bytes(
            shape, share.tokens(piece), share.tokens(context), batch, packs, setting.logits, setting.cpu
        )
        extra += peak.exchange_bytes(shape, piece, batch) if shards.world > 1 else 0
        pairs = set(zip(shape.layers, own, strict=True))
        each = (memory.of_layer(*pair, history, batch, calibrated, source, shards).count.total for pair in pairs)
        extra += max(each, default=0)
    if setting.weights == "file" and setting.shape.weights is not None and shape.weights is not None:
        whole = weights_bytes(setting.shape.weights, "file", shape.dtype)
        weights = -(-whole * shape.weights.total // setting.shape.weights.total)
    else:
        weights = weights_bytes(shape.weights, setting.weights, shape.dtype)
    return Need(weights, held, extra)
