"""Finds how many replicas a traffic needs to meet its targets, and what they cost.

A closed formula gives a first estimate for each layout, and picks the layout. The simulator then runs the traffic
with the scheduler and the dispatcher that serve, and the number of replicas follows from the share of requests that
met their targets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from penstock.core.engine_config import CacheConfig, SchedulerConfig
from penstock.core.errors import UsageError
from penstock.core.figures import percentile
from penstock.core.messages import HEARTBEAT_INTERVAL_S
from penstock.planner.roofline import Layout, RooflineCost
from penstock.simulator import (
    ControlTimes,
    Fixed,
    ReplicaConfig,
    Report,
    SimulationConfig,
    Workload,
    simulate,
)
from penstock.simulator.cost import StepCost, StepWork
from penstock.simulator.report import Outcome
from penstock.simulator.workload import Lengths

HOURS_PER_MONTH = 730.0
BLOCK_TOKENS = 16
_BLOCKS_PER_CONTEXT = 128
# The queue of a replica that is always busy grows without end. The formula uses this share of the largest rate.
_LOAD = 0.8
_MOST_SIMULATED = 2  # replicas; of a larger fleet, this part is simulated with the same part of the traffic
_REQUESTS_PER_REPLICA = 120
_MOST_REQUESTS_PER_REPLICA = 600
# An overload of 1/20 delays first tokens by more than their target after 20 times the target, and not before.
_TARGETS_SIMULATED = 20
_MOST_SEQUENCES = 256
_MOST_ATTEMPTS = 12  # steps above the estimate, to find a number of replicas that is enough

# Simulates (a part of) a fleet of so many replicas, and calls the function for each outcome.
SimulateFleet: TypeAlias = Callable[[SimulationConfig, int, Callable[[Outcome], None]], Report]


def simulate_fleet(
    config: SimulationConfig, num_replicas: int, on_outcome: Callable[[Outcome], None]
) -> Report:
    return simulate(config, on_outcome=on_outcome)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The traffic of clients. Lengths are drawn by the simulator; the formula uses their means."""

    requests_per_s: float
    prompt_tokens: Lengths
    output_tokens: Lengths
    mean_prompt: float
    mean_output: float
    # Of prompt tokens that are cached, because other prompts begin with the same tokens.
    prefix_share: float = 0.0

    @property
    def computed_prompt(self) -> float:
        return max(1.0, self.mean_prompt * (1 - self.prefix_share))


@dataclass(frozen=True, slots=True)
class Targets:
    ttft_s: float
    itl_s: float
    share: float = 0.95  # of requests that must meet both

    def are_met_by(self, outcome: Outcome) -> bool:
        """Return whether a request was answered in time: its first token, and the mean time between its tokens."""
        waits_s = outcome.waits_s
        if outcome.rejection is not None or waits_s is None:
            return False
        return waits_s[0] <= self.ttft_s and waits_s[1] <= self.itl_s


@dataclass(frozen=True, slots=True)
class Estimate:
    """The formula's estimate for one replica under load."""

    batch: int  # requests that are answered at once
    requests_per_s: float
    ttft_s: float  # of a prompt that need not wait
    itl_s: float
    binds: str

    @property
    def is_possible(self) -> bool:
        return self.requests_per_s > 0.0


@dataclass(frozen=True, slots=True)
class Load:
    """Describes the steps of a replica that always has the same number of requests."""

    decode: StepWork
    decode_s: float
    prompts_s: float  # the part of a step that new prompts take

    @property
    def step_s(self) -> float:
        return self.decode_s + self.prompts_s


def under_load(cost: StepCost, traffic: Traffic, batch: int) -> Load:
    """Return the load of a replica with b requests at once. With d(b) seconds for a decode step, p(b) seconds that a
    prompt adds to a step, and o tokens in an answer, the mean step takes d(b) + b p(b) / o seconds."""
    context = round(traffic.mean_prompt + traffic.mean_output / 2)
    decode = StepWork.decodes(batch, batch * context)
    decode_s = cost.step_s(decode)
    both_s = cost.step_s(decode + _prompt(traffic))
    return Load(decode, decode_s, max(0.0, both_s - decode_s) * batch / traffic.mean_output)


def _prompt(traffic: Traffic) -> StepWork:
    num_tokens = max(1, round(traffic.mean_prompt))
    return StepWork.prompt(num_tokens, num_tokens - max(1, round(traffic.computed_prompt)))


def estimate(layout: Layout, cost: StepCost, traffic: Traffic, targets: Targets) -> Estimate:
    """Solve for the largest batch that keeps the inter-token target and fits into memory. A replica then answers
    b / (o d(b) + b p(b)) requests per second."""
    whole = round(traffic.mean_prompt + traffic.mean_output)
    alone_s = cost.step_s(_prompt(traffic))
    room = min(layout.contexts(whole), _MOST_SEQUENCES)

    def step_s(batch: int) -> float:
        return under_load(cost, traffic, batch).step_s

    if whole > layout.model.max_positions:
        return Estimate(0, 0.0, alone_s, 0.0, "context length")
    if room < 1:
        return Estimate(0, 0.0, alone_s, 0.0, "memory")
    if alone_s > targets.ttft_s:
        return Estimate(0, 0.0, alone_s, step_s(1), "TTFT target")
    low, high = 0, room
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if step_s(middle) <= targets.itl_s else (low, middle - 1)
    if low == 0:
        return Estimate(0, 0.0, alone_s, step_s(1), "ITL target")
    rate = low / (traffic.mean_output * step_s(low))
    binds = "KV memory" if low == room < _MOST_SEQUENCES else "ITL target"
    if low == _MOST_SEQUENCES:
        binds = _binding(cost, under_load(cost, traffic, low))
    return Estimate(low, rate * _LOAD, alone_s, step_s(low), binds)


def _binding(cost: StepCost, load: Load) -> str:
    if not isinstance(cost, RooflineCost):
        return "engine"
    return "prompts" if load.prompts_s > load.decode_s else cost.times(load.decode).binds


@dataclass(frozen=True, slots=True)
class Attainment:
    """The figures of a simulation with this many replicas."""

    num_replicas: int
    share: float  # of requests that met the targets
    ttft_p95_s: float
    itl_p95_s: float
    output_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Plan:
    layout: Layout
    estimate: Estimate
    curve: tuple[Attainment, ...]  # by number of replicas, increasing
    num_replicas: int

    @property
    def reached(self) -> Attainment:
        return next(point for point in self.curve if point.num_replicas == self.num_replicas)

    @property
    def dollars_per_hour(self) -> float:
        return self.layout.dollars_per_hour * self.num_replicas

    @property
    def dollars_per_month(self) -> float:
        return self.dollars_per_hour * HOURS_PER_MONTH

    def dollars_per_million(self, traffic: Traffic) -> float:
        """Return the dollars for a million output tokens of this traffic."""
        return self.dollars_per_hour / (traffic.requests_per_s * traffic.mean_output * 3600 / 1e6)


def best_layout(
    layouts: Iterable[Layout], traffic: Traffic, targets: Targets
) -> tuple[Layout, Estimate] | None:
    """Return the layout with the lowest cost per request; None if no layout can meet the targets."""
    found = [
        (layout, estimate(layout, RooflineCost(layout, serves=True), traffic, targets)) for layout in layouts
    ]
    possible = [pair for pair in found if pair[1].is_possible]
    if not possible:
        return None

    def price(pair: tuple[Layout, Estimate]) -> float:
        replicas = math.ceil(traffic.requests_per_s / pair[1].requests_per_s)
        return replicas * pair[0].dollars_per_hour

    return min(possible, key=price)


def fleet_of(
    layout: Layout, cost: StepCost, traffic: Traffic, targets: Targets, num_replicas: int
) -> SimulationConfig:
    """Describe the simulation of this many replicas under the traffic, or of a part of both in proportion."""
    simulated = min(num_replicas, _MOST_SIMULATED)
    rate = traffic.requests_per_s * simulated / num_replicas
    in_targets = math.ceil(_TARGETS_SIMULATED * targets.ttft_s * traffic.requests_per_s / num_replicas)
    per_replica = max(_REQUESTS_PER_REPLICA, min(in_targets, _MOST_REQUESTS_PER_REPLICA))
    whole = round(traffic.mean_prompt + traffic.mean_output)
    prefix = round(traffic.mean_prompt * traffic.prefix_share)
    block_size = BLOCK_TOKENS if prefix else _block_tokens(whole)
    return SimulationConfig(
        workload=Workload(
            num_requests=per_replica * simulated,
            requests_per_s=rate,
            prompt_tokens=Fixed(max(1, round(traffic.computed_prompt))) if prefix else traffic.prompt_tokens,
            output_tokens=traffic.output_tokens,
            prefix_tokens=Fixed(prefix) if prefix else None,
        ),
        replica=ReplicaConfig(
            num_blocks=max(1, layout.kv_tokens(whole) // block_size),
            max_model_len=layout.model.max_positions,
            cost=cost,
            scheduler=SchedulerConfig(itl_target_ms=targets.itl_s * 1e3, max_num_seqs=_MOST_SEQUENCES),
            # Prompts without a common prefix find nothing in a cache, and filling it takes longer than all the rest.
            cache=CacheConfig(block_size=block_size, enable_prefix_caching=bool(prefix)),
        ),
        num_replicas=simulated,
        times=ControlTimes(heartbeat_s=HEARTBEAT_INTERVAL_S),
    )


def _block_tokens(context: int) -> int:
    """Return the tokens of a simulated block without caching: for long contexts more than in the engine, because the
    simulator takes time for every block. Half a block of each request stays empty, less than a hundredth of its
    context. Settings of an engine allow the size of its kernels' blocks alone, which does not bind a simulation."""
    return BLOCK_TOKENS * max(1, context // (BLOCK_TOKENS * _BLOCKS_PER_CONTEXT))


def attained(
    config: SimulationConfig, targets: Targets, num_replicas: int, run: SimulateFleet = simulate_fleet
) -> Attainment:
    """Simulate a fleet of this many replicas, or the part of it that `fleet_of` describes."""
    seen: list[tuple[bool, tuple[float, float] | None]] = []  # figures alone: outcomes hold whole prompts

    def watch(outcome: Outcome) -> None:
        seen.append((targets.are_met_by(outcome), outcome.waits_s))

    report = run(config, num_replicas, watch)
    # The first requests find an empty fleet, and the last requests run while the fleet empties: neither count.
    skipped = len(seen) // 10
    counted = seen[skipped : len(seen) - skipped] or seen
    waits_s = [each for _, each in counted if each is not None] or [(math.inf, math.inf)]
    rate = report.output_tokens / report.duration_s if report.duration_s else 0.0
    return Attainment(
        num_replicas,
        sum(is_met for is_met, _ in counted) / len(counted),
        percentile(sorted(ttft_s for ttft_s, _ in waits_s), 95),
        percentile(sorted(itl_s for _, itl_s in waits_s), 95),
        rate * num_replicas / config.num_replicas,
    )


def plan_replicas(
    layout: Layout,
    guess: Estimate,
    traffic: Traffic,
    targets: Targets,
    *,
    cost: StepCost | None = None,
    run: SimulateFleet = simulate_fleet,
) -> Plan:
    """Find the least number of replicas that meets the targets in the simulator, from the estimate on."""
    cost = cost or RooflineCost(layout, serves=True)
    points: dict[int, Attainment] = {}

    def is_enough(number: int) -> bool:
        if number not in points:
            config = fleet_of(layout, cost, traffic, targets, number)
            points[number] = attained(config, targets, number, run)
        return points[number].share >= targets.share

    number = least_number(max(1, math.ceil(traffic.requests_per_s / guess.requests_per_s)), is_enough)
    if number is None:
        raise UsageError(
            f"{layout.model.name} on {layout.hardware.name} meets the targets with no number of replicas: "
            f"{points[max(points)].share:.0%} of the requests met them with {max(points)} replicas.",
            hint="Allow more time with --ttft-ms or --itl-ms, or more devices for each replica.",
        )
    curve = tuple(points[number] for number in sorted(points))
    return Plan(layout, guess, curve, number)


def least_number(guess: int, is_enough: Callable[[int], bool]) -> int | None:
    """Return a number that is enough where one less is not, near a guess. Returns None if no number is found. Growing
    steps away from the guess find a number that is enough and one that is not, and bisection finds the limit between
    them."""
    step = max(1, guess // 8)
    if is_enough(guess):
        enough, lacking = guess, 0
        while enough > 1:
            if not is_enough(lower := max(1, enough - step)):
                lacking = lower
                break
            enough, step = lower, step * 2
    else:
        lacking = guess
        for _ in range(_MOST_ATTEMPTS):
            if is_enough(enough := lacking + step):
                break
            lacking, step = enough, step * 2
        else:
            return None
    while enough - lacking > 1:
        middle = (enough + lacking) // 2
        enough, lacking = (middle, lacking) if is_enough(middle) else (enough, middle)
    return enough
