"""The peak of reading a prompt: what is there beside the weights and the cache while a call runs. An estimate, from
above: what torch allocates for Llama, Qwen, Gemma and Phi lies below it, by a third at most.

Of a call that brings ``n`` tokens of each row, in a cache that holds ``L`` afterwards; in elements, for each row::

    n (4 hidden + 2 head_dim)      the residual stream, its norm, what callers still hold; cosines and sines
    + the wider of                 one layer at work:
        4 n intermediate + mask        a gated MLP, with gate and up projection in one
        2 n (query + key + value)      queries, keys and values before and after their rotary embedding,
          + masks + repeated               with masks in full, and K and V once more for each group of query heads
          + tiled                          and, of a CPU with AMX, once more for its matrix unit
    + logits                       n or 1 of them, and the last ones once more in float32
    + the largest layer            of the cache: encoded beside its pool, or copied as it grows

A prompt in one piece needs no mask, unless layers have a window. Then, and in chunks, there is one of ``n x L`` bytes,
which sdpa copies in the model's dtype; over packed history kvbits reads it as it is. Keys and values are repeated for
exact layers read in chunks. Where the CPU has a matrix unit for the model's type, sdpa lays out keys and values of all
query heads for it: ``2 L query``, in one piece and over exact history. Where the cache holds latents (MLA), each call
makes keys and values of all query heads of all ``L`` of them: ``2 L (key + value)``, which is rougher. Assumed are
attention without a matrix of scores (sdpa, flash), no gradients, and an allocator without gaps.
"""

from __future__ import annotations

import torch

from kvbits.plan.shapes import Shape
from kvbits.store.room import SPARE

_FLOAT_BYTES = 4


def activation_bytes(
    shape: Shape, tokens: int, context: int, rows: int = 1, packs: bool = True, logits: str = "last", cpu: bool = False
) -> int:
    """All but the last line, in bytes; 0 where the widths of a model are not known.

    Args:
        shape: the model.
        tokens: of each row, that the call brings.
        context: in the cache, these included.
        rows: of the batch.
        packs: whether what comes before them is packed.
        logits: of which columns logits are computed: ``last``, as ``generate`` does, or ``all``, as a plain forward.
        cpu: whether it runs on the CPU of this machine.
    """
    works = at_work(shape, tokens, context, packs, logits, cpu) if shape.widths is not None and tokens else ()
    return rows * max(works, default=0)


def at_work(
    shape: Shape, tokens: int, context: int, packs: bool = True, logits: str = "last", cpu: bool = False
) -> tuple[int, int]:
    """Of each row, what is there while an MLP is at work, and while attention is; of a model whose widths are known."""
    assert shape.widths is not None
    widths, itemsize = shape.widths, shape.dtype.itemsize
    kinds = [kind for kind in shape.kinds() if kind is not None]
    channels = max((kind.channels for kind in kinds), default=0)
    always = 4 * widths.hidden + 2 * max((kind.key_channels for kind in kinds), default=0)
    windows, chunks = any(kind.window is not None for kind in kinds), tokens < context
    mask = tokens * context if windows or chunks else 0
    copied = mask * itemsize if windows or not packs else 0
    latents = channels < widths.expanded
    grouped = 2 * widths.query > channels and not latents
    repeated = 2 * widths.query * context * itemsize if chunks and not packs and grouped else 0
    mlp = 4 * tokens * widths.intermediate * itemsize + mask
    handed = widths.expanded * context if latents else channels * tokens
    tiled = 2 * widths.query * context * itemsize if cpu and has_tiles(shape.dtype) and not (chunks and packs) else 0
    attention = 2 * (tokens * widths.query + handed) * itemsize + mask + copied + repeated + tiled
    columns = 1 if logits == "last" else tokens
    head = widths.vocabulary * (columns * itemsize + _FLOAT_BYTES)
    rest = tokens * always * itemsize + head
    return rest + mlp, rest + attention


def has_tiles(dtype: torch.dtype) -> bool:
    """Whether this CPU has a matrix unit (AMX) for a type, for which sdpa lays out keys and values anew."""
    supported = {torch.bfloat16: "_is_amx_tile_supported", torch.float16: "_is_amx_fp16_supported"}
    return bool(getattr(torch.cpu, supported.get(dtype, ""), bool)())


def exchange_bytes(shape: Shape, tokens: int, rows: int = 1) -> int:
    """What a rank holds beside that where ranks share a context, while they read ``tokens`` together.

    Keys and values of one layer and the chunk, as they come and side by side; all queries; and what they have seen of
    the blocks here, in float32, as it goes, as it comes and merged. The last chunk stays exact in all layers, with an
    eighth of spare room, until those of its tokens that make no slices have seen it.
    """
    if shape.widths is None:
        return 0
    kinds = {kind: layers for kind, layers in shape.kinds().items() if kind is not None}
    channels, itemsize = max((kind.channels for kind in kinds), default=0), shape.dtype.itemsize
    exact = sum(kind.token_bytes * layers for kind, layers in kinds.items() if kind.window is None)
    each = 2 * channels * itemsize + shape.widths.query * (2 * itemsize + 3 * _FLOAT_BYTES)
    return rows * tokens * (each + exact + exact // SPARE)
