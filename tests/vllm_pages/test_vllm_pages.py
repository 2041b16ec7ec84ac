"""Pages that are filled token by token have the bits of whole blocks, and are attended to. Without vLLM."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from kvbits.attend import KERNELS, Call
from kvbits.encode import Unsound, encode
from kvbits.numerics import bitpack
from kvbits.store.record import Record
from kvbits.transform.rotate import rotate
from kvbits.vllm.pages import Batch, PagedRows, Pages, paged_scheme

SCHEMES = ("int8", "int4", "int3", "int2", "nf4", "fp8", "hqq4", "rot4", "lm4", "lm3", "k=fp8,v=rot2", "exact")
HEADS, CHANNELS, POOL = 2, 40, 7


def pages_of(name: str, block: int = 32, dtype: torch.dtype = torch.float32, channels: int = CHANNELS) -> Pages:
    return Pages(paged_scheme(name), block, channels, channels, dtype)


def empty_pool(pages: Pages) -> torch.Tensor:
    """Not zeros: what nobody wrote must not matter."""
    return torch.randint(0, 60, (POOL, HEADS, pages.record.nbytes), dtype=torch.uint8)


def tokens(count: int, dtype: torch.dtype = torch.float32, channels: int = CHANNELS) -> torch.Tensor:
    return torch.randn(count, HEADS, channels).to(dtype)


# -- codes that share a byte -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", bitpack.BITS)
def test_codes_are_put_one_by_one_where_pack_puts_them_together(bits: int) -> None:
    codes = torch.randint(0, 2**bits, (3, HEADS, 32, CHANNELS), dtype=torch.uint8)
    packed = torch.randint(0, 256, (3, HEADS, bitpack.packed_rows(32, bits), CHANNELS), dtype=torch.uint8)
    order = torch.randperm(3 * 32)
    for some in order.split([1, 40, 7, 48]):
        page, token = some // 32, some % 32
        bitpack.put(packed, page, token, codes[page, :, token], bits)
    assert torch.equal(packed, bitpack.pack(codes, bits))


# -- writing -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SCHEMES)
def test_a_page_filled_token_by_token_has_the_bits_of_a_block(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    pages = pages_of(name, 64, dtype)
    pool, keys, values = empty_pool(pages), tokens(2 * 64, dtype), tokens(2 * 64, dtype)
    places = torch.cat([torch.arange(64) + 5 * 64, torch.arange(64) + 2 * 64])
    for some in torch.arange(2 * 64).split([1, 1, 50, 3, 64, 9]):  # in steps; in a step, in whatever order
        some = some[torch.randperm(len(some))]
        pages.write(pool, places[some], keys[some], values[some])
    whole = pool.clone()
    for slots, codec, x in (
        (pages.record.keys, pages.scheme.key, keys),
        (pages.record.values, pages.scheme.value, values),
    ):
        blocks = x.unflatten(0, (2, 64)).transpose(1, 2)  # [2, H, 64, D]
        packed = encode(codec, rotate(blocks) if codec.rotates else blocks, {})
        for slot in slots:
            part = packed[slot.part.name].contiguous().flatten(2).view(torch.uint8)
            whole[torch.tensor([5, 2]), :, slot.offset : slot.offset + slot.part.nbytes] = part
    assert torch.equal(pool, whole)


def test_what_an_earlier_request_left_in_a_page_is_gone_with_its_first_token() -> None:
    """Bit for bit, so that no answer depends on who was there before."""
    pages = pages_of("int4")
    keys, values = tokens(3), tokens(3)
    pools = [torch.zeros(POOL, HEADS, pages.record.nbytes, dtype=torch.uint8), empty_pool(pages)]
    for pool in pools:
        pages.write(pool, torch.arange(3) + 4 * 32, keys, values)
    assert torch.equal(pools[0][4], pools[1][4])
    assert not torch.equal(pools[0][3], pools[1][3])


def test_nothing_is_written_where_one_side_cannot_be() -> None:
    pages = pages_of("int4")
    pool = empty_pool(pages)
    before, values = pool.clone(), tokens(3)
    values[1, 0, 0] = torch.nan
    with pytest.raises(Unsound, match="1 elements are NaN"):
        pages.write(pool, torch.arange(3), tokens(3), values)
    assert torch.equal(pool, before)


# -- attention ---------------------------------------------------------------------------------------------------------


def stored(pages: Pages, pool: torch.Tensor, table: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Fill pages with ``count`` tokens; returns what they decode to, ``[H, count, D]`` in float64."""
    place = torch.arange(count)
    place = table[place // pages.block] * pages.block + place % pages.block
    sides = tokens(count, channels=pages.record.keys[0].part.shape[-1]), tokens(count)
    if count:
        pages.write(pool, place, *sides)
    decoded = []
    for codec, x, transform in zip((pages.scheme.key, pages.scheme.value), sides, pages.transforms, strict=True):
        padded = torch.cat([x, x.new_zeros(-count % 8 or 8, *x.shape[1:])]).transpose(0, 1)
        packed = codec.encode(rotate(padded) if codec.rotates else padded, {})
        out = transform.undo(codec.decode(packed, {}).double()[None], 0)[0]
        decoded.append(out[:, :count])
    return decoded[0], decoded[1]


def expected(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> torch.Tensor:
    """Causal attention of the last queries ``[Hq, q, D]`` over ``[H, T, D]``, in float64."""
    group, count, total = query.shape[0] // keys.shape[0], query.shape[1], keys.shape[1]
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    scores = query.double() @ keys.transpose(1, 2) * scaling
    hidden = torch.arange(total) > torch.arange(total - count, total)[:, None]
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values


@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if kernel.name != "triton"], ids=lambda k: k.name)
@pytest.mark.parametrize(
    ("packed", "queries"),
    [((33, 64, 1, 0), 1), ((5,), 1), ((64,), 1), ((70,), 9), ((64,), 40), ((32, 31), 3)],
    ids=str,
)
@pytest.mark.parametrize("name", ["int4", "fp8", "rot4", "k=fp8,v=int3", "exact"])
def test_new_tokens_see_what_their_row_holds_and_no_more(
    name: str, packed: tuple[int, ...], queries: int, kernel: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    monkeypatch.setattr("kvbits.attend.KERNELS", (kernel,))
    pages = pages_of(name)
    pool = torch.zeros(POOL, HEADS, pages.record.nbytes, dtype=torch.uint8)
    pages.write(pool, torch.arange(POOL * 32), 50 * tokens(POOL * 32), 50 * tokens(POOL * 32))  # of earlier requests
    rows = torch.tensor([[0, 4, 2], [1, 3, 0], [5, 0, 0], [6, 0, 0]])[: len(packed)]
    query = torch.randn(len(packed), 2 * HEADS, queries, CHANNELS)
    keys, values = (torch.randn(len(packed), HEADS, queries, CHANNELS) for _ in range(2))
    held = [stored(pages, pool, row, count) for row, count in zip(rows, packed, strict=True)]
    batch = Batch.of(rows.int(), packed, queries, 32)
    out = pages.attend(pool, batch, query, keys, values, 0.2)
    for row, (old_keys, old_values) in enumerate(held):
        all_keys, all_values = torch.cat([old_keys, keys[row]], 1), torch.cat([old_values, values[row]], 1)
        wanted = expected(query[row], all_keys, all_values, 0.2)
        assert (out[row] - wanted).abs().max() <= 1e-3 * wanted.abs().max()


def test_the_prompt_alone_is_exact() -> None:
    pages = pages_of("int2")
    query, keys, values = torch.randn(1, 4, 20, CHANNELS), *(torch.randn(1, HEADS, 20, CHANNELS) for _ in range(2))
    batch = Batch.of(torch.zeros(1, 4, dtype=torch.int32), [0], 20, 32)
    out = pages.attend(empty_pool(pages), batch, query, keys, values, 0.1)
    wanted = expected(query[0], keys[0].double(), values[0].double(), 0.1)
    torch.testing.assert_close(out[0].double(), wanted, atol=1e-5, rtol=1e-5)


def test_the_native_kernel_takes_pages() -> None:
    """So that a vLLM on the CPU never decodes its cache in PyTorch."""
    for name in SCHEMES:
        pages = pages_of(name, 128, torch.bfloat16, 64)
        pool = torch.zeros(POOL, HEADS, pages.record.nbytes, dtype=torch.uint8)
        called = []
        new = torch.randn(2, HEADS, 1, 64).bfloat16()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("kvbits.vllm.pages.attend", called.append)
            pages.attend(pool, Batch.of(torch.zeros(2, 1), [3, 90], 1, 128), new, new, new, 0.1)
        assert isinstance(called[0], Call)
        assert KERNELS[0].why_not(called[0]) == [], name


def test_columns_of_rows_of_different_lengths() -> None:
    rows = PagedRows([5, 2], [2, 1], 4, 1)
    assert rows.columns == 6 and rows.counts == (6, 3) and not rows.padded
    assert rows.column_of is not None
    own = rows.column_of.tolist()
    assert own[0] == [0, 1, 2, 3, 4, 6, 6, 6, 5]  # three places of the second page are free
    assert own[1][:5] == [3, 4, 9, 9, 5]


# -- schemes and sizes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("kivi2", "scales that tokens share"),
        ("int4-channel", "scales that tokens share"),
        ("fp8-static", "is fitted to the first tokens"),
        ("nuq3-1%", "outliers"),
        ("int4-1%", "outliers"),
        ("default", "mean of its keys"),
        ("int4,pre-rope", "before their rotary embedding"),
        ("int4,layers[0]=exact", "no layer can differ"),
        ("int4,residual=64", "no tokens exact"),
        ("int4,sinks=8", "no tokens exact"),
        ("int4,sinks=4+4", "no tokens exact"),
        ("int4,block=64", "--block-size"),
    ],
)
def test_a_scheme_that_cannot_fill_pages_is_refused_with_the_reason(name: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        paged_scheme(name)


@pytest.mark.parametrize("name", [*SCHEMES, "int4,residual=0,sinks=0"])
def test_a_scheme_of_pages_keeps_nothing_exact(name: str) -> None:
    scheme = paged_scheme(name)
    assert (scheme.residual, scheme.sinks) == (0, 0)
    assert paged_scheme(str(scheme)) == scheme


def test_pages_have_the_lengths_of_blocks() -> None:
    with pytest.raises(ValueError, match="pages of 48 tokens are not supported; take --block-size 32, 64"):
        pages_of("int4", 48)


@pytest.mark.parametrize("block", [32, 64, 128, 256])
@pytest.mark.parametrize("channels", [40, 64, 80, 128])
def test_a_token_takes_the_same_bytes_wherever_it_lies(block: int, channels: int) -> None:
    for name in SCHEMES:
        pages = pages_of(name, block, torch.bfloat16, channels)
        record = Record.of(pages.scheme.key, pages.scheme.value, block, channels, channels, torch.bfloat16)
        assert pages.bytes_per_token * block == record.nbytes


def test_the_plug_in_does_nothing_without_a_scheme_and_needs_nothing_to_be_imported() -> None:
    code = """
import os, sys
os.environ.pop("KVBITS_VLLM_SCHEME", None)
for name in ("vllm", "transformers"):
    sys.modules[name] = None
from kvbits.vllm.plugin import register
register()
assert "torch" not in sys.modules
os.environ["KVBITS_VLLM_SCHEME"] = "int4"
try:
    register()
except ImportError as error:
    print("refused")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.returncode) == ("refused\n", 0), done.stderr
