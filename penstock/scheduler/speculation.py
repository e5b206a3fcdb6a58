"""Decides how many drafted tokens each request verifies in a step. Knows no drafter and no clock.

The rate of a step with drafts is its expected tokens over its predicted seconds, E / T. One more drafted token adds
to E its chance to be accepted, and to T the time of one row. So tokens are taken in the order of their chances, for
as long as chance / row time exceeds E / T: no other choice has a higher rate. While few requests run, a row costs
little and nearly every guess is taken. Under full load a row costs as much as it can gain, and none is taken.

A drafted token counts only if all tokens before it are accepted. Its chance is a product of estimates, one for
each position, from decayed counts: of the drafter and grade in this engine, and of the same in this request, where
the first is what the second starts from.

A draft follows from the newest token, so a step with drafts cannot be planned ahead of the step before it, and the
executor idles while the host commits and plans. Where steps can be planned ahead, drafts must make up for that too.

The step-time predictor fits all loads with one straight line. So its prediction for a step without drafts is scaled
by what such steps took lately, and the time of a drafted token is what drafts added to it lately.

An estimate that is never tried is never corrected. So now and then, and when half of the requests have ended, a step
takes one short draft that does not seem to pay. And now and then a step takes no draft at all: if every step had as
many drafts for each request, the predictor could not tell what drafts cost. Steps without drafts are more frequent
when many more requests run than before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import msgspec

from penstock.core.engine_config import SchedulerConfig
from penstock.core.messages import DrafterStats
from penstock.core.plan import Draft, DraftUse, SampledToken
from penstock.scheduler.acceptance import Kind, Tally
from penstock.scheduler.running import RunningSet, Work
from penstock.scheduler.sequence import Sequence, State
from penstock.scheduler.step_builder import StepLoad, StepTimePredictor

_FIRST_CHANCE = 0.6  # before the first draft
_DECAY = 0.99  # of counts in the engine, per draft
_PRIOR_WEIGHT = 6.0  # the estimate of the previous position counts as this many tries
_MARGIN = 1.1  # the required ratio of a drafted token's value to its cost, because both are estimates
_MIN_GAIN = 1.05  # of a step with drafts over a step that is planned ahead
_GAIN = 0.2  # of the newest step in averages of costs
_OUTLIER = 1.5  # a step's time is clipped to this multiple of its prediction
_PATIENCE = 8  # plans without a draft, after which steps are planned ahead again
_FEWEST_BETWEEN_TRIALS, _MOST_BETWEEN_TRIALS = 16, 256  # plans; each failed trial doubles the number
_TRIAL_SHARE = 4  # a trial drafts one token for one of this many requests
_FIRST_TOKENS = 2  # of each draft, before the cost of a drafted token is known
_FADING = 0.02  # decay of the estimated cost of drafts, per plan without drafts
_PLANS_BETWEEN_PLAIN_STEPS = 48
_PLANS_AFTER_RISE = 8
_PLANS_UNTIL_FORGOTTEN = 256
_MANY_REQUESTS = 16  # with more requests, a request whose draft was rejected pauses for a while


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


class _PlainSteps:
    """Decides when a step takes no draft, so that the predictor learns the time of such a step too."""

    def __init__(self) -> None:
        self._num_with_drafts = 0  # plans since the last one without
        self._num_to_come = 0  # plans that alternate between drafts and none
        self._known_decodes = 0  # the number of decodes at which both kinds of steps were compared
        self._num_plans_with_few = 0  # plans since more than half as many ran

    def is_due(self, num_decodes: int) -> bool:
        """Say whether the plan of `num_decodes` decodes shall have no drafts."""
        if num_decodes > 2 * self._known_decodes:
            self._known_decodes = num_decodes
            self._num_to_come = _PLANS_AFTER_RISE
        self._num_plans_with_few = (
            0 if 2 * num_decodes > self._known_decodes else self._num_plans_with_few + 1
        )
        if self._num_plans_with_few >= _PLANS_UNTIL_FORGOTTEN:
            self._known_decodes = num_decodes
        self._num_to_come -= self._num_to_come > 0
        is_due = self._num_with_drafts >= _PLANS_BETWEEN_PLAIN_STEPS or bool(
            self._num_to_come and self._num_with_drafts
        )
        if is_due:
            self._num_with_drafts = 0
        return is_due

    def put_off(self) -> None:
        """Count a plan with drafts."""
        self._num_with_drafts += 1


class Speculation:
    def __init__(self, config: SchedulerConfig, predictor: StepTimePredictor, running: RunningSet) -> None:
        self._max_draft_tokens = config.max_draft_tokens
        self._max_step_tokens = config.max_num_batched_tokens
        self._predictor = predictor
        self._running = running
        self._tallies: dict[Kind, Tally] = {}
        self._counts: dict[str, _Counts] = {}
        self._plain_steps = _PlainSteps()
        self._num_plans_without = 0  # plans since the last draft that seemed to pay
        self._plans_between_trials = _FEWEST_BETWEEN_TRIALS
        self._most_decodes = 0  # of a plan since the load last fell by half
        self._plain_ratio = 1.0  # of a step without drafts to its prediction, lately
        self._row_s: float | None = None  # seconds of a drafted token, lately; None before the first
        self._num_observed = 0  # steps that were used to estimate the host's time
        self._host_s = 0.0  # host's time per step, while the executor idles
        self.plans_ahead = False  # the driver asks for plans ahead of commits; set by the scheduler

    @property
    def waits_for_commits(self) -> bool:
        """Say whether the next step, which could be planned ahead, is better planned with the newest tokens known:
        drafts have been paying, or a trial is due."""
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
        self._note_load(len(work.decodes))
        if not self._max_draft_tokens or self._plain_steps.is_due(len(work.decodes)):
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
        if drafted:
            self._plain_steps.put_off()
        return drafted

    def _note_load(self, num_decodes: int) -> None:
        """Let a trial be due with the next plan when half of the requests have ended: drafts may pay again."""
        self._most_decodes = max(self._most_decodes, num_decodes)
        if 0 < 2 * num_decodes <= self._most_decodes:
            self._most_decodes, self._plans_between_trials = num_decodes, _FEWEST_BETWEEN_TRIALS
            if self._num_plans_without >= _PATIENCE:
                self._num_plans_without = _PATIENCE + _FEWEST_BETWEEN_TRIALS - 1  # this plan counts

    def observe_step(self, load: StepLoad, planned_s: float, committed_s: float, elapsed_s: float) -> None:
        """Learn the costs of drafts from a step that was not planned ahead: the host's time, and without prompts the
        time of a step without drafts and of each drafted token."""
        idle_s = max(0.0, committed_s - planned_s - elapsed_s)
        idle_s = min(idle_s, max(2.0 * self._host_s, elapsed_s))  # the host may have recorded graphs
        self._num_observed += 1
        self._host_s += max(_GAIN, 1.0 / self._num_observed) * (idle_s - self._host_s)
        if load.prefill_tokens or elapsed_s <= 0.0:
            return
        elapsed_s = min(elapsed_s, _OUTLIER * self._predictor.predict(load))
        plain_s = self._predictor.predict(replace(load, draft_tokens=0))
        if plain_s <= 0.0:
            return  # noisy step times can leave a weight of zero
        if not load.draft_tokens:
            self._plain_ratio += _GAIN * (elapsed_s / plain_s - self._plain_ratio)
        else:
            row_s = max(0.0, elapsed_s - self._plain_ratio * plain_s) / load.draft_tokens
            before_s = self._predictor.draft_token_s if self._row_s is None else self._row_s
            self._row_s = before_s + _GAIN * (row_s - before_s)

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
            self._plans_between_trials = _FEWEST_BETWEEN_TRIALS
            return lengths
        self._num_plans_without += 1
        if self._row_s is not None:
            self._row_s += _FADING * (self._predictor.draft_token_s - self._row_s)
        if is_trial:
            self._num_plans_without = _PATIENCE
            self._plans_between_trials = min(2 * self._plans_between_trials, _MOST_BETWEEN_TRIALS)
            by_chance = sorted(range(len(offers)), key=lambda index: -self._chances(*offers[index])[0])
            for index in by_chance[: min(-(-load.decode_sequences // _TRIAL_SHARE), max_tokens)]:
                lengths[index] = 1
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
        return self._num_plans_without >= _PATIENCE + self._plans_between_trials

    def _room(self, sequence: Sequence) -> int:
        """Return the most tokens that may be drafted for a request, which gets one more token in any case."""
        return min(self._max_draft_tokens, sequence.length_limit - sequence.num_known - 1)

    def _best_lengths(
        self, offers: list[tuple[Sequence, Draft]], load: StepLoad, max_tokens: int
    ) -> list[int]:
        row_s = _MARGIN * (self._predictor.draft_token_s if self._row_s is None else self._row_s)
        plain_s = self._plain_ratio * self._predictor.predict(load)
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
        if self._row_s is None:
            lengths = [min(length, _FIRST_TOKENS) for length in lengths]
        if self.plans_ahead and num_tokens * plain_s <= _MIN_GAIN * load.decode_sequences * step_s:
            return [0] * len(offers)
        return lengths

    def _chances(self, sequence: Sequence, draft: Draft) -> list[float]:
        """Return the chance of each token to be accepted, with all before it."""
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
