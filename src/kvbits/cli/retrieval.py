"""``kvbits retrieval``: facts planted in a text at several depths, found again through each cache; heat maps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvbits.cli.common import (
    Calibrated,
    Device,
    DType,
    JsonFile,
    Model,
    attempt,
    bars,
    err,
    fail,
    going_on,
    load,
    out,
    read_source,
    results_file,
    say,
    tokens_of,
)
from kvbits.files import load_calibration
from kvbits.schemes.grammar import split_schemes

if TYPE_CHECKING:
    from kvbits.measure.results import Results
    from kvbits.measure.retrieval import Measurement, Plan

_COLUMNS = 5
"""Lengths side by side in 80 columns."""


def retrieval(
    model: Model = "smollm2",
    schemes: Annotated[str, typer.Option(help="Schemes and peers, between commas or semicolons.")] = "exact,default",
    tasks: Annotated[
        str, typer.Option(help="Of passkey, multikey, multikey-all and variables.")
    ] = "passkey,multikey,variables",
    lengths: Annotated[str, typer.Option(help="Tokens of the whole prompt, the answer's too; 2k is 2,048.")] = "512,2k",
    depths: Annotated[str, typer.Option(help="Of the needles, 0 (beginning) to 1 (end).")] = "0,0.25,0.5,0.75,1",
    repeats: Annotated[int, typer.Option(min=1, help="Prompts for each cell, each with needles of its own.")] = 5,
    haystack: Annotated[
        Path | None,
        typer.Option(help="A text file, .jsonl or .parquet; - is standard input. Default: Python's help topics."),
    ] = None,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens of the context that are read at a time.")] = 16,
    chat: Annotated[
        bool | None, typer.Option("--chat/--no-chat", help="The chat template; default: where the model has one.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of needles and places.")] = 0,
    dtype: DType = "auto",
    device: Device = "cpu",
    calibration: Calibrated = None,
    json_file: JsonFile = None,
) -> None:
    """Hide facts in a text, and see whether the model still finds them through each cache.

    The text goes through the cache in small chunks, then the question. Counts greedy answers that are right, and the
    log probability of the right answer; the exact cache comes first.
    """
    from kvbits.measure.caches import check
    from kvbits.measure.results import Results
    from kvbits.measure.retrieval import Measurement, Plan
    from kvbits.measure.setting import model_name

    plan = attempt(
        Plan, tuple(_list(tasks)), tuple(attempt(tokens_of, one) for one in _list(lengths)),
        tuple(_depth(one) for one in _list(depths)), repeats, chunk, chat, seed,
    )  # fmt: skip
    names = attempt(split_schemes, schemes)
    results_file(json_file, "retrieval")
    text = read_source(haystack)
    for name in names:
        attempt(check, name, calibrated=calibration is not None)  # says what is wrong before a model is loaded
    if calibration is not None:
        attempt(load_calibration, calibration)
    loaded, tokenizer = load(model, dtype, device)
    measurement = attempt(Measurement, loaded, tokenizer, text.content, names, plan, calibration)
    about = measurement.setting(model=model_name(model), haystack=text.name)
    results = attempt(Results.resume, json_file, "retrieval", about)
    for warning in measurement.warnings():
        say(f"warning: {warning}", err)
    with going_on(json_file):
        rows = _run(measurement, results, json_file)
    show(rows, plan)
    if all("error" in row for row in rows):
        fail(f"every cell failed, the first with {rows[0]['error']}")


def _run(measurement: Measurement, results: Results, json_file: Path | None) -> list[dict[str, Any]]:
    def keep(results: Results) -> None:
        if json_file is not None:
            attempt(results.save, json_file)

    with bars() as bar:
        task = bar.add_task("retrieval", total=None)

        def report(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        return measurement.run(results, keep, report)


def show(rows: list[dict[str, Any]], plan: Plan) -> None:
    """Print heat maps, a summary, and what must be known beside them."""
    from kvbits.measure.retrieval import remarks

    for table in [*heat_maps(rows, plan), summary(rows)]:
        out.print(table)
    for remark in remarks(rows):
        out.print(remark, markup=False, highlight=False)


def heat_maps(rows: list[dict[str, Any]], plan: Plan) -> Iterator[Group]:
    """For each task and scheme a table, depth by length, of hits and of the answer's log probability."""
    cells = {(row["task"], row["scheme"], row["length"], row["depth"]): row for row in rows}
    for task, scheme in dict.fromkeys((row["task"], row["scheme"]) for row in sorted(rows, key=_task_of(plan))):
        for first in range(0, len(plan.lengths), _COLUMNS):
            lengths = plan.lengths[first : first + _COLUMNS]
            table = Table(box=box.SIMPLE, padding=0)
            table.add_column("depth", justify="right")
            for length in lengths:
                table.add_column(f"{length:,}", justify="right")
            for depth in plan.depths:
                table.add_row(f"{depth:g}", *(_cell(cells[task, scheme, length, depth]) for length in lengths))
            yield Group(Text(f"{task}, {scheme}: hits, mean log probability of the answer"), table)


def _task_of(plan: Plan) -> Callable[[dict[str, Any]], int]:
    return lambda row: plan.tasks.index(row["task"])


def _cell(row: dict[str, Any]) -> Text:
    if "error" in row:
        return Text("failed", style="bold red")
    from kvbits.measure.caches import is_exact

    mark = "*" if row["exact_share"] and not is_exact(row["scheme"]) else " "
    green, red = (round(55 + 200 * share) for share in (row["accuracy"], 1 - row["accuracy"]))
    figures = f" {sum(row['hits'])}/{row['repeats']} {row['logprob']:6.2f}{mark}"
    return Text(figures, f"black on rgb({red},{green},90)")


def summary(rows: list[dict[str, Any]]) -> Table:
    """A line for each scheme, over all of its cells; the first rows are the exact cache's."""
    baseline = [row for row in rows if row["scheme"] == rows[0]["scheme"] and "error" not in row]
    exact = {_place(row): row["hits"] for row in baseline}
    table = Table(caption="agreement: of the hits of the exact cache, those that are hits here too; "
                  "bits and KV bytes: at the longest prompt")  # fmt: skip
    for column in ("scheme", "hits", "log p", "agreement", "bits", "KV bytes", "kernel"):
        table.add_column(column, justify="left" if column in ("scheme", "kernel") else "right", overflow="fold")
    for scheme in dict.fromkeys(row["scheme"] for row in rows):
        found = [row for row in rows if row["scheme"] == scheme and "error" not in row]
        if not found:
            table.add_row(scheme, "failed")
            continue
        longest = max(found, key=lambda row: int(row["length"]))
        hits = [hit for row in found for hit in row["hits"]]
        pairs = (zip(row["hits"], exact.get(_place(row), ()), strict=False) for row in found)
        agreed = [here for pair in pairs for here, there in pair if there]
        table.add_row(
            scheme,
            f"{sum(hits)}/{len(hits)}",
            f"{sum(row['logprob'] for row in found) / len(found):.2f}",
            f"{sum(agreed) / len(agreed):.0%}" if agreed else "-",
            f"{longest['bits_per_element']:.2f}",
            f"{longest['kv_bytes']:,}",
            longest["kernel"],
        )
    return table


def _place(row: dict[str, Any]) -> tuple[str, int, float]:
    return row["task"], row["length"], row["depth"]


def _list(text: str) -> list[str]:
    return [one.strip() for one in text.split(",") if one.strip()]


def _depth(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        fail(f"--depths {text} is not a number; give some between 0 and 1, such as 0,0.5,1")
