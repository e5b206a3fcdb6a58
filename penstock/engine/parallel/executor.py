"""The first rank's executors: they run every plan on all ranks. Know no tensors of their own and no processes.

Other ranks learn of requests, tokens and plans from messages that go out before this rank starts on a plan, and
compute it at the same time. Whichever rank samples, the first rank has the result.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.core.clock import Clock
from penstock.core.plan import Chunk, SampledToken, StepPlan, StepResult
from penstock.core.request import Request
from penstock.engine.grammar_masks import CompiledGrammar
from penstock.engine.parallel.local_rank import LocalRank, MicroBatcher
from penstock.engine.parallel.messages import Added, Appended, News, Removed, Step
from penstock.engine.parallel.processes import RankProcesses


class FirstRank:
    def __init__(self, local: LocalRank, others: RankProcesses) -> None:
        self._local = local
        self._others = others
        self._news: list[News] = []  # that the others do not know yet
        self._is_closed = False

    def add(self, request: Request, grammar: CompiledGrammar | None = None) -> None:
        self._local.add(request, grammar)
        self._news.append(Added(request))

    def append(self, request_id: str, token_ids: tuple[int, ...]) -> None:
        self._local.executor.append(request_id, token_ids)
        self._news.append(Appended(request_id, token_ids))

    def remove(self, request_id: str) -> None:
        self._local.executor.remove(request_id)
        self._news.append(Removed(request_id))

    @property
    def pids(self) -> Sequence[int]:
        """Of the other ranks."""
        return self._others.pids

    def check(self) -> None:
        """Raises when a rank has gone."""
        self._others.check()

    def close(self) -> None:
        """Ends the other ranks, whatever they are doing. May be called again."""
        if not self._is_closed:
            self._is_closed = True
            self._others.close()
            self._local.close()

    def _run(self, plan: StepPlan, in_flight: dict[str, int]) -> None:
        news, self._news = tuple(self._news), []
        with self._others.explaining():
            self._others.tell(Step(news, plan, in_flight))
            self._local.run(plan, in_flight)


class TensorParallelExecutor(FirstRank):
    """One stage: all ranks compute the same plan, and this one samples."""

    def submit(self, plan: StepPlan) -> tuple[Chunk, ...]:
        self._run(plan, {})
        return ()

    def collect(self) -> StepResult:
        with self._others.explaining():
            return self._local.collect()


@dataclass(frozen=True, slots=True)
class _Submitted:
    step_id: int
    num_parts: int
    started_s: float


class PipelineExecutor(FirstRank):
    """Several stages, of which this rank is in the first. A plan goes through them in parts, and its samples come
    back part by part; a part with a token that is still being sampled waits for it here."""

    def __init__(self, local: LocalRank, others: RankProcesses, clock: Clock) -> None:
        super().__init__(local, others)
        self._clock = clock
        self._batcher = MicroBatcher(local.shard.num_stages)
        self._submitted: deque[_Submitted] = deque()
        self._arrived: deque[tuple[SampledToken, ...]] = deque()  # of parts, in order
        self._awaited: Counter[str] = Counter()  # samples in flight, by request
        self._latest: dict[str, int] = {}  # the newest sampled token of requests that have not ended
        self._finished_s = 0.0

    def add(self, request: Request, grammar: CompiledGrammar | None = None) -> None:
        super().add(request, grammar)
        self._latest[request.id] = 0

    def remove(self, request_id: str) -> None:
        super().remove(request_id)
        self._batcher.forget(request_id)
        self._latest.pop(request_id, None)

    def submit(self, plan: StepPlan) -> tuple[Chunk, ...]:
        started_s = self._clock.now()
        parts = self._batcher.split(plan)
        for part in parts:
            in_flight = [chunk.request_id for chunk in part.chunks if chunk.in_flight]
            while any(self._awaited[request_id] for request_id in in_flight):
                self._receive()
            known = {request_id: self._latest.get(request_id, 0) for request_id in in_flight}
            self._run(part, known)
            self._awaited.update(chunk.request_id for chunk in part.chunks if chunk.samples)
        self._submitted.append(_Submitted(plan.step_id, len(parts), started_s))
        return ()

    def collect(self) -> StepResult:
        step = self._submitted.popleft()
        while len(self._arrived) < step.num_parts:
            self._receive()
        sampled = tuple(token for _ in range(step.num_parts) for token in self._arrived.popleft())
        # Steps overlap: each has occupied the pipeline since the one before it left.
        before_s, self._finished_s = self._finished_s, self._clock.now()
        return StepResult(step.step_id, sampled, self._finished_s - max(step.started_s, before_s))

    def _receive(self) -> None:
        message = self._others.sampled.get()
        if message is None:
            self._others.check()
            return
        self._arrived.append(message.sampled)
        for token in message.sampled:
            self._awaited[token.request_id] -= 1
            if not self._awaited[token.request_id]:
                del self._awaited[token.request_id]
            if token.request_id in self._latest:
                self._latest[token.request_id] = token.token_id
