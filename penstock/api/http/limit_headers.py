"""Rate-limit and retry headers, in the shape of the API that was called. Knows no request and no limiter."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import TypeAlias

from penstock.core.errors import PenstockError, RateLimited
from penstock.core.identity import LimitState, RateLimits

Headers: TypeAlias = list[tuple[bytes, bytes]]

DEFAULT_RETRY_AFTER_S = 1.0
_NO_LIMITS = RateLimits()
_LIMIT_HEADERS = (b"x-ratelimit-", b"anthropic-ratelimit-")


def limit_headers(rate_limits: RateLimits, *, is_anthropic: bool) -> Headers:
    """Empty for a caller without limits."""
    if rate_limits == _NO_LIMITS:
        return []
    return _anthropic_headers(rate_limits, time.time()) if is_anthropic else _openai_headers(rate_limits)


def has_limit_headers(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Say whether an answer already has rate limit headers."""
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


def _openai_names(kind: bytes) -> tuple[bytes, bytes, bytes]:
    return b"x-ratelimit-limit-" + kind, b"x-ratelimit-remaining-" + kind, b"x-ratelimit-reset-" + kind


_REQUESTS, _TOKENS = _openai_names(b"requests"), _openai_names(b"tokens")


def _openai_headers(rate_limits: RateLimits) -> Headers:
    headers: Headers = []
    for (limit, remaining, reset), state in (
        (_REQUESTS, rate_limits.requests),
        (_TOKENS, rate_limits.tokens),
    ):
        if state is not None:
            headers += (
                (limit, b"%d" % state.limit),
                (remaining, b"%d" % state.remaining),
                (reset, duration(state.reset_s).encode()),
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
                (name + b"-reset", _moment(state, wall_s)),
            )
    return headers


def _moment(state: LimitState, wall_s: float) -> bytes:
    """Return the time when the limit is full again, rounded up."""
    return timestamp(math.ceil(wall_s + state.reset_s)).encode()


def timestamp(unix_s: float) -> str:
    """RFC 3339, in UTC and whole seconds."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
