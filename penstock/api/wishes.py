"""What headers and middleware add to a request, whichever API it came through: who asks, under which id, how
long the answer may take, and whether an earlier one will do."""

from __future__ import annotations

import msgspec
from starlette.requests import HTTPConnection

from penstock.api.context import note_model, principal_of, request_id_of, timeout_s_of
from penstock.core.errors import InvalidRequest
from penstock.gateway.prompts import GenerationRequest
from penstock.gateway.stream import AnswerStream

CACHE_HEADER = "x-penstock-cache"  # asks for seconds, or "off"; answers "hit" or "miss"
IDEMPOTENCY_HEADER = "idempotency-key"
REGION_HEADER = "x-penstock-region"
MAX_REGION_LENGTH = 64


def signed_wish(connection: HTTPConnection, wish: GenerationRequest) -> GenerationRequest:
    headers = connection.headers
    note_model(connection, wish.model)
    return msgspec.structs.replace(
        wish,
        principal=principal_of(connection),
        request_id=request_id_of(connection),
        idempotency_key=headers.get(IDEMPOTENCY_HEADER),
        cache_response_s=_cache_seconds(headers.get(CACHE_HEADER)),
        region=_region(headers.get(REGION_HEADER, "")),
        timeout_s=timeout_s_of(connection),
    )


def cache_headers(answer: AnswerStream) -> list[tuple[bytes, bytes]]:
    """Empty for a request that did not ask the response cache."""
    status = answer.cache_status
    return [] if status is None else [(CACHE_HEADER.encode(), status.encode())]


def _region(text: str) -> str:
    if len(text) > MAX_REGION_LENGTH or not (text.isascii() and text.isprintable()):
        raise InvalidRequest(f"The header {REGION_HEADER} must be the name of a region.", param=REGION_HEADER)
    return text.strip()


def _cache_seconds(text: str | None) -> float | None:
    if text is None:
        return None
    if text.strip().lower() == "off":
        return 0.0
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise InvalidRequest(
            f"The header {CACHE_HEADER} must be a number of seconds, or 'off', not {text[:40]!r}.",
            param=CACHE_HEADER,
        )
    return seconds
