"""Whether and how the keys of each layer of a model are roped: looked up in the model, verified by running it.

No list of model families is kept. The model is asked (:mod:`kvbits.hf.rotation.probe`), and its own frequencies may
explain what it does (:mod:`kvbits.hf.rotation.frequencies`).

Attention scaling (yarn, longrope: cosine and sine times a constant) does not show here. Only the rotation by
angles is undone, and unroped keys still carry the factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from kvbits.hf.rotation.frequencies import CannotUnrope, Match, Source, explain, sources_of
from kvbits.hf.rotation.probe import probe, untouched
from kvbits.numerics.modes import outside_graphs
from kvbits.transform.rotary import Rotary

_SLACK = 0.25
"""Radians that the angles of a call may be off before it begins a new epoch."""

_LONG_CALL, _CHANGE = 32, 1 / 16
"""Dynamic scaling changes the frequencies a little at every step. Shorter calls begin an epoch only at this change."""


class Unreadable(CannotUnrope):
    """The model cannot be asked."""


class Rotaries:
    """What :func:`rotaries` found. One per model, shared by its caches.

    ``rotaries[layer]`` is the :class:`Rotary` of a layer, or None where it does not rope its keys, and raises
    :class:`CannotUnrope` where it does so in another way. Layers that share an embedding share the object.

    Attributes:
        layers: the same for all layers, with the error itself where there is one.
        distinct: the embeddings, each of them once.
    """

    def __init__(self, layers: list[Rotary | CannotUnrope | None], matches: dict[Rotary, Match]) -> None:
        self.layers = tuple(layers)
        self.distinct = tuple(matches)
        self._watches = [_Watch(match) for match in matches.values()]
        self._epoch = 0

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, layer: int) -> Rotary | None:
        found = self.layers[layer]
        if isinstance(found, CannotUnrope):
            raise found
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> Rotaries:
        return self  # a copied cache is of the same model, and its epochs are those of the same Rotary objects

    def adopt(self, epochs: Sequence[torch.Tensor]) -> list[int]:
        """The numbers that epochs have here which another process numbered 0, 1, 2, ...; new ones are added.

        Args:
            epochs: for each of :attr:`distinct` the frequencies of all epochs, float64 ``[E, R/2]``.

        Raises:
            ValueError: if they are of other embeddings.
        """
        shapes = [(len(epochs[0]), *rotary.epochs[0].shape) for rotary in self.distinct] if epochs else []
        if len(epochs) != len(self.distinct) or [tuple(x.shape) for x in epochs] != shapes:
            raise ValueError("the model has other rotary embeddings than those that the keys were roped by")
        if not epochs:
            return [0]
        numbers = []
        for epoch in zip(*epochs, strict=True):
            known = zip(*(rotary.epochs for rotary in self.distinct), strict=True)
            same = [all(map(torch.equal, here, epoch)) for here in known]
            if True not in same:
                for rotary, frequencies in zip(self.distinct, epoch, strict=True):
                    rotary.epochs.append(frequencies.clone())
            numbers.append(same.index(True) if True in same else len(same))
        return numbers

    def epoch(self, last: int, columns: int, added: int) -> int:
        """The epoch of the keys that the model computes right now: a number that all its :class:`Rotary` share.

        It costs next to nothing while the model leaves its frequencies as they were.

        Args:
            last: epoch of the keys before them in the same cache.
            columns: columns of the cache, the new ones included.
            added: the new ones.
        """
        changed = [watch.changed() for watch in self._watches]
        if any(changed) or self._epoch != last:
            self._epoch = self._nearest(last, columns, added)
        return self._epoch

    def _nearest(self, last: int, columns: int, added: int) -> int:
        """An epoch, new if need be, whose angles are close enough to those of the frequencies as they are now."""
        known = [torch.stack(rotary.epochs) for rotary in self.distinct]
        now = [watch.frequencies for watch in self._watches]
        off = torch.stack([(a - b).abs().amax(-1) for a, b in zip(known, now, strict=True)]).amax(0) * columns
        if off[last] <= _SLACK:
            return last
        if added < _LONG_CALL:
            pairs = zip(known, now, strict=True)
            if all(bool(((a[last] - b).abs() <= _CHANGE * a[last].abs()).all()) for a, b in pairs):
                return last
        best = int(off.argmin())
        if off[best] <= _SLACK:
            return best
        for rotary, frequencies in zip(self.distinct, now, strict=True):
            rotary.epochs.append(frequencies)  # in all of them: an epoch has the same number everywhere
        return len(known[0])


class _Watch:
    """Notices when a rotary module replaces its frequencies, or writes others over them."""

    def __init__(self, match: Match) -> None:
        # A table never changes, and its module may have weights, which no pickled cache should carry.
        self.module = None if match.source.table else match.source.module
        self.name, self.sign = match.source.name, match.sign
        self.frequencies = match.sign * match.source.frequencies
        self._seen: torch.Tensor | None = None
        self._version = 0

    def changed(self) -> bool:
        """Whether the frequencies are others than at the last look."""
        current = None if self.module is None else self.module._buffers.get(self.name)
        if current is None:
            return False
        version = -1 if current.is_inference() else current._version  # inference tensors do not count their versions
        if current is self._seen and version == self._version and version >= 0:
            return False
        self._seen, self._version = current, version
        now = self.sign * current.detach().cpu().double()
        if now.shape != self.frequencies.shape or torch.equal(now, self.frequencies):
            return False
        self.frequencies = now
        return True


_FOUND: WeakKeyDictionary[PreTrainedModel, Rotaries] = WeakKeyDictionary()


def rotaries(model: PreTrainedModel) -> Rotaries:
    """How each layer of ``model`` ropes its keys.

    The first call runs the model on a few tokens, on whatever device and in whatever type it is, and leaves no trace
    in it; the answer is kept until :func:`forget`.
    """
    found = _FOUND.get(model)
    if found is None:
        found = _FOUND[model] = _find(model)
    return found


def forget(model: PreTrainedModel) -> None:
    """Look again next time, should the model have changed."""
    _FOUND.pop(model, None)


@outside_graphs
def _find(model: PreTrainedModel) -> Rotaries:
    name = type(model).__name__
    layers: list[Rotary | CannotUnrope | None] = []
    found: dict[tuple[Any, ...], Rotary] = {}
    used: dict[Rotary, Match] = {}
    with untouched(model) as restore:
        try:
            seen, count = probe(model, restore)
        except Exception as error:
            count = model.config.get_text_config(decoder=True).num_hidden_layers
            reason = f"{name} cannot read one token of text by itself, so how it ropes its keys is not known: {error}"
            return Rotaries([Unreadable(reason)] * count, {})
        sources = list(sources_of(model))  # as they are now, after a short text
    types = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
    for layer in range(count):
        if layer not in seen:  # no keys of its own: linear attention, keys shared with another layer
            layers.append(None)
            continue
        kind = str(types[layer]) if layer < len(types) else ""
        matched = explain(f"{name}, layer {layer}", seen[layer], _own_first(sources, kind))
        if matched is None or isinstance(matched, CannotUnrope):
            layers.append(matched)
            continue
        key = (matched.source.name, matched.interleaved, matched.sign, tuple(matched.source.frequencies.tolist()))
        rotary = found.setdefault(key, matched.rotary())
        used.setdefault(rotary, matched)
        layers.append(rotary)
    return Rotaries(layers, used)


def _own_first(sources: list[Source], kind: str) -> list[Source]:
    """Gemma 3 and others name one buffer per type of layer; two of them may hold the same at first."""
    return sorted(sources, key=lambda source: not (kind and source.name.startswith(kind)))
