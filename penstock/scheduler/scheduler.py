"""The scheduler: four verbs, `add`, `abort`, `plan`, `commit`. Knows no clock, socket, tensor or text.

There is no prefill phase and no decode phase. Each request has tokens known and tokens computed, and a plan spends
one token budget on letting computed catch up with known. Chunked prefill, prefix hits, preemption by recompute and
resumption all follow from that.

Plans may be asked for ahead of commits, to any depth. The contract with an executor: it executes every plan, in
order, on one stream; it writes all KV of a step before it reads any; results are committed in the same order. That
is why blocks may be released and handed out again while a step that writes to them is still in flight: the next
owner is planned later, hence writes later, and reads only what was written for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from penstock.core.engine_config import SchedulerConfig
from penstock.core.errors import InvalidRequest
from penstock.core.messages import EngineStats, KVEvent
from penstock.core.plan import (
    NO_DRAFTS,
    Chunk,
    Draft,
    SampledToken,
    ScoredChunk,
    StepPlan,
    StepResult,
    TokenEvent,
)
from penstock.core.request import FinishReason, Request
from penstock.kvcache.cache import KVCache
from penstock.scheduler.admission import Admission, Headroom, Outcome, check_request, check_windows
from penstock.scheduler.endings import (
    Deadlines,
    finish_reason_of,
    last_event,
    reason_without_token,
    take_tokens,
    token_event,
    with_draft_use,
)
from penstock.scheduler.exchange import BlockExchange
from penstock.scheduler.images import ImageEncodings, check_images
from penstock.scheduler.preemption import Preemption, Swapping
from penstock.scheduler.prefix import Breakpoints, PrefixSharing
from penstock.scheduler.queue import WaitingQueue
from penstock.scheduler.running import RunningSet, check_records
from penstock.scheduler.sequence import BATCH_RANK, Sequence, State
from penstock.scheduler.speculation import Speculation
from penstock.scheduler.step_builder import StepBuilder, StepLoad, StepTimePredictor, share_of_room
from penstock.scheduler.tenants import (
    PROMPT_TOKEN_WEIGHT,
    OutputLengthEstimator,
    TenantAccounts,
)

_STEPS_BETWEEN_DECISIONS = 16  # between decisions whether evicted blocks are copied to host memory
TOKENS_AFTER_LATE_MASK = 8  # tokens that are then planned only once the previous token is known
MAX_TOLD_CHUNKS = 64  # chunks of a prompt that are reported to operators
_NATURAL_ENDS = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(frozen=True, slots=True)
class _StepInFlight:
    step_id: int
    # Records, not ids alone: an id may be used again while the step is in flight.
    sampling: dict[str, Sequence]
    scoring: dict[str, Sequence]
    load: StepLoad
    planned_s: float | None  # None for a step that was planned ahead of a commit


class Scheduler:
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
    ) -> None:
        """`block_copy_s` is the time of a copy of one block to host memory, or back; with None, preempted requests
        compute again. `tile_tokens`: the executor computes tokens in tiles of this size, and a partly filled tile
        takes as long as a full one. `image_cache_tokens`: the executor keeps the encoder's output for images of this
        many tokens in total. `masks_late`: the executor samples a step after the previous step is committed, as
        grammars require, so that requests with a grammar are planned ahead of commits too.

        A model with states gets no drafts, because a state cannot go back when a draft is rejected."""
        if cache.states is not None and (
            cache.states.num_slots < config.max_num_seqs or config.max_draft_tokens
        ):
            raise ValueError(
                f"{cache.states.num_slots} state slots are too few for {config.max_num_seqs} requests, or there are "
                f"drafts ({config.max_draft_tokens})"
            )
        self._config = config
        self.cache = cache
        self._max_model_len = max_model_len
        self._max_length = min(max_model_len, cache.longest_context())
        self._eos_token_ids = eos_token_ids
        self._tile_tokens = tile_tokens
        self._masks_late = masks_late
        self._itl_target_s = config.itl_target_ms / 1000.0 if config.itl_target_ms else None

        headroom = Headroom(cache.block_size, cache.windows, counts_tokens=cache.has_window_memory)
        self._lengths = OutputLengthEstimator(config.length_bins)
        self._predictor = StepTimePredictor()
        self._swapping = Swapping(cache, self._predictor, block_copy_s)
        self._swapping.decide_spills()
        self._accounts = TenantAccounts()
        self._sharing = PrefixSharing(cache)
        self._breakpoints = Breakpoints(cache, config.min_cacheable_tokens)
        self._admission = Admission(cache, self._sharing, headroom, self._swapping.num_worth_reading)
        self._images = ImageEncodings(image_cache_tokens)
        self._deadlines = Deadlines(config.queue_timeout_s)
        # For KV transfers between engines: blocks that other engines read or fill.
        self.exchange = BlockExchange(cache, headroom, self._admission.room_changed)

        # Until it ends, a request is in `_sequences`, and either in `_running` or a member of `_queue`.
        self._sequences: dict[str, Sequence] = {}
        self._running = RunningSet(cache, self._lengths, headroom)
        self._speculation = Speculation(config, self._predictor, self._running)
        self._queue = WaitingQueue(config)
        self._preemption = Preemption(
            cache, self._running, self._admission, config.max_num_seqs, self._preempt
        )
        self._steps: deque[_StepInFlight] = deque()  # planned, not yet committed
        self._events: list[TokenEvent] = []  # of requests that ended outside of a commit
        self._num_arrivals = 0
        self._num_steps = 0
        self._num_preemptions = 0
        self._shortage: tuple[str, float] = (
            "",
            -1.0,
        )  # the resource that the queue waited for last, and the time

    def add(self, request: Request, now: float) -> None:
        """Queue a request; or raise InvalidRequest or Overloaded, and leave no trace of it."""
        self._check(request)
        num_prompt = len(request.prompt_token_ids)
        self._queue.check_room(num_prompt, self._config.max_num_seqs - len(self._running), now)
        max_tokens = min(request.sampling.max_tokens, self._config.max_output_tokens or self._max_length)
        self._num_arrivals += 1
        sequence = Sequence(
            request,
            self._num_arrivals,
            now,
            # With max_tokens 0, one sample is counted too; it is dropped and needs no block.
            length_limit=min(num_prompt + max_tokens, self._max_length) if max_tokens else num_prompt + 1,
            account=self._accounts.enter(request.tenant),
        )
        if request.sampling.grammar is not None and not self._masks_late:
            sequence.ahead_from = sequence.length_limit
        if not request.sampling.ignore_eos:
            sequence.stop_token_ids |= self._eos_token_ids
        if request.output_token_ids:
            reason = finish_reason_of(sequence, request.output_token_ids[-1], now)
            # The engine that began the answer had ended it, or this server allows less.
            if reason is not None:
                self._accounts.leave(sequence.account)
                self._events.append(last_event(sequence, reason, None))
                return
        sequence.predict_length(self._lengths)
        if request.cache_breakpoints:
            self._breakpoints.arrive(sequence, now)
        self._sequences[request.id] = sequence
        self._queue.enter(sequence, now)
        self._deadlines.watch(sequence)

    def abort(self, request_id: str, now: float) -> None:
        """Forget a request wherever it is, and free its blocks. No event follows. Unknown ids are ignored."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            self._events = [event for event in self._events if event.request_id != request_id]
            return
        if sequence.request.sampling.stop and sequence.output_token_ids:
            # The gateway found a stop string: the answer is complete.
            self._lengths.observe(sequence.request, len(sequence.output_token_ids))
        self._end(sequence, now)

    def fail(self, chunk: Chunk, error: str, now: float) -> None:
        """End the request of a chunk that was not computed, and the requests that share the blocks of that chunk,
        with an error. The chunk is a chunk of the latest plan, or the end of such a chunk. Call this before the next
        plan."""
        failed = self._sequences.get(chunk.request_id)
        if failed is None or failed.state is not State.RUNNING:
            return
        first = chunk.start // self.cache.block_size
        lost = set(failed.blocks.whole_block_ids[first:])
        self.cache.withdraw(lost)
        windows = failed.blocks.windows
        lost_windows = set() if windows is None else windows.withdraw(first)
        failed.blocks.close_state()
        for sequence in list(self._running.sequences):
            table = sequence.blocks
            shares_window = table.windows is not None and table.windows.has_any(lost_windows)
            if sequence is failed or shares_window or not lost.isdisjoint(table.block_ids):
                event = last_event(sequence, FinishReason.ERROR, error)
                self._events.append(self._end_with(event, sequence, now))

    def wants_drafts(self) -> dict[str, int]:
        """Return the requests for which the next call of `plan` could use drafts, with the most tokens for each."""
        return {} if self._steps else self._speculation.wanted()

    def plan(self, now: float, drafts: Mapping[str, Draft] = NO_DRAFTS) -> StepPlan | None:
        """Return the next step; None when there is nothing to compute before a commit or an arrival. `drafts` are
        guesses of the next tokens of requests that `wants_drafts` has named."""
        self.cache.retention.expire(now)
        if self.cache.states is not None:
            self.cache.states.take_due()
        self._end_overdue(now)
        self._queue.promote(now)
        if self._steps:
            self._speculation.plans_ahead = True
            if self._speculation.waits_for_commits and self._running.has_decodes:
                return None

        max_tokens = self._config.max_num_batched_tokens
        urgent = self._queue.first() if self._config.preempt_batch else None
        work, lacks_blocks = self._preemption.make_room(max_tokens, urgent, now)
        step = StepBuilder(
            max_tokens, self._predictor, self._itl_target_s, self._tile_tokens, self.cache.block_size
        )
        drafted = self._speculation.choose(work, NO_DRAFTS if lacks_blocks else drafts)
        decodes = [each for each in work.decodes if each.number not in drafted] if drafted else work.decodes
        step.add_decodes(decodes, self._running.grow(work.growing))
        for sequence in drafted.values():
            assert sequence.draft is not None
            step.add_drafted(sequence, sequence.draft.token_ids[: sequence.num_drafted])
        self._running.decoded(step.load.decode_sequences + step.load.draft_tokens)
        # After a preemption no request is admitted, or the preempted requests would be admitted at once.
        self._add_prefills(step, work.prefills, now, may_admit=not lacks_blocks)
        # Without copies, blocks that were handed out for an import could never be filled.
        if not step.chunks and not step.encodings and not (self.exchange.lacks_copies and not self._steps):
            return None
        self._num_steps += 1
        planned_s = None if self._steps else now
        self._steps.append(_StepInFlight(self._num_steps, step.sampling, step.scoring, step.load, planned_s))
        return StepPlan(
            self._num_steps,
            tuple(step.chunks),
            self._running.take_released(),
            self.cache.take_copies(),
            tuple(step.encodings),
            self._images.take_dropped(),
        )

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[TokenEvent]:
        """Take the samples of the oldest plan in flight. Returns the events for clients."""
        step = self._steps[0] if self._steps else None
        if step is None or not step.step_id == plan.step_id == result.step_id:
            raise ValueError(f"step {result.step_id} is committed as {plan.step_id}, out of order")
        if len(result.sampled) != len(step.sampling):
            raise ValueError(f"step {step.step_id} has {len(result.sampled)} samples of {len(step.sampling)}")
        self._steps.popleft()
        if plan.chunks or plan.encodings:
            self._predictor.observe(step.load, result.elapsed_s)
        if not step.step_id % _STEPS_BETWEEN_DECISIONS:
            self._swapping.decide_spills()
        if step.planned_s is not None:
            self._speculation.observe_step(step.load, step.planned_s, now, result.elapsed_s)
        events = [
            self._take_scores(sequence, scored, now)
            for scored in result.scored
            if (sequence := step.scoring[scored.request_id]).state is not State.ENDED
        ]
        for sampled in result.sampled:
            sequence = step.sampling[sampled.request_id]
            if sequence.state is State.ENDED:  # while this step was in flight
                continue
            use = self._speculation.settle(sequence, sampled) if sequence.num_drafted else None
            if sampled.is_postponed:
                self._postpone(sequence, now)
            else:
                events.append(with_draft_use(self._take_sample(sequence, sampled, now), use))
        return events

    def take_events(self) -> list[TokenEvent]:
        """Return the events of requests that ended outside of a commit, such as by a deadline. Call this after
        `plan`."""
        events, self._events = self._events, []
        return events

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def has_work(self) -> bool:
        """Say whether any request waits or runs, or has an event that was not taken yet."""
        return bool(self._sequences or self._events)

    def prefill_s(self, start: int, num_tokens: int) -> float:
        """Predict the seconds that tokens of a prompt, from `start` on, take to compute."""
        return self._predictor.prefill_s(start, num_tokens)

    def next_wakeup(self, now: float) -> float | None:
        """Return the time to call `plan` again even if nothing happens before: the next deadline, if there is one."""
        deadline_s = self._deadlines.next_s()
        return None if deadline_s is None else max(now, deadline_s)

    def take_kv_events(self) -> list[KVEvent]:
        """Return the changes of the prefix index since the last call."""
        return self.cache.take_events()

    def restart_kv_events(self) -> None:
        """Make the next events start with the whole index, for a reader that has missed some or is new."""
        self.cache.restart_events()

    def stats(self) -> EngineStats:
        """Return the scheduler's part of EngineStats. The driver adds the figures of steps."""
        return msgspec.structs.replace(
            self.cache.stats(),
            num_running=len(self._running),
            num_waiting=len(self._queue),
            num_waiting_tokens=self._queue.num_tokens,
            num_prefill_tokens=self._num_prefill_tokens(),
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

    def _num_prefill_tokens(self) -> int:
        """Count the prompt tokens of running requests that no committed step has computed."""
        num_tokens = sum(step.load.prefill_tokens for step in self._steps)
        for sequence in self._running.sequences:
            if sequence.is_prefilling:
                num_tokens += sequence.num_known - sequence.num_computed
        return num_tokens

    @property
    def num_preemptions(self) -> int:
        return self._num_preemptions

    def services(self) -> list[dict[str, int]]:
        """Return, for each tier, the service that tenants with waiting requests received so far. Within a tier, the
        tenant with the least goes first."""
        return self._queue.services()

    def check_integrity(self) -> None:
        """Raise unless all records agree. Slow: for tests."""
        running = (sequence.blocks for sequence in self._running.sequences)
        self.cache.check_integrity([*running, *self.exchange.tables()])
        check_records(self._sequences, self._running, self._queue)

    def _check(self, request: Request) -> None:
        if request.id in self._sequences or any(event.request_id == request.id for event in self._events):
            raise InvalidRequest(f"A request with the id {request.id!r} is already being served.")
        check_request(request, self._max_length, self._max_model_len)
        check_images(request, self._config.max_num_batched_tokens)
        if request.images and self.cache.window_layout is not None:
            check_windows(request, self.cache)

    def _end_overdue(self, now: float) -> None:
        for sequence in self._deadlines.overdue(now):
            event = self._deadlines.event_for(sequence, now)
            self._events.append(self._end_with(event, sequence, now))

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
                sequence.waited_for = "prefix"
                sequence.state = State.HELD
                self._queue.park(sequence)
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
            if sequence.first_planned_s is not None and len(sequence.prefill_chunks) < MAX_TOLD_CHUNKS:
                chunk = now - sequence.first_planned_s, step.chunks[-1].num_tokens
                sequence.prefill_chunks.append(chunk)
            self._publish(sequence, now)
            if sequence.request.images:
                self._images.passed(sequence)

    def _start(self, sequence: Sequence, now: float) -> None:
        """Start a waiting request that has its blocks."""
        self._queue.start(sequence, now)
        self._running.start(sequence)
        sequence.state = State.RUNNING
        sequence.admitted_s = now
        self.cache.record_lookup(sequence.num_known, sequence.num_computed)
        if not sequence.has_started:
            sequence.first_planned_s = now
            what, at_s = self._shortage
            if sequence.waited_for is None and at_s >= sequence.arrival_s < now:
                sequence.waited_for = what
            self._images.num_images += len(sequence.request.images)
            sequence.num_cached_tokens = min(sequence.num_computed, sequence.num_prompt)
            if sequence.marks is not None:
                self._breakpoints.start(sequence, now)
            sequence.account.service += PROMPT_TOKEN_WEIGHT * (sequence.num_known - sequence.num_computed)
            self._deadlines.watch(sequence)

    def _publish(self, sequence: Sequence, now: float) -> None:
        for follower in self._sharing.publish(sequence):
            self._requeue(follower)
        if sequence.marks is not None and not sequence.marks.are_kept:
            self._breakpoints.keep(sequence, now)

    def _requeue(self, sequence: Sequence) -> None:
        """Let a parked member of the queue be admitted again."""
        sequence.state = State.WAITING
        self._queue.unpark(sequence)

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

    def _end_with(self, event: TokenEvent, sequence: Sequence, now: float) -> TokenEvent:
        """End a request without another token. Returns its last event."""
        self._end(sequence, now)
        return event

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

    def _preempt(self, sequence: Sequence, now: float) -> None:
        """Take a running request's blocks and put it at the front of its queue. Samples in flight stay valid, because
        they were planned before. The request may run again once they are committed."""
        self._swapping.preempted(sequence, now)
        self._stop(sequence)
        self._num_preemptions += 1
        is_settling = sequence.num_in_flight > 0
        sequence.state = State.SETTLING if is_settling else State.WAITING
        self._queue.enter(sequence, now, parked=is_settling)

    def _end(self, sequence: Sequence, now: float) -> None:
        if sequence.state is State.RUNNING:
            self._stop(sequence)
        else:
            if sequence.state is State.HELD:
                self._sharing.let_go(sequence)
            self._queue.leave(sequence, now)
        sequence.state = State.ENDED
        self._deadlines.forget(sequence)
        self._accounts.leave(sequence.account)
        del self._sequences[sequence.request_id]

    def _stop(self, sequence: Sequence) -> None:
        """Stop a running request: preempted or ended."""
        self._running.stop(sequence)
        self._images.stop(sequence)
        self._admission.room_changed()
        for follower in self._sharing.stop(sequence):
            self._requeue(follower)
