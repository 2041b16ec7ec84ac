"""The command line, run in this process."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

import zoo
from kvbits.cli import app
from letters import WORDS, tokenizer

TEXT = " ".join(WORDS[i % len(WORDS)] for i in range(300))


def write_model(path: Path) -> None:
    """A tiny Llama with a word tokenizer, as a folder."""
    zoo.build("llama").save_pretrained(path)
    tokenizer().save_pretrained(path)


def run(*arguments: str, text: str | None = None, columns: int = 200) -> tuple[int, str]:
    """Exit status and everything printed."""
    result = CliRunner().invoke(app, list(arguments), input=text, env={"COLUMNS": str(columns)})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output
