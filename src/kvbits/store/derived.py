"""``Derived``: what kernels make of a layer's blocks and parameters once, and read at every step."""

from __future__ import annotations

from typing import Any, NamedTuple


class Kept(NamedTuple):
    """Something derived, and what it was derived from: whoever reads it compares, and derives it anew if need be."""

    source: Any
    made: Any


class Derived:
    """One field for each thing that is derived; None until it is asked for.

    A store owns one. A copy of the store, or a fork, derives its own.

    Attributes:
        layout: the native kernel's description of the blocks and their static parameters.
        empty_layout: the same while nothing is packed.
        value_unrotation: the inverse of the values' rotation.
        steps: the native kernel's table of the angles within a block.
        triton_steps: the Triton kernel's, by what of a key they are applied to and the number of parts.
        triton_tables: its tables of levels, by side and number of parts.
        stored_order: own numbers of the tokens in stored order, where there are late sinks.
    """

    def __init__(self) -> None:
        self.layout: Any = None
        self.empty_layout: Any = None
        self.value_unrotation: Kept | None = None
        self.steps: Kept | None = None
        self.triton_steps: dict[tuple[int, int], Kept] = {}
        self.triton_tables: dict[tuple[str, int], Kept] = {}
        self.stored_order: Kept | None = None

    def __reduce__(self) -> tuple[type[Derived], tuple[()]]:
        return Derived, ()

    @property
    def nbytes(self) -> int:
        """Bytes of what grows with the context."""
        return 0 if self.stored_order is None else int(self.stored_order.made.nbytes)
