"""``Forwards``: the forward that a cache is in, what it has changed so far, and how that is taken back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvbits.hf.layer import PackedLayer
from kvbits.hf.stock import cropped
from kvbits.store.rows import Rows


class Forwards:
    """Forwards over one cache, one after the other.

    Attributes:
        of: the model whose forward is in progress (its hook's id); None between forwards.
        used: whether a forward has ended well since the cache was empty.
        broken: whether a forward has failed and could not be taken back.
    """

    def __init__(self, used: bool = False) -> None:
        self.of: int | None = None
        self.used, self.broken = used, False
        self._before = Rows()
        self._touched: dict[int, int | None] = {}

    @property
    def interrupted(self) -> bool:
        """Whether a forward has changed layers and neither ended nor failed; asked where none can be in progress."""
        return self.of is not None and bool(self._touched)

    def is_inside(self, of: int) -> bool:
        """Whether a forward of ``of`` that begins now is part of the one in progress: of the decoder in its model."""
        return self.of not in (None, of) and not self._touched

    def begin(self, of: int, rows: Rows) -> None:
        """A forward begins with these rows in the cache."""
        self.of, self._before = of, rows

    def touch(self, layer: int, columns: int | None) -> None:
        """The forward in progress has changed a layer, by so many columns or, None, beyond undoing."""
        if self.of is not None:
            self._touched[layer] = columns

    def end(self, failed: bool) -> None:
        """The forward is over."""
        self.used = self.used or (bool(self._touched) and not failed)
        self.of = None
        self._touched.clear()

    def take_back(self, layers: Sequence[Any]) -> Rows:
        """Undo what the forward has changed in the layers of the cache. Returns the rows from before it."""
        for index, columns in self._touched.items():
            layer = layers[index]
            if isinstance(layer, PackedLayer):
                done = layer.before is None or layer.core.undo(layer.before)
            else:
                done = columns is not None and cropped(layer, columns)
            self.broken = self.broken or not done
        return self._before
