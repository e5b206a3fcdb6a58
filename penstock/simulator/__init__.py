"""The simulator runs one or many replicas in virtual time, around the scheduler, block cache and dispatcher that
serve for real. Never imports torch."""

from penstock.simulator.control import ControlTimes
from penstock.simulator.report import Report
from penstock.simulator.simulation import ReplicaConfig, SimulationConfig, simulate
from penstock.simulator.workload import (
    Fixed,
    Kill,
    LogNormal,
    LoseKVEvents,
    SlowDown,
    Tenant,
    Uniform,
    Workload,
    generate,
    shared_prefix_workload,
)

__all__ = [
    "ControlTimes",
    "Fixed",
    "Kill",
    "LogNormal",
    "LoseKVEvents",
    "ReplicaConfig",
    "Report",
    "SimulationConfig",
    "SlowDown",
    "Tenant",
    "Uniform",
    "Workload",
    "generate",
    "shared_prefix_workload",
    "simulate",
]
