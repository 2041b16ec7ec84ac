"""Levels of a table by byte permutations: four codes at a time choose bytes of registers that hold the whole table.

A part of a table is 64 bytes: 16 levels in bfloat16, then their 16 lower and their 16 upper bytes.
"""

# The jit compiler reads annotations: no ``from __future__ import annotations`` here.

import triton
import triton.language as tl

PART = tl.constexpr(32)
"""Bfloat16 numbers of a part."""


@triton.jit
def permuted(low, high, table, part, BITS: tl.constexpr, SLOT: tl.constexpr, PARITY: tl.constexpr):
    """Levels in bfloat16 of one parity of a tile of units, in PTX; arguments as of :func:`codes.levels`."""
    words = table.to(tl.pointer_type(tl.int32), bitcast=True) + part * 16
    if BITS == 2:  # a code c chooses bytes 2 c and 2 c + 1
        level = tl.inline_asm_elementwise(
            f"""{{
            .reg .b32 code;
            prmt.b32 code, $2, $3, {"0x7531" if PARITY == 1 else "0x6420"};
            shr.b32 code, code, {2 * SLOT}; and.b32 code, code, 0x03030303; mad.lo.u32 code, code, 0x22, 0x10101010;
            prmt.b32 $0, $4, $8, code; shr.b32 code, code, 16; prmt.b32 $1, $4, $8, code;
            }}""",
            "=r,=r,r,r,r,r,r,r,r,r,r,r", [low, tl.load(words), tl.load(words + 1)], dtype=tl.bfloat16, is_pure=True,
            pack=4,
        )  # fmt: skip
    elif BITS == 3:
        level = tl.inline_asm_elementwise(
            f"""{{
            .reg .b32 code, top, next;
            prmt.b32 top, $4, $5, {"0x7531" if PARITY == 1 else "0x6420"};
            prmt.b32 code, $2, $3, {"0x7531" if PARITY == 1 else "0x6420"};
            {"shl" if SLOT == 0 else "shr"}.b32 top, top, {2 if SLOT == 0 else 2 * SLOT - 2};
            shr.b32 code, code, {2 * SLOT};
            lop3.b32 code, code, 0x03030303, top, 0xE2; and.b32 code, code, 0x07070707;
            shr.b32 next, code, 4; or.b32 code, code, next; prmt.b32 code, code, code, 0x2020;
            prmt.b32 top, $6, $10, code; prmt.b32 next, $14, $18, code;
            prmt.b32 $0, top, next, 0x5140; prmt.b32 $1, top, next, 0x7362;
            }}""",
            "=r,=r" + ",r" * 20,
            [low, high, tl.load(words + 8), tl.load(words + 9), tl.load(words + 12), tl.load(words + 13)],
            dtype=tl.bfloat16, is_pure=True, pack=4,
        )  # fmt: skip
    else:  # the upper bit of a code chooses between two permutations
        level = tl.inline_asm_elementwise(
            f"""{{
            .reg .b32 code, upper, half, other, bottom, top;
            prmt.b32 code, $2, $3, {"0x7531" if PARITY == 1 else "0x6420"};
            shl.b32 upper, code, {4 - 4 * SLOT}; prmt.b32 upper, upper, upper, 0xBA98;
            shr.b32 code, code, {4 * SLOT}; and.b32 code, code, 0x07070707;
            shr.b32 half, code, 4; or.b32 code, code, half; prmt.b32 code, code, code, 0x2020;
            prmt.b32 half, $4, $8, code; prmt.b32 other, $12, $16, code; lop3.b32 bottom, half, other, upper, 0xD8;
            prmt.b32 half, $20, $24, code; prmt.b32 other, $28, $32, code; lop3.b32 top, half, other, upper, 0xD8;
            prmt.b32 $0, bottom, top, 0x5140; prmt.b32 $1, bottom, top, 0x7362;
            }}""",
            "=r,=r" + ",r" * 34,
            [
                low, tl.load(words + 8), tl.load(words + 9), tl.load(words + 10), tl.load(words + 11),
                tl.load(words + 12), tl.load(words + 13), tl.load(words + 14), tl.load(words + 15),
            ],
            dtype=tl.bfloat16, is_pure=True, pack=4,
        )  # fmt: skip
    return level
