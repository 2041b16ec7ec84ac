"""The Triton encoder on a device, a part of :mod:`gpu`: the bits of the codec, and how long it takes beside PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from gpu_clock import Clock

from kvbits.codecs import Codec, Grouped, HalfQuadratic
from kvbits.encode import reference
from kvbits.encode.triton import encode as fast
from kvbits.numerics import hadamard
from kvbits.schemes.scheme import Scheme
from kvbits.store.record import Record
from kvbits.store.rows import Rows
from kvbits.transform import NOTHING, Rope, Transform
from kvbits.transform.rotary import Rotary
from kvbits.types import Params

ENCODED = (
    *("int4", "kivi4", "nf4", "lm4", "fp8", "fp8-static", "int4-1%", "int4-calibrated", "nuq3-1%", "hqq4"),
    *("rot4", "default", "small", "int4,pre-rope", "kivi4,pre-rope"),
)
"""Schemes whose keys are checked and timed: one for each way to encode, and for each thing that is done first."""

CHOOSES = 1e-2
"""Share of a part that may differ from the codec's where it takes one of equals: HQQ's zeros, and outliers."""


def transform_for(
    scheme: Scheme, heads: int, channels: int, blocks: int, block: int, device: torch.device
) -> Transform:
    """What a cache of such keys would do to them first."""
    rotated = scheme.key.rotates
    if not (rotated or scheme.centred or scheme.pre_rope):
        return NOTHING
    rope: Rope | None = None
    if scheme.centred or scheme.pre_rope:
        rotary = Rotary(10_000.0 ** -torch.linspace(0, 1, channels // 2))
        rope = rotary.rope(Rows(1), scheme.sinks, block, blocks, device)
    made = torch.Generator(device).manual_seed(0)
    mean = torch.randn(heads, channels, device=device, generator=made) if scheme.centred else None
    balance = torch.rand(heads, channels, device=device, generator=made) + 0.5 if scheme.centred and rotated else None
    rotation = hadamard.rotation(channels).to(device) if rotated else None
    return Transform(mean, rotation, rope, scheme.pre_rope, balance)


def encoder_differs(codec: Codec, x: torch.Tensor, params: Params, transform: Transform) -> float:
    """The largest share of a part's elements that the Triton encoder writes otherwise than the codec.

    Raises:
        RuntimeError: if it is more than none, or where either chooses among equals, more than ``CHOOSES``.
    """
    chooses = isinstance(codec, Grouped) and (codec.outliers > 0 or isinstance(codec, HalfQuadratic))
    x = torch.randn_like(x, dtype=torch.float32) if chooses else x  # hardly any are equal
    right, got = reference.run(codec, x, params, transform), fast.run(codec, x, params, transform)
    pairs = ((right[name].contiguous().view(torch.uint8), got[name].view(torch.uint8)) for name in right)
    differs = max(float((a != b).float().mean()) for a, b in pairs)
    if differs > CHOOSES * chooses:
        raise RuntimeError(f"{codec}: {differs:.2%} of what the Triton encoder writes is not what the codec does")
    return differs


def encode_row(clock: Clock, name: str, bandwidth: float, small: bool) -> dict[str, Any]:
    """Encode the keys of a prompt; the same in plain PyTorch beside it."""
    scheme = Scheme.parse(name)
    codec = scheme.key
    shape = (1, 2, 2, 32, 32) if small else (1, 8, 256, 128, 128)
    _, heads, blocks, block, channels = shape
    x = torch.randn(shape, device=clock.device, dtype=torch.bfloat16)
    transform = transform_for(scheme, heads, channels, blocks, block, clock.device)
    params = codec.fit(transform.apply_to_blocks(x, 0)[0].transpose(0, 1)[:4])
    record = Record.of(codec, codec, block, channels, channels, x.dtype)
    written = sum(slot.part.nbytes for slot in record.keys) * heads * blocks
    differs = encoder_differs(codec, x, params, transform)
    seconds = clock.seconds([lambda: fast.launch(codec, x, params, transform)] * 3)
    return {
        "scheme": name,
        "tokens": blocks * block,
        "heads": heads,
        "differs": differs,
        "microseconds": 1e6 * seconds,
        "torch_microseconds": 1e6 * clock.eager_seconds(lambda: reference.run(codec, x, params, transform)),
        "share_of_copy_bandwidth": (x.nbytes + written) / seconds / bandwidth,
    }
