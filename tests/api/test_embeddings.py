"""/v1/embeddings as the real openai SDK sees it, on an engine that answers with vectors made from token ids."""

from __future__ import annotations

import asyncio
import base64
import math
import struct
from collections.abc import Sequence
from typing import Any

import httpx
import openai
import pytest

from penstock.core.errors import Overloaded, PenstockError, ShuttingDown
from penstock.core.gateway_config import GatewayConfig
from penstock.core.identity import Principal
from penstock.core.messages import PoolerCard
from penstock.core.plan import TokenEvent
from penstock.core.request import FinishReason, Request
from penstock.gateway.accounts import Accounts, Claim, Outcome
from penstock.gateway.answers.stream import ENGINE_GRACE_S, ReaderGone
from penstock.gateway.embeddings import service
from penstock.gateway.embeddings.inputs import cache_key
from penstock.gateway.embeddings.run import MAX_TEXTS_IN_FLIGHT
from penstock.gateway.embeddings.service import EmbeddingRequest, Embeddings
from penstock.gateway.gateway import Gateway
from tests.api.conftest import Serve, Served, direct_client
from tests.gateway.fake_engine import FakeEngine, engine_ready, model_card, until
from tests.loop_time import pass_time

SIZE = 8


def vector_of(token_ids: Sequence[int]) -> list[float]:
    raw = [1.0 + sum(token_ids[index::SIZE]) for index in range(SIZE)]
    length = math.sqrt(sum(value * value for value in raw))
    return [value / length for value in raw]


def embed(request: Request) -> list[TokenEvent | PenstockError]:
    assert request.pooling is not None
    vector = struct.pack(f"<{SIZE}f", *vector_of(request.prompt_token_ids))
    return [
        TokenEvent(
            request.id, finish_reason=FinishReason.STOP, num_cached_tokens=0, queue_s=0.0, embedding=vector
        )
    ]


def embedding_engine(**card: Any) -> FakeEngine:
    card.setdefault("pooler", PoolerCard(matryoshka=()))
    return FakeEngine(embed, engine_ready(model_card(embedding_size=SIZE, **card)))


@pytest.fixture
def served(serve: Serve) -> Served:
    return serve(embedding_engine())


def close(left: Sequence[float], right: Sequence[float]) -> bool:
    return len(left) == len(right) and all(abs(a - b) < 1e-6 for a, b in zip(left, right, strict=True))


def test_a_batch_of_texts_and_both_encodings(served: Served) -> None:
    texts = ["first", "second, a little longer", "drei"]
    sdk = served.sdk()
    default = sdk.embeddings.create(model="bytes", input=texts)  # base64 on the wire, as the SDK likes it
    plain = sdk.embeddings.create(model="bytes", input=texts, encoding_format="float")
    for answer in (default, plain):
        assert [entry.index for entry in answer.data] == [0, 1, 2]
        for text, entry in zip(texts, answer.data, strict=True):
            assert close(entry.embedding, vector_of(text.encode()))
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, texts))
        assert answer.model == "bytes"


def test_a_single_text_and_token_ids(served: Served) -> None:
    sdk = served.sdk()
    (entry,) = sdk.embeddings.create(model="bytes", input="hi").data
    (same,) = sdk.embeddings.create(model="bytes", input=[104, 105]).data
    both = sdk.embeddings.create(model="bytes", input=[[104, 105], [1, 2, 3]]).data
    assert close(entry.embedding, same.embedding)
    assert close(entry.embedding, both[0].embedding)
    assert close(both[1].embedding, vector_of([1, 2, 3]))


def test_fewer_dimensions_are_cut_and_normalised(served: Served) -> None:
    (whole,) = served.sdk().embeddings.create(model="bytes", input="some text").data
    (cut,) = served.sdk().embeddings.create(model="bytes", input="some text", dimensions=3).data
    length = math.sqrt(sum(value * value for value in whole.embedding[:3]))
    assert close(cut.embedding, [value / length for value in whole.embedding[:3]])


async def test_base64_is_little_endian_float32() -> None:
    async with direct_client(embedding_engine()) as client:
        body = {"input": "x", "encoding_format": "base64"}
        (entry,) = (await client.post("/v1/embeddings", json=body)).json()["data"]
    assert close(struct.unpack(f"<{SIZE}f", base64.b64decode(entry["embedding"])), vector_of(b"x"))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["a", 3]}, "input"),
        ({"input": [99999]}, "input[0]"),
        ({"input": [1 << 64]}, "input[0]"),
        ({"input": 7}, "input"),
        ({}, None),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": SIZE + 1}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "pooling": "best"}, "pooling"),
        ({"input": "a", "dimension": 3}, "dimension"),
        ({"input": "x" * 256}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "model": "other"}, "model"),
    ],
)
async def test_bad_requests(body: dict[str, Any], param: str | None) -> None:
    engine = embedding_engine()
    async with direct_client(engine) as client:
        response = await client.post("/v1/embeddings", json=body)
    assert response.status_code == (404 if param == "model" else 400), response.text
    assert response.json()["error"]["param"] == param
    assert not engine.added


def test_models_that_only_do_the_other_thing(serve: Serve) -> None:
    writer = serve(FakeEngine(embed))
    with pytest.raises(openai.BadRequestError, match="makes no embeddings"):
        writer.sdk().embeddings.create(model="bytes", input="a")
    encoder = serve(embedding_engine(is_encoder=True, generates=False))
    with pytest.raises(openai.BadRequestError, match="writes no text"):
        encoder.sdk().chat.completions.create(model="bytes", messages=[{"role": "user", "content": "a"}])
    with pytest.raises(openai.BadRequestError, match="pooling 'mean' only"):
        encoder.sdk().embeddings.create(model="bytes", input="a", extra_body={"pooling": "last"})


def test_an_engine_that_refuses_fails_the_whole_request(serve: Serve) -> None:
    def script(request: Request) -> list[TokenEvent | PenstockError]:
        return [Overloaded("Full.", retry_after_s=2.0)] if request.id.endswith("-1") else embed(request)

    served = serve(FakeEngine(script, engine_ready(model_card(embedding_size=SIZE))))
    with pytest.raises(openai.InternalServerError, match="Full") as caught:
        served.sdk().embeddings.create(model="bytes", input=["a", "b", "c"])
    assert caught.value.status_code == 503


async def create(client: httpx.AsyncClient, *texts: str, **headers: str) -> dict[str, Any]:
    response = await client.post("/v1/embeddings", json={"input": list(texts)}, headers=headers)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def test_known_texts_are_not_embedded_again() -> None:
    engine = embedding_engine()
    gateway = Gateway(engine, GatewayConfig())
    async with direct_client(engine, gateway) as client:
        first = await create(client, "a", "b")
        second = await create(client, "b", "c", "a")
        assert len(engine.added) == 3
        assert second["data"][2]["embedding"] == first["data"][0]["embedding"]
        assert second["usage"]["prompt_tokens"] == 3, "what was known counts as well"
        await create(client, "a", **{"x-penstock-cache": "off"})
        assert len(engine.added) == 4
    rendered = gateway.render_own_metrics().decode()
    assert "penstock_embedding_cache_hits_total 2.0" in rendered
    assert "penstock_embedding_cache_misses_total 3.0" in rendered


@pytest.mark.parametrize("changes", [{}, {"truncate_prompt_tokens": 8}])
async def test_of_a_long_text_no_more_is_read_than_the_model_could_use(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    lengths: list[int] = []

    def noting_key(*content: Any) -> bytes:
        lengths.extend(len(each) for each in content if isinstance(each, str))
        return cache_key(*content)

    monkeypatch.setattr(service, "cache_key", noting_key)
    async with direct_client(embedding_engine()) as client:
        body = {"model": "bytes", "input": "a" * 1_000_000, **changes}
        answer = await client.post("/v1/embeddings", json=body)
    assert answer.status_code == (200 if changes else 400)
    assert all(length < 10_000 for length in lengths)


async def test_the_cache_is_bounded_and_can_be_off() -> None:
    for memory, num_embedded in (("0", 6), ("500", 4), ("64MiB", 3)):
        engine = embedding_engine()
        async with direct_client(
            engine, Gateway(engine, GatewayConfig(embedding_cache_memory=memory))
        ) as client:
            for text in ("a", "b", "c", "c", "b", "a"):
                await create(client, text)
        assert len(engine.added) == num_embedded, memory


class RecordingLedger:
    """A ledger and limiter that remember."""

    def __init__(self) -> None:
        self.claims: list[Claim] = []
        self.settled: list[Outcome] = []

    def begin(self, claim: Claim) -> None:
        self.claims.append(claim)

    def settle(self, claim: Claim, outcome: Outcome) -> None:
        self.settled.append(outcome)


async def test_every_request_is_in_the_ledger_once_and_workspaces_share_nothing() -> None:
    ledger = RecordingLedger()
    engine = embedding_engine()
    gateway = Gateway(engine, GatewayConfig(), accounts=Accounts(ledger=ledger))
    embeddings = Embeddings(gateway)
    for workspace in ("one", "one", "two"):
        request = EmbeddingRequest(inputs=("hello there",), principal=Principal(workspace_id=workspace))
        await (await embeddings.open(request)).run()
    assert [request.tenant for request in engine.added] == ["one", "two"]
    assert [claim.input_tokens for claim in ledger.claims] == [7, 0, 7]
    assert {claim.endpoint for claim in ledger.claims} == {"embeddings"}
    assert [outcome.usage.cached_tokens for outcome in ledger.settled] == [0, 7, 0]
    assert {outcome.status for outcome in ledger.settled} == {"completed"}
    assert all(outcome.usage.completion_tokens == 0 for outcome in ledger.settled)


async def test_a_client_that_leaves_frees_the_engine() -> None:
    ledger = RecordingLedger()
    engine = FakeEngine(None, engine_ready(model_card(embedding_size=SIZE)))
    gateway = Gateway(engine, GatewayConfig(), accounts=Accounts(ledger=ledger))
    job = await Embeddings(gateway).open(EmbeddingRequest(inputs=tuple(f"text {n}" for n in range(200))))
    job.cancel()
    with pytest.raises(ReaderGone):
        await job.run()
    assert not engine.streams
    assert [outcome.status for outcome in ledger.settled] == ["cancelled"]


async def test_a_large_request_goes_to_the_engine_bit_by_bit() -> None:
    engine = FakeEngine(None, engine_ready(model_card(embedding_size=SIZE)))
    gateway = Gateway(engine, GatewayConfig())
    job = await Embeddings(gateway).open(EmbeddingRequest(inputs=tuple(f"text {n}" for n in range(200))))
    running = asyncio.create_task(job.run())
    await asyncio.sleep(0)
    most = len(engine.streams)
    while engine.streams:
        stream = next(iter(engine.streams.values()))
        del engine.streams[stream.request.id]
        (event,) = embed(stream.request)
        assert isinstance(event, TokenEvent)
        stream.on_event(event)
        most = max(most, len(engine.streams))
    answer = await running
    assert most == MAX_TEXTS_IN_FLIGHT
    assert len(answer.vectors) == 200
    assert gateway.num_live == 0


async def test_a_drain_waits_for_a_job_that_was_opened_before_it() -> None:
    engine = FakeEngine(embed, engine_ready(model_card(embedding_size=SIZE)))
    gateway = Gateway(engine, GatewayConfig())
    embeddings = Embeddings(gateway)
    job, abandoned = [await embeddings.open(EmbeddingRequest(inputs=(text,))) for text in ("a", "b")]
    draining = asyncio.create_task(gateway.drain(60.0))
    await until(lambda: gateway.is_draining)
    with pytest.raises(ShuttingDown):
        await embeddings.open(EmbeddingRequest(inputs=("late",)))
    assert len((await job.run()).vectors) == 1
    abandoned.cancel()
    assert await draining


async def test_a_drain_ends_what_is_left() -> None:
    engine = FakeEngine(None, engine_ready(model_card(embedding_size=SIZE)))
    gateway = Gateway(engine, GatewayConfig())
    job = await Embeddings(gateway).open(EmbeddingRequest(inputs=("a",)))
    running = asyncio.create_task(job.run())
    await asyncio.sleep(0)
    assert not await gateway.drain(0.001)
    with pytest.raises(PenstockError, match="stopped"):
        await running
    assert not engine.streams


async def test_all_texts_share_the_requests_time_and_an_engine_that_hangs_gets_no_more() -> None:
    texts = [f"text {number}" for number in range(MAX_TEXTS_IN_FLIGHT + 1)]
    engine = FakeEngine(ready=engine_ready(model_card(embedding_size=SIZE)))
    async with direct_client(engine) as client:
        asking = asyncio.create_task(
            client.post("/v1/embeddings", json={"input": texts}, headers={"x-request-timeout-ms": "600000"})
        )
        await until(lambda: engine.streams)
        pass_time(300.0)
        stream = engine.streams.pop(engine.added[0].id)
        (event,) = embed(stream.request)
        assert isinstance(event, TokenEvent)
        stream.on_event(event)  # makes room for the last text, which gets what is left
        left_s = engine.streams[engine.added[-1].id].timeout_s
        assert stream.timeout_s is not None
        assert left_s is not None
        assert left_s <= stream.timeout_s - 300.0
        pass_time(300.0 + ENGINE_GRACE_S)
        answer = await asking
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert not engine.streams
