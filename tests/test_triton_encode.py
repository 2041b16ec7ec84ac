"""The Triton encoder gives the bits of ``Codec.encode``, for every format it says it runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvbits.codecs import CODECS, Fp8
from kvbits.encode import LARGEST, Unsound
from kvbits.encode import triton as fast
from kvbits.scheme import parse_codec
from test_attend import random
from test_triton import DEVICE, GPU, needs_triton

SPELLINGS = (
    *(f"int{bits}{rest}" for bits in (8, 4, 3, 2) for rest in ("", "-gs16", "-channel", "-channel-gs16")),
    *(f"nf{bits}{rest}" for bits in (4, 3, 2) for rest in ("", "-channel")),
    "fp8",
    "fp8-static",
    *(f"lm{bits}" for bits in (4, 3, 2)),
    "rot3-gs16",
)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Interpret where there is no GPU, in these tests alone."""
    if not GPU:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    yield


def assert_same_bits(spelling: str, x: torch.Tensor) -> None:
    codec, x = parse_codec(spelling), x.to(DEVICE)
    assert fast.why_not(codec, x) == []
    params = codec.fit(x[:1].flatten(0, -3)[None]) if codec.learns else {}
    right, got = codec.encode(x, params), fast.run(codec, x, params)
    assert got.keys() == right.keys()
    for name, part in right.items():
        assert got[name].dtype == part.dtype and got[name].shape == part.shape
        assert torch.equal(got[name].contiguous().view(torch.uint8), part.contiguous().view(torch.uint8)), name


@needs_triton
@pytest.mark.parametrize("channels", (32, 20, 65))
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_same_bits(spelling: str, channels: int) -> None:
    assert_same_bits(spelling, random(1, 2, 2, 32, channels, dtype=torch.bfloat16))


@needs_triton
@pytest.mark.parametrize("tokens", (64, 128, 256))
@pytest.mark.parametrize("spelling", ("int4", "int3", "int2-channel", "fp8", "lm2"))
def test_other_blocks(spelling: str, tokens: int) -> None:
    assert_same_bits(spelling, random(1, tokens, 40))


@needs_triton
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
@pytest.mark.parametrize("spelling", ("int4", "int3-channel", "nf4", "fp8", "lm4"))
def test_magnitudes_and_constants(spelling: str, dtype: torch.dtype) -> None:
    """Groups of one value, of zeros, one-signed and far from zero, tiny and large."""
    x = random(6, 32, 32, seed=3)
    x[0], x[1] = 0, -3.140625
    x[2] = x[2] / 100 + 40
    x[3], x[4] = x[3] * 1e-3, x[4] * 1e3
    x[5, :, ::2], x[5, ::2] = 1, 2
    assert_same_bits(spelling, x.to(dtype))
    if dtype == torch.float32:
        assert_same_bits(spelling, x * 1e-25)
        assert_same_bits(spelling, x * 1e25)


@needs_triton
def test_a_view_of_a_longer_buffer() -> None:
    """What a cache encodes: blocks in the middle of its tokens, not contiguous, for several rows and heads."""
    work = random(2, 3, 4 + 2 * 32 + 9, 24, dtype=torch.bfloat16)
    assert_same_bits("int4", work[:, :, 4:68].unflatten(2, (-1, 32)))
    assert_same_bits("int2-channel", work[:, :, 4:68].unflatten(2, (-1, 32)).transpose(1, 2))


@needs_triton
def test_no_blocks() -> None:
    got = fast.run(Fp8(), torch.zeros(2, 0, 32, 16, device=DEVICE), {})
    assert got["codes"].shape == (2, 0, 32, 16) and got["scale"].shape == (2, 0, 32, 1)


@needs_triton
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("spelling", ("int4", "int3-channel", "nf4", "fp8", "lm3"))
def test_what_no_block_can_hold_is_counted_and_refused(spelling: str, dtype: torch.dtype) -> None:
    codec, x = parse_codec(spelling), random(2, 3, 32, 20, dtype=dtype).to(DEVICE)
    limit = min(LARGEST, torch.finfo(dtype).max)
    x[1, 2, 3, 4] = limit
    fast.run(codec, x, {})
    for count, strange in enumerate((torch.nan, torch.inf, -torch.inf, -3e38)):
        x[count % 2, count % 3, 31 - count, 19] = strange
        with pytest.raises(Unsound) as found:
            fast.run(codec, x, {})
        assert (found.value.count, found.value.limit) == (count + 1, limit)


@needs_triton
@pytest.mark.parametrize(
    ("spelling", "shape", "dtype", "reason"),
    [
        ("hqq4", (32, 16), torch.float32, "hqq4 (int, rot, nf, lm and fp8 run)"),
        ("exact", (32, 16), torch.float32, "exact (int, rot, nf, lm and fp8 run)"),
        ("int4-1%", (32, 16), torch.float32, "int4-1% (without outliers or static scales it would run)"),
        ("int4-static", (32, 16), torch.float32, "int4-static (without outliers or static scales it would run)"),
        ("int4", (24, 16), torch.float32, "blocks of 24 tokens (powers of two from 16 run)"),
        ("int4", (32, 520), torch.float32, "head_dim 520 (up to 512 run)"),
        ("int4", (32, 16), torch.float64, "torch.float64 (float32, bfloat16 or float16 run)"),
    ],
)
def test_what_it_cannot_run(spelling: str, shape: tuple[int, int], dtype: torch.dtype, reason: str) -> None:
    x = torch.zeros(shape, dtype=dtype, device=DEVICE)
    assert fast.why_not(parse_codec(spelling), x) == [reason]
    with pytest.raises(ValueError, match="cannot be encoded with Triton"):
        fast.run(parse_codec(spelling), x, {})


def test_on_a_cpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for kind in CODECS:
        codec = parse_codec(kind.examples[0])
        assert fast.why_not(codec, torch.zeros(32, 16)) == ["tensors on cpu (CUDA and ROCm GPUs run)"]
