"""The ablation of KVQuant (arXiv 2401.18079, table 1 and section 4) on a real model, and every method at 4, 3, 2 bits.

Two calibrations of one text, weighted by squared gradients and not; then perplexity and KL to the exact cache of each
step, through the cache in small chunks, as ``kvbits eval`` measures it. ``--altered`` measures models whose keys
have outlier channels or a large constant offset (see ``bench/altered.py``), each against its own exact cache.

    python bench/ablation.py --calibration-text valid.txt --text test.txt
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import altered
import torch
from common import prose, write

from kvbits.calibration import calibrate
from kvbits.hf.loading import load_model, load_tokenizer
from kvbits.measure.quality import CHUNK, LENGTH, WINDOWS, measure
from kvbits.measure.setting import SEED
from kvbits.measure.text import read, windows_of


def steps(bits: int) -> dict[str, str]:
    """One idea after the other, at so many bits: what is added, and the scheme with it."""
    if bits == 4:  # where all are close to exact
        return {"per token": "int4", "K per channel": "k=int4-channel-gs64,v=int4", "1 % outliers": "nuq4-1%"}
    static = f"k=int{bits}-calibrated,v=int{bits}"
    return {
        "per token": f"int{bits}",
        "both per channel": f"int{bits}-channel-gs64",
        "K per channel": f"k=int{bits}-channel-gs64,v=int{bits}",
        "K static per channel, after RoPE": f"{static},post-rope",
        "K static per channel, before RoPE": f"{static},pre-rope",
        "normal-float levels": f"k=nf{bits}-calibrated,v=nf{bits},pre-rope",
        "fitted levels": f"nuq{bits}",
        "1 % outliers": f"nuq{bits}-1%",
        "the same after RoPE": f"nuq{bits}-1%,post-rope",
        "the same without sinks": f"nuq{bits}-1%,sinks=0",
        "the same with Q-Norm": f"nuq{bits}-1%-qnorm",
    }


def others(bits: int) -> tuple[str, ...]:
    """The other methods of so many bits, which need no calibration."""
    kivi = f"k=int{bits}-channel,v=int{bits}-gs32"
    plain = (kivi, f"{kivi},pre-rope")
    rotated = (f"rot{bits}", f"rot{bits},centred", f"lm{bits}", f"lm{bits},centred,block=64")
    return (*plain, *rotated, f"lm{bits},centred,block=64,sinks=4+8")


WEIGHED = "without sensitivity"
ALTERED = ("int4", "kivi4", "rot4,centred", "lm4", "default", "small")


def fitted(model: Any, name: str, text: str, schemes: list[str], weighted: bool, folder: str) -> Path:
    """A calibration of 16 x 512 tokens."""
    options = dict(samples=16, length=512, weighted=weighted, out=folder)
    calibrate(model, text, schemes, tokenizer=load_tokenizer(name), **options)
    return Path(folder)


def rows_of(
    model: Any, windows: torch.Tensor, schemes: Sequence[str], chunk: int, calibration: Path | None = None
) -> list[dict[str, Any]]:
    """One row a scheme, and first that of the noise floor, as they come."""
    rows = measure(model, windows, schemes, chunk=chunk, calibration=calibration, tell=print).rows
    for row in rows:
        print(row, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--text", type=Path, help="a text file; default: Python's help topics")
    parser.add_argument("--windows", type=int, default=WINDOWS)
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--chunk", type=int, default=CHUNK)
    parser.add_argument("--calibration-text", type=Path, help="default: other topics")
    parser.add_argument("--bits", default="4,3,2")
    parser.add_argument("--altered", action="store_true")
    parser.add_argument("--out")
    options = parser.parse_args()
    torch.manual_seed(SEED)
    model = load_model(options.model, dtype=torch.float32)
    own = prose(600_000)
    text = read(options.text).content if options.text else own[:200_000]
    windows = windows_of(text, load_tokenizer(options.model), options.windows, options.length, placement="start")
    more = {name: getattr(options, name) for name in ("model", "windows", "length", "chunk")}
    more |= {"text": options.text.name if options.text else "pydoc_data.topics"}
    if options.altered:
        rows = [
            {"altered": f"{kind.__name__} {size}", **row}
            for kind, size in ((altered.scaled, 1), (altered.scaled, 8), (altered.scaled, 64), (altered.offset, 8))
            for row in rows_of(kind(model, size), windows, ALTERED, options.chunk)
        ]
        print(write(options.out or "altered", rows, **more))
        return
    other = read(options.calibration_text).content if options.calibration_text else own[200_000:]
    bits = [int(width) for width in options.bits.split(",")]
    calibrated = [scheme for b in bits for scheme in steps(b).values() if "nuq" in scheme or "-calibrated" in scheme]
    rows = []
    with tempfile.TemporaryDirectory() as weighted, tempfile.TemporaryDirectory() as plain:
        fitted(model, options.model, other, calibrated, True, weighted)
        fitted(model, options.model, other, [f"nuq{b}-1%" for b in bits], False, plain)
        for b in bits:
            named = steps(b)
            found = rows_of(model, windows, [*named.values(), *others(b)], options.chunk, Path(weighted))
            by_scheme = {scheme: step for step, scheme in named.items()}
            rows += [{"bits": b, "step": by_scheme.get(row["scheme"]), **row} for row in found]
            _, unweighted = rows_of(model, windows, [f"nuq{b}-1%"], options.chunk, Path(plain))
            rows.append({"bits": b, "step": WEIGHED, **unweighted})
    source = options.calibration_text.name if options.calibration_text else "pydoc_data.topics"
    print(write(options.out or "ablation", rows, **more, calibration=f"{source}, 16 x 512 tokens"))


if __name__ == "__main__":
    main()
