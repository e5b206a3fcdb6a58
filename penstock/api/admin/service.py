"""Endpoints for operators and tools: health, version, metrics, tokenization."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock import __version__
from penstock.api.http.answers import json_response
from penstock.api.http.context import note_model, principal_of
from penstock.api.http.errors import error_response
from penstock.api.http.parsing import translated
from penstock.api.http.routes import Operation
from penstock.api.openai.messages import Message
from penstock.api.openai.requests import ChatCompletionRequest
from penstock.api.openai.tools import ChatTool
from penstock.core.errors import EngineUnavailable, InvalidRequest, PenstockError, ShuttingDown
from penstock.gateway.checks import check_token_ids
from penstock.gateway.gateway import Gateway
from penstock.gateway.metrics.gateway import CONTENT_TYPE
from penstock.gateway.models.catalogue import RETRY_AFTER_S
from penstock.gateway.models.served_model import ServedModel
from penstock.gateway.prompts import ChatPrompt, num_characters
from penstock.gateway.text.template import RenderedChat
from penstock.gateway.text.tokenizer import DIRECT_ENCODE_CHARS
from penstock.gateway.turns import in_thread

SPECIAL_TOKENS = ("bos", "eos", "pad", "unk")


class TokenizeRequest(msgspec.Struct):
    """Has either `prompt` or `messages`, and with messages what else a chat template may write. A plain prompt gets
    special tokens; a chat template writes its own."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool | None = None
    tools: list[ChatTool] | None = None
    chat_template: str | None = None  # the name of one of the model's templates
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    def chat(self, messages: list[Message]) -> ChatPrompt:
        """Return the prompt of a chat completion with the same fields."""
        return ChatCompletionRequest(
            messages=messages,
            tools=self.tools,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            chat_template=self.chat_template,
            chat_template_kwargs=self.chat_template_kwargs,
        ).chat_prompt()


class TokenizeResponse(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: tuple[int, ...]
    token_strs: list[str] | None


class DetokenizeRequest(msgspec.Struct):
    tokens: list[int]
    model: str | None = None


class DetokenizeResponse(msgspec.Struct):
    prompt: str


class TokenizerInfo(msgspec.Struct):
    """The tokenizer's settings, in vLLM's format. Evaluation tools use them to tokenize over HTTP."""

    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    add_bos_token: bool
    model_max_length: int
    chat_template: str | None


class ServiceEndpoints:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def routes(self) -> list[Operation]:
        return [
            Operation("GET /health", self.health),
            Operation("GET /ready", self.ready),
            Operation("GET /version", self.version),
            Operation("GET /metrics", self.metrics, content_type="text/plain"),
            Operation("GET /tokenizer_info", self.tokenizer_info, TokenizerInfo, query=("model",)),
            Operation("POST /tokenize", self.tokenize, TokenizeResponse, reads=TokenizeRequest),
            Operation("POST /detokenize", self.detokenize, DetokenizeResponse, reads=DetokenizeRequest),
        ]

    async def health(self, request: Request) -> Response:
        return (
            json_response({"status": "ok"}) if self._gateway.is_healthy else error_response(self._refusal())
        )

    async def ready(self, request: Request) -> Response:
        return (
            json_response({"status": "ready"}) if self._gateway.is_ready else error_response(self._refusal())
        )

    async def version(self, request: Request) -> Response:
        return json_response({"version": __version__})

    async def metrics(self, request: Request) -> Response:
        return Response(await self._gateway.metrics_page(), headers={"content-type": CONTENT_TYPE})

    async def tokenizer_info(self, request: Request) -> Response:
        card = self._model(request, request.query_params.get("model")).card
        special = {f"{kind}_token": card.special_tokens.get(f"{kind}_token") for kind in SPECIAL_TOKENS}
        return json_response(
            TokenizerInfo(
                **special,
                add_bos_token=card.add_bos_token,
                model_max_length=card.max_model_len,
                chat_template=card.chat_template,
            )
        )

    async def tokenize(self, request: Request, wire: TokenizeRequest) -> Response:
        if (wire.prompt is None) == (wire.messages is None):
            raise InvalidRequest("Give either prompt or messages.", param="prompt")
        model = self._model(request, wire.model)
        async with self._gateway.accounts.errand(principal_of(request), model.card.name, "tokenize"):
            tokens = await _tokens(wire, model)
            if len(tokens) <= DIRECT_ENCODE_CHARS:
                return _answer(wire, model, tokens)
            return await in_thread(_answer, wire, model, tokens)

    async def detokenize(self, request: Request, wire: DetokenizeRequest) -> Response:
        model = self._model(request, wire.model)
        model.check_detokenizable(len(wire.tokens), "tokens")
        check_token_ids(wire.tokens, model.card.vocab_size, param="tokens")
        async with self._gateway.accounts.errand(principal_of(request), model.card.name, "detokenize"):
            return json_response(DetokenizeResponse(await model.tokenizer.decode_later(wire.tokens)))

    def _model(self, request: Request, name: str | None) -> ServedModel:
        note_model(request, name)
        return self._gateway.catalogue.permitted(principal_of(request), name)

    def _refusal(self) -> PenstockError:
        if self._gateway.is_leaving:
            return ShuttingDown("The server is shutting down.", retry_after_s=RETRY_AFTER_S)
        return EngineUnavailable("No engine is ready to serve.", retry_after_s=RETRY_AFTER_S)


async def _tokens(wire: TokenizeRequest, model: ServedModel) -> tuple[int, ...]:
    param = "prompt"
    rendered = RenderedChat(wire.prompt or "")
    if wire.messages is not None:
        param = "messages"
        prompt = await translated(wire.messages, partial(wire.chat, wire.messages))
        model.check_tokenizable(num_characters(prompt), param)
        rendered = await model.template.render_later(prompt)
    adds_special = wire.messages is None if wire.add_special_tokens is None else wire.add_special_tokens
    return await model.tokenize(
        rendered.text, param, add_special_tokens=adds_special, plain_ranges=rendered.plain_ranges
    )


def _answer(wire: TokenizeRequest, model: ServedModel, tokens: tuple[int, ...]) -> Response:
    pieces = None
    if wire.return_token_strs:
        spelt = {
            token_id: model.tokenizer.token_bytes(token_id).decode("utf-8", "replace")
            for token_id in set(tokens)
        }
        pieces = [spelt[token_id] for token_id in tokens]
    return json_response(TokenizeResponse(len(tokens), model.card.max_model_len, tokens, pieces))
