"""Simulations for the console: the real command in a process, within bounds."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.core.errors import DeadlineExceeded, InvalidRequest, Overloaded
from penstock.gateway.simulations import SimulationChoices, SimulationOrder, Simulations

CHOICES = SimulationChoices(models=("llama-3.1-8b",), hardware=("h200",), formats=("bfloat16",))
SMALL = SimulationOrder(requests=30, rate=50.0, input="200", output="10:20", replicas=(1, 2))


async def test_each_fleet_serves_the_traffic() -> None:
    found = await Simulations(CHOICES).run(SMALL)
    assert [fleet.replicas for fleet in found.fleets] == [1, 2]
    for fleet in found.fleets:
        assert fleet.num_answered == fleet.num_requests == 30
        assert 0 < fleet.ttft_s.p50 <= fleet.ttft_s.p99
        assert 0 < fleet.busy_share <= 1
    assert found.fleets[1].busy_share < found.fleets[0].busy_share


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"requests": 0}, "requests must be between 1 and 5,000"),
        ({"requests": 10**9}, "requests must be"),
        ({"rate": -1.0}, "rate must be"),
        ({"replicas": ()}, "one to 4 different numbers"),
        ({"replicas": (1, 1)}, "one to 4 different numbers"),
        ({"replicas": (1, 2, 3, 4, 5)}, "one to 4 different numbers"),
        ({"replicas": (65,)}, "replicas must be between 1 and 64"),
        ({"session_share": 2.0}, "session_share must be"),
        ({"rate": float("nan")}, "rate must be"),
        ({"model": "x" * 100}, "model is too long"),
    ],
)
async def test_orders_beyond_the_bounds_start_nothing(
    changes: dict[str, Any], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
    with pytest.raises(InvalidRequest, match=sentence):
        await Simulations(CHOICES).run(SimulationOrder(**changes))


async def test_what_the_simulator_refuses_is_its_own_sentence() -> None:
    simulations = Simulations(CHOICES)
    with pytest.raises(InvalidRequest, match="nope is not known"):
        await simulations.run(SimulationOrder(model="nope", requests=1, replicas=(1,)))
    order = SimulationOrder(input='1"\n[fleet]\nreplicas = 9 #', requests=1, replicas=(1,))
    with pytest.raises(InvalidRequest, match=r"traffic\.input"):  # text cannot leave its quotes
        await simulations.run(order)


async def test_one_at_a_time_and_a_slow_one_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[asyncio.subprocess.Process] = []
    real = asyncio.create_subprocess_exec

    async def start(*command: str, **options: Any) -> asyncio.subprocess.Process:
        started.append(await real("sleep", "600", **options))
        return started[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    simulations = Simulations(CHOICES, timeout_s=0.05)
    first = asyncio.create_task(simulations.run(SMALL))
    while not started:
        await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="Another simulation is running"):
        await simulations.run(SMALL)
    with pytest.raises(DeadlineExceeded, match="took longer"):
        await first
    assert started[0].returncode is not None

    patient = Simulations(CHOICES)
    second = asyncio.create_task(patient.run(SMALL))
    while len(started) < 2:
        await asyncio.sleep(0)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert started[1].returncode is not None, "a reader that goes takes its process along"
