"""/v1/completions and /v1/chat/completions: decode, submit, answer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from penstock.api.answers import EventStream, answer_whole
from penstock.api.body import BodyDecoder, read_body
from penstock.api.openai_answers import AnswerHeader, chat_completion, completion
from penstock.api.openai_chunks import ChatChunks, CompletionChunks
from penstock.api.openai_echo import EchoedAnswer, prompt_texts
from penstock.api.openai_requests import EXTENSION_FIELDS, ChatCompletionRequest, CompletionRequest
from penstock.api.wishes import signed_wish
from penstock.gateway.choice import Delta
from penstock.gateway.gateway import Gateway
from penstock.gateway.prompts import GenerationRequest, Usage
from penstock.gateway.stream import AnswerStream


class OpenAIEndpoints:
    def __init__(self, gateway: Gateway, max_body_bytes: int) -> None:
        self._gateway = gateway
        self._max_body_bytes = max_body_bytes
        self._chat_decoder = BodyDecoder(ChatCompletionRequest, EXTENSION_FIELDS)
        self._completion_decoder = BodyDecoder(CompletionRequest, EXTENSION_FIELDS)

    def routes(self) -> list[Route]:
        return [
            Route("/v1/completions", self.create_completion, methods=["POST"]),
            Route("/v1/chat/completions", self.create_chat_completion, methods=["POST"]),
        ]

    async def create_completion(self, request: Request) -> ASGIApp:
        wire = self._completion_decoder.decode(await read_body(request, self._max_body_bytes))
        wish = wire.to_generation()
        echoed = (
            prompt_texts(wish.prompts, self._gateway.catalogue.answering(wish.model)) if wire.echo else ()
        )
        generation = await self._submit(request, wish)
        if echoed:
            generation = EchoedAnswer(generation, echoed, wish.n)
        header_of = partial(
            AnswerHeader.of, wants_logprobs=wire.logprobs is not None, includes_usage=wire.includes_usage
        )
        if wire.stream:
            return await EventStream.open(
                generation, request.receive, CompletionChunks(header_of(generation))
            )

        def build(deltas: Sequence[Delta], usage: Usage) -> bytes:
            # Not before the end: which model answers may turn out then.
            return completion(header_of(generation), deltas, usage)

        return await answer_whole(generation, request.receive, build)

    async def create_chat_completion(self, request: Request) -> ASGIApp:
        wire = self._chat_decoder.decode(await read_body(request, self._max_body_bytes))
        generation = await self._submit(request, wire.to_generation())
        header_of = partial(
            AnswerHeader.of, wants_logprobs=bool(wire.logprobs), includes_usage=wire.includes_usage
        )
        if wire.stream:
            return await EventStream.open(generation, request.receive, ChatChunks(header_of(generation)))

        def build(deltas: Sequence[Delta], usage: Usage) -> bytes:
            return chat_completion(header_of(generation), deltas, usage)

        return await answer_whole(generation, request.receive, build)

    async def _submit(self, request: Request, wish: GenerationRequest) -> AnswerStream:
        return await self._gateway.submit(signed_wish(request, wish))
