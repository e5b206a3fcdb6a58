"""What clients send to /v1/completions and /v1/chat/completions, and its translation into the gateway's nouns.

Field names and defaults are OpenAI's; those in `EXTENSION_FIELDS` are our own, with the names vLLM gave them.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from penstock.api.openai.messages import (
    ChatTool,
    ChosenTool,
    Message,
    Prediction,
    ToolMode,
    chat_messages,
    tool_choice_of,
    tools_of,
)
from penstock.core.errors import InvalidRequest
from penstock.core.request import Grammar, Tier
from penstock.gateway.checks import check_top_logprobs
from penstock.gateway.prompts import (
    ChatPrompt,
    GenerationRequest,
    Prompt,
    SamplingOptions,
    TextPrompt,
    TokenPrompt,
)
from penstock.gateway.text.grammars import ResponseFormat, StructuredOutputs

EXTENSION_FIELDS = (
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "prompt_logprobs",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)
COMPLETION_DEFAULT_MAX_TOKENS = 16

ServiceTier = Literal["auto", "default", "flex", "priority", "scale"]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
TIERS = {"flex": Tier.BATCH, "priority": Tier.PRIORITY}
_OTHER_SERVERS_GRAMMARS = {"regex": "regex", "ebnf": "grammar", "json_schema": "json", "grammar": "grammar"}
_TOP_K_OFF = -1  # as other servers write it; 0 means the same


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # accepted; nothing is padded


class SamplingFields(msgspec.Struct, kw_only=True):
    """What both endpoints share. Every field may be null, which is the same as absent."""

    ENDPOINT: ClassVar[str]  # what the usage ledger calls it

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
    prompt_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    regex: Any = None  # SGLang's and llama.cpp's names, all refused
    ebnf: Any = None
    json_schema: Any = None
    grammar: Any = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, Any] | None = None  # kept with a chat completion that is stored
    store: bool | None = None  # of chat completions

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def check_options(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options may only be given with stream=true.", param="stream_options")
        check_top_logprobs(self.prompt_logprobs, param="prompt_logprobs")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest(
                "prompt_logprobs cannot be combined with stream=true.",
                param="prompt_logprobs",
                hint="In streams of /v1/completions, echo with logprobs shows them.",
            )

    def generation_request(
        self,
        prompts: tuple[Prompt, ...],
        *,
        max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None = None,
        default_max_tokens: int | None = None,
        max_tokens_param: str = "max_tokens",
    ) -> GenerationRequest:
        options = self._sampling_options(max_tokens, logprobs)
        return GenerationRequest(
            prompts=prompts,
            sampling=msgspec.structs.replace(options, prompt_logprobs=prompt_logprobs),
            n=1 if self.n is None else self.n,
            model=self.model,
            default_max_tokens=default_max_tokens,
            max_tokens_param=max_tokens_param,
            tier=TIERS.get(self.service_tier or "default", Tier.DEFAULT),
            endpoint=self.ENDPOINT,
            user=self.user if self.safety_identifier is None else self.safety_identifier,
            prompt_cache_key=self.prompt_cache_key,
        )

    def _grammar(self) -> Grammar | None:
        """What the answer must look like, in whichever of the ways there are to say it; at most one."""
        for name, ours in _OTHER_SERVERS_GRAMMARS.items():
            if getattr(self, name) is not None:  # to ignore it would be to break a promise
                raise InvalidRequest(
                    f"The field {name} is not supported.", param=name, hint=f"Use structured_outputs.{ours}."
                )
        guided = StructuredOutputs(
            json=self.guided_json,
            regex=self.guided_regex,
            choice=self.guided_choice,
            grammar=self.guided_grammar,
        )
        grammars = [
            None if self.response_format is None else self.response_format.to_grammar(),
            None
            if self.structured_outputs is None
            else self.structured_outputs.to_grammar("structured_outputs"),
            guided.to_grammar("guided"),
        ]
        given = [grammar for grammar in grammars if grammar is not None]
        if len(given) > 1:
            raise InvalidRequest(
                "Give only one of response_format, structured_outputs and guided_….", param="response_format"
            )
        return given[0] if given else None

    def _sampling_options(self, max_tokens: int | None, logprobs: int | None) -> SamplingOptions:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        options: dict[str, Any] = {
            "max_tokens": max_tokens,
            "min_tokens": self.min_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": 0 if self.top_k == _TOP_K_OFF else self.top_k,
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
            "grammar": self._grammar(),
        }
        return SamplingOptions(**{name: value for name, value in options.items() if value is not None})


class CompletionRequest(SamplingFields, kw_only=True):
    ENDPOINT = "completions"

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None

    def to_generation(self) -> GenerationRequest:
        self.check_options()
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise InvalidRequest(
                "max_tokens must be at least 1, except with echo or prompt_logprobs.", param="max_tokens"
            )
        if self.suffix:
            raise InvalidRequest("suffix is not supported.", param="suffix")
        if self.best_of is not None and self.best_of != (1 if self.n is None else self.n):
            raise InvalidRequest("best_of other than n is not supported.", param="best_of")
        asked = (self.prompt_logprobs, self.logprobs if self.echo else None)
        return self.generation_request(
            _prompts(self.prompt),
            max_tokens=self.max_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=max((count for count in asked if count is not None), default=None),
            default_max_tokens=COMPLETION_DEFAULT_MAX_TOKENS,
        )


class ChatCompletionRequest(SamplingFields, kw_only=True):
    ENDPOINT = "chat"

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[ChatTool] | None = None
    tool_choice: ToolMode | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    prediction: Prediction | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    web_search_options: Any = None
    chat_template_kwargs: dict[str, Any] | None = None

    def to_generation(self) -> GenerationRequest:
        self.check_options()
        self._refuse_unsupported()
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs may only be given with logprobs=true.", param="top_logprobs")
        check_top_logprobs(self.top_logprobs)
        is_old_name = self.max_completion_tokens is None
        request = self.generation_request(
            (self._prompt(),),
            max_tokens=self.max_tokens if is_old_name else self.max_completion_tokens,
            max_tokens_param="max_tokens" if is_old_name else "max_completion_tokens",
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            prompt_logprobs=self.prompt_logprobs,
        )
        if self.prediction is None:
            return request
        return msgspec.structs.replace(request, prediction=self.prediction.text)

    def _prompt(self) -> ChatPrompt:
        tools, choice = tool_choice_of(
            self.tool_choice, tools_of(self.tools), parallel=self.parallel_tool_calls is not False
        )
        thinks, options = thinking_of(self.reasoning_effort)
        return ChatPrompt(
            messages=chat_messages(self.messages),
            tools=tools,
            tool_choice=choice,
            thinks=thinks,
            template_options=options | (self.chat_template_kwargs or {}),
        )

    def _refuse_unsupported(self) -> None:
        if self.functions or self.function_call is not None:
            raise InvalidRequest(
                "functions and function_call are not supported.",
                param="functions",
                hint="Use tools and tool_choice, which replaced them.",
            )
        if self.audio is not None or any(modality != "text" for modality in self.modalities or ()):
            raise InvalidRequest("Only text can be generated.", param="modalities")
        if self.web_search_options is not None:
            raise InvalidRequest("Searching the web is not supported.", param="web_search_options")


def thinking_of(effort: ReasoningEffort | None) -> tuple[bool | None, dict[str, Any]]:
    """Whether the model is to think, and what its template is told about how much."""
    if effort is None:
        return None, {}
    return effort != "none", {} if effort == "none" else {"reasoning_effort": effort}


def _prompts(prompt: str | list[str | int | list[int]]) -> tuple[Prompt, ...]:
    """A text, a list of texts, a list of token ids, or a list of lists of token ids."""
    if isinstance(prompt, str):
        return (TextPrompt(prompt),)
    if prompt and set(map(type, prompt)) == {int}:  # millions may be given
        return (TokenPrompt(tuple(prompt)),)  # type: ignore[arg-type]
    prompts: list[Prompt] = []
    for item in prompt:
        if isinstance(item, int):
            raise InvalidRequest("A list of token ids may hold nothing else.", param="prompt")
        prompts.append(TextPrompt(item) if isinstance(item, str) else TokenPrompt(tuple(item)))
    return tuple(prompts)
