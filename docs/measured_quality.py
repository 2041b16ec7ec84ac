"""Tables of measured quality, for :mod:`generate`."""

from __future__ import annotations

from typing import Any

from measured import code, measured_on, missing, result, result_if_any, table

FRONT = ("exact", "default", "small", "kivi4", "fp8", "hf:quanto4", "hf:fp8")
"""The rows of README's one table."""


def front() -> str:
    """README's table: error, speed and bytes side by side, a dash where something has not been measured."""
    errors, steps, prompts = result("quality"), result("decode"), result("prefill")
    error = {row["scheme"]: row for row in errors["rows"] if "error" not in row and row.get("regime") != "one-shot"}

    def speed(rows: list[dict[str, Any]], scheme: str, **where: Any) -> dict[str, Any]:
        own = {"scheme": "hf:dynamic" if scheme == "exact" else scheme, "dtype": "bfloat16", **where}
        return next((row for row in rows if own.items() <= row.items()), {})

    def cell(row: dict[str, Any], name: str, form: str, unit: float = 1.0) -> str:
        return "-" if row.get(name) is None else form.format(row[name] / unit)

    rows = []
    for scheme in FRONT:
        of = [speed(steps["rows"], scheme, context=context) for context in (512, 8000)]
        rows.append([
            code(scheme), cell(error[scheme], "bits_at_8000", "{:.2f}"), cell(error[scheme], "kl_mean", "{:.4f}"),
            *(cell(row, "speed_against_exact", "{:.2f}x") for row in of),
            cell(speed(prompts["rows"], scheme, context=2048, chunk=2048), "time_against_exact", "{:.2f}x"),
            cell(of[1], "kv_bytes", "{:.0f} MB", 1e6),
        ])  # fmt: skip
    head = (
        "scheme",
        "bits",
        "KL to exact",
        "step at 512",
        "step at 8,000",
        "time to read a prompt",
        "KV cache at 8,000",
    )
    chunks = speed(prompts["rows"], "default", context=2048, chunk=512)
    loss = (
        f"It loses where a long prompt is read in chunks: 2,048 tokens in chunks of 512 take "
        f"{chunks['time_against_exact']:.2f}x the time of the exact cache under `default`."
    )
    note = measured_on(
        steps,
        f"{loss} Model {steps['model']}, a CPU. Steps: speed against the exact cache in bfloat16, above 1x is "
        f"faster; prompts: time to read 2,048 tokens, below 1x is faster; bits: of everything that is allocated at "
        f"8,000 tokens; KL: {errors['windows']} windows of {errors['length']:,} tokens of {errors['text']} in "
        f"{errors['dtype']}. `hf:` are Transformers' own caches.",
    )
    return f"{table(head, rows, right=range(1, len(head)))}\n\n{note}"


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


def paper_table() -> str:
    """KVQuant's table on one model."""
    data = result_if_any("paper_table")
    if data is None:
        return missing("paper_table", "python bench/paper_table.py")
    texts = list(data["texts"])
    by_name: dict[str, dict[str, Any]] = {name: {} for row in data["rows"] for name in row["names"]}
    for row in data["rows"]:
        for name in row["names"]:
            by_name[name][row["text"]] = row
    head = ["in the paper", "paper bits", "real bits", *(f"{what}, {text}" for text in texts for what in ("PPL", "KL"))]
    cells = []
    for name, rows in by_name.items():
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


def tasks() -> str:
    """Scores of ``kvbits tasks``, beside the exact cache's on the same samples."""
    data = result_if_any("tasks")
    if data is None:
        return missing("tasks", "kvbits tasks smollm2 --tasks lambada --shots 10 --data FOLDER --json tasks.json")
    head = ("task", "scheme", "packed", "bits", "score", "better", "worse", "p")
    cells = []
    for row in data["rows"]:
        against = ("", "", "") if row["wins"] is None else (row["wins"], row["losses"], f"{row['p_value']:.2g}")
        score = f"{row['value']:.3g} ± {row['stderr']:.2g}"
        packed, bits = f"{100 * row['packed_share']:.0f} %", f"{row['bits_per_element']:.2f}"
        cells.append([f"{row['task']}, {row['metric']}", code(row["scheme"]), packed, bits, score, *against])
    what = (
        f"Model {data['model']} in {data['dtype']}, the first {data['limit']} samples after {data['shots']} solved "
        f"ones, in chunks of {data['chunk']}. Packed: share of what was attended to. Bits: of the whole cache of such "
        "a context. Better and worse: samples, against the exact cache, with p of McNemar's test, or of perplexities "
        "of the sign test."
    )
    return f"{table(head, cells, right=range(2, len(head)))}\n\n{measured_on(data, what)}"


def retrieval() -> str:
    """What ``kvbits retrieval`` found, all depths and lengths of a task together."""
    data = result_if_any("retrieval")
    if data is None:
        return missing("retrieval", "kvbits retrieval smollm2 --haystack FILE --json bench/results/retrieval.json")
    head = ("task", "scheme", "prompts", "found", "log probability of the answer")
    cells = []
    for task, scheme in dict.fromkeys((row["task"], row["scheme"]) for row in data["rows"]):
        rows = [row for row in data["rows"] if (row["task"], row["scheme"]) == (task, scheme)]
        prompts = sum(row["repeats"] for row in rows)
        found, logprob = (sum(row[name] * row["repeats"] for row in rows) for name in ("accuracy", "logprob"))
        cells.append([task, code(scheme), prompts, f"{found:.0f}", f"{logprob / prompts:.2f}"])
    lengths, depths = (sorted({row[name] for row in data["rows"]}) for name in ("length", "depth"))
    what = (
        f"Model {data['model']} in {data['dtype']}, prompts of {' and '.join(map(str, lengths))} tokens out of "
        f"{data['haystack']} with the answer at depths {', '.join(f'{depth:g}' for depth in depths)}."
    )
    return f"{table(head, cells, right=range(2, len(head)))}\n\n{measured_on(data, what)}"


def on_texts(data: dict[str, Any]) -> str:
    """What was read, by ``bench/texts.py``."""
    files = "; ".join(f"{name}: {', '.join(of)}" for name, of in data["texts"].items())
    return (
        f"Model {data['model']} in float32, {data['windows']} windows of {data['length']} tokens of each text in "
        f"chunks of {data['chunk']} ({files})."
    )
