"""Write the sections of the documentation that follow from the code, or check that they are up to date.

    python docs/generate.py            rewrite what stands between <!-- generated:NAME --> and <!-- /generated:NAME -->
    python docs/generate.py --check    print what would change; exit status 1 if anything would

Bits, bytes and offsets come from ``Codec.layout``, ``Record`` and a live ``LayerCache``; nothing is typed by hand.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

import kvbits.scheme
from kvbits.cache import LayerCache
from kvbits.catalogue import CATALOGUE, Entry
from kvbits.codecs import CODECS
from kvbits.hf.translate import scheme_of_cache_config
from kvbits.numerics import bitpack
from kvbits.scheme import BLOCK_TOKENS, Scheme
from kvbits.store import ALIGNMENT_BYTES, Record
from kvbits.types import Format

ROOT = Path(__file__).parent.parent
DTYPE = torch.bfloat16
CONTEXTS = (512, 2048, 8192)
"""Lengths at which the tables show what a cache really takes."""

HEAD_DIMS = (64, 80, 96, 128, 256)
CACHE_CONFIGS: tuple[dict[str, object], ...] = (
    {"backend": "quanto"},
    {"backend": "quanto", "nbits": 2},
    {"backend": "quanto", "residual_length": 64, "q_group_size": 32},
    {"backend": "quanto", "axis_key": -1},
    {"backend": "hqq"},
    {"backend": "hqq", "nbits": 2, "axis_key": 0},
    {"backend": "fp8"},
    {"backend": "kvbits", "nbits": 3},
    {"backend": "kvbits", "scheme": "kivi2,residual=64"},
)


def table(head: Sequence[str], rows: Iterable[Sequence[object]], right: Sequence[int] = ()) -> str:
    """A Markdown table; columns ``right`` hold numbers."""
    lines = [list(head), ["--:" if i in right else "---" for i in range(len(head))]]
    lines += [[str(cell).replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def code(text: object) -> str:
    """``text`` in backticks."""
    return f"`{text}`"


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` rather than ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def packed_bits(entry: Entry, head_dim: int) -> float:
    """Bits per element of a packed block, alignment included."""
    record = Record.of(entry.key, entry.value, BLOCK_TOKENS, head_dim, head_dim, DTYPE)
    return 8 * record.nbytes / (2 * BLOCK_TOKENS * head_dim)


def live_bits(entry: Entry, tokens: int, head_dim: int = 128) -> float:
    """Bits per element that a layer really allocates after a prompt of ``tokens``."""
    torch.manual_seed(0)
    cache = LayerCache(Scheme.parse(entry.name))
    cache.append(*torch.randn(2, 1, 1, tokens, head_dim, dtype=DTYPE))
    return 8 * sum(cache.nbytes().values()) / cache.elements


# -- schemes -----------------------------------------------------------------------------------------------------------


def readme_schemes() -> str:
    rows = {}
    for entries in by_format().values():
        bits = [packed_bits(entries[0], 128), *(live_bits(entries[0], tokens) for tokens in CONTEXTS)]
        rows.update({e: [code(e.name), *(f"{b:.2f}" for b in bits), e.advice] for e in entries})
    head = ["scheme", "packed", *(f"{tokens:,} tokens" for tokens in CONTEXTS), "when"]
    return table(head, [rows[entry] for entry in CATALOGUE], right=range(1, 2 + len(CONTEXTS)))


def catalogue() -> str:
    rows = [
        [code(e.name), f"{packed_bits(e, 64):.2f}", f"{packed_bits(e, 128):.2f}", e.formula, e.paper, e.advice]
        for e in CATALOGUE
    ]
    return table(["scheme", "head_dim 64", "head_dim 128", "stored", "source", "when"], rows, right=(1, 2))


def grammar() -> str:
    text = (kvbits.scheme.__doc__ or "").split("::\n", 1)[1]
    return f"```text\n{textwrap.dedent(text).strip()}\n```"


def spellings() -> str:
    rows = []
    for kind in CODECS:
        source = kind.__module__.replace(".", "/")
        rows.append([f"[{kind.__name__}](../src/{source}.py)", ", ".join(map(code, kind.examples))])
    return table(["codec", "spelled, for example"], rows)


def cache_configs() -> str:
    rows = [[code(config), code(scheme_of_cache_config(config))] for config in CACHE_CONFIGS]
    return table(["`cache_config`", "scheme"], rows)


# -- formats -----------------------------------------------------------------------------------------------------------


def describe(form: Format) -> tuple[str, ...]:
    """The fields of a format as cells."""
    group = form.group or ("head_dim" if form.per == "token" else "-")
    return str(form.bits or "as given"), form.levels, form.per, str(group), "yes" if form.zero else "no"


def by_format() -> dict[tuple[Format, Format], list[Entry]]:
    """Catalogue entries that lie in memory the same way."""
    groups: dict[tuple[Format, Format], list[Entry]] = {}
    for entry in CATALOGUE:
        groups.setdefault((entry.key.format, entry.value.format), []).append(entry)
    return groups


def formats() -> str:
    used: dict[Format, list[str]] = {}
    for entry in CATALOGUE:
        both = entry.key.format == entry.value.format
        for form, side in ((entry.key.format, "K of "), (entry.value.format, "V of ")):
            name = ("" if both else side) + code(entry.name)
            if name not in used.setdefault(form, []):
                used[form].append(name)
    rows = [[*describe(form), ", ".join(names)] for form, names in used.items()]
    return table(["bits", "levels", "scale per", "group", "zero", "schemes"], rows)


def records() -> str:
    parts = []
    for entries in by_format().values():
        entry = entries[0]
        record = Record.of(entry.key, entry.value, BLOCK_TOKENS, 128, 128, DTYPE)
        rows = [
            [side, slot.part.name, slot.offset, slot.part.nbytes, dtype_name(slot.part.dtype), list(slot.part.shape)]
            for side, slots in (("K", record.keys), ("V", record.values))
            for slot in slots
        ]
        title = ", ".join(code(e.name) for e in entries)
        bits = packed_bits(entry, 128)
        parts.append(f"### {title}\n\n{record.nbytes:,} bytes a record, {bits:.2f} bits per element.\n")
        parts.append(table(["side", "part", "offset", "bytes", "dtype", "shape"], rows, right=(2, 3)) + "\n")
    return "\n".join(parts).rstrip()


def head_dims() -> str:
    rows = [
        [", ".join(code(e.name) for e in entries), *(f"{packed_bits(entries[0], d):.2f}" for d in HEAD_DIMS)]
        for entries in by_format().values()
    ]
    return table(["scheme", *(f"head_dim {d}" for d in HEAD_DIMS)], rows, right=range(1, 1 + len(HEAD_DIMS)))


def bit_map() -> str:
    """Where each token's code lies, found by packing one code of ones at a time."""
    rows = []
    for bits in bitpack.BITS:
        # [tokens, byte rows]: what a block looks like whose only nonzero code bit is this one
        where: dict[tuple[int, int], tuple[int, int]] = {}
        for bit in range(bits):
            codes = torch.zeros(BLOCK_TOKENS, BLOCK_TOKENS, 1, dtype=torch.uint8)
            codes.diagonal().fill_(1 << bit)
            packed = bitpack.pack(codes, bits).squeeze(-1)
            for token, byte_row in packed.nonzero().tolist():
                place = int(packed[token, byte_row]).bit_length() - 1
                where[byte_row, place] = (token, bit)
        byte_rows = bitpack.packed_rows(BLOCK_TOKENS, bits)
        maps = [[where[row, place] for place in range(8)] for row in range(byte_rows)]
        first = 0
        for row in range(1, byte_rows + 1):
            moved = [(token + row - first, bit) for token, bit in maps[first]]
            if row == byte_rows or maps[row] != moved:
                rows.append([bits, f"{first} to {row - 1}", *_byte(maps[first], first)])
                first = row
    return table(["bits", "byte rows", "what byte row r holds, from its lowest bit up"], rows)


def _byte(places: list[tuple[int, int]], row: int) -> list[str]:
    """Words for one byte: ``places[i]`` is the (token, code bit) in bit i."""
    pieces: list[str] = []
    start = 0
    for i in range(1, 9):
        if i == 8 or places[i][0] != places[start][0]:
            shift = places[start][0] - row
            low, high = places[start][1], places[i - 1][1]
            token = "r" if shift == 0 else f"r {'+' if shift > 0 else '-'} {abs(shift)}"
            which = f"bit {low}" if low == high else f"bits {low}-{high}"
            pieces.append(f"{which} of token {token}")
            start = i
    return ["; ".join(pieces)]


def facts() -> str:
    text = (
        f"Records below: blocks of {BLOCK_TOKENS} tokens, head_dim 128 for K and V, a model in {dtype_name(DTYPE)}; "
        f"every part begins at a multiple of {ALIGNMENT_BYTES} bytes."
    )
    return textwrap.fill(text, 120)


def result(name: str) -> dict[str, Any]:
    """What ``bench/<name>.py`` last wrote."""
    data: dict[str, Any] = json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text(encoding="utf-8"))
    return data


def measured_on(data: dict[str, Any], what: str) -> str:
    """One sentence about where figures come from."""
    s = data["setting"]
    text = (
        f"{what} {s['processor']}, {s['cores']} threads, torch {s['torch']}, Transformers {s['transformers']}, "
        f"{s['date']}; `{s['command']}`."
    )
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def decode_speed() -> str:
    data = result("decode")
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
        f"`read` is of the {bandwidth / 1e9:.1f} GB/s that a plain sum reads in the same run. `+pre-rope` (keys stored "
        "before the rotary embedding) and `+outliers` (1 %) are formats that no scheme uses yet."
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
    head = ("scheme", "KL to exact", "median", "99.9 %", "same top token", "perplexity", "real bits at this length")
    rows = [
        (
            code(row["scheme"]),
            f"{abs(row['kl_mean']):.5f}",
            f"{abs(row['kl_median']):.5f}",
            f"{row['kl_p999']:.3f}",
            f"{100 * row['top1']:.1f} %",
            f"{row['ppl']:.2f} ± {row['ppl_se']:.2f}",
            "" if row["bits_per_element"] is None else f"{row['bits_per_element']:.1f}",
        )
        for row in data["rows"]
    ]
    what = (
        f"Model {data['model']} in {data['dtype']}, {data['text']}, {data['windows']} windows of {data['length']} "
        f"tokens in chunks of {data['chunk']}; `hf:dynamic` is the noise floor."
    )
    return f"{table(head, rows, right=range(1, 7))}\n\n{measured_on(data, what)}"


SECTIONS: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {
        "schemes": readme_schemes,
        "decode": decode_speed,
        "prefill": prompt_speed,
        "attend": attention_speed,
        "memory": peak_memory,
        "quality": quality,
    },
    "docs/kernels.md": {"chunks": chunk_speed, "encode": encode_speed},
    "docs/schemes.md": {
        "catalogue": catalogue,
        "grammar": grammar,
        "spellings": spellings,
        "cache_config": cache_configs,
    },
    "docs/formats.md": {
        "formats": formats,
        "bits": bit_map,
        "facts": facts,
        "records": records,
        "head_dims": head_dims,
    },
}


def updated(text: str, name: str, body: str) -> str:
    """``text`` with ``body`` between the markers of section ``name``."""
    begin, end = f"<!-- generated:{name} -->", f"<!-- /generated:{name} -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise SystemExit(f"the markers {begin} and {end} must each stand once")
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n\n{body}\n\n{end}{rest.partition(end)[2]}"


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Rewrite or check the files below ``root``; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit status 1 if anything is stale")
    check = parser.parse_args(arguments).check
    stale = 0
    for file, sections in SECTIONS.items():
        old = new = (root / file).read_text(encoding="utf-8")
        for name, body in sections.items():
            new = updated(new, name, body())
        if new == old:
            continue
        stale += 1
        if check:
            lines = difflib.unified_diff(old.splitlines(), new.splitlines(), file, f"{file} from the code", lineterm="")
            print("\n".join(lines))
        else:
            (root / file).write_text(new, encoding="utf-8")
            print(f"rewrote {file}")
    if check and stale:
        print("run: python docs/generate.py", file=sys.stderr)
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
