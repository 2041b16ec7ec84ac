"""Whether and how the keys of each layer of a model are rotated: looked up in the model, verified by running it.

No list of model families is kept. The model reads single tokens, each at several positions. A token that stands alone
attends to itself alone, so whatever its position the key of every layer is the same before its rotary embedding, and
what the positions change afterwards is the rotation. The frequencies that may explain it are the buffers of the
model's own rotary modules, so every scaling is the model's; what none of them explains is :class:`Unrotatable`.

Attention scaling (yarn, longrope: cosine and sine times a constant) does not show here. Only the rotation is undone,
and keys that are turned back still carry the factor.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from transformers import DynamicCache, PreTrainedModel

from kvbits.numerics import rope
from kvbits.numerics.modes import outside_graphs, without_autocast
from kvbits.rotary import Rotary

_POSITIONS = (1, 2, 38)
"""Of the probe. Not 0, where recurrent layers (RecurrentGemma) begin anew."""

_SMALL = 1 << 16
"""Elements of buffers that are put back as they were, should a forward change them in place."""

_SLACK = 0.25
"""Radians that the angles of a call may be off before it begins a new epoch."""

_LONG_CALL, _CHANGE = 32, 1 / 16
"""Dynamic scaling changes the frequencies a little at every step. Shorter calls begin an epoch only at this change."""


class Unrotatable(ValueError):
    """The keys of a layer are rotated, but not in a way that kvbits can undo."""


class Unreadable(Unrotatable):
    """The model cannot be asked."""


@dataclass(frozen=True)
class _Source:
    """Frequencies that a model holds: ``[R/2]`` in radians, and the buffer that they are in."""

    module: torch.nn.Module
    name: str
    frequencies: torch.Tensor
    table: bool = False


class _Match(NamedTuple):
    """How a layer rotates its keys. A few families (nanochat) turn them the other way: ``sign`` is then -1."""

    source: _Source
    interleaved: bool
    sign: int

    def rotary(self) -> Rotary:
        """Of these frequencies."""
        return Rotary(self.sign * self.source.frequencies, self.interleaved)

    def error(self, keys: torch.Tensor) -> float:
        """How far ``keys [P, B, H, D]`` are from turning like this with their positions, in units of their norm."""
        angles = (torch.tensor(_POSITIONS).double() - _POSITIONS[0])[:, None] * (self.sign * self.source.frequencies)
        cos, sin = (side[:, None, None] for side in (angles.cos(), angles.sin()))
        return _median_error(keys, rope.rotate(keys[:1].expand_as(keys), cos, sin, self.interleaved))


class _Keys(NamedTuple):
    """What a layer handed to its cache at each of the probe's positions, float64 ``[P, B, H, D]`` on the CPU.

    ``epsilon`` is that of the type that the keys had.
    """

    keys: torch.Tensor
    values: torch.Tensor
    epsilon: float

    @property
    def tolerance(self) -> float:
        """Relative errors that rounding explains; in 16 bits, that of the layers before (routers, sinks), too."""
        return min(0.1, max(1e-3, 16 * self.epsilon))


class Rotaries:
    """What :func:`rotaries` found. One per model, shared by its caches.

    ``rotaries[layer]`` is the :class:`Rotary` of a layer, or None where its keys are not rotated, and raises
    :class:`Unrotatable` where they are in another way. Layers that share an embedding share the object.

    Attributes:
        layers: the same for all layers, with the error itself where there is one.
    """

    def __init__(self, layers: list[Rotary | Unrotatable | None], matches: dict[Rotary, _Match]) -> None:
        self.layers = tuple(layers)
        self._rotaries = tuple(matches)
        self._watches = [_Watch(match) for match in matches.values()]
        self._epoch = 0

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, layer: int) -> Rotary | None:
        found = self.layers[layer]
        if isinstance(found, Unrotatable):
            raise found
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> Rotaries:
        return self  # a copied cache is of the same model, and its epochs are those of the same Rotary objects

    @property
    def distinct(self) -> tuple[Rotary, ...]:
        """The embeddings, each of them once."""
        return self._rotaries

    def adopt(self, epochs: Sequence[torch.Tensor]) -> list[int]:
        """The numbers that epochs have here which another process numbered 0, 1, 2, ...; new ones are added.

        Args:
            epochs: for each of :attr:`distinct` the frequencies of all epochs, float64 ``[E, R/2]``.

        Raises:
            ValueError: if they are of other embeddings.
        """
        shapes = [(len(epochs[0]), *rotary.epochs[0].shape) for rotary in self._rotaries] if epochs else []
        if len(epochs) != len(self._rotaries) or [tuple(x.shape) for x in epochs] != shapes:
            raise ValueError("the model has other rotary embeddings than those that the keys were turned by")
        if not epochs:
            return [0]
        numbers = []
        for epoch in zip(*epochs, strict=True):
            known = zip(*(rotary.epochs for rotary in self._rotaries), strict=True)
            same = [all(map(torch.equal, here, epoch)) for here in known]
            if True not in same:
                for rotary, frequencies in zip(self._rotaries, epoch, strict=True):
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
        known = [torch.stack(rotary.epochs) for rotary in self._rotaries]
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
        for rotary, frequencies in zip(self._rotaries, now, strict=True):
            rotary.epochs.append(frequencies)  # in all of them: an epoch has the same number everywhere
        return len(known[0])


class _Watch:
    """Notices when a rotary module replaces its frequencies, or writes others over them."""

    def __init__(self, match: _Match) -> None:
        # A table never changes, and its module may have weights, which no pickled cache should carry.
        self.module = None if match.source.table else match.source.module
        self.name, self.sign = match.source.name, match.sign
        self.frequencies = match.sign * match.source.frequencies
        self._seen: torch.Tensor | None = None
        self._version = 0

    def changed(self) -> bool:
        """Whether the frequencies are others than at the last look."""
        held = None if self.module is None else self.module._buffers.get(self.name)
        if held is None:
            return False
        version = -1 if held.is_inference() else held._version  # inference tensors do not count their versions
        if held is self._seen and version == self._version and version >= 0:
            return False
        self._seen, self._version = held, version
        now = self.sign * held.detach().cpu().double()
        if now.shape != self.frequencies.shape or torch.equal(now, self.frequencies):
            return False
        self.frequencies = now
        return True


_FOUND: WeakKeyDictionary[PreTrainedModel, Rotaries] = WeakKeyDictionary()


def rotaries(model: PreTrainedModel) -> Rotaries:
    """How each layer of ``model`` rotates its keys.

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
    layers: list[Rotary | Unrotatable | None] = []
    found: dict[tuple[Any, ...], Rotary] = {}
    used: dict[Rotary, _Match] = {}
    with _untouched(model) as restore:
        try:
            seen, count = _probe(model, restore)
        except Exception as error:
            count = model.config.get_text_config(decoder=True).num_hidden_layers
            reason = f"{name} cannot read one token of text by itself, so how it rotates its keys is not known: {error}"
            return Rotaries([Unreadable(reason)] * count, {})
        sources = list(_sources(model))  # as they are now, after a short text
    types = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
    for layer in range(count):
        if layer not in seen:  # no keys of its own: linear attention, keys shared with another layer
            layers.append(None)
            continue
        kind = str(types[layer]) if layer < len(types) else ""
        matched = _explain(f"{name}, layer {layer}", seen[layer], _own_first(sources, kind))
        if matched is None or isinstance(matched, Unrotatable):
            layers.append(matched)
            continue
        key = (matched.source.name, matched.interleaved, matched.sign, tuple(matched.source.frequencies.tolist()))
        rotary = found.setdefault(key, matched.rotary())
        used.setdefault(rotary, matched)
        layers.append(rotary)
    return Rotaries(layers, used)


def _own_first(sources: list[_Source], kind: str) -> list[_Source]:
    """Gemma 3 and others name one buffer per type of layer; two of them may hold the same at first."""
    return sorted(sources, key=lambda source: not (kind and source.name.startswith(kind)))


# -- what the model does with one token --------------------------------------------------------------------------------


class Recorder(DynamicCache):
    """The model's own cache, which also keeps what each layer hands over first: ``[B, H, T, D]``."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self.seen.setdefault(layer_idx, (key_states.detach(), value_states.detach()))
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def _probe(model: PreTrainedModel, restore: Callable[[], None]) -> tuple[dict[int, _Keys], int]:
    """What each layer that has keys hands over at :data:`_POSITIONS`, and the number of layers."""
    tokens, recorders = _tokens(model), []
    parameters = inspect.signature(model.forward).parameters
    argument = "cache" if "cache" in parameters else "past_key_values"  # its name before Transformers 5.24
    if "position_ids" in parameters:
        calls = [(tokens, {"position_ids": torch.full_like(tokens, position)}) for position in _POSITIONS]
    else:  # the same token over and over in one call: all that it attends to is the same
        calls = [(tokens.expand(-1, _POSITIONS[-1] + 1), {})]
    for ids, options in calls:
        restore()
        recorders.append(Recorder(model.config.get_text_config(decoder=True)))
        model(input_ids=ids, use_cache=True, **options, **{argument: recorders[-1]})
    seen = {}
    for layer, (first, _) in recorders[0].seen.items():
        keys, values = (
            torch.cat([recorder.seen[layer][side].cpu().double() for recorder in recorders], dim=2).movedim(2, 0)
            for side in (0, 1)
        )
        if len(calls) == 1:
            keys, values = keys[list(_POSITIONS)], values[list(_POSITIONS)]
        seen[layer] = _Keys(keys, values, torch.finfo(first.dtype).eps)
    return seen, max(len(recorders[0].layers), *(layer + 1 for layer in seen), 0)


def _tokens(model: PreTrainedModel) -> torch.Tensor:
    """Ids ``[4, 1]`` of ordinary tokens. That of padding would not do, as its embedding may be zero."""
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    padding = getattr(model.config.get_text_config(decoder=True), "pad_token_id", None)
    ids = [token for token in (vocabulary // part for part in (2, 3, 5, 7, 11)) if token != padding][:4]
    return torch.tensor(ids, device=model.get_input_embeddings().weight.device)[:, None]


@contextmanager
def _untouched(model: PreTrainedModel) -> Iterator[Callable[[], None]]:
    """In ``eval`` mode; what runs inside leaves modes, attributes, buffers and random numbers as they were.

    What is yielded puts all but the modes back already inside: some models keep a state in their modules.
    """
    modules = list(model.modules())
    modes = [module.training for module in modules]
    model.eval()
    attributes = [(vars(module), dict(vars(module))) for module in modules]
    buffers = [(module._buffers, dict(module._buffers)) for module in modules]
    small = [(x, x.clone()) for x in model.buffers() if x.numel() <= _SMALL and not x.is_meta]

    def restore() -> None:
        for current, saved in (*attributes, *buffers):
            for name in [name for name in current if name not in saved]:
                del current[name]
            for name, value in saved.items():
                if current.get(name) is not value:
                    current[name] = value
        for held, value in small:
            if not torch.equal(held, value):
                held.copy_(value)

    devices = sorted({x.get_device() for x in model.parameters() if x.is_cuda})
    with torch.random.fork_rng(devices), torch.no_grad(), without_autocast():
        try:
            yield restore
        finally:
            restore()
            for module, training in zip(modules, modes, strict=True):
                module.training = training


# -- which frequencies explain it --------------------------------------------------------------------------------------


def _sources(model: torch.nn.Module) -> Iterator[_Source]:
    """All that may be frequencies: vectors in modules without weights, and tables of sines and cosines (GPT-J).

    Which of them are is for the probe to tell. Each value comes once under each name.
    """
    known: set[tuple[Any, ...]] = set()
    for module in model.modules():
        weightless = next(module.parameters(), None) is None
        for name, buffer in module._buffers.items():
            if buffer is None or buffer.is_meta or not buffer.is_floating_point() or not buffer.numel():
                continue
            table = buffer.ndim == 2
            if table:
                frequencies = _of_table(buffer)
            else:
                frequencies = buffer.detach().cpu().double() if buffer.ndim == 1 and weightless else None
            if frequencies is None:
                continue
            key = (name, tuple(frequencies.tolist()))
            if key not in known:
                known.add(key)
                yield _Source(module, name, frequencies, table)


def _of_table(table: torch.Tensor) -> torch.Tensor | None:
    """Frequencies ``[R/2]`` of a table ``[positions, R]``, its sines in front of its cosines; None of other tables."""
    if len(table) < 3 or table.shape[1] % 2:
        return None
    sin, cos = table[:4096].detach().cpu().double().chunk(2, dim=-1)
    if not bool((sin[0] == 0).all() and (cos[0] == 1).all()):
        return None
    # Each angle is known up to the rounding of the table, and up to whole turns: go on from nearer positions.
    frequencies, position = torch.atan2(sin[1], cos[1]), 2
    while position < len(sin):
        beyond = torch.atan2(sin[position], cos[position]) - position * frequencies
        frequencies = frequencies + torch.remainder(beyond + torch.pi, 2 * torch.pi).sub(torch.pi) / position
        position *= 2
    return frequencies


def _explain(where: str, seen: _Keys, sources: list[_Source]) -> _Match | Unrotatable | None:
    """The frequencies and the layout by which a layer's keys turn from position to position; None if they do not."""
    if _moved(seen.keys) <= seen.tolerance:
        return None
    channels = seen.keys.shape[-1]
    fitting = [source for source in sources if 2 * len(source.frequencies) <= channels]
    choices = [_Match(source, pairs, sign) for sign in (1, -1) for source in fitting for pairs in (False, True)]
    errors = [choice.error(seen.keys) for choice in choices]
    best = min(range(len(choices)), key=errors.__getitem__, default=None)
    if best is not None and errors[best] <= seen.tolerance:
        return choices[best]
    if _moved(seen.values) > seen.tolerance:  # positions are in the hidden states
        if not fitting:
            return None  # absolute position embeddings (GPT-2, OPT)
        return Unrotatable(f"{where}: its keys and values both depend on positions, not by a rotary embedding alone")
    for choice in choices:
        rotated = 2 * len(choice.source.frequencies)
        if rotated < channels and choice.error(seen.keys[..., -rotated:]) <= seen.tolerance:
            return Unrotatable(
                f"{where}: the last {rotated} of the {channels} channels of its keys are rotated (as in multi-head "
                "latent attention); kvbits turns back the first channels only"
            )
    if not fitting:
        return Unrotatable(f"{where}: its keys depend on positions, but the model shows no rotary frequencies")
    return Unrotatable(
        f"{where}: its keys depend on positions, but they are not what turning by any of the model's own frequencies "
        "makes of them (a norm with weights may come after the rotation)"
    )


def _moved(x: torch.Tensor) -> float:
    """How far ``x [P, B, H, D]`` is from being the same at all positions, in units of its norm."""
    return _median_error(x, x[:1].expand_as(x))


def _median_error(x: torch.Tensor, right: torch.Tensor) -> float:
    """Of the rows, at their worst position: a router may send a single token to another expert."""
    norm = x.flatten(2).norm(dim=-1).clamp(min=1e-30)
    return float(((x - right).flatten(2).norm(dim=-1) / norm).amax(0).median())
