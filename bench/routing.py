"""Routing policies compared on a simulated fleet: `python bench/routing.py`. Virtual time, real router and scheduler.

Tenants share prefixes by Zipf's law, hold conversations and send bursts. Each replica runs the scheduler and the
block cache that serve for real; only the duration of a step comes from a cost model. The figure of the project is

    python bench/routing.py --requests 1000000 --replicas 64

which takes a while on one core; the default is smaller. Every policy gets the same arrivals.
"""

from __future__ import annotations

import argparse
import gc
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

from penstock.core.engine_config import SchedulerConfig
from penstock.dispatch import DispatchConfig
from penstock.router import POLICIES
from penstock.simulator.control import ControlTimes
from penstock.simulator.cost import LLAMA_8B_ON_L40S
from penstock.simulator.report import Report
from penstock.simulator.simulation import ReplicaConfig, SimulationConfig, simulate
from penstock.simulator.workload import LogNormal, shared_prefix_workload

KV_BLOCKS = 12_000  # 25 GB of KV at 16 tokens of 128 KiB each: what a 48 GB card has left


def make_config(options: argparse.Namespace, policy: str) -> SimulationConfig:
    workload = replace(
        shared_prefix_workload(
            options.requests,
            options.rate * options.replicas,
            num_tenants=options.tenants,
            prefixes_per_tenant=options.prefixes,
        ),
        zipf_exponent=options.zipf,
        output_tokens=LogNormal(median=options.output_tokens, sigma=0.7, maximum=256),
    )
    replica = ReplicaConfig(
        num_blocks=KV_BLOCKS,
        cost=LLAMA_8B_ON_L40S,
        scheduler=SchedulerConfig(queue_timeout_s=None, itl_target_ms=None),
    )
    return SimulationConfig(
        workload=workload,
        num_replicas=options.replicas,
        dispatch=DispatchConfig(routing_policy=policy),  # type: ignore[arg-type]
        replica=replica,
        num_gateways=options.gateways,
        times=ControlTimes(message_delay_s=options.message_delay),
        seed=options.seed,
    )


class Progress:
    """A line every few seconds."""

    def __init__(self, policy: str, num_requests: int, every_s: float = 15.0) -> None:
        self._policy = policy
        self._num_requests = num_requests
        self._every_s = every_s
        self._started = self._printed = time.monotonic()

    def __call__(self, num_ended: int, virtual_s: float) -> None:
        if num_ended % 1000:
            return
        now = time.monotonic()
        if now - self._printed >= self._every_s:
            self._printed = now
            left_s = (now - self._started) * (self._num_requests / num_ended - 1.0)
            print(
                f"  {self._policy}: {num_ended:,} of {self._num_requests:,} requests, "
                f"{virtual_s:.0f} s of virtual time, about {left_s:.0f} s to go",
                flush=True,
            )


def run(options: argparse.Namespace, policy: str) -> tuple[Report, float]:
    """The report, and the CPU seconds that it took."""
    gc.disable()  # a run makes no reference cycles worth collecting, and has millions of live objects
    started = time.process_time()
    report = simulate(make_config(options, policy), Progress(policy, options.requests))
    return report, time.process_time() - started


def row(report: Report, cpu_s: float) -> str:
    ttft = report.latency.ttft_s
    return (
        f"{report.policy:<18}{ttft.p50 * 1e3:>9.0f}{ttft.p90 * 1e3:>9.0f}{ttft.p99 * 1e3:>9.0f}"
        f"{report.latency.tpot_s.p90 * 1e3:>9.1f}{report.cached_share:>9.0%}{report.mean_busy_share:>8.0%}"
        f"{report.max_over_mean_requests:>10.2f}{report.max_over_mean_tokens:>10.2f}{cpu_s:>9.0f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--replicas", type=int, default=16)
    parser.add_argument("--rate", type=float, default=7.0, help="requests per second and replica")
    parser.add_argument("--tenants", type=int, default=64)
    parser.add_argument("--prefixes", type=int, default=16, help="per tenant")
    parser.add_argument("--zipf", type=float, default=0.9, help="exponent of the popularity of prefixes")
    parser.add_argument("--output-tokens", type=int, default=16, help="median")
    parser.add_argument(
        "--gateways", type=int, default=1, help="each with a router that knows nothing of the others"
    )
    parser.add_argument(
        "--message-delay", type=float, default=0.02, help="seconds until heartbeats and KV events arrive"
    )
    parser.add_argument("--policies", default="least-loaded,prefix-aware", help=f"of {', '.join(POLICIES)}")
    parser.add_argument("--processes", type=int, default=1, help="policies that are run at the same time")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    policies = options.policies.split(",")
    with ProcessPoolExecutor(options.processes) as executor:
        results = list(executor.map(run, [options] * len(policies), policies))
    reports = [report for report, _ in results]
    print(
        f"{options.requests:,} requests, {options.replicas} replicas, {options.rate:g} requests/s each, "
        f"{options.tenants * options.prefixes} prefixes, {reports[0].duration_s:.0f} s of virtual time"
    )
    heads = ("TTFT p50", "p90", "p99 ms", "TPOT p90", "cached", "busy", "requests", "tokens", "CPU s")
    widths = (9, 9, 9, 9, 9, 8, 10, 10, 9)
    print(f"{'policy':<18}" + "".join(f"{head:>{width}}" for head, width in zip(heads, widths, strict=True)))
    for report, cpu_s in results:
        print(row(report, cpu_s))
    for report in reports:
        if report.num_answered != report.num_requests:
            print(f"{report.policy}: not answered {report.rejected}, ended {report.finished}")


if __name__ == "__main__":
    main()
