"""Sampling once for several ranks: the first rank of a stage samples, and tells the others which tokens it drew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.core.plan import SampledToken
from penstock.core.request import Request
from penstock.engine.grammar_masks import StepMasks
from penstock.engine.parallel.mesh import TensorGroup
from penstock.engine.sampler import Sampler


class SharingSampler(Sampler):
    """Of the first rank, which has all logits."""

    def __init__(self, group: TensorGroup, *settings: Any) -> None:
        super().__init__(*settings)
        self._group = group

    def sample(
        self, logits: Tensor, rows: NDArray[np.int64], masks: StepMasks | None = None
    ) -> tuple[Tensor, dict[int, Tensor]]:
        token_ids, logprobs = super().sample(logits, rows, masks)
        self._group.share(token_ids)
        return token_ids, logprobs


class ReceivingSampler(Sampler):
    """Of the other ranks, which have no logits to speak of and keep no state of requests."""

    def __init__(self, group: TensorGroup, *settings: Any) -> None:
        super().__init__(*settings)
        self._group = group

    def begin(self, row: int, request: Request, output_token_ids: Sequence[int]) -> None:
        return

    def end(self, row: int) -> None:
        return

    def sample(
        self, logits: Tensor, rows: NDArray[np.int64], masks: StepMasks | None = None
    ) -> tuple[Tensor, dict[int, Tensor]]:
        token_ids = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
        self._group.share(token_ids)
        return token_ids, {}

    def report(self, *step: Any) -> tuple[SampledToken, ...]:
        return ()
