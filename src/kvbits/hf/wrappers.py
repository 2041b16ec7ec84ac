"""``Wrapper``, standing before one method of one model; ``PrepareInputs``, which keeps a model from losing its cache.

See :mod:`kvbits.hf.attach`, which puts them there and takes them off.
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel

from kvbits.hf.cache import KVCache
from kvbits.hf.frozen import StaticKVCache
from kvbits.hf.names import CACHE_NAMES, cache_name
from kvbits.hf.tokens import first_difference


class Wrapper:
    """Stands before one method of one model, or before what the user (PEFT, for one) has put in its place."""

    name: ClassVar[str]

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.own = vars(model).get(self.name)
        self.__signature__ = inspect.signature(getattr(model, self.name))
        self.takes = inspect.signature(getattr(type(model), self.name).__get__(model))

    @classmethod
    def stand_before(cls, model: PreTrainedModel) -> None:
        """Put one on ``model``, where none is."""
        if not isinstance(vars(model).get(cls.name), cls):
            setattr(model, cls.name, cls(model))

    @classmethod
    def step_aside(cls, model: PreTrainedModel) -> None:
        """Take it off again."""
        ours = vars(model).get(cls.name)
        if not isinstance(ours, cls):
            return  # never put there, or the user has put another in its place since
        if ours.own is None:
            del vars(model)[cls.name]
        else:
            setattr(model, cls.name, ours.own)

    def stock(self, *args: Any, **kwargs: Any) -> Any:
        """What the model does without kvbits."""
        if self.own is not None:
            return self.own(*args, **kwargs)
        return getattr(type(self.model), self.name)(self.model, *args, **kwargs)


class PrepareInputs(Wrapper):
    """Stands before ``prepare_inputs_for_generation`` of models that may throw the caller's cache away.

    Phi-3 and its relatives do so, silently, where a text outgrows their short rotary factors: generation would go on
    with an exact cache of their own. The cache is emptied and kept instead, and reads the whole text again.
    """

    name = "prepare_inputs_for_generation"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = {**self.takes.bind(*args, **kwargs).arguments, **kwargs}
        given = next((c for c in map(bound.get, CACHE_NAMES) if isinstance(c, (KVCache, StaticKVCache))), None)
        if given is not None and bound.get("is_first_iteration"):
            self._compare_text(given, bound)
        if isinstance(given, StaticKVCache):
            # One forward ran since the last call of the same generate; before the first nobody knows how many.
            first = "is_first_iteration" not in self.takes.parameters or bound.get("is_first_iteration")
            given.make_room(None if first or self.model.device.type == "cpu" else 1)
            if first:  # what is made of it is taken for one of Transformers' own; later ones only add ones
                given.refuse_mask(bound.get("attention_mask"))
        inputs = self.stock(*args, **kwargs)
        if given is not None and bound.get("use_cache") is False:
            raise ValueError(
                "use_cache=False makes generate pass the whole text at every step, to a cache that holds it already; "
                "pass use_cache=True, or no cache"
            )
        if given is not None and all(inputs.get(name) is None for name in CACHE_NAMES):
            if isinstance(given, StaticKVCache):
                raise ValueError(
                    f"{type(self.model).__name__} reads the whole text anew where it outgrows its short rotary "
                    "factors, and a frozen cache cannot; freeze one that holds more than "
                    "original_max_position_embeddings"
                )
            given.reset()
            if bound.get("cache_position") is not None:  # early releases would read the last token alone
                columns = torch.arange(bound["input_ids"].shape[1], device=bound["input_ids"].device)
                again = {**kwargs, "cache_position": columns}
                inputs = self.stock(*args, **again)
            inputs[cache_name(self.model)] = given
        return inputs

    def _compare_text(self, cache: KVCache | StaticKVCache, bound: dict[str, Any]) -> None:
        """Look at what ``generate`` cuts off a whole text, as many tokens as the cache holds, whatever they are.

        Raises:
            ValueError: if nothing is left of it. Where other tokens are cut off than were read, there is a warning.
        """
        ids, mask = bound.get("input_ids"), bound.get("attention_mask")
        held = cache.columns if isinstance(cache, StaticKVCache) else cache.columns.rows.columns
        if "next_sequence_length" in self.takes.parameters:
            added = bound.get("next_sequence_length")  # None where the ids are those of the new tokens alone
        else:
            shapes = [x.shape for x in (ids, mask) if isinstance(x, torch.Tensor)]
            added = shapes[0][1] - held if len(shapes) == 2 and shapes[0] == shapes[1] else None
        if added is None or not held:
            return
        other = "for another text reset() the cache or make a new one"
        if added <= 0:
            raise ValueError(
                f"the cache holds {held} tokens and the prompt has {held + added}, so none is left to read: pass the "
                f"text in the cache and at least one token more; {other}"
            )
        if (column := first_difference(cache.tokens, ids, mask)) is not None:
            warnings.warn(
                f"the cache holds {held} tokens, and from column {column} on they are not those that this prompt "
                "begins with: only what comes after them is read now, behind the text in the cache (cache.tokens); "
                f"{other}",
                UserWarning,
                stacklevel=2,
            )
