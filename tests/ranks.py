"""Several processes on this machine, as torchrun starts them, and what each of them found.

As a program it is one of them: it runs the functions of :mod:`scenes` that it is told, and prints what they return.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SECONDS = 900
"""A machine may have other things to do."""


class Ended:
    """How one process ended.

    Attributes:
        code: its exit status.
        found: what each scene returned, by name.
        error: what it wrote to stderr.
    """

    def __init__(self, code: int, out: str, error: str) -> None:
        self.code, self.error = code, error
        self.found: dict[str, Any] = {}
        for line in out.splitlines():
            if line.startswith("{"):
                self.found |= json.loads(line)


def run(world: int, *scenes: str, **environment: str) -> list[Ended]:
    """Run scenes in ``world`` processes; rank 0 is the first."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        **os.environ, **environment, "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "LOCAL_WORLD_SIZE": str(world),
    }  # fmt: skip
    started = []
    for rank in range(world):
        own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [sys.executable, str(HERE / "ranks.py"), *scenes]
        started.append(
            subprocess.Popen(command, env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=HERE)
        )
    try:
        until = time.monotonic() + SECONDS
        ended = []
        for process in started:
            out, error = process.communicate(timeout=max(1.0, until - time.monotonic()))
            ended.append(Ended(process.returncode, out, error))
        return ended
    finally:
        for process in started:
            process.kill()


def main() -> None:
    import torch.distributed as dist

    import scenes

    dist.init_process_group("gloo")
    for name in sys.argv[1:]:
        print(json.dumps({name: getattr(scenes, name)()}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
