"""Experiments on a whole server without HTTP: arms with replicas of their own, windows, verdicts, restarts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.cluster.staged_records import ExperimentRecord, MemoryRecords
from penstock.control.experiment import ExperimentStage
from penstock.core.cluster_view import ExperimentOrder, ReleaseOrder
from penstock.core.errors import Conflict, InvalidRequest, NotFound, Superseded
from penstock.core.objective import ObjectiveSettings, PolicySet, RoutingWeights, Targets, TierTarget, Weights
from tests.cluster.control_stage import SPEC, Stage, open_stage

# Times between tokens of an engine that echoes are microseconds: only first tokens count. Ten times the target is
# more than any of them takes on a busy machine: a request counts with at most that, and both sets would look alike.
OBJECTIVE = ObjectiveSettings(
    weights=Weights(ttft=1.0, itl=0.0, idle=0.0, drops=10.0), targets=Targets(default=TierTarget(ttft_s=0.5))
)
QUICK: dict[str, Any] = {"window_s": 0.1, "min_windows": 6, "guards": {"min_requests": 100_000}}


def order(second: PolicySet, **changes: Any) -> ExperimentOrder:
    values: dict[str, Any] = {
        "a": "default",
        "b": "other",
        "policy_a": PolicySet(),
        "policy_b": second,
        "objective": OBJECTIVE,
        "config": QUICK,
        **changes,
    }
    return ExperimentOrder(**values)


def view(stage: Stage) -> Any:
    return stage.plane.experiments.views()[0]


ONE_SEAT = PolicySet(max_num_seqs=1, routing=RoutingWeights(policy="round-robin"))


async def test_a_worse_set_is_found_and_the_server_goes_on_as_before(tmp_path: Path) -> None:
    store = MemoryRecords()
    async with open_stage(tmp_path, num_gateways=2, experiments=store) as stage:
        async with stage.traffic(8, max_tokens=300):  # which wait for the only seat
            started = await stage.links[0].start_experiment(order(ONE_SEAT))
            assert started.stage == "starting"
            with pytest.raises(Conflict, match="still running"):
                await stage.links[1].start_experiment(order(PolicySet()))
            with pytest.raises(Conflict, match="experiment"):
                await stage.links[1].start_release(ReleaseOrder(settings={"max_num_seqs": 2}))
            await stage.until(lambda: view(stage).stage == "running")
            assert stage.revisions() == {SPEC.revision, view(stage).b.revision}
            assert stage.fleets[0].router.policies[view(stage).b.revision].name == "round-robin"
            await stage.until(lambda: view(stage).is_over)
            (done,) = await stage.links[1].experiments()
        assert done.verdict == "a is better"
        assert done.difference is not None
        assert done.difference.low > 0.0
        assert done.a.num_requests > 0
        assert done.b.num_requests > 0
        await stage.until(lambda: stage.revisions() == {SPEC.revision})
        assert len(await stage.ask()) == 8
        (stored,) = await store.load()
        assert stored.state.stage is ExperimentStage.OVER
        assert stored.state.windows


async def test_an_operator_stops_it_and_a_restart_goes_on_with_it(tmp_path: Path) -> None:
    store = MemoryRecords()
    slow = {**QUICK, "min_windows": 1000}
    async with open_stage(tmp_path, experiments=store) as stage:
        with pytest.raises(NotFound, match="no experiment"):
            await stage.links[0].stop_experiment(None)
        async with stage.traffic(4):
            await stage.links[0].start_experiment(order(PolicySet(itl_target_ms=50.0), config=slow))
            await stage.until(lambda: view(stage).num_windows >= 2)
        seen = view(stage).num_windows
    async with open_stage(tmp_path, experiments=store) as stage:
        await stage.until(lambda: len(stage.revisions()) == 2)
        assert view(stage).num_windows >= seen
        async with stage.traffic(4):
            await stage.until(lambda: view(stage).num_windows > seen)
        stopped = await stage.links[0].stop_experiment(None)
        assert stopped.verdict == "stopped by an operator"
        await stage.until(lambda: view(stage).is_over and stage.revisions() == {SPEC.revision})
        again = await stage.links[0].stop_experiment(None)
        assert again.verdict == "stopped by an operator"


async def test_bad_orders_are_sentences(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        link = stage.links[0]
        with pytest.raises(InvalidRequest, match=r"share of 0\.3 is not possible with 1 replicas") as refusal:
            await link.start_experiment(order(ONE_SEAT, config={"share": 0.3}))
        assert refusal.value.hint == "Possible are 0.5."
        with pytest.raises(InvalidRequest, match="experiment is wrong"):
            await link.start_experiment(order(ONE_SEAT, config={"share": 1.5}))
        with pytest.raises(InvalidRequest, match="Both sets"):
            await link.start_experiment(order(ONE_SEAT, b="default"))
        assert await link.experiments() == ()
        assert stage.revisions() == {SPEC.revision}


class TakenOver(MemoryRecords[ExperimentRecord]):
    """A store that another control process has claimed since."""

    is_taken = False

    async def save(self, record: ExperimentRecord) -> None:
        if self.is_taken:
            raise Superseded("Another control process decides now.")
        await super().save(record)


async def test_an_experiment_that_another_process_owns_now_is_left_as_it_is(tmp_path: Path) -> None:
    store = TakenOver()
    async with open_stage(tmp_path, experiments=store) as stage:
        await stage.plane.experiments.start(order(PolicySet(itl_target_ms=50.0)))
        await stage.until(lambda: view(stage).stage == "running")
        store.is_taken = True
        with pytest.raises(Superseded):
            await stage.plane.experiments.stop(None)
        assert view(stage).stage == "running"
        store.is_taken = False
