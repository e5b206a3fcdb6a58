"""One answer of an external server, from chunks to deltas. Does no waiting: `answer.ExternalAnswer` does."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from penstock.cluster.external.wire import (
    StreamChunk,
    WireAlternative,
    WireChoice,
    WireLogprobs,
    WireToolCall,
    WireUsage,
)
from penstock.core.request import FinishReason
from penstock.gateway.answers.choice import LOGPROB_BYTES, Delta, TokenAlternative, TokenDetail, ToolCallDelta

_FINISH_REASONS = {
    "length": FinishReason.LENGTH,
    "content_filter": FinishReason.CONTENT_FILTER,
}


class ExternalChoice:
    """Buffers what is new until its reader comes."""

    def __init__(self, index: int, estimated_prompt_tokens: int) -> None:
        self.index = index
        self.ending: FinishReason | None = None  # as the server told; more about the answer may follow
        self.finish_reason: FinishReason | None = None  # when nothing follows any more
        self.buffered_bytes = 0
        self.is_dirty = False  # whether the owner has it on its list of choices with news
        self.first_token_at: float | None = None
        self.last_token_at = 0.0
        self._usage: WireUsage | None = None
        self._cached_tokens = 0
        self._estimated_prompt_tokens = estimated_prompt_tokens
        self._num_chunks = 0
        self._num_reasoning_chunks = 0
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, ToolCallDelta] = {}
        self._known_calls: set[int] = set()
        self._details: list[TokenDetail] = []
        self._num_chars = 0
        self._stop_sequence: str | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """The server's own count, once the server has reported it; an estimate before."""
        return self._estimated_prompt_tokens if self._usage is None else self._usage.prompt_tokens

    @property
    def cached_tokens(self) -> int:
        told = None if self._usage is None else self._usage.cached_tokens
        return min(self.num_prompt_tokens, self._cached_tokens if told is None else told)

    @property
    def num_tokens(self) -> int:
        """The server's own count. Until it is reported, each chunk counts as one token, as most servers send them."""
        told = None if self._usage is None else self._usage.completion_tokens
        return self._num_chunks if told is None else told

    @property
    def num_reasoning_tokens(self) -> int:
        told = None if self._usage is None else self._usage.reasoning_tokens
        return min(self.num_tokens, self._num_reasoning_chunks if told is None else told)

    def push(self, chunk: StreamChunk) -> bool:
        """Take in a chunk; whether it has anything new for the reader."""
        if chunk.usage is not None:
            self._usage = chunk.usage
        if chunk.timings is not None and chunk.timings.cache_n is not None:
            self._cached_tokens = chunk.timings.cache_n
        for choice in chunk.choices[:1]:
            if self.ending is None and choice.says_something:
                self._push_choice(choice)
                return True
        return False

    def take(self) -> Delta:
        """Everything new, as one delta."""
        delta = Delta(
            self.index,
            "".join(self._text),
            tuple(self._details),
            self.finish_reason,
            "".join(self._reasoning),
            tuple(self._calls[index] for index in sorted(self._calls)),
            None if self.finish_reason is None else self._stop_sequence,
        )
        self.drop_buffer()
        return delta

    def drop_buffer(self) -> None:
        for buffer in (self._text, self._reasoning, self._details):
            buffer.clear()
        self._calls.clear()
        self.buffered_bytes = 0

    def _push_choice(self, choice: WireChoice) -> None:
        delta = choice.delta
        text = choice.text or ""
        self._num_chunks += 1
        if delta is not None:
            text = delta.content or delta.refusal or ""
            reasoning = delta.reasoning_content or delta.reasoning
            if reasoning:
                self._num_reasoning_chunks += 1
                self._reasoning.append(reasoning)
                self.buffered_bytes += len(reasoning)
            for call in delta.tool_calls or ():
                self._push_call(call)
        if choice.logprobs is not None:
            self._push_logprobs(choice.logprobs)
        if text:
            self._text.append(text)
            self._num_chars += len(text)
            self.buffered_bytes += len(text)
        if choice.finish_reason is not None:
            self.ending = _FINISH_REASONS.get(choice.finish_reason, FinishReason.STOP)
            if isinstance(choice.stop_reason, str):
                self._stop_sequence = choice.stop_reason

    def _push_call(self, call: WireToolCall) -> None:
        arguments = call.function.arguments or ""
        self.buffered_bytes += len(arguments)
        pending = self._calls.get(call.index)
        if pending is not None:
            self._calls[call.index] = ToolCallDelta(
                call.index, pending.arguments + arguments, pending.id, pending.name
            )
        elif call.index in self._known_calls:
            self._calls[call.index] = ToolCallDelta(call.index, arguments)
        else:
            self._known_calls.add(call.index)
            call_id = call.id or f"call_{secrets.token_hex(12)}"
            self._calls[call.index] = ToolCallDelta(call.index, arguments, call_id, call.function.name or "")

    def _push_logprobs(self, logprobs: WireLogprobs) -> None:
        for detail in _details(logprobs, self._num_chars):
            self._details.append(detail)
            self.buffered_bytes += LOGPROB_BYTES * (1 + len(detail.alternatives))


def _details(logprobs: WireLogprobs, text_offset: int) -> list[TokenDetail]:
    """Tokens without a log-probability, as some servers have for the first, are left out."""
    if logprobs.content is None:
        return _completion_details(logprobs, text_offset)
    details = []
    for token in logprobs.content:
        data = _bytes_of(token.token, token.bytes)
        if token.logprob is not None:
            details.append(
                TokenDetail(data, token.logprob, text_offset, _alternatives(token.top_logprobs or ()))
            )
        text_offset += len(data.decode("utf-8", "ignore"))
    return details


def _completion_details(logprobs: WireLogprobs, text_offset: int) -> list[TokenDetail]:
    details = []
    tops = logprobs.top_logprobs or []
    for place, (token, logprob) in enumerate(
        zip(logprobs.tokens or (), logprobs.token_logprobs or (), strict=False)
    ):
        top = tops[place] if place < len(tops) else None
        alternatives = tuple(TokenAlternative(text.encode(), each) for text, each in (top or {}).items())
        if logprob is not None:
            details.append(TokenDetail(token.encode(), logprob, text_offset, alternatives))
        text_offset += len(token)
    return details


def _alternatives(tops: Sequence[WireAlternative]) -> tuple[TokenAlternative, ...]:
    return tuple(
        TokenAlternative(_bytes_of(top.token, top.bytes), top.logprob)
        for top in tops
        if top.logprob is not None
    )


def _bytes_of(token: str, data: Sequence[int] | None) -> bytes:
    try:
        return token.encode() if data is None else bytes(data)
    except ValueError:  # no bytes after all
        return token.encode("utf-8", "replace")
