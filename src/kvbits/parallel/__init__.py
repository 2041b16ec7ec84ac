"""One context on several ranks: each holds a shard of its packed blocks and attends to them; see docs/scale.md.

Start the processes with ``torchrun``, on one machine or on many, and run the same program in each::

    torch.distributed.init_process_group()
    cache = kvbits.parallel.cache_for(model, "kivi2")
    model.generate(ids, cache=cache)
"""

from __future__ import annotations

from kvbits.parallel.cache import SharedCache, cache_for
from kvbits.parallel.prefill import prefill
from kvbits.parallel.ranks import RankLost, Ranks

__all__ = ["RankLost", "Ranks", "SharedCache", "cache_for", "prefill"]
