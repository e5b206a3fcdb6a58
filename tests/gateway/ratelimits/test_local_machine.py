from __future__ import annotations

from hypothesis import settings

from penstock.gateway.ratelimits.local import LocalLimiter, RunningLimiter
from tests.gateway.ratelimits.machine import SETTINGS, LimiterMachine


class LocalMachine(LimiterMachine):
    def make_limiters(self) -> list[RunningLimiter]:
        self.local = LocalLimiter(SETTINGS[0], self.clock, spending=self.spending)
        return [self.local]

    def check_that_all_is_whole(self) -> None:
        now = self.clock.now()
        for meter in self.local._meters._meters.values():
            assert meter.is_whole(now)
            assert meter.reserved_microdollars == 0
        super().check_that_all_is_whole()


TestLocalMachine = LocalMachine.TestCase
TestLocalMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
