"""Encode blocks with Triton on CUDA and ROCm GPUs: one read of the exact elements, one write of the packed parts.

The twin of ``Codec.encode`` for ``int``, ``nf`` and ``fp8`` codecs, bit for bit: divisions are rounded to nearest and
rounding is half to even, as in PyTorch. Each program also counts what no block can hold, so that nothing is read twice.
Triton is imported when a block is encoded, not before.
"""

from __future__ import annotations

import functools

import torch

from kvbits.codecs import Affine, Codec, Fp8, NormalFloat
from kvbits.encode.sound import Unsound, compared_limit, limit_of
from kvbits.library import why_no_triton
from kvbits.numerics import groups
from kvbits.types import Packed, Params

MOST_CHANNELS = 512
_UNIFORM, _TABLE, _E4M3 = range(3)


def why_not(codec: Codec, x: torch.Tensor) -> list[str]:
    """Reasons against encoding blocks ``x [..., T, D]`` here; empty where :func:`run` does."""
    if reasons := why_no_triton(x.device):
        return reasons
    if type(codec) not in (Affine, NormalFloat, Fp8):
        reasons.append(f"{codec} (int, nf and fp8 run)")
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        reasons.append(f"{x.dtype} (float32, bfloat16 or float16 run)")
    tokens, channels = x.shape[-2:]
    if tokens < 16 or tokens & (tokens - 1):
        reasons.append(f"blocks of {tokens} tokens (powers of two from 16 run)")
    if channels > MOST_CHANNELS:
        reasons.append(f"head_dim {channels} (up to {MOST_CHANNELS} run)")
    return reasons


def run(codec: Codec, x: torch.Tensor, params: Params) -> Packed:
    """See :func:`kvbits.encode.encode`. Waits for the device, which alone knows whether the input is sound."""
    packed, unsound = launch(codec, x)
    if unsound is not None and (found := int(unsound.sum())):
        raise Unsound(found, limit_of(x.dtype))
    return packed


def launch(codec: Codec, x: torch.Tensor) -> tuple[Packed, torch.Tensor | None]:
    """Encode without waiting: parts ``[..., *part.shape]``, and how many elements of each block cannot be packed.

    Raises:
        ValueError: if :func:`why_not` has a reason.
    """
    if reasons := why_not(codec, x):
        raise ValueError(f"{codec} blocks {tuple(x.shape)} cannot be encoded with Triton: {', '.join(reasons)}")
    from kvbits.encode.triton_kernel import encode_block

    tokens, channels = x.shape[-2:]
    lead = x.shape[:-2]
    parts = codec.layout(tokens, channels, x.dtype)
    packed = {part.name: x.new_empty(*lead, *part.shape, dtype=part.dtype) for part in parts}
    flat = x.reshape(-1, *x.shape[-4:]) if x.ndim > 5 else x[(None,) * (5 - x.ndim)]  # [A, B, C, T, D]
    count = flat.shape[0] * flat.shape[1] * flat.shape[2]
    if count == 0:
        return packed, None
    if flat.stride(-1) != 1:
        flat = flat.contiguous()
    form = codec.format
    per_token = form.per == "token"
    length = (groups.group_length(channels, form.group) if form.group else channels) if per_token else form.group
    unsound = x.new_empty(count, dtype=torch.int32)
    encode_block[(count,)](
        flat, unsound, packed["codes"], packed["scale"], packed.get("zero", packed["scale"]),
        _edges(codec, x.device) if isinstance(codec, NormalFloat) else packed["scale"],
        compared_limit(x.dtype), flat.shape[1], flat.shape[2], *flat.stride()[:4],
        TOKENS=tokens, CHANNELS=channels, PADDED=max(16, 1 << (channels - 1).bit_length()), BITS=form.bits,
        LEVELS={"uniform": _UNIFORM, "table": _TABLE, "e4m3": _E4M3}[form.levels],
        PER_TOKEN=per_token, LENGTH=length, GROUPS=-(-channels // length) if per_token else tokens // length,
        num_warps=8,
    )  # fmt: skip
    return packed, unsound


@functools.lru_cache(maxsize=32)
def _edges(codec: NormalFloat, device: torch.device) -> torch.Tensor:
    """Midpoints between neighbouring levels, as ``codebook.nearest`` has them."""
    table = codec.table({})
    edges: torch.Tensor = (table[1:] + table[:-1]) / 2
    return edges.to(device)
