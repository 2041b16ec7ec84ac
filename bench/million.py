"""A million tokens on one machine: two processes share the packed cache of a small model, and find one planted key.

    torchrun --nproc-per-node 2 bench/million.py                     # 1,048,576 tokens, about 4 GB in all

Keys and values are made up and put into the cache of each layer as a prompt would be, in chunks: the model (the sizes
of Qwen2.5-0.5B, random weights, a small vocabulary) never reads a million tokens. One key in the middle is a multiple
of a query. What attention over the shared cache returns for that query is compared with float64 attention over the
exact keys and values, which are made again chunk by chunk. Then the model itself takes a few steps at that length.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from typing import Any

import torch
import torch.distributed as dist
from common import write
from transformers import Qwen2Config, Qwen2ForCausalLM

from kvbits import parallel
from kvbits.attend import Call, attend
from kvbits.hf.names import cache_name
from kvbits.hf.tokens import TokenIds
from kvbits.schemes.catalogue import RECOMMENDED
from kvbits.store.rows import Rows

LAYERS, HEADS, KV_HEADS, CHANNELS = 24, 14, 2, 64
"""Qwen2.5-0.5B."""

CHUNK = 65_536
STRENGTH = 3.0
"""The planted key is so many times the query: a score of 24, where a million others add up to exp(14.4)."""


class Text:
    """Keys and values ``[1, 2, n, 64]`` of a layer: normal numbers, no two tokens alike, and one planted token."""

    def __init__(self, layer: int, tokens: int) -> None:
        generator = torch.Generator().manual_seed(layer)
        self.base = torch.randn(2, 1, KV_HEADS, CHUNK, CHANNELS, generator=generator)
        self.query = torch.randn(1, KV_HEADS, 1, CHANNELS, generator=generator)
        self.answer = 3 * torch.randn(1, KV_HEADS, 1, CHANNELS, generator=generator)
        self.tokens, self.planted = tokens, int(tokens * 0.37) + 11 * layer

    def chunk(self, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        number, count = first // CHUNK, min(CHUNK, self.tokens - first)
        keys, values = self.base.roll((31 * number, number), (3, 4))[:, :, :, :count].unbind(0)
        if 0 <= (at := self.planted - first) < count:
            keys[:, :, at], values[:, :, at] = STRENGTH * self.query[:, :, 0], self.answer[:, :, 0]
        return keys, values

    def queries(self) -> torch.Tensor:
        """``[1, 14, 1, 64]``: that of its group in each head."""
        return self.query.repeat_interleave(HEADS // KV_HEADS, 1)


def fill(cache: parallel.SharedCache, tokens: int) -> None:
    """Put a text of its own into each layer."""
    for number, core in enumerate(cache.shared_layers):
        text = Text(number, tokens)
        for first in range(0, tokens, CHUNK):
            core.append(*text.chunk(first))
    for layer in cache.packed_layers:
        layer.is_initialized = True
    cache.hold(Rows().extend(1, tokens), TokenIds(torch.zeros(1, tokens, dtype=torch.int32)))


def truth(text: Text) -> tuple[torch.Tensor, torch.Tensor]:
    """Float64 attention ``[2, 64]`` of the planted queries over the exact text, and the weight of the planted token."""
    query = text.query[0, :, 0].double()
    top = STRENGTH * (query * query).sum(-1) / CHANNELS**0.5
    total, out = torch.zeros(KV_HEADS, dtype=torch.float64), torch.zeros(KV_HEADS, CHANNELS, dtype=torch.float64)
    for first in range(0, text.tokens, CHUNK):
        keys, values = (x[0].double() for x in text.chunk(first))
        weight = ((keys @ query[:, :, None])[..., 0] / CHANNELS**0.5 - top[:, None]).exp()
        total += weight.sum(-1)
        out += (weight[:, None] @ values)[:, 0]
    return out / total[:, None], 1 / total


def retrieve(cache: parallel.SharedCache, number: int, tokens: int) -> dict[str, Any]:
    """Ask one layer for its planted token."""
    text, core = Text(number, tokens), cache.shared_layers[number]
    start = time.perf_counter()
    out = attend(Call(text.queries(), core.view(), CHANNELS**-0.5))
    seconds = time.perf_counter() - start
    right, weight = truth(text)
    found = out[0, :: HEADS // KV_HEADS, 0].double()
    error = float((found - right).norm() / right.norm())
    far = float((found - text.answer[0, :, 0]).norm() / text.answer.norm())
    if not (float(weight.min()) > 0.99 and error < 0.2):
        raise SystemExit(f"layer {number}: weight {weight.tolist()}, error {error}: the planted key was not found")
    return {
        "layer": number, "position": text.planted, "weight_float64": float(weight.min()),
        "error_to_float64": error, "distance_to_planted_value": far, "attention_seconds": seconds,
    }  # fmt: skip


def steps(model: Qwen2ForCausalLM, cache: parallel.SharedCache, count: int) -> tuple[list[int], float]:
    """Greedy tokens of the model itself behind all that, and seconds for each."""
    token, found = torch.zeros(1, 1, dtype=torch.int64), []
    start = time.perf_counter()
    with torch.no_grad():
        for _ in range(count):
            token = model(token, **{cache_name(model): cache}).logits[:, -1:].argmax(-1)
            found.append(int(token))
    return found, (time.perf_counter() - start) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2**20)
    parser.add_argument("--scheme", default=RECOMMENDED)
    parser.add_argument("--check", default="0,11,23", help="layers that are asked for their planted key")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // dist.get_world_size()))
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=1024, hidden_size=HEADS * CHANNELS, intermediate_size=4864, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=2 * options.tokens,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).eval()
    cache = parallel.cache_for(model, options.scheme)
    start = time.perf_counter()
    fill(cache, options.tokens)
    filled = time.perf_counter() - start
    rows = [retrieve(cache, number, options.tokens) for number in map(int, options.check.split(","))]
    found, each = steps(model, cache, 4)
    own = {
        "rank": dist.get_rank(), "cache_bytes": cache.nbytes.total, "blocks": sum(cache.shared_layers[0].store.counts),  # type: ignore[union-attr]
        "peak_process_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "fill_seconds": filled,
        "step_seconds": each, "step_tokens": found,
    }  # fmt: skip
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    if any(rank["step_tokens"] != found for rank in ranks):
        raise SystemExit(f"ranks took different steps: {ranks}")
    if dist.get_rank() == 0:
        exact = options.tokens * LAYERS * KV_HEADS * 2 * CHANNELS * 2
        more = {"tokens": options.tokens, "scheme": options.scheme, "ranks": ranks, "exact_bytes_in_16_bits": exact}
        print(write("million", rows, **more))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
