"""What batches store counts in the quota of their workspace, and does not stay for ever."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from sqlalchemy import Connection, func, select

from penstock.gateway.batches import store as batch_store
from penstock.gateway.blobs.blobs import FileFolder
from penstock.gateway.files import FileStore
from penstock.gateway.store import tables
from penstock.gateway.store.database import Database
from tests.api.stored_work import ServedWork, serving_work
from tests.api.test_files_and_batches_sdk import (
    HeldEngine,
    chat_line,
    message_request,
    read_lines,
    start,
    until,
    until_ended,
    until_over,
    upload,
)
from tests.gateway.fake_engine import FakeEngine, script_text


def files_counted(served: ServedWork) -> dict[str, int]:
    """Bytes in the quota of all workspaces, by purpose."""

    def read(connection: Connection) -> dict[str, int]:
        columns = tables.files.c.purpose, func.sum(tables.files.c.num_bytes)
        return {
            row[0]: row[1] for row in connection.execute(select(*columns).group_by(tables.files.c.purpose))
        }

    return served.work.files.database.run_now(read)


def test_message_batches_count_in_the_quota_until_they_are_deleted(tmp_path: Path) -> None:
    """They could else fill the disk: each batch is stored, and so are its results."""
    engine = HeldEngine()
    with serving_work(engine, tmp_path, max_workspace_bytes=300) as served:
        sdk = served.anthropic()
        long = message_request("a", system="x" * 100)
        running = sdk.messages.batches.create(requests=[long])
        assert files_counted(served)["batch_input"] > 100
        with pytest.raises(anthropic.APIStatusError, match="more than the 300 bytes") as refused:
            sdk.messages.batches.create(requests=[long])
        assert refused.value.status_code == 413
        with pytest.raises(openai.APIStatusError, match="more than the 300 bytes"):
            served.openai().files.create(file=b"x" * 250, purpose="batch")
        served.anthropic("w2").messages.batches.create(requests=[message_request("a")])
        until(lambda: len(engine.added), lambda count: count == 2)
        engine.release()
        until_ended(sdk, running.id)
        until(lambda: files_counted(served), lambda counted: "batch_input" not in counted)
        results = (tmp_path / "files" / f"{running.id}-results").stat().st_size
        assert files_counted(served)["batch_results"] > results > 0
        assert list(served.openai().files.list()) == []
        sdk.messages.batches.delete(running.id)
        assert 0 < files_counted(served)["batch_results"] < 2 * results
        # The results of the other workspace are left.
        until(lambda: list((tmp_path / "files").iterdir()), lambda found: len(found) == 1)


async def test_results_of_message_batches_are_removed_after_29_days(tmp_path: Path) -> None:
    now = time.time()
    with serving_work(FakeEngine(script_text("fine")), tmp_path) as served:
        batch = served.anthropic().messages.batches.create(requests=[message_request("a")])
        until_ended(served.anthropic(), batch.id)
        until(lambda: list((tmp_path / "files").glob("*-input")), lambda found: not found)
    for days, left in ((28, 1), (30, 0)):
        later = now + days * 86_400
        database = Database(f"sqlite:///{tmp_path / 'penstock.db'}")
        blobs = FileFolder(tmp_path / "files")
        await FileStore(database, blobs, wall_clock=partial(float, later)).remove_expired()
        assert len(list((tmp_path / "files").iterdir())) == left
        database.close()


def test_results_of_running_batches_are_bounded(tmp_path: Path) -> None:
    """The lines of one batch can have results of any size, and run for a day."""
    with serving_work(FakeEngine(script_text("x" * 200)), tmp_path, max_workspace_bytes=17_000) as served:
        sdk = served.openai()
        batch = until_over(sdk, start(sdk, [chat_line(f"c{number}") for number in range(100)]).id)
        assert batch.request_counts is not None
        assert batch.request_counts.completed + batch.request_counts.failed == 100
        assert 10 < batch.request_counts.completed < 80
        assert len(served.engine.added) == batch.request_counts.completed, (
            "no line runs whose result has no room"
        )
        (sentence,) = {
            line["response"]["body"]["error"]["message"] for line in read_lines(sdk, batch.error_file_id)
        }
        assert "results of the workspace's running batches take the 17000 bytes" in sentence
        held = served.work.runner._context.result_bytes._num_bytes
        until(lambda: dict(held), lambda found: not found)  # a batch that is over gives its room back


def test_a_batch_begins_only_where_its_workspace_has_room(tmp_path: Path) -> None:
    """Its output may still take more than the quota, but no batch after that."""
    with serving_work(FakeEngine(script_text("fine")), tmp_path, max_workspace_bytes=1000) as served:
        sdk = served.openai()
        file_id = upload(sdk, [chat_line(f"c{number}") for number in range(5)])
        ask: Any = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        until_over(sdk, sdk.batches.create(**ask).id)
        with pytest.raises(openai.APIStatusError, match="more than the 1000 bytes"):
            sdk.batches.create(**ask)
        until(lambda: list((tmp_path / "files").glob("*-input")), lambda found: not found)


def test_a_workspace_has_so_many_files_at_most_also_empty_ones(tmp_path: Path) -> None:
    """Empty files take no bytes, but a row and a name on the disk each."""
    with serving_work(FakeEngine(script_text("fine")), tmp_path, max_workspace_files=3) as served:
        sdk = served.openai()
        ids = [sdk.files.create(file=("empty", b""), purpose="batch").id for _ in range(3)]
        for data in (b"", b"x"):
            with pytest.raises(openai.APIStatusError, match="has 3 files, which is the limit") as refused:
                sdk.files.create(file=("more", data), purpose="batch")
            assert refused.value.status_code == 413
        assert len(list((tmp_path / "files").iterdir())) == 3
        served.openai("w2").files.create(file=("empty", b""), purpose="batch")
        sdk.files.delete(ids[0])
        sdk.files.create(file=("more", b"x"), purpose="batch")


def test_the_oldest_batches_that_are_over_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client can make any number of batches that fail at once, and OpenAI's API deletes none."""
    monkeypatch.setattr(batch_store, "MAX_OVER", 3)
    with serving_work(FakeEngine(script_text("fine")), tmp_path) as served:
        sdk, other = served.openai(), served.openai("w2")
        theirs = until_over(other, start(other, [chat_line("a")]).id).id
        ids = [until_over(sdk, start(sdk, [{"bad": "line"}]).id).id for _ in range(6)]
        assert [batch.id for batch in sdk.batches.list()] == ids[:1:-1], (
            "the last one, and three that were over"
        )
        assert [batch.id for batch in other.batches.list()] == [theirs]
