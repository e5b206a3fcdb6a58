"""Many replicas in virtual time, around the scheduler and block cache that serve for real. Never imports torch."""

from penstock.simulator.driver import least_loaded, round_robin
from penstock.simulator.faults import Kill, LoseNews, SlowDown
from penstock.simulator.fleet_simulation import FleetConfig, FleetReport, simulate_fleet
from penstock.simulator.report import Report
from penstock.simulator.simulation import ReplicaConfig, SimulationConfig, simulate
from penstock.simulator.traffic import Traffic, generate_traffic
from penstock.simulator.workload import Fixed, LogNormal, Tenant, Uniform, Workload

__all__ = [
    "Fixed",
    "FleetConfig",
    "FleetReport",
    "Kill",
    "LogNormal",
    "LoseNews",
    "ReplicaConfig",
    "Report",
    "SimulationConfig",
    "SlowDown",
    "Tenant",
    "Traffic",
    "Uniform",
    "Workload",
    "generate_traffic",
    "least_loaded",
    "round_robin",
    "simulate",
    "simulate_fleet",
]
