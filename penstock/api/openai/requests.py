"""Requests to /v1/completions and /v1/chat/completions, and their translation into the gateway's types.

Field names and defaults are OpenAI's; `api.extensions` has the fields of other servers.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec
from msgspec.structs import replace

from penstock.api.extensions import ExtensionFields, refuse_foreign
from penstock.api.openai.messages import (
    FunctionDefinition,
    FunctionName,
    Message,
    Prediction,
    ToolMode,
    chat_messages,
)
from penstock.api.openai.tools import CallStyle, ChatTool, ChosenTool, Toolbox, flat_choice, toolbox_of
from penstock.core.errors import InvalidRequest
from penstock.core.request import Tier
from penstock.gateway.checks import check_num_choices, check_top_logprobs
from penstock.gateway.prompts import (
    BeamOptions,
    ChatPrompt,
    GenerationRequest,
    Prompt,
    SamplingOptions,
    TextPrompt,
    TokenPrompt,
)
from penstock.gateway.text.grammars import ResponseFormat

COMPLETION_DEFAULT_MAX_TOKENS = 16

ServiceTier = Literal["auto", "default", "flex", "priority", "scale"]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
TIERS = {"flex": Tier.BATCH, "priority": Tier.PRIORITY}


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # accepted; nothing is padded


class SamplingFields(ExtensionFields, kw_only=True):
    """The fields that both endpoints share. Every field may be null, which is the same as absent."""

    ENDPOINT: ClassVar[str]  # the name in the usage ledger

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    service_tier: ServiceTier | None = None
    n: int | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None  # vLLM's, and the next two
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
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
        self.check_beams()
        check_top_logprobs(self.prompt_logprobs, param="prompt_logprobs")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest(
                "prompt_logprobs cannot be combined with stream=true.",
                param="prompt_logprobs",
                hint="In streams of /v1/completions, echo with logprobs shows them.",
            )

    def check_beams(self) -> None:
        """Beams exist as a whole only at the end of their search."""
        if not self.use_beam_search:
            refuse_foreign("length_penalty", self.length_penalty)
            refuse_foreign("early_stopping", self.early_stopping)
            return
        if self.stream:
            raise InvalidRequest(
                "Beam search cannot be streamed: its answers are known at the end.",
                param="stream",
                hint="Send stream=false.",
            )
        if self.best_of is not None and self.best_of < self.num_answers:
            raise InvalidRequest("best_of must be at least n.", param="best_of")

    @property
    def num_answers(self) -> int:
        return 1 if self.n is None else self.n

    def beam_options(self) -> BeamOptions | None:
        """Return the options of beam search. Its width is `best_of`, or else `n`."""
        if not self.use_beam_search:
            return None
        return BeamOptions(
            width=self.num_answers if self.best_of is None else self.best_of,
            length_penalty=1.0 if self.length_penalty is None else self.length_penalty,
            early_stopping=self.early_stopping or False,
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
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        own = None if self.response_format is None else self.response_format.to_grammar()
        options: dict[str, Any] = {
            "max_tokens": max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "logprobs": logprobs,
            "prompt_logprobs": prompt_logprobs,
            "stop": tuple(stop or ()),
            "grammar": self.extended_grammar(own),
        }
        request = GenerationRequest(
            prompts=prompts,
            sampling=SamplingOptions(**options, **self.extended_options()),
            n=self.num_answers,
            beams=self.beam_options(),
            model=self.model,
            default_max_tokens=default_max_tokens,
            max_tokens_param=max_tokens_param,
            tier=TIERS.get(self.service_tier or "default", Tier.DEFAULT),
            endpoint=self.ENDPOINT,
            user=self.user if self.safety_identifier is None else self.safety_identifier,
            prompt_cache_key=self.prompt_cache_key,
        )
        request = self.extended_request(request, has_tier=self.service_tier is not None)
        if not self.return_token_ids:
            return request
        return replace(request, text=replace(request.text, lists_token_ids=True))


class CompletionRequest(SamplingFields, kw_only=True):
    ENDPOINT = "completions"

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None

    @property
    def keeps_best(self) -> bool:
        """Return whether more answers are sampled than returned."""
        return self.best_of not in (None, self.num_answers) and not self.use_beam_search

    def to_generation(self) -> GenerationRequest:
        self.check_options()
        self._check_best_of()
        if self.use_beam_search and self.echo:
            raise InvalidRequest("echo cannot be combined with beam search.", param="echo")
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise InvalidRequest(
                "max_tokens must be at least 1, except with echo or prompt_logprobs.", param="max_tokens"
            )
        if self.echo and (self.suffix or self.truncate_prompt_tokens is not None):
            raise InvalidRequest(
                "echo cannot be combined with suffix or truncate_prompt_tokens.", param="echo"
            )
        asked = (self.prompt_logprobs, self.logprobs if self.echo else None)
        request = self.generation_request(
            tuple(self._with_options(prompt) for prompt in _prompts(self.prompt)),
            max_tokens=self.max_tokens,
            logprobs=0 if self.keeps_best and self.logprobs is None else self.logprobs,
            prompt_logprobs=max((count for count in asked if count is not None), default=None),
            default_max_tokens=COMPLETION_DEFAULT_MAX_TOKENS,
        )
        return replace(request, n=self.best_of or request.n) if self.keeps_best else request

    def _check_best_of(self) -> None:
        if not self.keeps_best or self.best_of is None:
            return
        if self.best_of < self.num_answers:
            raise InvalidRequest("best_of must be at least n.", param="best_of")
        if self.stream or self.echo or self.prompt_logprobs is not None:
            raise InvalidRequest(
                "best_of cannot be combined with stream, echo or prompt_logprobs.", param="best_of"
            )

    def _with_options(self, prompt: Prompt) -> Prompt:
        if not isinstance(prompt, TextPrompt):
            if self.suffix:
                raise InvalidRequest("suffix needs a prompt of text, not of token ids.", param="suffix")
            return prompt
        return TextPrompt(prompt.text, self.suffix or None, self.add_special_tokens is not False)


class ThinkingSwitch(msgspec.Struct):
    """Thinking as DeepSeek, GLM and others switch it."""

    type: Literal["enabled", "disabled", "auto", "adaptive"]
    budget_tokens: int | None = None

    @property
    def thinks(self) -> bool | None:
        return {"enabled": True, "disabled": False}.get(self.type)


class ReasoningSwitch(msgspec.Struct, forbid_unknown_fields=True):
    """Thinking as OpenRouter switches it."""

    effort: ReasoningEffort | None = None
    max_tokens: int | None = None
    enabled: bool | None = None
    summary: str | None = None  # accepted: thoughts are shown as they are


class ChatCompletionRequest(SamplingFields, kw_only=True):
    ENDPOINT = "chat"

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[ChatTool] | None = None
    tool_choice: ToolMode | Literal["any"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    prediction: Prediction | None = None
    functions: list[FunctionDefinition] | None = None  # the older form of tools, and of tool_choice
    function_call: Literal["auto", "none"] | FunctionName | None = None
    modalities: list[str] | None = None
    audio: Any = None
    web_search_options: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: str | None = None  # the name of one of the model's templates
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    enable_thinking: bool | None = None  # as several providers write it, and the next four fields
    thinking: ThinkingSwitch | None = None
    reasoning: ReasoningSwitch | None = None
    thinking_token_budget: int | None = None
    thinking_budget: int | None = None

    def to_generation(self) -> GenerationRequest:
        self.check_options()
        if not self.use_beam_search:
            refuse_foreign("best_of", self.best_of)
        self._refuse_unsupported()
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs may only be given with logprobs=true.", param="top_logprobs")
        check_top_logprobs(self.top_logprobs)
        is_old_name = self.max_completion_tokens is None
        toolbox = toolbox_of(self.tools, self.functions)
        request = self.generation_request(
            (self._prompt(toolbox),),
            max_tokens=self.max_tokens if is_old_name else self.max_completion_tokens,
            max_tokens_param="max_tokens" if is_old_name else "max_completion_tokens",
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            prompt_logprobs=self.prompt_logprobs,
        )
        if toolbox.warnings:
            request = replace(request, warnings=(*request.warnings, *dict.fromkeys(toolbox.warnings)))
        if self.prediction is None:
            return request
        return replace(request, prediction=self.prediction.text)

    @property
    def call_style(self) -> CallStyle:
        return CallStyle.of(self.tools, is_older=bool(self.functions))

    def chat_prompt(self) -> ChatPrompt:
        """Return the prompt alone."""
        return self._prompt(toolbox_of(self.tools, self.functions))

    def _prompt(self, toolbox: Toolbox) -> ChatPrompt:
        tools, choice = toolbox.choice(
            flat_choice(self.tool_choice, self.function_call, toolbox),
            parallel=self.parallel_tool_calls is not False and not self.functions,
        )
        thinks, options = self._thinking()
        messages = chat_messages(self.messages)
        if self.continue_final_message:
            if self.add_generation_prompt:
                raise InvalidRequest(
                    "continue_final_message and add_generation_prompt exclude each other.",
                    param="continue_final_message",
                )
            if messages[-1].role != "assistant":
                raise InvalidRequest(
                    "continue_final_message needs a last message of the assistant.",
                    param="continue_final_message",
                )
        if self.documents is not None:
            options["documents"] = self.documents
        return ChatPrompt(
            messages=messages,
            tools=tools,
            tool_choice=choice,
            thinks=thinks,
            max_thinking_tokens=self._thinking_budget(),
            add_generation_prompt=self.add_generation_prompt is not False,
            continues_last=bool(self.continue_final_message),
            template_options=options | (self.chat_template_kwargs or {}),
            template_name=self.chat_template,
        )

    def _thinking(self) -> tuple[bool | None, dict[str, Any]]:
        """Return whether the model should think, and how much. Several fields can say so; template variables have
        priority."""
        if self._says_nothing_of_thinking:
            return None, {}
        thinking, reasoning = self.thinking or ThinkingSwitch("auto"), self.reasoning or ReasoningSwitch()
        thinks, options = thinking_of(reasoning.effort or self.reasoning_effort)
        for name in ("enable_thinking", "thinking"):
            if isinstance(switch := (self.chat_template_kwargs or {}).get(name), bool):
                return switch, options
        given = {thinks, self.enable_thinking, thinking.thinks, reasoning.enabled} - {None}
        if len(given) > 1:
            raise InvalidRequest(
                "The request both asks the model to think and not to think.", param="reasoning_effort"
            )
        return next(iter(given), None), options

    @property
    def _says_nothing_of_thinking(self) -> bool:
        given = (self.thinking, self.reasoning, self.reasoning_effort, self.enable_thinking)
        return given == (None, None, None, None) and not self.chat_template_kwargs

    def _thinking_budget(self) -> int | None:
        if self._says_nothing_of_thinking and self.thinking_token_budget is None is self.thinking_budget:
            return None
        budgets = {
            "thinking_token_budget": self.thinking_token_budget,
            "thinking_budget": self.thinking_budget,
            "thinking": None if self.thinking is None else self.thinking.budget_tokens,
            "reasoning": None if self.reasoning is None else self.reasoning.max_tokens,
        }
        for param, budget in budgets.items():
            if budget is None or budget == -1:  # -1: without a bound
                continue
            if not 0 <= budget < 2**31:
                raise InvalidRequest(f"The budget for thinking in {param} must be at least 0.", param=param)
            return budget
        return None

    def _refuse_unsupported(self) -> None:
        if self.audio is not None or any(modality != "text" for modality in self.modalities or ()):
            raise InvalidRequest("Only text can be generated.", param="modalities")
        if self.web_search_options is not None:
            raise InvalidRequest("Searching the web is not supported.", param="web_search_options")


def thinking_of(effort: ReasoningEffort | None) -> tuple[bool | None, dict[str, Any]]:
    """Return whether the model should think, and the template variables that say how much."""
    if effort is None:
        return None, {}
    return effort != "none", {} if effort == "none" else {"reasoning_effort": effort}


def _prompts(prompt: str | list[str | int | list[int]]) -> tuple[Prompt, ...]:
    """Read the prompts: a text, a list of texts, a list of token ids, or a list of lists of token ids."""
    if isinstance(prompt, str):
        return (TextPrompt(prompt),)
    if prompt and set(map(type, prompt)) == {int}:  # millions may be given
        return (TokenPrompt(tuple(prompt)),)  # type: ignore[arg-type]
    check_num_choices(len(prompt))  # now, because each prompt costs time
    prompts: list[Prompt] = []
    for item in prompt:
        if isinstance(item, int):
            raise InvalidRequest("A list of token ids may hold nothing else.", param="prompt")
        prompts.append(TextPrompt(item) if isinstance(item, str) else TokenPrompt(tuple(item)))
    return tuple(prompts)
