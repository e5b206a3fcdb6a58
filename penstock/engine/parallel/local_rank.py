"""Runs a step on one rank: its rows, one pass through its part of the model, and on the last stage a sample."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
import torch

from penstock.core.plan import SampledToken, StepPlan, StepResult
from penstock.core.request import Request
from penstock.engine.batch import BatchRows
from penstock.engine.executor import ModelExecutor
from penstock.engine.grammar import CompiledGrammar, GrammarCompiler
from penstock.engine.parallel.mesh import Mesh
from penstock.engine.parallel.messages import Added, Appended, News, Removed
from penstock.engine.parallel.microbatches import without_samples
from penstock.engine.staging import MAX_STEPS_IN_FLIGHT


class LocalRank:
    """`compiler` is needed on a last stage that is not the first: it masks logits itself."""

    def __init__(
        self, executor: ModelExecutor, rows: BatchRows, mesh: Mesh, compiler: GrammarCompiler | None
    ) -> None:
        self.shard = mesh.shard
        self.executor = executor
        self._rows = rows
        self._mesh = mesh
        self._samples_elsewhere = not self.shard.is_last_stage
        self._reports = self.shard.num_stages > 1 and self.shard.is_last_stage and self.shard.tensor_rank == 0
        self._compiler = compiler if self._reports else None
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

    def add(self, request: Request, grammar: CompiledGrammar | None) -> None:
        if self._samples_elsewhere:  # hidden states too are of use on the last stage alone
            request, grammar = msgspec.structs.replace(request, pooling=None), None
        self.executor.add(request, grammar)

    def run(self, plan: StepPlan, in_flight: Mapping[str, int]) -> tuple[SampledToken, ...] | None:
        """What was sampled, on the rank that reports it; steps of other ranks are collected when they are done."""
        if in_flight:
            rows = torch.tensor([self._rows.row(request_id) for request_id in in_flight])
            tokens = torch.tensor(list(in_flight.values()), dtype=torch.int32)
            last_tokens = self._rows.last_tokens
            last_tokens[rows.to(last_tokens.device)] = tokens.to(last_tokens.device)
        if self._num_submitted == MAX_STEPS_IN_FLIGHT:
            self.collect()
        self.executor.submit(without_samples(plan) if self._samples_elsewhere else plan)
        self._num_submitted += 1
        return self.collect().sampled if self._reports else None

    def collect(self) -> StepResult:
        self._num_submitted -= 1
        return self.executor.collect()

    def close(self) -> None:
        if self._compiler is not None:
            self._compiler.close()
        self._mesh.close()

    def _compiled(self, request: Request) -> CompiledGrammar | None:
        """The first rank has compiled the grammar before it told anybody of the request, so this takes a moment."""
        if self._compiler is None or request.sampling.grammar is None:
            return None
        return self._compiler.compile(request.sampling.grammar).result()
