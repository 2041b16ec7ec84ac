"""Tables of what was measured, from ``bench/results``, for :mod:`generate` to put into the documentation."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "bench" / "results"


def table(head: Sequence[str], rows: Iterable[Sequence[object]], right: Sequence[int] = ()) -> str:
    """A Markdown table; columns ``right`` hold numbers."""
    lines = [list(head), ["--:" if i in right else "---" for i in range(len(head))]]
    lines += [[str(cell).replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def code(text: object) -> str:
    """``text`` in backticks."""
    return f"`{text}`"


def result(name: str) -> dict[str, Any]:
    """What ``bench/<name>.py``, or ``kvbits`` with ``--json``, last wrote; with its setting also on the top level."""
    data: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return {**data["setting"], **data}


def result_if_any(name: str) -> dict[str, Any] | None:
    """The same, or None where it has not been run."""
    return result(name) if (RESULTS / f"{name}.json").is_file() else None


def measured_on(data: dict[str, Any], what: str) -> str:
    """One sentence about where figures come from."""
    s = data["setting"]
    text = (
        f"{what} {s['processor']}, {s['cores']} threads, torch {s['torch']}, Transformers {s['transformers']}, "
        f"{s['date']}; `{s['command']}`."
    )
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


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


ATTENTION_SHORT = ("int8", "fp8", "int4", "kivi4", "int2", "kivi2", "int4+pre-rope", "rot4+centred", "int4-1%")
"""Of the formats that attention was timed with, those of the short form of the table."""


def attention_speed(schemes: Sequence[str] = ()) -> str:
    """One decode step of one layer, of ``schemes`` or all."""
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
        if row["kind"] == "decode" and (not schemes or row["scheme"] in schemes)
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


def quality() -> str:
    data = result("quality")
    bits = "bits_at_8000" if "bits_at_8000" in data["rows"][0] else "bits_per_element"
    what = "bits at 8,000 tokens" if bits == "bits_at_8000" else "real bits at this length"
    head = ("scheme", "KL to exact", "median", "99.9 %", "same top token", "perplexity", what)
    rows = [
        (
            code(row["scheme"]),
            f"{abs(row['kl_mean']):.5f}",
            f"{abs(row['kl_median']):.5f}",
            f"{row['kl_p999']:.3f}",
            f"{100 * row['top1']:.1f} %",
            f"{row['ppl']:.2f} ± {row['ppl_se']:.2f}",
            "" if row[bits] is None else f"{row[bits]:.{2 if bits == 'bits_at_8000' else 1}f}",
        )
        for row in data["rows"]
        if "error" not in row and row.get("regime") != "one-shot"
    ]
    return f"{table(head, rows, right=range(1, 7))}\n\n{measured_how(data, '`hf:dynamic` is the noise floor.')}"


QUALITY_HEAD = ("KL to exact", "perplexity", "same top token", "bits at 8,000 tokens")
UNWEIGHTED = "without sensitivity"
"""The step of ``bench/ablation.py`` whose tables were fitted without weights."""


def quality_cells(row: dict[str, Any]) -> list[str]:
    """Cells of :data:`QUALITY_HEAD`."""
    spread, bits = row.get("kl_se"), row.get("bits_at_8000")
    return [
        f"{abs(row['kl_mean']):.5f}" + ("" if spread is None else f" ± {spread:.5f}"),
        f"{row['ppl']:.2f} ± {row['ppl_se']:.2f}",
        f"{100 * row['top1']:.1f} %",
        "" if bits is None else f"{bits:.2f}",
    ]


def measured_how(data: dict[str, Any], more: str = "") -> str:
    """A note on how quality was measured."""
    dtype = data.get("dtype", "float32")
    fitted = f"; calibrated on {data['calibration']}" if "calibration" in data else ""
    text = (
        f"Model {data['model']} in {dtype}, {data['text']}, {data['windows']} windows of {data['length']} tokens in "
        f"chunks of {data['chunk']}{fitted}."
    )
    return measured_on(data, f"{text[:-1]}; {more}" if more else text)


def missing(name: str, command: str) -> str:
    """What stands in the place of a table that nobody has measured."""
    return f"Not measured yet: `{command}` writes `{name}.json`, and `python docs/generate.py` the table."


def ablation() -> str:
    data = result_if_any("ablation")
    if data is None:
        return missing("ablation", "python bench/ablation.py")
    parts = []
    for bits in dict.fromkeys(row["bits"] for row in data["rows"]):
        own = [row for row in data["rows"] if row["bits"] == bits]
        steps = [row for row in own if row["step"]]
        others = [row for row in own if not row["step"]]
        parts.append(f"### {bits} bits, one idea after the other")
        head = ["with", "scheme", *QUALITY_HEAD]
        cells = [[row["step"], code(row["scheme"]), *quality_cells(row)] for row in steps]
        parts.append(table(head, cells, right=range(2, 2 + len(QUALITY_HEAD))))
        parts.append(f"### {bits} bits, without calibration")
        cells = [[code(row["scheme"]), *quality_cells(row)] for row in others]
        parts.append(table(["scheme", *QUALITY_HEAD], cells, right=range(1, 1 + len(QUALITY_HEAD))))
    return "\n\n".join([*parts, measured_how(data, "`hf:dynamic` is the noise floor.")])


def altered() -> str:
    data = result_if_any("altered")
    if data is None:
        return missing("altered", "python bench/ablation.py --altered")
    models = list(dict.fromkeys(row["altered"] for row in data["rows"]))
    cells: dict[str, dict[str, str]] = {}
    for row in data["rows"]:
        cells.setdefault(row["scheme"], {})[row["altered"]] = f"{abs(row['kl_mean']):.5f}"
    rows = [[code(scheme), *(found.get(model, "") for model in models)] for scheme, found in cells.items()]
    note = measured_how(data, "KL to the exact cache of the same model.")
    return f"{table(['scheme', *models], rows, right=range(1, 1 + len(models)))}\n\n{note}"


PAPER_SHORT = (
    "fp16",
    "int4",
    "nf4",
    "nuq4",
    "nuq4-1%",
    "int3",
    "nf3",
    "nuq3",
    "nuq3-1%",
    "int2",
    "nf2",
    "nuq2",
    "nuq2-1%",
)
"""Of the paper's names, those of the short form of its table."""


def paper_table(names: Sequence[str] = ()) -> str:
    """KVQuant's table on one model: the rows of ``names``, or all."""
    data = result_if_any("paper_table")
    if data is None:
        return missing("paper_table", "python bench/paper_table.py")
    texts = list(data["texts"])
    by_name = {name: {} for row in data["rows"] for name in row["names"] if not names or name in names}
    for row in data["rows"]:
        for name in row["names"]:
            if name in by_name:
                by_name[name][row["text"]] = row
    head = ["in the paper", "paper bits", "real bits", *(f"{what}, {text}" for text in texts for what in ("PPL", "KL"))]
    cells = []
    for name in names or by_name:
        rows = by_name[name]
        first = rows[texts[0]]
        bits = first["paper_bits"].get(name)
        figures = [cell for text in texts for cell in (f"{rows[text]['ppl']:.2f}", f"{abs(rows[text]['kl_mean']):.4f}")]
        paper = "" if bits is None else f"{bits:.2f}"
        cells.append([code(name), paper, f"{first['bits_at_8000']:.2f}", *figures])
    note = measured_on(data, f"{on_texts(data)} Paper bits by its arithmetic at 2,048 tokens; real bits at 8,000.")
    return f"{table(head, cells, right=range(1, len(head)))}\n\n{note}"


def prose() -> str:
    """Every width on several kinds of text."""
    data = result_if_any("prose")
    if data is None:
        return missing("prose", "python bench/prose.py")
    texts = list(data["texts"])
    by_scheme: dict[str, dict[str, Any]] = {}
    for row in data["rows"]:
        by_scheme.setdefault(row["scheme"], {})[row["text"]] = row
    head = ["scheme", "bits", *(f"{what}, {text}" for text in texts for what in ("KL", "same top"))]
    cells = []
    for scheme, rows in by_scheme.items():
        figures = [
            cell
            for text in texts
            for cell in (f"{abs(rows[text]['kl_mean']):.4f}", f"{100 * rows[text]['top1']:.1f} %")
        ]
        cells.append([code(scheme), f"{rows[texts[0]]['bits_at_8000']:.2f}", *figures])
    return f"{table(head, cells, right=range(1, len(head)))}\n\n{measured_on(data, on_texts(data))}"


def on_texts(data: dict[str, Any]) -> str:
    """What was read, by ``bench/texts.py``."""
    files = "; ".join(f"{name}: {', '.join(of)}" for name, of in data["texts"].items())
    return (
        f"Model {data['model']} in float32, {data['windows']} windows of {data['length']} tokens of each text in "
        f"chunks of {data['chunk']} ({files})."
    )


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
