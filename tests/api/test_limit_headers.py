"""Rate-limit headers on answers that used nothing: refusals before admission, lists, counted tokens."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from penstock.core.clock import VirtualClock
from penstock.core.gateway_config import GatewayConfig
from penstock.gateway.accounts import Accounts
from penstock.gateway.gateway import Gateway
from penstock.gateway.ratelimits.local import LocalLimiter
from penstock.gateway.ratelimits.settings import LimitSettings, ScopeLimits
from tests.api.conftest import direct_client
from tests.gateway.fake_engine import FakeEngine, script_text

CHAT = {"model": "bytes", "messages": [{"role": "user", "content": "hi"}]}
STRICT = ScopeLimits(requests_per_minute=3, input_tokens_per_minute=600, output_tokens_per_minute=1200)


def limited(**scopes: Any) -> LocalLimiter:
    """Time stands still, so that every header can be foretold."""
    return LocalLimiter(LimitSettings(**scopes), VirtualClock())


def client_of(engine: FakeEngine, limiter: LocalLimiter) -> httpx.AsyncClient:
    return direct_client(engine, Gateway(engine, GatewayConfig(), accounts=Accounts(limiter)))


EARLY_ANSWERS = [
    ("POST", "/v1/chat/completions", b"{not json", 400),
    ("POST", "/v1/chat/completions", b'{"messages": []}', 400),
    (
        "POST",
        "/v1/chat/completions",
        b'{"model": "other", "messages": [{"role": "user", "content": "x"}]}',
        404,
    ),
    ("POST", "/v1/completions", b'{"model": "bytes", "prompt": "x", "temperature": 9}', 400),
    ("POST", "/v1/responses", b"{}", 400),
    ("GET", "/v1/models", None, 200),
    ("GET", "/v1/models/other", None, 404),
    ("GET", "/v1/nowhere", None, 404),
    ("PUT", "/v1/chat/completions", b"", 405),
    ("POST", "/v1/messages", b"{}", 400),
    ("POST", "/v1/messages/count_tokens", b"[", 400),
]


@pytest.mark.parametrize(("method", "path", "body", "status"), EARLY_ANSWERS)
async def test_answers_that_used_nothing_tell_the_limits_too(
    method: str, path: str, body: bytes | None, status: int
) -> None:
    engine = FakeEngine(script_text("ok"))
    async with client_of(engine, limited(key=STRICT)) as client:
        await client.post("/v1/chat/completions", json=CHAT | {"max_tokens": 40})
        for _ in range(2):  # asking uses nothing
            answer = await client.request(method, path, content=body)
            assert answer.status_code == status
            is_anthropic = path.startswith("/v1/messages")
            name = (
                "anthropic-ratelimit-requests-remaining" if is_anthropic else "x-ratelimit-remaining-requests"
            )
            assert answer.headers[name] == "2"
            others = "x-ratelimit" if is_anthropic else "anthropic-ratelimit"
            assert not [name for name in answer.headers if name.startswith(others)]


async def test_a_refused_request_tells_the_limits_of_its_model() -> None:
    async with client_of(FakeEngine(), limited(model=STRICT)) as client:
        refused = await client.post("/v1/chat/completions", json=CHAT | {"temperature": 9})
        assert refused.status_code == 400
        assert refused.headers["x-ratelimit-limit-requests"] == "3"
        unknown = await client.post("/v1/chat/completions", json=CHAT | {"model": "other"})
        assert "x-ratelimit-limit-requests" not in unknown.headers


async def test_whoever_is_not_known_is_told_no_limits() -> None:
    engine = FakeEngine()
    gateway = Gateway(engine, GatewayConfig(), accounts=Accounts(limited(key=STRICT)))
    async with direct_client(engine, gateway, api_key="secret") as client:
        for path in ("/v1/models", "/health"):
            answer = await client.get(path)
            assert not [name for name in answer.headers if "ratelimit" in name]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "some text"}),
        ("/detokenize", {"tokens": [65]}),
        ("/v1/messages/count_tokens", CHAT),
        ("/v1/responses/input_tokens", {"model": "bytes", "input": "x"}),
    ],
)
async def test_counting_tokens_counts_as_a_request(path: str, body: dict[str, Any]) -> None:
    async with client_of(FakeEngine(), limited(key=STRICT)) as client:
        answers = [await client.post(path, json=body) for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
    name = (
        "anthropic-ratelimit-requests-remaining" if "messages" in path else "x-ratelimit-remaining-requests"
    )
    assert [answer.headers[name] for answer in answers] == ["2", "1", "0", "0"]
