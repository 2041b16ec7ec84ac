"""The compiled module; see native/binding/module.cpp."""

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
    pool: torch.Tensor,
    table: torch.Tensor,
    counts: Sequence[int],
    first_token: int,
    keys: torch.Tensor,
    values: torch.Tensor,
    held: Sequence[int],
    sinks: int,
    dropped: int,
    statics: tuple[torch.Tensor | None, ...],
    transforms: tuple[Any, ...] | None,
    mask: torch.Tensor | None,
    column_of: torch.Tensor | None,
    offset: int,
    first_query_column: int,
    window: int,
    packed_visible: bool,
    exact_visible: bool,
    scaling: float,
    softcap: float,
    sink_logits: torch.Tensor | None,
    log_sums: torch.Tensor | None = None,
) -> None: ...
def decode(
    layout: Layout,
    value_side: bool,
    isa: int,
    threads: int,
    output: torch.Tensor,
    pool: torch.Tensor,
    table: torch.Tensor,
    first: int,
    scale: torch.Tensor | None,
    zero: torch.Tensor | None,
    /,
) -> None: ...
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
    codes: torch.Tensor,
    scale: torch.Tensor | None,
    zero: torch.Tensor | None,
    outlier_index: torch.Tensor | None,
    outlier_value: torch.Tensor | None,
    edges: Sequence[float],
    table: Sequence[float],
    fixed: float,
    static_scale: torch.Tensor | None,
    static_zero: torch.Tensor | None,
    limit: float,
) -> tuple[int, float]: ...
def hadamard(isa: int, threads: int, x: torch.Tensor, signs: torch.Tensor, output: torch.Tensor, /) -> None: ...
def count_unsound(threads: int, x: torch.Tensor, limit: float, /) -> int: ...
