"""What faults cost a simulated fleet: `python bench/fleet_faults.py`. Virtual time, real router, retries and control.

One line per fault, of the same traffic: requests sent and answered, retries, how often a router asked for a new start
of KV events, replicas left out as slow, and times to first token.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from penstock.control.autoscaler import AutoscalerConfig
from penstock.control.outliers import OutlierConfig
from penstock.simulator.cost import LLAMA_8B, Accelerator, roofline
from penstock.simulator.faults import Kill, LoseNews, SlowDown
from penstock.simulator.fleet_simulation import FleetConfig, simulate_fleet
from penstock.simulator.simulation import ReplicaConfig
from penstock.simulator.traffic import Traffic

L40S = Accelerator(memory_bytes_per_s=864e9, flops_per_s=362e12)  # bfloat16, dense


def scenarios(num_requests: int, num_replicas: int, rate: float) -> dict[str, FleetConfig]:
    usual = FleetConfig(
        traffic=Traffic(num_requests=num_requests, requests_per_s=rate * num_replicas),
        num_replicas=num_replicas,
        replica=ReplicaConfig(num_blocks=12_000, cost=roofline(LLAMA_8B, L40S)),
        outliers=OutlierConfig(),
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
        "the same, and nobody looks for slow ones": replace(
            usual, faults=(SlowDown(half_s, 0, 4.0),), outliers=None
        ),
        "a fifth of KV events is lost": replace(usual, faults=(LoseNews(0.0, 2.0 * half_s, 0.2),)),
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
        report = simulate_fleet(config)
        answered = report.ended.get("stop", 0) + report.ended.get("length", 0)
        ttft_ms = [
            f"{figure * 1e3:.0f}" for figure in (report.ttft_s.p50, report.ttft_s.p90, report.ttft_s.p99)
        ]
        counts = (options.requests, answered, report.num_retries, report.num_resyncs, report.num_ejections)
        cells = (*counts, f"{report.cached_share:.0%}", *ttft_ms)
        print(f"{name:<50}" + "".join(f"{cell:>9}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
