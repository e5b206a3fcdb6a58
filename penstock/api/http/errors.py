"""Errors, rate-limit and retry headers, in the shape of the API that was called. Nothing of an unforeseen exception
reaches the client.

An Anthropic route answers in Anthropic's shape whatever goes wrong: an unknown path below it, a wrong method, a
body that is too large, a missing key. So does Ollama's API, below /api, and Cohere's, below /v2. Every other route
answers in OpenAI's.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import TypeAlias, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Scope

from penstock.api.http.context import state_of
from penstock.core.errors import (
    ConfigError,
    ContextLengthExceeded,
    InvalidRequest,
    NotFound,
    Overloaded,
    PenstockError,
    RateLimited,
    ThreadsUnsupported,
)
from penstock.core.identity import RateLimits

logger = logging.getLogger(__name__)

Headers: TypeAlias = list[tuple[bytes, bytes]]

DEFAULT_RETRY_AFTER_S = 1.0
_FOR_OPERATORS = "/admin/"  # below which errors may name files and addresses of the server
_NO_LIMITS = RateLimits()
_LIMIT_HEADERS = (b"x-ratelimit-", b"anthropic-ratelimit-")


def limit_headers(rate_limits: RateLimits, *, is_anthropic: bool) -> Headers:
    """Empty for a caller without limits."""
    if rate_limits == _NO_LIMITS:
        return []
    return _anthropic_headers(rate_limits, time.time()) if is_anthropic else _openai_headers(rate_limits)


def has_limit_headers(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Return whether an answer already has rate limit headers."""
    return any(name.startswith(_LIMIT_HEADERS) for name, _ in headers)


def retry_headers(error: PenstockError) -> Headers:
    """Return headers that say when to retry, or that a retry cannot succeed. Both SDKs prefer the milliseconds."""
    if isinstance(error, RateLimited) and not error.waiting_helps:
        never = [(b"x-should-retry", b"false")]
        return never if error.retry_after_s is None else [*never, *_retry_after(error.retry_after_s)]
    if error.status not in (429, 503):
        return []
    return _retry_after(DEFAULT_RETRY_AFTER_S if error.retry_after_s is None else error.retry_after_s)


def duration(seconds: float) -> str:
    """As OpenAI writes it: 20ms, 1.5s, 6m0s, 1h0m12s."""
    milliseconds = math.ceil(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, milliseconds = divmod(milliseconds, 60_000)
    text = f"{milliseconds / 1000:g}s"
    if not minutes:
        return text
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{text}" if hours else f"{minutes}m{text}"


def _retry_after(wait_s: float) -> Headers:
    return [
        (b"retry-after", b"%d" % max(1, math.ceil(wait_s))),
        (b"retry-after-ms", b"%d" % max(1, math.ceil(wait_s * 1000))),
    ]


def _openai_headers(rate_limits: RateLimits) -> Headers:
    headers: Headers = []
    for kind, state in ((b"requests", rate_limits.requests), (b"tokens", rate_limits.tokens)):
        if state is not None:
            headers += (
                (b"x-ratelimit-limit-" + kind, b"%d" % state.limit),
                (b"x-ratelimit-remaining-" + kind, b"%d" % state.remaining),
                (b"x-ratelimit-reset-" + kind, duration(state.reset_s).encode()),
            )
    return headers


def _anthropic_headers(rate_limits: RateLimits, wall_s: float) -> Headers:
    headers: Headers = []
    for kind, state in (
        (b"requests", rate_limits.requests),
        (b"tokens", rate_limits.tokens),
        (b"input-tokens", rate_limits.input_tokens),
        (b"output-tokens", rate_limits.output_tokens),
    ):
        if state is not None:
            name = b"anthropic-ratelimit-" + kind
            headers += (
                (name + b"-limit", b"%d" % state.limit),
                (name + b"-remaining", b"%d" % state.remaining),
                # The time when the limit is full again, rounded up.
                (name + b"-reset", timestamp(math.ceil(wall_s + state.reset_s)).encode()),
            )
    return headers


def timestamp(unix_s: float) -> str:
    """RFC 3339, in UTC and whole seconds."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


CLIENT_CLOSED_REQUEST = 499
ANTHROPIC_OVERLOADED = 529

_MESSAGES_PATH = "/v1/messages"
_OLLAMA_PATHS = "/api/"
_COHERE_PATHS = "/v2/"
# Both APIs have these paths; Anthropic's clients always send their version header.
_SHARED_PATHS = ("/v1/models", "/v1/files")  # in which the headers tell the two APIs apart
_ANTHROPIC_VERSION = b"anthropic-version"

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    ANTHROPIC_OVERLOADED: "overloaded_error",
}

_NO_ASSISTANTS = "The Assistants API is not served. /v1/responses and /v1/conversations do the same."
_NO_TRANSCRIPTS = (
    "Speech is not transcribed: models with an encoder and a decoder, such as Whisper, need cross-attention, which "
    "engines do not have."
)
_OTHER_SERVERS = "That is an API of another server. Use /v1/completions or /v1/chat/completions."
_NOT_SERVED = {  # by the beginning of the path; the first that fits
    "/v1/assistants": _NO_ASSISTANTS,
    "/v1/threads": _NO_ASSISTANTS,
    "/v1/audio/transcriptions": _NO_TRANSCRIPTS,
    "/v1/audio/translations": _NO_TRANSCRIPTS,
    "/v1/audio": "No model here hears or speaks.",
    "/v1/complete": "Anthropic's text completions are not served. Use /v1/messages.",
    "/v1/containers": "No code is run here. Give the model a tool that your program runs.",
    "/v1/fine_tuning": "Models are not trained here. LoRA adapters can be served.",
    "/v1/images": "No model here makes images.",
    "/v1/realtime": "The Realtime API is not served. /v1/responses and /v1/stream take WebSockets with text.",
    "/v1/vector_stores": "There are no vector stores. /v1/embeddings and /v1/rerank serve a store of your own.",
    "/v1/videos": "No model here makes videos.",
    "/v1beta": "Gemini's API is not served. Use /v1/chat/completions.",
    "/apply-template": "Use /tokenize, which renders chats too.",
    "/completion": _OTHER_SERVERS,
    "/generate": _OTHER_SERVERS,
    "/generate_stream": _OTHER_SERVERS,
    "/infill": "Use /v1/completions with a suffix.",
    "/invocations": _OTHER_SERVERS,
    "/ping": "Use /health, or /ready.",
}

AnswerT = TypeVar("AnswerT")
Endpoint = Callable[[Request], Awaitable[AnswerT]]


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


class AnthropicErrorFacts(msgspec.Struct, frozen=True):
    """The part of an error that Anthropic's clients handle automatically."""

    error_code: str


class AnthropicErrorDetail(msgspec.Struct, frozen=True, omit_defaults=True):
    type: str
    message: str
    details: AnthropicErrorFacts | None = None


class AnthropicErrorBody(msgspec.Struct, frozen=True):
    error: AnthropicErrorDetail
    request_id: str | None
    type: str = "error"


class OllamaErrorBody(msgspec.Struct, frozen=True):
    error: str


class CohereErrorBody(msgspec.Struct, frozen=True):
    id: str | None
    message: str


def is_cohere(scope: Scope) -> bool:
    """Return whether a request was made to Cohere's API."""
    path: str = scope["path"]
    return path.startswith(_COHERE_PATHS)


def is_ollama(scope: Scope) -> bool:
    """Return whether a request was made to Ollama's API."""
    path: str = scope["path"]
    return path.startswith(_OLLAMA_PATHS)


def is_anthropic(scope: Scope) -> bool:
    """Return whether a request was made to the Anthropic API."""
    path: str = scope["path"]
    if path.startswith(_MESSAGES_PATH):
        return path[len(_MESSAGES_PATH) :][:1] in ("", "/")
    if path.startswith(_SHARED_PATHS):
        return _names_anthropic_version(scope)
    return False


def _names_anthropic_version(scope: Scope) -> bool:
    return any(name == _ANTHROPIC_VERSION for name, _ in scope["headers"])


def error_response_for(scope: Scope, error: PenstockError, *, is_unknown_path: bool = False) -> Response:
    """Return the answer to a request that failed before its answer began. If both APIs have the path, a header
    decides."""
    state_of(scope).refusal = error.code
    for_anthropic = is_anthropic(scope) or (is_unknown_path and _names_anthropic_version(scope))
    headers = _error_headers(error, for_anthropic=for_anthropic)
    if for_anthropic:
        body = anthropic_error_body(error, state_of(scope).request_id)
        return Response(body, anthropic_status(error), headers, media_type="application/json")
    if is_cohere(scope):
        body = msgspec.json.encode(CohereErrorBody(state_of(scope).request_id, sentence(error)))
    else:
        body = ollama_error_body(error) if is_ollama(scope) else error_body(error)
    return Response(body, error.status, headers, media_type="application/json")


def error_response(error: PenstockError) -> Response:
    """For routes that are not Anthropic's."""
    return Response(
        error_body(error),
        error.status,
        _error_headers(error, for_anthropic=False),
        media_type="application/json",
    )


def internal_error_response_for(scope: Scope) -> Response:
    return error_response_for(scope, PenstockError("The server met an error that it did not foresee."))


def error_body(error: PenstockError) -> bytes:
    detail = ErrorDetail(sentence(error), error.type, error.param, error.code)
    return msgspec.json.encode(ErrorBody(detail))


def ollama_error_body(error: PenstockError) -> bytes:
    return msgspec.json.encode(OllamaErrorBody(sentence(error)))


def error_event(error: PenstockError) -> bytes:
    """Return the event that ends an OpenAI stream early."""
    return b"data: " + error_body(error) + b"\n\n"


def anthropic_error(error: PenstockError) -> AnthropicErrorDetail:
    details = AnthropicErrorFacts(error.code) if isinstance(error, ThreadsUnsupported) else None
    message = _anthropic_too_long(error) if isinstance(error, ContextLengthExceeded) else sentence(error)
    return AnthropicErrorDetail(_anthropic_type(anthropic_status(error)), message, details)


def _anthropic_too_long(error: ContextLengthExceeded) -> str:
    """Return Anthropic's own sentence: clients parse the numbers in it, and shorten the prompt."""
    size = error.overflow
    if size is not None and size.prompt >= size.context:
        # A prompt that fills the context to the last token leaves no room for an answer.
        maximum = size.context - (size.prompt == size.context)
        return f"prompt is too long: {size.prompt} tokens > {maximum} maximum"
    if size is not None and size.answer is not None:
        return (
            f"input length and `max_tokens` exceed context limit: {size.prompt} + {size.answer} > {size.context}, "
            "decrease input length or `max_tokens` and try again"
        )
    return f"prompt is too long: {sentence(error)}"


def anthropic_error_body(error: PenstockError, request_id: str | None) -> bytes:
    return msgspec.json.encode(AnthropicErrorBody(anthropic_error(error), request_id))


def anthropic_error_event(error: PenstockError, request_id: str | None) -> bytes:
    """Return the event that ends an Anthropic stream early."""
    return b"event: error\ndata: " + anthropic_error_body(error, request_id) + b"\n\n"


def anthropic_status(error: PenstockError) -> int:
    return ANTHROPIC_OVERLOADED if isinstance(error, Overloaded) else error.status


def sentence(error: PenstockError) -> str:
    """Return the text for a person: the message, and the hint if there is one."""
    return f"{error.message} {error.hint}" if error.hint else error.message


def named_params(endpoint: Endpoint[AnswerT], names: Mapping[str, str]) -> Endpoint[AnswerT]:
    """Return the endpoint of an API that has other names than the gateway for some parameters: errors use the API's
    names."""

    async def named(request: Request) -> AnswerT:
        try:
            return await endpoint(request)
        except PenstockError as error:
            if (name := names.get(error.param or "")) is None:
                raise
            raise error.with_param(name) from error

    return named


async def on_penstock_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, PenstockError)
    if isinstance(error, ConfigError) and not request.scope["path"].startswith(_FOR_OPERATORS):
        logger.error(
            "request %s met a wrong setting: %s", state_of(request.scope).request_id, sentence(error)
        )
        error = PenstockError("A setting of this server is wrong; the log says which.")
    return error_response_for(request.scope, error)


async def on_deep_value(request: Request, error: Exception) -> Response:
    return error_response_for(request.scope, nested_too_deeply())


def nested_too_deeply() -> InvalidRequest:
    """Return the error for a value that could be decoded, but is nested more deeply than later steps can follow."""
    return InvalidRequest("The request is nested too deeply.")


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Answer the framework's own errors: an unknown path or a wrong method."""
    assert isinstance(error, HTTPException)
    method, path = request.method, request.url.path
    if error.status_code == 404:
        error = NotFound(f"There is nothing at {path}.", hint=_hint(request))
        return error_response_for(request.scope, error, is_unknown_path=True)
    message = f"{path} does not take {method}." if error.status_code == 405 else error.detail
    code = "method_not_allowed" if error.status_code == 405 else "invalid_request_error"
    state_of(request.scope).refusal = code
    body: msgspec.Struct
    if is_anthropic(request.scope):
        detail = AnthropicErrorDetail(_anthropic_type(error.status_code), message)
        body = AnthropicErrorBody(detail, state_of(request.scope).request_id)
    elif is_ollama(request.scope):
        body = OllamaErrorBody(message)
    elif is_cohere(request.scope):
        body = CohereErrorBody(state_of(request.scope).request_id, message)
    else:
        body = ErrorBody(ErrorDetail(message, "invalid_request_error", None, None))
    content = msgspec.json.encode(body)
    return Response(content, error.status_code, error.headers, media_type="application/json")


async def on_reader_gone(request: Request, error: Exception) -> Response:
    """Tell the framework that the request is over. The client is gone, and does not read this response."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)


def _hint(request: Request) -> str | None:
    """Return why a provider's path is not served here, or the path that was probably meant: clients differ in whether
    a base URL ends with /v1."""
    path = request.scope["path"]
    for start, reason in _NOT_SERVED.items():
        if path == start or path.startswith(f"{start}/"):
            return reason
    meant = path.removeprefix("/v1") if path.startswith("/v1/v1/") else f"/v1{path}"
    for route in request.app.routes:
        match, _ = route.matches({**request.scope, "path": meant})
        if match is Match.FULL:
            return f"Did you mean {meant}? OpenAI's clients want a base URL that ends with /v1, Anthropic's without."
    return None


def _anthropic_type(status: int) -> str:
    if status in _ANTHROPIC_TYPES:
        return _ANTHROPIC_TYPES[status]
    return "invalid_request_error" if status < 500 else "api_error"


def _error_headers(error: PenstockError, *, for_anthropic: bool) -> Mapping[str, str]:
    headers = retry_headers(error)
    if error.rate_limits is not None:
        headers += limit_headers(error.rate_limits, is_anthropic=for_anthropic)
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if error.status == 415:
        headers.append((b"accept-encoding", b"gzip, deflate"))
    return {name.decode(): value.decode() for name, value in headers}
