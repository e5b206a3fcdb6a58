"""Models of other people's servers through both of our APIs, with all that a gateway does for its own."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import httpx
import httpx2
import openai
import pytest
from starlette.responses import JSONResponse

from penstock.api.app import create_app
from penstock.cluster.external.pool import ExternalPool
from penstock.cluster.external.server import ExternalServer
from penstock.core.config import ExternalServerConfig
from penstock.core.errors import Overloaded
from penstock.core.gateway_config import GatewayConfig, ServerConfig
from penstock.core.identity import OPEN_PRINCIPAL, Principal
from penstock.core.request import Tier
from penstock.gateway.accounts import Accounts, Claim, Outcome
from penstock.gateway.external.models import ExternalModels
from penstock.gateway.gateway import Gateway
from penstock.gateway.models.settings import ModelSettings
from penstock.gateway.prompts import GenerationRequest, SamplingOptions, TextPrompt
from penstock.gateway.ratelimits.local import LocalLimiter
from penstock.gateway.ratelimits.settings import LimitSettings, ScopeLimits
from tests.cluster.external.openai_server import OpenAIServer, listening, serving, text_chunks
from tests.gateway.fake_engine import FakeEngine, script_text, until
from tests.gateway.guards.read_settings import guard_settings
from tests.loop_time import pass_time, settle

USER: Any = {"role": "user", "content": "Hello there"}
CHAT = {"model": "theirs", "messages": [USER]}
USAGE = {
    "prompt_tokens": 40,
    "completion_tokens": 2,
    "total_tokens": 42,
    "prompt_tokens_details": {"cached_tokens": 32},
}


class RecordingLedger:
    """A ledger that remembers."""

    def __init__(self) -> None:
        self.rows: list[tuple[Claim, Outcome]] = []

    def begin(self, claim: Claim) -> None:
        pass

    def settle(self, claim: Claim, outcome: Outcome) -> None:
        self.rows.append((claim, outcome))


class Platform:
    def __init__(self, gateway: Gateway, limiter: LocalLimiter, ledger: RecordingLedger) -> None:
        assert gateway.catalogue.external is not None
        self.gateway = gateway
        self.external = gateway.catalogue.external
        self.limiter = limiter
        self.ledger = ledger
        app = create_app(gateway, ServerConfig())
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://test"
        )
        self.openai = openai.AsyncOpenAI(
            base_url="http://test/v1", api_key="k", max_retries=0, http_client=self.http
        )
        self.anthropic = anthropic.AsyncAnthropic(
            base_url="http://test",
            api_key="k",
            max_retries=0,
            http_client=httpx2.AsyncClient(transport=httpx2.ASGITransport(app)),
        )


@asynccontextmanager
async def platform(
    server: OpenAIServer, *, engine: FakeEngine | None = None, **config: Any
) -> AsyncIterator[Platform]:
    """Our gateway before `server`, and before an engine of its own with the model `bytes`."""
    async with serving(server):
        pool = ExternalPool([ExternalServer(ExternalServerConfig(url=server.url))])
        await pool.probe()
        limits = ScopeLimits(requests_per_minute=100, input_tokens_per_minute=6_000)
        limiter, ledger = LocalLimiter(LimitSettings(key=limits)), RecordingLedger()
        gateway = Gateway(
            engine or FakeEngine(script_text("ours")),
            GatewayConfig(**config),
            accounts=Accounts(limiter, ledger),
        )
        gateway.catalogue.external = ExternalModels(pool)
        gateway.metrics.register(gateway.catalogue.external)
        yield Platform(gateway, limiter, ledger)
        assert gateway.num_live == 0
        await pool.close()


def script(*pieces: str, **fields: Any) -> Any:
    return lambda body: text_chunks(*pieces, usage=USAGE, **fields)


async def test_workspaces_do_not_learn_of_each_others_cached_prompts() -> None:
    """vLLM keeps salted prompts apart; of a server that cannot, cached tokens are not told."""
    for owner, expected in (("vllm", 32), ("llamacpp", 0)):
        server = OpenAIServer(script=script("Hel", "lo"))
        server.owned_by = owner
        async with platform(server) as ours:
            for workspace_id in ("ws-1", "ws-2"):
                request = GenerationRequest(
                    prompts=(TextPrompt("hi"),),
                    sampling=SamplingOptions(),
                    model="theirs",
                    principal=Principal(workspace_id=workspace_id),
                )
                answer = await ours.gateway.submit(request)
                await answer.collect()
                assert answer.usage.cached_tokens == expected
        salts = [body.get("cache_salt") for body in server.bodies]
        assert len(set(salts)) == (2 if owner == "vllm" else 1)
        assert (None in salts) == (owner != "vllm")


async def test_openai_whole_and_streamed() -> None:
    server = OpenAIServer(script=script("Hel", "lo"))
    async with platform(server) as ours:
        whole = await ours.openai.chat.completions.create(**CHAT, n=2, max_tokens=9)  # type: ignore[call-overload]
        assert [choice.message.content for choice in whole.choices] == ["Hello", "Hello"]
        assert whole.model == "theirs"
        assert whole.choices[0].finish_reason == "stop"
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (40, 4)
        assert whole.usage.prompt_tokens_details.cached_tokens == 32
        latencies = ours.gateway.metrics.of("theirs").latencies(Tier.DEFAULT)
        assert sum(latencies.first_token_s.counts) == sum(latencies.inter_token_s.counts) == 0, "nobody knows"
        assert sum(latencies.end_to_end_s.counts) == 2
        chunks = [
            chunk
            async for chunk in await ours.openai.chat.completions.create(
                **CHAT, stream=True, stream_options={"include_usage": True}
            )  # type: ignore[call-overload]
        ]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "Hello"
        assert chunks[-1].usage.prompt_tokens == 40
        assert (await ours.openai.completions.create(model="theirs", prompt="x")).usage is not None
        own = await ours.openai.chat.completions.create(model="bytes", messages=[USER])
        assert own.choices[0].message.content == "ours"
    assert len(server.bodies) == 4
    assert server.paths == ["/v1/chat/completions"] * 3 + ["/v1/completions"]
    assert server.bodies[0]["max_tokens"] == 9


async def test_the_ledger_and_the_limits_know_what_was_used() -> None:
    async with platform(OpenAIServer(script=script("Hel", "lo"))) as ours:
        answer = await ours.http.post("/v1/chat/completions", json=CHAT)
        assert answer.headers["x-ratelimit-remaining-requests"] == "99"
        (claim, outcome), *_ = ours.ledger.rows
        assert (claim.model, outcome.status) == ("theirs", "completed")
        assert (outcome.usage.prompt_tokens, outcome.usage.cached_tokens) == (40, 32)
        shown = await ours.limiter.peek(OPEN_PRINCIPAL, None)
        assert shown.input_tokens is not None
        assert 6_000 - 8 <= shown.input_tokens.remaining < 6_000, "without those read from the cache"
        (shown,) = ours.external.replica_views()
        assert (shown.model, shown.state, shown.role, shown.num_running) == ("theirs", "ready", "external", 0)
        page = (await ours.http.get("/metrics")).text
        assert 'penstock_generation_tokens_total{model_name="theirs"} 2.0' in page
        assert 'outcome="served"' in page


async def test_anthropic_whole_and_streamed() -> None:
    server = OpenAIServer(script=script("Hel", "lo", stop_reason="!"))
    async with platform(server) as ours:
        ask: Any = {"model": "theirs", "max_tokens": 5, "system": "Be kind.", "messages": [USER]}
        message = await ours.anthropic.messages.create(**ask, stop_sequences=["!"])
        assert message.content[0].text == "Hello"
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "!")
        assert (message.usage.input_tokens, message.usage.output_tokens) == (40, 2)
        events = [event async for event in await ours.anthropic.messages.create(**ask, stream=True)]
        assert events[0].type == "message_start"
        assert events[-1].type == "message_stop"
        assert events[-2].usage.input_tokens == 40
    assert server.bodies[0]["messages"][0] == {"role": "system", "content": "Be kind."}
    assert server.bodies[0]["stop"] == ["!"]


def with_images(*urls: str) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"model": "theirs", "messages": [{"role": "user", "content": parts}]}


async def test_urls_of_images_lead_no_server_into_its_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server would fetch them for anybody. The rules are those for models of our own."""
    addresses = {"good.example": "93.184.216.34", "evil.example": "169.254.169.254"}
    resolve = socket.getaddrinfo

    def resolve_ours(host: Any, *options: Any, **more: Any) -> list[Any]:
        return resolve(addresses.get(host, host), *options, **more)

    monkeypatch.setattr(socket, "getaddrinfo", resolve_ours)
    inline = "data:image/png;base64,AAAA"
    refused = {
        "http://other.example/cat.png": "'other.example' may not be fetched",
        "http://evil.example/cat.png": "leads into an internal network",
        "http://127.0.0.1:8000/metrics": "'127.0.0.1' may not be fetched",
        "file:///etc/passwd": "must begin with",
    }
    server = OpenAIServer(script=script("Hel", "lo"))
    async with platform(server, allowed_image_hosts=("good.example", "evil.example"), max_images=2) as ours:
        for url, says in refused.items():
            answer = await ours.http.post("/v1/chat/completions", json=with_images(inline, url))
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, "messages[0].content")
            assert says in error["message"]
        answer = await ours.http.post("/v1/chat/completions", json=with_images(inline, inline, inline))
        assert (answer.status_code, answer.json()["error"]["message"]) == (
            400,
            "The request has 3 images, and at most 2 are allowed.",
        )
        assert not server.bodies
        taken = with_images(inline, "https://good.example/cat.png")
        assert (await ours.http.post("/v1/chat/completions", json=taken)).status_code == 200
    assert server.bodies[0]["messages"] == taken["messages"]


@pytest.mark.parametrize("status", [200, 302, 400])
async def test_no_header_passes_in_either_direction(status: int) -> None:
    body = {"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}]} if status == 200 else {}
    theirs = {"set-cookie": "a=b", "server": "other/1", "x-other": "1", "access-control-allow-origin": "*"}
    server = OpenAIServer(script=lambda _: [JSONResponse(body, status, theirs | {"location": server.url})])
    ours = {
        "cookie": "session=1",
        "connection": "authorization, x-api-key",
        "proxy-authorization": "Basic eDp5",
        "x-forwarded-for": "192.0.2.1",
        "x-request-id": "of-the-client",
    }
    async with platform(server) as platform_:
        answer = await platform_.http.post(
            "/v1/chat/completions",
            json=CHAT | {"max_tokens": 4},
            headers=ours | {"authorization": "Bearer of-the-client"},
        )
    assert answer.status_code == {200: 200, 302: 503, 400: 400}[status]
    assert theirs.keys().isdisjoint(answer.headers)
    assert len(server.headers) == 1, "no redirection is followed"
    assert server.headers[0].keys() == {
        "host",
        "accept-encoding",
        "user-agent",
        "content-type",
        "content-length",
    }


async def test_tools_and_structure_are_passed_on() -> None:
    def call(body: dict[str, Any]) -> list[dict[str, Any]]:
        calls = [{"index": 0, "id": "c1", "function": {"name": "f", "arguments": '{"a": 1}'}}]
        return [
            {"choices": [{"delta": {"tool_calls": calls}}]},
            {"choices": [{"delta": {}, "finish_reason": "tool_calls"}]},
        ]

    server = OpenAIServer(script=call)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    async with platform(server) as ours:
        answer = await ours.openai.chat.completions.create(
            **CHAT, tools=[tool], tool_choice="required", response_format={"type": "json_object"}
        )  # type: ignore[call-overload]
        assert answer.choices[0].finish_reason == "tool_calls"
        assert answer.choices[0].message.tool_calls[0].function.arguments == '{"a": 1}'
        message = await ours.anthropic.messages.create(
            model="theirs",
            max_tokens=9,
            messages=[USER],
            tools=[{"name": "f", "input_schema": {"type": "object"}}],
        )
        assert (message.stop_reason, message.content[0].input) == ("tool_use", {"a": 1})
        response = await ours.openai.responses.create(model="theirs", input="x")
        assert response.output[0].type == "function_call"
    assert server.bodies[0]["tool_choice"] == "required"
    assert server.bodies[0]["response_format"] == {"type": "json_object"}


async def test_guards_and_the_response_cache_work_for_them_too() -> None:
    server = OpenAIServer(script=script("card 4111 1111", " 1111 1111 ok"))
    async with platform(server) as ours:
        rules = {"rules": [{"guard": "pii"}]}
        ours.gateway.guards.apply(guard_settings({"policies": {"p": rules}, "default_policy": "p"}))
        body = {**CHAT, "messages": [{"role": "user", "content": "mail a@example.com"}]}
        headers = {"x-penstock-cache": "60"}
        answers = [await ours.http.post("/v1/chat/completions", json=body, headers=headers) for _ in range(2)]
        texts = [answer.json()["choices"][0]["message"]["content"] for answer in answers]
        assert texts == ["card [CREDIT_CARD] ok"] * 2
        assert [answer.headers["x-penstock-cache"] for answer in answers] == ["miss", "hit"]
        tokens = await ours.http.post("/v1/completions", json={"model": "theirs", "prompt": [1, 2]})
        assert tokens.status_code == 400
        assert "Send the prompt as text" in tokens.text
    (asked,) = server.bodies
    assert asked["messages"][0]["content"] == "mail [EMAIL]"


async def test_models_are_listed_and_may_have_aliases() -> None:
    async with platform(OpenAIServer("theirs", "bytes")) as ours:
        ours.gateway.catalogue.apply(ModelSettings(aliases={"gpt": "theirs"}))
        listed = {model["id"]: model for model in (await ours.http.get("/v1/models")).json()["data"]}
        assert listed.keys() == {"bytes", "theirs", "gpt"}
        assert listed["theirs"]["max_model_len"] is None
        assert {name: model["owned_by"] for name, model in listed.items()} == {
            "bytes": "penstock",
            "theirs": "external",
            "gpt": "external",
        }
        assert listed["bytes"]["max_model_len"] is not None, "a model of our own goes first"
        answer = await ours.openai.chat.completions.create(model="gpt", messages=[USER])
        assert (answer.model, answer.choices[0].message.content) == ("theirs", "Hello")
        async for model in ours.anthropic.models.list():
            assert model.id in listed


async def test_what_takes_a_tokenizer_is_refused() -> None:
    async with platform(OpenAIServer()) as ours:
        for path, body in (
            ("/tokenize", {"model": "theirs", "prompt": "x"}),
            ("/v1/messages/count_tokens", CHAT),
            ("/v1/completions", {"model": "theirs", "prompt": "x", "echo": True, "logprobs": 1}),
            ("/v1/completions", {"model": "theirs", "prompt": "x", "echo": True, "max_tokens": 0}),
            ("/v1/chat/completions", CHAT | {"prompt_logprobs": 1}),
            # Such a server may run a template, which guards cannot read.
            ("/v1/chat/completions", CHAT | {"chat_template": "{{ messages }}"}),
        ):
            answer = await ours.http.post(path, json=body)
            assert answer.status_code == 400, answer.text
            assert "runs on another server" in answer.text
        unknown = await ours.http.post("/v1/chat/completions", json=CHAT | {"model": "nobodys"})
        assert unknown.status_code == 404


async def test_a_server_that_refuses_says_why_and_one_that_fails_is_a_503() -> None:
    server = OpenAIServer(script=lambda body: [JSONResponse({"error": {"message": "too hot"}}, 400)])
    async with platform(server) as ours:
        refused = await ours.http.post("/v1/chat/completions", json=CHAT)
        assert refused.status_code == 400
        assert "too hot" in refused.json()["error"]["message"]
        assert refused.headers["x-ratelimit-remaining-requests"]
        server.script = lambda body: [JSONResponse({}, 500)]
        failed = await ours.http.post("/v1/messages", json=CHAT | {"max_tokens": 5})
        assert failed.status_code == 503
        assert failed.json()["error"]["type"] == "api_error"
        server.script = lambda body: text_chunks("half", "way")[:2]
        broken = await ours.http.post("/v1/chat/completions", json=CHAT | {"stream": True})
        assert "broke off" in broken.text
        assert "[DONE]" not in broken.text
        statuses = [outcome.status for _, outcome in ours.ledger.rows]
        assert statuses == ["failed"] * 3


async def test_a_deadline_ends_an_answer_where_it_is() -> None:
    waits = asyncio.Event()
    server = OpenAIServer(script=lambda body: [*text_chunks("begun")[:2], waits])
    async with platform(server) as ours:
        headers = {"x-request-timeout-ms": "600000"}

        async def ask_until_too_late(number: int) -> httpx.Response:
            asking = asyncio.create_task(ours.http.post("/v1/chat/completions", json=CHAT, headers=headers))
            await until(lambda: len(server.bodies) == number)
            await settle()
            pass_time(600.0)
            return await asking

        late = await ask_until_too_late(1)
        assert late.json()["choices"][0]["message"]["content"] == "begun"
        assert late.json()["choices"][0]["finish_reason"] == "length"
        server.script = lambda body: [waits]
        never = await ask_until_too_late(2)
        assert never.status_code == 504
        async with asyncio.timeout(60):
            while server.num_abandoned < 2:
                await asyncio.sleep(0.01)


async def test_a_client_that_leaves_is_heard_of_over_there() -> None:
    server = OpenAIServer(script=lambda body: [*text_chunks("a")[:2], 30.0])
    async with platform(server) as ours:
        body = {
            "id": "1",
            "model": "theirs",
            "prompt": "x",
            "max_tokens": 1000,
        }  # too many to be asked for whole
        asking = asyncio.create_task(ours.http.post("/v1/completions", json=body))
        async with asyncio.timeout(60):
            while not ours.gateway.num_live or not server.bodies:
                await asyncio.sleep(0.01)
            assert await ours.gateway.drain(0.05) is False
            while not server.num_abandoned:
                await asyncio.sleep(0.01)
        assert (await asking).status_code == 503


async def test_a_platform_without_engines_of_its_own() -> None:
    engine = FakeEngine()
    engine.ready = None
    server = OpenAIServer()
    async with platform(server, engine=engine) as ours:
        assert (await ours.http.get("/ready")).status_code == 200
        named = await ours.http.post("/v1/chat/completions", json={"messages": [USER]})
        assert named.json()["model"] == "theirs"
        assert (await ours.http.get("/v1/models")).json()["data"][0]["id"] == "theirs"
        unknown = await ours.http.post("/v1/chat/completions", json=CHAT | {"model": "other"})
        assert unknown.status_code == 404, json.dumps(unknown.json())


async def test_another_penstock_behind_ours() -> None:
    """Which is an OpenAI-compatible server like any other, and tells its load under vLLM's names."""
    theirs = create_app(Gateway(FakeEngine(script_text("from afar")), GatewayConfig()), ServerConfig())
    async with listening(theirs) as url:
        server = ExternalServer(ExternalServerConfig(url=url, models={"far": "bytes"}))
        pool = ExternalPool([server])
        await pool.probe()
        gateway = Gateway(FakeEngine(), GatewayConfig())
        gateway.catalogue.external = ExternalModels(pool)
        app = create_app(gateway, ServerConfig())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            answer = (await client.post("/v1/chat/completions", json=CHAT | {"model": "far"})).json()
            assert answer["choices"][0]["message"]["content"] == "from afar"
            assert answer["usage"]["completion_tokens"] == len("from afar") + 1
        assert server.load is not None
        assert server.max_model_lens == {"far": 256}
        await pool.close()


async def test_a_reader_that_falls_behind_loses_the_request() -> None:
    server = OpenAIServer(script=script(*["x" * 600] * 4))
    async with platform(server, max_stream_buffer_bytes=1024) as ours:
        answer = await ours.gateway.submit(
            GenerationRequest(prompts=(TextPrompt("x"),), sampling=SamplingOptions(), model="theirs")
        )
        async with asyncio.timeout(60):
            while ours.gateway.num_live:
                await asyncio.sleep(0.01)
        with pytest.raises(Overloaded, match="bytes behind"):
            await anext(answer)


VLLM_OLD = (
    "This model's maximum context length is 8192 tokens. However, you requested {total} tokens (471 in the messages, "
    "{asked} in the completion). Please reduce the length of the messages or completion."
)
VLLM = (
    "'max_tokens' or 'max_completion_tokens' is too large: {asked}. This model's maximum context length is 8192 "
    "tokens and your request has 471 input tokens ({asked} > 8192 - 471)."
)
VLLM_NEW = (
    "This model's maximum context length is 8192 tokens. However, you requested {asked} output tokens and your "
    "prompt contains at least 400 input tokens, for a total of at least 8193 tokens."
)
SGLANG = (
    "Requested token count exceeds the model's maximum context length of 8192 tokens. You requested a total of "
    "{total} tokens: 471 tokens from the input messages and {asked} tokens for the completion."
)


def strict(sentence: str) -> OpenAIServer:
    """A server whose prompts have 471 tokens, and that refuses answers beyond its context."""

    def answer(body: dict[str, Any]) -> list[Any]:
        asked = body.get("max_tokens", 0)
        if asked <= 8192 - 471:
            return text_chunks("Hello", usage=USAGE)
        message = sentence.format(asked=asked, total=asked + 471)
        return [JSONResponse({"error": {"message": message}}, status_code=400)]

    return OpenAIServer(script=answer)


@pytest.mark.parametrize(
    ("sentence", "given"), [(VLLM_OLD, 7721), (VLLM, 7721), (VLLM_NEW, None), (SGLANG, 7721)]
)
async def test_an_answer_longer_than_their_context_is_asked_for_again(
    sentence: str, given: int | None
) -> None:
    server = strict(sentence)
    async with platform(server) as ours:
        answer = await ours.http.post("/v1/chat/completions", json=CHAT | {"max_tokens": 32_000})
        assert answer.json()["choices"][0]["message"]["content"] == "Hello"
        (warning,) = answer.json()["warnings"]
        assert (warning["code"], str(given or "fewer") in warning["message"]) == ("max_tokens_lowered", True)
        message = await ours.http.post("/v1/messages", json=CHAT | {"max_tokens": 32_000, "stream": True})
        assert "max_tokens_lowered" in message.text.partition("content_block_start")[0]
        assert message.headers["warning"].startswith("299 ")
    assert [body.get("max_tokens") for body in server.bodies] == [32_000, given] * 2


async def test_their_refusal_is_passed_on_where_answers_are_not_shortened() -> None:
    server = strict(VLLM)
    async with platform(server, refuse_long_outputs=True) as ours:
        answer = await ours.http.post("/v1/chat/completions", json=CHAT | {"max_tokens": 32_000})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert len(server.bodies) == 1


async def test_a_prompt_that_is_too_long_for_them_is_asked_once() -> None:
    message = "This model's maximum context length is 8 tokens. However, you requested 14 tokens (9 in the messages)."
    server = OpenAIServer(
        script=lambda body: [JSONResponse({"error": {"message": message}}, status_code=400)]
    )
    async with platform(server) as ours:
        answer = await ours.http.post("/v1/messages", json=CHAT | {"max_tokens": 5})
    assert answer.json()["error"]["message"] == "prompt is too long: 9 tokens > 8 maximum"
    assert len(server.bodies) == 1


async def test_no_more_is_asked_for_or_reserved_than_a_known_context_holds() -> None:
    server = OpenAIServer(script=script("Hel", "lo"))
    server.max_model_len = 1000
    async with platform(server) as ours:
        answer = await ours.http.post("/v1/chat/completions", json=CHAT | {"max_tokens": 32_000})
        assert answer.json()["warnings"][0]["code"] == "max_tokens_lowered"
        (claim, _), *_ = ours.ledger.rows
    (body,) = server.bodies
    assert claim.max_output_tokens == body["max_tokens"]
    assert 900 < body["max_tokens"] < 1000
