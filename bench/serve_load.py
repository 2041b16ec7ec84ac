"""A server under load: conversations of several turns, many requests at a time, and what the caches save.

python bench/serve_load.py                          # SmolLM2, 200 requests, 8 at a time
python bench/serve_load.py --memory 100MB           # a budget that has to drop conversations
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
from common import prose, write

SYSTEM = "You answer in one short sentence."
QUESTIONS = ("What is this text about?", "Which word in it matters most?", "Is it hard to read?", "What would you add?")


def metrics(url: str) -> dict[str, float]:
    """The server's own numbers, those with labels summed."""
    found: dict[str, float] = {}
    for line in urllib.request.urlopen(f"{url}/metrics", timeout=60).read().decode().splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            name = name.partition("{")[0]
            found[name] = found.get(name, 0) + float(value)
    return found


def start(model: str, *options: str) -> tuple[subprocess.Popen[bytes], str]:
    """``kvbits serve`` as a process of its own, once it answers, and its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "kvbits.cli", "serve", model, "--port", str(port), *options]
    process, url = subprocess.Popen(command, env={**os.environ, "HF_HUB_OFFLINE": "1"}), f"http://127.0.0.1:{port}"
    while process.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5)
            return process, url
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise SystemExit(f"the server ended with status {process.returncode}")


class Watch(threading.Thread):
    """Looks at the caches' bytes until it is stopped."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.url, self.over, self.peak_bytes = url, threading.Event(), 0.0

    def run(self) -> None:
        while not self.over.wait(0.2):
            self.peak_bytes = max(self.peak_bytes, metrics(self.url)["kvbits_cache_bytes"])


def converse(client: openai.OpenAI, name: str, text: str, turns: int, tokens: int) -> list[dict[str, Any]]:
    """One conversation about a text: a row for each turn."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    rows = []
    for turn in range(turns):
        question = QUESTIONS[turn % len(QUESTIONS)]
        messages.append({"role": "user", "content": f"{text}\n\n{question}" if turn == 0 else question})
        sent, first, pieces, usage = time.perf_counter(), 0.0, [], None
        stream = client.chat.completions.create(
            model=name, messages=messages, max_tokens=tokens, stream=True, stream_options={"include_usage": True}
        )
        for event in stream:
            usage = event.usage or usage
            if event.choices and event.choices[0].delta.content:
                first = first or time.perf_counter() - sent
                pieces.append(event.choices[0].delta.content)
        messages.append({"role": "assistant", "content": "".join(pieces)})
        rows.append(
            {
                "turn": turn,
                "prompt_tokens": usage.prompt_tokens,
                "reused_tokens": usage.prompt_tokens_details.cached_tokens,
                "answer_tokens": usage.completion_tokens,
                "first_token_seconds": first,
                "seconds": time.perf_counter() - sent,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--scheme", default="default")
    parser.add_argument("--memory", default="1GiB")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--at-a-time", type=int, default=8)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=16, help="of each answer")
    parser.add_argument("--characters", type=int, default=1500, help="of the text of each conversation")
    parser.add_argument("--out", default="serve_load")
    options = parser.parse_args()
    process, url = start(options.model, "--scheme", options.scheme, "--memory", options.memory)
    try:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=3600)
        name = client.models.list().data[0].id
        count = -(-options.requests // options.turns)
        text = prose(count * options.characters)
        texts = [text[i * options.characters :][: options.characters] for i in range(count)]
        watch = Watch(url)
        watch.start()
        start_of_load = time.perf_counter()
        with ThreadPoolExecutor(options.at_a_time) as many:
            found = list(many.map(lambda one: converse(client, name, one, options.turns, options.tokens), texts))
        seconds = time.perf_counter() - start_of_load
        watch.over.set()
        watch.join()
        after = metrics(url)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    rows = [row for conversation in found for row in conversation]
    summary = {
        "requests": len(rows),
        "at_a_time": options.at_a_time,
        "seconds": seconds,
        "answer_tokens_per_second": sum(row["answer_tokens"] for row in rows) / seconds,
        "reused_share": sum(row["reused_tokens"] for row in rows) / sum(row["prompt_tokens"] for row in rows),
        "failed": after["kvbits_failed_total"],
        "evicted": after["kvbits_caches_evicted_total"],
        "peak_cache_bytes": watch.peak_bytes,
        "budget_bytes": after["kvbits_cache_budget_bytes"],
        "mean_generation_seconds": after["kvbits_generation_seconds_sum"] / after["kvbits_generation_seconds_count"],
        "median_first_token_seconds": statistics.median(row["first_token_seconds"] for row in rows),
    }
    for key, value in summary.items():
        print(f"{key:28} {value:,.2f}")
    assert summary["peak_cache_bytes"] <= summary["budget_bytes"] and not summary["failed"]
    print(write(options.out, rows, model=options.model, scheme=options.scheme, summary=summary))


if __name__ == "__main__":
    main()
