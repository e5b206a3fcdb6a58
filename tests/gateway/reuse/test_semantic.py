"""The cache of similar requests: off by default, exact in everything but the last turn, private, bounded."""

from __future__ import annotations

import asyncio
import math
import struct
from typing import Any

import pytest

from penstock.core.clock import VirtualClock
from penstock.core.errors import ConfigError, EngineUnavailable, PenstockError
from penstock.core.gateway_config import GatewayConfig
from penstock.core.request import Request
from penstock.gateway.accounts import Accounts
from penstock.gateway.embeddings.service import Embeddings
from penstock.gateway.gateway import Gateway
from penstock.gateway.prompts import (
    ChatMessage,
    ChatPrompt,
    GenerationRequest,
    SamplingOptions,
    TextPart,
    TextPrompt,
)
from penstock.gateway.reuse import reuse
from penstock.gateway.reuse.replay import IdempotencySettings, ResponseCacheSettings
from penstock.gateway.reuse.reuse import Probe, SemanticCache, SemanticCacheSettings, question_of
from penstock.gateway.settings.settings import parse_settings
from tests.api.test_embeddings import SIZE, embed
from tests.gateway.fake_engine import FakeEngine, engine_ready, model_card, script_text
from tests.gateway.reuse.test_cache import Rows, request_for

ON = SemanticCacheSettings(enabled=True, model="vectors", threshold=0.9)
ANGLES = {"capital of France?": 0.0, "France's capital?": 0.2, "capital of Spain?": 1.0}


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is not a model that hangs."""
    monkeypatch.setattr(reuse, "_EMBED_TIMEOUT_S", 60.0)


async def angle(text: str, request: GenerationRequest, model: str) -> tuple[bytes, bytes]:
    assert model == "vectors"
    return at(ANGLES[text]), b"identity"


def at(radians: float) -> bytes:
    return struct.pack("<2f", math.cos(radians), math.sin(radians))


def chat(text: str, *, system: str = "", **changes: Any) -> GenerationRequest:
    turns = [ChatMessage("system", system)] if system else []
    return request_for(ChatPrompt(messages=(*turns, ChatMessage("user", text))), **changes)


def gateway_with(settings: SemanticCacheSettings = ON, **parts: Any) -> Gateway:
    gateway = Gateway(FakeEngine(script_text("Paris")), GatewayConfig(), VirtualClock(), **parts)
    gateway.reuse.apply(ResponseCacheSettings(), IdempotencySettings(), settings)
    gateway.reuse.embed = angle
    return gateway


async def status(gateway: Gateway, asked: GenerationRequest) -> str | None:
    answer = await gateway.submit(asked)
    await answer.collect()
    return answer.cache_status


async def test_a_similar_question_gets_the_same_answer() -> None:
    rows = Rows()
    gateway = gateway_with(accounts=Accounts(ledger=rows))
    assert await status(gateway, chat("capital of France?")) == "miss"
    answer = await gateway.submit(chat("France's capital?"))
    assert answer.cache_status == "similar"
    assert "".join(delta.text for delta in await answer.collect()) == "Paris"
    assert rows.settled[1][1].is_cached
    assert await status(gateway, chat("capital of Spain?")) == "miss"
    assert await status(gateway, chat("capital of France?")) == "hit"


@pytest.mark.parametrize(
    "changes",
    [
        {"system": "Answer in French."},
        {"workspace": "other"},
        {"sampling": SamplingOptions(max_tokens=3)},
        {"n": 2},
    ],
)
async def test_everything_else_must_be_the_same(changes: dict[str, Any]) -> None:
    gateway = gateway_with()
    await status(gateway, chat("capital of France?"))
    assert await status(gateway, chat("France's capital?", **changes)) == "miss"


async def test_it_is_off_by_default_and_for_callers_without_a_cache() -> None:
    gateway = gateway_with(SemanticCacheSettings())
    await status(gateway, chat("capital of France?"))
    assert await status(gateway, chat("France's capital?")) == "miss"
    gateway = gateway_with()
    assert await status(gateway, chat("capital of France?", cache_response_s=None)) is None
    assert gateway.reuse._semantic.used == 0


async def test_answers_grow_old() -> None:
    gateway = gateway_with()
    await status(gateway, chat("capital of France?"))
    assert isinstance(gateway.clock, VirtualClock)
    gateway.clock.advance_to(30.0)
    assert await status(gateway, chat("France's capital?", cache_response_s=10.0)) == "miss"
    gateway.clock.advance_to(200.0)
    assert await status(gateway, chat("France's capital?")) == "miss"


async def test_turning_it_off_forgets() -> None:
    gateway = gateway_with()
    await status(gateway, chat("capital of France?"))
    gateway.reuse.apply(ResponseCacheSettings(), IdempotencySettings(), SemanticCacheSettings())
    assert gateway.reuse._semantic.used == 0


@pytest.mark.parametrize("failure", [EngineUnavailable("No engine is ready."), TimeoutError()])
async def test_without_a_vector_the_request_is_answered(
    failure: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = gateway_with()
    num_asked = 0

    async def fail(*_: object) -> tuple[bytes, bytes]:
        nonlocal num_asked
        num_asked += 1
        raise failure

    gateway.reuse.embed = fail
    assert await status(gateway, chat("capital of France?")) == "miss"
    assert await status(gateway, chat("France's capital?")) == "miss"
    assert num_asked == 1, "it is not tried again at once"
    assert "no similar answers are looked for, for 10 s" in caplog.text


async def test_a_client_that_leaves_stops_the_vector(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = gateway_with()
    begun, ended = asyncio.Event(), asyncio.Event()

    async def hang(*_: object) -> tuple[bytes, bytes]:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError

    gateway.reuse.embed = hang
    asking = asyncio.create_task(gateway.submit(chat("capital of France?")))
    await begun.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert ended.is_set()
    monkeypatch.setattr(reuse, "_EMBED_TIMEOUT_S", 0.001)
    assert await status(gateway, chat("capital of France?")) == "miss"


def test_what_can_be_similar() -> None:
    def question(*turns: ChatMessage, **fields: Any) -> str | None:
        found = question_of(request_for(ChatPrompt(messages=turns, **fields)))
        return None if found is None else found.text

    assert question(ChatMessage("user", "hi")) == "hi"
    assert question(ChatMessage("user", (TextPart("a"), TextPart("b")))) == "a\nb"
    assert question(ChatMessage("user", "x"), ChatMessage("assistant", "y")) is None
    assert question(ChatMessage("user", " ")) is None
    assert question(ChatMessage("user", "x" * 10_000)) is None
    assert question_of(request_for(TextPrompt("hi"))) is None
    assert question_of(request_for(prompts=(ChatPrompt(messages=(ChatMessage("user", "a"),)),) * 2)) is None


class TestBounds:
    def test_bytes(self) -> None:
        cache = SemanticCache(3 * (1000 + 8 + 512))
        for number in range(5):
            cache.keep(Probe("w", b"%d" % number, at(0)), bytes(1000), 0.0, 60.0)
        assert [cache.find(Probe("w", b"%d" % n, at(0)), 0.9, 1.0, 60.0) is not None for n in range(5)] == [
            False,
            False,
            True,
            True,
            True,
        ]
        cache.keep(Probe("w", b"x", at(0)), bytes(10_000), 0.0, 60.0)
        assert cache.find(Probe("w", b"x", at(0)), 0.9, 1.0, 60.0) is None
        cache.shrink_to(0)
        assert (cache.used, cache._places, len(cache._entries)) == (0, {}, 0)

    def test_a_context_compares_a_bounded_number(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("penstock.gateway.reuse.reuse._MAX_PER_CONTEXT", 2)
        cache = SemanticCache(1 << 20)
        for number in range(3):
            cache.keep(Probe("w", b"c", at(number)), b"%d" % number, 0.0, 60.0)
        assert cache.find(Probe("w", b"c", at(0)), 0.9, 1.0, 60.0) is None
        assert cache.find(Probe("w", b"c", at(2)), 0.9, 1.0, 60.0) == b"2"
        assert cache.find(Probe("w", b"c", at(2)), 0.9, 61.0, 100.0) is None
        assert cache.used == 0

    def test_vectors_that_are_no_numbers_match_nothing(self) -> None:
        cache = SemanticCache(1 << 20)
        cache.keep(Probe("w", b"c", struct.pack("<2f", math.nan, 0)), b"x", 0.0, 60.0)
        assert cache.find(Probe("w", b"c", at(0)), 0.5, 1.0, 60.0) is None


async def test_the_vectors_come_from_a_served_model_and_are_in_the_ledger() -> None:
    def answer(request: Request) -> list[Any]:
        return embed(request) if request.pooling is not None else list(script_text("Paris")(request))

    rows = Rows()
    engine = FakeEngine(answer, engine_ready(model_card(embedding_size=SIZE)))
    gateway = Gateway(engine, GatewayConfig(), VirtualClock(), accounts=Accounts(ledger=rows))
    settings = SemanticCacheSettings(enabled=True, model="bytes", threshold=0.2)
    gateway.reuse.apply(ResponseCacheSettings(), IdempotencySettings(), settings)
    Embeddings(gateway)
    assert await status(gateway, chat("capital of France?")) == "miss"
    assert await status(gateway, chat("capital of france?")) == "similar"
    assert [claim.endpoint for claim, _ in rows.settled].count("semantic_cache") == 2


def test_settings() -> None:
    with pytest.raises(ConfigError, match="line 2: semantic_cache needs a model"):
        parse_settings("\n[semantic_cache]\nenabled = true\n", "s.toml")
    assert issubclass(ConfigError, PenstockError)
