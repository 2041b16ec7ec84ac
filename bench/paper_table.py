"""Every row of KVQuant's table of perplexities (arXiv 2401.18079, table 4) on one model: int, nf and nuq at few bits.

Keys and values per token under ``int`` and ``nf``; ``nuq`` has keys per channel before the rotary embedding, fitted
levels, and 1 % outliers where the name says so. All schemes have the paper's one exact first token, and no exact recent
tokens but those that wait for a block of 32. The paper's own tables keep none of those either; but there a text is read
in one piece by a model whose keys and values are replaced, and here it goes through the cache in chunks.

At head_dim 64 a group of 64 channels is all that a token has in a head: ``int4`` (in the paper one group over all
heads), ``int4-gs64`` and ``int4-gs128`` are one layout in kvbits, measured once. ``-gs32`` is the finer group that is
left.

    python bench/paper_table.py --calibration DIR --text wikitext2=test.txt --text c4=c4.jsonl
"""

from __future__ import annotations

from typing import Any

import torch
from common import write
from texts import OnTexts

from kvbits.hf.loading import load_config
from kvbits.plan import paper
from kvbits.plan.shapes import Attention

EXACT_PART = ",residual=0,sinks=1,block=32"
PAPER_TOKENS = 2048
"""Context of the paper's perplexities; its bits count the static scales over so many tokens."""


def rows_of_paper() -> dict[str, tuple[str, ...]]:
    """Schemes of kvbits, and the paper's names for what each of them stores on a model with head_dim 64."""
    table: dict[str, tuple[str, ...]] = {"exact": ("fp16",)}
    for bits in (4, 3, 2):
        for method in ("int", "nf"):
            name = f"{method}{bits}"
            table[name] = (name, f"{name}-gs128", f"{name}-gs64")
            table[f"{name}-gs32"] = (f"{name}-gs32",)
        table[f"nuq{bits}"] = (f"nuq{bits}",)
        table[f"nuq{bits}-1%"] = (f"nuq{bits}-1%",)
    return table


def rows_with_names(texts: OnTexts) -> list[dict[str, Any]]:
    """One row for each scheme on each text."""
    config = load_config(texts.model)
    attention = Attention(config.num_key_value_heads, config.head_dim, config.head_dim, torch.float16, torch.float16)
    table = {f"{scheme}{'' if scheme == 'exact' else EXACT_PART}": names for scheme, names in rows_of_paper().items()}
    rows = []
    for row in texts.rows(list(table)):
        names = table.get(row["scheme"], (row["scheme"],))
        counted = {
            each: paper.bits(paper.Named.parse(each), attention, PAPER_TOKENS) for each in names if each in PAPER
        }
        rows.append({"names": list(names), "paper_bits": counted, **row})
    return rows


PAPER = {name for names in rows_of_paper().values() for name in names if not name.endswith("-gs32")}
"""What has a row in the paper's table."""


def main() -> None:
    parser = OnTexts.parser((__doc__ or "").splitlines()[0])
    parser.set_defaults(out="paper_table")
    options = parser.parse_args()
    texts = OnTexts.of(options)
    rows = rows_with_names(texts)
    print(write(options.out, rows, **texts.setting))
    for row in rows:
        counted = ", ".join(f"{name} {bits:.2f}" for name, bits in row["paper_bits"].items())
        print(f"{row['text']:10} {row['scheme']:34} ppl {row['ppl']:.2f} KL {row['kl_mean']:.5f} "
              f"real bits {row['bits_at_8000']} paper: {counted or '-'}")  # fmt: skip


if __name__ == "__main__":
    main()
