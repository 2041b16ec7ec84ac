"""From the bytes of a record to levels in bfloat16, and their products."""

# The jit compiler reads annotations: no ``from __future__ import annotations`` here.

import triton
import triton.language as tl

from kvbits.attend.triton.kernel.numbers import PACKED, add, affine, bf16_part, cast, dot
from kvbits.attend.triton.kernel.tables import PART, permuted

UNIFORM, TABLE, E4M3 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def levels(
    low, high, table, part, BITS: tl.constexpr, LEVELS: tl.constexpr, SLOT: tl.constexpr,
    PARITY: tl.constexpr, FIELDS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Levels of one parity of a tile of units, in bfloat16: of uniform codes below 8 bits ``2**k code + 128``.

    ``k`` is 0, or with FIELDS (2 bits) where the slice's field lies, so that few are shifted. EXACT takes 128 away.

    Args:
        low: int16 units of the only or the 2-bit plane.
        high: of 3 bits, units of the 1-bit plane, the bits of slot 0 lowest in each byte.
        table, part: of tables, where bfloat16 part ``part`` of the levels begins (entries ``part * PART + code``).
    """
    if LEVELS == E4M3:
        # Exponent and mantissa in the places of bfloat16's: 2**-120 times the value, also where it is subnormal.
        if PACKED:
            return tl.inline_asm_elementwise(
                f"""{{
                .reg .b32 sign, rest, up, none;
                shl.b32 sign, $1, {8 - 8 * PARITY}; and.b32 sign, sign, 0x80008000;
                {"shr" if PARITY == 1 else "shl"}.b32 rest, $1, 4; lop3.b32 rest, rest, 0x07F007F0, sign, 0xEA;
                mov.b32 up, 0x7B807B80; mov.b32 none, 0x80008000; fma.rn.bf16x2 $0, rest, up, none;
                }}""",
                "=r,r", [low], dtype=tl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
        byte = low >> 8 if PARITY == 1 else low
        bits = ((byte << 4) & 0x07F0) | ((byte << 8) & -0x8000)
        return affine(bits.to(tl.bfloat16, bitcast=True), 1.329227995784916e36, 0.0)
    if BITS == 8:
        # The top bit alone turns 128 into 256; the sum of both parts stays exact, 0 .. 255.
        if PACKED:
            return tl.inline_asm_elementwise(
                f"""{{
                .reg .b32 byte, bottom, top, one, less;
                shr.b32 byte, $1, {8 * PARITY};
                lop3.b32 bottom, byte, 0x007F007F, 0x43004300, 0xEA; lop3.b32 top, byte, 0x00800080, 0x43004300, 0xEA;
                mov.b32 one, 0x3F803F80; mov.b32 less, 0xC380C380;
                fma.rn.bf16x2 top, top, one, less; fma.rn.bf16x2 $0, bottom, one, top;
                }}""",
                "=r,r", [low], dtype=tl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
        byte = low >> 8 if PARITY == 1 else low
        bottom = ((byte & 0x7F) | 0x4300).to(tl.bfloat16, bitcast=True)
        top = ((byte & 0x80) | 0x4300).to(tl.bfloat16, bitcast=True)
        return add(bottom, affine(top, 1.0, -256.0))
    if LEVELS == TABLE and PACKED:
        return permuted(low, high, table, part, BITS, SLOT, PARITY)
    if LEVELS == UNIFORM and PACKED:
        if BITS == 3:
            level = tl.inline_asm_elementwise(
                f"""{{
                .reg .b32 bottom, up;
                shr.b32 bottom, $1, {8 * PARITY + 2 * SLOT}; lop3.b32 bottom, bottom, 0x00030003, 0x43004300, 0xEA;
                {"shr" if PARITY + SLOT else "shl"}.b32 up, $2, {8 * PARITY + 2 * SLOT - 2 if PARITY + SLOT else 2};
                lop3.b32 $0, up, 0x00040004, bottom, 0xEA;
                }}""",
                "=r,r,r", [low, high], dtype=tl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
        else:  # one shift, which neighbouring fields share, and one masked OR for two codes
            level = tl.inline_asm_elementwise(
                f"""{{
                .reg .b32 moved;
                shr.b32 moved, $1, {8 * PARITY + BITS * SLOT - SLOT * 2 % 6 * FIELDS};
                lop3.b32 $0, moved, {(((1 << BITS) - 1) << (SLOT * 2 % 6 * FIELDS)) * 65537}, 0x43004300, 0xEA;
                }}""",
                "=r,r", [low], dtype=tl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
    else:
        if BITS == 3:
            code = ((low >> (8 * PARITY + 2 * SLOT)) & 3) | (((high >> (8 * PARITY + 2 * SLOT)) & 1) << 2)
        else:
            code = low >> (8 * PARITY + BITS * SLOT - SLOT * 2 % 6 * FIELDS)
            code = code & (((1 << BITS) - 1) << (SLOT * 2 % 6 * FIELDS))
        if LEVELS == TABLE:
            return tl.load(table + (part * PART + code.to(tl.int32)))
        level = (code | 0x4300).to(tl.bfloat16, bitcast=True)
    if EXACT:
        level = affine(level, 1.0, -128.0)
    return level


@triton.jit
def times(level, factor, OFFSET: tl.constexpr):
    """``(level - 128) * factor``, or without OFFSET ``level * factor``, in bfloat16 and rounded once."""
    if not PACKED:
        wide = level.to(tl.float32)
        return cast((wide - 128.0 if OFFSET else wide) * factor.to(tl.float32), tl.bfloat16)
    return tl.inline_asm_elementwise(
        f"""{{
        .reg .b32 minus, none, taken;
        mov.b32 minus, 0xC300C300; mov.b32 none, 0x80008000;
        {"fma.rn.bf16x2 taken, $2, minus, none; " if OFFSET else "mov.b32 taken, none; "}
        fma.rn.bf16x2 $0, $1, $2, taken;
        }}""",
        "=r,r,r", [level, factor], dtype=tl.bfloat16, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def up(x, J: tl.constexpr, SIDE: tl.constexpr):
    """``x`` in units of the codes of slice ``J``, which for 2 bits lie 0, 2 or 4 bits up."""
    return x * (1 << (J // SIDE.sub * 2 % 6)) if SIDE.fields else x


@triton.jit
def down(x, J: tl.constexpr, SIDE: tl.constexpr):
    """The inverse of :func:`up`."""
    return x * (1.0 / (1 << (J // SIDE.sub * 2 % 6))) if SIDE.fields else x


@triton.jit
def dot_levels(
    acc, units, table, right, J: tl.constexpr, PARITY: tl.constexpr, SIDE: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """``acc + levels @ right`` of slice ``J``, with float32 ``right`` in PARTS bfloat16 parts, the smallest first."""
    low, high = units
    for of_level in tl.static_range(PARTS - 1 if SIDE.levels == TABLE else 0, -1, -1):
        level = levels(
            low, high, table, of_level, SIDE.bits, SIDE.levels, J // SIDE.sub, PARITY, SIDE.fields, SIDE.exact
        )
        for of_right in tl.static_range(PARTS - 1, -1, -1):
            if of_level + of_right < PARTS:  # the rest is below float32
                acc = dot(level, bf16_part(right, of_right), acc)
    return acc


@triton.jit
def byte_rows(pool, base, row, unit, SIDE: tl.constexpr, TRANS: tl.constexpr):
    """Int16 units ``[ROWS, U]`` of byte rows ``row`` of the codes that begin at ``base``; ``[U, ROWS]`` for TRANS."""
    first = base + row * SIDE.units
    if TRANS:  # 16-bit units are transposed by the load from shared memory
        at = pool + first[None, :] + unit[:, None]
        live = (unit < SIDE.units)[:, None]
    else:
        at = pool + first[:, None] + unit[None, :]
        live = (unit < SIDE.units)[None, :]
    if SIDE.channels == SIDE.padded:
        return tl.load(at)
    return tl.load(at, mask=live, other=0)


@triton.jit
def slice_units(
    pool, base, rr, unit, J: tl.constexpr, SIDE: tl.constexpr, TILE: tl.constexpr, TRANS: tl.constexpr
):  # fmt: skip
    """Units that hold slice ``J``, and for 3 bits those of the top bit, as :func:`levels` takes them.

    Tensors of fewer slots than slices (the other side has fewer bits) are cut at multiples of R byte rows.
    """
    base += SIDE.codes_at
    low = byte_rows(pool, base, rr + J % SIDE.sub * TILE.slice, unit, SIDE, TRANS)
    high = low
    if SIDE.bits == 3:
        high = byte_rows(pool, base, rr % (TILE.tokens // 8) + TILE.tokens // 4, unit, SIDE, TRANS)
        half = (rr // (TILE.tokens // 8)).to(tl.int16)  # the same in all slices
        high = moved_down(high, half[None, :] if TRANS else half[:, None])
    return low, high


@triton.jit
def moved_down(units, by):
    """Units of the 1-bit plane with their bits ``by`` further down, 0 or 1; what comes in at the top is no code's."""
    if PACKED:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 down;
            and.b32 down, $2, 1; shr.b32 $0, $1, down;
            }""",
            "=r,r,r", [units, by], dtype=tl.int16, is_pure=True, pack=2,
        )  # fmt: skip
    return units >> by
