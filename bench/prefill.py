"""Reading a prompt: kvbits beside Transformers' exact cache, at once and in chunks.

At once, a prompt attends to its own exact keys and values, so what kvbits adds is packing. In chunks, each chunk
attends to packed history. What ``kvbits bench`` measures, into the file that the table in the README is made from.

    python bench/prefill.py [--contexts 512,2048,4096] [--chunk 512]
"""

from __future__ import annotations

import argparse
from typing import Any

from common import measured, require_green, write

from kvbits.measure.bench import Bench
from kvbits.measure.caches import EXACT
from kvbits.schemes.grammar import split_schemes


def seconds(plan: Bench) -> list[dict[str, Any]]:
    """The rows of a plan of one context, as far as they are about its prompt."""
    rows = measured(plan)
    exact = next(row["first_token_seconds"] for row in rows if row["scheme"] == EXACT)
    return [
        {
            "scheme": row["scheme"],
            "dtype": row["dtype"],
            "context": row["context"],
            "chunk": plan.chunk or row["context"],
            "seconds": row["first_token_seconds"],
            "time_against_exact": row["first_token_seconds"] / exact,
        }
        for row in rows
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--schemes", default="int4,kivi4,kivi2", help="separated by commas or semicolons")
    parser.add_argument("--contexts", default="512,2048,4096")
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", default="prefill")
    options = parser.parse_args()
    require_green("tests/attend/test_attend.py", "tests/encode/test_encode.py")
    schemes = split_schemes(options.schemes)
    rows: list[dict[str, Any]] = []
    for dtype in options.dtypes.split(","):
        for context in map(int, options.contexts.split(",")):
            for chunk in (None, options.chunk) if options.chunk < context else (None,):
                how = {"dtype": dtype, "chunk": chunk, "prefills": options.rounds, "steps": 4, "peak": False}
                rows += seconds(Bench(options.model, schemes, [context], allow_long=True, **how))
    print(write(options.out, rows, model=options.model))


if __name__ == "__main__":
    main()
