"""Embeddings of other people's servers: in order, in the ledger, and with clear errors."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from starlette.responses import JSONResponse, Response

from penstock.core.errors import EngineUnavailable
from penstock.gateway.embeddings.run import MAX_INPUTS_PER_CALL
from tests.api.test_external_models import platform
from tests.cluster.external.openai_server import OpenAIServer


def vectors(body: dict[str, Any]) -> list[Response]:
    """A vector that tells the length of its text, in another order than asked for."""
    inputs = body["input"]
    data = [{"index": place, "embedding": [len(text), 0.5]} for place, text in enumerate(inputs)]
    usage = {"prompt_tokens": 3 * len(inputs), "total_tokens": 3 * len(inputs)}
    return [JSONResponse({"object": "list", "data": data[::-1], "usage": usage})]


async def test_many_texts_come_back_in_order() -> None:
    server = OpenAIServer(script=vectors)
    async with platform(server) as ours:
        texts = ["x" * length for length in range(1, MAX_INPUTS_PER_CALL + 4)]
        answer = await ours.openai.embeddings.create(model="theirs", input=texts, dimensions=2)
        assert [entry.embedding for entry in answer.data] == [[len(text), 0.5] for text in texts]
        assert answer.usage.prompt_tokens == 3 * len(texts)
        assert answer.model == "theirs"
        first, second = server.bodies
        assert (first["model"], first["dimensions"], len(second["input"])) == ("theirs", 2, 3)
        assert "stream" not in first
        ((claim, outcome),) = ours.ledger.rows
        assert (claim.endpoint, claim.model, outcome.status) == ("embeddings", "theirs", "completed")
        assert outcome.usage.prompt_tokens == 3 * len(texts)


@pytest.mark.parametrize(
    "fields",
    [{"normalize": True}, {"input_type": "query"}, {"pooling": "mean"}, {"truncate_prompt_tokens": 5}],
)
async def test_what_only_our_own_engines_can_do_is_refused(fields: dict[str, Any]) -> None:
    async with platform(OpenAIServer(script=vectors)) as ours:
        with pytest.raises(openai.BadRequestError, match="only asked for plain embeddings"):
            await ours.openai.embeddings.create(model="theirs", input="a", extra_body=fields)
        assert not ours.ledger.rows


@pytest.mark.parametrize(
    "answer",
    [
        {"data": []},
        {"data": [{"index": 1, "embedding": [1.0]}]},
        {"data": [{"index": 0, "embedding": "AAAA"}]},
        {"data": 7},
    ],
)
async def test_other_vectors_than_asked_for_are_an_error(answer: dict[str, Any]) -> None:
    async with platform(OpenAIServer(script=lambda body: [JSONResponse(answer)])) as ours:
        with pytest.raises(openai.InternalServerError):
            await ours.openai.embeddings.create(model="theirs", input="a")
        assert [outcome.status for _, outcome in ours.ledger.rows] == ["failed"]


async def test_a_drain_ends_vectors_that_take_too_long() -> None:
    begun, goes_on = asyncio.Event(), asyncio.Event()

    class Slow(JSONResponse):
        async def __call__(self, *arguments: Any) -> None:
            begun.set()
            await goes_on.wait()

    async with platform(OpenAIServer(script=lambda body: [Slow({})])) as ours:
        asking = asyncio.create_task(ours.openai.embeddings.create(model="theirs", input="a"))
        await begun.wait()
        (work,) = ours.gateway._live
        work.fail(EngineUnavailable("Enough."))
        with pytest.raises(openai.InternalServerError, match="Enough"):
            await asking
        assert [outcome.status for _, outcome in ours.ledger.rows] == ["failed"]
        goes_on.set()
