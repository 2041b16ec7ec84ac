"""``Layer``, what is held of one layer: to be looked at, counted, selected and handed on.

How it grows and is cropped stands in :mod:`kvbits.layer.cache`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar, cast

import torch

from kvbits.attend import KVView
from kvbits.layer.first_fit import Transforms
from kvbits.numerics.modes import without_autocast
from kvbits.schemes.scheme import Scheme
from kvbits.store.blocks import BlockStore
from kvbits.store.exact import ExactTokens
from kvbits.store.late_sinks import Late
from kvbits.store.room import Limits
from kvbits.store.rows import Rows
from kvbits.transform.rotary import Rotary
from kvbits.types import Params

_Method = TypeVar("_Method", bound=Callable[..., object])


def outlasting(method: _Method) -> _Method:
    """Run ``method`` outside autograd, inference mode and autocast: a cache changes later, in whatever mode that is.

    A tensor made under ``torch.inference_mode()`` could not be written to by a step under ``torch.no_grad()``.
    """

    @functools.wraps(method)
    def run(self: Layer, *args: object, **kwargs: object) -> object:
        with torch.inference_mode(False), torch.no_grad(), without_autocast():
            self._adopt()
            return method(self, *args, **kwargs)

    return cast(_Method, run)


class Layer:
    """Keys and values of one layer under one scheme (without overrides).

    Args:
        scheme: how to store them; see :meth:`Scheme.for_layer`.
        window: tokens that the layer can see back to, its own included, for sliding windows; older blocks are
            dropped and there are no sinks, neither first nor late ones.
        name: for error messages, such as ``layer 3``.
        rotary: how the keys are rotated, for schemes that take the rotary embedding off; None where they are not.
        calibrated: params of keys and values from calibration, a key mean among them where the scheme is centred. What
            is not among them is taken from the first tokens that are packed.

    Attributes:
        limits: how many tokens of a row are exact.
        rows: the columns seen so far.
        buffers, store: the exact tokens and the packed blocks; None while nothing was appended.
        key_params, value_params: what has been fitted of either side.
        is_final: whether that is final, of either side.
        warned: of which sides a warning has been given.
        dropped: tokens that every row has dropped behind its window.
    """

    def __init__(
        self,
        scheme: Scheme,
        window: int | None = None,
        name: str = "layer",
        rotary: Rotary | None = None,
        calibrated: tuple[Params, Params] = ({}, {}),
    ) -> None:
        if scheme.overrides:
            raise ValueError(f"{scheme} has overrides: give a layer its own scheme, Scheme.for_layer(index, count)")
        if window is not None and not scheme.packs:
            scheme = replace(scheme, residual=window)  # what is packed, here as it is, can be dropped
        self.scheme, self.window, self.name, self.calibrated = scheme, window, name, calibrated
        self.rotary = rotary if scheme.pre_rope or scheme.centred else None
        self.sinks, self.late_sinks = (scheme.sinks, scheme.late_sinks) if window is None else (0, 0)
        self.limits = Limits(self.sinks, self.late_sinks, scheme.residual, scheme.block)
        self.reset()

    def reset(self) -> None:
        """Forget everything, also the shape, the dtype and what static codecs fitted."""
        self.rows = Rows()
        self.buffers: ExactTokens | None = None
        self.store: BlockStore | None = None
        self.key_params, self.value_params = self.calibrated
        self.is_final = (False, False)
        self._transforms = Transforms(self.scheme, self.rotary, self.sinks)
        self.warned: set[str] = set()
        self.dropped = 0

    @property
    def keys(self) -> torch.Tensor | None:
        """Exact keys, in a buffer with room for more: ``[B, H, room, D]``; None while nothing was appended."""
        return None if self.buffers is None else self.buffers.keys

    @property
    def values(self) -> torch.Tensor | None:
        """The same of values."""
        return None if self.buffers is None else self.buffers.values

    @property
    def held(self) -> list[int]:
        """Exact tokens of each row."""
        return [] if self.buffers is None else self.buffers.held

    @property
    def late(self) -> Late:
        """Own numbers of the late sinks of each row."""
        return () if self.buffers is None else self.buffers.late

    @property
    def even(self) -> bool:
        """Whether all rows hold the same number of exact tokens."""
        return self.buffers is None or self.buffers.even

    @property
    def columns(self) -> int:
        """Columns seen so far, padding included."""
        return self.rows.columns

    @property
    def packed_blocks(self) -> list[int]:
        """Blocks that have been packed of each row, wherever they are."""
        return [] if self.store is None else self.store.counts

    # -- looking ---------------------------------------------------------------------------------------------------

    def view(self, offset: int = 0) -> KVView:
        """What the cache holds now, from column ``offset`` on. Raises ValueError while it is empty."""
        if self.buffers is None:
            raise ValueError(f"{self.name}: the cache is empty")
        return self._view(self.buffers.keys, self.buffers.values, self.buffers.held, self.rows, offset)

    def _view(self, keys: torch.Tensor, values: torch.Tensor, held: Sequence[int], rows: Rows, offset: int) -> KVView:
        """The packed blocks so far beside the exact tokens ``keys`` and ``values``, ``held`` of each row."""
        assert self.buffers is not None and self.store is not None
        late, longest, blocks = self.buffers.late, max(held, default=0), max(self.packed_blocks, default=0)
        transforms = self._transforms.of(self.key_params, rows, self.dropped, blocks, keys, values)
        return KVView(
            scheme=self.scheme,
            keys=keys[:, :, :longest],
            values=values[:, :, :longest],
            held=tuple(held),
            sinks=self.sinks,
            blocks=self.store.view(),
            key_params=self.key_params,
            value_params=self.value_params,
            rows=rows,
            dropped=self.dropped,
            offset=offset,
            key_transform=transforms.key,
            value_transform=transforms.value,
            late=late if any(late) else (),
        )

    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The exact buffers, uncopied, where nothing is packed or padded: ``[B, H, T, D]`` each."""
        assert self.buffers is not None
        held = self.buffers.held[0]
        return self.buffers.keys.narrow(2, 0, held), self.buffers.values.narrow(2, 0, held)

    def nbytes(self, seen: set[int] | None = None) -> dict[str, int]:
        """Real bytes by part: codes, scales, zeros, outliers, sinks, residual, slack.

        Args:
            seen: where several layers are counted together, what has been counted: see :meth:`BlockStore.nbytes`.
        """
        parts = dict.fromkeys(("codes", "scales", "zeros", "outliers", "sinks", "residual", "slack"), 0)
        if self.buffers is None or self.store is None:
            return parts
        for part, nbytes in (*self.store.nbytes(seen).items(), *self.buffers.count(self.sinks).items()):
            parts[part] += nbytes
        fitted = [x for params in (self.key_params, self.value_params) for x in params.values()]
        parts["scales"] += bytes_once(fitted, seen)
        return parts

    def _lost(self) -> list[int]:
        """Own tokens of each row that a window has dropped."""
        assert self.store is not None
        return [self.dropped + blank * self.scheme.block for blank in self.store.blank]

    @property
    def tokens(self) -> int:
        """Own tokens of all rows that are still held."""
        return 0 if self.store is None else sum(self.rows.counts) - sum(self._lost())

    @property
    def packed_tokens(self) -> int:
        """Those of them that stand in packed blocks."""
        return self.tokens - sum(self.held)

    @property
    def elements(self) -> int:
        """Elements of K and V of all own tokens that are still held."""
        if self.buffers is None:
            return 0
        keys, values = self.buffers.keys, self.buffers.values
        return self.tokens * keys.shape[1] * (keys.shape[3] + values.shape[3])

    # -- handing on ------------------------------------------------------------------------------------------------

    @outlasting
    def select_rows(self, index: torch.Tensor, rows: Rows | None = None) -> None:
        """Row ``i`` becomes what row ``index[i]`` was (int64). Packed blocks are not touched, only referred to."""
        if self.buffers is None or self.store is None:
            return
        self.rows = self.rows.select(index) if rows is None else rows
        self.buffers.select_rows(index)
        self.store.select_rows(index)

    @outlasting
    def restore(
        self,
        rows: Rows,
        keys: torch.Tensor,
        values: torch.Tensor,
        held: Sequence[int],
        late: Late,
        store: BlockStore,
        dropped: int = 0,
    ) -> None:
        """Take what another layer of the same scheme held; its exact tokens ``[B, H, T, D]`` are copied."""
        self.rows, self.store, self.dropped = rows, store, dropped
        self.buffers = ExactTokens.copied(keys, values, held, late, self.limits)

    def _adopt(self) -> None:
        """Take tensors that may be changed: a copy made under ``torch.inference_mode()`` has others."""
        if self.buffers is None or not self.buffers.keys.is_inference():
            return
        assert self.store is not None
        self.buffers.keys, self.buffers.values = self.buffers.keys.clone(), self.buffers.values.clone()
        self.store.pool, self.store.table = self.store.pool.clone(), self.store.table.clone()


def bytes_once(tensors: Iterable[torch.Tensor], seen: set[int] | None = None) -> int:
    """Bytes of tensors but for those in ``seen``, to which they are added."""
    total = 0
    for x in tensors:
        if seen is None or id(x) not in seen:
            total += x.nbytes
        if seen is not None:
            seen.add(id(x))
    return total
