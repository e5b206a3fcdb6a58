"""Runs plans on several ranks. Holds a step on one rank, the executors of the first rank, which run every plan on all
ranks, and the division of a plan into parts that follow each other through a pipeline. Starts no process.

Other ranks learn of requests, tokens and plans from messages that go out before the first rank starts on a plan, and
compute it at the same time. Whichever rank samples, the first rank has the result.

While one part of a plan is in the second stage, the next part is in the first. A running request stays in the same
part from step to step, so that the part's next step can begin as soon as its own tokens are sampled, whatever the
other parts do.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import msgspec
import torch

from penstock.core.clock import Clock
from penstock.core.plan import Chunk, StepPlan, StepResult
from penstock.core.request import Request
from penstock.engine.batch import BatchRows
from penstock.engine.executor import ModelExecutor
from penstock.engine.grammar import GrammarCompiler
from penstock.engine.grammar_masks import CompiledGrammar
from penstock.engine.parallel.experts import ExpertBalance, ExpertBalancer
from penstock.engine.parallel.mesh import Mesh
from penstock.engine.parallel.ops import SharedExperts
from penstock.engine.parallel.processes import (
    AdapterDropped,
    AdapterLoaded,
    Added,
    Appended,
    ExpertsPlaced,
    News,
    RankProcesses,
    Removed,
    Sampled,
    Step,
)
from penstock.engine.staging import MAX_STEPS_IN_FLIGHT

_SMALLEST_PIECE = 16  # tokens of a prompt that are worth a part of their own


@dataclass(slots=True)
class _Part:
    chunks: list[Chunk] = field(default_factory=list)
    num_tokens: int = 0

    def add(self, chunk: Chunk) -> None:
        self.chunks.append(chunk)
        self.num_tokens += chunk.num_tokens


class MicroBatcher:
    def __init__(self, num_parts: int) -> None:
        self._num_parts = num_parts
        self._part_of: dict[str, int] = {}  # of requests that decode
        self._num_in_part = Counter(dict.fromkeys(range(num_parts), 0))

    def forget(self, request_id: str) -> None:
        part = self._part_of.pop(request_id, None)
        if part is not None:
            self._num_in_part[part] -= 1

    def split(self, plan: StepPlan) -> tuple[StepPlan, ...]:
        """Cut a plan into plans with the same step id, to be run one after the other. A request that begins with a
        cached prefix may read what another request writes in the same step: it comes in the last part."""
        parts = [_Part() for _ in range(self._num_parts)]
        prompts = []
        for chunk in plan.chunks:
            if chunk.begins and chunk.start > 0:
                parts[-1].add(chunk)
            elif chunk.num_tokens == 1 or chunk.drafts:
                parts[self._part(chunk.request_id)].add(chunk)
            else:
                prompts.append(chunk)
        share = -(-plan.num_tokens // self._num_parts)
        for chunk in prompts:
            _spread(chunk, parts, share)
        filled = [_in_order(part.chunks) for part in parts if part.chunks]
        first = StepPlan(plan.step_id, filled[0], plan.released, plan.copies)
        return first, *(StepPlan(plan.step_id, chunks) for chunks in filled[1:])

    def _part(self, request_id: str) -> int:
        part = self._part_of.get(request_id)
        if part is None:
            part = min(self._num_in_part, key=self._num_in_part.__getitem__)
            self._part_of[request_id] = part
            self._num_in_part[part] += 1
        return part


def without_samples(plan: StepPlan) -> StepPlan:
    """Return the plan without samples, for stages that have no logits."""
    chunks = tuple(
        msgspec.structs.replace(chunk, samples=False, scores_from=None)
        if chunk.samples or chunk.scores_from is not None
        else chunk
        for chunk in plan.chunks
    )
    return msgspec.structs.replace(plan, chunks=chunks)


def _spread(chunk: Chunk, parts: list[_Part], share: int) -> None:
    """Fill each part up to its size with the next piece of the prompt; the last part takes the rest."""
    done = 0
    for part in parts:
        left = chunk.num_tokens - done
        room = max(0, share - part.num_tokens) // _SMALLEST_PIECE * _SMALLEST_PIECE
        size = left if part is parts[-1] or left - room < _SMALLEST_PIECE else room
        if size == 0:
            continue
        is_first, is_last = done == 0, size == left
        part.add(
            msgspec.structs.replace(
                chunk,
                start=chunk.start + done,
                num_tokens=size,
                samples=chunk.samples and is_last,
                new_block_ids=chunk.new_block_ids if is_first else (),
                begins=chunk.begins and is_first,
            )
        )
        done += size
        if is_last:
            return


def _in_order(chunks: list[Chunk]) -> tuple[Chunk, ...]:
    """Order chunks as in every plan: single tokens first, then chunks with drafts."""
    return tuple(sorted(chunks, key=lambda chunk: (chunk.num_tokens > 1, not chunk.drafts)))


class LocalRank:
    """Runs steps on one rank. A last stage that is not the first needs a `compiler`, because it masks logits
    itself."""

    def __init__(
        self,
        executor: ModelExecutor,
        rows: BatchRows,
        mesh: Mesh,
        compiler: GrammarCompiler | None,
        balance: ExpertBalance | None = None,
        experts: SharedExperts | None = None,
    ) -> None:
        """`balance` has the experts that may move between ranks, and `experts` those that ranks with tokens of their
        own share."""
        self.shard = mesh.shard
        self.executor = executor
        self.lora = executor.forward.lora
        self.balance = balance
        self._experts = experts
        self._rows = rows
        self._mesh = mesh
        self._samples_elsewhere = not self.shard.is_last_stage
        self._reports = self.shard.num_stages > 1 and self.shard.is_last_stage and self.shard.tensor_rank == 0
        self._compiler = compiler if self._reports or self.shard.data_rank > 0 else None
        self._num_submitted = 0

    def take(self, news: Iterable[News]) -> None:
        for item in news:
            match item:
                case Added(request=request):
                    self.add(request, self._compiled(request))
                case Appended(request_id=request_id, token_ids=token_ids):
                    self.executor.append(request_id, token_ids)
                case Removed(request_id=request_id):
                    self.executor.remove(request_id)
                case AdapterLoaded(adapter=adapter):
                    assert self.lora is not None, "the first rank has one too"
                    # The first rank has just read the files.
                    self.lora.load(adapter, self.lora.read(adapter))
                case AdapterDropped(digest=digest):
                    assert self.lora is not None
                    self.lora.drop(digest)
                case ExpertsPlaced():
                    self.place(item)

    def add(self, request: Request, grammar: CompiledGrammar | None) -> None:
        if self._samples_elsewhere:  # hidden states too are of use on the last stage alone
            request, grammar = msgspec.structs.replace(request, pooling=None), None
        self.executor.add(request, grammar)

    def place(self, move: ExpertsPlaced) -> None:
        """Bring experts to other ranks, together with all ranks."""
        assert self.balance is not None, "the first rank has one too"
        with torch.inference_mode():
            self.balance.move(move.layer, move.experts)

    def count_experts(self) -> None:
        """Add up the tokens of experts, together with all ranks."""
        assert self.balance is not None, "the first rank has one too"
        with torch.inference_mode():
            self.balance.take_loads()

    def run(
        self, plan: StepPlan, in_flight: Mapping[str, int], *, others_compute: bool = False
    ) -> StepResult | None:
        """Run a step. Returns the result on the rank that reports it; steps of other ranks are collected later."""
        if self.balance is not None:
            self.balance.begin_step(plan.num_tokens)
        if in_flight:
            rows = torch.tensor([self._rows.row(request_id) for request_id in in_flight])
            tokens = torch.tensor(list(in_flight.values()), dtype=torch.int32)
            last_tokens = self._rows.last_tokens
            last_tokens[rows.to(last_tokens.device)] = tokens.to(last_tokens.device)
        if self._num_submitted == MAX_STEPS_IN_FLIGHT:
            self.collect()
        self.executor.submit(without_samples(plan) if self._samples_elsewhere else plan)
        self._num_submitted += 1
        if others_compute and not plan.chunks:
            assert self._experts is not None, "ranks share experts"
            with torch.inference_mode():
                self._experts.serve()
        return self.collect() if self._reports else None

    def collect(self) -> StepResult:
        self._num_submitted -= 1
        return self.executor.collect()

    def close(self) -> None:
        if self._compiler is not None:
            self._compiler.close()
        self._mesh.close()

    def _compiled(self, request: Request) -> CompiledGrammar | None:
        """Compile the request's grammar. The first rank has compiled it before, so it is known to be good."""
        if self._compiler is None or request.sampling.grammar is None:
            return None
        return self._compiler.compile(request.sampling.grammar, request.tenant).result()


class FirstRank:
    def __init__(
        self, local: LocalRank, others: RankProcesses, balancer: ExpertBalancer | None = None
    ) -> None:
        self.balancer = balancer
        self._local = local
        self._others = others
        self._news: list[News] = []  # not sent to the other ranks yet
        self._is_closed = False
        if local.lora is not None:
            local.lora.on_load = lambda adapter: self._tell_all(AdapterLoaded(adapter))
            local.lora.on_drop = lambda digest: self._tell_all(AdapterDropped(digest))

    def add(self, request: Request, grammar: CompiledGrammar | None = None) -> None:
        self._local.add(request, grammar)
        self._tell_all(Added(request))

    def append(self, request_id: str, token_ids: tuple[int, ...]) -> None:
        self._local.executor.append(request_id, token_ids)
        self._tell_all(Appended(request_id, token_ids))

    def remove(self, request_id: str) -> None:
        self._local.executor.remove(request_id)
        self._tell_all(Removed(request_id))

    @property
    def pids(self) -> Sequence[int]:
        """Return the process ids of the other ranks."""
        return self._others.pids

    @property
    def kv_connections(self) -> Sequence[Connection]:
        """Return the connections to the other ranks' threads that move KV."""
        return self._others.kv_connections

    def check(self) -> None:
        """Raise when a rank has gone."""
        self._others.check()

    def close(self) -> None:
        """End the other ranks, whatever they are doing. May be called again."""
        if not self._is_closed:
            self._is_closed = True
            self._others.close()
            self._local.close()

    def _tell_all(self, news: News) -> None:
        self._news.append(news)

    def _run(self, plan: StepPlan, in_flight: dict[str, int]) -> None:
        move = self.balancer.next_move() if self.balancer is not None else None
        news, self._news = (*self._news, *([move] if move is not None else [])), []
        with self._others.explaining():
            self._others.tell(Step(news, plan, in_flight))
            if move is not None:
                self._local.place(move)
            self._local.run(plan, in_flight)


class TensorParallelExecutor(FirstRank):
    """The executor of one stage: all ranks compute the same plan, and this rank samples."""

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
    """The executor of several stages; this rank is in the first. A plan goes through the stages in parts, and its
    samples come back part by part. A part waits here for tokens that are still being sampled."""

    def __init__(self, local: LocalRank, others: RankProcesses, clock: Clock) -> None:
        super().__init__(local, others)
        self._clock = clock
        self._batcher = MicroBatcher(local.shard.num_stages)
        self._sampling_rank = (local.shard.num_stages - 1) * local.shard.tensor_size
        self._submitted: deque[_Submitted] = deque()
        self._arrived: deque[Sampled] = deque()  # of parts, in order
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
        parts = [self._arrived.popleft() for _ in range(step.num_parts)]
        sampled = tuple(token for part in parts for token in part.sampled)
        scored = tuple(chunk for part in parts for chunk in part.scored)
        # Steps overlap: each step has the pipeline from the end of the step before.
        before_s, self._finished_s = self._finished_s, self._clock.now()
        elapsed_s = self._finished_s - max(step.started_s, before_s)
        return StepResult(step.step_id, sampled, elapsed_s, scored)

    def _receive(self) -> None:
        message = self._others.next_sampled(self._sampling_rank)
        self._arrived.append(message)
        for token in message.sampled:
            self._awaited[token.request_id] -= 1
            if not self._awaited[token.request_id]:
                del self._awaited[token.request_id]
            if token.request_id in self._latest:
                self._latest[token.request_id] = token.token_id
