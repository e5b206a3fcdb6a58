"""Files and batches whose bytes are in an object store, also while the store is away."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from penstock.gateway.blobs import bucket
from penstock.gateway.blobs.bucket import Bucket, S3Client
from tests.api.stored_work import ServedWork, serving_work
from tests.api.test_files_and_batches_sdk import chat_line, read_lines, start, until, until_over, upload
from tests.gateway.blobs.object_store import BUCKET, ObjectStore, running_store
from tests.gateway.fake_engine import FakeEngine, script_text


class Line(httpx.BaseTransport):
    """The way to the store, which can be cut."""

    def __init__(self) -> None:
        self._transport = httpx.HTTPTransport()
        self.is_cut = False

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if self.is_cut:
            raise httpx.ConnectError("cut")
        return self._transport.handle_request(request)


@pytest.fixture(scope="module")
def object_store() -> Iterator[ObjectStore]:
    with running_store() as store:
        yield store


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> Line:
    monkeypatch.setattr(bucket, "_FIRST_WAIT_S", 0.05)  # the store may fail parallel requests at first
    monkeypatch.setattr(bucket, "_PAUSE_S", 0.001)
    return Line()


@pytest.fixture
def served(tmp_path: Path, object_store: ObjectStore, line: Line) -> Iterator[ServedWork]:
    url = f"s3://{BUCKET}/{secrets.token_hex(4)}"
    bucket = Bucket(S3Client(url, object_store.access, line))
    with serving_work(FakeEngine(script_text("fine")), tmp_path, bucket, max_file_bytes=32 << 20) as served:
        yield served
    assert not (tmp_path / "files").exists(), "nothing is kept on the disk"


def test_a_large_file_lives(served: ServedWork) -> None:
    sdk = served.openai()
    data = os.urandom((9 << 20) + 5)
    file = sdk.files.create(file=("données.bin", data), purpose="user_data")
    assert file.bytes == len(data)
    content = sdk.files.content(file.id)
    assert content.content == data
    assert content.response.headers["content-length"] == str(len(data))
    assert "donn%C3%A9es.bin" in content.response.headers["content-disposition"]
    assert content.response.headers["x-content-type-options"] == "nosniff"
    with pytest.raises(openai.NotFoundError):
        served.openai("w2").files.content(file.id)
    sdk.files.delete(file.id)
    with pytest.raises(openai.NotFoundError):
        sdk.files.content(file.id)


def test_an_upload_in_parts(served: ServedWork) -> None:
    sdk = served.openai()
    made = sdk.uploads.create(bytes=6, filename="f", mime_type="text/plain", purpose="user_data")
    parts = [sdk.uploads.parts.create(made.id, data=data).id for data in (b"def", b"abc")]
    done = sdk.uploads.complete(made.id, part_ids=parts[::-1])
    assert done.file is not None
    assert sdk.files.content(done.file.id).content == b"abcdef"


def test_batches_run_over_files_in_the_bucket(served: ServedWork) -> None:
    sdk = served.openai()
    over = until_over(sdk, start(sdk, [chat_line(f"l{number}") for number in range(5)]).id)
    assert over.status == "completed"
    assert {line["custom_id"] for line in read_lines(sdk, over.output_file_id)} == {f"l{n}" for n in range(5)}
    messages = served.anthropic().messages.batches
    request = {"model": "bytes", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
    batch = messages.create(requests=[{"custom_id": "one", "params": request}])
    until(lambda: messages.retrieve(batch.id), lambda batch: batch.processing_status == "ended")
    assert [entry.custom_id for entry in messages.results(batch.id)] == ["one"]
    messages.delete(batch.id)


def test_while_the_store_is_away_nothing_is_lost(served: ServedWork, line: Line) -> None:
    sdk = served.openai()
    kept = upload(sdk, [chat_line("a"), chat_line("b")])
    line.is_cut = True
    with pytest.raises(openai.InternalServerError, match="object store for files cannot be used") as refused:
        sdk.files.create(file=("f", b"data"), purpose="user_data")
    assert refused.value.status_code == 503
    assert "retry-after" in refused.value.response.headers
    with pytest.raises(openai.InternalServerError, match="cannot be used"):
        sdk.files.content(kept)
    assert [file.id for file in sdk.files.list()] == [kept], "no half-written file is seen"
    line.is_cut = False
    batch = sdk.batches.create(input_file_id=kept, endpoint="/v1/chat/completions", completion_window="24h")
    line.is_cut = True  # wherever the batch is now
    extra = sdk.files.list()
    assert kept in [file.id for file in extra]
    line.is_cut = False
    over = until_over(sdk, batch.id)
    assert over.status == "completed"
    assert len(read_lines(sdk, over.output_file_id)) == 2


def test_a_batch_waits_for_the_store(
    served: ServedWork, line: Line, caplog: pytest.LogCaptureFixture
) -> None:
    sdk = served.openai()
    kept = upload(sdk, [chat_line("a")])
    runner = served.work.runner
    runner.wake, wake = lambda: None, runner.wake  # type: ignore[method-assign]
    look = runner._look
    is_created = threading.Event()  # the runner looks by itself too, and must not cut the line before

    async def look_cut() -> None:
        if is_created.is_set():
            line.is_cut = True
            await look()

    runner._look = look_cut  # type: ignore[method-assign]
    batch = sdk.batches.create(input_file_id=kept, endpoint="/v1/chat/completions", completion_window="24h")
    is_created.set()
    until(lambda: caplog.text, lambda text: f"batch {batch.id} waits: The object store" in text)
    assert sdk.batches.retrieve(batch.id).status == "validating"
    runner._look = look  # type: ignore[method-assign]
    line.is_cut = False
    wake()
    assert until_over(sdk, batch.id).status == "completed"


def test_deleting_while_the_store_is_away_deletes(served: ServedWork, line: Line) -> None:
    sdk = served.openai()
    file = sdk.files.create(file=("f", b"data"), purpose="user_data")
    line.is_cut = True
    assert sdk.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        sdk.files.retrieve(file.id)
