"""What faults cost a simulated fleet: `python bench/fleet_faults.py`. Virtual time, real router, retries and control.

One line per fault, of the same traffic: requests sent and answered, retries, how often a router asked for a new start
of KV events, replicas left out as slow, and times to first token.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from math import inf

from penstock.control.autoscaler import AutoscalerConfig
from penstock.dispatch import DispatchConfig
from penstock.dispatch.health import OutlierConfig
from penstock.simulator.cost import LLAMA_8B_ON_L40S
from penstock.simulator.simulation import ReplicaConfig, SimulationConfig, simulate
from penstock.simulator.workload import Kill, LoseKVEvents, SlowDown, shared_prefix_workload


def scenarios(num_requests: int, num_replicas: int, rate: float) -> dict[str, SimulationConfig]:
    usual = SimulationConfig(
        workload=shared_prefix_workload(num_requests, rate * num_replicas),
        num_replicas=num_replicas,
        replica=ReplicaConfig(num_blocks=12_000, cost=LLAMA_8B_ON_L40S),
    )
    half_s = num_requests / (rate * num_replicas) / 2.0
    scaling = AutoscalerConfig(min_replicas=1, max_replicas=num_replicas)
    return {
        "nothing": usual,
        "a replica is killed, another starts 10 s later": replace(usual, faults=(Kill(half_s, 0),)),
        "two replicas are killed, none starts": replace(
            usual, faults=tuple(Kill(half_s, replica, restarts_after_s=None) for replica in (0, 1))
        ),
        "a replica is four times slower": replace(usual, faults=(SlowDown(half_s, 0, 4.0),)),
        "the same, without the detection of slow replicas": replace(
            usual,
            faults=(SlowDown(half_s, 0, 4.0),),
            dispatch=DispatchConfig(outliers=OutlierConfig(slow_factor=inf)),
        ),
        "a fifth of KV events is lost": replace(usual, faults=(LoseKVEvents(0.0, 2.0 * half_s, 0.2),)),
        "four gateways that know nothing of each other": replace(usual, num_gateways=4),
        "half of the replicas, until more are started": replace(
            usual, num_replicas=num_replicas // 2, autoscaler=scaling
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=4_000)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--rate", type=float, default=4.0, help="requests per second and replica")
    options = parser.parse_args()
    heads = ("sent", "answered", "retries", "resyncs", "left out", "cached", "TTFT p50", "p90", "p99 ms")
    print(f"{'':<50}" + "".join(f"{head:>9}" for head in heads))
    for name, config in scenarios(options.requests, options.replicas, options.rate).items():
        report = simulate(config)
        ttft = report.latency.ttft_s
        ttft_ms = [f"{figure * 1e3:.0f}" for figure in (ttft.p50, ttft.p90, ttft.p99)]
        counts = (
            options.requests,
            report.num_answered,
            report.num_retries,
            report.num_resyncs,
            report.num_ejections,
        )
        cells = (*counts, f"{report.cached_share:.0%}", *ttft_ms)
        print(f"{name:<50}" + "".join(f"{cell:>9}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
