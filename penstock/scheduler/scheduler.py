"""The scheduler: four verbs, `add`, `abort`, `plan`, `commit`. Knows no clock, socket, tensor or text.

There is no prefill phase and no decode phase. Each request has known tokens and computed tokens. A plan spends one
token budget on computing known tokens. Chunked prefill, prefix hits, preemption by recompute and resumption all
follow from this rule.

Plans may be asked for ahead of commits, to any depth. The contract with an executor: it executes every plan, in
order, on one stream; it writes all KV of a step before it reads any; results are committed in the same order. Blocks
may therefore be released and allocated again while a step that writes to them is still in flight. The next request is
planned later, so it writes later, and it reads only entries that were written for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from penstock.core.engine_config import SchedulerConfig
from penstock.core.messages import EngineStats, KVEvent
from penstock.core.plan import (
    NO_DRAFTS,
    Draft,
    SampledToken,
    ScoredChunk,
    StepPlan,
    StepResult,
    TokenEvent,
)
from penstock.core.request import FinishReason
from penstock.kvcache.cache import KVCache
from penstock.scheduler.admission import Outcome
from penstock.scheduler.endings import (
    last_event,
    reason_without_token,
    take_tokens,
    token_event,
    with_draft_use,
)
from penstock.scheduler.lifecycle import RequestLifecycle
from penstock.scheduler.preemption import Preemption
from penstock.scheduler.running import Work
from penstock.scheduler.sequence import BATCH_RANK, Drafted, Sequence, State
from penstock.scheduler.speculation import Speculation
from penstock.scheduler.step_builder import StepBuilder, StepLoad, StepTimePredictor, share_of_room

_STEPS_BETWEEN_DECISIONS = 16  # between decisions whether evicted blocks are copied to host memory
TOKENS_AFTER_LATE_MASK = 8  # tokens that are then planned only once the previous token is known
MAX_REPORTED_CHUNKS = 64  # chunks of a prompt that are reported to operators
_NATURAL_ENDS = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(frozen=True, slots=True)
class _StepInFlight:
    step_id: int
    # Records, not ids alone: an id may be used again while the step is in flight.
    sampling: dict[str, Sequence]
    drafted: dict[str, Drafted]
    scoring: dict[str, Sequence]
    load: StepLoad
    # Since when the executor had no step; None for a step that was planned ahead of a commit.
    idle_since_s: float | None


class Scheduler(RequestLifecycle):
    def __init__(
        self,
        config: SchedulerConfig,
        cache: KVCache,
        *,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        block_copy_s: float | None = None,
        tile_tokens: int = 1,
        image_cache_tokens: int = 0,
        masks_late: bool = False,
        starts_late: bool = False,
        predictor: StepTimePredictor | None = None,
    ) -> None:
        """`block_copy_s` is the time of a copy of one block to host memory, or back; with None, preempted requests
        compute again. `tile_tokens`: the executor computes tokens in tiles of this size, and a partly filled tile
        takes as long as a full one. `image_cache_tokens`: the executor keeps the encoder's output for images of this
        many tokens in total. `masks_late`: the executor samples a step after the previous step is committed, as
        grammars require, so that requests with a grammar are planned ahead of commits too. `starts_late`: the
        executor executes chunks with `unsettled` drafts, so that a step is planned before the drafts in front of it
        are verified. `predictor`: one that several schedulers have in common.

        A model with states gets no drafts, because a state cannot go back when a draft is rejected."""
        if cache.states is not None and (
            cache.states.num_slots < config.max_num_seqs or config.max_draft_tokens
        ):
            raise ValueError(
                f"{cache.states.num_slots} state slots are too few for {config.max_num_seqs} requests, or there are "
                f"drafts ({config.max_draft_tokens})"
            )
        super().__init__(
            config,
            cache,
            max_model_len=max_model_len,
            eos_token_ids=eos_token_ids,
            block_copy_s=block_copy_s,
            image_cache_tokens=image_cache_tokens,
            masks_late=masks_late,
            predictor=predictor,
        )
        self._tile_tokens = tile_tokens
        self._itl_target_s = config.itl_target_ms / 1000.0 if config.itl_target_ms else None
        # A window's old blocks are given back by the position of the newest token, which is not known then.
        self._starts_late = starts_late and cache.windows is None
        self._speculation = Speculation(config, self._predictor, self._running, starts_late=self._starts_late)
        self._preemption = Preemption(
            cache, self._running, self._admission, self._accounts, config, self._preempt
        )
        self._steps: deque[_StepInFlight] = deque()  # planned, not yet committed
        self._num_steps = 0
        self._committed_s = 0.0  # when a step was last committed

    def wants_drafts(self) -> dict[str, int]:
        """Return the requests for which the next call of `plan` could use drafts, with the most tokens for each."""
        return {} if self._steps else self._speculation.wanted()

    def plan(
        self, now: float, drafts: Mapping[str, Draft] = NO_DRAFTS, *, others_decode: bool = False
    ) -> StepPlan | None:
        """Return the next step; None when there is nothing to compute before a commit or an arrival. `drafts` are
        guesses of the next tokens of requests that `wants_drafts` has named. `others_decode`: requests of other
        ranks, which compute their steps together with this one, wait for their next tokens."""
        self.cache.retention.expire(now)
        if self.cache.states is not None:
            self.cache.states.take_due()
        self._end_overdue(now)
        self._queue.promote(now)
        max_tokens = self._config.max_num_batched_tokens
        is_late = False
        if self._steps:
            self._speculation.plans_ahead = True
            is_late = self._speculation.waits_for_commits and self._running.has_decodes
        if is_late:
            late = self._plan_late(max_tokens)
            if late is None:
                return None
            (work, drafted), lacks_blocks = late, False
        else:
            work, lacks_blocks = self._preemption.make_room(max_tokens, self._queue.first(), now)
            drafts = NO_DRAFTS if lacks_blocks else drafts
            drafted = self._speculation.choose(work, drafts, self._num_prompt_tokens(work) if drafts else 0)
        step = StepBuilder(
            max_tokens, self._predictor, self._itl_target_s, self._tile_tokens, self.cache.block_size
        )
        step.others_decode = others_decode
        decodes = [each for each in work.decodes if each.number not in drafted] if drafted else work.decodes
        step.add_decodes(decodes, self._running.grow(work.growing))
        for sequence in work.decodes if drafted else ():
            if sequence.number in drafted:
                step.add_drafted(sequence, drafted[sequence.number])
        self._running.decoded(step.load.decode_sequences + step.load.draft_tokens)
        # After a preemption no request is admitted, or the preempted requests would be admitted at once.
        self._add_prefills(step, work.prefills, now, may_admit=not lacks_blocks)
        # Without copies, blocks that were handed out for an import could never be filled.
        if not step.chunks and not step.encodings and not (self.exchange.lacks_copies and not self._steps):
            return None
        self._num_steps += 1
        idle_since_s = None
        if not self._steps:  # without decodes, the step may have waited for an arrival
            idle_since_s = self._committed_s if step.load.decode_sequences else now
        self._steps.append(
            _StepInFlight(self._num_steps, step.sampling, step.drafted, step.scoring, step.load, idle_since_s)
        )
        return StepPlan(
            self._num_steps,
            tuple(step.chunks),
            self._running.take_released(),
            self.cache.take_copies(),
            tuple(step.encodings),
            self._images.take_dropped(),
        )

    def _num_prompt_tokens(self, work: Work) -> int:
        """Count the prompt tokens that the next step could compute: of running requests and of the one that is
        admitted next."""
        num_tokens = sum(sequence.num_known - sequence.num_computed for sequence in work.prefills)
        if len(self._running) < self._config.max_num_seqs and (first := self._queue.first()) is not None:
            num_tokens += first.num_known
        return num_tokens

    def _plan_late(self, max_tokens: int) -> tuple[Work, dict[int, Drafted]] | None:
        """Return the work of a step that is planned while drafts are in flight, and its drafts; None if it is better,
        or needed, to wait for their commit. Such a step has only decodes, and preempts no request."""
        if not self._starts_late or self._queue.first() is not None:
            return None
        work = self._running.find_work(max_tokens, starts_late=True)
        if not work.decodes or work.prefills or self._running.num_spare(work.growing) < 0:
            return None
        drafted = self._speculation.choose_late(work)
        return None if drafted is None else (work, drafted)

    def commit(
        self, plan: StepPlan, result: StepResult, now: float, *, sets_pace: bool = True
    ) -> list[TokenEvent]:
        """Take the samples of the oldest plan in flight. Returns the events for clients. `sets_pace` is False if the
        step only waited for another rank, which had more to compute. The time of such a step says nothing about its
        load."""
        step = self._steps[0] if self._steps else None
        if step is None or not step.step_id == plan.step_id == result.step_id:
            raise ValueError(f"step {result.step_id} is committed as {plan.step_id}, out of order")
        if len(result.sampled) != len(step.sampling):
            raise ValueError(f"step {step.step_id} has {len(result.sampled)} samples of {len(step.sampling)}")
        self._steps.popleft()
        if sets_pace and (plan.chunks or plan.encodings):
            self._predictor.observe(step.load, result.elapsed_s)
        if not step.step_id % _STEPS_BETWEEN_DECISIONS:
            self._swapping.decide_spills()
        if sets_pace and not result.is_unusual:
            waited_s = None if step.idle_since_s is None else now - step.idle_since_s
            self._speculation.observe_step(step.load, waited_s, result.elapsed_s)
        self._committed_s = now
        events = [
            self._take_scores(sequence, scored, now)
            for scored in result.scored
            if (sequence := step.scoring[scored.request_id]).state is not State.ENDED
        ]
        for sampled in result.sampled:
            sequence = step.sampling[sampled.request_id]
            if sequence.state is State.ENDED:  # while this step was in flight
                continue
            drafted = step.drafted.get(sampled.request_id)
            use = self._speculation.settle(sequence, drafted, sampled) if drafted is not None else None
            if sampled.is_postponed:
                self._postpone(sequence, now)
            else:
                events.append(with_draft_use(self._take_sample(sequence, sampled, now), use))
        return events

    def prefill_s(self, start: int, num_tokens: int) -> float:
        """Predict the seconds that tokens of a prompt, from `start` on, take to compute."""
        return self._predictor.prefill_s(start, num_tokens)

    def take_kv_events(self) -> list[KVEvent]:
        """Return the changes of the prefix index since the last call."""
        return self.cache.take_events()

    def restart_kv_events(self, now: float) -> None:
        """Make the next events start with the whole index, for a reader that is new or has missed events."""
        self.cache.restart_events(now)

    def stats(self) -> EngineStats:
        """Return the scheduler's part of EngineStats. The driver adds the figures of steps."""
        return msgspec.structs.replace(
            self.cache.stats(),
            num_running=len(self._running),
            num_waiting=len(self._queue),
            num_waiting_tokens=self._queue.num_tokens,
            num_prefill_tokens=self.num_prefill_tokens(),
            kv_fragmentation=self._running.fragmentation,
            num_preemptions=self._num_preemptions,
            num_swapped=self._swapping.num_swapped,
            cache_read_tokens=self._breakpoints.read_tokens,
            cache_write_tokens=self._breakpoints.written_tokens,
            drafters=self._speculation.stats(),
            num_images=self._images.num_images,
            num_images_encoded=self._images.num_encoded,
            image_cache_queries=self._images.num_queries,
            image_cache_hits=self._images.num_hits,
            image_cache_tokens=self._images.num_tokens,
        )

    def num_prefill_tokens(self) -> int:
        """Count the prompt tokens of running requests that no committed step has computed."""
        num_tokens = sum(step.load.prefill_tokens for step in self._steps)
        for sequence in self._running.sequences:
            if sequence.is_prefilling:
                num_tokens += sequence.num_known - sequence.num_computed
        return num_tokens

    def _add_prefills(
        self, step: StepBuilder, prefills: list[Sequence], now: float, *, may_admit: bool
    ) -> None:
        """Continue running prefills, and admit waiting requests. A more urgent request goes before a prefill that
        already runs, unless that prefill has been running for long enough to count as urgent too."""
        for index, sequence in enumerate(prefills):
            if may_admit:
                aged = int((now - sequence.admitted_s) / self._config.aging_s)
                self._admit_waiting(step, now, max_rank=sequence.rank - aged - 1)
            room = step.prefill_room(sequence.num_computed)
            if not room:
                self._shortage = "tokens", now
                return
            if index + 1 < len(prefills) or (may_admit and self._queue.first() is not None):
                room = share_of_room(room)
            self._prefill(step, sequence, room, now)
        if may_admit:
            self._admit_waiting(step, now, max_rank=BATCH_RANK)
        elif self._queue.first() is not None:
            self._shortage = "blocks", now

    def _admit_waiting(self, step: StepBuilder, now: float, *, max_rank: int) -> None:
        """Admit requests of this rank or a more urgent one while there are seats, tokens and blocks."""
        while len(self._running) < self._config.max_num_seqs:
            sequence = self._queue.first()
            if sequence is None or sequence.rank > max_rank:
                return
            if not step.prefill_room(0):
                self._shortage = "tokens", now
                return
            outcome = self._admission.admit(sequence, is_alone=not self._running)
            if outcome is Outcome.BLOCKED:
                self._shortage = "blocks", now
                return
            if outcome is Outcome.HELD:
                self._hold(sequence)
                continue
            self._start(sequence, now)
            self._prefill(step, sequence, max(1, step.prefill_room(sequence.num_computed)), now)
        self._shortage = "seats", now

    def _prefill(self, step: StepBuilder, sequence: Sequence, room: int, now: float) -> None:
        """Compute up to `room` tokens of a running prefill: fewer before an image that is not encoded yet, or if
        there is no memory for more in layers with windows."""
        most = step.num_tokens_left
        if sequence.blocks.windows is not None:
            most = sequence.blocks.windows.reach(sequence.num_computed, most)
            room = min(room, most)
        if room and sequence.request.images:
            room = self._images.reach(sequence, room, most, step)
        if room:
            step.add_prefill(sequence, room, begins=not sequence.has_row)
            if sequence.first_planned_s is not None and len(sequence.prefill_chunks) < MAX_REPORTED_CHUNKS:
                chunk = now - sequence.first_planned_s, step.chunks[-1].num_tokens
                sequence.prefill_chunks.append(chunk)
            self._publish(sequence, now)
            if sequence.request.images:
                self._images.passed(sequence)

    def _take_sample(self, sequence: Sequence, sampled: SampledToken, now: float) -> TokenEvent:
        if sampled.error is not None or sampled.embedding is not None:
            event = last_event(sequence, reason_without_token(sampled), sampled.error, sampled.embedding)
            return self._end_with(event, sequence, now)
        if not sequence.request.sampling.max_tokens:
            return self._end_with(last_event(sequence, FinishReason.LENGTH, None), sequence, now)
        num_taken, finish_reason = take_tokens(sequence, sampled, now)
        publish_at = sequence.publish_at
        if publish_at is not None and sequence.num_computed >= publish_at <= sequence.num_known:
            self._publish(sequence, now)

        if finish_reason is not None:
            if finish_reason in _NATURAL_ENDS:
                self._lengths.observe(sequence.request, sequence.num_known - sequence.num_prompt)
            self._end(sequence, now)
        elif sequence.state is State.SETTLING and sequence.num_known == sequence.num_expected:
            self._requeue(sequence)

        return token_event(sequence, sampled, num_taken, finish_reason, self._breakpoints, now)

    def _take_scores(self, sequence: Sequence, scored: ScoredChunk, now: float) -> TokenEvent:
        if scored.error is not None:
            return self._end_with(last_event(sequence, FinishReason.ERROR, scored.error), sequence, now)
        return TokenEvent(sequence.request_id, prompt_logprobs=scored.logprobs)

    def _postpone(self, sequence: Sequence, now: float) -> None:
        """Return a request whose sample was not taken to its position before the step. A fixed state cannot go
        back: such a request starts again from its last snapshot."""
        sequence.num_expected -= 1
        # Later samples in flight are postponed too. A grammar that was slow once may be slow again.
        sequence.ahead_from = max(sequence.ahead_from, sequence.num_known + TOKENS_AFTER_LATE_MASK)
        if sequence.state is State.RUNNING and sequence.blocks.state_slot is not None:
            self._preempt(sequence, now)
        elif sequence.state is State.RUNNING:
            self._running.take_back(sequence)
        elif sequence.num_known == sequence.num_expected:  # the request was preempted meanwhile
            self._requeue(sequence)
