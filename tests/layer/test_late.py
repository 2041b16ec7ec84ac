"""Late sinks: what counts as one, and every operation of a cache that keeps some, against a plain list of tokens."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import pydoc_data.topics
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st

import kvbits
import stored
import zoo
from kvbits.attend import Call, KVView, native, reference
from kvbits.attend import view as view_module
from kvbits.attend.dense import dense
from kvbits.encode import encode
from kvbits.hf.names import cache_name
from kvbits.layer.cache import LayerCache
from kvbits.schemes.scheme import Scheme
from kvbits.store.late_sinks import abnormality, choose, own_numbers
from kvbits.store.rows import Rows
from kvbits.transform.rotary import Rotary

HEADS, CHANNELS = 2, 16
CPU = torch.device("cpu")
OPTIONS = "residual=20,sinks=2+3,block=32"
SCHEMES = (
    f"exact,{OPTIONS}",
    f"int4,{OPTIONS}",
    f"kivi4,{OPTIONS}",
    f"k=fp8-static,v=fp8,{OPTIONS}",
    "int8,residual=0,sinks=0+2,block=32",
)
KERNEL_NAMES = [name for name in ("native", "reference") if name == "reference" or native.library()[0] is not None]


def tokens(
    rows: int, count: int, seed: int, share: float = 0.04, heads: int = HEADS, channels: int = CHANNELS
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of ``count`` columns: keys of norm 1, and a share of them, planted, many times shorter or longer."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.nn.functional.normalize(torch.randn(rows, heads, count, channels, generator=generator), dim=-1)
    strength = 2 + 2 * torch.rand(rows, count, generator=generator)  # all different, e^2 and beyond
    sign = torch.where(torch.rand(rows, count, generator=generator) < 0.6, -1.0, 1.0)
    planted = torch.rand(rows, count, generator=generator) < share
    keys = keys * torch.where(planted, strength * sign, 0.0).exp()[:, None, :, None]
    return keys, torch.randn(rows, heads, count, channels, generator=generator)


# -- what counts as one ------------------------------------------------------------------------------------------------


def test_planted_keys_are_found_and_nothing_else() -> None:
    keys, _ = tokens(3, 500, 0, share=0.0)
    keys = keys * (0.8 + 0.4 * torch.rand(3, 1, 500, 1, generator=torch.Generator().manual_seed(1)))
    planted = ((0, 17, 0.3), (0, 200, 0.0), (1, 5, 12.0), (2, 0, 0.5), (2, 400, 3.0), (2, 499, 0.2))
    for row, at, factor in planted:
        keys[row, :, at] *= factor
    assert abnormality(keys).nonzero().tolist() == [[row, at] for row, at, _ in planted]
    assert choose(keys, 480, 20) == [[17, 200], [5], [0, 400]]  # the last is packed later, or becomes a late sink then
    assert choose(keys, 480, 2) == [
        [17, 200],
        [5],
        [400],
    ]  # the most abnormal ones: 0.2 comes before 3, and 3 before 0.5
    assert choose(keys, 480, 1) == [[200], [5], []]
    assert choose(keys, 480, 0) == choose(keys, 0, 8) == [[], [], []]


@pytest.mark.parametrize("scale", (1e-20, 1.0, 1e18), ids=str)
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32, torch.float64), ids=str)
def test_the_rule_measures_ratios_in_every_dtype(dtype: torch.dtype, scale: float) -> None:
    keys, _ = tokens(1, 200, 0, share=0.0)
    keys[:, :, 50] *= 0.2
    if dtype == torch.float16:
        scale = {1e-20: 1e-3, 1.0: 1.0, 1e18: 3e4}[scale]
    assert choose((keys.double() * scale).to(dtype), 150, 4) == [[50]]


@pytest.mark.parametrize("channels", (8, 64, 128))
@pytest.mark.parametrize("heads", (1, 8))
def test_ordinary_random_keys_hardly_trigger(heads: int, channels: int) -> None:
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(4, heads, 2000, channels, generator=generator)
    share = float((abnormality(keys) > 0).float().mean())
    assert share <= (0.03 if heads == 1 and channels == 8 else 0.0005)
    wide = keys * (0.4 * torch.randn(4, 1, 2000, 1, generator=generator)).exp()  # norms differ by themselves
    assert float((abnormality(wide) > 0).float().mean()) <= 0.02


def test_one_head_alone_makes_no_sink_unless_far_off() -> None:
    keys, _ = tokens(1, 200, 0, share=0.0, heads=8)
    keys[0, 0, 20] *= 0.2
    assert choose(keys, 150, 4) == [[]]
    keys[0, :, 20] *= 0.5
    assert choose(keys, 150, 4) == [[20]]


@pytest.mark.parametrize("what", ("zeros", "half zeros", "equal"))
def test_degenerate_keys(what: str) -> None:
    keys = torch.ones(1, 2, 100, 8)
    if what == "zeros":
        keys.zero_()
    elif what == "half zeros":
        keys[:, 0] = 0
    assert choose(keys, 60, 4) == [[]]
    keys[:, :, 7] = 0 if what == "equal" else 3
    assert choose(keys, 60, 4) == [[7] if what != "zeros" else []]


@pytest.mark.parametrize("bad", (torch.nan, torch.inf))
def test_what_is_not_finite_is_no_sink(bad: float) -> None:
    """It is refused when it is packed; to keep it exact would hide it."""
    keys, _ = tokens(2, 100, 0)
    keys[1, 0, 30, 2] = bad
    assert choose(keys, 80, 8)[1] == []
    cache = LayerCache(Scheme.parse(f"int4,{OPTIONS}"))
    with pytest.raises(ValueError, match="NaN, infinite"):
        cache.append(keys, keys)


def test_stored_order_leads_back_to_own_numbers() -> None:
    late = ((3, 4, 9), (), (2,))
    own = own_numbers(late, 2, (8, 8, 4), 16, torch.device("cpu"))
    assert own.tolist() == [
        [0, 1, 2, 5, 6, 7, 8, 10, 11, 12, 3, 4, 9, 13, 14, 15],
        list(range(16)),
        [0, 1, 3, 4, 5, 6, 2, *range(7, 16)],
    ]


# -- the grammar -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("padded", "batch"), [(False, 1), (False, 2), (True, 2)])
def test_steps_do_not_work_out_the_order_of_all_tokens_again(
    monkeypatch: pytest.MonkeyPatch, padded: bool, batch: int
) -> None:
    keys, values = tokens(batch, 400, 3)
    valid = torch.ones(batch, 400, dtype=torch.bool)
    valid[0, :30] = not padded
    rows = Rows().extend(batch, 400, valid if padded else None)
    layer = LayerCache(Scheme.parse(f"int4,{OPTIONS}"))
    layer.append(keys, values, rows)
    assert any(layer.late)
    asked = []
    monkeypatch.setattr(view_module, "own_numbers", lambda *args: asked.append(1) or own_numbers(*args))
    for step in range(60):
        rows = rows.extend(batch, 1)
        view = layer.append(keys[:, :, step : step + 1], values[:, :, step : step + 1], rows)
        own = own_numbers(view.late, view.sinks, [32 * count for count in view.blocks.counts], max(rows.counts), CPU)
        assert view.column_of is not None and view.column_of.stride() == (view.column_of.shape[1], 1)  # one row too
        assert torch.equal(view.column_of, own if rows.column_of is None else rows.column_of.gather(1, own))
    assert len(asked) <= 5  # once for each time that a row has packed
    assert layer.nbytes()["slack"] >= 4 * sum(rows.counts)


def test_the_grammar() -> None:
    for text, sinks, late, printed in (
        ("int4,sinks=4+8", 4, 8, "int4,sinks=4+8"),
        ("int4, Sinks = 0 + 12", 0, 12, "int4,sinks=0+12"),
        ("int4,sinks=4+0", 4, 0, "int4"),
        ("int4,sinks=7", 7, 0, "int4,sinks=7"),
    ):
        scheme = Scheme.parse(text)
        assert (scheme.sinks, scheme.late_sinks, str(scheme)) == (sinks, late, printed)
        assert Scheme.parse(str(scheme)) == Scheme.from_json(scheme.to_json()) == scheme
    assert Scheme.parse("int4,sinks=4+8,layers[0]=fp8").for_layer(0, 2).late_sinks == 8
    for text, near in (
        ("4+", "sinks=4,"),
        ("+8", r"sinks=8\+8"),
        ("4+8+1", "sinks=4,"),
        ("a+b", "sinks=4,"),
        ("4-8", ""),
    ):
        with pytest.raises(ValueError, match=rf"sinks={text.replace('+', '[+]')} is not a number of tokens.*{near}"):
            Scheme.parse(f"int4,sinks={text}")
    for number in (-1, True, 1.5):
        with pytest.raises(ValueError, match=r"late_sinks=.* is not a number of tokens"):
            dataclasses.replace(Scheme.parse("int4"), late_sinks=number)
    with pytest.raises(ValueError, match="did you mean sinks="):
        Scheme.parse("int4,sink=4+8")


def test_windows_and_exact_caches_have_none() -> None:
    scheme = Scheme.parse(f"int4,{OPTIONS}")
    for cache in (LayerCache(scheme, window=50), LayerCache(Scheme.parse("exact,sinks=2+3"))):
        for seed in range(4):
            cache.append(*tokens(1, 100, seed, share=0.1))
        assert not any(cache.late) and cache.view().late == ()
    assert LayerCache(scheme, window=50).late_sinks == 0


# -- every operation, in any order -------------------------------------------------------------------------------------


@dataclass
class PlainRow:
    """One sequence: which columns are text, K and V of its own tokens, and the numbers of packed and late ones."""

    text: list[bool] = field(default_factory=list)
    sides: list[torch.Tensor] = field(default_factory=list)
    blocks: list[list[int]] = field(default_factory=list)
    late: list[int] = field(default_factory=list)


class Plain:
    """What a cache must hold, token by token in the order of the text."""

    def __init__(self, scheme: Scheme) -> None:
        self.scheme, self.rows = scheme, []
        self.params: list[dict[str, torch.Tensor]] | None = None

    def append(self, keys: torch.Tensor, values: torch.Tensor, text: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        if not self.rows:
            self.rows = [PlainRow([], [keys[b, :, :0], values[b, :, :0]]) for b in range(keys.shape[0])]
        for b, row in enumerate(self.rows):
            own = torch.ones(keys.shape[2], dtype=torch.bool) if text is None else text[b]
            row.text += own.tolist()
            row.sides = [torch.cat([a, x[b][:, own]], dim=1) for a, x in zip(row.sides, (keys, values), strict=True)]
        seen = self.dense()
        self._pack()
        return seen

    def _pack(self) -> None:
        scheme, work = self.scheme, []
        for row in self.rows:
            count = sum(row.text)
            packed = len(row.blocks) * scheme.block
            room = scheme.late_sinks - len(row.late)
            taken = {*range(scheme.sinks), *row.late, *itertools.chain(*row.blocks)}
            recent = [t for t in range(count) if t not in taken]
            exact = count - packed
            size = max(0, (exact - scheme.sinks - scheme.late_sinks - scheme.residual) // scheme.block) * scheme.block
            if not size:
                continue
            candidates, found = recent[: size + room], []
            if room:
                score = abnormality(row.sides[0][None, :, candidates])[0]
                best = score.argsort(descending=True)[:room].tolist()
                found = [candidates[i] for i in best if score[i] > 0]
            to_pack = [t for t in recent if t not in found][:size]
            row.late = sorted([*row.late, *(t for t in found if t < to_pack[-1])])
            work += [(row, to_pack[at : at + scheme.block]) for at in range(0, size, scheme.block)]
        codecs = (scheme.key, scheme.value)
        if work and self.params is None:
            samples = [torch.cat([row.sides[side][:, at] for row, at in work], dim=1) for side in (0, 1)]
            self.params = [codec.fit(x) for codec, x in zip(codecs, samples, strict=True)]
        for row, at in work:
            for side, codec in enumerate(codecs):
                row.sides[side] = row.sides[side].clone()
                params = self.params[side]  # type: ignore[index]
                row.sides[side][:, at] = codec.decode(encode(codec, row.sides[side][:, at], params), params)
            row.blocks.append(at)

    def crop(self, columns: int) -> None:
        for row in self.rows:
            row.text = row.text[: len(row.text) - columns]
            count = sum(row.text)
            row.sides = [x[:, :count] for x in row.sides]
            while row.blocks and row.blocks[-1][-1] >= count:
                row.blocks.pop()
            last = row.blocks[-1][-1] if row.blocks else -1
            row.late = [t for t in row.late if t < min(last, count)]

    def select(self, rows: list[int]) -> None:
        self.rows = [copy.deepcopy(self.rows[row]) for row in rows]

    def dense(self) -> tuple[torch.Tensor, ...]:
        sides = []
        for side in (0, 1):
            out = [row.sides[side].new_zeros(HEADS, len(row.text), CHANNELS) for row in self.rows]
            for x, row in zip(out, self.rows, strict=True):
                x[:, torch.tensor(row.text, dtype=torch.bool)] = row.sides[side]
            sides.append(torch.stack(out))
        return tuple(sides)


def assert_same(view: KVView, expected: tuple[torch.Tensor, ...]) -> None:
    for got, wanted in zip(dense(view), expected, strict=True):
        assert torch.equal(got, wanted)


class Both:
    """A cache and its plain twin, driven together and compared after every operation."""

    def __init__(self, scheme: str, share: float = 0.04) -> None:
        self.scheme, self.share, self.seed = Scheme.parse(scheme), share, 0
        self.cache, self.plain = LayerCache(self.scheme), Plain(self.scheme)
        self.views: list[tuple[KVView, list[torch.Tensor]]] = []

    def append(self, count: int, text: torch.Tensor | None = None, batch: int = 1, step: bool = False) -> None:
        batch, self.seed = len(self.plain.rows) or batch, self.seed + 1
        keys, values = tokens(batch, count, self.seed, self.share)
        rows = self.cache.rows.extend(batch, count, text)
        if rows.valid is not None:
            text = rows.valid[:, rows.columns - count :]
        with torch.no_grad():
            stepped = step and self.cache.step(keys, values, rows)
        view = self.cache.view() if stepped else self.cache.append(keys, values, rows)
        expected = self.plain.append(keys, values, text)
        assert_same(view, expected)
        if not any(self.cache.store.counts) and rows.valid is None:  # type: ignore[union-attr]
            assert all(torch.equal(a, b) for a, b in zip(self.cache.exact(), expected, strict=True))
        self.views.append((view, [x.clone() for x in dense(view)]))
        self.check()
        attend_both(view, count or 1, seed=self.seed)

    def crop(self, columns: int) -> None:
        self.cache.crop(columns)
        self.plain.crop(columns)
        self.views = []
        self.check()

    def select(self, rows: list[int]) -> None:
        self.cache.select_rows(torch.tensor(rows))
        self.plain.select(rows)
        self.check()

    def check(self) -> None:
        cache, plain = self.cache, self.plain
        assert [list(row) for row in cache.late] == [row.late for row in plain.rows]
        assert all(len(row) <= self.scheme.late_sinks for row in cache.late)
        assert cache.store is not None and cache.store.counts == [len(row.blocks) for row in plain.rows]
        assert_same(cache.view(), plain.dense())
        assert cache.rows.valid is not None or cache.even == (len(set(cache.held)) == 1)
        assert cache.elements == sum(side.numel() for row in plain.rows for side in row.sides)
        parts, token = cache.nbytes(), 4 * HEADS * CHANNELS * 2
        held = [min(cache.sinks, count) + len(late) for count, late in zip(cache.held, cache.late, strict=True)]
        assert parts["sinks"] == token * sum(held) and parts["residual"] == token * (sum(cache.held) - sum(held))
        assert cache.keys is not None and cache.values is not None
        total = cache.keys.nbytes + cache.values.nbytes + cache.store.pool.nbytes + cache.store.table.nbytes
        if order := cache.store.derived.stored_order:
            total += order.made.nbytes
        assert sum(parts.values()) == total + sum(x.nbytes for x in cache.key_params.values()) + sum(
            x.nbytes for x in cache.value_params.values()
        )
        for row, (held_here, late) in enumerate(zip(cache.held, cache.late, strict=True)):
            assert not cache.keys[row, :, held_here:].any() and not cache.values[row, :, held_here:].any()
            if held_here > cache.sinks + len(late):  # at least the residual is exact
                assert held_here - cache.sinks - len(late) <= cache.keys.shape[2]
        for view, shown in self.views:
            assert all(torch.equal(now, then) for now, then in zip(dense(view), shown, strict=True))


def attend_both(view: KVView, queries: int, seed: int = 0) -> None:
    """Native and reference kernels against float64 over the shown columns: causal, and under masks with holes."""
    queries = min(queries, view.rows.columns, 5)
    if not queries:
        return
    generator = torch.Generator().manual_seed(seed)
    batch, heads, _, channels = view.keys.shape
    query = torch.randn(batch, 2 * heads, queries, channels, generator=generator)
    columns = view.rows.columns
    causal = torch.arange(columns) <= torch.arange(columns - queries, columns)[:, None]
    seen = causal & (torch.rand(batch, 1, queries, columns, generator=generator) < 0.8)
    bias = torch.randn(1, 2 * heads, queries, columns, generator=generator).masked_fill(~causal, -torch.inf)
    if view.rows.valid is not None:
        seen = seen & view.rows.valid[:, None, None]
        bias = bias.masked_fill(~view.rows.valid[:, None, None], -torch.inf)
    for mask, window in ((None, None), (None, 17), (seen, None), (bias, None)):
        if mask is None and view.rows.valid is not None:
            continue
        call = Call(query, view, 0.5, mask=mask, window=window)
        right = right_attention(call)
        for name in KERNEL_NAMES:
            kernel = {"native": native, "reference": reference}[name]
            if not kernel.why_not(call):
                bound = 2e-3 if name == "native" else 1e-5  # codes meet 16-bit factors
                assert float((kernel.run(call) - right).abs().max()) <= bound * float(right.abs().max())


def right_attention(call: Call) -> torch.Tensor:
    view = call.view
    groups = call.query.shape[1] // view.keys.shape[1]
    keys, values = (x.double().repeat_interleave(groups, dim=1) for x in dense(view))
    queries, columns = call.query.shape[2], view.rows.columns
    at = torch.arange(columns - queries, columns)[:, None]
    scores = call.query.double() @ keys.transpose(-1, -2) * call.scaling
    seen = torch.arange(columns) <= at
    if call.window is not None:
        seen = seen & (torch.arange(columns) > at - call.window)
    if call.mask is None:
        scores = scores.masked_fill(~seen, -torch.inf)
    elif call.mask.dtype == torch.bool:
        scores = scores.masked_fill(~call.mask, -torch.inf)
    else:
        scores = scores + call.mask.double()
    return scores.softmax(-1).nan_to_num(0.0) @ values


COUNTS = st.sampled_from((0, 1, 1, 2, 3, 5, 19, 31, 32, 33, 70, 150))
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), COUNTS),
        st.tuples(st.just("step"), COUNTS),
        st.tuples(st.just("holes"), COUNTS),
        st.tuples(st.just("crop"), st.integers(0, 160)),
        st.tuples(st.just("select"), st.integers(0, 10**6)),
        st.tuples(st.just("copy"), st.just(0)),
    ),
    min_size=2,
    max_size=10,
)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.filterwarnings("ignore:.*saturates")
@given(operations=OPERATIONS, padded=st.booleans(), batch=st.integers(1, 3), share=st.sampled_from((0.0, 0.02, 0.1)))
@settings(max_examples=15, deadline=None, derandomize=True)
def test_any_sequence_of_operations(
    scheme: str, operations: list[tuple[str, int]], padded: bool, batch: int, share: float
) -> None:
    both = Both(scheme, share)
    both.append(90, batch=batch)
    for name, number in operations:
        if name in ("append", "step") or (name == "holes" and not padded):
            both.append(number, step=name == "step")
        elif name == "holes":
            generator = torch.Generator().manual_seed(both.seed)
            both.append(number, torch.rand(len(both.plain.rows), number, generator=generator) < 0.7)
        elif name == "crop":
            both.crop(min(number, both.cache.columns))
        elif name == "select":
            generator = torch.Generator().manual_seed(number)
            count = 1 + number % 3
            both.select(torch.randint(0, len(both.plain.rows), (count,), generator=generator).tolist())
        else:
            other = copy.deepcopy(both)
            other.append(60)
            other.crop(min(80, other.cache.columns))
            both.check()


# -- operations, one at a time -----------------------------------------------------------------------------------------

each_scheme = pytest.mark.parametrize("scheme", SCHEMES)


def planted(rows: int, count: int, at: tuple[tuple[int, int, float], ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ordinary tokens but for the keys ``(row, token, factor)``."""
    keys, values = tokens(rows, count, 0, share=0.0)
    for row, token, factor in at:
        keys[row, :, token] *= factor
    return keys, values


@pytest.mark.parametrize("chunks", ((300,), (1,) * 300, (7, 120, 1, 0, 63, 109)), ids=("whole", "steps", "chunks"))
def test_planted_sinks_are_found_and_stay_bit_exact(chunks: tuple[int, ...]) -> None:
    where = ((0, 40, 0.05), (0, 41, 30.0), (0, 130, 0.1), (1, 3, 0.02), (2, 200, 9.0))
    keys, values = planted(3, 300, where)
    cache, first = LayerCache(Scheme.parse(f"int4,{OPTIONS}")), 0
    for count in chunks:
        cache.append(keys[:, :, first : first + count], values[:, :, first : first + count])
        first += count
    assert cache.late == ((40, 41, 130), (3,), (200,))
    assert cache.even and len(set(cache.held)) == 1
    shown = dense(cache.view())
    for row, token, _ in where:
        for got, x in zip(shown, (keys, values), strict=True):
            assert torch.equal(got[row, :, token], x[row, :, token])
            assert not torch.equal(got[row, :, token + 2], x[row, :, token + 2])  # its neighbours are packed


def test_no_more_than_allowed_and_the_most_abnormal_ones() -> None:
    where = tuple((0, token, 0.5**n) for n, token in enumerate(range(10, 130, 15), start=2))
    keys, values = planted(1, 300, where)
    cache = LayerCache(Scheme.parse(f"int4,{OPTIONS}"))
    cache.append(keys, values)
    assert cache.late == (tuple(token for _, token, _ in where[-3:]),)
    for _ in range(100):
        cache.append(*planted(1, 8, ((0, 3, 100.0),)))
    assert len(cache.late[0]) == 3


def test_a_late_sink_keeps_ranges_and_static_scales_clean() -> None:
    """That is what they are for: a key 30 times as long spoils the scale of its channel group, and a static scale."""
    keys, values = planted(1, 300, ((0, 50, 30.0),))
    others = [token for token in range(300) if token != 50]
    errors, scales = [], []
    for sinks in ("2", "2+3"):
        caches = [LayerCache(Scheme.parse(f"{s},residual=20,sinks={sinks},block=32")) for s in ("kivi4", "fp8-static")]
        for cache in caches:
            cache.append(keys, values)
        errors.append(float((dense(caches[0].view())[0] - keys)[:, :, others].norm()))
        scales.append(float(caches[1].key_params["scale"]))
    assert errors[1] < errors[0] / 2.5
    assert scales[1] < scales[0] / 4


@each_scheme
@pytest.mark.parametrize("batch", (1, 3))
def test_crop_to_everywhere_and_grow_again(scheme: str, batch: int) -> None:
    first = Both(scheme, share=0.06)
    first.append(230, batch=batch)
    assert any(first.cache.late)
    for left in sorted({*range(0, 230, 23), *(t + d for row in first.cache.late for t in row for d in (0, 1))}):
        both = copy.deepcopy(first)
        both.crop(230 - left)
        both.append(1, step=True)
        both.append(3, step=True)
        both.crop(min(both.cache.columns, 2))
        both.append(70)
        both.append(1, step=True)
        both.append(60)


def test_rows_become_uneven_without_padding_and_even_again() -> None:
    keys, values = planted(2, 200, ((0, 10, 0.05), (0, 20, 0.05), (0, 30, 0.05)))
    cache = LayerCache(Scheme.parse(f"exact,{OPTIONS}"))
    cache.append(keys, values)
    assert cache.even and cache.late == ((10, 20, 30), ())
    cache.crop(200 - 35)  # 32 tokens of the second row are one block; in the first there are 30 of them
    assert not cache.even and cache.store.counts == [0, 1] and cache.late == ((), ())  # type: ignore[union-attr]
    cache.crop(0)
    with torch.no_grad():
        assert not cache.step(keys[:, :, 35:36], values[:, :, 35:36], cache.rows.extend(2, 1))
    for at in range(35, 200):
        view = cache.append(keys[:, :, at : at + 1], values[:, :, at : at + 1])
        assert_same(view, (keys[:, :, : at + 1], values[:, :, : at + 1]))
        attend_both(view, 2, seed=at)
    assert cache.even and cache.late == ((10, 20, 30), ())
    chosen = copy.deepcopy(cache)
    chosen.crop(200 - 35)
    chosen.select_rows(torch.tensor([1, 1]))
    assert chosen.even


@each_scheme
def test_left_padding(scheme: str) -> None:
    both = Both(scheme, share=0.05)
    text = torch.arange(150).expand(3, 150) >= torch.tensor([[0], [37], [110]])
    both.append(150, text, batch=3)
    for count in (1, 1, 40, 1, 90, 33):
        both.append(count)
    both.crop(100)
    both.append(120)
    both.crop(240)
    both.append(200)


@pytest.mark.parametrize("scheme", SCHEMES[:3])
def test_a_padded_row_finds_what_it_finds_alone(scheme: str) -> None:
    keys, values = tokens(2, 260, 3, share=0.03)
    text = torch.arange(260).expand(2, 260) >= torch.tensor([[0], [71]])
    keys[1, :, :71] = torch.nan
    together = LayerCache(Scheme.parse(scheme))
    together.append(keys, values, Rows().extend(2, 260, text))
    assert all(together.late)
    for row in range(2):
        alone = LayerCache(Scheme.parse(scheme))
        alone.append(keys[row : row + 1][:, :, text[row]], values[row : row + 1][:, :, text[row]])
        assert alone.late[0] == together.late[row]
        if "static" not in scheme:
            stored.assert_same(stored.row_of(alone, 0)[:3], stored.row_of(together, row)[:3])


@each_scheme
def test_beams(scheme: str) -> None:
    both = Both(scheme, share=0.05)
    both.append(130, batch=2)
    both.select([0, 0, 0, 1, 1, 1])
    for beams in ([0, 1, 1, 5, 4, 3], [2, 0, 0, 3, 3, 3], [1, 1, 2, 4, 4, 5]):
        for _ in range(4):
            both.append(9)
        both.select(beams)
    both.crop(150)
    both.select([4, 1])
    both.append(75)


@each_scheme
@pytest.mark.parametrize("count", (1, 40, 100))
@pytest.mark.parametrize("batch", (1, 2))
def test_undo_takes_back_what_was_found(scheme: str, count: int, batch: int) -> None:
    cache, twin = LayerCache(Scheme.parse(scheme)), LayerCache(Scheme.parse(scheme))
    for each in (cache, twin):
        for seed, columns in enumerate((60, 50)):
            each.append(*tokens(batch, columns, seed, share=0.05))
    before = cache.before()
    cache.append(*tokens(batch, count, 5, share=0.1))
    assert cache.undo(before)
    assert cache.late == twin.late and cache.held == twin.held
    assert_same(cache.view(), dense(twin.view()))
    for each in (cache, twin):
        for seed in (7, 8):
            each.append(*tokens(batch, 60, seed, share=0.05))
    assert cache.late == twin.late
    assert_same(cache.view(), dense(twin.view()))


def test_a_refused_append_changes_nothing() -> None:
    cache, twin = LayerCache(Scheme.parse(f"int4,{OPTIONS}")), LayerCache(Scheme.parse(f"int4,{OPTIONS}"))
    for each in (cache, twin):
        each.append(*tokens(2, 130, 0))
    keys, values = tokens(2, 100, 1)
    values[1, 0, 20, 3] = torch.nan
    with pytest.raises(ValueError, match="NaN, infinite"):
        cache.append(keys, values)
    assert cache.late == twin.late and cache.held == twin.held
    good = tokens(2, 100, 2)
    assert_same(cache.append(*good), dense(twin.append(*good)))
    assert cache.late == twin.late


def test_reset_forgets_them() -> None:
    cache = LayerCache(Scheme.parse(f"int4,{OPTIONS}"))
    cache.append(*tokens(2, 130, 0, share=0.1))
    assert any(cache.late)
    cache.reset()
    assert cache.late == () and cache.even
    cache.append(*tokens(3, 130, 0, share=0.0))
    assert cache.late == ((), (), ())


# -- transforms and kernels --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ("pre-rope", "centred", "pre-rope,centred"))
def test_transformed_keys_come_back(kind: str) -> None:
    """Packed exactly, what is taken off must be put back: to float32's rounding, also where rows are uneven."""
    rotary = Rotary(10000.0 ** -(torch.arange(0, CHANNELS, 2) / CHANNELS))
    cache = LayerCache(Scheme.parse(f"exact,{kind},{OPTIONS}"), rotary=rotary)
    given = []
    for seed, count in enumerate((150, 1, 40, 70)):
        given.append(tokens(2, count, seed, share=0.05))
        view = cache.append(*given[-1])
        attend_both(view, 3, seed)
    cache.crop(120)
    cache.append(*tokens(2, 90, 9))
    keys = torch.cat([torch.cat([k for k, _ in given], dim=2)[:, :, :141], tokens(2, 90, 9)[0]], dim=2)
    torch.testing.assert_close(dense(cache.view())[0], keys, rtol=1e-5, atol=1e-4)
    assert any(cache.late)


def test_rotated_keys_come_back() -> None:
    cache = LayerCache(Scheme.parse(f"rot4,{OPTIONS}"))
    keys, values = tokens(2, 200, 0, share=0.05)
    view = cache.append(keys, values)
    assert any(cache.late)
    assert float((dense(cache.view())[1] - values).norm() / values.norm()) < 0.15
    attend_both(view, 3)
    attend_both(cache.view(), 1)


@pytest.mark.parametrize("name", KERNEL_NAMES)
@pytest.mark.parametrize("scheme", ("int4", "kivi4", "k=fp8-static,v=fp8", "nf4", "hqq4", "exact"))
@pytest.mark.parametrize("padded", (False, True), ids=("whole", "padded"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_kernels_are_right(name: str, scheme: str, padded: bool, dtype: torch.dtype) -> None:
    cache = LayerCache(Scheme.parse(f"{scheme},{OPTIONS}"))
    text = torch.arange(200).expand(2, 200) >= torch.tensor([[0], [37]])
    keys, values = (x.to(dtype) for x in tokens(2, 200, 4, share=0.05, channels=64))
    cache.append(keys, values, Rows().extend(2, 200, text) if padded else None)
    assert all(cache.late)
    more = tuple(x.to(dtype) for x in tokens(2, 4, 5, channels=64))
    view = cache.append(*more)
    kernel = {"native": native, "reference": reference}[name]
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(2, 6, 4, 64, generator=generator).to(dtype)
    causal = torch.arange(204) <= torch.arange(200, 204)[:, None]
    holes = causal & (torch.rand(2, 1, 4, 204, generator=generator) < 0.7)
    bias = torch.randn(2, 6, 4, 204, generator=generator).masked_fill(~causal, -torch.inf).to(dtype)
    for mask in (None, holes, bias):
        if padded:
            if mask is None:
                continue
            valid = cache.rows.valid[:, None, None]  # type: ignore[index]
            mask = mask & valid if mask.dtype == torch.bool else mask.masked_fill(~valid, -torch.inf)
        call = Call(query, view, 0.125, mask=mask)
        assert not kernel.why_not(call)
        wide = dataclasses.replace(view, keys=view.keys.float(), values=view.values.float())
        right = right_attention(dataclasses.replace(call, view=wide))
        tolerance = 2e-2 if dtype == torch.bfloat16 else 2e-3
        torch.testing.assert_close(kernel.run(call).double(), right, rtol=tolerance, atol=tolerance)


# -- models ------------------------------------------------------------------------------------------------------------

LATE = "int8,residual=6,sinks=1+3,block=32"


@pytest.fixture(scope="module")
def llama() -> hf.PreTrainedModel:
    """In float64, with tokens 5, 6 and 7 whose keys are short: their embeddings point elsewhere."""
    model = zoo.build("llama", torch.float64)
    with torch.no_grad():
        for layer in model.model.layers:
            weight = layer.self_attn.k_proj.weight
            direction = torch.nn.functional.normalize(torch.randn(48, dtype=torch.float64), dim=0)
            weight -= (weight @ direction)[:, None] * direction
            for token in (5, 6, 7):
                model.model.embed_tokens.weight[token] += 40 * direction / len(model.model.layers)
    return model


MODES: dict[str, tuple[int, dict[str, Any]]] = {
    "greedy": (2, {}),
    "beams": (2, {"num_beams": 3}),
    "lookup": (1, {"prompt_lookup_num_tokens": 4, "eos_token_id": zoo.VOCABULARY + 1}),
    "chunks": (2, {"prefill_chunk_size": 12}),
}


@pytest.mark.parametrize("mode", MODES)
def test_generate(llama: hf.PreTrainedModel, mode: str, one_thread: None) -> None:
    """Lossless blocks give the stock tokens, whatever is late; with 8 bits the steps are those of a plain loop."""
    batch, options = MODES[mode]
    ids, mask = zoo.padded_prompt(batch, 60)
    ids[:, 20], ids[:, 41] = 5, 6
    if mode == "lookup":
        ids[:, 30:60] = ids[:, :30].clone()
    arguments = dict(attention_mask=mask, max_new_tokens=40, do_sample=False, **options)
    right = llama.generate(ids, **arguments)
    cache = kvbits.cache_for(llama, LATE.replace("int8", "exact"))
    got = llama.generate(ids, **arguments, **{cache_name(llama): cache})
    assert torch.equal(got, right)
    assert any(any(layer.core.late) for layer in cache.packed_layers)
    if mode != "greedy":
        kvbits.disable(llama)
        return
    cache, plain = kvbits.cache_for(llama, LATE), kvbits.cache_for(llama, LATE)
    got = llama.generate(ids, **arguments, **{cache_name(llama): cache})
    zoo.feed(llama, plain, got[:, :-1], mask, (60, *[1] * 39))
    for row in range(batch):
        core, twin = cache.packed_layers[0].core, plain.packed_layers[0].core
        assert core.late == twin.late
        a, b = stored.row_of(core, row), stored.row_of(twin, row)
        stored.assert_same((a[0], a[3]), (b[0], b[3]))
    kvbits.disable(llama)


def smollm2_text(tokenizer: Any, count: int) -> torch.Tensor:
    topics = pydoc_data.topics.topics
    text = "\n".join(topics[name] for name in ("assignment", "with", "yield"))
    ids: torch.Tensor = tokenizer(text, return_tensors="pt").input_ids[:, :count]
    return ids


def smollm2_logprobs(model: Any, ids: torch.Tensor, cache: hf.Cache) -> torch.Tensor:
    logits = []
    with torch.no_grad():
        model(input_ids=ids[:, :192], use_cache=True, **{cache_name(model): cache})
        for first in range(192, ids.shape[1], 32):
            new = ids[:, first : first + 32]
            logits.append(model(input_ids=new, use_cache=True, **{cache_name(model): cache}).logits)
    return torch.cat(logits, dim=1)[0].log_softmax(-1)


@pytest.mark.model
def test_smollm2_has_a_sink_that_is_found(smollm2: Any) -> None:
    """Without first sinks, its first token is a late one in most layers, and the text is read better for it."""
    model, tokenizer = smollm2
    ids = smollm2_text(tokenizer, 448)
    right = smollm2_logprobs(kvbits.disable(model), ids, hf.DynamicCache(config=model.config))
    divergence: dict[str, float] = {}
    for sinks in ("0", "0+4"):
        cache = kvbits.cache_for(model, f"int4,residual=32,block=32,sinks={sinks}")
        got = smollm2_logprobs(model, ids, cache)
        divergence[sinks] = float((right.exp() * (right - got)).sum(-1).double().mean())
        late = [layer.core.late[0] for layer in cache.packed_layers]
        if sinks == "0+4":
            assert sum(0 in row for row in late) >= 20
            assert sum(map(len, late)) <= 60  # hardly any other, of 30 layers
    kvbits.disable(model)
    assert divergence["0+4"] <= divergence["0"]
