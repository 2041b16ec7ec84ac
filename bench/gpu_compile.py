"""What the compiler makes of the Triton kernels: registers, spills, shared memory and instructions. Needs no GPU.

Kernels are compiled ahead of time for each architecture, as a decode step of Llama-3-8B (8 KV heads of 4 query heads,
head_dim 128, bfloat16) would launch them. The loop over blocks is read from the machine code, and set beside the bytes
that it must read: a roofline on paper. It says what cannot be reached, never what is reached.

    python bench/gpu_compile.py            # needs triton; writes bench/results/gpu_compile.json
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
from common import write
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend

from kvbits.attend.triton import decode as triton_decode
from kvbits.attend.triton import kernel as triton_kernel
from kvbits.attend.triton.shape import Flags, Roping, Shape, shape_for, static_zero
from kvbits.attend.triton.tuning import tuning_for
from kvbits.schemes.scheme import Scheme
from kvbits.store.record import Record
from kvbits.transform import UNROPED_KEYS, UNROPED_MEAN

SCHEMES = "int8,fp8,fp8-static,int4,kivi4,nf4,int3,int2,kivi2,default,small,nuq4,nuq3,nuq2,nuq3-1%"
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
PEAK = {"name": "H200", "multiprocessors": 132, "clock_ghz": 1.98, "copy_tb_s": 4.3, "schedulers": 4}
"""What the paper roofline is drawn for: clock and copy bandwidth as such a card was once seen to have them."""

EXACT = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
PARAMS = ("*fp32", "*fp32", "*bf16")
GROUPS: dict[str, Any] = {
    "pools": ("*i16", "*i32", "*bf16", "*fp16"),
    "lookup": ("*i64", "*i32", "*i32", "*i64"),
    "mask": "*u8",
    **dict.fromkeys(("key_params", "value_params"), PARAMS),
    "angles": ("*fp32", "*fp32", "*bf16", "*bf16"),
    "key_mean": "*fp32",
    "found": ("*fp32",) * 3,
    "sizes": ("i32",) * 3,
    "strides": (("i32",) * 3,) * 4,
    "scores": ("fp32", "fp32"),
}
"""Types of the arguments of ``attend_split`` that are not plain numbers, but for those of the dtype."""

UNALIGNED = (("strides", 0, 2), ("strides", 1, 2))  # of a query of one token


def aligned(names: list[str], kinds: dict[str, Any]) -> dict[tuple[int, ...], list[list[Any]]]:
    """That pointers and strides are multiples of 16, as a launch would find."""

    def paths(kind: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        if isinstance(kind, tuple):
            for place, each in enumerate(kind):
                yield from paths(each, (*path, place))
        elif (kind.startswith("*") or path[0] == "strides") and path not in UNALIGNED:
            yield path

    found = (path for name in names for path in paths(kinds[name], (name,)))
    return {(names.index(name), *rest): [["tt.divisibility", 16]] for name, *rest in found}


def source_of(
    scheme: Scheme, channels: int, groups: int, capability: int, dtype: torch.dtype = torch.bfloat16, **changed: Any
) -> tuple[ASTSource, Shape, Record]:
    """The kernel of one decode step, its tiles, and the record it reads; ``changed`` are other flags."""
    key, value = scheme.key.format, scheme.value.format
    record = Record.of(scheme.key, scheme.value, scheme.block, channels, channels, dtype)
    tuning = tuning_for(f"sm_{capability}", max(key.bits, value.bits), "channel" in (key.per, value.per))
    roping = Roping()
    if scheme.pre_rope or scheme.centred:
        what = UNROPED_KEYS if scheme.pre_rope else UNROPED_MEAN
        roping = Roping.of(
            what, scheme.centred or (scheme.pre_rope and static_zero(key)), channels // 2, False, channels
        )
    shape = shape_for(record, key, value, channels, channels, groups, triton_decode.PARTS[dtype], tuning, roping.kind)
    flags = replace(Flags(groups), **changed)
    constants = {"KEY": shape.key, "VALUE": shape.value, "TILE": shape.tile, "ROPE": roping, "FLAGS": flags}
    names = triton_kernel.attend_split.arg_names
    exact = EXACT[dtype]
    kinds = {
        **dict.fromkeys(names, "i32"), **GROUPS, **dict.fromkeys(constants, "constexpr"),
        "query": "*fp32" if scheme.key.rotates else exact, "exact": (exact,) * 3,
    }  # fmt: skip
    source = ASTSource(
        fn=triton_kernel.attend_split, signature=kinds, constexprs=constants, attrs=aligned(names, kinds)
    )
    return source, shape, record


def compiled(scheme: Scheme, channels: int, groups: int, capability: int) -> tuple[Any, Shape, Record]:
    """The compiled kernel of one decode step in bfloat16, its tiles, and the record it reads."""
    source, shape, record = source_of(scheme, channels, groups, capability)
    tuning = shape.tuning
    options: dict[str, Any] = {"num_warps": tuning.warps, "num_stages": tuning.stages}
    if tuning.registers:
        options["maxnreg"] = tuning.registers
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options), shape, record


VARIANTS: tuple[tuple[str, int, torch.dtype, dict[str, Any]], ...] = (
    ("int4", 128, torch.bfloat16, {}),
    ("default", 128, torch.bfloat16, {}),
    ("small", 80, torch.float32, {"softcap": True, "ragged": True}),
    ("lm3,centred", 96, torch.float16, {"mask": 2, "padded": True, "plain": False, "single": False}),
    ("kivi2", 112, torch.float32, {"mask": 1, "window": True, "plain": False, "in_order": False}),
    ("int3-channel-1%,centred", 64, torch.bfloat16, {}),
    ("fp8-static,centred", 64, torch.float16, {}),
    ("nuq4-1%", 64, torch.float32, {}),
    ("kivi4,pre-rope,centred", 64, torch.bfloat16, {}),
    ("int8-static", 64, torch.bfloat16, {}),
)
"""Scheme, head_dim, dtype and flags: together every branch of the kernel."""


def check_variants() -> None:
    """Lower each variant: what the interpreter lets pass and the compiler does not, before anything is optimised."""
    lower = Lowering()
    for name, channels, dtype, changed in VARIANTS:
        lower(source_of(Scheme.parse(name), channels, 4, 90, dtype, **changed)[0])
        print(f"{name}: lowers", flush=True)


class Lowering:
    """Lowers sources to Triton's own code for sm_90, and no further."""

    def __init__(self) -> None:
        self.backend = make_backend(GPUTarget("cuda", 90, 32))
        self.context = ir.context()
        ir.load_dialects(self.context)
        self.backend.load_dialects(self.context)

    def __call__(self, source: ASTSource) -> None:
        backend, options = self.backend, self.backend.parse_options({})
        target, made = backend.target, (backend.get_codegen_implementation(options), backend.get_module_map())
        source.make_ir(target, options, *made, self.context)


def machine_code(cubin: bytes) -> tuple[int, int, list[str], list[str]]:
    """Registers, bytes of stack, all instructions, and those of the longest loop."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run([TOOLS / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True).stdout
        listing = subprocess.run([TOOLS / "nvdisasm", "-c", file.name], capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    labels, instructions, loops = {}, [], [(0, 0)]
    for line in listing.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif code := re.match(r"\s+/\*[0-9a-f]+\*/\s+(.*?);", line):
            instructions.append(re.sub(r"^@!?U?P\w+\s+", "", code[1]))
            back = re.search(r"BRA.*?(\.L_x_\d+)", code[1])
            if back and back[1] in labels:
                loops.append((labels[back[1]], len(instructions)))
    first, last = max(loops, key=lambda loop: loop[1] - loop[0])
    return int(found[1]), int(found[2]), instructions, instructions[first:last]


def spills(instructions: list[str]) -> int:
    """Loads and stores of what did not fit into registers."""
    return sum(op.startswith(("LDL", "STL")) for op in instructions)


def row_for(name: str, channels: int, groups: int, capability: int) -> dict[str, Any]:
    """Compile one scheme for one architecture and count."""
    scheme = Scheme.parse(name)
    kernel, shape, record = compiled(scheme, channels, groups, capability)
    registers, stack, _, loop = machine_code(kernel.asm["cubin"])
    warps = shape.tuning.warps
    per_block = len(loop) * warps / shape.tile.blocks
    operations = 4 * scheme.block * channels * shape.tile.queries  # both products, for the padded query rows
    bytes_a_clock = record.nbytes / (per_block / PEAK["schedulers"])
    needed = PEAK["copy_tb_s"] * 1e3 / PEAK["multiprocessors"] / PEAK["clock_ghz"]
    return {
        "scheme": name,
        "architecture": f"sm_{capability}",
        "registers": registers,
        "stack_bytes": stack,
        "spills_in_loop": spills(loop),
        "shared_bytes": kernel.metadata.shared,
        "programs_a_multiprocessor": min(65536 // (registers * 32 * warps), 2048 // (32 * warps)),
        "barriers_in_loop": sum(op.startswith("BAR") for op in loop),
        "matrix_instructions_in_loop": sum(op.startswith(("HGMMA", "HMMA")) for op in loop),
        "warp_instructions_a_block": per_block,
        "bytes_a_block": record.nbytes,
        "tokens_a_block": scheme.block,
        "matrix_operations_a_block": operations,
        "operations_a_byte": operations / record.nbytes,
        "paper_share_of_copy_bandwidth": min(1.0, bytes_a_clock / needed),
    }


def parser(description: str, what: str, names: str, out: str) -> argparse.ArgumentParser:
    """Options of the scripts that compile ahead of time; ``names`` are the default of option ``--what``."""
    made = argparse.ArgumentParser(description=description.splitlines()[0])
    made.add_argument(f"--{what}", default=names, help="separated by commas")
    made.add_argument("--capabilities", default="80,89,90")
    made.add_argument("--channels", type=int, default=128)
    made.add_argument("--out", default=out)
    made.add_argument("--check", action="store_true", help="only lower one variant of each kind: seconds, no figures")
    return made


def compile_all(
    names: str, options: argparse.Namespace, row: Callable[[str, int], dict[str, Any]], **more: Any
) -> None:
    """Write the rows of all ``names`` for all architectures; ``row`` makes one."""
    rows = []
    for capability in map(int, options.capabilities.split(",")):
        for name in names.split(","):
            rows.append(row(name, capability))
            print(rows[-1], flush=True)
    print(write(options.out, rows, measured=False, triton=triton.__version__, channels=options.channels, **more))


def main() -> None:
    arguments = parser(__doc__, "schemes", SCHEMES, "gpu_compile")
    arguments.add_argument("--groups", type=int, default=4, help="query heads of a KV head")
    options = arguments.parse_args()
    if options.check:
        check_variants()
        return
    compile_all(
        options.schemes, options, lambda name, capability: row_for(name, options.channels, options.groups, capability),
        groups=options.groups, paper=PEAK,
    )  # fmt: skip


if __name__ == "__main__":
    main()
