"""Runs plans on an encoder, which embeds texts and generates nothing. Knows nothing of queues, clients or text.

The scheduler treats a text like any prompt, and may cut it into chunks. An encoder cannot: every token sees all
others. It therefore computes a text whole, in the step that has its last chunk. Blocks are numbers here, with no
memory behind them.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch

from penstock.core.clock import Clock
from penstock.core.plan import Chunk, StepPlan, StepResult
from penstock.core.request import Request
from penstock.engine.pooling import pool_states, sampled_vector, unit_vector
from penstock.models.bert import BertEncoder

if TYPE_CHECKING:
    from penstock.engine.grammar import CompiledGrammar


class EncoderExecutor:
    def __init__(self, model: BertEncoder, clock: Clock) -> None:
        self._model = model
        self._clock = clock
        self._texts: dict[str, tuple[int, ...]] = {}
        self._submitted: deque[StepResult] = deque()

    def add(self, request: Request, grammar: CompiledGrammar | None = None) -> None:
        self._texts[request.id] = request.prompt_token_ids

    def append(self, request_id: str, token_ids: tuple[int, ...]) -> None:
        """There are no tokens to follow a text."""

    def remove(self, request_id: str) -> None:
        self._texts.pop(request_id, None)

    def submit(self, plan: StepPlan) -> tuple[Chunk, ...]:
        started_s = self._clock.now()
        request_ids = [chunk.request_id for chunk in plan.chunks if chunk.samples]
        sampled = []
        if request_ids:
            with torch.inference_mode():
                texts = [self._texts[request_id] for request_id in request_ids]
                for request_id, states in zip(request_ids, self._model.hidden_states(texts), strict=True):
                    pooled = pool_states(states, self._model.config.pooling)
                    sampled.append(sampled_vector(request_id, unit_vector(pooled)))
        self._submitted.append(StepResult(plan.step_id, tuple(sampled), self._clock.now() - started_s))
        return ()

    def collect(self) -> StepResult:
        return self._submitted.popleft()
