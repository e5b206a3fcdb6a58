"""The requests of the benchmark of routing before external servers, and what it reads from the servers."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from bench.external_routing import SYSTEM_CHARS, counted, prompts
from tests.cluster.external.openai_server import listening


def test_tenants_share_their_own_beginning() -> None:
    bodies: list[dict[str, Any]] = prompts(tenants=3, requests=60, seed=1)
    systems = Counter(body["messages"][0]["content"] for body in bodies)
    assert len(systems) == 3
    assert {len(system) for system in systems} == {SYSTEM_CHARS}
    assert len({body["messages"][1]["content"] for body in bodies}) == 60
    assert prompts(3, 60, seed=1) == bodies


@pytest.mark.parametrize("what", ["hits", "queries"])
async def test_counters_of_all_label_sets_are_added_up(what: str) -> None:
    page = "".join(f'vllm:prefix_cache_{what}_total{{model="{name}"}} {name}.0\n' for name in (3, 4))

    async def metrics(request: object) -> PlainTextResponse:
        return PlainTextResponse(f"# TYPE vllm:prefix_cache_{what} counter\n{page}vllm:other_total 9\n")

    async with listening(Starlette(routes=[Route("/metrics", metrics)])) as url:
        assert await asyncio.to_thread(counted, [url, url], what) == [7.0, 7.0]
