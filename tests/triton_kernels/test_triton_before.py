"""What the Triton encoder does to blocks before it encodes them: the bits of ``Transform.apply`` and ``encode``."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from blocks import assert_same, fit, normal
from kvbits import encode
from kvbits.encode import KERNELS as ALL
from kvbits.encode import LARGEST, Unsound, reference
from kvbits.encode.triton import encode as fast
from kvbits.encode.triton.shape import Before, Shape
from kvbits.layer.cache import LayerCache
from kvbits.numerics import hadamard
from kvbits.schemes.names import parse_codec
from kvbits.schemes.scheme import Scheme
from kvbits.store.rows import Rows, Run
from kvbits.transform import Rope, Transform
from kvbits.transform.rotary import Rotary
from kvbits.types import Params
from triton_blocks import DTYPES, there
from triton_calls import DEVICE, needs_triton
from views import random

pytestmark = pytest.mark.usefixtures("interpreted")

BLOCK, BLOCKS, FIRST, HEADS = 32, 2, 3, 2
ROTARY = Rotary(10_000.0 ** -torch.linspace(0, 1, 32))
KINDS = ("nothing", "keys unroped", "mean unroped")


def rope_for(pairs: int, rows: int, interleaved: bool, block: int = BLOCK) -> Rope:
    """Angles of blocks from 0 on, other ones in each row."""
    frequencies = 10_000.0 ** -torch.linspace(0, 1, pairs)
    rotary = Rotary(frequencies, interleaved)
    runs = tuple((Run(0, 7 * row),) for row in range(rows)) if rows > 1 else None
    return rotary.rope(Rows(rows, runs=runs), 4, block, FIRST + BLOCKS, torch.device("cpu"))


def transform_for(
    kind: str, channels: int, mean: bool, balance: bool, rotated: bool, rows: int = 1, pairs: int = 0,
    interleaved: bool = False, block: int = BLOCK,
) -> Transform:  # fmt: skip
    unropes = kind != "nothing"
    return Transform(
        random(HEADS, channels, seed=1) * 3 if mean else None,
        hadamard.rotation(channels) if rotated else None,
        rope_for(pairs or channels // 2, rows, interleaved, block) if unropes else None,
        kind != "mean unroped",
        random(HEADS, channels, seed=2).abs() + 0.3 if balance else None,
    )


def moved(transform: Transform) -> Transform:
    """On the device of the kernel."""
    rope, (mean, rotation, balance) = (
        transform.rope,
        (None if x is None else x.to(DEVICE) for x in (transform.mean, transform.rotation, transform.balance)),
    )
    if rope is not None:
        angles = (x.to(DEVICE) for x in (rope.base_cos, rope.base_sin, rope.step_cos, rope.step_sin))
        rope = Rope(*angles, rope.interleaved)
    return Transform(mean, rotation, rope, transform.whole, balance)


def blocks_of(rows: int, channels: int, dtype: torch.dtype, block: int = BLOCK) -> torch.Tensor:
    """What a cache encodes: blocks in the middle of its tokens."""
    tokens = normal(rows, HEADS, 4 + BLOCKS * block + 5, channels, seed=channels, dtype=dtype)
    return tokens[:, :, 4 : 4 + BLOCKS * block].unflatten(2, (-1, block))


def assert_right(spelling: str, x: torch.Tensor, transform: Transform) -> None:
    codec = parse_codec(spelling)
    seen = transform.apply_to_blocks(x, FIRST)
    params: Params = fit(codec, seen)
    assert fast.why_not(codec, x.to(DEVICE)) == []
    got = fast.run(codec, x.to(DEVICE), there(params), moved(transform), FIRST)
    assert_same({name: part.cpu() for name, part in got.items()}, codec.encode(seen, params), codec, seen, params)


CASES = [
    (kind, mean, balance, rotated)
    for kind, mean, balance, rotated in itertools.product(KINDS, (False, True), (False, True), (False, True))
    if (mean or kind != "mean unroped") and not (kind == "keys unroped" and rotated)
]


@needs_triton
@pytest.mark.parametrize(("kind", "mean", "balance", "rotated"), CASES, ids=str)
@pytest.mark.parametrize("spelling", ("int4", "int3-channel"))
def test_every_combination(spelling: str, kind: str, mean: bool, balance: bool, rotated: bool) -> None:
    transform = transform_for(kind, 64, mean, balance, rotated)
    assert Before.of(transform).anything != transform.is_nothing
    assert_right(spelling, blocks_of(1, 64, torch.bfloat16), transform)


@needs_triton
@pytest.mark.parametrize(("dtype", "channels"), list(zip(DTYPES, (80, 96, 112), strict=True)), ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_begin_elsewhere(kind: str, dtype: torch.dtype, channels: int) -> None:
    """Each row of a batch has angles of its own; pairs are neighbours or halves, of all channels or of the first."""
    x = blocks_of(3, channels, dtype)
    for pairs, interleaved in ((channels // 2, False), (5, True)):
        transform = transform_for(kind, channels, True, False, kind == "mean unroped", 3, pairs, interleaved)
        assert_right("nf4", x, transform)
    if kind != "nothing":
        one, other = (rope_for(4, 3, False).angles(FIRST, FIRST + 1)[0][row] for row in (0, 1))
        assert not torch.equal(one, other)


@needs_triton
@pytest.mark.parametrize(
    "spelling", ("int8", "nf3-gs16-1%", "lm4", "fp8", "nuq3-static-1%", "hqq4", "int2-channel-gs16")
)
def test_every_kind_of_codec(spelling: str) -> None:
    block = max(BLOCK, parse_codec(spelling).block_multiple)
    x = blocks_of(1, 64, torch.bfloat16, block)
    assert_right(spelling, x, transform_for("mean unroped", 64, True, True, True, block=block))
    assert_right(spelling, x, transform_for("keys unroped", 64, True, False, False, block=block))


@needs_triton
@pytest.mark.parametrize("interleaved", (False, True))
@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_rotary_embedding_of_no_channels(kind: str, interleaved: bool) -> None:
    """It unropes nothing; the kernel must not look for pairs."""
    rope = Rotary(torch.zeros(0), interleaved).rope(Rows(1), 4, BLOCK, FIRST + BLOCKS, torch.device("cpu"))
    transform = replace(transform_for("nothing", 20, True, False, False), rope=rope, whole=kind == KINDS[1])
    assert Before.of(transform) == Before(mean=True)
    assert_right("int4", blocks_of(1, 20, torch.bfloat16), transform)


@needs_triton
@pytest.mark.parametrize("channels", (1, 20, 80, 96, 112, 128, 256))
def test_rotations_of_any_size(channels: int) -> None:
    """In the tile, or by PyTorch before it where groups lie apart in it (80 channels are groups of 40)."""
    x = blocks_of(1, channels, torch.bfloat16)
    rotation = Transform(rotation=hadamard.rotation(channels))
    for spelling in ("int4", "int4-gs16", "int4-channel"):
        assert_right(spelling, x, rotation)
    assert Shape.of(parse_codec("int4"), BLOCK, 80).close is False
    assert Shape.of(parse_codec("int4-gs16"), BLOCK, 80).close is True


@needs_triton
def test_what_becomes_too_large_is_counted() -> None:
    """Of elements as they are encoded: one that is not finite spoils all that a rotation mixes it with."""
    codec, transform = parse_codec("int4"), moved(Transform(rotation=hadamard.rotation(64)))
    x = blocks_of(1, 64, torch.float32).to(DEVICE).clone()
    for bad, count in ((torch.nan, 64), (torch.inf, 64), (LARGEST * 3, 0), (LARGEST, 0)):
        x[0, 1, 1, 5, 9] = bad
        found = []
        for run in (fast.run, reference.run):
            try:
                run(codec, x, {}, transform, FIRST)
                found.append((0, LARGEST))
            except Unsound as unsound:
                found.append((unsound.count, unsound.limit))
        assert found == [(count, LARGEST)] * 2


@needs_triton
@pytest.mark.parametrize(
    "scheme", ("k=lm4,v=lm4,centred", "k=nuq3-1%,v=nuq3-token-1%,pre-rope", "k=int4-channel,v=int4,pre-rope", "rot4")
)
def test_a_cache_packs_the_same_bits(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through ``encode.KERNELS``, with rows of different lengths, from the first block on and later."""
    packed = []
    for names in ("native", "reference"), ("triton",):
        monkeypatch.setattr(encode, "KERNELS", tuple(kernel for kernel in ALL if kernel.name in names))
        cache = LayerCache(Scheme.parse(f"{scheme},residual=8,sinks=2,block={BLOCK}"), rotary=ROTARY)
        rows = Rows(2)
        for step, (queries, padding) in enumerate(((75, 9), (1, 0), (70, 0))):
            keys, values = (normal(2, HEADS, queries, 64, seed=2 * step + side).to(DEVICE) for side in range(2))
            valid = torch.ones(2, queries, dtype=torch.bool)
            valid[1, :padding] = False
            rows = rows.extend(2, queries, valid)
            cache.append(keys, values, rows)
        assert cache.store is not None and cache.packed_blocks == [4, 3]
        packed.append(cache.view().blocks.read(0, 4))
    for ours, theirs in zip(*packed, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@needs_triton
@pytest.mark.parametrize("name", ("default", "kivi4,pre-rope", "nuq3-1%"))
def test_what_a_device_would_be_measured_with(name: str) -> None:
    """``bench/gpu_encode.py`` on whatever is here."""
    from gpu_clock import Clock
    from gpu_encode import encode_row

    row = encode_row(Clock(torch.device(DEVICE), 1), name, 1e9, small=True)
    assert row["differs"] == 0 and row["microseconds"] > 0 and row["torch_microseconds"] > 0
