"""/v1/responses/compact: a shorter form of a long conversation, made by the model.

The answer holds the user's messages and one compaction item with the model's summary of everything. The item is
opaque to clients, who send it back in place of the items it stands for.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from penstock.api.http.answers import answer_whole
from penstock.api.http.context import note_model, principal_of, request_id_of, with_context
from penstock.api.http.parsing import BodyDecoder, read_body
from penstock.api.openai.requests import ServiceTier
from penstock.api.openai.responses_answers import ResponseUsage, response_usage
from penstock.api.openai.responses_history import History
from penstock.api.openai.responses_items import InputItem, compaction_item
from penstock.api.openai.responses_requests import ResponseRequest
from penstock.api.openai.responses_tools import Toolbox
from penstock.core.errors import InvalidRequest
from penstock.gateway.answers.choice import Delta
from penstock.gateway.answers.stream import AnswerStream
from penstock.gateway.prompts import RequestWarning
from penstock.gateway.responses.objects import ObjectStore
from penstock.gateway.responses.service import Responses

MAX_SUMMARY_TOKENS = 2048
_ASK = (
    "Summarize the conversation so far, so that it can be continued from the summary alone. Keep the goals, the "
    "decisions, the facts, the names of files and functions, the results of tools, and what is still to be done."
)
_to_json = msgspec.json.Encoder().encode


class CompactRequest(msgspec.Struct):
    model: str | None = None
    input: str | list[InputItem] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    service_tier: ServiceTier | None = None


class CompactedResponse(msgspec.Struct, kw_only=True):
    id: str
    created_at: int
    output: list[InputItem]
    usage: ResponseUsage
    warnings: tuple[RequestWarning, ...] | msgspec.UnsetType = msgspec.UNSET
    object: str = "response.compaction"


class Compaction:
    def __init__(self, responses: Responses, objects: ObjectStore, max_body_bytes: int) -> None:
        self._responses = responses
        self._objects = objects
        self._max_body_bytes = max_body_bytes
        self._decoder = BodyDecoder(CompactRequest)

    async def compact(self, request: Request) -> ASGIApp:
        wire = self._decoder.decode(await read_body(request, self._max_body_bytes))
        note_model(request, wire.model)
        history = History(self._responses, self._objects, principal_of(request))
        own_items = await history.own_items(wire.input or [], request_id_of(request))
        items = [*await history.earlier_items(wire.previous_response_id, None), *own_items]
        if not items:
            raise InvalidRequest("There is nothing to compact.", param="input")
        asked = ResponseRequest(
            input=[],
            model=wire.model,
            instructions=wire.instructions,
            prompt_cache_key=wire.prompt_cache_key,
            service_tier=wire.service_tier,
            truncation="auto",
        )
        generation = asked.to_generation([*items, InputItem(role="user", content=_ASK)], Toolbox(None))
        generation = msgspec.structs.replace(generation, default_max_tokens=MAX_SUMMARY_TOKENS)
        submitted = self._responses.gateway.submit(with_context(request, generation))
        return await answer_whole(request, submitted, partial(_compacted, request_id_of(request), items))


def _compacted(
    request_id: str,
    items: Sequence[InputItem],
    answer: AnswerStream,
    deltas: Sequence[Delta],
) -> bytes:
    said = [item for item in items if item.type == "message" and item.role == "user"]
    return _to_json(
        CompactedResponse(
            id=f"resp_{request_id}",
            created_at=int(time.time()),
            output=[*said, compaction_item(f"cmp_{request_id}", deltas[0].text.strip())],
            usage=response_usage(answer.usage),
            warnings=answer.warnings or msgspec.UNSET,
        )
    )
