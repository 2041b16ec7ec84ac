"""Floor 4: ``LayerCache`` against a plain list of tokens, for every operation, and what it costs."""

from __future__ import annotations

import copy
import math
import re
import warnings
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from kvbits.attend import Call, attend, reference
from kvbits.attend.dense import dense
from kvbits.codecs import Fp8Static
from kvbits.encode import encode
from kvbits.layer.cache import LayerCache
from kvbits.schemes.scheme import Scheme
from kvbits.store.rows import Rows

HEADS, KEY_CHANNELS, VALUE_CHANNELS = 2, 8, 12

# Small blocks, so that few tokens reach every state. In "exact" ones nothing is lost: dense() must be the input itself.
SMALL = "residual=20,sinks=4,block=32"
SCHEMES = (
    "exact",
    f"exact,{SMALL}",
    f"int4,{SMALL}",
    f"kivi2,{SMALL}",
    f"k=hqq3-channel,v=nf4-gs32,{SMALL}",
    f"k=fp8-static,v=fp8,{SMALL}",
    "k=nf2-channel,v=int8,residual=0,sinks=0,block=32",
)
PER_TOKEN = ("int4", "int2-gs16", "nf3", "hqq4", "fp8", "exact,residual=16")
PER_CHANNEL = ("kivi4", "k=int2-channel-gs16,v=int3", "k=nf4-channel,v=nf4-channel", "k=hqq3-channel,v=hqq2-channel")


def tokens(rows: int, count: int, seed: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Random K and V of ``count`` columns."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(rows, HEADS, count, KEY_CHANNELS, generator=generator)
    values = torch.randn(rows, HEADS, count, VALUE_CHANNELS, generator=generator)
    return keys.to(dtype), values.to(dtype)


@dataclass
class PlainRow:
    """One sequence: which columns are text, K and V of its own tokens, and how many of its blocks are packed."""

    text: list[bool] = field(default_factory=list)
    sides: list[torch.Tensor] = field(default_factory=list)  # K and V, each [H, n, D]
    packed: int = 0


class PlainCache:
    """What a cache must hold, kept as plainly as possible: a packed token is one that was encoded and decoded."""

    def __init__(self, scheme: Scheme, sinks: int | None = None) -> None:
        self.scheme, self.rows, self.params = scheme, [], None
        self.sinks = scheme.sinks if sinks is None else sinks

    def append(self, keys: torch.Tensor, values: torch.Tensor, text: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """Add columns; returns what attention must see: the new tokens exact."""
        if not self.rows:
            self.rows = [PlainRow([], [keys[b, :, :0], values[b, :, :0]]) for b in range(keys.shape[0])]
        for b, row in enumerate(self.rows):
            own = [True] * keys.shape[2] if text is None else text[b].tolist()
            row.text += own
            row.sides = [
                torch.cat([old, new[b][:, torch.tensor(own, dtype=torch.bool)]], dim=1)
                for old, new in zip(row.sides, (keys, values), strict=True)
            ]
        seen = self.dense()
        self._pack()
        return seen

    def _pack(self) -> None:
        if self.scheme.residual is None:
            return
        block, work = self.scheme.block, []
        for row in self.rows:
            first = self.sinks + row.packed * block
            count = max(0, (row.sides[0].shape[1] - first - self.scheme.residual) // block)
            work += [(row, first + n * block) for n in range(count)]
        codecs = (self.scheme.key, self.scheme.value)
        if work and self.params is None:
            samples = [torch.cat([row.sides[s][:, at : at + block] for row, at in work], dim=1) for s in (0, 1)]
            self.params = [codec.fit(x) for codec, x in zip(codecs, samples, strict=True)]
        for row, at in work:
            for side, codec in enumerate(codecs):
                x = row.sides[side].clone()
                piece = x[:, at : at + block]
                x[:, at : at + block] = codec.decode(encode(codec, piece, self.params[side]), self.params[side])
                row.sides[side] = x
            row.packed += 1

    def crop(self, columns: int) -> None:
        for row in self.rows:
            row.text = row.text[: len(row.text) - columns]
            row.sides = [x[:, : sum(row.text)] for x in row.sides]
            while row.packed and self.sinks + row.packed * self.scheme.block > sum(row.text):
                row.packed -= 1  # what is left of that block is decoded, and exact from now on

    def select(self, rows: list[int]) -> None:
        self.rows = [copy.deepcopy(self.rows[row]) for row in rows]

    def dense(self) -> tuple[torch.Tensor, ...]:
        """K and V ``[B, H, columns, D]`` with zeros for padding."""
        sides = []
        for side in (0, 1):
            rows = []
            for row in self.rows:
                x = row.sides[side]
                out = x.new_zeros(x.shape[0], len(row.text), x.shape[2])
                out[:, torch.tensor(row.text, dtype=torch.bool)] = x
                rows.append(out)
            sides.append(torch.stack(rows))
        return tuple(sides)


def assert_same(view: Any, expected: tuple[torch.Tensor, ...]) -> None:
    """Bit for bit."""
    for got, wanted in zip(dense(view), expected, strict=True):
        assert got.dtype == wanted.dtype and torch.equal(got, wanted)


def real_bytes(cache: LayerCache) -> int:
    """Bytes of the distinct storages behind a cache."""
    tensors = [cache.keys, cache.values, *cache.key_params.values(), *cache.value_params.values()]
    if cache.store is not None:
        tensors += [cache.store.pool, cache.store.table]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors if x is not None}
    return sum(storages.values())


class Both:
    """A cache and its plain twin, driven together and compared after every operation."""

    def __init__(self, scheme: str, dtype: torch.dtype = torch.float32) -> None:
        self.scheme, self.dtype = Scheme.parse(scheme), dtype
        self.cache, self.plain, self.seed = LayerCache(self.scheme), PlainCache(self.scheme), 0
        self.views: list[tuple[Any, list[torch.Tensor]]] = []

    def append(self, count: int, text: torch.Tensor | None = None, batch: int = 1) -> None:
        batch = len(self.plain.rows) or batch
        self.seed += 1
        keys, values = tokens(batch, count, self.seed, self.dtype)
        before = self._packed()
        rows = None if text is None else self.cache.rows.extend(batch, count, text)
        view = self.cache.append(keys, values, rows)
        if rows is None and self.cache.rows.valid is not None:
            text = torch.ones(batch, count, dtype=torch.bool)
        assert_same(view, self.plain.append(keys, values, text))
        self.views.append((view, [x.clone() for x in dense(view)]))
        for old, new in zip(before, self._packed(), strict=False):
            assert torch.equal(old, new[: len(old)])  # packed bytes never change
        self.check()

    def _packed(self) -> list[torch.Tensor]:
        """The bytes of every packed block, row by row."""
        store = self.cache.store
        if store is None:
            return []
        return [store.pool[store.table[row, :count]].clone() for row, count in enumerate(store.counts)]

    def crop(self, columns: int) -> None:
        self.cache.crop(columns)
        self.plain.crop(columns)
        self.views = []  # a view ends with the tokens that it shows
        self.check()

    def select(self, rows: list[int]) -> None:
        self.cache.select_rows(torch.tensor(rows))
        self.plain.select(rows)
        self.check()

    def reset(self) -> None:
        self.cache.reset()
        self.plain = PlainCache(self.scheme)

    def check(self) -> None:
        cache, plain = self.cache, self.plain
        assert_same(cache.view(), plain.dense())
        assert cache.columns == len(plain.rows[0].text)
        assert cache.rows.counts == tuple(sum(row.text) for row in plain.rows)
        assert cache.store is not None and cache.store.counts == [row.packed for row in plain.rows]
        parts = cache.nbytes()
        assert sum(parts.values()) == real_bytes(cache) and min(parts.values()) >= 0
        assert cache.elements == sum(side.numel() for row in plain.rows for side in row.sides)
        for buffer in (cache.keys, cache.values):
            assert buffer is not None
            for row, held in enumerate(cache.held):
                assert not buffer[row, :, held:].any()  # masks do not stop 0 * NaN: there must be zeros
        for view, shown in self.views:
            assert all(torch.equal(now, then) for now, then in zip(dense(view), shown, strict=True))


# -- every operation, in any order -------------------------------------------------------------------------------------

COUNTS = st.sampled_from((0, 1, 1, 2, 3, 5, 19, 31, 32, 33, 70, 150))
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), COUNTS),
        st.tuples(st.just("append"), COUNTS),
        st.tuples(st.just("holes"), COUNTS),
        st.tuples(st.just("crop"), st.integers(0, 160)),
        st.tuples(st.just("select"), st.integers(0, 10**6)),
        st.tuples(st.just("reset"), st.just(0)),
    ),
    min_size=2,
    max_size=12,
)


@pytest.mark.parametrize("scheme", SCHEMES)
@given(operations=OPERATIONS, padded=st.booleans(), batch=st.integers(1, 3))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_any_sequence_of_operations(scheme: str, operations: list[tuple[str, int]], padded: bool, batch: int) -> None:
    both = Both(scheme)
    both.append(7, batch=batch)
    for name, number in operations:
        rows = len(both.plain.rows)
        if name == "append" or (name == "holes" and not padded):
            both.append(number, batch=batch)
        elif name == "holes":
            rows = rows or batch
            text = torch.rand(rows, number, generator=torch.Generator().manual_seed(both.seed)) < 0.7
            both.append(number, text, batch=batch)
        elif rows and name == "crop":
            both.crop(min(number, both.cache.columns))
        elif rows and name == "select":
            generator = torch.Generator().manual_seed(number)
            both.select(torch.randint(0, rows, (1 + number % 3,), generator=generator).tolist())
        elif name == "reset":
            both.reset()


# -- operations, one at a time -----------------------------------------------------------------------------------------

each_scheme = pytest.mark.parametrize("scheme", SCHEMES)


@each_scheme
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16, torch.float64), ids=str)
def test_chunks_of_any_size(scheme: str, dtype: torch.dtype) -> None:
    both = Both(scheme, dtype)
    for count in (0, 1, 2, 0, 17, 64, 1, 1, 100, 33, 0, 5):
        both.append(count, batch=2)


@each_scheme
@pytest.mark.parametrize("prompt", (1, 3, 4, 5))
def test_prompts_shorter_than_the_sinks(scheme: str, prompt: int) -> None:
    both = Both(scheme)
    both.append(prompt)
    for _ in range(23):
        both.append(3)
    both.crop(68)
    both.append(60)


@pytest.mark.parametrize("prompt", (55, 56, 87, 88, 89, 120))
def test_flush_exactly_when_residual_and_block_are_full(prompt: int) -> None:
    """4 sinks + 20 residual + 32: the 56th token packs the first block, the 88th the second."""
    both = Both(f"int4,{SMALL}")
    both.append(prompt)
    assert both.cache.store is not None
    assert both.cache.store.counts == [max(0, (prompt - 24) // 32)]
    assert both.cache.held == [prompt - 32 * both.cache.store.counts[0]]
    both.append(40)


@each_scheme
@pytest.mark.parametrize(
    "columns",
    (1, 24, 25, 57, 148, 149, 152),
)
def test_crop_into_residual_blocks_and_sinks(scheme: str, columns: int) -> None:
    both = Both(scheme)
    both.append(150, batch=2)
    both.append(2)
    both.crop(columns)
    both.append(3)
    both.append(90)
    both.append(1)


def test_crop_decodes_a_block_once_and_only_that() -> None:
    both = Both(f"int2,{SMALL}")
    both.append(200)
    blocks = both.cache.store.counts[0]  # type: ignore[union-attr]
    for columns in (0, 10, 30, 1, 1):
        both.crop(columns)
    assert both.cache.store.counts == [blocks - 1]  # type: ignore[union-attr]
    both.append(60)


@pytest.mark.parametrize("rows", (1, 3))
@pytest.mark.parametrize("padded", (False, True), ids=("whole", "padded"))
@pytest.mark.parametrize("left", (3, 700, 1000))
def test_a_crop_far_back_costs_and_leaves_what_is_left(left: int, padded: bool, rows: int) -> None:
    """One block of a row is decoded at most, and the memory is that of the shorter text."""
    text = torch.ones(rows, 16384, dtype=torch.bool)
    if padded:
        text[0, :700] = False
    cache, short = LayerCache(Scheme.parse("kivi4")), LayerCache(Scheme.parse("kivi4"))
    x = torch.randn(rows, 1, 16384, 64)
    for each, columns in ((cache, 16384), (short, left)):
        each.append(x[:, :, :columns], x[:, :, :columns], Rows().extend(rows, columns, text[:, :columns]))
    with Written() as written:
        cache.crop(16384 - left)
    block, exact = 128 * 64 * 4, (4 + 128 + 127) * 64 * 4
    # both sides: fresh buffers, a few temporaries for each row's block, and the shorter pool
    assert written.nbytes <= 2 * rows * (2 * exact + 8 * block) + 2 * sum(short.nbytes().values())
    # a buffer has room for all that stays exact before a block is packed
    assert sum(cache.nbytes().values()) <= 1.25 * sum(short.nbytes().values()) + rows * (2 * exact + 4096)
    assert sum(cache.nbytes().values()) == real_bytes(cache)


def test_a_crop_gives_back_room_where_nothing_is_packed() -> None:
    cache = LayerCache(Scheme.parse("exact"))
    cache.append(*tokens(2, 5000, 0))
    before = cache.keys
    cache.crop(20)
    assert cache.keys is before  # drafts are taken back in place
    cache.crop(4000)
    parts = cache.nbytes()
    assert parts["slack"] <= parts["residual"] / 4
    assert_same(cache.view(), tuple(x[:, :, :980] for x in tokens(2, 5000, 0)))
    for step in range(300):
        cache.append(*tokens(2, 1, step))


def test_more_than_is_there_cannot_be_cropped() -> None:
    both = Both(f"int4,{SMALL}")
    both.append(10)
    for columns in (11, -1):
        with pytest.raises(ValueError, match=f"cannot take back {columns} of 10 columns"):
            both.cache.crop(columns)
    both.check()


@each_scheme
def test_beams_share_blocks_and_go_separate_ways(scheme: str) -> None:
    both = Both(scheme)
    both.append(130, batch=2)
    both.select([0, 0, 0, 1, 1, 1])  # batch_repeat_interleave
    for beams in ([0, 1, 1, 5, 4, 3], [2, 0, 0, 3, 3, 3], [1, 1, 2, 4, 4, 5]):
        both.append(40)
        both.select(beams)
    both.select([4, 1])
    both.append(75)


def test_selecting_rows_copies_no_packed_byte() -> None:
    cache = LayerCache(Scheme.parse(f"int4,{SMALL}"))
    cache.append(*tokens(2, 300, 0))
    assert cache.store is not None
    pool = cache.store.pool.data_ptr()
    cache.select_rows(torch.tensor([1, 1, 0, 0]))
    assert cache.store.pool.data_ptr() == pool


@each_scheme
def test_reset_takes_another_batch_and_type(scheme: str) -> None:
    both = Both(scheme)
    both.append(120, batch=2)
    both.reset()
    assert both.cache.columns == 0 and sum(both.cache.nbytes().values()) == 0 and both.cache.elements == 0
    with pytest.raises(ValueError, match="the cache is empty"):
        both.cache.view()
    both.dtype = torch.bfloat16
    both.append(130, batch=3)


def test_operations_on_an_empty_cache() -> None:
    cache = LayerCache(Scheme.parse("int4"))
    cache.crop(0)
    cache.select_rows(torch.tensor([0, 0]))
    cache.reset()
    assert sum(cache.nbytes().values()) == 0
    keys, values = tokens(3, 5, 0)
    assert_same(cache.append(keys, values), (keys, values))


@each_scheme
def test_a_deep_copy_is_another_cache(scheme: str) -> None:
    both = Both(scheme)
    both.append(150, batch=2)
    other = copy.deepcopy(both)
    other.append(90)
    other.crop(40)
    other.select([1])
    both.check()
    both.seed = 99  # other tokens than the copy got
    both.append(80)
    other.check()


def test_appended_tensors_may_change_afterwards() -> None:
    cache = LayerCache(Scheme.parse(f"int4,{SMALL}"))
    for count in (10, 100, 1):
        keys, values = tokens(1, count, count)
        cache.append(keys, values)
        before = [x.clone() for x in dense(cache.view())]
        keys.zero_()
        values.zero_()
        assert_same(cache.view(), tuple(before))


def test_gradients_do_not_enter() -> None:
    keys, values = tokens(1, 100, 0)
    cache = LayerCache(Scheme.parse(f"int4,{SMALL}"))
    view = cache.append(keys.requires_grad_(), values.requires_grad_())
    assert not any(x.requires_grad for x in dense(view) + dense(cache.view()))


# -- padding -----------------------------------------------------------------------------------------------------------


def padding(kind: str, columns: int) -> torch.Tensor:
    """bool ``[3, columns]``: row 0 whole, row 1 padded, row 2 padded more."""
    text = torch.ones(3, columns, dtype=torch.bool)
    if kind == "left":
        text[1, :37] = False
        text[2, :101] = False
    elif kind == "right":
        text[1, -37:] = False
        text[2, -101:] = False
    else:
        text[1, 5::7] = False
        text[2] = torch.rand(columns, generator=torch.Generator().manual_seed(1)) < 0.5
    return text


def stored_blocks(cache: LayerCache, row: int) -> list[dict[str, torch.Tensor]]:
    """Every part of every packed block of a row, K and V."""
    assert cache.store is not None
    sides = cache.store.view().read(0, cache.store.longest)
    count = cache.store.counts[row]
    return [{name: part[row, :, :count] for name, part in side.items()} for side in sides]


@pytest.mark.parametrize("kind", ("left", "right", "holes"))
@pytest.mark.parametrize("scheme", PER_TOKEN + PER_CHANNEL)
def test_a_padded_row_stores_bit_for_bit_what_it_stores_alone(scheme: str, kind: str) -> None:
    """Padding is poisoned, the batch comes in chunks, the row alone in one piece: the bits are the same.

    (fp8-static is not among the schemes: its one scale is for the whole layer, the other rows included.)
    """
    parsed = Scheme.parse(f"{scheme},block=32" + ("" if "residual" in scheme else ",residual=16"))
    columns = 260
    text = padding(kind, columns)
    keys, values = tokens(3, columns, 5)
    keys[~text[:, None].expand(-1, HEADS, -1)] = torch.nan
    values[~text[:, None].expand(-1, HEADS, -1)] = torch.inf
    batch, rows, first = LayerCache(parsed), Rows(), 0
    for count in (120, 1, 0, 63, 1, 75):
        chunk = slice(first, first + count)
        rows, first = rows.extend(3, count, text[:, chunk]), first + count
        batch.append(keys[:, :, chunk], values[:, :, chunk], rows)
    assert first == columns
    shown = dense(batch.view())
    for row in range(3):
        own = text[row]
        alone = LayerCache(parsed)
        alone.append(keys[row : row + 1][:, :, own], values[row : row + 1][:, :, own])
        assert alone.held[0] == batch.held[row]
        assert alone.store is not None and alone.store.counts[0] == batch.store.counts[row] > 0  # type: ignore
        for mine, theirs in zip(stored_blocks(batch, row), stored_blocks(alone, 0), strict=True):
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(mine[name], theirs[name]) for name in mine)
        for together, single in zip(shown, dense(alone.view()), strict=True):
            assert torch.equal(together[row][:, own], single[0])
            assert not together[row][:, ~own].any()


def test_rows_that_are_all_padding_hold_nothing() -> None:
    both = Both(f"kivi2,{SMALL}")
    both.append(100, torch.tensor([[True], [False]]).expand(2, 100), batch=2)
    assert both.cache.held[1] == 0 and both.cache.store.counts == [2, 0]  # type: ignore[union-attr]
    both.append(60)
    both.append(60, torch.tensor([[False], [True]]).expand(2, 60))


# -- sliding windows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padded", (False, True), ids=("whole", "padded"))
@pytest.mark.parametrize("window", (1, 20, 64, 100))
def test_a_window_keeps_what_can_be_seen_and_drops_the_rest(window: int, padded: bool) -> None:
    scheme = Scheme.parse(f"kivi4,{SMALL}")
    cache, plain = LayerCache(scheme, window=window), PlainCache(scheme, sinks=0)
    assert cache.sinks == 0
    for seed, count in enumerate((10, 80, 1, 1, 50, 0, 33, 128, 1, 40, 1) * 2):
        keys, values = tokens(2, count, seed)
        text = torch.rand(2, count, generator=torch.Generator().manual_seed(seed)) < 0.8 if padded else None
        rows = cache.rows.extend(2, count, text)
        offset = max(0, cache.columns - window + 1)
        view = cache.append(keys, values, rows)
        expected = plain.append(keys, values, text)
        assert view.kv_columns == cache.columns - offset
        assert_same(view, tuple(x[:, :, offset:] for x in expected))
        assert cache.store is not None
        unseen = min(cache.rows.counts) - (window - 1)
        assert cache.dropped <= max(0, unseen) and cache.dropped % scheme.block == 0
        kept = min(cache.store.counts) * scheme.block
        assert kept <= scheme.block * 3 + window or padded  # memory follows the window, not the text
        behind = [cache.dropped + blank * scheme.block for blank in cache.store.blank]
        full = cache.view()
        shown = dense(full)
        assert shown[0].shape[2] == full.kv_columns == cache.columns
        for got, wanted in zip(shown, plain.dense(), strict=True):  # dropped tokens are zero, the others there
            lost = (got == 0).all(dim=(1, 3)) & (wanted != 0).any(dim=1).any(-1)
            assert lost.sum(-1).tolist() == behind
            assert torch.equal(got, wanted.masked_fill(lost[:, None, :, None], 0))
    assert cache.dropped > 0
    assert sum(cache.nbytes().values()) == real_bytes(cache)


@pytest.mark.parametrize("padding", (150, 10**6), ids=("behind", "all-padding"))
def test_a_row_does_not_keep_what_another_has_not_left_behind(padding: int) -> None:
    """The second row is still in its first window, or has no text at all; later it gets some."""
    scheme, window = Scheme.parse(f"int4,{SMALL}"), 40
    cache, plain, most = LayerCache(scheme, window=window), PlainCache(scheme, sinks=0), 0
    record = 0
    for step in range(40):
        keys, values = tokens(2, 16, step)
        text = torch.ones(2, 16, dtype=torch.bool)
        text[1] = torch.arange(cache.columns, cache.columns + 16) >= min(padding, 560)
        rows = cache.rows.extend(2, 16, text)
        offset = max(0, cache.columns - window + 1)
        view, expected = cache.append(keys, values, rows), plain.append(keys, values, text)
        assert_same(view, tuple(x[:, :, offset:] for x in expected))
        assert cache.store is not None
        record = cache.store.record.nbytes * HEADS
        most = max(most, cache.store.pool.nbytes)
        if step == 30:
            cache.crop(20)
            plain.crop(20)
        if step == 33:
            cache.select_rows(torch.tensor([1, 0, 0]))
            plain.select([1, 0, 0])
            cache.select_rows(torch.tensor([1, 0]))
            plain.select([1, 0])
    assert most <= record * 2 * (window // 32 + 4)  # of both rows; the first row's text alone has 20 blocks
    behind = sum(cache.dropped + blank * scheme.block for blank in cache.store.blank)
    assert cache.elements == HEADS * (KEY_CHANNELS + VALUE_CHANNELS) * (sum(cache.rows.counts) - behind)
    with pytest.raises(ValueError, match="cannot take back 200 columns, the sliding window"):
        cache.crop(200)


def test_exact_tokens_are_left_behind_too() -> None:
    cache, plain = LayerCache(Scheme.parse("exact"), window=100), PlainCache(Scheme.parse("exact"))
    for step in range(60):
        keys, values = tokens(2, 50, step)
        offset = max(0, cache.columns - 99)
        assert_same(cache.append(keys, values), tuple(x[:, :, offset:] for x in plain.append(keys, values, None)))
    assert cache.elements <= 2 * HEADS * (KEY_CHANNELS + VALUE_CHANNELS) * (100 + 3 * 128)


def test_a_window_can_step_back_by_a_block_and_refuses_more() -> None:
    scheme = Scheme.parse(f"int4,{SMALL}")
    cache, plain = LayerCache(scheme, window=40, name="layer 7"), PlainCache(scheme, sinks=0)
    for seed in range(12):
        keys, values = tokens(1, 30, seed)
        cache.append(keys, values)
        plain.append(keys, values, None)
    with pytest.raises(ValueError, match=r"layer 7: cannot take back 200 columns.* window of 40 .*at most 32"):
        cache.crop(200)
    cache.crop(32)
    plain.crop(32)
    keys, values = tokens(1, 3, 77)
    offset = cache.columns - 40 + 1
    assert_same(cache.append(keys, values), tuple(x[:, :, offset:] for x in plain.append(keys, values, None)))


# -- bytes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheme", "codes", "scales", "zeros"),
    [
        # for one block of 128 tokens of one head, K and V of 64 channels
        ("int4", 2 * 128 * 32, 2 * 128 * 2, 2 * 128 * 2),
        ("int3", 2 * 128 * 24, 2 * 128 * 2, 2 * 128 * 2),
        ("int8-gs32", 2 * 128 * 64, 2 * 128 * 4, 2 * 128 * 4),
        ("kivi2", 2 * 128 * 16, (4 * 64 + 128 * 2) * 2, (4 * 64 + 128 * 2) * 2),
        ("fp8", 2 * 128 * 64, 2 * 128 * 2, 0),
        ("exact,residual=128", 2 * 128 * 64 * 2, 0, 0),
    ],
)
def test_bytes_by_part_are_the_arithmetic(scheme: str, codes: int, scales: int, zeros: int) -> None:
    cache, heads, blocks = LayerCache(Scheme.parse(scheme)), 3, 5
    x = torch.randn(2, heads, 4 + blocks * 128 + 128 + 9, 64, dtype=torch.bfloat16)
    cache.append(x, x)
    parts = cache.nbytes()
    count = 2 * heads * blocks
    assert parts["codes"] == count * codes and parts["scales"] == count * scales and parts["zeros"] == count * zeros
    assert parts["sinks"] == 2 * heads * 4 * 64 * 2 * 2
    assert parts["residual"] == 2 * heads * (128 + 9) * 64 * 2 * 2
    spare = 2 * heads * (127 - 9) * 64 * 2 * 2  # the residual buffer until the next flush
    assert parts["slack"] == spare + cache.store.table.nbytes  # type: ignore[union-attr]
    assert cache.elements == 2 * 2 * heads * (4 + blocks * 128 + 137) * 64


def test_static_scales_count_as_scales() -> None:
    cache = LayerCache(Scheme.parse("fp8-static"))
    cache.append(*tokens(1, 300, 0))
    assert cache.nbytes()["scales"] == 8  # two float32


@pytest.mark.parametrize("scheme", ("int4", "kivi2", "exact"))
@pytest.mark.parametrize("prompt", (0, 1000))
def test_slack_stays_below_an_eighth_and_a_constant(scheme: str, prompt: int) -> None:
    """However a text arrives, what is allocated beyond it is at most an eighth, one residual buffer and a block."""
    cache = LayerCache(Scheme.parse(scheme))
    token = 2 * 8 * 4  # K and V, 8 channels, float32
    if prompt:
        cache.append(torch.randn(1, 1, prompt, 8), torch.randn(1, 1, prompt, 8))
    x = torch.randn(1, 1, 1, 8)
    for _ in range(1500):
        cache.append(x, x)
        parts = cache.nbytes()
        slack = parts.pop("slack")
        assert slack <= sum(parts.values()) / 8 + (4 + 128 + 127) * token + 4096


# -- work per step -----------------------------------------------------------------------------------------------------


class Written(TorchDispatchMode):
    """Counts the bytes that operators allocate or write; views of existing memory are free."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        outputs = out if isinstance(out, (tuple, list)) else [out]
        for result, declared in zip(outputs, func._schema.returns, strict=False):
            view = declared.alias_info is not None and not declared.alias_info.is_write
            if isinstance(result, torch.Tensor) and not view:
                self.nbytes += result.nbytes
                if "empty" not in func.name():  # the pool itself
                    self.largest = max(self.largest, result.nbytes)
        return out


def bytes_per_step(cache: LayerCache, steps: int) -> float:
    x = torch.randn(cache.rows.batch, 1, 1, 64)
    total = 0
    for _ in range(steps):
        rows = cache.rows.extend(cache.rows.batch, 1)  # the map of padding is made once for all layers: not counted
        assert rows.counts
        with Written() as written:
            cache.append(x, x, rows)
        total += written.nbytes
    return total / steps


@pytest.mark.parametrize(
    ("scheme", "padded"),
    [("int4", False), ("exact", False), ("int4", True)],
    ids=("int4", "exact", "int4-padded"),
)
def test_a_step_costs_the_same_at_1k_and_at_16k_tokens(scheme: str, padded: bool) -> None:
    """Amortised: over growth by an eighth, which is one growth of the pool and of the exact buffer."""
    per_step, totals = {}, {}
    for context in (1024, 16384):
        cache = LayerCache(Scheme.parse(scheme))
        x = torch.randn(2 if padded else 1, 1, context, 64)
        text = torch.arange(context).expand(2, context) >= torch.tensor([[0], [100]])
        cache.append(x, x, Rows().extend(2, context, text) if padded else None)
        totals[context] = sum(cache.nbytes().values())
        per_step[context] = bytes_per_step(cache, max(256, context // 8))
    assert per_step[16384] <= 1.25 * per_step[1024]
    assert per_step[16384] < totals[16384] / 50  # a concatenation would write all of it at each step
    token = 2 * 64 * 4
    assert per_step[1024] > token  # the count does see the token itself


def test_a_step_of_beams_costs_little_more_than_a_plain_one() -> None:
    cache = LayerCache(Scheme.parse("int4"))
    x = torch.randn(1, 1, 8192, 64)
    cache.append(x, x)
    cache.select_rows(torch.zeros(4, dtype=torch.int64))
    total = sum(cache.nbytes().values())
    x = torch.randn(4, 1, 1, 64)
    with Written() as written:
        for step in range(256):
            cache.append(x, x)
            cache.select_rows(torch.tensor([[0, 0, 1, 2], [3, 2, 1, 0]][step % 2]))
    residual = 2 * 4 * (4 + 128 + 127) * 64 * 4  # each selection copies the exact rows, not the packed ones
    assert written.nbytes / 256 < 1.5 * residual < total


def test_encoding_a_long_prompt_needs_little_memory_beside_it() -> None:
    cache = LayerCache(Scheme.parse("int4"))
    x = torch.randn(1, 1, 16384, 64, dtype=torch.bfloat16)
    with Written() as written:
        cache.append(x, x)
    assert 0 < written.largest <= x.nbytes / 3


# -- bad input ---------------------------------------------------------------------------------------------------------


def state(cache: LayerCache) -> list[Any]:
    return [
        cache.columns, cache.rows.counts, list(cache.held), cache.is_final, cache.nbytes(), cache.elements,
        None if cache.store is None else (list(cache.store.counts), cache.store.used),
    ]  # fmt: skip


@pytest.mark.parametrize("bad", (math.nan, math.inf, -math.inf))
@pytest.mark.parametrize("side", ("keys", "values"))
@pytest.mark.parametrize("scheme", ("int4", "kivi2", "fp8", "fp8-static", "exact,residual=20"))
def test_what_is_not_finite_is_refused_before_anything_changes(scheme: str, side: str, bad: float) -> None:
    options = "block=32" if "residual" in scheme else SMALL
    cache = LayerCache(Scheme.parse(f"{scheme},{options}"), name="layer 3")
    twin = LayerCache(Scheme.parse(f"{scheme},{options}"))
    for each in (cache, twin):
        each.append(*tokens(2, 130, 0))
    before, shown = state(cache), [x.clone() for x in dense(cache.view())]
    keys, values = tokens(2, 100, 1)
    (keys if side == "keys" else values)[1, 0, 40, 3] = bad
    with pytest.raises(ValueError, match=rf"layer 3: 1 of the {side} to be packed are NaN, infinite"):
        cache.append(keys, values)
    assert state(cache) == before
    assert_same(cache.view(), tuple(shown))
    good = tokens(2, 100, 2)
    assert_same(cache.append(*good), dense(twin.append(*good)))
    assert_same(cache.view(), dense(twin.view()))


@pytest.mark.parametrize("padded", (False, True), ids=("whole", "padded"))
def test_a_refused_first_prompt_leaves_the_cache_empty(padded: bool) -> None:
    cache = LayerCache(Scheme.parse(f"int4,{SMALL}"))
    keys, values = tokens(2, 100, 0)
    keys[0, 0, 50, 0] = torch.nan
    rows = Rows().extend(2, 100, torch.arange(100).expand(2, 100) > 3) if padded else None
    with pytest.raises(ValueError, match="NaN, infinite"):
        cache.append(keys, values, rows)
    assert cache.columns == 0 and sum(cache.nbytes().values()) == 0
    with pytest.raises(ValueError, match="the cache is empty"):
        cache.view()
    keys, values = tokens(3, 90, 1, torch.bfloat16)
    assert_same(cache.append(keys, values), (keys, values))


@pytest.mark.parametrize("scheme", ("int4", "kivi2", "fp8-static", "exact"))
@pytest.mark.parametrize("at", (1, 95), ids=("in the sinks", "in the residual"))
def test_what_is_not_finite_among_the_exact_tokens_stays_where_it_is(scheme: str, at: int) -> None:
    """It enters no scale, not even a static one that is fitted from this very prompt."""
    options = "" if scheme == "exact" else f",{SMALL}"
    clean, cache = LayerCache(Scheme.parse(scheme + options)), LayerCache(Scheme.parse(scheme + options))
    keys, values = tokens(2, 100, 0)
    clean.append(keys, values)
    for x, bad in ((keys, torch.nan), (values, torch.inf)):
        x[1, 0, at, 3] = bad
    cache.append(keys, values)
    for got, wanted, bad in zip(dense(cache.view()), dense(clean.view()), (torch.nan, torch.inf), strict=True):
        expected = wanted.clone()
        expected[1, 0, at, 3] = bad
        assert torch.equal(got.nan_to_num(7.0), expected.nan_to_num(7.0))
        assert got.isfinite().sum() == got.numel() - 1


def test_cropping_what_is_not_finite_clears_it() -> None:
    both = Both(f"int4,{SMALL}")
    both.append(100)
    keys, values = tokens(1, 4, 9)
    keys[0, 0, 2], values[0, 0, 2] = torch.nan, torch.inf
    both.cache.append(keys, values)
    both.plain.append(keys, values, None)
    both.crop(3)
    both.append(60)


def test_a_static_scale_is_fitted_from_the_tokens_that_are_packed() -> None:
    """Not from the sinks, which stay exact and are often much larger, and not from padding."""
    scheme = Scheme.parse(f"fp8-static,{SMALL}")
    keys, values = tokens(2, 100, 0)
    keys[:, :, :4] *= 1000
    text = torch.ones(2, 100, dtype=torch.bool)
    text[1, 10:14] = False
    keys[1, :, 10:14] = 1e9
    for rows, packed in ((None, keys[:, :, 4:68]), (Rows().extend(2, 100, text), None)):
        cache = LayerCache(scheme)
        cache.append(keys, values, rows)
        if packed is None:
            packed = torch.cat([keys[:1, :, 4:68], keys[1:, :, 4:10], keys[1:, :, 14:72]], dim=2)
        assert torch.equal(cache.key_params["scale"], Fp8Static().fit(packed)["scale"])


@pytest.mark.parametrize(
    ("keys", "values", "words"),
    [
        ((3, 2, 5, 8), (3, 2, 5, 12), r"holds \(rows, heads, key channels, value channels\) = \(2, 2, 8, 12\)"),
        ((2, 4, 5, 8), (2, 4, 5, 12), "another batch or another model"),
        ((2, 2, 5, 16), (2, 2, 5, 12), r"got \(2, 2, 16, 12\)"),
        ((2, 2, 5, 8), (2, 2, 5, 8), "reset"),
        ((2, 2, 5, 8), (2, 2, 4, 12), "must be .* with the same B, H and T"),
        ((2, 5, 8), (2, 5, 12), "must be "),
    ],
    ids=("batch", "heads", "key channels", "value channels", "lengths", "dimensions"),
)
def test_other_shapes_are_refused(keys: tuple[int, ...], values: tuple[int, ...], words: str) -> None:
    cache = LayerCache(Scheme.parse("int4"), name="layer 5")
    cache.append(*tokens(2, 10, 0))
    before = state(cache)
    with pytest.raises(ValueError, match=f"layer 5: .*{words}"):
        cache.append(torch.zeros(keys), torch.zeros(values))
    assert state(cache) == before


@pytest.mark.parametrize(
    ("keys", "values", "words"),
    [
        (torch.bfloat16, torch.bfloat16, "holds keys torch.float32 .* and got keys torch.bfloat16"),
        (torch.float32, torch.bfloat16, "holds keys torch.float32 .* and values torch.bfloat16"),
        (torch.int64, torch.float32, "keys are torch.int64; allowed are float32"),
        (torch.float32, torch.float8_e4m3fn, "values are torch.float8_e4m3fn; allowed are float32"),
    ],
    ids=("changed", "one-changed", "integers", "float8"),
)
def test_other_types_are_refused(keys: torch.dtype, values: torch.dtype, words: str) -> None:
    cache = LayerCache(Scheme.parse("int4"), name="layer 5")
    cache.append(*tokens(2, 10, 0))
    k, v = tokens(2, 3, 1)
    with pytest.raises(ValueError, match=f"layer 5: .*{words}"):
        cache.append(k.to(keys), v.to(values))
    assert cache.columns == 10


def test_other_devices_are_refused() -> None:
    cache = LayerCache(Scheme.parse("int4"), name="layer 5")
    keys, values = tokens(2, 10, 0)
    with pytest.raises(ValueError, match="layer 5: keys are on cpu, but values on meta"):
        cache.append(keys, values.to("meta"))
    cache.append(keys, values)
    with pytest.raises(ValueError, match=r"layer 5: the cache holds .* on cpu and got .* on meta"):
        cache.append(keys.to("meta"), values.to("meta"))
    assert cache.columns == 10


def test_a_scheme_with_overrides_is_not_one_of_a_layer() -> None:
    with pytest.raises(ValueError, match=r"has overrides: give a layer its own scheme, Scheme\.for_layer"):
        LayerCache(Scheme.parse("int4,layers[0]=fp8"))


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32, torch.float64), ids=str)
def test_infinities_of_every_dtype_are_refused(dtype: torch.dtype) -> None:
    cache = LayerCache(Scheme.parse(f"int4,{SMALL}"))
    keys, values = tokens(2, 100, 0, dtype)
    keys[0, 0, 50, 0] = torch.inf
    with pytest.raises(ValueError, match="NaN, infinite"):
        cache.append(keys, values)


@pytest.mark.parametrize("scheme", ("int8", "int4", "int2", "kivi2", "nf4", "hqq4", "fp8", "fp8-static"))
def test_what_is_taken_out_of_a_block_stays_finite(scheme: str) -> None:
    """Errors above the largest float16 saturate; else one crop would put an infinity among the exact tokens."""
    cache = LayerCache(Scheme.parse(f"{scheme},residual=0,sinks=0,block=32"))
    generator, largest = torch.Generator().manual_seed(0), torch.finfo(torch.float16).max
    x = (torch.rand(1, 1, 64, 64, generator=generator) * 2 - 1) * largest
    x[..., ::7, :8], x[..., 3, 5] = largest, -largest
    cache.append(x.half(), x.half())
    assert all(bool(side.isfinite().all()) for side in dense(cache.view()))
    cache.crop(5)
    assert cache.keys is not None and cache.values is not None
    assert bool(cache.keys.isfinite().all() and cache.values.isfinite().all())
    assert cache.keys.abs().max() > largest / 2
    cache.append(x.half(), x.half())


# -- static scales -----------------------------------------------------------------------------------------------------


def test_a_static_scale_waits_for_what_is_not_zero() -> None:
    """Each side by itself; blocks of zeros stay zeros whatever is fitted later."""
    cache = LayerCache(Scheme.parse("fp8-static,residual=0,sinks=0,block=32"))
    zeros, generator = torch.zeros(1, 2, 64, 8), torch.Generator().manual_seed(0)
    x = torch.randn(1, 2, 64, 8, generator=generator) * 1e-4
    for keys, values, fitted in ((zeros, zeros, (False, False)), (x, zeros, (True, False)), (x, x, (True, True))):
        cache.append(keys, values)
        assert cache.is_final == fitted
    keys, values = dense(cache.view())
    assert not keys[:, :, :64].any() and not values[:, :, :128].any()
    for got in (keys[:, :, 64:128], keys[:, :, 128:], values[:, :, 128:]):
        assert (got - x).norm() <= 0.04 * x.norm()
    fitted = cache.key_params["scale"].clone()
    cache.append(x * 3, zeros)
    assert torch.equal(cache.key_params["scale"], fitted)


def test_saturation_warns_once_for_each_layer_and_tensor() -> None:
    x = torch.randn(1, 1, 32, 64, generator=torch.Generator().manual_seed(0))
    for name in ("layer 0", "layer 1"):
        cache = LayerCache(Scheme.parse("fp8-static,residual=0,sinks=0,block=32"), name=name)
        for _ in range(2):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for factor in (1, 2, 100, 200, 300):
                    cache.append(x * factor, x * (factor if factor != 200 else 400))
            said = [str(warning.message) for warning in caught]
            assert len(said) == 2 and all(warning.category is RuntimeWarning for warning in caught)
            for what, message in zip(("keys", "values"), said, strict=True):
                assert re.match(rf"{name}, {what}: a value of magnitude [\d.e+]+ saturates at .* use fp8", message)
            cache.reset()


def test_rotated_centred_keys_are_balanced_and_read_alike_by_every_kernel() -> None:
    """Channels 30 times as large as the others do not take the bits of all; crop and undo know of the balance."""
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 2, 3, 700, 64, generator=generator)
    keys[..., 20:24] *= 30
    query = torch.randn(2, 9, 1, 64, generator=generator)
    query[..., 20:24] /= 30
    outputs = {}
    for scheme in ("exact,residual=0", "default", "lm4"):
        layer = LayerCache(Scheme.parse(scheme))
        layer.append(keys, values)
        call = Call(query, layer.view(), 0.125)
        outputs[scheme] = reference.run(call)
        assert float((attend(call) - outputs[scheme]).abs().max()) <= 1e-3 * float(outputs[scheme].abs().max())
        if scheme == "default":
            balance = layer.key_params["balance"]
            assert balance.shape == (3, 64) and float(balance[:, 20:24].min()) > 3 * float(balance[:, :20].max())
            layer.crop(300)
            assert torch.equal(layer.key_params["balance"], balance)
            far = (dense(layer.view())[0] - keys[:, :, :400]).norm() / keys[:, :, :400].norm()
            assert float(far) < 0.1
    errors = {s: float((outputs[s] - outputs["exact,residual=0"]).norm()) for s in ("default", "lm4")}
    assert 3 * errors["default"] < errors["lm4"], errors
