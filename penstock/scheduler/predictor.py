"""How long will a step take? A linear model, fitted online from steps that ran. Knows no clock and no requests.

Recursive least squares on relative errors: each observation is divided by the larger of the observed and the
predicted time, so that a step of 5 ms counts as much as one of 2 s, and an outlier in either direction has a bounded
error. Errors beyond a few times the usual one are cut as well. Old steps fade, since caches warm up, clocks throttle
and neighbours come and go.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

_FORGETTING = 0.98
_CUT_AT_USUAL_ERRORS = 3.0
_MIN_CUT = 0.1  # relative error that is never cut
_USUAL_ERROR_DECAY = 0.9
_UNSEEN_TOKENS = 1 << 30

# Seconds per unit before anything was observed: a small accelerator. A wide spread lets the first steps overrule it.
_PRIOR = (2e-3, 2e-5, 2e-5, 2e-8, 1e-9)
_PRIOR_SPREAD = 30.0


@dataclass(slots=True)
class StepLoad:
    """What a step has to do; the five features of the model, the constant left out."""

    prefill_tokens: int = 0
    decode_sequences: int = 0
    decode_context_tokens: int = 0  # KV entries that decodes read
    prefill_pairs: int = 0  # of query and key, in the attention of prefills

    def add_prefill(self, start: int, num_tokens: int) -> None:
        self.prefill_tokens += num_tokens
        self.prefill_pairs += num_tokens * start + num_tokens * (num_tokens + 1) // 2


class StepTimePredictor:
    def __init__(self) -> None:
        self._weights = list(_PRIOR)  # seconds per unit of each feature; never negative
        self._max_variances = [(weight * _PRIOR_SPREAD) ** 2 for weight in _PRIOR]
        size = len(_PRIOR)
        self._covariance = [
            [self._max_variances[row] if row == column else 0.0 for column in range(size)]
            for row in range(size)
        ]
        self._usual_error = 1.0

    def predict(self, load: StepLoad) -> float:
        """Seconds."""
        return sum(map(float.__mul__, self._weights, _features(load)))

    def prefill_tokens_within(self, target_s: float, load: StepLoad, start: int) -> int:
        """How many tokens of a prompt, beginning at `start`, fit on top of `load` in a step of `target_s`."""
        room_s = target_s - self.predict(load)
        if room_s <= 0.0:
            return 0
        per_pair = self._weights[4]
        per_token = self._weights[1] + per_pair * start
        if per_pair <= 0.0:
            return int(room_s / per_token) if per_token > 0.0 else _UNSEEN_TOKENS
        # The positive root of per_pair/2 · n² + per_token · n = room, in a form that stays exact for small per_pair.
        return int(2.0 * room_s / (per_token + sqrt(per_token * per_token + 2.0 * per_pair * room_s)))

    def observe(self, load: StepLoad, elapsed_s: float) -> None:
        if elapsed_s <= 0.0:
            return
        predicted_s = self.predict(load)
        scale = 1.0 / max(elapsed_s, predicted_s)
        features = [feature * scale for feature in _features(load)]
        error = self._cut((elapsed_s - predicted_s) * scale)

        covariance = self._covariance
        spread = [sum(map(float.__mul__, row, features)) for row in covariance]
        denominator = _FORGETTING + sum(map(float.__mul__, spread, features))
        gain = [value / denominator for value in spread]
        for index, value in enumerate(gain):
            self._weights[index] = max(0.0, self._weights[index] + value * error)
        for row, row_gain in zip(covariance, gain, strict=True):
            for column, value in enumerate(spread):
                row[column] = (row[column] - row_gain * value) / _FORGETTING
        self._limit_variances()

    def _cut(self, error: float) -> float:
        limit = max(_MIN_CUT, _CUT_AT_USUAL_ERRORS * self._usual_error)
        self._usual_error = _USUAL_ERROR_DECAY * self._usual_error + (1.0 - _USUAL_ERROR_DECAY) * abs(error)
        return max(-limit, min(limit, error))

    def _limit_variances(self) -> None:
        """Forgetting inflates what recent steps say nothing about, such as prefill while only decodes run. Scale such
        a row and column back to its prior, which keeps the matrix a covariance."""
        covariance = self._covariance
        for index, limit in enumerate(self._max_variances):
            variance = covariance[index][index]
            if variance > limit:
                factor = sqrt(limit / variance)
                for other in range(len(covariance)):
                    covariance[index][other] *= factor
                    covariance[other][index] *= factor


def _features(load: StepLoad) -> tuple[float, float, float, float, float]:
    return (
        1.0,
        float(load.prefill_tokens),
        float(load.decode_sequences),
        float(load.decode_context_tokens),
        float(load.prefill_pairs),
    )
