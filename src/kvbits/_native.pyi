"""The compiled module; see native/binding/."""

from collections.abc import Sequence
from typing import Any

import torch

class Layout:
    """What a block looks like to the kernels; raises ValueError for one that they cannot read."""

    def __init__(self, tokens: int, bytes: int, key: dict[str, Any], value: dict[str, Any]) -> None: ...

class Steps:
    """Rotary angles of the tokens of a block, beyond those of its first: float32 ``[tokens, pairs]``, contiguous."""

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> None: ...

def names() -> list[str]: ...
def pool() -> str: ...
def set_dtypes(dtypes: list[torch.dtype | None]) -> None: ...
def attend(
    *,
    layout: Layout,
    isa: int,
    threads: int,
    output: torch.Tensor,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    exact_counts: Sequence[int],
    pool: torch.Tensor,
    table: torch.Tensor,
    counts: Sequence[int],
    sinks: int,
    dropped: int,
    key_scale: torch.Tensor | None = None,
    key_zero: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    value_zero: torch.Tensor | None = None,
    transforms: dict[str, Any],
    mask: torch.Tensor | None = None,
    column_of: torch.Tensor | None = None,
    offset: int,
    first_query_column: int,
    window: int | None,
    scaling: float,
    softcap: float | None,
    sink_logits: torch.Tensor | None = None,
    log_sums: torch.Tensor | None = None,
) -> None:
    """Attention into ``output [B, Hq, q, Dv]``, and where given the log of its sums into ``log_sums [B, Hq, q]``.

    Of ``keys`` and ``values``, row b has ``exact_counts[b]`` exact tokens; of ``pool``, the blocks that the first
    ``counts[b]`` entries of its row of ``table`` name. ``transforms`` has any of key_mean, key_balance, key_rotation,
    value_mean, value_unrotation, and together steps, base_cos, base_sin and unroped (whether whole keys are).
    """

def decode(
    *,
    layout: Layout,
    value_side: bool,
    isa: int,
    threads: int,
    output: torch.Tensor,
    pool: torch.Tensor,
    table: torch.Tensor,
    scale: torch.Tensor | None = None,
    zero: torch.Tensor | None = None,
) -> None:
    """The first blocks of each row, as many as ``output [B, H, T, D]`` has room for."""

def encode(
    *,
    isa: int,
    threads: int,
    x: torch.Tensor,
    choice: int,
    levels: int,
    per: int,
    bits: int,
    length: int,
    edges: Sequence[float],
    table: Sequence[float],
    layer_scale: float = 1.0,
    static_scale: torch.Tensor | None = None,
    static_zero: torch.Tensor | None = None,
    limit: float,
    packed: dict[str, torch.Tensor],
) -> int:
    """Encode ``x`` into the parts of ``packed``, by their names; returns how many elements are unsound."""

def hadamard(isa: int, threads: int, x: torch.Tensor, signs: torch.Tensor, output: torch.Tensor, /) -> None: ...
def count_unsound(threads: int, x: torch.Tensor, limit: float, /) -> int: ...
