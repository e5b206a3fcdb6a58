"""One answer on its way from engine events to its reader: detokenized, cut at a stop string, split into reasoning,
text and tool calls if the answer may hold them, and buffered.

A choice neither waits nor wakes its reader: `generation.Generation` owns the choices of a request and does both.

An answer does not depend on how many tokens come in one event, nor on how often its reader looks.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from penstock.core.plan import CacheUse, TokenEvent, TokenLogprobs
from penstock.core.request import FinishReason, Request
from penstock.gateway.prompts import AnswerText, PromptScores, ScoredPrompt
from penstock.gateway.text.detokenizer import StopMatcher, StopWatch
from penstock.gateway.text.tokenizer import TextTokenizer
from penstock.gateway.tools.answer_form import AnswerForm
from penstock.gateway.tools.parser import OutputParser

# Bytes by which a buffered log-probability counts against the reader's limit, roughly its size on the wire.
LOGPROB_BYTES = 80


class TokenAlternative(msgspec.Struct, frozen=True):
    data: bytes
    logprob: float


class TokenDetail(msgspec.Struct, frozen=True):
    """A token of the answer, for clients that asked for log-probabilities."""

    data: bytes  # the token's bytes; not always whole characters
    logprob: float
    text_offset: int  # where in the answer's text the token begins, in characters
    alternatives: tuple[TokenAlternative, ...]


class ToolCallDelta(msgspec.Struct, frozen=True):
    """New output of one tool call of an answer. `id` and `name` come once, with the first delta of a call."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


class Delta(msgspec.Struct, frozen=True):
    """New output of one answer since its reader last looked, or the first part of it."""

    index: int
    text: str
    details: tuple[TokenDetail, ...] = ()
    finish_reason: FinishReason | None = None
    reasoning: str = ""  # comes before the text of the same delta
    tool_calls: tuple[ToolCallDelta, ...] = ()  # come after it
    stop_sequence: str | None = None  # which stop string ended the answer, with finish_reason
    # Once, with the first delta, where its log-probabilities were asked for.
    prompt: ScoredPrompt | None = None
    token_ids: tuple[int, ...] = ()  # all that were generated, where the client asked for them
    prompt_token_ids: tuple[int, ...] = ()  # once, with the first delta, where the client asked for them

    @property
    def num_logprobs(self) -> int:
        """Return how many numbers `details` holds. All tokens of a request have as many alternatives."""
        return len(self.details) * (1 + len(self.details[0].alternatives)) if self.details else 0


def merge_deltas(deltas: Sequence[Delta]) -> Delta:
    """Return all deltas of one answer, in order, as one."""
    if len(deltas) == 1:
        return deltas[0]
    calls: dict[int, ToolCallDelta] = {}
    for call in (call for delta in deltas for call in delta.tool_calls):
        known = calls.get(call.index)
        if known is not None:
            call = msgspec.structs.replace(known, arguments=known.arguments + call.arguments)
        calls[call.index] = call
    return msgspec.structs.replace(
        deltas[-1],
        text="".join(delta.text for delta in deltas),
        details=tuple(detail for delta in deltas for detail in delta.details),
        reasoning="".join(delta.reasoning for delta in deltas),
        tool_calls=tuple(calls[index] for index in sorted(calls)),
        prompt=next((delta.prompt for delta in deltas if delta.prompt is not None), None),
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        prompt_token_ids=deltas[0].prompt_token_ids,
    )


def merged(batches: Iterable[Sequence[Delta]]) -> list[Delta]:
    """Return one delta for each answer, in order, as `collect` gives them."""
    by_index: dict[int, list[Delta]] = {}
    for deltas in batches:
        for delta in deltas:
            by_index.setdefault(delta.index, []).append(delta)
    return [merge_deltas(by_index[index]) for index in sorted(by_index)]


@dataclass(slots=True)
class _Part:
    """Consecutive output of one kind."""

    kind: Literal["reasoning", "text", "calls"]
    pieces: list[str] = field(default_factory=list)
    calls: list[tuple[ToolCallDelta, list[str]]] = field(default_factory=list)
    details: list[TokenDetail] = field(default_factory=list)

    def delta(self, index: int) -> Delta:
        text = "".join(self.pieces)
        if self.kind == "reasoning":
            return Delta(index, "", tuple(self.details), reasoning=text)
        calls = tuple(
            msgspec.structs.replace(call, arguments="".join(arguments)) for call, arguments in self.calls
        )
        return Delta(index, text, tuple(self.details), tool_calls=calls)


class ParsedAnswer:
    """Collects a parser's output (`tools.parser.AnswerSink`), in order, until the reader takes it."""

    __slots__ = ("_form", "_has_changed", "_num_calls", "_parts", "is_over")

    def __init__(self, form: AnswerForm) -> None:
        self._parts: list[_Part] = []
        self._num_calls = 0
        self._form = form
        self._has_changed = False  # since details were last added
        self.is_over = False  # later text does not belong to the answer and is dropped

    @property
    def has_news(self) -> bool:
        return bool(self._parts)

    def add_reasoning(self, text: str) -> None:
        self._part("reasoning").pieces.append(text)

    def add_text(self, text: str) -> None:
        """Add text. Text after calls ends an answer that must consist of calls, because no more calls follow."""
        self.is_over = self.is_over or (self._form.stops_at_text and bool(self._num_calls))
        if not self.is_over:
            self._part("text").pieces.append(text)

    def begin_call(self, name: str) -> None:
        self.is_over = self.is_over or (bool(self._num_calls) and not self._form.parallel)
        if self.is_over:
            return
        begun = ToolCallDelta(self._num_calls, id=f"call_{secrets.token_hex(12)}", name=name)
        self._part("calls").calls.append((begun, []))
        self._num_calls += 1

    def add_arguments(self, text: str) -> None:
        if self.is_over or not text:
            return
        calls = self._part("calls").calls
        if not calls:
            calls.append((ToolCallDelta(self._num_calls - 1), []))
        calls[-1][1].append(text)

    def add_details(self, take: Callable[[], Iterable[TokenDetail]]) -> None:
        """Add the details of tokens to the output that they produced. Tokens without output go with the next
        output."""
        if self._has_changed:
            self._parts[-1].details += take()
            self._has_changed = False

    def take(self, index: int) -> list[Delta]:
        deltas = [part.delta(index) for part in self._parts]
        self.clear()
        return deltas

    def clear(self) -> None:
        self._parts.clear()
        self._has_changed = False

    def _part(self, kind: Literal["reasoning", "text", "calls"]) -> _Part:
        self._has_changed = True
        if not self._parts or self._parts[-1].kind != kind:
            self._parts.append(_Part(kind))
        return self._parts[-1]


_PLAIN = AnswerText()


class Choice:
    """The state of one answer. `num_tokens` counts what the engine generated, up to and including the token that
    ended the answer."""

    # fmt: off
    __slots__ = (
        "_details", "_detokenizer", "_is_announced", "_is_plain_text", "_matcher", "_min_tokens",
        "_num_released_chars", "_num_seen_chars", "_parsed", "_parser", "_parts", "_prompt_token_ids",
        "_shown", "_token_ids", "_tokenizer", "buffered_bytes", "cache_breakpoints", "cache_use",
        "finish_reason", "first_token_at", "index", "is_dirty", "last_token_at", "num_cached_tokens",
        "num_prompt_tokens", "num_reasoning_tokens", "num_tokens", "prompt_scores", "request_id",
        "stop_ids",
    )
    # fmt: on

    def __init__(
        self,
        index: int,
        request: Request,
        tokenizer: TextTokenizer,
        eos_ids: Sequence[int],
        form: AnswerForm | None = None,
        shown: AnswerText = _PLAIN,
    ) -> None:
        sampling = request.sampling
        self._shown = shown
        self._min_tokens = sampling.min_tokens
        self._token_ids: list[int] = []  # not yet shown
        self._prompt_token_ids = request.prompt_token_ids if shown.lists_token_ids else ()
        self.index = index
        self.request_id = request.id
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.cache_breakpoints = request.cache_breakpoints
        self.cache_use = CacheUse(0, (0,) * len(request.cache_breakpoints))
        self.num_reasoning_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.first_token_at: float | None = None
        self.last_token_at = 0.0
        self.is_dirty = False  # whether the owner lists this choice as one with new output
        self.buffered_bytes = 0
        self.prompt_scores: PromptScores | None = None  # shared by all answers to the prompt
        self._is_announced = False
        self._tokenizer = tokenizer
        shown_ids = frozenset() if form is None else form.shown_token_ids
        if shown.shows_special_tokens:
            shown_ids = tokenizer.special_ids
        self._detokenizer = tokenizer.detokenizer(request.prompt_token_ids, shown_ids)
        self._matcher = StopMatcher(sampling.stop, keeps_match=shown.includes_stop) if sampling.stop else None
        self.stop_ids = frozenset(
            sampling.stop_token_ids if sampling.ignore_eos else (*sampling.stop_token_ids, *eos_ids)
        )
        self._is_plain_text = form is None and not sampling.stop and sampling.logprobs is None
        self._parts: list[str] = []
        self._parsed = None if form is None else ParsedAnswer(form)
        self._parser = None if form is None or self._parsed is None else form.parser(self._parsed)
        self._details: list[TokenDetail] = []
        self._num_seen_chars = 0  # of the detokenized text, held back or not
        self._num_released_chars = 0

    def push(self, event: TokenEvent) -> None:
        """Take in one event. Sets `finish_reason` when the answer is over, which a stop string may decide here."""
        token_ids = event.token_ids
        reason = event.finish_reason
        if self._shown.lists_token_ids:
            self._token_ids += token_ids
        if reason is None and self._is_plain_text:  # as nearly all events are
            self.num_tokens += len(token_ids)
            if text := self._detokenizer.push(token_ids):
                self._parts.append(text)
                self.buffered_bytes += len(text) if text.isascii() else len(text.encode())
            return
        ends_by_token = reason is FinishReason.STOP and bool(token_ids) and token_ids[-1] in self.stop_ids
        ends_by_token = ends_by_token and not self._shown.includes_stop
        shown_ids = token_ids[:-1] if ends_by_token else token_ids
        if self._is_plain_text:
            self.num_tokens += len(shown_ids)
            self._release(self._detokenizer.push(shown_ids))
        else:  # each token may end the answer or its reasoning, and later tokens then do not count
            for position, token_id in enumerate(shown_ids):
                self._push_token(token_id, event.logprobs[position] if event.logprobs else None)
                if self.finish_reason is not None:
                    return
        if ends_by_token:
            self._count_token()
        if reason is not None:
            self._finish(reason)

    @property
    def has_news(self) -> bool:
        """Return whether a reader would see a difference. The first event counts even without text: it says that the
        answer has begun. The answer is not shown before the scores of its prompt."""
        if self.prompt_scores is not None and not self.prompt_scores.is_over:
            return False
        if self._parts:
            return True
        return (
            self.finish_reason is not None
            or not self._is_announced
            or (self._parsed is not None and self._parsed.has_news)
        )

    def take(self) -> list[Delta]:
        """Return everything new, at least one delta; the buffer is empty afterwards."""
        is_first, self._is_announced = not self._is_announced, True
        self.buffered_bytes = 0
        deltas: list[Delta] = []
        if self._parsed is not None:
            deltas = self._parsed.take(self.index)
        if self._parsed is None or self.finish_reason is not None:
            text, details = "".join(self._parts), self._take_details()
            self._parts.clear()
            if text or details or not deltas:
                deltas.append(Delta(self.index, text, details))
        elif not deltas:
            deltas.append(Delta(self.index, ""))
        if is_first and self.prompt_scores is not None:
            deltas[0] = msgspec.structs.replace(deltas[0], prompt=self.prompt_scores.scored())
        if self._shown.lists_token_ids:
            deltas[0] = msgspec.structs.replace(
                deltas[0],
                token_ids=tuple(self._token_ids),
                prompt_token_ids=self._prompt_token_ids if is_first else (),
            )
            self._token_ids.clear()
        if self.finish_reason is not None:
            stop_sequence = None if self._matcher is None else self._matcher.matched
            deltas[-1] = msgspec.structs.replace(
                deltas[-1], finish_reason=self.finish_reason, stop_sequence=stop_sequence
            )
        return deltas

    def drop_buffer(self) -> None:
        self._parts.clear()
        self._token_ids.clear()
        if self._parsed is not None:
            self._parsed.clear()
        self._details.clear()
        self.buffered_bytes = 0

    def stop_watch(self) -> StopWatch | None:
        """Return the watch for stop strings of an answer that has not begun yet; None if there are no stop
        strings."""
        if self._matcher is None:
            return None
        return StopWatch(self._detokenizer, self._matcher, self._min_tokens)

    @property
    def _is_stopped(self) -> bool:
        return self._matcher is not None and self._matcher.matched is not None

    def _count_token(self) -> None:
        self.num_tokens += 1
        if self._parser is not None and self._parser.is_reasoning:
            self.num_reasoning_tokens += 1

    def _push_token(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        self._count_token()
        if logprobs is not None:
            self._details.append(self._detail(token_id, logprobs))
            self.buffered_bytes += LOGPROB_BYTES * (1 + len(logprobs.top_token_ids))
        self._push_text(self._detokenizer.push((token_id,)))
        if self._parsed is not None and self._details:
            self._parsed.add_details(self._take_details)

    def _push_text(self, text: str) -> None:
        self._num_seen_chars += len(text)
        # The first `min_tokens` tokens cannot be part of a stop string.
        if self._matcher is not None and self.num_tokens > self._min_tokens:
            text = self._matcher.push(text)
        self._release(text)
        if self._is_stopped:
            self._end(FinishReason.STOP)

    def _finish(self, reason: FinishReason) -> None:
        self._push_text(self._detokenizer.finish())
        if self.finish_reason is not None:
            return
        if self._matcher is not None:
            self._release(self._matcher.finish())
        self._end(reason)

    def _end(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        if self._parser is not None and self._parsed is not None:
            self._parser.finish()
            self._parsed.add_details(self._take_details)

    def _release(self, text: str) -> None:
        if text:
            if self._parser is None:
                self._parts.append(text)
            else:
                self._parse(self._parser, text)
            self._num_released_chars += len(text)
            self.buffered_bytes += len(text) if text.isascii() else len(text.encode())

    def _parse(self, parser: OutputParser, text: str) -> None:
        parser.push(text)
        if self._parsed is not None and self._parsed.is_over:
            self.finish_reason = FinishReason.STOP

    def _detail(self, token_id: int, logprobs: TokenLogprobs) -> TokenDetail:
        token_bytes = self._tokenizer.token_bytes
        alternatives = tuple(
            TokenAlternative(token_bytes(top_id), logprob)
            for top_id, logprob in zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True)
        )
        return TokenDetail(token_bytes(token_id), logprobs.logprob, self._num_seen_chars, alternatives)

    def _take_details(self) -> tuple[TokenDetail, ...]:
        """Take the details of the shown text: a token that is held back, or comes after a stop string, is not
        shown."""
        if not self._details:
            return ()
        if self.finish_reason is not None and not self._is_stopped:
            released = len(self._details)
        else:
            released = sum(detail.text_offset < self._num_released_chars for detail in self._details)
        details = tuple(self._details[:released])
        del self._details[:released]
        return details
