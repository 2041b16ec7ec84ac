"""The Triton kernels of :mod:`kvbits.attend.triton_decode`: attention over packed blocks without decoding them.

One program meets one split of the context of one row and KV head with a tile of its query rows; a second kernel merges
the splits by log-sum-exp. What keeps a program at memory speed:

- **Codes become bfloat16 by one masked OR.** A code in the low mantissa bits of ``0x4300`` *is* ``128 + code``; a
  field further up is ``128 + 2**k code``. Two codes take one 32-bit instruction, and 128 is taken back by the zero.
- **Pairs of channels are one 16-bit unit.** A record is read as int16, so even and odd channels are two tiles of the
  width that matrix units want, and values are transposed on the way from shared memory, never byte by byte.
- **The packed tile is the left operand** (``scores^T = K q^T``, ``out^T = V^T p^T``), so it stays in registers, and few
  query rows are the short side of the product.
- **Scales never touch a code.** A group of channels is a group of columns of the right operand: keys meet queries that
  are zero outside of the group, values meet weights multiplied by the group's scale. Codes are whole numbers, exact
  in bfloat16; what is rounded is the query and the weights, once each, and float16 and float32 split those into 2 and
  3 bfloat16 parts that are added up.

Slices of a block (``bitpack``) are separate groups of tokens: byte row ``i`` of slice ``j`` is token ``i + j R``.
Letters: R tokens of a slice, ROWS rows of a tile (slices of BPI blocks), NR query rows, U 16-bit units of a row.
"""

# The jit compiler reads annotations: no ``from __future__ import annotations`` here.

import os

import torch
import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
PACKED = tl.constexpr(not INTERPRETED.value and torch.version.hip is None)  # two codes at a time, in PTX
LOG2E = tl.constexpr(1.4426950408889634)

UNIFORM, TABLE, E4M3 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
TOKEN, CHANNEL, LAYER, STATIC = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@triton.jit
def _cast(x, TYPE: tl.constexpr):
    """Float32 ``x`` rounded to ``TYPE``."""
    if INTERPRETED and TYPE == tl.bfloat16:  # noqa: SIM300 - the interpreter would cut the bits off
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    return x.to(TYPE)


@triton.jit
def _affine(x, FACTOR: tl.constexpr, ADD: tl.constexpr):
    """``FACTOR * x + ADD`` in bfloat16, exact for what it is used for."""
    if INTERPRETED:  # which adds the bits of bfloat16 tensors instead of their values, and casts subnormals to 0
        wide = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
        return (wide * FACTOR + ADD).to(tl.bfloat16)
    if FACTOR != 1.0:
        x = x * tl.full([1, 1], FACTOR, tl.bfloat16)
    if ADD != 0.0:
        x = x + tl.full([1, 1], ADD, tl.bfloat16)
    return x


@triton.jit
def _sum(x, y):
    """``x + y`` in bfloat16."""
    if INTERPRETED:
        return (x.to(tl.float32) + y.to(tl.float32)).to(tl.bfloat16)
    return x + y


@triton.jit
def _dot(left, right, acc):
    """``acc + left @ right``, float32 sums; of float32 operands in float32, not in tf32."""
    if INTERPRETED:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, acc, input_precision="ieee")


@triton.jit
def _levels(
    low, high, high_shift, table, part, BITS: tl.constexpr, LEVELS: tl.constexpr, SLOT: tl.constexpr,
    PARITY: tl.constexpr, FIELDS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Levels of one parity of a tile of units, in bfloat16: of uniform codes below 8 bits ``2**k code + 128``.

    ``k`` is 0, or with FIELDS (2 bits) where the slice's field lies, so that few are shifted. EXACT takes 128 away.

    Args:
        low: int16 units of the only or the 2-bit plane.
        high, high_shift: of 3 bits, units of the 1-bit plane and how far each row's bit is up.
        table, part: of tables, where bfloat16 part ``part`` of the levels begins (entries ``part * 16 + code``).
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
        return _affine(bits.to(tl.bfloat16, bitcast=True), 1.329227995784916e36, 0.0)
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
        return _sum(bottom, _affine(top, 1.0, -256.0))
    if LEVELS == UNIFORM and PACKED:
        if BITS == 3:
            level = tl.inline_asm_elementwise(
                f"""{{
                .reg .b32 bottom, top, by;
                shr.b32 bottom, $1, {8 * PARITY + 2 * SLOT}; lop3.b32 bottom, bottom, 0x00030003, 0x43004300, 0xEA;
                and.b32 by, $3, 31; shr.b32 top, $2, by; shr.b32 top, top, {8 * PARITY}; and.b32 top, top, 0x00010001;
                shl.b32 top, top, 2; or.b32 $0, bottom, top;
                }}""",
                "=r,r,r,r", [low, high, high_shift], dtype=tl.bfloat16, is_pure=True, pack=2,
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
            code = ((low >> (8 * PARITY + 2 * SLOT)) & 3) | (((high >> (high_shift + 8 * PARITY)) & 1) << 2)
        else:
            code = low >> (8 * PARITY + BITS * SLOT - SLOT * 2 % 6 * FIELDS)
            code = code & (((1 << BITS) - 1) << (SLOT * 2 % 6 * FIELDS))
        if LEVELS == TABLE:
            return tl.load(table + (part * 16 + code.to(tl.int32)))
        level = (code | 0x4300).to(tl.bfloat16, bitcast=True)
    if EXACT:
        level = _affine(level, 1.0, -128.0)
    return level


@triton.jit
def _up(x, SLOT: tl.constexpr, FIELDS: tl.constexpr):
    """``x`` in units of a slice's codes, which for 2 bits lie 0, 2 or 4 bits up."""
    return x * (1 << (SLOT * 2 % 6)) if FIELDS else x


@triton.jit
def _down(x, SLOT: tl.constexpr, FIELDS: tl.constexpr):
    """The inverse of :func:`_up`."""
    return x * (1.0 / (1 << (SLOT * 2 % 6))) if FIELDS else x


@triton.jit
def _part(x, PART: tl.constexpr):
    """Bfloat16 part ``PART`` of float32 ``x``: what the parts before it have left, rounded."""
    part = _cast(x, tl.bfloat16)
    for _ in tl.static_range(PART):
        x = x - part.to(tl.float32)
        part = _cast(x, tl.bfloat16)
    return part


@triton.jit
def _rounded(x, PARTS: tl.constexpr):
    """What all parts of ``x`` sum to. Where codes carry an offset, zeros must meet the rounded factor."""
    total = _part(x, 0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += _part(x, part).to(tl.float32)
    return total


@triton.jit
def _dot_levels(
    acc, low, high, high_shift, table, right, BITS: tl.constexpr, LEVELS: tl.constexpr, SLOT: tl.constexpr,
    PARITY: tl.constexpr, FIELDS: tl.constexpr, EXACT: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """``acc + levels @ right`` with float32 ``right`` in PARTS bfloat16 parts."""
    for of_level in tl.static_range(PARTS if LEVELS == 1 else 1):
        level = _levels(low, high, high_shift, table, of_level, BITS, LEVELS, SLOT, PARITY, FIELDS, EXACT)
        for of_right in tl.static_range(PARTS):
            if of_level + of_right < PARTS:  # the rest is below float32
                acc = _dot(level, _part(right, of_right), acc)
    return acc


@triton.jit
def _units(pool, base, row, unit, UNITS: tl.constexpr, UNITS_PADDED: tl.constexpr, TRANS: tl.constexpr):
    """Int16 units ``[ROWS, U]`` of byte rows ``row`` of the codes that begin at ``base``; ``[U, ROWS]`` for TRANS."""
    first = base + row * UNITS
    if TRANS:  # 16-bit units are transposed by the load from shared memory
        at = pool + first[None, :] + unit[:, None]
        live = (unit < UNITS)[:, None]
    else:
        at = pool + first[:, None] + unit[None, :]
        live = (unit < UNITS)[None, :]
    if UNITS == UNITS_PADDED:
        return tl.load(at)
    return tl.load(at, mask=live, other=0)


@triton.jit
def _tile(
    pool, base, rr, unit, SLOT: tl.constexpr, SUB: tl.constexpr, J: tl.constexpr, BITS: tl.constexpr, R: tl.constexpr,
    BLOCK: tl.constexpr, UNITS: tl.constexpr, UNITS_PADDED: tl.constexpr, TRANS: tl.constexpr,
):  # fmt: skip
    """Units that hold slice ``J``, and for 3 bits those of the top bit, with each row's shift.

    Tensors of fewer slots than slices (the other side has fewer bits) are cut at ``SUB * R`` byte rows.
    """
    low = _units(pool, base, rr + SUB * R, unit, UNITS, UNITS_PADDED, TRANS)
    high, shift = low, 0
    if BITS == 3:
        high = _units(pool, base, rr % (BLOCK // 8) + BLOCK // 4, unit, UNITS, UNITS_PADDED, TRANS)
        shift = (2 * J + rr // (BLOCK // 8)).to(tl.int16)
        shift = shift[None, :] if TRANS else shift[:, None]
    return low, high, shift


@triton.jit
def _seen(
    s, column, live, query_column, mask, mask_h, mask_q, mask_c, head, query, real, offset, window,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Scores in base 2 ``[T, NR]`` with what a query does not see at -inf.

    Args:
        column: of each token; live: whether the row has it.
        query_column, head, query, real: of each query row; padding rows are not real.
        MASK: 0 none, 1 bool, 2 additive; FULL: tokens that all queries see, but for ``live``.
    """
    seen = live[:, None]
    if not FULL:
        seen = seen & (column >= offset)[:, None]
        if CAUSAL:
            seen = seen & (column[:, None] <= query_column[None, :])
        if WINDOW:
            seen = seen & (column[:, None] > query_column[None, :] - window)
    if MASK:
        at = mask + head[None, :] * mask_h + query[None, :] * mask_q + (column - offset)[:, None] * mask_c
        given = tl.load(at, mask=seen & real[None, :], other=0)
        if MASK == 1:
            seen = seen & (given != 0)
        else:
            s = s + given.to(tl.float32) * LOG2E
    return tl.where(seen, s, float("-inf"))


@triton.jit
def _base2(s, factor, bias, softcap, SOFTCAP: tl.constexpr):
    """Scores ``factor s + bias`` in base 2, after the soft cap."""
    if SOFTCAP:
        s = s * factor + bias
        return softcap * (2.0 * tl.sigmoid(2.0 * s / softcap) - 1.0) * LOG2E
    return s * (factor * LOG2E) + bias * LOG2E


@triton.jit
def _own_group(x, channel, GROUPS: tl.constexpr, LENGTH: tl.constexpr, U: tl.constexpr, NR: tl.constexpr):
    """Of columns (group, query row), those of each channel's own group: ``[U, GROUPS * NR]`` to ``[U, NR]``."""
    if GROUPS == 1:
        return x
    group = tl.arange(0, GROUPS)
    own = (channel // LENGTH)[:, None] == group[None, :]
    return tl.sum(tl.where(own[:, :, None], tl.reshape(x, (U, GROUPS, NR)), 0.0), 1)


@triton.jit
def _of_group(x, channel, GROUPS: tl.constexpr, LENGTH: tl.constexpr, U: tl.constexpr, NR: tl.constexpr):
    """The inverse: ``[U, NR]`` in the columns of each channel's own group, 0 elsewhere."""
    if GROUPS == 1:
        return x
    own = (channel // LENGTH)[:, None] == tl.arange(0, GROUPS)[None, :]
    return tl.reshape(tl.where(own[:, :, None], x[:, None, :], 0.0), (U, GROUPS * NR))


@triton.jit
def _record(block, table_row, batch, b, heads, h, RECORD: tl.constexpr, IN_ORDER: tl.constexpr):
    """Where the record of a row's block begins. int64: pools reach beyond 2**31."""
    if IN_ORDER:
        where = tl.cast(block, tl.int64) * batch + b
    else:
        where = tl.load(table_row + block)
    return (where * heads + h) * RECORD


@triton.jit
def _split_word(word, TYPE: tl.constexpr):
    """The two 16-bit floats of 32-bit words, as float32."""
    low = (word & 0xFFFF).to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)
    return low, (word >> 16).to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)


@triton.jit
def _per_channel(
    source, words, at, last, unit, table_row, batch, b, heads, h, OFFSET: tl.constexpr, FIRST: tl.constexpr,
    GROUPS: tl.constexpr, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr, RECORD: tl.constexpr, IN_ORDER: tl.constexpr,
):  # fmt: skip
    """Scales or zeros of even and of odd channels, ``[U, COLUMNS]`` each.

    Column c is group ``FIRST + c % GROUPS`` of block ``at + c // GROUPS``. Even and odd come in one word.
    """
    columns = tl.arange(0, COLUMNS)
    if GROUPS == COLUMNS:
        begin = _record(at, table_row, batch, b, heads, h, RECORD, IN_ORDER) + OFFSET
    else:
        block = tl.minimum(at + columns // GROUPS, last - 1)
        begin = _record(block, table_row, batch, b, heads, h, RECORD, IN_ORDER) + OFFSET
    begin = begin // 2 + (FIRST + columns % GROUPS) * (CHANNELS // 2)
    word = tl.load(words + begin[None, :] + unit[:, None], mask=(unit < CHANNELS // 2)[:, None], other=0)
    return _split_word(word, source.dtype.element_ty)


@triton.jit
def _per_token(source, words, at, columns, COUNT: tl.constexpr):
    """Scales or zeros of a token's groups of channels: ``[ROWS, C]`` for tokens whose own begin at ``at [ROWS]``.

    One column, or two in a 32-bit word, at a time: so few elements are loaded where they are needed, without a detour
    through shared memory.
    """
    if COUNT % 2 == 0:
        found = tl.zeros([at.shape[0], columns.shape[0]], tl.float32)
        for pair in tl.static_range(COUNT // 2):
            word = tl.load(words + (at // 2 + pair))
            low, high = _split_word(word, source.dtype.element_ty)
            found = tl.where(columns[None, :] == 2 * pair, low[:, None], found)
            found = tl.where(columns[None, :] == 2 * pair + 1, high[:, None], found)
    else:
        found = tl.load(source + at)[:, None].to(tl.float32) + tl.zeros([1, columns.shape[0]], tl.float32)
        for column in tl.static_range(1, COUNT):
            given = tl.load(source + at + column)[:, None].to(tl.float32)
            found = tl.where(columns[None, :] == column, given, found)
    return found


@triton.jit
def _static(source, h, channel, ADD: tl.constexpr, CHANNELS: tl.constexpr):
    """Static scales or zeros of one head's even or odd channels, ``[U]``."""
    return tl.load(source + h * CHANNELS + channel + ADD, mask=channel < CHANNELS, other=0).to(tl.float32)


@triton.jit
def _dense(
    pool, scales, zeros, scale_param, zero_param, table, base, token, channel, h,
    BITS: tl.constexpr, LEVELS: tl.constexpr, PER: tl.constexpr, GROUP: tl.constexpr, COUNT: tl.constexpr,
    ZERO: tl.constexpr, CODES_AT: tl.constexpr, SCALE_AT: tl.constexpr, ZERO_AT: tl.constexpr,
    CHANNELS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Decoded float32 elements ``[ROWS, C]``: any tokens of the records at ``base``, any channels. Not fast."""
    live = (channel < CHANNELS)[None, :]
    per_row: tl.constexpr = BLOCK // (4 if BITS == 3 else 8 // BITS)
    at = (base + CODES_AT + token % per_row * (CHANNELS // 2))[:, None] + (channel // 2)[None, :]
    byte = tl.load(pool + at, mask=live, other=0).to(tl.int32) >> (channel % 2 * 8)[None, :]
    if BITS == 3:
        code = (byte >> (token // per_row * 2)[:, None]) & 3
        row = token % (BLOCK // 8) + BLOCK // 4
        at = (base + CODES_AT + row * (CHANNELS // 2))[:, None] + (channel // 2)[None, :]
        byte = tl.load(pool + at, mask=live, other=0).to(tl.int32) >> (channel % 2 * 8)[None, :]
        code = code | (((byte >> (token // (BLOCK // 8))[:, None]) & 1) << 2)
    else:
        code = (byte >> (token // per_row * BITS)[:, None]) & ((1 << BITS) - 1)
    if LEVELS == E4M3:
        bits = ((code & 0x7F) << 20) | ((code & 0x80) << 24)
        level = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
    elif LEVELS == TABLE:
        level = tl.load(table + code).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            level += tl.load(table + (part * 16 + code)).to(tl.float32)
    else:
        level = code.to(tl.float32)
    if PER == LAYER:
        return level * tl.load(scale_param)
    if PER == STATIC:
        if ZERO:
            level -= _static(zero_param, h, channel, 0, CHANNELS)[None, :]
        return level * _static(scale_param, h, channel, 0, CHANNELS)[None, :]
    if PER == TOKEN:
        own = (token * COUNT)[:, None] + (channel // GROUP)[None, :]
    else:
        own = (token // GROUP * CHANNELS)[:, None] + channel[None, :]
    own += base[:, None]
    if ZERO:
        level -= tl.load(zeros + ZERO_AT + own, mask=live, other=0).to(tl.float32)
    return level * tl.load(scales + SCALE_AT + own, mask=live, other=0).to(tl.float32)


@triton.jit
def _rotary(cos, sin, token, channel, ROPE: tl.constexpr, HALF: tl.constexpr):
    """Of channels at tokens (shapes that broadcast): cosine, sine, the other channel of the pair, and 1 or -1.

    The sign is that of the second channel's share: a pair ``(x, y)`` becomes ``(x cos - y sin, y cos + x sin)``.
    """
    turned = channel < 2 * HALF
    if ROPE == 2:  # interleaved
        pair, first, other = channel // 2, channel % 2 == 0, channel ^ 1
    else:
        pair, first = channel % HALF, channel < HALF
        other = tl.where(first, channel + HALF, channel - HALF)
    at = token * HALF + pair
    live = turned & (at >= 0)
    return (
        tl.load(cos + at, mask=live, other=1.0),
        tl.load(sin + at, mask=live, other=0.0),
        tl.where(turned, other, channel),
        tl.where(first, 1.0, -1.0),
    )


@triton.jit
def _entries(pool, values, record, OUTLIERS: tl.constexpr, PADDED: tl.constexpr, INDEX_AT: tl.constexpr,
             VALUE_AT: tl.constexpr, CHANNELS: tl.constexpr):  # fmt: skip
    """Token, channel and value of a block's outliers, ``[PADDED]`` each; unused ones have the value 0."""
    entry = tl.arange(0, PADDED)
    index = tl.load(pool + record + INDEX_AT + entry, mask=entry < OUTLIERS, other=0).to(tl.int32) & 0xFFFF
    value = tl.load(values + record + VALUE_AT + entry, mask=entry < OUTLIERS, other=0).to(tl.float32)
    return index // CHANNELS, index % CHANNELS, value


@triton.jit
def _dot_parts(left, right, acc, PARTS: tl.constexpr):
    """``acc + left @ right`` of float32 operands in PARTS bfloat16 parts each."""
    for of_left in tl.static_range(PARTS):
        for of_right in tl.static_range(PARTS):
            if of_left + of_right < PARTS:
                acc = _dot(_part(left, of_left), _part(right, of_right), acc)
    return acc


@triton.jit
def _packed_split(
    q_at, query_bias, pool, words, scales, zeros, table_row, column_row, mask, key_scale, key_zero, key_table,
    value_scale, value_zero, value_table, out_row, tops, weights, first, last, batch, b, heads, h, row_live, head, q,
    query_column, mask_h, mask_q, mask_c, offset, window, first_token, scaling, softcap, cos, sin, key_mean,
    NR: tl.constexpr, K_CHANNELS: tl.constexpr, K_PADDED: tl.constexpr, V_CHANNELS: tl.constexpr,
    V_PADDED: tl.constexpr, BLOCK: tl.constexpr, NS: tl.constexpr, BPI: tl.constexpr, RECORD: tl.constexpr,
    K_BITS: tl.constexpr, K_LEVELS: tl.constexpr, K_PER: tl.constexpr, K_GROUP: tl.constexpr, K_COUNT: tl.constexpr,
    K_COLUMNS: tl.constexpr, K_ZERO: tl.constexpr, K_CODES_AT: tl.constexpr, K_SCALE_AT: tl.constexpr,
    K_ZERO_AT: tl.constexpr, K_OUTLIERS: tl.constexpr, K_ENTRIES: tl.constexpr,
    K_INDEX_AT: tl.constexpr, K_VALUE_AT: tl.constexpr,
    V_BITS: tl.constexpr, V_LEVELS: tl.constexpr, V_PER: tl.constexpr, V_GROUP: tl.constexpr, V_COUNT: tl.constexpr,
    V_COLUMNS: tl.constexpr, V_ZERO: tl.constexpr, V_CODES_AT: tl.constexpr, V_SCALE_AT: tl.constexpr,
    V_ZERO_AT: tl.constexpr, V_OUTLIERS: tl.constexpr, V_ENTRIES: tl.constexpr,
    V_INDEX_AT: tl.constexpr, V_VALUE_AT: tl.constexpr,
    PARTS: tl.constexpr, IN_ORDER: tl.constexpr, PADDED: tl.constexpr, MASK: tl.constexpr, WINDOW: tl.constexpr,
    PLAIN: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr, ROPE: tl.constexpr, HALF: tl.constexpr,
    MEAN: tl.constexpr,
):  # fmt: skip
    """Blocks ``first .. last - 1``. One function, because its parts would share two dozen values."""
    U: tl.constexpr = K_PADDED // 2
    W: tl.constexpr = V_PADDED // 2
    R: tl.constexpr = BLOCK // NS
    ROWS: tl.constexpr = R * BPI
    # float32 is too fine for sums of codes with an offset; static zeros meet the weights once, at the end.
    K_EXACT: tl.constexpr = PARTS == 3
    V_EXACT: tl.constexpr = PARTS == 3 or V_PER == STATIC
    k_offset: tl.constexpr = 128.0 if (K_BITS < 8 and K_LEVELS == UNIFORM and not K_EXACT) else 0.0
    v_offset: tl.constexpr = 128.0 if (V_BITS < 8 and V_LEVELS == UNIFORM and not V_EXACT) else 0.0
    k_fields: tl.constexpr = 1 if K_BITS == 2 and k_offset > 0 else 0  # whether 2-bit fields stay where they are
    v_fields: tl.constexpr = 1 if V_BITS == 2 and v_offset > 0 else 0
    v_zeroed: tl.constexpr = V_ZERO or v_offset > 0
    k_slots: tl.constexpr = 4 if K_BITS == 3 else 8 // K_BITS
    v_slots: tl.constexpr = 4 if V_BITS == 3 else 8 // V_BITS
    k_sub: tl.constexpr = NS // k_slots
    v_sub: tl.constexpr = NS // v_slots
    k_wide: tl.constexpr = K_COLUMNS * NR
    k_acc: tl.constexpr = k_wide if K_PER == TOKEN else NR
    v_wide: tl.constexpr = V_COLUMNS * NR
    ku, vu = tl.arange(0, U), tl.arange(0, W)
    tile_row = tl.arange(0, ROWS)
    bi, rr = tile_row // R, tile_row % R
    k_cols, v_cols = tl.arange(0, K_COLUMNS), tl.arange(0, V_COLUMNS)
    k_groups: tl.constexpr = K_COLUMNS // BPI if K_PER == CHANNEL else 1  # groups of tokens in a slice
    v_groups: tl.constexpr = V_COLUMNS // BPI if V_PER == CHANNEL else 1

    # Even and odd channels of the queries, in the columns of the groups that they meet.
    q_live = row_live[None, :] & (ku * 2 < K_CHANNELS)[:, None]
    q_even = tl.load(q_at[None, :] + (ku * 2)[:, None], mask=q_live, other=0).to(tl.float32)
    q_odd = tl.load(q_at[None, :] + (ku * 2 + 1)[:, None], mask=q_live, other=0).to(tl.float32)
    bias = tl.zeros([NR], tl.float32)
    if BIAS:
        bias = tl.load(query_bias, mask=row_live, other=0)
    if K_PER == STATIC:
        q_even *= _static(key_scale, h, ku * 2, 0, K_CHANNELS)[:, None]
        q_odd *= _static(key_scale, h, ku * 2, 1, K_CHANNELS)[:, None]
    if K_PER == TOKEN:
        right_even = _of_group(q_even, ku * 2, K_COLUMNS, K_GROUP, U, NR)
        right_odd = _of_group(q_odd, ku * 2 + 1, K_COLUMNS, K_GROUP, U, NR)
    else:
        right_even, right_odd = q_even, q_odd
    # The sum of each column's queries, for zeros and offsets; as rounded, or offsets would not cancel.
    rounded_even, rounded_odd = _rounded(right_even, PARTS), _rounded(right_odd, PARTS)
    q_sum = tl.sum(rounded_even + rounded_odd, 0)
    q_zero = tl.zeros_like(q_sum)
    if K_PER == STATIC and K_ZERO:
        q_zero = tl.sum(
            rounded_even * _static(key_zero, h, ku * 2, 0, K_CHANNELS)[:, None]
            + rounded_odd * _static(key_zero, h, ku * 2, 1, K_CHANNELS)[:, None], 0
        )  # fmt: skip
    if ROPE:
        kc = tl.arange(0, K_PADDED)
        every = row_live[None, :] & (kc < K_CHANNELS)[:, None]
        q_all = tl.load(q_at[None, :] + kc[:, None], mask=every, other=0).to(tl.float32)
        if ROPE == 2:
            kc_other = kc ^ 1
        else:
            kc_other = tl.where(kc < HALF, kc + HALF, kc - HALF)
        kc_other = tl.where(kc < 2 * HALF, kc_other, kc)
    k_factor = scaling
    if K_PER == LAYER:
        k_factor = scaling * tl.load(key_scale)

    top = tl.full([NR], float("-inf"), tl.float32)
    # Sums over tokens stay spread over the rows of a tile, and are summed over those once, at the end.
    weight = tl.zeros([ROWS, NR], tl.float32)
    v_acc: tl.constexpr = v_wide if V_PER == TOKEN else NR
    zero_sum = tl.zeros([ROWS, v_acc], tl.float32)
    if V_OUTLIERS:
        sparse_even = tl.zeros([W, NR], tl.float32)
        sparse_odd = tl.zeros([W, NR], tl.float32)
    even = tl.zeros([W, v_acc], tl.float32)
    odd = tl.zeros([W, v_acc], tl.float32)

    for at in range(first, last, BPI):
        block = at + bi
        block_live = block < last
        if BPI == 1:
            record = _record(at, table_row, batch, b, heads, h, RECORD, IN_ORDER)
            base = record + tl.zeros([ROWS], tl.int64)
        else:
            block = tl.minimum(block, last - 1)  # dead rows read what is there
            base = _record(block, table_row, batch, b, heads, h, RECORD, IN_ORDER)

        scores = ()
        for j in tl.static_range(NS):
            token = rr + j * R
            if ROPE:
                own_token = first_token + block * BLOCK + token
                k = _dense(
                    pool, scales, zeros, key_scale, key_zero, key_table, base, token, kc, h, K_BITS, K_LEVELS, K_PER,
                    K_GROUP, K_COUNT, K_ZERO, K_CODES_AT, K_SCALE_AT, K_ZERO_AT, K_CHANNELS, BLOCK, PARTS,
                )  # fmt: skip
                turn_cos, turn_sin, _, sign = _rotary(cos, sin, own_token[:, None], kc[None, :], ROPE, HALF)
                other = _dense(
                    pool, scales, zeros, key_scale, key_zero, key_table, base, token, kc_other, h, K_BITS, K_LEVELS,
                    K_PER, K_GROUP, K_COUNT, K_ZERO, K_CODES_AT, K_SCALE_AT, K_ZERO_AT, K_CHANNELS, BLOCK, PARTS,
                )  # fmt: skip
                if MEAN:
                    k += tl.load(key_mean + kc, mask=kc < K_CHANNELS, other=0)[None, :]
                    other += tl.load(key_mean + kc_other, mask=kc_other < K_CHANNELS, other=0)[None, :]
                k = k * turn_cos - sign * other * turn_sin
                s = _dot_parts(k, q_all, tl.zeros([ROWS, NR], tl.float32), PARTS) * scaling
            else:
                low, high, shift = _tile(
                    pool,
                    base + K_CODES_AT,
                    rr,
                    ku,
                    j // k_sub,
                    j % k_sub,
                    j,
                    K_BITS,
                    R,
                    BLOCK,
                    K_CHANNELS // 2,
                    U,
                    False,
                )
                if K_PER == CHANNEL:
                    scale_even, scale_odd = _per_channel(
                        scales, words, at, last, ku, table_row, batch, b, heads, h, K_SCALE_AT, j * R // K_GROUP,
                        k_groups, K_COLUMNS, K_CHANNELS, RECORD, IN_ORDER,
                    )  # fmt: skip
                    wide_even = tl.reshape(q_even[:, None, :] * scale_even[:, :, None], (U, k_wide))
                    wide_odd = tl.reshape(q_odd[:, None, :] * scale_odd[:, :, None], (U, k_wide))
                    zero_even = tl.full([U, K_COLUMNS], k_offset, tl.float32)
                    zero_odd = tl.full([U, K_COLUMNS], k_offset, tl.float32)
                    if K_ZERO:
                        given_even, given_odd = _per_channel(
                            zeros, words, at, last, ku, table_row, batch, b, heads, h, K_ZERO_AT, j * R // K_GROUP,
                            k_groups, K_COLUMNS, K_CHANNELS, RECORD, IN_ORDER,
                        )  # fmt: skip
                        zero_even += _up(given_even, j // k_sub, k_fields)
                        zero_odd += _up(given_odd, j // k_sub, k_fields)
                    s = tl.zeros([ROWS, k_wide], tl.float32)
                    terms = tl.reshape(_rounded(wide_even, PARTS), (U, K_COLUMNS, NR)) * zero_even[:, :, None]
                    terms += tl.reshape(_rounded(wide_odd, PARTS), (U, K_COLUMNS, NR)) * zero_odd[:, :, None]
                    s -= tl.reshape(tl.sum(terms, 0), (k_wide,))[None, :]
                else:
                    wide_even, wide_odd = right_even, right_odd
                    s = tl.zeros([ROWS, k_acc], tl.float32)
                s = _dot_levels(
                    s, low, high, shift, key_table, wide_even, K_BITS, K_LEVELS, j // k_sub, 0, k_fields, K_EXACT, PARTS
                )
                s = _dot_levels(
                    s, low, high, shift, key_table, wide_odd, K_BITS, K_LEVELS, j // k_sub, 1, k_fields, K_EXACT, PARTS
                )
                if K_PER == TOKEN:
                    scale = _per_token(scales, words, base + K_SCALE_AT + token * K_COUNT, k_cols, K_COUNT)
                    s3 = tl.reshape(s, (ROWS, K_COLUMNS, NR))
                    if K_ZERO:
                        zero = _up(
                            _per_token(zeros, words, base + K_ZERO_AT + token * K_COUNT, k_cols, K_COUNT),
                            j // k_sub,
                            k_fields,
                        )
                        s3 -= (zero + k_offset)[:, :, None] * tl.reshape(q_sum, (K_COLUMNS, NR))[None, :, :]
                    elif k_offset > 0:
                        s3 -= k_offset * tl.reshape(q_sum, (K_COLUMNS, NR))[None, :, :]
                    s = tl.sum(s3 * scale[:, :, None], 1)
                elif K_PER == CHANNEL:
                    if K_COLUMNS > 1:
                        own_group = (bi * k_groups + rr // K_GROUP % k_groups)[:, None] == k_cols[None, :]
                        s3 = tl.where(own_group[:, :, None], tl.reshape(s, (ROWS, K_COLUMNS, NR)), 0.0)
                        s = tl.sum(s3, 1)
                else:
                    s -= (q_sum * k_offset + _up(q_zero, j // k_sub, k_fields))[None, :]
                s = _down(s, j // k_sub, k_fields)
                if K_OUTLIERS:
                    s *= k_factor
            if K_OUTLIERS:
                for extra in tl.static_range(BPI):
                    e_block = tl.minimum(at + extra, last - 1)
                    spare = _record(e_block, table_row, batch, b, heads, h, RECORD, IN_ORDER)
                    e_token, e_channel, e_value = _entries(
                        pool, scales, spare, K_OUTLIERS, K_ENTRIES, K_INDEX_AT, K_VALUE_AT, K_CHANNELS
                    )
                    hit = tl.load(q_at[None, :] + e_channel[:, None], mask=row_live[None, :], other=0).to(tl.float32)
                    if ROPE:
                        e_own = first_token + e_block * BLOCK + e_token
                        turn_cos, turn_sin, e_other, sign = _rotary(cos, sin, e_own, e_channel, ROPE, HALF)
                        far = tl.load(q_at[None, :] + e_other[:, None], mask=row_live[None, :], other=0).to(tl.float32)
                        hit = hit * turn_cos[:, None] + far * (sign * turn_sin)[:, None]
                    hit *= e_value[:, None] * scaling
                    chosen = (token[:, None] == e_token[None, :]) & (bi == extra)[:, None]
                    s = _dot_parts(chosen.to(tl.float32), hit, s, PARTS)
            s = _base2(s, 1.0 if ROPE or K_OUTLIERS else k_factor, bias[None, :], softcap, SOFTCAP)
            if MASK or not PLAIN:
                own_token = first_token + block * BLOCK + token
                column = own_token
                if PADDED:
                    column = tl.load(column_row + own_token).to(tl.int32)
                s = _seen(
                    s, column, block_live, query_column, mask, mask_h, mask_q, mask_c, head, q, row_live, offset,
                    window, MASK, not MASK, WINDOW, False,
                )  # fmt: skip
            elif BPI > 1:
                s = tl.where(block_live[:, None], s, float("-inf"))
            scores = scores + (s,)  # noqa: RUF005 - the compiler knows no starred tuples

        largest = scores[0]
        for j in tl.static_range(1, NS):
            largest = tl.maximum(largest, scores[j])
        new_top = tl.maximum(top, tl.max(largest, 0))
        pivot = tl.where(new_top == float("-inf"), 0.0, new_top)
        fade = tl.exp2(top - pivot)
        top = new_top
        weight *= fade[None, :]
        v_fade = fade
        if v_acc > NR:
            v_fade = tl.reshape(tl.broadcast_to(fade[None, :], (V_COLUMNS, NR)), (v_acc,))
        even *= v_fade[None, :]
        odd *= v_fade[None, :]
        if v_zeroed:
            zero_sum *= v_fade[None, :]
        if V_OUTLIERS:
            sparse_even *= fade[None, :]
            sparse_odd *= fade[None, :]

        for j in tl.static_range(NS):
            p = tl.exp2(scores[j] - pivot[None, :])
            weight += p
            if V_OUTLIERS:
                for extra in tl.static_range(BPI):
                    e_block = tl.minimum(at + extra, last - 1)
                    spare = _record(e_block, table_row, batch, b, heads, h, RECORD, IN_ORDER)
                    e_token, e_channel, e_value = _entries(
                        pool, scales, spare, V_OUTLIERS, V_ENTRIES, V_INDEX_AT, V_VALUE_AT, V_CHANNELS
                    )
                    mine = (rr + j * R)[None, :] == e_token[:, None]
                    chosen = (mine & (bi == extra)[None, :]).to(tl.float32)
                    hit = _dot_parts(chosen, p, tl.zeros([V_ENTRIES, NR], tl.float32), PARTS) * e_value[:, None]
                    of_even = ((vu * 2)[:, None] == e_channel[None, :]).to(tl.float32)
                    of_odd = ((vu * 2 + 1)[:, None] == e_channel[None, :]).to(tl.float32)
                    sparse_even = _dot_parts(of_even, hit, sparse_even, PARTS)
                    sparse_odd = _dot_parts(of_odd, hit, sparse_odd, PARTS)
            low, high, shift = _tile(
                pool, base + V_CODES_AT, rr, vu, j // v_sub, j % v_sub, j, V_BITS, R, BLOCK, V_CHANNELS // 2, W, True
            )
            token = rr + j * R
            if V_PER == TOKEN:
                scale = _down(
                    _per_token(scales, words, base + V_SCALE_AT + token * V_COUNT, v_cols, V_COUNT),
                    j // v_sub,
                    v_fields,
                )
                wide = tl.reshape(p[:, None, :] * scale[:, :, None], (ROWS, v_wide))
                if v_zeroed:
                    zero = tl.full([ROWS, V_COLUMNS], v_offset, tl.float32)
                    if V_ZERO:
                        zero += _up(
                            _per_token(zeros, words, base + V_ZERO_AT + token * V_COUNT, v_cols, V_COUNT),
                            j // v_sub,
                            v_fields,
                        )
                    rounded = tl.reshape(_rounded(wide, PARTS), (ROWS, V_COLUMNS, NR))
                    zero_sum += tl.reshape(rounded * zero[:, :, None], (ROWS, v_wide))
            elif V_PER == CHANNEL:
                if V_COLUMNS == 1:
                    wide = p
                else:
                    own_group = (bi * v_groups + rr // V_GROUP % v_groups)[:, None] == v_cols[None, :]
                    wide = tl.reshape(tl.where(own_group[:, :, None], p[:, None, :], 0.0), (ROWS, v_wide))
            else:
                wide = _down(p, j // v_sub, v_fields)
                if v_zeroed:
                    zero_sum += _rounded(wide, PARTS)
            if V_PER == CHANNEL:
                # Another tile has other scales: they are applied here, not at the end.
                scale_even, scale_odd = _per_channel(
                    scales, words, at, last, vu, table_row, batch, b, heads, h, V_SCALE_AT, j * R // V_GROUP,
                    v_groups, V_COLUMNS, V_CHANNELS, RECORD, IN_ORDER,
                )  # fmt: skip
                zero_even = tl.full([W, V_COLUMNS], v_offset, tl.float32)
                zero_odd = tl.full([W, V_COLUMNS], v_offset, tl.float32)
                if V_ZERO:
                    given_even, given_odd = _per_channel(
                        zeros, words, at, last, vu, table_row, batch, b, heads, h, V_ZERO_AT, j * R // V_GROUP,
                        v_groups, V_COLUMNS, V_CHANNELS, RECORD, IN_ORDER,
                    )  # fmt: skip
                    zero_even += _up(given_even, j // v_sub, v_fields)
                    zero_odd += _up(given_odd, j // v_sub, v_fields)
                sums = tl.sum(tl.reshape(_rounded(wide, PARTS), (ROWS, V_COLUMNS, NR)), 0)  # [V_COLUMNS, NR]
                for parity in tl.static_range(2):
                    part = tl.zeros([W, v_wide], tl.float32)
                    part = _dot_levels(
                        part, low, high, shift, value_table, wide, V_BITS, V_LEVELS, j // v_sub, parity, v_fields,
                        V_EXACT, PARTS,
                    )  # fmt: skip
                    scale = _down(scale_odd if parity else scale_even, j // v_sub, v_fields)
                    zero = zero_odd if parity else zero_even
                    part3 = tl.reshape(part, (W, V_COLUMNS, NR)) - zero[:, :, None] * sums[None, :, :]
                    part = tl.sum(part3 * scale[:, :, None], 1)
                    if parity == 0:
                        even += part
                    else:
                        odd += part
            else:
                even = _dot_levels(
                    even, low, high, shift, value_table, wide, V_BITS, V_LEVELS, j // v_sub, 0, v_fields, V_EXACT, PARTS
                )
                odd = _dot_levels(
                    odd, low, high, shift, value_table, wide, V_BITS, V_LEVELS, j // v_sub, 1, v_fields, V_EXACT, PARTS
                )

    if V_PER == STATIC:
        taken = tl.sum(zero_sum, 0)[None, :]
        if V_ZERO:
            even -= _static(value_zero, h, vu * 2, 0, V_CHANNELS)[:, None] * taken
            odd -= _static(value_zero, h, vu * 2, 1, V_CHANNELS)[:, None] * taken
        even *= _static(value_scale, h, vu * 2, 0, V_CHANNELS)[:, None]
        odd *= _static(value_scale, h, vu * 2, 1, V_CHANNELS)[:, None]
    elif V_PER == LAYER:
        factor = tl.load(value_scale)
        even *= factor
        odd *= factor
    elif V_PER == TOKEN:
        if v_zeroed:
            taken = tl.sum(zero_sum, 0)[None, :]
            even -= taken
            odd -= taken
        even = _own_group(even, vu * 2, V_COLUMNS, V_GROUP, W, NR)
        odd = _own_group(odd, vu * 2 + 1, V_COLUMNS, V_GROUP, W, NR)
    if V_OUTLIERS:
        even += sparse_even
        odd += sparse_odd
    o_live = row_live[None, :] & (vu * 2 < V_CHANNELS)[:, None]
    tl.store(out_row[None, :] + (vu * 2)[:, None], even, mask=o_live)
    tl.store(out_row[None, :] + (vu * 2 + 1)[:, None], odd, mask=o_live)
    tl.store(tops, top, mask=row_live)
    tl.store(weights, tl.sum(weight, 0), mask=row_live)


@triton.jit
def _exact_split(
    q_at, key_row, value_row, column_row, mask, out_row, tops, weights, first, last, k_t, v_t, sinks, skipped,
    row_live, head, q, query_column, mask_h, mask_q, mask_c, offset, window, scaling, softcap,
    NR: tl.constexpr, K_CHANNELS: tl.constexpr, K_PADDED: tl.constexpr, V_CHANNELS: tl.constexpr,
    V_PADDED: tl.constexpr, EXACT_TILE: tl.constexpr, PADDED: tl.constexpr, MASK: tl.constexpr,
    WINDOW: tl.constexpr, PLAIN: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Exact slots ``first .. last - 1``: sinks, and behind ``skipped`` packed tokens the recent ones."""
    kc, vc = tl.arange(0, K_PADDED), tl.arange(0, V_PADDED)
    right = tl.load(q_at[None, :] + kc[:, None], mask=row_live[None, :] & (kc < K_CHANNELS)[:, None], other=0)
    top = tl.full([NR], float("-inf"), tl.float32)
    weight = tl.zeros([EXACT_TILE, NR], tl.float32)
    total = tl.zeros([V_PADDED, NR], tl.float32)
    for at in range(first, last, EXACT_TILE):
        slot = at + tl.arange(0, EXACT_TILE)
        live = slot < last
        k_live = live[:, None] & (kc < K_CHANNELS)[None, :]
        k = tl.load(key_row + (slot * k_t)[:, None] + kc[None, :], mask=k_live, other=0)
        s = _base2(_dot(k, right, tl.zeros([EXACT_TILE, NR], tl.float32)), scaling, 0.0, softcap, SOFTCAP)
        own_token = tl.where(slot < sinks, slot, slot + skipped)
        column = own_token
        if PADDED:
            column = tl.load(column_row + own_token, mask=live, other=0).to(tl.int32)
        s = _seen(
            s, column, live, query_column, mask, mask_h, mask_q, mask_c, head, q, row_live, offset, window,
            MASK, not MASK, WINDOW, PLAIN,
        )  # fmt: skip
        new_top = tl.maximum(top, tl.max(s, 0))
        pivot = tl.where(new_top == float("-inf"), 0.0, new_top)
        fade = tl.exp2(top - pivot)
        top = new_top
        p = tl.exp2(s - pivot[None, :])
        weight = weight * fade[None, :] + p
        v_live = live[:, None] & (vc < V_CHANNELS)[None, :]
        v = tl.load(value_row + (slot * v_t)[:, None] + vc[None, :], mask=v_live, other=0)
        total = _dot(tl.trans(v), _cast(p, v.dtype), total * fade[None, :])
    tl.store(out_row[None, :] + vc[:, None], total, mask=row_live[None, :] & (vc < V_CHANNELS)[:, None])
    tl.store(tops, top, mask=row_live)
    tl.store(weights, tl.sum(weight, 0), mask=row_live)


@triton.jit(
    do_not_specialize=(
        "block_count", "held_count", "splits", "blocks_per_split", "exact_per_split", "query_columns", "offset",
        "window", "first_token", "queries", "table_b", "column_b", "angle_b", "mask_b", "mask_h", "mask_q",
    )
)  # fmt: skip
def attend_split(
    query, exact_query, query_bias, keys, values, pool, words, scales, zeros, table, counts, held, column_of, mask,
    key_scale, key_zero, key_table, value_scale, value_zero, value_table, cos, sin, key_mean, out, tops, weights,
    block_count, held_count, splits, blocks_per_split, exact_per_split, query_columns, offset, window, first_token,
    queries, batch, heads, sinks, scaling, softcap,
    q_b, q_h, q_q, e_b, e_h, e_q, k_b, k_h, k_t, v_b, v_h, v_t, table_b, column_b, angle_b, mask_b, mask_h, mask_q,
    mask_c, GROUP_ROWS: tl.constexpr, SINGLE: tl.constexpr, NR: tl.constexpr,
    K_CHANNELS: tl.constexpr, K_PADDED: tl.constexpr, V_CHANNELS: tl.constexpr, V_PADDED: tl.constexpr,
    BLOCK: tl.constexpr, NS: tl.constexpr, BPI: tl.constexpr, RECORD: tl.constexpr,
    K_BITS: tl.constexpr, K_LEVELS: tl.constexpr, K_PER: tl.constexpr, K_GROUP: tl.constexpr, K_COUNT: tl.constexpr,
    K_COLUMNS: tl.constexpr, K_ZERO: tl.constexpr, K_CODES_AT: tl.constexpr, K_SCALE_AT: tl.constexpr,
    K_ZERO_AT: tl.constexpr, K_OUTLIERS: tl.constexpr, K_ENTRIES: tl.constexpr,
    K_INDEX_AT: tl.constexpr, K_VALUE_AT: tl.constexpr,
    V_BITS: tl.constexpr, V_LEVELS: tl.constexpr, V_PER: tl.constexpr, V_GROUP: tl.constexpr, V_COUNT: tl.constexpr,
    V_COLUMNS: tl.constexpr, V_ZERO: tl.constexpr, V_CODES_AT: tl.constexpr, V_SCALE_AT: tl.constexpr,
    V_ZERO_AT: tl.constexpr, V_OUTLIERS: tl.constexpr, V_ENTRIES: tl.constexpr,
    V_INDEX_AT: tl.constexpr, V_VALUE_AT: tl.constexpr,
    PARTS: tl.constexpr, IN_ORDER: tl.constexpr, RAGGED: tl.constexpr, PADDED: tl.constexpr, MASK: tl.constexpr,
    WINDOW: tl.constexpr, PLAIN: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr, ROPE: tl.constexpr,
    HALF: tl.constexpr, MEAN: tl.constexpr, EXACT_TILE: tl.constexpr,
):  # fmt: skip
    """One split of one row and KV head: ``out [splits + exact splits, B * H, rows, Dv]``, maxima, sums of weights.

    Split numbers below ``splits`` are packed blocks, the others exact tokens. ``scales`` and ``zeros`` are the pool
    as bfloat16 and float16; ``*_AT`` and ``RECORD`` count 2 bytes. ``K_COUNT`` is how many scales a token has,
    ``K_COLUMNS`` how many columns of the products they take. PLAIN: all packed tokens are seen by all queries.
    """
    split = tl.program_id(0)
    pair = tl.program_id(1)
    b, h = pair // heads, pair % heads
    rows = GROUP_ROWS * queries
    row = tl.program_id(2) * NR + tl.arange(0, NR)
    row_live = row < rows
    head = h * GROUP_ROWS + row // queries
    q = row % queries
    query_column = query_columns + q
    b64 = b.to(tl.int64)
    if RAGGED:
        block_count = tl.load(counts + b)
        held_count = tl.load(held + b)
    state = (split * tl.num_programs(1) + pair) * rows + row
    out_row = out + state.to(tl.int64) * V_CHANNELS
    column_row = column_of + b64 * column_b
    mask_row = mask + b64 * mask_b
    if split < splits:
        first = split * blocks_per_split
        _packed_split(
            query + b64 * q_b + head * q_h + q * q_q, query_bias + pair * rows + row, pool, words, scales, zeros,
            table + b64 * table_b, column_row, mask_row, key_scale, key_zero, key_table, value_scale, value_zero,
            value_table, out_row, tops + state, weights + state, first,
            tl.minimum(first + blocks_per_split, block_count), batch, b, heads, h, row_live, head, q, query_column,
            mask_h, mask_q, mask_c, offset, window, first_token, scaling, softcap, cos + b64 * angle_b,
            sin + b64 * angle_b, key_mean + h * K_CHANNELS,
            NR, K_CHANNELS, K_PADDED, V_CHANNELS, V_PADDED, BLOCK, NS, BPI, RECORD,
            K_BITS, K_LEVELS, K_PER, K_GROUP, K_COUNT, K_COLUMNS, K_ZERO, K_CODES_AT, K_SCALE_AT, K_ZERO_AT,
            K_OUTLIERS, K_ENTRIES, K_INDEX_AT, K_VALUE_AT,
            V_BITS, V_LEVELS, V_PER, V_GROUP, V_COUNT, V_COLUMNS, V_ZERO, V_CODES_AT, V_SCALE_AT, V_ZERO_AT,
            V_OUTLIERS, V_ENTRIES, V_INDEX_AT, V_VALUE_AT,
            PARTS, IN_ORDER, PADDED, MASK, WINDOW, PLAIN, SOFTCAP, BIAS, ROPE, HALF, MEAN,
        )  # fmt: skip
    else:
        first = (split - splits) * exact_per_split
        _exact_split(
            exact_query + b64 * e_b + head * e_h + q * e_q, keys + b64 * k_b + h.to(tl.int64) * k_h,
            values + b64 * v_b + h.to(tl.int64) * v_h, column_row, mask_row, out_row, tops + state, weights + state,
            first, tl.minimum(first + exact_per_split, held_count), k_t, v_t, sinks,
            block_count * BLOCK + first_token - sinks, row_live, head, q, query_column, mask_h, mask_q, mask_c,
            offset, window, scaling, softcap, NR, K_CHANNELS, K_PADDED, V_CHANNELS, V_PADDED, EXACT_TILE, PADDED,
            MASK, WINDOW, PLAIN and SINGLE and not MASK, SOFTCAP,
        )  # fmt: skip


@triton.jit(do_not_specialize=("first", "last", "queries", "pairs"))
def merge_splits(
    partial, tops, weights, sink_logits, out, log_sums, first, last, queries, pairs, heads, o_b, o_h, o_q,
    GROUP_ROWS: tl.constexpr, CHANNELS: tl.constexpr, PADDED: tl.constexpr,
    SINKS: tl.constexpr, LOG_SUMS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Splits ``first .. last - 1`` of one query row: the weighted mean of the values, in the type of ``out``.

    With LOG_SUMS the log-sum-exp (base 2) is written too, -inf where nothing was seen.
    """
    pair, row = tl.program_id(0), tl.program_id(1)
    rows = GROUP_ROWS * queries
    channel = tl.arange(0, PADDED)
    head = (pair % heads) * GROUP_ROWS + row // queries
    top = tl.full([], float("-inf"), tl.float32)
    if SINKS:
        top = tl.load(sink_logits + head).to(tl.float32) * LOG2E
    for at in range(first, last, SPLITS):
        split = at + tl.arange(0, SPLITS)
        state = (split * pairs + pair) * rows + row
        top = tl.maximum(top, tl.max(tl.load(tops + state, mask=split < last, other=float("-inf")), 0))
    pivot = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.zeros([], tl.float32)
    if SINKS:
        weight += tl.exp2(tl.load(sink_logits + head).to(tl.float32) * LOG2E - pivot)
    total = tl.zeros([PADDED], tl.float32)
    for at in range(first, last, SPLITS):
        split = at + tl.arange(0, SPLITS)
        state = (split * pairs + pair) * rows + row
        factor = tl.exp2(tl.load(tops + state, mask=split < last, other=float("-inf")) - pivot)
        weight += tl.sum(tl.load(weights + state, mask=split < last, other=0) * factor, 0)
        where = partial + state.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
        live = (split < last)[:, None] & (channel < CHANNELS)[None, :]
        total += tl.sum(tl.load(where, mask=live, other=0) * factor[:, None], 0)
    mean = total / tl.where(weight == 0, 1.0, weight)
    at = out + (pair // heads).to(tl.int64) * o_b + head * o_h + (row % queries) * o_q + channel
    tl.store(at, _cast(mean, out.dtype.element_ty), mask=channel < CHANNELS)
    if LOG_SUMS:
        tl.store(log_sums + pair * rows + row, pivot + tl.log2(weight))
