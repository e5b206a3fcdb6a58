"""What the autoscaler decides is carried out: on replicas that are only written down, and on real processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.cluster.control_messages import ModelReport, Report, Sample
from penstock.cluster.role_scaling import autoscaling
from penstock.cluster.scaling import PoolScaler
from penstock.control.autoscaler import AutoscalerConfig
from penstock.core.cluster_view import ReplicaOrder
from penstock.core.config import ScalingConfig
from penstock.core.errors import ConfigError, Conflict, ModelLoadError
from tests.cluster.control_stage import SPEC, open_stage
from tests.cluster.fake_manager import FakeManager

CONFIG = AutoscalerConfig(min_replicas=1, max_replicas=4, up_cooldown_s=30.0, down_cooldown_s=60.0)


class Pool:
    def __init__(self, config: AutoscalerConfig) -> None:
        self.manager = FakeManager()
        self.scaler = PoolScaler(self.manager, SPEC, config, drain_timeout_s=10.0)
        self.now = 0.0

    async def look(self, after_s: float = 1.0) -> list[str]:
        """Let time pass, look, and let what was begun get somewhere."""
        self.now += after_s
        self.scaler.look(self.now, wall_s=self.now)
        for _ in range(5):
            await asyncio.sleep(0)
        return self.manager.states()

    def report(self, **of_model: int) -> None:
        models = {SPEC.model: ModelReport(**of_model)}
        token_s = {member.id: 0.001 for member in self.manager.members()}
        report = Report(directive_number=0, models=models, token_s=token_s)
        self.scaler.figures.add(1, SPEC.model, {SPEC.revision}, report, self.now)


@pytest.fixture
async def pool() -> AsyncIterator[Pool]:
    pool = Pool(CONFIG)
    assert await pool.look() == ["starting"]
    pool.manager.finish_starting()
    yield pool
    await pool.scaler.close()


async def test_a_replica_that_starts_is_not_started_twice(pool: Pool) -> None:
    pool.manager.load(num_waiting=10, num_waiting_tokens=5000)
    pool.report(arrived_tokens=5000)
    assert await pool.look(40.0) == ["ready", "starting", "starting"]
    assert await pool.look(40.0) == ["ready", "starting", "starting"]
    pool.manager.finish_starting()
    assert await pool.look(0.1) == ["ready"] * 3


async def test_slow_first_tokens_start_a_replica(pool: Pool) -> None:
    sample = Sample("replica-1", SPEC.model, SPEC.revision, None, 5.0, None, False)
    pool.now += 40.0
    report = Report(directive_number=0, samples=(sample,) * 10)
    pool.scaler.figures.add(1, SPEC.model, {SPEC.revision}, report, pool.now)
    assert await pool.look() == ["ready", "starting"]
    assert "time to first token" in pool.scaler.view(pool.now).last_decision
    assert pool.scaler.view(pool.now).num_scale_ups == 2


async def test_a_full_kv_cache_starts_a_replica(pool: Pool) -> None:
    pool.manager.load(num_kv_blocks_used=95, num_running=3)
    assert await pool.look(40.0) == ["ready", "starting"]


async def test_one_leaves_when_fewer_are_enough_after_it_has_finished(pool: Pool) -> None:
    pool.manager.load(num_waiting=10, num_waiting_tokens=3000)
    pool.report(arrived_tokens=3000)
    await pool.look(40.0)
    pool.manager.finish_starting()
    pool.manager.load(num_running=1)
    await pool.look(100.0)
    states = await pool.look(100.0)
    assert states == ["ready", "draining"]
    assert await pool.look(1.0) == states  # it still answers someone
    pool.manager.load()
    assert await pool.look(1.0) == ["ready"]


async def test_a_draining_replica_is_taken_back_before_another_is_started(pool: Pool) -> None:
    pool.manager.load(num_waiting=10, num_waiting_tokens=3000)
    pool.report(arrived_tokens=3000)
    await pool.look(40.0)
    pool.manager.finish_starting()
    pool.manager.load(num_running=1)
    await pool.look(100.0)
    assert await pool.look(100.0) == ["ready", "draining"]
    pool.manager.load(num_waiting=10, num_waiting_tokens=3500, num_running=1)
    pool.report(arrived_tokens=7000)
    assert (await pool.look(40.0))[:2] == ["ready", "ready"]


def successor_of(pool: Pool, skew_s: float) -> Pool:
    """The pool under the next leader, five seconds later, by a clock that differs by `skew_s`."""
    successor = Pool(CONFIG)
    successor.manager = pool.manager
    successor.scaler = PoolScaler(pool.manager, SPEC, CONFIG, drain_timeout_s=10.0)
    successor.now = 7.0
    successor.scaler.restore(pool.scaler.kept(pool.now, wall_s=5000.0 - skew_s), 7.0, wall_s=5005.0)
    return successor


@pytest.mark.parametrize("skew_s", [-300.0, 0.0, 300.0])
async def test_a_leader_with_another_clock_scales_up_in_time(pool: Pool, skew_s: float) -> None:
    successor = successor_of(pool, skew_s)
    pool.manager.load(num_kv_blocks_used=95, num_running=3)
    assert await successor.look(31.0) == ["ready", "starting"]
    await successor.scaler.close()


@pytest.mark.parametrize("skew_s", [-300.0, 0.0, 300.0])
async def test_a_leader_with_another_clock_drains_nothing_too_early(pool: Pool, skew_s: float) -> None:
    pool.manager.load(num_kv_blocks_used=95, num_running=3)
    assert await pool.look(40.0) == ["ready", "starting"]
    pool.manager.finish_starting()
    pool.manager.load()
    assert await pool.look() == ["ready", "ready"]
    successor = successor_of(pool, skew_s)
    assert await successor.look() == ["ready", "ready"]
    assert await successor.look(50.0) == ["ready", "ready"]
    assert await successor.look(61.0) == ["ready"]
    await successor.scaler.close()


async def test_nothing_leaves_while_a_release_compares(pool: Pool) -> None:
    pool.manager.load(num_waiting=10, num_waiting_tokens=3000)
    pool.report(arrived_tokens=3000)
    await pool.look(40.0)
    pool.manager.finish_starting()
    pool.manager.load()
    pool.scaler.is_releasing = True
    await pool.look(100.0)
    assert await pool.look(1000.0) == ["ready", "ready"]


async def test_a_replica_that_cannot_start_is_tried_again_after_a_pause() -> None:
    pool = Pool(CONFIG)
    pool.now = asyncio.get_running_loop().time()
    pool.manager.failure = ModelLoadError("There is no such file.")
    assert await pool.look() == []
    pool.manager.failure = None
    assert await pool.look(0.1) == []
    assert await pool.look(100.0) == ["starting"]
    await pool.scaler.close()


async def test_held_requests_bring_the_first_replica_back() -> None:
    pool = Pool(AutoscalerConfig(min_replicas=0, max_replicas=2))
    assert await pool.look() == []
    pool.report(held_requests=1, held_tokens=100)
    assert await pool.look() == ["starting"]
    pool.scaler.figures.forget(1)
    assert pool.scaler.view(pool.now).held_requests == 0
    await pool.scaler.close()


def test_settings_become_a_policy() -> None:
    assert autoscaling(ScalingConfig(), 3) is None
    config = autoscaling(ScalingConfig(max_replicas=5, ttft_target_ms=250.0), 2)
    assert config is not None
    assert (config.min_replicas, config.max_replicas, config.ttft_target_s) == (2, 5, 0.25)
    config = autoscaling(ScalingConfig(min_replicas=0), 2)
    assert config is not None
    assert (config.min_replicas, config.max_replicas) == (0, 2)
    with pytest.raises(ConfigError, match="more than"):
        autoscaling(ScalingConfig(min_replicas=4, max_replicas=2), 1)


async def test_real_processes_come_and_go_and_come_back(tmp_path: Path) -> None:
    config = AutoscalerConfig(
        min_replicas=0,
        max_replicas=2,
        drain_target_s=1e-3,
        ttft_target_s=1e-6,  # any answer is too slow: so one more is started
        up_cooldown_s=0.0,
        down_cooldown_s=0.2,
        idle_to_zero_s=0.5,
    )
    async with open_stage(tmp_path, scaling=config) as stage:
        async with stage.traffic(2):
            await stage.until(lambda: len(stage.supervisor.members()) == 2)
            await stage.until(lambda: stage.plane.pools[0].view(0.0).num_ready == 2)
        await stage.until(lambda: not stage.supervisor.members())
        # Nobody is there to answer: the request is held until somebody is.
        assert await stage.ask(b"xyz", max_tokens=3) == tuple(b"xyz")
        decisions = stage.links[0].pools[0]
        assert decisions.num_scale_ups >= 2
        assert decisions.num_scale_downs >= 1


async def test_an_operator_starts_drains_and_resumes(pool: Pool) -> None:
    def order(action: str, replica_id: str | None = None) -> None:
        pool.scaler.obey(ReplicaOrder(action=action, replica_id=replica_id), pool.now, 1000.0)  # type: ignore[arg-type]

    order("start")
    await asyncio.sleep(0)
    assert pool.manager.states() == ["ready", "starting"]
    pool.manager.finish_starting()
    pool.manager.load(num_running=1)  # so that the drain does not end at once
    order("drain", "replica-2")
    await asyncio.sleep(0)
    assert pool.manager.states() == ["ready", "draining"]
    for action, replica_id in (("drain", "replica-2"), ("resume", "replica-1")):
        with pytest.raises(Conflict, match=replica_id):
            order(action, replica_id)
    order("resume", "replica-2")
    assert pool.manager.states() == ["ready", "ready"]
    assert [each.decision for each in pool.scaler.decisions][1:] == [
        "start 1: an operator's order",
        "drain replica-2: an operator's order",
        "resume replica-2: an operator's order",
    ]
    assert pool.scaler.decisions[0].decision == "start 1: below the floor"
