"""The Triton kernel against attention in float64 over everything decoded.

On a machine with a GPU the compiled kernel runs; elsewhere Triton's interpreter runs the same source on the CPU.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from kvbits.attend import Call, choose, explain, reference
from kvbits.attend.dense import dense
from kvbits.attend.triton import decode as triton_decode
from kvbits.attend.triton.tuning import Tuning, tuned
from kvbits.codecs import Affine
from kvbits.layer.cache import LayerCache
from kvbits.schemes.catalogue import CATALOGUE
from kvbits.schemes.scheme import Scheme
from kvbits.transform import Transform
from triton_calls import DEVICE, angles_for, moved, needs_triton, run
from views import (
    FEATURES,
    PLAIN,
    SMALL,
    Shape,
    additive,
    boolean,
    causal,
    padded_text,
    plain_attention,
    query_for,
    random,
    unrounded,
    view_of,
    visible,
)

pytestmark = pytest.mark.usefixtures("interpreted")


def assert_right(call: Call) -> None:
    """The kernel's error against float64 is at most twice that of the plain formula in the query's own type."""
    keys, values = unrounded(call.view)
    truth = plain_attention(call, torch.float64, keys, values)
    got = run(call)
    assert got.shape == truth.shape and got.dtype == call.query.dtype
    plain = plain_attention(call, call.query.dtype, keys, values).double() - truth
    # Root mean squares as well as maxima: a maximum alone is a matter of luck.
    error, eps = got.double() - truth, torch.finfo(call.query.dtype).eps
    allowed = 2 * eps * float(values.abs().amax())
    assert float(error.square().mean().sqrt()) <= 2 * float(plain.square().mean().sqrt()) + allowed / 4
    assert float(error.abs().amax()) <= 2 * float(plain.abs().amax()) + allowed


PAIRS = (
    *(entry.name for entry in CATALOGUE if not entry.name.startswith(("exact", "hqq"))),  # hqq is int's format
    "int4-gs16",
    "int8-channel",
    "int4-channel-gs16",
    "int3-channel",
    "int2-channel",
    "nf4-channel",
    "nf3-gs32",
    "k=int8,v=int4",
    "k=int4,v=int2-gs32",
    "k=int4-channel,v=int3",
    "k=fp8,v=nf4-gs32",
    "k=int2-channel,v=fp8-static",
    "k=nf3-channel,v=int8-gs16",
)


@needs_triton
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("scheme", PAIRS)
def test_any_format(scheme: str, dtype: torch.dtype) -> None:
    shape = Shape(1, 3, 40, 24)
    view = view_of(shape, (150, 1), f"{scheme},{SMALL}", batch=1, dtype=dtype)
    assert view.blocks.longest == 3
    assert_right(Call(query_for(view, shape, 1), view, 40**-0.5))


@needs_triton
@pytest.mark.parametrize("scheme", ("int4", "kivi2", "nf4", "fp8"))
def test_float16(scheme: str) -> None:
    view = view_of(PLAIN, (90, 1), f"{scheme},{SMALL}", batch=1, dtype=torch.float16)
    assert_right(Call(query_for(view, PLAIN, 1), view, 0.2))


@needs_triton
@pytest.mark.parametrize(
    ("scheme", "block"),
    [
        *(("kivi2", block) for block in (32, 64, 256)),
        *(("int3", block) for block in (32, 128, 256)),
        *(("fp8", block) for block in (32, 256)),
        ("int4", 128),
        ("k=int8-channel,v=int2-channel", 64),
    ],
)
def test_any_block(scheme: str, block: int) -> None:
    shape = Shape(1, 2, 32, 32)
    view = view_of(shape, (3 * block + 30, 1), f"{scheme},residual=0,sinks=3,block={block}", batch=1)
    assert view.blocks.longest == 3 and view.keys.shape[2] == 31
    assert_right(Call(query_for(view, shape, 1), view, 0.2))


@needs_triton
@pytest.mark.parametrize("rows", (16, 64, 128))
@pytest.mark.parametrize("scheme", ("int4", "kivi4", "int2-channel", "k=int8,v=int3"))
def test_any_tile(scheme: str, rows: int) -> None:
    """Tiles of one to many blocks give the same, also where blocks run out in the middle of a tile."""
    shape = Shape(1, 2, 20, 12)
    view = view_of(shape, (200, 1), f"{scheme},{SMALL}", batch=1)
    assert view.blocks.longest == 5
    with tuned(Tuning(rows=rows, programs=4)):
        assert_right(Call(query_for(view, shape, 1), view, 0.2))


SHAPES = (
    Shape(1, 1, 64, 64),
    Shape(1, 7, 80, 80),  # kivi4: groups of 27 channels
    Shape(1, 12, 96, 64),
    Shape(1, 1, 112, 128),
    Shape(1, 71, 64, 64),
    Shape(1, 4, 256, 256),
    Shape(1, 2, 512, 512),
)


@needs_triton
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scheme", ("kivi4", "int4"))
def test_any_heads_and_channels(shape: Shape, scheme: str) -> None:
    view = view_of(shape, (90, 1), f"{scheme},{SMALL}", batch=1)
    assert_right(Call(query_for(view, shape, 1), view, shape.key_channels**-0.5))


@needs_triton
@pytest.mark.parametrize("counts", ((150, 5), (90, 40), (10, 60, 61, 3), (20, 1), (45,), (1,)), ids=str)
@pytest.mark.parametrize("scheme", ("kivi4", "int4"))
def test_chunks_of_a_prompt(scheme: str, counts: tuple[int, ...]) -> None:
    view = view_of(PLAIN, counts, f"{scheme},{SMALL}", batch=1)
    assert_right(Call(query_for(view, PLAIN, counts[-1]), view, 0.2))


@needs_triton
@pytest.mark.parametrize(("shape", "queries"), [(PLAIN, 1), (Shape(1, 3, 20, 12), 6)], ids=("step", "chunk"))
@pytest.mark.parametrize("feature", FEATURES)
def test_masks_caps_windows_and_sinks(feature: str, shape: Shape, queries: int) -> None:
    view = view_of(shape, (90, queries))
    options = FEATURES[feature](view, shape.heads * shape.groups, queries)
    call = Call(query_for(view, shape, queries), view, 0.2, **options)
    assert_right(call)
    without = Call(call.query, view, 0.2)
    assert not torch.allclose(reference.run(call), reference.run(without), atol=1e-3)  # the feature does something


@needs_triton
@pytest.mark.parametrize("masked", (False, True), ids=("causal", "mask"))
@pytest.mark.parametrize("queries", (1, 6))
def test_layers_with_a_sliding_window(queries: int, masked: bool) -> None:
    shape = Shape(1, 3, 20, 12)
    view = view_of(shape, (100, 80, 90, 1, 30, queries), window=45)
    assert view.offset > 0 and view.dropped > 0 and view.blocks.longest > 0
    mask = boolean(view, 1, queries, 2) if masked else None
    assert_right(Call(query_for(view, shape, queries), view, 0.2, mask, window=45))
    assert_right(Call(query_for(view, shape, queries), view, 0.2, mask))


@needs_triton
@pytest.mark.parametrize("kind", ("left", "holes"))
@pytest.mark.parametrize("counts", ((200, 1), (100, 60, 5)), ids=("decode step", "chunks"))
def test_padded_rows(counts: tuple[int, ...], kind: str) -> None:
    """Rows with different numbers of blocks, whose tokens are not their columns."""
    text = padded_text(kind, sum(counts))
    shape = Shape(1, 2, 20, 12)
    view = view_of(shape, counts, batch=3, text=text)
    assert len(set(view.blocks.counts)) > 1
    mask = causal(view, counts[-1]) & text[:, None, None]
    assert_right(Call(query_for(view, shape, counts[-1]), view, 0.2, mask))


@needs_triton
def test_rows_that_share_blocks() -> None:
    """After beams were reordered the table decides; a row's own blocks lie anywhere in the pool."""
    cache = LayerCache(Scheme.parse(f"kivi4,{SMALL}"))
    shape = Shape(1, 2, 20, 12)
    cache.append(random(2, 1, 90, 20, seed=1), random(2, 1, 90, 12, seed=2))
    cache.select_rows(torch.tensor([1, 0, 1]))
    view = cache.append(random(3, 1, 1, 20, seed=3), random(3, 1, 1, 12, seed=4))
    assert not view.blocks.in_order
    call = Call(query_for(view, shape, 1), view, 0.2)
    assert_right(call)
    other = dataclasses.replace(view, blocks=dataclasses.replace(view.blocks, table=view.blocks.table.roll(1, 0)))
    assert not torch.allclose(run(call), run(dataclasses.replace(call, view=other)), atol=1e-3)


@needs_triton
@pytest.mark.parametrize(("queries", "masked"), [(1, False), (3, True)], ids=("step", "chunk with sink logits"))
@pytest.mark.parametrize("side", ("keys", "values", "both"))
@pytest.mark.parametrize("what", ("mean", "rotation", "mean and rotation"))
def test_means_and_rotations(what: str, side: str, masked: bool, queries: int) -> None:
    """Undone on the packed part alone: the exact tokens of a view are never transformed."""
    view = view_of(PLAIN, (60, queries), f"int8,{SMALL}", batch=1)

    def transform(channels: int, seed: int) -> Transform:
        mean = random(2, channels, seed=seed) if "mean" in what else None
        rotation = torch.linalg.qr(random(channels, channels, seed=seed + 1))[0] if "rotation" in what else None
        return Transform(mean, rotation)

    transforms = {}
    if side in ("keys", "both"):
        transforms["key_transform"] = transform(PLAIN.key_channels, 11)
    if side in ("values", "both"):
        transforms["value_transform"] = transform(PLAIN.value_channels, 13)
    logits = random(6, seed=7) * 2 if masked else None
    call = Call(query_for(view, PLAIN, queries), dataclasses.replace(view, **transforms), 0.2, sink_logits=logits)
    assert_right(call)
    assert not torch.allclose(reference.run(call), reference.run(dataclasses.replace(call, view=view)), atol=1e-2)


@needs_triton
@pytest.mark.parametrize(
    ("scheme", "pairs", "interleaved", "mean", "queries"),
    [
        ("int4", 16, False, False, 1),
        ("kivi2", 16, True, True, 1),
        ("int3", 5, False, True, 3),
        ("nf4", 8, True, False, 1),
        ("fp8-static", 16, False, True, 1),
        ("k=int8-channel,v=int4", 16, False, False, 2),
    ],
)
def test_keys_before_the_rotary_embedding(scheme: str, pairs: int, interleaved: bool, mean: bool, queries: int) -> None:
    """Roped by the angles of their own tokens; the exact tokens are not."""
    shape = Shape(2, 2, 32, 16)
    for batch in (1, 2):
        view = view_of(shape, (60, queries), f"{scheme},{SMALL}", batch=batch)
        center = random(2, 32, seed=22) if mean else None
        centred = Transform(mean=center, rope=angles_for(view, pairs, batch, interleaved))
        call = Call(query_for(view, shape, queries), dataclasses.replace(view, key_transform=centred), 0.2)
        assert_right(call)
        assert not torch.allclose(reference.run(call), reference.run(dataclasses.replace(call, view=view)), atol=1e-2)


@needs_triton
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("scheme", ("nuq4", "nuq3", "nuq2", "int4-calibrated", "int4", "int8", "kivi2", "fp8-static"))
def test_keys_before_the_rotary_embedding_whose_pairs_are_halves(scheme: str, dtype: torch.dtype) -> None:
    """As in most models: channels of both halves share cosines."""
    shape = Shape(1, 3, 64, 16)
    view = view_of(shape, (90, 1), f"{scheme},{SMALL}", batch=1, dtype=dtype)
    rope = angles_for(view, 32)
    call = Call(query_for(view, shape, 1), dataclasses.replace(view, key_transform=Transform(rope=rope)), 0.15)
    assert_right(call)


@needs_triton
def test_every_number_of_the_angles_counts() -> None:
    shape = Shape(1, 3, 64, 16)
    view = view_of(shape, (90, 1), f"nuq3,{SMALL}", batch=1, dtype=torch.float32)
    rope = angles_for(view, 32)
    call = Call(query_for(view, shape, 1), dataclasses.replace(view, key_transform=Transform(rope=rope)), 0.15)
    right = run(call)
    for name in ("base_cos", "base_sin", "step_cos", "step_sin"):
        x = getattr(rope, name).clone()
        x[..., 1, 31] += 0.5
        broken = Transform(rope=dataclasses.replace(rope, **{name: x}))
        other = dataclasses.replace(call, view=dataclasses.replace(view, key_transform=broken))
        assert float((run(other) - right).abs().amax()) > 1e-4, name  # not of NaN either


@needs_triton
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("roped", (False, True), ids=("", "before rope"))
@pytest.mark.parametrize(("bits", "per", "group"), [(4, "token", 64), (2, "channel", 16)])
def test_outliers(bits: int, per: str, group: int, roped: bool, dtype: torch.dtype) -> None:
    shape = Shape(1, 2, 32, 16)
    pair = Affine(bits, per, group, outliers=0.025), Affine(bits, "token", 16, outliers=0.03)
    scheme = Scheme(*pair, residual=20, sinks=4, block=32)
    cache = LayerCache(scheme)
    cache.append(random(1, 1, 90, 32, seed=1, dtype=dtype), random(1, 1, 90, 16, seed=2, dtype=dtype))
    view = cache.append(random(1, 1, 1, 32, seed=3, dtype=dtype), random(1, 1, 1, 16, seed=4, dtype=dtype))
    if roped:
        view = dataclasses.replace(view, key_transform=Transform(rope=angles_for(view, 16)))
    call = Call(query_for(view, shape, 1), view, 0.2)
    assert_right(call)
    if roped or dtype == torch.bfloat16 or per == "channel":  # the kernel reads them the same way
        return
    right = run(call)
    for part in ("outlier_index", "outlier_value"):
        for slots in (view.blocks.record.keys, view.blocks.record.values):
            at = next(slot.offset for slot in slots if slot.part.name == part)
            pool = view.blocks.pool.clone()
            pool[:, :, at : at + 8] = pool[:, :, at + 8 : at + 16]
            broken = dataclasses.replace(view, blocks=dataclasses.replace(view.blocks, pool=pool))
            assert not torch.allclose(run(dataclasses.replace(call, view=broken)), right, atol=1e-5)


@needs_triton
@pytest.mark.parametrize("form", ("bool", "additive"))
def test_queries_that_see_nothing_give_zero(form: str) -> None:
    view = view_of(PLAIN, (150, 4))
    mask = boolean(view, 1, 4, 2).clone()
    mask[0, :, 2], mask[1, :, 0] = False, False
    if form == "additive":
        mask = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    out = run(Call(query_for(view, PLAIN, 4), view, 0.2, mask))
    assert not out[0, :, 2].any() and not out[1, :, 0].any() and out[0, :, 1].all()


@needs_triton
def test_large_scores_do_not_overflow() -> None:
    """Of scores in the thousands float32 keeps 4 digits behind the point; a handful of roundings each."""
    view = view_of(PLAIN, (90, 3), batch=1)
    call = Call(query_for(view, PLAIN, 3) * 1000, view, 0.25)
    keys, values = unrounded(view)
    truth = plain_attention(call, torch.float64, keys, values)
    largest = float((call.query.double().unflatten(1, (2, -1)).flatten(2, 3) @ keys.transpose(-1, -2)).abs().amax())
    rounding = 8 * largest * 0.25 * torch.finfo(torch.float32).eps
    assert float((run(call).double() - truth).abs().amax()) <= rounding * float(values.abs().amax())


@needs_triton
def test_large_and_tiny_keys_and_values() -> None:
    """Scales far outside of float16: neither queries nor weights may pass through it."""
    shape = Shape(1, 2, 32, 32)
    cache = LayerCache(Scheme.parse(f"kivi4,{SMALL}"))
    cache.append(random(1, 1, 150, 32) * 1e-12, random(1, 1, 150, 32, seed=1) * 1e20)
    view = cache.append(random(1, 1, 1, 32) * 1e-12, random(1, 1, 1, 32, seed=1) * 1e20)
    assert_right(Call(query_for(view, shape, 1) * 1e12, view, 0.2))


@needs_triton
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_half_precision_error_is_at_most_twice_that_of_torch(dtype: torch.dtype) -> None:
    """Torch's own attention in the same type, over the same tokens decoded and rounded to it."""
    shape = Shape(1, 4, 64, 64)
    view = view_of(shape, (700, 1), "kivi4", batch=1, dtype=dtype)
    query = query_for(view, shape, 1)
    call = Call(query, view, 0.125)
    truth = plain_attention(call, torch.float64, *unrounded(view))
    keys, values = dense(view)
    torchs = scaled_dot_product_attention(query, keys, values, visible(call), scale=0.125, enable_gqa=True)
    error, allowed = ((x.double() - truth).square().mean().sqrt() for x in (run(call), torchs))
    assert 0 < float(error) <= 2 * float(allowed)


@needs_triton
@pytest.mark.parametrize("part", ("codes", "scale", "zero"))
@pytest.mark.parametrize("side", ("keys", "values"))
@pytest.mark.parametrize("scheme", ("int4", "kivi2"))
def test_every_part_of_a_record_counts(scheme: str, side: str, part: str) -> None:
    """A test that compares must be able to fail: one changed byte of any part shows."""
    view = view_of(PLAIN, (150, 1), f"{scheme},{SMALL}", batch=1)
    call = Call(query_for(view, PLAIN, 1), view, 0.2)
    slots = view.blocks.record.keys if side == "keys" else view.blocks.record.values
    slot = next(slot for slot in slots if slot.part.name == part)
    right, pool = run(call), view.blocks.pool.clone()
    pool[1, 0, slot.offset + 1] ^= 0x04
    broken = dataclasses.replace(view, blocks=dataclasses.replace(view.blocks, pool=pool))
    assert not torch.allclose(run(dataclasses.replace(call, view=broken))[:, :3], right[:, :3], atol=1e-6)


@needs_triton
def test_it_is_chosen_and_others_say_that_it_is_better() -> None:
    view = moved(view_of(PLAIN, (60, 1)))
    call = Call(query_for(view, PLAIN, 1).to(DEVICE), view, 0.2)
    assert choose(call).name == "triton"
    lines = explain(call)
    assert lines[1:] == ["triton: runs", "reference: fits, but a better one runs"]


@needs_triton
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"scheme": "k=exact,v=int4"}, "keys: packed blocks of exact elements"),
        ({"shape": Shape(1, 2, 65, 12)}, "keys: head_dim 65 (even ones up to 512 run)"),
        ({"shape": Shape(1, 2, 514, 12)}, "keys: head_dim 514 (even ones up to 512 run)"),
        ({"dtype": torch.float64}, "torch.float64 queries (bfloat16, float16 or float32 run)"),
    ],
    ids=("exact", "odd head_dim", "large head_dim", "float64"),
)
def test_what_it_cannot_run(change: dict, reason: str) -> None:
    options = {"shape": PLAIN, "scheme": "kivi4", "dtype": torch.float32, **change}
    shape = options["shape"]
    view = view_of(shape, (60, 1), f"{options['scheme']},{SMALL}", dtype=options["dtype"])
    call = Call(query_for(view, shape, 1), view, 0.2)
    there = dataclasses.replace(call, query=call.query.to(DEVICE), view=moved(view))
    assert triton_decode.why_not(there) == [reason]


@needs_triton
def test_keys_that_were_rotated_before_the_rotary_embedding_go_to_the_reference() -> None:
    view = view_of(PLAIN, (60, 1))
    both = dataclasses.replace(view, key_transform=Transform(rotation=torch.eye(20), rope=angles_for(view, 10)))
    call = Call(query_for(view, PLAIN, 1), both, 0.2)
    there = dataclasses.replace(call, query=call.query.to(DEVICE), view=moved(both))
    assert triton_decode.why_not(there) == ["keys: rotated before the rotary embedding"]


def test_gradients_are_left_to_the_reference() -> None:
    view = view_of(PLAIN, (60, 1))
    query = query_for(view, PLAIN, 1).requires_grad_()
    assert choose(Call(query, view, 0.2)).name == "reference"


def test_without_triton_or_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    view = view_of(PLAIN, (60, 1))
    call = Call(query_for(view, PLAIN, 1), view, 0.2)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert explain(call)[1] == "triton: tensors on cpu (CUDA and ROCm GPUs run)"
    assert choose(call).name == "reference"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr("kvbits.backends.triton_version", lambda: None)
    assert explain(call)[1] == "triton: triton is not installed"
    monkeypatch.setattr("kvbits.backends.triton_version", lambda: "3.4.0")
    assert explain(call)[1] == "triton: triton 3.4.0 (3.5 and later run)"
    torch.testing.assert_close(choose(call).run(call), reference.run(call))


def test_no_queries_give_no_rows() -> None:
    view = view_of(PLAIN, (150, 0))
    assert triton_decode.run(Call(query_for(view, PLAIN, 0), view, 0.2)).shape == (2, 6, 0, PLAIN.value_channels)


@needs_triton
def test_an_additive_mask_of_another_type() -> None:
    view = view_of(PLAIN, (150, 2), dtype=torch.bfloat16)
    assert_right(Call(query_for(view, PLAIN, 2), view, 0.2, additive(view, 6, 2, 2).float()))
