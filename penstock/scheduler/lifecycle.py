"""Moves requests through their states: waiting, running, preempted, ended. Plans no step and computes no budget.

Only this file changes `Sequence.state`:

    add                                          → WAITING
    _start      WAITING                          → RUNNING
    _hold       WAITING                          → HELD, until another request has computed the same prefix
    _preempt    RUNNING                          → WAITING, or SETTLING while samples are in flight
    _requeue    HELD, SETTLING                   → WAITING
    _end        any                              → ENDED, by `abort`, `fail`, a deadline or the last token
"""

from __future__ import annotations

from penstock.core.engine_config import SchedulerConfig
from penstock.core.errors import InvalidRequest
from penstock.core.plan import (
    Chunk,
    TokenEvent,
)
from penstock.core.request import FinishReason, Request
from penstock.kvcache.cache import KVCache
from penstock.scheduler.admission import Admission, Headroom, check_request, check_windows
from penstock.scheduler.endings import (
    Deadlines,
    finish_reason_of,
    last_event,
)
from penstock.scheduler.exchange import BlockExchange
from penstock.scheduler.images import ImageEncodings, check_images
from penstock.scheduler.preemption import Swapping
from penstock.scheduler.prefix import Breakpoints, PrefixSharing
from penstock.scheduler.queue import WaitingQueue
from penstock.scheduler.running import RunningSet, check_records
from penstock.scheduler.sequence import Sequence, State
from penstock.scheduler.step_builder import StepTimePredictor
from penstock.scheduler.tenants import (
    PROMPT_TOKEN_WEIGHT,
    OutputLengthEstimator,
    TenantAccounts,
)


class RequestLifecycle:
    """The requests of a scheduler, with the queue, the running set and all records about them."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: KVCache,
        *,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        block_copy_s: float | None,
        image_cache_tokens: int,
        masks_late: bool,
        predictor: StepTimePredictor | None = None,
    ) -> None:
        """See `Scheduler`."""
        self._config = config
        self.cache = cache
        self._max_model_len = max_model_len
        self._max_length = min(max_model_len, cache.longest_context())
        self._eos_token_ids = eos_token_ids
        self._masks_late = masks_late

        headroom = Headroom(cache.block_size, cache.windows, counts_tokens=cache.has_window_memory)
        self._lengths = OutputLengthEstimator(config.length_bins)
        self._predictor = StepTimePredictor() if predictor is None else predictor
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
        self._queue = WaitingQueue(config)
        self._events: list[TokenEvent] = []  # of requests that ended outside of a commit
        self._num_arrivals = 0
        self._num_preemptions = 0
        # The resource that the queue waited for last, and the time.
        self._shortage: tuple[str, float] = ("", -1.0)

    def add(self, request: Request, now: float) -> None:
        """Queue a request; or raise InvalidRequest or Overloaded, and leave no trace of it."""
        self._check(request)
        num_prompt = len(request.prompt_token_ids)
        self._queue.check_room(request, self._config.max_num_seqs - len(self._running), now)
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

    def sequence_of(self, request_id: str) -> Sequence | None:
        """Return the record of a request that has not ended, for other ranks."""
        return self._sequences.get(request_id)

    def num_kept_tokens(self, sequence: Sequence, now: float) -> int:
        """Return how many leading tokens another rank's request could read here at its breakpoints."""
        return self._breakpoints.num_kept_tokens(sequence, now)

    @property
    def has_decodes(self) -> bool:
        """Return whether a running request waits for its next token."""
        return self._running.has_decodes

    @property
    def unfinished(self) -> set[str]:
        """Return the ids of requests whose end `take_events` and `commit` have not told."""
        return {*self._sequences, *(event.request_id for event in self._events)}

    @property
    def has_work(self) -> bool:
        """Return whether any request waits or runs, or has an event that was not taken yet."""
        return bool(self._sequences or self._events)

    def next_wakeup(self, now: float) -> float | None:
        """Return the time to call `plan` again even if nothing happens before: the next deadline, if there is one."""
        deadline_s = self._deadlines.next_s()
        return None if deadline_s is None else max(now, deadline_s)

    def services(self) -> list[dict[str, int]]:
        """Return, for each tier, the service that tenants with waiting requests received so far. Within a tier, the
        tenant with the least goes first."""
        return self._queue.services()

    def check_integrity(self) -> None:
        """Raise unless all records agree. Slow: for tests."""
        running = (sequence.blocks for sequence in self._running.sequences)
        self.cache.check_integrity([*running, *self.exchange.tables()])
        check_records(self._sequences, self._running, self._queue)

    @property
    def num_preemptions(self) -> int:
        return self._num_preemptions

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

    def _hold(self, sequence: Sequence) -> None:
        """Park a waiting request until another request has computed the prefix that both share."""
        sequence.waited_for = "prefix"
        sequence.state = State.HELD
        self._queue.park(sequence)

    def _requeue(self, sequence: Sequence) -> None:
        """Let a parked member of the queue be admitted again."""
        sequence.state = State.WAITING
        self._queue.unpark(sequence)

    def _end_with(self, event: TokenEvent, sequence: Sequence, now: float) -> TokenEvent:
        """End a request without another token. Returns its last event."""
        self._end(sequence, now)
        return event

    def _preempt(self, sequence: Sequence, now: float) -> None:
        """Take a running request's blocks and put it at the front of its tenant's line. Samples in flight stay valid,
        because they were planned before. The request may run again once they are committed."""
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
                self._sharing.stop_waiting(sequence)
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
