"""Files and batches of both APIs, driven by the real SDKs."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from penstock.core.request import Request, Tier
from penstock.gateway.batches import batch as batch_module
from tests.api.stored_work import ServedWork, serving_work
from tests.api.test_scoring import cross_encoder
from tests.gateway.fake_engine import FakeEngine, script_text


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedWork]:
    with serving_work(FakeEngine(script_text("fine")), tmp_path) as served:
        yield served


def chat_line(custom_id: str, **fields: Any) -> dict[str, Any]:
    body = {"model": "bytes", "messages": [{"role": "user", "content": custom_id}]} | fields
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def jsonl(lines: list[dict[str, Any]]) -> bytes:
    return b"\n".join(json.dumps(line).encode() for line in lines)


def upload(sdk: openai.OpenAI, lines: list[dict[str, Any]]) -> str:
    return sdk.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch").id


def start(sdk: openai.OpenAI, lines: list[dict[str, Any]], **fields: Any) -> openai.types.Batch:
    return sdk.batches.create(
        input_file_id=upload(sdk, lines), endpoint="/v1/chat/completions", completion_window="24h", **fields
    )


def until(look: Callable[[], Any], condition: Callable[[Any], bool]) -> Any:
    deadline = time.monotonic() + 60
    while not condition(seen := look()):
        assert time.monotonic() < deadline, seen
        time.sleep(0.01)
    return seen


def until_over(sdk: openai.OpenAI, batch_id: str) -> openai.types.Batch:
    final = ("completed", "failed", "expired", "cancelled")
    return until(lambda: sdk.batches.retrieve(batch_id), lambda batch: batch.status in final)


def read_lines(sdk: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(line) for line in sdk.files.content(file_id).text.splitlines()]


def test_a_file_lives(served: ServedWork) -> None:
    sdk = served.openai()
    data = bytes(range(256)) * 500
    file = sdk.files.create(file=("données.bin", data), purpose="user_data")
    assert (file.object, file.bytes, file.purpose, file.status) == (
        "file",
        len(data),
        "user_data",
        "processed",
    )
    assert file.filename == "données.bin"
    assert file.expires_at is None
    assert sdk.files.retrieve(file.id) == file
    assert sdk.files.content(file.id).content == data
    assert [each.id for each in sdk.files.list()] == [file.id]
    deleted = sdk.files.delete(file.id)
    assert (deleted.id, deleted.deleted) == (file.id, True)
    with pytest.raises(openai.NotFoundError):
        sdk.files.retrieve(file.id)
    with pytest.raises(openai.NotFoundError):
        sdk.files.content(file.id)


@pytest.mark.parametrize("is_beta", [False, True])
def test_a_file_of_anthropics_client_lives(served: ServedWork, is_beta: bool) -> None:
    """Its API knows no purpose, and its files have another shape."""
    sdk = served.anthropic()
    files: Any = sdk.beta.files if is_beta else sdk.files
    file = files.upload(file=("notes.txt", b"hello", "text/plain"), expires_in_seconds=7200)
    assert (file.type, file.filename, file.mime_type, file.size_bytes) == (
        "file",
        "notes.txt",
        "text/plain",
        5,
    )
    assert (file.expires_at - file.created_at).total_seconds() == 7200
    assert files.retrieve_metadata(file.id) == file
    assert files.download(file.id).read() == b"hello"
    more = [files.upload(file=("more.bin", b"x")).id for _ in range(4)]
    assert [each.id for each in files.list(limit=2)] == [*more[::-1], file.id]
    assert files.delete(file.id).type == "file_deleted"
    with pytest.raises(anthropic.NotFoundError):
        files.retrieve_metadata(file.id)
    with pytest.raises(anthropic.BadRequestError, match="expires_in_seconds"):
        files.upload(file=b"x", expires_in_seconds=5)


def test_files_are_listed_page_by_page(served: ServedWork) -> None:
    sdk = served.openai()
    ids = [sdk.files.create(file=b"x", purpose="batch").id for _ in range(5)]
    sdk.files.create(file=b"x", purpose="vision")
    assert [file.id for file in sdk.files.list(limit=2, order="asc", purpose="batch")] == ids
    assert [file.id for file in sdk.files.list(limit=2, purpose="batch")] == ids[::-1]
    with pytest.raises(openai.BadRequestError):
        sdk.files.list(limit=0)
    with pytest.raises(openai.BadRequestError):
        sdk.files.list(after="file-unknown")


def test_files_expire_when_asked_to(served: ServedWork) -> None:
    sdk = served.openai()
    file = sdk.files.create(
        file=b"x", purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert file.expires_at == file.created_at + 3600
    with pytest.raises(openai.BadRequestError):
        sdk.files.create(file=b"x", purpose="batch", expires_after={"anchor": "created_at", "seconds": 1})


def test_files_are_private_to_a_workspace(served: ServedWork) -> None:
    mine, theirs = served.openai("w1"), served.openai("w2")
    file = mine.files.create(file=b"secret", purpose="batch")
    unknown = "file-000000000000000000000000"
    for look in (theirs.files.retrieve, theirs.files.content, theirs.files.delete):
        messages = []
        for file_id in (file.id, unknown):
            with pytest.raises(openai.NotFoundError) as caught:
                look(file_id)
            messages.append(caught.value.message.replace(file_id, "ID"))
        assert messages[0] == messages[1]
    assert list(theirs.files.list()) == []
    with pytest.raises(openai.NotFoundError):
        theirs.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")


def test_bad_uploads(served: ServedWork, tmp_path: Path) -> None:
    sdk = served.openai()
    with pytest.raises(openai.BadRequestError, match="purpose"):
        sdk.files.create(file=b"x", purpose="nonsense")  # type: ignore[arg-type]
    with pytest.raises(openai.APIStatusError) as caught:
        sdk.files.create(file=b"x" * (1 << 20) + b"y", purpose="batch")
    assert caught.value.status_code == 413
    url = f"{served.url}/v1/files"
    endless = b"--b\r\ncontent-disposition: form-data; name=x\r\n\r\n\r\n" * 60_000
    refusal = httpx.post(url, content=endless, headers={"content-type": "multipart/form-data; boundary=b"})
    assert refusal.status_code == 400
    assert "more than 32 fields" in refusal.text
    boundary = {"content-type": "multipart/form-data; boundary=b"}
    part = b'--b\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\nx\r\n'
    for content, headers in [
        (b"{}", {"content-type": "application/json"}),
        (b"", boundary),
        (b"nonsense", boundary),
        (part, boundary),  # cut off
        (part + part + b"--b--\r\n", boundary),  # two files
        (b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--\r\n', boundary),
        (b"--b\r\nx: " + b"y" * 10_000 + b"\r\n\r\n\r\n--b--\r\n", boundary),
    ]:
        answer = httpx.post(url, content=content, headers=headers)
        assert answer.status_code == 400, (content[:80], answer.text)
        assert answer.json()["error"]["type"] == "invalid_request_error"
    assert list((tmp_path / "files").iterdir()) == []


def test_a_batch_of_chats(served: ServedWork) -> None:
    sdk = served.openai()
    created = start(sdk, [chat_line(f"c{n}") for n in range(5)], metadata={"job": "nightly"})
    assert (created.object, created.status, created.endpoint) == (
        "batch",
        "validating",
        "/v1/chat/completions",
    )
    assert created.expires_at == created.created_at + 24 * 3600
    batch = until_over(sdk, created.id)
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (
        5,
        5,
        0,
    )
    assert batch.metadata == {"job": "nightly"}
    assert batch.error_file_id is None
    assert batch.completed_at is not None
    lines = read_lines(sdk, batch.output_file_id)
    assert [line["custom_id"] for line in lines] == [f"c{n}" for n in range(5)]
    for line in lines:
        assert line["error"] is None
        assert line["response"]["status_code"] == 200
        assert line["response"]["request_id"].startswith(batch.id)
        completion = openai.types.chat.ChatCompletion.model_validate(line["response"]["body"])
        assert completion.choices[0].message.content == "fine"
    assert {request.tier for request in served.engine.added} == {Tier.BATCH}
    assert {request.tenant for request in served.engine.added} == {"w1"}


def test_a_batch_of_completions(served: ServedWork) -> None:
    sdk = served.openai()
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "hi"}}
    batch = sdk.batches.create(
        input_file_id=upload(sdk, [line]), endpoint="/v1/completions", completion_window="24h"
    )
    (result,) = read_lines(sdk, until_over(sdk, batch.id).output_file_id)
    assert result["response"]["body"]["object"] == "text_completion"


def test_a_batch_of_responses(served: ServedWork) -> None:
    sdk = served.openai()
    line = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/responses",
        "body": {"model": "bytes", "input": "hi"},
    }
    batch = sdk.batches.create(
        input_file_id=upload(sdk, [line]), endpoint="/v1/responses", completion_window="24h"
    )
    (result,) = read_lines(sdk, until_over(sdk, batch.id).output_file_id)
    assert result["response"]["body"]["object"] == "response"
    assert result["response"]["body"]["status"] == "completed"


def test_no_line_of_a_batch_leaves_work_behind_it(served: ServedWork) -> None:
    sdk = served.openai()
    body = {"model": "bytes", "input": "hi", "background": True}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/responses", "body": body}
    batch = sdk.batches.create(
        input_file_id=upload(sdk, [line]), endpoint="/v1/responses", completion_window="24h"
    )
    (result,) = read_lines(sdk, until_over(sdk, batch.id).error_file_id)
    assert result["response"]["status_code"] == 400
    assert result["response"]["body"]["error"]["param"] == "background"
    assert not served.engine.added


def test_a_byte_order_mark_and_a_line_that_is_too_long(
    served: ServedWork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_module, "MAX_LINE_BYTES", 1000)
    sdk = served.openai()
    short, long = (json.dumps(chat_line(name)).encode() for name in ("a", "b" * 500))
    options: dict[str, Any] = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
    marked = sdk.files.create(file=b"\xef\xbb\xbf" + short, purpose="batch")
    batch = until_over(sdk, sdk.batches.create(input_file_id=marked.id, **options).id)
    assert batch.status == "completed"
    tail = sdk.files.create(file=short + b"\n" + long + b" " * 600, purpose="batch")
    batch = until_over(sdk, sdk.batches.create(input_file_id=tail.id, **options).id)
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [(error.line, error.message) for error in batch.errors.data] == [
        (2, "A line may have at most 1000 bytes.")
    ]


def test_failed_lines_go_to_the_error_file(served: ServedWork) -> None:
    sdk = served.openai()
    lines = [
        chat_line("good"),
        chat_line("no-model", model="unknown"),
        chat_line("bad", temperature="hot"),
        chat_line("streamed", stream=True),
    ]
    batch = until_over(sdk, start(sdk, lines).id)
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 3)
    errors = {line["custom_id"]: line["response"] for line in read_lines(sdk, batch.error_file_id)}
    assert {name: answer["status_code"] for name, answer in errors.items()} == {
        "no-model": 404,
        "bad": 400,
        "streamed": 400,
    }
    assert errors["no-model"]["body"]["error"]["code"] == "model_not_found"
    assert [line["custom_id"] for line in read_lines(sdk, batch.output_file_id)] == ["good"]


def test_a_batch_that_is_not_valid(served: ServedWork) -> None:
    sdk = served.openai()
    lines = [chat_line("a"), chat_line("a"), chat_line("b") | {"url": "/v1/completions"}]
    batch = until_over(sdk, start(sdk, lines).id)
    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [(error.line, error.param) for error in batch.errors.data] == [(2, "custom_id"), (3, "url")]
    assert not served.engine.added


@pytest.mark.parametrize(
    "changes",
    [
        {"endpoint": "/v1/images/generations"},
        {"endpoint": "/v1/files"},
        {"completion_window": "1h"},
        {"metadata": {"k": "v" * 600}},
        {"output_expires_after": {"anchor": "created_at", "seconds": 5}},
    ],
)
def test_batches_that_are_refused(served: ServedWork, changes: dict[str, Any]) -> None:
    sdk = served.openai()
    fields: dict[str, Any] = {
        "input_file_id": upload(sdk, [chat_line("a")]),
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    }
    with pytest.raises(openai.BadRequestError):
        sdk.batches.create(**(fields | changes))
    assert list(sdk.batches.list()) == []


def test_a_file_of_another_purpose_is_no_batch(served: ServedWork) -> None:
    sdk = served.openai()
    file = sdk.files.create(file=jsonl([chat_line("a")]), purpose="user_data")
    with pytest.raises(openai.BadRequestError):
        sdk.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")


class HeldEngine(FakeEngine):
    """Answers nothing before it is released."""

    def __init__(self) -> None:
        super().__init__()
        self._answer = script_text("late")

    def release(self) -> None:
        """From the test's thread."""
        self._loop.call_soon_threadsafe(self._release)

    def add(self, request: Request, **options: Any) -> None:
        self._loop = asyncio.get_running_loop()
        super().add(request, **options)

    def _release(self) -> None:
        self.script = self._answer
        for stream in list(self.streams.values()):
            self._play(stream.request.id, list(self._answer(stream.request)))


def test_a_batch_survives_the_deletion_of_its_input(tmp_path: Path) -> None:
    engine = HeldEngine()
    with serving_work(engine, tmp_path) as served:
        sdk = served.openai()
        batch = start(sdk, [chat_line("a"), chat_line("b")])
        assert batch.input_file_id
        sdk.files.delete(batch.input_file_id)
        until(lambda: len(engine.added), lambda count: count == 2)
        engine.release()
        assert len(read_lines(sdk, until_over(sdk, batch.id).output_file_id)) == 2


def test_cancelling(tmp_path: Path) -> None:
    engine = HeldEngine()
    with serving_work(engine, tmp_path) as served:
        sdk = served.openai()
        created = start(sdk, [chat_line(f"c{n}") for n in range(40)])
        until(lambda: len(engine.added), lambda count: count == 32)
        cancelling = sdk.batches.cancel(created.id)
        assert cancelling.status == "cancelling"
        assert cancelling.cancelling_at is not None
        engine.release()
        batch = until_over(sdk, created.id)
        assert batch.status == "cancelled"
        assert len(engine.added) == 32
        assert len(read_lines(sdk, batch.output_file_id)) == 32
        unrun = read_lines(sdk, batch.error_file_id)
        assert {(line["response"], line["error"]["code"]) for line in unrun} == {(None, "batch_cancelled")}
        with pytest.raises(openai.ConflictError):
            sdk.batches.cancel(created.id)


def test_batches_are_listed_and_private(served: ServedWork) -> None:
    sdk = served.openai()
    ids = [start(sdk, [chat_line("a")]).id for _ in range(3)]
    assert [batch.id for batch in sdk.batches.list(limit=2)] == ids[::-1]
    theirs = served.openai("w2")
    assert list(theirs.batches.list()) == []
    for look in (theirs.batches.retrieve, theirs.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            look(ids[0])
    with pytest.raises(openai.NotFoundError):
        sdk.batches.retrieve("batch_unknown")


def message_request(custom_id: str, **params: Any) -> Any:
    messages = [{"role": "user", "content": custom_id}]
    return {
        "custom_id": custom_id,
        "params": {"model": "bytes", "max_tokens": 50, "messages": messages} | params,
    }


def until_ended(sdk: anthropic.Anthropic, batch_id: str) -> Any:
    return until(
        lambda: sdk.messages.batches.retrieve(batch_id), lambda batch: batch.processing_status == "ended"
    )


def test_a_batch_of_messages(served: ServedWork) -> None:
    sdk = served.anthropic()
    requests = [message_request("one"), message_request("two", max_tokens="many"), message_request("three")]
    created = sdk.messages.batches.create(requests=requests)
    assert (created.type, created.processing_status) == ("message_batch", "in_progress")
    assert created.request_counts.processing == 3
    assert created.results_url is None
    batch = until_ended(sdk, created.id)
    counts = batch.request_counts
    assert (counts.processing, counts.succeeded, counts.errored) == (0, 2, 1)
    assert batch.ended_at is not None
    assert (batch.expires_at - batch.created_at).total_seconds() == 24 * 3600
    results = list(sdk.messages.batches.results(batch.id))
    assert [result.custom_id for result in results] == ["one", "two", "three"]
    first, second, _ = (result.result for result in results)
    assert first.type == "succeeded"
    assert first.message.content[0].type == "text"
    assert first.message.content[0].text == "fine"
    assert first.message.usage.service_tier == "batch"
    assert second.type == "errored"
    assert second.error.error.type == "invalid_request_error"
    assert {request.tier for request in served.engine.added} == {Tier.BATCH}


def test_message_batches_are_listed_deleted_and_private(served: ServedWork) -> None:
    sdk, theirs = served.anthropic(), served.anthropic("w2")
    ids = [sdk.messages.batches.create(requests=[message_request("a")]).id for _ in range(3)]
    assert [batch.id for batch in sdk.messages.batches.list(limit=2)] == ids[::-1]
    before = sdk.messages.batches.list(limit=5, before_id=ids[0])
    assert [batch.id for batch in before.data] == [ids[2], ids[1]]
    assert list(theirs.messages.batches.list()) == []
    until_ended(sdk, ids[0])
    for look in (
        theirs.messages.batches.retrieve,
        theirs.messages.batches.delete,
        theirs.messages.batches.results,
    ):
        with pytest.raises(anthropic.NotFoundError):
            look(ids[0])
    deleted = sdk.messages.batches.delete(ids[0])
    assert (deleted.id, deleted.type) == (ids[0], "message_batch_deleted")
    with pytest.raises(anthropic.NotFoundError):
        sdk.messages.batches.retrieve(ids[0])
    # Neither API sees the batches of the other.
    assert list(served.openai().batches.list()) == []
    assert list(served.openai().files.list()) == []


@pytest.mark.parametrize(
    "requests",
    [
        [],
        [message_request("a"), message_request("a")],
        [message_request("")],
        [message_request("a b")],
        [message_request("x" * 65)],
        [{"custom_id": "a"}],
        [message_request("a") | {"params": {"more": "x" * (16 << 20)}}],
    ],
    ids=["none", "twice", "empty", "blank", "long", "no params", "large params"],
)
def test_message_batches_that_are_refused(served: ServedWork, requests: list[Any]) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        served.anthropic().messages.batches.create(requests=requests)
    body: Any = caught.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")


def test_params_with_too_many_values_end_their_request_and_no_other(served: ServedWork) -> None:
    sdk = served.anthropic()
    large: Any = {"custom_id": "large", "params": {"messages": [{}] * 110_000}}
    batch = sdk.messages.batches.create(requests=[large, message_request("small")])
    until_ended(sdk, batch.id)
    outcomes = {result.custom_id: result.result.type for result in sdk.messages.batches.results(batch.id)}
    assert outcomes == {"large": "errored", "small": "succeeded"}


def test_cancelling_a_message_batch(tmp_path: Path) -> None:
    engine = HeldEngine()
    with serving_work(engine, tmp_path) as served:
        sdk = served.anthropic()
        batch = sdk.messages.batches.create(requests=[message_request(f"c{n}") for n in range(33)])
        until(lambda: len(engine.added), lambda count: count == 32)
        with pytest.raises(anthropic.ConflictError):
            sdk.messages.batches.delete(batch.id)
        results = f"{served.url}/v1/messages/batches/{batch.id}/results"
        too_early = httpx.get(results, headers={"x-api-key": "w1"})
        assert (too_early.status_code, too_early.json()["type"]) == (400, "error")
        canceling = sdk.messages.batches.cancel(batch.id)
        assert canceling.processing_status == "canceling"
        assert canceling.cancel_initiated_at is not None
        engine.release()
        counts = until_ended(sdk, batch.id).request_counts
        assert (counts.succeeded, counts.canceled, counts.processing) == (32, 1, 0)
        outcomes = [result.result.type for result in sdk.messages.batches.results(batch.id)]
        assert sorted(outcomes) == ["canceled"] + ["succeeded"] * 32


def test_batches_of_scoring_routes(tmp_path: Path) -> None:
    bodies = {
        "/v1/rerank": {"query": "abcd", "documents": ["x", "abc"], "top_n": 1},
        "/v1/score": {"text_1": "abcd", "text_2": "abc"},
        "/v1/moderations": {"input": "hi"},
    }
    with serving_work(cross_encoder(), tmp_path) as served:
        sdk = served.openai()
        answers = []
        for path, body in bodies.items():
            line = {"custom_id": "a", "method": "POST", "url": path, "body": body}
            batch: Any = sdk.batches.create(
                input_file_id=upload(sdk, [line]),
                endpoint=path,  # type: ignore[arg-type]
                completion_window="24h",
            )
            batch = until_over(sdk, batch.id)
            (result,) = read_lines(sdk, batch.output_file_id or batch.error_file_id)
            answers.append(result["response"])
    ranked, scored, moderated = answers
    assert ranked["body"]["results"][0]["index"] == 1
    assert scored["body"]["data"][0]["score"] == ranked["body"]["results"][0]["relevance_score"]
    assert moderated["status_code"] in (200, 404), "as the route answers without a batch"
