"""Gateway processes that tell each other where they sent prompts. Here each process is a pool."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from penstock.cluster.external.placements import Placements
from penstock.cluster.external.pool import ExternalPool
from penstock.cluster.external.server import ExternalServer
from penstock.core.clock import VirtualClock
from penstock.core.config import ExternalServerConfig
from penstock.router.index import MAX_TEXT_CHUNKS
from tests.cluster.external.openai_server import OpenAIServer, serving, text_chunks
from tests.cluster.external.test_pool import ask, call
from tests.loop_time import settle

NUM_PREFIXES = 16


@contextlib.asynccontextmanager
async def processes(
    servers: list[OpenAIServer], folder: Path, *, max_concurrent: int | None = None
) -> AsyncIterator[list[ExternalPool]]:
    """Pools whose clock stands still: by theirs, no server answers slowly."""
    clock = VirtualClock()
    async with serving(*servers), contextlib.AsyncExitStack() as stack:
        pools = []
        for number in range(2):
            members = [
                ExternalServer(ExternalServerConfig(url=server.url, max_concurrent=max_concurrent))
                for server in servers
            ]
            pool = ExternalPool(members, num_processes=2, clock=clock)
            stack.push_async_callback(pool.close)
            await pool.probe()
            placements = Placements(pool, folder, 2, number)
            placements.start()
            stack.callback(placements.close)
            pools.append(pool)
        yield pools


async def num_moved(servers: list[OpenAIServer], pools: list[ExternalPool]) -> int:
    """How many prefixes went to two servers, when each was sent by both processes."""
    number = 0
    for prefix in range(NUM_PREFIXES):
        # The second process begins with the even ones, so that equal rules make no equal choices.
        other = 2 * prefix % NUM_PREFIXES + (2 * prefix >= NUM_PREFIXES)
        for pool, which in ((pools[0], prefix), (pools[1], other)):
            number += 1
            await ask(pool, call(number, f"the prefix {which} " * 40))
            await settle()  # the other process hears of it
    sent = [{body["messages"][0]["content"] for body in server.bodies} for server in servers]
    return len(sent[0] & sent[1])


async def test_a_prefix_that_another_process_sent_goes_to_the_same_server(tmp_path: Path) -> None:
    servers = [OpenAIServer(), OpenAIServer()]
    async with processes(servers, tmp_path) as pools:
        assert await num_moved(servers, pools) <= 2  # a busier server may have one copied
    assert all(server.bodies for server in servers)


async def test_long_prompts_and_processes_that_are_gone_harm_nobody(tmp_path: Path) -> None:
    servers = [OpenAIServer(), OpenAIServer()]
    long = "a long prompt of many words. " * (64 * 2 * MAX_TEXT_CHUNKS // 29)
    async with processes(servers, tmp_path) as pools:
        assert await ask(pools[0], call(1, long)) == "Hello"
        await settle()
        assert await ask(pools[1], call(2, long)) == "Hello"
        assert sorted(len(server.bodies) for server in servers) == [0, 2]
        (tmp_path / "placed-1.sock").unlink()
        assert await ask(pools[0], call(3, "another prompt " * 40)) == "Hello"


async def test_processes_share_what_a_server_takes_at_a_time(tmp_path: Path) -> None:
    most = 0

    def answer(body: dict[str, Any]) -> list[Any]:
        nonlocal most
        most = max(most, sum(pool.views()[0].num_running for pool in pools))
        return [0.02, *text_chunks("ok")]

    server = OpenAIServer(script=answer)
    async with processes([server], tmp_path, max_concurrent=4) as pools:
        asked = [ask(pools[number % 2], call(number)) for number in range(16)]
        assert await asyncio.gather(*asked) == ["ok"] * 16
    assert most == 4
