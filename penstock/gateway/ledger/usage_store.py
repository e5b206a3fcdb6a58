"""The usage table: rows go in once, totals come out.

Reads and writes are plain functions of a database connection. The API and the command line share the parsing of
questions (times in words, groups by name) and the shape of answers (dollars).
"""

from __future__ import annotations

import base64
import binascii
import difflib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, TypeAlias, get_args

import msgspec
import sqlalchemy as sa
from sqlalchemy import Connection

from penstock.core.errors import InvalidRequest
from penstock.gateway.ledger.journal import SECONDS_PER_DAY, RowStatus, UsageRow
from penstock.gateway.ledger.prices import PICODOLLARS_PER_MICRODOLLAR, format_dollars
from penstock.gateway.store.database import insert_into
from penstock.gateway.store.tables import usage, usage_spend

GroupName: TypeAlias = Literal[
    "day", "organization", "workspace", "key", "model", "endpoint", "tier", "status", "user"
]
GROUP_NAMES: tuple[GroupName, ...] = get_args(GroupName)
STATUSES: tuple[RowStatus, ...] = get_args(RowStatus)
TOKEN_COLUMNS = (
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "cache_read_tokens",
    "cache_write_5m_tokens",
    "cache_write_1h_tokens",
    "reasoning_tokens",
)

_SUMMED = (*TOKEN_COLUMNS, "cost_picodollars")
_CUT_OFF: tuple[RowStatus, ...] = ("cancelled", "failed")

# (day, workspace, key, model, picodollars)
SpendRecord: TypeAlias = tuple[int, str, str, str, int]

_GROUP_COLUMNS: Mapping[GroupName, sa.ColumnElement[Any]] = {
    "day": usage.c.day,
    "organization": usage.c.organization_id,
    "workspace": usage.c.workspace_id,
    "key": usage.c.key_id,
    "model": usage.c.model,
    "endpoint": usage.c.endpoint,
    "tier": usage.c.tier,
    "status": usage.c.status,
    "user": sa.func.coalesce(usage.c.user, ""),
}


class UsageQuery(msgspec.Struct, frozen=True, kw_only=True):
    """A query for sums of usage rows. `after` is the last group of the page before."""

    group_by: tuple[GroupName, ...] = ("day",)
    start: float | None = None  # Unix seconds, included
    end: float | None = None  # excluded
    workspace_id: str | None = None  # None: of all workspaces
    key_id: str | None = None
    model: str | None = None
    endpoint: str | None = None
    after: tuple[str | int, ...] | None = None
    limit: int = 100


class UsageTotal(msgspec.Struct, frozen=True, kw_only=True):
    """The usage of one group."""

    group: dict[GroupName, str | int]  # `day` counts days since the epoch
    requests: int
    by_status: dict[RowStatus, int]
    cached_answers: int
    tokens: dict[str, int]
    cost_picodollars: int


def insert_rows(connection: Connection, rows: Sequence[UsageRow]) -> int:
    """Write the rows that are not there yet, and return how many those were. A batch runs an interrupted line again
    under the same id. The figures of the later attempt are added to the figures of earlier ones, until an attempt is
    completed. The start times tell a later attempt from an earlier row that is written once more."""
    return sum(_insert_once(connection, group) for group in _groups(rows))


_COLUMNS = (*UsageRow.__struct_fields__, "day")


def _insert_once(connection: Connection, rows: Sequence[UsageRow]) -> int:
    """Write rows, of which no two belong to the same request. Nearly always none of them is there yet: then they go
    in as they are, which costs a tenth of a statement that looks."""
    try:
        with connection.begin_nested():
            connection.exec_driver_sql(
                _plain_insert(connection), [(*msgspec.structs.astuple(row), row.day) for row in rows]
            )
    except (sa.exc.DataError, sa.exc.IntegrityError):
        written = _insert_unless_there(connection, rows)
        _add_spend(connection, rows, written)
        return len(written)
    _add_spend(connection, rows, None)
    return len(rows)


def _plain_insert(connection: Connection) -> str:
    quote = connection.dialect.identifier_preparer.quote
    mark = "?" if connection.dialect.paramstyle == "qmark" else "%s"
    names = ", ".join(map(quote, _COLUMNS))
    return f"INSERT INTO {quote(usage.name)} ({names}) VALUES ({', '.join([mark] * len(_COLUMNS))})"


def _insert_unless_there(connection: Connection, rows: Sequence[UsageRow]) -> frozenset[str]:
    """Write the rows that are new or say more than those that are there, and return their requests."""
    values = [msgspec.structs.asdict(row) | {"day": row.day} for row in rows]
    statement = insert_into(connection, usage)
    is_known = statement.excluded.status != "interrupted"
    is_cut_off = sa.or_(*(usage.c.status == name for name in _CUT_OFF))  # `IN` cannot be used with many rows
    is_later = statement.excluded.started_at > usage.c.started_at
    statement = statement.on_conflict_do_update(
        index_elements=["request_id"],
        set_={
            column.name: usage.c[column.name] + column if column.name in _SUMMED else column
            for column in statement.excluded
            if not column.primary_key
        },
        where=sa.or_(
            sa.and_(usage.c.status == "interrupted", is_known), sa.and_(is_cut_off, is_known, is_later)
        ),
    )
    return frozenset(connection.execute(statement.returning(usage.c.request_id), values).scalars())


def _groups(rows: Sequence[UsageRow]) -> list[Sequence[UsageRow]]:
    """Return the rows in their order, in as few groups as hold no request twice: one statement cannot write a row
    twice. Nearly always one group is enough."""
    if len({row.request_id for row in rows}) == len(rows):
        return [rows] if rows else []
    return [*_separated(rows)]


def _separated(rows: Sequence[UsageRow]) -> list[list[UsageRow]]:
    groups: list[list[UsageRow]] = []
    num_seen: Counter[str] = Counter()
    for row in rows:
        place = num_seen[row.request_id]
        num_seen[row.request_id] += 1
        if place == len(groups):
            groups.append([])
        groups[place].append(row)
    return groups


def _add_spend(connection: Connection, rows: Sequence[UsageRow], inserted: frozenset[str] | None) -> None:
    """Add the money of the inserted rows, all of them for None."""
    spent: dict[tuple[int, str, str, str], int] = defaultdict(int)
    for row in rows:
        if row.cost_picodollars and (inserted is None or row.request_id in inserted):
            spent[row.day, row.workspace_id, row.key_id, row.model] += row.cost_picodollars
    if not spent:
        return
    statement = insert_into(connection, usage_spend)
    total = usage_spend.c.cost_picodollars + statement.excluded.cost_picodollars
    connection.execute(
        statement.on_conflict_do_update(
            index_elements=list(usage_spend.primary_key.columns), set_={"cost_picodollars": total}
        ),
        [
            {"day": day, "workspace_id": workspace, "key_id": key, "model": model, "cost_picodollars": cost}
            # In one order in every process, so that two of them never wait for each other's row locks.
            for (day, workspace, key, model), cost in sorted(spent.items())
        ],
    )


def usage_totals(connection: Connection, query: UsageQuery) -> list[UsageTotal]:
    """Add up usage by group, in the order of the group's values. Without groups, one total of everything."""
    groups = [_GROUP_COLUMNS[name] for name in query.group_by]
    cost = usage.c.cost_picodollars
    sums: list[sa.ColumnElement[Any]] = [
        sa.func.count(),
        *(_count_where(usage.c.status == status) for status in STATUSES),
        _count_where(usage.c.is_cached),
        *(sa.func.sum(usage.c[name]) for name in TOKEN_COLUMNS),
        # In two parts: a sum of picodollars would leave 64 bits at nine million dollars.
        sa.func.sum(cost // PICODOLLARS_PER_MICRODOLLAR),
        sa.func.sum(cost % PICODOLLARS_PER_MICRODOLLAR),
    ]
    select = sa.select(*groups, *sums).where(*_conditions(query))
    if groups:
        select = select.group_by(*groups).order_by(*groups)
    if query.after is not None:
        select = select.where(sa.tuple_(*groups) > sa.tuple_(*map(sa.literal, query.after)))
    return [_total(query, tuple(record)) for record in connection.execute(select.limit(query.limit))]


def spent_between(connection: Connection, first_day: int, end_day: int) -> list[SpendRecord]:
    """Return the money spent from `first_day` up to, but not on, `end_day`."""
    columns = usage_spend.c
    select = sa.select(
        columns.day, columns.workspace_id, columns.key_id, columns.model, columns.cost_picodollars
    ).where(columns.day >= first_day, columns.day < end_day)
    return [
        (day, workspace, key, model, cost) for day, workspace, key, model, cost in connection.execute(select)
    ]


def _conditions(query: UsageQuery) -> list[sa.ColumnElement[bool]]:
    columns = usage.c
    conditions: list[sa.ColumnElement[bool]] = [
        column == value
        for column, value in (
            (columns.workspace_id, query.workspace_id),
            (columns.key_id, query.key_id),
            (columns.model, query.model),
            (columns.endpoint, query.endpoint),
        )
        if value is not None
    ]
    # The indexes hold days.
    if query.start is not None:
        conditions += [columns.day >= int(query.start // SECONDS_PER_DAY), columns.started_at >= query.start]
    if query.end is not None:
        conditions += [columns.day <= int(query.end // SECONDS_PER_DAY), columns.started_at < query.end]
    return conditions


def _count_where(condition: sa.ColumnElement[bool]) -> sa.ColumnElement[int]:
    return sa.func.sum(sa.case((condition, 1), else_=0))


def _total(query: UsageQuery, record: tuple[Any, ...]) -> UsageTotal:
    num_groups = len(query.group_by)
    group = dict(zip(query.group_by, record[:num_groups], strict=True))
    sums = iter([int(value or 0) for value in record[num_groups:]])
    return UsageTotal(
        group=group,
        requests=next(sums),
        by_status={status: next(sums) for status in STATUSES},
        cached_answers=next(sums),
        tokens={name: next(sums) for name in TOKEN_COLUMNS},
        cost_picodollars=next(sums) * PICODOLLARS_PER_MICRODOLLAR + next(sums),
    )


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
    """The usage of one group. Only the fields that were grouped by are set."""

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
