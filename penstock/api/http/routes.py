"""The routes of an API: each one says where it is, what it reads and what it answers.

The server routes requests by them, and the OpenAPI document is made from them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from penstock import __version__
from penstock.api.http.answers import while_present
from penstock.api.http.errors import AnthropicErrorBody, CohereErrorBody, ErrorBody, OllamaErrorBody
from penstock.api.http.parsing import BodyDecoder

JSON = "application/json"
EVENT_STREAM = "text/event-stream"
JSON_LINES = "application/x-ndjson"
PAGE = ("limit", "after")  # the query of a list that is read page by page

Handler = Callable[..., Awaitable[ASGIApp]]


class Operation(Route):
    """One method of one path. A handler takes the request, and the body that the operation `reads`, decoded."""

    def __init__(
        self,
        method_and_path: str,
        handler: Handler,
        response: type[msgspec.Struct] | None = None,  # None: any JSON
        *,
        reads: BodyDecoder[Any] | type[msgspec.Struct] | None = None,
        default: bytes = b"",  # stands for an empty body
        request: type[msgspec.Struct]
        | None = None,  # of a body that the handler itself reads; None: any JSON
        query: tuple[str, ...] = (),
        streams: bool = False,  # can also answer with a stream
        stream_type: str = EVENT_STREAM,
        takes_body: bool = True,  # of a method that could
        form: Mapping[str, Any] | None = None,  # fields of a multipart form, in place of a JSON body
        content_type: str = JSON,  # of the answer
        only_reads: bool = False,  # as every GET does: such a request ends when its client leaves
    ) -> None:
        self.request = request
        if only_reads or method_and_path.startswith("GET "):
            handler = _while_present(handler)
        if reads is not None:
            decoder = reads if isinstance(reads, BodyDecoder) else BodyDecoder(reads)
            self.request = decoder.shape
            handler = _with_body(handler, decoder, default)
        method, _, path = method_and_path.partition(" ")
        super().__init__(path, handler, methods=[method])
        self.method = method
        self.response = response
        self.query = query
        self.streams = streams
        self.stream_type = stream_type
        self.takes_body = takes_body
        self.form = form
        self.content_type = content_type


def _while_present(handler: Handler) -> Handler:
    """A client that leaves ends what only reads: hundreds of them would keep the threads busy after an attack."""

    @functools.wraps(handler)
    async def handle_while_present(request: Request, *body: object) -> ASGIApp:
        return await while_present(request, handler(request, *body))

    return handle_while_present


def _with_body(handler: Handler, decoder: BodyDecoder[Any], default: bytes) -> Handler:
    @functools.wraps(handler)
    async def read_and_handle(request: Request) -> ASGIApp:
        return await handler(request, await decoder.read(request, default=default))

    return read_and_handle


PATH = "/openapi.json"

_REFERENCE = "#/components/schemas/{name}"
_PATH_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")
_ERRORS: dict[str, type[msgspec.Struct]] = {
    "/v1/messages": AnthropicErrorBody,
    "/api/": OllamaErrorBody,
    "/v2/": CohereErrorBody,
}  # others: OpenAI's
_WITH_BODY = frozenset({"POST", "PATCH", "PUT"})


class OpenAPIEndpoint:
    """Serves the document, made when it is first asked for."""

    def __init__(self) -> None:
        self._body: bytes | None = None

    def routes(self) -> list[Route]:
        return [Route(PATH, self.show, methods=["GET"])]

    async def show(self, request: Request) -> Response:
        if self._body is None:
            self._body = msgspec.json.encode(openapi_document(request.app.routes))
        return Response(self._body, media_type=JSON)


def openapi_document(routes: Iterable[BaseRoute]) -> dict[str, Any]:
    operations = [route for route in routes if isinstance(route, Operation)]
    schemas, components = _schemas(operations)
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        path = _PATH_PARAMETER.sub(r"{\1}", operation.path)
        paths.setdefault(path, {})[operation.method.lower()] = _described(operation, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Penstock", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"bearer": []}, {"key": []}],
    }


Schemas = Mapping[type[msgspec.Struct], dict[str, Any]]


def _schemas(operations: Sequence[Operation]) -> tuple[Schemas, dict[str, Any]]:
    """Return a reference to each shape, and what the references stand for."""
    shapes: list[type[msgspec.Struct]] = [ErrorBody, *_ERRORS.values()]
    for operation in operations:
        shapes += [
            shape
            for shape in (operation.request, operation.response)
            if shape is not None and shape not in shapes
        ]
    references, components = msgspec.json.schema_components(shapes, ref_template=_REFERENCE)
    return dict(zip(shapes, references, strict=True)), components


def _described(operation: Operation, schemas: Schemas) -> dict[str, Any]:
    name: str = operation.endpoint.__name__
    path_in_id = re.sub(r"[^a-z0-9]+", "_", operation.path.lower()).strip("_")
    path_parameters = [
        {"name": parameter, "in": "path", "required": True, "schema": {"type": "string"}}
        for parameter in _PATH_PARAMETER.findall(operation.path.replace(":path", ""))
    ]
    query = [
        {"name": parameter, "in": "query", "schema": {"type": "string"}} for parameter in operation.query
    ]
    described: dict[str, Any] = {
        "operationId": f"{name}_{path_in_id}_{operation.method.lower()}",
        "summary": name.replace("_", " ").capitalize(),
        "tags": [_tag(operation.path)],
        "parameters": path_parameters + query,
        "responses": _responses(operation, schemas),
    }
    if operation.form is not None:
        described["requestBody"] = {
            "required": True,
            "content": {"multipart/form-data": {"schema": dict(operation.form)}},
        }
    elif operation.method in _WITH_BODY and operation.takes_body:
        schema = schemas[operation.request] if operation.request else {}
        described["requestBody"] = {"required": True, "content": {JSON: {"schema": schema}}}
    return described


def _responses(operation: Operation, schemas: Schemas) -> dict[str, Any]:
    schema = schemas[operation.response] if operation.response else {}
    content: dict[str, Any] = {operation.content_type: {"schema": schema}}
    if operation.streams:
        content[operation.stream_type] = {"schema": {"type": "string"}}
    shapes = (shape for prefix, shape in _ERRORS.items() if operation.path.startswith(prefix))
    error = schemas[next(shapes, ErrorBody)]
    return {
        "200": {"description": "The answer.", "content": content},
        "default": {"description": "A refusal or a failure.", "content": {JSON: {"schema": error}}},
    }


def _tag(path: str) -> str:
    parts = path.strip("/").split("/")
    return parts[1] if parts[0] == "v1" and len(parts) > 1 else parts[0] or "page"
