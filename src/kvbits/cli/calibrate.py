"""``kvbits calibrate``: fit tables, static scales and key means of a model to a text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import TaskID

from kvbits.cli.common import Device, DType, Model, attempt, bars, err, load, out, read_text, say
from kvbits.schemes.scheme import SINK_TOKENS, Scheme


def calibrate(
    model: Model,
    text: Annotated[Path, typer.Option(help="A text file to calibrate on; - is standard input.")],
    out_folder: Annotated[Path, typer.Option("--out", help="Folder for the result; a run that stopped goes on there.")],
    scheme: Annotated[
        list[str] | None,
        typer.Option("--scheme", "-s", help="What to calibrate for; repeatable. Default: all calibrated codecs."),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Windows of the text.")] = 16,
    length: Annotated[int, typer.Option(min=1, help="Tokens of each.")] = 2048,
    sinks: Annotated[int, typer.Option(min=0, help="First tokens of each to leave out.")] = SINK_TOKENS,
    checkpointing: Annotated[str, typer.Option(help="Compute twice, for less memory: auto, on or off.")] = "auto",
    keep_samples: Annotated[bool, typer.Option(help="Leave the samples there, to fit more later.")] = False,
    dtype: DType = "auto",
    device: Device = "cpu",
) -> None:
    """Fit tables, static scales and key means of a model to a text, for the schemes that need it.

    Runs the model forwards and backwards on one sample at a time. Says first how much memory and disk that takes.
    """
    for name in scheme or []:
        attempt(Scheme.parse, name)
    content = read_text(None, text)
    loaded, tokenizer = load(model, dtype, device)
    from kvbits.calibration import calibrate as fit

    tasks: dict[str, TaskID] = {}
    bar = bars()

    def report(stage: str, done: int, count: int) -> None:
        if stage not in tasks:
            tasks[stage] = bar.add_task(stage, total=count, completed=done)
        bar.update(tasks[stage], completed=done)

    def tell(plan: str) -> None:
        say(plan, err)

    try:
        with bar:
            found = attempt(
                fit, loaded, content, scheme, tokenizer=tokenizer, samples=samples, length=length, sinks=sinks,
                out=out_folder, checkpointing=checkpointing, keep_samples=keep_samples, tell=tell, report=report,
            )  # fmt: skip
    except KeyboardInterrupt:
        err.print(f"interrupted; the same command goes on from what is in {out_folder}", markup=False, soft_wrap=True)
        raise
    size = sum(x.nbytes for x in found.tensors.values())
    out.print(f"{out_folder}: {len(found.about['layers'])} layers, {size:,} bytes", markup=False, highlight=False)
    for line in found.fits():
        out.print(f"  {line}", markup=False, highlight=False)
