"""The simulator held to the engine: `python bench/simulator_validation.py`. A CPU, some minutes.

The same traffic runs on the real engine and in the simulator, and the figures are compared. The step times of the
simulator are fitted to other traffic: no step of a compared load is used.

How noise is bounded. The engine runs in this process, on one thread, and its clock is the CPU time of the process:
time in which other processes had the core does not count, and an idle engine jumps to the next arrival. Garbage
collection is off while a load runs. The speed of a core still changes from one moment to the next with what other
processes do to its caches. A probe therefore runs after each step: a fixed piece of work, whose own time does not
count. The seconds of a step are scaled by the mean of the last probes, to a core that is as fast as during the
warm-up. Each load runs several times with other requests, and all samples of these runs make one distribution.
`samples` says how many of them are at or above the two p99s. `noise` is how far the errors of single runs are from
the errors of all runs together, in the mean.

Equal steps still take unequal times, so the fitted cost has the spread of the steps that it was fitted to. The last
line says what the errors are without it.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import mean, median
from typing import Any

import msgspec
import torch

from penstock.core.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from penstock.core.plan import Chunk, StepPlan, StepResult
from penstock.dispatch import DispatchConfig
from penstock.engine.build import Engine, build_engine
from penstock.engine.loop import EngineLoop
from penstock.kvcache import KVCache
from penstock.scheduler.scheduler import Scheduler
from penstock.simulator import (
    LogNormal,
    ReplicaConfig,
    SimulationConfig,
    Uniform,
    Workload,
    generate,
    simulate,
)
from penstock.simulator.cost import (
    StepCost,
    StepWork,
    fit,
    fit_corrected,
    mean_relative_error,
    with_spread,
)
from penstock.simulator.report import Summary, times_between
from penstock.simulator.workload import Arrival

VOCABULARY = 4096
CONTEXT = 1024
MOST_BLOCKS = 1200
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


class SteadyClock:
    """Counts the CPU time of this process as if the speed of the core never changed, and time that is skipped."""

    def __init__(self) -> None:
        self._skipped_s = -time.process_time()
        self._usual_s: float | None = None  # of a probe
        self._probes_s: deque[float] = deque(maxlen=4)
        hidden, inner = MODEL["hidden_size"], MODEL["intermediate_size"]
        layers = range(MODEL["num_hidden_layers"])
        self._weights = [(torch.randn(hidden, inner), torch.randn(inner, hidden)) for _ in layers]

    def now(self) -> float:
        return time.process_time() + self._skipped_s

    def skip_to(self, now: float) -> None:
        self._skipped_s += max(0.0, now - self.now())

    def scale_since(self, began_s: float) -> None:
        """Scale the seconds of a step that has just ended by the speed of the core."""
        elapsed_s = self.now() - began_s
        self._probes_s.append(self._probe_s())
        usual_s = self._usual_s or self._probes_s[-1]
        self._skipped_s += began_s + elapsed_s * usual_s / mean(self._probes_s) - self.now()

    def set_usual_speed(self) -> None:
        self._usual_s = median(self._probe_s() for _ in range(200))

    @torch.inference_mode()
    def _probe_s(self) -> float:
        """Time matrix products as long as those of a small step, and some Python, as a step has both."""
        began_s = time.process_time()
        rows = torch.ones(8, MODEL["hidden_size"])
        for up, down in self._weights:
            rows = torch.tanh(rows @ up) @ down
        total = 0
        for number in range(6000):
            total += number & 3
        return time.process_time() - began_s


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


WHOLE_PROMPTS = SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=256, itl_target_ms=None)


@dataclass(frozen=True, slots=True)
class Load:
    name: str
    workload: Workload
    busy: float  # the share of the engine's time that the rate is chosen for; 0: all requests come at once
    num_blocks: int = MOST_BLOCKS
    scheduler: SchedulerConfig = WHOLE_PROMPTS


def workload(num_requests: int, prompt: object, output: object, **settings: object) -> Workload:
    return Workload(
        num_requests=num_requests,
        requests_per_s=1.0,  # set by `timed`
        prompt_tokens=prompt,  # type: ignore[arg-type]
        output_tokens=output,  # type: ignore[arg-type]
        **settings,  # type: ignore[arg-type]
    )


SMALL_STEPS = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=64, itl_target_ms=None)
LOADS = (
    Load("light chat", workload(200, LogNormal(60, 0.6, 300), LogNormal(24, 0.6, 80)), 0.3),
    Load("busy chat", workload(250, LogNormal(60, 0.6, 300), LogNormal(24, 0.6, 80)), 0.6),
    Load("long prompts in chunks", workload(120, Uniform(200, 600), Uniform(8, 32)), 0.5, scheduler=SMALL_STEPS),
    Load("long answers", workload(80, Uniform(10, 60), Uniform(60, 160)), 0.5),
    Load(
        "shared prefixes",
        workload(250, Uniform(10, 60), Uniform(8, 40), prefix_tokens=Uniform(100, 300), prefixes_per_tenant=12,
                 zipf_exponent=1.0),
        0.5,
    ),
    Load("bursts", workload(200, Uniform(20, 120), Uniform(8, 40), burst_share=0.1, burst_size=8), 0.4),
    Load("little KV memory", workload(120, Uniform(30, 120), Uniform(40, 120)), 0.0, num_blocks=60),
    Load("all at once", workload(150, LogNormal(60, 0.6, 300), LogNormal(24, 0.6, 80)), 0.0),
)  # fmt: skip
FITTED = (
    Load("fit: answers", workload(8, Uniform(5, 100), Uniform(10, 100)), 0.4),
    Load("fit: prompts", workload(8, Uniform(30, 500), Uniform(2, 30)), 0.4),
    Load("fit: full batches", workload(16, Uniform(10, 150), Uniform(10, 60)), 0.0),
    Load("fit: chunks", workload(6, Uniform(50, 500), Uniform(4, 40)), 0.5, scheduler=SMALL_STEPS),
)


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
    preemptions: int

    @classmethod
    def of(cls, runs: list[Run]) -> Figures:
        ttft = Summary.of(each for run in runs for each in run.ttft_s)
        itl = Summary.of(each for run in runs for each in run.itl_s)
        cached, prompts = sum(run.cached_tokens for run in runs), sum(run.prompt_tokens for run in runs)
        tokens_per_s = (ttft.count + itl.count) / sum(run.end_s for run in runs)
        return cls(ttft, itl, tokens_per_s, cached / prompts, sum(run.preemptions for run in runs))

    def times(self) -> list[float]:
        """Return the figures of which errors are shares."""
        ttft, itl = self.ttft, self.itl
        return [ttft.p50, ttft.p90, ttft.p99, itl.p50, itl.p90, itl.p99, self.tokens_per_s]


def arrivals_of(load: Load, seed: int, mean_s: float) -> list[Arrival]:
    """Return the requests of a load, with tokens that the model has. `mean_s`: seconds of the engine's time that a
    request takes, alone in its batch."""
    rate = load.busy / mean_s if load.busy else 1e6
    made = []
    for arrival in generate(replace(load.workload, requests_per_s=rate), Random(seed)):
        tokens = tuple(3 + token % (VOCABULARY - 3) for token in arrival.request.prompt_token_ids)
        sampling = msgspec.structs.replace(arrival.request.sampling, ignore_eos=True, temperature=0.0)
        request = msgspec.structs.replace(arrival.request, prompt_token_ids=tokens, sampling=sampling)
        made.append(
            replace(arrival, request=request, block_hashes=(), time_s=arrival.time_s if load.busy else 0.0)
        )
    return made


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


def run_engine(
    engine: Engine, clock: SteadyClock, load: Load, arrivals: list[Arrival]
) -> tuple[Run, list[tuple[StepWork, float]]]:
    """Run a load on the engine. Also returns the work and the seconds of each step."""
    config = msgspec.structs.replace(load.scheduler, max_draft_tokens=0)
    cache = KVCache(load.num_blocks, halves_blocks=True)
    scheduler = Scheduler(config, cache, max_model_len=CONTEXT, eos_token_ids=frozenset({2}))
    executor = WatchedExecutor(engine.loop.executor)
    loop = EngineLoop(scheduler, executor, clock, vocab_size=VOCABULARY)  # type: ignore[arg-type]
    waiting = list(reversed(arrivals))
    times_s: dict[str, list[float]] = {each.request.id: [] for each in arrivals}
    cached = 0
    steps: list[tuple[StepWork, float]] = []
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
        clock.scale_since(began_s)
        ended_s = clock.now()
        for event in events:
            times_s[event.request_id] += [ended_s - base_s] * len(event.token_ids)
            cached += event.num_cached_tokens or 0
        if executor.plan is not None:
            steps.append((StepWork.of(executor.plan), ended_s - began_s))
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
    """The runs of one load, each with its simulation."""

    load: Load
    pairs: list[tuple[Run, Run]]

    def figures(self, place: int) -> Figures:
        return Figures.of([pair[place] for pair in self.pairs])

    def errors(self) -> list[float]:
        """Return the error of each figure that has a time."""
        each = zip(self.figures(0).times(), self.figures(1).times(), strict=True)
        return [guess / real - 1.0 for real, guess in each]

    def noise(self) -> float:
        together = self.errors()
        apart = [Compared(self.load, [pair]).errors() for pair in self.pairs]
        return mean(
            abs(error - of_all) for errors in apart for error, of_all in zip(errors, together, strict=True)
        )


def rows(results: list[Compared]) -> Iterator[str]:
    yield (
        "| load | TTFT p50 | p90 | p99 | between tokens p50 | p90 | p99 | tokens/s | cached, engine and simulator | "
        "preemptions | samples | noise |"
    )
    yield "|" + "---|" * 12
    for each in results:
        real, guess = each.figures(0), each.figures(1)
        cells = [
            f"{_shown(place, figure)} {error:+.1%}"
            for place, (figure, error) in enumerate(zip(real.times(), each.errors(), strict=True))
        ]
        cells.append(f"{real.cached_share:.1%} and {guess.cached_share:.1%}")
        cells.append(f"{real.preemptions} and {guess.preemptions}")
        cells.append(f"{-(-real.ttft.count // 100)} and {-(-real.itl.count // 100)}")
        yield f"| {each.load.name} | " + " | ".join(cells) + f" | {each.noise():.1%} |"


def _shown(place: int, figure: float) -> str:
    return f"{figure:,.0f}" if place == 6 else f"{figure * 1e3:.1f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3, help="of each load")
    parser.add_argument("--share", type=float, default=1.0, help="of the requests of each load")
    parser.add_argument("--out", type=Path, help="write the table to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(MODEL))
        results, without_spread, step_error = compare(folder, options.runs, options.share)
    table = "\n".join(rows(results))
    table += (
        f"\n\nErrors of times and of tokens/s: {summary(results)}. The fit is off by {step_error:.1%} for single "
        f"steps, in the mean. Without the spread of steps: {summary(without_spread)}."
    )
    print(table)
    if options.out is not None:
        options.out.write_text(table + "\n")


def summary(results: list[Compared]) -> str:
    shares = [abs(error) for each in results for error in each.errors()]
    within = sum(share <= 0.05 for share in shares)
    return (
        f"{mean(shares):.1%} in the mean, {max(shares):.1%} at most; {within} of {len(shares)} are within 5 %"
    )


def compare(folder: Path, num_runs: int, share: float) -> tuple[list[Compared], list[Compared], float]:
    """Return the comparison with the spread of steps and without it, and the mean error of single steps."""

    def shortened(load: Load) -> Load:
        count = max(6, round(load.workload.num_requests * share))
        return replace(load, workload=replace(load.workload, num_requests=count))

    engine, clock = build(folder)
    loads = [shortened(load) for load in LOADS]

    def calibrate(seed: int) -> list[tuple[StepWork, float]]:
        return [
            step
            for load in map(shortened, FITTED)
            for step in run_engine(engine, clock, load, arrivals_of(load, seed, 0.05))[1]
        ]

    run_engine(engine, clock, loads[-1], arrivals_of(loads[-1], 99, 1.0))  # warm up
    clock.set_usual_speed()
    steps = calibrate(1000)
    first = fit(steps)
    real: list[list[tuple[list[Arrival], Run]]] = [[] for _ in loads]
    recorded: list[list[tuple[StepWork, float]]] = [[] for _ in loads]
    for turn in range(num_runs):
        for number, load in enumerate(loads):
            seed = turn * len(loads) + number
            arrivals = arrivals_of(load, seed, mean_s(load.workload, first))
            run, of_run = run_engine(engine, clock, load, arrivals)
            real[number].append((arrivals, run))
            recorded[number] += of_run
            if number % 2:
                steps += calibrate(1001 + seed)
        print(f"{turn + 1} of {num_runs} rounds done", flush=True)
    engine.close()
    cost = fit_corrected(steps)
    print(f"fitted to {len(steps):,} steps: {cost}", flush=True)
    for load, of_load in zip(loads, recorded, strict=True):
        print(f"recorded over predicted, {load.name}: {step_errors(of_load, cost)}", flush=True)
    compared = [
        [
            Compared(load, [(run, run_simulator(load, arrivals, each)) for arrivals, run in runs])
            for load, runs in zip(loads, real, strict=True)
        ]
        for each in (with_spread(cost, steps), cost)
    ]
    return compared[0], compared[1], mean_relative_error(cost, steps)


def step_errors(steps: list[tuple[StepWork, float]], cost: StepCost) -> str:
    """Return the median ratios of recorded to predicted seconds, by kind of step and largest number of sequences."""
    ratios: dict[tuple[str, int], list[float]] = {}
    for work, elapsed_s in steps:
        kind = "decodes" if work.tokens == work.sequences else "with prompts"
        most = 1 << (work.sequences - 1).bit_length()
        ratios.setdefault((kind, most), []).append(elapsed_s / cost.step_s(work))
    return ", ".join(
        f"{kind} to {most}: {median(each):.3f} ({len(each)})" for (kind, most), each in sorted(ratios.items())
    )


def mean_s(lengths: Workload, cost: StepCost) -> float:
    """Return the engine's seconds for a request in a batch of eight."""
    rng = Random(0)
    prefix = 0 if lengths.prefix_tokens is None else 20
    prompt = mean(lengths.prompt_tokens.draw(rng) for _ in range(500)) + prefix
    output = mean(lengths.output_tokens.draw(rng) for _ in range(500))
    batch = 8
    decode_s = cost.step_s(StepWork(batch, batch, int(batch * prompt), int(batch * prompt))) / batch
    prompt_s = cost.step_s(StepWork(int(prompt), 1, int(prompt), int(prompt * prompt / 2)))
    return output * decode_s + prompt_s


if __name__ == "__main__":
    main()
