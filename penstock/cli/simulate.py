"""`penstock simulate`: the platform in virtual time, and a search for faults that break its promises. `penstock
tune`: a search for the policy set with the best objective on a load."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from penstock.cli.commands import PenstockCommand
from penstock.cli.console import json_option, print_json, stderr_console, stdout_console
from penstock.cli.simulations import PROGRESS_S, GatewayLimits, SimulationRuns, duration
from penstock.core.errors import UsageError

if TYPE_CHECKING:
    from penstock.planner.scenario import Scenario
    from penstock.planner.tune import Check, Evaluation
    from penstock.simulator import Report, SimulationConfig
    from penstock.simulator.report import Outcome
    from penstock.simulator.search import FaultCase

_SEEDS_PER_TASK = 8  # about a second of work


def run_case(path: Path) -> None:
    """Run the case in a file. Raises an error if the case breaks a promise."""
    from penstock.simulator.search import CASE_DECODER

    try:
        case = CASE_DECODER.decode(path.read_bytes())
    except msgspec.MsgspecError as error:
        raise UsageError(f"{path} holds no case: {error}.") from error
    broken = _violation(case)
    if broken is not None:
        raise UsageError(f"{broken}, with {case.num_requests} requests and {case.num_faults} faults.")
    click.echo(f"{case.num_requests} requests and {case.num_faults} faults: no promise was broken.")


def search(num_cases: int, first_seed: int, num_requests: int, num_workers: int) -> None:
    """Run the fleets of `num_cases` seeds. Raises an error for the first seed that breaks a promise, with a smaller
    case in a file.

    Each fleet is defined by its seed alone. Several processes therefore find what one process finds, and the search
    reports the broken promise with the lowest seed.
    """
    seeds = range(first_seed, first_seed + num_cases)
    tasks = [seeds[begin : begin + _SEEDS_PER_TASK] for begin in range(0, num_cases, _SEEDS_PER_TASK)]
    console, shown_s, num_done = stderr_console(), time.monotonic(), 0
    with _outcomes(tasks, num_requests, min(num_workers, len(tasks))) as outcomes:
        for task, failing_seed in zip(tasks, outcomes, strict=True):
            if failing_seed is not None:
                break
            num_done += len(task)
            if time.monotonic() - shown_s >= PROGRESS_S:
                shown_s = time.monotonic()
                console.print(f"{num_done:,} of {num_cases:,} fleets, {num_done * num_requests:,} requests")
    if failing_seed is not None:
        _report_failure(failing_seed, num_requests)
    click.echo(
        f"{num_cases:,} fleets and {num_cases * num_requests:,} requests, seeds {seeds[0]} to {seeds[-1]}: "
        "no promise was broken."
    )


@contextmanager
def _outcomes(tasks: Sequence[range], num_requests: int, num_workers: int) -> Iterator[Iterator[int | None]]:
    """Yield the first failing seed of each task, in the order of the tasks. Tasks that are not needed any more are
    dropped at the end of the context."""
    if num_workers == 1:
        yield (_first_failure(task, num_requests) for task in tasks)
        return
    executor = ProcessPoolExecutor(num_workers, get_context("spawn"), _follow_parent)
    try:
        yield executor.map(_first_failure, tasks, [num_requests] * len(tasks))
    except BrokenProcessPool as error:
        raise UsageError(
            "A process of the search was killed.", hint="Is there enough memory for --workers?"
        ) from error
    finally:
        executor.shutdown(cancel_futures=True)


def _follow_parent() -> None:
    """Leave Ctrl-C to the parent, and end with the parent, however the parent ends."""
    parent = parent_process()
    assert parent is not None

    def follow() -> None:
        wait([parent.sentinel])
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=follow, daemon=True).start()


def _first_failure(seeds: range, num_requests: int) -> int | None:
    """Return the first of the seeds whose fleet breaks a promise."""
    from penstock.simulator.search import random_case

    return next((seed for seed in seeds if _violation(random_case(seed, num_requests)) is not None), None)


def _violation(case: FaultCase) -> str | None:
    """Run a case with the limits of the gateway that serves."""
    from penstock.simulator.search import violation

    return violation(
        case, lambda limits: GatewayLimits({"workspace": msgspec.to_builtins(limits)}, "the case")
    )


def _report_failure(seed: int, num_requests: int) -> None:
    """Make a failing case smaller, write the case to a file, and raise an error."""
    from penstock.simulator.search import random_case, shrink

    case = random_case(seed, num_requests)
    stderr_console().print(f"Seed {seed} broke a promise ({_violation(case)}); making the case smaller.")
    smallest = shrink(case, lambda each: _violation(each) is not None)
    path = Path(f"fault-case-{seed}.json")
    path.write_bytes(msgspec.json.format(msgspec.json.encode(smallest)))
    raise UsageError(
        f"Seed {seed}: {_violation(smallest)}, with {smallest.num_requests} requests, {smallest.num_replicas} "
        f"replicas and {smallest.num_faults} faults.",
        hint=f"Run it again: penstock simulate --fault-case {path}",
    )


_LONG_RUN_S = 60.0
_GUESSED_REQUEST_S = 2e-3  # before anything was measured
_GUESSED_BEAT_S = 1e-4


@click.command(cls=PenstockCommand, short_help="Run a fleet in virtual time; search for harmful faults.")
@click.argument("scenarios", nargs=-1, type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option("--replicas", type=click.IntRange(min=1), help="Replicas, instead of the scenario's.")
@click.option(
    "--rate", type=click.FloatRange(0, min_open=True), help="Requests per second, instead of the scenario's."
)
@click.option(
    "--requests", "num_requests", type=click.IntRange(min=1), help="Requests, instead of the scenario's."
)
@click.option("--seed", type=int, help="Seed, instead of the scenario's; with --fault-search the first one.")
@click.option("--fault-search", "num_cases", type=click.IntRange(min=1), metavar="N",
              help="Run N random fleets with random faults, and check every request.")  # fmt: skip
@click.option("--fault-case", "case_file", type=click.Path(path_type=Path, dir_okay=False, exists=True),
              help="Run the case in this file, which --fault-search wrote.")  # fmt: skip
@click.option("--workers", type=click.IntRange(min=1), metavar="N",
              help="Processes that share the fleets of --fault-search. Default: 1.")  # fmt: skip
@click.option("--plot", "plot_file", type=click.Path(path_type=Path), metavar="FILE",
              help="Draw times to the first token and between tokens; needs the extra `plot`.")  # fmt: skip
@json_option
def simulate(
    scenarios: tuple[Path, ...],
    replicas: int | None,
    rate: float | None,
    num_requests: int | None,
    seed: int | None,
    num_cases: int | None,
    case_file: Path | None,
    workers: int | None,
    plot_file: Path | None,
    as_json: bool,
) -> None:
    """Run the fleets of SCENARIOS (TOML files) in virtual time, with the scheduler and the dispatcher that serve.

    Two scenarios are compared side by side. Without one, Llama 3.1 8B runs on one H200 under a default load. See
    docs/simulator.md for the keys of a scenario.

    \b
      penstock simulate fleet.toml
      penstock simulate fleet.toml --replicas 8 --plot fleet.png
      penstock simulate one.toml other.toml
      penstock simulate --fault-search 1000 --workers 4
    """
    from penstock.planner.scenario import Scenario, load_scenario, simulation_of

    if num_cases is not None or case_file is not None:
        many = case_file is not None and (num_cases or workers)
        if scenarios or replicas or rate or plot_file or as_json or many:
            raise UsageError(
                "--fault-search and --fault-case have fleets of their own.",
                hint="Give --fault-case alone, or --fault-search with --seed, --requests and --workers at most.",
            )
        if case_file is not None:
            run_case(case_file)
        elif num_cases is not None:
            search(num_cases, seed or 0, num_requests or 100, workers or 1)
        return
    if workers:
        raise UsageError("--workers shares the fleets of --fault-search.", hint="Leave --workers out.")
    if plot_file:
        from penstock.bench.summary import check_plot

        check_plot(plot_file)
    warn = stderr_console().print
    loaded = {str(path): load_scenario(path) for path in scenarios} or {"default": Scenario()}
    reports: dict[str, Report] = {}
    times: dict[str, list[tuple[float, float]]] = {}
    for name, scenario in loaded.items():
        changed = _changed(scenario, replicas, rate, num_requests, seed)
        config = simulation_of(changed, Path(name).parent, warn)
        limits = GatewayLimits(scenario.limits, name) if scenario.limits else None
        reports[name], times[name] = _run(name, config, limits)
    if plot_file:
        _plot(plot_file, times)
    if as_json:
        print_json({name: asdict(report) for name, report in reports.items()})
    elif len(reports) == 1:
        click.echo(str(next(iter(reports.values()))))
    else:
        _compare(reports)


def _changed(
    scenario: Scenario, replicas: int | None, rate: float | None, num_requests: int | None, seed: int | None
) -> Scenario:
    """Return the scenario with the options of the command line, which are then checked like its own values."""
    traffic, fleet = scenario.traffic, scenario.fleet
    if (rate or num_requests) and traffic.trace is not None:
        raise UsageError(
            "A trace has its own rate and number of requests.", hint="Leave --rate and --requests out."
        )
    return msgspec.structs.replace(
        scenario,
        traffic=msgspec.structs.replace(
            traffic, rate=rate or traffic.rate, requests=num_requests or traffic.requests
        ),
        fleet=msgspec.structs.replace(fleet, replicas=replicas or fleet.replicas),
        seed=scenario.seed if seed is None else seed,
    )


def _run(
    name: str, config: SimulationConfig, limits: GatewayLimits | None
) -> tuple[Report, list[tuple[float, float]]]:
    """Run one scenario. Return its report, and the time to the first token and between tokens of each answer."""
    runs, seen = SimulationRuns(name, config), list[tuple[float, float]]()
    guess_s = runs.num_requests * _GUESSED_REQUEST_S + _num_beats(config) * _GUESSED_BEAT_S
    if guess_s > _LONG_RUN_S:
        stderr_console().print(
            f"{name}: {runs.num_requests:,} requests will take about {duration(guess_s)} of one core."
        )

    def watch(outcome: Outcome) -> None:
        if (waits_s := outcome.waits_s) is not None:
            seen.append(waits_s)

    return runs.simulate(config, watch, limits), seen


def _num_beats(config: SimulationConfig) -> float:
    """Estimate the number of heartbeats that replicas send, also while no request arrives."""
    duration_s = config.workload.num_requests / config.workload.requests_per_s
    return duration_s / config.times.heartbeat_s * (config.num_replicas + config.num_prefill_replicas)


def _compare(reports: dict[str, Report]) -> None:
    from rich.table import Table

    table = Table("", *reports, box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    rows: dict[str, Callable[[Report], str]] = {
        "answered": lambda report: f"{report.num_answered:,} of {report.num_requests:,}",
        "output tokens/s": lambda report: f"{report.output_tokens_per_s:,.0f}",
        "TTFT p50, ms": lambda report: f"{report.latency.ttft_s.p50 * 1e3:,.0f}",
        "TTFT p99, ms": lambda report: f"{report.latency.ttft_s.p99 * 1e3:,.0f}",
        "between tokens p50, ms": lambda report: f"{report.latency.itl_s.p50 * 1e3:,.1f}",
        "between tokens p99, ms": lambda report: f"{report.latency.itl_s.p99 * 1e3:,.1f}",
        "prompt tokens from the cache": lambda report: f"{report.cached_share:.1%}",
        "preemptions": lambda report: f"{report.num_preemptions:,}",
        "retries": lambda report: f"{report.num_retries:,}",
        "objective": lambda report: f"{report.objective.total:.3f}",
        "replicas busy": lambda report: f"{report.mean_busy_share:.0%}",
    }
    for name, figure in rows.items():
        table.add_row(name, *(figure(report) for report in reports.values()))
    stdout_console().print(table)


def _plot(path: Path, times: dict[str, list[tuple[float, float]]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    for index, (axes, title) in enumerate(zip(
        figure.subplots(1, 2), ("time to the first token, s", "mean time between tokens, s"), strict=True
    )):  # fmt: skip
        for name, pairs in times.items():
            values = sorted(pair[index] for pair in pairs)
            shares = [(place + 1) / len(values) for place in range(len(values))]
            axes.plot(values, shares, label=Path(name).stem)
        axes.set(xlabel=title, ylabel="share of requests", ylim=(0, 1))
        axes.legend()
    figure.savefig(path)


_LONG_S = 60.0


@click.command(cls=PenstockCommand, short_help="Search for better scheduling policies, in virtual time.")
@click.argument("scenario", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option(
    "--evaluations", "max_evaluations", type=click.IntRange(2, 100_000), default=60, show_default=True,
    metavar="N", help="Most policy sets to simulate.",
)  # fmt: skip
@click.option("--only", "only", multiple=True, metavar="SETTING",
              help="A setting to change; may be given several times. Default: all that can matter.")  # fmt: skip
@click.option("--name", default="tuned", show_default=True, metavar="NAME", help="Name of the proposed set.")
@json_option
def tune(scenario: Path, max_evaluations: int, only: tuple[str, ...], name: str, as_json: bool) -> None:
    """Search policy sets for the smallest objective on the load of SCENARIO, a TOML file of `penstock simulate`.

    The load may be recorded: `traffic.trace` in the scenario names the file. The best set is compared with the
    settings in use on requests that the search has not seen, and is printed as a table for the settings file. Ctrl-C
    ends the search; the best set so far is printed.

    \b
      penstock tune fleet.toml >> settings.toml
      penstock experiment start default tuned
    """
    from penstock.core.objective import check_names
    from penstock.planner.scenario import read_scenario
    from penstock.planner.tune import SPACE, check, mean_gain, split

    unknown = [each for each in only if each.replace("-", "_") not in SPACE]
    if unknown:
        raise UsageError(f"{unknown[0]} is no setting to tune.", hint=f"There are: {', '.join(SPACE)}.")
    settings = tuple(each.replace("-", "_") for each in only)
    config = read_scenario(scenario, stderr_console().print)
    load, checks = split(config)
    evaluations = _search(load, max_evaluations, settings)
    best = next(each for each in reversed(evaluations) if each.is_best)
    check_names({name: best.policy})
    compared: tuple[Check, ...] = ()
    if best.number > 1 and checks:
        compared = check(checks, best.policy, SimulationRuns("check", checks[0], 2 * len(checks)).simulate)
    if as_json:
        print_json({"name": name, "evaluations": evaluations, "policy": best.policy, "checks": compared})
        return
    console = stderr_console()
    if best.number == 1:
        console.print(
            f"None of {len(evaluations)} policy sets is better than the settings in use on this load."
        )
        return
    before, after = evaluations[0].objective.total, best.objective.total
    console.print(
        f"objective {before:.4f} → {after:.4f} on the load of the search ({1 - after / before:.1%} less)"
    )
    if compared and mean_gain(compared) <= 0.0:
        console.print(f"{_shown(compared)}: the gain does not hold. Search with a longer load.")
        return
    if compared:
        console.print(f"{_shown(compared)} ({mean_gain(compared):.1%} less)")
    click.echo(best.policy.to_toml(name), nl=False)
    console.print(f"Try it on live traffic: penstock experiment start default {name} --share 0.5")


def _shown(checks: tuple[Check, ...]) -> str:
    pairs = ", ".join(f"{each.before:.4f} → {each.after:.4f}" for each in checks)
    return f"objective {pairs} on requests that the search has not seen"


def _search(load: SimulationConfig, max_evaluations: int, settings: tuple[str, ...]) -> list[Evaluation]:
    """Run the search. Prints an estimate of the time if the search takes long."""
    from penstock.planner.tune import search

    console, evaluations, began_s = stderr_console(), [], time.monotonic()
    runs = SimulationRuns("search", load, max_evaluations)
    try:
        for each in search(load, runs.simulate, max_evaluations=max_evaluations, settings=settings):
            evaluations.append(each)
            if each.number == 1:
                each_s = time.monotonic() - began_s
                if each_s * max_evaluations > _LONG_S:
                    total = duration(each_s * max_evaluations)
                    console.print(
                        f"{max_evaluations} simulations take up to {total}. Ctrl-C ends the search; --evaluations "
                        "and a shorter load make it quicker."
                    )
            if each.is_best:
                console.print(f"{each.number:>4}  objective {each.objective.total:.4f}  {each.change}")
    except KeyboardInterrupt:
        if not evaluations:
            raise
        console.print(f"Ended after {len(evaluations)} simulations.")
    return evaluations
