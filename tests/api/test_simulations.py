"""/admin/simulations: who may use it, what it refuses, and that a reader who goes ends the run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest_asyncio

from penstock.api.app import create_app
from penstock.api.console import SimulationEndpoints
from penstock.core.gateway_config import ServerConfig
from penstock.core.identity import Scope
from penstock.gateway.simulations import SimulationChoices, SimulationOrder, Simulations
from tests.api.bounded_server import bounded_server
from tests.api.tenant_server import TenantServer
from tests.gateway.fake_engine import FakeEngine, until

CHOICES = SimulationChoices(models=("llama-3.1-8b",), hardware=("h200",), formats=("bfloat16",))
PATH = "/admin/simulations"


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[TenantServer]:
    server = TenantServer(tmp_path, static_key="root")
    routes = SimulationEndpoints(Simulations(CHOICES)).routes()
    server.app = create_app(server.gateway, ServerConfig(), tenants=server.tenants, more_routes=routes)
    yield server
    await server.close()


async def test_only_administrators_simulate(server: TenantServer) -> None:
    issued = await server.make_key(Scope.INFERENCE)
    async with server.client(issued.secret) as client:
        assert (await client.get(PATH)).status_code == 403
        assert (await client.post(PATH, json={})).status_code == 403
    async with server.client() as client:
        assert (await client.post(PATH, json={})).status_code == 401


async def test_choices_and_a_run(server: TenantServer) -> None:
    async with server.client("root") as client:
        assert (await client.get(PATH)).json()["models"] == ["llama-3.1-8b"]
        order = {"requests": 10, "input": "100", "output": "5", "replicas": [1]}
        (fleet,) = (await client.post(PATH, json=order)).json()["fleets"]
        assert (fleet["replicas"], fleet["num_answered"]) == (1, 10)


async def test_bad_orders_are_sentences(server: TenantServer) -> None:
    async with server.client("root") as client:
        for order in ({"requests": 10**7}, {"replicas": "many"}, {"colour": 1}, {"rate": None}, []):
            refused = await client.post(PATH, json=order)
            assert refused.status_code == 400, order
            assert refused.json()["error"]["message"]


class Endless(Simulations):
    """A simulation that ends only when it is cancelled."""

    def __init__(self) -> None:
        super().__init__(CHOICES)
        self.states: list[str] = []

    async def run(self, order: SimulationOrder) -> Any:
        self.states.append("began")
        try:
            await asyncio.Event().wait()
        finally:
            self.states.append("ended")


async def test_a_reader_that_goes_ends_the_run() -> None:
    endless = Endless()
    routes = SimulationEndpoints(endless).routes()
    with bounded_server(FakeEngine(), more_routes=lambda gateway: routes) as served:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{served.port}") as client:
            asking = asyncio.create_task(client.post(PATH, json={}))
            await until(lambda: endless.states)
            asking.cancel()
        await until(lambda: endless.states == ["began", "ended"])
