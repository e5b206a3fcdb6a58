"""One log line and one span for every request. Neither holds a prompt, a key or a query string.

Installed only where an operator asked for lines or traces; without it a request pays nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from time import monotonic
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.api.http.context import state_of
from penstock.core.identity import Principal
from penstock.gateway.telemetry import RequestRecord, Tracing, current_record, parse_traceparent

access_logger = logging.getLogger("penstock.access")

# Asked every few seconds by probes; worth a line only when the answer is not 200.
QUIET_PATHS = frozenset({"/health", "/ready", "/metrics"})


class RequestLog:
    """Opens a record when a request arrives, and writes it down when the answer is out."""

    def __init__(self, tracing: Tracing, *, writes_lines: bool, keeps_prompts: bool = False) -> None:
        self._tracing = tracing
        self._writes_lines = writes_lines
        self._keeps_prompts = keeps_prompts

    def begin(
        self, request_id: str, method: str, path: str, headers: Iterable[tuple[bytes, bytes]]
    ) -> RequestRecord:
        """Open a record, and make it the current record of the running task."""
        header = next((value for name, value in headers if name == b"traceparent"), None)
        parent = parse_traceparent(header.decode("latin-1")) if header is not None else None
        record = RequestRecord(request_id, parent, self._keeps_prompts)
        current_record.set(record)
        attributes = {"http.request.method": method, "url.path": path}
        self._tracing.begin(record, f"{method} {path}", attributes)
        return record

    def end(
        self, record: RequestRecord, method: str, path: str, status: int, principal: Principal | None
    ) -> None:
        self._tracing.end(record, status)
        if not self._writes_lines or (path in QUIET_PATHS and status < 400):
            return
        duration_ms = (monotonic() - record.began_s) * 1e3
        fields: dict[str, Any] = {
            "request_id": record.request_id,
            "method": method,
            "path": path,
            "status": status,
            "duration_ms": round(duration_ms, 3),
        }
        if principal is not None:
            fields |= {"workspace_id": principal.workspace_id, "key_id": principal.key_id}
        if record.parent is not None:
            fields["trace_id"] = record.parent.trace_id
        fields |= _answer_fields(record)
        if record.prompts:
            fields["prompts"] = record.prompts
        access_logger.info(
            "%s %s %d in %.1f ms (%s)",
            method,
            path,
            status,
            duration_ms,
            record.request_id,
            extra={"fields": fields},
        )


def _answer_fields(record: RequestRecord) -> dict[str, Any]:
    if record.own_account is None:
        return {}
    claim, outcome = record.own_account
    fields: dict[str, Any] = {
        "model": claim.model,
        "endpoint": claim.endpoint,
        "tier": claim.tier.value,
        "outcome": outcome.status,
        "prompt_tokens": outcome.usage.prompt_tokens,
        "completion_tokens": outcome.usage.completion_tokens,
        "cached_tokens": outcome.usage.cached_tokens,
    }
    if outcome.first_token_s is not None:
        fields["first_token_ms"] = round(outcome.first_token_s * 1e3, 3)
    if outcome.queue_s is not None:
        fields["queue_ms"] = round(outcome.queue_s * 1e3, 3)
    if outcome.error_code is not None:
        fields["error_code"] = outcome.error_code
    return fields


class AccessLog:
    """Middleware for HTTP. A WebSocket carries many requests, so its endpoint writes their lines itself."""

    def __init__(self, app: ASGIApp, request_log: RequestLog) -> None:
        self._app = app
        self._request_log = request_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        method, path, state = scope["method"], scope["path"], state_of(scope)
        record = self._request_log.begin(str(state.request_id), method, path, scope["headers"])
        status = 500  # unless an answer says otherwise

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            self._request_log.end(record, method, path, status, state.principal)
