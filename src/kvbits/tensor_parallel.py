"""``Heads``, which of a model's KV heads this process has, where tensor parallel spreads them.

Transformers (``tp_plan="auto"``) keeps the whole configuration in every process and splits the matrices, as DTensors.
So the heads of a rank are read off the matrix that makes its keys; the number of heads in a config is that of all
ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kvbits.types import Params

_KEYS = ("k_proj", "qkv_proj", "query_key_value")
"""Modules that make keys, as the plans of Transformers name them."""


class Heads(NamedTuple):
    """Part ``rank`` of ``world`` equal ones of the KV heads of every layer; rank 0 has the first."""

    rank: int = 0
    world: int = 1

    @staticmethod
    def of(model: Any) -> Heads:
        """What this process has of ``model``; all heads where keys are not spread."""
        for name, parameter in model.named_parameters():
            if name.rpartition(".")[0].rpartition(".")[2] in _KEYS and is_spread(parameter):
                mesh, names = parameter.device_mesh, parameter.device_mesh.mesh_dim_names or ()
                for dimension, placement in enumerate(parameter.placements):
                    spread = "tp" not in names or names[dimension] == "tp"  # FSDP may split along other dimensions
                    if spread and getattr(placement, "dim", None) == 0:
                        return Heads(mesh.get_local_rank(dimension), mesh.size(dimension))
        return Heads()

    def own(self, params: Params) -> Params:
        """Of what was fitted of all heads, that of these: of tensors ``[H, D]``; others hold for the whole layer.

        Raises:
            ValueError: if the heads cannot be divided evenly.
        """
        if self.world == 1:
            return params
        found = {}
        for name, x in params.items():
            if x.ndim == 2 and x.shape[0] % self.world:
                raise ValueError(f"{x.shape[0]} KV heads cannot be divided over {self.world} ranks")
            found[name] = x.chunk(self.world)[self.rank] if x.ndim == 2 else x
        return found

    def __str__(self) -> str:
        return f"the KV heads of rank {self.rank} of {self.world}" if self.world > 1 else "all KV heads"


def is_spread(x: torch.Tensor) -> bool:
    """Whether a parameter is a DTensor: not imported here, since a model without them needs no torch.distributed."""
    return type(x).__name__ == "DTensor"


def elements(x: Any, index: torch.Tensor) -> torch.Tensor:
    """Elements ``index`` (int64) of a flattened tensor, or DTensor; NaN where another rank has them."""
    found: torch.Tensor
    if not is_spread(x):
        flat = x.flatten() if x.is_contiguous() else x.reshape(-1)
        found = flat[index.to(flat.device)]
        return found
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    local: torch.Tensor = x.to_local()
    if any(type(placement).__name__ not in ("Shard", "Replicate") for placement in x.placements):
        return local.new_full((len(index),), torch.nan)  # split in some other way: which elements are here is not known
    shape, offset = compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)
    place = torch.stack(torch.unravel_index(index, x.shape), -1) - torch.tensor(offset)
    size = torch.tensor(shape)
    here = ((place >= 0) & (place < size)).all(-1)
    place = place.clamp(min=0).minimum((size - 1).clamp(min=0)).to(local.device)
    if not local.numel():
        return local.new_full((len(index),), torch.nan)
    found = local[tuple(place.unbind(-1))].masked_fill(~here.to(local.device), torch.nan)
    return found
