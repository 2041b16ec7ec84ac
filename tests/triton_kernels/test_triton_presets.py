"""What ``default`` and ``small`` need of the Triton kernels: roped means of keys, and late sinks."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kvbits.attend import Call, KVView, reference
from kvbits.attend.dense import _in_columns
from kvbits.attend.triton import decode as triton_decode
from kvbits.attend.triton.tuning import Tuning, tuned
from kvbits.layer.cache import LayerCache
from kvbits.schemes.scheme import Scheme
from kvbits.store.rows import Rows
from kvbits.transform import Rope, Transform
from kvbits.transform.rotary import Rotary
from triton_calls import angles_for, moved, needs_triton, run
from views import SMALL, Shape, additive, boolean, causal, plain_attention, query_for, random, view_of

pytestmark = pytest.mark.usefixtures("interpreted")


def centred_view(
    scheme: str, shape: Shape, queries: int, batch: int, pairs: int, interleaved: bool = False, rotated: bool = True,
    dtype: torch.dtype = torch.float32,
) -> KVView:  # fmt: skip
    """A view whose packed keys lack a roped mean, of the size that such means have beside what is left."""
    view = view_of(shape, (92, queries), f"{scheme},{SMALL}", batch=batch, dtype=dtype)
    channels = shape.key_channels
    key = Transform(
        mean=random(shape.heads, channels, seed=31) * 3,
        rotation=torch.linalg.qr(random(channels, channels, seed=32))[0] if rotated else None,
        rope=angles_for(view, pairs, batch, interleaved),
        whole=False,
        balance=random(shape.heads, channels, seed=33).abs() + 0.5 if rotated else None,
    )
    rotation = torch.linalg.qr(random(shape.value_channels, shape.value_channels, seed=34))[0] if rotated else None
    return dataclasses.replace(view, key_transform=key, value_transform=Transform(rotation=rotation))


def in_float64(view: KVView) -> tuple[torch.Tensor, torch.Tensor]:
    """All columns, what was done to packed keys and values undone in float64: a mean is large beside what it is in."""
    key, rope = view.key_transform, view.key_transform.rope
    if rope is not None:
        angles = (x.double() for x in (rope.base_cos, rope.base_sin, rope.step_cos, rope.step_sin))
        key = dataclasses.replace(key, rope=Rope(*angles, rope.interleaved))
    packed = view.blocks.read(0, view.blocks.longest)
    decoded = (
        transform.undo(codec.decode(x, params).flatten(2, 3).double(), 0)
        for codec, x, params, transform in (
            (view.scheme.key, packed[0], view.key_params, key),
            (view.scheme.value, packed[1], view.value_params, view.value_transform),
        )
    )
    keys, values = (
        _in_columns(view, exact.double(), x) for exact, x in zip((view.keys, view.values), decoded, strict=True)
    )
    return keys, values


def assert_right(call: Call) -> None:
    """Against float64 from the stored bits on: at most twice the error of the reference, or of the plain formula.

    The reference ropes and rotates keys in float32, as the kernel does queries; the plain formula is given them.
    """
    keys, values = in_float64(call.view)
    truth = plain_attention(call, torch.float64, keys, values)
    plain = plain_attention(call, call.query.dtype, keys, values).double() - truth
    error, twin = run(call).double() - truth, reference.run(call).double() - truth
    allowed = 2 * torch.finfo(call.query.dtype).eps * float(values.abs().amax())
    for norm, rounding in ((_root_mean_square, allowed / 4), (lambda x: float(x.abs().amax()), allowed)):
        assert norm(error) <= 2 * max(norm(plain), norm(twin)) + rounding


def _root_mean_square(x: torch.Tensor) -> float:
    return float(x.square().mean().sqrt())


@needs_triton
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize(
    ("scheme", "pairs", "interleaved", "queries", "batch"),
    [
        ("lm4", 16, False, 1, 1),
        ("lm2", 16, True, 2, 1),
        ("lm3", 5, False, 1, 2),
    ],
)
def test_centred_and_rotated(
    scheme: str, pairs: int, interleaved: bool, queries: int, batch: int, dtype: torch.dtype
) -> None:
    shape = Shape(1, 2, 32, 16)
    view = centred_view(scheme, shape, queries, batch, pairs, interleaved, dtype=dtype)
    call = Call(query_for(view, shape, queries), view, 0.2)
    assert_right(call)
    still = dataclasses.replace(view.key_transform, rope=None)
    other = dataclasses.replace(call, view=dataclasses.replace(view, key_transform=still))
    assert not torch.allclose(reference.run(call), reference.run(other), atol=5e-2)


@needs_triton
@pytest.mark.parametrize("scheme", ("int8", "kivi2", "int3", "fp8-static", "k=nf4-channel,v=int4", "int4-1%"))
def test_centred_alone_in_any_format(scheme: str) -> None:
    """Also where scales are the layer's, or outliers join scores that are scaled already."""
    shape = Shape(1, 2, 24, 20)
    view = centred_view(scheme, shape, 2, 1, 12, rotated=False)
    assert_right(Call(query_for(view, shape, 2), view, 0.2))


@needs_triton
@pytest.mark.parametrize("channels", (80, 96, 112, 512))
def test_centred_heads_of_any_size(channels: int) -> None:
    shape = Shape(1, 2, channels, 32)
    view = centred_view("lm4", shape, 1, 1, channels // 2)
    assert_right(Call(query_for(view, shape, 1), view, channels**-0.5))


@needs_triton
@pytest.mark.parametrize("rows", (16, 128))
def test_centred_tiles_of_one_block_and_of_many(rows: int) -> None:
    shape = Shape(1, 2, 32, 16)
    view = centred_view("lm2", shape, 1, 1, 16)
    with tuned(Tuning(rows=rows, programs=2)):
        assert_right(Call(query_for(view, shape, 1), view, 0.2))


@needs_triton
def test_centred_with_a_mask_a_cap_a_window_and_sink_logits() -> None:
    shape = Shape(2, 2, 32, 16)
    view = centred_view("lm4", shape, 4, 1, 16)
    mask = additive(view, 4, 4, 1)
    assert_right(Call(query_for(view, shape, 4), view, 0.2, mask, 2.0, 60, random(4, seed=7)))


@needs_triton
def test_every_number_of_a_turning_mean_counts() -> None:
    shape = Shape(1, 2, 32, 16)
    view = centred_view("lm4", shape, 1, 1, 12)
    call = Call(query_for(view, shape, 1), view, 0.2)
    right, rope = run(call), view.key_transform.rope
    assert rope is not None
    for name in ("base_cos", "base_sin", "step_cos", "step_sin"):
        x = getattr(rope, name).clone()
        x[..., 1, 11] += 0.5
        changed = dataclasses.replace(view.key_transform, rope=dataclasses.replace(rope, **{name: x}))
        broken = dataclasses.replace(view, key_transform=changed)
        assert not torch.allclose(run(dataclasses.replace(call, view=broken)), right, atol=1e-4), name
    for channel in (0, 12, 23, 31):  # both of a pair, and one in no pair
        mean = view.key_transform.mean.clone()
        mean[0, channel] += 0.5
        broken = dataclasses.replace(view, key_transform=dataclasses.replace(view.key_transform, mean=mean))
        assert not torch.allclose(run(dataclasses.replace(call, view=broken)), right, atol=1e-4), channel


def preset_cache(scheme: str, late: bool = False, channels: int = 32) -> LayerCache:
    """A cache as a model's layer has it, with its rotary embedding."""
    rotary = Rotary(10_000.0 ** -(torch.arange(0, channels, 2) / channels))
    sinks = ",sinks=4+3" if late else ",sinks=4"
    return LayerCache(Scheme.parse(f"{scheme}{sinks},residual=20,block=32"), rotary=rotary)


def model_like(count: int, seed: int, dtype: torch.dtype, batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys with a mean, a few of them much shorter than the others; and values."""
    keys = random(batch, 2, count, 32, seed=seed) + 3 * random(1, 2, 1, 32, seed=77)
    keys[0, :, 40::53] *= 0.02
    keys[-1, :, 61::71] *= 0.02
    return keys.to(dtype), random(batch, 2, count, 32, seed=seed + 1, dtype=dtype)


@needs_triton
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("queries", (1, 5))
@pytest.mark.parametrize("scheme", ("lm4,centred", "lm2,centred"), ids=("as default", "as small"))
def test_presets(scheme: str, queries: int, dtype: torch.dtype) -> None:
    cache = preset_cache(scheme)
    cache.append(*model_like(100, 1, dtype, batch=1))
    view = cache.append(*model_like(queries, 9, dtype, batch=1))
    assert view.key_transform.balance is not None and not view.key_transform.whole
    assert_right(Call(query_for(view, Shape(2, 2, 32, 32), queries), view, 0.18))


@needs_triton
@pytest.mark.parametrize("padded", (False, True), ids=("whole", "padded"))
@pytest.mark.parametrize("scheme", ("int4", "lm4,centred"))
def test_late_sinks(scheme: str, padded: bool) -> None:
    """Their place in the text is not that in the store: masks and windows must find the former."""
    cache = preset_cache(scheme, late=True)
    text = torch.arange(150).expand(2, 150) >= torch.tensor([[0], [17]])
    cache.append(*model_like(150, 1, torch.float32), Rows().extend(2, 150, text) if padded else None)
    view = cache.append(*model_like(4, 9, torch.float32))
    assert all(view.late) and view.late[0] != view.late[1]
    query = query_for(view, Shape(2, 2, 32, 32), 4)
    seen = boolean(view, 4, 4, 2)
    if padded:
        valid = view.rows.valid
        assert valid is not None
        assert_right(Call(query, view, 0.18, seen & valid[:, None, None]))
        assert_right(Call(query, view, 0.18, causal(view, 4) & valid[:, None, None]))
        return
    assert_right(Call(query, view, 0.18))
    assert_right(Call(query, view, 0.18, seen))
    assert_right(Call(query, view, 0.18, window=70))
    other = dataclasses.replace(view, late=())
    masked = Call(query, view, 0.18, seen)
    assert not torch.allclose(run(masked), run(dataclasses.replace(masked, view=other)), atol=1e-3)


@needs_triton
def test_a_step_over_late_sinks_needs_no_map() -> None:
    cache = preset_cache("lm2,centred", late=True)
    cache.append(*model_like(150, 1, torch.float32))
    view = cache.append(*model_like(1, 9, torch.float32))
    assert any(view.late)
    assert_right(Call(query_for(view, Shape(2, 2, 32, 32), 1), view, 0.18))
    assert "column_of" not in vars(view)


@needs_triton
def test_presets_have_no_reason_against_the_kernel() -> None:
    for name in ("default", "small"):
        cache = LayerCache(Scheme.parse(name), rotary=Rotary(10_000.0 ** -(torch.arange(0, 32, 2) / 32)))
        cache.append(*model_like(400, 1, torch.bfloat16))
        view = moved(cache.append(*model_like(1, 9, torch.bfloat16)))
        assert (
            triton_decode.why_not(Call(query_for(view, Shape(2, 2, 32, 32), 1).to(view.keys.device), view, 0.2)) == []
        )
