"""The report as Markdown: the choice, the pictures and the tables."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from kvbits.report import tables, words
from kvbits.report.choose import Choice, Rule
from kvbits.report.hero import caveats, conditions, others, stated
from kvbits.report.merge import Measured
from kvbits.report.tables import Table


def markdown(
    models: Sequence[Measured], choices: Sequence[Choice], rule: Rule, pictures: Mapping[str, Sequence[str]]
) -> str:
    """The text of ``report.md``. ``pictures`` are names of files, by model."""
    parts = ["# KV cache report"]
    for measured, choice in zip(models, choices, strict=True):
        parts += [f"## {text(measured.model)}", _choice(choice, rule)]
        parts += [f"![{name.removesuffix('.png')}]({name})" for name in pictures.get(measured.model, ())]
        parts.append(_table(tables.verdicts(choice)))
        for run in measured.all_runs:
            parts += [_table(one, tables.apart(measured, run)) for one in tables.of_run(run)]
        found = tables.remarks(measured)
        if found:
            lines = [f"- {text(what)}: {text(said)}" for what, said in found]
            parts.append("\n".join(["### Failures and warnings", "", *lines]))
        parts.append(_table(tables.settings(measured.all_runs)))
    parts.append(text(stated(rule)))
    return "\n\n".join(parts) + "\n"


def _choice(choice: Choice, rule: Rule) -> str:
    one = choice.take
    lines = [f"**Take {code(one.scheme)}.**" if one else f"**No recommendation.** {text(choice.why)}", ""]
    shown = one or choice.closest
    for value, what, limit, mark in conditions(shown, choice, rule) if shown else []:
        sign = {"good": "✓ ", "bad": "✗ "}.get(mark, "")
        lines.append(f"- {text(what)}: {text(value)} ({sign}{text(limit)})")
    lines += [f"- {text(caveat)}" for caveat in caveats(choice)]
    for what, other in others(choice):
        figures = f"{words.decimal(other.bits)} bits, KL {words.small(other.kl)}"
        lines.append(f"- {what}: {code(other.scheme)}, {figures}")
    return "\n".join(lines)


def _table(table: Table, note: str = "") -> str:
    head = [text(column.name) for column in table.columns]
    rule = ["---" if column.left else "--:" for column in table.columns]
    rows = [
        [code(cell.text) if column.code else text(cell.text) for cell, column in zip(row, table.columns, strict=True)]
        for row in table.rows
    ]
    lines = [f"| {' | '.join(cells)} |" for cells in (head, rule, *rows)]
    title = f"### {text(table.title)}" + (f" ({text(note)})" if note else "")
    return "\n".join([title, "", *lines, *(["", text(table.note)] if table.note else [])])


def text(words_: str) -> str:
    """Any text as Markdown that shows it, in one line."""
    return re.sub(r"([\\`*_\[\]<>|#~&$])", r"\\\1", " ".join(words_.split()))


def code(name: str) -> str:
    """Any text as a code span that holds it, also inside a table."""
    name = " ".join(name.split())
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", name)), default=0))
    room = " " if name.startswith("`") or name.endswith("`") else ""
    return f"{fence}{room}{name}{room}{fence}".replace("|", "\\|")
