"""Requests as clients differ in sending them: compressed bodies, a slash too many, a base URL without /v1, paths and
keys of other providers."""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any

import pytest

from tests.api.conftest import direct_client
from tests.gateway.fake_engine import FakeEngine, script_text

CHAT: dict[str, Any] = {"model": "bytes", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
BODY = json.dumps(CHAT).encode()
BOMB = gzip.compress(b" " * (64 << 20))


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", gzip.compress(BODY)),
        ("GZIP", gzip.compress(BODY)),
        ("x-gzip", gzip.compress(BODY)),
        ("deflate", zlib.compress(BODY)),
        ("identity", BODY),
    ],
    ids=["gzip", "GZIP", "x-gzip", "deflate", "identity"],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_compressed_bodies_are_read(path: str, encoding: str, body: bytes) -> None:
    async with direct_client(FakeEngine(script_text("fine"))) as client:
        answer = await client.post(path, content=body, headers={"content-encoding": encoding})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("encoding", "body", "status", "code"),
    [
        ("br", BODY, 415, "unsupported_media_type"),
        ("zstd", BODY, 415, "unsupported_media_type"),
        ("gzip, gzip", gzip.compress(gzip.compress(BODY)), 415, "unsupported_media_type"),
        ("gzip", BODY, 400, "invalid_request_error"),
        ("gzip", b"", 400, "invalid_request_error"),
        ("gzip", gzip.compress(BODY)[:-9], 400, "invalid_request_error"),
        ("gzip", gzip.compress(BODY) + b"more", 400, "invalid_request_error"),
        ("gzip", BOMB, 413, "request_too_large"),
    ],
    ids=[
        "br",
        "zstd",
        "gzip twice",
        "not compressed",
        "empty",
        "cut off",
        "more behind the end",
        "too large",
    ],
)
async def test_other_compressed_bodies_are_refused(
    encoding: str, body: bytes, status: int, code: str
) -> None:
    async with direct_client(FakeEngine(script_text("fine")), max_body_bytes=1 << 20) as client:
        headers = {"content-encoding": encoding}
        answer = await client.post("/v1/chat/completions", content=body, headers=headers)
        assert (await client.post("/v1/chat/completions", content=BODY)).status_code == 200
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    if status == 415:
        assert answer.headers["accept-encoding"] == "gzip, deflate"


@pytest.mark.parametrize("path", ["/v1/chat/completions/", "/v1/messages/", "/v1/chat/completions//"])
async def test_a_slash_at_the_end_changes_nothing(path: str) -> None:
    async with direct_client(FakeEngine(script_text("fine"))) as client:
        assert (await client.post(path, json=CHAT)).status_code == 200
        models = await client.get("/v1/models/")
        assert models.json()["object"] == "list"


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/messages", "/v1/messages"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/completions/", "/v1/completions"),
        ("/nonsense", None),
        ("/v1/nonsense", None),
    ],
)
async def test_a_path_without_the_version_gets_a_hint(path: str, meant: str | None) -> None:
    async with direct_client(FakeEngine()) as client:
        answer = await client.post(path, json=CHAT)
    assert answer.status_code == 404
    message = answer.json()["error"]["message"]
    assert (f"Did you mean {meant}?" in message) if meant else ("Did you mean" not in message)


@pytest.mark.parametrize(
    ("path", "instead"),
    [
        ("/v1/assistants", "/v1/responses"),
        ("/v1/threads/runs", "/v1/responses"),
        ("/v1/audio/speech", "hears or speaks"),
        ("/v1/audio/transcriptions", "cross-attention"),
        ("/v1/audio/translations", "cross-attention"),
        ("/v1/realtime/client_secrets", "WebSockets"),
        ("/v1/vector_stores", "/v1/embeddings"),
        ("/v1beta/models/m:generateContent", "Gemini"),
        ("/completion", "/v1/completions"),
        ("/v1/fine_tuning/jobs", "LoRA"),
        ("/v1/complete", "/v1/messages"),
    ],
)
async def test_what_providers_have_and_we_do_not_is_refused_with_a_reason(path: str, instead: str) -> None:
    async with direct_client(FakeEngine()) as client:
        openai = await client.post(path, json={"model": "bytes"})
        anthropic = await client.post(path, json={}, headers={"anthropic-version": "2023-06-01"})
    assert openai.status_code == anthropic.status_code == 404
    assert openai.json()["error"]["code"] == "not_found"
    for answer in (openai, anthropic):
        message = answer.json()["error"]["message"]
        assert message.startswith(f"There is nothing at {path}. ")
        assert instead in message


SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(?=.*x)[a-z]+$"}}}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (
            "/v1/chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
            "response_format",
        ),
        (
            "/v1/responses",
            {"input": "hi", "text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}}},
            "text.format",
        ),
    ],
)
@pytest.mark.parametrize("is_streamed", [True, False])
async def test_patterns_that_are_not_enforced_are_named_in_the_answer(
    path: str, fields: dict[str, Any], param: str, *, is_streamed: bool
) -> None:
    """The second request finds the grammar checked, and is told the same."""
    engine = FakeEngine(script_text("{}"))
    body = {"model": "bytes", "stream": is_streamed} | ({} if "input" in fields else CHAT) | fields
    async with direct_client(engine) as client:
        for _ in range(2):
            answer = await client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            assert "without its assertions" in answer.headers["warning"]
            assert '"code":"schema_not_enforced"' in answer.text
            assert f'"param":"{param}"' in answer.text
    (first, second) = engine.added
    assert first.sampling.grammar == second.sampling.grammar


@pytest.mark.parametrize(
    ("path", "model"),
    [
        ("/openai/deployments/bytes/chat/completions?api-version=2024-10-21", None),
        ("/openai/deployments/team/bytes/chat/completions", "bytes"),
        ("/openai/v1/chat/completions/", "bytes"),
        ("/openai/chat/completions", "bytes"),
    ],
)
async def test_paths_and_keys_of_other_providers_are_taken(path: str, model: str | None) -> None:
    body = CHAT | {"model": model}
    async with direct_client(FakeEngine(script_text("fine")), api_key="secret") as client:
        answer = await client.post(path, json=body, headers={"api-key": "secret"})
        refused = await client.post(path, json=body, headers={"api-key": "wrong"})
    assert (answer.status_code, refused.status_code) == (200, 401), answer.text
    assert answer.json()["model"] == "bytes"


async def test_a_path_names_the_model_where_the_body_does_not() -> None:
    async with direct_client(FakeEngine()) as client:
        answer = await client.post("/openai/deployments/no/such/completions", json={"prompt": "hi"})
        unknown = await client.post("/openai/deployments/completions", json={"prompt": "hi"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert "'no/such'" in answer.json()["error"]["message"]
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "not_found")
