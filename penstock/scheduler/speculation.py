"""Decides how many drafted tokens each request verifies in a step. Knows no drafter and no clock.

The rate of a step with drafts is its expected tokens over its predicted seconds, E / T. One more drafted token adds
to E its chance to be accepted, and to T the time of one row. So tokens are taken in the order of their chances, for
as long as chance / row time exceeds E / T: no other choice has a higher rate. While few requests run, a row costs
little and nearly every guess is taken. Under full load a row costs as much as it can bring, and none is taken.

A drafted token counts only if all tokens in front of it are accepted. Its chance is a product of estimates, one for
each position, from decayed counts: of the drafter and grade in this engine, and of the same in this request, where
the first is what the second starts from.

A draft follows from the newest token, so a step with drafts cannot be planned ahead of the step before it, and the
executor idles while the host commits and plans. Where steps can be planned ahead, drafts must make up for that too.

An estimate that is never tried is never corrected. So now and then a step takes one short draft that does not seem to
pay.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from penstock.core.engine_config import SchedulerConfig
from penstock.core.messages import DrafterStats
from penstock.core.plan import Draft, DraftUse, SampledToken
from penstock.scheduler.acceptance import Kind, Tally
from penstock.scheduler.running import RunningSet, Work
from penstock.scheduler.sequence import Sequence, State
from penstock.scheduler.step_builder import StepLoad, StepTimePredictor

_FIRST_CHANCE = 0.5  # before anything was tried
_DECAY = 0.99  # of counts in the engine, per draft
_PRIOR_WEIGHT = 2.0  # as many tries as the estimate of the position in front counts for
_MARGIN = 1.1  # a drafted token must be worth so many times its cost, because both are estimates
_MIN_GAIN = 1.05  # of a step with drafts over a step that is planned ahead
_HOST_TIME_GAIN = 0.1  # of the newest step
_PATIENCE = 8  # plans without a draft, after which steps are planned ahead again
_PLANS_BETWEEN_TRIALS = 64
_TRIAL_TOKENS = 2
_MANY_REQUESTS = 16  # with more of them, a request whose draft was not taken is left out for a while


class _Counts:
    """Counts of one drafter's tokens by position, for statistics."""

    def __init__(self) -> None:
        self.drafted: list[int] = []
        self.accepted: list[int] = []

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        missing = num_drafted - len(self.drafted)
        self.drafted += [0] * missing
        self.accepted += [0] * missing
        for position in range(num_drafted):
            self.drafted[position] += 1
        for position in range(num_accepted):
            self.accepted[position] += 1


class Speculation:
    def __init__(self, config: SchedulerConfig, predictor: StepTimePredictor, running: RunningSet) -> None:
        self._max_draft_tokens = config.max_draft_tokens
        self._max_step_tokens = config.max_num_batched_tokens
        self._predictor = predictor
        self._running = running
        self._tallies: dict[Kind, Tally] = {}
        self._counts: dict[str, _Counts] = {}
        self._num_plans_without = 0  # plans since the last draft that seemed to pay
        self._num_observed = 0  # steps that taught the host's time
        self._host_s = 0.0  # host's time per step, while the executor idles
        self._plans_ahead = False  # the driver asks for plans ahead of commits

    def waits_for_commits(self) -> bool:
        """Say whether the next step, which could be planned ahead, is better planned with the newest tokens known:
        drafts have been paying, or a trial is due."""
        self._plans_ahead = True
        return self._max_draft_tokens > 0 and (self._num_plans_without < _PATIENCE or self._is_trial_due)

    def wanted(self) -> dict[str, int]:
        """Return the requests for which drafts are wanted, and the most tokens for each. None of their samples may be
        in flight."""
        if not self._max_draft_tokens:
            return {}
        many = len(self._running) > _MANY_REQUESTS
        wanted: dict[str, int] = {}
        for sequence in self._running.sequences:
            room = self._room(sequence)
            if room <= 0 or sequence.is_prefilling:
                continue
            if not (many and sequence.num_known < sequence.drafting.paused_until):
                wanted[sequence.request_id] = room
        return wanted

    def choose(self, work: Work, drafts: Mapping[str, Draft]) -> dict[int, Sequence]:
        """Return the decodes that verify drafts in this step, by number, each with the drafts that it takes. Requests
        that need more slots for them join `work.growing`."""
        if not self._max_draft_tokens:
            return {}
        offers = []
        for sequence in work.decodes if drafts else ():
            draft = drafts.get(sequence.request_id)
            room = self._room(sequence)
            if draft is not None and draft.token_ids and room > 0 and not sequence.num_in_flight:
                offers.append((sequence, msgspec.structs.replace(draft, token_ids=draft.token_ids[:room])))
        load = StepLoad(decode_sequences=len(work.decodes))
        load.decode_context_tokens = sum(sequence.num_computed + 1 for sequence in work.decodes)
        drafted = {}
        max_tokens = self._max_step_tokens - len(work.decodes)
        for (sequence, draft), length in zip(offers, self._lengths(offers, load, max_tokens), strict=True):
            num_drafted = self._running.fit_drafts(sequence, length, work.growing) if length else 0
            if num_drafted > 0:
                sequence.draft, sequence.num_drafted = draft, num_drafted
                drafted[sequence.number] = sequence
            else:
                sequence.drafting.pause(sequence.num_known)
        return drafted

    def observe_step(self, planned_s: float, committed_s: float, elapsed_s: float) -> None:
        """Learn the host's time from a step that was not planned ahead."""
        idle_s = max(0.0, committed_s - planned_s - elapsed_s)
        self._num_observed += 1
        self._host_s += max(_HOST_TIME_GAIN, 1.0 / self._num_observed) * (idle_s - self._host_s)

    def settle(self, sequence: Sequence, sampled: SampledToken) -> DraftUse:
        """Count the drafts of a request that were in flight, and take back those that were not accepted."""
        draft, num_drafted, num_accepted = sequence.draft, sequence.num_drafted, len(sampled.accepted)
        assert draft is not None
        num_rejected = num_drafted - num_accepted
        if num_rejected < 0:
            raise ValueError(f"{num_accepted} of {num_drafted} drafts were accepted")
        if not sampled.is_postponed:
            self._observe(sequence, draft, num_drafted, num_accepted)
        sequence.num_expected -= num_rejected
        if sequence.state is State.RUNNING:
            self._running.take_back(sequence, num_rejected)
        sequence.draft, sequence.num_drafted = None, 0
        return DraftUse(draft.drafter, num_drafted, num_accepted)

    def _lengths(self, offers: list[tuple[Sequence, Draft]], load: StepLoad, max_tokens: int) -> list[int]:
        """Return how many tokens of each draft a step takes. `load` is the step without drafts. All drafts together
        may have `max_tokens`."""
        is_trial = self._is_trial_due
        lengths = self._best_lengths(offers, load, max_tokens)
        if any(lengths):
            self._num_plans_without = 0
        elif is_trial:
            self._num_plans_without = _PATIENCE
            if offers and max_tokens > 0:
                best = max(range(len(offers)), key=lambda index: self._chances(*offers[index])[0])
                lengths[best] = min(_TRIAL_TOKENS, len(offers[best][1].token_ids), max_tokens)
        else:
            self._num_plans_without += 1
        return lengths

    def _observe(self, sequence: Sequence, draft: Draft, num_drafted: int, num_accepted: int) -> None:
        """Count a draft that was verified."""
        kind = (draft.drafter, draft.grade)
        self._tally(kind).observe(num_drafted, num_accepted)
        sequence.drafting.observe(kind, num_drafted, num_accepted)
        self._counts.setdefault(draft.drafter, _Counts()).observe(num_drafted, num_accepted)

    def stats(self) -> tuple[DrafterStats, ...]:
        return tuple(
            DrafterStats(drafter, tuple(counts.drafted), tuple(counts.accepted))
            for drafter, counts in self._counts.items()
        )

    @property
    def _is_trial_due(self) -> bool:
        return self._num_plans_without >= _PATIENCE + _PLANS_BETWEEN_TRIALS

    def _room(self, sequence: Sequence) -> int:
        """Return the most tokens that may be drafted for a request, which gets one more token in any case."""
        return min(self._max_draft_tokens, sequence.length_limit - sequence.num_known - 1)

    def _best_lengths(
        self, offers: list[tuple[Sequence, Draft]], load: StepLoad, max_tokens: int
    ) -> list[int]:
        row_s = self._predictor.draft_token_s * _MARGIN
        plain_s = self._predictor.predict(load)
        step_s = plain_s + self._host_s
        num_tokens = float(load.decode_sequences)
        rows = [
            (chance, index)
            for index, (sequence, draft) in enumerate(offers)
            for chance in self._chances(sequence, draft)
        ]
        # Within a draft chances fall, or stay: a stable sort keeps its tokens in order.
        rows.sort(key=_by_chance, reverse=True)
        lengths = [0] * len(offers)
        for chance, index in rows[: max(max_tokens, 0)]:
            if chance * step_s <= num_tokens * row_s:
                break
            lengths[index] += 1
            num_tokens += chance
            step_s += row_s
        if self._plans_ahead and num_tokens * plain_s <= _MIN_GAIN * load.decode_sequences * step_s:
            return [0] * len(offers)
        return lengths

    def _chances(self, sequence: Sequence, draft: Draft) -> list[float]:
        """Return the chance of each token to be accepted, with all in front of it."""
        kind = (draft.drafter, draft.grade)
        ours, own = self._tally(kind), sequence.drafting.tallies.get(kind)
        chances = []
        prior, product = _FIRST_CHANCE, 1.0
        for position in range(len(draft.token_ids)):
            prior = ours.chance(position, prior)
            product *= prior if own is None else own.chance(position, prior)
            chances.append(product)
        return chances

    def _tally(self, kind: Kind) -> Tally:
        tally = self._tallies.get(kind)
        if tally is None:
            tally = self._tallies[kind] = Tally(_DECAY, _PRIOR_WEIGHT)
        return tally


def _by_chance(row: tuple[float, int]) -> float:
    return row[0]
