"""The fleet of `shared_faults`: Redis, PostgreSQL, two hosts of engines, two gateways and two control processes.

All of them are real processes. With a network (`network_namespaces`), each is in a namespace of its own, with an
address of its own; without, all are on loopback.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from bench.network_namespaces import Network, Node
from penstock.cluster.host_record import JoinTokens
from penstock.cluster.leadership import opened
from penstock.cluster.redis_registry import RedisRegistry
from penstock.cluster.registry import RegistryError
from penstock.core.machine import free_port
from penstock.gateway.store.database import Database
from tests.gateway.blobs.object_store import BUCKET, ObjectStore, running_store
from tests.gateway.ratelimits.redis_server import RedisServer, running_redis
from tests.gateway.store.postgres_server import PostgresServer, running_postgres

ROOT = Path(__file__).parents[1]
LOOPBACK = "127.0.0.1"
LIMIT_S = 300.0  # for everything to be well again
REQUEST_TIMEOUT_S = 60.0  # without a byte
CLOCKS_APART = ("+7m", "-3m", "-10m", "+20m", "+15m", "-1h")  # of the parts, in turn
ADMIN = "an-admin-key-for-this-run-only"
JOIN_TOKEN = "a token for this run on one machine"


@dataclass(slots=True)
class Process:
    command: list[str]
    environment: dict[str, str]
    log: Path
    node: Node | None
    files: Path  # the folder of the package
    running: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        prefix = [] if self.node is None else self.node.prefix
        with self.log.open("ab") as log:
            command = [*prefix, sys.executable, "-m", "penstock.main", *self.command]
            environment = {**self.environment, "PYTHONPATH": str(self.files)}
            self.running = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=self.files)

    def signal(self, number: signal.Signals) -> None:
        assert self.running is not None
        self.running.send_signal(number)
        if number is signal.SIGKILL:
            self.running.wait()


class Rig:
    def __init__(
        self,
        folder: Path,
        redis: RedisServer,
        postgres: PostgresServer,
        nodes: dict[str, Node],
        files: Path = ROOT,
        gateway_options: Sequence[str] = (),
        store: ObjectStore | None = None,
        clock_library: Path | None = None,
    ) -> None:
        """`files` is the folder of the package, perhaps of another version. Files of clients are in `store`, if there
        is one. With libfaketime as the `clock_library`, the clocks of the parts are apart."""
        self.redis, self.postgres, self.nodes, self.store = redis, postgres, nodes, store
        environment = {
            **os.environ,
            "PENSTOCK_REGISTRY": redis.url,
            "PENSTOCK_REDIS_URL": redis.url,
            "PENSTOCK_DATABASE_URL": postgres.url,
            "PENSTOCK_JOIN_TOKEN": JOIN_TOKEN,
            "PENSTOCK_DATA_DIR": str(folder),
        }
        if store is not None:
            environment |= {
                "PENSTOCK_FILES_URL": f"s3://{BUCKET}/files",
                "AWS_ENDPOINT_URL": store.endpoint,
                "AWS_ACCESS_KEY_ID": "id",
                "AWS_SECRET_ACCESS_KEY": "secret",
            }

        clocks = itertools.cycle(CLOCKS_APART)

        def process(name: str, *command: str) -> Process:
            host = nodes[name].host if name in nodes else LOOPBACK
            words = [host if word == "HOST" else word for word in command]
            own = environment
            if clock_library is not None:
                clock = {"LD_PRELOAD": str(clock_library), "FAKETIME": next(clocks)}
                own = environment | clock | {"FAKETIME_DONT_FAKE_MONOTONIC": "1", "FAKETIME_NO_CACHE": "1"}
            return Process(words, own, folder / f"{name}.log", nodes.get(name), files)

        self.fault_s = 20.0
        self.pause_s = 0.0  # of a client between two answers
        self.is_ready = [True, True]  # of the gateways, as a load balancer sees them
        self.started: list[Process] = []  # in place of others
        self.urls: list[str] = []
        self.engines, self.gateways, self.controls = [], [], []
        for number in range(2):
            gateway = f"gateway-{number}"
            port = free_port(LOOPBACK)
            host = nodes[gateway].host if nodes else LOOPBACK
            self.urls.append(f"http://{host}:{port}")
            options = ["--host", "HOST", "--port", str(port), "--api-key", ADMIN, *gateway_options]
            self.gateways.append(process(gateway, "gateway", *options))
            options = ["--engine-host", "HOST", "--max-replicas", "2"]
            self.engines.append(process(f"engine-{number}", "engine", "echo", *options))
            options = ["--control-host", "HOST", "--min-replicas", "2"]
            self.controls.append(process(f"control-{number}", "control", *options))
        self.database = Database(postgres.url)
        self.http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {ADMIN}"},
            timeout=httpx.Timeout(REQUEST_TIMEOUT_S, connect=10.0),
            limits=httpx.Limits(max_connections=200, max_keepalive_connections=0),
        )

    @property
    def processes(self) -> list[Process]:
        return [*self.engines, *self.controls, *self.gateways, *self.started]

    async def view(self, number: int = 0) -> dict[str, object] | None:
        with contextlib.suppress(httpx.HTTPError, ValueError):
            answer = await self.http.get(f"{self.urls[number]}/admin/cluster", timeout=10.0)
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


class EpochWatch:
    """Reads the documents of leaders again and again. A falling epoch means that a leader wrote after its time."""

    def __init__(self, rig: Rig) -> None:
        self._registry = RedisRegistry(rig.redis.url)
        self._tokens = JoinTokens.parse(JOIN_TOKEN)
        self._latest: dict[str, int] = {}
        self.num_late = 0

    async def keep_looking(self) -> None:
        while True:
            with contextlib.suppress(RegistryError):
                for name, data in (await self._registry.documents()).items():
                    epoch = opened(name, data, self._tokens).epoch
                    self.num_late += epoch < self._latest.get(name, 0)
                    self._latest[name] = epoch
            await asyncio.sleep(0.1)


NAMES = [f"{role}-{number}" for role in ("gateway", "engine", "control") for number in range(2)]


@contextlib.contextmanager
def fleet(
    folder: Path,
    network: Network | None = None,
    *,
    files: Path = ROOT,
    gateway_options: Sequence[str] = (),
    has_store: bool = False,
    clock_library: Path | None = None,
) -> Iterator[Rig]:
    names = [*NAMES, "redis", "postgres", *(["store"] if has_store else [])]
    nodes = {} if network is None else {name: network.node(name) for name in names}
    with contextlib.ExitStack() as stack:
        if network is None:
            redis = stack.enter_context(running_redis())
            postgres = stack.enter_context(running_postgres())
        else:
            redis = stack.enter_context(running_redis(nodes["redis"].host, nodes["redis"].prefix))
            postgres = stack.enter_context(running_postgres(nodes["postgres"].host, nodes["postgres"].file))
        store = None
        if has_store:
            where = (nodes["store"].host, nodes["store"].prefix) if nodes else ()
            store = stack.enter_context(running_store(*where))
        rig = Rig(folder, redis, postgres, nodes, files, gateway_options, store, clock_library)
        for process in rig.processes:
            process.start()
        try:
            yield rig
        finally:
            for node in nodes.values():
                node.join()
            for process in rig.processes:
                if process.running is not None:
                    process.running.send_signal(signal.SIGCONT)
                    process.running.kill()
                    process.running.wait()
            rig.database.close()
