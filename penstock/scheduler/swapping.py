"""Whether the KV of a preempted request is worth moving to host memory. Knows predicted times; no bytes, no budget.

A preempted request gives its blocks back, and computes again what it does not find when it resumes. Blocks that are
promised to somebody go to host memory when they are evicted (see `kvcache`), so to swap a request out is to promise
its blocks to itself for a while. That is done when moving them there and back is predicted to take less time than
computing them again. Blocks that nobody needed meanwhile are moved nowhere, and cost nothing either way.
"""

from __future__ import annotations

from penstock.kvcache.cache import KVCache
from penstock.scheduler.predictor import StepLoad, StepTimePredictor
from penstock.scheduler.sequence import Sequence

# Preempted requests are the first of their queue: they resume when a few others have ended.
_KEPT_FOR_S = 120.0


def swap_is_cheaper(
    num_blocks: int, block_size: int, block_copy_s: float, predictor: StepTimePredictor
) -> bool:
    """`block_copy_s`: one block, one way."""
    load = StepLoad()
    load.add_prefill(0, num_blocks * block_size)
    compute_s = predictor.predict(load) - predictor.predict(StepLoad())
    return 2 * num_blocks * block_copy_s < compute_s


class Swapping:
    def __init__(
        self, cache: KVCache, predictor: StepTimePredictor, block_copy_s: float | None = None
    ) -> None:
        """Without `block_copy_s`, nobody is swapped."""
        self._cache = cache
        self._predictor = predictor
        self._block_copy_s = block_copy_s
        self.num_swapped = 0  # requests, so far

    def preempted(self, sequence: Sequence, now: float) -> None:
        """Called while the request still holds its blocks."""
        cache, copy_s = self._cache, self._block_copy_s
        num_blocks = sequence.num_published
        if copy_s is None or not num_blocks or not cache.num_host_blocks:
            return
        if swap_is_cheaper(num_blocks, cache.block_size, copy_s, self._predictor):
            cache.promise(sequence.hashes[:num_blocks], now + _KEPT_FOR_S, now)
            self.num_swapped += 1
