"""The wire formats of external servers, for requests and answers: OpenAI's API, the deployments of Azure, and
Anthropic's.

A call has OpenAI's shape. A dialect writes the call as its servers read it, and reads their answers back as OpenAI's
chunks. Knows no connections.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias
from urllib.parse import quote

import msgspec

from penstock.cluster.external.wire import (
    ExternalCall,
    StreamChunk,
    WholeAnswer,
    WireCached,
    WireChoice,
    WireDelta,
    WireFunction,
    WireToolCall,
    WireUsage,
)
from penstock.core.config import ExternalServerConfig
from penstock.core.errors import ConfigError, InvalidRequest

ANTHROPIC_VERSION = "2023-06-01"
AZURE_API_VERSION = "2024-10-21"
DEFAULT_MAX_TOKENS = 4096  # which Anthropic's API must be told

ReadEvent: TypeAlias = Callable[[bytes], StreamChunk]
_read_openai: ReadEvent = msgspec.json.Decoder(StreamChunk).decode
_read_openai_whole: ReadEvent = msgspec.json.Decoder(WholeAnswer).decode


class Dialect(Protocol):
    headers: Mapping[str, str]  # of every request, beside the key's
    key_header: str
    takes_cache_control: bool
    models_path: str

    def path(self, call: ExternalCall, model: str) -> str: ...

    def body(self, call: ExternalCall, model: str) -> dict[str, Any]:
        """Raises InvalidRequest for what the servers cannot do."""
        ...

    def read_whole(self, data: bytes) -> StreamChunk:
        """Return an answer in one piece. Raises msgspec.DecodeError."""
        ...

    def reader(self) -> ReadEvent:
        """Reads the events of one stream. Raises msgspec.DecodeError."""
        ...


class OpenAI:
    headers: Mapping[str, str] = {}
    key_header = "authorization"
    takes_cache_control = False
    models_path = "/v1/models"

    def path(self, call: ExternalCall, model: str) -> str:
        return f"/v1/{call.api}"

    def body(self, call: ExternalCall, model: str) -> dict[str, Any]:
        if call.api == "embeddings":
            return {**call.body, "model": model}
        body = {**call.body, "model": model, "stream": not call.is_whole}
        if not call.is_whole:
            body["stream_options"] = {"include_usage": True}
        return body

    def read_whole(self, data: bytes) -> StreamChunk:
        return _read_openai_whole(data)

    def reader(self) -> ReadEvent:
        return _read_openai


class Azure(OpenAI):
    """The older API of Azure, whose paths name a deployment. The newer one is OpenAI's, at `…/openai/v1`."""

    key_header = "api-key"

    def __init__(self, api_version: str) -> None:
        self._query = f"?api-version={quote(api_version)}"
        self.models_path = f"/openai/models{self._query}"

    def path(self, call: ExternalCall, model: str) -> str:
        return f"/openai/deployments/{quote(model, safe='')}/{call.api}{self._query}"


class Anthropic:
    headers: Mapping[str, str] = {"anthropic-version": ANTHROPIC_VERSION}
    key_header = "x-api-key"
    takes_cache_control = True
    models_path = "/v1/models?limit=1000"

    def path(self, call: ExternalCall, model: str) -> str:
        return "/v1/messages"

    def body(self, call: ExternalCall, model: str) -> dict[str, Any]:
        asked = call.body
        if "messages" not in asked:
            raise InvalidRequest(
                "The server of this model takes chats only.", param="input" if "input" in asked else "prompt"
            )
        for name in _UNKNOWN_TO_ANTHROPIC:
            if name in asked:
                raise InvalidRequest(f"The server of this model does not take {name}.", param=name)
        system, messages = _anthropic_messages(asked["messages"])
        body: dict[str, Any] = {
            "model": model,
            "messages": messages,
            "max_tokens": asked.get("max_tokens") or DEFAULT_MAX_TOKENS,
            "stream": not call.is_whole,
        }
        if system:
            body["system"] = system
        body |= {name: asked[name] for name in ("top_p", "top_k") if name in asked}
        if "temperature" in asked:
            body["temperature"] = min(1.0, asked["temperature"])
        if "stop" in asked:
            body["stop_sequences"] = asked["stop"]
        if asked.get("tools"):
            body["tools"] = [_anthropic_tool(tool) for tool in asked["tools"]]
            body["tool_choice"] = _anthropic_choice(asked)
        return body

    def read_whole(self, data: bytes) -> StreamChunk:
        answer = _decode_message(data)
        if answer.type == "error":
            return StreamChunk(error=answer.error)
        tools = [
            WireToolCall(
                number, block.id, WireFunction(block.name, msgspec.json.encode(block.input).decode())
            )
            for number, block in enumerate(each for each in answer.content if each.type == "tool_use")
        ]
        message = WireDelta(
            content="".join(block.text for block in answer.content if block.type == "text"),
            reasoning_content="".join(block.thinking for block in answer.content) or None,
            tool_calls=tools or None,
        )
        choice = WireChoice(
            delta=message,
            finish_reason=_FINISH_REASONS.get(answer.stop_reason or "", "stop"),
            stop_reason=answer.stop_sequence,
        )
        return StreamChunk([choice], answer.usage.as_openai(answer.usage.output_tokens))

    def reader(self) -> ReadEvent:
        return _AnthropicEvents()


# Fields that Anthropic's API does not have. Leaving one out would silently change the answer.
_UNKNOWN_TO_ANTHROPIC = ("logprobs", "response_format", "structured_outputs", "logit_bias", "min_tokens")
_FINISH_REASONS = {
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}


class _Tokens(msgspec.Struct, frozen=True):
    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None

    def as_openai(self, output_tokens: int | None) -> WireUsage:
        cached = self.cache_read_input_tokens or 0
        prompt = (self.input_tokens or 0) + cached + (self.cache_creation_input_tokens or 0)
        return WireUsage(prompt, output_tokens, WireCached(cached))


class _Block(msgspec.Struct, frozen=True):
    type: str = ""
    text: str = ""
    thinking: str = ""
    id: str | None = None
    name: str | None = None
    input: Any = None


class _Delta(msgspec.Struct, frozen=True):
    type: str = ""
    text: str = ""
    thinking: str = ""
    partial_json: str = ""
    stop_reason: str | None = None
    stop_sequence: str | None = None


class _Message(msgspec.Struct, frozen=True):
    type: str = ""
    content: list[_Block] = []
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: _Tokens = _Tokens()
    error: Any = None


class _Event(msgspec.Struct, frozen=True):
    type: str = ""
    index: int = 0
    message: _Message | None = None
    content_block: _Block | None = None
    delta: _Delta | None = None
    usage: _Tokens | None = None
    error: Any = None


_decode_message = msgspec.json.Decoder(_Message).decode
_decode_event = msgspec.json.Decoder(_Event).decode
_NOTHING = StreamChunk()


class _AnthropicEvents:
    """Reads the events of one stream. Calls of tools are counted by themselves in OpenAI's chunks."""

    def __init__(self) -> None:
        self._prompt = _Tokens()
        self._calls: dict[int, int] = {}  # their numbers, by the index of their block

    def __call__(self, data: bytes) -> StreamChunk:
        event = _decode_event(data)
        if event.type == "message_start" and event.message is not None:
            self._prompt = event.message.usage
        elif event.type == "content_block_start" and event.content_block is not None:
            return self._begun(event.index, event.content_block)
        elif event.type == "content_block_delta" and event.delta is not None:
            return self._went_on(event.index, event.delta)
        elif event.type == "message_delta" and event.delta is not None:
            return self._ended(event.delta, event.usage or _Tokens())
        elif event.type == "error":
            return StreamChunk(error=event.error or "an error")
        return _NOTHING

    def _begun(self, index: int, block: _Block) -> StreamChunk:
        if block.type != "tool_use":
            return _says(WireDelta(content=block.text or None, reasoning_content=block.thinking or None))
        number = self._calls[index] = len(self._calls)
        return _says(WireDelta(tool_calls=[WireToolCall(number, block.id, WireFunction(block.name, ""))]))

    def _went_on(self, index: int, delta: _Delta) -> StreamChunk:
        if index in self._calls:
            function = WireFunction(None, delta.partial_json)
            return _says(WireDelta(tool_calls=[WireToolCall(self._calls[index], None, function)]))
        return _says(WireDelta(content=delta.text or None, reasoning_content=delta.thinking or None))

    def _ended(self, delta: _Delta, usage: _Tokens) -> StreamChunk:
        choices = []
        if delta.stop_reason is not None:
            reason = _FINISH_REASONS.get(delta.stop_reason, "stop")
            choices = [WireChoice(delta=WireDelta(), finish_reason=reason, stop_reason=delta.stop_sequence)]
        return StreamChunk(choices, self._prompt.as_openai(usage.output_tokens))


def _says(delta: WireDelta) -> StreamChunk:
    return StreamChunk([WireChoice(delta=delta)])


def _anthropic_messages(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the system's blocks, and the turns. Results of tools are blocks of the user's turn."""
    system: list[dict[str, Any]] = []
    turns: list[dict[str, Any]] = []
    for message in messages:
        role = message["role"]
        blocks = _blocks(message)
        if role in ("system", "developer"):
            system += blocks
            continue
        side = "assistant" if role == "assistant" else "user"
        if turns and turns[-1]["role"] == side:
            turns[-1]["content"] += blocks
        else:
            turns.append({"role": side, "content": blocks})
    return system, turns


def _blocks(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    content = message.get("content") or ""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    # Empty texts are refused there.
    blocks = [_block(part) for part in parts if part["type"] != "text" or part["text"]]
    if message["role"] in ("tool", "function"):
        # A mark belongs to the whole result.
        marks = [block.pop("cache_control") for block in blocks if "cache_control" in block]
        result = {"type": "tool_result", "tool_use_id": message.get("tool_call_id"), "content": blocks}
        return [result | {"cache_control": marks[-1]} if marks else result]
    for call in message.get("tool_calls") or ():
        function = call["function"]
        try:
            given = msgspec.json.decode(function["arguments"] or "{}")
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidRequest(
                "The arguments of an earlier call of a tool are not JSON.", param="messages"
            ) from error
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": given})
    return blocks


def _block(part: Mapping[str, Any]) -> dict[str, Any]:
    if part["type"] != "image_url":
        return dict(part)
    url: str = part["image_url"]["url"]
    if not url.startswith("data:"):
        return {"type": "image", "source": {"type": "url", "url": url}}
    media_type, _, data = url.removeprefix("data:").partition(";base64,")
    return {"type": "image", "source": {"type": "base64", "media_type": media_type, "data": data}}


def _anthropic_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool["function"]
    fields = {"name": function["name"], "input_schema": function["parameters"]}
    if "description" in function:
        fields["description"] = function["description"]
    if "cache_control" in tool:
        fields["cache_control"] = tool["cache_control"]
    return fields


def _anthropic_choice(asked: Mapping[str, Any]) -> dict[str, Any]:
    choice = asked.get("tool_choice", "auto")
    if isinstance(choice, dict):
        fields: dict[str, Any] = {"type": "tool", "name": choice["function"]["name"]}
    else:
        fields = {"type": {"required": "any"}.get(choice, choice)}
    if fields["type"] != "none" and asked.get("parallel_tool_calls") is False:
        fields["disable_parallel_tool_use"] = True
    return fields


def dialect_of(config: ExternalServerConfig) -> Dialect:
    """Raises ConfigError for an Azure server without models: it lists what it could serve, not its deployments."""
    if config.dialect == "anthropic":
        return Anthropic()
    if config.dialect == "openai":
        return OpenAI()
    if not config.models:
        raise ConfigError(
            f"The external server {config.url} must name its models: Azure does not list deployments.",
            hint='Write models = { name = "deployment" } into its table.',
        )
    return Azure(config.api_version or AZURE_API_VERSION)
