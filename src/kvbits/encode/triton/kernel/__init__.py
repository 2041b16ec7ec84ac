"""The Triton kernel of :mod:`kvbits.encode.triton.encode`: one program encodes one block of one head, in one read.

A block is a tile of three dimensions, one of which runs along a group, so that every codec is written once:

- per token ``[T, groups, length]``, groups of channels, each widened to a power of two;
- per channel ``[groups, length, D]``, groups of tokens; static scales are one group of all of them.

What a group has one of (its range, scale, zero) keeps that dimension as 1. Row-major order is the order of the text in
both, token by token and channel by channel: the order that outliers are stored in. All numbers a kernel is compiled for
are in one frozen :class:`kvbits.encode.triton.shape.Shape`.

====================  =====================================================
module                what is in it
====================  =====================================================
``numbers``           rounding to bfloat16, half to even, to e4m3
``tile``              which token and channel an element of a tile is
``scales``            scale and zero of a group from its range
``half_quadratic``    the zero that HQQ finds
``levels``            codes of levels, what they decode to, scales of norms
``outliers``          which elements are outliers, and their entries
``pack``              codes into bytes
``kernel``            what is launched
====================  =====================================================
"""

from kvbits.encode.triton.kernel.kernel import encode_block

__all__ = ["encode_block"]
