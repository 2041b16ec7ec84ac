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
from kvbits.attend.triton.decode import table_parts
from kvbits.numerics import float8

FOLDER = Path(kvbits.attend.__file__).parent / "triton" / "kernel"
SOURCE = "".join((FOLDER / name).read_text(encoding="utf-8") for name in ("codes.py", "tables.py"))
BLOCKS = re.findall(r'inline_asm_elementwise\(\s*f?"""(.*?)"""', SOURCE, re.DOTALL)

TRUTH = {
    "0xEA": lambda a, b, c: (a & b) | c,
    "0xD8": lambda a, b, c: (a & ~c) | (b & c),
    "0xE2": lambda a, b, c: (a & b) | (c & ~b),
}
"""What the tables of ``lop3`` stand for."""

UNITS = torch.arange(2**16)
WORDS = UNITS | (UNITS.flip(0) << 16)  # two units to a register, as the compiler packs them


def ptx(sign: str, names: dict[str, int]) -> list[list[str]]:
    """Instructions of the block with ``sign`` in it, its constants filled in."""
    found = [block for block in BLOCKS if sign in block]
    assert len(found) == 1, f"{len(found)} blocks have {sign!r}"
    text = eval(f'f"""{found[0]}"""', {}, names) if "{{" in found[0] else found[0]
    lines = [line.strip() for line in text.strip().strip("{}").split(";")]
    return [re.split(r"[ ,]+", line) for line in lines if line and not line.startswith(".reg")]


def bf16(bits: torch.Tensor) -> torch.Tensor:
    """Values of bfloat16 bits, as float64."""
    return (bits.int() << 16).view(torch.float32).double()


def permute(a: torch.Tensor, b: torch.Tensor, selector: torch.Tensor) -> torch.Tensor:
    """``prmt.b32``: each nibble of the selector names a byte of ``b:a``; its top bit spreads that byte's sign."""
    both, result = a | (b << 32), torch.zeros_like(a | b | selector)
    for place in range(4):
        nibble = (selector >> (4 * place)) & 0xF
        byte = (both >> (8 * (nibble & 7))) & 0xFF
        result |= torch.where(nibble >= 8, 0xFF * (byte >> 7), byte) << (8 * place)
    return result


def run(program: list[list[str]], rounds: bool = False, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Run on int64 registers; returns all of them. Nothing may be rounded unless ``rounds``."""
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
            truth = TRUTH[names[3]]
            assert sum(1 << i for i in range(8) if truth(i >> 2 & 1, i >> 1 & 1, i & 1)) == int(names[3], 0)
            result = truth(*given[:3])
        elif opcode == "prmt.b32":
            result = permute(*given)
        elif opcode == "mad.lo.u32":
            result = given[0] * given[1] + given[2]
        elif opcode == "fma.rn.bf16x2":
            halves = []
            for shift in (0, 16):
                a, b, c = (bf16((x >> shift) & 0xFFFF) for x in given)
                exact = a * b + c
                bits = exact.to(torch.bfloat16)
                if not rounds:
                    assert torch.equal(bits.double().nan_to_num(), exact.nan_to_num())
                halves.append((bits.view(torch.int16).long() & 0xFFFF) << shift)
            result = halves[0] | halves[1]
        else:
            raise AssertionError(f"unknown instruction {opcode}")
        registers[target] = result & 0xFFFFFFFF
    return registers


def levels(sign: str, word: torch.Tensor = WORDS, **names: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a block makes of the lower and of the upper unit of each word."""
    more = {"$2": torch.as_tensor(names.pop("top"))} if "top" in names else {}
    out = run(ptx(sign, names), **{"$1": word, **more})["$0"]
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


def down(word: torch.Tensor, half: int) -> torch.Tensor:
    """The 1-bit plane as rows of the lower or of the upper half of a slice take it."""
    return run(ptx(".b32 down", {}), **{"$1": word, "$2": torch.tensor(half | (half << 16))})["$0"]


@pytest.mark.parametrize("parity", (0, 1))
@pytest.mark.parametrize("slot", range(4))
@pytest.mark.parametrize("half", (0, 1))
def test_three_bits(half: int, slot: int, parity: int) -> None:
    """Two bits from one plane, the top bit from the other, where a row's shift says."""
    top, by = WORDS.flip(0), 2 * slot + half
    both = levels(".b32 bottom, up", SLOT=slot, PARITY=parity, top=down(top, half))
    for got, held, unit in zip(both, byte(parity), (0, 16), strict=True):
        code = ((held >> (2 * slot)) & 3) | (((top >> (unit + 8 * parity + by)) & 1) << 2)
        assert torch.equal(got, 128.0 + code)


@pytest.mark.parametrize("parity", (0, 1))
@pytest.mark.parametrize(
    ("bits", "slot", "half"),
    [(4, 0, 0), (4, 1, 0), *((2, s, 0) for s in range(4)), *((3, s, h) for s in range(4) for h in (0, 1))],
)
def test_tables(bits: int, slot: int, half: int, parity: int) -> None:
    """Of any levels: two registers of two units each make four."""
    torch.manual_seed(bits)
    table = torch.randn(2**bits).to(torch.bfloat16)
    words = table_parts(table, 1).view(torch.int32)[0].long() & 0xFFFFFFFF
    low, high = (WORDS, WORDS.roll(12345)), (WORDS.flip(0), WORDS.roll(777))
    by = 2 * slot + half
    first, of_table = {2: (4, (0, 1)), 3: (6, (8, 9, 12, 13)), 4: (4, range(8, 16))}[bits]
    inputs = {"$2": low[0], "$3": low[1]}
    if bits == 3:
        inputs |= {"$4": down(high[0], half), "$5": down(high[1], half)}
    inputs |= {f"${first + 4 * place}": words[n] for place, n in enumerate(of_table)}
    sign = {2: ".b32 code;", 3: ".b32 code, top,", 4: ".b32 code, upper,"}[bits]
    out = run(ptx(sign, {"SLOT": slot, "PARITY": parity}), **inputs)
    for register, word, top in zip(("$0", "$1"), low, high, strict=True):
        for unit in (0, 16):
            at = unit + 8 * parity
            code = (word >> (at + (2 if bits == 3 else bits) * slot)) & (3 if bits == 3 else 2**bits - 1)
            if bits == 3:
                code = code | (((top >> (at + by)) & 1) << 2)
            assert torch.equal(bf16((out[register] >> unit) & 0xFFFF), table[code].double())


@pytest.mark.parametrize("offset", (0, 1))
def test_times(offset: int) -> None:
    """A level times any cosine, rounded once, however large the offset is that is taken off."""
    code = UNITS % 256
    level = (code % 128 + 128 if offset else code).to(torch.bfloat16)
    factor = (UNITS * 0.37).cos().to(torch.bfloat16)
    words = [x.view(torch.int16).long() & 0xFFFF for x in (level, factor)]
    both = {f"${n + 1}": word | (word.flip(0) << 16) for n, word in enumerate(words)}
    out = run(ptx(".b32 minus, none", {"OFFSET": offset}), rounds=True, **both)["$0"]
    right = ((level.double() - 128 * offset) * factor.double()).to(torch.bfloat16).double()
    assert torch.equal(bf16(out & 0xFFFF), right) and torch.equal(bf16(out >> 16), right.flip(0))


def test_every_block_is_tested() -> None:
    assert len(BLOCKS) == 9
