"""/v1/completions, with its `echo` option, and /v1/chat/completions: decode, submit, answer, and the chunks of
streams.

Streams write tens of thousands of chunks a second that differ in a few characters. The constant part of the chunks of
a request is therefore encoded once, and a chunk is composed of bytes.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from penstock.api.extensions import EXTENSION_FIELDS, refuse_foreign
from penstock.api.http.answers import EventStream, answer_whole
from penstock.api.http.context import context_of, principal_of, with_context
from penstock.api.http.errors import error_event
from penstock.api.http.parsing import (
    MAX_MESSAGE_PARTS,
    UNCOUNTED_BYTES,
    BodyDecoder,
    read_within_bound,
    translated,
)
from penstock.api.http.routes import Operation
from penstock.api.openai.answers import (
    AnswerHeader,
    ChatCompletion,
    Completion,
    ShowsPrompts,
    best_answers,
    chat_completion,
    chat_logprobs,
    completion,
    completion_logprobs,
    wire_finish_reason,
    wire_usage,
)
from penstock.api.openai.prompt_echo import EchoedAnswer, ShownPrompts, TokenBytes, prompt_texts
from penstock.api.openai.requests import ChatCompletionRequest, CompletionRequest, StreamOptions
from penstock.api.openai.stored_chats import KeptAnswer, StoredChats, kept_metadata
from penstock.api.openai.tools import StreamedCalls
from penstock.core.errors import PenstockError
from penstock.gateway.answers.choice import Delta
from penstock.gateway.answers.stream import AnswerStream, off_loop_if_large
from penstock.gateway.gateway import Gateway
from penstock.gateway.prompts import ChatMessage, ChatPrompt, GenerationRequest, SamplingOptions, Usage


class PlainMessage(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant"]
    content: str


class PlainChat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A chat that the full shape would translate into the same `GenerationRequest`: messages of text, and the
    common options, as in most requests. It is decoded and translated at a fraction of the cost. Whatever does not
    fit is left to the full shape, which also words the errors."""

    model: Annotated[str, msgspec.Meta(min_length=1)]
    messages: Annotated[list[PlainMessage], msgspec.Meta(min_length=1, max_length=MAX_MESSAGE_PARTS)]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] | None = None
    user: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def to_generation(self, **context: Any) -> GenerationRequest:
        is_old_name = self.max_completion_tokens is None
        return GenerationRequest(
            prompts=(
                ChatPrompt(
                    messages=tuple([ChatMessage(message.role, message.content) for message in self.messages])
                ),
            ),
            sampling=SamplingOptions(
                max_tokens=self.max_tokens if is_old_name else self.max_completion_tokens,
                temperature=self.temperature,
                top_p=self.top_p,
                seed=self.seed,
                stop=self.stop or (),
            ),
            model=self.model,
            max_tokens_param="max_tokens" if is_old_name else "max_completion_tokens",
            endpoint=ChatCompletionRequest.ENDPOINT,
            user=self.user,
            is_read_whole=not self.stream,
            is_plain=True,
            **context,
        )


_decode = msgspec.json.Decoder(PlainChat).decode


def plain_chat(body: bytes) -> PlainChat | None:
    """None for a body that only the full shape can judge, and for one whose values must be counted first."""
    if len(body) > UNCOUNTED_BYTES:
        return None
    try:
        chat = _decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return None if chat.stream_options is not None and not chat.stream else chat


_to_json = msgspec.json.Encoder().encode


class _ChunkFrame:
    """The unchanging bytes around one choice: `head`, the choice's index and body, `tail`."""

    def __init__(self, header: AnswerHeader, id_prefix: str, kind: str) -> None:
        fields: dict[str, str | int] = {
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
        self._includes_usage = header.includes_usage

    def first_head(self, answer: AnswerStream) -> bytes:
        """`head` of the first chunk, which tells the answer's warnings."""
        if not answer.warnings:
            return self.head
        return b'%b,"warnings":%b,"choices":[{"index":' % (self._start, _to_json(answer.warnings))

    def closing(self, usage: Usage) -> bytes:
        if not self._includes_usage:
            return b"data: [DONE]\n\n"
        return b'%b,"choices":[],"usage":%b}\n\ndata: [DONE]\n\n' % (
            self._start, _to_json(wire_usage(usage))
        )  # fmt: skip


class ChatChunks:
    def __init__(self, header: AnswerHeader) -> None:
        self._frame = _ChunkFrame(header, "chatcmpl", "chat.completion.chunk")
        self._plain_tail = b'},"logprobs":null,"finish_reason":null' + self._frame.tail
        self._calls = header.calls
        self._called: dict[int, StreamedCalls] = {}  # answers that called tools, by their index

    def opening(self, answer: AnswerStream) -> bytes:
        delta = b',"delta":{"role":"assistant","content":""'
        heads = [self._frame.first_head(answer)] + [self._frame.head] * (answer.num_choices - 1)
        return b"".join(
            b"%b%d%b%b" % (head, index, delta, self._plain_tail) for index, head in enumerate(heads)
        )

    def chunk(self, delta: Delta) -> bytes:
        if delta.finish_reason is None and not (
            delta.details or delta.reasoning or delta.tool_calls or delta.token_ids or delta.prompt_token_ids
        ):  # as nearly all are
            return self._plain(delta, b"content", _to_json(delta.text)) if delta.text else b""
        content = b""
        if delta.token_ids or delta.prompt_token_ids:
            content = _token_ids(self._frame, delta, b'"delta":{},"logprobs":null')
        content += self._text_chunk(delta)
        if delta.reasoning:
            content = self._plain(delta, b"reasoning_content", _to_json(delta.reasoning)) + content
        if delta.tool_calls or (delta.finish_reason is not None and delta.index in self._called):
            content += self._call_chunks(delta)
        if delta.finish_reason is None:
            return content
        reason = wire_finish_reason(
            delta.finish_reason, called_tools=delta.index in self._called, calls=self._calls
        ).encode()
        return content + b'%b%d,"delta":{},"logprobs":null,"finish_reason":"%b"%b' % (
            self._frame.head, delta.index, reason, self._frame.tail
        )  # fmt: skip

    def _call_chunks(self, delta: Delta) -> bytes:
        called = self._called.setdefault(delta.index, StreamedCalls(self._calls))
        calls = called.ready(delta.tool_calls, is_end=delta.finish_reason is not None)
        fields = self._calls.fields(calls, is_whole=False) if calls else {}
        return b"".join(self._plain(delta, name.encode(), _to_json(value)) for name, value in fields.items())

    def _text_chunk(self, delta: Delta) -> bytes:
        if delta.details:
            logprobs = _to_json(chat_logprobs(delta.details))
            return b'%b%d,"delta":{"content":%b},"logprobs":%b,"finish_reason":null%b' % (
                self._frame.head, delta.index, _to_json(delta.text), logprobs, self._frame.tail
            )  # fmt: skip
        return self._plain(delta, b"content", _to_json(delta.text)) if delta.text else b""

    def closing(self, usage: Usage) -> bytes:
        return self._frame.closing(usage)

    def failure(self, error: PenstockError) -> bytes:
        return error_event(error)

    def _plain(self, delta: Delta, field: bytes, value: bytes) -> bytes:
        return b'%b%d,"delta":{"%b":%b%b' % (self._frame.head, delta.index, field, value, self._plain_tail)


def _token_ids(frame: _ChunkFrame, delta: Delta, body: bytes) -> bytes:
    """Return a chunk that tells token ids: of the prompt with the first one, and of the answer."""
    shown: dict[str, tuple[int, ...]] = {"token_ids": delta.token_ids}
    if delta.prompt_token_ids:
        shown["prompt_token_ids"] = delta.prompt_token_ids
    return b'%b%d,%b,"finish_reason":null,%b%b' % (
        frame.head, delta.index, body, _to_json(shown)[1:-1], frame.tail
    )  # fmt: skip


class CompletionChunks:
    def __init__(self, header: AnswerHeader, prompts: ShowsPrompts | None = None) -> None:
        self._prompts = prompts
        self._frame = _ChunkFrame(header, "cmpl", "text_completion")
        self._plain_tail = b',"logprobs":null,"finish_reason":null' + self._frame.tail

    def opening(self, answer: AnswerStream) -> bytes:
        if not answer.warnings:
            return b""
        return b'%b0,"text":""%b' % (self._frame.first_head(answer), self._plain_tail)

    def chunk(self, delta: Delta) -> bytes:
        head, tail = self._frame.head, self._frame.tail
        if delta.token_ids or delta.prompt_token_ids:
            told = _token_ids(self._frame, delta, b'"text":"","logprobs":null')
            return told + self.chunk(msgspec.structs.replace(delta, token_ids=(), prompt_token_ids=()))
        text = _to_json(delta.text)
        if delta.finish_reason is None and not delta.details and delta.prompt is None:
            return b'%b%d,"text":%b%b' % (head, delta.index, text, self._plain_tail)
        logprobs = b"null"
        if delta.details or delta.prompt is not None:
            shown = self._prompts.logprobs(delta) if self._prompts else completion_logprobs(delta.details)
            logprobs = _to_json(shown)
        reason = b"null"
        if delta.finish_reason is not None:
            reason = b'"%b"' % wire_finish_reason(delta.finish_reason, called_tools=False).encode()
        return b'%b%d,"text":%b,"logprobs":%b,"finish_reason":%b%b' % (
            head, delta.index, text, logprobs, reason, tail
        )  # fmt: skip

    def closing(self, usage: Usage) -> bytes:
        return self._frame.closing(usage)

    def failure(self, error: PenstockError) -> bytes:
        return error_event(error)


def _build_plain(answer: AnswerStream, deltas: Sequence[Delta]) -> bytes:
    return chat_completion(AnswerHeader.of(answer, wants_logprobs=False), deltas, answer.usage)


class OpenAIEndpoints:
    def __init__(self, gateway: Gateway, chats: StoredChats) -> None:
        self._gateway = gateway
        self._chats = chats
        self._chat_decoder = BodyDecoder(ChatCompletionRequest, EXTENSION_FIELDS, refuse_foreign)

    def routes(self) -> list[Operation]:
        return [
            Operation(
                "POST /v1/completions",
                self.create_completion,
                Completion,
                reads=BodyDecoder(CompletionRequest, EXTENSION_FIELDS, refuse_foreign),
                streams=True,
            ),
            Operation(
                "POST /v1/chat/completions",
                self.create_chat_completion,
                ChatCompletion,
                request=ChatCompletionRequest,
                streams=True,
            ),
        ]

    async def create_completion(self, request: Request, wire: CompletionRequest) -> ASGIApp:
        generation = wire.to_generation()
        prompts: EchoedAnswer | None = None

        async def submit() -> AnswerStream:
            nonlocal prompts
            answer = await self._submit(request, generation, is_read_whole=not wire.stream)
            if not wire.echo and wire.prompt_logprobs is None:
                return answer
            try:
                shown = await self._shown_prompts(wire, generation)
            except BaseException:
                answer.cancel()
                raise
            prompts = EchoedAnswer(answer, shown, self._vocabulary_of)
            return prompts

        header_of = partial(
            AnswerHeader.of,
            wants_logprobs=wire.logprobs is not None,
            includes_usage=wire.includes_usage,
            lists_token_ids=bool(wire.return_token_ids),
        )
        if wire.stream:
            return await EventStream.open(
                request, submit(), lambda answer: CompletionChunks(header_of(answer), prompts), error_event
            )

        def build(answer: AnswerStream, deltas: Sequence[Delta]) -> bytes:
            # Not before the end: which model answers may turn out then.
            if wire.keeps_best:
                deltas = best_answers(deltas, generation.n, wire.n or 1)
            return completion(header_of(answer), deltas, answer.usage, prompts)

        return await answer_whole(request, submit(), build)

    async def create_chat_completion(self, request: Request) -> ASGIApp:
        body = await read_within_bound(request)
        if (plain := plain_chat(body)) is not None:
            return await self._answer_plain(request, plain)
        wire = await self._chat_decoder.decode_for(request, body)
        metadata = kept_metadata(wire.metadata) if wire.store else {}
        generation = await translated(wire.messages, wire.to_generation)
        prompts: EchoedAnswer | None = None
        header_of = partial(
            AnswerHeader.of,
            wants_logprobs=bool(wire.logprobs),
            includes_usage=wire.includes_usage,
            lists_token_ids=bool(wire.return_token_ids),
            calls=wire.call_style,
        )

        async def submit() -> AnswerStream:
            nonlocal prompts
            answer = await self._submit(request, generation, is_read_whole=not wire.stream)
            if wire.prompt_logprobs is not None:
                shown = ShownPrompts(n=generation.n, scored_top=wire.prompt_logprobs)
                answer = prompts = EchoedAnswer(answer, shown, self._vocabulary_of)
            if not wire.store:
                return answer

            async def keep(deltas: Sequence[Delta]) -> None:
                header, usage = header_of(answer), answer.usage
                body = await off_loop_if_large(deltas, lambda: chat_completion(header, deltas, usage))
                await self._chats.keep(principal_of(request), body, wire.messages, metadata)

            return KeptAnswer(answer, keep)

        if wire.stream:
            return await EventStream.open(
                request, submit(), lambda answer: ChatChunks(header_of(answer)), error_event
            )

        def build(answer: AnswerStream, deltas: Sequence[Delta]) -> bytes:
            scored = prompts.prompt_logprobs(deltas[0]) if prompts else None
            return chat_completion(header_of(answer), deltas, answer.usage, scored)

        return await answer_whole(request, submit(), build)

    def _answer_plain(self, request: Request, chat: PlainChat) -> Coroutine[Any, Any, ASGIApp]:
        submitted = self._gateway.submit(chat.to_generation(**context_of(request, chat.model)))
        if not chat.stream:
            return answer_whole(request, submitted, _build_plain)
        header_of = partial(AnswerHeader.of, wants_logprobs=False, includes_usage=chat.includes_usage)
        return EventStream.open(request, submitted, lambda answer: ChatChunks(header_of(answer)), error_event)

    def _submit(
        self, request: Request, generation: GenerationRequest, *, is_read_whole: bool
    ) -> Coroutine[Any, Any, AnswerStream]:
        return self._gateway.submit(with_context(request, generation, is_read_whole=is_read_whole))

    async def _shown_prompts(self, wire: CompletionRequest, generation: GenerationRequest) -> ShownPrompts:
        texts: list[str] = []
        if wire.echo:
            model = self._gateway.catalogue.answering(generation.model)
            texts = await prompt_texts(generation.prompts, model)
        return ShownPrompts(
            n=generation.n,
            texts=texts,
            echoed_top=wire.logprobs if wire.echo else None,
            scored_top=wire.prompt_logprobs,
        )

    def _vocabulary_of(self, model: str) -> TokenBytes:
        return self._gateway.model(model).tokenizer.token_bytes
