"""Decode attention, encoding and chunked prefill on a GPU: kvbits beside the best 16-bit attention of the same run.

First every format is checked against float64; a wrong one ends the run. Then each case is captured in a CUDA graph and
its replays are timed: launch gaps are no part of the figures, on either side. Small cases rotate over copies of their
data that are larger together than the L2 cache, as the layers of a model are. The 16-bit side is the fastest of torch's
flash and cuDNN attention, with the query heads of a group as heads or as rows, and flash-attn where it is installed.

    python bench/gpu.py                    # one CUDA machine, under 8 minutes; writes bench/results/gpu.json
    python bench/gpu.py --tune kivi4,int4  # other ways to cut the work, for attend/triton/tuning.py
    python bench/gpu.py --dry              # the same code on a CPU in Triton's interpreter, tiny: no figures
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import importlib.util
import itertools
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from common import write
from gpu_clock import Clock, copy_bandwidth
from gpu_encode import ENCODED, encode_row
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kvbits.attend import Call, KVView
from kvbits.attend.dense import dense
from kvbits.attend.triton import decode as triton_decode
from kvbits.attend.triton.tuning import Tuning, tuned
from kvbits.backends import OPT_IN
from kvbits.layer.cache import LayerCache
from kvbits.measure.setting import SEED
from kvbits.schemes.scheme import Scheme
from kvbits.store.blocks import Blocks
from kvbits.store.rows import Rows
from kvbits.transform.rotary import Rotary

os.environ[OPT_IN] = "1"
SCHEMES = ("default", "small", "int4", "kivi4", "int2", "kivi2", "fp8", "int8", "int3", "nf4")
CHECKED = (
    *SCHEMES, "fp8-static", "nf3", "nf2", "int4-channel", "int8-channel", "int3-channel", "nf4-channel",
    "k=int8,v=int4", "k=int4-channel,v=fp8", "k=int2-channel,v=int3",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Model:
    """Heads of one layer."""

    name: str
    heads: int
    groups: int
    channels: int = 128


LLAMA3, LLAMA2 = Model("Llama-3-8B", 8, 4), Model("Llama-2-7B", 32, 1)
QWEN3 = Model("Qwen3-0.6B", 8, 2)
CASES = (
    # (model, context, batch): first what the targets are about, then the rest while time lasts
    *((LLAMA3, context, 1) for context in (32_768, 131_072)),
    (LLAMA3, 4_096, 16),
    *((LLAMA3, context, batch) for context, batch in ((4_096, 1), (32_768, 16), (1_048_576, 1), (131_072, 16))),
    *((LLAMA2, context, batch) for context, batch in ((4_096, 16), (32_768, 1), (131_072, 1))),
    *((QWEN3, context, batch) for context, batch in ((4_096, 16), (32_768, 1), (131_072, 1))),
)
ROTATE_BYTES = 2**28
"""Copies of the data are made until they are together larger than this: several times any L2 cache."""

MOST_BYTES = 2**35
"""A case whose 16-bit keys and values take more is left out."""


def packed_view(scheme: Scheme, model: Model, context: int, batch: int, device: torch.device) -> KVView:
    """A layer that holds ``context`` tokens: random keys and values in up to 32 blocks, which then repeat."""
    exact = scheme.sinks + (scheme.residual or 0)
    count = max(1, (context - exact) // scheme.block)
    different = min(count, 32)
    shape = (1, model.heads, different * scheme.block + exact, model.channels)
    rotary = Rotary(10_000.0 ** -(torch.arange(0, model.channels, 2) / model.channels))
    cache = LayerCache(scheme, rotary=rotary)
    keys, values = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
    cache.append(keys, values)
    view = cache.view()
    which = torch.arange(count * batch, device=device) % view.blocks.longest
    blocks = Blocks(
        view.blocks.record,
        view.blocks.pool[which],
        torch.arange(count * batch, device=device).view(count, batch).t().contiguous(),
        (count,) * batch,
        in_order=True,
    )
    rows = Rows(batch, count * scheme.block + view.held[0])
    transform = view.key_transform
    if cache.rotary is not None:
        rope = rotary.rope(rows, scheme.sinks, scheme.block, count, device)
        transform = dataclasses.replace(transform, rope=rope)
    return dataclasses.replace(
        view,
        keys=view.keys.expand(batch, -1, -1, -1).contiguous(),
        values=view.values.expand(batch, -1, -1, -1).contiguous(),
        held=view.held * batch,
        blocks=blocks,
        rows=rows,
        key_transform=transform,
    )


def read_bytes(view: KVView) -> int:
    """Bytes of a view that attention must read: packed blocks and exact tokens."""
    exact = sum(view.held) * view.keys.shape[1] * (view.keys.shape[3] + view.values.shape[3]) * view.keys.itemsize
    return view.blocks.pool.nbytes + exact


def rotated(make: Callable[[], Any], nbytes: int) -> list[Any]:
    """As many copies as it takes to keep them out of the cache."""
    return [make() for _ in range(max(1, min(32, -(-ROTATE_BYTES // nbytes))))]


# -- correctness -------------------------------------------------------------------------------------------------------


def attention(call: Call, dtype: torch.dtype, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """By the formula, all scores at once."""
    groups = call.query.shape[1] // keys.shape[1]
    keys, values = (x.to(dtype).repeat_interleave(groups, dim=1) for x in (keys, values))
    return (call.query.to(dtype) @ keys.transpose(-1, -2) * call.scaling).softmax(-1) @ values


def check(name: str, device: torch.device, small: bool) -> dict[str, Any]:
    """Root-mean-square error against float64, and that of the plain formula in bfloat16 over the decoded tokens.

    Raises:
        RuntimeError: if it is more than twice as large.
    """
    model = Model("check", 1 if small else 4, 4, 32 if small else 128)
    view = packed_view(Scheme.parse(name), model, 420 if small else 1500, 1 if small else 2, device)
    query = torch.randn(view.keys.shape[0], model.heads * model.groups, 1, model.channels, device=device)
    call = Call(query.to(view.keys.dtype), view, model.channels**-0.5)
    if reasons := triton_decode.why_not(call):
        raise RuntimeError(f"{name} does not run: {', '.join(reasons)}")
    wide = dataclasses.replace(view, keys=view.keys.float(), values=view.values.float())
    truth = attention(call, torch.float64, *dense(wide))
    got = triton_decode.run(call).double() - truth
    plain = attention(call, torch.bfloat16, *dense(view)).double() - truth
    error, allowed = (float(x.square().mean().sqrt()) for x in (got, plain))
    if not 0 < error <= 2 * allowed:
        raise RuntimeError(f"{name}: an error of {error:.2e}, where plain bfloat16 attention has {allowed:.2e}")
    return {"scheme": name, "rms_error": error, "rms_error_of_plain_bfloat16": allowed, "rms": float(truth.std())}


# -- the 16-bit side ---------------------------------------------------------------------------------------------------


def exact_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, queries_as_rows: bool, backend: SDPBackend
) -> Callable[[], Any]:
    """Torch's attention with one backend; a group's query heads as heads of their own or as rows of one head."""
    if queries_as_rows:
        query = query.squeeze(2).unflatten(1, (keys.shape[1], -1))  # [B, H, G, D]

    def run() -> torch.Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(query, keys, values, enable_gqa=not queries_as_rows)

    return run


def exact_candidates(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, cpu: bool
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Every way to compute 16-bit attention that is at hand."""
    backends = {"math": SDPBackend.MATH} if cpu else {}
    if not cpu:
        backends = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    for (name, backend), rows in itertools.product(backends.items(), (True, False)):
        yield f"sdpa {name}{', heads as rows' if rows else ''}", exact_attention(query, keys, values, rows, backend)
    if importlib.util.find_spec("flash_attn"):
        from flash_attn import flash_attn_with_kvcache

        q, k, v = (x.transpose(1, 2).contiguous() for x in (query, keys, values))
        yield "flash-attn", lambda: flash_attn_with_kvcache(q, k, v)
    if importlib.util.find_spec("flashinfer") and query.shape[0] == 1:
        import flashinfer

        k, v = keys[0], values[0]
        yield "flashinfer", lambda: flashinfer.single_decode_with_kv_cache(query[0, :, 0], k, v, kv_layout="HND")


def best_exact(clock: Clock, model: Model, context: int, batch: int) -> dict[str, Any]:
    """The fastest of them: its name, its seconds, and all the others' seconds."""
    shape = (batch, model.heads, context, model.channels)
    nbytes = 4 * batch * model.heads * context * model.channels

    def pair() -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (torch.randn(shape, device=clock.device, dtype=torch.bfloat16) for _ in range(2))
        return keys, values

    pairs = rotated(pair, nbytes)
    query = torch.randn(batch, model.heads * model.groups, 1, model.channels, device=clock.device).bfloat16()
    found: dict[str, float] = {}
    names = [name for name, _ in exact_candidates(query, *pairs[0], clock.device.type == "cpu")]
    for index, name in enumerate(names):
        calls = [list(exact_candidates(query, *pair, clock.device.type == "cpu"))[index][1] for pair in pairs]
        try:
            found[name] = clock.seconds(calls)
        except Exception as error:
            # A backend that has no kernel for this shape is no contestant; it is recorded as such.
            found[name] = float("inf")
            print(f"  {name}: {str(error).splitlines()[0][:100]}", flush=True)
    best = min(found, key=lambda name: found[name])
    seconds = {name: time for name, time in found.items() if time < float("inf")}
    return {"best": best, "seconds": found[best], "all_seconds": seconds, "bytes": nbytes}


# -- measurements ------------------------------------------------------------------------------------------------------


def decode_row(
    clock: Clock, name: str, model: Model, context: int, batch: int, exact: dict[str, Any], bandwidth: float
) -> dict[str, Any]:
    """One scheme in one case, beside the best 16-bit attention."""
    scheme = Scheme.parse(name)
    first = packed_view(scheme, model, context, batch, clock.device)
    views = [first, *rotated(lambda: _copied(first), read_bytes(first))[1:]]
    query = torch.randn(batch, model.heads * model.groups, 1, model.channels, device=clock.device).bfloat16()
    calls = [Call(query, view, model.channels**-0.5) for view in views]
    start = time.perf_counter()
    triton_decode.run(calls[0])
    clock.wait()
    compiled = time.perf_counter() - start
    seconds = clock.seconds([lambda call=call: triton_decode.run(call) for call in calls])
    nbytes = read_bytes(first)
    return {
        "scheme": name,
        "model": model.name,
        "context": context,
        "batch": batch,
        "microseconds": 1e6 * seconds,
        "exact_microseconds": 1e6 * exact["seconds"],
        "exact_kernel": exact["best"],
        "speed_against_exact": exact["seconds"] / seconds,
        "bytes_read": nbytes,
        "bytes_against_exact": exact["bytes"] / nbytes,
        "share_of_copy_bandwidth": nbytes / seconds / bandwidth,
        "exact_share_of_copy_bandwidth": exact["bytes"] / exact["seconds"] / bandwidth,
        "launch_microseconds": 1e6 * clock.launched(lambda: triton_decode.run(calls[0])),
        "first_call_seconds": compiled,
        "copies": len(views),
    }


def _copied(view: KVView) -> KVView:
    blocks = dataclasses.replace(view.blocks, pool=view.blocks.pool.clone())
    return dataclasses.replace(view, blocks=blocks, keys=view.keys.clone(), values=view.values.clone())


def prefill_row(clock: Clock, name: str, model: Model, context: int, queries: int) -> dict[str, Any]:
    """A chunk of a prompt over packed history; torch's flash attention over 16-bit history beside it."""
    view = packed_view(Scheme.parse(name), model, context, 1, clock.device)
    columns = view.rows.columns
    query = torch.randn(1, model.heads * model.groups, queries, model.channels, device=clock.device).bfloat16()
    seconds = clock.seconds([lambda: triton_decode.run(Call(query, view, model.channels**-0.5))])
    shape = (1, model.heads * model.groups, columns, model.channels)
    keys, values = (torch.randn(shape, device=clock.device, dtype=torch.bfloat16) for _ in range(2))
    backend = SDPBackend.MATH if clock.device.type == "cpu" else SDPBackend.FLASH_ATTENTION

    def flash() -> torch.Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(query, keys, values)

    exact = clock.seconds([flash])
    return {
        "scheme": name,
        "model": model.name,
        "context": columns,
        "queries": queries,
        "microseconds": 1e6 * seconds,
        "flash_microseconds": 1e6 * exact,
        "speed_against_flash": exact / seconds,
    }


TUNED = ((32_768, 1), (131_072, 1), (4_096, 16))
"""Contexts and batches of Llama-3-8B that other ways to cut the work are tried at."""


def tunings() -> Iterator[Tuning]:
    """What is worth compiling; how many programs run is tried for each without compiling again."""
    for rows, warps, stages, registers in itertools.product((64, 128), (4, 8), (1, 2, 3), (None, 128, 168)):
        if warps == 4 or (rows == 128 and registers != 168):
            yield Tuning(rows, warps, stages, registers)


def compile_ahead(job: tuple[str, Tuning]) -> None:
    """Compile one variant into Triton's cache, in a process of its own; errors show when it is timed."""
    name, tuning = job
    with contextlib.suppress(Exception), tuned(tuning):
        for batch in (1, 16):
            view = packed_view(Scheme.parse(name), LLAMA3, 4_096, batch, torch.device("cuda"))
            query = torch.randn(batch, 32, 1, 128, device="cuda").bfloat16()
            triton_decode.run(Call(query, view, 128**-0.5))
            torch.cuda.synchronize()


def tune(clock: Clock, names: list[str], bandwidth: float, jobs: int) -> list[dict[str, Any]]:
    """Other ways to cut the work: the share of copy bandwidth of each, in each of the cases."""
    found = []
    start = time.perf_counter()
    with concurrent.futures.ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_ahead, itertools.product(names, tunings())))
    print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)
    for name in names:
        cases = []
        for context, batch in TUNED:
            first = packed_view(Scheme.parse(name), LLAMA3, context, batch, clock.device)
            query = torch.randn(batch, 32, 1, 128, device=clock.device).bfloat16()
            views = [first, *rotated(lambda view=first: _copied(view), read_bytes(first))[1:]]
            cases.append((f"share_{context}_{batch}", [Call(query, view, 128**-0.5) for view in views]))
        best: dict[str, Any] = {}
        for variant, programs in itertools.product(tunings(), (2, 3, 4, 6, 8)):
            tuning = dataclasses.replace(variant, programs=programs)
            row: dict[str, Any] = {"scheme": name, **dataclasses.asdict(tuning)}
            try:
                with tuned(tuning):
                    for case, calls in cases:
                        seconds = clock.seconds([lambda call=call: triton_decode.run(call) for call in calls])
                        row[case] = read_bytes(calls[0].view) / seconds / bandwidth
                row["share"] = statistics.geometric_mean(row[case] for case, _ in cases)
                best = max(best, row, key=lambda row: row.get("share", 0))
            except Exception as error:
                row["error"] = str(error).splitlines()[0][:100]  # too much shared memory for this architecture
            found.append(row)
        print(best, flush=True)
    return found


# -- the run -----------------------------------------------------------------------------------------------------------


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["scheme   model        context  batch      us  16-bit us  faster  fewer bytes  of copy bandwidth"]
    for row in rows:
        lines.append(
            f"{row['scheme']:8s} {row['model']:11s} {row['context']:8d} {row['batch']:6d} {row['microseconds']:7.1f} "
            f"{row['exact_microseconds']:10.1f} {row['speed_against_exact']:6.2f}x {row['bytes_against_exact']:11.2f}x "
            f"{row['share_of_copy_bandwidth']:18.0%}"
        )
    return "\n".join(lines)


def hardware(device: torch.device) -> dict[str, Any]:
    if device.type == "cpu":
        return {"gpu": "none: Triton's interpreter on a CPU"}
    import triton

    properties = torch.cuda.get_device_properties(device)
    return {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "triton": triton.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schemes", default=",".join(SCHEMES), help="separated by commas")
    parser.add_argument("--minutes", type=float, default=7.0, help="no new case is begun after so many")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--tune", metavar="SCHEMES", help="only try other ways to cut the work of these schemes")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that compile for --tune")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--out", default="gpu")
    options = parser.parse_args()
    begun = time.perf_counter()
    torch.manual_seed(SEED)
    if options.dry:
        os.environ["TRITON_INTERPRET"] = "1"
    elif not torch.cuda.is_available():
        sys.exit("no CUDA or ROCm GPU here; --dry runs the same code on a CPU")
    device = torch.device("cpu" if options.dry else "cuda")
    clock = Clock(device, 1 if options.dry else options.repeats)
    schemes = options.schemes.split(",")
    bandwidth = copy_bandwidth(clock)
    found: dict[str, Any] = {"hardware": hardware(device), "copy_bytes_per_second": bandwidth}
    print(found, flush=True)
    if options.tune:
        print(write(f"{options.out}_tune", tune(clock, options.tune.split(","), bandwidth, options.jobs), **found))
        return
    checked = CHECKED[:3] if options.dry else CHECKED
    found["errors"] = [check(name, device, options.dry) for name in checked]
    print("\n".join(str(row) for row in found["errors"]), flush=True)
    prefill = (Model("tiny", 1, 2, 32), 400, 3) if options.dry else (LLAMA3, 32_768, 512)
    found["encode"] = [encode_row(clock, name, bandwidth, options.dry) for name in ENCODED]
    found["prefill"] = [prefill_row(clock, name, *prefill) for name in ("int4", "kivi4")]
    for row in found["encode"] + found["prefill"]:
        print(row, flush=True)
    cases = ((Model("tiny", 1, 2, 32), 400, 2),) if options.dry else CASES
    rows, left_out = [], []
    for model, context, batch in cases:
        case = f"{model.name}, {context} tokens, batch {batch}"
        if 4 * batch * model.heads * context * model.channels > MOST_BYTES:
            left_out.append(f"{case}: too large")
            continue
        if time.perf_counter() - begun > 60 * options.minutes:
            left_out.append(f"{case}: no time left")
            continue
        exact = best_exact(clock, model, context, batch)
        for name in schemes:
            rows.append(decode_row(clock, name, model, context, batch, exact, bandwidth))
        print(table(rows[-len(schemes) :]), flush=True)
    found["left_out"] = left_out
    found["minutes"] = (time.perf_counter() - begun) / 60
    print(table(rows))
    if not options.dry:
        print(write(options.out, rows, **found))


if __name__ == "__main__":
    main()
