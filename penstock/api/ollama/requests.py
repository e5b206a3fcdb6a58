"""Requests of Ollama's API, and their translation into the gateway's types.

Field names and defaults are Ollama's. An empty text stands for an absent field, as Ollama's own clients write it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, ClassVar, TypeAlias

import msgspec

from penstock.api.extensions import FOREIGN_FIELDS, ExtensionFields, refuse_foreign
from penstock.api.http.parsing import check_num_parts
from penstock.api.openai.messages import FunctionDefinition
from penstock.api.openai.requests import thinking_of
from penstock.core.errors import InvalidRequest
from penstock.core.request import Grammar, SamplingDefaults
from penstock.gateway.checks import check_num_tools
from penstock.gateway.prompts import (
    ChatMessage,
    ChatPrompt,
    GenerationRequest,
    ImagePart,
    Prompt,
    RequestWarning,
    SamplingOptions,
    TextPart,
    TextPrompt,
    Tool,
    ToolCall,
)
from penstock.gateway.text.grammars import json_schema

ROLES = ("system", "user", "assistant", "tool")
THINKING_LEVELS = ("low", "medium", "high")
# Ollama's own, for a model whose makers recommend nothing.
DEFAULTS = SamplingDefaults(temperature=0.8, top_k=40, top_p=0.9)
REPEAT_LAST_N = 64  # the tokens that penalties look at where a request does not say

Duration: TypeAlias = str | int | float  # "5m", or seconds
Number: TypeAlias = int | float  # whole numbers may be written as 40.0


class Options(ExtensionFields, kw_only=True):
    """The options that change an answer, under Ollama's names, and the extensions of the other dialects. Those of
    other servers are refused. All others concern how Ollama loads a model, and are ignored."""

    num_predict: Number | None = None
    temperature: float | None = None
    top_k: Number | None = None  # type: ignore[assignment]
    top_p: float | None = None
    seed: Number | None = None  # type: ignore[assignment]
    repeat_penalty: float | None = None
    repeat_last_n: Number | None = None  # type: ignore[assignment]
    stop: str | list[str] | None = None

    @classmethod
    def of(cls, given: dict[str, Any] | None) -> Options:
        for name, value in (given or {}).items():
            if name not in _USED_OPTIONS:
                refuse_foreign(name, value)
        try:
            return msgspec.convert(given or {}, cls, str_keys=True)
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"options: {error}.", param="options") from error

    def sampling(self, grammar: Grammar | None, logprobs: int | None) -> SamplingOptions:
        """Zero and negative numbers stand for no limit, except for a seed, where -1 stands for a random one, and for
        `repeat_last_n`, where 0 stands for no penalties."""
        options = self.extended_options()
        options["seed"] = _whole(self.seed, "seed")
        options["top_k"] = _whole(self.top_k, "top_k")
        options["repeat_last_n"] = _whole(self.repeat_last_n, "repeat_last_n")
        if options["seed"] == -1:
            options["seed"] = None
        if options["top_k"] is not None:
            options["top_k"] = max(options["top_k"], 0)
        if self.repeat_penalty is not None:
            options["repetition_penalty"] = self.repeat_penalty
        penalties = (self.repeat_penalty, self.presence_penalty, self.frequency_penalty)
        if options["repeat_last_n"] is None and any(penalties):
            options["repeat_last_n"] = REPEAT_LAST_N
        max_tokens = _whole(self.num_predict, "num_predict")
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or ()
        return SamplingOptions(
            **options,
            max_tokens=max_tokens if max_tokens and max_tokens > 0 else None,
            temperature=self.temperature,
            top_p=self.top_p,
            stop=tuple(text for text in stop if text),
            grammar=self.extended_grammar(grammar),
            logprobs=logprobs,
            fallback=DEFAULTS,
        )


_USED_OPTIONS = frozenset(field.name for field in msgspec.structs.fields(Options))
_SHOWN_NAMES = 8
_SHOWN_NAME_CHARS = 40


class AnswerFields(msgspec.Struct, kw_only=True):
    """The fields that /api/chat and /api/generate share."""

    ENDPOINT: ClassVar[str]  # the name in the usage ledger

    model: str | None = None
    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    keep_alive: Duration | None = None  # accepted: a served model stays loaded
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @property
    def streams(self) -> bool:
        return self.stream is not False

    @property
    def unloads(self) -> bool:
        """Return whether a request without a prompt asks to unload the model. Otherwise it asks to load the model."""
        return self.keep_alive in (0, "0", "0s")

    @property
    def warnings(self) -> tuple[RequestWarning, ...]:
        """One warning that names the options without effect, if there are any."""
        given = (
            name
            for name, value in (self.options or {}).items()
            if value is not None and name not in FOREIGN_FIELDS
        )
        ignored = sorted(name[:_SHOWN_NAME_CHARS] for name in given if name not in _USED_OPTIONS)
        if not ignored:
            return ()
        names = ", ".join(ignored[:_SHOWN_NAMES]) + (", …" if len(ignored) > _SHOWN_NAMES else "")
        return (RequestWarning("options_ignored", f"These options have no effect here: {names}.", "options"),)

    def generation_request(self, prompt: Prompt) -> GenerationRequest:
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        options = Options.of(self.options)
        request = GenerationRequest(
            prompts=(prompt,),
            sampling=options.sampling(self._grammar(), logprobs),
            model=self.model or None,
            endpoint=self.ENDPOINT,
            max_tokens_param="num_predict",
        )
        return options.extended_request(request, has_tier=False)

    def chat_prompt(
        self, messages: tuple[ChatMessage, ...], tools: Sequence[OllamaTool] | None = None
    ) -> ChatPrompt:
        thinks, options = self._thinking()
        check_num_tools(len(tools or ()))
        known = tuple(tool.to_tool() for tool in tools or ())
        return ChatPrompt(messages=messages, tools=known, thinks=thinks, template_options=options)

    def _thinking(self) -> tuple[bool | None, dict[str, Any]]:
        if not isinstance(self.think, str):
            return self.think, {}
        for level in ("low", "medium", "high"):
            if self.think == level:
                return thinking_of(level)
        raise InvalidRequest(
            f"think is {self.think[:40]!r}, which is neither true nor false nor one of "
            f"{', '.join(THINKING_LEVELS)}.",
            param="think",
        )

    def _grammar(self) -> Grammar | None:
        if not self.format:
            return None
        if isinstance(self.format, dict):
            return json_schema(self.format, param="format")
        if self.format == "json":
            return Grammar("json")
        raise InvalidRequest(
            f"format is {self.format[:40]!r}, which is neither 'json' nor a JSON schema.", param="format"
        )


class OllamaTool(msgspec.Struct):
    function: FunctionDefinition
    type: str | None = None

    def to_tool(self) -> Tool:
        if self.type not in (None, "", "function"):
            raise InvalidRequest(f"Tools of the type {self.type[:40]!r} are not supported.", param="tools")
        return self.function.to_tool()


class CalledFunction(msgspec.Struct):
    name: str
    arguments: dict[str, Any] | None = None


class CalledTool(msgspec.Struct):
    function: CalledFunction
    id: str | None = None


class OllamaMessage(msgspec.Struct, kw_only=True):
    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[CalledTool] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class ChatRequest(AnswerFields, kw_only=True):
    ENDPOINT = "ollama_chat"

    messages: list[OllamaMessage] | None = None
    tools: list[OllamaTool] | None = None

    def to_generation(self) -> GenerationRequest | None:
        """None for a request without messages, which asks for the model to be loaded."""
        if not self.messages:
            return None
        return self.generation_request(self.chat_prompt(_chat_messages(self.messages), self.tools))


class GenerateRequest(AnswerFields, kw_only=True):
    ENDPOINT = "ollama_generate"

    prompt: str | None = None
    suffix: str | None = None
    images: list[str] | None = None
    system: str | None = None
    template: str | None = None
    context: list[int] | None = None
    raw: bool | None = None

    def to_generation(self) -> GenerationRequest | None:
        """None for a request without a prompt, which asks for the model to be loaded."""
        self._refuse_unsupported()
        if not self.prompt:
            return None
        if self.raw:
            if self.system:
                raise InvalidRequest("system has no place in a raw prompt.", param="system")
            return self.generation_request(TextPrompt(self.prompt))
        if self.suffix:
            return self.generation_request(TextPrompt(self.prompt, self.suffix))
        system = (ChatMessage("system", self.system),) if self.system else ()
        prompt = _with_images(self.prompt, self.images, "images")
        return self.generation_request(self.chat_prompt((*system, ChatMessage("user", prompt))))

    def _refuse_unsupported(self) -> None:
        if self.images and (self.raw or self.suffix):
            raise InvalidRequest("Images have no place in a raw prompt or beside a suffix.", param="images")
        if self.suffix and (self.raw or self.system):
            raise InvalidRequest("suffix has no place beside raw or system.", param="suffix")
        if self.template:
            raise InvalidRequest(
                "template is not supported: the model's own is used.",
                param="template",
                hint="Send the whole prompt with raw=true.",
            )
        if self.context:
            raise InvalidRequest(
                "context is not supported.", param="context", hint="Send the conversation to /api/chat."
            )


class EmbedRequest(msgspec.Struct, kw_only=True):
    input: str | list[str]
    model: str | None = None
    truncate: bool | None = None
    dimensions: int | None = None
    options: dict[str, Any] | None = None  # accepted; none changes a vector
    keep_alive: Duration | None = None


class EmbeddingsRequest(msgspec.Struct, kw_only=True):
    """The older form, for one text."""

    prompt: str = ""
    model: str | None = None
    options: dict[str, Any] | None = None
    keep_alive: Duration | None = None


class ModelRequest(msgspec.Struct, kw_only=True):
    """A model by name. `name` is the older name of `model`."""

    model: str | None = None
    name: str | None = None
    stream: bool | None = None
    verbose: bool | None = None


def _chat_messages(messages: list[OllamaMessage]) -> tuple[ChatMessage, ...]:
    """Ollama's calls need no ids. Here calls get ids, and results name the calls that they answer, in order."""
    check_num_parts(messages, "messages")
    turns = []
    unanswered = _UnansweredCalls()
    for position, message in enumerate(messages):
        param = f"messages[{position}]"
        if message.role not in ROLES:
            raise InvalidRequest(
                f"{param}.role is {message.role[:40]!r}, which is none of {', '.join(ROLES)}.",
                param=f"{param}.role",
            )
        if message.tool_calls and message.role != "assistant":
            raise InvalidRequest("Only an assistant calls tools.", param=f"{param}.tool_calls")
        calls = tuple(
            ToolCall(
                call.id or f"call_{position}_{number}",
                call.function.name,
                msgspec.json.encode(call.function.arguments or {}).decode(),
            )
            for number, call in enumerate(message.tool_calls or ())
        )
        unanswered.add(calls)
        turns.append(
            ChatMessage(
                message.role,
                _with_images(message.content or "", message.images, f"{param}.images"),
                message.tool_name,
                calls,
                _answered_call(message, unanswered) if message.role == "tool" else None,
                message.thinking,
            )
        )
    return tuple(turns)


class _UnansweredCalls:
    """The calls that no result was found for yet. Finding one takes the same time however many there are."""

    def __init__(self) -> None:
        self._in_order: deque[ToolCall] = deque()
        self._by_name: dict[str, deque[ToolCall]] = {}
        self._answered: set[int] = set()  # identities of calls, which one of the queues may still hold

    def add(self, calls: Sequence[ToolCall]) -> None:
        for call in calls:
            self._in_order.append(call)
            self._by_name.setdefault(call.name, deque()).append(call)

    def take(self, tool_name: str | None) -> ToolCall | None:
        """Return the first call of a tool, else the first of all."""
        for queue in (self._by_name.get(tool_name or "", ()), self._in_order):
            while queue:
                call = queue.popleft()
                if id(call) not in self._answered:
                    self._answered.add(id(call))
                    return call
        return None


def _answered_call(result: OllamaMessage, unanswered: _UnansweredCalls) -> str:
    """Return the id of the call that a result answers: the named one, else the first of its tool, else the first."""
    if result.tool_call_id:
        return result.tool_call_id
    call = unanswered.take(result.tool_name)
    return "call_unknown" if call is None else call.id


def _with_images(text: str, images: list[str] | None, param: str) -> str | tuple[TextPart, ...]:
    """Return the content of a turn. Images are base64 texts, and stand before the text."""
    if not images:
        return text
    return (*(ImagePart(url=f"data:image/*;base64,{image}", param=param) for image in images), TextPart(text))


def _whole(value: Number | None, name: str) -> int | None:
    if value is None or isinstance(value, int):
        return value
    if not value.is_integer():
        raise InvalidRequest(f"options.{name} must be a whole number, not {value}.", param=f"options.{name}")
    return int(value)
