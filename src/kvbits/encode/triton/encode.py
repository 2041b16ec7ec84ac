"""Encode blocks with Triton on CUDA and ROCm GPUs: one read of the exact elements, one write of the packed parts.

The twin of ``Codec.encode``, bit for bit: divisions are rounded to nearest, rounding is half to even, and products and
sums are not fused, as in PyTorch. The two exceptions are those of :mod:`kvbits.encode.native`: HQQ may take another one
of two zeros that are equally good, and of elements that are equally far out others may become outliers. What is done to
keys and values first (means, rotations, the rotary embedding taken off:
:class:`kvbits.transform.Transform`) is done in the same read. Each program also counts what no block can
hold, so that nothing is read twice. Triton is imported when a block is encoded.
"""

from __future__ import annotations

import functools

import torch

from kvbits.backends import why_no_triton, why_triton_is_off
from kvbits.codecs import Codec, Grouped
from kvbits.encode.sound import Unsound, compared_limit, limit_of
from kvbits.encode.triton.shape import Before, Shape, warps_of
from kvbits.transform import NOTHING, Transform
from kvbits.transform.rotate import signs_on
from kvbits.types import Packed, Params

MOST_CHANNELS = 512


def why_not(codec: Codec, x: torch.Tensor, transform: Transform = NOTHING) -> list[str]:
    """Reasons against encoding blocks ``x [..., T, D]`` here; empty where :func:`run` does."""
    return why_triton_is_off(x.device) or why_not_blocks(codec, x)


def why_not_blocks(codec: Codec, x: torch.Tensor) -> list[str]:
    """Reasons against these blocks, wherever Triton runs; empty where :func:`launch` takes them."""
    reasons = why_no_triton(x.device)
    if codec.chooses is None:
        reasons.append(f"{codec} (codecs that say how they choose run)")
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        reasons.append(f"{x.dtype} (float32, bfloat16 or float16 run)")
    tokens, channels = x.shape[-2:]
    if tokens < 16 or tokens & (tokens - 1):
        reasons.append(f"blocks of {tokens} tokens (powers of two from 16 run)")
    if channels > MOST_CHANNELS:
        reasons.append(f"head_dim {channels} (up to {MOST_CHANNELS} run)")
    return reasons


def run(codec: Codec, x: torch.Tensor, params: Params, transform: Transform = NOTHING, first: int = 0) -> Packed:
    """See :func:`kvbits.encode.encode`. Waits for the device, which alone knows whether the input is sound."""
    packed, unsound = launch(codec, x, params, transform, first)
    if unsound is not None and (found := int(unsound.sum())):
        raise Unsound(found, limit_of(x.dtype if transform.is_nothing else torch.float32))
    return packed


def launch(
    codec: Codec, x: torch.Tensor, params: Params, transform: Transform = NOTHING, first: int = 0
) -> tuple[Packed, torch.Tensor | None]:
    """Encode without waiting: parts ``[..., *part.shape]``, and how many elements of each block cannot be packed.

    Raises:
        ValueError: if :func:`why_not_blocks` has a reason, or static scales are for other heads.
    """
    if reasons := why_not_blocks(codec, x):
        raise ValueError(f"{codec} blocks {tuple(x.shape)} cannot be encoded with Triton: {', '.join(reasons)}")
    from kvbits.encode.triton.kernel import encode_block

    tokens, channels = x.shape[-2:]
    shape = Shape.of(codec, tokens, channels)
    if transform.rotation is not None and not shape.close:
        x, transform = transform.apply_to_blocks(x, first), NOTHING
    lead = x.shape[:-2]
    parts = codec.layout(tokens, channels, x.dtype)
    packed = {part.name: x.new_empty(*lead, *part.shape, dtype=part.dtype) for part in parts}
    flat = x.reshape(-1, *x.shape[-4:]) if x.ndim > 5 else x[(None,) * (5 - x.ndim)]  # [A, B, C, T, D]
    count = flat.shape[0] * flat.shape[1] * flat.shape[2]
    scale, zero = _given(codec, x, params)
    if count == 0:
        return packed, None
    if flat.stride(-1) != 1:
        flat = flat.contiguous()
    before, codes = Before.of(transform), packed["codes"]
    angles, strides = _angles(transform, before, flat)
    limit = compared_limit(torch.float32 if before.anything else x.dtype)
    unsound = x.new_empty(count, dtype=torch.int32)
    scratch = x.new_empty(count * tokens * channels if shape.outliers else 0, dtype=torch.int16)
    rest = (packed.get(name, codes) for name in ("scale", "zero", "outlier_index", "outlier_value"))
    encode_block[(count,)](
        flat, unsound, codes, *rest, scratch, _levels(codec, params, codes), scale, zero, limit,
        *_params(transform, flat), *angles, first, *strides, flat.shape[1], flat.shape[2], *flat.stride()[:4],
        SHAPE=shape, BEFORE=before, num_warps=warps_of(shape, before), enable_fp_fusion=False,
    )  # fmt: skip
    return packed, unsound


def _given(codec: Codec, x: torch.Tensor, params: Params) -> tuple[torch.Tensor, torch.Tensor]:
    """Static scales and zeros, float32 on the device of ``x``; anything where the codec has none."""
    if isinstance(codec, Grouped) and codec.static:
        scale, zero = codec.statics(x, params)
        return scale.float().contiguous(), zero.float().contiguous()
    if codec.format.per == "layer":
        scale = params["scale"].to(x.device).float()
        return scale, scale
    return x, x


def _params(transform: Transform, x: torch.Tensor) -> list[torch.Tensor]:
    """Mean, balance and signs, float32; anything where there are none."""
    signs = None if transform.rotation is None else signs_on(x.shape[-1], x.device)
    return [x if param is None else param.contiguous() for param in (transform.mean, transform.balance, signs)]


def _angles(transform: Transform, before: Before, none: torch.Tensor) -> tuple[list[torch.Tensor], tuple[int, int]]:
    """Cosines and sines of blocks and within one; the strides of a row, which may be one for all, and of a block."""
    rope = transform.rope
    if rope is None or not before.unroped:
        return [none] * 4, (0, 0)
    shared = rope.base_cos.shape[0] == 1
    cos, sin = (x if x.stride(2) == 1 else x.contiguous() for x in (rope.base_cos, rope.base_sin))
    assert cos.stride() == sin.stride()
    steps = [rope.step_cos.contiguous(), rope.step_sin.contiguous()]
    return [cos, sin, *steps], (0 if shared else cos.stride(0), cos.stride(1))


def _levels(codec: Codec, params: Params, none: torch.Tensor) -> torch.Tensor:
    """The edges between the levels of a table, and what their codes decode to."""
    if codec.format.levels != "table":
        return none
    return _with_edges(codec, params).to(none.device) if codec.is_fitted else _fixed_levels(codec, none.device)


@functools.lru_cache(maxsize=32)
def _fixed_levels(codec: Codec, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return _with_edges(codec, {}).to(device)


def _with_edges(codec: Codec, params: Params) -> torch.Tensor:
    edges, table = codec.edges(params), codec.table(params)
    assert edges is not None and table is not None
    return torch.cat([edges, table]).float()
