"""``measure.quality``: its figures against a slow twin in float64, its guards, its files, and many kinds of models."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import signal
import subprocess
import sys
import textwrap
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import kvbits
import zoo
from kvbits.backends import instruction_set
from kvbits.hf.attach import attached
from kvbits.hf.cache import KVCache
from kvbits.hf.names import cache_name
from kvbits.measure import caches, exact, guards, memory, quality
from kvbits.measure.bits import bits_at, bits_per_element, elements
from kvbits.measure.divergence import Scores, divergence, log_probabilities
from kvbits.measure.results import Results
from kvbits.measure.text import prose
from kvbits.report.merge import NUMBERS
from loud import loud

pytestmark = pytest.mark.usefixtures("one_thread")

SCHEME = "int4,residual=16,block=32"
LENGTH, CHUNK = 150, 16
"""The last chunk has 6 tokens."""


@pytest.fixture(autouse=True)
def no_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before each peak all garbage is collected, which takes longer in a process of many tests than a tiny model."""
    monkeypatch.setattr(memory, "gc", types.SimpleNamespace(collect=lambda: None))


@pytest.fixture(scope="module")
def built() -> PreTrainedModel:
    return loud()


@pytest.fixture
def llama(built: PreTrainedModel) -> PreTrainedModel:
    return kvbits.disable(built)


def measure(model: Any, *schemes: str, **options: Any) -> dict[tuple[str, str], dict[str, Any]]:
    """Rows by scheme and regime; warnings are collected under ``options["tell"]``, or dropped."""
    given = {"chunk": CHUNK, "tell": lambda text: None, **options}
    ids = given.pop("ids", zoo.prompt(2, LENGTH))
    rows = quality.measure(model, ids, list(schemes), **given).rows
    return {(row["scheme"], row["regime"]): row for row in rows}


def refuse(*_: Any) -> None:
    """A report of progress that must not come."""
    raise AssertionError("something was measured")


# -- figures -----------------------------------------------------------------------------------------------------------


def slow(model: Any, name: str, ids: torch.Tensor, step: int) -> tuple[torch.Tensor, Any]:
    """Log probabilities of every token in float64, ``[W, T, V]``, and the last cache."""
    found = []
    for window in ids:
        cache, logits = caches.make(model, name), []
        for first in range(0, len(window), step):
            given = {"input_ids": window[None, first : first + step], cache_name(model): cache}
            with torch.no_grad():
                logits.append(model(**given, use_cache=True).logits[0].double())
        found.append(torch.cat(logits))
    x = torch.stack(found)
    return x - x.exp().sum(-1, keepdim=True).log(), cache


def twin(exact: torch.Tensor, found: torch.Tensor, ids: torch.Tensor) -> dict[str, float]:
    """The figures, spelled out one token at a time."""
    windows, length, vocabulary = found.shape
    kl, nll, change, same = [], [], [], 0
    for w in range(windows):
        for t in range(length):
            p, q = exact[w, t].tolist(), found[w, t].tolist()
            kl.append(math.fsum(math.exp(p[v]) * (p[v] - q[v]) for v in range(vocabulary)))
            same += p.index(max(p)) == q.index(max(q))
            if t + 1 < length:
                token = int(ids[w, t + 1])
                nll.append(-q[token])
                change.append(p[token] - q[token])

    def mean(values: list[float]) -> float:
        return math.fsum(values) / len(values)

    def error(values: list[float]) -> float:
        centre = mean(values)
        return math.sqrt(math.fsum((x - centre) ** 2 for x in values) / (len(values) - 1) / len(values))

    def quantile(values: list[float], share: float) -> float:
        ordered, place = sorted(values), share * (len(values) - 1)
        low = int(place)
        return ordered[low] + (place - low) * (ordered[min(low + 1, len(values) - 1)] - ordered[low])

    ppl = math.exp(mean(nll))
    return {
        "ppl": ppl, "ppl_se": ppl * error(nll), "nll_change": mean(change), "nll_change_se": error(change),
        "kl_mean": mean(kl), "kl_se": error([mean(kl[i * length : (i + 1) * length]) for i in range(windows)]),
        "kl_median": quantile(kl, 0.5), "kl_p999": quantile(kl, 0.999), "top1": same / len(kl),
    }  # fmt: skip


@pytest.mark.parametrize("name", (SCHEME, "small,residual=0,sinks=0", "hf:fp8", "exact", "hf:dynamic"))
def test_figures_are_those_of_a_slow_twin(llama: PreTrainedModel, name: str) -> None:
    ids = zoo.prompt(2, LENGTH)
    row = measure(llama, name, ids=ids)[name, "chunked"]
    reference, _ = slow(llama, "hf:dynamic", ids, CHUNK)
    found, cache = slow(llama, name, ids, LENGTH if name == "hf:dynamic" else CHUNK)
    want = twin(reference, found, ids)
    assert list(want) == list(row)[2:11], "a figure without a twin"
    if name == "hf:dynamic":  # perplexity is of the chunks; what differs from it in one piece is the noise floor
        want |= {name: value for name, value in twin(reference, reference, ids).items() if "kl" not in name}
    # Float32 sums over 128 tokens, of terms as large as the largest logarithm: some 1e-6 in nats.
    for figure, value in want.items():
        assert row[figure] == pytest.approx(value, rel=1e-4, abs=3e-6), figure
    if name not in ("exact", "hf:dynamic"):
        assert row["kl_mean"] > 1e-4 and row["kl_p999"] > row["kl_mean"] > row["kl_median"]
    assert row["kv_bytes"] == caches.nbytes(cache)
    kvbits.disable(llama)


def test_every_figure_is_documented_and_known_to_reports(llama: PreTrainedModel) -> None:
    row = measure(llama, SCHEME)[SCHEME, "chunked"]
    page = (Path(__file__).parents[2] / "docs" / "measure.md").read_text()
    table = page.partition("## The figures")[2].partition("**How to read them.**")[0]
    heads = "".join(line.split("|")[1] for line in table.splitlines() if line.startswith("|"))
    assert set(row) - {"scheme", "regime"} <= (named := set(re.findall(r"`(\w+)`", heads)))
    assert named - set(row) == {"missing", "error"}
    numbers = {name for name, value in row.items() if isinstance(value, (int, float))}
    assert numbers - NUMBERS == {"nll_change", "nll_change_se", "packed_layers"}, "reports do not read it"


def test_the_noise_floor_is_the_exact_cache_in_one_piece(llama: PreTrainedModel) -> None:
    rows = measure(llama, SCHEME, one_shot=True)
    floor, scheme = rows["hf:dynamic", "chunked"], rows[SCHEME, "chunked"]
    assert abs(floor["kl_mean"]) < 1e-6 < scheme["kl_mean"] / 1000 and floor["top1"] == 1
    # In one shot a scheme is as close to the exact cache as that is to itself: the regime measures nothing.
    flattered = rows[SCHEME, "one-shot"]
    assert flattered["kl_mean"] == floor["kl_mean"] and flattered["kv_bytes"] < floor["kv_bytes"]
    assert flattered["packed_share"] == 0 and flattered["warnings"] == [guards.ONE_SHOT]
    assert ("hf:dynamic", "one-shot") not in rows and len(rows) == 3


def test_divergence_by_hand() -> None:
    p, q = torch.tensor([0.5, 0.25, 0.25, 0.0]), torch.tensor([0.25, 0.25, 0.25, 0.25])
    assert float(divergence(p.log(), q.log())) == pytest.approx(0.5 * math.log(2))
    assert float(divergence(q.log(), p.log())) == math.inf  # what the exact run expects is ruled out
    assert torch.equal(divergence(p.log()[None], p.log()[None]), torch.zeros(1))
    assert log_probabilities(torch.ones(2, 4, dtype=torch.bfloat16)).dtype is torch.float32


def test_figures_that_are_no_numbers_are_none_with_a_reason() -> None:
    def scores(kl: list[float], nll: list[float]) -> Scores:
        return Scores([torch.tensor(nll).double()], [torch.tensor(kl).double()], [torch.ones(len(kl)).double()])

    good = scores([0.1, 0.2, 0.3], [1.0, 2.0])
    figures, missing = good.figures(good)
    assert figures["kl_se"] is None and missing == {"kl_se": "one window has no spread"}
    assert figures["kl_median"] == pytest.approx(0.2)
    figures, missing = scores([0.1, math.nan, 0.3], [math.nan, 2.0]).figures(good)
    assert len(figures) == 9 and set(figures.values()) == {None} and set(missing) == set(figures)
    assert missing["kl_mean"] == "the divergence of 1 of 3 tokens is no finite number"
    assert missing["ppl"] == "the surprise of 1 of 2 tokens is no finite number"
    figures, missing = scores([0.1, math.inf, 0.3], [1000.0, 1000.0]).figures(good)
    assert figures["top1"] == 1 and figures["kl_median"] == pytest.approx(0.3) and figures["kl_mean"] is None
    assert figures["ppl"] is None and missing["ppl"] == "too large for a number" and figures["nll_change"] == 998.5


# -- what it took ------------------------------------------------------------------------------------------------------


def test_real_bits_are_read_off_the_live_cache(llama: PreTrainedModel) -> None:
    rows = measure(llama, SCHEME, "hf:fp8", "exact")
    _, cache = slow(llama, SCHEME, zoo.prompt(1, LENGTH), CHUNK)
    count = 2 * 2 * 2 * 8 * LENGTH  # layers, K and V, heads, channels
    assert isinstance(cache, KVCache)
    row = rows[SCHEME, "chunked"]
    assert row["bits_per_element"] == cache.bits_per_element == 8 * row["kv_bytes"] / count
    assert rows["hf:dynamic", "chunked"]["bits_per_element"] == 32
    assert rows["hf:fp8", "chunked"]["bits_per_element"] == 8 * rows["hf:fp8", "chunked"]["kv_bytes"] / count < 9
    assert 32 < rows["exact", "chunked"]["bits_per_element"] < 40  # it has room to grow
    # head_dim 8: codes, scales and zeros in whole cache lines; 20 exact tokens of 8,000 and the last block
    assert row["bits_at_8000"] == bits_at(cache) and 8 < row["bits_at_8000"] < 9.5
    assert rows["exact", "chunked"]["bits_at_8000"] == 16 == rows["hf:dynamic", "chunked"]["bits_at_8000"]
    # one scale of 4 bytes for all keys, and one for all values, of a layer
    assert rows["hf:fp8", "chunked"]["bits_at_8000"] == 8 + 8 * 2 * 4 / (2 * 2 * 8 * 8000)
    kvbits.disable(llama)


def test_long_contexts_count_each_layer_as_it_is() -> None:
    """Gemma 4: some layers have a window, some share keys, and the full ones have fewer and wider heads."""
    model = zoo.build("gemma4")
    row = measure(model, f"{SCHEME},layers[1]=int8")[f"{SCHEME},layers[1]=int8", "chunked"]
    _, cache = slow(model, f"{SCHEME},layers[1]=int8", zoo.prompt(1, LENGTH), CHUNK)
    _, stock = slow(model, "hf:dynamic", zoo.prompt(1, LENGTH), CHUNK)
    assert isinstance(cache, KVCache)
    stored = [layer.core for layer in cache.packed_layers if layer.core.keys is not None]
    layers = [layer for layer in cache.packed_layers if layer.core.keys is not None]
    each = [bits_at(kvbits.hf.cache.KVCache([layer], cache.scheme, cache.columns, model)) for layer in layers]
    weights = [core.elements for core in stored]
    mean = sum(b * w for b, w in zip(each, weights, strict=True)) / sum(weights)
    assert row["bits_at_8000"] == pytest.approx(mean) and row["packed_layers"] == len(stored)
    assert bits_per_element(cache, elements(stock)) == row["bits_per_element"]


def test_the_peak_of_memory_is_of_the_block_alone() -> None:
    device = torch.device("cpu")
    with memory.peak_memory(device) as before:
        pass
    if before.nbytes is None:
        pytest.skip(before.what)
    with memory.peak_memory(device) as large:
        torch.ones(50_000_000)  # 200 MB, gone at once
    with memory.peak_memory(device) as after:
        torch.ones(1_000)
    assert large.nbytes is not None and after.nbytes is not None
    assert 195e6 < large.nbytes - before.nbytes < 230e6
    assert after.nbytes - before.nbytes < 20e6


def test_a_system_that_cannot_reset_its_peak_says_so(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_CLEAR_REFS", Path("/proc/no-such-file/clear_refs"))
    row = measure(llama, SCHEME)[SCHEME, "chunked"]
    assert row["peak_bytes"] is None and row["missing"] == {"peak_bytes": memory.UNKNOWN}


def test_on_cuda_the_peak_is_what_torch_has_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a stand-in for the device: the peak is reset first, and read after all that was given to do is done."""
    calls: list[str] = []
    fakes = {"synchronize": None, "empty_cache": None, "reset_peak_memory_stats": None, "max_memory_allocated": 12345}
    for name, result in fakes.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, n=name, r=result: (calls.append(n), r)[1])
    with memory.peak_memory(torch.device("cuda")) as peak:
        calls.append("run")
    assert peak.nbytes == 12345 and peak.what == memory.ON_CUDA
    assert calls == ["synchronize", "empty_cache", "reset_peak_memory_stats", "run", "max_memory_allocated"]


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_the_exact_logits_come_back_as_they_were(dtype: torch.dtype) -> None:
    logits = torch.randn(2, 10, 7, dtype=torch.float32).to(dtype)
    kept = exact.ExactLogits(2, 10)
    for window in logits:
        for piece in window.split(3):
            kept.write(piece)
    for window, first, last in ((1, 2, 9), (0, 0, 10), (0, 9, 10), (1, 0, 1)):
        assert torch.equal(kept.read(window, first, last), logits[window, first:last])
    kept.close()


def test_logits_that_the_disk_cannot_hold_are_refused(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact.shutil, "disk_usage", lambda folder: type("", (), {"free": 100_000})())
    with pytest.raises(ValueError, match=r"2 x 150 tokens over 128, need 0\.0 GB on disk.*fewer windows.*TMPDIR"):
        measure(llama, SCHEME)


# -- kinds of models ---------------------------------------------------------------------------------------------------

SLOW = {"falcon-mqa", "deepseek-v3"}
RUN = ("llama-mqa-d80", "llama-d256-eager", "qwen3", "gemma3", "gpt-oss", "gemma2-softcap", "falcon-mqa", "jamba",
       "deepseek-v3", "stablelm")  # fmt: skip


@pytest.mark.parametrize("family", RUN)
def test_many_families_are_measured(family: str) -> None:
    model = loud(family)
    told: list[str] = []
    rows = measure(model, SCHEME, "exact", "hf:fp8", tell=told.append)
    row = rows[SCHEME, "chunked"]
    assert not attached(model)
    assert 0 < row["kl_mean"] < 5 and row["packed_layers"] == sum(
        type(layer).__name__ == "PackedLayer" for layer in kvbits.cache_for(model, SCHEME).layers
    )
    assert abs(rows["exact", "chunked"]["kl_mean"]) < 1e-6
    if family in SLOW:
        assert row["kernel"] == "decoded" and any("2 layers ran on no fast kernel, decoded" in x for x in told)
    elif instruction_set():
        assert row["kernel"] == "kernel native" and not any("no fast kernel" in x for x in told)
    peer = rows["hf:fp8", "chunked"]
    if zoo.FAMILIES[family].stock_layers:  # peers refuse windows and states: a row, not a crash
        assert set(peer) == {"scheme", "regime", "error"} and peer["error"].startswith("ValueError: ")
        assert any(x.startswith("hf:fp8: ValueError") for x in told)
    else:
        assert peer["kl_mean"] > 0 and peer["kernel"] == "stock" and peer["packed_share"] is None


def test_a_model_of_windows_alone_has_nothing_to_measure() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        row = measure(zoo.build("mistral-window"), SCHEME)[SCHEME, "chunked"]
    assert "nothing was packed, so there is nothing to measure" in row["error"]


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_half_precision(dtype: torch.dtype) -> None:
    rows = measure(zoo.build("llama", dtype), SCHEME, "hf:fp8")
    floor, scheme = rows["hf:dynamic", "chunked"], rows[SCHEME, "chunked"]
    assert floor["bits_per_element"] == 16 and scheme["kl_mean"] > 2 * floor["kl_mean"] >= 0
    assert rows["hf:fp8", "chunked"]["kl_mean"] > 0


def test_a_broken_model_has_rows_without_figures(tmp_path: Path) -> None:
    model = zoo.build("llama")
    with torch.no_grad():
        model.lm_head.weight[3] = math.nan
    file = tmp_path / "out.json"
    row = measure(model, SCHEME, json=file)[SCHEME, "chunked"]
    assert row["kl_mean"] is None and row["ppl"] is None and row["kv_bytes"] > 0
    assert "of 300 tokens is no finite number" in row["missing"]["kl_mean"]
    assert "NaN" not in file.read_text()


def test_the_model_is_left_as_it_was(llama: PreTrainedModel) -> None:
    llama.train()
    measure(llama, SCHEME)
    assert llama.training and not attached(llama)
    kvbits.enable(llama.eval(), "int8")
    measure(llama, SCHEME, "hf:fp8")
    with torch.no_grad():
        assert str(llama(zoo.prompt(), use_cache=True)[cache_name(llama)].scheme) == "int8"
    kvbits.disable(llama)


def test_a_scheme_that_fails_is_a_row_and_the_next_is_measured(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no memory left")

    monkeypatch.setattr(kvbits.hf.layer.PackedLayer, "update", fail)
    seen: list[tuple[str, int, int]] = []
    rows = measure(
        llama, SCHEME, "int4,layers[5]=int8,residual=16,block=32", "hf:fp8", report=lambda *x: seen.append(x)
    )
    assert rows[SCHEME, "chunked"]["error"] == "RuntimeError: no memory left"
    assert "layers 0 to 1" in rows["int4,layers[5]=int8,residual=16,block=32", "chunked"]["error"]
    assert rows["hf:fp8", "chunked"]["kl_mean"] > 0
    done = [tokens for _, tokens, _ in seen]
    assert done == sorted(done) and done[-1] == seen[-1][2] == 5 * 2 * LENGTH  # exact, in one piece, three schemes
    assert {total for *_, total in seen} == {done[-1]}


def test_a_peer_without_its_library_is_a_row(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.cache_utils.is_hqq_available", lambda: False)
    assert "pip install hqq" in measure(llama, "hf:hqq4")["hf:hqq4", "chunked"]["error"]
    monkeypatch.delitem(sys.modules, "optimum.quanto", raising=False)  # another test may have loaded it
    monkeypatch.setitem(sys.modules, "optimum", None)
    assert caches.installed("hf:fp8") and caches.installed("int4") and not caches.installed("hf:quanto4")
    assert quality.default_schemes()[-1] != "hf:quanto4"


# -- what would be dishonest -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schemes", "options", "message"),
    [
        (("int5",), {}, "unknown scheme 'int5'"),
        (("hf:quanto5",), {}, r"unknown peer 'hf:quanto5'; did you mean 'hf:quanto"),
        (("nuq3-1%",), {}, "nuq3-1% needs a calibration"),
        ((SCHEME,), {"chunk": LENGTH}, "a chunk of 150 tokens holds a whole window of 150.*says nothing of the cache"),
        ((SCHEME,), {"chunk": 0}, "in chunks of 0 measure nothing"),
        ((), {"ids": zoo.prompt(1, 1), "chunk": 1}, "windows of 1 tokens in chunks of 1 measure nothing"),
        ((), {"ids": zoo.prompt(0, 10)}, r"token ids are int64 \[N, T\]"),
        ((), {"ids": zoo.prompt(1, 20) + 1000}, "they are another model's"),
        ((), {"ids": "text", "tokenizer": None}, "pass tokenizer="),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(
    llama: PreTrainedModel, schemes: Any, options: Any, message: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        measure(llama, *schemes, report=refuse, **options)


@pytest.mark.parametrize(
    ("scheme", "length", "chunk", "fits"),
    [
        ("int4", 260, 16, False),  # 4 + 128 + 128 tokens lie in the cache when the last chunk reads the last 4
        ("int4", 273, 16, True),
        ("int4", 272, 16, False),
        ("int4", 262, 1, True),
        ("int4", 260, 1, False),
        ("default", 209, 16, True),
        ("small,sinks=4+8", 209, 16, True),
        ("small,sinks=4+8", 208, 16, False),
        ("int4,residual=512", 600, 16, False),
        ("exact,layers[0]=int4", 200, 16, False),
        ("exact", 20, 16, True),
        ("hf:quanto4", 20, 16, True),
        (SCHEME, 65, 16, True),
        (SCHEME, 64, 16, False),
    ],
)
def test_a_scheme_that_would_pack_nothing_is_refused(scheme: str, length: int, chunk: int, fits: bool) -> None:
    if fits:
        guards.refuse_unpacked(scheme, length, chunk)
        return
    with pytest.raises(ValueError, match=r"would pack nothing that is read again.*Give a length of (\d+)") as refusal:
        guards.refuse_unpacked(scheme, length, chunk)
    words = str(refusal.value)
    least = int(words.partition("a length of ")[2].split()[0])
    guards.refuse_unpacked(scheme, least, chunk)
    guards.refuse_unpacked(words.rpartition("such as ")[2], length, chunk) if length > 90 else None


@pytest.mark.parametrize(("length", "chunk"), [(65, 16), (261, 20), (150, 7)])
def test_what_is_refused_and_what_is_packed_agree(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, length: int, chunk: int
) -> None:
    """The guard counts from the scheme alone; here it stands aside, and the blocks that were read are counted."""
    guard, schemes = guards.refuse_unpacked, [f"int4,residual={residual},block=32" for residual in range(0, length, 16)]
    monkeypatch.setattr(guards, "refuse_unpacked", lambda *_: None)
    rows = measure(llama, *schemes, ids=zoo.prompt(1, length), chunk=chunk)
    for scheme in schemes:
        row = rows[scheme, "chunked"]
        try:
            guard(scheme, length, chunk)
        except ValueError:
            assert "nothing was packed" in row["error"], scheme
        else:
            assert row["packed_share"] > 0, scheme


def test_the_share_of_packed_keys_is_counted_and_a_small_one_flagged(llama: PreTrainedModel) -> None:
    ids = zoo.prompt(2, 96)
    row = measure(llama, SCHEME, ids=ids)[SCHEME, "chunked"]
    # 4 sinks and 16 recent: 32 are packed once 52 are there, at 64; 64 once 84 are there, at 96. Two chunks see 32.
    share = 2 * 16 * 32 / (96 * 97 / 2)
    assert row["packed_share"] == pytest.approx(share) and len(row["warnings"]) == 1
    assert f"only {100 * share:.0f} % of the keys that queries attended to were packed" in row["warnings"][0]
    many = measure(llama, "int4,residual=0,sinks=0,block=32", ids=zoo.prompt(2, 320))
    (row,) = (row for (scheme, _), row in many.items() if scheme != "hf:dynamic")
    assert row["packed_share"] > 0.8 and row["warnings"] == []


def test_large_chunks_flatter_and_are_flagged(llama: PreTrainedModel) -> None:
    scheme = "int4,residual=0,sinks=0,block=32"
    ids = zoo.prompt(2, 320)
    small, large = (measure(llama, scheme, ids=ids, chunk=chunk)[scheme, "chunked"] for chunk in (16, 160))
    assert large["kl_mean"] < small["kl_mean"] and large["packed_share"] < 0.5 < small["packed_share"]
    assert "of the keys that queries attended to were packed" in large["warnings"][0]


def test_one_window_is_measured_with_a_warning(llama: PreTrainedModel) -> None:
    told: list[str] = []
    rows = measure(llama, SCHEME, ids=zoo.prompt(1, LENGTH), tell=told.append)
    row = rows[SCHEME, "chunked"]
    assert row["kl_se"] is None and row["missing"] == {"kl_se": "one window has no spread"}
    assert all(row["warnings"][0] == guards.ONE_WINDOW for row in rows.values())
    assert told.count(guards.ONE_WINDOW) == 1
    with pytest.warns(UserWarning, match="one window"):
        measure(llama, SCHEME, ids=zoo.prompt(1, LENGTH), tell=None)


def test_a_kernel_that_falls_back_is_flagged_with_the_reason(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    if instruction_set() is None:
        pytest.skip("the native kernels are not built here")
    native = next(kernel for kernel in kvbits.attend.KERNELS if kernel.name == "native")
    others = tuple(kernel for kernel in kvbits.attend.KERNELS if kernel.name != "native")
    broken = (dataclasses.replace(native, why_not=lambda call: ["the moon is full"]), *others)
    monkeypatch.setattr(kvbits.attend, "KERNELS", broken)
    row = measure(llama, SCHEME)[SCHEME, "chunked"]
    assert row["kernel"] == "kernel reference"
    assert any("2 layers ran on no fast kernel, kernel reference: " in x and "the moon is full" in x
               for x in row["warnings"])  # fmt: skip


# -- files -------------------------------------------------------------------------------------------------------------

FLEETING = {"seconds", "peak_bytes"}
NAMES = (SCHEME, "exact", "hf:fp8", "int8,residual=16,block=32")


def lasting(file: Path) -> dict[str, Any]:
    """What is in a file, but for what differs from run to run."""
    data = json.loads(file.read_text())
    for row in data["rows"]:
        assert all(row.pop(name) > 0 for name in FLEETING)
    return data


def test_a_killed_run_goes_on_and_ends_with_the_same_file(llama: PreTrainedModel, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole.json", tmp_path / "parts.json"
    program = f"""
        import os, signal, sys
        sys.path.insert(0, {str(Path(__file__).parents[1] / "support")!r})
        import torch
        import zoo
        from loud import loud
        from kvbits.measure import quality
        torch.set_num_threads(1)
        sys.argv = {sys.argv!r}

        def report(name, done, total):
            if name == "hf:fp8" and done % 300:
                os.kill(os.getpid(), signal.SIGKILL)

        ids = zoo.prompt(2, {LENGTH})
        quality.measure(loud(), ids, {NAMES!r}, chunk={CHUNK}, json={str(parts)!r}, report=report)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    before = json.loads(parts.read_text())["rows"]
    assert [row["scheme"] for row in before] == ["hf:dynamic", *NAMES[:2]]
    measured: set[str] = set()
    measure(llama, *NAMES, json=parts, report=lambda name, *_: measured.add(name))
    assert measured == {"hf:dynamic", *NAMES[2:]}  # the exact run once more: its logits are gone
    measure(llama, *NAMES, json=whole)
    assert json.loads(parts.read_text())["rows"][:3] == before
    assert lasting(parts) == lasting(whole)
    assert not list(tmp_path.glob("*.part")) and not list(tmp_path.glob(".*"))


def test_an_interrupted_run_keeps_what_is_finished(llama: PreTrainedModel, tmp_path: Path) -> None:
    file = tmp_path / "out.json"

    def report(name: str, done: int, total: int) -> None:
        if name == "exact":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(llama, SCHEME, "exact", json=file, report=report)
    assert [row["scheme"] for row in Results.load(file).rows] == ["hf:dynamic", SCHEME]
    assert not attached(llama)


def test_finished_rows_are_not_measured_again(llama: PreTrainedModel, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    first = measure(llama, SCHEME, "int4,layers[9]=int8,residual=16,block=32", json=file)
    assert "error" in first["int4,layers[9]=int8,residual=16,block=32", "chunked"]
    more = measure(llama, SCHEME, "exact", one_shot=True, json=file)  # other schemes and regimes go into the same file
    assert more[SCHEME, "chunked"] == first[SCHEME, "chunked"] and ("exact", "one-shot") in more
    assert measure(llama, SCHEME, "exact", one_shot=True, json=file, report=refuse) == more
    with pytest.raises(AssertionError, match="something was measured"):  # one that failed is tried again
        measure(llama, "int4,layers[9]=int8,residual=16,block=32", json=file, report=refuse)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunk": 15}, "chunk=16, not 15"),
        ({"ids": zoo.prompt(3, LENGTH)}, "windows=2, not 3"),
        ({"ids": zoo.prompt(2, LENGTH, seed=2)}, "tokens_sha256="),
        ({"about": {"text": "another.txt"}}, "text=None, not 'another.txt'"),
    ],
)
def test_another_setting_is_refused(llama: PreTrainedModel, tmp_path: Path, change: Any, message: str) -> None:
    file = tmp_path / "out.json"
    Results("quality", measured_setting(llama, tmp_path)).save(file)
    with pytest.raises(ValueError, match=f"was measured with {message}"):
        measure(llama, SCHEME, json=file, **change)


def measured_setting(model: Any, folder: Path) -> dict[str, Any]:
    file = folder / "first.json"
    measure(model, "exact", json=file)
    return Results.load(file).setting


def test_another_model_of_the_same_shape_is_refused(llama: PreTrainedModel, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    measure(llama, "exact", json=file)
    other = zoo.build("llama")
    with torch.no_grad():
        other.lm_head.weight.mul_(1.5)
    with pytest.raises(ValueError, match="was measured with weights_sha256="):
        measure(other, "exact", json=file)


def test_a_calibration_is_checked_before_anything_runs(llama: PreTrainedModel) -> None:
    found = kvbits.calibrate(llama, zoo.prompt(2, 160), "nuq3")
    with pytest.raises(ValueError, match="not for this model"):
        measure(zoo.build("qwen2"), "nuq3,residual=16,block=32", calibration=found, report=refuse)
    row = measure(llama, "nuq3,residual=16,block=32", calibration=found)["nuq3,residual=16,block=32", "chunked"]
    assert 0 < row["kl_mean"] < 2


# -- peers -------------------------------------------------------------------------------------------------------------


@pytest.mark.parity
@pytest.mark.parametrize("name", [peer for peer in caches.PEERS if peer != "hf:fp8"])
def test_peers_with_libraries_are_measured(name: str) -> None:
    """Of hqq below 8 bits, an even number of tokens: see :data:`kvbits.measure.caches.PEERS`."""
    model = zoo.build("llama", head_dim=64)
    row = measure(model, name, ids=zoo.prompt(2, 160))[name, "chunked"]
    assert 0 < row["kl_mean"] < 5 and row["kv_bytes"] < measure(model)["hf:dynamic", "chunked"]["kv_bytes"]


# -- a real model ------------------------------------------------------------------------------------------------------


@pytest.mark.model
def test_a_real_model(smollm2: Any) -> None:
    model, tokenizer = smollm2
    scheme, kept = "small,residual=16,block=32", "kv_bytes"
    options = {"tokenizer": tokenizer, "windows": 2, "length": 96, "tell": lambda text: None}
    results = quality.measure(model, prose(8000), [scheme], **options)
    floor, row = results.rows
    assert abs(floor["kl_mean"]) < 1e-6 < 1e-4 < row["kl_mean"] < 0.1 and floor["top1"] == 1 >= row["top1"] > 0.8
    assert row[kept] < floor[kept] == 2 * 30 * 3 * 64 * 4 * 96
    assert 2.2 < row["bits_at_8000"] < 2.5 and row["packed_layers"] == 30
    assert results.setting["placement"] == "spread" and results.setting["parameters"] > 1e8
