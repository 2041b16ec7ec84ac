"""The memory of one layer: exact tokens, and packed blocks in a pool with a table.

==============  ======================================================
module          what is in it
==============  ======================================================
``record``      the byte map of one packed block of one KV head
``blocks``      ``BlockStore``: the pool, and the table of which row owns which block
``exact``       ``ExactTokens``: the exact tokens of a layer, with room to append
``rows``        ``Rows``: which columns of a batch are text
``room``        how much room a cache takes as it grows
``derived``     what kernels make of a layer once
``late_sinks``  which keys are kept exact although they come late
``crop``        what a crop leaves of a row
``shards``      which rank owns which block
``huge_pages``  large pools on huge pages
==============  ======================================================
"""

from kvbits.store.blocks import Blocks, BlockStore

__all__ = ["BlockStore", "Blocks"]
