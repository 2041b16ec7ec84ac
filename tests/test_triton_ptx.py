"""The PTX that turns codes into bfloat16, run instruction by instruction on every 16-bit unit.

Triton's interpreter takes the portable path instead, so without a GPU nothing else would look at these lines. The text
is read from the kernel's source: neither Triton nor a GPU is needed.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import kvbits.attend
from kvbits.numerics import float8

SOURCE = (Path(kvbits.attend.__file__).parent / "triton_kernel" / "codes.py").read_text(encoding="utf-8")
BLOCKS = re.findall(r'inline_asm_elementwise\(\s*f"""(.*?)"""', SOURCE, re.DOTALL)

UNITS = torch.arange(2**16)
WORDS = UNITS | (UNITS.flip(0) << 16)  # two units to a register, as the compiler packs them


def ptx(sign: str, names: dict[str, int]) -> list[list[str]]:
    """Instructions of the block with ``sign`` in it, its constants filled in."""
    found = [block for block in BLOCKS if sign in block]
    assert len(found) == 1, f"{len(found)} blocks have {sign!r}"
    text = eval(f'f"""{found[0]}"""', {}, names)
    lines = [line.strip() for line in text.strip().strip("{}").split(";")]
    return [re.split(r"[ ,]+", line) for line in lines if line and not line.startswith(".reg")]


def bf16(bits: torch.Tensor) -> torch.Tensor:
    """Values of bfloat16 bits, as float64."""
    return (bits.int() << 16).view(torch.float32).double()


def run(program: list[list[str]], **inputs: torch.Tensor) -> torch.Tensor:
    """Run on int64 registers; returns register ``$0``."""
    registers = dict(inputs)

    def value(name: str) -> torch.Tensor:
        if re.fullmatch(r"0x[0-9A-F]+|\d+", name):
            return torch.tensor(int(name, 0))
        return registers[name]

    for opcode, target, *names in program:
        given = [value(name) for name in names]
        if opcode == "mov.b32":
            result = given[0]
        elif opcode == "shr.b32":
            result = given[0] >> given[1]
        elif opcode == "shl.b32":
            result = given[0] << given[1]
        elif opcode == "and.b32":
            result = given[0] & given[1]
        elif opcode == "or.b32":
            result = given[0] | given[1]
        elif opcode == "lop3.b32":
            assert names[3] == "0xEA"  # the table of (a & b) | c
            result = (given[0] & given[1]) | given[2]
        elif opcode == "fma.rn.bf16x2":
            halves = []
            for shift in (0, 16):
                a, b, c = (bf16((x >> shift) & 0xFFFF) for x in given)
                exact = a * b + c
                bits = exact.to(torch.bfloat16)
                assert torch.equal(bits.double().nan_to_num(), exact.nan_to_num())  # nothing is rounded
                halves.append((bits.view(torch.int16).long() & 0xFFFF) << shift)
            result = halves[0] | halves[1]
        else:
            raise AssertionError(f"unknown instruction {opcode}")
        registers[target] = result & 0xFFFFFFFF
    return registers["$0"]


def levels(sign: str, word: torch.Tensor = WORDS, **names: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a block makes of the lower and of the upper unit of each word."""
    more = {"$2": names.pop("top"), "$3": names.pop("by")} if "by" in names else {}
    out = run(ptx(sign, names), **{"$1": word, **{key: torch.as_tensor(x) for key, x in more.items()}})
    return bf16(out & 0xFFFF), bf16(out >> 16)


def byte(parity: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The byte of one parity in the lower and in the upper unit."""
    return (WORDS >> (8 * parity)) & 0xFF, (WORDS >> (16 + 8 * parity)) & 0xFF


@pytest.mark.parametrize("parity", (0, 1))
@pytest.mark.parametrize(
    ("bits", "slot", "fields"), [(4, 0, 0), (4, 1, 0), *((2, s, f) for s in range(4) for f in (0, 1))]
)
def test_uniform_codes(bits: int, slot: int, fields: int, parity: int) -> None:
    up = 2 ** (slot * 2 % 6 * fields)
    for got, held in zip(
        levels(".b32 moved", BITS=bits, SLOT=slot, PARITY=parity, FIELDS=fields), byte(parity), strict=True
    ):
        code = (held >> (bits * slot)) & (2**bits - 1)
        assert torch.equal(got, 128.0 + up * code)


@pytest.mark.parametrize("parity", (0, 1))
def test_bytes(parity: int) -> None:
    for got, held in zip(levels(".b32 byte", PARITY=parity), byte(parity), strict=True):
        assert torch.equal(got, held.double())


@pytest.mark.parametrize("parity", (0, 1))
def test_e4m3(parity: int) -> None:
    """Subnormals too; the two codes of NaN are never written."""
    table = float8.decode_table().double()
    for got, held in zip(levels(".b32 sign", PARITY=parity), byte(parity), strict=True):
        real = (held & 0x7F) != 0x7F
        assert torch.equal(got[real], table[held[real]])


@pytest.mark.parametrize("parity", (0, 1))
@pytest.mark.parametrize("slot", range(4))
@pytest.mark.parametrize("half", (0, 1))
def test_three_bits(half: int, slot: int, parity: int) -> None:
    """Two bits from one plane, the top bit from the other, where a row's shift says."""
    top, by = WORDS.flip(0), 2 * slot + half
    both = levels(".b32 bottom, top, by", SLOT=slot, PARITY=parity, top=top, by=by | (by << 16))
    for got, held, unit in zip(both, byte(parity), (0, 16), strict=True):
        code = ((held >> (2 * slot)) & 3) | (((top >> (unit + 8 * parity + by)) & 1) << 2)
        assert torch.equal(got, 128.0 + code)


def test_every_block_is_tested() -> None:
    assert len(BLOCKS) == 4
