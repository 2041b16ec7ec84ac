"""The native kernel under transforms: means, rotations, rotary angles."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from kernel_calls import PLAIN, SPELLINGS, assert_native, cached_view, each_isa, same, view_in
from kvbits.attend import Call, KVView, attend, explain, native
from kvbits.schemes.scheme import Scheme
from kvbits.store.blocks import Blocks
from kvbits.transform import Rope, Transform
from unspelled import STORED, stored_as
from views import Shape, boolean, causal, plain_attention, query_for, random, unrounded, view_of

pytestmark = pytest.mark.usefixtures("threads_stay")


def rotation_of(channels: int) -> torch.Tensor:
    """Orthogonal; its memory runs down the columns, as torch's QR leaves it."""
    return torch.linalg.qr(random(channels, channels, seed=channels)).Q


def rope_of(view: KVView, pairs: int, interleaved: bool = False, per_row: bool = False) -> Rope:
    """Angles of the packed blocks of a view; per row, each row's begin elsewhere, as after left padding."""
    batch, block = view.keys.shape[0], view.blocks.record.tokens
    start = torch.arange(batch) * 7 if per_row else torch.zeros(1)
    frequencies = 10 ** -torch.linspace(0, 4, pairs)
    first = view.sinks + view.dropped + block * torch.arange(view.blocks.longest)
    base, step = (start[:, None] + first)[..., None] * frequencies, torch.arange(block)[:, None] * frequencies
    # some scalings of RoPE carry a factor
    return Rope(base.cos() * 1.1, base.sin() * 1.1, step.cos(), step.sin(), interleaved)


def means(view: KVView, side: str) -> torch.Tensor:
    like = getattr(view, side)
    return random(like.shape[1], like.shape[3], seed=len(side)) * 2


def balance_of(view: KVView) -> torch.Tensor:
    return random(view.keys.shape[1], view.keys.shape[3], seed=7).exp()


TRANSFORMS: dict[str, Callable[[KVView], tuple[Transform, Transform]]] = {
    "nothing": lambda view: (Transform(), Transform()),
    "key mean": lambda view: (Transform(means(view, "keys")), Transform()),
    "value mean": lambda view: (Transform(), Transform(means(view, "values"))),
    "both means": lambda view: (Transform(means(view, "keys")), Transform(means(view, "values"))),
    "keys rotated": lambda view: (Transform(rotation=rotation_of(64)), Transform()),
    "values rotated": lambda view: (Transform(), Transform(rotation=rotation_of(64))),
    "one rotation for both": lambda view: (Transform(rotation=rotation_of(64)),) * 2,  # one and the same object
    "means and rotations": lambda view: (
        Transform(means(view, "keys"), rotation_of(64)),
        Transform(means(view, "values"), rotation_of(64).t()),
    ),
    "RoPE": lambda view: (Transform(rope=rope_of(view, 32)), Transform()),
    "interleaved RoPE": lambda view: (Transform(rope=rope_of(view, 32, True)), Transform()),
    "partial RoPE": lambda view: (Transform(rope=rope_of(view, 9)), Transform()),
    "interleaved partial RoPE": lambda view: (Transform(rope=rope_of(view, 12, True)), Transform()),
    "RoPE of each row": lambda view: (Transform(rope=rope_of(view, 32, per_row=True)), Transform()),
    "RoPE and means": lambda view: (
        Transform(means(view, "keys"), rope=rope_of(view, 16, True, True)),
        Transform(means(view, "values")),
    ),
    "RoPE off the mean": lambda view: (
        Transform(means(view, "keys"), rope=rope_of(view, 32), whole=False),
        Transform(),
    ),
    "RoPE off the mean, rotated": lambda view: (
        Transform(means(view, "keys"), rotation_of(64), rope_of(view, 32), whole=False),
        Transform(rotation=rotation_of(64)),
    ),
    "RoPE off the mean, balanced": lambda view: (
        Transform(means(view, "keys"), rope=rope_of(view, 32), whole=False, balance=balance_of(view)),
        Transform(),
    ),
    "RoPE off the mean, balanced and rotated": lambda view: (
        Transform(means(view, "keys"), rotation_of(64), rope_of(view, 32), False, balance_of(view)),
        Transform(rotation=rotation_of(64)),
    ),
    "partial RoPE off the mean of each row": lambda view: (
        Transform(means(view, "keys"), rotation_of(64), rope_of(view, 13, True, True), whole=False),
        Transform(),
    ),
    "RoPE and values rotated": lambda view: (
        Transform(rope=rope_of(view, 32)),
        Transform(means(view, "values"), rotation_of(64)),
    ),
}


def transformed(view: KVView, name: str) -> KVView:
    key, value = TRANSFORMS[name](view)
    return dataclasses.replace(view, key_transform=key, value_transform=value)


@each_isa
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name: str, stored: str, isa: str) -> None:
    for counts in ((150, 1), (150, 5)):
        plain = stored_as(stored, counts)
        view = transformed(plain, name)
        call = Call(query_for(view, PLAIN, counts[-1]), view, 0.125)
        got = assert_native(call)
        assert same(got, native.run(dataclasses.replace(call, view=plain)), 1e-2) == (name == "nothing")


@pytest.mark.parametrize(
    "name",
    (
        "RoPE of each row",
        "RoPE and means",
        "means and rotations",
        "RoPE off the mean, rotated",
        "RoPE off the mean, balanced and rotated",
    ),
)
@pytest.mark.parametrize("stored", ("kivi4", "fp8", "one outlier"))
def test_transforms_of_more_rows_than_one_batch_of_queries(stored: str, name: str) -> None:
    view = transformed(stored_as(stored, (150, 70)), name)
    assert_native(Call(query_for(view, PLAIN, 70), view, 0.125, boolean(view, 6, 70, 2), softcap=3.0))


@each_isa
@pytest.mark.parametrize("channels", (8, 24, 40, 72, 80, 112, 136, 256, 512))
def test_rotations_of_any_number_of_channels(channels: int, isa: str) -> None:
    shape = Shape(2, 3, channels, channels)
    view = view_of(shape, (150, 5))
    turned = (Transform(rotation=rotation_of(channels)), Transform(rotation=rotation_of(channels)))
    view = dataclasses.replace(view, key_transform=turned[0], value_transform=turned[1])
    assert_native(Call(query_for(view, shape, 5), view, channels**-0.5))


@each_isa
@pytest.mark.parametrize("queries", (1, 5))
def test_rope_of_left_padded_rows(queries: int, isa: str) -> None:
    """Angles go by a row's own tokens, not by columns."""
    text = torch.ones(3, 200 + queries, dtype=torch.bool)
    text[1, :47], text[2, :150] = False, False
    view = view_of(PLAIN, (200, queries), batch=3, text=text)
    view = dataclasses.replace(view, key_transform=Transform(rope=rope_of(view, 32, per_row=True)))
    mask = causal(view, queries) & text[:, None, None]
    assert_native(Call(query_for(view, PLAIN, queries), view, 0.125, mask))


@each_isa
def test_rope_of_what_a_window_has_left(isa: str) -> None:
    view = view_of(PLAIN, (100, 80, 90, 1, 30, 3), window=45)
    assert view.dropped > 0 and view.blocks.longest > 0
    view = dataclasses.replace(view, key_transform=Transform(rope=rope_of(view, 32)))
    assert_native(Call(query_for(view, PLAIN, 3), view, 0.125, window=45))


@each_isa
def test_rope_where_tokens_behind_the_sinks_are_gone(isa: str) -> None:
    """Sinks that stay while blocks behind them are dropped: own tokens then have a gap, and so do the angles."""
    whole = view_of(PLAIN, (190, 3))
    blocks = whole.blocks
    left = Blocks(
        blocks.record, blocks.pool, blocks.table[:, 2:], tuple(n - 2 for n in blocks.counts), False, blocks.derived
    )
    view = dataclasses.replace(whole, blocks=left, dropped=64)
    view = dataclasses.replace(view, key_transform=Transform(rope=rope_of(view, 32)))
    mask = causal(view, 3)[None, None].clone()
    mask[..., 4:68] = False
    assert view.sinks == 4 and left.longest > 0
    assert_native(Call(query_for(view, PLAIN, 3), view, 0.125, mask))


@each_isa
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("interleaved", (False, True), ids=("", "interleaved"))
def test_rope_before_every_codec(interleaved: bool, spelling: str, isa: str) -> None:
    block = 128 if "gs128" in spelling else 32
    view = cached_view(Shape(1, 4, 80, 80), (170, 1), f"{spelling},residual=20,sinks=4,block={block}")
    for pairs in (40, 16):
        turned = dataclasses.replace(view, key_transform=Transform(rope=rope_of(view, pairs, interleaved)))
        assert_native(Call(query_for(view, Shape(1, 4, 80, 80), 1), turned, 0.12))


@each_isa
def test_rope_before_blocks_of_any_length(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for block in (8, 16, 24, 48, 256):
        monkeypatch.setattr("kvbits.schemes.scheme.BLOCKS", (block,))
        for spelling in ("int3", "nf4", "fp8", "int2-channel-gs16"):
            if block % 16 and spelling.endswith("gs16"):
                continue
            view = view_in(Scheme.parse(f"{spelling},residual=10,sinks=3,block={block}"), PLAIN, (2 * block + 13, 3))
            for whole in (True, False):
                transform = Transform(means(view, "keys"), rope=rope_of(view, 32), whole=whole)
                turned = dataclasses.replace(view, key_transform=transform)
                assert_native(Call(query_for(view, PLAIN, 3), turned, 0.125))


def test_angles_of_any_strides() -> None:
    """A model's cosines come for all channels, each angle twice: a pair's are every other one, or the first half."""
    view = stored_as("kivi4", (150, 1))
    block, count = view.blocks.record.tokens, view.blocks.longest
    wide = torch.arange(float(block * count))[None, :, None] / 10 ** torch.linspace(0, 4, 64)
    base, step = wide[:, ::block], wide[0, :block]
    ropes = (
        Rope(base.cos()[..., ::2], base.sin()[..., ::2], step.cos()[..., ::2], step.sin()[..., ::2], True),
        Rope(base.cos()[..., :32], base.sin()[..., :32], step.cos()[..., :32], step.sin()[..., :32].contiguous()),
        Rope(
            base.cos()[..., :32].expand(2, -1, -1), base.sin()[..., :32].expand(2, -1, -1),
            step.cos()[:, :32], step.sin()[:, :32],
        ),
    )  # fmt: skip
    for rope in ropes:
        rotated = dataclasses.replace(view, key_transform=Transform(rope=rope))
        assert_native(Call(query_for(view, PLAIN, 1), rotated, 0.125))


def test_other_steps_are_not_taken_for_those_before() -> None:
    view = stored_as("kivi4", (150, 1))
    for pairs in (32, 16, 32):
        turned = dataclasses.replace(view, key_transform=Transform(rope=rope_of(view, pairs)))
        assert_native(Call(query_for(view, PLAIN, 1), turned, 0.125))


def test_steps_that_change_the_length() -> None:
    """No rotary embedding has them; the angles are what they are told to be."""
    view = stored_as("kivi4", (150, 1))
    rope = rope_of(view, 32)
    for factor in (1e-20, 0.3, 7.0):
        longer = dataclasses.replace(rope, step_cos=rope.step_cos * factor, step_sin=rope.step_sin * factor)
        assert_native(
            Call(query_for(view, PLAIN, 1), dataclasses.replace(view, key_transform=Transform(rope=longer)), 0.1)
        )


@pytest.mark.parametrize("queries", (1, 5))
def test_rotated_keys_before_the_rotary_embedding_are_left_to_the_reference(queries: int) -> None:
    view = stored_as("kivi4", (150, queries))
    both = Transform(means(view, "keys"), rotation_of(64), rope_of(view, 32))
    call = Call(query_for(view, PLAIN, queries), dataclasses.replace(view, key_transform=both), 0.125)
    lines = explain(call)
    assert (
        lines[0] == "native: keys are rotated and stored before the rotary embedding" and lines[-1] == "reference: runs"
    )
    assert same(attend(call).double(), plain_attention(call, torch.float64, *unrounded(call.view)), 1e-5)
    turned = dataclasses.replace(view, value_transform=Transform(rope=rope_of(view, 32)))
    assert explain(dataclasses.replace(call, view=turned))[0] == "native: values have a rotary embedding"
