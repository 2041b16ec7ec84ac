"""A codec of your own, registered from outside: scales that are powers of two, as in the MX formats of OCP.

python examples/custom_codec.py [MODEL]
"""

import sys
from dataclasses import dataclass
from typing import ClassVar

import torch

import kvbits
from kvbits.codecs import Grouped, grouped_pattern, register


@register
@dataclass(frozen=True)
class PowerOfTwo(Grouped):
    """``po4``: affine codes of 4 or 8 bits with a scale that is a power of two. The bits lie as those of ``int4``."""

    name: ClassVar[str] = "po"
    allowed_bits: ClassVar[tuple[int, ...]] = (4, 8)
    dense_only = "its scales are chosen anew in every group"
    pattern = grouped_pattern("po", allowed_bits)
    examples = ("po4", "po8", "po4-gs32", "po4-channel")

    def choose(self, grouped, dim, weights, chosen):
        scale, zero = super().choose(grouped, dim, weights, chosen)
        power = scale.float().log2().ceil().exp2()  # up, so that the range still fits
        return power.to(scale.dtype), (zero.float() * scale.float() / power).to(zero.dtype)


def main(name: str = "smollm2") -> None:
    x = torch.randn(1, 2, 3, 128, 64, generator=torch.Generator().manual_seed(0))  # [B, H, blocks, T, D]
    for text in ("int4", "po4"):
        codec = kvbits.Scheme.parse(text).key
        error = (codec.decode(codec.encode(x, {}), {}) - x).square().mean().sqrt()
        print(f"{text}: error {error:.4f} at {codec.bits_per_element(128, 64):.2f} bits")

    model, tokenizer = kvbits.load_model(name), kvbits.load_tokenizer(name)
    prompt = tokenizer("One two three four five six seven eight. " * 40, return_tensors="pt")
    output = model.generate(**prompt, cache=kvbits.cache_for(model, "po4"), max_new_tokens=6, do_sample=False)
    print(tokenizer.decode(output[0, -6:]))
    print(kvbits.explain(model, "po4"))


if __name__ == "__main__":
    main(*sys.argv[1:])
