"""Makes vectors from hidden states, in a decoder's steps or by an encoder's executor: embeddings, or the logits of a
classifier. Knows no queue, client or text.

Sums over a prompt's chunks are kept in double precision, so that the single-precision result does not depend on how a
prompt was cut into chunks.

The scheduler treats a text like any prompt, and may cut it into chunks. An encoder cannot: every token attends to all
others. An encoder therefore computes a text whole, in the step that has its last chunk. An encoder's blocks are
ids without memory.
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
from penstock.models.encoders.load import LoadedEncoder
from penstock.models.pooling_head import Head

if TYPE_CHECKING:
    from penstock.engine.grammar_masks import CompiledGrammar


class VectorMaker:
    """Turns pooled states into results: through the model's head, and to length 1 if the model or the request says
    so."""

    def __init__(self, head: Head | None = None, *, normalizes: bool = True) -> None:
        self._head = head
        self._normalizes = normalizes

    def finish(self, pooled: Tensor, request: Request) -> Tensor:
        """Make float32 [size] of the pooled states, float64 [rows, hidden]; the results of rows stand end to end."""
        normalizes = self._normalizes if request.normalizes is None else request.normalizes
        made = []
        for row in pooled:
            vector = row if self._head is None else self._head(row.float()[None])[0].double()
            made.append(unit_vector(vector) if normalizes else vector.float())
        return torch.cat(made)


class HiddenPooler:
    """Follows the requests with pooling, from `begin` to `end`."""

    def __init__(self, maker: VectorMaker | None = None) -> None:
        self._maker = maker or VectorMaker()
        self._requests: dict[str, Request] = {}
        self._partial: dict[str, Tensor] = {}  # of prompts that are partly computed

    def begin(self, request: Request) -> None:
        if request.pooling is not None:
            self._requests[request.id] = request

    def end(self, request_id: str) -> None:
        self._requests.pop(request_id, None)
        self._partial.pop(request_id, None)

    @property
    def request_ids(self) -> Collection[str]:
        return self._requests.keys()

    def pools(self, request_id: str) -> bool:
        return request_id in self._requests

    def any_of(self, chunks: Sequence[Chunk]) -> bool:
        return bool(self._requests) and any(chunk.request_id in self._requests for chunk in chunks)

    def take(self, hidden: Tensor, step: HostStep, chunks: Sequence[Chunk]) -> dict[str, Tensor]:
        """Read this step's hidden states [T, hidden]; returns the vectors, float32 on the device, of the prompts that
        ended in it."""
        finished: dict[str, Tensor] = {}
        partial: dict[str, Tensor] = {}
        for index, chunk in enumerate(chunks):
            request = self._requests.get(chunk.request_id)
            if request is None or request.pooling is None:
                continue
            states = hidden[int(step.chunk_starts[index]) : int(step.chunk_starts[index + 1])]
            before = self._partial.get(chunk.request_id) if chunk.start else None
            pooled = pool_states(states, request.pooling, chunk.start, before)
            if chunk.samples:
                mean = _mean(pooled, request.pooling, len(request.prompt_token_ids))
                finished[chunk.request_id] = self._maker.finish(mean, request)
            else:
                partial[chunk.request_id] = pooled
        self._partial.update(partial)  # at the end: a step that lacks memory is taken again in pieces
        return finished


def pool_states(states: Tensor, pooling: Pooling, start: int = 0, before: Tensor | None = None) -> Tensor:
    """Pool [length, hidden], the states of tokens from position `start` on, to float64 [rows, hidden], together with
    what was pooled `before` them. Means are sums, until the prompt has ended."""
    match pooling:
        case "last":
            return states[-1:].double()
        case "first":
            return states[:1].double() if before is None else before
        case "all":
            return states.double() if before is None else torch.cat([before, states.double()])
        case "max":
            pooled = states.double().amax(dim=0, keepdim=True)
            return pooled if before is None else torch.maximum(before, pooled)
        case "mean":
            pooled = states.double().sum(dim=0, keepdim=True)
        case "weighted_mean":
            weights = torch.arange(start + 1, start + len(states) + 1, device=states.device)
            pooled = (states.double() * weights[:, None]).sum(dim=0, keepdim=True)
    return pooled if before is None else before + pooled


def _mean(pooled: Tensor, pooling: Pooling, num_tokens: int) -> Tensor:
    if pooling == "mean":
        return pooled / num_tokens
    if pooling == "weighted_mean":
        return pooled / (num_tokens * (num_tokens + 1) / 2)
    return pooled


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
    def __init__(self, loaded: LoadedEncoder, clock: Clock) -> None:
        self._model = loaded.model
        self._maker = VectorMaker(loaded.head, normalizes=loaded.settings.card.normalizes)
        self._pooling = loaded.settings.pooling
        self._clock = clock
        self._requests: dict[str, Request] = {}
        self._submitted: deque[StepResult] = deque()

    def add(self, request: Request, grammar: CompiledGrammar | None = None) -> None:
        self._requests[request.id] = request

    def append(self, request_id: str, token_ids: tuple[int, ...]) -> None:
        """Do nothing: no tokens follow a text."""

    def remove(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def submit(self, plan: StepPlan) -> tuple[Chunk, ...]:
        started_s = self._clock.now()
        requests = [self._requests[chunk.request_id] for chunk in plan.chunks if chunk.samples]
        sampled = []
        if requests:
            with torch.inference_mode():
                all_states = self._model.hidden_states(
                    [request.prompt_token_ids for request in requests],
                    [request.second_text_at for request in requests],
                )
                for request, states in zip(requests, all_states, strict=True):
                    pooling = request.pooling or self._pooling
                    pooled = _mean(pool_states(states, pooling), pooling, len(states))
                    sampled.append(sampled_vector(request.id, self._maker.finish(pooled, request)))
        self._submitted.append(StepResult(plan.step_id, tuple(sampled), self._clock.now() - started_s))
        return ()

    def collect(self) -> StepResult:
        return self._submitted.popleft()
