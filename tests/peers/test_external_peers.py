"""Our gateway before real servers of other projects. Opt-in: `make test-peers`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from penstock.api.app import create_app
from penstock.cluster.external.pool import ExternalPool
from penstock.cluster.external.server import ExternalServer
from penstock.core.config import ExternalServerConfig
from penstock.core.gateway_config import GatewayConfig, ServerConfig
from penstock.gateway.external.models import ExternalModels
from penstock.gateway.gateway import Gateway
from penstock.gateway.prompts import GenerationRequest, SamplingOptions, TextPrompt
from tests.gateway.fake_engine import FakeEngine
from tests.peers.peer_servers import llama_cpp, vllm

pytestmark = [pytest.mark.peers, pytest.mark.timeout(600)]

USER = {"role": "user", "content": "Say hello to the world, please."}
CHAT: dict[str, Any] = {"model": "peer", "messages": [USER], "max_tokens": 8, "temperature": 0}
Start = Callable[[Path], AbstractContextManager[str]]


@pytest.fixture(scope="module", params=[llama_cpp, vllm], ids=lambda start: start.__name__)
def peer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    start: Start = request.param
    with start(tmp_path_factory.mktemp("peer")) as url:
        yield url


class Platform:
    def __init__(self, pool: ExternalPool) -> None:
        self.pool = pool
        self.gateway = Gateway(FakeEngine(), GatewayConfig())
        self.gateway.catalogue.external = ExternalModels(pool)
        transport = httpx.ASGITransport(create_app(self.gateway, ServerConfig()))
        self.http = httpx.AsyncClient(transport=transport, base_url="http://test", timeout=120)

    async def ask(self, path: str, body: dict[str, Any]) -> Any:
        answer = await self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()


@asynccontextmanager
async def platform(*urls: str) -> AsyncIterator[Platform]:
    pool = ExternalPool([ExternalServer(ExternalServerConfig(url=url)) for url in urls])
    await pool.probe()
    yield Platform(pool)
    await pool.close()


async def test_models_and_load_are_seen(peer: str) -> None:
    async with platform(peer) as ours:
        listed = (await ours.http.get("/v1/models")).json()["data"]
        assert "peer" in {model["id"] for model in listed}
        (view,) = ours.pool.views()
        assert view.load is not None
        assert view.load.num_running == 0


async def test_both_apis_and_their_usage(peer: str) -> None:
    async with platform(peer) as ours:
        long = {**CHAT, "messages": [{"role": "system", "content": "Be brief and kind. " * 20}, USER]}
        first, second = [await ours.ask("/v1/chat/completions", long) for _ in range(2)]
        assert first["usage"]["prompt_tokens"] > 80
        assert 0 < first["usage"]["completion_tokens"] <= 8
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 32
        assert second["choices"][0]["message"]["content"] == first["choices"][0]["message"]["content"]
        message = await ours.ask("/v1/messages", {"model": "peer", "messages": [USER], "max_tokens": 8})
        assert message["usage"]["output_tokens"] <= 8
        assert message["content"][0]["type"] == "text"
        streamed = await ours.http.post("/v1/chat/completions", json=CHAT | {"stream": True})
        assert streamed.text.endswith("data: [DONE]\n\n")
        completion = await ours.ask(
            "/v1/completions", {"model": "peer", "prompt": "Once", "max_tokens": 4, "n": 2}
        )
        assert len(completion["choices"]) == 2


async def test_structure_logprobs_and_stop(peer: str) -> None:
    async with platform(peer) as ours:
        schema = {
            "type": "object",
            "properties": {"ok": {"type": "boolean"}},
            "required": ["ok"],
            "additionalProperties": False,
        }
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
        body = CHAT | {"max_tokens": 60, "response_format": wanted}
        (choice,) = (await ours.ask("/v1/chat/completions", body))["choices"]
        assert choice["message"]["content"].lstrip().startswith("{")
        if choice["finish_reason"] == "stop":  # a random model may write spaces until it is cut off
            assert isinstance(msgspec.json.decode(choice["message"]["content"])["ok"], bool)
        detailed = await ours.ask("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2})
        tokens = detailed["choices"][0]["logprobs"]["content"]
        assert len(tokens) >= 1
        assert len(tokens[0]["top_logprobs"]) == 2


async def test_a_refusal_is_the_clients(peer: str) -> None:
    async with platform(peer) as ours:
        long = CHAT | {"messages": [{"role": "user", "content": "word " * 9000}]}
        refused = await ours.http.post("/v1/chat/completions", json=long)
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "context_length_exceeded", refused.text


async def test_cancelling_frees_the_server(peer: str) -> None:
    async with platform(peer) as ours:
        sampling = SamplingOptions(max_tokens=900, ignore_eos=True)
        request = GenerationRequest(prompts=(TextPrompt("Count: 1 2 3"),), sampling=sampling, model="peer")
        answer = await ours.gateway.submit(request)
        await anext(answer)
        answer.cancel()
        async with asyncio.timeout(20):
            while True:
                await ours.pool.probe()
                load = ours.pool.views()[0].load
                if load is not None and load.num_running == 0:
                    break
                await asyncio.sleep(0.1)


async def test_two_kinds_of_server_stand_in_for_each_other(tmp_path: Path) -> None:
    with vllm(tmp_path) as first:
        with llama_cpp(tmp_path) as second:
            async with platform(first, second) as ours:
                for number in range(6):
                    await ours.ask("/v1/chat/completions", CHAT | {"seed": number})
                served = [view.outcomes.get("served", 0) for view in ours.pool.views()]
                assert sum(served) == 6
        async with platform(first, second) as ours:  # the second has gone
            for number in range(6):
                await ours.ask("/v1/chat/completions", CHAT | {"seed": number})
