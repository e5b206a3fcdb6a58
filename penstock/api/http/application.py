"""The Starlette application: request ids, rate-limit headers, counts of requests, a fast path for POST endpoints, and
calls of an endpoint from inside the server. The middleware is plain ASGI, for speed. This module knows no endpoint by
name."""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from penstock.api.http.bodies import PendingBodies
from penstock.api.http.context import (
    ON_DEPARTURE,
    set_principal,
    state_of,
)
from penstock.api.http.errors import (
    ANTHROPIC_OVERLOADED,
    CLIENT_CLOSED_REQUEST,
    Headers,
    error_response_for,
    has_limit_headers,
    internal_error_response_for,
    is_anthropic,
    limit_headers,
    nested_too_deeply,
    on_deep_value,
    on_penstock_error,
    on_reader_gone,
)
from penstock.api.http.parsing import release_body
from penstock.core.errors import NotFound, PenstockError
from penstock.core.identity import Principal
from penstock.gateway.answers.stream import ReaderGone
from penstock.gateway.batches.batch import LineAnswer
from penstock.gateway.gateway import Gateway
from penstock.gateway.metrics.table import Figures
from penstock.gateway.turns import WorkspaceTurns

OTHER = "other"
_OVERLOADED = frozenset({503, ANTHROPIC_OVERLOADED})


class RequestCounts:
    """Counts HTTP requests by route and status, and refusals by status and reason.

    A path counts as the route that it matches, and paths that match none count together: the number of counters does
    not depend on what clients ask for. A refusal is an answer with a status of 4xx, 503 or 529. A request that was
    admitted and then failed counts elsewhere, and so does a client that left.
    """

    def __init__(self, refusals: Counter[tuple[str, str]] | None = None) -> None:
        self._refusals = Counter() if refusals is None else refusals
        self._counts: Counter[tuple[str, int]] = Counter()
        self._fixed: frozenset[str] = frozenset()
        self._templates: tuple[Route, ...] = ()

    def set_routes(self, routes: Iterable[BaseRoute]) -> None:
        http = [route for route in routes if isinstance(route, Route)]
        self._fixed = frozenset(route.path for route in http if "{" not in route.path)
        self._templates = tuple(route for route in http if "{" in route.path)

    def count(self, scope: Scope, status: int) -> None:
        path: str = scope["path"]
        self._counts[path if path in self._fixed else self._template(scope), status] += 1
        if status >= 400 and (status < CLIENT_CLOSED_REQUEST or status in _OVERLOADED):
            self._refusals[str(status), state_of(scope).refusal or OTHER] += 1

    def _template(self, scope: Scope) -> str:
        for route in self._templates:
            if route.matches(scope)[0] is not Match.NONE:
                return route.path_format
        return OTHER

    def figures(self) -> Figures:
        return {"http_requests": {(path, str(status)): n for (path, status), n in self._counts.items()}}


class Application(Starlette):
    """The outermost middleware must answer every exception: Starlette's own handler is left out, because it answers
    in the shape of no API."""

    max_body_bytes = 0  # of requests; set by the code that builds the application, like the next fields
    pending_bodies = PendingBodies(0, 0)
    body_turns = WorkspaceTurns()  # of large bodies that are decoded

    def build_middleware_stack(self) -> ASGIApp:
        app: ASGIApp = ExceptionMiddleware(self.router, handlers=self.exception_handlers)
        app = FastPath(app, self.routes)
        for layer, arguments, options in reversed(self.user_middleware):
            app = layer(app, *arguments, **options)
        return app


async def answer_unknown_path(scope: Scope, receive: Receive, send: Send) -> None:
    """The router's last resort. A WebSocket is refused with a status, as an HTTP request is."""
    if scope["type"] != "websocket":
        raise HTTPException(404)
    error = NotFound(f"There is no WebSocket at {scope['path']}.")
    if "websocket.http.response" in scope.get("extensions", {}):
        await WebSocket(scope, receive, send).send_denial_response(error_response_for(scope, error))
    else:
        await send({"type": "websocket.close", "code": 1008, "reason": error.message})


class FastPath:
    """Calls the endpoint of a POST to a fixed path directly, as for every request for tokens. The router would try
    one pattern after the other, and the layers around the router cost as much again. The rest goes on to `app`."""

    def __init__(self, app: ASGIApp, routes: Sequence[BaseRoute]) -> None:
        self._app = app
        fixed = [route for route in routes if isinstance(route, Route) and not route.param_convertors]
        self._endpoints = posted_endpoints(fixed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        endpoint = self._endpoints.get(scope["path"]) if is_post else None
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive, send)
        try:
            answer = await endpoint(request)
        except PenstockError as error:
            answer = await on_penstock_error(request, error)
        except RecursionError as error:
            answer = await on_deep_value(request, error)
        except ReaderGone as error:
            answer = await on_reader_gone(request, error)
        await answer(scope, receive, send)


Endpoint = Callable[[Request], Awaitable[ASGIApp]]


def posted_endpoints(routes: Sequence[Route]) -> dict[str, Endpoint]:
    """Return the endpoints that take a POST, by path."""
    return {route.path: route.endpoint for route in routes if route.methods and "POST" in route.methods}


async def call_endpoint(
    endpoint: Endpoint, path: str, body: bytes, *, principal: Principal, request_id: str
) -> LineAnswer:
    """Status and body of the answer. Raises the PenstockError that the endpoint raises; cancelling this cancels the
    request."""
    scope: Scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))],
        "state": {},
        # A caller inside the server never disconnects.
        "extensions": {ON_DEPARTURE: {"watch": lambda on_departure: None}},
    }
    set_principal(scope, principal)
    state_of(scope).request_id = request_id
    incoming = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        return incoming.pop()

    status = 500
    parts: list[bytes] = []

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        elif message["type"] == "http.response.body":
            parts.append(message.get("body", b""))

    try:
        response = await endpoint(Request(scope, receive, send))
    except RecursionError as error:
        raise nested_too_deeply() from error
    await response(scope, receive, send)
    return LineAnswer(status, b"".join(parts))


logger = logging.getLogger(__name__)


_OTHER_ROOT = "/openai/"  # Azure's clients say /openai, and Groq's say /openai/v1, where OpenAI's say /v1
_DEPLOYMENTS = "deployments/"
# A model's name may have slashes, too.
_DEPLOYED_PATHS = ("/chat/completions", "/completions", "/embeddings")


def _make_path_plain(scope: Scope) -> None:
    """Remove a slash at the end, and map the path of another provider to OpenAI's path. The model in a path of
    Azure's is recorded."""
    path: str = scope["path"]
    if path.endswith("/") and len(path) > 1:
        path = path.rstrip("/") or "/"
    if path.startswith(_OTHER_ROOT):
        rest = path[len(_OTHER_ROOT) :].removeprefix("v1/")
        if rest.startswith(_DEPLOYMENTS):
            end = next((each for each in _DEPLOYED_PATHS if rest.endswith(each)), "")
            if model := rest[len(_DEPLOYMENTS) : -len(end)] if end else "":
                state_of(scope).deployment = model
                rest = end[1:]
        path = f"/v1/{rest}"
    scope["path"] = path


class RequestIds:
    """Names every request in a header, and turns an unforeseen exception into a logged 500. Paths are made plain.
    With `limits`, every answer to a caller that is known has its rate-limit headers, however early it was refused.
    `counts` counts the statuses of answers."""

    def __init__(
        self, app: ASGIApp, limits: CallerLimits | None = None, counts: RequestCounts | None = None
    ) -> None:
        self._app = app
        self._limits = limits
        self._counts = counts
        self._randomness = ""  # in hexadecimal digits, of which each id takes its part

    def _new_id(self) -> str:
        """12 digits of the time in milliseconds, and 20 random digits. The database then finds place for the rows of
        new requests next to each other: rows with random ids cost twice as much, and more the longer the table is.
        The system is asked for many random digits at a time, which costs as much as asking for those of one id."""
        if not self._randomness:
            self._randomness = secrets.token_hex(10 * 64)
        random, self._randomness = self._randomness[:20], self._randomness[20:]
        return f"{time.time_ns() // 1_000_000:012x}{random}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id, state = self._new_id(), state_of(scope)
        state.request_id = request_id
        path: str = scope["path"]
        if path[-1:] == "/" or path.startswith(_OTHER_ROOT):
            _make_path_plain(scope)
        header_name = b"request-id" if is_anthropic(scope) else b"x-request-id"
        has_started = False

        def send_with_id(message: Message) -> Awaitable[None]:
            nonlocal has_started
            if message["type"] != "http.response.start":
                return send(message)
            has_started = True
            if self._counts is not None:
                self._counts.count(scope, message["status"])
            headers = [*message.get("headers", ()), (header_name, request_id.encode())]
            # Proxies may keep answers to GETs, and know only Authorization of the headers with keys.
            if scope["method"] == "GET" and not any(name == b"cache-control" for name, _ in headers):
                headers.append((b"cache-control", b"no-store"))
            message["headers"] = headers
            if self._limits is None or state.has_sent_limits or has_limit_headers(headers):
                return send(message)
            return _send_with_limits(self._limits, scope, message, send)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            logger.exception("request %s (%s %s) failed", request_id, scope["method"], scope["path"])
            if has_started:
                raise  # the server closes the connection, so that the answer cannot look complete
            await internal_error_response_for(scope)(scope, receive, send_with_id)
        finally:
            release_body(scope)


async def _send_with_limits(limits: CallerLimits, scope: Scope, message: Message, send: Send) -> None:
    message["headers"] += await limits.headers(scope)
    await send(message)


class CallerLimits:
    """The current rate limits of a request's caller, for answers to requests that were not admitted."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def headers(self, scope: Scope) -> Headers:
        """Empty for an unknown caller."""
        state = state_of(scope)
        if state.principal is None:
            return []
        rate_limits = await self._gateway.accounts.peek(state.principal, self._model(state.model))
        return limit_headers(rate_limits, is_anthropic=is_anthropic(scope))

    def _model(self, name: str | None) -> str | None:
        """Return the name under which limits count the model. A name that is not served has no limits:
        they would otherwise be kept for any name."""
        try:
            return None if name is None else self._gateway.catalogue.answering(name).name
        except PenstockError:
            return None
