"""Many replicas in virtual time, around the scheduler and block cache that serve for real. Never imports torch."""

from penstock.simulator.driver import least_loaded, round_robin
from penstock.simulator.report import Report
from penstock.simulator.simulation import ReplicaConfig, SimulationConfig, simulate
from penstock.simulator.workload import Fixed, LogNormal, Tenant, Uniform, Workload

__all__ = [
    "Fixed",
    "LogNormal",
    "ReplicaConfig",
    "Report",
    "SimulationConfig",
    "Tenant",
    "Uniform",
    "Workload",
    "least_loaded",
    "round_robin",
    "simulate",
]
