"""Attributes of an object as JSON data and tensors, and back: for cache layers of the model's own types.

Their content is theirs and differs from release to release, so nothing is known here but what it is made of: numbers,
words, lists, dictionaries, dtypes, devices and tensors. Anything else is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from kvbits.files.sealed import Content


def to_plain(value: Any, name: str, tensors: dict[str, Content]) -> Any:
    """JSON data that stands for ``value``; its tensors are added to ``tensors``, under names that begin with ``name``.

    Raises:
        ValueError: for what cannot be stored, naming it.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if type(value) is torch.Tensor and not value.is_meta and value.layout is torch.strided:
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": None}  # that of the model which it is read for
    if type(value) in (list, tuple):
        items = [to_plain(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]
        return {type(value).__name__: items}
    if type(value) is dict and all(isinstance(key, (int, str)) for key in value):
        return {"dict": [[key, to_plain(item, f"{name}.{key}", tensors)] for key, item in value.items()]}
    kind = "tensor subclass" if is_traceable_wrapper_subclass(value) else type(value).__name__
    raise ValueError(f"{name} is a {kind}, which cannot be stored")


def from_plain(plain: Any, tensor: Callable[[str], torch.Tensor], device: torch.device) -> Any:
    """What :func:`to_plain` was given.

    Args:
        plain: what it returned.
        tensor: gives the tensor of a name; it is copied to ``device``.
        device: also in place of every device that was stored.

    Raises:
        ValueError: for anything that :func:`to_plain` never returns.
    """
    if plain is None or isinstance(plain, (bool, int, float, str)):
        return plain
    if isinstance(plain, Mapping) and len(plain) == 1:
        ((kind, content),) = plain.items()
        if kind == "tensor":
            return tensor(content).to(device, copy=True)
        if kind == "dtype" and isinstance(getattr(torch, str(content), None), torch.dtype):
            return getattr(torch, content)
        if kind == "device":
            return device
        if kind in ("list", "tuple"):
            items = [from_plain(item, tensor, device) for item in content]
            return items if kind == "list" else tuple(items)
        if kind == "dict":
            return {key: from_plain(item, tensor, device) for key, item in content}
    raise ValueError(f"{str(plain)[:60]!r} is nothing that is ever stored")
