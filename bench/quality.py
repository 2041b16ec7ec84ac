"""How close each scheme stays to the exact cache: KL divergence and top-1 agreement, through the cache.

Text goes through the cache in small chunks, so every chunk attends to what was stored, not to the keys and values
just computed. The reference is the same model with Transformers' exact cache, chunk by chunk; its own row, the exact
cache in one piece, is the noise floor.

    python bench/quality.py --text book.txt --windows 4 --length 1024
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

import torch
from common import SEED, prose, write
from decode import make
from transformers import Cache

from kvbits.hf.attach import cache_name
from kvbits.hf.cache import KVCache
from kvbits.hf.loading import load_model, load_tokenizer

SCHEMES = "int8,fp8,kivi4,int4,nf4,hqq4,int3,kivi2,int2,hf:quanto4,hf:quanto2"


def log_probabilities(model: Any, ids: torch.Tensor, cache: Cache, chunk: int) -> torch.Tensor:
    """Next-token log probabilities ``[T, vocabulary]`` with ``ids [1, T]`` fed ``chunk`` tokens at a time."""
    rows = []
    for first in range(0, ids.shape[1], chunk):
        given = {"input_ids": ids[:, first : first + chunk], "use_cache": True, cache_name(model): cache}
        rows.append(model(**given).logits[0].float().log_softmax(-1))
    return torch.cat(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--schemes", default=SCHEMES, help="separated by semicolons or commas without options")
    parser.add_argument("--text", type=Path, help="a text file; default: Python's help topics")
    parser.add_argument("--text-name", help="what to call it in the results")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--chunk", type=int, default=16)
    parser.add_argument("--out", default="quality")
    options = parser.parse_args()
    torch.manual_seed(SEED)
    separator = ";" if ";" in options.schemes else ","
    schemes = options.schemes.split(separator)
    model = load_model(options.model, dtype=getattr(torch, options.dtype))
    text = options.text.read_text(encoding="utf-8") if options.text else prose(8 * options.windows * options.length)
    ids = load_tokenizer(options.model)(text, return_tensors="pt").input_ids
    windows = ids[0, : options.windows * options.length].unflatten(0, (options.windows, options.length))
    totals: dict[str, list[torch.Tensor]] = {scheme: [] for scheme in ["hf:dynamic", *schemes]}
    agree: dict[str, float] = dict.fromkeys(totals, 0.0)
    loss: dict[str, list[torch.Tensor]] = {scheme: [] for scheme in totals}
    bits: dict[str, float] = {}
    seconds: dict[str, float] = dict.fromkeys(totals, 0.0)
    with torch.no_grad():
        for window in windows:
            exact = log_probabilities(model, window[None], make(model, "hf:dynamic"), options.chunk)
            for scheme in totals:
                start = time.perf_counter()
                cache, chunk = make(model, scheme), options.chunk
                chunk = options.length if scheme == "hf:dynamic" else chunk
                found = log_probabilities(model, window[None], cache, chunk)
                seconds[scheme] += time.perf_counter() - start
                totals[scheme].append((exact.exp() * (exact - found)).sum(-1))
                loss[scheme].append(-found[:-1].gather(1, window[1:, None])[:, 0])
                agree[scheme] += float((exact.argmax(-1) == found.argmax(-1)).float().mean()) / len(windows)
                if isinstance(cache, KVCache):
                    bits[scheme] = cache.bits_per_element
    rows = []
    for scheme, values in totals.items():
        kl, nll = torch.cat(values), torch.cat(loss[scheme])
        rows.append(
            {
                "scheme": scheme,
                "kl_mean": float(kl.mean()),
                "kl_median": float(kl.median()),
                "kl_p999": float(kl.quantile(0.999)),
                "top1": agree[scheme],
                "ppl": math.exp(float(nll.mean())),
                "ppl_se": math.exp(float(nll.mean())) * float(nll.std()) / math.sqrt(len(nll)),
                "bits_per_element": bits.get(scheme),
                "seconds": seconds[scheme],
            }
        )
        print(rows[-1], flush=True)
    more = {name: getattr(options, name) for name in ("model", "dtype", "windows", "length", "chunk")}
    text_name = options.text_name or (options.text.name if options.text else "pydoc_data.topics")
    print(write(options.out, rows, **more, text=text_name))


if __name__ == "__main__":
    main()
