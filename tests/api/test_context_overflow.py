"""Requests that do not fit the context: `max_tokens` is lowered and the answer says so; a prompt is refused in the
words that clients parse."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import openai
import pytest

from penstock.api.http.context import MAX_WARNING_CHARS, MAX_WARNINGS, answer_headers
from penstock.core.gateway_config import GatewayConfig
from penstock.gateway.accounts import Accounts
from penstock.gateway.gateway import Gateway
from penstock.gateway.prompts import GenerationRequest, RequestWarning, SamplingOptions, TextPrompt
from penstock.gateway.ratelimits.local import LocalLimiter
from penstock.gateway.ratelimits.settings import LimitSettings, ScopeLimits
from tests.api.conftest import Serve, direct_client
from tests.gateway.fake_engine import FakeEngine, script_text

USER: Any = {"role": "user", "content": "hi"}
LONG: Any = {"role": "user", "content": "x" * 300}
# Path, body, and the field that says how long an answer may be.
ROUTES: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"messages": [USER]}, "max_tokens"),
    ("/v1/chat/completions", {"messages": [USER]}, "max_completion_tokens"),
    ("/v1/completions", {"prompt": "hi"}, "max_tokens"),
    ("/v1/responses", {"input": "hi"}, "max_output_tokens"),
    ("/v1/messages", {"messages": [USER]}, "max_tokens"),
]


def client_for(engine: FakeEngine, **config: Any) -> httpx.AsyncClient:
    return direct_client(engine, Gateway(engine, GatewayConfig(**config)))


def events(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(("path", "body", "field"), ROUTES)
async def test_a_number_that_does_not_fit_is_lowered_on_every_route(
    path: str, body: dict[str, Any], field: str
) -> None:
    engine = FakeEngine(script_text("fine"))
    async with client_for(engine) as client:
        whole = await client.post(path, json={"model": "bytes", **body, field: 32_000})
        streamed = await client.post(path, json={"model": "bytes", **body, field: 32_000, "stream": True})
        plain = await client.post(path, json={"model": "bytes", **body, field: 10})
    assert [request.sampling.max_tokens for request in engine.added] == [128, 128, 10]
    for answer in (whole, streamed):
        assert answer.status_code == 200, answer.text
        assert re.fullmatch(
            r'299 penstock "The answer may have at most 128 tokens, .*"', answer.headers["warning"]
        )
    (warning,) = whole.json()["warnings"]
    assert warning["code"] == "max_tokens_lowered"
    assert warning["param"] == field
    first = events(streamed.text)[0]
    assert (first.get("message") or first.get("response") or first)["warnings"] == [warning]
    assert "warning" not in plain.headers
    assert "warnings" not in plain.json()


@pytest.mark.parametrize(("path", "body", "field"), ROUTES)
async def test_an_option_restores_the_refusal(path: str, body: dict[str, Any], field: str) -> None:
    engine = FakeEngine(script_text("fine"))
    async with client_for(engine, refuse_long_outputs=True) as client:
        answer = await client.post(path, json={"model": "bytes", **body, field: 300})
    assert engine.added == []
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["type"] == "invalid_request_error"
    if path == "/v1/messages":
        assert re.search(
            r"^input length and `max_tokens` exceed context limit: \d+ \+ 300 > 256, ", error["message"]
        )
        return
    assert re.search(
        r"^This model's maximum context length is 256 tokens\. .*300 in the completion", error["message"]
    )
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == field


@pytest.mark.parametrize("refuse_long_outputs", [True, False])
@pytest.mark.parametrize(("path", "body", "field"), ROUTES)
async def test_errors_name_the_field_that_the_client_sent(
    path: str, body: dict[str, Any], field: str, *, refuse_long_outputs: bool
) -> None:
    asked = {-1: "must be at least"} | ({130: "is too large: 130"} if refuse_long_outputs else {})
    async with client_for(FakeEngine(), refuse_long_outputs=refuse_long_outputs) as client:
        for number, said in asked.items():
            error = (await client.post(path, json={"model": "bytes", **body, field: number})).json()["error"]
            assert error["message"].startswith(f"{field} {said}")
            assert error.get("param", field) == field


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": [LONG]}, "messages"),
        ("/v1/completions", {"prompt": "x" * 300}, "prompt"),
        ("/v1/completions", {"prompt": [1] * 300}, "prompt"),
        ("/v1/responses", {"input": "x" * 300}, "input"),
        ("/v1/responses", {"input": "x" * 30_000}, "input"),  # too long to be worth tokenizing
        ("/v1/responses", {"input": "x" * 300, "stream": True}, "input"),
    ],
)
async def test_a_prompt_that_does_not_fit_is_refused_in_openais_words(
    path: str, body: dict[str, Any], param: str
) -> None:
    async with client_for(FakeEngine(script_text("fine"))) as client:
        answer = await client.post(path, json={"model": "bytes", **body})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param)
    said = re.match(
        r"This model's maximum context length is (\d+) tokens\. However, your \w+ resulted in (\d+) tokens",
        error["message"],
    )
    assert said
    assert int(said[1]) == 256
    assert int(said[2]) >= 300


@pytest.mark.parametrize(("num_characters", "maximum"), [(300, 256), (253, 255)])
async def test_a_prompt_that_does_not_fit_is_refused_in_anthropics_words(
    num_characters: int, maximum: int
) -> None:
    async with client_for(FakeEngine(script_text("fine"))) as client:
        body = {"model": "bytes", "max_tokens": 5, "messages": [USER | {"content": "x" * num_characters}]}
        answer = await client.post("/v1/messages", json=body)
        counted = await client.post("/v1/messages/count_tokens", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    said = re.fullmatch(r"prompt is too long: (\d+) tokens > (\d+) maximum", error["message"])
    assert said
    assert int(said[1]) == counted.json()["input_tokens"] > maximum
    assert int(said[2]) == maximum


def test_sdk_users_find_the_warning(serve: Serve) -> None:
    served = serve(FakeEngine(script_text("fine")))
    answer = served.sdk().chat.completions.create(model="bytes", messages=[USER], max_tokens=32_000)
    assert answer.warnings[0]["code"] == "max_tokens_lowered"  # type: ignore[attr-defined]
    with pytest.raises(openai.BadRequestError) as error:
        served.sdk().responses.create(model="bytes", input="x" * 300)
    assert (error.value.code, error.value.param) == ("context_length_exceeded", "input")


async def test_limits_reserve_no_more_than_can_be_used() -> None:
    """A minute's 200 output tokens allow an answer of at most 128, whatever number the client names."""
    engine = FakeEngine(script_text("fine"))
    limiter = LocalLimiter(LimitSettings(key=ScopeLimits(output_tokens_per_minute=200)))
    gateway = Gateway(engine, GatewayConfig(), accounts=Accounts(limiter))
    async with direct_client(engine, gateway) as client:
        body = {"model": "bytes", "messages": [USER], "max_tokens": 32_000}
        answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200
    assert answer.headers["x-ratelimit-limit-tokens"] == "200"


async def test_a_cached_answer_keeps_its_warning() -> None:
    engine = FakeEngine(script_text("fine"))
    async with client_for(engine) as client:
        body = {"model": "bytes", "messages": [USER], "max_tokens": 32_000}
        answers = [
            await client.post("/v1/chat/completions", json=body, headers={"x-penstock-cache": "60"})
            for _ in range(2)
        ]
    assert [answer.headers["x-penstock-cache"] for answer in answers] == ["miss", "hit"]
    assert answers[1].headers["warning"] == answers[0].headers["warning"]


async def test_a_warning_in_a_header_is_one_short_line_of_ascii() -> None:
    engine = FakeEngine(script_text("fine"))
    texts = ('tool "déjà"\r\nset-cookie: x', "y" * 10_000, *["z"] * 100)
    request = GenerationRequest(
        prompts=(TextPrompt("hi"),),
        sampling=SamplingOptions(),
        warnings=tuple(RequestWarning("tool_skipped", text) for text in texts),
    )
    answer = await Gateway(engine, GatewayConfig()).submit(request)
    headers = [value for _, value in answer_headers(answer)]
    assert headers[0] == b'299 penstock "tool \\"d?j?\\"  set-cookie: x"'
    assert max(map(len, headers)) < MAX_WARNING_CHARS + 50
    assert len(headers) == MAX_WARNINGS
    assert len(answer.warnings) == len(texts)
    answer.cancel()
