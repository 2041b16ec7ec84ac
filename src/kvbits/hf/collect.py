"""Collect K and V of every attention layer, and the gradient of the loss with respect to each of their elements.

A recording cache sees what every model hands to its cache: keys after the rotary embedding and values, one tensor per
layer, whether its projections are separate or fused. It passes them on through :class:`_Tap`, an identity whose
backward notes the gradient. The graph thus begins at the caches of the layers: no weight requires a gradient, none of
their gradients is ever computed, and what a sample needs is bounded by its activations (or, checkpointed, by the
inputs of the layers and the activations of one of them).

KVQuant (arXiv 2401.18079, appendix E) asks for the squared gradients of the outputs of k_proj and v_proj. The rotary
embedding is orthogonal, so the gradient before it is the gradient after it, unroped like the key itself: signed
gradients are kept, and squared in the basis that a codec sees.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from kvbits.hf.devices import device_of_ids
from kvbits.hf.names import cache_name

LOGITS_TOKENS = 256
"""Tokens whose logits are float32 at a time."""

GRADIENT_DTYPE = torch.bfloat16
"""Its exponents reach from 1e-38 to 1e38, so no gradient of a loss vanishes; 8 bits are enough for a weight."""

SMALLEST_SCALE = 2.0**-40


class _Tap(torch.autograd.Function):
    """``x`` itself; ``note`` gets the gradient that arrives."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, x: torch.Tensor, note: Callable[[torch.Tensor], None]) -> torch.Tensor:
        ctx.note = note
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.note(gradients[0])
        return None, gradients[0] if ctx.needs_input_grad[1] else None, None


class Recorder(Cache):
    """An always empty Transformers cache that records one forward and the backward after it.

    While :attr:`recording`, what layers hand over is kept, on the CPU. Afterwards the same call leaves everything as it
    is: checkpointed layers run again during the backward.

    Attributes:
        states: ``"3.key"``, ``"3.value"``: ``[H, T, D]`` in the model's dtype, keys after the rotary embedding.
        gradients: the same names: bfloat16 ``[H, T, D]`` on the CPU, times whatever the loss was scaled by.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._empty: list[Any] = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
        super().__init__(layers=copy.deepcopy(self._empty))
        self.recording = True
        self.states: dict[str, torch.Tensor] = {}
        self.gradients: dict[str, torch.Tensor] = {}
        self._anchor = torch.zeros((), requires_grad=True)  # makes every tap a part of the graph

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Note both and return them, as a cache that was empty does."""
        return self._pass(f"{layer_idx}.key", key_states), self._pass(f"{layer_idx}.value", value_states)

    def _pass(self, name: str, x: torch.Tensor) -> torch.Tensor:
        if self.recording:
            if name in self.states:
                raise ValueError(f"{name}: handed to the cache twice in one forward, which cannot be calibrated")
            if x.ndim != 4 or x.shape[0] != 1:
                raise ValueError(
                    f"{name}: {tuple(x.shape)} is no [1, heads, tokens, channels] that could be calibrated"
                )
            self.states[name] = x.detach()[0].cpu()

        def note(gradient: torch.Tensor) -> None:
            self.gradients[name] = gradient.detach()[0].to("cpu", GRADIENT_DTYPE)

        passed: torch.Tensor = _Tap.apply(self._anchor, x, note)  # type: ignore[no-untyped-call]  # of torch
        return passed

    # Layers of linear attention and state spaces: each call finds them as new, also when it is repeated.

    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """As in every Transformers cache, and forgotten."""
        return copy.deepcopy(self._empty[layer_idx]).update_conv_state(conv_states, *args, **kwargs)

    def update_recurrent_state(self, recurrent_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """As in every Transformers cache, and forgotten."""
        return copy.deepcopy(self._empty[layer_idx]).update_recurrent_state(recurrent_states, *args, **kwargs)


def collect(model: PreTrainedModel, ids: torch.Tensor, checkpointing: bool = False) -> dict[str, torch.Tensor]:
    """States and gradients of one sample.

    Args:
        model: on any device, in float32, bfloat16 or float16; it is left as it was.
        ids: int64 ``[T]``.
        checkpointing: compute each layer again in the backward rather than keep its activations.

    Returns:
        ``"3.key"``, ``"3.value"`` as in :class:`Recorder`, and ``"3.key.gradient"``, ``"3.value.gradient"``: bfloat16
        ``[H, T, D]``, of the summed next-token cross entropy of the sample.

    Raises:
        ValueError: if states or gradients are not finite, or the model returns no logits.
    """
    scale = 1.0
    while True:
        recorder = _run(model, ids, scale, checkpointing)
        _refuse_infinite(recorder.states, "is not finite: the model itself overflows, take bfloat16 or float32")
        if all(bool(x.isfinite().all()) for x in recorder.gradients.values()):
            break
        scale /= 16  # float16 ends at 65504
        if model.dtype != torch.float16 or scale < SMALLEST_SCALE:
            _refuse_infinite(recorder.gradients, "has a gradient that is not finite")
    found = dict(recorder.states)
    for name, x in recorder.states.items():
        gradient = recorder.gradients.get(name)
        # A power of two: dividing by it loses nothing.
        found[f"{name}.gradient"] = torch.zeros(x.shape, dtype=GRADIENT_DTYPE) if gradient is None else gradient / scale
    return found


def _refuse_infinite(tensors: dict[str, torch.Tensor], what: str) -> None:
    for name, x in tensors.items():
        if not bool(x.isfinite().all()):
            layer, side = name.split(".")
            raise ValueError(f"the {side} of layer {layer} {what}")


def _run(model: PreTrainedModel, ids: torch.Tensor, scale: float, checkpointing: bool) -> Recorder:
    recorder = Recorder(model)
    ids = ids.to(device_of_ids(model))[None]
    twice = checkpointed(model) if checkpointing else contextlib.nullcontext()
    with torch.inference_mode(False), torch.enable_grad(), frozen(model), twice:
        logits = getattr(model(input_ids=ids, use_cache=True, **{cache_name(model): recorder}), "logits", None)
        recorder.recording = False
        if logits is None:
            raise ValueError(f"{type(model).__name__} returns no logits, and so has no loss; give a language model")
        if logits.requires_grad:  # it does not where no layer has a cache of keys and values
            logits.backward(gradient=loss_gradient(logits.detach(), ids, scale))
    return recorder


def loss_gradient(logits: torch.Tensor, ids: torch.Tensor, scale: float) -> torch.Tensor:
    """Gradient of ``scale`` times the summed next-token cross entropy, like ``logits [1, T, V]``.

    In closed form (softmax minus one-hot), a few tokens at a time: the float32 copies of a long sample's logits would
    be the largest tensors of all.
    """
    gradient = torch.zeros_like(logits)
    targets = ids[0, 1:].to(logits.device)
    for first in range(0, len(targets), LOGITS_TOKENS):
        here = slice(first, min(first + LOGITS_TOKENS, len(targets)))
        share = logits[0, here].float().softmax(-1)
        share.scatter_add_(-1, targets[here, None], share.new_full((len(share), 1), -1.0))
        gradient[0, here] = (share * scale).to(gradient.dtype)
    return gradient


@contextlib.contextmanager
def frozen(model: PreTrainedModel) -> Iterator[None]:
    """No weight requires a gradient and nothing is dropped out meanwhile; then everything is as it was."""
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    training = [module for module in model.modules() if module.training]
    for parameter in wanted:
        parameter.requires_grad_(False)
    model.eval()
    try:
        yield
    finally:
        for parameter in wanted:
            parameter.requires_grad_(True)
        for module in training:
            module.training = True


# -- memory ------------------------------------------------------------------------------------------------------------


def decoder_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The layers that can be computed again one by one: those that Transformers itself would checkpoint."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


@contextlib.contextmanager
def checkpointed(model: PreTrainedModel) -> Iterator[None]:
    """Each decoder layer keeps its inputs only, and runs again in the backward.

    Not Transformers' own checkpointing: that takes the cache away from the layers, and runs in training mode only.
    """
    layers = decoder_layers(model)
    own = [vars(layer).get("forward") for layer in layers]
    for layer in layers:
        layer.forward = _Checkpointed(layer.forward)
    try:
        yield
    finally:
        for layer, forward in zip(layers, own, strict=True):
            if forward is None:
                del layer.forward
            else:  # accelerate's, for one
                layer.forward = forward


class _Checkpointed:
    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def probe(model: PreTrainedModel, tokens: int) -> tuple[int, dict[str, torch.Tensor]]:
    """What one forward of so many tokens keeps for its backward, by trying it: bytes beside the weights, and states.

    The states are those of :class:`Recorder`.
    """
    weights = {x.untyped_storage().data_ptr() for x in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}

    def note(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    ids = torch.ones(1, tokens, dtype=torch.int64, device=device_of_ids(model))
    recorder = Recorder(model)
    keeping = torch.autograd.graph.saved_tensors_hooks(note, lambda x: x)
    with torch.inference_mode(False), torch.enable_grad(), frozen(model), keeping:
        model(input_ids=ids, use_cache=True, **{cache_name(model): recorder})
    return sum(kept.values()), recorder.states
