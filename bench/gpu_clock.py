"""Time on the device, for :mod:`gpu` and :mod:`gpu_encode`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


class Clock:
    """Times calls on the device, or on the CPU for a dry run."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device, self.repeats = device, repeats

    def seconds(self, calls: list[Callable[[], Any]]) -> float:
        """Median seconds of one call, over replays of a graph of all ``calls``."""
        if self.device.type == "cpu":
            start = time.perf_counter()
            for call in calls:
                call()
            return (time.perf_counter() - start) / len(calls)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls[:2]:
                call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        samples = []
        for turn in range(self.repeats + 3):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if turn >= 3:
                samples.append(start.elapsed_time(end) / 1e3 / len(calls))
        return statistics.median(samples)

    def eager_seconds(self, call: Callable[[], Any]) -> float:
        """Median seconds of calls that cannot be captured, because they copy from the host."""
        samples = []
        for _ in range(5):
            self.wait()
            start = time.perf_counter()
            call()
            self.wait()
            samples.append(time.perf_counter() - start)
        return statistics.median(samples)

    def launched(self, call: Callable[[], Any]) -> float:
        """Seconds that the host takes to launch one call, without a graph."""
        self.wait()
        call()
        start = time.perf_counter()
        for _ in range(20):
            call()
        spent = (time.perf_counter() - start) / 20
        self.wait()
        return spent

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def copy_bandwidth(clock: Clock) -> float:
    """Bytes read and written per second by a large copy."""
    size = 2**31 if clock.device.type == "cuda" else 2**22
    source = torch.empty(size, dtype=torch.uint8, device=clock.device).random_()
    target = torch.empty_like(source)
    return 2 * size / clock.seconds([lambda: target.copy_(source)] * 3)


# -- what is attended to -----------------------------------------------------------------------------------------------
