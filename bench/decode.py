"""Decode step of a whole model: kvbits beside Transformers' exact cache and its quanto cache.

All caches of one (dtype, context) are filled with the same keys and values, then stepped in turn, one token each per
round, in one process; the table shows medians and ratios of medians. Steps that re-quantize HF's cache (every 128th)
are left out, to HF's advantage.

    python bench/decode.py                       # SmolLM2, 512 / 2,048 / 8,000 tokens, float32 and bfloat16
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from common import prose, require_green, write
from transformers import Cache, DynamicCache

from kvbits.hf.attach import cache_name
from kvbits.hf.cache import KVCache
from kvbits.hf.loading import load_model, load_tokenizer
from kvbits.measure.caches import make, nbytes
from kvbits.measure.setting import SEED
from kvbits.scheme import split_schemes

PEERS = ("hf:dynamic", "hf:quanto4", "hf:quanto2")


def filled(model: Any, scheme: str, source: DynamicCache, calibration: Path | None = None) -> Cache:
    """A cache that holds the keys and values of ``source``."""
    cache = make(model, scheme, calibration)
    if isinstance(cache, KVCache):
        cache.columns.begin(None)
    for index, layer in enumerate(source.layers):
        cache.update(layer.keys.clone(), layer.values.clone(), index)
    return cache


def steps(
    model: Any, ids: torch.Tensor, schemes: list[str], rounds: int, calibration: Path | None = None
) -> list[dict[str, Any]]:
    """Median step times of all schemes after the prompt ``ids [1, T]``, interleaved."""
    name = cache_name(model)
    with torch.no_grad():
        source = DynamicCache(config=model.config)
        model(input_ids=ids, use_cache=True, logits_to_keep=1, **{name: source})
        caches = {scheme: filled(model, scheme, source, calibration) for scheme in schemes}
        sizes = {scheme: nbytes(cache) for scheme, cache in caches.items()}
        del source
        token = ids[:, -1:]
        times: dict[str, list[float]] = {scheme: [] for scheme in schemes}
        for turn in range(rounds + 2):
            for scheme, cache in caches.items():
                start = time.perf_counter()
                model(input_ids=token, use_cache=True, **{name: cache})
                if turn >= 2:  # the first steps warm up; quanto compiles its extension at first use
                    times[scheme].append(time.perf_counter() - start)
    medians = {scheme: statistics.median(samples) for scheme, samples in times.items()}
    return [
        {
            "scheme": scheme,
            "context": ids.shape[1],
            "dtype": str(model.dtype).removeprefix("torch."),
            "step_ms": 1e3 * medians[scheme],
            "speed_against_exact": medians["hf:dynamic"] / medians[scheme],
            "speed_against_quanto4": medians["hf:quanto4"] / medians[scheme],
            "kv_bytes": sizes[scheme],
        }
        for scheme in schemes
    ]


def prompt(name: str, tokens: int) -> torch.Tensor:
    """Real text, ``[1, tokens]``."""
    return load_tokenizer(name)(prose(8 * tokens), return_tensors="pt").input_ids[:, :tokens]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--schemes", default="int4,kivi4,kivi2,default,small", help="separated by commas or semicolons")
    parser.add_argument("--calibration", type=Path, help="folder that 'kvbits calibrate' wrote")
    parser.add_argument("--contexts", default="512,2048,8000")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", default="decode")
    options = parser.parse_args()
    require_green("tests/test_attend.py", "tests/test_smollm2.py")
    torch.manual_seed(SEED)
    schemes = [*PEERS, *split_schemes(options.schemes)]
    rows: list[dict[str, Any]] = []
    for dtype in options.dtypes.split(","):
        model = load_model(options.model, dtype=getattr(torch, dtype))
        for context in map(int, options.contexts.split(",")):
            measured = steps(model, prompt(options.model, context), schemes, options.rounds, options.calibration)
            for row in measured:
                print(row, flush=True)
            rows += measured
    print(write(options.out, rows, model=options.model))


if __name__ == "__main__":
    main()
