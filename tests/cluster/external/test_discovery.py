"""Servers that come and go: by name, and by what the tables say."""

from __future__ import annotations

import asyncio

import pytest

from penstock.cluster.external.discovery import Discovery, look_up
from penstock.cluster.external.pool import ExternalPool
from penstock.core.config import ExternalServerConfig
from penstock.core.errors import ConfigError, EngineUnavailable, ModelNotFound
from tests.cluster.external.openai_server import OpenAIServer, serving
from tests.cluster.external.test_pool import ask, call

BEHIND_A_NAME = ExternalServerConfig(url="http://pods.example:8000", discover="dns", region="eu")


class Names:
    """A DNS that a test sets."""

    def __init__(self, *addresses: str) -> None:
        self.addresses: list[str] | None = list(addresses)

    async def look_up(self, host: str, port: int) -> list[str]:
        assert (host, port) == ("pods.example", 8000)
        if self.addresses is None:
            raise OSError("no name server")
        return self.addresses


async def test_each_address_is_a_server() -> None:
    discovery = Discovery(Names("10.0.0.1", "10.0.0.2").look_up)
    plain = ExternalServerConfig(url="http://other.example")
    one, two, other = await discovery.servers([BEHIND_A_NAME, plain])
    assert (one.address, one.name, one.region) == ("10.0.0.1", "pods.example:8000/10.0.0.1", "eu")
    assert two.address == "10.0.0.2"
    assert other == plain


async def test_a_name_server_that_is_away_changes_nothing() -> None:
    names = Names("10.0.0.1")
    discovery = Discovery(names.look_up)
    before = await discovery.servers([BEHIND_A_NAME])
    names.addresses = None
    assert await discovery.servers([BEHIND_A_NAME]) == before
    names.addresses = ["10.0.0.3"]
    (server,) = await discovery.servers([BEHIND_A_NAME])
    assert server.address == "10.0.0.3"


async def test_addresses_of_this_machine() -> None:
    assert set(await look_up("localhost", 80)) & {"127.0.0.1", "::1"}


async def test_requests_go_to_the_address_with_the_name_of_the_url() -> None:
    server = OpenAIServer()
    async with serving(server):
        port = server.url.rpartition(":")[2]
        config = ExternalServerConfig(url=f"http://localhost:{port}", address="127.0.0.1")
        pool = ExternalPool([])
        await pool.replace([config])
        assert await ask(pool, call(0, "hi"))
        await pool.close()


async def test_servers_are_replaced_while_requests_run() -> None:
    first, second = OpenAIServer(), OpenAIServer()
    async with serving(first, second):
        old, new = (ExternalServerConfig(url=server.url) for server in (first, second))
        pool = ExternalPool([])
        await pool.replace([old])
        may_answer = asyncio.Event()
        first.script = lambda body: [may_answer, *OpenAIServer().script(body)]
        asking = asyncio.create_task(ask(pool, call(0, "long")))
        while not first.bodies:
            await asyncio.sleep(0.01)
        await pool.replace([new])
        assert [view.name for view in pool.views()] == [second.url.removeprefix("http://")]
        assert await ask(pool, call(1, "next"))
        assert (len(first.bodies), len(second.bodies)) == (1, 1)
        may_answer.set()
        assert await asking, "what ran at the old server has come to its end"
        await pool.replace([])
        with pytest.raises(ModelNotFound):
            await ask(pool, call(2, "nobody"))
        await pool.close()


async def test_a_server_that_stays_keeps_its_state() -> None:
    server = OpenAIServer()
    async with serving(server):
        config = ExternalServerConfig(url=server.url)
        pool = ExternalPool([])
        await pool.replace([config])
        await ask(pool, call(0, "hi"))
        await pool.replace([config])
        assert pool.views()[0].outcomes == {"served": 1}
        with pytest.raises(ConfigError):
            await pool.replace([ExternalServerConfig(url="ftp://nowhere")])
        assert pool.views()[0].outcomes == {"served": 1}
        await pool.close()


async def test_a_name_without_servers_keeps_its_models_until_its_table_goes() -> None:
    server = OpenAIServer()
    async with serving(server):
        table = ExternalServerConfig(url=server.url, discover="srv")
        found = ExternalServerConfig(url=server.url, address="127.0.0.1")
        pool = ExternalPool([])
        await pool.replace([found], [table])
        await pool.replace([], [table])
        await pool.probe()
        assert "theirs" in pool.models
        with pytest.raises(EngineUnavailable, match="No server of 'theirs'"):
            await ask(pool)
        await pool.replace([found], [table])
        assert await ask(pool)
        await pool.replace([], [table])
        await pool.replace([], [])
        assert not pool.models
        with pytest.raises(ModelNotFound):
            await ask(pool)
        await pool.close()
