"""Parses questions about usage and writes answers: times in words, groups by name, dollars. The API and the command
line share it."""

from __future__ import annotations

import base64
import binascii
import difflib
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from penstock.core.errors import InvalidRequest
from penstock.gateway.ledger.prices import format_dollars
from penstock.gateway.ledger.rows import SECONDS_PER_DAY
from penstock.gateway.ledger.usage_store import GROUP_NAMES, GroupName, UsageQuery, UsageTotal

DEFAULT_DAYS = 30
MAX_DAY = 10**7  # beyond the calendar


class RequestCounts(msgspec.Struct, frozen=True, kw_only=True):
    total: int
    completed: int
    cancelled: int
    failed: int
    interrupted: int
    cached: int  # answered without an engine; each is also in one of the above


class UsageEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one group used. Only the fields that were grouped by are there."""

    day: str | None = None  # such as 2026-11-15
    organization: str | None = None
    workspace: str | None = None
    key: str | None = None
    model: str | None = None
    endpoint: str | None = None
    tier: str | None = None
    status: str | None = None
    user: str | None = None
    requests: RequestCounts
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cache_read_tokens: int
    cache_write_5m_tokens: int
    cache_write_1h_tokens: int
    reasoning_tokens: int
    cost_usd: str  # exact


class UsagePage(msgspec.Struct, frozen=True, kw_only=True):
    """One page of usage. A client sends `next_page` back as `page` for the next page; None at the end."""

    object: str = "usage.list"
    start: int
    end: int | None
    group_by: tuple[GroupName, ...]
    data: list[UsageEntry]
    has_more: bool
    next_page: str | None


def usage_page(query: UsageQuery, totals: Sequence[UsageTotal]) -> UsagePage:
    """Build a page. `totals` has one entry more than the limit of `query` if there is a next page."""
    shown, has_more = totals[: query.limit], len(totals) > query.limit
    return UsagePage(
        start=int(query.start or 0),
        end=None if query.end is None else int(query.end),
        group_by=query.group_by,
        data=[_entry(total) for total in shown],
        has_more=has_more,
        next_page=_cursor(shown[-1]) if has_more else None,
    )


def parse_groups(text: str) -> tuple[GroupName, ...]:
    """Parse group names with commas between them. No names add everything up."""
    groups: list[GroupName] = []
    for word in filter(None, (word.strip() for word in text.split(","))):
        name = next((name for name in GROUP_NAMES if name == word), None)
        if name is None:
            close = difflib.get_close_matches(word, GROUP_NAMES, n=1)
            raise InvalidRequest(
                f"Usage cannot be grouped by {word[:40]!r}.",
                param="group_by",
                hint=f"Did you mean {close[0]!r}?" if close else f"There are: {', '.join(GROUP_NAMES)}.",
            )
        if name not in groups:
            groups.append(name)
    return tuple(groups)


def parse_moment(text: str, param: str) -> float:
    """Unix seconds from a day (2026-11-15, midnight UTC), an RFC 3339 time, or Unix seconds."""
    try:
        if text.isascii() and text.isdecimal() and len(text) <= 11:
            return float(text)
        moment = datetime.fromisoformat(text)
        return moment.replace(tzinfo=moment.tzinfo or UTC).timestamp()
    except (ValueError, OverflowError):
        raise InvalidRequest(
            f"{param} must be a day such as 2026-11-15, a time such as 2026-11-15T08:30:00Z, or Unix seconds, "
            f"not {text[:40]!r}.",
            param=param,
        ) from None


def default_start(now: float) -> float:
    return now // SECONDS_PER_DAY * SECONDS_PER_DAY - DEFAULT_DAYS * SECONDS_PER_DAY


def parse_page(text: str, groups: Sequence[GroupName]) -> tuple[str | int, ...]:
    """Parse the position at which the page before ended. Raises InvalidRequest for anything that `next_page` did not
    say."""
    try:
        values = msgspec.json.decode(base64.urlsafe_b64decode(text), type=tuple[str | int, ...])
        expected = tuple(int if group == "day" else str for group in groups)
        if not values or tuple(map(type, values)) != expected:
            raise ValueError
        if any(abs(value) > MAX_DAY if isinstance(value, int) else "\0" in value for value in values):
            raise ValueError
    except (ValueError, binascii.Error, msgspec.DecodeError):
        raise InvalidRequest("page is not what an earlier answer called next_page.", param="page") from None
    return values


def shown_day(day: int) -> str:
    return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(days=day)).date().isoformat()


def _entry(total: UsageTotal) -> UsageEntry:
    fields: dict[str, Any] = {str(name): value for name, value in total.group.items()}
    if "day" in fields:
        fields["day"] = shown_day(fields["day"])
    fields |= total.tokens
    return UsageEntry(
        **fields,
        requests=RequestCounts(total=total.requests, cached=total.cached_answers, **total.by_status),
        cost_usd=format_dollars(total.cost_picodollars),
    )


def _cursor(total: UsageTotal) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode(tuple(total.group.values()))).decode()
