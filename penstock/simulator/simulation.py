"""Runs a whole simulation from one description: `simulate(config) -> Report`. The composition root of this room."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random

import msgspec

from penstock.control.autoscaler import Autoscaler, AutoscalerConfig
from penstock.core.engine_config import CacheConfig, SchedulerConfig
from penstock.core.objective import Objective, ObjectiveSettings, Terms
from penstock.core.plan import StateSlots, WindowLayout
from penstock.dispatch import DispatchConfig, Dispatcher
from penstock.kvcache import KVCache
from penstock.router import ReplicaState
from penstock.scheduler.counted import CountedScheduler
from penstock.scheduler.scheduler import Scheduler
from penstock.simulator.control import ControlTimes, FleetControl
from penstock.simulator.cost import LLAMA_8B_ON_H200, SlowerCost, StepCost
from penstock.simulator.driver import Admission, Driver
from penstock.simulator.fleet import Answers, SimulatedFleet, SimulatedReplica
from penstock.simulator.releases import CANDIDATE, STABLE, ReleaseRun, SimulatedRelease
from penstock.simulator.report import Outcome, ReplicaReport, Report, Tally
from penstock.simulator.transfers import KVLink
from penstock.simulator.workload import END_TOKEN_ID, Arrival, Fault, Workload, generate

RELEASE_INTERVAL_S = 1.0  # between two looks at the gates of a release


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaConfig:
    """The settings of each replica. The default: Llama 3.1 8B in bfloat16 on one H200, with about 100 GB of KV."""

    num_blocks: int = 48_000
    max_model_len: int = 32_768
    depth: int = 2
    cost: StepCost = LLAMA_8B_ON_H200
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    draft_acceptance: float | None = None  # the chance of each drafted token; None: no speculation
    states: StateSlots | None = None  # of a model whose layers have a fixed state, which takes no drafts
    windows: WindowLayout | None = None  # of a model whose layers have windows
    halves_blocks: bool = False  # the last tokens of two requests share a block, as on a CPU
    num_host_blocks: int = 0  # slots of host memory for evicted blocks; copies take no time
    block_copy_s: float | None = None  # by which the scheduler decides on copies; None: no request is swapped
    counts_decodes: bool = True  # False plans every token separately: slower, with the same figures

    def build(self, slowdown: float = 1.0) -> SimulatedReplica:
        """Build a replica. `slowdown` is a factor of all step times."""
        cache = KVCache(
            self.num_blocks,
            block_size=self.cache.block_size,
            enable_prefix_caching=self.cache.enable_prefix_caching,
            max_pinned_fraction=self.cache.max_pinned_fraction,
            states=self.states,
            windows=self.windows,
            halves_blocks=self.halves_blocks,
            num_host_blocks=self.num_host_blocks,
        )
        config = self.scheduler
        if self.draft_acceptance is None or self.states is not None:
            config = msgspec.structs.replace(config, max_draft_tokens=0)
        cost = self.cost if slowdown == 1.0 else SlowerCost(self.cost, slowdown)
        answers, eos_token_ids = Answers(), frozenset({END_TOKEN_ID})
        if self.counts_decodes and not config.max_draft_tokens and not self.num_host_blocks:
            scheduler: Scheduler = CountedScheduler(
                config, cache, max_model_len=self.max_model_len, eos_token_ids=eos_token_ids, answers=answers
            )
        else:
            scheduler = Scheduler(
                config,
                cache,
                max_model_len=self.max_model_len,
                eos_token_ids=eos_token_ids,
                block_copy_s=self.block_copy_s,
            )
        return SimulatedReplica(
            scheduler, cache, cost, depth=self.depth, acceptance=self.draft_acceptance, answers=answers
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationConfig:
    workload: Workload
    arrivals: Iterable[Arrival] | None = None  # requests that were recorded, instead of the workload's
    replica: ReplicaConfig = field(default_factory=ReplicaConfig)
    num_replicas: int = 1
    num_prefill_replicas: int = 0  # that compute long prompts for the others, which then decode
    kv_link: KVLink | None = None  # between replicas; None: no KV moves
    num_gateways: int = 1  # each with a dispatcher of its own; they tell each other nothing
    dispatch: DispatchConfig = field(default_factory=DispatchConfig)
    autoscaler: AutoscalerConfig | None = None
    faults: tuple[Fault, ...] = ()
    release: SimulatedRelease | None = None
    times: ControlTimes = field(default_factory=ControlTimes)
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    seed: int = 0


def simulate(
    config: SimulationConfig,
    progress: Callable[[int, float], None] | None = None,
    on_outcome: Callable[[Outcome], None] | None = None,
    on_event: Callable[[SimulatedFleet], None] | None = None,
    admission: Admission | None = None,
) -> Report:
    """Run the workload to its end in virtual time. The same configuration gives the same report, to the last bit.
    `progress` gets the number of requests that have ended and the virtual time, whenever a request ends and every few
    virtual seconds. `on_outcome` gets each outcome. `on_event` looks at the replicas after every event. `admission`
    are the limits of the gateways."""
    rng = Random(config.seed)
    tally = Tally(targets=config.objective.targets)

    def on_end(outcome: Outcome, now: float) -> None:
        tally.add(outcome, now)
        if progress is not None:
            progress(tally.num_requests, now)
        if on_outcome is not None:
            on_outcome(outcome)

    block_size = config.replica.cache.block_size
    release = config.release
    revision = "" if release is None else STABLE
    fleet = SimulatedFleet(
        config.replica.build,
        revisions={} if release is None else {CANDIDATE: partial(config.replica.build, release.slowdown)},
        block_size=block_size,
        max_step_tokens=config.replica.scheduler.max_num_batched_tokens,
        kv_bytes_per_token=None if config.kv_link is None else config.kv_link.bytes_per_token,
    )
    for _ in range(config.num_replicas):
        fleet.start(ReplicaState.READY, "decode" if config.num_prefill_replicas else "both", revision)
    for _ in range(config.num_prefill_replicas):
        fleet.start(ReplicaState.READY, "prefill")
    driver = Driver(
        fleet,
        [Dispatcher(config.dispatch, Random(rng.random()), 0.0) for _ in range(config.num_gateways)],
        on_end,
        starts_on_demand=config.autoscaler is not None and config.autoscaler.min_replicas == 0,
        message_delay_s=config.times.message_delay_s,
        start_s=config.times.start_s,
        kv_link=config.kv_link,
        admission=admission,
    )
    autoscaler = None if config.autoscaler is None else Autoscaler(config.autoscaler)
    control = FleetControl(driver, tally, config.times, autoscaler, Random(rng.random()))
    if progress is not None:
        control.on_look = lambda now: progress(tally.num_requests, now)
    control.begin(config.faults)
    run = None
    if release is not None:
        run = ReleaseRun(driver, release, RELEASE_INTERVAL_S, Random(rng.random()))
        run.begin()
    # Without prefix caching no replica holds a prefix, and routers need no hashes.
    hashed_size = block_size if config.replica.cache.enable_prefix_caching else None
    arrivals: Iterator[Arrival] = generate(config.workload, Random(config.seed), block_size=hashed_size)
    if config.arrivals is not None:
        arrivals = iter(config.arrivals)
    driver.run(arrivals, None if on_event is None else partial(on_event, fleet))
    for member in fleet.members.values():
        if member.is_alive:
            member.replica.cache.check_integrity([])
    report = _report(config, driver, tally, control)
    return report if run is None else replace(report, release=tuple(run.changes))


def _report(config: SimulationConfig, driver: Driver, tally: Tally, control: FleetControl) -> Report:
    duration_s = tally.last_end_s
    reasons: Counter[str] = Counter()
    for dispatcher in driver.dispatchers:
        reasons.update(dispatcher.reasons)
    report = Report(
        policy=config.dispatch.routing_policy,
        duration_s=duration_s,
        num_requests=tally.num_requests,
        finished=dict(sorted(tally.finished.items())),
        rejected=dict(sorted(tally.rejected.items())),
        prompt_tokens=tally.prompt_tokens,
        cached_tokens=tally.cached_tokens,
        output_tokens=tally.output_tokens,
        latency=tally.latency(),
        latency_by_tier=tally.latency_by_tier(),
        replicas=tuple(
            ReplicaReport(
                num_requests=member.num_taken,
                num_steps=member.replica.num_steps,
                num_tokens_computed=member.replica.num_tokens_computed,
                num_preemptions=member.replica.scheduler.stats().num_preemptions,
                busy_share=member.replica.busy_s / duration_s if duration_s else 0.0,
            )
            for member in driver.fleet.all_members
        ),
        num_retries=tally.num_retries,
        num_waits=driver.num_waits,
        num_resyncs=driver.num_resyncs,
        num_moved_tokens=0 if driver.transfers is None else driver.transfers.num_moved_tokens,
        num_ejections=sum(dispatcher.table.num_ejections for dispatcher in driver.dispatchers),
        reasons=dict(sorted(reasons.items())),
        sizes=tuple(control.sizes),
        sums=dict(sorted(tally.sums.items())),
        objective=Objective(overall=Terms()),
    )
    return replace(report, objective=report.objective_by(config.objective))
