"""The simulator held to the engine: `python bench/simulator_validation.py`. A CPU, some minutes.

The same traffic runs on the real engine and in the simulator, and the figures are compared. The step times of the
simulator are fitted to other traffic: no step of a compared load is used.

How noise is bounded. The engine runs in this process, on one thread, and its clock is the CPU time of the process:
time in which other processes had the core does not count, and an idle engine jumps to the next arrival. Nor does the
time count in which this file keeps its records. Garbage collection is off while a load runs. The speed of a core
still changes from one moment to the next with what other processes do to its caches. A probe therefore runs after
each step: a fixed piece of work, whose own time does not count. The seconds of a step are scaled by the mean of the
last probes, to a core that is as fast as during the warm-up. Each load runs several times with other requests, and
all samples of these runs make one distribution. `samples` says how many of them are at or above the two p99s. `noise`
is how far the errors of single runs are from the errors of all runs together, in the mean.

Equal steps still take unequal times, so the fitted cost has the spread of the steps that it was fitted to. Each run
is simulated several times, with other draws from this spread. The last line says what the errors are without it.

`--twins N` says how large errors are by chance alone. Only the steps of the fit are recorded. Then N simulations of
each load take the engine's place, one after the other: their costs are exactly those of the simulations that they are
compared with, and only the draws from the spread differ.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from statistics import mean, median
from typing import Any, TypeAlias

import msgspec
import torch

from bench.cpu_clock import SteadyClock
from bench.simulator_loads import FITTED, LOADS, MOST_BLOCKS, VOCABULARY, Load, arrivals_of, mean_s
from penstock.core.engine_config import CacheConfig, EngineConfig, ModelConfig
from penstock.core.plan import Chunk, StepPlan, StepResult
from penstock.dispatch import DispatchConfig
from penstock.engine.build import Engine, build_engine
from penstock.engine.loop import EngineLoop
from penstock.kvcache import KVCache
from penstock.scheduler.scheduler import Scheduler
from penstock.simulator import (
    ReplicaConfig,
    SimulationConfig,
    simulate,
)
from penstock.simulator.cost import (
    SpreadCost,
    StepCost,
    StepWork,
    fit,
    fit_corrected,
    mean_relative_error,
    with_spread,
)
from penstock.simulator.report import Summary, times_between
from penstock.simulator.workload import Arrival

Steps: TypeAlias = list[tuple[StepWork, float]]  # their work, and their seconds
DRAWS = 4  # simulations of each run, with other draws from the spread of steps
CONTEXT = 1024
MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
}


class WatchedExecutor:
    """Keeps the plan that was submitted last, for the fit."""

    def __init__(self, executor: object) -> None:
        self._executor = executor
        self.plan: StepPlan | None = None

    def __getattr__(self, name: str) -> object:
        return getattr(self._executor, name)

    def submit(self, plan: StepPlan) -> tuple[Chunk, ...]:
        self.plan = plan
        return self._executor.submit(plan)  # type: ignore[attr-defined, no-any-return]

    def collect(self) -> StepResult:
        return self._executor.collect()  # type: ignore[attr-defined, no-any-return]


@dataclass(frozen=True, slots=True)
class Run:
    """The samples of one run of a load."""

    ttft_s: list[float]
    itl_s: list[float]
    end_s: float  # of the last answer
    prompt_tokens: int
    cached_tokens: int
    preemptions: int

    @classmethod
    def of(
        cls, arrivals: list[Arrival], times_s: dict[str, list[float]], cached: int, preemptions: int
    ) -> Run:
        return cls(
            [times_s[each.request.id][0] - each.time_s for each in arrivals],
            [gap for each in arrivals for gap in times_between(times_s[each.request.id])],
            max(times[-1] for times in times_s.values()),
            sum(len(each.request.prompt_token_ids) for each in arrivals),
            cached,
            preemptions,
        )


@dataclass(frozen=True, slots=True)
class Figures:
    ttft: Summary
    itl: Summary
    tokens_per_s: float
    cached_share: float
    preemptions: float  # of a run, in the mean

    @classmethod
    def of(cls, runs: list[Run]) -> Figures:
        ttft = Summary.of(each for run in runs for each in run.ttft_s)
        itl = Summary.of(each for run in runs for each in run.itl_s)
        cached, prompts = sum(run.cached_tokens for run in runs), sum(run.prompt_tokens for run in runs)
        tokens_per_s = (ttft.count + itl.count) / sum(run.end_s for run in runs)
        return cls(ttft, itl, tokens_per_s, cached / prompts, mean(run.preemptions for run in runs))

    def times(self) -> list[float]:
        """Return the figures of which errors are shares."""
        ttft, itl = self.ttft, self.itl
        return [ttft.p50, ttft.p90, ttft.p99, itl.p50, itl.p90, itl.p99, self.tokens_per_s]


def build(folder: Path) -> tuple[Engine, SteadyClock]:
    """Build the engine once. Each run gets a fresh scheduler and a fresh cache around the same executor."""
    clock = SteadyClock()
    config = EngineConfig(
        model=ModelConfig(model=str(folder), device="cpu", dtype="float32", load_format="random"),
        cache=CacheConfig(num_kv_blocks=MOST_BLOCKS),
        speculate="off",
        steps_in_flight=1,
    )
    return build_engine(config, folder, clock=clock), clock


def run_engine(engine: Engine, clock: SteadyClock, load: Load, arrivals: list[Arrival]) -> tuple[Run, Steps]:
    """Run a load on the engine. Also returns the work and the seconds of each step."""
    config = msgspec.structs.replace(load.scheduler, max_draft_tokens=0)
    cache = KVCache(load.num_blocks, halves_blocks=True)
    scheduler = Scheduler(config, cache, max_model_len=CONTEXT, eos_token_ids=frozenset({2}))
    executor = WatchedExecutor(engine.loop.executor)
    loop = EngineLoop(scheduler, executor, clock, vocab_size=VOCABULARY)  # type: ignore[arg-type]
    waiting = list(reversed(arrivals))
    times_s: dict[str, list[float]] = {each.request.id: [] for each in arrivals}
    cached = 0
    steps: Steps = []
    gc.collect()
    gc.disable()
    base_s = clock.now()
    while waiting or loop.has_work:
        if not loop.has_work:
            clock.skip_to(base_s + waiting[-1].time_s)
        began_s = clock.now()
        while waiting and base_s + waiting[-1].time_s <= began_s:
            loop.add(waiting.pop().request)
        executor.plan = None
        events = loop.step()
        ended_s = clock.end_step(began_s)
        for event in events:
            times_s[event.request_id] += [ended_s - base_s] * len(event.token_ids)
            cached += event.num_cached_tokens or 0
        if executor.plan is not None:
            steps.append((StepWork.of(executor.plan), ended_s - began_s))
        clock.set(ended_s)  # the lists above are not the engine's
    preemptions = loop.stats().num_preemptions
    gc.enable()
    return Run.of(arrivals, times_s, cached, preemptions), steps


def run_simulator(load: Load, arrivals: list[Arrival], cost: StepCost) -> Run:
    times_s: dict[str, list[float]] = {}
    cached = 0

    def note(outcome: object) -> None:
        nonlocal cached
        times_s[outcome.arrival.request.id] = outcome.token_times_s  # type: ignore[attr-defined]
        cached += outcome.num_cached_tokens  # type: ignore[attr-defined]

    config = SimulationConfig(
        workload=load.workload,
        arrivals=tuple(arrivals),
        replica=ReplicaConfig(
            num_blocks=load.num_blocks,
            max_model_len=CONTEXT,
            depth=1,
            cost=cost,
            scheduler=load.scheduler,
            halves_blocks=True,
        ),
        dispatch=DispatchConfig(routing_policy="least-loaded"),
    )
    report = simulate(config, on_outcome=note)
    return Run.of(arrivals, times_s, cached, report.num_preemptions)


@dataclass(frozen=True, slots=True)
class Compared:
    """The runs of one load, each with its simulations."""

    load: Load
    pairs: list[tuple[Run, list[Run]]]

    def real(self) -> Figures:
        return Figures.of([run for run, _ in self.pairs])

    def guess(self) -> Figures:
        return Figures.of([run for _, simulated in self.pairs for run in simulated])

    def errors(self) -> list[float]:
        """Return the error of each figure that has a time."""
        each = zip(self.real().times(), self.guess().times(), strict=True)
        return [guess / real - 1.0 for real, guess in each]

    def noise(self) -> str:
        if len(self.pairs) == 1:
            return "–"
        together = self.errors()
        apart = [Compared(self.load, [pair]).errors() for pair in self.pairs]
        distances = (
            abs(error - of_all) for errors in apart for error, of_all in zip(errors, together, strict=True)
        )
        return f"{mean(distances):.1%}"


def rows(results: list[Compared]) -> Iterator[str]:
    yield (
        "| load | TTFT p50 | p90 | p99 | between tokens p50 | p90 | p99 | tokens/s | cached, engine and simulator | "
        "preemptions | samples | noise |"
    )
    yield "|" + "---|" * 12
    for each in results:
        real, guess = each.real(), each.guess()
        cells = [
            f"{_shown(place, figure)} {error:+.1%}"
            for place, (figure, error) in enumerate(zip(real.times(), each.errors(), strict=True))
        ]
        cells.append(f"{real.cached_share:.1%} and {guess.cached_share:.1%}")
        cells.append(f"{real.preemptions:.3g} and {guess.preemptions:.3g}")
        cells.append(f"{-(-real.ttft.count // 100)} and {-(-real.itl.count // 100)}")
        yield f"| {each.load.name} | " + " | ".join(cells) + f" | {each.noise()} |"


def _shown(place: int, figure: float) -> str:
    return f"{figure:,.0f}" if place == 6 else f"{figure * 1e3:.1f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3, help="of each load")
    parser.add_argument("--at-once", type=int, default=1, help="runs at once, each on a core of its own")
    parser.add_argument("--share", type=float, default=1.0, help="of the requests of each load")
    parser.add_argument("--out", type=Path, help="write the table to this file")
    parser.add_argument("--twins", type=int, help="compare so many simulations of each load with others")
    options = parser.parse_args()
    if options.twins:
        print(twins(options.twins, options.share))
        return
    # Each run has a process of its own, whose clock begins with it.
    with ProcessPoolExecutor(
        options.at_once, multiprocessing.get_context("spawn"), max_tasks_per_child=1
    ) as processes:
        recordings = list(processes.map(record, range(options.runs), repeat(options.share)))
    table = compared(recordings)
    print(table)
    if options.out is not None:
        options.out.write_text(table + "\n")


def summary(results: list[Compared]) -> str:
    shares = [abs(error) for each in results for error in each.errors()]
    within = sum(share <= 0.05 for share in shares)
    return (
        f"{mean(shares):.1%} in the mean, {max(shares):.1%} at most; {within} of {len(shares)} are within 5 %"
    )


@dataclass(frozen=True, slots=True)
class Recording:
    """One run of each compared load on the engine, with its requests and steps, and the steps for the fit."""

    loads: list[Load]
    runs: list[tuple[list[Arrival], Run]]  # of each load
    steps: list[Steps]  # of each load
    fitted: Steps


def warm_engine(loads: list[Load]) -> tuple[Engine, SteadyClock]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(MODEL))
        engine, clock = build(folder)
    run_engine(engine, clock, loads[-1], arrivals_of(loads[-1], 99, 1.0))
    clock.set_usual_speed()
    return engine, clock


def fitted_steps(engine: Engine, clock: SteadyClock, traffic: list[Load], seed: int) -> Steps:
    runs = (run_engine(engine, clock, load, arrivals_of(load, seed, 0.05)) for load in traffic)
    return [step for _, steps in runs for step in steps]


def twins(count: int, share: float) -> str:
    """Compare simulations with simulations that differ by chance alone."""
    loads, traffic = ([shortened(load, share) for load in each] for each in (LOADS, FITTED))
    engine, clock = warm_engine(loads)
    steps = fitted_steps(engine, clock, traffic, 1000)
    engine.close()
    spread = with_spread(fit_corrected(steps), steps)
    names = ("TTFT p50", "p90", "p99", "between tokens p50", "p90", "p99", "tokens/s")
    lines = ["| load | " + " | ".join(names) + " |", "|" + "---|" * (len(names) + 1)]
    within = 0
    for place, load in enumerate(loads):
        errors = [errors_by_chance(load, number * len(loads) + place, spread) for number in range(count)]
        within += sum(abs(error) <= 0.05 for each in errors for error in each)
        cells = [
            f"{mean(map(abs, each)):.1%}, {max(map(abs, each)):.1%}" for each in zip(*errors, strict=True)
        ]
        lines.append(f"| {load.name} | " + " | ".join(cells) + " |")
    total = count * len(loads) * len(names)
    return "\n".join(lines) + f"\n\nMean and largest errors by chance. {within} of {total} are within 5 %."


def errors_by_chance(load: Load, seed: int, cost: SpreadCost) -> list[float]:
    """Return the errors of simulations against another one, which differs in its draws from the spread of steps."""
    arrivals = arrivals_of(load, seed, mean_s(load.workload, cost))
    twin, *others = (run_simulator(load, arrivals, replace(cost, seed=draw)) for draw in range(DRAWS + 1))
    return Compared(load, [(twin, others)]).errors()


def record(number: int, share: float) -> Recording:
    loads, traffic = ([shortened(load, share) for load in each] for each in (LOADS, FITTED))
    engine, clock = warm_engine(loads)

    def calibrate(seed: int) -> Steps:
        return fitted_steps(engine, clock, traffic, seed)

    first = number * len(loads)
    fitted = calibrate(1000 + first)
    cost = fit(fitted)
    recording = Recording(loads, [], [], fitted)
    for place, load in enumerate(loads):
        arrivals = arrivals_of(load, first + place, mean_s(load.workload, cost))
        run, steps = run_engine(engine, clock, load, arrivals)
        recording.runs.append((arrivals, run))
        recording.steps.append(steps)
        if place % 2:
            fitted += calibrate(1001 + first + place)
    engine.close()
    return recording


def shortened(load: Load, share: float) -> Load:
    count = max(3, round(load.workload.num_requests * share))
    return replace(load, workload=replace(load.workload, num_requests=count))


def compared(recordings: list[Recording]) -> str:
    """Run the simulator with the costs that are fitted to each recording. Returns the table and its last line."""
    loads = recordings[0].loads
    results, without_spread = [Compared(load, []) for load in loads], [Compared(load, []) for load in loads]
    step_errors: list[float] = []
    ratios: list[Ratios] = [{} for _ in loads]
    for recording in recordings:
        cost = fit_corrected(recording.fitted)
        print(f"fitted to {len(recording.fitted):,} steps: {cost}", flush=True)
        step_errors.append(mean_relative_error(cost, recording.fitted))
        spread = with_spread(cost, recording.fitted)
        draws = [replace(spread, seed=seed) for seed in range(DRAWS)]
        for place, (load, (arrivals, run)) in enumerate(zip(loads, recording.runs, strict=True)):
            note_ratios(ratios[place], recording.steps[place], cost)
            simulated = [run_simulator(load, arrivals, each) for each in draws]
            results[place].pairs.append((run, simulated))
            without_spread[place].pairs.append((run, [run_simulator(load, arrivals, cost)]))
    for load, of_load in zip(loads, ratios, strict=True):
        print(f"recorded over predicted, {load.name}: {shown_ratios(of_load)}", flush=True)
    return "\n".join(rows(results)) + (
        f"\n\nErrors of times and of tokens/s: {summary(results)}. The fit is off by {mean(step_errors):.1%} for "
        f"single steps, in the mean. Without the spread of steps: {summary(without_spread)}."
    )


Ratios: TypeAlias = dict[
    tuple[str, int], list[float]
]  # of seconds, by kind of step and largest number of sequences


def note_ratios(ratios: Ratios, steps: Steps, cost: StepCost) -> None:
    """Add the ratios of recorded to predicted seconds."""
    for work, elapsed_s in steps:
        kind = "decodes" if work.only_decodes else "with prompts"
        if work.samples < work.sequences:
            kind += " that go on"
        most = 1 << (work.sequences - 1).bit_length()
        ratios.setdefault((kind, most), []).append(elapsed_s / cost.step_s(work))


def shown_ratios(ratios: Ratios) -> str:
    return ", ".join(
        f"{kind} to {most}: {median(each):.3f} ({len(each)})" for (kind, most), each in sorted(ratios.items())
    )


if __name__ == "__main__":
    main()
