"""Decode step of a whole model: kvbits beside Transformers' exact cache and its quanto cache.

What ``kvbits bench`` measures, over several dtypes and into the file that the table in the README is made from.

    python bench/decode.py                       # SmolLM2, 512 / 2,048 / 8,000 tokens, float32 and bfloat16
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from common import measured, require_green, write

from kvbits.measure.bench import Bench
from kvbits.schemes.grammar import split_schemes

PEERS = ("hf:dynamic", "hf:quanto4", "hf:quanto2")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--schemes", default="int4,kivi4,kivi2,default,small", help="separated by commas or semicolons")
    parser.add_argument("--calibration", type=Path, help="folder that 'kvbits calibrate' wrote")
    parser.add_argument("--contexts", default="512,2048,8000")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", default="decode")
    options = parser.parse_args()
    require_green("tests/attend/test_attend.py", "tests/hf/test_smollm2.py")
    schemes, contexts = [*PEERS, *split_schemes(options.schemes)], list(map(int, options.contexts.split(",")))
    rows: list[dict[str, Any]] = []
    for dtype in options.dtypes.split(","):
        plan = Bench(
            options.model, schemes, contexts, dtype=dtype, steps=options.rounds, prefills=1, peak=False,
            calibration=options.calibration, allow_long=True,
        )  # fmt: skip
        rows += measured(plan)
    print(write(options.out, rows, model=options.model))


if __name__ == "__main__":
    main()
