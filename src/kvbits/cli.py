"""Floor 7: the command line. Every command is a few lines over the library."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

try:
    import torch
    import typer
    from rich import progress
    from rich.console import Console
    from rich.markdown import Markdown
    from rich.markup import escape
    from rich.table import Table

    from kvbits import __version__, pages
    from kvbits.catalogue import ALIAS_ADVICE, ALIASES, CATALOGUE, RECOMMENDED
    from kvbits.files import load_calibration, refuse_uncalibrated
    from kvbits.scheme import SINK_TOKENS, Scheme
    from kvbits.scheme import __doc__ as grammar_of_schemes
    from kvbits.store import Record
except KeyboardInterrupt:  # torch takes seconds to import, and main() is not there yet to end quietly
    raise SystemExit(130) from None

if TYPE_CHECKING:
    from kvbits.hf.run import Run

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
out, err = Console(), Console(stderr=True)

Model = Annotated[str, typer.Argument(help="Hub id, local folder, .gguf file, or smollm2, the embedded small model.")]
Schemes = Annotated[list[str] | None, typer.Option("--scheme", "-s", help="A scheme; repeat it to compare several.")]
DType = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option(help="Device for the model, such as cpu, cuda or mps.")]
Calibrated = Annotated[
    Path | None, typer.Option("--calibration", help="Folder that 'kvbits calibrate' wrote, for schemes that need one.")
]

DEMO_TOKENS = 2000


@app.command()
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
    schemes = [_try(Scheme.parse, name) for name in scheme or [RECOMMENDED]]
    if json_file is not None and not json_file.absolute().parent.is_dir():
        _fail(f"--json {json_file}: there is no folder {json_file.parent}")
    for one in schemes if calibration is None else ():
        _try(refuse_uncalibrated, one)
    if calibration is not None:
        _try(load_calibration, calibration)  # says what is wrong with it before a model is loaded
    text = _prompt_text(prompt, prompt_file)
    if not text.strip():
        _fail("the prompt is empty; give --prompt or --prompt-file")
    runs = _generate(model, schemes, text, prompt_tokens, max_new_tokens, chat, dtype, device, calibration)
    out.print(_table(runs))
    if json_file is not None:
        _try(json_file.write_text, json.dumps([_row(run, runs[0]) for run in runs], indent=1) + "\n")


@app.command()
def demo(
    model: Model = "smollm2",
    scheme: Schemes = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 60,
    dtype: DType = "auto",
    device: Device = "cpu",
) -> None:
    """The main job at a glance: a prompt of 2,000 tokens, the exact cache beside a packed one."""
    schemes = [_try(Scheme.parse, name) for name in ["exact", *(scheme or [RECOMMENDED])]]
    runs = _generate(model, schemes, _topics(), DEMO_TOKENS, max_new_tokens, False, dtype, device)
    out.print(_table(runs))


@app.command()
def schemes(
    name: Annotated[
        str | None,
        typer.Argument(help="A scheme (kivi4, nuq3-1%, default) or a modifier (centred, outliers): print its page."),
    ] = None,
) -> None:
    """List every scheme, or say of one what it stores, what it costs, when to take it and where it is from."""
    if name is not None:
        out.print(Markdown(_page(name), hyperlinks=False))
        return
    table = Table(title="bits per element of a packed block, head_dim 128, scales and zeros included")
    for column in ("scheme", "bits", "stored", "source", "when"):
        table.add_column(column, justify="right" if column == "bits" else "left")
    for entry in CATALOGUE:
        texts = map(escape, (entry.formula, entry.paper, entry.advice))
        table.add_row(entry.name, _bits(Scheme.parse(entry.name)), *texts)
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


def _bits(scheme: Scheme, head_dim: int = 128) -> str:
    """Bits per element of a packed block of a 16-bit model, K and V on average."""
    record = Record.of(scheme.key, scheme.value, scheme.block, head_dim, head_dim, torch.bfloat16)
    return f"{8 * record.nbytes / (2 * scheme.block * head_dim):.2f}"


def _page(name: str) -> str:
    """What ``kvbits schemes NAME`` prints, as Markdown: without comments, and with names of files in place of links."""
    page = pages.of_word(name)
    texts = [pages.read(page)] if page is not None else _pages_of_scheme(name)
    text = re.sub(r"<!--.*?-->\n*", "", "\n\n".join(texts), flags=re.S)
    text = re.sub(r"\[([^\]]+)\]\(\.\./\.\./\.\./([^)#]+)[^)]*\)", r"\1 (`\2`)", text)
    return re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]+\)", r"\1", text)


def _pages_of_scheme(name: str) -> list[str]:
    try:
        scheme = Scheme.parse(name)
    except ValueError as error:
        near = pages.near(name)
        _fail(str(error) + (f". There are pages on {', '.join(near)}" if near else ""))
    methods, modifiers = pages.of_scheme(scheme)
    meant = [f"k={scheme.key}", f"v={scheme.value}"]
    meant += [word for word, used in (("pre-rope", scheme.pre_rope), ("centred", scheme.centred)) if used]
    facts = [f"It stands for `{','.join(meant)}` in blocks of {scheme.block} tokens."]
    facts += [f"Packed, it takes {_bits(scheme, 64)} bits per element at head_dim 64, {_bits(scheme)} at head_dim 128."]
    if scheme.needs_calibration:
        facts.append(f"It needs a calibration: `kvbits calibrate MODEL --text FILE --out DIR --scheme {scheme}`.")
    if modifiers:
        more = ", ".join(f"`kvbits schemes {page.replace('_', '-')}`" for page in modifiers)
        facts.append(f"More on what it uses: {more}.")
    return [f"**`{name.strip()}`**", "\n".join(f"- {fact}" for fact in facts), *map(pages.read, methods)]


@app.command()
def explain(
    model: Model = "smollm2",
    scheme: Annotated[str, typer.Option("--scheme", "-s", help="The scheme.")] = RECOMMENDED,
    dtype: DType = "auto",
    device: Device = "cpu",
    calibration: Calibrated = None,
) -> None:
    """Say for each layer of a model which kernel computes attention under a scheme, and why."""
    parsed = _try(Scheme.parse, scheme)
    loaded, _ = _load(model, dtype, device)
    from kvbits.hf.explain import explain as explain_layers

    out.print(str(_try(explain_layers, loaded, parsed, calibration=calibration)), markup=False, highlight=False)


@app.command()
def version() -> None:
    """Print the version."""
    out.print(__version__, highlight=False)


@app.command()
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
        _try(Scheme.parse, name)
    content = _prompt_text(None, text)
    loaded, tokenizer = _load(model, dtype, device)
    from kvbits.calibration import calibrate as fit

    tasks: dict[str, progress.TaskID] = {}
    bar = progress.Progress(
        progress.TextColumn("{task.description}"), progress.BarColumn(), progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(), progress.TextColumn("left"), progress.TimeRemainingColumn(), console=err,
    )  # fmt: skip

    def report(stage: str, done: int, count: int) -> None:
        if stage not in tasks:
            tasks[stage] = bar.add_task(stage, total=count, completed=done)
        bar.update(tasks[stage], completed=done)

    def tell(plan: str) -> None:
        err.print(plan, markup=False, highlight=False, soft_wrap=True)

    try:
        with bar:
            found = _try(
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


def _generate(
    name: str,
    schemes: list[Scheme],
    text: str,
    limit: int | None,
    steps: int,
    chat: bool,
    dtype: str,
    device: str,
    calibration: Path | None = None,
) -> list[Run]:
    model, tokenizer = _load(name, dtype, device)
    from kvbits.hf.run import run

    if chat:
        if not getattr(tokenizer, "chat_template", None):
            _fail(f"{name} has no chat template; leave out --chat")
        turn = [{"role": "user", "content": text.strip()}]
        text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=not chat).input_ids[:, :limit].to(model.device)
    longest = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if longest is not None and ids.shape[1] + steps > longest:
        _fail(
            f"{ids.shape[1]} prompt tokens and {steps} new ones are more than the {longest} that {name} was made for; "
            f"give --prompt-tokens {max(1, longest - steps)} or fewer"
        )
    runs = []
    for scheme in schemes:
        out.rule(f"{scheme}, prompt of {ids.shape[1]} tokens")
        show, finish = _streamer(tokenizer)
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        runs.append(_try(run, model, ids, scheme, steps, show, calibration, pad_token_id=pad))
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


def _load(name: str, dtype: str, device: str) -> tuple[Any, Any]:
    path = Path(name)
    if path.is_dir() and not (path / "config.json").is_file():
        _fail(f"the folder {name} has no config.json: it is no model")
    if path.is_file() and path.suffix != ".gguf":
        _fail(f"{name} is a file, but no .gguf file; give a hub id, a folder with a model, or a .gguf file")
    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        _fail(f"--dtype {dtype} is unknown; allowed are auto, float32, bfloat16, float16")
    from transformers.utils import logging

    from kvbits.hf.loading import load_model, load_tokenizer

    logging.set_verbosity_error()
    _try(torch.empty, 0, device=device, what=f"cannot use the device {device!r}: ")
    with err.status(f"loading {name}"):
        tokenizer = _try(load_tokenizer, name, what=f"cannot load {name!r}: ")
        kind = dtype if dtype == "auto" else getattr(torch, dtype)
        model = _try(load_model, name, dtype=kind, what=f"cannot load {name!r}: ")
        return _try(model.to, device, what=f"cannot use the device {device!r}: "), tokenizer


def _prompt_text(prompt: str | None, file: Path | None) -> str:
    if prompt is not None and file is not None:
        _fail("give --prompt or --prompt-file, not both")
    if prompt is not None:
        return prompt
    if file is None:
        return _topics()
    try:
        return sys.stdin.read() if str(file) == "-" else str(_try(file.read_text, encoding="utf-8"))
    except UnicodeDecodeError as error:
        _fail(f"{file} is not text in UTF-8: {error.reason} at byte {error.start}")


def _topics() -> str:
    """Real English on any Python: the prose of its own help topics on objects and execution, about 5,000 tokens."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in ("objects", "execmodel", "exceptions", "types"))[:20_000]


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


def _table(runs: list[Run]) -> Table:
    first = runs[0]
    table = Table(
        caption=f"smaller, agreement: against {first.scheme}; KV bytes really allocated, after the last token"
    )
    for column in ("scheme", "KV bytes", "smaller", "prefill tok/s", "decode tok/s", "leading tokens equal"):
        table.add_column(column, justify="left" if column == "scheme" else "right")
    for run in runs:
        row = _row(run, first)
        rate = row["decode_tokens_per_second"]
        table.add_row(
            run.scheme,
            f"{run.kv_bytes:,}",
            f"{row['bytes_ratio']:.2f}x" if len(runs) > 1 else "-",
            f"{run.prefill_rate:.1f}",
            "-" if rate is None else f"{rate:.1f}",
            f"{row['leading_tokens_equal']} of {len(first.tokens)}" if len(runs) > 1 else "-",
        )
    return table


def _try(function: Callable[..., Any], *args: Any, what: str = "", **kwargs: Any) -> Any:
    """Call; turn what a user can cause into one message, with ``what`` before it, and exit status 2."""
    try:
        return function(*args, **kwargs)
    except (BrokenPipeError, UnicodeDecodeError, typer.Exit):
        raise
    except Exception as error:  # a user sees what is wrong, never a traceback; the library is for those who debug
        _fail(f"{what}{error}")


def _fail(message: str) -> NoReturn:
    err.print(f"error: {message}", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(2)


def main() -> None:
    """The entry point: an interruption or a closed pipe ends quietly, as in other command-line programs."""
    try:
        app()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:
        sys.stderr.close()
        raise SystemExit(141) from None


if __name__ == "__main__":
    main()
