"""The answers of external servers to one request, read like answers of our own engines.

`ExternalAnswer` runs one task per answer, which reads what a server sends; the rest is `answers.stream`. An only
answer that is read whole needs no task: its reader does the work. Each choice turns chunks into deltas without
waiting.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import secrets
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock.cluster.external.pool import ExternalPool
from penstock.cluster.external.wire import (
    ExternalCall,
    StreamChunk,
    WireAlternative,
    WireChoice,
    WireLogprobs,
    WireToolCall,
    WireUsage,
)
from penstock.core.errors import ContextLengthExceeded, DeadlineExceeded, EngineUnavailable, PenstockError
from penstock.core.request import FinishReason
from penstock.gateway.accounts import Account
from penstock.gateway.answers.choice import LOGPROB_BYTES, Delta, TokenAlternative, TokenDetail, ToolCallDelta
from penstock.gateway.answers.stream import MeteredAnswer, StreamContext
from penstock.gateway.checks import max_tokens_lowered
from penstock.gateway.prompts import Usage

_FINISH_REASONS = {"length": FinishReason.LENGTH, "content_filter": FinishReason.CONTENT_FILTER}


@dataclass(slots=True)
class _CallInParts:
    """The new part of a tool call: its pieces are joined once, because a long call has thousands."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: list[str] = field(default_factory=list)

    def joined(self) -> ToolCallDelta:
        return ToolCallDelta(self.index, "".join(self.arguments), self.id, self.name)


class ExternalChoice(msgspec.Struct, eq=False):
    """One answer of an external server, whose output is buffered until the reader takes it."""

    index: int
    num_prompt_tokens: int  # an estimate, until the server reports its own count
    ending: FinishReason | None = None  # as the server reported; usage may still follow
    finish_reason: FinishReason | None = None  # when nothing follows any more
    buffered_bytes: int = 0
    num_bytes: int = 0  # of all text that came
    num_logprobs: int = 0
    is_dirty: bool = False  # whether the owner lists this choice as one with new output
    first_token_at: float | None = None
    last_token_at: float = 0.0
    num_tokens: int = 0  # by the server's own count; until it is reported, a chunk counts as a token
    _usage: WireUsage | None = None
    _cached_tokens: int = 0
    _num_chunks: int = 0
    _num_reasoning_chunks: int = 0
    _text: list[str] = []
    _reasoning: list[str] = []
    _calls: dict[int, _CallInParts] = {}
    _known_calls: set[int] = set()
    _details: list[TokenDetail] = []
    _num_chars: int = 0
    _stop_sequence: str | None = None

    @property
    def usage(self) -> Usage:
        """Return the usage as the server reports it, or as it is estimated."""
        cached_tokens, reasoning_tokens = self._cached_tokens, self._num_reasoning_chunks
        if (told := self._usage) is not None:
            cached, reasoned = told.prompt_tokens_details, told.completion_tokens_details
            if cached is not None and cached.cached_tokens is not None:
                cached_tokens = cached.cached_tokens
            if reasoned is not None and reasoned.reasoning_tokens is not None:
                reasoning_tokens = reasoned.reasoning_tokens
        prompt_tokens, num_tokens = self.num_prompt_tokens, self.num_tokens
        return Usage(
            prompt_tokens,
            num_tokens,
            cached_tokens if cached_tokens < prompt_tokens else prompt_tokens,
            reasoning_tokens=reasoning_tokens if reasoning_tokens < num_tokens else num_tokens,
        )

    def push(self, chunks: Sequence[StreamChunk]) -> int:
        """Take in chunks; return how many of them have anything new for the reader."""
        num_before = self._num_chunks
        for chunk in chunks:
            if chunk.timings is not None and chunk.timings.cache_n is not None:
                self._cached_tokens = chunk.timings.cache_n
            if chunk.choices and self.ending is None:
                choice = chunk.choices[0]
                if choice.says_something:
                    self._push_choice(choice)
            if chunk.usage is not None:
                self._usage = chunk.usage
                self.num_prompt_tokens = chunk.usage.prompt_tokens
        told = None if self._usage is None else self._usage.completion_tokens
        self.num_tokens = self._num_chunks if told is None else told
        return self._num_chunks - num_before

    def take(self) -> list[Delta]:
        """Take everything new."""
        text, details, reasoning, calls = self._text, self._details, self._reasoning, self._calls
        delta = Delta(
            self.index,
            text[0] if len(text) == 1 else "".join(text),
            tuple(details),
            self.finish_reason,
            "".join(reasoning) if reasoning else "",
            tuple([calls[index].joined() for index in sorted(calls)]) if calls else (),
            None if self.finish_reason is None else self._stop_sequence,
        )
        self.drop_buffer()
        return [delta]

    def drop_buffer(self) -> None:
        self._text.clear()
        self._reasoning.clear()
        self._details.clear()
        self._calls.clear()
        self.buffered_bytes = 0

    def _push_choice(self, choice: WireChoice) -> None:
        delta = choice.delta
        self._num_chunks += 1
        if delta is None:
            text = choice.text or ""
        else:
            text = delta.content or delta.refusal or ""
            reasoning = delta.reasoning_content or delta.reasoning
            if reasoning:
                self._num_reasoning_chunks += 1
                self._reasoning.append(reasoning)
                self._hold(len(reasoning))
            for call in delta.tool_calls or ():
                self._push_call(call)
        if choice.logprobs is not None:
            self._push_logprobs(choice.logprobs)
        if text:
            self._text.append(text)
            num_chars = len(text)
            self._num_chars += num_chars
            self.buffered_bytes += num_chars
            self.num_bytes += num_chars
        if choice.finish_reason is not None:
            self.ending = _FINISH_REASONS.get(choice.finish_reason, FinishReason.STOP)
            if isinstance(choice.stop_reason, str):
                self._stop_sequence = choice.stop_reason

    def _push_call(self, call: WireToolCall) -> None:
        pending = self._calls.get(call.index)
        if pending is None:
            pending = self._calls[call.index] = _CallInParts(call.index)
            if call.index not in self._known_calls:
                self._known_calls.add(call.index)
                pending.id = call.id or f"call_{secrets.token_hex(12)}"
                pending.name = call.function.name or ""
                self._hold(len(pending.id) + len(pending.name))
        if call.function.arguments:
            pending.arguments.append(call.function.arguments)
            self._hold(len(call.function.arguments))

    def _hold(self, num_bytes: int) -> None:
        self.buffered_bytes += num_bytes
        self.num_bytes += num_bytes

    def _push_logprobs(self, logprobs: WireLogprobs) -> None:
        for detail in _details(logprobs, self._num_chars):
            self._details.append(detail)
            num_logprobs = 1 + len(detail.alternatives)
            self.num_logprobs += num_logprobs
            self.buffered_bytes += LOGPROB_BYTES * num_logprobs


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
    except ValueError:  # not a list of bytes
        return token.encode("utf-8", "replace")


logger = logging.getLogger(__name__)

MAX_ANSWER_BYTES = 32 << 20  # of one answer's text: millions of tokens


def _too_long() -> EngineUnavailable:
    return EngineUnavailable(
        f"The server of this model sent an answer longer than {MAX_ANSWER_BYTES} bytes, which was cut off."
    )


class ExternalAnswer(MeteredAnswer[ExternalChoice]):
    """`start` it once. With `shortens_answers`, a server that refuses a `max_tokens` beyond its context is asked
    again for an answer that fits."""

    shortens_answers = False
    asked_max_tokens: int | None = None  # by the client
    max_tokens_param = "max_tokens"  # the client's name for it

    def __init__(
        self,
        account: Account,
        calls: Sequence[ExternalCall],
        n: int,
        context: StreamContext,
        on_end: Callable[[MeteredAnswer[ExternalChoice]], None],
    ) -> None:
        choices = [ExternalChoice(index, call.estimated_tokens) for index, call in enumerate(calls)]
        super().__init__(account, choices, n, context, on_end)
        self._calls = calls
        self._tasks: list[asyncio.Task[Any]] = []
        self._pool: ExternalPool | None = None  # until the servers are asked

    def start(self, pool: ExternalPool, timeout_s: float | None, *, is_read_whole: bool = False) -> None:
        """Ask the servers now; with `is_read_whole`, an only answer is asked for when its reader collects it."""
        if timeout_s is not None:
            self._timer = asyncio.get_running_loop().call_later(timeout_s, self._time_out)
            self._calls = [msgspec.structs.replace(call, timeout_s=timeout_s) for call in self._calls]
        self._pool = pool
        if not is_read_whole or len(self._calls) > 1:
            self._ask()

    def _ask(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None and self._num_open:
            for choice, call in zip(self._choices, self._calls, strict=True):
                self._tasks.append(asyncio.create_task(self._follow(pool, call, choice)))

    def __anext__(self) -> Coroutine[Any, Any, list[Delta]]:
        if self._pool is not None:
            self._ask()
        return super().__anext__()

    async def collect(self) -> list[Delta]:
        reader = asyncio.current_task()
        if self._pool is None or reader is None or len(self._calls) > 1:
            return await super().collect()
        pool, self._pool = self._pool, None
        self._wants_all_at_once = True
        if self._num_open:
            self._tasks.append(reader)
            try:
                await self._follow(pool, self._calls[0], self._choices[0])
            except asyncio.CancelledError:
                if self._num_open:  # another task cancelled the reader
                    raise
                reader.uncancel()  # this answer ended early, and released the server
            finally:
                self._tasks.clear()
        if self._error is not None:
            raise self._error
        return self._take()

    @property
    def usage(self) -> Usage:
        """Return the usage as servers report it, or as it is estimated. A prompt counts once, however many answers
        share it."""
        choices = self._choices
        if len(choices) == 1:
            return choices[0].usage
        usages = [choice.usage for choice in choices]
        leaders = usages[:: self._n]
        return Usage(
            prompt_tokens=sum(leader.prompt_tokens for leader in leaders),
            completion_tokens=sum(usage.completion_tokens for usage in usages),
            cached_tokens=sum(leader.cached_tokens for leader in leaders),
            reasoning_tokens=sum(usage.reasoning_tokens for usage in usages),
        )

    def _abandon(self, choices: Sequence[ExternalChoice]) -> None:
        """Close the connections, so that the servers stop too."""
        self._stop_reading()

    async def _follow(self, pool: ExternalPool, call: ExternalCall, choice: ExternalChoice) -> None:
        try:
            try:
                await self._read(pool, call, choice)
            except ContextLengthExceeded as error:
                shorter = call.with_shorter_answer(error) if self.shortens_answers else None
                if shorter is None:
                    raise
                self._warn_of(shorter.max_tokens)
                await self._read(pool, shorter, choice)
            if choice.ending is None:
                raise EngineUnavailable("The server of this model broke off its answer.", hint="Try again.")
        except PenstockError as error:
            self.fail(error)
        except Exception:
            logger.exception("request %s failed at an external server", call.id)
            self.fail(PenstockError("The server met an error that it did not foresee."))
        else:
            self._finish(choice, choice.ending)

    def _warn_of(self, max_tokens: int | None) -> None:
        if self.asked_max_tokens is not None:
            warning = max_tokens_lowered(self.asked_max_tokens, max_tokens, self.max_tokens_param)
            others = (each for each in self.warnings if each.code != warning.code)
            self.warnings = (*others, warning)

    def _read(
        self, pool: ExternalPool, call: ExternalCall, choice: ExternalChoice
    ) -> Coroutine[Any, Any, None]:
        def take(chunks: list[StreamChunk]) -> None:
            num_logprobs, num_bytes = -choice.num_logprobs, -choice.buffered_bytes
            num_new = choice.push(chunks)
            self._num_unread_bytes += num_bytes + choice.buffered_bytes
            num_logprobs += choice.num_logprobs
            if num_logprobs:
                self._count_logprobs(num_logprobs)
            if choice.num_bytes > MAX_ANSWER_BYTES:
                choice.drop_buffer()
                self.fail(_too_long())
            if num_new:
                self._time_tokens(choice, num_new, is_whole=call.is_whole)
                self._pass_on(choice)
            if isinstance(self._error, PenstockError):
                raise copy.copy(self._error)  # to the reader of the connection, who closes it

        return pool.send(call, take)

    def _time_tokens(self, choice: ExternalChoice, count: int, *, is_whole: bool) -> None:
        """Note when `count` tokens came, which came together. The times between the tokens of a whole answer are
        unknown, and so is the time of the first token. The histograms leave such answers out, because a guess would
        set off alerts on first tokens."""
        now = self._context.clock.now()
        is_first, before = choice.first_token_at is None, choice.last_token_at
        choice.last_token_at = now
        if is_first:
            choice.first_token_at = now
        if is_whole:
            return
        if is_first:
            self._latencies.first_token_s.observe(now - self._arrived_at)
        else:
            self._latencies.inter_token_s.observe(now - before)
        if count > 1:
            self._latencies.inter_token_s.observe(0.0, count - 1)

    def _pass_on(self, choice: ExternalChoice) -> None:
        if self._error is not None:
            return
        if self._num_unread_bytes <= self._unchecked_bytes or not self._num_open or self._may_wait():
            self._tell(choice)

    def _finish(self, choice: ExternalChoice, reason: FinishReason) -> None:
        choice.finish_reason = reason
        self._close(choice, reason)
        self._pass_on(choice)

    def _close(self, choice: ExternalChoice, reason: FinishReason) -> None:
        # Only now is it known how many there were.
        self._metrics.generation_tokens += choice.num_tokens
        self._latencies.output_tokens += choice.num_tokens
        if choice.first_token_at is not None:
            self._metrics.prompt_tokens += choice.num_prompt_tokens
            self._latencies.prompt_tokens += choice.num_prompt_tokens
        super()._close(choice, reason)

    def _time_out(self) -> None:
        """End an answer that has begun where it is. An answer without text ends with the error."""
        open_choices = [choice for choice in self._choices if choice.finish_reason is None]
        if any(choice.first_token_at is None for choice in open_choices):
            self.fail(DeadlineExceeded("The request's deadline passed before its first token."))
            return
        self._stop_reading()
        for choice in open_choices:
            self._finish(choice, choice.ending or FinishReason.DEADLINE)

    def _stop_reading(self) -> None:
        current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                task.cancel()
