"""/v1/completions, with its `echo` option, and /v1/chat/completions: decode, submit, answer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from penstock.api.http.answers import EventStream, answer_whole
from penstock.api.http.context import with_context
from penstock.api.http.parsing import BodyDecoder, read_body
from penstock.api.openai.answers import AnswerHeader, chat_completion, completion
from penstock.api.openai.chunks import ChatChunks, CompletionChunks
from penstock.api.openai.requests import EXTENSION_FIELDS, ChatCompletionRequest, CompletionRequest
from penstock.core.errors import InvalidRequest
from penstock.gateway.answers.choice import Delta
from penstock.gateway.answers.stream import AnswerStream, WrappedAnswer
from penstock.gateway.gateway import Gateway
from penstock.gateway.models.catalogue import AnsweringModel
from penstock.gateway.prompts import GenerationRequest, Prompt, TextPrompt, TokenPrompt, Usage


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
        generation = wire.to_generation()
        answer = await self._submit(request, generation)
        if wire.echo:
            try:
                echoed = await prompt_texts(
                    generation.prompts, self._gateway.catalogue.answering(generation.model)
                )
            except BaseException:
                answer.cancel()
                raise
            answer = EchoedAnswer(answer, echoed, generation.n)
        header_of = partial(
            AnswerHeader.of, wants_logprobs=wire.logprobs is not None, includes_usage=wire.includes_usage
        )
        if wire.stream:
            return await EventStream.open(answer, request.receive, CompletionChunks(header_of(answer)))

        def build(deltas: Sequence[Delta], usage: Usage) -> bytes:
            # Not before the end: which model answers may turn out then.
            return completion(header_of(answer), deltas, usage)

        return await answer_whole(answer, request.receive, build)

    async def create_chat_completion(self, request: Request) -> ASGIApp:
        wire = self._chat_decoder.decode(await read_body(request, self._max_body_bytes))
        answer = await self._submit(request, wire.to_generation())
        header_of = partial(
            AnswerHeader.of, wants_logprobs=bool(wire.logprobs), includes_usage=wire.includes_usage
        )
        if wire.stream:
            return await EventStream.open(answer, request.receive, ChatChunks(header_of(answer)))

        def build(deltas: Sequence[Delta], usage: Usage) -> bytes:
            return chat_completion(header_of(answer), deltas, usage)

        return await answer_whole(answer, request.receive, build)

    async def _submit(self, request: Request, generation: GenerationRequest) -> AnswerStream:
        return await self._gateway.submit(with_context(request, generation))


class EchoedAnswer(WrappedAnswer):
    """`prompts` as text; the n answers of a prompt follow each other."""

    def __init__(self, answer: AnswerStream, prompts: Sequence[str], n: int) -> None:
        super().__init__(answer)
        self._prompts = dict(enumerate(prompt for prompt in prompts for _ in range(n)))

    async def __anext__(self) -> list[Delta]:
        return list(map(self._echoed, await anext(self._answer)))

    async def collect(self) -> list[Delta]:
        return list(map(self._echoed, await self._answer.collect()))

    def _echoed(self, delta: Delta) -> Delta:
        prompt = self._prompts.pop(delta.index, "")  # once, before the first piece
        return msgspec.structs.replace(delta, text=prompt + delta.text) if prompt else delta


async def prompt_texts(prompts: Sequence[Prompt], model: AnsweringModel) -> list[str]:
    """Raises InvalidRequest for token ids outside the vocabulary."""
    texts = []
    for prompt in prompts:
        if isinstance(prompt, TextPrompt):
            texts.append(prompt.text)
        elif isinstance(prompt, TokenPrompt):
            texts.append(await model.decode(prompt.token_ids))
        else:
            raise InvalidRequest("Only the prompts of completions can be echoed.", param="echo")
    return texts
