"""Releases on real engine processes: one that promotes itself, one that rolls itself back, orders, a restart."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from penstock.cluster.replica import ReplicaSpec
from penstock.cluster.staged_records import MemoryRecords, serving_spec
from penstock.core.cluster_view import ReleaseOrder, ReleaseView
from penstock.core.errors import Conflict, EngineUnavailable, InvalidRequest, ModelNotFound, NotFound
from tests.cluster.control_stage import SPEC, Stage, open_stage

POLICY = {
    "mirrored_share": 0.5,
    "canary_shares": [0.3, 0.6],
    "min_stage_s": 0.0,
    # What a busy machine does to the times of a few requests proves nothing.
    "gates": {"min_requests": 20, "min_compared": 5, "max_ttft_ratio": 1e6, "max_itl_ratio": 1e6},
}
PATIENT = {"min_stage_s": 3600.0}  # stays in its stage unless somebody orders otherwise


def release(stage: Stage) -> ReleaseView:
    (view,) = stage.plane.releases.views()
    return view


async def test_a_good_revision_promotes_itself(tmp_path: Path) -> None:
    async with open_stage(tmp_path, num_gateways=2) as stage:
        order = ReleaseOrder(settings={"max_num_seqs": 128}, revision="roomy", policy=POLICY)
        async with stage.traffic(4):
            view = await stage.links[0].start_release(order)
            assert (view.stable, view.candidate, view.stage) == (SPEC.revision, "roomy", "warming")
            with pytest.raises(Conflict, match="still"):
                await stage.links[1].start_release(order)
            await stage.until(lambda: release(stage).is_over)
            assert release(stage).stage == "promoted", release(stage)
            assert stage.revisions() == {"roomy"}
        assert set(stage.answers) == {(97, 98, 99, 100, 97, 98, 99, 100)}
        await stage.ask()
        # The next release begins where this one ended.
        assert stage.plane.pools[0].spec.revision == "roomy"


async def test_a_slow_revision_rolls_itself_back(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        # One request at a time: all others wait for it.
        gates = {"min_requests": 20, "min_compared": 1, "max_ttft_ratio": 3.0, "max_itl_ratio": 50.0}
        policy = POLICY | {"gates": gates}
        order = ReleaseOrder(settings={"max_num_seqs": 1}, revision="narrow", policy=policy)
        async with stage.traffic(8, max_tokens=400):
            await stage.links[0].start_release(order)
            await stage.until(lambda: release(stage).is_over)
        view = release(stage)
        assert view.stage == "rolled_back"
        assert "p95" in view.reason
        assert stage.revisions() == {SPEC.revision}
        assert {len(answer) for answer in stage.answers} == {400}
        await stage.ask()


async def test_an_operator_may_hurry_and_may_change_their_mind(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        link = stage.links[0]
        with pytest.raises(NotFound):
            await link.promote_release(None)
        with pytest.raises(ModelNotFound):
            await link.start_release(ReleaseOrder(model="other", settings={"max_num_seqs": 2}))
        with pytest.raises(InvalidRequest, match="max_num_sequences") as refused:
            await link.start_release(ReleaseOrder(settings={"max_num_sequences": 2}))
        assert refused.value.hint == "Did you mean 'max_num_seqs'?"
        with pytest.raises(InvalidRequest, match="no model"):
            await link.start_release(ReleaseOrder(weights="elsewhere"))
        with pytest.raises(InvalidRequest, match="canary"):
            await link.start_release(ReleaseOrder(settings={"seed": 1}, policy={"canary_shares": [2.0]}))
        with pytest.raises(Conflict, match="already"):
            await link.start_release(ReleaseOrder(revision=SPEC.revision))

        order = ReleaseOrder(settings={"max_num_seqs": "64"}, revision="second", policy=PATIENT)
        await link.start_release(order)
        with pytest.raises(Conflict, match="cannot follow"):
            await link.promote_release(None)  # nothing is there to promote yet
        await stage.until(lambda: release(stage).stage == "shadow")
        assert (await stage.ask())[:1] == (97,)
        await link.roll_back_release("echo")
        await stage.until(lambda: release(stage).stage == "rolled_back")
        assert stage.revisions() == {SPEC.revision}

        await link.start_release(order)
        await stage.until(lambda: release(stage).stage == "shadow")
        await link.promote_release(None)
        async with stage.traffic(2):
            await stage.until(lambda: release(stage).stage == "promoted")
        assert stage.revisions() == {"second"}


async def test_a_release_goes_on_after_a_restart_and_what_it_promoted_stays(tmp_path: Path) -> None:
    store = MemoryRecords()
    order = ReleaseOrder(settings={"max_num_seqs": 64}, revision="second", policy=PATIENT)
    async with open_stage(tmp_path, store=store) as stage:
        await stage.links[0].start_release(order)
        await stage.until(lambda: release(stage).stage == "shadow")
    (record,) = await store.load()
    assert record.state.stage == "shadow"
    assert serving_spec(SPEC, [record]) == SPEC
    async with open_stage(tmp_path, store=store) as stage:
        await stage.until(lambda: stage.revisions() == {SPEC.revision, "second"})
        await stage.links[0].promote_release(None)
        await stage.until(lambda: release(stage).stage == "promoted")
    (record,) = await store.load()
    # The same flags as before: what was promoted since is what they mean now. Other flags mean what they say.
    assert serving_spec(SPEC, [record]).engine.scheduler.max_num_seqs == 64
    changed = replace(SPEC, revision="of other flags")
    assert serving_spec(changed, [record]) == changed


async def test_a_candidate_that_cannot_start_is_rolled_back_and_says_why(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        order = ReleaseOrder(settings={"record_plans": str(tmp_path / "missing" / "plans")}, revision="bad")
        await stage.links[0].start_release(order)
        await stage.until(lambda: release(stage).is_over)
        assert release(stage).stage == "rolled_back"
        assert "it cannot be started" in release(stage).reason


async def test_a_candidate_gets_fewer_replicas_where_there_is_no_room_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_stage(tmp_path, num_replicas=2) as stage:
        launch = stage.supervisor.launch
        asked = 0

        async def launch_one(spec: ReplicaSpec) -> str:
            nonlocal asked
            asked += 1
            if asked <= 2:  # all requests are mirrored, so the candidate wants two replicas at first
                raise EngineUnavailable("There is no room.", retry_after_s=1.0)
            return await launch(spec)

        monkeypatch.setattr(stage.supervisor, "launch", launch_one)
        policy = PATIENT | {"mirrored_share": 1.0}
        order = ReleaseOrder(settings={"max_num_seqs": 64}, revision="second", policy=policy)
        await stage.links[0].start_release(order)
        await stage.until(lambda: release(stage).stage == "shadow")
        serving = [member.replica.revision for member in stage.supervisor.members()]
        assert serving.count(SPEC.revision) == 2
        assert serving.count("second") >= 1
