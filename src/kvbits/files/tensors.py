"""Safetensors files, read and written by their own library."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from kvbits.files.atomic import replacing


def save_tensors(path: Path, tensors: Mapping[str, torch.Tensor], about: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file as a whole or not at all, with ``about`` in its header."""
    from safetensors.torch import save_file

    # safetensors refuses tensors that share memory.
    alone, seen = {}, set()
    for name, x in tensors.items():
        storage = x.untyped_storage()
        shared = not x.is_contiguous() or x.nbytes != storage.nbytes() or storage.data_ptr() in seen
        alone[name] = x.clone(memory_format=torch.contiguous_format) if shared else x
        seen.add(storage.data_ptr())
    with replacing(path) as beside:
        save_file(alone, str(beside), dict(about or {}))


def load_tensors(path: Path, names: tuple[str, ...] | None = None) -> dict[str, torch.Tensor]:
    """All tensors of a safetensors file, or those named.

    Raises:
        ValueError: for a damaged file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            return {name: file.get_tensor(name) for name in (file.keys() if names is None else names)}
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def about_tensors(path: Path) -> dict[str, tuple[int, ...]] | None:
    """Names and shapes in a safetensors file, without reading them; None if it is not there or damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (FileNotFoundError, SafetensorError):
        return None
