"""What the tests of the native kernel share: instruction sets, and calls that are held against float64."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from kvbits.attend import Call, KVView, choose, native
from kvbits.backends import library
from kvbits.codecs import CODECS
from kvbits.layer.cache import LayerCache
from kvbits.schemes.scheme import Scheme
from views import NATIVE_ERROR, Shape, plain_attention, random, unrounded, view_of, visible

_native = pytest.importorskip("kvbits._native", reason="kvbits._native is not built: no C++ compiler")
library()  # tells the module torch's dtypes

ISAS: list[str] = _native.names()
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
PLAIN = Shape(2, 3, 64, 64)
UNLIKE = Shape(2, 3, 72, 40)
HEADS = PLAIN.heads * PLAIN.groups
SPELLINGS = sorted({example for codec in CODECS for example in codec.examples})
SPLIT = 2**-16
"""Where work is cut elsewhere, float32 sums differ in their last bit, and by that a 16-bit factor in its own last."""

cached_view = functools.cache(view_of)
each_isa = pytest.mark.parametrize("isa", ISAS, indirect=True)


def decoded(view: KVView) -> tuple[torch.Tensor, torch.Tensor]:
    """All columns in float64, as the codecs themselves decode them."""
    with mock.patch.object(native, "why_not_view", lambda view: ["a test"]):
        return unrounded(view)


def torch_in_half(call: Call, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """What torch's own attention makes of it in bfloat16; where it lacks a feature, the formula in bfloat16."""
    half = dataclasses.replace(call, query=call.query.bfloat16())
    if call.softcap is not None or call.sink_logits is not None:
        return plain_attention(half, torch.bfloat16, keys, values)
    seen = visible(call)
    bias = torch.zeros(seen.shape)
    if call.mask is not None:
        bias = bias + (torch.zeros(()) if call.mask.dtype == torch.bool else call.mask.float())
        seen = seen & call.mask if call.mask.dtype == torch.bool else seen
    bias = bias.masked_fill(~seen, -torch.inf).bfloat16().expand(call.query.shape[0], -1, -1, -1)
    parts = (half.query, keys.bfloat16(), values.bfloat16())
    return scaled_dot_product_attention(*parts, bias, scale=call.scaling, enable_gqa=True).nan_to_num(0.0)


def assert_native(call: Call, run: Callable[[Call], torch.Tensor] = native.run) -> torch.Tensor:
    """The kernel takes the call, and errs by 1e-3 of the largest output, or twice what torch does in bfloat16.

    Whichever is smaller, in the maximum norm; beside it, the result may be rounded to its type once.
    """
    assert native.why_not(call) == [] and choose(call).name == "native"
    keys, values = decoded(call.view)
    truth = plain_attention(call, torch.float64, keys, values)
    largest = float(truth.abs().amax())
    in_half = float((torch_in_half(call, keys, values).double() - truth).abs().amax())
    rounding = largest * torch.finfo(call.query.dtype).eps / 2
    got = run(call)
    assert got.shape == truth.shape and got.dtype == call.query.dtype
    assert float((got.double() - truth).abs().amax()) <= min(NATIVE_ERROR * largest, 2 * in_half) + rounding
    return got


def same(got: torch.Tensor, right: torch.Tensor, tolerance: float) -> bool:
    """Equal to ``tolerance`` of the largest."""
    return float((got - right).abs().amax()) <= tolerance * float(right.abs().amax())


def view_in(
    scheme: Scheme, shape: Shape, counts: tuple[int, ...], scale: float = 1.0, dtype: torch.dtype = torch.float32
) -> KVView:
    """As ``view_of``, for codecs that have no spelling and elements of any magnitude."""
    cache, view = LayerCache(scheme), None
    for seed, count in enumerate(counts):
        keys = random(2, shape.heads, count, shape.key_channels, seed=2 * seed, dtype=dtype) * scale
        values = random(2, shape.heads, count, shape.value_channels, seed=2 * seed + 1, dtype=dtype) * scale
        view = cache.append(keys, values)
    assert view is not None
    return view
