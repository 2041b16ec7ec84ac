"""Several processes on this machine, as torchrun starts them, and what each of them found.

As a program it is all of them: they run the functions of :mod:`scenes` that it is told, and print what they return.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SECONDS = 900
"""A machine may have other things to do."""

STREAMS = ("out", "err")


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
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, str(HERE / "ranks.py"), name, *scenes]
        process = subprocess.Popen(command, env=shared, cwd=HERE, start_new_session=True)
        try:
            process.wait(SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        codes = json.loads((folder / "codes").read_text())
        texts = [[(folder / f"{rank}.{stream}").read_text() for stream in STREAMS] for rank in range(world)]
        return [Ended(code, *text) for code, text in zip(codes, texts, strict=True)]


def main() -> None:
    """Fork the ranks, which takes a fraction of what importing everything in each of them would, and wait for them."""
    import scenes  # noqa: F401

    folder = Path(sys.argv[1])
    ranks = [fork(rank, folder) for rank in range(int(os.environ["WORLD_SIZE"]))]
    codes = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
    (folder / "codes").write_text(json.dumps(codes))


def fork(rank: int, folder: Path) -> int:
    """One rank, which writes into files of its own and does not return; its number as a process."""
    if process := os.fork():
        return process
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    for number, stream in enumerate(STREAMS, start=1):
        os.dup2(os.open(folder / f"{rank}.{stream}", os.O_WRONLY | os.O_CREAT), number)
    play(sys.argv[2:])
    sys.exit()


def play(names: list[str]) -> None:
    """The scenes, as one rank."""
    import torch.distributed as dist

    import scenes

    dist.init_process_group("gloo")
    for name in names:
        print(json.dumps({name: getattr(scenes, name)()}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
