"""/v1/completions, with its `echo` option, and /v1/chat/completions: decode, submit, answer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from penstock.api.http.answers import EventStream, answer_whole
from penstock.api.http.context import principal_of, with_context
from penstock.api.http.errors import error_event
from penstock.api.http.parsing import BodyDecoder
from penstock.api.openai.answers import AnswerHeader, chat_completion, completion
from penstock.api.openai.chunks import ChatChunks, CompletionChunks
from penstock.api.openai.prompt_echo import EchoedAnswer, ShownPrompts, TokenBytes, prompt_texts
from penstock.api.openai.requests import EXTENSION_FIELDS, ChatCompletionRequest, CompletionRequest
from penstock.api.openai.stored_chats import KeptAnswer, StoredChats, kept_metadata
from penstock.gateway.answers.choice import Delta
from penstock.gateway.answers.stream import AnswerStream
from penstock.gateway.gateway import Gateway
from penstock.gateway.prompts import GenerationRequest


class OpenAIEndpoints:
    def __init__(self, gateway: Gateway, chats: StoredChats) -> None:
        self._gateway = gateway
        self._chats = chats
        self._chat_decoder = BodyDecoder(ChatCompletionRequest, EXTENSION_FIELDS)
        self._completion_decoder = BodyDecoder(CompletionRequest, EXTENSION_FIELDS)

    def routes(self) -> list[Route]:
        return [
            Route("/v1/completions", self.create_completion, methods=["POST"]),
            Route("/v1/chat/completions", self.create_chat_completion, methods=["POST"]),
        ]

    async def create_completion(self, request: Request) -> ASGIApp:
        wire = await self._completion_decoder.read(request)
        generation = wire.to_generation()
        prompts: EchoedAnswer | None = None

        async def submit() -> AnswerStream:
            nonlocal prompts
            answer = await self._submit(request, generation)
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
            AnswerHeader.of, wants_logprobs=wire.logprobs is not None, includes_usage=wire.includes_usage
        )
        if wire.stream:
            return await EventStream.open(
                request, submit(), lambda answer: CompletionChunks(header_of(answer), prompts), error_event
            )

        def build(answer: AnswerStream, deltas: Sequence[Delta]) -> bytes:
            # Not before the end: which model answers may turn out then.
            return completion(header_of(answer), deltas, answer.usage, prompts)

        return await answer_whole(request, submit(), build)

    async def create_chat_completion(self, request: Request) -> ASGIApp:
        wire = await self._chat_decoder.read(request)
        metadata = kept_metadata(wire.metadata) if wire.store else {}
        generation = wire.to_generation()
        prompts: EchoedAnswer | None = None
        header_of = partial(
            AnswerHeader.of, wants_logprobs=bool(wire.logprobs), includes_usage=wire.includes_usage
        )

        async def submit() -> AnswerStream:
            nonlocal prompts
            answer = await self._submit(request, generation)
            if wire.prompt_logprobs is not None:
                shown = ShownPrompts(n=generation.n, scored_top=wire.prompt_logprobs)
                answer = prompts = EchoedAnswer(answer, shown, self._vocabulary_of)
            if not wire.store:
                return answer

            async def keep(deltas: Sequence[Delta]) -> None:
                body = chat_completion(header_of(answer), deltas, answer.usage)
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

    async def _submit(self, request: Request, generation: GenerationRequest) -> AnswerStream:
        return await self._gateway.submit(with_context(request, generation))

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
