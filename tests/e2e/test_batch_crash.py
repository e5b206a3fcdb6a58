"""kill -9 and shutdown of the gateway in mid-batch: no line is lost, none is repeated, and each is paid for once."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import openai
import pytest
import sqlalchemy as sa

from penstock.gateway.store.database import Database, sqlite_url
from penstock.gateway.store.tables import usage

from .conftest import RunningServer, start_server

pytestmark = pytest.mark.slow

NUM_LINES = 600
TOKENS_EACH = 48


def line(number: int) -> str:
    body = {"model": "echo", "prompt": f"line {number}.", "max_tokens": TOKENS_EACH, "ignore_eos": True}
    return json.dumps({"custom_id": f"c{number}", "method": "POST", "url": "/v1/completions", "body": body})


def sdk_of(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")


def wait_for_lines(sdk: openai.OpenAI, batch_id: str, count: int) -> openai.types.Batch:
    deadline = time.monotonic() + 240
    while True:
        batch = sdk.batches.retrieve(batch_id)
        assert batch.request_counts is not None
        if batch.request_counts.completed >= count or batch.status == "completed":
            return batch
        assert time.monotonic() < deadline, batch
        time.sleep(0.02)


def test_no_line_is_lost_or_repeated(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    settings = tmp_path / "settings.toml"
    settings.write_text("[prices.models.echo]\ninput = 1\noutput = 2\n")  # what has a price has a ledger
    arguments = ("echo", "--data-dir", str(data_dir), "--settings", str(settings))
    server = start_server(tmp_path, *arguments)
    sdk = sdk_of(server)
    lines = "\n".join(line(number) for number in range(NUM_LINES))
    file = sdk.files.create(file=("in.jsonl", lines.encode()), purpose="batch")
    batch_id = sdk.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    ).id
    # Early, so that the rest takes longer than a busy machine may hold up the test before it kills the server.
    for fraction, number in ((0.05, signal.SIGKILL), (0.15, signal.SIGTERM), (0.25, signal.SIGKILL)):
        batch = wait_for_lines(sdk_of(server), batch_id, int(NUM_LINES * fraction))
        assert batch.status == "in_progress", "it was over before it could be killed"
        os.kill(server.process.pid, number)
        server.process.wait(timeout=240)
        server = start_server(tmp_path, *arguments)

    sdk = sdk_of(server)
    batch = wait_for_lines(sdk, batch_id, NUM_LINES)
    deadline = time.monotonic() + 240
    while (batch := sdk.batches.retrieve(batch_id)).status != "completed":
        assert time.monotonic() < deadline, batch
        time.sleep(0.05)
    assert batch.error_file_id is None
    assert batch.output_file_id is not None
    results = [json.loads(text) for text in sdk.files.content(batch.output_file_id).text.splitlines()]
    assert server.stop() == 0

    assert [result["custom_id"] for result in results] == [f"c{number}" for number in range(NUM_LINES)]
    for number, result in enumerate(results):
        (choice,) = result["response"]["body"]["choices"]
        assert choice["text"].startswith(f"line {number}.line {number}.")
    database = Database(sqlite_url(data_dir))
    rows = database.run_now(lambda connection: connection.execute(sa.select(usage)).all())
    database.close()
    assert {row.status for row in rows} == {"completed"}
    assert {row.request_id for row in rows} == {f"{batch_id}-{number + 1}" for number in range(NUM_LINES)}
    assert sum(row.completion_tokens for row in rows) == NUM_LINES * TOKENS_EACH
