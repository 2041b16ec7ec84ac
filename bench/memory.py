"""Peak memory of a whole process that reads a long prompt and generates a few tokens, one process per scheme.

python bench/memory.py                       # SmolLM2, 2,048 and 8,000 tokens, float32 and bfloat16
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
from typing import Any

import torch
from common import write
from decode import prompt

from kvbits.hf.attach import cache_name
from kvbits.hf.loading import load_model
from kvbits.measure.caches import make

NEW_TOKENS = 8


def peak(name: str, dtype: str, scheme: str, context: int) -> int:
    """Peak resident bytes of a process of its own."""
    command = [sys.executable, __file__, "--model", name, "--peak", dtype, scheme, str(context)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def peak_here(name: str, dtype: str, scheme: str, context: int) -> None:
    """Generate in this process and print its peak resident bytes."""
    model, ids = load_model(name, dtype=getattr(torch, dtype)), prompt(name, context)
    options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    if scheme.startswith("hf:quanto"):
        config = {"backend": "quanto", "nbits": int(scheme[-1])}
        options |= {"cache_implementation": "quantized", "cache_config": config}
    else:
        options[cache_name(model)] = make(model, scheme)
    model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    print(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--schemes", default="hf:dynamic,hf:quanto4,int4,kivi2", help="separated by commas")
    parser.add_argument("--contexts", default="2048,8000")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--peak", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        peak_here(options.model, options.peak[0], options.peak[1], int(options.peak[2]))
        return
    rows = []
    for dtype in options.dtypes.split(","):
        for context in map(int, options.contexts.split(",")):
            for scheme in options.schemes.split(","):
                found = peak(options.model, dtype, scheme, context)
                rows.append({"dtype": dtype, "context": context, "scheme": scheme, "peak_bytes": found})
                print(rows[-1], flush=True)
    print(write("memory", rows, model=options.model, new_tokens=NEW_TOKENS))


if __name__ == "__main__":
    main()
