"""How long an engine may say nothing before it counts as frozen. Pure: heartbeats and passing time are told to it.

An engine sends no heartbeat during a step, and on a slow device the largest step may take long. So the patience grows
with what the largest step would take at the speed that was seen. And a process that uses its processor is not frozen,
but held up, as by others that want the same cores: it gets ten times as long, since it may also be lost in a loop.
"""

from __future__ import annotations

from penstock.core.messages import EngineStats

_MIN_TOKENS = 32  # of a step, for its time to say how long larger ones take
_LARGEST_STEPS = 3.0  # so many of them in a row may pass in silence
_WORKING_SHARE = 0.1  # of the time that passes while the process works, that counts


class Silence:
    def __init__(self, timeout_s: float, max_step_tokens: int) -> None:
        self._timeout_s = timeout_s
        self._max_step_tokens = max_step_tokens
        self._silent_s = 0.0
        self._num_steps = 0
        self.token_s = 0.0  # that a prompt's token takes in a large step

    @property
    def patience_s(self) -> float:
        return max(self._timeout_s, _LARGEST_STEPS * self.token_s * self._max_step_tokens)

    def heard(self, stats: EngineStats) -> None:
        self._silent_s = 0.0
        if stats.step_tokens >= _MIN_TOKENS and stats.num_steps != self._num_steps:
            self._num_steps = stats.num_steps
            self.token_s = stats.step_s / stats.step_tokens

    def is_too_long(self, passed_s: float, *, is_working: bool) -> bool:
        """Called regularly, with the time between two calls by plan: when the caller itself was held up, heartbeats
        wait to be read, and that time must not count."""
        self._silent_s += passed_s * _WORKING_SHARE if is_working else passed_s
        return self._silent_s > self.patience_s
