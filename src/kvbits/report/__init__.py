"""Results as a page that says which scheme to take, with pictures, tables and the merged data.

:func:`write` makes of any number of files of results, of any models and dates:

- ``index.html``, one file that needs nothing else;
- ``quality.png``, ``speed.png``, ``memory.png`` and ``retrieval-TASK.png``;
- ``report.json``, all rows and settings merged, from which a later report can go on;
- ``report.md``, the tables.

Modules, from the files to the page: ``merge`` (what may be compared), ``choose`` (the rule), ``tables``, ``pictures``
(``scatter``, ``lines`` and ``heat``, on a ``plane`` of a ``drawing``), and the writers: ``page`` (with ``hero`` and
``markup``) and ``markdown``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbits import __version__
from kvbits.files import replacing, row_lines
from kvbits.measure.results import FORMAT, Results
from kvbits.report import drawing, markdown, merge, page
from kvbits.report.choose import Choice, Rule, choose
from kvbits.report.merge import Measured
from kvbits.report.pictures import files
from kvbits.report.standing import Standing

__all__ = ["Choice", "Measured", "Report", "Rule", "build", "write"]


@dataclass(frozen=True)
class Report:
    """What was measured of each model, and what the rule makes of it. ``files`` are those that were written."""

    models: list[Measured]
    choices: list[Choice]
    rule: Rule
    files: tuple[Path, ...] = ()

    @property
    def data(self) -> dict[str, Any]:
        """Everything as plain JSON data, as ``report.json`` has it."""
        return {
            "format": FORMAT,
            "kind": "report",
            "kvbits": __version__,
            "rule": dataclasses.asdict(self.rule),
            "models": [_data(measured, choice) for measured, choice in zip(self.models, self.choices, strict=True)],
        }


def build(found: Iterable[tuple[str, Results]], rule: Rule | None = None) -> Report:
    """A report on results, each with the name of the file that it is from.

    Raises:
        ValueError: if there are none.
    """
    rule = rule or Rule()
    models = merge.merge(found)
    if not models:
        raise ValueError("there are no results to report on: give files that 'kvbits eval' or 'kvbits bench' wrote")
    return Report(models, [choose(measured, rule) for measured in models], rule)


def write(results: Sequence[str | Path], out: str | Path, rule: Rule | None = None, pictures: bool = True) -> Report:
    """Read files of results and write a report into a folder, in place of one that is there.

    Args:
        results: files that ``kvbits eval --json`` and ``kvbits bench --json`` wrote, folders of such, and
            ``report.json`` files of earlier reports.
        out: the folder; it is made where it is missing.
        rule: what makes a scheme good enough.
        pictures: whether to write PNG files too. Without Matplotlib there are none, and the page has tables alone.

    Raises:
        FileNotFoundError: for results that are not there.
        ValueError: for files that are none of results, figures that are not finite, and ``out`` if it is a file.
    """
    out = Path(out)
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; give a folder to write the report into")
    report = build(merge.read(results), rule)
    out.mkdir(parents=True, exist_ok=True)
    sheets = files(report.models, report.choices, report.rule) if pictures and drawing.available() else []
    names = {one.model: [file for model, file, _ in sheets if model == one.model] for one in report.models}
    data = report.data
    # Lone surrogates, which JSON can hold and UTF-8 cannot, become question marks.
    parts = {
        "report.json": row_lines(data).encode(),
        "report.md": markdown.markdown(report.models, report.choices, report.rule, names).encode(errors="replace"),
        **{file: drawing.png(sheet) for _, file, sheet in sheets},
        "index.html": page.page(report.models, report.choices, report.rule, data).encode(errors="replace"),
    }
    for name, content in parts.items():
        with replacing(out / name) as beside:
            beside.write_bytes(content)
    return dataclasses.replace(report, files=tuple(out / name for name in parts))


def _data(measured: Measured, choice: Choice) -> dict[str, Any]:
    named = {"take": choice.take, "closest": choice.closest, "smallest": choice.smallest}
    return {
        "model": measured.model,
        "recommendation": {name: one.scheme if one else None for name, one in named.items()}
        | {"why": choice.why, "caveats": choice.caveats, "missing": choice.missing, "bits": choice.bits_field},
        "schemes": [_standing(one) for one in choice.standings],
        "runs": [
            {"kind": run.kind, "settings": run.settings, "rows": run.rows, "replaced": run.replaced}
            for run in measured.all_runs
        ],
    }


def _standing(one: Standing) -> dict[str, Any]:
    figures = {"bits": one.bits, "kl": one.kl, "top1": one.top1, "speed": one.speed, "retrieval": one.found}
    verdict = {"tasks_lost": one.lost, "reasons": one.reasons, "warnings": one.warnings, "failures": one.failures}
    return {"scheme": one.scheme, **figures, "front": one.front, **verdict}
