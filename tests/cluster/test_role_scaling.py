"""Prefill and decode pools that are sized together, in real processes: a replica changes its role where it is."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace

from penstock.cluster.control_plane import ControlPlane
from penstock.cluster.fleet import Fleet
from penstock.cluster.hosts import Hosts
from penstock.cluster.local import LocalLauncher
from penstock.cluster.supervisor import Supervisor
from penstock.control.autoscaler import AutoscalerConfig
from penstock.core.engine_config import CacheConfig
from penstock.core.errors import Conflict, NotFound, PenstockError
from penstock.core.plan import TokenEvent
from penstock.core.request import Request, SamplingParams
from tests.cluster.control_stage import SPEC, MemoryReleases, resolve

WAIT_S = 60.0
LENGTH = 3000  # a quarter of an answer's tokens: three quarters of the KV cache
PREFILL = replace(SPEC, role="prefill", engine=replace(SPEC.engine, cache=CacheConfig(num_kv_blocks=1024)))
DECODE = replace(PREFILL, role="decode")
SCALING = AutoscalerConfig(max_replicas=3, kv_target=0.2, up_cooldown_s=0.2, down_cooldown_s=600.0)


@pytest.fixture
async def supervisor() -> AsyncIterator[Supervisor]:
    supervisor = Supervisor({"local": LocalLauncher(log_level="WARNING")})
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
        MemoryReleases(),
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


async def test_a_replica_that_is_not_there_or_belongs_to_a_host_is_not_converted(
    supervisor: Supervisor,
) -> None:
    with pytest.raises(NotFound):
        supervisor.convert("replica-9", "decode")
    with pytest.raises(Conflict, match="keep their roles"):
        Hosts.convert(object.__new__(Hosts), "replica-1", "decode")
