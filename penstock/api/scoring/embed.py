"""/v2/embed in Cohere's shape: decode, embed, answer."""

from __future__ import annotations

import base64
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from penstock.api.http.answers import WholeAnswer
from penstock.api.http.context import principal_of, request_id_of, timeout_s_of
from penstock.api.http.parsing import BodyDecoder
from penstock.api.http.routes import Operation
from penstock.api.openai.embeddings import refusing, run_job, uses_cache
from penstock.core.errors import InvalidRequest
from penstock.gateway.embeddings.inputs import Input, Reading, Role, RoledText, Truncation
from penstock.gateway.embeddings.run import numbers
from penstock.gateway.embeddings.service import EmbeddingRequest, Embeddings

REFUSED_FIELDS = ("images", "priority")
GUARDED_FIELDS = ("texts", "input_type", "embedding_types", "output_dimension", "truncate", "max_tokens")
_ROLES: dict[str, Role] = {"search_query": "query", "search_document": "document"}
_SIDES: dict[str, Literal["left", "right"]] = {"START": "left", "END": "right"}


class EmbedPart(msgspec.Struct):
    type: str
    text: str | None = None


class EmbedInput(msgspec.Struct):
    content: list[EmbedPart]


class CohereEmbedRequest(msgspec.Struct, kw_only=True):
    """Texts, alone or as inputs of text parts. `truncate` cuts a long text at its start or end, or refuses it."""

    model: str | None = None
    texts: list[str] | None = None
    inputs: list[EmbedInput] | None = None
    input_type: Literal["search_document", "search_query", "classification", "clustering", "image"] | None = (
        None
    )
    embedding_types: list[str] | None = None
    output_dimension: int | None = None
    truncate: Literal["NONE", "START", "END"] = "END"
    max_tokens: int | None = None

    def all_texts(self) -> list[str]:
        if (self.texts is None) == (self.inputs is None):
            raise InvalidRequest("Give either texts or inputs.", param="texts")
        if self.texts is not None:
            return self.texts
        return [_text_of(each, index) for index, each in enumerate(self.inputs or ())]

    def kinds(self) -> list[str]:
        kinds = self.embedding_types or ["float"]
        for kind in kinds:
            if kind not in ("float", "base64"):
                raise InvalidRequest(
                    f"Embeddings of the type {kind[:40]!r} are not supported; float and base64 are.",
                    param="embedding_types",
                )
        return kinds

    def reading(self) -> Reading:
        if self.truncate == "NONE":
            return Reading()
        return Reading(None, Truncation(self.max_tokens, _SIDES[self.truncate]))


class BilledInput(msgspec.Struct):
    input_tokens: int


class EmbedMeta(msgspec.Struct):
    api_version: dict[str, str]
    billed_units: BilledInput


class CohereEmbedResponse(msgspec.Struct):
    id: str
    embeddings: dict[str, list[Any]]
    texts: list[str]
    meta: EmbedMeta
    response_type: str = "embeddings_by_type"


class EmbedEndpoints:
    def __init__(self, embeddings: Embeddings) -> None:
        self._embeddings = embeddings

    def routes(self) -> list[Operation]:
        decoder = BodyDecoder(CohereEmbedRequest, GUARDED_FIELDS, refusing(REFUSED_FIELDS))
        return [
            Operation(
                "POST /v2/embed",
                self.embed,
                CohereEmbedResponse,
                reads=decoder,
            )
        ]

    async def embed(self, request: Request, wire: CohereEmbedRequest) -> ASGIApp:
        texts, kinds = wire.all_texts(), wire.kinds()
        role = _ROLES.get(wire.input_type or "")
        inputs: tuple[Input, ...] = tuple(RoledText(text, role) for text in texts) if role else tuple(texts)
        job = await self._embeddings.open(
            EmbeddingRequest(
                inputs=inputs,
                labels=tuple(f"texts[{index}]" for index in range(len(texts))),
                model=wire.model,
                dimensions=wire.output_dimension,
                reading=wire.reading(),
                uses_cache=uses_cache(request),
                principal=principal_of(request),
                request_id=request_id_of(request),
                timeout_s=timeout_s_of(request),
            )
        )
        answer = await run_job(job, request)
        found: dict[str, list[Any]] = {}
        if "float" in kinds:
            found["float"] = [numbers(vector) for vector in answer.vectors]
        if "base64" in kinds:
            found["base64"] = [base64.b64encode(vector).decode() for vector in answer.vectors]
        body = CohereEmbedResponse(
            id=request_id_of(request),
            embeddings=found,
            texts=texts,
            meta=EmbedMeta({"version": "2"}, BilledInput(answer.usage.prompt_tokens)),
        )
        return WholeAnswer(msgspec.json.encode(body), answer.rate_limits)


def _text_of(each: EmbedInput, index: int) -> str:
    if any(part.type != "text" or part.text is None for part in each.content):
        raise InvalidRequest(f"inputs[{index}] has a part that is not text.", param="inputs")
    return "\n".join(part.text or "" for part in each.content)
