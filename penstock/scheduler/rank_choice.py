"""Chooses the rank of a new request, as the router chooses a replica: by the prefix that a rank has cached, and by
its load. Knows no plan.

The cost of a rank is a number of tokens: the prompt tokens that the rank computes before the first token of the
request, and an allowance for requests that take a row of each step. Ranks compute a step together, so that a step
lasts as long as its busiest rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.core.hashing import BlockHash, chain_hashes, root_hash
from penstock.core.request import Request
from penstock.kvcache.cache import KVCache
from penstock.scheduler.scheduler import Scheduler

_LOOKUP_BLOCKS = 64  # hashed and looked up at a time
# A request that runs takes a row of every step until it ends: as much as this many tokens of a prompt.
_TOKENS_PER_REQUEST = 16


def ranks_by_cost(
    num_tokens: int, cached: Sequence[int], waiting: Sequence[int], schedulers: Sequence[Scheduler]
) -> list[int]:
    """Return all ranks, the best one first, for a request of `num_tokens`. `cached` are the leading tokens of the
    request that each rank has, and `waiting` the tokens that requests in each queue have to compute. Ranks of equal
    cost keep their order."""
    costs = [
        _cost(num_tokens - cached[rank], waiting[rank], scheduler)
        for rank, scheduler in enumerate(schedulers)
    ]
    return sorted(range(len(schedulers)), key=costs.__getitem__)


def _cost(num_uncached: int, num_waiting: int, scheduler: Scheduler) -> int:
    num_requests = scheduler.num_running + scheduler.num_waiting
    num_ahead = num_waiting + scheduler.num_prefill_tokens()
    return num_ahead + num_uncached + _TOKENS_PER_REQUEST * num_requests


def cached_tokens(request: Request, caches: Sequence[KVCache]) -> list[int]:
    """Return how many leading tokens of a request each cache has, in whole blocks."""
    size = caches[0].block_size
    tokens = (*request.key_token_ids, *request.output_token_ids)[:-1]
    counts = [0] * len(caches)
    growing = [index for index, cache in enumerate(caches) if cache.enable_prefix_caching]
    parent, first = root_hash(request.prefix_salt), 0
    while growing:
        hashes: list[BlockHash] = chain_hashes(
            parent, tokens[first * size : (first + _LOOKUP_BLOCKS) * size], size
        )
        if not hashes:
            break
        for index in growing:
            counts[index] += caches[index].match(hashes)
        first += len(hashes)
        parent = hashes[-1]
        growing = [index for index in growing if counts[index] == first]
    return [count * size for count in counts]
