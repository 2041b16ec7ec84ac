"""Attention of one layer, straight from packed blocks, beside torch over an exact cache of the same length.

Decode: one query token at T = 32,768, two shapes, every kind of format; copies of each cache are taken in turn until
together they exceed a gigabyte, so that no cache of the processor helps. Peers get the same care: scaled dot product
attention with ``enable_gqa``, with the query heads packed per KV head, and as plain matrix products, in bfloat16 and
float32. Chunks: 128 and 512 query tokens over 8,192 tokens of packed history, against torch over the decoded cache.
All contestants of a round run one after the other; medians of rounds, errors against float64, and the bandwidth of a
plain read in the same run. Refuses to run where a kernel errs by more than its tests allow.

    python bench/attend.py [--rounds 15] [--out attend]
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from common import require_green, write
from torch.nn.functional import scaled_dot_product_attention

from kvbits.attend import Call, KVView, native, reference
from kvbits.attend.dense import dense
from kvbits.backends import instruction_set
from kvbits.codecs import Codec
from kvbits.layer.cache import LayerCache
from kvbits.measure.setting import SEED
from kvbits.schemes.scheme import Scheme
from kvbits.store import huge_pages
from kvbits.transform.rotary import Rotary
from kvbits.types import Params

SHAPES = ((32, 8, 128), (32, 32, 128))
SCHEMES = ("int8", "fp8", "int4", "kivi4", "nf4", "int3", "nf3", "int2", "kivi2", "nf2")
TRANSFORMED = ("int4+pre-rope", "kivi4+pre-rope", "fp8+pre-rope", "rot4", "rot4+centred", "lm3+centred")
SPARSE = ("int4-1%", "int4-static", "int4-static+pre-rope", "nuq3-static", "nuq3-static-1%+pre-rope")
AT_LEAST_BYTES = 10**9
ALLOWED_ERROR = 1e-3
Attention: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]


def scheme_of(name: str) -> Scheme:
    """Options follow a plus here, since commas part the schemes: ``int4+pre-rope``."""
    return Scheme.parse(name.replace("+", ","))


def calibrated(codec: Codec, x: torch.Tensor) -> Params:
    """What calibration teaches a codec that needs it."""
    return codec.fit(x[:, :, :1024]) if codec.needs_calibration else {}


def cache_of(name: str, heads: int, channels: int, tokens: int) -> tuple[KVView, torch.Tensor, torch.Tensor]:
    """A filled layer, and its keys and values decoded in float32."""
    generator = torch.Generator().manual_seed(SEED)
    shift = 2 * torch.randn(channels, generator=generator)  # keys have strong channels
    keys = (torch.randn(1, heads, tokens, channels, generator=generator) + shift).bfloat16()
    values = torch.randn(1, heads, tokens, channels, generator=generator).bfloat16()
    scheme = scheme_of(name)
    fitted = calibrated(scheme.key, keys), calibrated(scheme.value, values)
    rotary = Rotary(10000.0 ** (-torch.arange(0, channels, 2) / channels))
    cache = LayerCache(scheme, rotary=rotary, calibrated=fitted)
    cache.append(keys[:, :, :-1], values[:, :, :-1])
    view = cache.append(keys[:, :, -1:], values[:, :, -1:])
    return view, *dense(view)


def copies(view: KVView) -> list[KVView]:
    """Views of equal blocks in memory of their own, over ``AT_LEAST_BYTES`` in all."""
    count = max(2, -(-AT_LEAST_BYTES // view.blocks.pool.nbytes))
    made = []
    for _ in range(count):
        pool = huge_pages.allocate(tuple(view.blocks.pool.shape), view.blocks.pool.device)
        pool.copy_(view.blocks.pool)
        made.append(dataclasses.replace(view, blocks=dataclasses.replace(view.blocks, pool=pool)))
    return made


def peers(heads: int, channels: int, groups: int) -> dict[str, Attention]:
    scale = channels**-0.5

    def packed(q: torch.Tensor) -> torch.Tensor:
        return q.unflatten(1, (heads, groups)).flatten(2, 3)

    return {
        "sdpa gqa": lambda q, k, v: scaled_dot_product_attention(q, k, v, enable_gqa=groups > 1),
        "sdpa packed": lambda q, k, v: scaled_dot_product_attention(packed(q), k, v),
        "matmul": lambda q, k, v: torch.softmax(packed(q) @ k.transpose(-1, -2) * scale, -1) @ v,
    }


def on_copy(run: Attention, query: torch.Tensor, caches: Sequence[Any], turn: int) -> Any:
    """One call of a peer, over the copy whose turn it is."""
    return run(query, *caches[turn % len(caches)])


def step(calls: Sequence[Call], turn: int) -> Any:
    """One call of ours."""
    return native.run(calls[turn % len(calls)])


def seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def interleaved(contestants: dict[str, Callable[[int], Any]], rounds: int) -> dict[str, float]:
    """Median seconds of each, run in turn; ``round`` picks the copy."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(rounds + 1):
        for name, run in contestants.items():
            spent = seconds(partial(run, turn))
            if turn:
                times[name].append(spent)
    return {name: statistics.median(all_times) for name, all_times in times.items()}


def error_of(call: Call) -> float:
    """Of the native kernel against float64 over the decoded tensors, relative in the maximum norm."""
    truth = reference.run(dataclasses.replace(call, query=call.query.double()))
    return float(
        (native.run(dataclasses.replace(call, query=call.query.float())) - truth).abs().max() / truth.abs().max()
    )


def read_bandwidth() -> float:
    """Bytes per second of summing a gigabyte with all threads: what DRAM gives to a plain read."""
    data = huge_pages.allocate((AT_LEAST_BYTES,), torch.device("cpu")).fill_(1).view(torch.float32)
    return AT_LEAST_BYTES / statistics.median(seconds(lambda: data.sum()) for _ in range(7))


def decode_rows(rounds: int, tokens: int, names: tuple[str, ...]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for q_heads, heads, channels in SHAPES:
        groups = q_heads // heads
        query = torch.randn(1, q_heads, 1, channels, generator=torch.Generator().manual_seed(1))
        generator = torch.Generator().manual_seed(SEED)
        exact = torch.randn(2, 1, heads, tokens, channels, generator=generator)
        contestants: dict[str, Callable[[int], Any]] = {}
        for dtype in (torch.bfloat16, torch.float32):
            one = exact.to(dtype)
            caches = [one.clone() for _ in range(max(2, -(-AT_LEAST_BYTES // one.nbytes)))]
            for name, run in peers(heads, channels, groups).items():
                name = f"torch {name} {str(dtype).removeprefix('torch.')}"
                contestants[name] = partial(on_copy, run, query.to(dtype), caches)
        for name in names:
            view, _, _ = cache_of(name, heads, channels, tokens)
            call = Call(query.bfloat16(), view, channels**-0.5)
            error = error_of(call)
            if error > ALLOWED_ERROR:
                raise SystemExit(f"{name}: error {error:.2e} is above {ALLOWED_ERROR:g}; fix the kernel first")
            ours = {name: partial(step, [dataclasses.replace(call, view=copy) for copy in copies(view)])}
            medians = interleaved({**contestants, **ours}, rounds)
            best = min((value, key) for key, value in medians.items() if key.endswith("bfloat16"))
            best_full = min((value, key) for key, value in medians.items() if key.endswith("float32"))
            nbytes = view.blocks.pool.nbytes
            rows.append(
                {
                    "kind": "decode", "scheme": name, "q_heads": q_heads, "kv_heads": heads, "head_dim": channels,
                    "tokens": tokens, "ms": 1e3 * medians[name], "speed_against_bfloat16": best[0] / medians[name],
                    "best_bfloat16": best[1], "best_bfloat16_ms": 1e3 * best[0],
                    "speed_against_float32": best_full[0] / medians[name], "best_float32_ms": 1e3 * best_full[0],
                    "packed_bytes": nbytes, "bytes_per_second": nbytes / medians[name], "error": error,
                    "kernel": f"native {instruction_set()}",
                }
            )  # fmt: skip
            print(rows[-1], flush=True)
    return rows


def chunk_rows(rounds: int, tokens: int, names: tuple[str, ...]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    q_heads, heads, channels = SHAPES[0]
    for dtype in (torch.bfloat16, torch.float32):
        for queries in (16, 128, 512):
            query = torch.randn(1, q_heads, queries, channels, generator=torch.Generator().manual_seed(1)).to(dtype)
            for name in names:
                view, keys, values = cache_of(name, heads, channels, tokens)
                keys, values = keys.to(dtype), values.to(dtype)
                # Every query sees everything on both sides: the exact tail is one token long in neither's favour.
                mask = torch.zeros(1, 1, queries, tokens, dtype=torch.bool).logical_not_()
                call = Call(query, view, channels**-0.5, mask=mask)
                contestants = {
                    key: partial(on_copy, run, query, [(keys, values)])
                    for key, run in peers(heads, channels, q_heads // heads).items()
                }
                medians = interleaved({**contestants, name: partial(step, [call])}, rounds)
                best = min((value, key) for key, value in medians.items() if key != name)
                best_sdpa = min(value for key, value in medians.items() if key.startswith("sdpa"))
                rows.append(
                    {
                        "kind": "chunk", "scheme": name, "q_heads": q_heads, "kv_heads": heads, "head_dim": channels,
                        "tokens": tokens, "queries": queries, "dtype": str(dtype).removeprefix("torch."),
                        "ms": 1e3 * medians[name], "best_sdpa_ms": 1e3 * best_sdpa,
                        "speed_against_sdpa": best_sdpa / medians[name], "best_torch": best[1],
                        "best_torch_ms": 1e3 * best[0], "speed_against_torch": best[0] / medians[name],
                    }
                )  # fmt: skip
                print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--schemes", default=",".join((*SCHEMES, *TRANSFORMED, *SPARSE)))
    parser.add_argument("--chunk-schemes", default="int4,kivi2,fp8")
    parser.add_argument("--out", default="attend")
    options = parser.parse_args()
    require_green("tests/attend/test_attend.py")
    torch.manual_seed(SEED)
    bandwidth = read_bandwidth()
    rows = decode_rows(options.rounds, options.tokens, tuple(options.schemes.split(",")))
    rows += chunk_rows(max(3, options.rounds // 3), 8192, tuple(options.chunk_schemes.split(",")))
    print(write(options.out, rows, read_bytes_per_second=bandwidth))


if __name__ == "__main__":
    main()
