"""Makes embeddings from hidden states, in a decoder's steps or by an encoder's executor. Knows no queue, client or
text.

Sums over a prompt's chunks are kept in double precision, so that the single-precision result does not depend on how a
prompt was cut into chunks.

The scheduler treats a text like any prompt, and may cut it into chunks. An encoder cannot: every token sees all
others. An encoder therefore computes a text whole, in the step that has its last chunk. An encoder's blocks are
numbers with no memory behind them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.core.clock import Clock
from penstock.core.plan import NOT_A_NUMBER, Chunk, SampledToken, StepPlan, StepResult
from penstock.core.request import Pooling, Request
from penstock.engine.batch import HostStep
from penstock.models.bert import BertEncoder

if TYPE_CHECKING:
    from penstock.engine.grammar_masks import CompiledGrammar


class HiddenPooler:
    """Follows the requests with pooling, from `begin` to `end`."""

    def __init__(self) -> None:
        self._poolings: dict[str, Pooling] = {}
        self._sums: dict[str, Tensor] = {}  # of prompts that are partly computed

    def begin(self, request: Request) -> None:
        if request.pooling is not None:
            self._poolings[request.id] = request.pooling

    def end(self, request_id: str) -> None:
        self._poolings.pop(request_id, None)
        self._sums.pop(request_id, None)

    @property
    def request_ids(self) -> Collection[str]:
        return self._poolings.keys()

    def pools(self, request_id: str) -> bool:
        return request_id in self._poolings

    def any_of(self, chunks: Sequence[Chunk]) -> bool:
        return bool(self._poolings) and any(chunk.request_id in self._poolings for chunk in chunks)

    def take(self, hidden: Tensor, step: HostStep, chunks: Sequence[Chunk]) -> dict[str, Tensor]:
        """Read this step's hidden states [T, hidden]; returns the unit vectors, float32 on the device, of the prompts
        that ended in it."""
        finished = {}
        for index, chunk in enumerate(chunks):
            pooling = self._poolings.get(chunk.request_id)
            if pooling is None:
                continue
            states = hidden[int(step.chunk_starts[index]) : int(step.chunk_starts[index + 1])]
            pooled = self._pool(chunk, pooling, states)
            if chunk.samples:
                self._sums.pop(chunk.request_id, None)
                finished[chunk.request_id] = unit_vector(pooled)
            else:
                self._sums[chunk.request_id] = pooled
        return finished

    def _pool(self, chunk: Chunk, pooling: Pooling, states: Tensor) -> Tensor:
        pooled = pool_states(states, pooling)
        if pooling == "last" or chunk.start == 0:
            return pooled
        before = self._sums[chunk.request_id]
        return before if pooling == "first" else before + pooled


def pool_states(states: Tensor, pooling: Pooling) -> Tensor:
    """Pool [length, hidden] to float64 [hidden]. For a mean this is the sum, since only the direction matters."""
    if pooling == "mean":
        return states.double().sum(dim=0)
    return states[0 if pooling == "first" else -1].double()


def unit_vector(vector: Tensor) -> Tensor:
    """Scale a vector to length 1, in float32. A vector of zeros stays as it is; NaNs stay."""
    length = vector.norm()
    return (vector / torch.where(length > 0, length, 1.0)).float()


def sampled_vector(request_id: str, vector: Tensor) -> SampledToken:
    """Return the sample that a step reports for an embedded prompt."""
    host = vector.cpu()
    if not bool(torch.isfinite(host).all()):
        return SampledToken(request_id, 0, error=NOT_A_NUMBER)
    return SampledToken(request_id, 0, embedding=host.numpy().astype("<f4").tobytes())


class EncoderExecutor:
    def __init__(self, model: BertEncoder, clock: Clock) -> None:
        self._model = model
        self._clock = clock
        self._texts: dict[str, tuple[int, ...]] = {}
        self._submitted: deque[StepResult] = deque()

    def add(self, request: Request, grammar: CompiledGrammar | None = None) -> None:
        self._texts[request.id] = request.prompt_token_ids

    def append(self, request_id: str, token_ids: tuple[int, ...]) -> None:
        """Do nothing: no tokens follow a text."""

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
