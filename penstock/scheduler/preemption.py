"""Decides which running requests lose their blocks, and whether their KV is worth moving to host memory.

A preempted request keeps its tokens. When it resumes, it computes again what the cache has lost. Retained blocks go
to host memory when they are evicted (see `kvcache`), so swapping a request out means retaining its blocks for a time.
That is done when moving them there and back is predicted to take less time than computing them again. Blocks that no
other request needed in the meantime are moved nowhere, and cost nothing either way.

Why this always ends. Order requests by seniority: rank, then arrival. Growth may preempt any running request except
the most senior. `Scheduler.add` refuses a request that does not fit the cache alone. The most senior request
therefore gets every block that it asks for, and ends. Seniority never falls, because arrival is fixed and aging only
makes more urgent. So each request becomes the most senior at some time, unless it ends before. Displacement takes the
blocks of batch requests alone, for a request of a more urgent tier, and aging makes a batch request safe from it.

One tenant could hold all seats or blocks for as long as its answers last. A new request that has waited for a while
therefore displaces requests of the tenant that runs the most, as long as that tenant still runs more afterwards than
the tenant of the new request. A new request never displaces the most senior request, nor a request of a more urgent
tier. Once a request has started, it displaces no other in this way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as TokenIds

from penstock.core.engine_config import SchedulerConfig
from penstock.core.hashing import BlockHash
from penstock.kvcache.cache import KVCache
from penstock.scheduler.admission import Admission
from penstock.scheduler.running import RunningSet, Work
from penstock.scheduler.sequence import BATCH_RANK, TIER_RANK, Sequence, seniority
from penstock.scheduler.step_builder import StepTimePredictor
from penstock.scheduler.tenants import TenantAccounts

# Preempted requests are the first of their tenant: they resume when a few others have ended.
_RETAINED_FOR_S = 120.0
_FAIR_WAIT = 0.05  # of `aging_s`: how long a new request waits before it displaces those of a busier tenant


class Preemption:
    def __init__(
        self,
        cache: KVCache,
        running: RunningSet,
        admission: Admission,
        accounts: TenantAccounts,
        config: SchedulerConfig,
        preempt: Callable[[Sequence, float], None],
    ) -> None:
        """`preempt` stops a running request and puts it back into the queue."""
        self._cache = cache
        self._running = running
        self._admission = admission
        self._accounts = accounts
        self._max_num_seqs = config.max_num_seqs
        self._preempts_batch = config.preempt_batch
        self._fair_wait_s = _FAIR_WAIT * config.aging_s
        self._preempt = preempt

    def make_room(self, max_decodes: int, waiting: Sequence | None, now: float) -> tuple[Work, bool]:
        """Preempt requests if others need their blocks or their seat. Returns what the remaining requests could
        do, and whether blocks were missing for growth. This comes before any chunk is planned: other requests may
        share a planned chunk, so it stays planned."""
        running = self._running
        work = running.find_work(max_decodes)
        prefill = self._senior_prefill()
        lacks_blocks = running.num_spare(work.growing, prefill) < 0
        if lacks_blocks:
            self.for_growth(work.growing, prefill, now)
        elif waiting is None or not (self.for_urgency(waiting, now) or self.for_fairness(waiting, now)):
            return work, False
        return running.find_work(max_decodes), lacks_blocks

    def _senior_prefill(self) -> Sequence | None:
        """Return the most senior request, if its windows must move on before more of its prompt is computed."""
        if self._cache.windows is None or not self._running:
            return None
        senior = min(self._running.sequences, key=seniority)
        return senior if senior.is_prefilling else None

    def for_growth(self, growing: list[Sequence], prefill: Sequence | None, now: float) -> None:
        """Preempt requests until there is a block for each running request that needs one, and for the next tokens of
        the most senior request if that is a prefill."""
        cache, running = self._cache, self._running
        in_need = {sequence.number: sequence for sequence in growing}
        for victim in victims_for_growth(running.sequences, cache.block_size):
            if running.num_spare(in_need.values(), prefill) >= 0:
                return
            self._preempt(victim, now)
            in_need.pop(victim.number, None)
        # The most senior request runs alone, and its need outweighs pins.
        num_window_blocks = running.num_window_blocks_to_grow(in_need.values(), prefill)
        cache.retention.give_way(running.num_blocks_to_grow(in_need.values()), num_window_blocks)
        if (
            running.num_spare(in_need.values(), prefill) < 0
        ):  # exports to other engines hold blocks: the request waits
            for sequence in tuple(running.sequences):
                self._preempt(sequence, now)

    def for_urgency(self, waiting: Sequence, now: float) -> bool:
        """Preempt batch requests when the next waiting request is more urgent and lacks a seat or blocks."""
        if not self._preempts_batch or TIER_RANK[waiting.request.tier] == BATCH_RANK:
            return False
        running, cache = self._running, self._cache
        num_missing = self._admission.num_missing_blocks(waiting)
        if not num_missing and len(running) < self._max_num_seqs:
            return False
        victims = victims_for_displacement(running.sequences, cache.block_size)
        if not victims or sum(victim.own_blocks for victim in victims) < num_missing:
            return False
        enough_available = cache.num_memory_available + num_missing
        for victim in victims:
            if len(running) < self._max_num_seqs and cache.num_memory_available >= enough_available:
                break
            self._preempt(victim, now)
        return True

    def for_fairness(self, waiting: Sequence, now: float) -> bool:
        """Preempt requests of the tenant that runs the most when the next waiting request is new, has waited for a
        while and lacks a seat or blocks. Where only the forecast lacks blocks, one request is preempted at a time."""
        victims = self.unfair(waiting, now)
        num_missing = self._admission.num_missing_blocks(waiting)
        if not victims or sum(victim.own_blocks for victim in victims) < num_missing:
            return False
        running, cache = self._running, self._cache
        enough_available = cache.num_memory_available + num_missing
        for index, victim in enumerate(victims):
            if index and len(running) < self._max_num_seqs and cache.num_memory_available >= enough_available:
                break
            self._preempt(victim, now)
        return True

    def unfair(self, waiting: Sequence, now: float) -> list[Sequence]:
        """Return the requests that a waiting one may displace because their tenant runs more, cheapest first."""
        if waiting.has_started or now - waiting.arrival_s < self._fair_wait_s:
            return []
        if self._accounts.num_active < 2 or not self._running:
            return []
        if len(self._running) < self._max_num_seqs and not self._admission.is_turned_away(waiting):
            return []
        counts = self._counts()
        own = counts[waiting.account.number]
        number, count = max(counts.items(), key=lambda item: item[1])
        if count < own + 2:
            return []
        senior = min(self._running.sequences, key=seniority)
        victims = [
            sequence
            for sequence in self._running.sequences
            if sequence.account.number == number
            and TIER_RANK[sequence.request.tier] >= TIER_RANK[waiting.request.tier]
            and sequence is not senior
        ]
        return _cheapest_first(victims, self._cache.block_size)[: count - own - 1]

    def _counts(self) -> Counter[int]:
        """Return the number of running requests of each tenant, by account."""
        return Counter(sequence.account.number for sequence in self._running.sequences)


def victims_for_growth(running: Iterable[Sequence], block_size: int) -> list[Sequence]:
    """Return the requests that may be preempted so that others can grow, cheapest first: all but the most senior."""
    by_seniority = sorted(running, key=seniority)
    return _cheapest_first(by_seniority[1:], block_size)


def victims_for_displacement(running: Iterable[Sequence], block_size: int) -> list[Sequence]:
    """Return the requests that may be preempted so that a more urgent one can start, cheapest first."""
    return _cheapest_first([sequence for sequence in running if sequence.rank == BATCH_RANK], block_size)


def _cheapest_first(candidates: list[Sequence], block_size: int) -> list[Sequence]:
    """Order requests: first by the least urgent rank; then by the fewest tokens to compute again (cached blocks are
    expected to be found again); then by the most remaining tokens; then by the latest arrival."""

    def cost(sequence: Sequence) -> tuple[int, int, int, int]:
        recompute_tokens = sequence.num_computed - sequence.blocks.num_reused_blocks * block_size
        remaining_tokens = sequence.predicted_length - sequence.num_known
        return -sequence.rank, recompute_tokens, -remaining_tokens, -sequence.number

    return sorted(candidates, key=cost)


def swap_is_cheaper(
    num_blocks: int, block_size: int, block_copy_s: float, predictor: StepTimePredictor
) -> bool:
    """Return whether copying blocks to host memory and back takes less time than computing them. `block_copy_s` is
    the time of one block, one way."""
    return 2 * num_blocks * block_copy_s < predictor.prefill_s(0, num_blocks * block_size)


class Swapping:
    def __init__(
        self, cache: KVCache, predictor: StepTimePredictor, block_copy_s: float | None = None
    ) -> None:
        """Without `block_copy_s`, no request is swapped, and only retained blocks go to host memory."""
        self._cache = cache
        self._predictor = predictor
        self._block_copy_s = block_copy_s
        self.num_swapped = 0  # requests, so far

    def decide_spills(self) -> None:
        """Let evicted blocks go to host memory, if copying a block there and back is quicker than computing it.
        Blocks alone do not help where layers have windows or states."""
        cache, copy_s = self._cache, self._block_copy_s
        if (
            copy_s is None
            or not cache.num_host_blocks
            or cache.windows is not None
            or cache.states is not None
        ):
            return
        cache.pool.spills = swap_is_cheaper(1, cache.block_size, copy_s, self._predictor)

    def num_worth_reading(self, hashes: TokenIds[BlockHash]) -> int:
        """Return how many of these leading blocks are worth reusing: all of them, or those before the first one
        in host memory if computing is quicker than copying from there. Retained prefixes are always reused."""
        in_host = self._cache.pool.host.index
        if not in_host or self._block_copy_s is None:
            return len(hashes)
        first = next((at for at, each in enumerate(hashes) if each in in_host), len(hashes))
        slots = [in_host[each] for each in hashes[first:] if each in in_host]
        if any(slot.term is not None for slot in slots):
            return len(hashes)
        num_copies = len(slots)
        block_size = self._cache.block_size
        compute_s = self._predictor.prefill_s(first * block_size, (len(hashes) - first) * block_size)
        return len(hashes) if num_copies * self._block_copy_s <= compute_s else first

    def preempted(self, sequence: Sequence, now: float) -> None:
        """Retain the blocks of a preempted request, which still holds them, if swapping is cheaper than computing."""
        cache, copy_s = self._cache, self._block_copy_s
        num_blocks = sequence.num_published
        if cache.states is not None:  # blocks after the last snapshot are computed again in any case
            num_blocks = cache.states.longest(sequence.hashes[:num_blocks])
        if copy_s is None or not num_blocks or not cache.num_host_blocks or cache.windows is not None:
            return
        if swap_is_cheaper(num_blocks, cache.block_size, copy_s, self._predictor):
            cache.retention.swap_out(sequence.hashes[:num_blocks], now + _RETAINED_FOR_S, now)
            self.num_swapped += 1
