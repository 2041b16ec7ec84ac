"""Rounding, products, and numbers in bfloat16 parts."""

# The jit compiler reads annotations: no ``from __future__ import annotations`` here.

import os

import torch
import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
PACKED = tl.constexpr(not INTERPRETED.value and torch.version.hip is None)  # two codes at a time, in PTX


@triton.jit
def cast(x, TYPE: tl.constexpr):
    """Float32 ``x`` rounded to ``TYPE``."""
    if INTERPRETED and TYPE == tl.bfloat16:  # noqa: SIM300 - the interpreter would cut the bits off
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    return x.to(TYPE)


@triton.jit
def affine(x, FACTOR: tl.constexpr, ADD: tl.constexpr):
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
def add(x, y):
    """``x + y`` in bfloat16."""
    if INTERPRETED:
        return (x.to(tl.float32) + y.to(tl.float32)).to(tl.bfloat16)
    return x + y


@triton.jit
def dot(left, right, acc):
    """``acc + left @ right``, float32 sums; of float32 operands in float32, not in tf32."""
    if INTERPRETED:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, acc, input_precision="ieee")


@triton.jit
def bf16_part(x, PART: tl.constexpr):
    """Bfloat16 part ``PART`` of float32 ``x``: what the parts before it have left, rounded."""
    part = cast(x, tl.bfloat16)
    for _ in tl.static_range(PART):
        x = x - part.to(tl.float32)
        part = cast(x, tl.bfloat16)
    return part


@triton.jit
def rounded(x, PARTS: tl.constexpr):
    """What all parts of ``x`` sum to. Where codes carry an offset, zeros must meet the rounded factor."""
    total = bf16_part(x, 0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += bf16_part(x, part).to(tl.float32)
    return total


@triton.jit
def dot_parts(left, right, acc, PARTS: tl.constexpr):
    """``acc + left @ right`` of float32 operands in PARTS bfloat16 parts each, the smallest first."""
    for of_left in tl.static_range(PARTS - 1, -1, -1):
        for of_right in tl.static_range(PARTS - 1, -1, -1):
            if of_left + of_right < PARTS:
                acc = dot(bf16_part(left, of_left), bf16_part(right, of_right), acc)
    return acc


@triton.jit
def split_word(word, TYPE: tl.constexpr):
    """The two 16-bit floats of 32-bit words, as float32."""
    low = (word & 0xFFFF).to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)
    return low, (word >> 16).to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)
