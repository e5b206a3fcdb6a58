"""A whole simulation from one description: the composition root of this room."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from penstock.core.engine_config import CacheConfig, SchedulerConfig
from penstock.kvcache import KVCache
from penstock.scheduler.scheduler import Scheduler
from penstock.simulator.cost import LLAMA_8B_ON_H200, LinearCost
from penstock.simulator.driver import Choose, Driver, least_loaded
from penstock.simulator.replica import SimulatedReplica
from penstock.simulator.report import Report, summarize
from penstock.simulator.workload import END_TOKEN_ID, Workload, generate


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaConfig:
    """What each replica is. The default: Llama 3.1 8B in bfloat16 on one H200, with about 100 GB of KV."""

    num_blocks: int = 48_000
    max_model_len: int = 32_768
    depth: int = 2
    cost: LinearCost = LLAMA_8B_ON_H200
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)

    def build(self) -> SimulatedReplica:
        cache = KVCache(
            self.num_blocks,
            block_size=self.cache.block_size,
            enable_prefix_caching=self.cache.enable_prefix_caching,
            max_pinned_fraction=self.cache.max_pinned_fraction,
        )
        scheduler = Scheduler(
            self.scheduler, cache, max_model_len=self.max_model_len, eos_token_ids=frozenset({END_TOKEN_ID})
        )
        return SimulatedReplica(scheduler, cache, self.cost, depth=self.depth)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationConfig:
    workload: Workload
    replica: ReplicaConfig = field(default_factory=ReplicaConfig)
    num_replicas: int = 1
    choose: Choose = least_loaded
    seed: int = 0


def simulate(config: SimulationConfig) -> Report:
    """Run the workload to its end in virtual time. The same configuration gives the same report, to the last bit.
    A `choose` that remembers, such as `round_robin()`, must be made anew for each run."""
    driver = Driver([config.replica.build() for _ in range(config.num_replicas)], config.choose)
    outcomes = driver.run(generate(config.workload, Random(config.seed)))
    for replica in driver.replicas:
        replica.cache.check_integrity([])
    return summarize(outcomes, driver.replicas)
