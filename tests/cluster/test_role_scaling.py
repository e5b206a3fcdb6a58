"""Prefill and decode pools that are sized together, in real processes: a replica changes its role where it is."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from msgspec.structs import replace

from penstock.cluster.control_messages import OrderReplica, decode_from_control, encode_line
from penstock.cluster.control_plane import ControlPlane
from penstock.cluster.fleet import Fleet
from penstock.cluster.role_scaling import RolePair, autoscaling, role_pairs, scaling_of_role
from penstock.cluster.scaling import PoolScaler
from penstock.cluster.staged_records import MemoryRecords
from penstock.cluster.supervisor import Supervisor
from penstock.control.autoscaler import AutoscalerConfig
from penstock.core.cluster_view import ReplicaOrder
from penstock.core.config import ScalingConfig
from penstock.core.engine_config import CacheConfig
from penstock.core.errors import Conflict, InvalidRequest, NotFound, PenstockError
from penstock.core.plan import TokenEvent
from penstock.core.request import Request, SamplingParams
from tests.cluster.control_stage import SPEC, resolve
from tests.cluster.fake_manager import FakeManager
from tests.copies import CopyingLauncher

WAIT_S = 240.0
LENGTH = 3000  # a quarter of an answer's tokens: three quarters of the KV cache
PREFILL = replace(SPEC, role="prefill", engine=replace(SPEC.engine, cache=CacheConfig(num_kv_blocks=1024)))
DECODE = replace(PREFILL, role="decode")
SCALING = AutoscalerConfig(max_replicas=3, kv_target=0.2, up_cooldown_s=0.2, down_cooldown_s=600.0)


@pytest.fixture
async def supervisor() -> AsyncIterator[Supervisor]:
    supervisor = Supervisor({"local": CopyingLauncher(log_level="WARNING")}, heartbeat_timeout_s=60.0)
    yield supervisor
    await supervisor.close()


def roles(supervisor: Supervisor) -> Counter[str]:
    return Counter(member.role for member in supervisor.members())


async def answer(fleet: Fleet, request_id: str) -> list[int]:
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    tokens: list[int] = []

    def on_event(event: TokenEvent) -> None:
        tokens.extend(event.token_ids)
        if event.finish_reason is not None:
            done.set_result(None)

    def on_error(error: PenstockError) -> None:
        done.set_exception(error)

    sampling = SamplingParams(max_tokens=4 * LENGTH, temperature=0.0)
    request = Request(id=request_id, prompt_token_ids=tuple(b"abcd"), sampling=sampling)
    fleet.add(request, timeout_s=WAIT_S, on_event=on_event, on_error=on_error)
    await done
    return tokens


async def test_a_full_decode_pool_takes_an_idle_prefill_replica_and_no_stream_notices(
    supervisor: Supervisor,
) -> None:
    plane = ControlPlane(
        supervisor,
        [(PREFILL, SCALING), (DECODE, SCALING)],
        MemoryRecords(),
        resolve,
        look_interval_s=0.05,
    )
    await asyncio.gather(*(supervisor.launch(spec) for spec in (PREFILL, PREFILL, DECODE)))
    pids = {member.id: supervisor.pid(member.id) for member in supervisor.members()}
    fleet = Fleet()
    supervisor.on_change.append(fleet.update)
    fleet.update(supervisor.members())
    try:
        async with asyncio.timeout(WAIT_S), plane.running():
            await fleet.wait_ready()
            number = 0
            while roles(supervisor) != {"prefill": 1, "decode": 2}:
                number += 1
                assert await answer(fleet, f"stream-{number}") == list(b"abcd" * LENGTH)
            assert roles(supervisor).total() == 3
            decisions = [each.decision for each in plane.view().decisions]
            assert decisions == ["convert 1: KV utilisation"]
            # Both decode now, and the process is the one that was there before.
            both = await asyncio.gather(*(answer(fleet, f"after-{n}") for n in range(4)))
            assert both == [list(b"abcd" * LENGTH)] * 4
            assert {member.id: supervisor.pid(member.id) for member in supervisor.members()} == pids
            assert supervisor.num_restarts == 0
            assert not fleet.verdicts
    finally:
        supervisor.on_change.remove(fleet.update)
        fleet.close()


@dataclass
class Pair:
    """The two pools of one model, whose replicas are only written down: 1 and 2 prefill, 3 and 4 decode."""

    manager: FakeManager
    pools: list[PoolScaler]
    pair: RolePair

    def obey(self, replica_id: str, role: str) -> None:
        self.pair.obey(replica_id, role, 0.0, 0.0)

    def roles(self) -> str:
        return " ".join(member.role for member in self.manager.members())


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    manager = FakeManager(is_quick=True)
    for spec in (PREFILL, PREFILL, DECODE, DECODE):
        await manager.launch(spec)
    pools = [PoolScaler(manager, spec, None, 10.0) for spec in (PREFILL, DECODE)]
    [pair] = role_pairs(manager, pools)
    yield Pair(manager, pools, pair)
    for pool in pools:
        await pool.close()


async def test_an_operator_changes_a_role_and_leaves_a_replica_in_each(pair: Pair) -> None:
    pair.obey("replica-1", "decode")
    assert pair.roles() == "decode prefill decode decode"
    [decision] = pair.pools[1].decisions
    assert decision.decision == "convert replica-1: an operator's order"
    with pytest.raises(Conflict, match="the last one for prefill"):
        pair.obey("replica-2", "decode")
    pair.obey("replica-3", "prefill")
    assert pair.roles() == "decode prefill prefill decode"
    # The autoscaler waits after an operator's order as after a decision of its own.
    assert [pool.state.last_change_s for pool in pair.pools] == [0.0, 0.0]


async def test_orders_to_change_a_role_that_are_refused(pair: Pair) -> None:
    with pytest.raises(NotFound):
        pair.obey("replica-9", "decode")
    with pytest.raises(InvalidRequest, match="cannot become 'both'"):
        pair.obey("replica-1", "both")
    with pytest.raises(Conflict, match="already"):
        pair.obey("replica-1", "prefill")
    pair.manager.roles_stay = "Its host is of another version."
    with pytest.raises(Conflict, match="another version"):
        pair.obey("replica-1", "decode")
    pair.manager.roles_stay = None
    pair.pools[0].is_releasing = True
    with pytest.raises(Conflict, match="compares revisions"):
        pair.obey("replica-1", "decode")
    pair.pools[0].is_releasing = False
    pair.pools[1].spec = replace(DECODE, revision="other")
    with pytest.raises(Conflict, match="different settings"):
        pair.obey("replica-1", "decode")
    pair.pools[1].spec = DECODE
    pair.manager.load(num_running=1)
    draining = asyncio.create_task(pair.manager.drain("replica-1", 10.0))
    await asyncio.sleep(0)
    with pytest.raises(Conflict, match="is draining"):
        pair.obey("replica-1", "decode")
    draining.cancel()
    assert pair.roles() == "prefill prefill decode decode"


async def test_a_model_without_roles_and_an_unknown_replica_convert_nothing() -> None:
    manager = FakeManager(is_quick=True)
    await manager.launch(SPEC)
    plane = ControlPlane(manager, [(SPEC, None)], MemoryRecords(), resolve)
    for replica_id, words in (("replica-1", "no prefill and decode replicas"), ("replica-9", "no replica")):
        order = ReplicaOrder(action="convert", replica_id=replica_id, role="decode")
        answer = await plane.answer(1, encode_line(OrderReplica(order)))
        assert words in decode_from_control(answer).message


@pytest.mark.parametrize(
    ("floor", "ceiling", "expected"), [(None, 1, (1, 2)), (3, 4, (2, 4)), (2, 6, (2, 6))]
)
def test_two_pools_have_room_for_both_floors(
    floor: int | None, ceiling: int, expected: tuple[int, int]
) -> None:
    """Also where the hosts of a shared fleet have less room than that for a moment."""
    config = ScalingConfig(min_replicas=floor, max_replicas=max(ceiling, floor or 0))
    scaling = scaling_of_role(autoscaling(config, 1), config, DECODE)
    assert scaling is not None
    assert (scaling.min_replicas, scaling.max_replicas) == expected


async def test_a_replica_that_is_not_there_is_not_converted(supervisor: Supervisor) -> None:
    with pytest.raises(NotFound):
        supervisor.convert("replica-9", "decode")
