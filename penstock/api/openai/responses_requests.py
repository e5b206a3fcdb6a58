"""What clients send to /v1/responses, and its translation into the gateway's nouns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from penstock.api.openai.messages import AllowedTool, AllowedTools, ToolMode, allowed_choice, named_choice
from penstock.api.openai.requests import TIERS, ReasoningEffort, ServiceTier, thinking_of
from penstock.api.openai.responses_items import CUSTOM_TOOL_PARAMETERS, InputItem, messages_of
from penstock.core.errors import InvalidRequest
from penstock.core.request import Grammar, Tier
from penstock.gateway.checks import check_top_logprobs
from penstock.gateway.prompts import ChatPrompt, GenerationRequest, SamplingOptions, Tool, ToolChoice
from penstock.gateway.text import grammars

LOGPROBS_INCLUDED = "message.output_text.logprobs"
MAX_METADATA = 16
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_VALUE_CHARS = 512


class ToolFormat(msgspec.Struct, omit_defaults=True):
    """What a custom tool takes."""

    type: str
    syntax: str | None = None
    definition: str | None = None


class ResponseTool(msgspec.Struct, omit_defaults=True):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: ToolFormat | None = None  # of a custom tool


class ResponseToolChoice(msgspec.Struct, omit_defaults=True):
    type: str
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[AllowedTool] | None = None


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
            f"text.format.type is {self.type!r}, which is none of text, json_object, json_schema.",
            param="text.format.type",
        )


class TextOptions(msgspec.Struct, omit_defaults=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(msgspec.Struct):
    effort: ReasoningEffort | None = None
    summary: str | None = None


class ResponseRequest(msgspec.Struct, kw_only=True):
    """Every field may be null, which is the same as absent."""

    input: str | list[InputItem]
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
    conversation: Any = None
    prompt: Any = None

    @property
    def custom_tools(self) -> frozenset[str]:
        """The names of tools that take free text instead of JSON."""
        return frozenset(tool.name or "" for tool in self.tools or () if tool.type == "custom")

    @property
    def is_stored(self) -> bool:
        return self.store is not False

    @property
    def wants_logprobs(self) -> bool:
        return self.top_logprobs is not None or LOGPROBS_INCLUDED in (self.include or ())

    def check(self) -> None:
        if self.conversation is not None:
            raise InvalidRequest(
                "Conversations are not supported.",
                param="conversation",
                hint="Use previous_response_id to go on with a response.",
            )
        if self.prompt is not None:
            raise InvalidRequest("Prompt templates are not supported.", param="prompt")
        if self.background and not self.is_stored:
            raise InvalidRequest("A response in the background must be stored.", param="store")
        if self.background and self.stream:
            raise InvalidRequest("A response in the background cannot be streamed.", param="stream")
        check_top_logprobs(self.top_logprobs)
        self._check_metadata()

    def to_generation(self, items: Sequence[InputItem]) -> GenerationRequest:
        """`items` are those of the whole conversation, this request's own at the end."""
        options: dict[str, Any] = {
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "logprobs": (self.top_logprobs or 0) if self.wants_logprobs else None,
            "grammar": None
            if self.text is None or self.text.format is None
            else self.text.format.to_grammar(),
        }
        return GenerationRequest(
            prompts=(self.chat_prompt(items),),
            sampling=SamplingOptions(**{name: value for name, value in options.items() if value is not None}),
            model=self.model,
            tier=TIERS.get(self.service_tier or "default", Tier.DEFAULT),
            endpoint="responses",
            user=self.user if self.safety_identifier is None else self.safety_identifier,
            prompt_cache_key=self.prompt_cache_key,
            drops_oldest_turns=self.truncation == "auto",
        )

    def chat_prompt(self, items: Sequence[InputItem]) -> ChatPrompt:
        messages = messages_of(items, self.instructions)
        if not messages:
            raise InvalidRequest("The input is empty.", param="input")
        tools, choice = self._tool_choice(self._tools())
        thinks, options = thinking_of(self.reasoning.effort if self.reasoning else None)
        return ChatPrompt(
            messages=messages, tools=tools, tool_choice=choice, thinks=thinks, template_options=options
        )

    def _tools(self) -> tuple[Tool, ...]:
        tools = []
        for position, tool in enumerate(self.tools or ()):
            if tool.type not in ("function", "custom") or tool.name is None:
                raise InvalidRequest(
                    f"tools[{position}] is of type {tool.type!r}; only functions and custom tools with a name are "
                    "supported.",
                    param="tools",
                )
            if tool.format is not None and tool.format.type != "text":
                raise InvalidRequest(
                    f"tools[{position}].format is {tool.format.type!r}; custom tools take only text here.",
                    param="tools",
                )
            is_custom = tool.type == "custom"
            parameters = CUSTOM_TOOL_PARAMETERS if is_custom else tool.parameters or {}
            tools.append(Tool(tool.name, tool.description, parameters, is_custom or bool(tool.strict)))
        return tuple(tools)

    def _tool_choice(self, tools: tuple[Tool, ...]) -> tuple[tuple[Tool, ...], ToolChoice]:
        parallel = self.parallel_tool_calls is not False
        choice = self.tool_choice
        if isinstance(choice, ResponseToolChoice):
            if choice.type in ("function", "custom") and choice.name is not None:
                return tools, named_choice(choice.name, tools, parallel=parallel)
            if choice.type == "allowed_tools" and choice.tools is not None:
                allowed = AllowedTools(choice.tools, choice.mode or "auto")
                return allowed_choice(allowed, tools, parallel=parallel)
            raise InvalidRequest(
                f"tool_choice of type {choice.type!r} is not supported.", param="tool_choice"
            )
        if choice == "required" and not tools:
            raise InvalidRequest("tool_choice is 'required', but there are no tools.", param="tool_choice")
        return tools, ToolChoice(choice or "auto", parallel=parallel)

    def _check_metadata(self) -> None:
        metadata = self.metadata or {}
        if (
            len(metadata) > MAX_METADATA
            or any(len(key) > MAX_METADATA_KEY_CHARS for key in metadata)
            or any(len(value) > MAX_METADATA_VALUE_CHARS for value in metadata.values())
        ):
            raise InvalidRequest(
                f"metadata may have {MAX_METADATA} entries, keys of {MAX_METADATA_KEY_CHARS} characters and "
                f"values of {MAX_METADATA_VALUE_CHARS}.",
                param="metadata",
            )
