"""Which of a model's own frequencies explain how its keys change with their positions.

Those that may are the buffers of the model's own rotary modules, so every scaling is the model's; what none of them
explains is :class:`CannotUnrope`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from kvbits.hf.rotation.probe import POSITIONS, Keys
from kvbits.numerics import rope
from kvbits.transform.rotary import Rotary


class CannotUnrope(ValueError):
    """The keys of a layer depend on their positions, but not in a way that kvbits can undo."""


@dataclass(frozen=True)
class Source:
    """Frequencies that a model holds: ``[R/2]`` in radians, and the buffer that they are in."""

    module: torch.nn.Module
    name: str
    frequencies: torch.Tensor
    table: bool = False


class Match(NamedTuple):
    """How a layer ropes its keys. A few families (nanochat) use negative angles: ``sign`` is then -1."""

    source: Source
    interleaved: bool
    sign: int

    def rotary(self) -> Rotary:
        """Of these frequencies."""
        return Rotary(self.sign * self.source.frequencies, self.interleaved)

    def error(self, keys: torch.Tensor) -> float:
        """How far ``keys [P, B, H, D]`` are from being roped like this, in units of their norm."""
        angles = (torch.tensor(POSITIONS).double() - POSITIONS[0])[:, None] * (self.sign * self.source.frequencies)
        cos, sin = (side[:, None, None] for side in (angles.cos(), angles.sin()))
        return _median_error(keys, rope.apply(keys[:1].expand_as(keys), cos, sin, self.interleaved))


def sources_of(model: torch.nn.Module) -> Iterator[Source]:
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
                yield Source(module, name, frequencies, table)


def _of_table(table: torch.Tensor) -> torch.Tensor | None:
    """Frequencies ``[R/2]`` of a table ``[positions, R]``, its sines in front of its cosines; None of other tables."""
    if len(table) < 3 or table.shape[1] % 2:
        return None
    sin, cos = table[:4096].detach().cpu().double().chunk(2, dim=-1)
    if not bool((sin[0] == 0).all() and (cos[0] == 1).all()):
        return None
    # Each angle is known up to the rounding of the table, and up to whole circles: go on from nearer positions.
    frequencies, position = torch.atan2(sin[1], cos[1]), 2
    while position < len(sin):
        beyond = torch.atan2(sin[position], cos[position]) - position * frequencies
        frequencies = frequencies + torch.remainder(beyond + torch.pi, 2 * torch.pi).sub(torch.pi) / position
        position *= 2
    return frequencies


def explain(where: str, seen: Keys, sources: list[Source]) -> Match | CannotUnrope | None:
    """The frequencies and the layout by which a layer ropes its keys; None if it does not."""
    if _moved(seen.keys) <= seen.tolerance:
        return None
    channels = seen.keys.shape[-1]
    fitting = [source for source in sources if 2 * len(source.frequencies) <= channels]
    choices = [Match(source, pairs, sign) for sign in (1, -1) for source in fitting for pairs in (False, True)]
    errors = [choice.error(seen.keys) for choice in choices]
    best = min(range(len(choices)), key=errors.__getitem__, default=None)
    if best is not None and errors[best] <= seen.tolerance:
        return choices[best]
    if _moved(seen.values) > seen.tolerance:  # positions are in the hidden states
        if not fitting:
            return None  # absolute position embeddings (GPT-2, OPT)
        return CannotUnrope(f"{where}: its keys and values both depend on positions, not by a rotary embedding alone")
    for choice in choices:
        roped = 2 * len(choice.source.frequencies)
        if roped < channels and choice.error(seen.keys[..., -roped:]) <= seen.tolerance:
            return CannotUnrope(
                f"{where}: the last {roped} of the {channels} channels of its keys are roped (as in multi-head latent "
                "attention); kvbits unropes the first channels only"
            )
    if not fitting:
        return CannotUnrope(f"{where}: its keys depend on positions, but the model shows no rotary frequencies")
    return CannotUnrope(
        f"{where}: its keys depend on positions, but not as roping by any of the model's own frequencies makes them "
        "(a norm with weights may come after the rotary embedding)"
    )


def _moved(x: torch.Tensor) -> float:
    """How far ``x [P, B, H, D]`` is from being the same at all positions, in units of its norm."""
    return _median_error(x, x[:1].expand_as(x))


def _median_error(x: torch.Tensor, right: torch.Tensor) -> float:
    """Of the rows, at their worst position: a router may send a single token to another expert."""
    norm = x.flatten(2).norm(dim=-1).clamp(min=1e-30)
    return float(((x - right).flatten(2).norm(dim=-1) / norm).amax(0).median())
