"""``Announcer``: hooks that tell the cache in a call what its model does not: padding, ids, positions, the end."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from transformers import Cache, PreTrainedModel

from kvbits.hf.cache import KVCache
from kvbits.hf.frozen import StaticKVCache
from kvbits.hf.names import CACHE_NAMES, cache_name
from kvbits.hf.tokens import text_of
from kvbits.numerics.modes import host_runs, outside_graphs

Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any]


@runtime_checkable
class ReadsAhead(Protocol):
    """A cache that runs the model itself on most of a prompt: see :mod:`kvbits.parallel.cache`."""

    def read_ahead(
        self, model: PreTrainedModel, ids: torch.Tensor, keep: int, mask: torch.Tensor | None,
        positions: torch.Tensor | None,
    ) -> int:  # fmt: skip
        """Read some of the ids ``[B, n]`` of a call, of which only the last ``keep`` logits are wanted.

        Args:
            model, ids, mask, positions: of the call, as its caller gave them.
            keep: between 0 and n.

        Returns:
            How many columns have been read; the call is then made without them.
        """
        ...


def _refuse_stranger(cache: KVCache | StaticKVCache, module: torch.nn.Module) -> None:
    """Raise where a cache was filled by another model than the one that runs, or a part or a whole of it.

    An empty cache changes hands, unless its scheme has to know the rotary embedding and the other model has another.
    """
    own = cache.model
    if own is None or own is module or any(part is module for part in own.modules()):
        return
    if any(part is own for part in module.modules()):
        return
    if (
        isinstance(cache, KVCache)
        and not cache.columns.rows.columns
        and (cache.columns.rotaries is None or _rope(own) == _rope(module))
    ):
        cache.hand_to(module)
        return
    raise ValueError(
        f"this cache was made for another {type(own).__name__} than the {type(module).__name__} that runs, to which "
        "its keys and values say nothing; make one for the model that runs, kvbits.cache_for(model, scheme)"
    )


def _rope(model: Any) -> tuple[type, Any]:
    """Equal for two models with the same rotary embedding."""
    return type(model), getattr(model.config.get_text_config(decoder=True), "rope_parameters", None)


class Announcer:
    """A pair of hooks that tell the cache in a call's arguments about the call's padding mask, and when it is over.

    Args:
        module: the model that they are put on.
        default: on the outermost model, makes the cache for a call that names none; None where it shall have none.
    """

    def __init__(self, module: PreTrainedModel, default: Callable[[], KVCache | None] | None) -> None:
        self.default = default
        self.names = list(inspect.signature(module.forward).parameters)

    def __call__(self, module: torch.nn.Module, args: Args, kwargs: Kwargs) -> Any:
        cache = self._cache(args, kwargs)
        if not isinstance(cache, StaticKVCache):
            return self._begin(module, args, kwargs)
        if host_runs():  # else this is part of a graph
            _refuse_stranger(cache, module)
            cache.begin(id(self))
            cache.refuse_mask(self._argument("attention_mask", args, kwargs))
        return args, kwargs

    @outside_graphs
    def _begin(self, module: torch.nn.Module, args: Args, kwargs: Kwargs) -> Any:
        cache = self._cache(args, kwargs)
        if cache is None and self.default is not None and self._wants_cache(module, args, kwargs):
            cache = self.default()
            if cache is not None:
                args, kwargs = self._with(cache_name(module), cache, args, kwargs)
        if isinstance(cache, KVCache):
            _refuse_stranger(cache, module)
            if self.default is not None and isinstance(cache, ReadsAhead):
                args, kwargs = self._read_ahead(module, cache, args, kwargs)
            cache.begin(id(self))
            mask = self._argument("attention_mask", args, kwargs)
            padding = isinstance(mask, torch.Tensor) and mask.ndim == 2
            # The decoder inside may get the same mask in a form that no longer shows the padding.
            if padding or mask is None or not cache.columns.waiting:
                cache.columns.begin(mask if padding else None, self._ids(cache, args, kwargs))
            cache.columns.place(self._positions(args, kwargs))
        return args, kwargs

    def end(self, module: torch.nn.Module, args: Args, kwargs: Kwargs, output: Any) -> None:
        """Forward hook, called always: tells the cache that the call is over; without an output it has failed."""
        cache = self._cache(args, kwargs)
        if not isinstance(cache, StaticKVCache):
            self._end(cache, output)
        elif host_runs():
            cache.end(id(self), failed=output is None)

    @outside_graphs
    def _end(self, cache: Cache | None, output: Any) -> None:
        if isinstance(cache, KVCache):
            cache.end(id(self), failed=output is None)

    def _read_ahead(self, module: Any, cache: ReadsAhead, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Let the cache read what the caller wants no logits of; the arguments of the call for the rest."""
        given, keep = self._argument("input_ids", args, kwargs), self._argument("logits_to_keep", args, kwargs)
        if type(keep) is not int or not isinstance(given, torch.Tensor) or not 0 < keep < given.shape[-1]:
            return args, kwargs  # as all steps
        ids = self._text(args, kwargs)
        if ids is None or self._wants_more(module, args, kwargs):
            return args, kwargs
        mask, positions = self._argument("attention_mask", args, kwargs), self._positions(args, kwargs)
        done = cache.read_ahead(module, ids, keep, mask, positions)
        for name in ("input_ids", "position_ids", "cache_position") if done else ():
            if isinstance(given := self._argument(name, args, kwargs), torch.Tensor):
                args, kwargs = self._with(name, given[..., done:], args, kwargs)
        return args, kwargs

    def _wants_more(self, module: Any, args: Args, kwargs: Kwargs) -> bool:
        """Whether the call is for more than the last logits: a loss, gradients, what layers return."""
        if torch.is_grad_enabled() or self._argument("labels", args, kwargs) is not None:
            return True
        wanted = ("output_hidden_states", "output_attentions", "output_router_logits")
        given = {name: self._argument(name, args, kwargs) for name in wanted}
        return any(getattr(module.config, name, False) if x is None else x for name, x in given.items())

    def _cache(self, args: Args, kwargs: Kwargs) -> Cache | None:
        given = (self._argument(name, args, kwargs) for name in CACHE_NAMES)
        return next((c for c in given if isinstance(c, Cache)), None)

    def _ids(self, cache: KVCache, args: Args, kwargs: Kwargs) -> torch.Tensor | None:
        """The new ids, where they are not known already and are all that the call reads."""
        return None if cache.columns.waiting else self._text(args, kwargs)

    def _text(self, args: Args, kwargs: Kwargs) -> torch.Tensor | None:
        return text_of({**dict(zip(self.names, args, strict=False)), **kwargs})

    def _positions(self, args: Args, kwargs: Kwargs) -> torch.Tensor | None:
        """The positions that the call names, int64 ``[..., B or 1, columns]``. Early releases count columns instead."""
        positions = self._argument("position_ids", args, kwargs)
        if positions is None:
            positions = self._argument("cache_position", args, kwargs)
        return positions if isinstance(positions, torch.Tensor) else None

    def _wants_cache(self, module: Any, args: Args, kwargs: Kwargs) -> bool:
        if module.training:
            return False
        wanted = self._argument("use_cache", args, kwargs)
        if wanted is None:
            wanted = getattr(module.config.get_text_config(decoder=True), "use_cache", False)
        return bool(wanted)

    def _with(self, name: str, value: Any, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """The arguments with another value, in the place where the caller gave one."""
        position = self.names.index(name) if name in self.names else len(args)
        if position < len(args):
            return (*args[:position], value, *args[position + 1 :]), kwargs
        return args, {**kwargs, name: value}

    def _argument(self, name: str, args: Args, kwargs: Kwargs) -> Any:
        if name in kwargs or name not in self.names:
            return kwargs.get(name)
        position = self.names.index(name)
        return args[position] if position < len(args) else None
