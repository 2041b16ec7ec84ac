"""``SharedLayer``: the cache of one layer of which this rank holds a shard of the packed blocks.

Every rank is given every token, and counts and crops as one alone would. All of them hold the few exact tokens, sinks
and recent ones, which are bounded; a block that is full is encoded by its owner and dropped by the others. So blocks
are bit for bit those of one process, and no packed byte ever travels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from kvbits.attend import KVView, Shard
from kvbits.encode.sound import Unsound, compared_limit, limit_of
from kvbits.layer.cache import LayerCache
from kvbits.layer.packing import Encoded, Plan, ToPack
from kvbits.parallel.join import Sliced, Together
from kvbits.parallel.ranks import Ranks
from kvbits.schemes.scheme import Scheme
from kvbits.store.rows import Rows
from kvbits.store.shards import Shards
from kvbits.transform import Transform
from kvbits.transform.rotary import Rotary
from kvbits.types import Packed, Params


class SharedLayer(LayerCache):
    """As :class:`kvbits.layer.cache.LayerCache`, for rows of equal length, without a sliding window.

    Args:
        ranks: who holds the rest.
        shards: which blocks are this rank's.

    Attributes:
        sliced: whether attention is asked by slices of the newest tokens, one for each rank, right now.
    """

    def __init__(
        self,
        scheme: Scheme,
        name: str,
        rotary: Rotary | None,
        fitted: tuple[Params, Params],
        ranks: Ranks,
        shards: Shards,
    ) -> None:
        self.ranks, self.shards, self.sliced = ranks, shards, False
        super().__init__(scheme, None, name, rotary, fitted)
        self._limits = self.limits

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self._packed: list[int] = []
        self._own_angles: tuple[object, int, Transform] | None = None

    @property
    def packed_blocks(self) -> list[int]:
        """Blocks that have been packed of each row, on all ranks together."""
        return self._packed

    @property
    def elements(self) -> int:
        """Elements of K and V that this rank holds."""
        if self.keys is None or self.values is None or self.store is None:
            return 0
        tokens = sum(self.held) + sum(self.store.counts) * self.scheme.block
        return tokens * self.keys.shape[1] * (self.keys.shape[3] + self.values.shape[3])

    # -- growing ---------------------------------------------------------------------------------------------------

    def hold(self, on: bool) -> None:
        """Whether what is appended now stays exact, to be packed with what comes after ``hold(False)``."""
        self.limits = replace(self._limits, residual=None) if on else self._limits

    def _allocate(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super()._allocate(keys, values)
        self._packed = [0] * keys.shape[0]

    def _encode_side(
        self, side: int, to_pack: ToPack, row: int | None, blocks: range, params: Params, transform: Transform
    ) -> list[Packed]:
        assert row is None, "rows of a shared context have the same length"
        self._refuse_unsound(side, to_pack, blocks)  # on all ranks alike: they would wait for an owner that stopped
        begin, packed = self._packed[0], []
        for run in self.shards.mine(begin + blocks.start, begin + blocks.stop):
            own = range(run.start - begin, run.stop - begin)
            packed += super()._encode_side(side, to_pack, row, own, params, transform)
        return packed

    def _refuse_unsound(self, side: int, to_pack: ToPack, blocks: range) -> None:
        first, last = (self.sinks + n * self.scheme.block for n in (blocks.start, blocks.stop))
        tokens = to_pack.take(None, first, last)
        limit = compared_limit(tokens.dtype)
        if not bool(tokens.abs().amax() <= limit):
            count = int((~(tokens.abs() <= limit)).sum())
            raise self._unsound(side, Unsound(count, limit_of(tokens.dtype)))

    def _commit(self, plan: Plan, pieces: Encoded, rest: list[torch.Tensor]) -> None:
        super()._commit(plan, pieces, rest)
        self._packed = [before + more for before, more in zip(self._packed, plan.blocks, strict=True)]

    # -- looking ---------------------------------------------------------------------------------------------------

    def _view(self, keys: torch.Tensor, values: torch.Tensor, held: Sequence[int], rows: Rows, offset: int) -> KVView:
        view = super()._view(keys, values, held, rows, offset)
        packed = max(self._packed, default=0)
        shard: Shard | None = None
        if self.sliced:
            shard = Sliced(self.ranks, packed > 0)
        elif packed:
            shard = Together(self.ranks, self.shards.owner(packed) == self.shards.rank)
        return replace(view, shard=shard, key_transform=self._of_own_blocks(view))

    def _of_own_blocks(self, view: KVView) -> Transform:
        """The transform of the keys, with the angles of this rank's blocks alone."""
        transform, count = view.key_transform, view.blocks.longest
        if transform.rope is None:
            return transform
        known = self._own_angles
        if known is None or known[0] is not transform or known[1] != count:
            own = self.shards.number(torch.arange(count, device=transform.rope.base_cos.device))
            cos, sin = (x[:, own] for x in (transform.rope.base_cos, transform.rope.base_sin))
            rope = replace(transform.rope, base_cos=cos, base_sin=sin)
            self._own_angles = known = transform, count, replace(transform, rope=rope)
        return known[2]

    # -- changing --------------------------------------------------------------------------------------------------

    def _truncate(self, counts: Sequence[int]) -> None:
        super()._truncate([self.shards.count(count) for count in counts])
        self._packed = list(counts)

    def refuse_crop(self, columns: int) -> None:
        """Raise ValueError where taking back ``columns`` columns would crop into a packed block."""
        kept = self.columns - columns
        if self.whole(kept) != kept:
            raise ValueError(
                f"{self.name}: taking back {columns} of {self.columns} columns crops into a packed block, which one "
                f"rank alone could decode; take back {self.columns - self.whole(kept)}, up to where a block begins"
            )

    def select_rows(self, index: torch.Tensor, rows: Rows | None = None) -> None:
        """Row ``i`` becomes what row ``index[i]`` was."""
        super().select_rows(index, rows)
        self._packed = [self._packed[row] for row in index.tolist()] if self._packed else []

    def fork(self) -> LayerCache:
        """Another layer that holds the same and goes on by itself."""
        twin = super().fork()
        assert isinstance(twin, SharedLayer)
        twin._packed = list(self._packed)
        return twin

    def _empty(self) -> LayerCache:
        return SharedLayer(self.scheme, self.name, self.rotary, self.calibrated, self.ranks, self.shards)
