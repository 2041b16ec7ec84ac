"""The native encoders: scales, zeros, codes and their packing in one pass over the blocks, in C++ on the CPU.

The bits are those of ``codec.encode``: ``native/encode.hpp`` does the same float32 operations in the same order. HQQ is
the exception. Its powers and sums are rounded otherwise, so that of two zeros that are equally good, to five digits of
their error, it may take the other one (about 2 in 10,000 zeros, and 2 in a million codes).
"""

from __future__ import annotations

import functools

import torch

from kvbits.codecs import Affine, Codec, Exact, Fp8, Fp8Static, Grouped, HalfQuadratic, NormalFloat
from kvbits.encode.sound import Unsound, compared_limit, limit_of
from kvbits.library import DTYPES, LEVELS, PER, library
from kvbits.numerics import codebook, groups
from kvbits.types import Packed, Params

_CHOICES: dict[type[Codec], int] = {Affine: 0, NormalFloat: 0, HalfQuadratic: 1, Fp8: 2, Fp8Static: 3}
"""How a codec chooses its scales: the places of ``Choice`` in ``native/encoder.hpp``."""


def why_not(codec: Codec, x: torch.Tensor) -> list[str]:
    """Reasons against this kernel."""
    module, _, reason = library()
    if module is None:
        return [reason]
    grouped = isinstance(codec, Grouped)
    reasons = {
        f"{codec} has static scales": grouped and codec.static,
        f"{codec} has outliers": grouped and codec.outliers > 0,
        f"{codec} has no native encoder": type(codec) not in _CHOICES and type(codec) is not Exact,
        f"tensors are on {x.device.type}": x.device.type != "cpu",
        f"{x.dtype} is encoded in full only by the reference": x.dtype not in DTYPES[1:4],
        "there is nothing to encode": x.numel() == 0,
    }
    return [reason for reason, holds in reasons.items() if holds]


def run(codec: Codec, x: torch.Tensor, params: Params) -> Packed:
    """See :func:`kvbits.encode.encode`."""
    return run_on(library()[1], codec, x, params)


def run_on(isa: int, codec: Codec, x: torch.Tensor, params: Params) -> Packed:
    """As :func:`run`, with the instruction set of this place in ``_native.names()``."""
    module = library()[0]
    assert module is not None
    threads, limit = torch.get_num_threads(), compared_limit(x.dtype)
    tokens, channels = x.shape[-2:]
    parts = codec.layout(tokens, channels, x.dtype)  # raises where the block does not suit the codec
    if x.stride(-1) != 1:
        x = x.contiguous()
    if isinstance(codec, Exact):
        bad = module.count_unsound(threads, x, limit)
        if bad:
            raise Unsound(bad, limit_of(x.dtype))
        return codec.encode(x, params)
    form = codec.format
    length = form.group
    if form.per != "channel":
        length = groups.group_length(channels, form.group) if form.group else channels
    packed = {part.name: torch.empty(*x.shape[:-2], *part.shape, dtype=part.dtype) for part in parts}
    scale = float(params["scale"]) if form.per == "layer" else 1.0
    bad, _ = module.encode(
        isa, threads, x, _CHOICES[type(codec)], LEVELS.index(form.levels),
        PER.index("token" if form.per == "layer" else form.per), form.bits, length,
        packed["codes"], packed.get("scale"), packed.get("zero"),
        _edges(form.bits) if form.levels == "table" else [], scale, limit,
    )  # fmt: skip
    if bad:
        raise Unsound(bad, limit_of(x.dtype))
    return packed


@functools.cache
def _edges(bits: int) -> list[float]:
    """What lies between neighbouring levels, as ``codebook.nearest`` computes it."""
    table = torch.tensor(codebook.normal_float(bits), dtype=torch.float32)
    edges: list[float] = ((table[1:] + table[:-1]) / 2).tolist()
    return edges
