"""The first token of an answer to a long prompt: after reading it, after loading its cache from disk, after a fork.

All ways begin with the ids of the prompt and end with the next token. Loaded, the cache has read all but the last
token; its file is in the system's memory, or (cold) has just been dropped from it. In every round one way after the
other, in one process; medians.

    python bench/load.py [--contexts 6000] [--schemes default;kivi4;exact]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import prose, require_green, write

import kvbits
from kvbits.hf.loading import load_model, load_tokenizer
from kvbits.hf.names import cache_name
from kvbits.measure.runner import Prompts
from kvbits.measure.setting import SEED


def first_token(model: Any, cache: Any, ids: torch.Tensor) -> int:
    """The token after ``ids [1, T]``, of which the cache has read the first ones."""
    rest = ids[:, cache.get_seq_length() :]
    with torch.no_grad():
        logits = model(input_ids=rest, use_cache=True, logits_to_keep=1, **{cache_name(model): cache}).logits
    return int(logits[0, -1].argmax())


def dropped(path: Path) -> Path:
    """The file, no longer in the system's memory."""
    file = os.open(path, os.O_RDONLY)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)
    return path


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, and what came out."""
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def measure(model: Any, ids: torch.Tensor, scheme: str, path: Path, rounds: int) -> dict[str, Any]:
    """One row of the results."""
    cache = kvbits.cache_for(model, scheme)
    first_token(model, cache, ids[:, :-1])
    saving, _ = timed(lambda: kvbits.save(cache, path))
    ways: dict[str, Callable[[], int]] = {
        "prefill": lambda: first_token(model, kvbits.cache_for(model, scheme), ids),
        "load": lambda: first_token(model, kvbits.load(path, model), ids),
        "cold": lambda: first_token(model, kvbits.load(dropped(path), model), ids),
        "fork": lambda: first_token(model, cache.fork(), ids),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(rounds + 1):
        tokens = {}
        for way, work in ways.items():
            spent, tokens[way] = timed(work)
            if turn:  # the first round warms up
                seconds[way].append(spent)
        if not tokens["load"] == tokens["cold"] == tokens["fork"]:
            raise SystemExit(f"{scheme}: a loaded cache answers otherwise than the one that was saved: {tokens}")
    medians = {f"{way}_seconds": statistics.median(samples) for way, samples in seconds.items()}
    return {
        "scheme": scheme,
        "context": ids.shape[1],
        "file_bytes": path.stat().st_size,
        "cache_bytes": cache.nbytes.total,
        "save_seconds": saving,
        **medians,
        "sooner": medians["prefill_seconds"] / medians["load_seconds"],
        "sooner_cold": medians["prefill_seconds"] / medians["cold_seconds"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--schemes", default="default;kivi4;exact", help="separated by semicolons")
    parser.add_argument("--contexts", default="2048,6000")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    require_green("tests/sessions/test_saving.py")
    torch.manual_seed(SEED)
    prompts = Prompts(load_tokenizer(options.model)(prose(), return_tensors="pt").input_ids[0])
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for dtype in options.dtypes.split(","):
            model = load_model(options.model, dtype=getattr(torch, dtype))
            for context in map(int, options.contexts.split(",")):
                ids = prompts.take(1, 0, context)
                for scheme in options.schemes.split(";"):
                    row = measure(model, ids, scheme, Path(folder) / "cache.safetensors", options.rounds)
                    rows.append({"dtype": dtype, **row})
                    print(rows[-1], flush=True)
    print(write("load", rows, model=options.model))


if __name__ == "__main__":
    main()
