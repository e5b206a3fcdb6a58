"""Runs a plan on a model: rows in, one forward pass, tokens out. Knows nothing of queues, clients or text.

`submit` queues the work on the device and starts copying the sampled tokens back; `collect` waits for that copy.
On a CPU both are synchronous, which changes nothing for the caller.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.core.clock import Clock
from penstock.core.plan import BlockCopy, SampledToken, StepPlan, StepResult
from penstock.core.request import Request
from penstock.engine.batch import BatchRows, HostStep
from penstock.engine.grammar import CompiledGrammar
from penstock.engine.grammar_masks import GrammarMasks, StepMasks
from penstock.engine.graphs import DecodeGraphs
from penstock.engine.pooling import HiddenPooler, sampled_vector
from penstock.engine.sampler import Sampler
from penstock.engine.staging import Staging
from penstock.engine.timing import CudaTimer, HostTimer, StepTimer
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
    token_ids: Tensor | None  # int64 [S] on the host once the step is done; None when nothing was sampled
    logprobs: dict[int, Tensor]
    masks: StepMasks | None
    embeddings: dict[str, Tensor]  # on the device, by request
    timer: StepTimer


class ModelExecutor:
    def __init__(
        self,
        model: Model,
        ops: Ops,
        kv: KVStore,
        *,
        rows: BatchRows,
        staging: Staging,
        sampler: Sampler,
        clock: Clock,
        graphs: DecodeGraphs | None = None,
        masks: GrammarMasks | None = None,
    ) -> None:
        self._model = model
        self._ops = ops
        self._kv = kv
        self._rows = rows
        self._staging = staging
        self._sampler = sampler
        self._clock = clock
        self._graphs = graphs
        self._masks = masks
        self._pooler = HiddenPooler()
        self._live: dict[str, _Live] = {}
        self._submitted: deque[_Submitted] = deque()

    def add(self, request: Request, grammar: CompiledGrammar | None = None) -> None:
        self._live[request.id] = _Live(request, [])
        self._pooler.begin(request)
        if grammar is not None:
            assert self._masks is not None, "whoever compiles grammars also masks with them"
            self._masks.begin(request.id, grammar)

    def append(self, request_id: str, token_ids: tuple[int, ...]) -> None:
        self._live[request_id].output_token_ids.extend(token_ids)
        if self._masks is not None:
            self._masks.append(request_id, token_ids)
        if request_id in self._rows:
            self._rows.append_tokens(request_id, token_ids)

    def remove(self, request_id: str) -> None:
        self._live.pop(request_id, None)
        self._pooler.end(request_id)
        if self._masks is not None:
            self._masks.end(request_id)

    def submit(self, plan: StepPlan) -> None:
        timer = self._start_timer()
        if self._masks is not None:
            self._masks.start()
        self._staging.next_step()
        self._update_rows(plan)
        step = self._rows.build(plan.chunks)
        pools = self._pooler.any_of(plan.chunks)
        if pools:
            tokens_only = [n for n in step.sampled if not self._pooler.pools(plan.chunks[n].request_id)]
            step = replace(step, sampled=tokens_only)
        sampled_rows = step.rows[step.sampled]
        request_ids = [plan.chunks[index].request_id for index in step.sampled]
        token_ids: Tensor | None = None
        logprobs: dict[int, Tensor] = {}
        masks: StepMasks | None = None
        embeddings: dict[str, Tensor] = {}
        with torch.inference_mode():
            self._copy_blocks(plan.copies)
            if pools:
                hidden = self._hidden(step)
                embeddings = self._pooler.take(hidden, step, plan.chunks)
                logits = self._head(hidden, step)
            else:
                logits = self._logits(step)
            if logits is not None:
                if self._masks is not None:
                    masks = self._masks.take(request_ids, len(plan.chunks))
                sampled, logprobs = self._sampler.sample(logits, sampled_rows, masks)
                self._rows.last_tokens[self._staging.to_device(sampled_rows)] = sampled.to(torch.int32)
                token_ids = self._to_host(sampled)
        timer.stop()
        self._submitted.append(
            _Submitted(plan, request_ids, sampled_rows, token_ids, logprobs, masks, embeddings, timer)
        )

    def _copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        for copy in copies:
            if copy.to_host:
                self._kv.copy_to_host(copy.block_id, copy.host_slot)
            else:
                self._kv.copy_from_host(copy.host_slot, copy.block_id)

    def _logits(self, step: HostStep) -> Tensor | None:
        """Run the model; float32 [S, V] of the requests that sample, if any does."""
        if self._graphs is not None and self._graphs.fits(step):
            return self._graphs.logits(step)
        return self._head(self._hidden(step), step)

    def _hidden(self, step: HostStep) -> Tensor:
        rows = self._rows
        return self._model.forward(rows.token_ids(step), rows.attention_batch(step), self._kv)

    def _head(self, hidden: Tensor, step: HostStep) -> Tensor | None:
        if not step.sampled:
            return None
        last_rows = self._staging.to_device(step.query_starts[1:][step.sampled].astype(np.int64) - 1)
        return self._model.logits(hidden[last_rows])

    def collect(self) -> StepResult:
        step = self._submitted.popleft()
        elapsed_s = step.timer.wait()
        sampled: tuple[SampledToken, ...] = ()
        if step.token_ids is not None:
            sampled = self._sampler.report(
                step.request_ids, step.rows, step.token_ids.tolist(), step.logprobs, step.masks
            )
        embedded = (sampled_vector(request_id, vector) for request_id, vector in step.embeddings.items())
        return StepResult(step.plan.step_id, (*sampled, *embedded), elapsed_s)

    def _start_timer(self) -> StepTimer:
        return CudaTimer() if self._ops.device.type == "cuda" else HostTimer(self._clock)

    def _to_host(self, tensor: Tensor) -> Tensor:
        """Starts the copy; the step's timer tells when it is done."""
        if tensor.device.type == "cpu":
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

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
