"""How a gateway leaves: not ready at once, open for the lame-duck time, then drained."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.api.http.connections import ConnectionLimits
from penstock.core.errors import ShuttingDown
from penstock.core.gateway_config import GatewayConfig, ServerConfig
from penstock.gateway.gateway import Gateway
from penstock.serve.gateway import RunningGateway
from tests.gateway.fake_engine import FakeEngine


class Runner:
    stopped_within: float | None = None

    async def stop(self, timeout_s: float) -> None:
        self.stopped_within = timeout_s


def running_gateway() -> tuple[RunningGateway, Runner]:
    runner = Runner()
    unused: Any = None
    work: Any = SimpleNamespace(runner=runner)
    gateway = Gateway(FakeEngine(), GatewayConfig())
    return RunningGateway(gateway, work, ConnectionLimits.of(ServerConfig()), unused, unused), runner


async def test_a_lame_duck_is_not_ready_and_takes_requests() -> None:
    running, runner = running_gateway()
    leaving = asyncio.create_task(running.leave(ServerConfig(lame_duck_s=1000.0)))
    await asyncio.sleep(0)
    assert not running.gateway.is_ready
    assert running.gateway.is_healthy
    running.gateway.check_accepting()
    assert runner.stopped_within is None

    leaving.cancel()  # as a second signal does
    with pytest.raises(asyncio.CancelledError):
        await leaving
    with pytest.raises(ShuttingDown):
        running.gateway.check_accepting(is_admitted=True)
    assert runner.stopped_within == 0.0


async def test_requests_are_refused_after_the_lame_duck_time() -> None:
    running, runner = running_gateway()
    await running.leave(ServerConfig(lame_duck_s=0.01, drain_timeout=7.0))
    with pytest.raises(ShuttingDown):
        running.gateway.check_accepting()
    assert runner.stopped_within == 7.0
