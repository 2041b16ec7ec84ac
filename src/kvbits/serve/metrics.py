"""What Prometheus may know of a server, under ``/metrics``."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvbits.serve.engine import Job
from kvbits.serve.pool import Pool
from kvbits.serve.queue import RequestQueue

_FIRST_TOKEN_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_ANSWER_SECONDS = (0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """Counters of one server; gauges are read off its queue and its pool when asked for."""

    def __init__(self, queue: RequestQueue, pool: Pool) -> None:
        self.registry = registry = CollectorRegistry()
        self.pool, self._evicted = pool, 0

        def counter(name: str, what: str, *labels: str) -> Counter:
            return Counter(f"kvbits_{name}", what, labels, registry=registry)

        self.requests = counter("requests", "Requests, by path and HTTP status.", "path", "status")
        self.cancelled = counter("cancelled", "Answers that nobody waited for any more.")
        self.failed = counter("failed", "Answers that ended with an error of the server.")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts.")
        self.reused_tokens = counter("reused_tokens", "Tokens of prompts that a cache had read before.")
        self.answer_tokens = counter("answer_tokens", "Tokens of answers.")
        self.evicted = counter("caches_evicted", "Caches that were dropped for want of room.")
        self.first_token = Histogram(
            "kvbits_first_token_seconds", "From the request to the first token of its answer.",
            buckets=_FIRST_TOKEN_SECONDS, registry=registry,
        )  # fmt: skip
        self.generation = Histogram(
            "kvbits_generation_seconds", "The model's work on an answer, without the time in the queue.",
            buckets=_ANSWER_SECONDS, registry=registry,
        )  # fmt: skip
        gauges = (
            ("waiting", "Requests that wait.", lambda: len(queue)),
            ("waiting_limit", "Requests that may wait.", lambda: queue.limit),
            ("running", "Requests that the model works on.", lambda: int(queue.running is not None)),
            ("cache_bytes", "Bytes of all caches, read off them.", lambda: pool.nbytes),
            ("cache_budget_bytes", "Bytes that all caches together may take.", lambda: pool.budget_bytes),
            ("caches", "Caches that are kept.", lambda: len(pool.kept)),
        )
        for name, what, value in gauges:
            Gauge(f"kvbits_{name}", what, registry=registry).set_function(value)

    def answered(self, job: Job, arrived: float, seconds: float) -> None:
        """Count one job that is over, however it ended.

        Args:
            arrived: when its request came, as ``time.perf_counter``.
            seconds: that the model worked on it.
        """
        self.generation.observe(seconds)
        if job.first_token is not None:
            self.first_token.observe(job.first_token - arrived)
        self.prompt_tokens.inc(len(job.prompt))
        self.reused_tokens.inc(job.reused_tokens)
        self.answer_tokens.inc(max(0, len(job.tokens) - len(job.prompt)))
        self.evicted.inc(self.pool.evicted - self._evicted)
        self._evicted = self.pool.evicted

    def text(self) -> bytes:
        """In the format of Prometheus."""
        return generate_latest(self.registry)
