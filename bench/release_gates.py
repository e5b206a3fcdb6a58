"""How often the gates of a release are wrong: `python bench/release_gates.py`.

Many releases on drawn times, through the collector and the rules that serve: a candidate whose times are those of the
stable revision, times a ratio. Times are lognormal with a heavy tail, alone or alike in a row, as in a queue. For
each ratio, the table says how many releases were rolled back, and after how many of the candidate's requests.

`--plain` is a rule without a test, for comparison: a percentile beyond its limit fails, at every tenth request.
`--fleet` runs identical candidates in simulated fleets instead, with queues, batches and caches.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from math import exp, sqrt
from random import Random
from statistics import median

from penstock.control.gates import EvidenceCollector, GateConfig
from penstock.control.release import ReleaseConfig, ReleaseEvent, Releases, Stage
from penstock.core.figures import percentile
from penstock.simulator import ControlTimes, LogNormal, SimulationConfig, Workload, simulate
from penstock.simulator.releases import SimulatedRelease

MAX_REQUESTS = 100_000  # of the candidate in a stage; a release that needs more is given up


@dataclass(frozen=True, slots=True)
class Sample:
    revision: str
    stage_number: int
    ttft_s: float
    itl_s: float
    has_failed: bool


def times(rng: Random, sigma: float, phi: float, ratio: float) -> Iterator[float]:
    last = rng.gauss(0.0, 1.0)
    while True:
        yield 0.1 * ratio * exp(sigma * last)
        last = phi * last + sqrt(1.0 - phi * phi) * rng.gauss(0.0, 1.0)


def run(config: ReleaseConfig, rng: Random, sigma: float, phi: float, ratio: float) -> tuple[Stage, int]:
    """Return how a release ended, and after how many requests of the candidate."""
    rules = Releases(config)
    collector = EvidenceCollector("stable", "candidate", config.gates)
    state = rules.happened(rules.start("stable", "candidate", 0.0), ReleaseEvent.WARMED_UP, 0.0)
    num_in_all = 0
    stable, candidate = times(rng, sigma, phi, 1.0), times(rng, sigma, phi, ratio)
    while state.stage in (Stage.SHADOW, Stage.CANARY):
        collector.begin(state.stage_number)
        collector.add_comparisons(state.stage_number, config.gates.min_compared, 0)
        split = rules.split(state)
        share = split.candidate_share or split.mirrored_share / (1.0 + split.mirrored_share)
        after, owed = state, 0.0
        for _ in range(MAX_REQUESTS):
            owed += 1.0 / share - 1.0
            while owed >= 1.0:
                owed -= 1.0
                collector.add(Sample("stable", state.stage_number, next(stable), 0.01, False))
            collector.add(Sample("candidate", state.stage_number, next(candidate), 0.01, False))
            num_in_all += 1
            after = rules.judged(state, collector.evidence(), 0.0)
            if after is not state:
                break
        else:
            break
        state = after
    return state.stage, num_in_all


def run_plain(
    config: ReleaseConfig, rng: Random, sigma: float, phi: float, ratio: float
) -> tuple[Stage, int]:
    """The same, by percentiles alone, for stages of three times the fewest requests."""
    gates, num_in_all = config.gates, 0
    for share in (config.mirrored_share / (1.0 + config.mirrored_share), *config.canary_shares):
        stable, candidate = times(rng, sigma, phi, 1.0), times(rng, sigma, phi, ratio)
        ours: list[float] = []
        theirs: list[float] = []
        while len(ours) < 3 * gates.min_requests:
            ours += [next(candidate) for _ in range(10)]
            theirs += [next(stable) for _ in range(round(10 * (1.0 / share - 1.0)))]
            if min(len(ours), len(theirs)) < gates.min_requests:
                continue
            allowed_s = percentile(sorted(theirs), 95) * gates.max_ttft_ratio
            if percentile(sorted(ours), 95) > allowed_s:
                return Stage.ROLLING_BACK, num_in_all + len(ours)
        num_in_all += len(ours)
    return Stage.LAME_DUCK, num_in_all


def run_fleet(min_requests: int, seed: int, slowdown: float) -> tuple[str, str]:
    """Return how a release ended in a simulated fleet, and why."""
    settings = ReleaseConfig(
        gates=GateConfig(min_requests=min_requests, min_compared=5),
        mirrored_share=0.5,
        canary_shares=(0.2, 0.5),
        min_stage_s=3.0,
    )
    report = simulate(
        SimulationConfig(
            workload=Workload(
                num_requests=100 * min_requests,
                requests_per_s=60.0,
                prompt_tokens=LogNormal(median=400, sigma=1.2, maximum=8000),
                output_tokens=LogNormal(median=60, sigma=0.8, maximum=500),
            ),
            num_replicas=4,
            times=ControlTimes(start_s=2.0),
            release=SimulatedRelease(at_s=1.0, config=settings, slowdown=slowdown),
            seed=seed,
        )
    )
    last = report.release[-1]
    return last.stage, last.reason


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--releases", type=int, default=200, help="for each line of the table")
    parser.add_argument("--min-requests", type=int, nargs="+", default=[20, 200])
    parser.add_argument("--ratios", type=float, nargs="+", default=[1.0, 1.2, 1.5, 2.0])
    parser.add_argument("--sigmas", type=float, nargs="+", default=[0.5, 1.0])
    parser.add_argument(
        "--phis", type=float, nargs="+", default=[0.0, 0.8], help="dependence on the last time"
    )
    parser.add_argument("--plain", action="store_true", help="compare percentiles without a test")
    parser.add_argument(
        "--fleet", action="store_true", help="releases in simulated fleets; ratios are slowdowns"
    )
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.fleet:
        print("| fewest requests | slowdown of steps | how releases ended |\n|---|---|---|")
        for least in options.min_requests:
            for ratio in options.ratios:
                stages = [run_fleet(least, options.seed + n, ratio)[0] for n in range(options.releases)]
                counts = ", ".join(f"{name} {stages.count(name)}" for name in sorted(set(stages)))
                print(f"| {least} | {ratio} | {counts} |", flush=True)
        return
    print("| fewest requests | sigma | dependence | ratio | rolled back | unfinished | requests until then |")
    print("|---|---|---|---|---|---|---|")
    one_release = run_plain if options.plain else run
    for least in options.min_requests:
        config = ReleaseConfig(gates=GateConfig(min_requests=least), min_stage_s=0.0)
        for sigma in options.sigmas:
            for phi in options.phis:
                for ratio in options.ratios:
                    rng = Random(options.seed)
                    ended = [one_release(config, rng, sigma, phi, ratio) for _ in range(options.releases)]
                    bad = [count for stage, count in ended if stage is Stage.ROLLING_BACK]
                    good = sum(stage is Stage.LAME_DUCK for stage, _ in ended)
                    print(
                        f"| {least} | {sigma} | {phi} | {ratio} | {len(bad) / len(ended):.1%} "
                        f"| {(len(ended) - len(bad) - good) / len(ended):.1%} "
                        f"| {f'{median(bad):.0f}' if bad else ''} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
