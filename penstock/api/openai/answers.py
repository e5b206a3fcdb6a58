"""The whole answers of /v1/completions and /v1/chat/completions. For streams see `chunks`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, cast

import msgspec

from penstock.api.openai.tools import PLAIN_CALLS, CallStyle
from penstock.core.request import FinishReason, Tier
from penstock.gateway.answers.choice import Delta, TokenDetail
from penstock.gateway.answers.stream import AnswerStream
from penstock.gateway.prompts import RequestWarning, Usage

_to_json = msgspec.json.Encoder().encode
Part = TypeVar("Part")

WireFinishReason = Literal["stop", "length", "tool_calls", "function_call", "content_filter"]
SERVICE_TIERS = {Tier.PRIORITY: "priority", Tier.DEFAULT: "default", Tier.BATCH: "flex"}


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class WireUsage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None] | None

    def followed_by(self, other: CompletionLogprobs) -> CompletionLogprobs:
        tops = self.top_logprobs
        return CompletionLogprobs(
            self.text_offset + other.text_offset,
            self.token_logprobs + other.token_logprobs,
            self.tokens + other.tokens,
            tops if tops is None or other.top_logprobs is None else tops + other.top_logprobs,
        )


class PromptLogprob(msgspec.Struct):
    """One token that might stand at a position of the prompt, as vLLM describes it."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobList: TypeAlias = list[dict[str, PromptLogprob] | None]


class ChatAnswer(msgspec.Struct):
    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET
    function_call: dict[str, str] | msgspec.UnsetType = msgspec.UNSET  # for requests with `functions`


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: WireFinishReason
    token_ids: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(msgspec.Struct, omit_defaults=True):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: WireUsage
    service_tier: str | None = None
    prompt_logprobs: PromptLogprobList | None = None
    warnings: tuple[RequestWarning, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: WireFinishReason
    prompt_logprobs: PromptLogprobList | msgspec.UnsetType = msgspec.UNSET
    token_ids: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET


class Completion(msgspec.Struct, omit_defaults=True):
    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: WireUsage
    service_tier: str | None = None
    warnings: tuple[RequestWarning, ...] = ()


class AnswerHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that every chunk of an answer repeats, and the optional parts that the caller asked for."""

    generation_id: str
    model: str
    wants_logprobs: bool
    includes_usage: bool = False
    lists_token_ids: bool = False
    service_tier: str | None = None
    warnings: tuple[RequestWarning, ...] = ()
    calls: CallStyle = PLAIN_CALLS
    created: int = msgspec.field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(cls, answer: AnswerStream, **options: Any) -> AnswerHeader:
        """Return the header of an answer, with the parts that the caller asked for."""
        return cls(
            generation_id=answer.id,
            model=answer.model,
            service_tier=SERVICE_TIERS[answer.tier],
            warnings=answer.warnings,
            **options,
        )


def wire_usage(usage: Usage) -> WireUsage:
    return WireUsage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(usage.cached_tokens),
        completion_tokens_details=CompletionTokensDetails(
            usage.reasoning_tokens, usage.accepted_prediction_tokens, usage.rejected_prediction_tokens
        ),
    )


def wire_finish_reason(
    reason: FinishReason, *, called_tools: bool, calls: CallStyle = PLAIN_CALLS
) -> WireFinishReason:
    """Return OpenAI's word. A deadline counts as a length limit, because the client has part of its answer."""
    if reason is FinishReason.CONTENT_FILTER:
        return "content_filter"
    if reason is not FinishReason.STOP:
        return "length"
    if not called_tools:
        return "stop"
    return "function_call" if calls.is_older else "tool_calls"


def chat_completion(
    header: AnswerHeader,
    deltas: Sequence[Delta],
    usage: Usage,
    prompt_logprobs: PromptLogprobList | None = None,
) -> bytes:
    choices = [
        ChatChoice(
            delta.index,
            _chat_answer(delta, header.calls),
            chat_logprobs(delta.details) if header.wants_logprobs else None,
            _finish_reason_of(delta, header.calls),
            delta.token_ids if header.lists_token_ids else msgspec.UNSET,
        )
        for delta in deltas
    ]
    return _to_json(
        ChatCompletion(
            f"chatcmpl-{header.generation_id}",
            "chat.completion",
            header.created,
            header.model,
            choices,
            wire_usage(usage),
            header.service_tier,
            prompt_logprobs,
            header.warnings,
            deltas[0].prompt_token_ids,
        )
    )


class ShowsPrompts(Protocol):
    """The log-probabilities in an answer that shows its prompt (`prompt_echo`)."""

    def logprobs(self, delta: Delta) -> CompletionLogprobs: ...
    def prompt_logprobs(self, delta: Delta) -> PromptLogprobList | None: ...


def completion(
    header: AnswerHeader, deltas: Sequence[Delta], usage: Usage, prompts: ShowsPrompts | None = None
) -> bytes:
    choices = []
    for delta in deltas:
        logprobs = None
        if header.wants_logprobs:
            logprobs = prompts.logprobs(delta) if prompts else completion_logprobs(delta.details)
        choice = CompletionChoice(delta.index, delta.text, logprobs, _finish_reason_of(delta))
        if prompts and (scored := prompts.prompt_logprobs(delta)) is not None:
            choice.prompt_logprobs = scored
        if header.lists_token_ids:
            choice.token_ids, choice.prompt_token_ids = delta.token_ids, delta.prompt_token_ids
        choices.append(choice)
    return _to_json(
        Completion(
            f"cmpl-{header.generation_id}",
            "text_completion",
            header.created,
            header.model,
            choices,
            wire_usage(usage),
            header.service_tier,
            header.warnings,
        )
    )


def best_answers(deltas: Sequence[Delta], best_of: int, n: int) -> list[Delta]:
    """Return the `n` most probable of each prompt's `best_of` answers, by the mean log-probability of their
    tokens."""
    best: list[Delta] = []
    for start in range(0, len(deltas), best_of):
        ranked = sorted(deltas[start : start + best_of], key=_mean_logprob, reverse=True)
        best += ranked[:n]
    return [msgspec.structs.replace(delta, index=index) for index, delta in enumerate(best)]


def _mean_logprob(delta: Delta) -> float:
    return sum(detail.logprob for detail in delta.details) / max(1, len(delta.details))


def _finish_reason_of(delta: Delta, calls: CallStyle = PLAIN_CALLS) -> WireFinishReason:
    assert delta.finish_reason is not None
    return wire_finish_reason(delta.finish_reason, called_tools=bool(delta.tool_calls), calls=calls)


def _chat_answer(delta: Delta, calls: CallStyle) -> ChatAnswer:
    answer = ChatAnswer(delta.text if delta.text or not delta.tool_calls else None)
    if delta.reasoning:
        answer.reasoning_content = delta.reasoning
    if delta.tool_calls:
        for name, value in calls.fields(delta.tool_calls, is_whole=True).items():
            setattr(answer, name, value)
    return answer


def token_text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def encoded(part: Part) -> Part:
    """Return the JSON of a part of an answer, which the encoder of the whole answer takes in place of the part. One
    call that encodes a million numbers would hold the interpreter's lock, and with it all streams, for a tenth of a
    second."""
    return cast(Part, msgspec.Raw(_to_json(part)))


def chat_logprobs(details: Iterable[TokenDetail]) -> ChatLogprobs:
    return ChatLogprobs(
        [
            encoded(
                ChatLogprob(
                    token_text(detail.data),
                    detail.logprob,
                    list(detail.data),
                    [
                        TopLogprob(token_text(top.data), top.logprob, list(top.data))
                        for top in detail.alternatives
                    ],
                )
            )
            for detail in details
        ]
    )


def completion_logprobs(details: Sequence[TokenDetail], prompt_length: int = 0) -> CompletionLogprobs:
    """Return log-probabilities in the shape of the older endpoint, where alternatives include the sampled token and
    none means null. Offsets count from the beginning of an echoed prompt."""
    has_alternatives = any(detail.alternatives for detail in details)
    return CompletionLogprobs(
        text_offset=[prompt_length + detail.text_offset for detail in details],
        token_logprobs=[detail.logprob for detail in details],
        tokens=[token_text(detail.data) for detail in details],
        top_logprobs=[encoded(_top_logprobs(detail)) for detail in details] if has_alternatives else None,
    )


def _top_logprobs(detail: TokenDetail) -> dict[str, float]:
    alternatives = ((token_text(each.data), each.logprob) for each in detail.alternatives)
    return top_logprobs(alternatives, token_text(detail.data), detail.logprob)


def top_logprobs(alternatives: Iterable[tuple[str, float]], token: str, logprob: float) -> dict[str, float]:
    """By text; of several tokens with the same text, the most likely one, which comes first."""
    top: dict[str, float] = {}
    for text, each in alternatives:
        top.setdefault(text, each)
    top.setdefault(token, logprob)
    return top
