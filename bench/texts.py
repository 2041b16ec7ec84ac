"""Quality of schemes on several texts, one after the other, and what such a script is told on its command line."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvbits.hf.loading import load_model, load_tokenizer
from kvbits.measure.quality import CHUNK, LENGTH, WINDOWS, measure
from kvbits.measure.setting import SEED
from kvbits.measure.text import BETWEEN, Text, read, windows_of


@dataclass(frozen=True)
class OnTexts:
    """Windows of several texts, read through the caches of one model.

    Attributes:
        texts: ``NAME=FILE`` or ``NAME=FILE+FILE``, which are joined.
        calibration: folder that ``kvbits calibrate`` wrote.
        partial: beginning of the names of files to go on from after an interruption.
    """

    model: str
    texts: list[str]
    calibration: Path
    windows: int
    length: int
    chunk: int
    partial: str | None

    @staticmethod
    def parser(description: str) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument("--model", default="smollm2")
        parser.add_argument("--text", action="append", required=True, metavar="NAME=FILE[+FILE...]", help="repeatable")
        parser.add_argument("--calibration", type=Path, required=True, help="folder that 'kvbits calibrate' wrote")
        parser.add_argument("--windows", type=int, default=WINDOWS)
        parser.add_argument("--length", type=int, default=LENGTH)
        parser.add_argument("--chunk", type=int, default=CHUNK)
        parser.add_argument("--partial", help="beginning of the names of files to go on from after an interruption")
        parser.add_argument("--out")
        return parser

    @classmethod
    def of(cls, given: argparse.Namespace) -> OnTexts:
        """The options that :meth:`parser` read."""
        return cls(
            given.model, given.text, given.calibration, given.windows, given.length, given.chunk, given.partial
        )  # fmt: skip

    @property
    def setting(self) -> dict[str, Any]:
        """What the results say of it."""
        return {
            "model": self.model,
            "windows": self.windows,
            "length": self.length,
            "chunk": self.chunk,
            "calibration": self.calibration.name,
            "texts": {
                text.partition("=")[0]: [Path(file).name for file in text.partition("=")[2].split("+")]
                for text in self.texts
            },
        }

    def rows(self, schemes: Sequence[str]) -> list[dict[str, Any]]:
        """One row for each scheme on each text, with the ``text``'s name."""
        torch.manual_seed(SEED)
        model, tokenizer = load_model(self.model, dtype=torch.float32), load_tokenizer(self.model)
        rows = []
        for source in self.texts:
            name, _, files = source.partition("=")
            content = BETWEEN.join(contents(Path(file)).content for file in files.split("+"))
            windows = windows_of(content, tokenizer, self.windows, self.length, "spread")
            found = measure(
                model, windows, schemes, chunk=self.chunk, calibration=self.calibration, tell=print,
                json=f"{self.partial}.{name}.json" if self.partial else None,
                report=lambda scheme, done, total, name=name: None if done % 1024 else print(name, scheme, done, total),
            ).rows  # fmt: skip
            rows += [{"text": name, **row} for row in found]
        return rows


def contents(path: Path) -> Text:
    """A text, or the problems of a ``.jsonl`` file, each with its solution."""
    if path.suffix == ".jsonl":
        first, *_ = records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        if {"question", "solution"} <= first.keys():
            return Text(path.name, BETWEEN.join(f"{each['question']}\n{each['solution']}" for each in records))
    return read(path)
