"""Runs plans with data-parallel attention: each rank has requests and KV of its own, and samples for its requests.

The first rank's executor learns from the plans which rank has a request, tells each rank of its own requests, and
puts the results of all ranks together. Starts no process.
"""

from __future__ import annotations

from collections import deque

from penstock.core.plan import Chunk, StepPlan, StepResult
from penstock.core.request import Request
from penstock.engine.grammar_masks import CompiledGrammar
from penstock.engine.parallel.executor import FirstRank, LocalRank
from penstock.engine.parallel.experts import ExpertBalancer
from penstock.engine.parallel.processes import (
    Added,
    Appended,
    CountExperts,
    ExpertsPlaced,
    News,
    RankProcesses,
    Removed,
    Report,
    Sampled,
    Step,
)


class DataParallelExecutor(FirstRank):
    def __init__(
        self, local: LocalRank, others: RankProcesses, balancer: ExpertBalancer | None = None
    ) -> None:
        super().__init__(local, others, balancer)
        num_ranks = local.shard.data_size
        self._waiting: dict[str, tuple[Request, CompiledGrammar | None]] = {}  # in no plan yet
        self._rank_of: dict[str, int] = {}
        self._submitted: deque[int] = deque()  # ids of steps
        self._news_of: list[list[News]] = [[] for _ in range(num_ranks)]  # the first rank's list stays empty

    def add(self, request: Request, grammar: CompiledGrammar | None = None) -> None:
        self._waiting[request.id] = request, grammar

    def append(self, request_id: str, token_ids: tuple[int, ...]) -> None:
        rank = self._rank_of[request_id]
        if rank == 0:
            self._local.executor.append(request_id, token_ids)
        else:
            self._news_of[rank].append(Appended(request_id, token_ids))

    def remove(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)
        rank = self._rank_of.pop(request_id, None)
        if rank == 0:
            self._local.executor.remove(request_id)
        elif rank is not None:
            self._news_of[rank].append(Removed(request_id))

    def submit(self, plan: StepPlan) -> tuple[Chunk, ...]:
        for rank, own in enumerate(plan.ranks):
            if own is not None:
                self._place(own, rank)
        with self._others.explaining():
            move = self._next_move()
            news, self._news_of = self._news_of, [[] for _ in self._news_of]
            nothing = StepPlan(plan.step_id, ())
            plans = [nothing if own is None else own for own in plan.ranks]
            computes = bool(plan.num_tokens)
            self._others.tell_each(lambda rank: Step(tuple(news[rank]), plans[rank], others_compute=computes))
            if move is not None:
                self._local.place(move)
            self._local.run(plans[0], {}, others_compute=computes)
        self._submitted.append(plan.step_id)
        return ()

    def collect(self) -> StepResult:
        with self._others.explaining():
            self._others.tell(Report())
            own = Sampled.of(self._local.collect())
            results = [own, *(self._others.next_sampled(rank) for rank in self._other_ranks)]
        return StepResult(
            self._submitted.popleft(),
            tuple(token for each in results for token in each.sampled),
            max(each.elapsed_s for each in results),
            tuple(chunk for each in results for chunk in each.scored),
            max(each.encoder_s for each in results),
            any(each.is_unusual for each in results),
        )

    @property
    def _other_ranks(self) -> range:
        return range(1, len(self._news_of))

    def _place(self, plan: StepPlan, rank: int) -> None:
        """Give requests to the rank that begins to compute them."""
        begun = (chunk.request_id for chunk in plan.chunks if chunk.begins)
        encoded = (encoding.request_id for encoding in plan.encodings)
        for request_id in (*encoded, *begun):
            waiting = self._waiting.pop(request_id, None)
            if waiting is None:
                continue
            request, grammar = waiting
            self._rank_of[request_id] = rank
            if rank == 0:
                self._local.add(request, grammar)
            else:
                self._news_of[rank].append(Added(request))

    def _next_move(self) -> ExpertsPlaced | None:
        """Count the tokens of experts where that is due. Returns the move of experts before the next step, of which
        the other ranks are told."""
        if self.balancer is None:
            return None
        if self.balancer.counts_next:
            self._others.tell(CountExperts())
        move = self.balancer.next_move()
        if move is not None:
            self._tell_all(move)
        return move

    def _tell_all(self, news: News) -> None:
        for rank in self._other_ranks:
            self._news_of[rank].append(news)
