"""vLLM on packed pages against vLLM's own cache: prompts and steps, many requests at a time and one with a long prompt.

python bench/vllm_speed.py                          # in the environment of `make vllm`; SmolLM2, five minutes

Each engine is a process of its own, since a process has one scheme. All of them are loaded first and then take turns,
so what else the machine does falls on all alike; no two compute at the same time.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from common import prose, write

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
from small import save

OWN = "vLLM's own"
ENGINES = {OWN: {}, "vLLM's own, fp8": {"kv_cache_dtype": "fp8"}, "int4": {}, "fp8": {}}
"""Each with options of vLLM's; the names without one of vLLM's are schemes."""

CASES = ({"requests": 16, "prompt": 128, "new": 48}, {"requests": 1, "prompt": 4000, "new": 32})
"""Requests at a time, tokens of a prompt, and new ones of each. Prefixes are not kept, so each prompt is read."""


def serve(line: Connection, name: str, model: str, options: dict[str, Any]) -> None:
    """One engine, in a process of its own: prompts of token ids come in, and seconds go out."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    os.environ.pop("KVBITS_VLLM_SCHEME", None)
    if not name.startswith(OWN):
        os.environ["KVBITS_VLLM_SCHEME"] = name
    import torch
    from vllm import LLM

    engine = LLM(model, max_model_len=8192, enforce_eager=True, enable_prefix_caching=False, **options)
    config = engine.llm_engine.vllm_config
    cached = config.cache_config.num_gpu_blocks * config.cache_config.block_size
    batched = config.scheduler_config.max_num_batched_tokens
    line.send({"cached_tokens": cached, "batched_tokens": batched, "threads": torch.get_num_threads()})
    while (job := line.recv()) is not None:
        line.send(timed(engine.llm_engine, *job))


def timed(engine: Any, prompts: list[list[int]], new: int) -> dict[str, float]:
    """Seconds until every request has its first token, and seconds of a step from there to the last."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    begin, begun, first, steps = time.perf_counter(), set(), 0.0, 0
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, greedy)
    while engine.has_unfinished_requests():
        done = engine.step()
        if len(begun) < len(prompts):
            begun |= {one.request_id for one in done if one.outputs[0].token_ids}
            first = time.perf_counter() - begin
        else:
            steps += 1
    return {"prompt": first, "step": (time.perf_counter() - begin - first) / steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quick", action="store_true", help="short prompts, to see whether it runs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows, limits = measure(save(Path(folder)), options.dtype, options.rounds, options.quick)
    for row in rows:
        print(row)
    name = "vllm_speed_quick" if options.quick else "vllm_speed"
    print(write(name, rows, model="smollm2", dtype=options.dtype, vllm=version("vllm-cpu"), **limits))


def measure(model: str, dtype: str, rounds: int, quick: bool) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows of each case and engine, and what vLLM was set to."""
    from transformers import AutoTokenizer

    text: list[int] = AutoTokenizer.from_pretrained(model)(prose(120_000))["input_ids"]
    spawn, lines = multiprocessing.get_context("spawn"), {}
    for name, more in ENGINES.items():
        here, there = spawn.Pipe()
        spawn.Process(target=serve, args=(there, name, model, {"dtype": dtype, **more}), daemon=True).start()
        there.close()
        lines[name] = here, here.recv()
    rows = []
    for case in CASES:
        length = min(case["prompt"], 64) if quick else case["prompt"]
        found: dict[str, list[dict[str, float]]] = {name: [] for name in ENGINES}
        for turn in range(rounds + 1):  # the first is short, and not counted
            prompts = [text[(i * 7 + turn) % 97 :][: length if turn else 64] for i in range(case["requests"])]
            for name in ENGINES:
                lines[name][0].send((prompts, case["new"]))
                found[name].append(lines[name][0].recv())
        own = median(found[OWN][1:])
        for name, times in found.items():
            row: dict[str, Any] = {"engine": name, **case, "prompt": length}
            for what, seconds in median(times[1:]).items():
                row[f"{what}_seconds"] = seconds
                row[f"{what}_against_own"] = own[what] / seconds
                row[f"{what}_all"] = [round(one[what], 4) for one in times[1:]]
            rows.append({**row, "cached_tokens": lines[name][1]["cached_tokens"]})
    for line, _ in lines.values():
        line.send(None)
    return rows, {**{what: lines[OWN][1][what] for what in ("batched_tokens", "threads")}, "rounds": rounds}


def median(times: list[dict[str, float]]) -> dict[str, float]:
    return {what: statistics.median(one[what] for one in times) for what in times[0]}


if __name__ == "__main__":
    main()
