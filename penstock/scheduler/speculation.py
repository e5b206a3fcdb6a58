"""Decides how many drafted tokens each request verifies in a step. Knows no drafter and no clock.

The rate of a step with drafts is its expected tokens over its predicted seconds, E / T. One more drafted token adds
to E its chance to be accepted, and to T the time of one row. So tokens are taken in the order of their chances, for
as long as chance / row time exceeds E / T: no other choice has a higher rate. While few requests run, a row costs
little and nearly every guess is taken. Under full load a row costs as much as it can gain, and none is taken.

A drafted token counts only if all tokens before it are accepted. Its chance is a product of estimates, one for each
position, from decayed counts of the drafter and grade. The estimate of a request starts from the estimate of the
engine. A node of a tree counts by its rank in the tree: as often as it was accepted of all times that it was
verified.

A draft follows from the newest token. So a step with new drafts cannot be planned ahead of the step before it, and
the executor idles while the host commits and plans. Where steps can be planned ahead, drafts must make up for that.
Where they cannot, and many requests run, the host rarely looks for drafts while none pays. A long draft has tokens
for several steps. A step with the later tokens of such a draft is planned while the first tokens are in flight: the
step *starts late*. The later tokens count only if all tokens before them are accepted, but the executor does not
idle. Otherwise such a step brings one token for each request. The rates of both ways are compared.

The step-time predictor fits all loads with one straight line. The prediction for a step without drafts is therefore
scaled by the recent times of such steps with about as many requests. The time of a drafted token is the time that
drafts added.

The first step with drafts after a while takes the host longer than later ones. So while there are no drafts, the
estimate of the host's time fades to the lowest of its latest times.

An estimate that is never tried is never corrected. So now and then, and when half of the requests have ended, a step
takes one short draft that does not seem to pay. And now and then a step takes no draft at all: if every step had as
many drafts for each request, the predictor could not tell what drafts cost. The first steps of a number of requests
alternate between drafts and none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from penstock.core.engine_config import SchedulerConfig
from penstock.core.messages import DrafterStats
from penstock.core.plan import Draft, DraftUse, SampledToken
from penstock.scheduler.acceptance import Kind, NodeTally, Tally
from penstock.scheduler.plain_steps import GAIN, OUTLIER, Lowest, PlainSteps
from penstock.scheduler.running import RunningSet, Work
from penstock.scheduler.sequence import Drafted, Sequence, State
from penstock.scheduler.step_builder import StepLoad, StepTimePredictor

_FIRST_CHANCE = 0.6  # before the first draft
_DECAY = 0.99  # of counts in the engine, per draft
_PRIOR_WEIGHT = 6.0  # the estimate of the previous position counts as this many tries
_MARGIN = 1.1  # the required ratio of a drafted token's value to its cost, because both are estimates
_MIN_GAIN = 1.02  # of a step with drafts over a step without: the best of many guesses are overestimated
_MIN_GAIN_AHEAD = 1.05  # of a step with drafts over a step that is planned ahead
_GAIN_OF_RISE = 0.1  # of a host's time above the average: often a kernel was compiled or a graph recorded
_PATIENCE = 8  # plans without a draft, after which steps are planned ahead again, or few plans ask for drafts
_PATIENCE_WITH_MANY = 2  # the same, if many requests run: where all lack drafts, they lack the next ones too
_FEWEST_BETWEEN_TRIALS, _MOST_BETWEEN_TRIALS = 16, 256  # plans; each failed trial doubles the number
_FEWEST_WITH_MANY = 64  # plans between trials, if many requests run
_TRIAL_SHARE = 4  # a trial drafts one token for one of this many requests
_FIRST_TOKENS = 2  # of each draft, before the cost of a drafted token is known
_FADING = 0.02  # decay of the estimated cost of drafts and of the host's time, per plan without drafts
_STEPS_THAT_PAY = 4  # with drafts, in a row, after which trials are as frequent as at first
_MANY_REQUESTS = 16  # with more, a request whose draft was not taken pauses, and drafts are given up sooner
_MOST_NODES = 31  # of a tree
_LATE_STEPS = 4  # for which a long draft has tokens, besides the first


class _Offer(NamedTuple):
    """Tokens of a draft, from the `first` on, that a request could verify. All before the `known`-th have been
    sampled."""

    sequence: Sequence
    draft: Draft
    room: int  # the most tokens
    first: int = 0
    known: int = 0

    def chosen(self, count: int) -> Drafted:
        return Drafted(self.draft, self.first, count)


class _Choice(NamedTuple):
    lengths: list[int]  # of each offer
    num_tokens: float  # expected of the step
    step_s: float


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
    def __init__(
        self,
        config: SchedulerConfig,
        predictor: StepTimePredictor,
        running: RunningSet,
        *,
        starts_late: bool = False,
    ) -> None:
        self._max_draft_tokens = config.max_draft_tokens
        self._max_step_tokens = config.max_num_batched_tokens
        self._predictor = predictor
        self._running = running
        self._tallies: dict[Kind, Tally] = {}
        self._nodes: dict[Kind, NodeTally] = {}  # of trees
        self._counts: dict[str, _Counts] = {}
        self._plain_steps = PlainSteps(predictor)
        self._num_plans_without = 0  # plans since the last draft that seemed to pay
        self._plans_between_trials = _FEWEST_BETWEEN_TRIALS
        self._most_requests = 0  # running since the load last fell by half
        self._row_s: float | None = None  # seconds of a drafted token, lately; None before the first
        self._num_observed = 0  # steps that were used to estimate the host's time
        self._host_s = 0.0  # host's time per step, while the executor idles
        self._fastest_host = Lowest()
        self._num_paying = 0  # plans in a row with drafts
        self._latest = _Choice([], 0.0, 0.0)  # of the latest step that was not planned ahead
        self.plans_ahead = False  # the driver asks for plans ahead of commits; set by the scheduler
        self._starts_late = starts_late

    @property
    def waits_for_commits(self) -> bool:
        """Return whether the next step, which could be planned ahead, is better planned with the newest tokens known:
        drafts have been paying, or a trial is due."""
        return self._max_draft_tokens > 0 and (self._num_plans_without < self._patience or self._is_trial_due)

    def wanted(self) -> dict[str, int]:
        """Return the requests for which drafts are wanted, and the most tokens for each. None of their samples may be
        in flight."""
        many = self._many_run
        if not self._max_draft_tokens or (many and self._rests):
            return {}
        wanted: dict[str, int] = {}
        num_steps = 1 + _LATE_STEPS if self._starts_late and self.plans_ahead else 1
        for sequence in self._running.sequences:
            room = self._room(sequence)
            if room <= 0 or sequence.is_prefilling:
                continue
            if not (many and sequence.num_known < sequence.drafting.paused_until):
                longest = sequence.length_limit - sequence.num_known - 1
                wanted[sequence.request_id] = min(num_steps * (1 + room) - 1, longest)
        return wanted

    def choose(
        self, work: Work, drafts: Mapping[str, Draft], num_prompt_tokens: int = 0
    ) -> dict[int, Drafted]:
        """Return the drafts that decodes verify in this step, by the number of their request. Requests that need more
        slots for them join `work.growing`. Prompts, of which the step could compute `num_prompt_tokens`, get at least
        half of the tokens that decodes leave: drafts that are always right would keep prompts waiting forever."""
        self._note_load(len(self._running))
        if not self._max_draft_tokens:
            return {}
        is_plain = self._plain_steps.is_due(len(work.decodes))
        drafted = {} if is_plain else self._choose(work, drafts, num_prompt_tokens)
        self._plain_steps.planned(len(work.decodes), with_drafts=bool(drafted))
        return drafted

    def _choose(self, work: Work, drafts: Mapping[str, Draft], num_prompt_tokens: int) -> dict[int, Drafted]:
        offers, is_trial = [], self._is_trial_due
        for sequence in work.decodes if drafts else ():
            draft = drafts.get(sequence.request_id)
            room = self._room(sequence, draft)
            if draft is not None and draft.token_ids and room > 0 and not sequence.num_in_flight:
                offers.append(_Offer(sequence, draft, room))
        max_tokens = self._max_step_tokens - len(work.decodes)
        max_tokens -= min(num_prompt_tokens, -(-max_tokens // 2))
        drafted = self._fitted(offers, self._lengths(offers, _load_of(work), max_tokens), work)
        for offer in offers:
            if offer.sequence.number not in drafted and not is_trial:
                offer.sequence.drafting.pause(offer.sequence.num_known)
        return drafted

    def choose_late(self, work: Work) -> dict[int, Drafted] | None:
        """Return the drafts of a step that starts late, as `choose` does; None if it is better to wait for the commit
        of the step in flight. Without any draft it is: new ones are only asked for when nothing is in flight."""
        offers = []
        for sequence in work.decodes:
            before, room = sequence.drafted, self._room(sequence)
            if before is not None and not before.is_void and room > 0:
                # One token of the draft lies between: the sample after the drafts in flight.
                first = before.first + before.count + 1
                offers.append(_Offer(sequence, before.draft, room, first, before.first))
        max_tokens = self._max_step_tokens - len(work.decodes)
        choice = self._best(offers, _load_of(work), max_tokens, idle_s=0.0)
        if not any(choice.lengths) or not self._pays_late(choice):
            return None
        return self._fitted(offers, choice.lengths, work)

    def _pays_late(self, choice: _Choice) -> bool:
        """Return whether a step that starts late has a higher rate than a step like the latest one that waited."""
        waiting = self._latest
        return choice.num_tokens * waiting.step_s > _MIN_GAIN_AHEAD * waiting.num_tokens * choice.step_s

    def _fitted(self, offers: list[_Offer], lengths: list[int], work: Work) -> dict[int, Drafted]:
        """Return as much of the chosen drafts as there are slots for."""
        chosen = [(offer, length) for offer, length in zip(offers, lengths, strict=True) if length]
        if not chosen:
            return {}
        counts = self._running.fit_drafts(
            [(offer.sequence, length) for offer, length in chosen], work.growing
        )
        return {
            offer.sequence.number: offer.chosen(count)
            for (offer, _), count in zip(chosen, counts, strict=True)
            if count > 0
        }

    def _note_load(self, num_requests: int) -> None:
        """Let a trial be due with the next plan when half of the requests have ended: drafts may pay again. The
        requests of one plan do not tell: a plan made ahead leaves out those that verify drafts."""
        self._most_requests = max(self._most_requests, num_requests)
        if 0 < 2 * num_requests <= self._most_requests:
            self._most_requests, self._plans_between_trials = num_requests, _FEWEST_BETWEEN_TRIALS
            if self._num_plans_without >= self._patience:
                self._num_plans_without = self._patience + self._trial_interval - 1  # this plan counts

    def observe_step(self, load: StepLoad, waited_s: float | None, elapsed_s: float) -> None:
        """Learn the times of steps without drafts, and what drafts add to them: the host's time, and that of each
        drafted token. `waited_s` is the time from the commit before the step to its own; None for a step that was
        planned ahead."""
        if not self._max_draft_tokens:
            return
        if waited_s is not None:
            self._observe_host(max(0.0, waited_s - elapsed_s), elapsed_s)
        if load.prefill_tokens or elapsed_s <= 0.0:
            return
        if not load.draft_tokens:
            self._plain_steps.observe(load, elapsed_s)
        elif waited_s is not None:
            plain_s = self._plain_steps.predict(replace(load, draft_tokens=0))
            if plain_s <= 0.0:
                return  # noisy step times can leave a weight of zero
            elapsed_s = min(elapsed_s, OUTLIER * self._predictor.predict(load))
            row_s = max(0.0, elapsed_s - plain_s) / load.draft_tokens
            before_s = self._predictor.draft_token_s if self._row_s is None else self._row_s
            self._row_s = before_s + GAIN * (row_s - before_s)

    def _observe_host(self, idle_s: float, elapsed_s: float) -> None:
        idle_s = min(idle_s, max(2.0 * self._host_s, elapsed_s))  # the host may have compiled kernels
        self._num_observed += 1
        self._fastest_host.observe(idle_s)
        gain = GAIN if idle_s < self._host_s else _GAIN_OF_RISE
        self._host_s += max(gain, 1.0 / self._num_observed) * (idle_s - self._host_s)

    def settle(self, sequence: Sequence, drafted: Drafted, sampled: SampledToken) -> DraftUse:
        """Count the drafts of a request that were in flight, and take back those that were not accepted."""
        num_accepted = len(sampled.accepted)
        num_rejected = drafted.count - num_accepted
        if num_rejected < 0:
            raise ValueError(f"{num_accepted} of {drafted.count} drafts were accepted")
        if not sampled.is_postponed:
            self._observe(sequence, drafted, sampled)
        sequence.num_expected -= num_rejected
        if sequence.state is State.RUNNING:
            self._running.take_back(sequence, num_rejected)
        sequence.num_drafted -= drafted.count
        if sequence.drafted is drafted:
            sequence.drafted = None
        elif sequence.drafted is not None and not drafted.continues(sampled):
            sequence.drafted.is_void = True
        return DraftUse(drafted.draft.drafter, drafted.count, num_accepted)

    def _lengths(self, offers: list[_Offer], load: StepLoad, max_tokens: int) -> list[int]:
        """Return how many tokens of each draft a step takes. `load` is the step without drafts. All drafts together
        may have `max_tokens`."""
        is_trial = self._is_trial_due
        lengths = self._best_lengths(offers, load, max_tokens)
        if any(lengths):
            self._num_plans_without = 0
            self._num_paying += 1
            if self._num_paying == _STEPS_THAT_PAY:
                self._plans_between_trials = _FEWEST_BETWEEN_TRIALS
            return lengths
        self._num_plans_without += 1
        if is_trial or 0 < self._num_paying < _STEPS_THAT_PAY:
            self._plans_between_trials = min(2 * self._plans_between_trials, _MOST_BETWEEN_TRIALS)
        self._num_paying = 0
        if self._num_observed:
            self._host_s += _FADING * (self._fastest_host.value - self._host_s)
        if self._row_s is not None:
            self._row_s += _FADING * (self._predictor.draft_token_s - self._row_s)
        if is_trial:
            self._num_plans_without = self._patience
            by_chance = sorted(range(len(offers)), key=lambda index: -self._chances(offers[index])[0])
            for index in by_chance[: min(-(-load.decode_sequences // _TRIAL_SHARE), max_tokens)]:
                lengths[index] = 1
        return lengths

    def _observe(self, sequence: Sequence, drafted: Drafted, sampled: SampledToken) -> None:
        """Count a draft that was verified. Later tokens of a draft say nothing about its first ones. A tree counts as
        a draft of as many tokens as it is deep."""
        draft, num_accepted = drafted.draft, len(sampled.accepted)
        kind = (draft.drafter, draft.grade)
        if draft.tree_depth is not None:
            self._nodes_of(kind).observe(drafted.count, sampled.nodes)
            num_levels = min(draft.tree_depth, drafted.count)
            counts = self._counts.setdefault(draft.drafter, _Counts())
            counts.observe(num_levels, num_accepted)
            return
        if not drafted.first:
            self._tally(kind).observe(drafted.count, num_accepted)
            sequence.drafting.observe(kind, drafted.count, num_accepted)
        self._counts.setdefault(draft.drafter, _Counts()).observe(drafted.count, num_accepted)

    def stats(self) -> tuple[DrafterStats, ...]:
        return tuple(
            DrafterStats(drafter, tuple(counts.drafted), tuple(counts.accepted))
            for drafter, counts in self._counts.items()
        )

    @property
    def _is_trial_due(self) -> bool:
        return self._num_plans_without >= self._patience + self._trial_interval

    @property
    def _trial_interval(self) -> int:
        return max(self._plans_between_trials, _FEWEST_WITH_MANY if self._many_run else 0)

    @property
    def _many_run(self) -> bool:
        return len(self._running) > _MANY_REQUESTS

    @property
    def _patience(self) -> int:
        return _PATIENCE_WITH_MANY if self._many_run else _PATIENCE

    @property
    def _rests(self) -> bool:
        """Return whether drafts have not been paying, so that the host only looks for them in one of some plans."""
        num_plans = self._num_plans_without
        return num_plans >= self._patience and num_plans % _PATIENCE != 0 and not self._is_trial_due

    def _room(self, sequence: Sequence, draft: Draft | None = None) -> int:
        """Return the most tokens that may be drafted for a request, which gets one more token in any case. A drafter
        keeps to the setting by the depth of its trees, which have more nodes."""
        is_tree = draft is not None and draft.tree_depth is not None
        most = _MOST_NODES if is_tree else self._max_draft_tokens
        return min(most, sequence.length_limit - sequence.num_expected - 1)

    def _best_lengths(self, offers: list[_Offer], load: StepLoad, max_tokens: int) -> list[int]:
        """Return how many tokens of each draft raise the rate of a step that is not planned ahead."""
        choice = self._best(offers, load, max_tokens, idle_s=self._host_s)
        self._latest = choice
        plain_s = self._plain_steps.predict(load)
        min_gain = _MIN_GAIN_AHEAD
        if not self.plans_ahead:
            plain_s, min_gain = plain_s + self._host_s, _MIN_GAIN
        if choice.num_tokens * plain_s <= min_gain * load.decode_sequences * choice.step_s:
            return [0] * len(offers)
        return choice.lengths

    def _best(self, offers: list[_Offer], load: StepLoad, max_tokens: int, *, idle_s: float) -> _Choice:
        """Take drafted tokens in the order of their chances. The executor idles for `idle_s` before the step."""
        row_s = _MARGIN * (self._predictor.draft_token_s if self._row_s is None else self._row_s)
        step_s = self._plain_steps.predict(load) + idle_s
        num_tokens = float(load.decode_sequences)
        rows = [(chance, index) for index, offer in enumerate(offers) for chance in self._chances(offer)]
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
        return _Choice(lengths, num_tokens, step_s)

    def _chances(self, offer: _Offer) -> list[float]:
        """Return the chance of each token to be accepted, with all before it in the draft."""
        sequence, draft, room, first, known = offer
        kind = (draft.drafter, draft.grade)
        if draft.tree_depth is not None:
            return self._nodes_of(kind).chances(min(room, len(draft.token_ids)))
        ours, own = self._tally(kind), sequence.drafting.tallies.get(kind)
        chances = []
        prior, product = _FIRST_CHANCE, 1.0
        for position in range(min(first + room, len(draft.token_ids))):
            prior = ours.chance(position, prior)
            if position >= known:
                product *= prior if own is None else own.chance(position, prior)
            if position >= first:
                chances.append(product)
        return chances

    def _nodes_of(self, kind: Kind) -> NodeTally:
        tally = self._nodes.get(kind)
        if tally is None:
            tally = self._nodes[kind] = NodeTally(_DECAY, _PRIOR_WEIGHT, _FIRST_CHANCE)
        return tally

    def _tally(self, kind: Kind) -> Tally:
        tally = self._tallies.get(kind)
        if tally is None:
            tally = self._tallies[kind] = Tally(_DECAY, _PRIOR_WEIGHT)
        return tally


def _load_of(work: Work) -> StepLoad:
    """Return the load of a step without drafts."""
    load = StepLoad(decode_sequences=len(work.decodes))
    load.decode_context_tokens = sum(sequence.num_computed + 1 for sequence in work.decodes)
    return load


def _by_chance(row: tuple[float, int]) -> float:
    return row[0]
