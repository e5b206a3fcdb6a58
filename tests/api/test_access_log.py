"""Log lines: one per request, machine-readable, with neither prompts nor credentials in them."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.sync.client import connect

from penstock.api.app import create_app
from penstock.api.http.access_log import RequestLog
from penstock.core.gateway_config import GatewayConfig, ServerConfig
from penstock.core.log_format import JsonFormatter, TextFormatter, without_secrets
from penstock.gateway.accounts import Accounts
from penstock.gateway.gateway import Gateway
from penstock.gateway.telemetry import RequestObserver, Tracing
from tests.api.bounded_server import bounded_server
from tests.gateway.fake_engine import FakeEngine, script_text

KEY = "sk-ps-AbCdEfGhIjKlMnOpQrStUvWxYz0123456789abcdefgh"
PROMPT = "the crown jewels are under the bed"


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """Everything logged by anyone, as the JSON format writes it."""
    written: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            written.append(self.format(record))

    handler = Collect()
    handler.setFormatter(JsonFormatter("gateway"))
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield written
    root.removeHandler(handler)
    root.setLevel(level)


def client_for(engine: FakeEngine, *, keeps_prompts: bool = False, **server: Any) -> httpx.AsyncClient:
    observer = RequestObserver()
    gateway = Gateway(engine, GatewayConfig(), accounts=Accounts(observers=[observer]))
    request_log = RequestLog(Tracing(), writes_lines=True, keeps_prompts=keeps_prompts)
    app = create_app(gateway, ServerConfig(**server), request_log=request_log)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test")


def access_lines(lines: list[str]) -> list[dict[str, Any]]:
    return [line for line in map(json.loads, lines) if line["logger"] == "penstock.access"]


async def test_every_request_gets_one_line(lines: list[str]) -> None:
    async with client_for(FakeEngine(script_text("hello", num_cached_tokens=2))) as client:
        answer = await client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 20})
        await client.get("/v1/nothing?password=hunter2")
        await client.get("/health")
    first, second = access_lines(lines)
    assert first["request_id"] == answer.headers["x-request-id"]
    expected = {
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "workspace_id": "default",
        "key_id": "open",
        "model": "bytes",
        "endpoint": "completions",
        "outcome": "completed",
        "prompt_tokens": len(PROMPT),
        "completion_tokens": 6,
        "cached_tokens": 2,
        "level": "info",
        "process": "gateway",
    }
    assert {name: first[name] for name in expected} == expected
    assert first["duration_ms"] > 0
    assert first["queue_ms"] == 0
    assert (second["path"], second["status"]) == ("/v1/nothing", 404)
    assert "hunter2" not in "".join(lines)
    assert PROMPT not in "".join(lines)


async def test_prompts_are_logged_when_asked_for(lines: list[str]) -> None:
    async with client_for(FakeEngine(script_text("x")), keeps_prompts=True) as client:
        await client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 20})
        await client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": PROMPT}]})
    assert [line["prompts"] for line in access_lines(lines)] == [[PROMPT], [f"user: {PROMPT}"]]


async def test_a_bug_is_a_line_with_500(lines: list[str]) -> None:
    def broken(request: object) -> list[Any]:
        raise RuntimeError("boom")

    async with client_for(FakeEngine(broken)) as client:
        answer = await client.post("/v1/completions", json={"prompt": "hi"})
    (line,) = access_lines(lines)
    assert (line["status"], line["request_id"]) == (500, answer.headers["x-request-id"])


def test_requests_over_a_websocket_get_their_own_lines(lines: list[str]) -> None:
    request_log = RequestLog(Tracing(), writes_lines=True)
    with (
        bounded_server(
            FakeEngine(script_text("ok")), observer=RequestObserver(), request_log=request_log
        ) as served,
        connect(f"ws://127.0.0.1:{served.port}/v1/stream") as socket,
    ):
        socket.send('{"id": 1, "prompt": "hi"}')
        while "done" not in str(socket.recv(timeout=60)):
            pass
        socket.send('{"id": 2, "prompt": "hi", "model": "other"}')
        socket.recv(timeout=60)
        served.wait_until(lambda: len(access_lines(lines)) == 2)
    first, second = access_lines(lines)
    assert (first["path"], first["status"], first["completion_tokens"]) == ("/v1/stream", 200, 3)
    assert second["status"] == 404
    assert first["request_id"] != second["request_id"]


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {KEY}"},
        {"x-api-key": KEY},
        {"authorization": f"Basic {KEY}"},
        {"cookie": f"session={KEY}"},
    ],
)
async def test_credentials_reach_neither_logs_nor_errors_nor_metrics(
    lines: list[str], headers: dict[str, str]
) -> None:
    """Right, wrong, misplaced and in the middle of a crash."""

    def broken(request: object) -> list[Any]:
        raise RuntimeError(f"cannot reach http://user:{KEY}@host with Bearer {KEY}")

    seen = []
    for api_key, engine in (
        (KEY, FakeEngine(broken)),
        ("another-key", FakeEngine()),
        (None, FakeEngine(broken)),
    ):
        async with client_for(engine, api_key=api_key) as client:
            for path in ("/v1/completions", "/v1/messages", "/v1/responses", f"/v1/files/{KEY}"):
                answer = await client.post(path, json={"prompt": "hi", "api_key": KEY}, headers=headers)
                if KEY not in path:
                    seen.append(answer.text + str(answer.headers))
            seen.append((await client.get("/metrics", headers=headers)).text)
    assert KEY not in "".join(seen)
    assert KEY not in "".join(lines)


def test_the_text_format_masks_too() -> None:
    record = logging.LogRecord("x", logging.INFO, "", 0, "got Bearer %s from %s", (KEY, KEY), None)
    assert TextFormatter("%(message)s").format(record) == "got Bearer *** from sk-***"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("api_key=abcdefgh more", "api_key=*** more"),
        ('{"password": "hunter22", "a": 1}', '{"password": "***", "a": 1}'),
        ("Authorization: abcdefgh", "Authorization: ***"),
        ("postgresql://me:hunter2@db/x", "postgresql://me:***@db/x"),
        ("token eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2ln here", "token *** here"),
        ("the risk-averse desk-bound bearer of news", "the risk-averse desk-bound bearer of news"),
        ("see sk-", "see sk-"),
    ],
)
def test_what_looks_like_a_credential(text: str, expected: str) -> None:
    assert without_secrets(text) == expected


def test_quoted_secrets_are_masked_and_the_line_stays_json() -> None:
    record = logging.LogRecord(
        "x", logging.INFO, "", 0, 'password="hunter22\\" and api_key="abc\\\\def"', None, None
    )
    record.fields = {"nested": [{"url": "redis://me:hunter22@host"}]}
    line = JsonFormatter("gateway").format(record)
    assert "hunter22" not in line
    assert json.loads(line)["nested"] == [{"url": "redis://me:***@host"}]


@given(
    message=st.text(),
    fields=st.dictionaries(st.text(max_size=8), st.one_of(st.text(), st.integers(), st.none(), st.floats())),
)
def test_any_record_is_one_line_of_json(message: str, fields: dict[str, Any]) -> None:
    record = logging.LogRecord("x", logging.INFO, "", 0, "%s", (message,), None)
    record.fields = fields
    line = JsonFormatter("engine").format(record)
    assert "\n" not in line
    decoded = json.loads(line)
    assert decoded["level"] == "info"
    assert decoded["process"] == "engine"


async def test_a_path_cannot_write_a_line_of_its_own() -> None:
    written: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            written.append(self.format(record))

    handler = Collect()
    handler.setFormatter(TextFormatter("%(levelname)s %(message)s"))
    logger = logging.getLogger("penstock.access")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        async with client_for(FakeEngine()) as client:
            await client.get("/v1/x%0aINFO%20GET%20/admin%0d%1b[2J%c2%85%e2%80%a8%e2%80%ae%e2%81%a6")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    (line,) = written
    assert "/v1/x\\nINFO GET /admin\\r\\x1b[2J\\x85\\u2028\\u202e\\u2066 404" in line
    assert line.splitlines() == [line]


def test_a_step_of_the_clock_changes_no_duration(lines: list[str]) -> None:
    request_log = RequestLog(Tracing(), writes_lines=True)
    record = request_log.begin("request", "GET", "/v1/models", [])
    record.started_ns += 3600 * 10**9  # as if the clock had been set back since
    request_log.end(record, "GET", "/v1/models", 200, None)
    (line,) = access_lines(lines)
    assert 0 <= line["duration_ms"] < 60_000
