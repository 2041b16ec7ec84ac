"""What the compiler makes of the Triton encoder: registers, spills, shared memory and instructions. Needs no GPU.

One kernel for each kind of codec, compiled ahead of time for each architecture, as blocks of Llama-3-8B (head_dim 128,
bfloat16) would launch it. A program encodes one block.

    python bench/gpu_compile_encode.py     # needs triton; writes bench/results/gpu_compile_encode.json
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from gpu_compile import Lowering, compile_all, machine_code, parser, spills
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvbits.attend.triton.shape import UNROPED_KEYS, UNROPED_MEAN
from kvbits.encode.triton import kernel as triton_kernel
from kvbits.encode.triton.shape import Before, Shape, warps_of
from kvbits.numerics import hadamard
from kvbits.schemes.names import parse_codec

CODECS = (
    "int8,int4,int3,int2,int4-channel,int2-channel,nf4,lm4,lm2,fp8,fp8-static,int4-static,hqq4,hqq2,hqq4-channel,"
    "int4-1%,nf3-1%,int4-channel-1%,nuq4-static,nuq3-token-1%,nuq3-static-1%,"
    "lm4 rotated,int4 rotated,lm4 centred,lm2 centred,int4 pre-rope,int4-channel pre-rope,nuq3-static-1% pre-rope"
)
"""Codecs, and what is done to elements first: a rotation; a roped mean taken off, and a rotation; the rotary
embedding taken off."""

WAYS = ("", "rotated", "centred", "pre-rope")
POINTERS = {
    **{"unsound": "*i32", "codes_out": "*u8", "scale_out": "*bf16", "zero_out": "*fp16", "index_out": "*u16"},
    **{"value_out": "*bf16", "scratch": "*i16"},
    **dict.fromkeys(("table", "given_scale", "given_zero", "mean", "balance", "signs"), "*fp32"),
    **dict.fromkeys(("base_cos", "base_sin", "step_cos", "step_sin"), "*fp32"),
}
ELEMENTS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
CHECKED = (
    ("int4", 64, 128, torch.bfloat16),
    ("int3-channel", 32, 80, torch.float32),
    ("int8-1%", 16, 112, torch.float16),
    ("nf3-gs16-1%", 128, 96, torch.bfloat16),
    ("nuq2-static-1%-qnorm", 64, 80, torch.float32),
    ("nuq4-channel", 32, 64, torch.bfloat16),
    ("int4-static", 64, 128, torch.float16),
    ("hqq2", 64, 80, torch.bfloat16),
    ("hqq8-channel", 64, 128, torch.float32),
    ("fp8", 64, 65, torch.bfloat16),
    ("fp8-calibrated", 64, 128, torch.bfloat16),
    ("lm3", 64, 96, torch.bfloat16),
    ("lm4 centred", 64, 128, torch.bfloat16),
    ("nuq2-static-1% pre-rope", 64, 80, torch.float16),
    ("int4-channel rotated", 64, 96, torch.bfloat16),
)
"""Codec, tokens, head_dim and dtype: together every branch of the kernel."""


def source_of(name: str, tokens: int, channels: int, dtype: torch.dtype) -> tuple[ASTSource, int]:
    """The kernel that encodes such blocks, and its warps."""
    codec, _, way = name.partition(" ")
    shape, before = Shape.of(parse_codec(codec), tokens, channels), before_of(way, channels)
    names = triton_kernel.encode_block.arg_names
    kinds = {"x": ELEMENTS[dtype], "limit": "fp32", "SHAPE": "constexpr", "BEFORE": "constexpr", **POINTERS}
    aligned = {"x", *POINTERS, "s_a", "s_b", "s_c", "s_t"} if channels % 16 == 0 else {"x", *POINTERS}
    source = ASTSource(
        fn=triton_kernel.encode_block,
        signature={name: kinds.get(name, "i32") for name in names},
        constexprs={"SHAPE": shape, "BEFORE": before},
        attrs={(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in aligned},
    )
    return source, warps_of(shape, before)


def before_of(way: str, channels: int) -> Before:
    """What is done to keys or values of Llama first: ``way`` is one of ``WAYS``."""
    if way not in WAYS:
        raise ValueError(f"{way!r} is none of {', '.join(WAYS[1:])}")
    half, rotated = channels // 2, hadamard.block_of(channels)
    return {
        "": Before(),
        "rotated": Before(rotated=rotated),
        "centred": Before(UNROPED_MEAN, half, mean=True, balance=True, rotated=rotated),
        "pre-rope": Before(UNROPED_KEYS, half),
    }[way]


def check_variants() -> None:
    """Lower each variant: see :func:`gpu_compile.check_variants`."""
    lower = Lowering()
    for case in CHECKED:
        lower(source_of(*case)[0])
        print(f"{case[0]}: lowers", flush=True)


def row_for(name: str, tokens: int, channels: int, capability: int) -> dict[str, Any]:
    """Compile one codec for one architecture and count."""
    source, warps = source_of(name, tokens, channels, torch.bfloat16)
    options = {"num_warps": warps, "enable_fp_fusion": False}
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    registers, stack, instructions, loop = machine_code(kernel.asm["cubin"])
    return {
        "codec": name,
        "architecture": f"sm_{capability}",
        "warps": warps,
        "registers": registers,
        "stack_bytes": stack,
        "spills": spills(instructions),
        "shared_bytes": kernel.metadata.shared,
        "programs_a_multiprocessor": min(65536 // (registers * 32 * warps), 2048 // (32 * warps)),
        "instructions": len(instructions),
        "instructions_in_longest_loop": len(loop),
    }


def main() -> None:
    arguments = parser(__doc__, "codecs", CODECS, "gpu_compile_encode")
    arguments.add_argument("--tokens", type=int, default=64, help="of a block")
    options = arguments.parse_args()
    if options.check:
        check_variants()
        return
    compile_all(
        options.codecs, options, lambda name, capability: row_for(name, options.tokens, options.channels, capability),
        tokens=options.tokens,
    )  # fmt: skip


if __name__ == "__main__":
    main()
