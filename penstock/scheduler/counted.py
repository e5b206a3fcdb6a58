"""A faster scheduler for drivers that know all answers beforehand, such as the simulator. Decodes are counted, and
not planned and committed token by token.

A request that decodes does the same in every step: one more token is planned, and one token is committed. Four other
changes happen at steps that are known as soon as the prompt is computed: the plan that needs another block, the
commit that fills a block for the prefix index, the first plan without the request, and the commit that ends the
answer. The scheduler notes these steps. The time of a step therefore depends on the changes in the step, not on the
number of decodes. The counts of a request are brought up to date when another method reads them. Everything else
(admission, prompts, the queue, tenants, blocks, endings) is the code of `Scheduler`. Plans and commits have the same
effects in the same order; a test compares the two schedulers.

When a request cannot be counted (because of a deadline, a grammar or a stop token), or when blocks run out, the
scheduler goes back to plans with a chunk for each token, until the counted steps in flight are committed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as TokenIds
from operator import attrgetter

from msgspec.structs import replace

from penstock.core.engine_config import SchedulerConfig
from penstock.core.plan import Chunk, SampledToken, StepPlan, TokenEvent
from penstock.core.request import Request
from penstock.kvcache.cache import KVCache
from penstock.scheduler.counted_plan import Answers, CountedPlan, Decode, Told, is_countable
from penstock.scheduler.scheduler import Scheduler
from penstock.scheduler.sequence import BATCH_RANK, TIER_RANK, Sequence, State, seniority
from penstock.scheduler.step_builder import StepBuilder, StepLoad

_TIMES_KEPT = 4096  # commits, at least; beyond, the times of reported tokens are dropped
_by_turn = attrgetter("sequence.turn")


class CountedScheduler(Scheduler):
    """Counts decodes. Call `plan_step` in place of `plan`, and `commit_step` for counted plans; other plans are
    committed by `commit`."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: KVCache,
        *,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        answers: Answers,
    ) -> None:
        super().__init__(config, cache, max_model_len=max_model_len, eos_token_ids=eos_token_ids)
        self._answers = answers
        self._counts = not (
            config.max_draft_tokens
            or cache.windows is not None
            or cache.states is not None
            or cache.num_host_blocks
            or cache.tail_slots != cache.block_size
        )
        self._decodes: dict[int, Decode] = {}  # by number of the request
        self._prefilling: dict[int, Sequence] = {}
        self._joins_all = False  # requests decode that are not counted
        self._num_uncountable = 0  # requests that have not ended
        self._counted: deque[CountedPlan] = deque()  # planned, not yet committed
        self._num_planned = 0  # counted plans
        self._num_committed = 0
        # The changes that happen at each plan or commit. An entry of a request that no longer decodes is ignored.
        self._growing: dict[int, list[Decode]] = {}
        self._leaving: dict[int, list[Decode]] = {}
        self._noted: dict[int, list[Decode]] = {}  # commits that may fill a block or end an answer
        self._num_in_step = 0  # decodes of the next plan
        self._num_entries = 0  # tokens that they have computed
        self._times_s: list[float] = []  # of commits
        self._most_times = _TIMES_KEPT
        self._untold: list[Told] = []

    def plan_step(self, now: float) -> CountedPlan | StepPlan | None:
        """Return the next step, as `plan` does: counted, or with a chunk for each token."""
        if not self._counts or self._num_uncountable:
            return self._plan_rows(now)
        if self._joins_all:
            self._join_all()
        self.cache.retention.expire(now)
        self._end_overdue(now)
        self._queue.promote(now)
        num_waiting = len(self._queue)
        is_decoding_alone = not self._prefilling and not num_waiting
        if num_waiting > 1:
            self._update_services()
        growing = self._due_to_grow()
        if self._needs_room(growing, now):
            return self._plan_rows(now)
        load = self._plan_decodes(growing)
        if is_decoding_alone:
            return self._planned(load) if load.decode_sequences else None
        step = StepBuilder(
            self._config.max_num_batched_tokens,
            self._predictor,
            self._itl_target_s,
            self._tile_tokens,
            self.cache.block_size,
        )
        step.load = load
        step.num_tokens_left -= load.decode_sequences
        prefills = sorted(self._prefilling.values(), key=seniority)
        self._add_prefills(step, prefills, now, may_admit=True)
        if not step.chunks and not load.decode_sequences:
            return None
        return self._planned(step.load, step.chunks, step.sampling)

    def _plan_rows(self, now: float) -> StepPlan | None:
        self.stop_counting()
        self._joins_all = True
        return self.plan(now)

    def _needs_room(self, growing: list[Sequence], now: float) -> bool:
        """Return whether requests may have to be preempted."""
        if self._num_in_step > self._config.max_num_batched_tokens:
            return True
        if len(growing) > self.cache.num_available:  # each needs one block
            return True
        waiting = self._queue.first() if len(self._queue) else None
        if waiting is None:
            return False
        if self._preemption.unfair(waiting, now):
            return True
        if TIER_RANK[waiting.request.tier] == BATCH_RANK:
            return False
        lacks = self._admission.num_missing_blocks(waiting) or len(self._running) >= self._config.max_num_seqs
        return bool(lacks) and any(sequence.rank == BATCH_RANK for sequence in self._running.sequences)

    def _plan_decodes(self, growing: list[Sequence]) -> StepLoad:
        """Plan the next token of every request that decodes. The plan is made if there is any."""
        self._change_decodes(growing)
        count = self._num_in_step
        self._num_entries += count
        self._running.decoded(count)
        return StepLoad(decode_sequences=count, decode_context_tokens=self._num_entries)

    def _change_decodes(self, growing: list[Sequence]) -> None:
        """Leave out the requests that the next plan no longer has, and give slots to those that need more."""
        index = self._num_planned + 1
        if index in self._leaving:
            for decode in self._leaving.pop(index):
                self._leave_plans(decode)
        if growing:
            self._running.grow(growing)
        if index in self._growing:
            self._note_growth(index)

    def _planned(
        self, load: StepLoad, chunks: TokenIds[Chunk] = (), sampling: dict[str, Sequence] | None = None
    ) -> CountedPlan:
        self._num_planned += 1
        self._num_steps += 1
        plan = CountedPlan(self._num_planned, load, chunks, sampling)
        self._counted.append(plan)
        for sequence in sampling.values() if sampling else ():
            del self._prefilling[sequence.number]
            self._join(sequence)
        self._running.take_released()
        return plan

    def commit_step(
        self, plan: CountedPlan, elapsed_s: float, tokens: list[SampledToken], now: float
    ) -> list[Told]:
        """Take the samples of the oldest counted plan. `tokens` are the first tokens of answers whose prompts ended
        in this plan. Returns the events for clients. Tokens of answers that continue are reported later."""
        self._commit_one(plan, elapsed_s, now)
        told = self._take_noted(plan.index, now)
        for sequence in plan.rows or ():
            if sequence.state is not State.ENDED:
                index = sequence.num_known - sequence.num_prompt
                (token_id,) = self._answers.tokens(sequence.request_id, index, index + 1)
                sampled = SampledToken(sequence.request_id, token_id)
                told.append(Told(self._take_sample(sequence, sampled, now)))
        for sampled in tokens:
            assert plan.sampling is not None
            sequence = plan.sampling[sampled.request_id]
            if sequence.state is not State.ENDED:
                told.append(Told(self._take_sample(sequence, sampled, now)))
        return told

    def _commit_one(self, plan: CountedPlan, elapsed_s: float, now: float) -> None:
        if not self._counted or self._counted.popleft() is not plan:
            raise ValueError(f"counted step {plan.index} is committed out of order")
        self._predictor.observe(plan.load, elapsed_s)
        self._num_committed += 1
        self._times_s.append(now)
        if len(self._times_s) > self._most_times:
            self._drop_times()

    def _take_noted(self, index: int, now: float) -> list[Told]:
        """End the answers whose last token is in this commit, and publish the blocks that the commit fills."""
        noted = self._noted.pop(index, None)
        if noted is None:
            return []
        told = []
        before = None
        for decode in sorted(noted, key=_by_turn) if len(noted) > 1 else noted:
            sequence = decode.sequence
            if decode is before or self._decodes.get(sequence.number) is not decode:
                continue
            before = decode
            if decode.end == index:
                self._update(decode, index - 1)
                told.append(self._end_answer(decode, now))
                continue
            self._update(decode, index)
            publish_at = sequence.publish_at
            if publish_at is not None and sequence.num_computed >= publish_at <= sequence.num_known:
                self._publish(sequence, now)
            self._note_publication(decode)
        return told

    def _end_answer(self, decode: Decode, now: float) -> Told:
        sequence = decode.sequence
        index = len(sequence.output_token_ids)
        (token_id,) = self._answers.tokens(sequence.request_id, index, index + 1)
        event = self._take_sample(sequence, SampledToken(sequence.request_id, token_id), now)
        assert event.finish_reason is not None, f"{sequence.request_id} goes on behind the end of its answer"
        before = sequence.output_token_ids[decode.num_told : -1]
        if not before:
            return Told(event)
        times_s = self._last_times(len(before) + 1)[:-1]
        return Told(replace(event, token_ids=(*before, *event.token_ids)), times_s)

    def take_told(self) -> list[Told]:
        """Return events that are owed since `stop_counting`."""
        told, self._untold = self._untold, []
        return told

    def tell(self, request_id: str | None = None) -> list[Told]:
        """Return events with all committed tokens that were not reported yet: of one request, or of all."""
        told = self.take_told()
        for decode in sorted(self._decodes.values(), key=_by_turn):
            sequence = decode.sequence
            if request_id is not None and sequence.request_id != request_id:
                continue
            self._update(decode, self._num_committed)
            tokens = tuple(sequence.output_token_ids[decode.num_told :])
            if tokens:
                decode.num_told += len(tokens)
                told.append(Told(TokenEvent(sequence.request_id, tokens), self._last_times(len(tokens))))
        return told

    # Coasting: steps in which requests decode, and nothing else happens.

    @property
    def may_coast(self) -> bool:
        """Return whether the next steps are decodes alone, unless another call comes."""
        return (
            self._counts
            and self._num_in_step > 0
            and not self._prefilling
            and not self._joins_all
            and not self._num_uncountable
            and not self._steps
            and not len(self._queue)
            and not self._events
            and not len(self.cache.pool.pins)
            and not any(plan.rows for plan in self._counted)
        )

    def coasting_steps(self, most: int) -> list[tuple[int, int]]:
        """Return the number of decodes and of KV entries for each of the next plans: one plan for each of the next
        commits, at most `most`, up to the first commit that begins or ends an answer. Plans that could lack blocks
        are left out. This method makes no plan."""
        num_committed, num_planned = self._num_committed, self._num_planned
        next_end = num_committed + most + 1
        for plan in self._counted:
            if plan.sampling:
                next_end = plan.index
                break
        for decode in self._decodes.values():  # quicker than `min` where modules are compiled
            if num_committed < decode.end < next_end:
                next_end = decode.end
        num_spare = self.cache.num_available
        count, num_entries = self._num_in_step, self._num_entries
        leaving, growing = self._leaving, self._growing
        again: dict[int, int] = {}  # by plan: the number of requests that need slots a second time
        steps = []
        for index in range(num_planned + 1, num_planned + next_end - num_committed):
            if index in leaving:
                for decode in leaving[index]:
                    if not decode.has_left:
                        count -= 1
                        num_entries -= decode.computed + index - decode.first
            if index in growing or index in again:
                num_growing = len(growing.get(index, ())) + again.get(index, 0)
                again[index + self.cache.tail_slots] = num_growing
                num_spare -= num_growing
                if num_spare < 0:
                    break
            if not count:
                break
            num_entries += count
            steps.append((count, num_entries))
        return steps

    def coast(self, commits: TokenIds[tuple[float, float]], num_plans: int) -> list[CountedPlan]:
        """Commit the oldest steps in flight, which begin and end no answer: `commits` are their seconds and ends.
        Behind each of the first `num_plans` commits, make the next plan of `coasting_steps`. Returns the plans that
        were made here and are still in flight."""
        in_flight, num_commits = list(self._counted), len(commits)
        made: list[tuple[int, int]] = []  # the decodes and KV entries of new plans
        first, times_s, noted = self._num_committed + 1, self._times_s, self._noted
        predictor, observed = self._predictor, []
        for place, (elapsed_s, now) in enumerate(commits):
            if place < len(in_flight):
                predictor.observe(in_flight[place].load, elapsed_s)
            else:
                observed.append((*made[place - len(in_flight)], elapsed_s))
            self._num_committed = first + place
            times_s.append(now)
            if first + place in noted:
                self._take_noted(first + place, now)
            if place < num_plans:
                made.append(self._plan_coasted())
        predictor.observe_decodes(observed)  # nothing asks the predictor meanwhile
        if len(times_s) > self._most_times:
            self._drop_times()
        self._num_steps += num_plans
        plans = [
            CountedPlan(first + len(in_flight) + place, StepLoad(0, *load))
            for place, load in enumerate(made)
            if len(in_flight) + place >= num_commits
        ]
        self._counted = deque(in_flight[num_commits:] + plans)
        return plans

    def _plan_coasted(self) -> tuple[int, int]:
        """Plan the next token of every request. Returns the decodes and their KV entries."""
        index = self._num_planned + 1
        if index in self._leaving or index in self._growing:
            self._change_decodes(self._due_to_grow())
        count = self._num_in_step
        self._num_entries += count
        self._running.decoded(count)
        self._num_planned = index
        return count, self._num_entries

    # Methods that read or change requests bring the counts up to date first.

    def add(self, request: Request, now: float) -> None:
        self._update_services()
        super().add(request, now)
        if request.id in self._sequences and not is_countable(request):
            self._num_uncountable += 1

    def abort(self, request_id: str, now: float) -> None:
        sequence = self._sequences.get(request_id)
        if sequence is not None and (decode := self._decodes.get(sequence.number)) is not None:
            self._update(decode, self._num_committed)
        super().abort(request_id, now)

    def services(self) -> list[dict[str, int]]:
        self._update_services()
        return super().services()

    def num_prefill_tokens(self) -> int:
        return super().num_prefill_tokens() + sum(plan.load.prefill_tokens for plan in self._counted)

    def check_integrity(self) -> None:
        for decode in self._decodes.values():
            self._update(decode, self._num_committed)
        super().check_integrity()
        assert self._num_in_step == sum(not decode.has_left for decode in self._decodes.values())

    def stop_counting(self) -> None:
        """List the decodes of each counted step in flight, so that requests can be preempted. All tokens so far are
        reported."""
        if not self._decodes:
            return
        self._untold = self.tell()
        decodes = sorted(self._decodes.values(), key=_by_turn)
        for plan in self._counted:
            if plan.rows is None:
                plan.rows = [each.sequence for each in decodes if each.first <= plan.index <= each.last]
        self._decodes.clear()
        self._growing.clear()
        self._leaving.clear()
        self._noted.clear()
        self._num_in_step = self._num_entries = 0

    def _start(self, sequence: Sequence, now: float) -> None:
        super()._start(sequence, now)
        self._prefilling[sequence.number] = sequence

    def _stop(self, sequence: Sequence) -> None:
        self._prefilling.pop(sequence.number, None)
        decode = self._decodes.pop(sequence.number, None)
        if decode is not None:
            decode.update_planned(self._num_planned)
            self._leave_plans(decode)
        super()._stop(sequence)

    def _end(self, sequence: Sequence, now: float) -> None:
        super()._end(sequence, now)
        if not is_countable(sequence.request):
            self._num_uncountable -= 1

    def _take_sample(self, sequence: Sequence, sampled: SampledToken, now: float) -> TokenEvent:
        decode = self._decodes.get(sequence.number)
        if decode is not None:
            decode.update_planned(self._num_planned)
        return super()._take_sample(sequence, sampled, now)

    # The counts of one request.

    def _join_all(self) -> None:
        """Count the requests that decode. Samples that are still in flight are committed first."""
        self._joins_all = False
        self._prefilling = {}
        for sequence in self._running.sequences:
            if sequence.is_prefilling:
                self._prefilling[sequence.number] = sequence
            elif sequence.number not in self._decodes:
                self._join(sequence)

    def _join(self, sequence: Sequence) -> None:
        first = self._num_planned + 1
        decode = Decode(sequence, first, self._answers.length(sequence.request_id))
        self._decodes[sequence.number] = decode
        self._num_in_step += 1
        self._num_entries += decode.computed
        self._leaving.setdefault(max(decode.last + 1, first), []).append(decode)
        self._growing.setdefault(first + sequence.blocks.num_slots - decode.computed, []).append(decode)
        if decode.end >= first:
            self._noted.setdefault(decode.end, []).append(decode)
        self._note_publication(decode)

    def _note_publication(self, decode: Decode) -> None:
        """Look at a request again when its next block may be full."""
        publish_at = decode.sequence.publish_at
        if publish_at is not None:
            due = decode.first + publish_at - decode.expected - 1
            commit = max(due, self._num_committed + 1, decode.first)
            self._noted.setdefault(commit, []).append(decode)

    def _due_to_grow(self) -> list[Sequence]:
        """Return the requests that need more slots in the next plan, in the order in which they began to run."""
        index = self._num_planned + 1
        if index not in self._growing:
            return []
        decodes = self._decodes
        current = [each for each in self._growing[index] if decodes.get(each.sequence.number) is each]
        self._growing[index] = current
        due = [decode for decode in current if decode.last >= index]
        for decode in due:
            decode.update_planned(self._num_planned)
        return [decode.sequence for decode in (sorted(due, key=_by_turn) if len(due) > 1 else due)]

    def _note_growth(self, index: int) -> None:
        """Look at the requests of `_due_to_grow` again when their new slots are full."""
        grown, later = self._growing.pop(index), index + self.cache.tail_slots
        if later in self._growing:
            self._growing[later] += grown
        else:
            self._growing[later] = grown

    def _leave_plans(self, decode: Decode) -> None:
        if not decode.has_left:
            decode.has_left = True
            self._num_in_step -= 1
            self._num_entries -= decode.computed + self._num_planned + 1 - decode.first

    def _update(self, decode: Decode, num_committed: int) -> None:
        """Bring the counts of a request up to date with all plans, and with so many commits."""
        decode.update_planned(self._num_planned)
        decode.update_committed(num_committed, self._answers)

    def _update_services(self) -> None:
        """Bring the accounts of tenants up to date, which decide whose request goes first."""
        for decode in self._decodes.values():
            decode.update_service(self._num_committed)

    def _last_times(self, count: int) -> list[float]:
        """Return the times of the last commits."""
        return self._times_s[len(self._times_s) - count :]

    def _drop_times(self) -> None:
        """Forget the times of tokens that were reported. Long answers leave many times, which are copied here: the
        next call comes when there are twice as many."""
        next_commit = self._num_committed + 1
        first = min((each.first_untold for each in self._decodes.values()), default=next_commit)
        self._times_s = self._last_times(max(0, next_commit - first))
        self._most_times = max(_TIMES_KEPT, 2 * len(self._times_s))
