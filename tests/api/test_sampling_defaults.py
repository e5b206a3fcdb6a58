"""The makers' sampling defaults hold in every dialect, unless a request says otherwise."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.core.request import SamplingDefaults, SamplingParams
from tests.api.conftest import direct_client
from tests.gateway.fake_engine import FakeEngine, engine_ready, model_card, script_text

MAKERS = SamplingDefaults(
    temperature=0.01, top_p=0.8, top_k=20, min_p=0.05, repetition_penalty=1.1, max_new_tokens=7
)
USER = [{"role": "user", "content": "hi"}]
DIALECTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": USER}),
    "completions": ("/v1/completions", {"prompt": "hi"}),
    "responses": ("/v1/responses", {"input": "hi"}),
    "messages": ("/v1/messages", {"model": "bytes", "messages": USER, "max_tokens": 5}),
    "ollama": ("/api/chat", {"model": "bytes", "messages": USER, "stream": False}),
}


async def sampled(stated: SamplingDefaults, dialect: str, **fields: Any) -> SamplingParams:
    engine = FakeEngine(script_text("fine"), engine_ready(model_card(sampling_defaults=stated)))
    path, body = DIALECTS[dialect]
    async with direct_client(engine) as client:
        answer = await client.post(path, json=body | fields)
    assert answer.status_code == 200, answer.text
    return engine.added[0].sampling


def numbers(params: SamplingParams) -> tuple[float | None, ...]:
    return params.temperature, params.top_p, params.top_k, params.min_p, params.repetition_penalty


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_makers_speak_in_every_dialect(dialect: str) -> None:
    assert numbers(await sampled(MAKERS, dialect)) == (0.01, 0.8, 20, 0.05, 1.1)


@pytest.mark.parametrize(("dialect", "off"), [("chat", -1), ("chat", 0), ("completions", 0), ("messages", 0)])
async def test_a_request_outranks_the_makers(dialect: str, off: int) -> None:
    params = await sampled(MAKERS, dialect, temperature=0.7, top_k=off)
    assert numbers(params) == (0.7, 0.8, None, 0.05, 1.1)


async def test_options_of_ollama_outrank_the_makers_and_its_defaults_stand_in_for_silent_ones() -> None:
    params = await sampled(MAKERS, "ollama", options={"temperature": 0.5, "repeat_penalty": 1.2, "top_k": 0})
    assert numbers(params) == (0.5, 0.8, None, 0.05, 1.2)
    assert numbers(await sampled(SamplingDefaults(), "ollama")) == (0.8, 0.9, 40, 0.0, 1.0)
    assert numbers(await sampled(SamplingDefaults(), "chat")) == (1.0, 1.0, None, 0.0, 1.0)


async def test_makers_bound_an_answer_that_has_no_bound_of_its_own() -> None:
    assert (await sampled(MAKERS, "chat")).max_tokens == 7
    assert (await sampled(MAKERS, "chat", max_tokens=9)).max_tokens == 9


async def test_the_list_of_models_and_a_response_tell_the_defaults() -> None:
    engine = FakeEngine(script_text("fine"), engine_ready(model_card(sampling_defaults=MAKERS)))
    async with direct_client(engine) as client:
        (entry,) = (await client.get("/v1/models")).json()["data"]
        response = (await client.post("/v1/responses", json={"input": "hi", "top_p": 0.5})).json()
    assert entry["sampling_defaults"] == MAKERS.stated()
    assert (response["temperature"], response["top_p"]) == (0.01, 0.5)
