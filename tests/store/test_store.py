"""Floor 2: records, the pool of packed blocks and its table, and which columns are text."""

from __future__ import annotations

import pytest
import torch

from kvbits.schemes.names import parse_codec
from kvbits.store.blocks import BlockStore
from kvbits.store.record import ALIGNMENT_BYTES, Record
from kvbits.store.rows import Rows
from kvbits.types import Packed
from table import QUANTIZED, CodecCase

TOKENS, HEADS, KEY_CHANNELS, VALUE_CHANNELS = 32, 2, 8, 12
KEY, VALUE = parse_codec("int4-channel"), parse_codec("int3")


def small_record() -> Record:
    return Record.of(KEY, VALUE, TOKENS, KEY_CHANNELS, VALUE_CHANNELS, torch.float32)


def blocks(rows: int, count: int, seed: int) -> tuple[Packed, Packed]:
    """Encoded K and V of ``count`` random blocks for each row: ``[rows, HEADS, count, ...]``."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(rows, HEADS, count, TOKENS, KEY_CHANNELS, generator=generator)
    values = torch.randn(rows, HEADS, count, TOKENS, VALUE_CHANNELS, generator=generator)
    return KEY.encode(keys, {}), VALUE.encode(values, {})


class PlainStore:
    """What a store must hold, as a list of blocks per row."""

    def __init__(self, rows: int) -> None:
        self.store = BlockStore(small_record(), HEADS, rows, torch.device("cpu"))
        self.rows: list[list[tuple[Packed, Packed]]] = [[] for _ in range(rows)]
        self.seed = 0

    def append(self, row: int | None, count: int) -> None:
        rows = range(len(self.rows)) if row is None else [row]
        self.seed += 1
        keys, values = blocks(len(rows), count, self.seed)
        self.store.append([(row, keys, values)])
        for index, r in enumerate(rows):
            for n in range(count):
                self.rows[r].append(
                    ({k: v[index, :, n] for k, v in keys.items()}, {k: v[index, :, n] for k, v in values.items()})
                )

    def select(self, *rows: int) -> None:
        self.store.select_rows(torch.tensor(rows))
        self.rows = [list(self.rows[row]) for row in rows]

    def truncate(self, *counts: int) -> None:
        self.store.truncate(counts)
        self.rows = [row[:count] for row, count in zip(self.rows, counts, strict=True)]

    def drop_first(self, count: int) -> None:
        self.store.drop_first(count)
        self.rows = [row[count:] for row in self.rows]

    def check(self) -> None:
        assert self.store.counts == [len(row) for row in self.rows]
        view = self.store.view()
        assert view.counts == tuple(self.store.counts) and view.longest == max(self.store.counts)
        for first, last in ((0, view.longest), (view.longest // 2, view.longest)):
            sides = view.read(first, last)
            for row, held in enumerate(self.rows):
                for n in range(first, min(last, len(held))):
                    for side in (0, 1):
                        assert sides[side].keys() == held[n][side].keys()
                        for name, part in sides[side].items():
                            assert torch.equal(part[row, :, n - first], held[n][side][name]), (row, n, name)
        assert sum(self.store.nbytes().values()) == self.store.pool.nbytes + self.store.table.nbytes


def test_memory_that_runs_out_while_blocks_are_moved_spoils_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = PlainStore(2)
    plain.append(None, 3)
    plain.select(1, 0)
    fork = plain.store.fork()
    plain.truncate(1, 3)
    fork.truncate([0, 0])

    def fail(_: BlockStore) -> torch.Tensor:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(BlockStore, "pool", property(fail))
        with pytest.raises(MemoryError):
            plain.store._compact(plain.store._alive())
    del fork
    plain.check()


# -- records -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", QUANTIZED, ids=str)
def test_parts_of_a_record_are_aligned_and_do_not_overlap(case: CodecCase) -> None:
    codec = parse_codec(case.spelling)
    record = Record.of(codec, parse_codec("nf3-gs32"), 128, 80, 20, torch.bfloat16)
    end = 0
    for slot in record.keys + record.values:
        assert slot.offset % ALIGNMENT_BYTES == 0
        assert end <= slot.offset < end + ALIGNMENT_BYTES  # after the part before, and no gap but alignment
        end = slot.offset + slot.part.nbytes
    assert record.nbytes % ALIGNMENT_BYTES == 0 and end <= record.nbytes < end + ALIGNMENT_BYTES
    roles = [slot.part.nbytes for slot in record.keys + record.values]
    assert sum(record.role_bytes(role) for role in ("codes", "scales", "zeros", "outliers")) == sum(roles)
    for side, one, channels in ((record.keys, codec, 80), (record.values, parse_codec("nf3-gs32"), 20)):
        assert tuple(slot.part for slot in side) == one.layout(128, channels, torch.bfloat16)


# -- store -------------------------------------------------------------------------------------------------------------


def test_blocks_come_back_in_every_order_of_appending() -> None:
    plain = PlainStore(3)
    for row, count in ((None, 2), (None, 1), (1, 3), (0, 1), (1, 1), (2, 5)):
        plain.append(row, count)
        plain.check()


def test_rows_in_order_are_read_without_a_copy() -> None:
    plain = PlainStore(2)
    plain.append(None, 4)
    view = plain.store.view()
    keys, _ = view.read(1, 3)
    assert view.in_order
    assert keys["codes"].untyped_storage().data_ptr() == plain.store.pool.untyped_storage().data_ptr()


def test_moving_rows_moves_no_block() -> None:
    plain = PlainStore(3)
    plain.append(None, 3)
    pool = plain.store.pool
    before = pool.clone()
    for rows in ((2, 0, 1), (0, 0, 1, 1), (3,), (0, 0)):
        plain.select(*rows)
        plain.check()
        assert plain.store.pool.data_ptr() == pool.data_ptr() and torch.equal(plain.store.pool, before)
    plain.append(None, 1)  # and afterwards rows that shared blocks go separate ways
    plain.check()
    plain.append(1, 2)
    plain.check()


def test_truncated_rows_go_on_with_other_blocks() -> None:
    plain = PlainStore(2)
    plain.append(None, 4)
    for counts in ((3, 3), (3, 1), (0, 1), (0, 0)):
        plain.truncate(*counts)
        plain.check()
    plain.append(None, 2)
    plain.append(0, 1)
    plain.check()
    plain.truncate(1, 2)
    plain.append(1, 3)
    plain.check()


def test_a_row_truncated_after_sharing_leaves_the_other_alone() -> None:
    plain = PlainStore(1)
    plain.append(None, 3)
    plain.select(0, 0)
    plain.truncate(1, 3)
    plain.append(0, 4)
    plain.check()


def test_dropped_blocks_are_reclaimed() -> None:
    plain = PlainStore(2)
    for _ in range(60):
        plain.append(None, 1)
        if plain.store.longest > 4:
            plain.drop_first(1)
        plain.check()
    assert plain.store.pool.shape[0] <= 2 * (4 + 1) * 9 / 8 + 2  # 4 blocks and 1 new one per row, an eighth, rounding


def test_beams_that_died_are_reclaimed() -> None:
    plain = PlainStore(4)
    for step in range(40):
        plain.append(None, 1)
        plain.select(*((0, 0, 1, 1) if step % 3 else (3, 2, 1, 0)))
    plain.check()
    plain.append(None, 1)
    alive = len({int(n) for row in range(4) for n in plain.store.table[row, : plain.store.counts[row]]})
    assert alive <= 4 * 41
    assert plain.store.pool.shape[0] <= alive * 9 / 8 + 4 + 4 * 8  # nothing but what died since the pool last grew


def test_a_view_does_not_change_when_the_store_does() -> None:
    plain = PlainStore(2)
    plain.append(None, 2)
    views = []
    for change in (
        lambda: plain.append(None, 1),
        lambda: plain.append(1, 2),
        lambda: plain.select(1, 0),
        lambda: plain.append(None if plain.store.counts[0] == plain.store.counts[1] else 0, 1),
        lambda: plain.drop_first(1),
        lambda: plain.append(0, 9),
    ):
        view = plain.store.view()
        sides = [{name: part.clone() for name, part in side.items()} for side in view.read(0, view.longest)]
        views.append((view, sides))
        change()
        for old, expected in views:
            for side, parts in zip(old.read(0, old.longest), expected, strict=True):
                for row, count in enumerate(old.counts):
                    assert all(torch.equal(side[name][row, :, :count], parts[name][row, :, :count]) for name in parts)


def test_a_view_keeps_the_blocks_that_a_window_leaves_behind_later() -> None:
    plain = PlainStore(2)
    plain.append(None, 2)
    view = plain.store.view()
    assert view.in_order
    table = view.table.clone()
    plain.store.blank_first(0, 1)
    assert torch.equal(view.table, table)  # kernels read by it even where the blocks lie in order


def test_pool_grows_by_an_eighth_and_copies_a_byte_a_bounded_number_of_times() -> None:
    store = BlockStore(small_record(), HEADS, 1, torch.device("cpu"))
    keys, values = blocks(1, 1, 0)
    copied = capacity = 0
    for written in range(1, 600):
        held = store.used
        store.append([(None, keys, values)])
        if store.pool.shape[0] != capacity:
            copied, capacity = copied + held, store.pool.shape[0]
        assert store.used == written and capacity <= written * 9 / 8 + 1
    assert copied <= 9 * 600


def test_a_first_fill_is_cut_to_fit() -> None:
    store = BlockStore(small_record(), HEADS, 2, torch.device("cpu"))
    store.append([(None, *blocks(2, 50, 0))])
    assert store.pool.shape[0] == 100


# -- rows --------------------------------------------------------------------------------------------------------------


def test_rows_without_padding_carry_no_map() -> None:
    rows = Rows().extend(2, 5).extend(2, 3)
    assert (rows.batch, rows.columns, rows.counts, rows.valid, rows.column_of) == (2, 8, (8, 8), None, None)
    assert rows.crop(3).counts == (5, 5) and rows.select(torch.tensor([1, 1, 0])).counts == (8, 8, 8)


def test_rows_know_the_column_of_every_own_token() -> None:
    valid = torch.tensor([[0, 0, 1, 1, 1], [1, 0, 1, 0, 0], [0, 0, 0, 0, 0]], dtype=torch.bool)
    rows = Rows().extend(3, 5, valid)
    assert rows.counts == (3, 2, 0)
    assert rows.column_of is not None
    assert rows.column_of.tolist() == [[2, 3, 4], [0, 2, -1], [-1, -1, -1]]
    more = rows.extend(3, 1)  # no mask: text
    assert more.counts == (4, 3, 1) and rows.counts == (3, 2, 0)  # the old one is unchanged
    assert more.crop(2).counts == (2, 2, 0)
    assert more.select(torch.tensor([2, 0])).column_of.tolist() == [[5, -1, -1, -1], [2, 3, 4, 5]]  # type: ignore


def test_padding_that_comes_later_finds_the_earlier_columns_text() -> None:
    rows = Rows().extend(2, 3).extend(2, 2, torch.tensor([[True, False], [False, True]]))
    assert rows.counts == (4, 4)
    assert rows.column_of is not None and rows.column_of.tolist() == [[0, 1, 2, 3], [0, 1, 2, 4]]
