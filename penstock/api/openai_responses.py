"""What /v1/completions and /v1/chat/completions answer, whole or as stream chunks.

A stream writes tens of thousands of chunks a second that differ in a few characters, so everything that does not
change between the chunks of a request is encoded once, and a chunk is put together from bytes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Literal, Protocol

import msgspec

from penstock.core.request import FinishReason
from penstock.gateway.choice import Delta, TokenDetail
from penstock.gateway.prompts import Usage

_to_json = msgspec.json.Encoder().encode

WireFinishReason = Literal["stop", "length"]


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class WireUsage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]] | None


class ChatAnswer(msgspec.Struct):
    content: str
    role: str = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: WireFinishReason


class ChatCompletion(msgspec.Struct, omit_defaults=True):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: WireUsage
    service_tier: str | None = None


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: WireFinishReason


class Completion(msgspec.Struct, omit_defaults=True):
    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: WireUsage
    service_tier: str | None = None


class AnswerHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What every chunk of an answer repeats, and what a caller asked to see in it."""

    generation_id: str
    model: str
    wants_logprobs: bool
    includes_usage: bool = False
    service_tier: str | None = None
    created: int = msgspec.field(default_factory=lambda: int(time.time()))


def wire_usage(usage: Usage) -> WireUsage:
    return WireUsage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(usage.cached_tokens),
    )


def wire_finish_reason(reason: FinishReason) -> WireFinishReason:
    """A deadline is a limit like max_tokens to a client that has part of its answer."""
    return "stop" if reason is FinishReason.STOP else "length"


def chat_completion(header: AnswerHeader, deltas: Sequence[Delta], usage: Usage) -> bytes:
    choices = [
        ChatChoice(
            delta.index,
            ChatAnswer(delta.text),
            _chat_logprobs(delta.details) if header.wants_logprobs else None,
            _finish_reason_of(delta),
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
        )
    )


def completion(header: AnswerHeader, deltas: Sequence[Delta], usage: Usage) -> bytes:
    choices = [
        CompletionChoice(
            delta.index,
            delta.text,
            _completion_logprobs(delta.details) if header.wants_logprobs else None,
            _finish_reason_of(delta),
        )
        for delta in deltas
    ]
    return _to_json(
        Completion(
            f"cmpl-{header.generation_id}",
            "text_completion",
            header.created,
            header.model,
            choices,
            wire_usage(usage),
            header.service_tier,
        )
    )


class ChunkWriter(Protocol):
    """Turns deltas into complete `data:` events."""

    def opening(self, num_choices: int) -> bytes:
        """What comes before the first delta."""
        ...

    def chunk(self, delta: Delta) -> bytes: ...

    def usage(self, usage: Usage) -> bytes: ...


class _ChunkFrame:
    """The unchanging bytes around one choice: `head`, the choice's index and body, `tail`."""

    def __init__(self, header: AnswerHeader, id_prefix: str, kind: str) -> None:
        fields = {
            "id": f"{id_prefix}-{header.generation_id}",
            "object": kind,
            "created": header.created,
            "model": header.model,
        }
        if header.service_tier is not None:
            fields["service_tier"] = header.service_tier
        self._start = b"data: " + _to_json(fields)[:-1]
        self.head = self._start + b',"choices":[{"index":'
        self.tail = b'}],"usage":null}\n\n' if header.includes_usage else b"}]}\n\n"

    def usage(self, usage: Usage) -> bytes:
        return self._start + b',"choices":[],"usage":' + _to_json(wire_usage(usage)) + b"}\n\n"


class ChatChunks:
    def __init__(self, header: AnswerHeader) -> None:
        self._frame = _ChunkFrame(header, "chatcmpl", "chat.completion.chunk")
        self._wants_logprobs = header.wants_logprobs
        self._plain_tail = b'},"logprobs":null,"finish_reason":null' + self._frame.tail

    def opening(self, num_choices: int) -> bytes:
        delta = b',"delta":{"role":"assistant","content":""'
        return b"".join(
            b"%b%d%b%b" % (self._frame.head, index, delta, self._plain_tail) for index in range(num_choices)
        )

    def chunk(self, delta: Delta) -> bytes:
        content = b""
        if delta.details:
            logprobs = _to_json(_chat_logprobs(delta.details))
            content = b'%b%d,"delta":{"content":%b},"logprobs":%b,"finish_reason":null%b' % (
                self._frame.head, delta.index, _to_json(delta.text), logprobs, self._frame.tail
            )  # fmt: skip
        elif delta.text:
            content = b'%b%d,"delta":{"content":%b%b' % (
                self._frame.head, delta.index, _to_json(delta.text), self._plain_tail
            )  # fmt: skip
        if delta.finish_reason is None:
            return content
        return content + b'%b%d,"delta":{},"logprobs":null,"finish_reason":"%b"%b' % (
            self._frame.head, delta.index, _finish_reason_of(delta).encode(), self._frame.tail
        )  # fmt: skip

    def usage(self, usage: Usage) -> bytes:
        return self._frame.usage(usage)


class CompletionChunks:
    def __init__(self, header: AnswerHeader) -> None:
        self._frame = _ChunkFrame(header, "cmpl", "text_completion")
        self._plain_tail = b',"logprobs":null,"finish_reason":null' + self._frame.tail

    def opening(self, num_choices: int) -> bytes:
        return b""

    def chunk(self, delta: Delta) -> bytes:
        head, tail = self._frame.head, self._frame.tail
        text = _to_json(delta.text)
        if delta.finish_reason is None and not delta.details:
            return b'%b%d,"text":%b%b' % (head, delta.index, text, self._plain_tail)
        logprobs = _to_json(_completion_logprobs(delta.details)) if delta.details else b"null"
        reason = b"null" if delta.finish_reason is None else b'"%b"' % _finish_reason_of(delta).encode()
        return b'%b%d,"text":%b,"logprobs":%b,"finish_reason":%b%b' % (
            head, delta.index, text, logprobs, reason, tail
        )  # fmt: skip

    def usage(self, usage: Usage) -> bytes:
        return self._frame.usage(usage)


def _finish_reason_of(delta: Delta) -> WireFinishReason:
    assert delta.finish_reason is not None
    return wire_finish_reason(delta.finish_reason)


def _token_text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _chat_logprobs(details: Iterable[TokenDetail]) -> ChatLogprobs:
    return ChatLogprobs(
        [
            ChatLogprob(
                _token_text(detail.data),
                detail.logprob,
                list(detail.data),
                [
                    TopLogprob(_token_text(top.data), top.logprob, list(top.data))
                    for top in detail.alternatives
                ],
            )
            for detail in details
        ]
    )


def _completion_logprobs(details: Sequence[TokenDetail]) -> CompletionLogprobs:
    """The shape of the older endpoint, where alternatives include the sampled token and none means null."""
    has_alternatives = any(detail.alternatives for detail in details)
    return CompletionLogprobs(
        text_offset=[detail.text_offset for detail in details],
        token_logprobs=[detail.logprob for detail in details],
        tokens=[_token_text(detail.data) for detail in details],
        top_logprobs=[_top_logprobs(detail) for detail in details] if has_alternatives else None,
    )


def _top_logprobs(detail: TokenDetail) -> dict[str, float]:
    top = {_token_text(alternative.data): alternative.logprob for alternative in detail.alternatives}
    top.setdefault(_token_text(detail.data), detail.logprob)
    return top
