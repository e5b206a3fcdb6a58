"""Endpoints for operators and tools: health, version, metrics, tokenization; /v1/models, with every name that the
caller may use, in the shapes of both APIs; and /admin/adapters for LoRA adapters of a running server, also under
vLLM's names.

The middleware has checked that a caller of /admin/adapters has the scope `admin`.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from penstock import __version__
from penstock.api.anthropic.endpoints import model_info, model_page
from penstock.api.http.answers import json_response
from penstock.api.http.context import note_model, principal_of
from penstock.api.http.errors import error_response, is_anthropic
from penstock.api.http.parsing import translated
from penstock.api.http.routes import Operation
from penstock.api.openai.messages import Message
from penstock.api.openai.requests import ChatCompletionRequest
from penstock.api.openai.tools import ChatTool
from penstock.core.errors import (
    EngineUnavailable,
    InvalidRequest,
    ModelNotFound,
    PenstockError,
    ShuttingDown,
    quoted,
)
from penstock.gateway.checks import check_token_ids
from penstock.gateway.external.models import ExternalModel
from penstock.gateway.gateway import Gateway
from penstock.gateway.metrics.gateway import CONTENT_TYPE
from penstock.gateway.models.catalogue import (
    RETRY_AFTER_S,
    ListedModel,
    RegisteredAdapter,
    register,
    try_adapter,
)
from penstock.gateway.models.served_model import ServedModel
from penstock.gateway.prompts import ChatPrompt, num_characters
from penstock.gateway.text.template import RenderedChat
from penstock.gateway.text.tokenizer import DIRECT_ENCODE_CHARS
from penstock.gateway.turns import in_thread


class ModelEntry(msgspec.Struct):
    """`root` is the model that answers, also for an alias; `parent` is the model that an adapter changes."""

    id: str
    created: int
    max_model_len: int | None  # None where an external server does not tell
    root: str
    parent: str | None
    # Sampling settings of requests that name none; empty where an external server decides.
    sampling_defaults: dict[str, float | int]
    object: str = "model"
    owned_by: str = "penstock"
    input_modalities: list[str] | msgspec.UnsetType = msgspec.UNSET  # of a model that takes more than text


class ModelList(msgspec.Struct):
    data: list[ModelEntry]
    object: str = "list"


class ModelsEndpoints:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._started = int(time.time())

    def routes(self) -> list[Operation]:
        return [
            Operation("GET /v1/models", self.list_models, ModelList),
            Operation("GET /v1/models/{name:path}", self.show_model, ModelEntry),
        ]

    async def list_models(self, request: Request) -> Response:
        self._gateway.catalogue.answering(None)  # raises when no model is ready
        models = self._gateway.catalogue.listed(principal_of(request))
        if is_anthropic(request.scope):
            return json_response(model_page([model_info(model, self._started) for model in models]))
        return json_response(ModelList([self._entry(model) for model in models]))

    async def show_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._gateway.catalogue.answering(None)
        listed = self._gateway.catalogue.listed(principal_of(request))
        found = next((model for model in listed if model.name == name), None)
        if found is None:  # without a word about models that this key does not see
            raise ModelNotFound(f"The model {quoted(name)} is not served here.", param="model")
        if is_anthropic(request.scope):
            return json_response(model_info(found, self._started))
        return json_response(self._entry(found))

    def _entry(self, listed: ListedModel) -> ModelEntry:
        model = listed.model
        owner = "external" if isinstance(model, ExternalModel) else "penstock"
        stated = model.card.sampling_defaults.stated() if isinstance(model, ServedModel) else {}
        sees = isinstance(model, ServedModel) and model.card.vision is not None
        return ModelEntry(
            listed.name,
            self._started,
            model.max_model_len,
            model.name,
            listed.parent,
            stated,
            owned_by=owner,
            input_modalities=["text", "image"] if sees else msgspec.UNSET,
        )


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
            Operation(
                "POST /tokenize", self.tokenize, TokenizeResponse, reads=TokenizeRequest, only_reads=True
            ),
            Operation(
                "POST /detokenize",
                self.detokenize,
                DetokenizeResponse,
                reads=DetokenizeRequest,
                only_reads=True,
            ),
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


logger = logging.getLogger(__name__)


class LoadAdapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`lora_path` is a folder as PEFT writes it, which this server and its engines both see."""

    lora_name: str
    lora_path: str
    base_model_name: str | None = None
    load_inplace: bool = False  # one of the same name is replaced in any case


class UnloadAdapter(msgspec.Struct, frozen=True):
    lora_name: str


class AdapterObject(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    path: str
    digest: str
    base_model: str | None
    object: Literal["adapter"] = "adapter"


class AdapterList(msgspec.Struct, frozen=True):
    data: list[AdapterObject]
    object: Literal["list"] = "list"


class AdapterDeleted(msgspec.Struct, frozen=True):
    id: str
    deleted: bool = True
    object: Literal["adapter"] = "adapter"


class AdapterEndpoints:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def routes(self) -> list[Operation]:
        return [
            Operation("GET /admin/adapters", self.list_adapters, AdapterList),
            Operation("POST /admin/adapters", self.create_adapter, AdapterObject, reads=LoadAdapter),
            Operation("DELETE /admin/adapters/{name:path}", self.delete_adapter, AdapterDeleted),
            Operation(
                "POST /v1/load_lora_adapter",
                self.load_lora_adapter,
                reads=LoadAdapter,
                content_type="text/plain",
            ),
            Operation(
                "POST /v1/unload_lora_adapter",
                self.unload_lora_adapter,
                reads=UnloadAdapter,
                content_type="text/plain",
            ),
        ]

    async def list_adapters(self, request: Request) -> Response:
        return json_response(AdapterList([_shown(entry) for entry in self._gateway.catalogue.adapters.all()]))

    async def create_adapter(self, request: Request, wire: LoadAdapter) -> Response:
        return json_response(_shown(await self._load(request, wire)))

    async def delete_adapter(self, request: Request) -> Response:
        name = request.path_params["name"]
        await self._unload(request, name)
        return json_response(AdapterDeleted(name))

    async def load_lora_adapter(self, request: Request, wire: LoadAdapter) -> Response:
        entry = await self._load(request, wire)
        return PlainTextResponse(f"Success: LoRA adapter '{entry.adapter.name}' added successfully.")

    async def unload_lora_adapter(self, request: Request, wire: UnloadAdapter) -> Response:
        await self._unload(request, wire.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{wire.lora_name}' removed successfully.")

    async def _load(self, request: Request, wire: LoadAdapter) -> RegisteredAdapter:
        entry = await register(wire.lora_name, wire.lora_path, wire.base_model_name)
        self._gateway.catalogue.check_free(entry)
        await try_adapter(self._gateway.engine, self._gateway.catalogue, entry)
        await self._gateway.catalogue.adapters.add(entry, principal_of(request).key_id)
        logger.info(
            "adapter %s added from %s by %s", wire.lora_name, wire.lora_path, principal_of(request).key_id
        )
        return entry

    async def _unload(self, request: Request, name: str) -> None:
        await self._gateway.catalogue.adapters.remove(name, principal_of(request).key_id)
        logger.info("adapter %s removed by %s", name, principal_of(request).key_id)


def _shown(entry: RegisteredAdapter) -> AdapterObject:
    adapter = entry.adapter
    return AdapterObject(
        id=adapter.name, path=adapter.path, digest=adapter.digest, base_model=entry.base_model
    )
