"""Reading a prompt: kvbits beside Transformers' exact cache, at once and in chunks.

At once, a prompt attends to its own exact keys and values, so what kvbits adds is packing. In chunks, each chunk
attends to packed history. One cache after the other in every round, in one process; medians.

    python bench/prefill.py [--contexts 512,2048,4096] [--chunk 512]
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from common import require_green, write
from decode import prompt

from kvbits.hf.attach import cache_name
from kvbits.hf.loading import load_model
from kvbits.measure.caches import make
from kvbits.measure.setting import SEED


def seconds(model: Any, ids: torch.Tensor, scheme: str, chunk: int) -> float:
    """To read ``ids [1, T]`` into a fresh cache, ``chunk`` tokens at a time."""
    cache, name = make(model, scheme), cache_name(model)
    start = time.perf_counter()
    with torch.no_grad():
        for piece in ids.split(chunk, dim=1):
            model(input_ids=piece, use_cache=True, logits_to_keep=1, **{name: cache})
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--schemes", default="int4,kivi4,kivi2", help="separated by commas")
    parser.add_argument("--contexts", default="512,2048,4096")
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", default="prefill")
    options = parser.parse_args()
    require_green("tests/test_attend.py", "tests/test_encode.py")
    torch.manual_seed(SEED)
    schemes = ["hf:dynamic", *options.schemes.split(",")]
    rows: list[dict[str, Any]] = []
    for dtype in options.dtypes.split(","):
        model = load_model(options.model, dtype=getattr(torch, dtype))
        for context in map(int, options.contexts.split(",")):
            ids = prompt(options.model, context)
            for chunk in dict.fromkeys((context, min(context, options.chunk))):
                times: dict[str, list[float]] = {scheme: [] for scheme in schemes}
                for turn in range(options.rounds + 1):
                    for scheme in schemes:
                        spent = seconds(model, ids, scheme, chunk)
                        if turn:  # the first round warms up
                            times[scheme].append(spent)
                medians = {scheme: statistics.median(samples) for scheme, samples in times.items()}
                for scheme in schemes:
                    rows.append(
                        {
                            "scheme": scheme,
                            "dtype": dtype,
                            "context": context,
                            "chunk": chunk,
                            "seconds": medians[scheme],
                            "time_against_exact": medians[scheme] / medians["hf:dynamic"],
                        }
                    )
                    print(rows[-1], flush=True)
    print(write(options.out, rows, model=options.model))


if __name__ == "__main__":
    main()
