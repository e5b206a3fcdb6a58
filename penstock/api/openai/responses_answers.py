"""The answers of /v1/responses: the response as it grows, and its stream events.

The same object serves a stream, a whole answer and an answer in the background: it takes in deltas, and a caller that
does not stream ignores the events.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from penstock.api.http.errors import sentence
from penstock.api.openai.answers import SERVICE_TIERS, chat_logprobs
from penstock.api.openai.messages import custom_input_of
from penstock.api.openai.responses_items import (
    OutputCall,
    OutputCustomCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningText,
    client_call,
)
from penstock.api.openai.responses_requests import (
    ConversationName,
    ReasoningOptions,
    ResponseRequest,
    TextFormat,
    TextOptions,
)
from penstock.api.openai.tools import CLIENT_TOOLS, CalledTool, CallKind, ResponseTool, ResponseToolChoice
from penstock.core.errors import ContextLengthExceeded, InvalidRequest, Overloaded, PenstockError, RateLimited
from penstock.core.request import FinishReason, SamplingDefaults
from penstock.gateway.answers.choice import Delta, TokenDetail, ToolCallDelta
from penstock.gateway.answers.stream import AnswerStream
from penstock.gateway.prompts import RequestWarning, Usage

_to_json = msgspec.json.Encoder().encode

_ID_PREFIX = "resp_"
# This API's names for what the gateway calls by the names of the older ones.
PARAMS = {"messages": "input", "response_format": "text.format"}

ResponseStatus = Literal["completed", "failed", "in_progress", "cancelled", "queued", "incomplete"]


class InputTokensDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int = 0  # absent from bodies that an earlier release stored


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(msgspec.Struct):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    reason: Literal["max_output_tokens", "content_filter"]


class ResponseBody(msgspec.Struct, kw_only=True):
    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: ResponseStatus
    background: bool
    conversation: ConversationName | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningOptions
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float
    text: TextOptions
    tool_choice: str | ResponseToolChoice
    tools: list[ResponseTool]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None = None
    user: str | None
    metadata: dict[str, str]
    warnings: tuple[RequestWarning, ...] | msgspec.UnsetType = msgspec.UNSET


NOTHING_STATED = SamplingDefaults()


def new_response(
    request: ResponseRequest, answer: AnswerStream, stated: SamplingDefaults = NOTHING_STATED
) -> ResponseBody:
    """Return a response to `request` that has just begun."""
    options = request.text or TextOptions()
    return ResponseBody(
        id=f"{_ID_PREFIX}{answer.id}",  # the same when an idempotent request is answered again
        created_at=int(time.time()),
        status="in_progress",
        background=bool(request.background),
        conversation=None if request.conversation_id is None else ConversationName(request.conversation_id),
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        model=answer.model,
        output=[],
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        prompt_cache_key=request.prompt_cache_key,
        reasoning=request.reasoning or ReasoningOptions(),
        safety_identifier=request.safety_identifier,
        service_tier=SERVICE_TIERS[answer.tier],
        store=request.is_stored,
        temperature=_first_given(request.temperature, stated.temperature),
        text=TextOptions(options.format or TextFormat("text"), options.verbosity),
        tool_choice=request.tool_choice or "auto",
        tools=request.tools or [],
        top_logprobs=request.top_logprobs or 0,
        top_p=_first_given(request.top_p, stated.top_p),
        truncation=request.truncation or "disabled",
        user=request.user,
        metadata=request.metadata or {},
    )


def _first_given(*values: float | None) -> float:
    return next((value for value in values if value is not None), 1.0)


def response_usage(usage: Usage) -> ResponseUsage:
    return ResponseUsage(
        usage.prompt_tokens,
        InputTokensDetails(usage.cached_tokens, usage.cache_write_5m_tokens + usage.cache_write_1h_tokens),
        usage.completion_tokens,
        OutputTokensDetails(usage.reasoning_tokens),
        usage.prompt_tokens + usage.completion_tokens,
    )


def _error_code(error: PenstockError) -> str:
    """Clients act on some codes: they compact their history, wait, or give up."""
    if isinstance(error, ContextLengthExceeded | RateLimited):
        return error.code
    if isinstance(error, Overloaded):
        return "server_is_overloaded"
    return "invalid_prompt" if isinstance(error, InvalidRequest) else "server_error"


class ResponseEvents:
    """Implements EventWriter and ResponseBuilder. At most one output item is open at a time."""

    def __init__(
        self, body: ResponseBody, *, wants_logprobs: bool, called: Mapping[str, CalledTool] | None = None
    ) -> None:
        self.body = body
        self._wants_logprobs = wants_logprobs
        self._called = called or {}
        self._sequence_number = 0
        self._open: OutputItem | None = None
        self._open_kind: CallKind = "function"  # what the open call is to the client
        self._pieces: list[str] = []  # of the open item's text or arguments
        self._delta_start = b""  # all of a delta event up to its number
        # Log-probabilities of tokens that are text if text comes next, and else part of a call.
        self._held: list[TokenDetail] = []

    @property
    def response_id(self) -> str:
        return self.body.id

    def to_json(self, model: str) -> bytes:
        self.body.model = model
        return _to_json(self.body)

    def note_warnings(self, answer: AnswerStream) -> None:
        if answer.warnings:
            self.body.warnings = tuple(
                msgspec.structs.replace(each, param=PARAMS.get(each.param or "", each.param))
                for each in answer.warnings
            )

    def opening(self, answer: AnswerStream) -> bytes:
        self.note_warnings(answer)
        return self._event("response.created", response=self.body) + self._event(
            "response.in_progress", response=self.body
        )

    def chunk(self, delta: Delta) -> bytes:
        events = b""
        if delta.reasoning:
            events += self._add_reasoning(delta.reasoning)
        elif self._wants_logprobs and (self._open is None or isinstance(self._open, OutputMessage)):
            self._held += delta.details
        if delta.text or (self._held and delta.finish_reason is not None and not delta.tool_calls):
            events += self._add_text(delta.text, delta.details)
        for call in delta.tool_calls:
            events += self._add_call(call)
        if delta.finish_reason is not None:
            events += self._end(delta.finish_reason)
        return events

    def closing(self, usage: Usage) -> bytes:
        self.finish(usage)
        return self.ending()

    def failure(self, error: PenstockError) -> bytes:
        """Clients expect a beginning before the end, also of a stream that failed while it waited."""
        opening = b"" if self._sequence_number else self._event("response.created", response=self.body)
        self.fail(error)
        return opening + self.ending()

    def ending(self) -> bytes:
        return self._event(f"response.{self.body.status}", response=self.body)

    def finish(self, usage: Usage) -> None:
        """After the last delta."""
        if self.body.status == "in_progress":
            self.body.status = "completed"
            self.body.completed_at = int(time.time())
        self.body.usage = response_usage(usage)

    def fail(self, error: PenstockError) -> None:
        self.body.status = "failed"
        self.body.error = ResponseError(_error_code(error), sentence(error))

    def event(self, kind: str, **fields: Any) -> bytes:
        """Return an event about the response that is not part of its output, numbered like the others."""
        return self._event(kind, **fields)

    def _end(self, reason: FinishReason) -> bytes:
        if reason is not FinishReason.STOP:
            filtered = reason is FinishReason.CONTENT_FILTER
            self.body.status = "incomplete"
            self.body.incomplete_details = IncompleteDetails(
                "content_filter" if filtered else "max_output_tokens"
            )
        events = b""
        if not self.body.output:  # an answer without a word is still a message
            events = self._begin(OutputMessage(self._item_id("msg"), "in_progress", []))
        return events + self._close()

    def _add_reasoning(self, text: str) -> bytes:
        events = b""
        if not isinstance(self._open, OutputReasoning):
            events = self._begin(OutputReasoning(self._item_id("rs"), "in_progress", []))
        self._pieces.append(text)
        return events + self._delta(text, b"")

    def _add_text(self, text: str, details: Sequence[TokenDetail]) -> bytes:
        events = b""
        if not isinstance(self._open, OutputMessage):
            events = self._begin(OutputMessage(self._item_id("msg"), "in_progress", []))
        assert isinstance(self._open, OutputMessage)
        self._pieces.append(text)
        if not self._wants_logprobs:
            return events + self._delta(text, b',"logprobs":[]')
        logprobs = chat_logprobs(self._held or details).content
        self._held.clear()
        self._open.content[0].logprobs.extend(logprobs)
        return events + self._delta(text, b',"logprobs":' + _to_json(logprobs))

    def _add_call(self, call: ToolCallDelta) -> bytes:
        events = b""
        if call.id is not None:
            name = call.name or ""
            tool = self._called.get(name) or CalledTool("function", name)
            kind, prefix = (OutputCustomCall, "ctc") if tool.kind == "custom" else (OutputCall, "fc")
            item = kind(self._item_id(prefix), "in_progress", call.id, tool.name, "")
            item.namespace = tool.namespace or msgspec.UNSET
            events = self._begin(item, tool.kind)
        if not call.arguments:
            return events
        self._pieces.append(call.arguments)
        if self._open_kind != "function":  # what stands inside the JSON is known at the end
            return events
        return events + self._delta(call.arguments, b"")

    def _item_id(self, prefix: str) -> str:
        return f"{prefix}_{self.body.id.removeprefix(_ID_PREFIX)}-{len(self.body.output)}"

    def _begin(self, item: OutputItem, call_kind: CallKind = "function") -> bytes:
        events = self._close()
        if not isinstance(item, OutputMessage):
            self._held.clear()
        index = len(self.body.output)
        self.body.output.append(item)
        self._open, self._open_kind = item, call_kind
        if call_kind in CLIENT_TOOLS:
            return events  # such an item has no form before it is whole
        events += self._event("response.output_item.added", output_index=index, item=item)
        place: dict[str, Any] = {"item_id": item.id, "output_index": index}
        kind = "response.function_call_arguments.delta"
        if isinstance(item, OutputMessage | OutputReasoning):
            place["content_index"] = 0
            part = OutputText("", []) if isinstance(item, OutputMessage) else ReasoningText("")
            item.content.append(part)  # type: ignore[arg-type]
            events += self._event("response.content_part.added", **place, part=part)
            of_message = isinstance(item, OutputMessage)
            kind = "response.output_text.delta" if of_message else "response.reasoning_text.delta"
        fields = _to_json({"type": kind, **place})[:-1]
        self._delta_start = b"event: " + kind.encode() + b"\ndata: " + fields + b',"sequence_number":'
        return events

    def _close(self) -> bytes:
        """End the open item, if there is one."""
        item, self._open = self._open, None
        if item is None:
            return b""
        whole = "".join(self._pieces)
        self._pieces.clear()
        place: dict[str, Any] = {"item_id": item.id, "output_index": len(self.body.output) - 1}
        if self._open_kind in CLIENT_TOOLS:
            assert isinstance(item, OutputCall)
            item.arguments = whole
            item = self.body.output[-1] = client_call(self._open_kind, item) or item
            events = self._event("response.output_item.added", output_index=place["output_index"], item=item)
        elif isinstance(item, OutputCall):
            item.arguments = whole
            events = self._event(
                "response.function_call_arguments.done", **place, name=item.name, arguments=whole
            )
        elif isinstance(item, OutputCustomCall):
            item.input = custom_input_of(whole)
            events = self._event("response.custom_tool_call_input.delta", **place, delta=item.input)
            events += self._event("response.custom_tool_call_input.done", **place, input=item.input)
        else:
            assert isinstance(item, OutputMessage | OutputReasoning)
            place["content_index"] = 0
            part = item.content[0]
            part.text = whole
            if isinstance(part, OutputText):
                events = self._event("response.output_text.done", **place, text=whole, logprobs=part.logprobs)
            else:
                events = self._event("response.reasoning_text.done", **place, text=whole)
            events += self._event("response.content_part.done", **place, part=part)
        item.status = "incomplete" if self.body.status == "incomplete" else "completed"
        return events + self._event(
            "response.output_item.done", output_index=place["output_index"], item=item
        )

    def _delta(self, text: str, more: bytes) -> bytes:
        number = self._sequence_number
        self._sequence_number += 1
        return b'%b%d,"delta":%b%b}\n\n' % (self._delta_start, number, _to_json(text), more)

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._sequence_number, **fields}
        self._sequence_number += 1
        return b"event: " + kind.encode() + b"\ndata: " + _to_json(event) + b"\n\n"
