"""Attach kvbits to a model, make caches for it, and take everything off again.

Nothing of Transformers is patched. What ``attach`` puts on one model: forward hooks on it and on the decoder inside
it (they tell the cache of each call's padding, and when the call is over), the name of a kvbits attention function in
its configs, and a wrapper around its ``prepare_inputs_for_generation`` that keeps it from losing its cache. ``enable``
adds one around ``_prepare_cache_for_generation``. ``disable`` removes all of it.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvbits.attend import native
from kvbits.files import Calibration, load_calibration, refuse_uncalibrated
from kvbits.hf.announce import Announcer
from kvbits.hf.attention import STOCK_OF, ours_for, register
from kvbits.hf.cache import KVCache
from kvbits.hf.columns import Columns
from kvbits.hf.layer import PackedLayer
from kvbits.hf.names import CACHE_NAMES, cache_name
from kvbits.hf.rotation.frequencies import CannotUnrope
from kvbits.hf.rotation.rotary import Rotaries, forget, rotaries
from kvbits.hf.stock import ATTENTION
from kvbits.hf.translate import scheme_of_cache_config
from kvbits.hf.wrappers import PrepareInputs, Wrapper
from kvbits.layer.cache import LayerCache
from kvbits.schemes.catalogue import RECOMMENDED
from kvbits.schemes.scheme import Scheme
from kvbits.tensor_parallel import Heads
from kvbits.transform.rotary import Rotary
from kvbits.types import Params

_ATTRIBUTE = "_kvbits_attachment"


@dataclass
class Attachment:
    """What kvbits put on one model."""

    hooks: list[Any] = field(default_factory=list)
    implementations: list[tuple[Any, str | None]] = field(default_factory=list)
    scheme: Scheme | None = None
    sliding: bool = False
    calibration: Calibration | None = None


def cache_for(
    model: PreTrainedModel,
    scheme: str | Scheme = RECOMMENDED,
    *,
    sliding: bool = False,
    calibration: str | Path | Calibration | None = None,
) -> KVCache:
    """A new, empty cache for ``model``, for ``generate`` or for a loop of forwards.

    Attaches kvbits to the model (see this module); :func:`disable` takes it off.

    Args:
        model: a decoder-only Transformers model.
        scheme: such as ``"int4"``, ``"kivi2,residual=64"``, or a :class:`kvbits.Scheme`.
        sliding: quantize sliding-window layers too; they stay exact, in the model's own type, by default. So do those
            whose window is too short for the scheme to save memory (see :meth:`kvbits.Scheme.for_window`).
        calibration: what :func:`kvbits.calibrate` fitted of this model, or the folder where it lies; ``nuq`` and
            other calibrated schemes need it.

    Raises:
        TypeError: if ``model`` is no Transformers model.
        ValueError: for an unknown scheme, a layer that does not exist, a model that cannot be served
            (encoder-decoders, models with a cache of their own making), keys whose rotary embedding cannot be taken
            off under a scheme that does, or a calibration that is missing, of another model, or not for this scheme.
    """
    scheme = Scheme.parse(scheme)
    refuse_unless_served(model)
    return make_cache(model, scheme, sliding, fitted_by(model, scheme, calibration))


Fitted: TypeAlias = Callable[[int, Scheme], tuple[Params, Params]]
"""A layer and its scheme to the params of keys and values that it begins with."""


class Parts(NamedTuple):
    """The parts of a cache; :func:`kvbits.parallel.cache_for` puts its own in the place of each of them.

    Attributes:
        cache: as :class:`KVCache`.
        columns: as :class:`Columns`.
        layer: as :class:`PackedLayer`.
        core: as :class:`LayerCache`.
    """

    cache: Callable[..., KVCache] = KVCache
    columns: Callable[..., Columns] = Columns
    layer: Callable[..., PackedLayer] = PackedLayer
    core: Callable[..., LayerCache] = LayerCache


def make_cache(
    model: PreTrainedModel,
    scheme: Scheme,
    sliding: bool = False,
    fitted: Fitted | None = None,
    parts: Parts = Parts(),  # noqa: B008 - it is immutable
) -> KVCache:
    """As :func:`cache_for`, for a model that can be served.

    Args:
        fitted: params of keys and values that a layer of a scheme begins with; none by default.
        parts: what it is made of.
    """
    if model.device.type == "cpu":
        native.warn_if_missing()
    ropes = rotaries(model) if scheme.pre_rope or scheme.centred else None
    layers, columns = _stock_layers(model), parts.columns(ropes, strict=scheme.pre_rope)
    for index, (stock, able) in enumerate(zip(layers, storable(model.config, layers), strict=True)):
        window = stock.sliding_window if type(stock) is DynamicSlidingWindowLayer else None
        own = scheme.for_attention(index, len(layers), window, sliding)
        if own is not None and able:
            name = f"layer {index}"
            known = ({}, {}) if fitted is None else fitted(index, own)
            rotary = None if ropes is None else _rotary_of(ropes, index, own)
            layers[index] = parts.layer(parts.core(own, window, name, rotary, known), columns, name)
    if not any(isinstance(layer, PackedLayer) for layer in layers):
        hint = "pass sliding=True to pack such layers too"
        if sliding:
            hint = (
                "these windows are too short to save memory beside what a scheme keeps exact; give a smaller residual="
            )
        warnings.warn(
            f"every layer of {type(model).__name__} has a sliding window and stays exact, so {scheme} packs nothing; "
            f"{hint}",
            UserWarning,
            stacklevel=3,
        )
    attach(model)
    return parts.cache(layers, scheme, columns, model)


def _rotary_of(ropes: Rotaries, layer: int, scheme: Scheme) -> Rotary | None:
    """The rotary embedding of a layer's keys; None where they have none, or where a scheme can do without it."""
    try:
        return ropes[layer]
    except CannotUnrope as error:
        if scheme.pre_rope:
            raise
        warnings.warn(
            f"{error}; their mean is taken as they come, and less of it is constant", UserWarning, stacklevel=4
        )
        return None


def fitted_by(model: PreTrainedModel, scheme: Scheme, calibration: str | Path | Calibration | None) -> Fitted | None:
    """What a calibration knows of the layers of ``model``. Raises as :func:`cache_for`."""
    if calibration is None:
        refuse_uncalibrated(scheme)
        return None
    loaded = calibration if isinstance(calibration, Calibration) else load_calibration(calibration)
    attachment = vars(model).get(_ATTRIBUTE)
    if attachment is None or attachment.calibration is not loaded:  # enable has checked its own, once for all calls
        loaded.check(model)
    heads = Heads.of(model)

    def of_layer(layer: int, own: Scheme) -> tuple[Params, Params]:
        keys, values = loaded.of_layer(layer, own)
        return heads.own(keys), heads.own(values)

    return of_layer


def _stock_layers(model: PreTrainedModel) -> list[Any]:
    return DynamicCache(config=model.config.get_text_config(decoder=True)).layers


def storable(config: Any, layers: list[Any]) -> list[bool]:
    """Which layers of a model's own cache kvbits can stand in for.

    Keys and values of a picture (Mllama) are no columns of the text: those layers stay the model's own.
    """
    crossing = getattr(config.get_text_config(decoder=True), "cross_attention_layers", None) or ()
    return [type(layer) in ATTENTION and index not in crossing for index, layer in enumerate(layers)]


def refuse_unless_served(model: Any) -> None:
    """Raise where a model cannot be served, saying why."""
    if not isinstance(model, PreTrainedModel):
        found = type(model).__name__
        inner = {"OptimizedModule": "model._orig_mod", "DataParallel": "model.module", "str": "kvbits.load_model(name)"}
        hint = inner.get(found, "pipe.model of a pipeline, get_base_model() of a PEFT model, .module of a parallel one")
        raise TypeError(f"kvbits needs a Transformers model, not {found}; give {hint}")
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{name} is an encoder-decoder: Transformers keeps its self- and cross-attention in an "
            "EncoderDecoderCache of exact caches, which kvbits does not serve; use its own cache"
        )
    supports = getattr(model, "_supports_default_dynamic_cache", None)
    if supports is not None and not supports():
        raise ValueError(f"{name} keeps a cache of its own making, without keys and values that kvbits could store")
    if not any(cache in inspect.signature(model.forward).parameters for cache in CACHE_NAMES):
        raise ValueError(f"{name} takes no cache of keys and values")
    layers = _stock_layers(model)
    if not any(type(layer) in ATTENTION for layer in layers):
        kinds = ", ".join(sorted({type(layer).__name__ for layer in layers}))
        raise ValueError(
            f"{name} has no attention layer whose keys and values kvbits could store; its cache is made of {kinds}"
        )


def attach(model: PreTrainedModel) -> Attachment:
    """Put the hooks and the attention functions on ``model``; again is harmless."""
    found: Attachment | None = vars(model).get(_ATTRIBUTE)
    if found is None:
        found = Attachment()
        setattr(model, _ATTRIBUTE, found)
        for module in _models_in(model):
            announce = Announcer(module, partial(_default_cache, model, found) if module is model else None)
            found.hooks.append(module.register_forward_pre_hook(announce, with_kwargs=True))
            found.hooks.append(module.register_forward_hook(announce.end, with_kwargs=True, always_call=True))
        if hasattr(model, PrepareInputs.name):
            PrepareInputs.stand_before(model)
    _set_attention(model, found)
    return found


def _default_cache(model: PreTrainedModel, attachment: Attachment) -> KVCache | None:
    """What :func:`enable` gives a call that names no cache."""
    if attachment.scheme is None:
        return None
    return cache_for(model, attachment.scheme, sliding=attachment.sliding, calibration=attachment.calibration)


def attached(model: Any) -> bool:
    """Whether kvbits is on ``model``."""
    return _ATTRIBUTE in getattr(model, "__dict__", {})


def _models_in(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    return (module for module in model.modules() if isinstance(module, PreTrainedModel))


def _set_attention(model: PreTrainedModel, attachment: Attachment) -> None:
    """Name our attention functions in the configs of all models that go through the attention interface."""
    register()
    for module in _models_in(model):
        config = module.config
        current = config._attn_implementation
        if current in STOCK_OF or not module._can_set_attn_implementation():
            continue
        attachment.implementations = [(c, s) for c, s in attachment.implementations if c is not config]
        attachment.implementations.append((config, current))
        config._attn_implementation_internal = ours_for(current)


def enable(
    model: PreTrainedModel,
    scheme: str | Scheme | None = None,
    *,
    sliding: bool = False,
    calibration: str | Path | Calibration | None = None,
) -> PreTrainedModel:
    """Make stock calls run on kvbits, until :func:`disable`.

    ``generate(cache_implementation="quantized", cache_config={...})`` gets the kvbits cache that its ``cache_config``
    describes. With ``scheme``, every ``generate`` and every forward that names no cache uses that scheme.

    Returns:
        The same model. Raises as :func:`cache_for`.
    """
    scheme = None if scheme is None else Scheme.parse(scheme)
    if calibration is not None and not isinstance(calibration, Calibration):
        calibration = load_calibration(calibration)
    # Refuses now rather than at the first call.
    cache_for(model, scheme or "int4", sliding=sliding, calibration=calibration)
    attachment = attach(model)
    attachment.scheme, attachment.sliding, attachment.calibration = scheme, sliding, calibration
    if hasattr(model, _PrepareCache.name):
        _PrepareCache.stand_before(model)
    return model


def disable(model: PreTrainedModel) -> PreTrainedModel:
    """Take kvbits off ``model``: hooks, attention functions and the wrapper of :func:`enable`. Returns the model."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"disable takes a Transformers model, not {type(model).__name__}")
    attachment: Attachment | None = vars(model).pop(_ATTRIBUTE, None)
    if attachment is None:
        return model
    forget(model)
    for hook in attachment.hooks:
        hook.remove()
    for config, stock in attachment.implementations:
        if config._attn_implementation in STOCK_OF:
            config._attn_implementation_internal = stock
    for wrapper in (_PrepareCache, PrepareInputs):
        wrapper.step_aside(model)
    return model


class _PrepareCache(Wrapper):
    """Stands before one model's ``_prepare_cache_for_generation`` and answers where a kvbits cache is asked for."""

    name = "_prepare_cache_for_generation"

    def __call__(self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        model, attachment = self.model, vars(self.model).get(_ATTRIBUTE)
        if attachment is None:  # disabled, while a wrapper of the user's around this one stays
            return self.stock(generation_config, model_kwargs, *args, **kwargs)
        given = any(model_kwargs.get(name) is not None for name in CACHE_NAMES)
        scheme: Scheme | None = None
        if not given and generation_config.use_cache is not False:
            if generation_config.cache_implementation == "quantized":
                scheme = scheme_of_cache_config(generation_config.cache_config)
            elif generation_config.cache_implementation is None:
                scheme = attachment.scheme
        if scheme is None:
            return self.stock(generation_config, model_kwargs, *args, **kwargs)
        cache = cache_for(model, scheme, sliding=attachment.sliding, calibration=attachment.calibration)
        model_kwargs[cache_name(model)] = cache
        if getattr(generation_config, "is_assistant", False):
            cache.activate_past_recording()  # type: ignore[no-untyped-call]  # of Transformers
        return None
