"""What faults cost a shared fleet of real processes: `python -m bench.shared_faults [--streams 24]`.

Starts Redis, PostgreSQL, two hosts of engines, two gateways and two control processes on loopback. Clients stream
answers, one after the other, while one part is killed or frozen for 20 s. Every answer is compared with the one that
is right (the model echoes its prompt), and every answered request is looked up in the ledger. Prints a table in
Markdown; exits with 1 if a token was lost or repeated, or an answer was billed twice or never.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from sqlalchemy import select

from penstock.cluster.transport import free_port
from penstock.gateway.store.database import Database
from penstock.gateway.store.tables import usage
from tests.gateway.ratelimits.redis_server import RedisServer, running_redis
from tests.gateway.store.postgres_server import PostgresServer, running_postgres

FREEZE_S = 20.0
AWAY_S = 5.0  # before a killed part is started again
SETTLE_S = 4.0  # of undisturbed streams before the fault, and after it
LIMIT_S = 300.0  # for everything to be well again
MAX_TOKENS = 400
HEADS = (
    "fault",
    "answered",
    "asked again",
    "refused",
    "wrong answers",
    "billed never, wrongly",
    "longest pause",
    "all well",
)
ADMIN = "an-admin-key-for-this-run-only"


@dataclass(slots=True)
class Process:
    command: list[str]
    environment: dict[str, str]
    log: Path
    running: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            command = [sys.executable, "-m", "penstock.main", *self.command]
            self.running = subprocess.Popen(command, stdout=log, stderr=log, env=self.environment)

    def signal(self, number: signal.Signals) -> None:
        assert self.running is not None
        self.running.send_signal(number)
        if number is signal.SIGKILL:
            self.running.wait()


@dataclass(slots=True)
class Tally:
    answered: list[str] = field(default_factory=list)  # request ids
    wrong: int = 0
    reconnected: int = 0
    refused: int = 0  # answered with an error, then asked again
    longest_pause_s: float = 0.0


class Rig:
    def __init__(self, folder: Path, redis: RedisServer, postgres: PostgresServer) -> None:
        self.redis, self.postgres = redis, postgres
        environment = {
            **os.environ,
            "PENSTOCK_REGISTRY": redis.url,
            "PENSTOCK_REDIS_URL": redis.url,
            "PENSTOCK_DATABASE_URL": postgres.url,
            "PENSTOCK_JOIN_TOKEN": "a token for this run on loopback",
            "PENSTOCK_DATA_DIR": str(folder),
        }
        self.ports = [free_port("127.0.0.1") for _ in range(2)]

        def process(name: str, *command: str) -> Process:
            return Process(list(command), environment, folder / f"{name}.log")

        self.engines = [process(f"engine-{n}", "engine", "echo", "--max-replicas", "2") for n in range(2)]
        self.gateways = [
            process(f"gateway-{n}", "gateway", "--port", str(port), "--api-key", ADMIN)
            for n, port in enumerate(self.ports)
        ]
        self.controls = [process(f"control-{n}", "control", "--min-replicas", "2") for n in range(2)]
        self.database = Database(postgres.url)
        self.http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {ADMIN}"},
            timeout=httpx.Timeout(FREEZE_S + 30, connect=2.0),
            limits=httpx.Limits(max_connections=200, max_keepalive_connections=0),
        )

    @property
    def processes(self) -> list[Process]:
        return [*self.engines, *self.controls, *self.gateways]

    def url(self, number: int) -> str:
        return f"http://127.0.0.1:{self.ports[number]}"

    async def view(self, number: int = 0) -> dict[str, object] | None:
        with contextlib.suppress(httpx.HTTPError, ValueError):
            answer = await self.http.get(f"{self.url(number)}/admin/cluster", timeout=10.0)
            if answer.status_code == 200:
                return dict(answer.json())
        return None

    async def until_well(self) -> None:
        """Wait until there are a leader, two ready replicas, and two gateways that follow and take requests."""
        async with asyncio.timeout(LIMIT_S):
            while not (await self._is_well(0) and await self._is_well(1)):
                await asyncio.sleep(0.1)

    async def _is_well(self, number: int) -> bool:
        view = await self.view(number)
        if view is None or view["leader"] is None:
            return False
        ready = [each for each in view["replicas"] if each["state"] == "ready"]  # type: ignore[attr-defined]
        return len(ready) >= 2 and len(view["gateways"]) == 2  # type: ignore[arg-type]

    async def leader(self) -> Process:
        view = await self.view()
        assert view is not None
        name: str = view["leader"]["name"]  # type: ignore[index]
        return next(each for each in self.controls if f"{name}: ready" in each.log.read_text())


async def stream(rig: Rig, number: int, client: int, over: asyncio.Event, tally: Tally) -> None:
    """One client: asks again when it is answered, and asks the other gateway when its own is gone."""
    gateway, asked = client % 2, 0
    while not over.is_set():
        prompt = f"client {client} of fault {number} asks {asked}: "
        right = (prompt * (MAX_TOKENS // len(prompt) + 1))[:MAX_TOKENS]
        body = {"model": "echo", "prompt": prompt, "max_tokens": MAX_TOKENS, "stream": True}
        text, last_s = "", time.monotonic()
        try:
            async with rig.http.stream("POST", f"{rig.url(gateway)}/v1/completions", json=body) as answer:
                if answer.status_code != 200:
                    tally.refused += 1
                    await asyncio.sleep(0.5)
                    continue
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        event = json.loads(line[6:])
                        text += "".join(choice["text"] for choice in event.get("choices", ()))
                    tally.longest_pause_s = max(tally.longest_pause_s, time.monotonic() - last_s)
                    last_s = time.monotonic()
                tally.answered.append(answer.headers["x-request-id"])
                tally.wrong += text != right
                asked += 1
        except httpx.HTTPError:
            tally.reconnected += 1
            gateway = 1 - gateway
            await asyncio.sleep(0.1)


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
        await asyncio.sleep(FREEZE_S)
        process.signal(signal.SIGCONT)

    return strike


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
    await asyncio.sleep(FREEZE_S)
    for pid in pids:  # its host has killed and replaced it, unless it was patient
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


async def kill_redis(rig: Rig) -> None:
    rig.redis.stop()
    await asyncio.sleep(AWAY_S)
    rig.redis.start()  # without its memory


async def freeze_redis(rig: Rig) -> None:
    rig.redis.pause()
    await asyncio.sleep(FREEZE_S)
    rig.redis.resume()


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
    for number, pause_s in ((signal.SIGSTOP, FREEZE_S), (signal.SIGCONT, 0.0)):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        await asyncio.sleep(pause_s)


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
}


@dataclass(frozen=True, slots=True)
class Row:
    fault: str
    tally: Tally
    well_after_s: float
    unbilled: int
    wrongly_billed: int

    @property
    def is_good(self) -> bool:
        return not (self.tally.wrong or self.unbilled or self.wrongly_billed)


async def measure(rig: Rig, number: int, name: str, num_streams: int) -> Row:
    over, tally = asyncio.Event(), Tally()
    clients = [asyncio.create_task(stream(rig, number, client, over, tally)) for client in range(num_streams)]
    await asyncio.sleep(SETTLE_S)
    struck_s = time.monotonic()
    await FAULTS[name](rig)
    await rig.until_well()
    well_after_s = time.monotonic() - struck_s
    await asyncio.sleep(SETTLE_S)
    over.set()
    await asyncio.gather(*clients)
    billed = await _billed(rig, tally.answered)
    wrongly = sum(tokens != MAX_TOKENS for tokens in billed.values())
    return Row(name, tally, well_after_s, len(tally.answered) - len(billed), wrongly)


async def _billed(rig: Rig, request_ids: list[str]) -> dict[str, int]:
    """Return the tokens billed by request id. The ledger writes a moment after the answer."""
    wanted = set(request_ids)
    deadline_s = time.monotonic() + 15.0
    while True:
        rows = await rig.database.run(
            lambda connection: list(
                connection.execute(select(usage.c.request_id, usage.c.completion_tokens))
            ),
            reads_only=True,
        )
        found = {row[0]: row[1] for row in rows if row[0] in wanted}
        if len(found) == len(wanted) or time.monotonic() > deadline_s:
            return found
        await asyncio.sleep(0.5)


@contextlib.contextmanager
def fleet(folder: Path) -> Iterator[Rig]:
    with running_redis() as redis, running_postgres() as postgres:
        rig = Rig(folder, redis, postgres)
        for process in rig.processes:
            process.start()
        try:
            yield rig
        finally:
            for process in rig.processes:
                if process.running is not None:
                    process.running.send_signal(signal.SIGCONT)
                    process.running.kill()
                    process.running.wait()
            rig.database.close()


async def run(folder: Path, names: list[str], num_streams: int) -> list[Row]:
    rows = []
    print("| " + " | ".join(HEADS) + " |")
    print("|---" * len(HEADS) + "|")
    with fleet(folder) as rig:
        await rig.until_well()
        for number, name in enumerate(names):
            row = await measure(rig, number, name, num_streams)
            tally = row.tally
            cells = (
                name,
                len(tally.answered),
                tally.reconnected,
                tally.refused,
                tally.wrong,
                f"{row.unbilled}, {row.wrongly_billed}",
                f"{tally.longest_pause_s:.1f} s",
                f"after {row.well_after_s:.1f} s",
            )
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)
            rows.append(row)
        await rig.http.aclose()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=24)
    parser.add_argument("--only", nargs="*", choices=list(FAULTS), default=list(FAULTS), metavar="FAULT")
    parser.add_argument("--logs", type=Path, help="folder to keep the logs of all processes in")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        rows = asyncio.run(run(folder, options.only, options.streams))
    sys.exit(0 if all(row.is_good for row in rows) else 1)


if __name__ == "__main__":
    main()
