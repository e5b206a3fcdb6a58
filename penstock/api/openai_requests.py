"""What clients send to /v1/completions and /v1/chat/completions, and its translation into the gateway's nouns.

Field names and defaults are OpenAI's; those in `EXTENSION_FIELDS` are our own, with the names vLLM gave them.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from penstock.core.errors import InvalidRequest
from penstock.core.request import Tier
from penstock.gateway.prompts import (
    ChatMessage,
    ChatPrompt,
    GenerationRequest,
    Prompt,
    SamplingOptions,
    TextPart,
    TextPrompt,
    TokenPrompt,
)

EXTENSION_FIELDS = ("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids")
COMPLETION_DEFAULT_MAX_TOKENS = 16
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})

ServiceTier = Literal["auto", "default", "flex", "priority"]
_TIERS = {"flex": Tier.BATCH, "priority": Tier.PRIORITY}
_TOP_K_OFF = (-1, 0)  # as other servers write it


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """What both endpoints share. Every field may be null, which is the same as absent."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    service_tier: ServiceTier | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def check_stream_options(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options may only be given with stream=true.", param="stream_options")

    def generation_request(
        self,
        prompts: tuple[Prompt, ...],
        *,
        max_tokens: int | None,
        logprobs: int | None,
        default_max_tokens: int | None = None,
    ) -> GenerationRequest:
        return GenerationRequest(
            prompts=prompts,
            sampling=self._sampling_options(max_tokens, logprobs),
            n=1 if self.n is None else self.n,
            model=self.model,
            default_max_tokens=default_max_tokens,
            tier=_TIERS.get(self.service_tier or "default", Tier.DEFAULT),
        )

    def _sampling_options(self, max_tokens: int | None, logprobs: int | None) -> SamplingOptions:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        wishes: dict[str, Any] = {
            "max_tokens": max_tokens,
            "min_tokens": self.min_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": None if self.top_k in _TOP_K_OFF else self.top_k,
            "min_p": self.min_p,
            "seed": self.seed,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": self.logit_bias,
            "logprobs": logprobs,
            "stop": tuple(stop or ()),
            "stop_token_ids": tuple(self.stop_token_ids or ()),
            "ignore_eos": self.ignore_eos,
        }
        return SamplingOptions(**{name: wish for name, wish in wishes.items() if wish is not None})


class CompletionRequest(SamplingFields, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None

    def to_generation(self) -> GenerationRequest:
        self.check_stream_options()
        if self.echo:
            raise InvalidRequest("echo is not supported.", param="echo")
        if self.suffix:
            raise InvalidRequest("suffix is not supported.", param="suffix")
        if self.best_of is not None and self.best_of != (1 if self.n is None else self.n):
            raise InvalidRequest("best_of other than n is not supported.", param="best_of")
        return self.generation_request(
            _prompts(self.prompt),
            max_tokens=self.max_tokens,
            logprobs=self.logprobs,
            default_max_tokens=COMPLETION_DEFAULT_MAX_TOKENS,
        )


class MessagePart(msgspec.Struct):
    type: str
    text: str | None = None


class Message(msgspec.Struct):
    role: str
    content: str | list[MessagePart] | None = None
    name: str | None = None
    tool_calls: list[Any] | None = None

    def to_chat_message(self, position: int) -> ChatMessage:
        param = f"messages[{position}]"
        if self.role not in ROLES:
            raise InvalidRequest(
                f"{param}.role is {self.role!r}, which is none of {', '.join(sorted(ROLES))}.",
                param=f"{param}.role",
            )
        if self.tool_calls:
            raise InvalidRequest("Tool calls are not supported.", param=f"{param}.tool_calls")
        if self.content is None:
            raise InvalidRequest(f"{param}.content is missing.", param=f"{param}.content")
        # Templates know the older name of this role.
        role = "system" if self.role == "developer" else self.role
        if isinstance(self.content, str):
            return ChatMessage(role, self.content, self.name)
        return ChatMessage(role, tuple(TextPart(_text_of(part, param)) for part in self.content), self.name)


class ResponseFormat(msgspec.Struct):
    type: str


class ChatCompletionRequest(SamplingFields, kw_only=True):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def to_generation(self) -> GenerationRequest:
        self.check_stream_options()
        self._refuse_unsupported()
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs may only be given with logprobs=true.", param="top_logprobs")
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        prompt = ChatPrompt(
            messages=chat_messages(self.messages), template_options=self.chat_template_kwargs or {}
        )
        return self.generation_request(
            (prompt,),
            max_tokens=max_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )

    def _refuse_unsupported(self) -> None:
        if self.response_format is not None and self.response_format.type != "text":
            raise InvalidRequest(
                f"response_format {self.response_format.type!r} is not supported; only 'text' is.",
                param="response_format",
            )
        if self.tools and self.tool_choice != "none":
            raise InvalidRequest("Tools are not supported.", param="tools", hint="Use tool_choice='none'.")
        if self.functions:
            raise InvalidRequest("Functions are not supported.", param="functions")


def chat_messages(messages: list[Message]) -> tuple[ChatMessage, ...]:
    if not messages:
        raise InvalidRequest("There must be at least one message.", param="messages")
    return tuple(message.to_chat_message(position) for position, message in enumerate(messages))


def _text_of(part: MessagePart, param: str) -> str:
    if part.type != "text" or part.text is None:
        raise InvalidRequest(
            f"{param}.content has a part of type {part.type!r}; this model takes text parts only.",
            param=f"{param}.content",
        )
    return part.text


def _prompts(prompt: str | list[str | int | list[int]]) -> tuple[Prompt, ...]:
    """A text, a list of texts, a list of token ids, or a list of lists of token ids."""
    if isinstance(prompt, str):
        return (TextPrompt(prompt),)
    if prompt and all(isinstance(item, int) for item in prompt):
        return (TokenPrompt(tuple(prompt)),)  # type: ignore[arg-type]
    prompts: list[Prompt] = []
    for item in prompt:
        if isinstance(item, int):
            raise InvalidRequest("A list of token ids may hold nothing else.", param="prompt")
        prompts.append(TextPrompt(item) if isinstance(item, str) else TokenPrompt(tuple(item)))
    return tuple(prompts)
