"""Errors as clients of the OpenAI API expect them. Nothing of an unforeseen exception reaches the client."""

from __future__ import annotations

import math

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from penstock.core.errors import NotFound, PenstockError

DEFAULT_RETRY_AFTER_S = 1.0
CLIENT_CLOSED_REQUEST = 499


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


def error_body(error: PenstockError) -> bytes:
    message = f"{error.message} {error.hint}" if error.hint else error.message
    return msgspec.json.encode(ErrorBody(ErrorDetail(message, error.type, error.param, error.code)))


def error_response(error: PenstockError) -> Response:
    headers = {}
    if error.status in (429, 503):
        wait_s = DEFAULT_RETRY_AFTER_S if error.retry_after_s is None else error.retry_after_s
        headers["retry-after"] = str(max(1, math.ceil(wait_s)))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(error_body(error), error.status, headers, media_type="application/json")


def internal_error_response() -> Response:
    return error_response(PenstockError("The server met an error that it did not foresee."))


async def on_penstock_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, PenstockError)
    return error_response(error)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """The framework's own refusals: an unknown path or a wrong method."""
    assert isinstance(error, HTTPException)
    method, path = request.method, request.url.path
    if error.status_code == 404:
        return error_response(NotFound(f"There is nothing at {path}."))
    message = f"{path} does not take {method}." if error.status_code == 405 else error.detail
    detail = ErrorDetail(message, "invalid_request_error", None, None)
    body = msgspec.json.encode(ErrorBody(detail))
    return Response(body, error.status_code, error.headers, media_type="application/json")


async def on_reader_gone(request: Request, error: Exception) -> Response:
    """Nobody reads this; it tells the framework that the request is over."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)
