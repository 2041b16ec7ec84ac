"""Whether a codec of another package keeps what the rest relies on: its spelling, its layout, and what its bits mean.

Kernels read a format and never ask the codec. So a codec that decodes otherwise than its format says would be attended
to wrongly and in silence; one that is refused here cannot.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from kvbits.codecs.base import Codec
from kvbits.numerics import bitpack, float8, groups, outliers
from kvbits.types import Packed, Params

RESERVED = ("default", "small", "kivi4", "kivi2")
"""Names of the catalogue that no codec of kvbits has."""

_NAME = re.compile(r"[a-z][a-z0-9]*(?:-[a-z0-9.]+%?)*")
_HEADS, _BLOCKS, _TOKENS, _CHANNELS = 2, 3, 128, 64


def check(kind: type[Codec], others: Sequence[type[Codec]]) -> None:
    """Refuse a codec that schemes could not name, or that kernels would read otherwise than it decodes.

    Raises:
        ValueError: naming the codec, the example and what is wrong with it.
    """
    examples = tuple(getattr(kind, "examples", ()))
    if not examples:
        raise ValueError(f"{kind.__name__} has no examples; give a spelling of each of its variants, such as ('po4',)")
    for example in examples:
        match = kind.pattern.fullmatch(example)
        if match is None:
            raise ValueError(f"{kind.__name__}.pattern {kind.pattern.pattern!r} does not match its example {example!r}")
        if not _NAME.fullmatch(example):
            raise ValueError(
                f"{example!r} is no name of a codec: small letters and digits, then parts such as -gs32 or -1%"
            )
        if taken := [other.__name__ for other in others if other.pattern.fullmatch(example)]:
            raise ValueError(f"{example!r} already is a {taken[0]}; give {kind.__name__} a name of its own")
        _check_bits(kind.from_match(match), example)
    spelled = [name for other in others for name in other.examples]
    if stolen := [name for name in (*RESERVED, *spelled, "nosuchcodec") if kind.pattern.fullmatch(name)]:
        raise ValueError(
            f"{kind.__name__}.pattern {kind.pattern.pattern!r} also matches {stolen[0]!r}; make it narrower"
        )


def _check_bits(codec: Codec, name: str) -> None:
    x = torch.randn(_HEADS, _BLOCKS, _TOKENS, _CHANNELS, generator=torch.Generator().manual_seed(0))
    params = codec.fit(x.transpose(0, 1)) if codec.is_fitted else {}
    packed, parts = codec.encode(x, params), codec.layout(_TOKENS, _CHANNELS, x.dtype)
    said = [(part.name, part.dtype, part.shape) for part in parts]
    made = [(key, part.dtype, tuple(part.shape[2:])) for key, part in packed.items()]
    if sorted(said, key=str) != sorted(made, key=str):
        raise ValueError(f"{name}: encode makes {made}, but layout says {said}")
    decoded, right = codec.decode(packed, params), by_format(codec, packed, params)
    if not torch.allclose(decoded.float(), right, rtol=1e-3, atol=1e-3 * float(x.abs().amax())):
        raise ValueError(
            f"{name} decodes otherwise than its format {codec.format} says, which is what kernels read: "
            "change what encode chooses, or give it a format of its own"
        )


def by_format(codec: Codec, packed: Packed, params: Params) -> torch.Tensor:
    """Blocks ``[H, N, T, D]`` as kernels understand them: ``scale * (level - zero)`` and what outliers add, float32."""
    form, codes = codec.format, packed["codes"]
    if form.levels == "exact":
        return codes.float()
    levels = float8.decode(codes) if form.levels == "e4m3" else bitpack.unpack(codes, form.bits).float()
    if form.levels == "table":
        table = codec.table(params)
        assert table is not None
        levels = table[levels.long()]
    channels = levels.shape[-1]
    fixed = form.per == "layer" or (form.per == "channel" and not form.group)

    def spread(name: str) -> torch.Tensor:
        if fixed:
            return params[name] if form.per == "layer" else params[name][:, None, None]
        x = packed[name].float()
        if form.per == "channel":
            return x.repeat_interleave(form.group, -2)
        length = groups.group_length(channels, form.group) if form.group else channels
        return x.repeat_interleave(length, -1)[..., :channels]

    out = (levels - spread("zero") if form.zero else levels) * spread("scale")
    if form.outliers:
        outliers.add_into(out, packed["outlier_index"], packed["outlier_value"])
    return out
