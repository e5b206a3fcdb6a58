"""The faults of `shared_faults`: each strikes one part of the fleet, or two, and ends by itself."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
from redis.asyncio import Redis

from bench.network_namespaces import Node
from bench.shared_faults_rig import LIMIT_S, Process, Rig

AWAY_S = 5.0  # before a killed part is started again
STORE = "object store"  # in its rows, one more client sends files and reads them back

Fault = Callable[[Rig], Awaitable[None]]


def killed(pick: Callable[[Rig], Awaitable[Process]]) -> Fault:
    async def strike(rig: Rig) -> None:
        process = await pick(rig)
        process.signal(signal.SIGKILL)
        await asyncio.sleep(AWAY_S)
        process.start()

    return strike


def frozen(pick: Callable[[Rig], Awaitable[Process]]) -> Fault:
    async def strike(rig: Rig) -> None:
        process = await pick(rig)
        process.signal(signal.SIGSTOP)
        await asyncio.sleep(rig.fault_s)
        process.signal(signal.SIGCONT)

    return strike


def cut(pick: Callable[[Rig], Awaitable[Node]], *, sends: bool = False, receives: bool = False) -> Fault:
    async def strike(rig: Rig) -> None:
        node = await pick(rig)
        await asyncio.to_thread(node.cut, sends=sends, receives=receives)
        await asyncio.sleep(rig.fault_s)
        await asyncio.to_thread(node.join)

    return strike


def node_of(pick: Callable[[Rig], Awaitable[Process]]) -> Callable[[Rig], Awaitable[Node]]:
    async def node(rig: Rig) -> Node:
        found = (await pick(rig)).node
        assert found is not None
        return found

    return node


def node_named(name: str) -> Callable[[Rig], Awaitable[Node]]:
    async def node(rig: Rig) -> Node:
        return rig.nodes[name]

    return node


async def _gateway(rig: Rig) -> Process:
    return rig.gateways[1]


async def _host(rig: Rig) -> Process:
    return rig.engines[0]


async def _leader(rig: Rig) -> Process:
    return await rig.leader()


def _engine_pids(rig: Rig) -> list[int]:
    host = rig.engines[0].running
    assert host is not None
    children = Path(f"/proc/{host.pid}/task/{host.pid}/children").read_text().split()
    return [int(pid) for pid in children]


async def kill_engine(rig: Rig) -> None:
    for pid in _engine_pids(rig):
        os.kill(pid, signal.SIGKILL)


async def freeze_engine(rig: Rig) -> None:
    pids = _engine_pids(rig)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(rig.fault_s)
    for pid in pids:  # its host has killed and replaced it, unless it was patient
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


async def kill_redis(rig: Rig) -> None:
    rig.redis.stop()
    await asyncio.sleep(AWAY_S)
    rig.redis.start()  # without its memory


async def freeze_redis(rig: Rig) -> None:
    rig.redis.pause()
    await asyncio.sleep(rig.fault_s)
    rig.redis.resume()


def _redis_told(*orders: tuple[str, ...]) -> Fault:
    """Give Redis one order, and after the time of a fault the other."""

    async def strike(rig: Rig) -> None:
        async with Redis.from_url(rig.redis.url) as client:
            await client.execute_command(*orders[0])
            await asyncio.sleep(rig.fault_s)
            await client.execute_command(*orders[1])

    return strike


async def make_postgres_a_standby(rig: Rig) -> None:
    await asyncio.to_thread(rig.postgres.become, "standby")
    await asyncio.sleep(rig.fault_s)
    await asyncio.to_thread(rig.postgres.become, "primary")


async def make_lines_bad(rig: Rig) -> None:
    """Packets between all parts are lost, so that what they carry is late."""
    for node in rig.nodes.values():
        await asyncio.to_thread(node.lose_some)
    await asyncio.sleep(rig.fault_s)
    for node in rig.nodes.values():
        await asyncio.to_thread(node.join)


async def kill_postgres(rig: Rig) -> None:
    process = rig.postgres._process
    assert process is not None
    process.kill()
    process.wait()
    await asyncio.sleep(AWAY_S)
    (rig.postgres._data / "postmaster.pid").unlink(missing_ok=True)
    await asyncio.to_thread(rig.postgres.start)


async def freeze_postgres(rig: Rig) -> None:
    process = rig.postgres._process
    assert process is not None
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    pids = [process.pid, *map(int, children)]
    for number, pause_s in ((signal.SIGSTOP, rig.fault_s), (signal.SIGCONT, 0.0)):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        await asyncio.sleep(pause_s)


async def kill_store(rig: Rig) -> None:
    assert rig.store is not None
    rig.store.stop()
    await asyncio.sleep(AWAY_S)
    await asyncio.to_thread(rig.store.start)  # without its files


async def freeze_store(rig: Rig) -> None:
    assert rig.store is not None
    rig.store.freeze()
    await asyncio.sleep(rig.fault_s)
    rig.store.thaw()


def both(one: Fault, other: Fault) -> Fault:
    """The second begins half a second after the first."""

    async def later(rig: Rig) -> None:
        await asyncio.sleep(0.5)
        await other(rig)

    async def strike(rig: Rig) -> None:
        await asyncio.gather(one(rig), later(rig))

    return strike


async def _move(rig: Rig) -> tuple[str, str] | None:
    """Return a replica of the second host, and the first host, to which the replica may move."""
    view, log = await rig.view(), rig.engines[0].log.read_text()
    if view is None:
        return None
    hosts: list[dict[str, str]] = view["hosts"]  # type: ignore[assignment]
    replicas: list[dict[str, str]] = view["replicas"]  # type: ignore[assignment]
    for host in hosts:
        name = host["name"]
        if host["state"] == "ready" and f"{name}: " in log:
            moving = [each["id"] for each in replicas if not each["id"].startswith(f"{name}-")]
            has_room = len(replicas) - len(moving) < 2
            return (moving[0], name) if moving and has_room else None
    return None


async def kill_target_of_move(rig: Rig) -> None:
    """Kill a host while a replica of the other one moves there."""
    async with asyncio.timeout(LIMIT_S):
        while (found := await _move(rig)) is None:  # the host may have been killed before, and join again
            await asyncio.sleep(0.5)
    moving, target = found
    order = {"action": "move", "target": moving, "to": target}
    asking = asyncio.create_task(rig.http.post(f"{rig.urls[0]}/admin/cluster", json=order, timeout=60.0))
    await asyncio.sleep(0.3)
    await killed(_host)(rig)
    with contextlib.suppress(httpx.HTTPError):
        print(f"the order to move was answered with {(await asking).status_code}", file=sys.stderr)


FAULTS: dict[str, Fault] = {
    "gateway killed": killed(_gateway),
    "gateway frozen": frozen(_gateway),
    "leader killed": killed(_leader),
    "leader frozen": frozen(_leader),
    "engine killed": kill_engine,
    "engine frozen": freeze_engine,
    "host killed": killed(_host),
    "Redis killed": kill_redis,
    "Redis frozen": freeze_redis,
    "PostgreSQL killed": kill_postgres,
    "PostgreSQL frozen": freeze_postgres,
    "Redis full": _redis_told(("CONFIG", "SET", "maxmemory", "1"), ("CONFIG", "SET", "maxmemory", "0")),
    "Redis is a replica": _redis_told(("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE")),
    "PostgreSQL is a standby": make_postgres_a_standby,
    "leader and Redis killed": both(killed(_leader), kill_redis),
    "host and Redis killed": both(killed(_host), kill_redis),
    "leader and host killed": both(killed(_leader), killed(_host)),
    "gateway and PostgreSQL killed": both(killed(_gateway), kill_postgres),
    "gateway frozen, Redis killed": both(frozen(_gateway), kill_redis),
    "target of a move killed": kill_target_of_move,
    f"{STORE} killed": kill_store,
    f"{STORE} frozen": freeze_store,
}

PARTS = {
    "gateway": node_of(_gateway),
    "leader": node_of(_leader),
    "host": node_of(_host),
    "Redis": node_named("redis"),
    "PostgreSQL": node_named("postgres"),
    STORE: node_named("store"),
}
NETWORK_FAULTS: dict[str, Fault] = {"bad lines": make_lines_bad} | {
    f"{part} {how}": cut(pick, sends=sends, receives=receives)
    for part, pick in PARTS.items()
    for how, sends, receives in (
        ("cut off", False, False),
        ("receives nothing", True, False),
        ("sends nothing", False, True),
    )
}
