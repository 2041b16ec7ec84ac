"""``kvbits schemes`` and ``kvbits explain``: what there is, and what a model makes of it."""

from __future__ import annotations

import re
import textwrap
from typing import Annotated, ClassVar

import torch
import typer
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import Markdown, MarkdownElement, TableElement
from rich.markup import escape
from rich.table import Table

from kvbits.cli.common import Calibrated, Device, DType, Model, attempt, fail, load, out
from kvbits.schemes import help as pages
from kvbits.schemes.catalogue import ALIAS_ADVICE, ALIASES, CATALOGUE, RECOMMENDED
from kvbits.schemes.grammar import __doc__ as grammar_of_schemes
from kvbits.schemes.scheme import Scheme
from kvbits.store.record import Record

WIDE = 120
"""Columns of a console from which on the list of schemes also says what is stored, and where it is from."""


def schemes(
    name: Annotated[
        str | None,
        typer.Argument(help="A scheme (kivi4, nuq3-1%, default) or a modifier (centred, outliers): print its page."),
    ] = None,
) -> None:
    """List every scheme, or say of one what it stores, what it costs, when to take it and where it is from."""
    if name is not None:
        out.print(_Page(_page(name), hyperlinks=False))
        return
    wide = out.width >= WIDE
    table = Table(title="bits per element of a packed block, head_dim 128, scales and zeros included")
    for column in ("scheme", "bits", *(("stored", "source") if wide else ()), "when"):
        table.add_column(column, justify="right" if column == "bits" else "left", no_wrap=column in ("scheme", "bits"))
    for entry in CATALOGUE:
        more = (entry.formula, entry.paper) if wide else ()
        table.add_row(entry.name, _bits(Scheme.parse(entry.name)), *map(escape, (*more, entry.advice)))
    out.print(table)
    aliases = Table(title="names that stand for whole schemes")
    for column in ("name", "bits", "stands for", "when"):
        aliases.add_column(column, justify="right" if column == "bits" else "left")
    for alias, scheme in ALIASES.items():
        aliases.add_row(alias, _bits(Scheme.parse(scheme)), scheme, ALIAS_ADVICE[alias])
    out.print(aliases)
    grammar = textwrap.dedent((grammar_of_schemes or "").split("::\n", 1)[1]).strip()
    out.print(
        f"{grammar}\n\nEach grouped name also with -gs32, -gs64, -gs128 (elements that share a scale) and, but for "
        "hqq, -1% (outliers).\nPages: kvbits schemes NAME, with any scheme, or one of "
        f"{', '.join(page.replace('_', '-') for page in pages.MODIFIERS)}.",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


class _FoldedTable(TableElement):
    """A table of a page, whose long words go on in the next line; rich would cut them."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for table in super().__rich_console__(console, options):
            for column in table.columns if isinstance(table, Table) else ():
                column.overflow = "fold"
            yield table


class _Page(Markdown):
    """A page of a scheme on a console."""

    elements: ClassVar[dict[str, type[MarkdownElement]]] = {**Markdown.elements, "table_open": _FoldedTable}


def _bits(scheme: Scheme, head_dim: int = 128) -> str:
    """Bits per element of a packed block of a 16-bit model, K and V on average."""
    record = Record.of(scheme.key, scheme.value, scheme.block, head_dim, head_dim, torch.bfloat16)
    return f"{8 * record.nbytes / (2 * scheme.block * head_dim):.2f}"


def _page(name: str) -> str:
    """What ``kvbits schemes NAME`` prints, as Markdown: without comments, and with names of files in place of links."""
    page = pages.of_word(name)
    texts = [pages.read(page)] if page is not None else _pages_of_scheme(name)
    text = re.sub(r"<!--.*?-->\n*", "", "\n\n".join(texts), flags=re.S)
    text = re.sub(r"\[([^\]]+)\]\((?:\.\./)+([^)#]+)[^)]*\)", r"\1 (`\2`)", text)
    return re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]+\)", r"\1", text)


def _pages_of_scheme(name: str) -> list[str]:
    try:
        scheme = Scheme.parse(name)
    except ValueError as error:
        near = pages.near(name)
        fail(str(error) + (f". There are pages on {', '.join(near)}" if near else ""))
    methods, modifiers = pages.of_scheme(scheme)
    meant = [f"k={scheme.key}", f"v={scheme.value}"]
    meant += [word for word, used in (("pre-rope", scheme.pre_rope), ("centred", scheme.centred)) if used]
    facts = [f"It stands for `{','.join(meant)}` in blocks of {scheme.block} tokens."]
    facts += [f"Packed, it takes {_bits(scheme, 64)} bits per element at head_dim 64, {_bits(scheme)} at head_dim 128."]
    facts.append(_exact_part(scheme))
    if scheme.needs_calibration:
        facts.append(f"It needs a calibration: `kvbits calibrate MODEL --text FILE --out DIR --scheme {scheme}`.")
    if modifiers:
        more = ", ".join(f"`kvbits schemes {page.replace('_', '-')}`" for page in modifiers)
        facts.append(f"More on what it uses: {more}.")
    return [f"**`{name.strip()}`**", "\n".join(f"- {fact}" for fact in facts), *map(pages.read, methods)]


def _exact_part(scheme: Scheme) -> str:
    """What stays exact beside the packed blocks."""
    if not scheme.packs:
        return "Every token stays exact."
    late = f", and up to {scheme.late_sinks} later ones that look like sinks" if scheme.late_sinks else ""
    others = "".join(f" Other codecs: `{one}`." for one in scheme.overrides)
    return (
        f"Beside packed blocks the first {scheme.sinks} tokens{late} and at least the {scheme.residual} most recent "
        f"ones stay exact.{others}"
    )


def explain(
    model: Model = "smollm2",
    scheme: Annotated[str, typer.Option("--scheme", "-s", help="The scheme.")] = RECOMMENDED,
    dtype: DType = "auto",
    device: Device = "cpu",
    calibration: Calibrated = None,
) -> None:
    """Say for each layer of a model which kernel computes attention under a scheme, and why."""
    parsed = attempt(Scheme.parse, scheme)
    loaded, _ = load(model, dtype, device)
    from kvbits.hf.explain import explain as explain_layers

    out.print(str(attempt(explain_layers, loaded, parsed, calibration=calibration)), markup=False, highlight=False)
