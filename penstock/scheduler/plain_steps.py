"""Times of steps without drafts, from which the cost of drafts follows, and averages of costs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.scheduler.step_builder import StepLoad, StepTimePredictor

GAIN = 0.2  # of the newest step in averages of costs
OUTLIER = 1.5  # a step's time is clipped to this multiple of its prediction
_PLANS_BETWEEN_PLAIN_STEPS = 48
_FIRST_PLAIN_STEPS = 4  # of about as many requests
_REMEMBERED = 64  # values of `Lowest`


@dataclass
class _Times:
    """Averages over the latest steps without drafts, of about as many requests."""

    num_planned: int = 0
    num_observed: int = 0
    decodes: float = 0.0
    context_tokens: float = 0.0
    elapsed_s: float = 0.0

    def observe(self, load: StepLoad, elapsed_s: float) -> None:
        self.num_observed += 1
        gain = max(GAIN, 1.0 / self.num_observed)
        self.decodes += gain * (load.decode_sequences - self.decodes)
        self.context_tokens += gain * (load.decode_context_tokens - self.context_tokens)
        self.elapsed_s += gain * (elapsed_s - self.elapsed_s)

    def mean_load(self) -> StepLoad:
        return StepLoad(
            decode_sequences=round(self.decodes), decode_context_tokens=round(self.context_tokens)
        )


class PlainSteps:
    """Knows what steps without drafts take, and decides when a step takes no draft so that this stays known."""

    def __init__(self, predictor: StepTimePredictor) -> None:
        self._predictor = predictor
        self._times: dict[int, _Times] = {}  # by the bits of the number of decodes
        self._num_with_drafts = 0  # plans since the last one without

    def predict(self, load: StepLoad) -> float:
        """Predict the seconds of a step without drafts. The predictor's straight line passes through what such steps
        of about as many requests took lately."""
        predicted_s = self._predictor.predict(load)
        seen = self._times.get(load.decode_sequences.bit_length())
        if seen is None or not seen.num_observed:
            return predicted_s
        seen_s = self._predictor.predict(seen.mean_load())
        return predicted_s * seen.elapsed_s / seen_s if seen_s > 0.0 else predicted_s

    def observe(self, load: StepLoad, elapsed_s: float) -> None:
        """Learn from a step without drafts and prompts."""
        self._times_of(load.decode_sequences).observe(load, min(elapsed_s, OUTLIER * self.predict(load)))

    def is_due(self, num_decodes: int) -> bool:
        """Return whether the plan of `num_decodes` decodes shall have no drafts. The first plans of a size
        alternate."""
        known = self._times_of(num_decodes).num_planned >= _FIRST_PLAIN_STEPS
        return self._num_with_drafts >= (_PLANS_BETWEEN_PLAIN_STEPS if known else 1)

    def planned(self, num_decodes: int, *, with_drafts: bool) -> None:
        if with_drafts:
            self._num_with_drafts += 1
        else:
            self._num_with_drafts = 0
            self._times_of(num_decodes).num_planned += 1

    def _times_of(self, num_decodes: int) -> _Times:
        return self._times.setdefault(num_decodes.bit_length(), _Times())


class Lowest:
    """The lowest of the latest values: of about `_REMEMBERED` to twice as many."""

    def __init__(self) -> None:
        self._values = [math.inf, math.inf]  # of the present period and the one before
        self._count = 0

    @property
    def value(self) -> float:
        return min(self._values)

    def observe(self, value: float) -> None:
        if self._count == _REMEMBERED:
            self._values, self._count = [math.inf, self._values[0]], 0
        self._values[0] = min(self._values[0], value)
        self._count += 1
