"""How fast the simulator is: `python bench/simulator_speed.py`. One core; the scheduler, cache, router and dispatcher
that serve.

The figure of the project is

    python bench/simulator_speed.py --replicas 1000 --requests 1000000

Requests are those of a chat service: short prompts behind a system prompt that the requests of a tenant share, and
answers of some dozen tokens. `--plain` plans every token by itself, for comparison; the report is the same.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import resource
import time
from dataclasses import replace

from penstock.core.messages import HEARTBEAT_INTERVAL_S
from penstock.dispatch import DispatchConfig
from penstock.router import POLICIES
from penstock.simulator import (
    ControlTimes,
    Fixed,
    LogNormal,
    ReplicaConfig,
    Report,
    SimulationConfig,
    Tenant,
    Workload,
    simulate,
)


def make_config(options: argparse.Namespace) -> SimulationConfig:
    workload = Workload(
        num_requests=options.requests,
        requests_per_s=options.rate * options.replicas,
        prompt_tokens=LogNormal(median=options.input, sigma=0.7, maximum=1000),
        output_tokens=LogNormal(median=options.output, sigma=0.7, maximum=1000),
        tenants=tuple(Tenant(f"tenant-{number}") for number in range(64)),
        prefix_tokens=Fixed(options.prefix) if options.prefix else None,
    )
    return SimulationConfig(
        workload=workload,
        num_replicas=options.replicas,
        dispatch=DispatchConfig(routing_policy=options.policy),
        replica=replace(ReplicaConfig(), counts_decodes=not options.plain),
        times=ControlTimes(heartbeat_s=HEARTBEAT_INTERVAL_S),
        seed=options.seed,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--rate", type=float, default=20.0, help="requests per second and replica")
    parser.add_argument("--input", type=int, default=64, help="median tokens behind the system prompt")
    parser.add_argument("--output", type=int, default=48, help="median tokens of answers")
    parser.add_argument("--prefix", type=int, default=64, help="tokens of the system prompt")
    parser.add_argument("--policy", default="prefix-aware", help=f"one of {', '.join(POLICIES)}")
    parser.add_argument("--plain", action="store_true", help="plan every token by itself")
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    gc.disable()  # a run makes no reference cycles worth collecting, and has millions of live objects
    began_s = time.process_time()
    profile = cProfile.Profile() if options.profile else None
    report: Report = (profile.runcall if profile else _call)(simulate, make_config(options))
    cpu_s = time.process_time() - began_s
    if profile is not None:
        pstats.Stats(profile).sort_stats("tottime").print_stats(40)
    print(report)
    num_steps = sum(replica.num_steps for replica in report.replicas)
    print(
        f"{cpu_s:.1f} CPU seconds, {cpu_s / options.requests * 1e6:.0f} µs for each request, "
        f"{num_steps / options.requests:.1f} steps and {report.output_tokens / options.requests:.0f} output tokens "
        f"for each request, {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.1f} GB"
    )


def _call(function: object, *arguments: object) -> Report:
    return function(*arguments)  # type: ignore[operator, no-any-return]


if __name__ == "__main__":
    main()
