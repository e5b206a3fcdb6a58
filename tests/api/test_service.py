"""Health, metrics, tokenization and keys."""

from __future__ import annotations

from typing import Any

import pytest

from penstock import __version__
from penstock.core.gateway_config import GatewayConfig
from penstock.gateway.gateway import Gateway
from tests.api.conftest import direct_client
from tests.gateway.fake_engine import EOS_ID, FakeEngine, engine_ready, model_card, script_text


async def test_health_and_readiness_follow_the_engine() -> None:
    engine = FakeEngine()
    engine.ready = None  # type: ignore[assignment]
    gateway = Gateway(engine, GatewayConfig())
    async with direct_client(engine, gateway) as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).status_code == 503
        refused = await client.post("/v1/completions", json={"prompt": "x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")
        assert "retry-after" in refused.headers
        engine.ready = engine_ready()
        assert (await client.get("/ready")).json() == {"status": "ready"}
        assert (await client.get("/v1/models")).status_code == 200
        engine.ready = None  # type: ignore[assignment]
        assert (await client.get("/health")).status_code == 503


async def test_version() -> None:
    async with direct_client(FakeEngine()) as client:
        assert (await client.get("/version")).json() == {"version": __version__}


async def test_metrics() -> None:
    async with direct_client(FakeEngine(script_text("abc"))) as client:
        await client.post("/v1/completions", json={"prompt": "x"})
        answer = await client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    assert 'vllm:generation_tokens_total{model_name="bytes"} 4.0' in answer.text
    assert 'penstock_request_success_total{finished_reason="stop",model_name="bytes"} 1.0' in answer.text


async def test_answers_are_counted_by_route_and_status() -> None:
    async with direct_client(FakeEngine(script_text("abc"))) as client:
        await client.post("/v1/completions", json={"prompt": "x"})
        await client.post("/v1/completions/", json={"prompt": 1.5})
        for name in ("one", "two"):
            await client.get(f"/v1/models/{name}")
            await client.get(f"/nowhere/{name}")
        page = (await client.get("/metrics")).text
    counts = {line for line in page.splitlines() if line.startswith("penstock_http_requests_total{")}
    assert counts == {
        'penstock_http_requests_total{path="/v1/completions",status="200"} 1.0',
        'penstock_http_requests_total{path="/v1/completions",status="400"} 1.0',
        'penstock_http_requests_total{path="/v1/models/{name}",status="404"} 2.0',
        'penstock_http_requests_total{path="other",status="404"} 2.0',
    }


async def test_tokenize_and_detokenize() -> None:
    engine = FakeEngine(ready=engine_ready(model_card(add_bos_token=True)))
    async with direct_client(engine) as client:
        plain = (await client.post("/tokenize", json={"prompt": "hé", "return_token_strs": True})).json()
        assert plain == {
            "count": 4,
            "max_model_len": 256,
            "tokens": [257, *"hé".encode()],
            "token_strs": ["<|begin|>", "h", "\ufffd", "\ufffd"],
        }
        bare = (await client.post("/tokenize", json={"prompt": "a", "add_special_tokens": False})).json()
        assert (bare["tokens"], bare["token_strs"]) == ([97], None)
        messages = [{"role": "user", "content": "a"}]
        chat = (await client.post("/tokenize", json={"model": "bytes", "messages": messages})).json()
        assert chat["tokens"] == [258, 97, EOS_ID, 259]
        closed = {"messages": messages, "add_generation_prompt": False}
        assert (await client.post("/tokenize", json=closed)).json()["tokens"] == [258, 97, EOS_ID]
        text = (await client.post("/detokenize", json={"tokens": chat["tokens"]})).json()
        assert text == {"prompt": "<|user|>a<|end|><|assistant|>"}


async def test_what_else_a_template_writes_is_tokenized() -> None:
    engine = FakeEngine(script_text("x"), engine_ready(model_card(max_model_len=8192), max_output_tokens=64))
    tool = {"type": "function", "function": {"name": "find", "description": "Finds.", "parameters": {}}}
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        "tools": [tool],
    }
    async with direct_client(engine) as client:
        continued = {**body, "add_generation_prompt": False, "continue_final_message": True}
        for fields in (body, continued, {**body, "tools": None, "chat_template_kwargs": {"x": 1}}):
            counted = (await client.post("/tokenize", json=fields)).json()
            await client.post("/v1/chat/completions", json={**fields, "max_tokens": 1})
            assert tuple(counted["tokens"]) == engine.added[-1].prompt_token_ids
        refused = await client.post("/tokenize", json={**body, "chat_template": "{{ 1 }}"})
        assert refused.json()["error"]["param"] == "chat_template"


async def test_tokenizer_info() -> None:
    engine = FakeEngine(ready=engine_ready(model_card(chat_template=None)))
    async with direct_client(engine, api_key="right") as client:
        assert (await client.get("/tokenizer_info")).status_code == 401
        key = {"authorization": "Bearer right"}
        assert (await client.get("/tokenizer_info", headers=key)).json() == {
            "bos_token": "<|begin|>",
            "eos_token": "<|end|>",
            "pad_token": None,
            "unk_token": None,
            "add_bos_token": False,
            "model_max_length": 256,
            "chat_template": None,
        }
        unknown = await client.get("/tokenizer_info", params={"model": "nobody's"}, headers=key)
        assert unknown.status_code == 404


@pytest.mark.parametrize("header", [{}, {"authorization": "Bearer wrong"}, {"authorization": "Basic right"}])
async def test_a_key_is_asked_for(header: dict[str, str]) -> None:
    engine = FakeEngine(script_text("fine"))
    async with direct_client(engine, api_key="right") as client:
        for method, path in (
            ("POST", "/v1/completions"),
            ("GET", "/v1/models"),
            ("GET", "/metrics"),
            ("GET", "/x"),
        ):
            answer = await client.request(method, path, headers=header, json={"prompt": "x"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.headers["x-request-id"]
        for path in ("/", "/health", "/ready", "/version"):
            assert (await client.get(path, headers=header)).status_code == 200
    assert engine.added == []


@pytest.mark.parametrize("header", ["Bearer right", "bearer right", "Bearer  right "])
async def test_the_right_key_opens(header: str) -> None:
    async with direct_client(FakeEngine(), api_key="right") as client:
        answer = await client.get("/v1/models", headers={"authorization": header})
    assert answer.status_code == 200
