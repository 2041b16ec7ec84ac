"""Encode blocks with Triton on CUDA and ROCm GPUs: one read of the exact elements, one write of the packed parts.

The twin of ``Codec.encode``, bit for bit, for ``int``, ``rot``, ``nf``, ``lm``, ``fp8`` and ``fp8-static`` codecs
without outliers: divisions are rounded to nearest and rounding is half to even, as in PyTorch. What rotations and means
do to keys and values first (:class:`kvbits.attend.Transform`) is left to PyTorch, once a block. Each program also
counts what no block can hold, so that nothing is read twice. Triton is imported when a block is encoded, not before.
"""

from __future__ import annotations

import functools

import torch

from kvbits.codecs import Affine, Codec, Fp8, Fp8Static, Grouped, LloydMax, NormalFloat, Rotated
from kvbits.encode.sound import Unsound, compared_limit, limit_of
from kvbits.library import why_no_triton
from kvbits.numerics import groups
from kvbits.types import Packed, Params

MOST_CHANNELS = 512
_LEVELS = {"uniform": 0, "table": 1, "e4m3": 2}
_RANGE, _NORM, _FIXED = range(3)
"""How scales are chosen, as ``CHOICE`` in the kernel."""

_CHOICES: dict[type[Codec], int] = {
    Affine: _RANGE, Rotated: _RANGE, NormalFloat: _RANGE, Fp8: _RANGE, LloydMax: _NORM, Fp8Static: _FIXED,
}  # fmt: skip


def why_not(codec: Codec, x: torch.Tensor) -> list[str]:
    """Reasons against encoding blocks ``x [..., T, D]`` here; empty where :func:`run` does."""
    if reasons := why_no_triton(x.device):
        return reasons
    if type(codec) not in _CHOICES:
        reasons.append(f"{codec} (int, rot, nf, lm and fp8 run)")
    elif isinstance(codec, Grouped) and (codec.outliers or codec.static):
        reasons.append(f"{codec} (without outliers or static scales it would run)")
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
    packed, unsound = launch(codec, x, params)
    if unsound is not None and (found := int(unsound.sum())):
        raise Unsound(found, limit_of(x.dtype))
    return packed


def launch(codec: Codec, x: torch.Tensor, params: Params) -> tuple[Packed, torch.Tensor | None]:
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
    form, codes = codec.format, packed["codes"]
    per_channel = form.per == "channel"
    length = form.group if per_channel or not form.group else groups.group_length(channels, form.group)
    length = length or channels
    unsound = x.new_empty(count, dtype=torch.int32)
    scale = params["scale"] if _CHOICES[type(codec)] == _FIXED else packed["scale"]
    encode_block[(count,)](
        flat, unsound, codes, scale, packed.get("zero", codes),
        _levels(codec, x.device) if form.levels == "table" else codes,
        compared_limit(x.dtype), flat.shape[1], flat.shape[2], *flat.stride()[:4],
        TOKENS=tokens, CHANNELS=channels, PADDED=max(16, 1 << (channels - 1).bit_length()), BITS=form.bits,
        LEVELS=_LEVELS[form.levels], CHOICE=_CHOICES[type(codec)], PER_TOKEN=not per_channel, LENGTH=length,
        GROUPS=tokens // length if per_channel else -(-channels // length), num_warps=8,
    )  # fmt: skip
    return packed, unsound


@functools.lru_cache(maxsize=32)
def _levels(codec: Codec, device: torch.device) -> torch.Tensor:
    """Midpoints between neighbouring levels, as ``codebook.nearest`` has them, and behind them the levels."""
    table = codec.table({})
    assert table is not None
    return torch.cat([(table[1:] + table[:-1]) / 2, table]).to(device)
