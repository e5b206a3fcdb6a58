"""Chooses between chains and trees of drafts, by the tokens per second that both were seen to bring. Imports no
torch.

A round is the time from one call of the drafter to the next. It counts for trees if the step of the round verified
trees, and trees were drafted behind it. Trees must be tried before their rates are known, and the kind in use must be
compared with the other kind from time to time. A trial lasts some rounds; trials that fail become rarer. The rates
depend mostly on the number of requests that decode at once, so each range of numbers has its own rates.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median

from penstock.core.clock import Clock
from penstock.engine.drafters.length import DraftLength

MOST_REQUESTS = 8  # that get trees: with more, the rows of a step are dearer than what they can bring
# The tokens of a round vary by half of their mean, so the mean of 500 rounds is known to about 2 %.
_DECAY = 0.998  # of rates, per round
_TRIAL_ROUNDS = 512
_MIN_GAIN = 1.02  # of what takes the place of what is in use
# A trial ends early where its rate is less than this share of the other, after this many rounds.
_HOPELESS = ((12, 0.7), (48, 0.85), (192, 0.95))
_ROUNDS_TO_JUDGE = 12
_ROUNDS_TO_LEARN = 64  # at the beginning of a trial, which do not count: lengths follow acceptance
_ROUNDS_BEFORE_TRIAL, _ROUNDS_BETWEEN_TRIALS, _MOST_BETWEEN_TRIALS = 256, 1024, 8192
_RECENT_ROUNDS, _FEWEST_ROUNDS = 31, 9  # whose median is the usual time of a round
_LONGEST = 3.0  # times the usual time: in longer rounds graphs were recorded, or the engine was idle


@dataclass(frozen=True, slots=True)
class Wanted:
    count: int  # tokens of a chain, or levels of a tree
    is_tree: bool = False


@dataclass(slots=True)
class _Rate:
    num_tokens: float = 0.0
    seconds: float = 0.0
    num_rounds: float = 0.0

    def note(self, num_tokens: int, seconds: float) -> None:
        self.num_tokens = _DECAY * self.num_tokens + num_tokens
        self.seconds = _DECAY * self.seconds + seconds
        self.num_rounds = _DECAY * self.num_rounds + 1.0

    def beats(self, other: _Rate, ratio: float) -> bool:
        """Return whether this rate is known, and more than `ratio` times the other."""
        if min(self.num_rounds, other.num_rounds) < _ROUNDS_TO_JUDGE / 2:
            return False
        return self.num_tokens * other.seconds > ratio * other.num_tokens * self.seconds


class Contest:
    """Compares chains and trees for one range of numbers of requests."""

    def __init__(self) -> None:
        self._rates = {False: _Rate(), True: _Rate()}
        self._is_tree = False  # what is in use
        self._num_left = 0  # rounds of a trial of the other
        self._num_to_learn = 0  # of these, before any count
        self._num_until_trial = _ROUNDS_BEFORE_TRIAL
        self._pause = _ROUNDS_BETWEEN_TRIALS
        self._recent_s = deque[float](maxlen=_RECENT_ROUNDS)

    def note(self, num_tokens: int, seconds: float, *, is_tree: bool) -> None:
        self._recent_s.append(seconds)
        if self._num_to_learn and is_tree is not self._is_tree:
            self._num_to_learn -= 1
        elif len(self._recent_s) >= _FEWEST_ROUNDS and seconds <= _LONGEST * median(self._recent_s):
            self._rates[is_tree].note(num_tokens, seconds)

    def choose(self) -> bool:
        """Return whether the next drafts shall be trees."""
        used, other = self._rates[self._is_tree], self._rates[not self._is_tree]
        if self._num_left:
            self._num_left -= 1
            is_hopeless = any(
                other.num_rounds >= rounds and used.beats(other, 1.0 / share) for rounds, share in _HOPELESS
            )
            if self._num_left and not is_hopeless:
                return not self._is_tree
            self._num_left = 0
            self._end_trial(is_won=other.beats(used, _MIN_GAIN))
        else:
            self._num_until_trial -= 1
            if self._num_until_trial <= 0:
                self._rates[not self._is_tree] = _Rate()
                self._num_left, self._num_to_learn = _TRIAL_ROUNDS + _ROUNDS_TO_LEARN, _ROUNDS_TO_LEARN
                return not self._is_tree
        return self._is_tree

    def _end_trial(self, *, is_won: bool) -> None:
        if is_won:
            self._is_tree = not self._is_tree
            self._pause = _ROUNDS_BETWEEN_TRIALS
        else:
            self._pause = min(2 * self._pause, _MOST_BETWEEN_TRIALS)
        self._num_until_trial = self._pause


class DraftChoice:
    """Chooses chains or trees, and their length or depth. Each has a `DraftLength` of its own."""

    def __init__(self, clock: Clock, max_tokens: int, max_depth: int = 0) -> None:
        """Without a `max_depth` there are no trees."""
        self._clock = clock
        self.chains = DraftLength(clock, max_tokens)
        self.trees = DraftLength(clock, max_depth) if max_depth else None
        self._latest = self.chains
        self._contests: dict[int, Contest] = {}  # by the number of bits of the number of requests
        self._began_s: float | None = None
        self._num_tokens = 0  # committed since

    def note_tokens(self, count: int) -> None:
        self._num_tokens += count

    def begin(self, drafting_s: float, num_steps: int, num_requests: int, *, was_tree: bool | None) -> Wanted:
        """Begin a call of the drafter: `DraftLength.begin`. `was_tree` says what the round was; None for a round that
        tells nothing of either."""
        if self.trees is None:
            return Wanted(self.chains.begin(drafting_s, num_steps))
        is_tree = self._next(num_requests, was_tree)
        length = self.trees if is_tree else self.chains
        if length is not self._latest:
            length.resume()
            self._latest = length
        count = length.begin(drafting_s, num_steps)
        return Wanted(max(2, count), is_tree=True) if is_tree else Wanted(count)

    def _next(self, num_requests: int, was_tree: bool | None) -> bool:
        began_s, self._began_s = self._began_s, self._clock.now()
        num_tokens, self._num_tokens = self._num_tokens, 0
        if num_requests > MOST_REQUESTS:
            return False
        contest = self._contests.setdefault(num_requests.bit_length(), Contest())
        if began_s is not None and was_tree is not None:
            contest.note(num_tokens, self._began_s - began_s, is_tree=was_tree)
        return contest.choose()
