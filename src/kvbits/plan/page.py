"""The plan as a page with sliders: one HTML file that asks for nothing else, to open from a disk or to serve.

All its constants are data from here: the bytes of a record, what a codec fits, the terms of the papers' accounting,
shapes of models. ``arithmetic.js`` has the closed form of :mod:`kvbits.plan.memory` for a prompt in one piece on one
device, and a test compares the two in a browser.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from kvbits.files import replacing
from kvbits.plan import memory, paper, plan, setting
from kvbits.plan.devices import GPU_MIB, MIB, MOST_BYTES
from kvbits.plan.paper import Named
from kvbits.plan.presets import PRESETS, shape_of_preset
from kvbits.plan.shapes import Attention, Shape
from kvbits.schemes.catalogue import ALIAS_ADVICE, ALIASES, CATALOGUE
from kvbits.schemes.scheme import Scheme
from kvbits.store import room

FILES = Path(__file__).with_name("page_files")
HEAD_DIMS = (64, 80, 96, 112, 128, 160, 192, 256)
"""To choose from for a model of one's own."""

SHOWN = ("exact", "fp8", "default", "kivi4", "small")
DTYPES = {2: torch.bfloat16, 4: torch.float32}
"""By the bytes of an exact element."""


def write(found: plan.Plan, path: str | Path, presets: Iterable[str] = tuple(PRESETS)) -> Path:
    """Write the page, which begins with the setting of a plan, in place of what is there.

    Args:
        found: the plan; its model and its schemes are on the page.
        path: of the file.
        presets: other models to choose from.

    Raises:
        ValueError: for a plan whose numbers the page would not have.
        OSError: if it cannot be written.
    """
    path = Path(path)
    refuse(found.setting)
    text = (FILES / "page.html").read_text(encoding="utf-8")
    # No "</script>" inside the data may end it.
    values = {
        "STYLE": (FILES / "style.css").read_text(encoding="utf-8"),
        "DATA": json.dumps(data(found, presets), separators=(",", ":")).replace("</", "<\\/"),
        "ARITHMETIC": (FILES / "arithmetic.js").read_text(encoding="utf-8"),
        "SCRIPT": (FILES / "page.js").read_text(encoding="utf-8"),
    }
    for name, value in values.items():
        text = text.replace(f"/*{name}*/", value)
    with replacing(path) as beside:
        beside.write_text(text, encoding="utf-8")
    return path


def refuse(start: setting.Setting) -> None:
    """Raise ValueError for a setting that is not a prompt in one piece on one device, naming what is beyond it."""
    beyond = {
        "--devices": start.devices > 1, "--new-tokens": start.steps, "--chunk": start.chunk,
        "--sliding": start.sliding, "--logits": start.logits != "last",
        "--source": start.shape.encodes and start.source_tokens != start.context,
    }  # fmt: skip
    if named := [name for name, given in beyond.items() if given]:
        raise ValueError(f"a page plans a prompt in one piece on one device: leave out --page, or {', '.join(named)}")


def data(found: plan.Plan, presets: Iterable[str]) -> dict[str, Any]:
    """All that the page knows, as plain JSON data."""
    start = found.setting
    models = {name: (PRESETS[name].title, shape_of_preset(name)) for name in presets}
    key = "planned" if start.shape.name not in models else start.shape.name
    models[key] = (start.shape.name if key == "planned" else models[key][0], start.shape)
    files = start.shape.weights is not None and start.shape.weights.file_bytes is not None
    names = list(dict.fromkeys([*(row.named.name for row in found.rows), *_names(start.shape)]))
    sizes = {
        (kind.key_channels, kind.value_channels)
        for _, shape in models.values() for kind in shape.kinds() if kind is not None
    } | {(channels, channels) for channels in HEAD_DIMS}  # fmt: skip
    return {
        "growth": {"spare": room.SPARE, "table_bytes": torch.int64.itemsize, "exact_bits": paper.EXACT_BITS},
        "limits": {"tokens": setting.MOST_TOKENS, "batch": setting.MOST_BATCH, "memory": MOST_BYTES},
        "weights": [name for name in setting.WEIGHTS if name != "file" or files],
        "weight_bits": setting.WEIGHT_BITS,
        "models": {name: model(title, shape) for name, (title, shape) in models.items()},
        "head_dims": HEAD_DIMS,
        "schemes": {name: scheme(Named.parse(name), sorted(sizes)) for name in names},
        "gpus": {name: mib * MIB for name, mib in GPU_MIB.items()},
        "start": {
            "model": key,
            "context": start.context,
            "batch": start.batch,
            "memory": start.limit_bytes or GPU_MIB["a100-80gb"] * MIB,
            "weights": start.weights,
            "schemes": [row.named.name for row in found.rows],
        },
    }


def _names(shape: Shape) -> list[str]:
    """Schemes to choose from."""
    if shape.refusal is not None:
        return ["exact"]
    with_outliers = [f"{entry.name}-1%" for entry in CATALOGUE if entry.name.startswith("nuq")]
    return [*ALIASES, *(entry.name for entry in CATALOGUE), *with_outliers]


def model(title: str, shape: Shape) -> dict[str, Any]:
    """A shape: runs of equal layers, its weights and its widths."""
    runs: list[dict[str, Any]] = []
    for layer in shape.layers:
        kind = None if layer.attention is None else attention(layer.attention)
        one = {
            "attention": kind, "fixed": layer.fixed_bytes, "row": layer.row_bytes, "token": layer.token_bytes,
            "source": layer.source_token_bytes,
        }  # fmt: skip
        if runs and runs[-1]["layer"] == one:
            runs[-1]["count"] += 1
        else:
            runs.append({"count": 1, "layer": one})
    weights = shape.weights
    return {
        "title": title,
        "runs": runs,
        "itemsize": shape.dtype.itemsize,
        "weights": None if weights is None else {
            "outside": weights.embedding + weights.head, "layers": sum(weights.layers), "bits": weights.bits,
            "file": weights.file_bytes,
        },
        "widths": None if shape.widths is None else asdict(shape.widths),
        "trained": shape.trained,
        "refusal": shape.refusal,
        "unrotatable": shape.unrotatable,
        "encodes": shape.encodes,
        "eager": shape.eager,
    }  # fmt: skip


def attention(one: Attention) -> dict[str, Any]:
    """What a layer hands to its cache."""
    return {
        "heads": one.heads, "key": one.key_channels, "value": one.value_channels, "window": one.window,
        "token": one.token_bytes,
    }  # fmt: skip


def scheme(named: Named, sizes: Iterable[tuple[int, int]]) -> dict[str, Any]:
    """A scheme: its own form and those of its overrides, and the terms of the papers' accounting."""
    whole = named.scheme
    own = replace(whole, overrides=())
    forms: list[tuple[list[int] | None, Scheme, Named]] = [(None, own, named)]
    for override in whole.overrides:
        # As for_layer makes it: of a model that has no layer but the last that is named.
        count = 1 + max(layer if layer >= 0 else -layer - 1 for layer in override.layers)
        changed = whole_of(whole, override.layers[0], count)
        forms.append((list(override.layers), changed, Named(str(changed), changed)))
    return {
        "scheme": str(whole),
        "advice": ALIAS_ADVICE.get(named.name) or next((e.advice for e in CATALOGUE if e.name == named.name), ""),
        "calibrated": whole.needs_calibration,
        "pre_rope": whole.pre_rope,
        "packs": whole.packs,
        "forms": [form(layers, one, paper_name, whole.needs_calibration, sizes) for layers, one, paper_name in forms],
    }


def whole_of(one: Scheme, layer: int, count: int) -> Scheme:
    """The scheme of a layer, in a model in which no other override matters."""
    kept = tuple(override for override in one.overrides if layer in override.layers)
    return replace(one, overrides=kept).for_layer(layer % count, count)


def form(
    layers: list[int] | None, own: Scheme, named: Named, calibrated: bool, sizes: Iterable[tuple[int, int]]
) -> dict[str, Any]:
    """One scheme without overrides: how much stays exact, and for each size of a head the bytes of its records."""
    return {
        "layers": layers,
        "sinks": own.sinks, "late": own.late_sinks, "residual": own.residual, "block": own.block,
        "paper": [asdict(side) for side in paper.terms(named)],
        "sizes": {
            f"{key}/{value}/{itemsize}": record(own, key, value, itemsize, calibrated)
            for key, value in sizes for itemsize in DTYPES
        },
    }  # fmt: skip


@cache
def record(own: Scheme, key: int, value: int, itemsize: int, calibrated: bool) -> list[int] | None:
    """Bytes of a record, and of what a layer has fitted before and after it packs: shared by its heads, and of each.

    None where the scheme does not fit such a head.
    """
    one, two = (Attention(heads, key, value, DTYPES[itemsize], DTYPES[itemsize]) for heads in (1, 2))
    try:
        nbytes = memory.record_of(own, one).nbytes
    except ValueError:
        return None
    found = [nbytes]
    for packs in (False, True):
        least, more = (memory.fitted_bytes(own, kind, calibrated, packs) for kind in (one, two))
        found += [2 * least - more, more - least]
    return found
