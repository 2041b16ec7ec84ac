"""Which scheme is right for your model and your text: error against the exact cache, beside the bytes.

python examples/choose_scheme.py [MODEL] [TEXT FILE]

``kvbits eval`` does this with windows, confidence and resumption; this is the idea in a loop.
"""

import sys
from pathlib import Path

import torch

import kvbits

SCHEMES = ("exact", "int8", "default", "small")
TOKENS, CHUNK = 400, 100


def main(name: str = "smollm2", text: str = "") -> None:
    model, tokenizer = kvbits.load_model(name), kvbits.load_tokenizer(name)
    words = Path(text).read_text(encoding="utf-8") if text else (torch.__doc__ or "") + (Path(__file__).read_text() * 4)
    ids = tokenizer(words, return_tensors="pt").input_ids[:, :TOKENS]
    exact = None
    for scheme in SCHEMES:
        cache = kvbits.cache_for(model, scheme)
        with torch.no_grad():  # chunks, so that later tokens see what was packed
            parts = [model(part, cache=cache).logits for part in ids.split(CHUNK, dim=1)]
        log_p = torch.cat(parts, dim=1).float().log_softmax(-1)
        exact = log_p if exact is None else exact
        kl = (exact.exp() * (exact - log_p)).sum(-1).mean().item()
        print(f"{scheme:8} {cache.nbytes.total / 1e6:6.1f} MB   KL to exact {abs(kl):.5f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
