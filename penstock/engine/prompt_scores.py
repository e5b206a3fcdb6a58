"""Log-probabilities of prompt tokens, made from the hidden states of a step. Knows no queue, client or text.

The logits of a whole prompt would need as much memory as its tokens times the vocabulary: a prompt of 8,192 tokens
has 5 GB of them with a vocabulary of 152,000. They are computed for a few positions at a time instead, and only the
requested values are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.core.plan import NOT_A_NUMBER, Chunk, PromptLogprobs, ScoredChunk
from penstock.core.request import Request
from penstock.engine.batch import HostStep
from penstock.engine.staging import Staging
from penstock.models.model import Model

MAX_LOGIT_BYTES = 64 << 20  # of the positions that are computed at a time


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probabilities of one piece of a prompt, on the host once the step is done; see `PromptLogprobs`."""

    request_id: str
    start: int
    values: Tensor
    ids: Tensor

    def report(self) -> ScoredChunk:
        if not bool(torch.isfinite(self.values).all()):
            return ScoredChunk(self.request_id, None, NOT_A_NUMBER)
        num_tokens, width = self.values.shape
        values = self.values.numpy().astype("<f4").tobytes()
        ids = self.ids.numpy().astype("<i4").tobytes()
        return ScoredChunk(self.request_id, PromptLogprobs(self.start, num_tokens, width - 1, values, ids))


class PromptScorer:
    """Follows the requests that ask for log-probabilities of their prompts, from `begin` to `end`."""

    def __init__(self, model: Model, staging: Staging, vocab_size: int, *, has_logits: bool = True) -> None:
        """Without `has_logits` this is a rank that helps to compute logits and does not get them all."""
        self._model = model
        self._staging = staging
        self._has_logits = has_logits
        self._rows_at_a_time = max(1, MAX_LOGIT_BYTES // (4 * vocab_size))
        self._requests: dict[str, Request] = {}

    def begin(self, request: Request) -> None:
        if request.sampling.prompt_logprobs is not None:
            self._requests[request.id] = request

    def end(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def any_of(self, chunks: Sequence[Chunk]) -> bool:
        return bool(self._requests) and any(chunk.scores_from is not None for chunk in chunks)

    def take(self, hidden: Tensor, step: HostStep, chunks: Sequence[Chunk]) -> list[Scores]:
        """Read this step's hidden states [T, hidden]; returns the scores, on the device, of the chunks that ask for
        them."""
        made = []
        for index, chunk in enumerate(chunks):
            request = self._requests.get(chunk.request_id)
            if chunk.scores_from is None or request is None:
                continue
            prompt = request.prompt_token_ids
            first = max(chunk.start, chunk.scores_from)
            end = min(chunk.start + chunk.num_tokens, len(prompt) - 1)
            if first >= end:
                continue
            states = hidden[int(step.chunk_starts[index]) + first - chunk.start :][: end - first]
            targets = np.array(prompt[first + 1 : end + 1], dtype=np.int64)
            parts = self._score(states, targets, request.sampling.prompt_logprobs or 0)
            if parts:
                values, ids = (torch.cat(column) for column in zip(*parts, strict=True))
                made.append(Scores(request.id, first + 1, values, ids))
        return made

    def _score(
        self, states: Tensor, targets: np.ndarray[tuple[int], np.dtype[np.int64]], num_top: int
    ) -> list[tuple[Tensor, Tensor]]:
        parts = []
        for start in range(0, len(targets), self._rows_at_a_time):
            end = start + self._rows_at_a_time
            logits = self._model.logits(states[start:end])
            if self._has_logits:
                parts.append(score_tokens(logits, self._staging.to_device(targets[start:end]), num_top))
        return parts


def score_tokens(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """float32 [n, V], int64 [n] → float32 and int32 [n, 1 + num_top], as `PromptLogprobs` has them."""
    own = logits.gather(1, token_ids.unsqueeze(1))
    total = logits.logsumexp(dim=1, keepdim=True)
    ranks = (logits > own).sum(dim=1, keepdim=True) + 1
    top, top_ids = logits.topk(min(num_top, logits.shape[1]), dim=1)
    return torch.cat((own, top), dim=1) - total, torch.cat((ranks, top_ids), dim=1).to(torch.int32)
