"""A driver of several schedulers behind one object: each rank has a strict executor of its own."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.core.plan import Chunk, StepPlan, StepResult
from penstock.scheduler.ranks import RankSchedulers
from tests.kvcache.chains import Mirror
from tests.scheduler.strict import Driver, Faults, StrictExecutor, make_request


class RanksExecutor:
    """Hands each rank its plan, and checks that a request is on one rank alone."""

    def __init__(self, executors: list[StrictExecutor]) -> None:
        self._executors = executors
        self.last_step_id = 0
        self.num_idle = 0  # ranks without a plan, in all steps

    @property
    def faults(self) -> Faults:
        return self._executors[0].faults

    @faults.setter
    def faults(self, faults: Faults) -> None:
        for each in self._executors:
            each.faults = faults

    @property
    def prompts(self) -> dict[str, tuple[int, ...]]:
        return self._executors[0].prompts

    def execute(self, plan: StepPlan, tokens: dict[str, list[int]], tenants: dict[str, str]) -> StepResult:
        assert plan.step_id == self.last_step_id + 1
        self.last_step_id = plan.step_id
        assert len(plan.ranks) == len(self._executors)
        assert msgspec.structs.replace(plan, ranks=()) == StepPlan(plan.step_id, ())
        assert sum(plan.rank_tokens) == plan.num_tokens
        self.num_idle += plan.ranks.count(None)
        results = [
            executor.execute(own, tokens, tenants)
            for executor, own in zip(self._executors, plan.ranks, strict=True)
            if own is not None
        ]
        sampled = [token for each in reversed(results) for token in each.sampled]
        assert len({token.request_id for token in sampled}) == len(sampled), "a request is on two ranks"
        scored = [chunk for each in results for chunk in each.scored]
        return StepResult(
            plan.step_id, tuple(sampled), max(each.elapsed_s for each in results), tuple(scored)
        )

    def spoil(self, chunk: Chunk) -> None:
        for each in self._executors:
            row = each.rows.get(chunk.request_id)
            if row is not None and row.num_computed > chunk.start:
                each.spoil(chunk)

    def deliver(self, request_id: str, token_ids: tuple[int, ...]) -> None:
        """Rows of an aborted request whose id is in use on another rank hear nothing of it."""
        for each in self._executors:
            if request_id in each.rows:
                each.deliver(request_id, token_ids)


class RanksDriver(Driver):
    def __init__(self, num_ranks: int, **settings: Any) -> None:
        super().__init__(**settings)
        drivers = [self, *(Driver(**settings) for _ in range(num_ranks - 1))]
        prompts = self.executor.prompts
        for each in drivers:
            each.executor.prompts = prompts
        self.caches = [each.cache for each in drivers]
        executor: Any = RanksExecutor([each.executor for each in drivers])
        scheduler: Any = RankSchedulers([each.scheduler for each in drivers])
        self.ranks: RankSchedulers = scheduler
        self.scheduler, self.executor = scheduler, executor
        self.mirror = Mirror()

    def rank_of(self, request_id: str) -> int:
        return self.ranks._rank_of[request_id]

    def expect_short_answers(self) -> None:
        for scheduler in self.ranks.schedulers:
            for _ in range(8):
                scheduler._lengths.observe(make_request("short", 4), 1)

    def check_index(self) -> None:
        """A reader of the events knows what any rank has, and nothing else."""
        self.mirror.apply(self.ranks.take_kv_events())
        known = {*(each for cache in self.caches for each in (*cache.pool.index, *cache.pool.host.index))}
        assert self.mirror.hashes == known

    def run(self, max_steps: int = 10_000) -> None:
        super().run(max_steps)
        assert all(cache.pool.num_active == 0 for cache in self.caches)
        self.check_index()
