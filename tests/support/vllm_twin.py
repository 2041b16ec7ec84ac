"""What vLLM does over packed pages, through Transformers and without pages: each token through the codec's reference.

A step attends to what came before as it is stored, and to its own tokens exactly. Rows of a batch come in COPIES.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from kvbits.codecs import Codec
from kvbits.numerics import hadamard
from kvbits.schemes.scheme import Scheme

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENS = 24
"""That are asked for after each prompt."""

NOISE = 1e-4
"""What the native kernel's outputs are off by, in parts of the largest (docs/kernels.md)."""

COPIES = 4
"""Of each prompt: the first as it is, the others with noise. An element that lies between two codes gets another one
for the least reason, and few bits make much of that: so one run alone does not tell what may differ."""


def stored(codec: Codec, x: torch.Tensor) -> torch.Tensor:
    """What tokens ``[B, H, T, D]`` are once stored, each by itself."""
    matrix = hadamard.rotation(x.shape[-1]) if codec.rotates else torch.eye(x.shape[-1])
    rotated = x @ matrix
    padded = torch.cat([rotated, rotated.new_zeros(*x.shape[:2], -x.shape[2] % 8, x.shape[3])], dim=2)
    return codec.decode(codec.encode(padded, {}), {})[:, :, : x.shape[2]] @ matrix.T


def cache_of(scheme: Scheme, unseen: bool = False) -> Cache:
    """A cache that hands out new tokens exactly, and stored once they are old; ``unseen`` forgets one in each step."""

    class Layer(DynamicLayer):
        def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
            held = [x[:, :, : x.shape[2] - unseen] if x.ndim == 4 else x for x in (self.keys, self.values)]
            seen = [torch.cat(pair, dim=2) for pair in zip(held, (key_states, value_states), strict=True)]
            self.keys = torch.cat([self.keys, stored(scheme.key, key_states)], dim=2)
            self.values = torch.cat([self.values, stored(scheme.value, value_states)], dim=2)
            return seen[0], seen[1]

    return Cache(layer_class_to_replicate=Layer)


@contextmanager
def noisy(model: PreTrainedModel, cache: Cache) -> Iterator[None]:
    """Attention of all copies but the first is off: over stored tokens as a kernel is, else as sums in float32 are."""
    summands = model.config.intermediate_size
    exact = torch.finfo(torch.float32).eps * math.sqrt(summands)

    def shake(module: Any, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        (out,) = inputs
        size = NOISE if held[0] else exact
        noise = size * out.abs().amax(-1, keepdim=True) * torch.randn_like(out)
        noise[::COPIES] = 0
        return (out + noise,)

    def begin(module: Any, args: Any, kwargs: Any) -> None:
        held[0] = cache.get_seq_length()

    held = [0]
    hooks = [layer.self_attn.o_proj.register_forward_pre_hook(shake) for layer in model.model.layers]
    hooks.append(model.register_forward_pre_hook(begin, with_kwargs=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def steps(
    model: PreTrainedModel,
    prompts: list[list[int]],
    cache: Cache,
    chunk: int = 10_000,
    said: list[list[int]] | None = None,
) -> Iterator[torch.Tensor]:
    """Log-probabilities ``[prompts, COPIES, V]`` of each of TOKENS steps after prompts of one length.

    Args:
        prompts: token ids; the cache may hold a part of them.
        chunk: so many tokens of a prompt are read at once.
        said: what the copies are told to have said; without it, each says what it finds likeliest.
    """
    torch.manual_seed(0)
    ids = torch.tensor(prompts).repeat_interleave(COPIES, 0)
    with noisy(model, cache):
        for new in ids[:, cache.get_seq_length() :].split(chunk, dim=1):
            logits = model(new, past_key_values=cache, logits_to_keep=1).logits[:, -1]
        for step in range(TOKENS):
            yield logits.log_softmax(-1).unflatten(0, (-1, COPIES))
            if step < TOKENS - 1:
                token = logits.argmax(-1) if said is None else torch.tensor(said)[:, step].repeat_interleave(COPIES)
                logits = model(token[:, None], past_key_values=cache).logits[:, -1]


@dataclass(frozen=True)
class Told:
    """How far log-probabilities lie from those of the copy without noise, at every step of every prompt.

    Attributes:
        ours: vLLM's, the largest distance among its likeliest tokens, ``[n]``.
        copies: those of the copies with noise, for the same tokens, ``[n, COPIES - 1]``.
        short: how far the token that vLLM took is from the likeliest of the copy without noise, ``[n]``.
        shorts: the same for the token that each copy with noise finds likeliest, ``[n, COPIES - 1]``.
    """

    ours: torch.Tensor
    copies: torch.Tensor
    short: torch.Tensor
    shorts: torch.Tensor


def told(
    model: PreTrainedModel, prompts: list[list[int]], answers: list[dict[str, Any]], cache: Cache, chunk: int = 10_000
) -> Told:
    """What Transformers makes of ``answers`` (of :func:`vllm_job.run`) to prompts of one length, step by step."""
    rows = []
    said = [one["tokens"] for one in answers]
    for step, found in enumerate(steps(model, prompts, cache, chunk, said)):
        for answer, here in zip(answers, found, strict=True):  # here: [COPIES, V]
            top = {int(token): value for token, value in answer["top"][step].items()}
            moved = here[:, [*top]] - here[0, [*top]]
            ours = torch.tensor([*top.values()]) - here[0, [*top]]
            likeliest = here[0].max()
            taken = here[0, [answer["tokens"][step], *here[1:].argmax(-1).tolist()]]
            rows.append(
                (ours.abs().max()[None], moved[1:].abs().amax(-1), likeliest - taken[:1], likeliest - taken[1:])
            )
    ours, copies, short, shorts = (torch.stack(column) for column in zip(*rows, strict=True))
    return Told(ours[:, 0], copies, short[:, 0], shorts)
