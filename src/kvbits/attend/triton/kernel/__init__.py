"""The Triton kernels of :mod:`kvbits.attend.triton.decode`: attention over packed blocks without decoding them.

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
- **A mean of the keys never touches a key.** What it adds to the score of a token is two numbers for each query row and
  rotary pair, roped to each block and from there to its tokens by a product with a table that all blocks share.
- **Keys before the rotary embedding are not roped, but weighed.** Queries are roped back to each block, and codes are
  multiplied by the cosines and by the sines of their token within it, two to an instruction.

Slices of a block (``bitpack``) are separate groups of tokens: byte row ``i`` of slice ``j`` is token ``i + j R``.
Letters: R tokens of a slice, ROWS rows of a tile (slices of several blocks), NR query rows, U 16-bit units of a row.
Formats, tiles and ropings are the frozen dataclasses of :mod:`kvbits.attend.triton.shape`, passed as one constant each.

==============  ====================================================
module          what is in it
==============  ====================================================
``numbers``     rounding, bfloat16 parts, products
``codes``       bytes of a record to levels
``tables``      the same, of levels in a table, where PTX runs
``records``     where a record, its scales, zeros and outliers lie
``rotary``      pairs, their angles, and means that are roped
``keys``        one slice of keys: scores
``unroped``     one slice of keys before the rotary embedding: scores
``values``      one slice of values: weighted sums
``softmax``     what is seen, soft caps, the exponent's base
``packed``      one split of packed blocks
``exact``       one split of exact tokens
``kernels``     what is launched: a split, and the merge
==============  ====================================================
"""

from kvbits.attend.triton.kernel.kernels import attend_split, merge_splits

__all__ = ["attend_split", "merge_splits"]
