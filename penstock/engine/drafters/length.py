"""Chooses how many tokens a drafter drafts whose drafts take time. Imports no torch."""

from __future__ import annotations

from penstock.core.clock import Clock

_DECAY = 0.97  # of counts, per draft
_WEIGHT = 4.0  # the initial guess counts as this many drafts
_FIRST_CHANCE = 0.7
_FADING = 0.005  # of the share of taken tokens towards 1, per step without an offer
_SMOOTHING = 0.2  # of a new measurement of seconds
_MARGIN = 1.05  # a draft must be worth this many times its seconds
_STEPS_BETWEEN_TRIALS = 64
_TRIAL_TOKENS = 2
_CALLS_TO_WARM_UP = 2  # the first calls compile kernels, so their times do not count
_OUTLIER = 2.0  # no call counts for more than this many times the usual time of a token
_FEW_TOKENS = 12  # known tokens of a request, after a step with drafts
_LONGEST_PAUSE = 4.0  # times the usual step: a longer pause means an idle engine


class DraftLength:
    """Keeps estimates, by position, of acceptance and of the share of drafts whose token the scheduler takes; of the
    seconds of one drafted token for all requests; and of the seconds of a step without drafting. A further token is
    drafted while its chance to be taken and accepted, per second, is above the tokens per second of all before it.
    Under load the scheduler takes fewer tokens, because verifying them takes time too."""

    def __init__(self, clock: Clock, max_tokens: int) -> None:
        self._clock = clock
        self._tried = [_WEIGHT] * max_tokens
        self._accepted = [_WEIGHT * _FIRST_CHANCE] * max_tokens
        self._taken_share = [1.0] * max_tokens
        self._num_offered = [0] * max_tokens  # since the last call
        self._num_taken = [0] * max_tokens  # of these
        self._token_s: float | None = None
        self._step_s: float | None = None
        self._began_s = 0.0
        self._ended_s: float | None = None
        self._num_measured = 0  # calls that told the time of a drafted token
        self._num_idle = 0  # steps since tokens were last drafted

    def begin(self, drafting_s: float = 0.0, num_steps: int = 1) -> int:
        """Begin a call of the drafter. Returns how many tokens to draft. There were this many steps since the last
        call, and `drafting_s` went to drafting after a step."""
        self._began_s = now = self._clock.now()
        if self._ended_s is not None:
            step_s = max(0.0, now - self._ended_s - drafting_s) / max(num_steps, 1)
            self._step_s = _smoothed_s(self._step_s, min(step_s, _LONGEST_PAUSE * (self._step_s or step_s)))
        self._ended_s = now
        self._count_taken(max(num_steps, 1))
        length = self._best()
        if not length:
            self._num_idle += max(num_steps, 1)
            if self._num_idle >= _STEPS_BETWEEN_TRIALS:
                length = min(_TRIAL_TOKENS, len(self._tried))
        if length:
            self._num_idle = 0
        return length

    def resume(self) -> None:
        """Leave out the time since the last call, in which another kind of drafts was used."""
        self._ended_s = None

    def end(self, num_drafted: int, num_known: int, num_requests: int) -> None:
        """End a call that drafted this many tokens for this many requests, and computed this many known tokens
        before."""
        self._ended_s = self._clock.now()
        # The time of a call that catches up with a prompt is not representative.
        if num_requests and num_known <= _FEW_TOKENS * num_requests:
            self.note_seconds((self._ended_s - self._began_s) / num_drafted)

    def note_seconds(self, token_s: float) -> None:
        """Note the seconds of one drafted token for all requests."""
        self._num_measured += 1
        if self._num_measured > _CALLS_TO_WARM_UP:
            usual_s = token_s if self._token_s is None else self._token_s
            self._token_s = _smoothed_s(self._token_s, min(token_s, _OUTLIER * usual_s))

    def observe(self, num_drafted: int, num_taken: int, num_known: int, num_right: int) -> None:
        """Count a draft, of which the scheduler took this many tokens. The answer has tokens in the places of its
        first `num_known`, and this many of these were drafted right."""
        for position in range(min(num_drafted, len(self._tried))):
            self._num_offered[position] += 1
            self._num_taken[position] += position < num_taken
        for position in range(min(num_known, num_right + 1, len(self._tried))):
            self._tried[position] = self._tried[position] * _DECAY + 1
            self._accepted[position] = self._accepted[position] * _DECAY + (position < num_right)

    def _count_taken(self, num_steps: int) -> None:
        """Update the shares by the drafts since the last call. After a while, a token that was not drafted seems
        worth a try again."""
        for position, num_offered in enumerate(self._num_offered):
            share = self._taken_share[position]
            if num_offered:
                share = _smoothed(share, self._num_taken[position] / num_offered)
            else:
                share = 1.0 - (1.0 - _FADING) ** num_steps * (1.0 - share)
            self._taken_share[position] = share
            self._num_offered[position] = self._num_taken[position] = 0

    def _best(self) -> int:
        if self._token_s is None or self._step_s is None:
            return min(_TRIAL_TOKENS, len(self._tried))
        expected, seconds, chance, share = 1.0, self._step_s, 1.0, 1.0
        for position, (tried, accepted) in enumerate(zip(self._tried, self._accepted, strict=True)):
            chance *= accepted / tried
            # No token is accepted without the tokens before it.
            share = min(share, self._taken_share[position])
            gain = share * chance
            if gain * seconds <= expected * self._token_s * _MARGIN:
                return position
            expected += gain
            seconds += self._token_s
        return len(self._tried)


def _smoothed_s(before_s: float | None, measured_s: float) -> float:
    """Smooth measured seconds. Stalls make measurements longer, never shorter: an estimate of more than twice a new
    measurement came from stalls, and is forgotten."""
    if before_s is not None and _OUTLIER * measured_s < before_s:
        return measured_s
    return _smoothed(before_s, measured_s)


def _smoothed(before: float | None, measured: float) -> float:
    return measured if before is None else before + _SMOOTHING * (measured - before)
