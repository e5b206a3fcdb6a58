"""Policy sets in the simulator and on the real engine: `python bench/policies.py tune | bins`. Needs no GPU.

`tune` measures the costs of the real engine's steps, searches a policy set in the simulator for each of three loads,
and plays one load to the real engine with the default set and with the set that was found. The engine runs on one
thread, and its clock is the CPU time of the process, as in `simulator_validation.py`: time in which other processes
had the core does not count, and an idle engine jumps to the next arrival. Each round gives both sets the same
requests, in turns (AB, BA, AB, …), so that a core that gets slower or faster does so for both alike; the interval is
Student's, over the differences within rounds.

`bins` simulates an application whose short prompts have long answers and whose long prompts have short ones, and
compares the objective without length bins, with bins by tenant, and with bins by prompt.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import msgspec

from bench.cpu_clock import CpuClock
from bench.simulator_loads import mean_s
from penstock.cli.console import fetch_model
from penstock.core.engine_config import CacheConfig, EngineConfig, LengthBins, ModelConfig
from penstock.core.errors import PenstockError
from penstock.core.objective import (
    Objective,
    ObjectiveSettings,
    PolicySet,
    TierSums,
    objective_of,
    utilisation_of,
)
from penstock.core.request import Request, SamplingParams, Tier
from penstock.engine.build import Engine, build_engine
from penstock.planner.tune import check, mean_gain, search, split, with_policy
from penstock.simulator import (
    Fixed,
    LogNormal,
    ReplicaConfig,
    SimulationConfig,
    Tenant,
    Uniform,
    Workload,
    simulate,
)
from penstock.simulator.cost import StepCost, StepWork, fit_corrected, mean_relative_error
from penstock.simulator.workload import Arrival, generate

NUM_KV_BLOCKS = 2048
FIRST_TOKEN = 1000  # of prompts; those below may have a meaning
OBJECTIVE = ObjectiveSettings()
# Student's 97.5 % quantiles, by degrees of freedom from 1 on.
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11,
           2.10, 2.09)  # fmt: skip


LOADS = {
    "chat": Workload(
        num_requests=60,
        requests_per_s=1.0,  # set by `timed`
        prompt_tokens=LogNormal(median=60, sigma=0.6, maximum=300),
        output_tokens=LogNormal(median=40, sigma=0.5, maximum=120),
    ),
    "documents": Workload(
        num_requests=40,
        requests_per_s=1.0,
        prompt_tokens=Uniform(200, 600),
        output_tokens=Uniform(20, 80),
    ),
    "bursts": Workload(
        num_requests=60,
        requests_per_s=1.0,
        prompt_tokens=Uniform(40, 160),
        output_tokens=LogNormal(median=40, sigma=0.8, maximum=160),
        burst_share=0.1,
        burst_size=12,
    ),
}
BUSY = {"chat": 0.7, "documents": 0.8, "bursts": 0.6}  # shares of the engine's time that rates are chosen for
FITTED = (
    Workload(
        num_requests=30, requests_per_s=8.0, prompt_tokens=Uniform(10, 700), output_tokens=Uniform(5, 60)
    ),
    Workload(
        num_requests=20, requests_per_s=1.5, prompt_tokens=Uniform(10, 300), output_tokens=Uniform(30, 90)
    ),
)


def timed(name: str, cost: StepCost) -> Workload:
    """Return a load with as many requests per second as an engine of these costs can answer in its share of time."""
    workload = LOADS[name]
    return replace(workload, requests_per_s=BUSY[name] / mean_s(workload, cost))


def engine_of(policy: PolicySet, clock: CpuClock) -> Engine:
    model = ModelConfig(model="smollm2-135m", device="cpu")
    config = EngineConfig(
        model=model,
        cache=CacheConfig(num_kv_blocks=NUM_KV_BLOCKS, enable_prefix_caching=False, kv_host_memory="0"),
        speculate="off",
        num_threads=1,
        steps_in_flight=1,
    )
    config = msgspec.structs.replace(config, scheduler=policy.applied_to(config.scheduler))
    return build_engine(config, Path(fetch_model(model.model)), clock=clock)


def play(
    engine: Engine, clock: CpuClock, arrivals: list[Arrival], capacity: float | None = None
) -> Objective:
    """Give requests to a real engine at their times, and compute the objective."""
    loop, waiting = engine.loop, list(reversed(arrivals))
    vocabulary = engine.ready.model.vocab_size
    sums, token_times = TierSums(), dict[str, list[float]]()
    gc.collect()
    gc.disable()
    before, began_s = loop.stats(), clock.now()
    while waiting or loop.has_work:
        if not loop.has_work:
            clock.skip_to(began_s + waiting[-1].time_s)
        now = clock.now() - began_s
        while waiting and waiting[-1].time_s <= now:
            arrival = waiting.pop()
            token_times[arrival.request.id] = [arrival.time_s]
            try:
                loop.add(_playable(arrival, vocabulary))
            except PenstockError:
                sums.add(OBJECTIVE.targets.default, None, None, is_dropped=True)
        for event in loop.step():
            times = token_times[event.request_id]
            times += [clock.now() - began_s] * len(event.token_ids)
            if event.finish_reason is not None:
                pace_s = (times[-1] - times[1]) / (len(times) - 2) if len(times) > 2 else None
                sums.add(OBJECTIVE.targets.default, times[1] - times[0], pace_s)
    elapsed_s, after = clock.now() - began_s, loop.stats()
    gc.enable()
    num_tokens, busy_s = after.tokens_computed - before.tokens_computed, after.busy_s - before.busy_s
    used = utilisation_of(num_tokens / elapsed_s, capacity or num_tokens / busy_s)
    return objective_of({Tier.DEFAULT: sums}, OBJECTIVE, used)


def _playable(arrival: Arrival, vocabulary: int) -> Request:
    """Return the request with tokens that the model has, and an answer of the given length."""
    span = vocabulary - FIRST_TOKEN
    tokens = tuple(FIRST_TOKEN + token % span for token in arrival.request.prompt_token_ids)
    sampling = SamplingParams(max_tokens=arrival.num_output_tokens, temperature=0.0, ignore_eos=True)
    return msgspec.structs.replace(arrival.request, prompt_token_ids=tokens, sampling=sampling)


def measured_cost(engine: Engine, clock: CpuClock, seed: int) -> tuple[StepCost, float]:
    """Fit the costs of steps on loads that are not among the three. Returns the mean relative error, too."""
    observed: list[tuple[StepWork, float]] = []
    scheduler = engine.loop.scheduler
    commit = scheduler.commit

    def watched(plan, result, now):  # type: ignore[no-untyped-def]
        if plan.chunks:
            observed.append((StepWork.of(plan), result.elapsed_s))
        return commit(plan, result, now)

    scheduler.commit = watched  # type: ignore[method-assign]
    for workload in FITTED:
        play(engine, clock, list(generate(workload, Random(seed))))
    scheduler.commit = commit  # type: ignore[method-assign]
    cost = fit_corrected(observed)
    return cost, mean_relative_error(cost, observed)


def simulation(workload: Workload, cost: StepCost, seed: int) -> SimulationConfig:
    return SimulationConfig(
        workload=workload,
        replica=ReplicaConfig(num_blocks=NUM_KV_BLOCKS, max_model_len=2048, depth=1, cost=cost),
        objective=OBJECTIVE,
        seed=seed,
    )


def tune(arguments: argparse.Namespace) -> None:
    clock = CpuClock()
    first = engine_of(PolicySet(), clock)
    play(first, clock, list(generate(LOADS["chat"], Random(0)))[:3])  # warms up
    cost, error = measured_cost(first, clock, arguments.seed)
    print(f"costs of the real engine: {cost}, mean relative error {error:.0%}", flush=True)
    best_name, best_policy, best_gain = "", PolicySet(), 0.0
    for name in LOADS:
        workload = timed(name, cost)
        config = simulation(replace(workload, num_requests=400), cost, arguments.seed)
        load, checks = split(config)
        found = list(search(load, simulate, max_evaluations=arguments.evaluations))
        best = [each for each in found if each.is_best][-1]
        gain = mean_gain(check(checks, best.policy, simulate)) if best.number > 1 else 0.0
        print(
            f"{name}: {workload.requests_per_s:.2f} requests/s, {len(found)} sets, objective "
            f"{found[0].objective.total:.3f} → {best.objective.total:.3f}, {gain:+.1%} less on other seeds: "
            f"{best.policy.engine_settings() or 'the default'}",
            flush=True,
        )
        if gain > best_gain:
            best_name, best_policy, best_gain = name, best.policy, gain
    if not best_name:
        print("No set was better than the default.")
        return
    second = engine_of(best_policy, clock)
    play(second, clock, list(generate(LOADS["chat"], Random(0)))[:3])
    print(f"the real engine, load {best_name!r}, default (a) against the set that was found (b):", flush=True)
    confirm(first, second, clock, timed(best_name, cost), arguments)


def confirm(
    first: Engine, second: Engine, clock: CpuClock, workload: Workload, arguments: argparse.Namespace
) -> None:
    """Play a load to both engines, round by round, and compare their objectives."""
    stats = first.loop.stats()
    capacity = stats.tokens_computed / stats.busy_s
    differences, totals = [], ([], [])  # type: ignore[var-annotated]
    for number in range(arguments.rounds):
        arrivals = list(generate(workload, Random(1000 + arguments.seed + number)))
        order = (0, 1) if number % 2 == 0 else (1, 0)
        got = {}
        for arm in order:
            got[arm] = play((first, second)[arm], clock, arrivals, capacity)
        differences.append(got[1].total - got[0].total)
        for arm in (0, 1):
            totals[arm].append(got[arm].total)
        print(
            f"  round {number + 1}: a {got[0].total:.3f} (first token {got[0].overall.ttft:.3f}, between tokens "
            f"{got[0].overall.itl:.3f}), b {got[1].total:.3f} ({got[1].overall.ttft:.3f}, {got[1].overall.itl:.3f})",
            flush=True,
        )
    means = [statistics.fmean(each) for each in totals]
    print(f"mean objective {means[0]:.3f} → {means[1]:.3f} ({1 - means[1] / means[0]:.1%} less)")
    mean, half = statistics.fmean(differences), half_width(differences)
    print(
        f"difference: {mean:+.3f} (95 %: {mean - half:+.3f} to {mean + half:+.3f}, {len(differences)} rounds)"
    )


def half_width(differences: list[float]) -> float:
    """Return half of Student's 95 % confidence interval for the mean."""
    quantile = STUDENT[min(len(differences) - 1, len(STUDENT)) - 1]
    return quantile * statistics.stdev(differences) / math.sqrt(len(differences))


def two_tasks(seed: int, requests_per_s: float) -> Iterator[Arrival]:
    """Yield requests of one tenant with two tasks: stories from short prompts, labels from long ones."""
    stories = Workload(
        num_requests=400,
        requests_per_s=requests_per_s / 2,
        prompt_tokens=Uniform(20, 60),
        output_tokens=LogNormal(median=400, sigma=0.4, maximum=1000),
        tenants=(Tenant("app"),),
        max_tokens=1024,
    )
    labels = replace(stories, prompt_tokens=Uniform(300, 900), output_tokens=Fixed(4))
    merged = [*generate(stories, Random(seed)), *generate(labels, Random(seed + 1000))]
    merged.sort(key=lambda arrival: arrival.time_s)
    for number, arrival in enumerate(merged):
        yield arrival._replace(request=msgspec.structs.replace(arrival.request, id=f"r{number}"))


def bins(arguments: argparse.Namespace) -> None:
    print("| requests/s | length bins | objective | first token | between tokens | preemptions |")
    print("|---|---|---|---|---|---|")
    for rate in arguments.rates:
        for kind in ("off", "tenant", "prompt"):
            print(_bins_row(rate, kind, arguments.seeds), flush=True)


def _bins_row(rate: float, kind: LengthBins, num_seeds: int) -> str:
    reports = []
    for seed in range(num_seeds):
        config = SimulationConfig(
            workload=Workload(
                num_requests=1, requests_per_s=1.0, prompt_tokens=Fixed(1), output_tokens=Fixed(1)
            ),
            arrivals=tuple(two_tasks(seed, rate)),
            replica=ReplicaConfig(num_blocks=1500),
        )
        policy = PolicySet(length_bins=kind, max_num_seqs=32)
        reports.append(simulate(with_policy(config, policy)))
    objective, ttft, itl, preemptions = (
        statistics.fmean(values)
        for values in (
            [report.objective.total for report in reports],
            [report.latency.ttft_s.mean for report in reports],
            [report.latency.tpot_s.mean for report in reports],
            [report.num_preemptions for report in reports],
        )
    )
    return f"| {rate:g} | {kind} | {objective:.3f} | {ttft:.3f} s | {itl * 1e3:.1f} ms | {preemptions:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    kinds = parser.add_subparsers(required=True)
    tuning = kinds.add_parser("tune")
    tuning.add_argument("--evaluations", type=int, default=40)
    tuning.add_argument("--rounds", type=int, default=10, help="on the real engine; at least 2")
    tuning.set_defaults(run=tune)
    binning = kinds.add_parser("bins")
    binning.add_argument("--rates", type=float, nargs="+", default=[12.0, 16.0, 20.0])
    binning.add_argument("--seeds", type=int, default=3)
    binning.set_defaults(run=bins)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
