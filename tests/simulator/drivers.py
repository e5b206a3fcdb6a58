"""Simulation drivers for tests that look at single outcomes rather than at a report."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from penstock.core.config import RoutingPolicy
from penstock.dispatch import DispatchConfig, Dispatcher
from penstock.router import ReplicaState
from penstock.simulator.driver import Driver
from penstock.simulator.fleet import SimulatedFleet, SimulatedReplica
from penstock.simulator.report import Outcome


def make_driver(
    build: Callable[[], SimulatedReplica], num_replicas: int = 1, policy: RoutingPolicy = "least-loaded"
) -> tuple[Driver, list[Outcome]]:
    """A driver with one gateway, and the list that its outcomes go to."""
    outcomes: list[Outcome] = []
    fleet = SimulatedFleet(build, block_size=16, max_step_tokens=2048)
    for _ in range(num_replicas):
        fleet.start(ReplicaState.READY)
    dispatcher = Dispatcher(DispatchConfig(routing_policy=policy), Random(0), 0.0)
    return Driver(fleet, [dispatcher], lambda outcome, now: outcomes.append(outcome)), outcomes


def replicas_of(driver: Driver) -> list[SimulatedReplica]:
    return [member.replica for member in driver.fleet.all_members]
