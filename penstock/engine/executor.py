"""Runs a plan on a model: rows in, one forward pass, tokens out. Knows nothing of queues, clients or text.

`submit` queues the work on the device and starts copying the sampled tokens back; `collect` waits for that copy. On a
CPU both are synchronous, which changes nothing for the caller. A step may be planned before the newest token of a
constrained request is known. Such a step is sampled later, when the mask after that token is known: by the next
`submit` or by its own `collect`. Its forward pass runs meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor

from penstock.core.clock import Clock
from penstock.core.plan import (
    ON_DEVICE,
    BlockCopy,
    Chunk,
    HalfCopy,
    KVCopy,
    SampledToken,
    StateCopy,
    StepPlan,
    StepResult,
)
from penstock.core.request import Request
from penstock.engine.batch import NO_SAMPLES, BatchRows, HostStep, Samples
from penstock.engine.drafters.following import verified
from penstock.engine.drafters.hidden_states import NOTHING, HiddenStates
from penstock.engine.forward import ForwardPass, FromHidden
from penstock.engine.grammar_masks import CompiledGrammar, GrammarMasks, StepMasks
from penstock.engine.pooling import sampled_vector
from penstock.engine.sampler import Sampler
from penstock.engine.staging import Staging
from penstock.engine.step_timers import CudaTimer, HostTimer, StepTimer
from penstock.engine.trees import AcceptedPaths, straighten
from penstock.kernels.interface import HalvesBlocks, KVStore, MovesTokens
from penstock.kernels.states import StateStore

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Live:
    request: Request
    output_token_ids: list[int]


@dataclass(slots=True)
class _Submitted:
    plan: StepPlan
    samples: Samples
    hidden: FromHidden
    drafts: LateDrafts | None  # of the step, which the host did not know when it was submitted
    timer: StepTimer
    encoder_timer: StepTimer | None
    host: HostStep | None = None
    # Set when the logits of a step that is sampled later are computed.
    computed: torch.cuda.Event | None = None
    made: Tensor | None = None  # logits, or argmaxes, until they are sampled
    # int64 [S] on the host once the step is done; None when nothing was sampled.
    token_ids: Tensor | None = None
    logprobs: dict[int, Tensor] = field(default_factory=dict)
    masks: StepMasks | None = None
    drafter_recording_s: float = 0.0
    lacks_graph: bool = False  # which is recorded when such a step is met again


class LateDrafts(Protocol):
    """Drafts that were made on the device. The host can read them once a step that verifies them is done."""

    def of(self, request_id: str) -> tuple[int, ...]: ...


class StepFollower(Protocol):
    """Drafts after steps, on the device."""

    @property
    def in_use(self) -> LateDrafts | None:
        """Return the drafts that the latest plan may have as ON_DEVICE."""
        ...

    def follow(
        self,
        chunks: Sequence[Chunk],
        step: HostStep,
        sampled: Tensor,
        states: Tensor | None,
        blind: Collection[str],
    ) -> Mapping[str, int]:
        """Draft after a step. `sampled` are its samples, int64 [S], and `states` its hidden states, if heads need
        them, [T, ...]. The host needs no drafted tokens of the `blind` requests before they are verified. Returns
        how many states of a request, the first ones of the step, need not be kept."""
        ...

    def take_recording_s(self) -> float:
        """Return the seconds that recordings of graphs took since the last call."""
        ...


class ModelExecutor:
    def __init__(
        self,
        forward: ForwardPass,
        kv: KVStore,
        *,
        rows: BatchRows,
        staging: Staging,
        sampler: Sampler,
        clock: Clock,
        masks: GrammarMasks | None = None,
        states: HiddenStates | None = None,
        follower: StepFollower | None = None,
    ) -> None:
        """`states` keeps the hidden states of every step, for heads that draft. `follower` drafts after steps."""
        self.forward = forward
        self._kv = kv
        self._rows = rows
        self._staging = staging
        self._sampler = sampler
        self._clock = clock
        self._masks = masks
        self._states = states
        self._follower = follower
        self._latest: tuple[Sequence[Chunk], HostStep, Tensor | None] | None = None  # step, with its samples
        self._live: dict[str, _Live] = {}
        self._submitted: deque[_Submitted] = deque()
        self._unsampled: _Submitted | None = None  # the latest step, while it waits for tokens to mask with
        self._awaited: set[str] = set()  # constrained requests whose tokens that step waits for
        self._late: frozenset[str] = frozenset()  # requests whose sample in the latest step is invalid

    def add(self, request: Request, grammar: CompiledGrammar | None = None) -> None:
        self._live[request.id] = _Live(request, list(request.output_token_ids))
        self.forward.begin(request)
        if grammar is not None:
            assert self._masks is not None, "an engine that compiles grammars also masks with them"
            self._masks.begin(request.id, grammar)
            if request.output_token_ids:
                self._masks.append(request.id, request.output_token_ids)

    def append(self, request_id: str, token_ids: tuple[int, ...]) -> None:
        self._live[request_id].output_token_ids.extend(token_ids)
        if self._masks is not None:
            self._masks.append(request_id, token_ids)
            self._no_longer_awaits(request_id)
        if request_id in self._rows:
            self._sampler.commit(self._rows.row(request_id), token_ids)
            self._rows.append_tokens(request_id, token_ids)

    def remove(self, request_id: str) -> None:
        self._live.pop(request_id, None)
        self.forward.end(request_id)
        if self._masks is not None:
            self._masks.end(request_id)
            self._no_longer_awaits(request_id)

    def _no_longer_awaits(self, request_id: str) -> None:
        """Begin the masks of a step that waits to be sampled, once its last token is known."""
        if request_id in self._awaited:
            self._awaited.discard(request_id)
            if not self._awaited and self._masks is not None:
                self._masks.start()

    def submit(self, plan: StepPlan) -> tuple[Chunk, ...]:
        self._sample_waiting()
        timer = self._start_timer()
        if self._masks is not None:
            self._masks.start(plan.chunks)
        self._staging.next_step()
        self._update_rows(plan)
        encoder_timer = self._encode_images(plan, timer)
        if not plan.chunks:
            timer.begin()
            with torch.inference_mode():
                self._copy_blocks(plan.copies)
            timer.stop()
            self._submitted.append(_Submitted(plan, NO_SAMPLES, FromHidden(), None, timer, encoder_timer))
            return ()
        step = self.forward.build(plan.chunks)
        if step.late is not None:
            self._settle_drafts({chunk.request_id for chunk in plan.chunks if chunk.unsettled})
        drafts = self._follower.in_use if self._follower is not None and step.drafts_at.size else None
        submitted = _Submitted(plan, step.samples, FromHidden(), drafts, timer, encoder_timer, step)
        hidden = submitted.hidden
        timer.begin()
        with torch.inference_mode():
            self._copy_blocks(plan.copies)
            only_argmax = self._needs_only_argmax(step.samples)
            submitted.made, failed = self.forward.run(plan.chunks, step, hidden, only_argmax=only_argmax)
            hidden.scores = [
                replace(each, values=self._to_host(each.values), ids=self._to_host(each.ids))
                for each in hidden.scores
            ]
        self._submitted.append(submitted)
        self._awaited = self._awaited_tokens(plan)
        self._unsampled = submitted
        if not self._awaited:
            self._sample_waiting()
        elif self._staging.device.type == "cuda":
            submitted.computed = torch.cuda.Event()
            submitted.computed.record()
        return tuple(failed)

    def _awaited_tokens(self, plan: StepPlan) -> set[str]:
        """Return the constrained requests of a plan whose newest token is in flight."""
        if self._masks is None:
            return set()
        ahead = [chunk.request_id for chunk in plan.chunks if chunk.in_flight]
        return set(self._masks.constrained(ahead))

    def _sample_waiting(self) -> None:
        """Sample the latest step, unless that has been done."""
        step, self._unsampled = self._unsampled, None
        if step is None:
            return
        made, samples, host = step.made, step.samples, step.host
        step.made = step.host = None
        sampled: Tensor | None = None
        with torch.inference_mode():
            if made is not None:
                sampled = made
                if made.dim() == 1:
                    self._sampler.note_drawn(samples)
                else:
                    if self._masks is not None:
                        self._masks.start()
                        if (computed := step.computed) is not None:
                            self._masks.wait_while(lambda: not computed.query())
                        step.masks = self._masks.take(samples, len(step.plan.chunks), self._void(step.plan))
                    num_taken_back = self._rows.num_taken_back(samples)
                    sampled, step.logprobs = self._sampler.sample(made, samples, step.masks, num_taken_back)
                self._keep_last_tokens(samples, sampled)
                if host is not None and host.has_trees:
                    step.drafts = self._straighten(step, host, sampled)
                step.token_ids = self._to_host(sampled)
            step.timer.stop(self.forward.take_capture_s())
            step.lacks_graph = self.forward.lacks_graph
            if host is not None:
                self._latest = step.plan.chunks, host, sampled
                self._prepare_drafts(step.plan.chunks, host, sampled, step.hidden)
            if self._follower is not None:
                step.drafter_recording_s = self._follower.take_recording_s()
        late = step.masks.late if step.masks is not None else ()
        self._late = frozenset(samples.request_ids[index] for index in late)

    def _straighten(self, step: _Submitted, host: HostStep, sampled: Tensor) -> AcceptedPaths:
        """Let what follows a step with trees find chains: the accepted paths."""
        assert isinstance(self._kv, MovesTokens), "trees are drafted where KV can be moved"
        parts = step.hidden.states
        if len(parts) > 1:  # of a step that was computed in pieces, with parts of trees
            parts.clear()
        hidden = [part.values for part in parts]
        return straighten(step.plan.chunks, host, sampled, hidden, self._kv, self._rows, self._staging)

    def _void(self, plan: StepPlan) -> frozenset[str]:
        """Return the requests whose newest token was sampled without its mask: later samples are invalid."""
        if not self._late:
            return self._late
        return self._late.intersection(chunk.request_id for chunk in plan.chunks if chunk.in_flight)

    def _encode_images(self, plan: StepPlan, timer: StepTimer) -> StepTimer | None:
        """Encode the images of a plan. Returns a timer of that; the step's own `timer` begins with it."""
        images = self.forward.images
        if images is None or not (plan.encodings or plan.dropped_images):
            return None
        encoder_timer = self._start_timer()
        timer.begin()
        encoder_timer.begin()
        with contextlib.suppress(torch.OutOfMemoryError):  # a chunk that needs the image tries again
            images.run(plan.encodings, plan.dropped_images)
        encoder_timer.stop()
        return encoder_timer

    def _needs_only_argmax(self, samples: Samples) -> bool:
        """Return whether the requests that sample in this step need nothing but the argmax of their logits."""
        masked = self._masks is not None and bool(self._masks.constrained(samples.request_ids))
        return not masked and self._sampler.needs_only_argmax(samples)

    def _keep_last_tokens(self, samples: Samples, sampled: Tensor) -> None:
        """Keep the samples of requests without drafts, for steps that are planned before they are committed. If
        nothing could be sampled (-1), such a step computes token 0, and the sample is dropped with the request."""
        rows, plain = samples.rows, samples.plain()
        if plain is not None:
            if not plain.size:
                return
            rows, sampled = rows[plain], sampled[self._staging.to_device(plain)]
        self._rows.last_tokens.index_copy_(0, self._staging.kept(rows), sampled.clamp(min=0).to(torch.int32))

    def _settle_drafts(self, request_ids: Collection[str]) -> None:
        """Let the device find which drafts of the latest step were accepted, for requests whose next step is planned
        before the host knows."""
        assert self._latest is not None, "drafts are in flight"
        chunks, step, sampled = self._latest
        drafted = {chunk.request_id: chunk for chunk in chunks if chunk.request_id in request_ids}
        with torch.inference_mode():
            assert sampled is not None, "steps with drafts are sampled"
            found = verified(drafted, step, sampled, self._rows.draft_tokens, self._staging)
            assert found is not None, "the latest step has these drafts"
            rows = np.array([self._rows.row(each) for each in found.request_ids], dtype=np.int64)
            newest = found.sampled.gather(1, found.num_accepted[:, None]).squeeze(1)
            self._rows.settle(rows, found.num_drafts - found.num_accepted, newest)

    def _copy_blocks(self, copies: Sequence[KVCopy]) -> None:
        for is_to_host, group in groupby(copies, key=_is_to_host):
            if is_to_host is not None:
                blocks = [(each.block_id, each.host_slot) for each in group if isinstance(each, BlockCopy)]
                block_ids, slots = zip(*blocks, strict=True)
                if is_to_host:
                    self._kv.copy_to_host(block_ids, slots)
                else:
                    self._kv.copy_from_host(slots, block_ids)
                continue
            for copy in group:
                if isinstance(copy, HalfCopy):
                    assert isinstance(self._kv, HalvesBlocks), "a store that halves blocks can copy halves"
                    self._kv.copy_half(copy.block_id, copy.offset, copy.to_block_id)
                elif isinstance(copy, StateCopy):
                    assert self._rows.states is not None, "a plan of a model with states has slots"
                    _copy_state(self._rows.states, copy)

    def _prepare_drafts(
        self, chunks: Sequence[Chunk], step: HostStep, sampled: Tensor | None, hidden: FromHidden
    ) -> None:
        """Let a drafter draft after the step, and keep the hidden states that a head has not read."""
        is_whole = len(hidden.states) == 1 and len(hidden.states[0].chunks) == len(chunks)
        read: Mapping[str, int] = NOTHING
        if self._follower is not None and sampled is not None and (is_whole or self._states is None):
            states = hidden.states[0].values if is_whole else None
            read = self._follower.follow(chunks, step, sampled, states, self._blind(step.samples))
        for part in hidden.states if self._states is not None else ():
            assert self._states is not None
            self._states.take_step([each.request_id for each in part.chunks], part.step, part.values, read)
        hidden.states.clear()

    def _blind(self, samples: Samples) -> Collection[str]:
        """Return the requests whose logits depend neither on a grammar nor on earlier tokens (penalties)."""
        masks, sampler = self._masks, self._sampler
        return {
            request_id
            for request_id, row in zip(samples.request_ids, samples.request_rows.tolist(), strict=True)
            if sampler.knows_no_text(row) and (masks is None or not masks.constrained([request_id]))
        }

    def collect(self) -> StepResult:
        step = self._submitted.popleft()
        if step is self._unsampled:
            self._sample_waiting()
        elapsed_s = step.timer.wait()
        sampled: tuple[SampledToken, ...] = ()
        if step.token_ids is not None:
            samples = step.samples if step.drafts is None else _with_ids(step.samples, step.drafts)
            logprobs, trees = step.logprobs, step.drafts if isinstance(step.drafts, AcceptedPaths) else None
            if trees is not None and logprobs:
                logprobs = trees.logprobs(samples, logprobs)
            sampled = self._sampler.report(samples, step.token_ids.tolist(), logprobs, step.masks)
            if trees is not None:
                sampled = tuple(_with_nodes(each, trees) for each in sampled)
        embedded = (
            sampled_vector(request_id, vector) for request_id, vector in step.hidden.embeddings.items()
        )
        scored = tuple(scores.report() for scores in step.hidden.scores)
        encoder_s = step.encoder_timer.wait() if step.encoder_timer is not None else 0.0
        is_unusual = step.lacks_graph or step.timer.preparation_s + step.drafter_recording_s > 0.0
        return StepResult(step.plan.step_id, (*sampled, *embedded), elapsed_s, scored, encoder_s, is_unusual)

    def _start_timer(self) -> StepTimer:
        return CudaTimer() if self._staging.device.type == "cuda" else HostTimer(self._clock)

    def _to_host(self, tensor: Tensor) -> Tensor:
        """Start the copy to the host. The step's timer tells when the copy is done."""
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
                rows.place_blocks(row, chunk)
            elif chunk.new_block_ids:
                rows.place_blocks(rows.row(chunk.request_id), chunk)
            if chunk.window_blocks:
                rows.place_windows(chunk)
            if chunk.drafts:
                rows.place_drafts(chunk)


def _is_to_host(copy: KVCopy) -> bool | None:
    """Return the direction of a copy of a whole block; None for other copies."""
    return copy.to_host if isinstance(copy, BlockCopy) else None


def _with_ids(samples: Samples, late: LateDrafts) -> Samples:
    """Return the samples with the ids of drafts that were not known when the step was submitted."""
    drafts = {
        index: late.of(samples.request_ids[index])[: len(ids)] if ON_DEVICE in ids else ids
        for index, ids in samples.drafts.items()
    }
    return replace(samples, drafts=drafts)


def _with_nodes(sampled: SampledToken, trees: AcceptedPaths) -> SampledToken:
    if not sampled.accepted or sampled.request_id not in trees.request_ids:
        return sampled
    nodes = trees.nodes_of(sampled.request_id, len(sampled.accepted))
    return msgspec.structs.replace(sampled, nodes=nodes)


def _copy_state(states: StateStore, copy: StateCopy) -> None:
    if copy.from_slot is None:
        states.clear(copy.slot)
    elif copy.from_host:
        states.copy_from_host(copy.from_slot, copy.slot)
    elif copy.to_host:
        states.copy_to_host(copy.from_slot, copy.slot)
    else:
        states.copy(copy.from_slot, copy.slot)
