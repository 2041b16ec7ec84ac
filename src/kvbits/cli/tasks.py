"""``kvbits tasks`` and ``kvbits lm-eval``: scores on tasks, and lm-evaluation-harness's own command over our caches."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from kvbits.cli.common import (
    Calibrated,
    Device,
    DType,
    JsonFile,
    Model,
    attempt,
    err,
    fail,
    going_on,
    load,
    out,
    results_file,
    say,
)
from kvbits.files import load_calibration
from kvbits.schemes.catalogue import RECOMMENDED
from kvbits.schemes.grammar import split_schemes


def tasks(
    model: Model = "smollm2",
    tasks: Annotated[str, typer.Option("--tasks", "-t", help="Names, with commas between: hellaswag,gsm8k.")] = "",
    schemes: Annotated[str, typer.Option(help="Schemes, and peers such as hf:quanto4.")] = f"exact,{RECOMMENDED}",
    data: Annotated[Path | None, typer.Option(help="Folder with local files for the tasks; no network then.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only so many samples of each task, the first ones.")] = None,
    shots: Annotated[int | None, typer.Option(min=0, help="Solved samples before each question.")] = None,
    chunk: Annotated[int, typer.Option(min=0, help="Tokens read through the cache at a time; 0 is all at once.")] = 16,
    batch: Annotated[int, typer.Option(min=1, help="Rows at a time.")] = 1,
    dtype: DType = "auto",
    device: Device = "cpu",
    calibration: Calibrated = None,
    json_file: JsonFile = None,
) -> None:
    """Score a model on tasks under one or more schemes, through lm-evaluation-harness.

    Contexts are read into the cache and packed before anything is scored or generated. Each scheme is compared with
    the exact cache on the same samples (McNemar's test).
    """
    from kvbits.measure import caches
    from kvbits.measure import tasks as measure
    from kvbits.measure.setting import model_name

    names = [name.strip() for name in tasks.split(",") if name.strip()]
    listed = [attempt(caches.check, name, calibration is not None) for name in attempt(split_schemes, schemes)]
    results_file(json_file, "tasks")
    fitted = None if calibration is None else attempt(load_calibration, calibration)
    with err.status("loading the tasks"):
        prepared = attempt(measure.load_tasks, names, data, shots)
    loaded, tokenizer = load(model, dtype, device)
    about = {
        "model": model_name(model),
        "data": None if data is None else data.name,
        "shots": shots,
        "calibration": None if calibration is None else calibration.name,
        "schemes": listed,
    }
    with going_on(json_file):
        results = attempt(
            measure.evaluate, loaded, tokenizer, listed, prepared, limit=limit, chunk=chunk, batch=batch,
            calibration=fitted, path=json_file, report=lambda line: err.print(line, markup=False, highlight=False),
            about=about,
        )  # fmt: skip
    _show(results.rows, listed)


def _show(rows: list[dict[str, Any]], schemes: list[str]) -> None:
    """A table for each task, and below it what went wrong and what says little."""
    for task in dict.fromkeys(row["task"] for row in rows):
        mine = [row for row in rows if row["task"] == task and row["scheme"] in schemes]
        mine.sort(key=lambda row: schemes.index(row["scheme"]))
        if any("error" not in row for row in mine):
            out.print(_table(task, [row for row in mine if "error" not in row]))
        for line in dict.fromkeys(row["advice"] for row in mine if row.get("advice")):
            say(f"warning: {task}: {line}", err)
        for row in mine:
            if "error" in row:
                err.print(f"failed: {task}, {row['scheme']}: {row['error']}", markup=False, highlight=False)
            elif row["truncated"]:
                cut = f"{row['truncated']} contexts were cut to the model's greatest length"
                err.print(f"warning: {task}, {row['scheme']}: {cut}", markup=False, highlight=False)
    if all("error" in row for row in rows if row["scheme"] in schemes):
        raise typer.Exit(1)


def _table(task: str, rows: list[dict[str, Any]]) -> Table:
    """A line for each scheme, a column for each metric."""
    metrics = list(dict.fromkeys(row["metric"] for row in rows))
    table = Table(
        title=f"{task}, {rows[0]['samples']} samples",
        caption="+ and -: samples better and worse than with the exact cache, p of McNemar's test; "
        "packed: share of what was attended to; bits: real ones per element",
        box=box.SIMPLE_HEAD,
    )
    for column in ("scheme", *metrics, "packed", "bits", "s", "kernel"):
        left = column in ("scheme", "kernel")
        table.add_column(column, justify="left" if left else "right", no_wrap=not left, overflow="fold")
    for scheme in dict.fromkeys(row["scheme"] for row in rows):
        found = {row["metric"]: row for row in rows if row["scheme"] == scheme}
        row = next(iter(found.values()))
        table.add_row(
            scheme,
            *(_cell(found[metric]) for metric in metrics),
            f"{row['packed_share']:.0%}",
            "-" if row["bits_per_element"] is None else f"{row['bits_per_element']:.2f}",
            f"{row['seconds']:.1f}",
            row["kernel"],
        )
    return table


def _cell(row: dict[str, Any]) -> str:
    value = "not finite" if row["value"] is None else f"{row['value']:.4g}"
    if row["stderr"] is not None:
        value += f" ± {row['stderr']:.2g}"
    return value if row["p_value"] is None else f"{value}\n+{row['wins']} -{row['losses']} p={row['p_value']:.2g}"


def lm_eval(context: typer.Context) -> None:
    """Run lm_eval, the command of lm-evaluation-harness, with --model kvbits; all other options are its own.

    kvbits lm-eval --tasks hellaswag --model_args pretrained=MODEL,scheme=nuq3-1%,calibration=DIR
    """
    try:
        from kvbits.measure.harness import main
    except ImportError as error:
        fail(str(error))
    attempt(main, context.args)
