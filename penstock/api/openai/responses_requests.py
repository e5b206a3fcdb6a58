"""Requests to /v1/responses, and their translation into the gateway's types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from penstock.api.extensions import ExtensionFields
from penstock.api.openai.messages import ToolMode
from penstock.api.openai.requests import TIERS, ReasoningEffort, ServiceTier, thinking_of
from penstock.api.openai.responses_items import InputItem, messages_of
from penstock.api.openai.tools import ResponseTool, ResponseToolChoice, Toolbox
from penstock.core.errors import InvalidRequest, quoted
from penstock.core.request import Grammar, Tier
from penstock.gateway.checks import check_top_logprobs
from penstock.gateway.prompts import ChatPrompt, GenerationRequest, SamplingOptions
from penstock.gateway.text import grammars

LOGPROBS_INCLUDED = "message.output_text.logprobs"
MAX_METADATA = 16
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_VALUE_CHARS = 512


class TextFormat(msgspec.Struct, omit_defaults=True):
    type: str
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None

    def to_grammar(self) -> Grammar | None:
        match self.type:
            case "text":
                return None
            case "json_object":
                return Grammar("json")
            case "json_schema" if self.schema is not None:
                return grammars.json_schema(self.schema, strict=bool(self.strict), param="text.format.schema")
            case "json_schema":
                raise InvalidRequest("text.format.schema is missing.", param="text.format.schema")
        raise InvalidRequest(
            f"text.format.type is {quoted(self.type)}, which is none of text, json_object, json_schema.",
            param="text.format.type",
        )


class TextOptions(msgspec.Struct, omit_defaults=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(msgspec.Struct):
    effort: ReasoningEffort | None = None
    summary: str | None = None


class ConversationName(msgspec.Struct):
    id: str


class ResponseRequest(ExtensionFields, kw_only=True):
    """Every field may be null, which is the same as absent."""

    input: str | list[InputItem] = msgspec.field(default_factory=list)
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: ToolMode | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None  # of built-in tools, of which there are none
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    stop: str | list[str] | None = None  # an extension, as in vLLM
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = None
    store: bool | None = None
    stream: bool | None = None
    background: bool | None = None
    metadata: dict[str, str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    service_tier: ServiceTier | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    conversation: str | ConversationName | None = None
    prompt: Any = None

    @property
    def conversation_id(self) -> str | None:
        return self.conversation.id if isinstance(self.conversation, ConversationName) else self.conversation

    @property
    def is_stored(self) -> bool:
        return self.store is not False

    @property
    def wants_logprobs(self) -> bool:
        return self.top_logprobs is not None or LOGPROBS_INCLUDED in (self.include or ())

    def check(self) -> None:
        if self.conversation is not None and self.previous_response_id is not None:
            raise InvalidRequest(
                "Give either conversation or previous_response_id, not both.", param="conversation"
            )
        if self.prompt is not None:
            raise InvalidRequest("Prompt templates are not supported.", param="prompt")
        if self.background and not self.is_stored:
            raise InvalidRequest("A response in the background must be stored.", param="store")
        check_top_logprobs(self.top_logprobs)
        check_metadata(self.metadata)

    def to_generation(self, items: Sequence[InputItem], toolbox: Toolbox) -> GenerationRequest:
        """`items` are all items of the conversation, this request's last. `toolbox` holds its tools."""
        own = None if self.text is None or self.text.format is None else self.text.format.to_grammar()
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        options: dict[str, Any] = {
            "max_tokens": self.max_output_tokens,
            "stop": tuple(stop or ()),
            "temperature": self.temperature,
            "top_p": self.top_p,
            "logprobs": (self.top_logprobs or 0) if self.wants_logprobs else None,
            "grammar": self.extended_grammar(own),
        }
        request = GenerationRequest(
            prompts=(self.chat_prompt(items, toolbox),),
            sampling=SamplingOptions(**options, **self.extended_options()),
            model=self.model,
            tier=TIERS.get(self.service_tier or "default", Tier.DEFAULT),
            endpoint="responses",
            max_tokens_param="max_output_tokens",
            user=self.user if self.safety_identifier is None else self.safety_identifier,
            prompt_cache_key=self.prompt_cache_key,
            drops_oldest_turns=self.truncation == "auto",
            warnings=tuple(dict.fromkeys(toolbox.warnings)),  # `chat_prompt` above has added some
        )
        return self.extended_request(request, has_tier=self.service_tier is not None)

    def chat_prompt(self, items: Sequence[InputItem], toolbox: Toolbox) -> ChatPrompt:
        messages = messages_of(items, self.instructions, toolbox.warnings)
        if not messages:
            raise InvalidRequest("The input is empty.", param="input")
        tools, choice = toolbox.choice(self.tool_choice, parallel=self.parallel_tool_calls is not False)
        thinks, options = thinking_of(self.reasoning.effort if self.reasoning else None)
        return ChatPrompt(
            messages=messages, tools=tools, tool_choice=choice, thinks=thinks, template_options=options
        )


def check_metadata(metadata: dict[str, str] | None) -> None:
    given = metadata or {}
    if (
        len(given) > MAX_METADATA
        or any(len(key) > MAX_METADATA_KEY_CHARS for key in given)
        or any(len(value) > MAX_METADATA_VALUE_CHARS for value in given.values())
    ):
        raise InvalidRequest(
            f"metadata may have {MAX_METADATA} entries, keys of {MAX_METADATA_KEY_CHARS} characters and "
            f"values of {MAX_METADATA_VALUE_CHARS}.",
            param="metadata",
        )
