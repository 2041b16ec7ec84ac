"""A model by the name that a user gives it."""

from __future__ import annotations

from pathlib import Path

import torch

from kvbits.plan.presets import PRESETS, shape_of_preset
from kvbits.plan.shapes import Shape

EMBEDDED = "smollm2"
"""The small model that comes as a Python package, as elsewhere in kvbits."""


def shape_of(name: str, dtype: torch.dtype | None = None, rotary: bool = False) -> Shape:
    """The shape of a ``.gguf`` file, ``smollm2``, a preset, a folder, a ``config.json``, or a hub id.

    Args:
        name: what the user wrote.
        dtype: of exact keys and values; None is the model's own.
        rotary: also find out whether its keys can be stored before their rotary embedding.

    Raises:
        ValueError: for what is no model, naming near ones.
        ModuleNotFoundError: if a package that reads it is missing.
    """
    if not name.strip():
        raise ValueError(f"{name!r} names no model; give one such as llama-3.1-8b")
    by_hub = {preset.hub.lower(): preset_name for preset_name, preset in PRESETS.items()}
    preset = name.lower() if name.lower() in PRESETS else by_hub.get(name.lower())
    if preset is not None and not Path(name).exists():
        return shape_of_preset(preset, dtype)
    path = Path(name)
    if name == EMBEDDED:
        from kvbits.hf.loading import embedded_model

        path = embedded_model()
    if path.suffix == ".gguf":
        from kvbits.plan.gguf import shape_of_gguf

        return shape_of_gguf(path, name, dtype)
    from kvbits.plan.models import shape_of_model

    return shape_of_model(name, dtype, rotary)
