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
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import prose, write
from transformers import Cache

from kvbits.cache import LayerCache
from kvbits.hf.attach import cache_name
from kvbits.hf.cache import KVCache
from kvbits.hf.loading import load_model, load_tokenizer
from kvbits.measure.caches import make
from kvbits.measure.setting import SEED
from kvbits.rotary import Rotary
from kvbits.scheme import Scheme, split_schemes

SCHEMES = "int8,fp8,kivi4,int4,nf4,hqq4,int3,kivi2,int2,hf:quanto4,hf:quanto2"
BITS_AT = 8000
"""Tokens at which the bits per element are counted, everything that a layer allocates included."""


def log_probabilities(model: Any, ids: torch.Tensor, cache: Cache, chunk: int) -> torch.Tensor:
    """Next-token log probabilities ``[T, vocabulary]`` with ``ids [1, T]`` fed ``chunk`` tokens at a time."""
    rows = []
    for first in range(0, ids.shape[1], chunk):
        given = {"input_ids": ids[:, first : first + chunk], "use_cache": True, cache_name(model): cache}
        rows.append(model(**given).logits[0].float().log_softmax(-1))
    return torch.cat(rows)


def divergence(exact: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """KL from ``exact`` to ``found``, log probabilities ``[T, vocabulary]``, in nats for each token."""
    return (exact.exp() * (exact - found)).sum(-1)


def windows_of(model_name: str, text: str, windows: int, length: int) -> torch.Tensor:
    """The first tokens of ``text``, int64 ``[windows, length]``."""
    ids = load_tokenizer(model_name)(text, return_tensors="pt").input_ids[0]
    if len(ids) < windows * length:
        raise SystemExit(f"the text has {len(ids)} tokens, not {windows} x {length}")
    return ids[: windows * length].unflatten(0, (windows, length))


def bits_at(model: Any, scheme: str, tokens: int = BITS_AT) -> float:
    """Bits per element that one layer of the model's shape really allocates after a prompt, in bfloat16."""
    config = model.config.get_text_config(decoder=True)
    channels = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotary = Rotary(10_000 ** -(torch.arange(channels // 2) / (channels // 2)))
    generator = torch.Generator().manual_seed(SEED)
    prompt = torch.randn(2, 1, config.num_key_value_heads, tokens, channels, generator=generator).bfloat16()
    layer = LayerCache(replace(Scheme.parse(scheme), overrides=()), rotary=rotary)
    layer.append(*prompt)
    return 8 * sum(layer.nbytes().values()) / layer.elements


def measure(
    model: Any, windows: torch.Tensor, schemes: Sequence[str], chunk: int, calibration: Path | None = None
) -> list[dict[str, Any]]:
    """One row a scheme: its KL to the exact cache over ``windows [W, T]``, fed ``chunk`` tokens at a time."""
    totals: dict[str, list[torch.Tensor]] = {scheme: [] for scheme in ["hf:dynamic", *schemes]}
    agree: dict[str, float] = dict.fromkeys(totals, 0.0)
    loss: dict[str, list[torch.Tensor]] = {scheme: [] for scheme in totals}
    seconds: dict[str, float] = dict.fromkeys(totals, 0.0)
    packed: dict[str, float] = {}
    with torch.no_grad():
        for window in windows:
            exact = log_probabilities(model, window[None], make(model, "hf:dynamic"), chunk)
            for scheme in totals:
                start = time.perf_counter()
                cache = make(model, scheme, calibration)
                # The exact cache in one piece: the noise floor.
                step = windows.shape[1] if scheme == "hf:dynamic" else chunk
                found = log_probabilities(model, window[None], cache, step)
                seconds[scheme] += time.perf_counter() - start
                totals[scheme].append(divergence(exact, found))
                loss[scheme].append(-found[:-1].gather(1, window[1:, None])[:, 0])
                agree[scheme] += float((exact.argmax(-1) == found.argmax(-1)).float().mean()) / len(windows)
                if isinstance(cache, KVCache):
                    packed[scheme] = bits_at(model, scheme)
    rows = []
    for scheme, values in totals.items():
        kl, nll = torch.cat(values), torch.cat(loss[scheme])
        by_window = torch.stack([value.mean() for value in values])
        rows.append(
            {
                "scheme": scheme,
                "kl_mean": float(kl.mean()),
                "kl_se": float(by_window.std() / math.sqrt(len(by_window))) if len(by_window) > 1 else None,
                "kl_median": float(kl.median()),
                "kl_p999": float(kl.quantile(0.999)),
                "top1": agree[scheme],
                "ppl": math.exp(float(nll.mean())),
                "ppl_se": math.exp(float(nll.mean())) * float(nll.std()) / math.sqrt(len(nll)),
                f"bits_at_{BITS_AT}": packed.get(scheme),
                "seconds": seconds[scheme],
            }
        )
        print(rows[-1], flush=True)
    return rows


def parser_of(description: str) -> argparse.ArgumentParser:
    """The options of what is measured over windows of a text."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--text", type=Path, help="a text file; default: Python's help topics")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--chunk", type=int, default=16)
    return parser


def main() -> None:
    parser = parser_of(__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--schemes", default=SCHEMES, help="separated by semicolons or commas without options")
    parser.add_argument("--calibration", type=Path, help="folder that 'kvbits calibrate' wrote")
    parser.add_argument("--text-name", help="what to call it in the results")
    parser.add_argument("--out", default="quality")
    options = parser.parse_args()
    torch.manual_seed(SEED)
    schemes = split_schemes(options.schemes)
    model = load_model(options.model, dtype=getattr(torch, options.dtype))
    text = options.text.read_text(encoding="utf-8") if options.text else prose(8 * options.windows * options.length)
    windows = windows_of(options.model, text, options.windows, options.length)
    rows = measure(model, windows, schemes, options.chunk, options.calibration)
    more = {name: getattr(options, name) for name in ("model", "dtype", "windows", "length", "chunk")}
    text_name = options.text_name or (options.text.name if options.text else "pydoc_data.topics")
    print(write(options.out, rows, **more, text=text_name))


if __name__ == "__main__":
    main()
