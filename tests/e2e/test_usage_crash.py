"""kill -9 of the gateway under load: afterwards the ledger holds every answer that a client received, once."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from penstock.gateway.store.database import Database, sqlite_url
from penstock.gateway.store.tables import usage

from .conftest import RunningServer, start_server

pytestmark = pytest.mark.slow

NUM_CLIENTS = 24
ANSWERS_BEFORE_THE_KILL = 60
PROMPT = "abcdefgh"
LONG_ANSWER = 30_000


@dataclass
class Received:
    """What the clients saw, by request id."""

    complete: dict[str, int] = field(default_factory=dict)  # completion tokens
    cut: set[str] = field(default_factory=set)


async def ask_for_ever(client: httpx.AsyncClient, number: int, received: Received) -> None:
    """Streams and whole answers in turn, until the connection breaks."""
    for turn in range(10_000):
        max_tokens = 5 + (number * 7 + turn * 3) % 200
        body = {"prompt": PROMPT, "max_tokens": max_tokens, "ignore_eos": True, "stream": turn % 2 == 0}
        request_id = None
        try:
            async with client.stream("POST", "/v1/completions", json=body) as response:
                request_id = response.headers["x-request-id"]
                text = "".join([part async for part in response.aiter_text()])
                is_whole = "[DONE]" in text if body["stream"] else json.loads(text)["usage"] is not None
        except (httpx.HTTPError, json.JSONDecodeError):
            if request_id is not None:
                received.cut.add(request_id)
            return
        assert response.status_code == 200
        assert is_whole
        received.complete[request_id] = max_tokens


async def load_until_killed(server: RunningServer, received: Received) -> None:
    target = len(received.complete) + ANSWERS_BEFORE_THE_KILL
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        clients = [
            asyncio.create_task(ask_for_ever(client, number, received)) for number in range(NUM_CLIENTS)
        ]
        while len(received.complete) < target:
            assert not any(task.done() for task in clients), "the server refused or died"
            await asyncio.sleep(0.01)
        # However fast the server is, this answer is under way.
        body = {"prompt": PROMPT, "max_tokens": LONG_ANSWER, "ignore_eos": True, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            await anext(response.aiter_text())
            received.cut.add(response.headers["x-request-id"])
            os.kill(server.process.pid, signal.SIGKILL)
        await asyncio.gather(*clients)
    server.process.wait(timeout=240)


def ledger_rows(data_dir: Path) -> dict[str, Any]:
    database = Database(sqlite_url(data_dir))
    try:
        rows = database.run_now(lambda connection: connection.execute(sa.select(usage)).all())
    finally:
        database.close()
    by_id = {row.request_id: row for row in rows}
    assert len(by_id) == len(rows)
    return by_id


async def test_the_ledger_equals_the_answers_that_clients_received(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    settings = tmp_path / "settings.toml"
    settings.write_text("[prices.models.echo]\ninput = 1\noutput = 2\n")
    arguments = ("echo", "--data-dir", str(data_dir), "--settings", str(settings))
    received = Received()
    for _ in range(2):
        server = start_server(tmp_path, *arguments)
        await load_until_killed(server, received)

    last = start_server(tmp_path, *arguments)
    totals = httpx.get(last.url + "/v1/usage", params={"group_by": ""}).json()["data"][0]
    assert last.stop() == 0
    rows = ledger_rows(data_dir)

    completed = {name: row for name, row in rows.items() if row.status == "completed"}
    interrupted = {name for name, row in rows.items() if row.status == "interrupted"}
    assert {row.status for row in rows.values()} <= {"completed", "cancelled", "interrupted"}
    assert received.complete.keys() <= completed.keys(), (
        "an answer that a client received is not in the ledger"
    )
    assert interrupted, "nothing was running when the gateway was killed"
    assert received.cut <= rows.keys(), "a request that had begun left no trace"
    for name, max_tokens in received.complete.items():
        row = completed[name]
        assert (row.prompt_tokens, row.completion_tokens) == (len(PROMPT), max_tokens)
        assert row.cost_picodollars == (len(PROMPT) + 2 * max_tokens) * 10**6
    # Beyond those, only answers that were whole but still on their way when the process died.
    on_their_way = completed.keys() - received.complete.keys()
    assert len(on_their_way) <= 2 * NUM_CLIENTS
    assert totals["requests"]["total"] == len(rows)
    assert totals["requests"]["interrupted"] == len(interrupted)
    assert os.listdir(data_dir / "usage-journal") == ["claim.lock"]
