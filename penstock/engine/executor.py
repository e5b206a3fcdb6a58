"""Runs a plan on a model: rows in, one forward pass, tokens out. Knows nothing of queues, clients or text.

`submit` queues the work on the device and starts copying the sampled tokens back; `collect` waits for that copy.
On a CPU both are synchronous, which changes nothing for the caller.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.core.clock import Clock
from penstock.core.plan import StepPlan, StepResult
from penstock.core.request import Request
from penstock.engine.batch import BatchRows
from penstock.engine.sampler import Sampler
from penstock.kernels.interface import KVStore, Ops
from penstock.models.model import Model


@dataclass(slots=True)
class _Live:
    request: Request
    output_token_ids: list[int]


@dataclass(frozen=True, slots=True)
class _Submitted:
    plan: StepPlan
    request_ids: list[str]
    rows: NDArray[np.int64]
    token_ids: Tensor | None  # int64 [S] on the host once the copy is done; None when nothing was sampled
    logprobs: dict[int, Tensor]
    started_s: float


class ModelExecutor:
    def __init__(
        self, model: Model, ops: Ops, kv: KVStore, *, rows: BatchRows, sampler: Sampler, clock: Clock
    ) -> None:
        self._model = model
        self._ops = ops
        self._kv = kv
        self._rows = rows
        self._sampler = sampler
        self._clock = clock
        self._live: dict[str, _Live] = {}
        self._submitted: deque[_Submitted] = deque()

    def add(self, request: Request) -> None:
        self._live[request.id] = _Live(request, [])

    def append(self, request_id: str, token_ids: tuple[int, ...]) -> None:
        self._live[request_id].output_token_ids.extend(token_ids)
        if request_id in self._rows:
            self._rows.append_token(request_id, token_ids)

    def remove(self, request_id: str) -> None:
        self._live.pop(request_id, None)

    def submit(self, plan: StepPlan) -> None:
        started_s = self._clock.now()
        self._update_rows(plan)
        with torch.inference_mode():
            step = self._rows.build(plan.chunks)
            hidden = self._model.forward(step.token_ids, step.attention, self._kv)
            token_ids, logprobs = None, {}
            if step.sampled_ids:
                logits = self._model.logits(hidden[step.sample_indices])
                token_ids, logprobs = self._sampler.sample(logits, step.sampled_rows)
                self._rows.last_tokens[torch.from_numpy(step.sampled_rows).to(self._ops.device)] = (
                    token_ids.to(torch.int32)
                )
                token_ids = token_ids.to("cpu", non_blocking=True)
        self._submitted.append(
            _Submitted(plan, step.sampled_ids, step.sampled_rows, token_ids, logprobs, started_s)
        )

    def collect(self) -> StepResult:
        step = self._submitted.popleft()
        sampled = ()
        if step.token_ids is not None:
            if self._ops.device.type == "cuda":
                torch.cuda.synchronize(self._ops.device)
            sampled = self._sampler.report(
                step.request_ids, step.rows, step.token_ids.tolist(), step.logprobs
            )
        return StepResult(step.plan.step_id, sampled, self._clock.now() - step.started_s)

    def _update_rows(self, plan: StepPlan) -> None:
        rows = self._rows
        for request_id in plan.released:
            if request_id in rows:
                self._sampler.end(rows.release(request_id))
        for chunk in plan.chunks:
            if chunk.begins:
                live = self._live[chunk.request_id]
                prompt = live.request.prompt_token_ids
                row = rows.begin(chunk.request_id, (*prompt, *live.output_token_ids))
                self._sampler.begin(row, live.request, live.output_token_ids)
                rows.append_blocks(row, chunk.new_block_ids)
            elif chunk.new_block_ids:
                rows.append_blocks(rows.row(chunk.request_id), chunk.new_block_ids)
