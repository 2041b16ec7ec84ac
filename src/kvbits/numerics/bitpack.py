"""Codes of 2, 3, 4 and 8 bits in bytes, packed along the tokens of a block.

Packing runs along tokens, never along channels, so any head_dim fits and the last dimension stays contiguous.
With ``n`` tokens in the block and ``r = 8 // bits`` codes a byte, byte row ``i`` holds tokens
``i, i + n/r, i + 2n/r, ...`` from the low bits up: unpacking is one shift and mask per slice, without interleaving.
Three bits are a plane of 2 bits followed by a plane of 1 bit (the code's top bit), so every load stays aligned.
"""

from __future__ import annotations

import torch

BITS = (2, 3, 4, 8)
_PLANES: dict[int, tuple[int, ...]] = {2: (2,), 3: (2, 1), 4: (4,), 8: (8,)}


def packed_rows(tokens: int, bits: int) -> int:
    """Byte rows that ``tokens`` codes of ``bits`` bits take; ``tokens`` must be a multiple of 8."""
    if bits not in _PLANES:
        raise ValueError(f"codes of {bits} bits cannot be packed; allowed are {', '.join(map(str, BITS))}")
    if tokens % 8:
        raise ValueError(f"{tokens} tokens cannot be packed: a block must be a multiple of 8 tokens")
    return tokens * bits // 8


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack uint8 codes ``[..., T, D]`` below ``2**bits`` into uint8 ``[..., T * bits / 8, D]``.

    Raises:
        ValueError: for a bit width or a token count that cannot be packed.
    """
    packed_rows(codes.shape[-2], bits)
    if bits == 8:
        return codes
    planes, low = [], 0
    for width in _PLANES[bits]:
        plane = (codes >> low) & (2**width - 1)
        slices = plane.unflatten(-2, (8 // width, -1)).unbind(-3)
        byte = slices[0]
        for position, piece in enumerate(slices[1:], start=1):
            byte = byte | (piece << (position * width))
        planes.append(byte)
        low += width
    return planes[0] if len(planes) == 1 else torch.cat(planes, dim=-2)


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Inverse of :func:`pack`: uint8 ``[..., T * bits / 8, D]`` to uint8 codes ``[..., T, D]``."""
    if bits == 8:
        return packed
    tokens = packed.shape[-2] * 8 // bits
    codes, row, low = None, 0, 0
    for width in _PLANES[bits]:
        rows = tokens * width // 8
        byte = packed.narrow(-2, row, rows)
        mask = 2**width - 1
        slices = [byte & mask]
        slices += [(byte >> shift) & mask for shift in range(width, 8 - width, width)]
        slices += [byte >> (8 - width)]  # the topmost slice needs no mask
        plane = torch.cat(slices, dim=-2)
        codes = plane if codes is None else codes | (plane << low)
        row, low = row + rows, low + width
    assert codes is not None
    return codes


def unpack_into(out: torch.Tensor, packed: torch.Tensor, bits: int) -> None:
    """As :func:`unpack`, into a float tensor ``out [..., T, D]``: one pass, and no temporary of its size."""
    if bits not in (2, 4):
        out.copy_(unpack(packed, bits))
        return
    # All slices at once: a short step is bound by the number of operations, not by their size.
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)[:, None, None]
    codes = (packed.unsqueeze(-3) >> shifts).bitwise_and_(2**bits - 1)
    out.unflatten(-2, (8 // bits, -1)).copy_(codes)


def put(packed: torch.Tensor, page: torch.Tensor, token: torch.Tensor, codes: torch.Tensor, bits: int) -> None:
    """Replace the codes of single tokens, where they lie.

    Args:
        packed: uint8 ``[P, H, T * bits / 8, D]``, each block of it as :func:`pack` made it; any strides.
        page, token: int64 ``[n]``, which of the P and which of the T; no two the same.
        codes: uint8 ``[n, H, D]`` below ``2**bits``.
        bits: of a code.
    """
    tokens, first, low = packed.shape[-2] * 8 // bits, 0, 0
    apart = len(page) == 1 or len(page.unique()) == len(page)
    for width in _PLANES[bits]:
        rows, mask = tokens * width // 8, 2**width - 1
        position = token // rows
        # Tokens of one slice share no byte, so that none is lost where all of them are written at once.
        slices = [slice(None)] if apart else [(position == place).nonzero().flatten() for place in range(8 // width)]
        for some in slices:
            at = page[some], slice(None), first + token[some] % rows
            shift = (position[some] * width).to(torch.uint8)[:, None, None]
            code = ((codes[some] >> low) & mask) << shift
            packed[at] = packed[at] & ~(mask << shift) | code
        first, low = first + rows, low + width
