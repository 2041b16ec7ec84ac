"""``kvbits bench``: speed and memory of caches side by side, on the user's own model and machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box, progress
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
    read_source,
    results_file,
    say,
    tokens_of,
)
from kvbits.schemes.grammar import split_schemes

if TYPE_CHECKING:
    from kvbits.measure.bench import Cell

_SCHEMES = "exact,default,small,int4,kivi2,hf:quanto4"


def bench(
    model: Model = "smollm2",
    schemes: Annotated[
        str, typer.Option(help="Schemes, and Transformers' own caches such as hf:quanto4; the exact one is added.")
    ] = _SCHEMES,
    context: Annotated[str, typer.Option(help="Tokens of the prompt: several, such as 512,2k,32k.")] = "512,2k",
    batch: Annotated[str, typer.Option(help="Rows, each of another text: several, such as 1,4.")] = "1",
    weights: Annotated[
        str, typer.Option(help="none, int8-dynamic, torchao-int8, bnb-nf4, ...: weights in few bits as well.")
    ] = "none",
    steps: Annotated[int, typer.Option(min=4, help="Timed decode steps of each cache.")] = 16,
    prefills: Annotated[int, typer.Option(min=1, help="How often each reads the prompt.")] = 3,
    chunk: Annotated[str | None, typer.Option(help="Tokens of a prompt read at once. Default: all of them.")] = None,
    text: Annotated[Path | None, typer.Option(help="What is read; - is standard input. Default: prose.")] = None,
    allow_long: Annotated[bool, typer.Option(help="Also beyond the positions that the model was made for.")] = False,
    peak: Annotated[bool, typer.Option(help="Peak memory too; a CPU loads the model again for each.")] = True,
    dtype: DType = "auto",
    device: Device = "cpu",
    calibration: Calibrated = None,
    json_file: JsonFile = None,
) -> None:
    """Measure prefill and decode speed, memory and break-even length of caches, interleaved, beside the exact cache."""
    names = attempt(split_schemes, schemes)
    contexts = [attempt(tokens_of, part, what="--context: ") for part in context.split(",")]
    batches = [attempt(tokens_of, part, what="--batch: ") for part in batch.split(",")]
    piece = None if chunk is None else attempt(tokens_of, chunk, what="--chunk: ")
    results_file(json_file, "speed")
    source = None if text is None else read_source(text)
    content = {} if source is None else {"text": source.content, "text_name": source.name}
    from kvbits.measure.bench import Bench
    from kvbits.measure.breakeven import verdicts

    plan = attempt(
        Bench, model, names, contexts, batches, weights.split(","), dtype, device, steps, prefills, piece, calibration,
        allow_long=allow_long, peak=peak, **content,
    )  # fmt: skip
    screen = _Screen()
    try:
        run = (json_file, lambda: screen.quiet(load, model, dtype, device), screen.report, screen.show)
        with going_on(json_file):
            results = attempt(plan.run, *run)
    finally:
        screen.bar.stop()
    out.print("\nfaster than the exact cache, per token, from what context on:")
    for line in verdicts(results.rows):
        out.print(f"  {line}", markup=False, highlight=False)
    if all("error" in row for row in results.rows):
        fail("every cache failed; the reasons stand above")


class _Screen:
    """A progress bar on one console that makes way for what is printed on the other."""

    def __init__(self) -> None:
        self.bar = progress.Progress(
            progress.TextColumn("{task.description}"), progress.BarColumn(), progress.TaskProgressColumn(),
            progress.TimeElapsedColumn(), progress.TextColumn("left"), progress.TimeRemainingColumn(), console=err,
        )  # fmt: skip

    def report(self, what: str, done: int, count: int) -> None:
        if not self.bar.tasks:
            self.bar.add_task(what, total=count)
        self.bar.start()
        self.bar.update(self.bar.tasks[0].id, description=what, completed=done)

    def quiet(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call without the bar, whose lines would go through others."""
        self.bar.stop()
        return function(*args)

    def show(self, cell: Cell, rows: Sequence[dict[str, Any]]) -> None:
        self.quiet(show, cell, rows)


_SCHEME, _KERNEL = "\nscheme", "\nkernel"
_COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    _SCHEME: lambda row: str(row["scheme"]),
    "prefill\ntok/s": lambda row: _digits(row["prefill_tokens_per_second"]),
    "\nstep": lambda row: _time(row["step_ms"]),
    "\n±": lambda row: f"{min(9.99, (row['step_ms_high'] - row['step_ms_low']) / 2 / row['step_ms']):.0%}",
    "\nflush": lambda row: _time(row["flush_ms"]),
    "decode\ntok/s": lambda row: _digits(row["decode_tokens_per_second"]),
    "to\nexact": lambda row: f"{_digits(row['speed_against_exact'])}x" if row["speed_against_exact"] else "-",
    "KV\ncache": lambda row: _bytes(row["kv_bytes"]),
    "peak\nmemory": lambda row: _bytes(row["peak_bytes"]) if row.get("peak_bytes") else "-",
    _KERNEL: lambda row: row["kernel"].replace("kernel ", ""),
}


def show(cell: Cell, rows: Sequence[dict[str, Any]]) -> None:
    """Print a table of rows measured side by side, and what has to be known about them."""
    measured = [row for row in rows if "error" not in row]
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False, title=str(cell), title_justify="left")
    table.add_column(_SCHEME, overflow="fold", min_width=10)
    for name in list(_COLUMNS)[1:]:
        table.add_column(name, justify="right", no_wrap=name != _KERNEL, min_width=8 if name == _KERNEL else None)
    for row in measured:
        table.add_row(*(write(row) for write in _COLUMNS.values()))
    if measured:
        noise = measured[0]["noise"]
        spread = "± half the distance between the quartiles"
        table.caption = spread if noise is None else f"{spread}; two exact caches differ by {noise - 1:.1%}"
        table.caption_justify = "left"
        out.print(table)
    for row in rows:
        for warning in [f"failed: {row['error']}"] if "error" in row else row["warnings"]:
            say(f"{cell}, {row['scheme']}: {warning}", err)


def _digits(value: float) -> str:
    """Three digits that say something."""
    if value >= 99_950:
        return f"{value / 1e3:,.0f}k"
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def _time(milliseconds: float | None) -> str:
    if milliseconds is None:
        return "-"
    return f"{_digits(milliseconds / 1e3)} s" if milliseconds >= 1000 else f"{_digits(milliseconds)} ms"


def _bytes(count: int) -> str:
    return f"{_digits(count / 1e9)} GB" if count >= 999.5e6 else f"{_digits(count / 1e6)} MB"
