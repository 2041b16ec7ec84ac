"""``kvbits eval``: how close schemes stay to the exact cache on a text, through the cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeAlias

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from kvbits.cli.common import (
    Calibrated,
    Device,
    DType,
    JsonFile,
    Model,
    attempt,
    bars,
    check_model,
    fail,
    going_on,
    load_model,
    load_tokenizer,
    out,
    read_source,
    results_file,
    say,
    working,
)
from kvbits.files import load_calibration
from kvbits.schemes.grammar import split_schemes

if TYPE_CHECKING:
    from kvbits.measure.results import Results
    from kvbits.measure.text import Text

Row: TypeAlias = dict[str, Any]

WIDE_COLUMNS = 150
"""A terminal so wide has room for every figure."""


def _moved(given: str | None) -> None:
    """Name the commands to a user of options that 'kvbits eval' once had."""
    if given is not None:
        fail("tasks have a command of their own, 'kvbits tasks', and so has retrieval, 'kvbits retrieval'")


def evaluate(
    model: Model,
    schemes: Annotated[
        str | None,
        typer.Option(
            help="A list such as exact,int4,kivi2,residual=64,hf:quanto4, with commas or semicolons between. "
            "Default: a short one."
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="A text file, .jsonl or .parquet; - is standard input. Default: Python's help topics."),
    ] = None,
    dataset: Annotated[str | None, typer.Option(help="In place of a file: wikitext2, c4 or pg19.")] = None,
    field: Annotated[str | None, typer.Option(help="Of .jsonl and .parquet: the field that holds the text.")] = None,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens that go through the cache at a time.")] = 16,
    windows: Annotated[int, typer.Option(min=1, help="Windows of the text.")] = 4,
    length: Annotated[int, typer.Option(min=2, help="Tokens of each.")] = 1024,
    placement: Annotated[str, typer.Option(help="Windows: spread over the text, or from its start.")] = "spread",
    one_shot: Annotated[bool, typer.Option(help="Show the flattering regime too: a window in one forward.")] = False,
    dtype: DType = "auto",
    device: Device = "cpu",
    calibration: Calibrated = None,
    json_file: JsonFile = None,
    moved: Annotated[
        str | None,
        typer.Option("--tasks", "--data", "--limit", "--retrieval", hidden=True, is_eager=True, callback=_moved),
    ] = None,
) -> None:
    """Measure how close schemes stay to the exact cache: divergence, perplexity, same first choice, real bits.

    A text goes through each cache in small chunks. Transformers' own caches are peers: hf:quanto4, hf:quanto2,
    hf:hqq8, hf:hqq4, hf:hqq2, hf:fp8. hf:dynamic, the exact one, is always there: all are compared with it, and its
    own row is the noise floor.
    """
    check_model(model, dtype, device)
    names = _names(schemes, calibration is not None, length, chunk)
    if calibration is not None:
        attempt(load_calibration, calibration)  # says what is wrong with it before a model is loaded
    results_file(json_file, "quality")
    content = _text(text, dataset, field)
    ids = _windows(model, content, windows, length, placement)
    loaded = load_model(model, dtype, device)
    from kvbits.measure.quality import measure
    from kvbits.measure.setting import model_name

    about = {"model": model_name(model), "text": content.name, "text_sha256": content.sha256, "placement": placement}
    heard: list[str] = []
    bar = bars()
    task = bar.add_task("", total=None)

    def report(name: str, done: int, total: int) -> None:
        bar.update(task, description=escape(name), completed=done, total=total)

    with going_on(json_file), bar:
        results = attempt(
            measure, loaded, ids, names, chunk=chunk, one_shot=one_shot, calibration=calibration, json=json_file,
            about=about, tell=heard.append, report=report,
        )  # fmt: skip
    show(results, names, one_shot)
    if json_file is not None:
        say(f"written to {json_file}")
    if names and not any(results.find(scheme=name) for name in names):
        fail("every scheme failed; the reasons stand above")


def _names(schemes: str | None, calibrated: bool, length: int, chunk: int) -> list[str]:
    """The schemes to measure, once it is known that there are such and that they can be measured."""
    from kvbits.measure.quality import default_schemes, names_of, refuse_dishonest

    names: list[str] = attempt(
        names_of, default_schemes() if schemes is None else attempt(split_schemes, schemes), calibrated
    )
    attempt(refuse_dishonest, names, length, chunk)
    return names


def _text(file: Path | None, dataset: str | None, field: str | None) -> Text:
    from kvbits.measure import text

    if file is not None and dataset is not None:
        fail("give --text or --dataset, not both")
    if file is None and field is not None:
        fail(f"--field {field} is of a file: give it with --text")
    if dataset is not None:
        with working(f"loading {dataset}"):
            return attempt(text.dataset, dataset)
    return read_source(file, field)


def _windows(model: str, content: Text, windows: int, length: int, placement: str) -> Any:
    """Token ids ``[windows, length]``, before the weights are loaded."""
    from kvbits.calibration.text import longest_text
    from kvbits.hf.loading import load_config
    from kvbits.measure.text import windows_of

    tokenizer = load_tokenizer(model)
    longest = longest_text(attempt(load_config, model, what=f"cannot load {model!r}: "))
    return attempt(windows_of, content.content, tokenizer, windows, length, placement, longest)


# -- the table ---------------------------------------------------------------------------------------------------------


def show(results: Results, names: list[str], one_shot: bool) -> None:
    """What was asked for, as a table that fits the terminal, and below it what to know of its rows."""
    asked = [row for row in results.rows if row["scheme"] in (*names, "hf:dynamic")]
    rows = [row for row in asked if one_shot or row["regime"] == "chunked"]
    where = results.setting
    out.print(
        f"{where['model']} in {where['dtype']}; {where['windows']} x {where['length']} tokens of {where['text']} "
        f"({where['placement']}) in chunks of {where['chunk']}",
        markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip
    notes_of_all = list(dict.fromkeys(note for row in rows for note in notes(row)))
    wide = out.width >= WIDE_COLUMNS
    columns = [column for column in COLUMNS if wide or not column.wide]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False)
    table.add_column("scheme", overflow="fold", min_width=12)
    for column in columns:
        table.add_column(column.head, justify="right", no_wrap=True)
    for row in rows:
        regime = "" if row["regime"] == "chunked" else f" {row['regime']}"
        marks = ",".join(str(notes_of_all.index(note) + 1) for note in notes(row))
        cells = [_cell(row, column.show) for column in columns]
        cells[0] = "failed" if "error" in row else cells[0]
        table.add_row(escape(f"{row['scheme']}{regime}{f' ({marks})' if marks else ''}"), *cells)
    out.print(table)
    out.print(
        "KL: mean divergence from the exact cache, in nats. bits: really allocated for each element at the end of a "
        "window. The row of hf:dynamic is the noise floor: the exact cache against itself in one piece.",
        highlight=False,
    )
    for number, note in enumerate(notes_of_all, 1):
        out.print(f"({number}) {note}", markup=False, highlight=False)


def notes(row: Row) -> list[str]:
    """What to know of a row."""
    from kvbits.measure.results import missing_figures

    return [*([row["error"]] if "error" in row else []), *row.get("warnings", []), *missing_figures(row)]


def _cell(row: Row, show: Callable[[Row], str]) -> str:
    try:
        return show(row)
    except (KeyError, TypeError):  # a figure that a failed row has not, or that is None
        return "-"


def _small(value: float) -> str:
    return f"{value:.5f}" if abs(value) >= 1e-5 else f"{value:.0e}" if value else "0"


def _with_error(row: Row, name: str, error: str, digits: int) -> str:
    spread = row[error]
    return f"{row[name]:.{digits}f}" + ("" if spread is None else f" ± {spread:.{digits}f}")


class Column(NamedTuple):
    """One column of the table.

    Attributes:
        head: its title.
        show: the cell of a row.
        wide: whether it is shown only where there is room.
    """

    head: str
    show: Callable[[Row], str]
    wide: bool = False


COLUMNS = (
    Column("KL to exact", lambda row: _small(row["kl_mean"])),
    Column("± over windows", lambda row: _small(row["kl_se"]), wide=True),
    Column("median", lambda row: _small(row["kl_median"]), wide=True),
    Column("99.9 %", lambda row: f"{row['kl_p999']:.3f}"),
    Column("same top", lambda row: f"{100 * row['top1']:.1f} %"),
    Column("perplexity", lambda row: _with_error(row, "ppl", "ppl_se", 2)),
    Column("log ratio", lambda row: _with_error(row, "nll_change", "nll_change_se", 4), wide=True),
    Column("bits", lambda row: f"{row['bits_per_element']:.2f}"),
    Column("at 8,000", lambda row: f"{row['bits_at_8000']:.2f}", wide=True),
    Column("KV MB", lambda row: f"{row['kv_bytes'] / 1e6:.1f}"),
    Column("peak MB", lambda row: f"{row['peak_bytes'] / 1e6:,.0f}", wide=True),
    Column("s", lambda row: f"{row['seconds']:.0f}"),
    Column("kernel", lambda row: str(row["kernel"]).removeprefix("kernel "), wide=True),
)
