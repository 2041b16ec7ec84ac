"""Packed pages: how a page of a paged KV cache holds a record for each KV head, filled token by token.

A page of ``block`` tokens is ``[H, record bytes]``, so the pages of a layer are a pool as :mod:`kvbits.store.blocks`
has it, and a block table of vLLM's is the table of :class:`kvbits.store.blocks.Blocks`: kernels read both as they lie.
Under a scheme with scales per token, a token's codes and scales depend on no other token. So each can be written into
its place when it comes, although codes of several tokens share a byte, and a page is never encoded again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvbits.attend import Call, KVView, attend
from kvbits.codecs import Codec
from kvbits.encode import encode
from kvbits.numerics import bitpack, hadamard
from kvbits.schemes.scheme import BLOCK_TOKENS, BLOCKS, RESIDUAL_TOKENS, SINK_TOKENS, Scheme
from kvbits.store.blocks import Blocks
from kvbits.store.derived import Derived
from kvbits.store.record import Record, Slot
from kvbits.store.rows import Rows
from kvbits.transform import Transform
from kvbits.transform.rotate import rotate
from kvbits.types import Packed, Params

_AT_ONCE = 8
"""Tokens that are encoded together: the fewest that a block may have."""


def paged_scheme(text: str | Scheme) -> Scheme:
    """The scheme ``text`` as pages hold it: every token packed, so ``residual=0,sinks=0``.

    Raises:
        ValueError: for a scheme that a page cannot be filled with token by token, with the reason and a near one.
    """
    scheme = Scheme.parse(text)
    reasons = [f"{codec} {reason}" for codec in dict.fromkeys((scheme.key, scheme.value)) for reason in _why_not(codec)]
    reasons += _found(
        {
            "its keys are stored before their rotary embedding, which vLLM has applied": scheme.pre_rope,
            "the mean of its keys is not known before the first tokens are stored": scheme.centred,
            "all layers share one pool of pages, so no layer can differ": bool(scheme.overrides),
            "pages keep no tokens exact beside them": _keeps_exact(scheme),
            f"the length of a block is vLLM's --block-size, not block={scheme.block}": scheme.block != BLOCK_TOKENS,
        }
    )
    if reasons:
        raise ValueError(f"{text!s} cannot fill pages: {'; '.join(reasons)}. Take int4, int8, fp8, rot4 or lm4")
    return replace(scheme, residual=0, sinks=0)


def _why_not(codec: Codec) -> list[str]:
    """Reasons why one token cannot be encoded without others."""
    return _found(
        {
            "has scales that tokens share": codec.format.per == "channel",
            "is fitted to the first tokens or to a calibration, and requests share pages": codec.is_fitted,
            "has outliers, which are chosen among the tokens of a block": codec.format.outliers,
        }
    )


def _found(reasons: Mapping[str, bool]) -> list[str]:
    return [reason for reason, holds in reasons.items() if holds]


def _keeps_exact(scheme: Scheme) -> bool:
    """Whether it asks for exact tokens, beyond those that every scheme has unless it says otherwise."""
    return (
        scheme.residual not in (None, RESIDUAL_TOKENS, 0)
        or scheme.sinks not in (SINK_TOKENS, 0)
        or scheme.late_sinks > 0
    )


class PagedRows(Rows):
    """Rows of any lengths, the same number of newest tokens of each, and packed tokens that end inside a page.

    A model's columns end with the newest tokens of all rows. What a row's last page holds beyond its packed tokens is
    put into a column that no query sees.

    Args:
        packed: packed tokens of each row.
        pages: pages that hold them.
        block: tokens of a page.
        queries: newest tokens, exact, the same number in each row.
    """

    def __init__(self, packed: Sequence[int], pages: Sequence[int], block: int, queries: int) -> None:
        columns = max(packed) + queries
        tokens, held = (torch.tensor(counts)[:, None] for counts in (packed, pages))
        skipped = columns - queries - tokens
        super().__init__(len(packed), columns, torch.arange(columns) >= skipped)
        slot = torch.arange(max(pages) * block + queries)
        newest = slot - held * block + tokens
        own = torch.where(slot < tokens, slot, torch.where(slot < held * block, columns, newest))
        self.column_of = own + skipped
        self.padded = False  # no query stands before its row begins: causality is the whole mask


@dataclass(frozen=True)
class Batch:
    """Some rows of a batch that have as many new tokens each, as kernels need to know them.

    Attributes:
        rows: which columns hold text.
        table: int64 ``[B, N]``, the pages of each row.
        pages: how many of them hold tokens that came before.
        queries: new tokens of each row.
    """

    rows: Rows
    table: torch.Tensor
    pages: tuple[int, ...]
    queries: int

    @staticmethod
    def of(table: torch.Tensor, packed: Sequence[int], queries: int, block: int) -> Batch:
        """Rows with ``packed`` tokens in the pages of ``table [B, >= N]`` (any integers), and ``queries`` new ones."""
        pages = tuple(-(-count // block) for count in packed)
        if len(packed) == 1 and pages[0] * block == packed[0]:
            rows = Rows(1, packed[0] + queries)
        else:
            rows = PagedRows(packed, pages, block, queries)
        return Batch(rows, table[:, : max(pages)].to(torch.int64).contiguous(), pages, queries)


class Pages:
    """The packed pages of one layer.

    Args:
        scheme: of :func:`paged_scheme`.
        block: tokens of a page.
        key_channels, value_channels: of a head.
        dtype: of exact keys and values.

    Raises:
        ValueError: for a length of pages that no block has.
    """

    def __init__(self, scheme: Scheme, block: int, key_channels: int, value_channels: int, dtype: torch.dtype) -> None:
        if block not in BLOCKS:
            allowed = ", ".join(map(str, BLOCKS))
            raise ValueError(f"pages of {block} tokens are not supported; take --block-size {allowed}")
        self.scheme, self.block = replace(scheme, block=block), block
        self.record = Record.of(scheme.key, scheme.value, block, key_channels, value_channels, dtype)
        self.derived = Derived()
        assert self.record.nbytes % block == 0, "parts are whole numbers of bytes per token, aligned to 64"
        self.params: Params = {}
        self._alike = scheme.key == scheme.value and key_channels == value_channels
        rotation = [hadamard.rotation(channels) for channels in (key_channels, value_channels)]
        self.transforms = tuple(
            Transform(rotation=matrix) if codec.rotates else Transform()
            for codec, matrix in zip((scheme.key, scheme.value), rotation, strict=True)
        )

    @property
    def bytes_per_token(self) -> int:
        """Of one KV head, K and V."""
        return self.record.nbytes // self.block

    def write(self, pool: torch.Tensor, places: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Encode tokens into their places, each page from its first token on.

        The first token of a page clears what an earlier request left there. It would not be seen, but kernels round
        to the largest scale of a page.

        Args:
            pool: uint8 ``[P, H, record bytes]``.
            places: int64 ``[T]``, ``page * block + token`` of each, no two the same.
            keys, values: ``[T, H, D]``.

        Raises:
            Unsound: if elements are NaN, infinite or above what a codec takes.
        """
        page, token = places // self.block, places % self.block
        if self._alike and keys.shape == values.shape:  # then a record is two records of one side, of twice the heads
            sides = [(self.scheme.key, self.record.keys, torch.stack([keys, values], dim=2).flatten(1, 2))]
            pool = pool.view(pool.shape[0], -1, pool.shape[2] // 2)
        else:
            sides = [(self.scheme.key, self.record.keys, keys), (self.scheme.value, self.record.values, values)]
        packed = [_encode_tokens(codec, x, self.params) for codec, _, x in sides]  # all of it before any is stored
        pool[page[token == 0]] = 0
        for (codec, slots, _), parts in zip(sides, packed, strict=True):
            for slot in slots:
                _put(pool, slot, codec.format.bits, page, token, parts[slot.part.name])

    def attend(
        self,
        pool: torch.Tensor,
        batch: Batch,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scaling: float,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Attention of the new tokens over the packed ones and, exact, over themselves.

        Args:
            pool: uint8 ``[P, H, record bytes]``.
            batch: where the packed tokens are.
            query: ``[B, Hq, q, Dk]``.
            keys, values: of the new tokens, ``[B, H, q, D]``.
            scaling, softcap: as for :class:`kvbits.attend.Call`.

        Returns:
            ``[B, Hq, q, Dv]`` in the query's dtype.
        """
        if softcap is None and not any(batch.pages):  # prompts of one length
            return scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scaling, enable_gqa=True)
        held = (batch.queries,) * len(batch.pages)
        blocks = Blocks(self.record, pool, batch.table, batch.pages, False, self.derived)
        view = KVView(
            self.scheme, keys, values, held, 0, blocks, self.params, self.params, batch.rows,
            key_transform=self.transforms[0], value_transform=self.transforms[1],
        )  # fmt: skip
        return attend(Call(query, view, scaling, softcap=softcap))


def _encode_tokens(codec: Codec, x: torch.Tensor, params: Params) -> Packed:
    """Parts of tokens ``x [T, H, D]``, each by itself: ``[T, H, n]``, codes unpacked (uint8, or the exact elements)."""
    tokens = x.shape[0]
    if codec.rotates:
        x = rotate(x)
    if short := -tokens % _AT_ONCE:
        x = torch.cat([x, x.new_zeros(short, *x.shape[1:])])
    parts = encode(codec, x.unflatten(0, (-1, _AT_ONCE)).transpose(1, 2), params)  # [n, H, 8, D]
    if codec.format.bits:
        parts = {**parts, "codes": bitpack.unpack(parts["codes"], codec.format.bits)}
    return {name: part.transpose(1, 2).flatten(0, 1)[:tokens] for name, part in parts.items()}


def _put(
    pool: torch.Tensor, slot: Slot, bits: int, page: torch.Tensor, token: torch.Tensor, part: torch.Tensor
) -> None:
    """Write one part of tokens, ``[T, H, n]``, into the records of their pages, where ``slot`` says."""
    lines = pool[..., slot.offset : slot.offset + slot.part.nbytes].unflatten(-1, (slot.part.shape[0], -1))
    if slot.part.role == "codes" and bits:
        bitpack.put(lines, page, token, part, bits)
    else:
        lines[page, :, token] = part.contiguous().view(torch.uint8)
