"""``kvbits report``: results of any measurements as one page that says which scheme to take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvbits.cli.common import attempt, err, say


def report(
    results: Annotated[
        list[Path], typer.Argument(help="Files that eval and bench wrote, folders of such, earlier report.json files.")
    ],
    out_folder: Annotated[Path, typer.Option("--out", help="Folder for index.html, report.json, report.md and PNGs.")],
    max_kl: Annotated[float, typer.Option(help="The rule: mean KL to the exact cache, nats, at most.")] = 0.01,
    min_top1: Annotated[float, typer.Option(help="The rule: share of equal likeliest tokens, at least.")] = 0.97,
    min_speed: Annotated[float, typer.Option(help="The rule: decode speed against the exact cache, at least.")] = 0.95,
    pictures: Annotated[bool, typer.Option(help="Write PNG files too. All pictures need Matplotlib.")] = True,
) -> None:
    """Merge results into one page that says which scheme to take, with pictures and tables.

    Files of several models, dates and settings may be given together; only what was measured alike is compared.
    """
    from kvbits.report import Rule, write
    from kvbits.report.drawing import NEEDED, available
    from kvbits.report.words import printable

    rule = attempt(Rule, max_kl=max_kl, min_top1=min_top1, min_speed=min_speed)
    with err.status("drawing"):
        made = attempt(write, results, out_folder, rule, pictures)
    for measured, choice in zip(made.models, made.choices, strict=True):
        said = f"take {choice.take.scheme}" if choice.take else f"no recommendation. {choice.why}"
        lines = [f"{measured.model}: {said}", *(f"  {caveat}" for caveat in choice.caveats)]
        if choice.missing:
            lines.append(f"  not measured: {', '.join(choice.missing)}")
        for line in lines:
            say(printable(line))
    if not available():
        say(NEEDED, err)
    say(f"{out_folder / 'index.html'}")
