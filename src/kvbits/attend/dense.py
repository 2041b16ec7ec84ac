"""Views decoded: all of one at once (:func:`dense`), or some of its blocks (:func:`decode_into`)."""

from __future__ import annotations

import torch

from kvbits.attend import native
from kvbits.attend.view import KVView
from kvbits.numerics.cast import narrow


def dense(view: KVView) -> tuple[torch.Tensor, torch.Tensor]:
    """All columns from ``view.offset`` on, decoded: ``[B, H, columns, Dk]`` and ``[B, H, columns, Dv]``.

    Padding, and tokens behind a sliding window, are zero. Where nothing is packed and nothing padded this is the exact
    buffer itself, uncopied.
    """
    if view.shard is not None:
        raise NotImplementedError(
            "this layer's keys and values are spread over several ranks and cannot be decoded in one place: "
            "leave out what needs that (output_attentions, dropout), and take a model whose layers kvbits.explain "
            "does not call decoded"
        )
    if view.blocks.longest == 0 and view.rows.valid is None and view.dropped == 0:
        return view.keys[:, :, view.offset :], view.values[:, :, view.offset :]
    if view.blocks.longest:
        transformed = not (view.key_transform.is_nothing and view.value_transform.is_nothing)
        slow = transformed or native.why_not_view(view)
        keys, values = decode(view, 0, view.blocks.longest) if slow else native.decode(view)
    else:
        keys, values = view.keys[:, :, :0], view.values[:, :, :0]
    return (
        _in_columns(view, view.keys, narrow(keys, view.keys.dtype)),
        _in_columns(view, view.values, narrow(values, view.values.dtype)),
    )


def decode(view: KVView, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks ``first .. last - 1`` of all rows: ``[B, H, n * block, Dk]`` and ``[B, H, n * block, Dv]``."""
    keys, values = view.blocks.read(first, last)
    return (
        view.key_transform.undo(view.scheme.key.decode(keys, view.key_params).flatten(2, 3), first),
        view.value_transform.undo(view.scheme.value.decode(values, view.value_params).flatten(2, 3), first),
    )


def decode_into(view: KVView, keys: torch.Tensor, values: torch.Tensor, first: int, last: int) -> None:
    """As :func:`decode`, into float ``keys`` and ``values``."""
    packed_keys, packed_values = view.blocks.read(first, last)
    block = view.blocks.record.tokens
    for out, packed, codec, params, transform in (
        (keys, packed_keys, view.scheme.key, view.key_params, view.key_transform),
        (values, packed_values, view.scheme.value, view.value_params, view.value_transform),
    ):
        codec.decode_into(out.unflatten(2, (-1, block)), packed, params)
        if not transform.is_nothing:
            out.copy_(transform.undo(out, first))


def _in_columns(view: KVView, exact: torch.Tensor, decoded: torch.Tensor) -> torch.Tensor:
    """Own tokens ``[B, H, L, D]`` and ``[B, H, N * block, D]`` put where the model's columns are."""
    if view.rows.valid is None and view.dropped <= view.offset and not view.late and view.even:
        # Own tokens are columns: sinks, packed, recent.
        skip = view.offset - view.dropped
        return torch.cat([exact[:, :, : view.sinks], decoded, exact[:, :, view.sinks :]], dim=2)[:, :, skip:]
    batch, heads, _, channels = exact.shape
    device, columns = exact.device, view.kv_columns
    pieces = ((exact, *view.exact_tokens(device)), (decoded, *view.packed_tokens(0, view.blocks.longest, device)))
    out = exact.new_zeros(batch, columns + 1, heads, channels)  # the last column is thrown away
    for x, token, live in pieces:
        column = view.columns_of(token.expand(batch, -1)) - view.offset
        column = torch.where(live & (column >= 0), column, columns)[:, :, None, None]
        out.scatter_(1, column.expand(-1, -1, heads, channels), x.transpose(1, 2))
    return out[:, :columns].transpose(1, 2).contiguous()
