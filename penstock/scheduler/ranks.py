"""Several schedulers behind the verbs of one, for data-parallel attention: each rank has requests, a queue and a KV
cache of its own, and all ranks compute a step together.

All schedulers run in the process of the first rank, so that ranks need not agree before a step. One plan says which
tokens each rank computes. A rank without tokens still takes part in the exchange of tokens. A request stays on the
rank that `add` has chosen. Fairness between tenants and tiers holds for each rank by itself.

Knows no clock, socket or tensor, like the schedulers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import msgspec

from penstock.core.engine_config import SchedulerConfig
from penstock.core.errors import Overloaded
from penstock.core.messages import EngineStats, KVEvent, added_up
from penstock.core.plan import NO_DRAFTS, Chunk, Draft, StepPlan, StepResult, TokenEvent
from penstock.core.request import Request
from penstock.kvcache.block import IndexUnion
from penstock.scheduler.rank_choice import cached_tokens, ranks_by_cost
from penstock.scheduler.scheduler import Scheduler


class RankSchedulers:
    def __init__(self, schedulers: Sequence[Scheduler]) -> None:
        """`schedulers` has one for each rank, with equal settings."""
        self.schedulers = tuple(schedulers)
        self._rank_of: dict[str, int] = {}  # of requests that have not ended
        # For requests in no plan yet: the tokens that were not cached on arrival, and their sum for each rank.
        self._to_compute: dict[str, int] = {}
        self._waiting_tokens = [0] * len(schedulers)
        # For requests with breakpoints: the leading tokens that another rank keeps, which the client has paid for.
        self._kept_elsewhere: dict[str, int] = {}
        self._index = IndexUnion(len(schedulers))
        self._steps: deque[int] = deque()  # planned, not yet committed
        self._num_steps = 0

    def add(self, request: Request, now: float) -> None:
        """Queue a request on the best rank whose queue has room. Raises the errors of `Scheduler.add`."""
        known = self._rank_of.get(request.id)
        if known is not None:
            self.schedulers[known].add(request, now)  # raises
            return
        num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        cached = cached_tokens(request, [scheduler.cache for scheduler in self.schedulers])
        refusal: Overloaded | None = None
        for rank in ranks_by_cost(num_tokens, cached, self._waiting_tokens, self.schedulers):
            try:
                self.schedulers[rank].add(request, now)
            except Overloaded as error:
                refusal = refusal or error
            else:
                self._rank_of[request.id] = rank
                self._to_compute[request.id] = num_tokens - cached[rank]
                self._waiting_tokens[rank] += num_tokens - cached[rank]
                if request.cache_breakpoints:
                    self._note_kept(request.id, rank, now)
                return
        assert refusal is not None, "there are ranks"
        raise refusal

    def abort(self, request_id: str, now: float) -> None:
        """Forget a request wherever it is. No event follows. Unknown ids are ignored."""
        rank = self._rank_of.get(request_id)
        if rank is not None:
            self._forget(request_id)
            self.schedulers[rank].abort(request_id, now)

    def fail(self, chunk: Chunk, error: str, now: float) -> None:
        """End the request of a chunk that was not computed; see `Scheduler.fail`."""
        rank = self._rank_of.get(chunk.request_id)
        if rank is not None:
            self.schedulers[rank].fail(chunk, error, now)

    def wants_drafts(self) -> dict[str, int]:
        """Return the requests for which the next call of `plan` could use drafts, with the most tokens for each."""
        return {
            request_id: most
            for scheduler in self.schedulers
            for request_id, most in scheduler.wants_drafts().items()
        }

    def plan(self, now: float, drafts: Mapping[str, Draft] = NO_DRAFTS) -> StepPlan | None:
        """Return the next step, with a plan for each rank that has something to compute; None if no rank has."""
        of_ranks: list[dict[str, Draft]] = [{} for _ in self.schedulers]
        for request_id, draft in drafts.items():
            if (rank := self._rank_of.get(request_id)) is not None:
                of_ranks[rank][request_id] = draft
        # Long prompts of one rank would keep the answers of all others waiting.
        decoding = [scheduler.has_decodes for scheduler in self.schedulers]
        plans = tuple(
            scheduler.plan(now, of_ranks[rank], others_decode=any(decoding[:rank] + decoding[rank + 1 :]))
            for rank, scheduler in enumerate(self.schedulers)
        )
        if not any(plan is not None for plan in plans):
            return None
        for own in plans if self._to_compute else ():
            for chunk in () if own is None else own.chunks:
                if chunk.begins:
                    self._no_longer_waits(chunk.request_id)
        self._num_steps += 1
        self._steps.append(self._num_steps)
        return StepPlan(self._num_steps, (), ranks=plans)

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[TokenEvent]:
        """Take the samples of all ranks for the oldest plan in flight. Returns the events for clients."""
        if not self._steps or not self._steps[0] == plan.step_id == result.step_id:
            raise ValueError(f"step {result.step_id} is committed as {plan.step_id}, out of order")
        self._steps.popleft()
        sampled = {each.request_id: each for each in result.sampled}
        busiest = max(range(len(plan.ranks)), key=plan.rank_tokens.__getitem__)
        events: list[TokenEvent] = []
        for rank, (scheduler, own) in enumerate(zip(self.schedulers, plan.ranks, strict=True)):
            if own is None:
                continue
            ids = {chunk.request_id for chunk in own.chunks}
            part = msgspec.structs.replace(
                result,
                step_id=own.step_id,
                sampled=tuple(sampled[chunk.request_id] for chunk in own.chunks if chunk.samples),
                scored=tuple(each for each in result.scored if each.request_id in ids),
            )
            events += scheduler.commit(own, part, now, sets_pace=rank == busiest)
        return self._told(events)

    def take_events(self) -> list[TokenEvent]:
        """Return the events of requests that ended outside of a commit. Call this after `plan`."""
        return self._told([event for scheduler in self.schedulers for event in scheduler.take_events()])

    def take_kv_events(self) -> list[KVEvent]:
        """Return the changes since the last call of what any rank can reuse."""
        return self._index.merge([scheduler.take_kv_events() for scheduler in self.schedulers])

    def restart_kv_events(self, now: float) -> None:
        """Make the next events start with the whole index."""
        self._index.restart()
        for scheduler in self.schedulers:
            scheduler.restart_kv_events(now)

    @property
    def num_running(self) -> int:
        return sum(scheduler.num_running for scheduler in self.schedulers)

    @property
    def num_waiting(self) -> int:
        return sum(scheduler.num_waiting for scheduler in self.schedulers)

    @property
    def has_work(self) -> bool:
        return any(scheduler.has_work for scheduler in self.schedulers)

    def next_wakeup(self, now: float) -> float | None:
        """Return the time to call `plan` again even if nothing happens before."""
        times_s = [scheduler.next_wakeup(now) for scheduler in self.schedulers]
        return min((time_s for time_s in times_s if time_s is not None), default=None)

    def stats(self) -> EngineStats:
        """Return the figures of all ranks together."""
        return added_up([scheduler.stats() for scheduler in self.schedulers])

    def check_integrity(self) -> None:
        """Raise unless all records agree. Slow: for tests."""
        for rank, scheduler in enumerate(self.schedulers):
            scheduler.check_integrity()
            own = {request_id for request_id, owner in self._rank_of.items() if owner == rank}
            assert own == scheduler.unfinished, f"rank {rank} has other requests than it was given"
            waiting = sum(count for request_id, count in self._to_compute.items() if request_id in own)
            assert waiting == self._waiting_tokens[rank]

    def _told(self, events: list[TokenEvent]) -> list[TokenEvent]:
        if self._kept_elsewhere:
            events = [self._settled(event) for event in events]
        for event in events:
            if event.finish_reason is not None:
                self._forget(event.request_id)
        return events

    def _note_kept(self, request_id: str, rank: int, now: float) -> None:
        sequence = self.schedulers[rank].sequence_of(request_id)
        if sequence is None:
            return
        others = (scheduler for other, scheduler in enumerate(self.schedulers) if other != rank)
        most = max((scheduler.num_kept_tokens(sequence, now) for scheduler in others), default=0)
        if most:
            self._kept_elsewhere[request_id] = most

    def _settled(self, event: TokenEvent) -> TokenEvent:
        """Count what another rank keeps as read, not as written once more."""
        most = self._kept_elsewhere.get(event.request_id)
        if event.cache_use is None or most is None:
            return event
        use = event.cache_use.reading(most)
        num_cached = max(event.num_cached_tokens or 0, use.read_tokens)
        return msgspec.structs.replace(event, cache_use=use, num_cached_tokens=num_cached)

    def _forget(self, request_id: str) -> None:
        self._kept_elsewhere.pop(request_id, None)
        self._no_longer_waits(request_id)
        self._rank_of.pop(request_id, None)

    def _no_longer_waits(self, request_id: str) -> None:
        num_tokens = self._to_compute.pop(request_id, None)
        if num_tokens is not None:
            self._waiting_tokens[self._rank_of[request_id]] -= num_tokens


def config_of_rank(config: SchedulerConfig, num_ranks: int) -> SchedulerConfig:
    """Return the settings of one rank. Ranks share the bounds of the queue; other settings count for each."""
    return msgspec.structs.replace(
        config,
        max_queue_requests=-(-config.max_queue_requests // num_ranks),
        max_queue_tokens=-(-config.max_queue_tokens // num_ranks),
    )
