"""Encoding blocks: the native encoders beside the eager PyTorch codecs and a plain copy, in GB/s of bfloat16 input.

Blocks are encoded as a cache packs a long prompt: 16 blocks of 128 tokens of 8 heads of 128 channels a call, each call
another part of a buffer that no processor cache holds. All are timed in turn, round after round; figures are medians,
per second of the clock and per second that the processor really worked on it (all threads added up): where other
processes compete for the cores, the second is the one to compare.
Results that are not those of the PyTorch codec end the run.

    python bench/encode.py                       # on one thread and on all
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from common import require_green, write

from kvbits.backends import instruction_set
from kvbits.codecs import Codec, HalfQuadratic
from kvbits.encode import native
from kvbits.layer.cache import ENCODE_BLOCKS
from kvbits.measure.setting import SEED
from kvbits.numerics import bitpack
from kvbits.schemes.names import parse_codec
from kvbits.types import Params

SCHEMES = (
    "int4,int4-channel,int4-gs32,nf4,nf4-channel,int2,int2-channel,int3,int8,fp8,fp8-static,hqq4,"
    "nuq3-token,lm3,int4-static,nuq3-static,int4-1%,int4-channel-1%,nuq3-static-1%"
)
HEADS, BLOCK, CHANNELS = 8, 128, 128


def check(codec: Codec, x: torch.Tensor) -> None:
    """The native result is that of PyTorch; of HQQ, and beside outliers, at least 99 of 100 codes are."""
    params = fit(codec, x)
    got, wanted = native.run(codec, x, params), codec.encode(x, params)
    if isinstance(codec, HalfQuadratic) or codec.format.outliers:
        codes, others = (bitpack.unpack(packed["codes"], codec.bits) for packed in (got, wanted))
        right = bool((codes == others).float().mean() > 0.99)
    else:
        right = all(torch.equal(got[name], part) for name, part in wanted.items())
    if not right:
        raise SystemExit(f"{codec}: the native encoder and PyTorch disagree; nothing was measured")


def fit(codec: Codec, x: torch.Tensor) -> Params:
    """What blocks ``x [1, H, N, T, D]`` teach."""
    return codec.fit(x[0].transpose(0, 1))


def speed(run: Callable[[torch.Tensor], object], pieces: Iterator[torch.Tensor], seconds: float) -> tuple[float, float]:
    """GB of input per second, and per second of processor time, over at least ``seconds``."""
    nbytes, begin, worked = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - begin < seconds:
        piece = next(pieces)
        run(piece)
        nbytes += piece.nbytes
    return nbytes / (time.perf_counter() - begin) / 1e9, nbytes / (time.process_time() - worked) / 1e9


def measure(x: torch.Tensor, schemes: list[str], threads: int, rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Speeds on ``threads`` threads over pieces of ``x [n, 1, H, blocks, T, D]``."""
    torch.set_num_threads(threads)
    pieces = itertools.cycle(x)
    target = torch.empty_like(x[0])
    runs: dict[tuple[str, str], Callable[[torch.Tensor], object]] = {("copy", "torch"): target.copy_}
    for scheme in schemes:
        codec = parse_codec(scheme)
        params = fit(codec, x[0] * 2)  # what lies between is then never saturated
        runs[scheme, "native"] = lambda piece, codec=codec, params=params: native.run(codec, piece, params)
        runs[scheme, "torch"] = lambda piece, codec=codec, params=params: codec.encode(piece, params)
    speeds: dict[tuple[str, str], list[tuple[float, float]]] = {key: [] for key in runs}
    for turn in range(rounds + 1):
        for key, run in runs.items():
            found = speed(run, pieces, seconds)
            if turn:  # the first round warms up
                speeds[key].append(found)
    medians = {key: statistics.median(clock for clock, _ in values) for key, values in speeds.items()}
    return [
        {
            "scheme": scheme,
            "kernel": kernel,
            "threads": threads,
            "gb_per_second": median,
            "fastest_gb_per_second": max(clock for clock, _ in speeds[scheme, kernel]),
            "gb_per_processor_second": statistics.median(worked for _, worked in speeds[scheme, kernel]),
            "speed_against_torch": median / medians[scheme, "torch"],
            "speed_against_copy": median / medians["copy", "torch"],
        }
        for (scheme, kernel), median in medians.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schemes", default=SCHEMES, help="separated by commas")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.2, help="of each measurement in each round")
    parser.add_argument("--pieces", type=int, default=128, help="of 4 MiB; together they are the buffer")
    parser.add_argument("--out", default="encode")
    options = parser.parse_args()
    require_green("tests/encode/test_encode.py")
    if instruction_set() is None:
        raise SystemExit("the native kernels are not built")
    generator = torch.Generator().manual_seed(SEED)
    piece = (1, HEADS, ENCODE_BLOCKS, BLOCK, CHANNELS)
    x = torch.stack([torch.randn(piece, generator=generator).bfloat16() for _ in range(options.pieces)])
    schemes = options.schemes.split(",")
    for scheme in schemes:
        check(parse_codec(scheme), x[0])
    rows: list[dict[str, Any]] = []
    for threads in sorted({1, torch.get_num_threads()}):
        for row in measure(x, schemes, threads, options.rounds, options.seconds):
            print(row, flush=True)
            rows.append(row)
    print(write(options.out, rows, instruction_set=instruction_set(), shape=list(piece)))


if __name__ == "__main__":
    main()
