"""The published models of OpenAI's and Anthropic's answers, by route, and a strict comparison of an answer with them.

The models come from the SDKs, which are generated from the providers' own schemas. The SDKs themselves do not check:
they build objects from whatever comes. Clients in other languages do check.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any, Generic, Literal, TypeVar

import anthropic.types as a
import anthropic.types.messages as am
import httpx
import openai.types as o
import openai.types.chat as oc
import openai.types.conversations as ov
import openai.types.responses as r
import pydantic
from openai.types.uploads import UploadPart

T = TypeVar("T")


class OpenAIPage(pydantic.BaseModel, Generic[T], extra="forbid"):
    """OpenAI's lists. The SDK's pages leave out what the SDK does not use."""

    object: Literal["list"]
    data: list[T]
    first_id: str | None
    last_id: str | None
    has_more: bool


class StoredMessage(oc.ChatCompletionStoreMessage):
    role: str  # type: ignore[assignment]  # the model knows only answers; OpenAI lists all messages


class EchoLogprobs(o.completion_choice.Logprobs):
    """The first token of an echoed prompt has no log-probability: OpenAI sends null, against its model."""

    token_logprobs: list[float | None] | None = None  # type: ignore[assignment]
    top_logprobs: list[dict[str, float] | None] | None = None  # type: ignore[assignment]


class CompletionChoice(o.CompletionChoice):
    logprobs: EchoLogprobs | None = None
    finish_reason: Literal["stop", "length", "content_filter"] | None  # type: ignore[assignment]  # null in chunks


class Completion(o.Completion):
    choices: list[CompletionChoice]  # type: ignore[assignment]


class CompactedResponse(r.CompactedResponse):
    output: list[r.ResponseOutputItem | r.ResponseInputMessageItem]  # type: ignore[assignment]  # messages of users too


class ModelList(pydantic.BaseModel, extra="forbid"):
    object: Literal["list"]
    data: list[o.Model]


class AnthropicPage(pydantic.BaseModel, Generic[T], extra="forbid"):
    data: list[T]
    first_id: str | None
    last_id: str | None
    has_more: bool


class AnthropicFiles(AnthropicPage[a.FileMetadata]):
    next_page: str | None  # newer versions of the SDK turn pages with it


class OpenAIError(pydantic.BaseModel, extra="forbid"):
    error: o.ErrorObject


CHAT = "/v1/chat/completions"
CONVERSATION = "/v1/conversations/{conversation_id}"
RESPONSE = "/v1/responses/{response_id}"
UPLOAD = "/v1/uploads/{upload_id}"
MESSAGE_BATCH = "/v1/messages/batches/{batch_id}"

OPENAI: dict[str, Any] = {
    "GET /v1/models": ModelList,
    "GET /v1/models/{name:path}": o.Model,
    f"POST {CHAT}": oc.ChatCompletion,
    f"GET {CHAT}": OpenAIPage[oc.ChatCompletion],
    f"GET {CHAT}/{{completion_id}}": oc.ChatCompletion,
    f"POST {CHAT}/{{completion_id}}": oc.ChatCompletion,
    f"DELETE {CHAT}/{{completion_id}}": oc.ChatCompletionDeleted,
    f"GET {CHAT}/{{completion_id}}/messages": OpenAIPage[StoredMessage],
    "POST /v1/completions": Completion,
    "POST /v1/responses": r.Response,
    "POST /v1/responses/input_tokens": r.InputTokenCountResponse,
    "POST /v1/responses/compact": CompactedResponse,
    f"GET {RESPONSE}": r.Response,
    f"POST {RESPONSE}/cancel": r.Response,
    f"GET {RESPONSE}/input_items": r.ResponseItemList,
    "POST /v1/conversations": ov.Conversation,
    f"GET {CONVERSATION}": ov.Conversation,
    f"POST {CONVERSATION}": ov.Conversation,
    f"DELETE {CONVERSATION}": ov.ConversationDeletedResource,
    f"POST {CONVERSATION}/items": ov.ConversationItemList,
    f"GET {CONVERSATION}/items": ov.ConversationItemList,
    f"GET {CONVERSATION}/items/{{item_id}}": ov.ConversationItem,
    f"DELETE {CONVERSATION}/items/{{item_id}}": ov.Conversation,
    "POST /v1/embeddings": o.CreateEmbeddingResponse,
    "POST /v1/moderations": o.ModerationCreateResponse,
    "POST /v1/files": o.FileObject,
    "GET /v1/files": OpenAIPage[o.FileObject],
    "GET /v1/files/{file_id}": o.FileObject,
    "DELETE /v1/files/{file_id}": o.FileDeleted,
    "POST /v1/uploads": o.Upload,
    f"POST {UPLOAD}/parts": UploadPart,
    f"POST {UPLOAD}/complete": o.Upload,
    f"POST {UPLOAD}/cancel": o.Upload,
    "POST /v1/batches": o.Batch,
    "GET /v1/batches": OpenAIPage[o.Batch],
    "GET /v1/batches/{batch_id}": o.Batch,
    "POST /v1/batches/{batch_id}/cancel": o.Batch,
}
ANTHROPIC: dict[str, Any] = {
    "GET /v1/models": AnthropicPage[a.ModelInfo],
    "GET /v1/models/{name:path}": a.ModelInfo,
    "POST /v1/messages": a.Message,
    "POST /v1/messages/count_tokens": a.MessageTokensCount,
    "POST /v1/messages/batches": am.MessageBatch,
    "GET /v1/messages/batches": AnthropicPage[am.MessageBatch],
    f"GET {MESSAGE_BATCH}": am.MessageBatch,
    f"DELETE {MESSAGE_BATCH}": am.DeletedMessageBatch,
    f"POST {MESSAGE_BATCH}/cancel": am.MessageBatch,
    f"GET {MESSAGE_BATCH}/results": am.MessageBatchIndividualResponse,  # one on each line
    "POST /v1/files": a.FileMetadata,
    "GET /v1/files": AnthropicFiles,
    "GET /v1/files/{file_id}": a.FileMetadata,
    "DELETE /v1/files/{file_id}": a.DeletedFile,
}
STREAMS: dict[str, Any] = {
    f"POST {CHAT}": oc.ChatCompletionChunk,
    "POST /v1/completions": Completion,
    "POST /v1/responses": r.ResponseStreamEvent,
    "POST /v1/messages": a.RawMessageStreamEvent,
}
# Answers for which the providers publish no model, and routes of our own.
WITHOUT_MODEL = {
    f"DELETE {RESPONSE}",  # the SDK returns nothing
    "GET /v1/files/{file_id}/content",
    "GET /v1/usage",
    *("POST /v1/rerank", "POST /v1/score", "POST /v1/classify"),  # not OpenAI's
    "POST /v1/load_lora_adapter",
    "POST /v1/unload_lora_adapter",
}

# Fields that we send and the providers' models do not know.
OUR_FIELDS = {
    # What a clamp or a skipped tool did to the request.
    *("ChatCompletion.warnings", "ChatCompletionChunk.warnings", "Completion.warnings", "Response.warnings"),
    "Message.warnings",
    # Thoughts, as DeepSeek and vLLM name them.
    *("ChatCompletionMessage.reasoning_content", "ChoiceDelta.reasoning_content"),
    # vLLM's.
    *("ChatCompletion.prompt_logprobs", "CompletionChoice.prompt_logprobs"),
    *("Model.max_model_len", "Model.sampling_defaults", "Model.parent", "Model.root"),
    # OpenAI sends these, and the models have forgotten them or had them in older versions.
    *("Response.store", "ResponseCustomToolCall.status", "ResponseFunctionCallArgumentsDoneEvent.name"),
    # In one place as in another: the tier in completions as in chats, bytes in events as in whole responses, and the
    # final usage as the first.
    *("Completion.service_tier", "Logprob.bytes", "LogprobTopLogprob.bytes"),
    *("MessageDeltaUsage.cache_creation", "MessageDeltaUsage.service_tier"),
    # Rules of the policy by which texts are moderated.
    *(
        f"{part}.{rule}"
        for part in ("Categories", "CategoryScores", "CategoryAppliedInputTypes")
        for rule in ("blocklist", "pii")
    ),
}

# Fields that Anthropic documents as null. All others are left out when there is nothing to say.
NULL_AT_ANTHROPIC = {
    *("stop_reason", "stop_sequence", "first_id", "last_id"),
    *("next_page", "archived_at", "cancel_initiated_at", "ended_at", "expires_at", "results_url"),
}


@cache
def _adapter(model: Any) -> pydantic.TypeAdapter[Any]:
    return pydantic.TypeAdapter(model)


def check(model: Any, shape: Any) -> None:
    """Refuse missing fields, wrong types, nulls where the model has none, and fields that nobody knows."""
    try:
        found = _adapter(model).validate_json(json.dumps(shape), strict=True)
    except pydantic.ValidationError as error:
        raise AssertionError(f"{_what_is_wrong(error)} in {shape}") from None
    unknown = set(_unknown_fields(found)) - OUR_FIELDS
    assert not unknown, f"unknown to {getattr(model, '__name__', 'the union of events')}: {sorted(unknown)}"


def _what_is_wrong(error: pydantic.ValidationError) -> str:
    """The errors without those of members of a union that are meant for another type of object."""
    places = {each["loc"]: each for each in error.errors()}
    others = [
        place[:-1]
        for place, each in places.items()
        if place[-1] in ("type", "role") and each["type"] == "literal_error"
    ]
    meant = [place for place in places if not any(place[: len(other)] == other for other in others)]
    return "; ".join(f"{'.'.join(map(str, place))}: {places[place]['msg']}" for place in meant or places)


def _unknown_fields(found: Any) -> Iterator[str]:
    if isinstance(found, pydantic.BaseModel):
        for name in found.model_extra or ():
            yield f"{type(found).__name__}.{name}"
        for name in type(found).model_fields:
            yield from _unknown_fields(getattr(found, name))
    elif isinstance(found, list):
        for each in found:
            yield from _unknown_fields(each)


def refuse_nulls(shape: Any, path: str = "") -> None:
    if isinstance(shape, dict):
        for name, value in shape.items():
            assert value is not None or name in NULL_AT_ANTHROPIC, f"{path}.{name} is null"
            refuse_nulls(value, f"{path}.{name}")
    elif isinstance(shape, list):
        for value in shape:
            refuse_nulls(value, f"{path}[]")


class CheckedClient:
    """Sends requests to routes, and compares each answer with the provider's model of the route's answers."""

    def __init__(self, url: str, models: dict[str, Any], headers: dict[str, str]) -> None:
        self._client = httpx.Client(base_url=url, headers=headers, timeout=60)
        self._models = models

    def __call__(self, route: str, body: dict[str, Any] | None = None, **ids: Any) -> Any:
        """The parsed answer. `ids` fill the places of the path; `_upload` is the file of a form, with `body` as the
        other fields; `_ends_with` is the model of a stream's last event, where the stream breaks off."""
        upload, last_model = ids.pop("_upload", None), ids.pop("_ends_with", None)
        method, path = route.split(" ")
        content: dict[str, Any] = (
            {"data": body, "files": upload} if upload else {} if body is None else {"json": body}
        )
        answer = self._client.request(method, path.replace(":path", "").format(**ids), **content)
        assert answer.status_code == 200, answer.text
        kind = answer.headers["content-type"].partition(";")[0]
        if kind == "text/event-stream":
            events = list(events_of(answer))
            if last_model is not None:
                self._check(last_model, events[-1])
            for event in events[: -1 if last_model else None]:
                if event.get("type") != "ping":  # which the SDK drops unread
                    self._check(STREAMS[route], event)
            return events
        shapes = [
            json.loads(text) for text in (answer.text.splitlines() if "jsonl" in kind else [answer.text])
        ]
        for shape in shapes:
            self._check(self._models[route], shape)
        return shapes if "jsonl" in kind else shapes[0]

    def _check(self, model: Any, shape: Any) -> None:
        check(model, shape)
        if self._models is ANTHROPIC:
            refuse_nulls(shape)

    def error(self, method: str, path: str, body: Any = None) -> Any:
        answer = self._client.request(method, path, json=body)
        assert answer.status_code >= 400, answer.text
        self._check(a.ErrorResponse if self._models is ANTHROPIC else OpenAIError, answer.json())
        return answer.json()


def events_of(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in answer.text.splitlines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))
