"""Runs a plan on a model: rows in, one forward pass, tokens out. Knows nothing of queues, clients or text.

`submit` queues the work on the device and starts copying the sampled tokens back; `collect` waits for that copy.
On a CPU both are synchronous, which changes nothing for the caller. A step that was planned before a constrained
request's newest token was known is sampled later, when the mask behind that token can be had: by the next `submit` or
by its own `collect`. Its forward pass runs meanwhile. A step that lacks memory is computed in pieces
(`halves`), and a piece that cannot be halved ends its own request.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from penstock.core.clock import Clock
from penstock.core.plan import (
    ON_DEVICE,
    Chunk,
    HalfCopy,
    KVCopy,
    SampledToken,
    StateCopy,
    StepPlan,
    StepResult,
)
from penstock.core.request import Request
from penstock.engine.adapters import LoRAModel, Slots
from penstock.engine.batch import NO_SAMPLES, BatchRows, HostStep, Samples, Staging, halves
from penstock.engine.drafters.hidden_states import NOTHING, HiddenStates
from penstock.engine.grammar_masks import CompiledGrammar, GrammarMasks, StepMasks
from penstock.engine.graphs import DecodeGraphs, PromptGraphs
from penstock.engine.images import ImageEncoder, PlacedImages
from penstock.engine.pooling import HiddenPooler, VectorMaker, sampled_vector
from penstock.engine.prompt_scores import PromptScorer, Scores
from penstock.engine.sampler import Sampler
from penstock.kernels.interface import HalvesBlocks, KVStore, Ops
from penstock.kernels.states import StateStore
from penstock.models.model import Model, TappedModel

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Live:
    request: Request
    output_token_ids: list[int]


@dataclass(slots=True)
class _Submitted:
    plan: StepPlan
    samples: Samples
    hidden: _FromHidden
    drafts: LateDrafts | None  # of the step, which the host did not know when it was submitted
    timer: StepTimer
    encoder_timer: StepTimer | None
    host: HostStep | None = None
    computed: torch.cuda.Event | None = None  # of a step that is sampled later: its logits are there
    made: Tensor | None = None  # logits, or argmaxes, until they are sampled
    token_ids: Tensor | None = (
        None  # int64 [S] on the host once the step is done; None when nothing was sampled
    )
    logprobs: dict[int, Tensor] = field(default_factory=dict)
    masks: StepMasks | None = None


@dataclass(slots=True)
class _FromHidden:
    """The results that one step makes of hidden states, besides samples."""

    embeddings: dict[str, Tensor] = field(default_factory=dict)  # on the device, by request
    scores: list[Scores] = field(default_factory=list)
    states: list[_StepStates] = field(default_factory=list)  # of each pass, for heads


@dataclass(frozen=True, slots=True)
class _StepStates:
    chunks: Sequence[Chunk]
    step: HostStep
    values: Tensor  # [T, ...], valid until the next pass


class LateDrafts(Protocol):
    """Drafts that were made on the device. The host can read them once a step that verifies them is done."""

    def of(self, request_id: str) -> tuple[int, ...]: ...


class StepFollower(Protocol):
    """Drafts behind steps, on the device."""

    @property
    def in_use(self) -> LateDrafts | None:
        """The drafts that the latest plan may have as ON_DEVICE."""
        ...

    def follow(
        self,
        chunks: Sequence[Chunk],
        step: HostStep,
        sampled: Tensor,
        states: Tensor | None,
        blind: Collection[str],
    ) -> Mapping[str, int]:
        """Draft behind a step. `sampled` are its samples, int64 [S], and `states` its hidden states, if heads need
        them, [T, ...]. The host needs no drafted tokens of the `blind` requests before they are verified. Returns
        how many states of a request, the first ones of the step, need not be kept."""
        ...


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
        prompt_graphs: PromptGraphs | None = None,
        masks: GrammarMasks | None = None,
        lora: LoRAModel | None = None,
        states: HiddenStates | None = None,
        follower: StepFollower | None = None,
        images: ImageEncoder | None = None,
        vectors: VectorMaker | None = None,
    ) -> None:
        """`states` keeps the hidden states of every step, for heads that draft. `follower` drafts behind steps."""
        self._model = model
        self._ops = ops
        self._kv = kv
        self._rows = rows
        self._staging = staging
        self._sampler = sampler
        self._clock = clock
        self._graphs = graphs
        self._prompt_graphs = prompt_graphs
        self._masks = masks
        self.lora = lora
        self._states = states
        self._follower = follower
        self._images = images
        self._pooler = HiddenPooler(vectors)
        self._scorer = PromptScorer(model, staging, sampler.vocab_size, has_logits=sampler.has_logits)
        self._live: dict[str, _Live] = {}
        self._submitted: deque[_Submitted] = deque()
        self._unsampled: _Submitted | None = None  # the latest step, while it waits for tokens to mask with
        self._awaited: set[str] = set()  # constrained requests whose tokens that step waits for
        self._late: frozenset[str] = frozenset()  # requests whose sample in the latest step means nothing

    def add(self, request: Request, grammar: CompiledGrammar | None = None) -> None:
        self._live[request.id] = _Live(request, list(request.output_token_ids))
        self._pooler.begin(request)
        self._scorer.begin(request)
        if self._images is not None:
            self._images.begin(request)
        if self.lora is not None:
            self.lora.begin(request)
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
        self._pooler.end(request_id)
        self._scorer.end(request_id)
        if self._images is not None:
            self._images.end(request_id)
        if self.lora is not None:
            self.lora.end(request_id)
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
        encoder_timer = self._encode_images(plan)
        if not plan.chunks:
            with torch.inference_mode():
                self._copy_blocks(plan.copies)
            timer.stop()
            self._submitted.append(_Submitted(plan, NO_SAMPLES, _FromHidden(), None, timer, encoder_timer))
            return ()
        step = self._build(plan.chunks)
        drafts = self._follower.in_use if self._follower is not None and step.drafts_at.size else None
        submitted = _Submitted(plan, step.samples, _FromHidden(), drafts, timer, encoder_timer, step)
        hidden = submitted.hidden
        with torch.inference_mode():
            self._copy_blocks(plan.copies)
            only_argmax = self._needs_only_argmax(step.samples)
            submitted.made, failed = self._compute_somehow(plan.chunks, step, hidden, only_argmax)
            hidden.scores = [
                replace(each, values=self._to_host(each.values), ids=self._to_host(each.ids))
                for each in hidden.scores
            ]
        self._submitted.append(submitted)
        self._awaited = self._awaited_tokens(plan)
        self._unsampled = submitted
        if not self._awaited:
            self._sample_waiting()
        elif self._ops.device.type == "cuda":
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
                    sampled, step.logprobs = self._sampler.sample(made, samples, step.masks)
                self._keep_last_tokens(samples, sampled)
                step.token_ids = self._to_host(sampled)
            step.timer.stop(0.0 if self._graphs is None else self._graphs.take_capture_s())
            if host is not None:
                self._prepare_drafts(step.plan.chunks, host, sampled, step.hidden)
        late = step.masks.late if step.masks is not None else ()
        self._late = frozenset(samples.request_ids[index] for index in late)

    def _void(self, plan: StepPlan) -> frozenset[str]:
        """Return the requests whose newest token was sampled without its mask: what follows means nothing."""
        if not self._late:
            return self._late
        return self._late.intersection(chunk.request_id for chunk in plan.chunks if chunk.in_flight)

    def _encode_images(self, plan: StepPlan) -> StepTimer | None:
        if self._images is None or not (plan.encodings or plan.dropped_images):
            return None
        timer = self._start_timer()
        with contextlib.suppress(torch.OutOfMemoryError):  # a chunk that needs the image tries again
            self._images.run(plan.encodings, plan.dropped_images)
        timer.stop()
        return timer

    def _build(self, chunks: Sequence[Chunk]) -> HostStep:
        """Lay out chunks for the model. Requests that pool their hidden states do not sample."""
        step = self._rows.build(chunks, self._pooler.request_ids)
        return step if self._images is None else self._images.arranged(chunks, step)

    def _needs_only_argmax(self, samples: Samples) -> bool:
        """Say whether the requests that sample in this step need nothing but the argmax of their logits."""
        masked = self._masks is not None and bool(self._masks.constrained(samples.request_ids))
        return not masked and self._sampler.needs_only_argmax(samples)

    def _keep_last_tokens(self, samples: Samples, sampled: Tensor) -> None:
        """Keep the samples for steps that are planned before they are committed, which follow no drafts."""
        rows, plain = samples.rows, samples.plain()
        if plain is not None:
            if not plain.size:
                return
            rows, sampled = rows[plain], sampled[self._staging.to_device(plain)]
        self._rows.last_tokens[self._staging.to_device(rows)] = sampled.to(torch.int32)

    def _compute(
        self,
        chunks: Sequence[Chunk],
        step: HostStep,
        taken: _FromHidden,
        *,
        graphs: bool = True,
        only_argmax: bool = False,
    ) -> Tensor | None:
        """Run the model. Returns float32 [S, V] for the requests that sample, if any; with `only_argmax` perhaps
        int64 [S], the argmax of each row. `taken` gets embeddings of prompts that ended, and scores of prompts."""
        slots = None if self.lora is None else self.lora.slots_of(chunks, step.chunk_starts)
        pools, scores = self._pooler.any_of(chunks), self._scorer.any_of(chunks)
        placed = None if self._images is None else self._images.place(chunks, step)
        has_taps = self._states is not None and slots is None and placed is None
        taps = self._states.taps if self._states is not None and has_taps else ()
        if slots is not None and self.lora is not None:
            graphs = graphs and self.lora.records_graphs
        graphs = graphs and not pools and placed is None
        if graphs and not scores and self._graphs is not None and self._graphs.fits(step):
            logits = self._graphs.logits(step, slots)
            self._note_states(taken, chunks, step, self._graphs.hidden)
            return logits
        hidden = None
        if graphs and not taps and self._prompt_graphs is not None:
            hidden = self._prompt_graphs.hidden(step, slots)
        only_argmax = only_argmax and hidden is None and not pools
        states = None
        if hidden is None and taps:
            hidden, states = self._tapped(step, taps)
        elif hidden is None:
            hidden = self._hidden(step, slots, placed)
        made = self._head(hidden, step, only_argmax)
        self._note_states(taken, chunks, step, states if taps else hidden)
        scored = self._scorer.take(hidden, step, chunks) if scores else []
        if pools:
            taken.embeddings.update(self._pooler.take(hidden, step, chunks))
        taken.scores += scored  # nothing is taken of a pass that lacks memory
        return made

    def _compute_somehow(
        self, chunks: Sequence[Chunk], step: HostStep, taken: _FromHidden, only_argmax: bool
    ) -> tuple[Tensor | None, list[Chunk]]:
        """Run `_compute` in as many passes as the memory needs. Also returns the chunks, or their rests, that no pass
        had room for. Their logits and vectors are not numbers."""
        try:
            return self._compute(chunks, step, taken, only_argmax=only_argmax), []
        except torch.OutOfMemoryError:
            pass  # the exception keeps the memory of the pass, so the next attempt comes after this block
        if self._rows.states is not None:
            # Some layers have seen the tokens of the pass and others have not: no state can be used any more.
            logger.warning("out of memory in a step of a model with states: its requests end")
            nothing = [part for chunk in chunks for part in self._nothing_for(chunk, taken.embeddings)]
            return torch.cat(nothing) if nothing else None, list(chunks)
        return self._compute_in_pieces(chunks, taken)

    def _compute_in_pieces(
        self, chunks: Sequence[Chunk], taken: _FromHidden
    ) -> tuple[Tensor | None, list[Chunk]]:
        logger.warning("out of memory in a step of %d tokens", sum(chunk.num_tokens for chunk in chunks))
        made: list[Tensor] = []
        lost: dict[str, Chunk] = {}  # by request, the first lost piece; later pieces are lost with it
        pieces = [chunks]
        while pieces:
            piece = pieces.pop()
            first = piece[0]
            parts = None
            if first.request_id not in lost:
                if self._ops.device.type == "cuda":
                    torch.cuda.empty_cache()
                try:
                    logits = self._compute(piece, self._build(piece), taken, graphs=False)
                except torch.OutOfMemoryError:
                    parts = halves(piece)
                else:
                    made += [] if logits is None else [logits]
                    continue
            if parts is not None:
                pieces += reversed(parts)
            else:
                if first.start < self._rows.num_tokens(
                    first.request_id
                ):  # a request can do without its drafts
                    lost.setdefault(first.request_id, first)
                made += self._nothing_for(first, taken.embeddings)
        return torch.cat(made) if made else None, list(lost.values())

    def _nothing_for(self, chunk: Chunk, embeddings: dict[str, Tensor]) -> list[Tensor]:
        if not chunk.samples:
            return []
        shape = (1 + len(chunk.drafts), self._sampler.vocab_size)
        nothing = torch.full(shape, torch.nan, device=self._ops.device)
        if self._pooler.pools(chunk.request_id):
            embeddings[chunk.request_id] = nothing[0]
            return []
        return [nothing]

    def _copy_blocks(self, copies: Sequence[KVCopy]) -> None:
        for copy in copies:
            if isinstance(copy, HalfCopy):
                assert isinstance(self._kv, HalvesBlocks), "a store that halves blocks can copy halves"
                self._kv.copy_half(copy.block_id, copy.offset, copy.to_block_id)
            elif isinstance(copy, StateCopy):
                assert self._rows.states is not None, "a plan of a model with states has slots"
                _copy_state(self._rows.states, copy)
            elif copy.to_host:
                self._kv.copy_to_host(copy.block_id, copy.host_slot)
            else:
                self._kv.copy_from_host(copy.host_slot, copy.block_id)

    def _hidden(self, step: HostStep, slots: Slots | None, placed: PlacedImages | None) -> Tensor:
        rows = self._rows
        token_ids, batch = rows.token_ids(step), rows.attention_batch(step)
        if slots is not None and self.lora is not None:
            return self.lora.forward(token_ids, batch, self._kv, slots, placed)
        if placed is not None:
            return placed.forward(self._model, token_ids, batch, self._kv)
        return self._model.forward(token_ids, batch, self._kv)

    def _tapped(self, step: HostStep, taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        rows = self._rows
        assert isinstance(self._model, TappedModel), "the loader has checked this"
        return self._model.forward_tapped(rows.token_ids(step), rows.attention_batch(step), self._kv, taps)

    def _note_states(
        self, taken: _FromHidden, chunks: Sequence[Chunk], step: HostStep, states: Tensor | None
    ) -> None:
        """Note hidden states for heads. Steps with adapters have none of inner layers."""
        kept = self._states
        if kept is not None and states is not None and states.shape[1] == kept.width:
            taken.states.append(_StepStates(chunks, step, states))

    def _prepare_drafts(
        self, chunks: Sequence[Chunk], step: HostStep, sampled: Tensor | None, hidden: _FromHidden
    ) -> None:
        """Let a drafter draft behind the step, and keep the hidden states that a head has not read."""
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
        """Return the requests whose logits change neither by a grammar nor by the text in front of them."""
        masks, sampler = self._masks, self._sampler
        return {
            request_id
            for request_id, row in zip(samples.request_ids, samples.request_rows.tolist(), strict=True)
            if sampler.knows_no_text(row) and (masks is None or not masks.constrained([request_id]))
        }

    def _head(self, hidden: Tensor, step: HostStep, only_argmax: bool = False) -> Tensor | None:
        if not step.samples.request_ids:
            return None
        rows = hidden[self._staging.to_device(step.samples.at)]
        chosen = self._model.argmax(rows) if only_argmax else None
        return chosen if chosen is not None else self._model.logits(rows)

    def collect(self) -> StepResult:
        step = self._submitted.popleft()
        if step is self._unsampled:
            self._sample_waiting()
        elapsed_s = step.timer.wait()
        sampled: tuple[SampledToken, ...] = ()
        if step.token_ids is not None:
            samples = step.samples if step.drafts is None else _with_ids(step.samples, step.drafts)
            sampled = self._sampler.report(samples, step.token_ids.tolist(), step.logprobs, step.masks)
        embedded = (
            sampled_vector(request_id, vector) for request_id, vector in step.hidden.embeddings.items()
        )
        scored = tuple(scores.report() for scores in step.hidden.scores)
        encoder_s = step.encoder_timer.wait() if step.encoder_timer is not None else 0.0
        return StepResult(step.plan.step_id, (*sampled, *embedded), elapsed_s, scored, encoder_s)

    def _start_timer(self) -> StepTimer:
        return CudaTimer() if self._ops.device.type == "cuda" else HostTimer(self._clock)

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


def _with_ids(samples: Samples, late: LateDrafts) -> Samples:
    """Return the samples with the ids of drafts that were not known when the step was submitted."""
    drafts = {
        index: late.of(samples.request_ids[index])[: len(ids)] if ON_DEVICE in ids else ids
        for index, ids in samples.drafts.items()
    }
    return replace(samples, drafts=drafts)


def _copy_state(states: StateStore, copy: StateCopy) -> None:
    if copy.from_slot is None:
        states.clear(copy.slot)
    elif copy.from_host:
        states.copy_from_host(copy.from_slot, copy.slot)
    elif copy.to_host:
        states.copy_to_host(copy.from_slot, copy.slot)
    else:
        states.copy(copy.from_slot, copy.slot)


class StepTimer(Protocol):
    """Measures the time of a step from the construction of the timer."""

    def stop(self, preparation_s: float = 0.0) -> None:
        """Mark the end of the step's work, all of which has been submitted. Of its time, `preparation_s` was spent on
        what later steps need not do again, and does not count."""
        ...

    def wait(self) -> float:
        """Wait until the step's work is done. Returns its seconds."""
        ...


class HostTimer:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._started_s = clock.now()
        self._elapsed_s = 0.0

    def stop(self, preparation_s: float = 0.0) -> None:
        self._elapsed_s = self._clock.now() - self._started_s - preparation_s

    def wait(self) -> float:
        return self._elapsed_s


class CudaTimer:
    def __init__(self) -> None:
        self._begin = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)
        self._begin.record()
        self._preparation_s = 0.0

    def stop(self, preparation_s: float = 0.0) -> None:
        self._end.record()
        self._preparation_s = preparation_s

    def wait(self) -> float:
        self._end.synchronize()
        elapsed_s = float(self._begin.elapsed_time(self._end)) / 1000.0
        return max(0.0, elapsed_s - self._preparation_s)
