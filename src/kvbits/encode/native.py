"""The native encoders: scales, zeros, codes, outliers and their packing, block by block in C++ on the CPU.

The bits are those of ``codec.encode``: ``native/encode.hpp`` does the same float32 operations in the same order. There
are two exceptions. HQQ's powers and sums are rounded otherwise, so that of two zeros that are equally good, to five
digits of their error, it may take the other one (about 2 in 10,000 zeros, and 2 in a million codes). And of elements
that are equally far out, another one may become an outlier.
"""

from __future__ import annotations

import torch

from kvbits.backends import DTYPES, LEVELS, PER, library
from kvbits.codecs import Choice, Codec, Exact, Grouped
from kvbits.encode.sound import Unsound, compared_limit, limit_of
from kvbits.numerics import groups
from kvbits.transform import NOTHING, Transform
from kvbits.types import Packed, Params

_CHOICES: tuple[Choice, ...] = ("range", "half-quadratic", "magnitude", "fixed", "norm", "open range")
"""The places of ``Choice`` in ``native/encoder.hpp``."""


def why_not(codec: Codec, x: torch.Tensor, transform: Transform = NOTHING) -> list[str]:
    """Reasons against this kernel."""
    module, _, reason = library()
    if module is None:
        return [reason]
    reasons = {
        f"{codec} has no native encoder": codec.chooses is None and not isinstance(codec, Exact),
        f"tensors are on {x.device.type}": x.device.type != "cpu",
        f"{x.dtype} is encoded in full only by the reference": x.dtype not in DTYPES[1:4] and transform.is_nothing,
        "there is nothing to encode": x.numel() == 0,
    }
    return [reason for reason, holds in reasons.items() if holds]


def run(codec: Codec, x: torch.Tensor, params: Params, transform: Transform = NOTHING, first: int = 0) -> Packed:
    """See :func:`kvbits.encode.encode`."""
    return run_on(library()[1], codec, transform.apply_to_blocks(x, first), params)


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
    assert codec.chooses is not None
    static = isinstance(codec, Grouped) and codec.static
    length = tokens if static else form.group
    if form.per != "channel":
        length = groups.group_length(channels, form.group) if form.group else channels
    packed = {part.name: torch.empty(*x.shape[:-2], *part.shape, dtype=part.dtype) for part in parts}
    edges, table = _levels(codec, params)
    bad = module.encode(
        isa=isa,
        threads=threads,
        x=x,
        choice=_CHOICES.index("fixed" if static else codec.chooses),
        levels=LEVELS.index(form.levels),
        per=PER.index("token" if form.per == "layer" else form.per),
        bits=form.bits,
        length=length,
        edges=edges,
        table=table,
        layer_scale=float(params["scale"]) if form.per == "layer" else 1.0,
        static_scale=params["scale"].float().contiguous() if static else None,
        static_zero=params["zero"].float().contiguous() if static else None,
        limit=limit,
        packed=packed,
    )
    if bad:
        raise Unsound(bad, limit_of(x.dtype))
    return packed


def _levels(codec: Codec, params: Params) -> tuple[list[float], list[float]]:
    """The edges between the levels of a table, and what their codes decode to; nothing where there is none."""
    edges, table = codec.edges(params), codec.table(params)
    return ([], []) if edges is None or table is None else (edges.tolist(), table.tolist())
