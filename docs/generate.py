"""Write the sections of the documentation that follow from the code, or check that they are up to date.

    python docs/generate.py            rewrite what stands between <!-- generated:NAME --> and <!-- /generated:NAME -->
    python docs/generate.py --check    print what would change; exit status 1 if anything would

Bits, bytes and offsets come from ``Codec.layout``, ``Record`` and a live ``LayerCache``; what was measured comes from
:mod:`measured_quality` and :mod:`measured_speed`; nothing is typed by hand.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import measured
import measured_quality
import measured_speed
import torch
from measured import code, table

import kvbits.schemes.grammar
from kvbits.codecs import CODECS, Codec
from kvbits.hf.translate import scheme_of_cache_config
from kvbits.layer.cache import LayerCache
from kvbits.numerics import bitpack
from kvbits.plan.presets import PRESETS
from kvbits.schemes import help as pages
from kvbits.schemes.catalogue import ALIAS_ADVICE, ALIASES, CATALOGUE, Entry
from kvbits.schemes.scheme import BLOCK_TOKENS, BLOCKS, Scheme
from kvbits.store.record import ALIGNMENT_BYTES, Record
from kvbits.transform.rotary import Rotary
from kvbits.types import Format

ROOT = Path(__file__).parent.parent
DTYPE = torch.bfloat16
CONTEXTS = (512, 2048, 8192)
"""Lengths at which the tables show what a cache really takes."""

LONG_TOKENS = 131_072
"""The length that README counts in GiB."""

HEAD_DIMS = (64, 80, 96, 128, 256)
SHOWN: dict[str, tuple[str, ...]] = {
    "exact": ("exact",),
    "affine": ("int8", "int4", "int3", "int2", "int4-gs32", "int4-channel", "int4-static", "int4-calibrated"),
    "kivi": ("kivi4", "k=int3-channel,v=int3-gs32", "kivi2"),
    "normal_float": ("nf4", "nf3", "nf2", "nf4-gs32", "nf4-channel", "nf4-static"),
    "half_quadratic": ("hqq8", "hqq4", "hqq3", "hqq2", "hqq4-gs32", "hqq2-channel"),
    "fp8": ("fp8", "fp8-static", "fp8-calibrated"),
    "rotated": ("rot4", "rot3", "rot2", "rot4-gs32", "rot4-1%"),
    "lloyd_max": ("default", "lm4", "lm3", "lm2", "small"),
    "non_uniform": ("nuq4", "nuq4-1%", "nuq3", "nuq3-1%", "nuq2", "nuq2-1%"),
    "outliers": ("int4", "int4-0.5%", "int4-1%", "int4-2%", "nuq3", "nuq3-1%"),
}
"""What the page of each method counts the bits of."""

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


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` rather than ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def packed_bits(entry: Entry, head_dim: int) -> float:
    """Bits per element of a packed block, alignment included."""
    return pair_bits(entry.key, entry.value, BLOCK_TOKENS, head_dim)


def pair_bits(key: Codec, value: Codec, block: int, head_dim: int) -> float:
    """The same of any two codecs and blocks."""
    return 8 * Record.of(key, value, block, head_dim, head_dim, DTYPE).nbytes / (2 * block * head_dim)


def live_bits(scheme: str, tokens: int, head_dim: int = 128) -> float:
    """Bits per element that a layer really allocates after a prompt of ``tokens``."""
    cache = filled(scheme, tokens, head_dim)
    return 8 * sum(cache.nbytes().values()) / cache.elements


def filled(scheme: str, tokens: int, head_dim: int) -> LayerCache:
    """A layer after a prompt of ``tokens``."""
    torch.manual_seed(0)
    half = head_dim // 2
    cache = LayerCache(Scheme.parse(scheme), rotary=Rotary(10_000 ** -(torch.arange(half) / half)))
    cache.append(*torch.randn(2, 1, 1, tokens, head_dim, dtype=DTYPE))
    return cache


# -- schemes -----------------------------------------------------------------------------------------------------------


def problem() -> str:
    """What a long context takes, in the sizes of a model that everyone knows."""
    preset = PRESETS["llama-3.1-8b"]
    sizes = preset.config
    layers, heads = sizes["num_hidden_layers"], sizes["num_key_value_heads"]
    head_dim = sizes["hidden_size"] // sizes["num_attention_heads"]
    elements = 2 * layers * heads * head_dim * LONG_TOKENS
    gib = {name: elements * live_bits(name, LONG_TOKENS, head_dim) / 8 / 2**30 for name in ("exact", *ALIASES)}
    packed = " or ".join(f"**{gib[name]:.1f} GiB** (`{name}`)" for name in ALIASES)
    text = (
        f"Each token that {preset.title} reads leaves {elements / LONG_TOKENS * 2 / 1024:.0f} KiB of keys and values "
        f"behind. At {LONG_TOKENS // 1024}k tokens they take {gib['exact']:.1f} GiB, more than its weights; with "
        f"kvbits {packed}."
    )
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def live() -> str:
    """What a layer really takes under each name."""
    rows: dict[str, list[str]] = {}
    for name, scheme in ALIASES.items():
        one = Scheme.parse(scheme)
        bits = [pair_bits(one.key, one.value, one.block, 128), *(live_bits(name, tokens) for tokens in CONTEXTS)]
        rows[name] = [code(name), *(f"{b:.2f}" for b in bits)]
    for entries in by_format().values():
        bits = [packed_bits(entries[0], 128), *(live_bits(entries[0].name, tokens) for tokens in CONTEXTS)]
        rows.update({e.name: [code(e.name), *(f"{b:.2f}" for b in bits)] for e in entries})
    head = ["scheme", "packed", *(f"{tokens:,} tokens" for tokens in CONTEXTS)]
    order = [*ALIASES, *(entry.name for entry in CATALOGUE)]
    return table(head, [rows[name] for name in order], right=range(1, 2 + len(CONTEXTS)))


def catalogue() -> str:
    rows = []
    for name, scheme in ALIASES.items():
        one = Scheme.parse(scheme)
        bits = [f"{pair_bits(one.key, one.value, one.block, d):.2f}" for d in (64, 128)]
        rows.append([code(name), *bits, page_link("lloyd_max"), code(scheme), "see its codec", ALIAS_ADVICE[name]])
    for e in CATALOGUE:
        (page,), _ = pages.of_scheme(Scheme.parse(e.name))
        bits = [f"{packed_bits(e, d):.2f}" for d in (64, 128)]
        rows.append([code(e.name), *bits, page_link(page), e.formula, e.paper, e.advice])
    return table(["scheme", "head_dim 64", "head_dim 128", "page", "stored", "source", "when"], rows, right=(1, 2))


def page_link(page: str) -> str:
    """A link from ``docs/``."""
    return f"[{page.replace('_', '-')}](../src/kvbits/schemes/help/{page}.md)"


def blocks() -> str:
    rows = []
    for block in BLOCKS:
        scheme = f"lm4,centred,block={block}"
        cache = filled(scheme, 8000, 64)
        assert cache.keys is not None
        bits = [f"{live_bits(scheme, tokens, d):.2f}" for d in (64, 128) for tokens in (2000, 8000)]
        rows.append([code(scheme), cache.keys.shape[2], *bits])
    head = ["scheme", "room for exact tokens"]
    head += [f"head_dim {d}, {tokens:,} tokens" for d in (64, 128) for tokens in (2000, 8000)]
    note = "Bits per element of everything that a layer allocates, 16-bit model."
    return f"{table(head, rows, right=range(1, 6))}\n\n{note}"


# -- pages -------------------------------------------------------------------------------------------------------------


def page_bits(page: str) -> str:
    """Bits per element of packed blocks, part by part."""
    rows = []
    for name in SHOWN[page]:
        scheme = Scheme.parse(name)
        parts = dict.fromkeys(("codes", "scales", "zeros", "outliers"), 0.0)
        for codec in (scheme.key, scheme.value):
            for part in codec.layout(scheme.block, 128, DTYPE):
                parts[part.role] += 8 * part.nbytes / (2 * scheme.block * 128)
        totals = [pair_bits(scheme.key, scheme.value, scheme.block, d) for d in (64, 128)]
        cells = [f"{part:.2f}" if part else "-" for part in parts.values()]
        rows.append([code(name), *cells, *(f"**{total:.2f}**" for total in totals)])
    head = ["scheme", "codes", "scales", "zeros", "outliers", "all, head_dim 128", "all, head_dim 64"]
    rows = [[*row[:5], row[6], row[5]] for row in rows]
    note = "Bits per element of a packed block, K and V on average; parts at head_dim 128, alignment included in all."
    return f"{table(head, rows, right=range(1, 7))}\n\n{note}"


def page_measured(page: str) -> str:
    """What of a page's schemes was measured through a model: rows of the ablation, and of the table of quality."""
    parts = []
    seen: set[str] = set()
    for name in ("ablation", "quality"):
        data = measured.result_if_any(name)
        rows = [] if data is None else [row for row in rows_of_page(page, data["rows"]) if row["scheme"] not in seen]
        if data is None or not rows:
            continue
        seen |= {row["scheme"] for row in rows}
        cells = [[code(row["scheme"]), *measured_quality.quality_cells(row)] for row in rows]
        head = ["scheme", *measured_quality.QUALITY_HEAD]
        parts.append(f"{table(head, cells, right=range(1, len(head)))}\n\n{measured_quality.measured_how(data)}")
    return "\n\n".join(parts) or "Not measured through a model yet."


def rows_of_page(page: str, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the page's schemes; for a modifier those that have it, and the same codecs without."""
    found: dict[str, tuple[dict[str, Any], bool, tuple[str, str]]] = {}
    for row in rows:
        if row["scheme"].startswith("hf:") or row.get("step") == measured_quality.UNWEIGHTED:
            continue
        scheme = Scheme.parse(row["scheme"])
        methods, modifiers = pages.of_scheme(scheme)
        plain = tuple(str(without(codec)) for codec in (scheme.key, scheme.value))
        found[row["scheme"]] = (row, page in methods or page in modifiers, (plain[0], plain[1]))
    pairs = {pair for _, uses, pair in found.values() if uses} if page in pages.MODIFIERS else set()
    return [row for row, uses, pair in found.values() if uses or pair in pairs]


def without(codec: Codec) -> Codec:
    """A codec without outliers and Q-Norm."""
    names = {field.name for field in dataclasses.fields(codec)}
    plain = {"outliers": 0.0, "qnorm": False}
    return dataclasses.replace(codec, **{name: plain[name] for name in names & plain.keys()})


def page_sections(page: str) -> dict[str, Callable[[], str]]:
    """The generated sections of a page."""
    sections: dict[str, Callable[[], str]] = {}
    if page in SHOWN:
        sections["bits"] = functools.partial(page_bits, page)
    if page == "sinks":
        sections["blocks"] = blocks
    if page not in ("exact", "calibration"):
        sections["measured"] = functools.partial(page_measured, page)
    return sections


def grammar() -> str:
    text = (kvbits.schemes.grammar.__doc__ or "").split("::\n", 1)[1]
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


def floors() -> str:
    """The rooms of the house, from the top floor down; tests/house/test_floors.py holds the code to the same table."""
    sys.path.append(str(ROOT / "tests" / "support"))
    from rooms import ROOMS

    names = {name: "`native/`" if name == "_native" else f"`{name}.py`" if room.file else f"`{name}/`"
             for name, room in ROOMS.items()}  # fmt: skip
    return table(
        ["floor", "room", "what it is"], [[room.floor, names[name], room.what] for name, room in ROOMS.items()], [0]
    )


def facts() -> str:
    text = (
        f"Records below: blocks of {BLOCK_TOKENS} tokens, head_dim 128 for K and V, a model in {dtype_name(DTYPE)}; "
        f"every part begins at a multiple of {ALIGNMENT_BYTES} bytes."
    )
    return textwrap.fill(text, 120)


SECTIONS: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"problem": problem, "front": measured_quality.front},
    "docs/results.md": {
        "decode": measured_speed.decode_speed,
        "prefill": measured_speed.prompt_speed,
        "memory": measured_speed.peak_memory,
        "quality": measured_quality.quality,
        "paper": measured_quality.paper_table,
        "prose": measured_quality.prose,
        "tasks": measured_quality.tasks,
        "retrieval": measured_quality.retrieval,
        "batches": measured_speed.batches,
        "decode_8k": functools.partial(measured_speed.decode_speed, "decode_8k"),
    },
    "docs/design.md": {"floors": floors},
    "docs/save.md": {"load": measured_speed.loading},
    "docs/serve.md": {"serve_load": measured_speed.serving},
    "docs/vllm.md": {"vllm_speed": measured_speed.vllm_speed},
    "docs/kernels.md": {
        "steps": measured_speed.attention_speed,
        "chunks": measured_speed.chunk_speed,
        "encode": measured_speed.encode_speed,
    },
    "docs/schemes.md": {
        "catalogue": catalogue,
        "live": live,
        "grammar": grammar,
        "spellings": spellings,
        "cache_config": cache_configs,
    },
    "docs/decisions.md": {"blocks": blocks, "ablation": measured_quality.ablation, "altered": measured_quality.altered},
    "docs/formats.md": {
        "formats": formats,
        "bits": bit_map,
        "facts": facts,
        "records": records,
        "head_dims": head_dims,
    },
    **{f"src/kvbits/schemes/help/{page}.md": page_sections(page) for page in (*pages.METHODS, *pages.MODIFIERS)},
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
