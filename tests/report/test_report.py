"""Reports: what is merged, which scheme is named and why, and pages that hold whatever a file of results may hold."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
import sys
import warnings
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvbits import report
from kvbits.cli import app
from kvbits.measure.results import Results
from kvbits.report import Report, Rule, merge, page, tables, words
from kvbits.report.choose import front
from kvbits.report.drawing import Drawing, drawn, png, svg
from kvbits.report.hero import others
from kvbits.report.markup import data, tag
from kvbits.report.palette import DARK, LIGHT
from kvbits.report.pictures import against_context, files, heat_maps
from kvbits.report.plane import TIP
from kvbits.report.scatter import NARROW, scatter

if TYPE_CHECKING:
    from browser import Page

Row = dict[str, Any]

HOSTILE = "</script><script>hacked=1</script><img src=x onerror=hacked=1>\"'`|\n# *_[a](b)_* & $x^2$ \ud800 \u202e漢"


def setting(**more: Any) -> Row:
    machine = {"processor": "A processor", "cores": 2, "device": "cpu", "instructions": "avx2"}
    versions = {"date": "2026-11-30", "kvbits": "0.1.0", "torch": "2.13.0", "command": "kvbits eval"}
    return {"model": "a model", "dtype": "float32", **machine, **versions, **more}


def quality_row(scheme: str, bits: float | None, kl: float | None, top1: float | None = 0.98, **more: Any) -> Row:
    figures = {"kl_mean": kl, "kl_se": kl and kl / 4, "top1": top1, "ppl": 23.2, "ppl_se": 1.1}
    return {"scheme": scheme, "bits_at_8000": bits, "bits_per_element": bits and bits + 6, **figures, **more}


SCHEMES = {
    "hf:dynamic": (32.0, 1e-9, 1.0),
    "int8": (8.9, 2e-5, 0.998),
    "kivi4": (5.4, 0.0017, 0.985),
    "default": (4.54, 0.0016, 0.983),
    "int3": (3.9, 0.038, 0.915),
    "small": (2.6, 0.044, 0.912),
    "int2": (2.9, 1.03, 0.56),
}


def quality(rows: Sequence[Row] | None = None, **more: Any) -> Results:
    rows = [quality_row(name, *figures) for name, figures in SCHEMES.items()] if rows is None else rows
    return Results("quality", setting(**{"text": "A text", "windows": 4, "length": 1024, **more}), list(rows))


def speed_row(scheme: str, context: int, ratio: float | None, **more: Any) -> Row:
    place = {"weights": "none", "dtype": "float32", "batch": 1, "context": context}
    figures = {"step_ms": 50.0, "speed_against_exact": ratio, "kv_bytes": 1000 * context}
    return {"scheme": scheme, **place, **figures, **more}


def speed(ratios: dict[str, float], contexts: Sequence[int] = (512, 8192), **more: Any) -> Results:
    rows = [
        speed_row(scheme, context, 1.0 if scheme == "hf:dynamic" else ratio * (0.5 + context / max(contexts) / 2))
        for context in contexts
        for scheme, ratio in ratios.items()
    ]
    return Results("speed", setting(**more), rows)


def retrieval(accuracies: dict[str, float], **more: Any) -> Results:
    rows = [
        {"scheme": scheme, "task": "passkey", "length": length, "depth": depth, "repeats": 5, "accuracy": accuracy}
        for scheme, accuracy in accuracies.items()
        for length in (512, 2048)
        for depth in (0.0, 0.5, 1.0)
    ]
    return Results("retrieval", setting(**more), rows)


def tasks(found: dict[str, tuple[float, int, int]], **more: Any) -> Results:
    rows = [
        {"scheme": scheme, "task": "piqa", "metric": "acc", "value": 0.6, "p_value": p, "wins": wins, "losses": losses}
        for scheme, (p, wins, losses) in found.items()
    ]
    return Results("tasks", setting(**more), rows)


def everything() -> list[Results]:
    """One model, measured in all four ways."""
    return [
        quality(),
        speed({"hf:dynamic": 1.0, "default": 1.6, "kivi4": 1.7, "small": 1.5, "int8": 1.2}),
        retrieval({"hf:dynamic": 1.0, "default": 0.98, "small": 0.7}),
        tasks({"default": (0.7, 5, 6), "small": (0.001, 2, 30)}),
    ]


def built(*results: Results, rule: Rule | None = None) -> Report:
    return report.build([(f"{place}.json", one) for place, one in enumerate(results)], rule)


def html_of(made: Report) -> str:
    return page.page(made.models, made.choices, made.rule, made.data)


def saved(folder: Path, *results: Results) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    return [one.save(folder / f"{place}.json") for place, one in enumerate(results)]


# -- merging ---------------------------------------------------------------------------------------------------------


def test_files_of_one_setting_are_one_run_and_the_later_row_counts() -> None:
    early = quality([quality_row("int4", 4.9, 0.5), quality_row("fp8", 8.5, 0.001)], date="2026-01-01", torch="2.6")
    late = quality([quality_row("int4", 4.9, 0.25)], date="2026-02-01", torch="2.7")
    for order in ([early, late], [late, early]):
        (one,) = merge.merge([("a.json", order[0]), ("b.json", order[1])])
        (run,) = one.all_runs
        assert {row["scheme"]: row["kl_mean"] for row in run.rows} == {"int4": 0.25, "fp8": 0.001}
        assert [row["kl_mean"] for row in run.replaced] == [0.5]
        assert run.varying == {"torch": ["2.6", "2.7"]} and run.setting["text"] == "A text"
        assert run.dates == ["2026-01-01", "2026-02-01"]
    said = html_of(built(early, late))
    assert "rows differ in torch: 2.6 and 2.7" in said and "1 measured again later" in said


def test_the_later_row_counts_by_its_own_date_then_that_of_its_file_then_the_order_given() -> None:
    first, second = (quality([quality_row("int4", 4.9, kl)]) for kl in (0.5, 0.25))
    dated = [quality_row("int4", 4.9, 0.25, date="2026-03-01"), quality_row("int4", 4.9, 0.5, date="2026-01-01")]
    for results, source in (((first, second), "1.json"), ((quality(dated, date="2026-02-01"),), "0.json")):
        (row,) = built(*results).models[0].all_runs[0].rows
        assert row["kl_mean"] == 0.25 and row["source"] == source


def test_a_failure_never_takes_the_place_of_figures() -> None:
    good = quality([quality_row("int4", 4.9, 0.25, error=None)], date="2026-02-01")
    for failed_on in ("2026-01-01", "2026-03-01"):
        made = built(good, quality([{"scheme": "int4", "error": "out of memory"}], date=failed_on))
        (run,) = made.models[0].all_runs
        assert [row["kl_mean"] for row in run.rows] == [0.25] and run.failures == [] and taken(made) is None
        assert [row.get("error") for row in run.replaced] == ["out of memory"]


def test_what_bears_on_figures_keeps_runs_apart() -> None:
    for field in ("text", "length", "chunk", "dtype"):
        made = built(quality(), quality(**{field: "another"}))
        assert len(made.models[0].runs["quality"]) == 2, field
        assert f"{field}: another" in html_of(made)


def test_machines_are_kept_apart_for_speed_alone() -> None:
    ratios = {"hf:dynamic": 1.0, "default": 1.5}
    other = {"processor": "Another", "cores": 64}
    made = built(quality(), quality([quality_row("fp8", 8.5, 0.001)], **other), speed(ratios), speed(ratios, **other))
    assert {kind: len(runs) for kind, runs in made.models[0].runs.items()} == {"quality": 1, "speed": 2}
    text = html_of(made)
    assert "rows differ in processor: A processor and Another" in text and "processor: Another, cores: 64" in text


def test_what_rows_say_of_themselves_keeps_nothing_apart() -> None:
    parts = [speed({"hf:dynamic": 1.0}, (context,)) for context in (512, 8192)]
    for part in parts:
        part.setting["contexts"] = [part.rows[0]["context"]]
    made = built(*parts)
    (run,) = made.models[0].all_runs
    assert [row["context"] for row in run.rows] == [512, 8192] and run.varying == {}


def test_a_calibration_bears_only_on_the_schemes_that_take_one() -> None:
    names = ("int4", "nuq3-1%", "default")
    parts = []
    for place, digest in enumerate((None, "a" * 64, "b" * 64)):
        rows = [quality_row(name, 4.0, 0.001 * (place + 1)) for name in names if digest or name != "nuq3-1%"]
        parts.append(quality(rows, calibration_sha256=digest, date=f"2026-01-0{place + 1}"))
    made = built(*parts)
    (run,) = made.models[0].all_runs
    found = [(row["scheme"], str(row.get("calibration"))[:4], row["kl_mean"]) for row in run.rows]
    assert sorted(found) == [
        ("default", "None", 0.001), ("default", "aaaa", 0.002), ("default", "bbbb", 0.003),
        ("int4", "None", 0.003),
        ("nuq3-1%", "aaaa", 0.002), ("nuq3-1%", "bbbb", 0.003),
    ]  # fmt: skip
    assert "aaaaaaaa</td>" in html_of(made)


def test_remarks_are_said_once_with_all_they_are_about() -> None:
    rows = [quality_row(f"int{bits}", bits, 0.1, warnings=["one window"]) for bits in range(2, 9)]
    rows[0] |= {"missing": {"peak_bytes": "no /proc"}, "advice": "take more samples"}
    rows.append({"scheme": "hf:hqq4", "error": "hqq is not installed"})
    remarks = tables.remarks(built(quality(rows)).models[0])
    assert remarks == [
        ("quality of hf:hqq4", "failed: hqq is not installed"),
        ("quality of int2, int3, int4 and 4 more", "one window"),
        ("quality of int2", "take more samples"),
        ("quality of int2", "no peak_bytes: no /proc"),
    ]


def test_what_is_of_single_samples_is_in_the_json_and_not_on_the_page(tmp_path: Path) -> None:
    rows = tasks({"default": (0.7, 5, 6)})
    rows.rows[0]["scores"] = "01" * 500
    report.write(saved(tmp_path, quality(), rows), tmp_path / "out", pictures=False)
    assert "0101" in (tmp_path / "out" / "report.json").read_text()
    assert "0101" not in (tmp_path / "out" / "index.html").read_text()


def test_models_stay_apart_and_the_widest_run_is_the_main_one() -> None:
    few = quality([quality_row("int4", 4.9, 0.25)], text="Another text", date="2027-01-01")
    made = built(few, quality(), quality(model="org/second"))
    assert [one.model for one in made.models] == ["a model", "org/second"]
    main = made.models[0].main("quality")
    assert main is not None and len(main.rows) == len(SCHEMES)
    assert made.models[0].main("speed") is None


def test_schemes_measured_on_another_text_are_named_as_left_out() -> None:
    other = quality([quality_row("int8", 4.9, 0.25), quality_row("kivi2", 2.3, 1e-6)], text="Another text")
    (choice,) = built(quality(), other).choices
    assert choice.take and choice.take.scheme == "default"
    assert "Not in the choice, since measured on another text or in another setting: kivi2." in choice.caveats
    assert not any("Not in the choice" in text for text in built(quality()).choices[0].caveats)


def test_a_report_goes_on_from_its_own_json(tmp_path: Path) -> None:
    paths = saved(tmp_path / "in", *everything(), quality([quality_row("int8", 9.0, 0.5)], date="2026-01-01"))
    first = report.write(paths, tmp_path / "out", pictures=False)
    text = (tmp_path / "out" / "report.json").read_text()
    again = report.write([tmp_path / "out" / "report.json"], tmp_path / "again", pictures=False)
    assert (tmp_path / "again" / "report.json").read_text() == text and again.data == first.data
    # Both together say nothing twice.
    report.write([*paths, tmp_path / "out" / "report.json"], tmp_path / "both", pictures=False)
    both = json.loads((tmp_path / "both" / "report.json").read_text())
    for one, other in zip(both["models"], json.loads(text)["models"], strict=True):
        assert one["schemes"] == other["schemes"]
        counts = [[(len(run["rows"]), len(run["replaced"])) for run in x["runs"]] for x in (one, other)]
        assert counts[0] == counts[1] == [(7, 1), (6 * 3, 0), (2, 0), (10, 0)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"format": 1, "kind": "quality", "setting": {}, "rows": [{"scheme": "x", "ppl": NaN}]}', "'ppl' is nan"),
        ('{"format": 1, "kind": "quality", "setting": {}, "rows": [{"scheme": "x", "ppl": 1e999}]}', "'ppl' is inf"),
        ('{"format": 1, "kind": "quality", "setting": {"a": [-Infinity]}, "rows": []}', "the setting's 'a' is -inf"),
        ('{"format": 1, "kind": "quality", "setting": {}, "rows": [{"scheme": "x", "a": {"b": NaN}}]}', "'a' is nan"),
        ('{"format": 1, "kind": "quality", "setting": {}, "rows": [{"scheme": "x", "top1": "high"}]}', "not a number"),
        ('{"format": 1, "kind": "quality", "setting": {}, "rows": [{"scheme": "x", "top1": true}]}', "not a number"),
        ('{"format": 1, "kind": "quality", "setting": {}, "rows": [{"ppl": 1}]}', "row 1 names no scheme"),
        ('{"format": 1, "kind": "speed", "setting": {}, "rows": [{"scheme": "x", "context": 1%s}]}', "must be finite"),
        ('{"format": 1, "kind": "taste", "setting": {}, "rows": []}', "'taste' is no kind of results"),
        ('{"format": 9, "kind": "quality", "setting": {}, "rows": []}', "update kvbits"),
        ('{"format": 9, "kind": "report", "models": []}', "update kvbits"),
        ('{"format": 1, "kind": "report", "models": [{}]}', "damaged report"),
        ('{"format": 1, "kind": "report", "models": 3}', "damaged report"),
        ('{"rows": []}', "no file of results"),
        ("[", "damaged"),
        ("\udcff", "damaged"),
    ],
)
def test_a_file_that_is_wrong_is_refused_with_its_name(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.json"
    path.write_bytes((text % ("0" * 400) if "%s" in text else text).encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        report.write([path], tmp_path / "out", pictures=False)
    assert "wrong.json" in str(caught.value)
    assert not (tmp_path / "out").exists()


# -- the front -------------------------------------------------------------------------------------------------------

near = st.integers(0, 6).map(float)


@given(st.lists(st.tuples(near, near), max_size=30))
def test_the_front_is_what_no_other_beats(points: list[tuple[float, float]]) -> None:
    def beaten(point: tuple[float, float]) -> bool:
        return any(a <= point[0] and b <= point[1] and (a, b) != point for a, b in points)

    assert sorted(front(points)) == [place for place, point in enumerate(points) if not beaten(point)]
    assert [points[place] for place in front(points)] == sorted(points[place] for place in front(points))


# -- the rule --------------------------------------------------------------------------------------------------------


def taken(made: Report) -> str | None:
    (choice,) = made.choices
    return choice.take.scheme if choice.take else None


def test_the_fewest_bits_that_are_good_enough_are_taken() -> None:
    made = built(*everything())
    (choice,) = made.choices
    assert taken(made) == "default" and choice.caveats == [] and choice.missing == []
    assert choice.closest is choice.of("int8") and choice.smallest is choice.of("small")
    assert {one.scheme for one in choice.standings if one.front} == {"int8", "default", "int3", "small"}
    assert set(choice.of("small").failed) == {"KL", "token", "retrieval", "tasks"}
    assert choice.of("hf:dynamic").failed == {} and choice.standings[0].exact


def test_limits_move_the_choice() -> None:
    for rule, name in (
        (Rule(max_kl=0.0015), "int8"),
        (Rule(max_kl=0.05, min_top1=0.9), "small"),
        (Rule(max_kl=0.05), "default"),
        (Rule(min_top1=0.99), "int8"),
        (Rule(max_kl=1e-6), None),
    ):
        assert taken(built(quality(), rule=rule)) == name, rule
    for limit in ({"max_kl": -1.0}, {"min_top1": 1.5}, {"min_speed": math.nan}, {"max_lost": -0.1}):
        with pytest.raises(ValueError, match=next(iter(limit))):
            Rule(**limit)


def test_each_condition_alone_keeps_a_scheme_out() -> None:
    ratios = {"hf:dynamic": 1.0, "default": 0.9, "kivi4": 1.2, "int8": 1.0}
    for more, name in (
        ([], "default"),
        ([speed(ratios)], "kivi4"),
        ([retrieval({"hf:dynamic": 0.9, "default": 0.6})], "kivi4"),  # of 30 prompts: 75 % at most
        ([retrieval({"hf:dynamic": 0.9, "default": 0.8})], "default"),  # 90 % at most
        ([retrieval({"default": 0.1})], "default"),  # no exact cache to compare with
        ([tasks({"default": (0.001, 1, 20)})], "kivi4"),
        ([tasks({"default": (0.001, 20, 1)})], "default"),  # it wins
        ([tasks({"default": (0.04, 1, 9)})], "default"),
    ):
        made = built(quality(), *more)
        assert taken(made) == name, more
        assert (name == "default") != bool(made.choices[0].of("default").failed)


def test_the_longest_context_of_the_main_combination_decides_on_speed() -> None:
    fast = speed({"hf:dynamic": 1.0, "default": 1.2}, (512, 8192, 2048))
    fast.rows += [speed_row("default", 32768, None), speed_row("default", 65536, 0.1, batch=8)]
    (choice,) = built(quality(), fast).choices
    assert choice.of("default").speed == pytest.approx(1.2)
    row = choice.of("default").speed_row
    assert row is not None and row["context"] == 8192


def test_slow_schemes_are_named_where_all_are_slow_and_the_page_says_so() -> None:
    made = built(quality(), speed({"hf:dynamic": 1.0, **dict.fromkeys(("default", "kivi4", "int8"), 0.6)}))
    assert taken(made) == "default"
    assert "this one is at 0.60×" in made.choices[0].caveats[0] and "this one is at 0.60×" in html_of(made)


def test_what_was_measured_with_a_warning_comes_last() -> None:
    rows = [
        quality_row("default", 4.5, 0.001, warnings=["the residual covers the window"]),
        quality_row("fp8", 8, 0.001),
    ]
    assert taken(built(quality(rows))) == "fp8"
    made = built(quality(rows[:1]))
    assert taken(made) == "default" and made.choices[0].caveats == [
        "Measured with a warning: the residual covers the window"
    ]


def test_least_memory_is_less_than_what_is_shown() -> None:
    """The smaller one was measured with a warning, and comes last; the larger one is no answer to scarce memory."""
    rows = [
        quality_row("int4", 5.4, 0.0005, 0.95, warnings=["few were packed"]),
        quality_row("hf:fp8", 8.0, 0.0006, 0.91),
    ]
    (choice,) = built(quality(rows)).choices
    assert choice.closest and choice.closest.scheme == "int4" and choice.smallest and choice.smallest.scheme == "hf:fp8"
    assert others(choice) == [] and choice.caveats == ["Measured with a warning: few were packed"]
    (choice,) = built(quality()).choices
    assert [(what, one.scheme) for what, one in others(choice)] == [
        ("Closest to exact", "int8"),
        ("Least memory", "small"),
    ]


def test_schemes_of_the_flattering_regime_are_not_in_the_choice() -> None:
    made = built(quality([quality_row("int2", 2.5, 1e-9, regime="one-shot"), quality_row("int4", 5.0, 0.005)]))
    assert taken(made) == "int4" and made.choices[0].of("int2").point is None
    assert "flattering, and not for comparison" in html_of(made)


@pytest.mark.parametrize(
    ("results", "why", "missing"),
    [
        ([speed({"hf:dynamic": 1.0, "int4": 2.0})], "Quality was not measured", ["quality", "retrieval", "tasks"]),
        ([quality([{"scheme": "int4", "error": "no"}])], "all failed", ["retrieval", "tasks", "speed"]),
        ([quality([quality_row("hf:dynamic", 16, 0)])], "Only the exact cache", ["retrieval", "tasks", "speed"]),
        ([quality([quality_row("int4", None, 0.1)])], "both its KL and its bits", ["retrieval", "tasks", "speed"]),
        ([quality([])], "No scheme has", ["retrieval", "tasks", "speed"]),
        ([quality([quality_row("int2", 2.5, 1.0, 0.5)])], "The closest is int2: KL 1.00 > 0.01", None),
    ],
)
def test_without_data_nothing_is_recommended_and_the_page_says_why(
    results: list[Results], why: str, missing: list[str] | None
) -> None:
    made = built(*results)
    (choice,) = made.choices
    assert choice.take is None and why in choice.why
    assert missing is None or choice.missing == missing
    text = html_of(made)
    assert "No recommendation" in text and tag("p", choice.why)[3:-4] in text
    assert all(sheet.drawings for _, _, sheet in files(made.models, made.choices, made.rule))


def test_one_scheme_is_enough_and_none_is_an_error() -> None:
    made = built(quality([quality_row("default", 4.5, 0.001)]))
    assert taken(made) == "default"
    assert made.choices[0].missing == ["retrieval", "tasks", "speed"]
    assert html_of(made).count("not measured") >= 3
    with pytest.raises(ValueError, match="no results"):
        report.build([])


def test_bits_are_those_at_8000_tokens_if_half_of_the_schemes_have_them() -> None:
    peers = [quality_row(f"hf:{name}", None, 0.1) | {"bits_per_element": 5.0} for name in ("quanto4", "hqq4")]
    exact = quality_row("hf:dynamic", None, 1e-9) | {"bits_per_element": 32.0}
    (few,) = built(quality([exact, quality_row("default", 4.5, 0.001), *peers])).choices
    assert few.bits_field == "bits_per_element" and few.of("default").bits == 10.5 and few.of("hf:dynamic").bits == 32
    made = built(quality([exact, quality_row("default", 4.5, 0.001), peers[0]]))
    assert made.choices[0].bits_field == "bits_at_8000" and made.choices[0].of("hf:quanto4").point is None
    # What is exact counts 16 bits there, in the exact cache too: 32 would flatter all others.
    assert made.choices[0].of("hf:dynamic").bits == 16
    text = html_of(made)
    assert "3.6 times smaller than the exact cache" in text and "the exact cache has 16" in text
    assert "bits at 8,000 tokens are not known: hf:quanto4." in text
    assert "The same against bits as measured" in text and ">hf:quanto4\n5.00 bits" in text
    assert "KL is that of windows of 1,024 tokens, bits are those of 8,000." in text
    assert "The exact cache against itself: 1.0e-9." in text


# -- figures in words ------------------------------------------------------------------------------------------------


def test_figures_in_words() -> None:
    for shown, text in (
        (words.small(0.0016512), "0.00165"),
        (words.small(1.0), "1.00"),
        (words.small(0.0), "0"),
        (words.small(6.7e-10), "6.7e-10"),
        (words.small(-3e-9), "-3.0e-9"),
        (words.small_spread(0.0016512, 0.0004), "0.00165 ± 0.00040"),
        (words.small_spread(2e-5, 1e-6), "2.0e-5"),
        (words.spread(23.237, 1.115, 2), "23.24 ± 1.11"),
        (words.size(5898240), "5.9 MB"),
        (words.size(368.6e6), "369 MB"),
        (words.size(512), "512 B"),
        (words.percent(0.98291), "98.3 %"),
        (words.whole(None), "–"),
        (words.plain([1, "a", {"b": None}]), "1, a, b: –"),
        (words.listed(["a", "b", "c"]), "a, b and c"),
        (words.listed([]), ""),
    ):
        assert shown == text


# -- pictures --------------------------------------------------------------------------------------------------------


def drawings(made: Report) -> list[Drawing]:
    (choice,) = made.choices
    found = [scatter(choice, made.rule), scatter(choice, made.rule, NARROW)]
    for run in made.models[0].all_runs:
        if run.kind == "speed":
            found += against_context(run, choice)
        if run.kind == "retrieval":
            found += [drawing for _, maps in heat_maps(run, choice) for drawing in maps]
    return [drawing for drawing in found if drawing is not None]


def painted(drawing: Drawing) -> Any:
    """The plane of a drawing, alone."""
    pytest.importorskip("matplotlib", reason="pictures need Matplotlib")
    figure = drawn(drawing.width, drawing.height, [(drawing, (0, 0))])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a sign that the font lacks
        figure.draw_without_rendering()
    return figure.axes[0]


def tips(axes: Any) -> list[tuple[str, Any]]:
    """Marks and cells that say something on pointing at them."""
    named = [(mark.get_gid() or "", mark) for mark in (*axes.collections, *axes.patches)]
    return [(unquote(gid.removeprefix(TIP)), mark) for gid, mark in named if gid.startswith(TIP)]


def dots(drawing: Drawing) -> dict[str, tuple[float, float, bool]]:
    """Of each scheme that says what it is: pixels from the left and from below, and whether its mark is hollow."""
    axes = painted(drawing)
    found = {}
    for tip, mark in tips(axes):
        (place,) = axes.transData.transform(mark.get_offsets())
        found[tip.partition("\n")[0]] = (*map(float, place), mark.get_facecolor()[0].tolist()[:3] == [1, 1, 1])
    return found


def many(count: int, seed: int) -> list[Results]:
    draw = random.Random(seed)
    names = [f"scheme-{place},sinks={draw.randrange(10 ** draw.randrange(1, 12))}" for place in range(count)]
    rows = [quality_row(name, draw.uniform(2, 9), 10 ** draw.uniform(-6, 1), draw.random()) for name in names]
    ratios = {name: draw.uniform(0.3, 4) for name in names}
    return [quality(rows), speed(ratios, (128, 512, 4096, 32768)), retrieval({name: draw.random() for name in names})]


@pytest.mark.parametrize("count", [1, 2, 12, 300])
def test_marks_stay_inside_and_names_do_not_touch(count: int) -> None:
    found = drawings(built(*many(count, seed=count)))
    for drawing in found[:4] + found[-3:]:
        axes = painted(drawing)
        texts = [*axes.texts, *(axes.get_legend().get_texts() if axes.get_legend() else [])]
        for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, sorted(axes.get_ylim()))):
            ticks = [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
            assert len(ticks) >= 2 or "Retrieval" in drawing.title, drawing
            texts += ticks
        for text in texts:
            box = text.get_window_extent()
            assert box.x0 >= -9 and box.x1 <= drawing.width + 9 and box.y0 >= 0 and box.y1 <= drawing.height, text
        for x, y, _ in dots(drawing).values() if axes.collections else ():
            assert axes.bbox.padded(1).contains(x, y)
        if drawing.title == "Quality against bits":
            names = [text.get_window_extent() for text in axes.texts if "Mono" in text.get_fontfamily()[0]]
            assert names and not any(a.overlaps(b) for a, b in itertools.combinations(names, 2))


def test_the_picture_shows_the_front_the_limit_and_the_choice() -> None:
    made = built(quality())
    drawing = scatter(made.choices[0], made.rule)
    assert drawing is not None and "The rule takes default." in drawing.about
    found = dots(drawing)
    assert set(found) == set(SCHEMES) - {"hf:dynamic"}
    assert {name for name, (_, _, hollow) in found.items() if not hollow} == {"int8", "default", "int3", "small"}
    # Down is a lower KL, right is more bits; the limit lies between int3 and default.
    (limit,) = [text for text in painted(drawing).texts if text.get_text().startswith("close enough")]
    border = limit.get_window_extent().y1
    assert found["int8"][1] < found["default"][1] < border < found["int3"][1]
    assert found["int8"][0] > found["default"][0]
    # A KL that is lost in rounding is drawn below the others.
    made = built(quality([quality_row("a", 8, -1e-9), quality_row("b", 4, 0.0), quality_row("c", 3, 0.1)]))
    drawing = scatter(made.choices[0], made.rule)
    assert drawing is not None
    found = dots(drawing)
    assert found["a"][1] == found["b"][1] < found["c"][1]


@pytest.mark.parametrize("make", [everything, lambda: many(1, seed=0), lambda: hostile()])
def test_pictures_on_the_page_have_its_colours_and_its_text_and_are_always_the_same(make: Any) -> None:
    for drawing in drawings(built(*make())):
        axes, text = painted(drawing), svg(drawing)
        assert text == svg(drawing) and not re.search(r"#[0-9a-f]{6}|font-family|clip|nan", text)
        shown = Elements(text)
        names = [name for name, _ in shown.found]
        assert names.count("title") == len(tips(axes)) > 0 and set(names) == {"svg", "path", "text", "title"}
        assert {tip for tip, _ in tips(axes)} <= set(shown.text)
        assert {str(text.get_text()) for text in axes.texts} <= set(shown.text)
    made = built(*make())
    for _, _, sheet in files(made.models, made.choices, made.rule):
        assert png_size(png(sheet)) == (int(2 * sheet.width), int(2 * sheet.height))


def png_size(content: bytes) -> tuple[int, int]:
    """Width and height, once it is known that the file is whole."""
    assert content[:8] == b"\x89PNG\r\n\x1a\n" and content[-8:-4] == b"IEND"
    return int.from_bytes(content[16:20], "big"), int.from_bytes(content[20:24], "big")


def test_every_picture_is_a_png_that_shows_something(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image", reason="PNG files need Matplotlib")
    made = report.write(saved(tmp_path, *everything()), tmp_path / "out")
    names = {path.name for path in made.files}
    assert names == {
        "index.html", "report.json", "report.md", "quality.png", "quality-as-measured.png", "speed.png", "memory.png",
        "retrieval-passkey.png",
    }  # fmt: skip
    assert names == {path.name for path in (tmp_path / "out").iterdir()}
    for model, name, sheet in files(made.models, made.choices, made.rule):
        path = tmp_path / "out" / name
        assert model == "a model" and name in (tmp_path / "out" / "report.md").read_text()
        assert png_size(path.read_bytes()) == (int(2 * sheet.width), int(2 * sheet.height))
        assert path.read_bytes() == png(sheet)
        pixels = (255 * image.imread(path)[..., :3]).round().astype(int)
        accent = [int(LIGHT["lost" if "retrieval" in name else "accent"][place : place + 2], 16) for place in (1, 3, 5)]
        assert (pixels == (255, 255, 255)).all(-1).mean() > 0.3
        if "retrieval" not in name:  # there it is always mixed with the cell
            assert (abs(pixels - accent).max(-1) < 8).sum() > 50, name


def test_names_of_pictures_are_names_of_files() -> None:
    models = ["../../evil", "..", "org/model", "org\\model", "org:model"]
    made = built(*(quality(model=model) for model in models), retrieval({"x": 1.0}, model=models[0]))
    names = [name for _, name, _ in files(made.models, made.choices, made.rule)]
    assert len(set(names)) == len(names) == 11
    assert all(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*\.png", name) for name in names), names


def test_a_picture_of_very_many_schemes_stays_small_and_says_so() -> None:
    made = built(*many(200, seed=0))
    found = {name: sheet for _, name, sheet in files(made.models, made.choices, made.rule)}
    assert all(sheet.width < 2000 and sheet.height < 2000 for sheet in found.values())
    maps = found["retrieval-passkey.png"]
    assert maps.title.endswith("(the first 24 of 200)") and len(maps.drawings) == 24


def luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """As in WCAG 2."""
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
def test_colours_can_be_read(palette: dict[str, str]) -> None:
    grounds = ["page", "paper", "tint", "good-tint", "warn-tint", "bad-tint", "cell"]
    for name in ("ink", "soft"):
        assert all(contrast(palette[name], palette[ground]) >= 4.5 for ground in grounds), name
    for name, ground in (("accent", "paper"), ("accent", "page"), ("good", "good-tint"), ("good", "paper")):
        assert contrast(palette[name], palette[ground]) >= 4.5, name
    for name in ("warn", "bad"):
        assert (
            contrast(palette[name], palette["paper"]) >= 4.5 and contrast(palette[name], palette[f"{name}-tint"]) >= 4.5
        )
    assert contrast(palette["ink"], palette["lost"]) >= 4.4  # figures of a cell in which all was lost
    assert all(contrast(palette[f"s{place}"], palette["paper"]) >= 3 for place in range(7))


def test_a_light_colour_says_which_dark_one_takes_its_place() -> None:
    assert set(LIGHT) == set(DARK)
    assert len(set(zip(LIGHT.values(), DARK.values(), strict=False))) == len(set(LIGHT.values()))


# Machado, Oliveira and Fernandes 2009: what those without one kind of cones see, on linear red, green and blue.
BLINDNESS = {
    "none": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
    "deuteranopia": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
}


@pytest.mark.parametrize("kind", BLINDNESS)
@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
def test_series_are_told_apart_with_fewer_colours(palette: dict[str, str], kind: str) -> None:
    def seen(colour: str) -> tuple[float, ...]:
        """CIE Lab."""
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        red, green, blue = (
            min(1.0, max(0.0, sum(a * b for a, b in zip(row, linear, strict=True)))) for row in BLINDNESS[kind]
        )
        xyz = (
            (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505,
            0.2126 * red + 0.7152 * green + 0.0722 * blue,
            (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089,
        )
        f = [value ** (1 / 3) if value > 0.008856 else 7.787 * value + 16 / 116 for value in xyz]
        return 116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])

    colours = {name: seen(palette[name]) for name in (f"s{place}" for place in range(7))}
    for (a, one), (b, other) in itertools.combinations(colours.items(), 2):
        assert math.dist(one, other) > 15, (a, b, math.dist(one, other))


# -- the page --------------------------------------------------------------------------------------------------------


class Elements(HTMLParser):
    """The elements of a page with their attributes, and its text outside of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((name, dict(attributes)))
        assert len(dict(attributes)) == len(attributes), attributes
        if name not in ("meta", "br", "input", "link", "img"):
            self.open.append(name)

    def handle_endtag(self, name: str) -> None:
        assert self.open.pop() == name

    def handle_data(self, text: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.text.append(text)


def hostile() -> list[Results]:
    """All that a file says is an attack on the page."""
    found = everything()
    for results in found:
        results.setting.update(model=HOSTILE, text=HOSTILE, processor=HOSTILE, **{HOSTILE: HOSTILE})
        for row in results.rows:
            if row["scheme"] in ("small", "default"):
                row["scheme"] += HOSTILE
            for name in ("task", "weights", "dtype", "metric"):
                if name in row:
                    row[name] = HOSTILE
            row.update(kernel=HOSTILE, warnings=[HOSTILE])
        results.rows.append({"scheme": f"bad{HOSTILE}", "error": HOSTILE})
    return found


@pytest.mark.parametrize("make", [everything, hostile])
def test_a_page_is_whole_and_refers_to_nothing_outside(make: Any) -> None:
    text = html_of(built(*make()))
    page_ = Elements(text)
    assert page_.open == []
    names = [name for name, _ in page_.found]
    assert names.count("script") == 2 and names.count("style") == 1 and names.count("main") == 1
    assert not {"img", "link", "iframe", "object", "embed", "base", "form", "audio", "video", "use"} & set(names)
    for name, attributes in page_.found:
        assert not any(key.startswith("on") or key in ("src", "srcset", "action", "xlink:href") for key in attributes)
        assert name == "meta" or (attributes.get("href") or "#").startswith("#"), attributes
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style and "@import" not in style
    ids = [attributes["id"] for _, attributes in page_.found if "id" in attributes]
    assert len(set(ids)) == len(ids)
    for name, attributes in page_.found:
        if name == "svg":
            assert attributes["role"] == "img" and len(attributes["aria-label"] or "") > 10
    levels = [int(name[1]) for name in names if re.fullmatch("h[1-6]", name)]
    assert levels[0] == 1 and levels.count(1) == 1 and all(b - a <= 1 for a, b in itertools.pairwise(levels))


def test_whatever_a_file_says_is_shown_as_text() -> None:
    made = built(*hostile())
    shown = "".join(Elements(html_of(made)).text)
    for text in (f"default{HOSTILE}", f"failed: {HOSTILE}", f"bad{HOSTILE}"):
        assert text in shown
    carried = html_of(made).split('id="data">')[1].split("</script>")[0]
    assert "<" not in carried and json.loads(carried)["models"][0]["model"] == HOSTILE


@given(st.text(st.characters(codec=None), max_size=40))
def test_markup_keeps_any_text(text: str) -> None:
    shown = tag("p", text, tag("b", text), title=text)
    found = Elements(shown.replace("\r", "&#13;"))
    assert [name for name, _ in found.found] == ["p", "b"]
    assert found.found[0][1]["title"] == text.replace("\0", "\0") and "".join(found.text) == text + text
    assert json.loads(data({"x": text})) == {"x": text} and not set("<>&") & set(data(text))


def test_all_kinds_and_models_are_on_the_page() -> None:
    made = built(*everything(), quality(model="org/second", date="2025-01-01"))
    text = " ".join(Elements(html_of(made)).text)
    for wanted in (
        "Which KV cache for these 2 models?", "a model", "org/second", "Take", "default", "Quality against memory",
        "Speed and memory against context", "passkey", "piqa", "Settings", "keep the rule on every model: default",
        "A processor", "fails KL, token, retrieval, tasks",
    ):  # fmt: skip
        assert wanted in text, wanted


def test_one_prompt_of_a_few_says_nothing() -> None:
    """11 of 12 found may be 98.5 % (Wilson); 110 of 120 are 95.4 % at most, and 1,100 of 1,200 are 93.1 %."""
    for repeats, kept in ((2, True), (20, True), (200, False)):
        results = retrieval({"hf:dynamic": 1.0, "default": 11 / 12})
        for row in results.rows:
            row["repeats"] = repeats
        made = built(quality(), results)
        assert ("retrieval" not in made.choices[0].of("default").failed) == kept, repeats


def test_answers_in_files_of_their_own_are_paired() -> None:
    """Ten questions: the exact cache has nine right, the scheme four, none of which the exact one misses."""
    alike = {"task": "piqa", "metric": "acc", "sample_hash": "cafe"}
    exact = {"scheme": "exact", **alike, "value": 0.9, "scores": "1111111110"}
    scheme = {"scheme": "small", **alike, "value": 0.4, "scores": "1111000000"}
    run = report.build([("a", Results("tasks", setting(), [scheme])), ("b", Results("tasks", setting(), [exact]))])
    (row,) = [row for row in run.models[0].runs["tasks"][0].rows if row["scheme"] == "small"]
    assert (row["wins"], row["losses"], row["p_value"]) == (0, 5, 2 * 0.5**5)
    other = {**scheme, "sample_hash": "beef"}  # of other questions
    run = report.build([("a", Results("tasks", setting(), [other])), ("b", Results("tasks", setting(), [exact]))])
    assert not any("p_value" in row for row in run.models[0].runs["tasks"][0].rows)


def monster() -> list[Results]:
    """Two models with hundreds of schemes, thousands of rows, and long errors."""
    found = []
    for model in ("one", "three"):
        for results in many(250, seed=len(model)):
            results.setting["model"] = model
            results.rows += [{"scheme": f"bad {place}", "error": f"{place} " + "error " * 500} for place in range(300)]
            found.append(results)
    return found


def test_a_page_of_thousands_of_rows_is_light(written: dict[str, Path]) -> None:
    text = written["monster"].read_text()
    assert 400_000 < len(text.encode()) < 3_000_000
    assert re.search(r"\d+ more rows are left out here; report.json has them", text)
    assert text.count("are left out here") >= 3


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(0, 100))
def test_a_fair_part_uses_what_there_is(sizes: list[int], most: int) -> None:
    part = page.fair(sizes, most)
    assert sum(min(size, part) for size in sizes) <= most
    if sum(sizes) > most:
        assert sum(min(size, part + 1) for size in sizes) > most


def test_markdown_has_whole_tables_whatever_the_names(tmp_path: Path) -> None:
    report.write(saved(tmp_path, *hostile()), tmp_path / "out", pictures=False)
    text = (tmp_path / "out" / "report.md").read_text()
    found = re.findall(r"(?:^\|.*\n?)+", text, flags=re.M)
    assert len(found) == 6
    for table in found:
        rows = table.strip().split("\n")
        counts = {len(re.findall(r"(?<!\\)\|", row)) for row in rows}
        assert len(counts) == 1 and re.fullmatch(r"\|(?: (?:---|--:) \|)+", rows[1])
    assert "**Take ``default</script>" in text and "<script" not in re.sub(r"\\<", "", re.sub(r"(`+).*?\1", "", text))


# -- in a browser ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages by name."""
    folder = tmp_path_factory.mktemp("reports")
    pages = {"plain": everything(), "hostile": hostile(), "monster": monster()}
    pages["models"] = [*everything(), quality(model="org/second")]
    found = {}
    for name, results in pages.items():
        report.write(saved(folder / f"{name}-in", *results), folder / name, pictures=False)
        found[name] = folder / name / "index.html"
    return found


def test_pages_open_in_a_browser(written: dict[str, Path], tab: Page) -> None:
    for path in written.values():
        tab.open(path)
        assert tab.errors == [] and tab.requests == [path.as_uri()]
        assert tab.evaluate("typeof hacked") == "undefined"
        assert tab.evaluate("performance.getEntriesByType('navigation')[0].duration") < 2000
        for width in (390, 1280):
            tab.resize(width, 900)
            assert tab.evaluate("document.documentElement.scrollWidth") <= width, (path, width)
        tab.evaluate("document.querySelectorAll('details').forEach(x => x.open = true)")
        assert tab.evaluate("document.documentElement.scrollWidth") <= 1280


def column(table: int, place: int) -> str:
    """An expression: what the rows of a table that are not hidden show in a column."""
    rows = f"[...document.querySelectorAll('table')[{table}].tBodies[0].rows]"
    return f"{rows}.filter(row => !row.hidden).map(row => row.cells[{place}].textContent)"


def test_tables_sort_and_filter(written: dict[str, Path], tab: Page) -> None:
    tab.open(written["plain"])
    assert tab.evaluate(column(0, 0))[0] == "hf:dynamic"
    tab.click("th:nth-child(4) button")
    assert tab.evaluate(column(0, 0)) == ["hf:dynamic", "int8", "default", "kivi4", "int3", "small", "int2"]
    assert tab.evaluate("document.querySelectorAll('th')[3].getAttribute('aria-sort')") == "ascending"
    tab.click("th:nth-child(4) button")
    assert tab.evaluate(column(0, 0))[0] == "int2"
    # What was not measured stays at the end, both ways.
    for _ in range(2):
        tab.click("th:nth-child(7) button")
        assert tab.evaluate(column(0, 6))[-4:] == ["–"] * 4
    tab.open(written["monster"])
    tab.set(".filter input", "scheme-7,")
    (name,) = tab.evaluate(column(1, 0))  # the first is that of the models
    assert name.startswith("scheme-7,")
    assert tab.errors == []


def test_marks_say_what_they_are(written: dict[str, Path], tab: Page) -> None:
    tab.open(written["plain"])
    assert tab.evaluate("document.getElementById('tip').hidden") is True
    tab.click("svg.wide [data-tip^='int3']")
    assert tab.evaluate("document.getElementById('tip').textContent") == "int3\n3.90 bits, KL 0.0380, same token 91.5 %"
    tab.evaluate("document.querySelector('h1').dispatchEvent(new PointerEvent('pointermove', {bubbles: true}))")
    assert tab.evaluate("document.getElementById('tip').hidden") is True


def test_data_can_be_taken_out_again(written: dict[str, Path], tab: Page) -> None:
    tab.open(written["hostile"])
    text = tab.evaluate("fetch(document.getElementById('save').href).then(x => x.text(), x => 'no')")
    text = tab.evaluate("document.getElementById('data').textContent") if text == "no" else text
    assert json.loads(text)["models"][0]["model"] == HOSTILE
    tab.open(written["monster"])
    assert tab.evaluate("document.getElementById('save').hidden") is True


def test_a_page_is_complete_without_scripts_and_allows_no_others(written: dict[str, Path], tab: Page) -> None:
    tab.scripting(False)
    tab.open(written["plain"])
    assert tab.errors == [] and tab.evaluate("document.querySelectorAll('button, input').length") == 0
    assert "default" in tab.evaluate("document.querySelector('.name').innerText")
    assert tab.evaluate("document.querySelectorAll('svg title').length") > 10
    tab.scripting(True)
    broken = written["plain"].with_name("broken.html")
    text = written["plain"].read_text(encoding="utf-8")
    broken.write_text(text.replace("<main>", "<main><script>hacked = 1</script>"), encoding="utf-8")
    tab.open(broken)
    assert tab.evaluate("typeof hacked") == "undefined" and len(tab.errors) == 1 and "Content Security" in tab.errors[0]


def test_a_page_follows_the_readers_scheme_and_prints_on_white(written: dict[str, Path], tab: Page) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    found = []
    for scheme, medium in (("light", "screen"), ("dark", "screen"), ("dark", "print")):
        tab.prefer(scheme, medium)
        tab.open(written["plain"])
        found.append(sum(map(int, re.findall(r"\d+", tab.evaluate(ground))[:3])))
    assert found[0] > 700 and found[1] < 100 and found[2] == 3 * 255


# -- the command line ------------------------------------------------------------------------------------------------


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["report", *map(str, arguments)], env={"COLUMNS": "200"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_the_command_says_what_to_take(tmp_path: Path) -> None:
    saved(tmp_path / "in", quality(), quality([quality_row("int2", 2.9, 1.0, 0.5)], model="second"))
    code, text = run(tmp_path / "in", "--out", tmp_path / "out", "--no-pictures")
    assert code == 0 and "a model: take default\n" in text and "second: no recommendation. No scheme keeps" in text
    assert "not measured: retrieval, tasks, speed" in text and str(tmp_path / "out" / "index.html") in text
    saved(tmp_path / "hostile", quality(model=f"\x1b[31m{HOSTILE}"))
    code, text = run(tmp_path / "hostile", "--out", tmp_path / "out", "--no-pictures")
    assert code == 0 and "take default" in text and "\x1b" not in text and "hacked=1" in text
    code, text = run(
        tmp_path / "in", "--out", tmp_path / "out", "--no-pictures", "--max-kl", "0.05", "--min-top1", "0.9"
    )
    assert code == 0 and "a model: take small\n" in text


def test_the_command_names_what_is_wrong(tmp_path: Path) -> None:
    (path,) = saved(tmp_path / "in", quality())
    (tmp_path / "empty").mkdir()
    for arguments, said in (
        ([tmp_path / "none.json", "--out", tmp_path / "out"], "there is no file"),
        ([tmp_path / "empty", "--out", tmp_path / "out"], "there is no .json file in the folder"),
        ([path, "--out", path], "is a file; give a folder"),
        ([path, "--out", tmp_path / "out", "--min-top1", "97"], "min_top1=97.0 is out of range; give between 0 and 1"),
    ):
        code, text = run(*arguments, "--no-pictures")
        assert code == 2 and said in text and "Traceback" not in text, text
    assert not (tmp_path / "out").exists()


def test_without_matplotlib_a_report_has_its_tables_and_says_what_pictures_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="it cannot be taken away where it is not")
    paths = saved(tmp_path / "in", *everything())
    assert run(*paths, "--out", tmp_path / "with")[0] == 0
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, said = run(*paths, "--out", tmp_path / "out")
    assert code == 0 and "pictures need Matplotlib: pip install 'kvbits[report]'" in said
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"index.html", "report.json", "report.md"}
    bare, whole = (Elements((tmp_path / name / "index.html").read_text()) for name in ("out", "with"))
    counts = [[name for name, _ in one.found].count("table") for one in (bare, whole)]
    assert counts[0] == counts[1] > 0 and "svg" not in [name for name, _ in bare.found]
    assert "pip install 'kvbits[report]'" in "".join(bare.text) and "kvbits[report]" not in "".join(whole.text)
