"""``kvbits plan``: will it fit, how far does it reach, what should I take? Before anything is loaded."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.markup import escape
from rich.table import Table

from kvbits.cli.common import attempt, fail, out, tokens_of, working
from kvbits.schemes.grammar import split_schemes

if TYPE_CHECKING:
    from kvbits.plan.plan import Plan, Row
    from kvbits.plan.setting import Setting
    from kvbits.plan.shapes import Shape

_SCHEMES = "exact,fp8,default,kivi4,small"
_DTYPES = ("auto", "float32", "bfloat16", "float16")
_NUMBERS = "Instead of a model"
_LEAST_WIDTH = 80


def plan(
    model: Annotated[
        str | None,
        typer.Argument(help="Hub id, folder, config.json, .gguf file, smollm2, or a preset such as llama-3.1-8b."),
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Layers.", rich_help_panel=_NUMBERS)] = None,
    kv_heads: Annotated[int | None, typer.Option(help="KV heads of a layer.", rich_help_panel=_NUMBERS)] = None,
    head_dim: Annotated[int | None, typer.Option(help="Channels of a head.", rich_help_panel=_NUMBERS)] = None,
    value_dim: Annotated[
        int | None, typer.Option(help="Channels of a head of values, if they differ.", rich_help_panel=_NUMBERS)
    ] = None,
    parameters: Annotated[
        str | None, typer.Option(help="Weights, such as 6.7b; default: the cache alone.", rich_help_panel=_NUMBERS)
    ] = None,
    context: Annotated[str, typer.Option(help="Tokens in the cache: 65536, 64k (65,536) or 1m (1,048,576).")] = "8k",
    new_tokens: Annotated[str | None, typer.Option(help="Of these, tokens that were generated one by one.")] = None,
    chunk: Annotated[str | None, typer.Option(help="Tokens of the prompt read at a time; default: all of it.")] = None,
    source: Annotated[
        str | None, typer.Option(help="Tokens of an encoder's text; default: as many as in the cache.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Rows.")] = 1,
    schemes: Annotated[
        str | None, typer.Option(help=f"A list such as exact,kivi4,residual=64,nuq3-1%; default: {_SCHEMES}.")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="A GPU, for its memory: a100-80gb, h100, rtx-4090, m4-max-64gb, ...; or cpu.")
    ] = None,
    memory: Annotated[str | None, typer.Option(help="Memory of each device: 24GiB, 80GB.")] = None,
    reserve: Annotated[str | None, typer.Option(help="Of it, what the driver and others keep: 1GiB.")] = None,
    devices: Annotated[int, typer.Option(help="Equal devices.")] = 1,
    split: Annotated[
        str, typer.Option(help="Over several: pipeline (layers), tensor (heads) or context.")
    ] = "pipeline",
    weights: Annotated[
        str, typer.Option(help="auto, fp32, bf16, fp16, fp8, int8, int4, file (as large as the files are) or none.")
    ] = "auto",
    dtype: Annotated[str, typer.Option(help="Of exact keys and values: auto, float32, bfloat16, float16.")] = "auto",
    sliding: Annotated[bool, typer.Option("--sliding", help="Pack layers with sliding windows, too.")] = False,
    logits: Annotated[str, typer.Option(help="Of a prompt: last (generate) or all (a plain forward).")] = "last",
    results: Annotated[
        Path | None, typer.Option(help="A file of measured quality, to choose by and to show beside the bytes.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
    csv_file: Annotated[Path | None, typer.Option("--csv", help="Write a table; - is standard output.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw memory against context: FILE.png, .svg or .pdf.")] = None,
    page: Annotated[Path | None, typer.Option(help="Write an HTML page with sliders, in one file.")] = None,
) -> None:
    """Plan the memory of a model: cache, weights and the peak of a prompt, for each scheme.

    Says how long a context and how large a batch fit into a memory. Real bytes are those of a live cache after the same
    calls: a prompt in one piece, or in chunks, and then single steps. Beside them stands the papers' own arithmetic.
    """
    _refuse_files({"--csv": csv_file, "--picture": picture, "--page": page}, as_json)
    from kvbits.plan.devices import bytes_of, gpu_bytes
    from kvbits.plan.paper import Named
    from kvbits.plan.plan import plan as make
    from kvbits.plan.setting import Setting

    def made() -> Setting:
        # Unknown schemes are refused before a model is looked at.
        pre_rope = any(Named.parse(name).scheme.pre_rope for name in split_schemes(schemes or _SCHEMES))
        if gpu is not None and memory is not None:
            raise ValueError("give --gpu or --memory, not both")
        limit = bytes_of(memory) if memory is not None else None if gpu is None else gpu_bytes(gpu)
        tokens = tokens_of(context)
        shape = _shape(model, (layers, kv_heads, head_dim, value_dim), parameters, dtype, pre_rope)
        return Setting(
            shape=shape,
            context=tokens,
            steps=0 if new_tokens is None else tokens_of(new_tokens),
            chunk=None if chunk is None else tokens_of(chunk),
            batch=batch,
            source_tokens=tokens_of(source) if source is not None else tokens if shape.encodes else 0,
            sliding=sliding,
            memory_bytes=limit,
            reserve_bytes=0 if reserve is None else bytes_of(reserve, least=0),
            devices=devices,
            split=split,
            weights=weights,
            logits=logits,
            cpu=(gpu or "").strip().lower() == "cpu",
        )

    setting = attempt(made)
    quality = None
    if results is not None:
        from kvbits.plan.quality import load

        quality = attempt(load, results)
    wanted = ("exact" if setting.shape.refusal else _SCHEMES) if schemes is None else schemes
    found: Plan = attempt(lambda: make(setting, split_schemes(wanted), quality))
    if picture is not None:
        from kvbits.plan.picture import draw

        attempt(draw, found, picture)
    if page is not None:
        from kvbits.plan.page import write

        attempt(write, found, page)
    if csv_file is not None:
        _write_csv(found, csv_file)
    if as_json:
        sys.stdout.write(json.dumps(found.to_json(), indent=1) + "\n")
    elif str(csv_file) != "-":
        _print(found)


def _refuse_files(files: dict[str, Path | None], as_json: bool) -> None:
    """End with a message for files that cannot be written, by their options."""
    for option, file in files.items():
        if file is None:
            continue
        if str(file) == "-" and (as_json or option != "--csv"):
            fail(f"{option} - is not possible{' beside --json' if option == '--csv' else ''}; give a file")
        if str(file) != "-" and not file.absolute().parent.is_dir():
            fail(f"{file}: there is no folder {file.parent}")


def _shape(
    model: str | None,
    numbers: tuple[int | None, int | None, int | None, int | None],
    parameters: str | None,
    dtype: str,
    pre_rope: bool,
) -> Shape:
    from kvbits.plan.devices import count_of
    from kvbits.plan.names import shape_of
    from kvbits.plan.shapes import of_numbers

    if dtype not in _DTYPES:
        raise ValueError(f"--dtype {dtype} is unknown; allowed are {', '.join(_DTYPES)}")
    kind = None if dtype == "auto" else getattr(torch, dtype)
    layers, kv_heads, head_dim, value_dim = numbers
    given = [number is not None for number in (*numbers, parameters)]
    if model is not None:
        if any(given):
            raise ValueError("give a model, or --layers, --kv-heads and --head-dim, not both")
        with working(f"reading the sizes of {model}"):
            return shape_of(model, kind, pre_rope)
    if layers is None or kv_heads is None or head_dim is None:
        raise ValueError("name a model, such as llama-3.1-8b, or give all of --layers 32 --kv-heads 8 --head-dim 128")
    count = None if parameters is None else count_of(parameters)
    return of_numbers(layers, kv_heads, head_dim, value_dim, kind or torch.bfloat16, count)


# -- what is printed ---------------------------------------------------------------------------------------------------


def _print(found: Plan) -> None:
    setting = found.setting
    out.print(_title(setting), highlight=False, markup=False, soft_wrap=True)
    tables = [_cache_table(found)]
    if setting.shape.weights is not None or setting.memory_bytes is not None:
        tables.append(_memory_table(found))
    if setting.devices > 1:
        tables.append(_devices_table(found))
    for table in tables:  # a terminal that is narrower breaks lines, but hides no figure
        table.width = None if out.width >= _LEAST_WIDTH else _LEAST_WIDTH
        out.print(table, crop=False)
    for line in _lines(found):
        out.print(line, highlight=False, markup=False, soft_wrap=True)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column == "scheme" else "right", overflow="fold")
    return table


def _cache_table(found: Plan) -> Table:
    columns = ["scheme", "bits, papers", "GiB, papers", "bits, real", "GiB, real", "KiB a token"]
    measured = any(row.figures for row in found.rows)
    table = _table("the cache", *columns, *(["KL"] if measured else []))
    for row in found.rows:
        bits = f"{row.real.bits_per_element:.2f}" if row.real.elements else "-"  # nothing is in kvbits' hands
        cells = [
            f"{row.paper_bits:.2f}", _gib(row.paper_bytes), bits,
            _gib(row.real.count.total), f"{row.bytes_per_token / 2**10:,.2f}",
        ]  # fmt: skip
        if measured:
            figure = (row.figures or {}).get("kl_mean")
            cells.append("-" if figure is None else f"{figure:.4f}")
        table.add_row(escape(row.named.name), *cells)
    return table


def _memory_table(found: Plan) -> Table:
    setting, limited = found.setting, found.setting.memory_bytes is not None
    title = "GiB" if setting.devices == 1 else "GiB on the fullest device"
    columns = ["weights", "cache", "peak", "in all", *(["longest context", "largest batch"] if limited else [])]
    table = _table(title, "scheme", *columns)
    for row in found.rows:
        fullest = max(row.needs, key=lambda need: need.total)
        cells = [_gib(x) for x in (fullest.weights, fullest.cache.count.total, fullest.peak, fullest.total)]
        cells += [_count(row.max_context), _count(row.max_batch)] if limited else []
        table.add_row(escape(row.named.name), *cells)
    return table


def _devices_table(found: Plan) -> Table:
    shown = range(min(6, found.setting.devices))
    more = f"; the first {len(shown)} of {found.setting.devices}" if found.setting.devices > len(shown) else ""
    table = _table(f"GiB on each device{more}", "scheme", *map(str, shown))
    for row in found.rows:
        table.add_row(escape(row.named.name), *(_gib(row.needs[index].total) for index in shown))
    return table


def _gib(nbytes: float) -> str:
    """GiB, with as many digits as it takes to see anything."""
    return f"{nbytes / 2**30:,.2f}" if nbytes >= 2**30 / 10 or not nbytes else f"{nbytes / 2**30:.2g}"


def _title(setting: Setting) -> str:
    from kvbits.plan.devices import gib

    shape = setting.shape
    kinds = [
        f"{count} x {kind.heads} KV heads of {kind.key_channels}"
        + (f"/{kind.value_channels}" if kind.value_channels != kind.key_channels else "")
        + (f", window {kind.window:,}" if kind.window else "")
        if kind is not None
        else f"{count} without keys and values that kvbits stores"
        for kind, count in shape.kinds().items()
    ]
    parts = [f"{shape.name} ({shape.source}): {'; '.join(kinds)}; {str(shape.dtype).removeprefix('torch.')}"]
    calls = "" if setting.chunk is None else f", read in chunks of {setting.chunk:,}"
    calls += f", the last {setting.steps:,} one by one" if setting.steps else ""
    parts.append(f"{setting.context:,} tokens{calls}, {setting.batch} row{'s' if setting.batch > 1 else ''}")
    if setting.memory_bytes is not None:
        kept = f", {gib(setting.reserve_bytes)} of it kept free" if setting.reserve_bytes else ""
        many = f"{setting.devices} devices ({setting.split}) of " if setting.devices > 1 else ""
        parts.append(f"{many}{gib(setting.memory_bytes)}{kept}")
    return "\n".join(parts)


def _count(number: int | None) -> str:
    return "no limit" if number is None else f"{number:,}" if number else "none"


def _lines(found: Plan) -> list[str]:
    lines = [f"note: {note}" for note in found.notes]
    if found.setting.memory_bytes is not None:
        if found.recommended is None:
            lines.append("recommended: nothing fits; give more memory, a shorter context, or weights in fewer bits")
        else:
            lines.append(f"recommended: {found.recommended[0]}: {found.recommended[1]}")
    return lines


def _write_csv(found: Plan, path: Path) -> None:
    text = io.StringIO()
    rows = [_csv_row(found.setting, row) for row in found.rows]
    writer = csv.DictWriter(text, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    if str(path) == "-":
        sys.stdout.write(text.getvalue())
    else:
        attempt(path.write_text, text.getvalue(), encoding="utf-8")


def _csv_row(setting: Setting, row: Row) -> dict[str, Any]:
    fullest = max(row.needs, key=lambda need: need.total)
    data = row.to_json()
    plain = {name: value for name, value in data.items() if not isinstance(value, (dict, list))}
    plain.pop("quality", None)
    parts = {f"{name}_bytes": value for name, value in data["real_parts"].items()}
    device = {"device_weights_bytes": fullest.weights, "device_peak_bytes": fullest.peak, "device_bytes": fullest.total}
    first = {"model": setting.shape.name, "context": setting.context, "batch": setting.batch}
    return {**first, **plain, **parts, **device}
