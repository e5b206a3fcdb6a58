"""Splits and fallbacks: which model answers, and what happens when it cannot. Our engine serves `bytes`, an external
server `theirs`."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
from starlette.responses import JSONResponse

from penstock.core.errors import (
    ConfigError,
    ContextLengthExceeded,
    EngineUnavailable,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    PenstockError,
    QuotaExceeded,
    ShuttingDown,
)
from penstock.core.identity import Principal
from penstock.gateway.models.routes import chosen_by_weight, reason_of
from penstock.gateway.models.settings import ModelSettings
from penstock.gateway.prompts import GenerationRequest, SamplingOptions, TextPrompt
from tests.api.test_external_models import CHAT, Platform, platform, script
from tests.cluster.external.openai_server import OpenAIServer, text_chunks


def settings_of(**tables: Any) -> ModelSettings:
    settings = msgspec.convert(tables, ModelSettings)
    settings.check()
    return settings


async def chat(ours: Platform, model: str, **fields: Any) -> dict[str, Any]:
    answer = await ours.http.post("/v1/chat/completions", json=CHAT | {"model": model, **fields})
    return {"status": answer.status_code, **answer.json()}


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ContextLengthExceeded("x"), "context"),
        (QuotaExceeded("x"), "budget"),
        (Overloaded("x"), "queue"),
        (EngineUnavailable("x"), "error"),
        (ModelNotFound("x"), "error"),
        (PenstockError("x"), "error"),
        (ShuttingDown("x"), None),
        (InvalidRequest("x"), None),
    ],
)
def test_reasons(error: PenstockError, reason: str | None) -> None:
    assert reason_of(error) == reason


def test_weights_hold_in_the_long_run() -> None:
    chosen = Counter(chosen_by_weight({"a": 9, "b": 1}, b"%d" % number) for number in range(2000))
    assert 1700 < chosen["a"] < 1900
    assert chosen_by_weight({"a": 9, "b": 1}, b"7") == chosen_by_weight({"a": 9, "b": 1}, b"7")


async def test_a_split_keeps_a_user_with_one_model() -> None:
    async with platform(OpenAIServer(script=script("hi"))) as ours:
        ours.gateway.catalogue.settings = settings_of(splits={"best": {"theirs": 1, "bytes": 1}})
        answers = [
            (user, (await chat(ours, "best", user=user, max_tokens=3))["model"])
            for user in map(str, range(12))
            for _ in range(2)
        ]
        listed = (await ours.http.get("/v1/models")).json()["data"]
    assert len(set(answers)) == 12, "each user has one model"
    assert {model for _, model in answers} == {"theirs", "bytes"}
    assert "best" in {model["id"] for model in listed}


@pytest.mark.parametrize("stream", [False, True])
async def test_our_engine_answers_when_the_server_cannot(stream: bool) -> None:
    server = OpenAIServer(script=lambda body: [JSONResponse({"error": {"message": "no"}}, 503)])
    async with platform(server) as ours:
        ours.gateway.catalogue.settings = settings_of(fallbacks={"theirs": {"models": ["bytes"]}})
        answer = await ours.http.post("/v1/chat/completions", json=CHAT | {"stream": stream})
        assert answer.status_code == 200
        assert '"model":"bytes"' in answer.text
        statuses = [(claim.model, outcome.status) for claim, outcome in ours.ledger.rows]
        assert statuses == [("theirs", "failed"), ("bytes", "completed")]
        assert "penstock_fallbacks_total{" in (await ours.http.get("/metrics")).text


async def test_a_prompt_too_long_for_our_engine_overflows_to_a_server() -> None:
    async with platform(OpenAIServer(script=script("long"))) as ours:
        long = {"messages": [{"role": "user", "content": "x" * 1000}]}
        assert (await chat(ours, "bytes", **long))["status"] == 400
        ours.gateway.catalogue.settings = settings_of(
            fallbacks={"bytes": {"models": ["theirs"], "on": ["context"]}}
        )
        assert (await chat(ours, "bytes", **long))["choices"][0]["message"]["content"] == "long"


async def test_other_reasons_and_begun_answers_do_not_fall_back() -> None:
    server = OpenAIServer(script=lambda body: [JSONResponse({"error": {"message": "no"}}, 503)])
    server.owned_by = "somebody"
    async with platform(server) as ours:
        ours.gateway.catalogue.settings = settings_of(
            fallbacks={"theirs": {"models": ["bytes"], "on": ["context"]}}
        )
        assert (await chat(ours, "theirs"))["status"] == 503
        ours.gateway.catalogue.settings = settings_of(fallbacks={"theirs": {"models": ["bytes"]}})
        server.script = lambda body: [*text_chunks("a")[:2], {"error": "gone"}]
        answer = await ours.http.post("/v1/chat/completions", json=CHAT | {"stream": True})
        assert "broke off" in answer.text or "failed with status" in answer.text
        assert '"model":"bytes"' not in answer.text
        assert (await chat(ours, "theirs", temperature=9))["status"] == 400, "the caller's mistake"


async def test_a_fallback_that_the_caller_may_not_use_is_not_asked() -> None:
    server = OpenAIServer(script=lambda body: [JSONResponse({"error": {"message": "no"}}, 503)])
    async with platform(server) as ours:
        ours.gateway.catalogue.settings = settings_of(fallbacks={"theirs": {"models": ["bytes"]}})
        request = GenerationRequest(
            prompts=(TextPrompt("x"),),
            sampling=SamplingOptions(max_tokens=3),
            model="theirs",
            principal=Principal(allowed_models=frozenset({"theirs"})),
        )
        answer = await ours.gateway.submit(request)
        with pytest.raises(Overloaded):
            await answer.collect()


async def test_regions_by_model() -> None:
    settings = settings_of(
        regions={"theirs": {"region": "eu", "policy": "pin"}, "bytes": {"region": "eu", "spill_over_s": 1}},
        workspaces={"ws": {"region": "us"}},
    )
    anyone, somebody = Principal(workspace_id="other"), Principal(workspace_id="ws")
    assert settings.placed("us", anyone, "theirs") == ("eu", float("inf"))
    assert settings.placed("", anyone, "bytes") == ("eu", 1.0)
    assert settings.placed("", somebody, "bytes") == ("us", 1.0)
    assert settings.placed("x", somebody, "another") == ("x", None)
    async with platform(OpenAIServer(script=script("hi"))) as ours:
        ours.gateway.catalogue.settings = settings
        answer = await chat(ours, "theirs")
    assert answer["status"] == 503
    assert "Nothing in the region 'eu' serves 'theirs'" in answer["error"]["message"]


@pytest.mark.parametrize(
    "tables",
    [
        {"splits": {"a": {}}},
        {"splits": {"a": {"a": 1}}},
        {"splits": {"a": {"b": 1}}, "aliases": {"a": "b"}},
        {"fallbacks": {"a": {"models": ["a"]}}},
    ],
)
def test_settings_that_cannot_be_meant(tables: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        settings_of(**tables)
