"""The command line. Every command is a few lines over the library, one file for each or a few of a kind."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, Any

try:
    import typer

    from kvbits import __version__
    from kvbits.cli import (
        bench,
        calibrate,
        chat,
        evaluate,
        generate,
        inspect,
        plan,
        report,
        retrieval,
        schemes,
        serve,
        tasks,
    )  # fmt: skip
    from kvbits.cli.common import out, reason
except KeyboardInterrupt:  # torch takes seconds to import, and main() is not there yet to end quietly
    raise SystemExit(130) from None

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def version() -> None:
    """Print the version."""
    out.print(__version__, highlight=False)


def _version(asked: bool) -> None:
    if asked:
        version()
        raise typer.Exit


@app.callback()
def _options(
    asked: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """The KV cache of language models in 2 to 8 bits, and attention straight from the stored bits."""


COMMANDS: dict[str, Callable[..., Any]] = {
    "demo": generate.demo,
    "generate": generate.generate,
    "chat": chat.chat,
    "schemes": schemes.schemes,
    "explain": schemes.explain,
    "eval": evaluate.evaluate,
    "retrieval": retrieval.retrieval,
    "tasks": tasks.tasks,
    "bench": bench.bench,
    "report": report.report,
    "plan": plan.plan,
    "calibrate": calibrate.calibrate,
    "inspect": inspect.inspect,
    "serve": serve.serve,
    "version": version,
}
"""In the order in which ``kvbits --help`` lists them."""

for name, command in COMMANDS.items():
    app.command(name)(command)

app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(tasks.lm_eval)


def main() -> None:
    """The entry point: an interruption or a closed pipe ends quietly, as in other command-line programs."""
    if sys.stdout is None:
        raise SystemExit("error: standard output is closed")
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:
        sys.stderr.close()
        raise SystemExit(141) from None
    except OSError as error:  # a full disk behind standard output, which is written to once more at the end
        sys.stdout = None
        raise SystemExit(f"error: {reason(error)}") from None
