"""``kvbits generate`` and ``kvbits demo``: text under one or more schemes, with memory and speed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from kvbits.cli.common import (
    Calibrated,
    Device,
    DType,
    Model,
    Schemes,
    attempt,
    fail,
    load,
    out,
    read_text,
    results_file,
    topics,
)
from kvbits.files import load_calibration, refuse_uncalibrated, row_lines
from kvbits.schemes.catalogue import RECOMMENDED
from kvbits.schemes.scheme import Scheme

if TYPE_CHECKING:
    from kvbits.hf.run import Run

DEMO_TOKENS = 2000


def generate(
    model: Model = "smollm2",
    scheme: Schemes = None,
    prompt: Annotated[str | None, typer.Option(help="The prompt itself.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A text file with the prompt; - is standard input.")] = None,
    prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Use only this many tokens of it.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 100,
    chat: Annotated[bool, typer.Option(help="Wrap the prompt in the model's chat template.")] = False,
    dtype: DType = "auto",
    device: Device = "cpu",
    calibration: Calibrated = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the measurements here.")] = None,
) -> None:
    """Generate from a prompt under one or more schemes, and compare memory, speed and text.

    The scheme 'exact' is Transformers' own cache. Without a prompt, the text of Python's help topics is used.
    """
    schemes = _parsed(scheme or [RECOMMENDED])
    results_file(json_file)
    for _, one in schemes if calibration is None else ():
        attempt(refuse_uncalibrated, one)
    if calibration is not None:
        attempt(load_calibration, calibration)  # says what is wrong with it before a model is loaded
    text = read_text(prompt, prompt_file)
    if not text.strip():
        fail("the prompt is empty; give --prompt or --prompt-file")
    runs = _generate(model, schemes, text, prompt_tokens, max_new_tokens, chat, dtype, device, calibration)
    out.print(table([name for name, _ in schemes], runs))
    if json_file is not None:
        attempt(json_file.write_text, row_lines([_row(run, runs[0]) for run in runs]))


def demo(
    model: Model = "smollm2",
    scheme: Schemes = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 60,
    dtype: DType = "auto",
    device: Device = "cpu",
) -> None:
    """The main job at a glance: a prompt of 2,000 tokens, the exact cache beside a packed one."""
    schemes = _parsed(["exact", *(scheme or [RECOMMENDED])])
    runs = _generate(model, schemes, topics(), DEMO_TOKENS, max_new_tokens, False, dtype, device)
    out.print(table([name for name, _ in schemes], runs))


def _parsed(names: list[str]) -> list[tuple[str, Scheme]]:
    """Schemes beside the names that a user has given them."""
    return [(name.strip(), attempt(Scheme.parse, name)) for name in names]


def _generate(
    name: str,
    schemes: list[tuple[str, Scheme]],
    text: str,
    limit: int | None,
    steps: int,
    chat: bool,
    dtype: str,
    device: str,
    calibration: Path | None = None,
) -> list[Run]:
    model, tokenizer = load(name, dtype, device)
    from kvbits.hf.run import run

    if chat:
        if not getattr(tokenizer, "chat_template", None):
            fail(f"{name} has no chat template; leave out --chat")
        turn = [{"role": "user", "content": text.strip()}]
        text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=not chat).input_ids[:, :limit].to(model.device)
    longest = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if longest is not None and ids.shape[1] + steps > longest:
        fail(
            f"{ids.shape[1]} prompt tokens and {steps} new ones are more than the {longest} that {name} was made for; "
            f"give --prompt-tokens {max(1, longest - steps)} or fewer"
        )
    runs = []
    for given, scheme in schemes:
        out.rule(f"{escape(given)}, prompt of {ids.shape[1]} tokens")
        show, finish = _streamer(tokenizer)
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        runs.append(attempt(run, model, ids, scheme, steps, show, calibration, pad_token_id=pad))
        finish()
    return runs


def _streamer(tokenizer: Any) -> tuple[Callable[[int], None], Callable[[], None]]:
    """Print text as its tokens come: only what more tokens can no longer change."""
    tokens: list[int] = []
    shown = 0

    def write(end: bool) -> None:
        nonlocal shown
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        stop = len(text) if end or text.endswith(("\n", " ")) else text.rfind(" ") + 1
        if stop > shown and not (text.endswith("\N{REPLACEMENT CHARACTER}") and not end):
            sys.stdout.write(text[shown:stop])
            sys.stdout.flush()
            shown = stop

    def show(token: int) -> None:
        tokens.append(token)
        write(end=False)

    def finish() -> None:
        write(end=True)
        sys.stdout.write("\n")

    return show, finish


def _row(run: Run, first: Run) -> dict[str, Any]:
    return {
        "scheme": run.scheme,
        "prompt_tokens": run.prompt_tokens,
        "new_tokens": len(run.tokens),
        "kv_bytes": run.kv_bytes,
        "bytes_ratio": first.kv_bytes / run.kv_bytes,
        "prefill_tokens_per_second": run.prefill_rate,
        "decode_tokens_per_second": run.decode_rate,
        "leading_tokens_equal": run.agreement(first),
    }


def table(names: list[str], runs: list[Run]) -> Table:
    """Memory, speed and agreement of each run, under the names that a user has given to the schemes."""
    first = runs[0]
    found = Table(
        caption=f"smaller, agreement: against {escape(names[0])}; KV bytes really allocated, after the last token",
        box=box.SIMPLE_HEAD,
    )
    found.add_column("\nscheme", overflow="fold", min_width=10)
    for head in ("\nKV bytes", "\nsmaller", "prefill\ntok/s", "decode\ntok/s", "leading\ntokens equal"):
        found.add_column(head, justify="right", no_wrap=True)
    for name, run in zip(names, runs, strict=True):
        row, several = _row(run, first), len(runs) > 1
        found.add_row(
            escape(name),
            f"{run.kv_bytes:,}",
            f"{row['bytes_ratio']:.2f}x" if several else "-",
            f"{run.prefill_rate:.1f}",
            "-" if run.decode_rate is None else f"{run.decode_rate:.1f}",
            f"{row['leading_tokens_equal']} of {len(first.tokens)}" if several else "-",
        )
    return found
