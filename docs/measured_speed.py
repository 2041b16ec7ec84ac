"""Tables of measured speed and memory, for :mod:`generate`."""

from __future__ import annotations

from measured import code, measured_on, missing, result, result_if_any, table


def decode_speed(name: str = "decode") -> str:
    data = result(name)
    head = ("dtype", "context", "scheme", "step", "speed against exact", "against quanto int4", "KV cache")
    rows = [
        (
            row["dtype"],
            f"{row['context']:,}",
            code(row["scheme"]),
            f"{row['step_ms']:.0f} ms",
            f"{row['speed_against_exact']:.2f}x",
            f"{row['speed_against_quanto4']:.2f}x",
            f"{row['kv_bytes'] / 1e6:.1f} MB",
        )
        for row in data["rows"]
    ]
    note = measured_on(data, f"Model {data['model']}; `hf:` are Transformers' own caches.")
    return f"{table(head, rows, right=(1, 3, 4, 5, 6))}\n\n{note}"


def prompt_speed() -> str:
    data = result("prefill")
    head = ("dtype", "context", "in chunks of", "scheme", "seconds", "time against exact")
    rows = [
        (
            row["dtype"],
            f"{row['context']:,}",
            "all" if row["chunk"] == row["context"] else f"{row['chunk']:,}",
            code(row["scheme"]),
            f"{row['seconds']:.1f}",
            f"{row['time_against_exact']:.2f}x",
        )
        for row in data["rows"]
    ]
    note = measured_on(data, f"Model {data['model']}.")
    return f"{table(head, rows, right=(1, 2, 4, 5))}\n\n{note}"


def attention_speed() -> str:
    """One decode step of one layer."""
    data = result("attend")
    bandwidth = data["read_bytes_per_second"]
    head = (
        "query / KV heads",
        "format",
        "step",
        "best of torch, bf16",
        "against it",
        "against float32",
        "read",
        "error",
    )
    rows = [
        (
            f"{row['q_heads']} / {row['kv_heads']}",
            code(row["scheme"]),
            f"{row['ms']:.1f} ms",
            f"{row['best_bfloat16_ms']:.1f} ms",
            f"{row['speed_against_bfloat16']:.1f}x",
            f"{row['speed_against_float32']:.1f}x",
            f"{100 * row['bytes_per_second'] / bandwidth:.0f} %",
            f"{row['error']:.0e}",
        )
        for row in data["rows"]
        if row["kind"] == "decode"
    ]
    first = data["rows"][0]
    what = (
        f"One layer, one query token, {first['tokens']:,} tokens, head_dim {first['head_dim']}, {first['kernel']}; "
        f"`read` is of the {bandwidth / 1e9:.1f} GB/s that a plain sum reads in the same run. Modifiers follow a plus: "
        "`+pre-rope` is keys stored before the rotary embedding; `+outliers`, or `-1%`, is 1 % of the elements beside "
        "the codes."
    )
    return f"{table(head, rows, right=(2, 3, 4, 5, 6, 7))}\n\n{measured_on(data, what)}"


def chunk_speed() -> str:
    data = result("attend")
    head = ("dtype", "query tokens", "format", "kvbits", "torch SDPA", "against it", "best of torch", "against it")
    chunks = [row for row in data["rows"] if row["kind"] == "chunk"]
    rows = [
        (
            row["dtype"],
            row["queries"],
            code(row["scheme"]),
            f"{row['ms']:.0f} ms",
            f"{row['best_sdpa_ms']:.0f} ms",
            f"{row['speed_against_sdpa']:.2f}x",
            f"{row['best_torch_ms']:.0f} ms ({row['best_torch']})",
            f"{row['speed_against_torch']:.2f}x",
        )
        for row in chunks
    ]
    first = chunks[0]
    what = (
        f"{first['q_heads']} query heads, {first['kv_heads']} KV heads, head_dim {first['head_dim']}, "
        f"{first['tokens']:,} tokens of history; torch reads it decoded."
    )
    return f"{table(head, rows, right=(1, 3, 4, 5, 6, 7))}\n\n{measured_on(data, what)}"


def encode_speed() -> str:
    data = result("encode")
    head = ("threads", "codec", "GB/s", "per second of processor time", "PyTorch codec", "against it")
    torch_rows = {(row["scheme"], row["threads"]): row for row in data["rows"] if row["kernel"] == "torch"}
    rows = [
        (
            row["threads"],
            code(row["scheme"]),
            f"{row['gb_per_second']:.1f}",
            f"{row['gb_per_processor_second']:.1f}",
            f"{torch_rows[row['scheme'], row['threads']]['gb_per_second']:.2f}",
            f"{row['speed_against_torch']:.0f}x",
        )
        for row in data["rows"]
        if row["kernel"] == "native"
    ]
    what = f"GB of bfloat16 input, {data['instruction_set']}."
    return f"{table(head, rows, right=(0, 2, 3, 4, 5))}\n\n{measured_on(data, what)}"


def peak_memory() -> str:
    data = result("memory")
    head = ("dtype", "context", "scheme", "peak of the process")
    rows = [
        (row["dtype"], f"{row['context']:,}", code(row["scheme"]), f"{row['peak_bytes'] / 1e6:,.0f} MB")
        for row in data["rows"]
    ]
    note = measured_on(data, f"Model {data['model']}, prompt and {data['new_tokens']} tokens in a process of its own.")
    return f"{table(head, rows, right=(1, 3))}\n\n{note}"


def batches() -> str:
    """What ``kvbits bench`` found at several contexts and batches."""
    data = result_if_any("speed")
    if data is None:
        return missing("speed", "kvbits bench smollm2 --batch 1,4 --json bench/results/speed.json")
    head = ("context", "batch", "scheme", "step", "tokens a second", "against exact", "flush", "KV cache")
    rows = [
        (
            f"{row['context']:,}",
            row["batch"],
            code(row["scheme"]),
            f"{row['step_ms']:.0f} ms",
            f"{row['decode_tokens_per_second']:.1f}",
            f"{row['speed_against_exact']:.2f}x",
            "" if row["flush_ms"] is None else f"{row['flush_ms']:.0f} ms",
            f"{row['kv_bytes'] / 1e6:.1f} MB",
        )
        for row in data["rows"]
        if "error" not in row
    ]
    what = f"Model {data['model']} in {data['rows'][0]['dtype']}; `hf:` are Transformers' own caches."
    return f"{table(head, rows, right=(0, 1, 3, 4, 5, 6, 7))}\n\n{measured_on(data, what)}"


def loading() -> str:
    data = result("load")
    head = ("dtype", "scheme", "file", "read again", "loaded", "sooner", "sooner from a cold disk", "forked")
    rows = [
        (
            row["dtype"],
            code(row["scheme"]),
            f"{row['file_bytes'] / 1e6:.1f} MB",
            f"{row['prefill_seconds']:.1f} s",
            f"{row['load_seconds']:.2f} s",
            f"{row['sooner']:.0f}x",
            f"{row['sooner_cold']:.0f}x",
            f"{row['fork_seconds']:.2f} s",
        )
        for row in data["rows"]
    ]
    what = f"Model {data['model']}: seconds to the first token after a prompt of {data['rows'][0]['context']:,} tokens."
    return f"{table(head, rows, right=range(2, 8))}\n\n{measured_on(data, what)}"


def serving() -> str:
    data = result_if_any("serve_load")
    if data is None:
        return missing("serve_load", "python bench/serve_load.py")
    s = data["summary"]
    rows = [
        ("requests, at a time, failed", f"{s['requests']}, {s['at_a_time']}, {s['failed']:.0f}"),
        ("seconds in all", f"{s['seconds']:.0f}"),
        ("answer tokens a second, all together", f"{s['answer_tokens_per_second']:.1f}"),
        ("tokens of prompts that were in a cache", f"{100 * s['reused_share']:.0f} %"),
        ("caches dropped for room", f"{s['evicted']:.0f}"),
        (
            "most bytes of caches, of the budget",
            f"{s['peak_cache_bytes'] / 1e6:.1f} of {s['budget_bytes'] / 1e6:.0f} MB",
        ),
        ("first token, median, with the wait", f"{s['median_first_token_seconds']:.1f} s"),
        ("the model's work on an answer, mean", f"{s['mean_generation_seconds']:.2f} s"),
    ]
    note = measured_on(data, f"Model {data['model']} under `{data['scheme']}`.")
    return f"{table(('what', 'figure'), rows, right=(1,))}\n\n{note}"


def vllm_speed() -> str:
    """vLLM on packed pages against its own cache."""
    data = result_if_any("vllm_speed")
    if data is None:
        return missing("vllm_speed", "python bench/vllm_speed.py")
    head = ("requests", "prompt", "cache", "prompts", "against own", "step", "against own", "tokens that fit")
    rows = [
        (
            row["requests"],
            f"{row['prompt']:,}",
            row["engine"] if row["engine"].startswith("vLLM") else code(row["engine"]),
            f"{row['prompt_seconds']:.2f} s",
            f"{row['prompt_against_own']:.2f}x",
            f"{row['step_seconds'] * 1e3:.0f} ms",
            f"{row['step_against_own']:.2f}x",
            f"{row['cached_tokens']:,}",
        )
        for row in data["rows"]
    ]
    what = (
        f"Model {data['model']} in {data['dtype']}, medians of {data['rounds']} rounds in turn; `prompts`: until every "
        f"request has its first token, at most {data['batched_tokens']:,} tokens at once; `step`: one token more for "
        f"each; above 1x is faster. vLLM {data['vllm']}."
    )
    return f"{table(head, rows, right=(0, 1, 3, 4, 5, 6, 7))}\n\n{measured_on(data, what)}"
