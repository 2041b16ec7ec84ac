"""Peak memory of a whole process that reads a long prompt and steps into its next block, one process per scheme.

What ``kvbits bench`` measures, into the file that the table in the README is made from.

    python bench/memory.py                       # SmolLM2, 2,048 and 8,000 tokens, float32 and bfloat16
"""

from __future__ import annotations

import argparse
from typing import Any

from common import measured, write

from kvbits.measure.bench import Bench
from kvbits.measure.peak import STEPS
from kvbits.schemes.grammar import split_schemes


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--schemes", default="hf:dynamic,hf:quanto4,int4,kivi2", help="separated by commas")
    parser.add_argument("--contexts", default="2048,8000")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    options = parser.parse_args()
    schemes, contexts = split_schemes(options.schemes), list(map(int, options.contexts.split(",")))
    rows: list[dict[str, Any]] = []
    for dtype in options.dtypes.split(","):
        plan = Bench(options.model, schemes, contexts, dtype=dtype, steps=4, prefills=1, allow_long=True)
        fields = ("dtype", "context", "scheme", "peak_bytes")
        rows += [{field: row[field] for field in fields} for row in measured(plan)]
    print(write("memory", rows, model=options.model, new_tokens=STEPS + 1))


if __name__ == "__main__":
    main()
