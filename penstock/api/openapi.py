"""An OpenAPI document made from the routes that an application has and the shapes that its endpoints decode.

`openapi_operations` says what each route takes and gives; a route that is not described there still appears, with
bodies of any shape.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from penstock.api.errors import AnthropicErrorBody, ErrorBody
from penstock.version import __version__

PATH = "/openapi.json"
JSON = "application/json"
EVENT_STREAM = "text/event-stream"

_REFERENCE = "#/components/schemas/{name}"
_PATH_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")
_WITH_BODY = frozenset({"POST", "PATCH", "PUT"})


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """What one method of one path takes and gives. None as a shape stands for any JSON."""

    request: type[msgspec.Struct] | None = None
    response: type[msgspec.Struct] | None = None
    query: tuple[str, ...] = ()
    streams: bool = False  # besides a whole body it can answer with server-sent events
    takes_body: bool = True  # of a method that could
    form: Mapping[str, Any] | None = None  # fields of a multipart form, in place of a JSON body
    content_type: str = JSON  # of the answer


class OpenAPIEndpoint:
    """Serves the document, made when it is first asked for."""

    def __init__(self, operations: Mapping[str, Operation]) -> None:
        self._operations = operations
        self._body: bytes | None = None

    def routes(self) -> list[Route]:
        return [Route(PATH, self.show, methods=["GET"])]

    async def show(self, request: Request) -> Response:
        if self._body is None:
            document = openapi_document(request.app.routes, self._operations)
            self._body = msgspec.json.encode(document)
        return Response(self._body, media_type=JSON)


def openapi_document(routes: Iterable[BaseRoute], operations: Mapping[str, Operation]) -> dict[str, Any]:
    """`operations` are keyed by method and path: `GET /v1/models`."""
    described = [
        (method, route, operations.get(f"{method} {route.path}", Operation()))
        for route in routes
        if isinstance(route, Route) and route.path != PATH
        for method in sorted((route.methods or set()) - {"HEAD"})
    ]
    schemas, components = _schemas([operation for _, _, operation in described])
    paths: dict[str, dict[str, Any]] = {}
    for method, route, operation in described:
        path = _PATH_PARAMETER.sub(r"{\1}", route.path)
        paths.setdefault(path, {})[method.lower()] = _operation(method, route, operation, schemas)
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
    """A reference to each shape, and what the references stand for."""
    shapes: list[type[msgspec.Struct]] = [ErrorBody, AnthropicErrorBody]
    for operation in operations:
        shapes += [
            shape
            for shape in (operation.request, operation.response)
            if shape is not None and shape not in shapes
        ]
    references, components = msgspec.json.schema_components(shapes, ref_template=_REFERENCE)
    return dict(zip(shapes, references, strict=True)), components


def _operation(method: str, route: Route, operation: Operation, schemas: Schemas) -> dict[str, Any]:
    name: str = route.endpoint.__name__
    path_parameters = [
        {"name": parameter, "in": "path", "required": True, "schema": {"type": "string"}}
        for parameter in _PATH_PARAMETER.findall(route.path.replace(":path", ""))
    ]
    query = [
        {"name": parameter, "in": "query", "schema": {"type": "string"}} for parameter in operation.query
    ]
    described: dict[str, Any] = {
        "operationId": f"{name}_{re.sub(r'[^a-z0-9]+', '_', route.path.lower()).strip('_')}_{method.lower()}",
        "summary": name.replace("_", " ").capitalize(),
        "tags": [_tag(route.path)],
        "parameters": path_parameters + query,
        "responses": _responses(route, operation, schemas),
    }
    if operation.form is not None:
        described["requestBody"] = {
            "required": True,
            "content": {"multipart/form-data": {"schema": dict(operation.form)}},
        }
    elif method in _WITH_BODY and operation.takes_body:
        schema = schemas[operation.request] if operation.request else {}
        described["requestBody"] = {"required": True, "content": {JSON: {"schema": schema}}}
    return described


def _responses(route: Route, operation: Operation, schemas: Schemas) -> dict[str, Any]:
    schema = schemas[operation.response] if operation.response else {}
    content: dict[str, Any] = {operation.content_type: {"schema": schema}}
    if operation.streams:
        content[EVENT_STREAM] = {"schema": {"type": "string"}}
    is_anthropic = route.path.startswith("/v1/messages")
    error = schemas[AnthropicErrorBody if is_anthropic else ErrorBody]
    return {
        "200": {"description": "The answer.", "content": content},
        "default": {"description": "A refusal or a failure.", "content": {JSON: {"schema": error}}},
    }


def _tag(path: str) -> str:
    parts = path.strip("/").split("/")
    return parts[1] if parts[0] == "v1" and len(parts) > 1 else parts[0] or "page"
