"""A fleet's whole simulation from one description, and its figures: `simulate_fleet(config) -> FleetReport`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from penstock.control.autoscaler import Autoscaler, AutoscalerConfig
from penstock.control.holding import HoldingConfig
from penstock.control.outliers import OutlierConfig, OutlierDetector
from penstock.control.retries import RetryConfig, RetryPolicy
from penstock.router import ReplicaState, Router, RouterConfig, policy_named
from penstock.simulator.faults import Fault
from penstock.simulator.fleet import Fleet
from penstock.simulator.fleet_control import ControlTimes, FleetControl
from penstock.simulator.fleet_driver import FleetDriver
from penstock.simulator.news import News
from penstock.simulator.report import Summary
from penstock.simulator.simulation import ReplicaConfig
from penstock.simulator.traffic import Traffic, generate_traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    traffic: Traffic
    num_replicas: int
    policy: str = "prefix-aware"
    replica: ReplicaConfig = field(default_factory=ReplicaConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    num_gateways: int = 1  # each with a router of its own; they tell each other nothing
    news_delay_s: float = 0.02
    times: ControlTimes = field(default_factory=ControlTimes)
    retries: RetryConfig = field(default_factory=RetryConfig)
    holding: HoldingConfig = field(default_factory=HoldingConfig)
    autoscaler: AutoscalerConfig | None = None
    outliers: OutlierConfig | None = None
    faults: tuple[Fault, ...] = ()
    seed: int = 0


@dataclass(frozen=True, slots=True)
class FleetReport:
    policy: str
    duration_s: float  # from the start to the end of the last request
    ended: dict[str, int]  # by finish reason or error code
    ttft_s: Summary
    tpot_s: Summary
    e2e_s: Summary
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    requests_by_replica: tuple[int, ...]
    tokens_by_replica: tuple[int, ...]  # computed: prompts as far as they were not cached, and answers
    busy_s_by_replica: tuple[float, ...]
    num_retries: int
    num_held: int
    num_resyncs: int
    num_ejections: int
    reasons: dict[str, int]  # of routing decisions
    sizes: tuple[tuple[float, int], ...]  # when the number of serving replicas changed, and to what

    @property
    def cached_share(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def max_over_mean_requests(self) -> float:
        return _max_over_mean(self.requests_by_replica)

    @property
    def max_over_mean_tokens(self) -> float:
        return _max_over_mean(self.tokens_by_replica)

    @property
    def mean_busy_share(self) -> float:
        busy = self.busy_s_by_replica
        return sum(busy) / len(busy) / self.duration_s if busy and self.duration_s else 0.0


def simulate_fleet(config: FleetConfig, progress: Callable[[int, float], None] | None = None) -> FleetReport:
    """Run to the end in virtual time. The same configuration gives the same report, to the last bit."""
    rng = Random(config.seed)
    fleet = Fleet(config.replica.build, config.replica.scheduler.max_num_batched_tokens)
    for _ in range(config.num_replicas):
        fleet.start(ReplicaState.READY)
    routers = [Router(policy_named(config.policy), config.router) for _ in range(config.num_gateways)]
    driver = FleetDriver(fleet, routers, RetryPolicy(config.retries), config.holding, Random(rng.random()))
    driver.progress = progress
    news = News(fleet, routers, driver.events, Random(rng.random()), delay_s=config.news_delay_s)
    control = FleetControl(
        driver,
        news,
        config.times,
        None if config.autoscaler is None else Autoscaler(config.autoscaler),
        None if config.outliers is None else OutlierDetector(config.outliers),
    )
    control.begin(config.faults)
    driver.run(generate_traffic(config.traffic, Random(config.seed)))
    for member in fleet.members.values():
        if member.is_alive:
            member.replica.cache.check_integrity([])
    return _report(config, driver, control, news)


def _report(config: FleetConfig, driver: FleetDriver, control: FleetControl, news: News) -> FleetReport:
    tally = driver.tally
    members = driver.fleet.all_members
    return FleetReport(
        policy=config.policy,
        duration_s=tally.last_end_s,
        ended=dict(sorted(tally.ended.items())),
        ttft_s=Summary.of(tally.ttft_s),
        tpot_s=Summary.of(tally.tpot_s),
        e2e_s=Summary.of(tally.e2e_s),
        prompt_tokens=tally.prompt_tokens,
        cached_tokens=tally.cached_tokens,
        output_tokens=tally.output_tokens,
        requests_by_replica=tuple(member.num_taken for member in members),
        tokens_by_replica=tuple(member.replica.num_tokens_computed for member in members),
        busy_s_by_replica=tuple(member.replica.busy_s for member in members),
        num_retries=tally.num_retries,
        num_held=tally.num_held,
        num_resyncs=news.num_resyncs,
        num_ejections=control.num_ejections,
        reasons=dict(sorted(tally.reasons.items())),
        sizes=tuple(control.sizes),
    )


def _max_over_mean(values: tuple[int, ...]) -> float:
    total = sum(values)
    return max(values) * len(values) / total if total else 1.0
