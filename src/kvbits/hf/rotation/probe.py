"""What each layer of a model does to keys at several positions: it reads single tokens, and leaves no trace.

A token that stands alone attends to itself alone, so whatever its position the key of every layer is the same before
its rotary embedding, and what the positions change afterwards is the rotary embedding.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, PreTrainedModel

from kvbits.hf.devices import device_of_ids
from kvbits.hf.names import cache_name
from kvbits.numerics.modes import without_autocast

POSITIONS = (1, 2, 38)
"""Of the probe. Not 0, where recurrent layers (RecurrentGemma) begin anew."""

_SMALL = 1 << 16
"""Elements of buffers that are put back as they were, should a forward change them in place."""


class Keys(NamedTuple):
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


class Recorder(DynamicCache):
    """The model's own cache, which also keeps what each layer hands over first: ``[B, H, T, D]``."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self.seen.setdefault(layer_idx, (key_states.detach(), value_states.detach()))
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def probe(model: PreTrainedModel, restore: Callable[[], None]) -> tuple[dict[int, Keys], int]:
    """What each layer that has keys hands over at :data:`POSITIONS`, and the number of layers."""
    tokens, recorders = _tokens(model), []
    parameters = inspect.signature(model.forward).parameters
    if "position_ids" in parameters:
        calls = [(tokens, {"position_ids": torch.full_like(tokens, position)}) for position in POSITIONS]
    else:  # the same token over and over in one call: all that it attends to is the same
        calls = [(tokens.expand(-1, POSITIONS[-1] + 1), {})]
    for ids, options in calls:
        restore()
        recorders.append(Recorder(model.config.get_text_config(decoder=True)))
        model(input_ids=ids, use_cache=True, **options, **{cache_name(model): recorders[-1]})
    seen = {}
    for layer, (first, _) in recorders[0].seen.items():
        keys, values = (
            torch.cat([recorder.seen[layer][side].cpu().double() for recorder in recorders], dim=2).movedim(2, 0)
            for side in (0, 1)
        )
        if len(calls) == 1:
            keys, values = keys[list(POSITIONS)], values[list(POSITIONS)]
        seen[layer] = Keys(keys, values, torch.finfo(first.dtype).eps)
    return seen, max(len(recorders[0].layers), *(layer + 1 for layer in seen), 0)


def _tokens(model: PreTrainedModel) -> torch.Tensor:
    """Ids ``[4, 1]`` of ordinary tokens. That of padding would not do, as its embedding may be zero."""
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    padding = getattr(model.config.get_text_config(decoder=True), "pad_token_id", None)
    ids = [token for token in (vocabulary // part for part in (2, 3, 5, 7, 11)) if token != padding][:4]
    return torch.tensor(ids, device=device_of_ids(model))[:, None]


@contextmanager
def untouched(model: PreTrainedModel) -> Iterator[Callable[[], None]]:
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
        for buffer, value in small:
            if not torch.equal(buffer, value):
                buffer.copy_(value)

    devices = sorted({x.get_device() for x in model.parameters() if x.is_cuda})
    with torch.random.fork_rng(devices), torch.no_grad(), without_autocast():
        try:
            yield restore
        finally:
            restore()
            for module, training in zip(modules, modes, strict=True):
                module.training = training
