"""The plan as a page with sliders: one HTML file that asks for nothing else, to open from a disk or to serve.

All its numbers are values of :mod:`kvbits.plan` at some lengths, for a prompt in one piece on one device. They are
linear between those lengths, in the rows of a batch and in KV heads, and from some length on they repeat with every
eighth block, higher by the same. So the page reads the numbers of any setting off them, to the byte, and knows no rule.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from kvbits.files import replacing
from kvbits.plan import memory, paper, peak, plan, setting
from kvbits.plan.devices import GPU_MIB, MIB, MOST_BYTES
from kvbits.plan.memory import History
from kvbits.plan.paper import Named
from kvbits.plan.presets import PRESETS, shape_of_preset
from kvbits.plan.shapes import Attention, Layer, Shape
from kvbits.schemes.catalogue import ALIAS_ADVICE, ALIASES, CATALOGUE
from kvbits.schemes.scheme import Scheme
from kvbits.store.room import SPARE

FILES = Path(__file__).with_name("page_files")
HEAD_DIMS = (64, 80, 96, 112, 128, 160, 192, 256)
"""To choose from for a model of one's own."""

Kind = tuple[int, int, int]
"""Channels of a head of keys and of values, and bytes of an exact element."""

DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
"""By the bytes of an exact element."""

Table = list[Any]
"""``[starts, values, more, period, rise]``: what something is at the first token of each piece, and what each further
token of it adds, each as coefficients. What follows the second start repeats every ``period`` tokens, higher by
``rise``."""


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
    kinds = sorted(
        {kind_of(layer.attention) for _, shape in models.values() for layer in shape.layers if layer.attention}
        | {(channels, channels, 2) for channels in HEAD_DIMS}
    )
    bits = {"auto": 16.0, **setting.WEIGHT_BITS, "none": 0.0}
    return {
        "limits": {"tokens": setting.MOST_TOKENS, "batch": setting.MOST_BATCH, "memory": MOST_BYTES},
        "weights": [name for name in setting.WEIGHTS if name != "file" or files],
        "weight_bits": bits,
        "exact_bits": paper.EXACT_BITS,
        "models": {name: model(title, shape, start.cpu) for name, (title, shape) in models.items()},
        "head_dims": HEAD_DIMS,
        "schemes": {name: scheme(Named.parse(name), kinds) for name in names},
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


def model(title: str, shape: Shape, cpu: bool = False) -> dict[str, Any]:
    """A shape: runs of equal layers, its weights in every precision, the peak of a prompt."""
    runs: list[dict[str, Any]] = []
    for layer in shape.layers:
        one = run(layer, shape.refusal is not None)
        if runs and runs[-1] | {"count": 1} == one:
            runs[-1]["count"] += 1
        else:
            runs.append(one)
    usual = next((kind for kind in shape.kinds() if kind is not None and kind.window is None), None)
    return {
        "title": title,
        "runs": runs,
        "usual": None if usual is None else {"kind": name_of(kind_of(usual)), "heads": usual.heads},
        "weights": {
            how: setting.weights_bytes(shape.weights, how, shape.dtype) for how in setting.WEIGHTS
            if how != "file" or (shape.weights is not None and shape.weights.file_bytes is not None)
        },
        "peak": None if shape.widths is None else [work(shape, cpu, index) for index in range(2)],
        "windows": sum(layer.attention is not None and layer.attention.window is not None for layer in shape.layers),
        "trained": shape.trained,
        "refusal": shape.refusal,
        "unrotatable": shape.unrotatable,
        "encodes": shape.encodes,
        "eager": shape.eager,
    }  # fmt: skip


def run(layer: Layer, refused: bool) -> dict[str, Any]:
    """A layer: what a scheme packs of it, or the bytes of the model's own type; the same for the papers' bytes."""
    kind, own = layer.attention, None
    if kind is None:
        own = table(lambda tokens: [layer.row_bytes + layer.token_bytes * tokens], [1])
    elif (window := kind.window) is not None:
        width = kind.channels * paper.EXACT_BITS / 8
        own = table(lambda tokens: [min(tokens, window) * width], sorted({1, window}))
    return {
        "count": 1,
        "kind": None if kind is None else name_of(kind_of(kind)),
        "heads": None if kind is None else kind.heads,
        "width": None if kind is None else kind.channels,
        "packs": own is None and not refused,
        "own": [layer.fixed_bytes, layer.row_bytes, layer.token_bytes, layer.source_token_bytes],
        "paper": own,
    }


def work(shape: Shape, cpu: bool, index: int) -> list[float]:
    """One of the works of :func:`kvbits.plan.peak.at_work`, as coefficients of 1, tokens read, tokens in the cache."""
    return bilinear(lambda read, tokens: peak.at_work(shape, read, tokens, cpu=cpu)[index], 2, 1)


def kind_of(attention: Attention) -> Kind:
    return attention.key_channels, attention.value_channels, attention.key_dtype.itemsize


def name_of(kind: Kind) -> str:
    return "/".join(map(str, kind))


def scheme(named: Named, kinds: Sequence[Kind]) -> dict[str, Any]:
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
        "forms": [form(layers, one, paper_name, whole.needs_calibration, kinds) for layers, one, paper_name in forms],
    }


def whole_of(one: Scheme, layer: int, count: int) -> Scheme:
    """The scheme of a layer, in a model in which no other override matters."""
    kept = tuple(override for override in one.overrides if layer in override.layers)
    return replace(one, overrides=kept).for_layer(layer % count, count)


def form(
    layers: list[int] | None, own: Scheme, named: Named, calibrated: bool, kinds: Sequence[Kind]
) -> dict[str, Any]:
    """One scheme without overrides: for each kind of head the real bytes of a layer, and those of the papers."""
    return {
        "layers": layers,
        "real": {name_of(kind): real(own, kind, calibrated) for kind in kinds},
        "paper": {name_of(kind): of_papers(named, kind) for kind in kinds},
    }


def of_heads(kind: Kind, heads: int) -> Attention:
    key, value, itemsize = kind
    return Attention(heads, key, value, DTYPES[itemsize], DTYPES[itemsize])


@cache
def real(own: Scheme, kind: Kind, calibrated: bool) -> Table | None:
    """Bytes of a layer, as coefficients of 1, heads, rows, and heads times rows; None for heads that do not fit."""

    def value(tokens: int) -> list[float]:
        def nbytes(heads: int, rows: int) -> int:
            return memory.packed(own, of_heads(kind, heads), History.of(tokens), rows, calibrated).count.total

        return bilinear(nbytes, 1, 1)

    try:
        memory.record_of(own, of_heads(kind, 1))
    except ValueError:
        return None
    if not own.packs:
        return table(value, [1])
    first = own.limits().most + 1
    return table(value, [1, *(first + block * own.block for block in range(SPARE))], SPARE * own.block)


@cache
def of_papers(named: Named, kind: Kind) -> Table:
    """The papers' bytes of a row of a layer, as coefficients of 1 and heads."""

    def value(tokens: int) -> list[float]:
        one, two = (
            paper.bits(named, of_heads(kind, heads), tokens) / 8 * tokens * of_heads(kind, heads).channels
            for heads in (1, 2)
        )
        return [2 * one - two, two - one]

    return table(value, sorted({1, max(1, named.scheme.sinks + named.scheme.late_sinks)}))


def table(value: Callable[[int], list[float]], starts: list[int], period: int = 0) -> Table:
    """Values of Python; ``starts`` are the lengths at which a piece of them begins that is linear."""

    def less(first: int, last: int) -> list[float]:
        return [b - a for a, b in zip(value(first), value(last), strict=True)]

    rise = less(starts[1], starts[1] + period) if period else []
    return [starts, [value(start) for start in starts], [less(start, start + 1) for start in starts], period, rise]


def bilinear(value: Callable[[int, int], int], x: int, y: int) -> list[float]:
    """Coefficients of 1, x, y, and x times y, of what is linear in either, from four values."""
    least, along_y, along_x, both = (value(x + i, y + j) for i in (0, 1) for j in (0, 1))
    mixed = both - along_x - along_y + least
    first, second = along_x - least - mixed * y, along_y - least - mixed * x
    return [least - first * x - second * y - mixed * x * y, first, second, mixed]
