"""`penstock usage`: token usage and cost, from the database."""

from __future__ import annotations

import csv
import sys
import time
from typing import TYPE_CHECKING

import click

from penstock.cli.commands import PenstockCommand
from penstock.cli.console import json_option, print_json, print_rows
from penstock.cli.options import config_options
from penstock.core.errors import ConfigError, InvalidRequest
from penstock.core.gateway_config import StoreConfig
from penstock.serve.environment import open_database

if TYPE_CHECKING:
    from penstock.gateway.ledger.usage_store import UsageEntry, UsagePage, UsageQuery

_COUNTS = ("prompt_tokens", "completion_tokens", "cached_tokens")


@click.command(cls=PenstockCommand, short_help="Show token usage and cost.")
@click.option(
    "--by",
    "group_by",
    default="day",
    show_default=True,
    metavar="NAMES",
    help="Groups, separated by commas: day, organization, workspace, key, model, endpoint, tier, status, "
    "user. An empty string gives one total.",
)
@click.option("--start", metavar="TIME", help="First moment, such as 2026-11-01.  [default: 30 days ago]")
@click.option("--end", metavar="TIME", help="End, exclusive.  [default: now]")
@click.option("--workspace", metavar="ID", help="Only of this workspace.")
@click.option("--key", metavar="ID", help="Only with this key.")
@click.option("--model", "of_model", metavar="NAME", help="Only of this model.")
@click.option("--endpoint", metavar="NAME", help="Only of this endpoint: chat, completions, messages, …")
@click.option(
    "--limit", type=click.IntRange(1, 100_000), default=1000, show_default=True, help="Most rows to print."
)
@click.option("--page", metavar="TEXT", help="Continue after an earlier page: its next_page.")
@json_option
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV, for spreadsheets.")
@config_options(StoreConfig)
def usage(
    group_by: str,
    start: str | None,
    end: str | None,
    workspace: str | None,
    key: str | None,
    of_model: str | None,
    endpoint: str | None,
    limit: int,
    page: str | None,
    as_json: bool,
    as_csv: bool,
    config: StoreConfig,
) -> None:
    """Show token usage and cost.

    Reads the database of the server. If the server is running, the requests of the last second may be missing. Costs
    are exact, at the prices of the moment when each request ended.

    \b
      penstock usage
      penstock usage --by workspace,model --start 2026-11-01
      penstock usage --by day,key --csv > usage.csv
    """
    from penstock.gateway.ledger.usage_store import (
        UsageQuery,
        default_start,
        parse_groups,
        parse_moment,
        parse_page,
    )

    if as_json and as_csv:
        raise ConfigError("Choose either --json or --csv.")
    try:
        groups = parse_groups(group_by)
        query = UsageQuery(
            group_by=groups,
            start=default_start(time.time()) if start is None else parse_moment(start, "--start"),
            end=None if end is None else parse_moment(end, "--end"),
            workspace_id=workspace,
            key_id=key,
            model=of_model,
            endpoint=endpoint,
            after=None if page is None else parse_page(page, groups),
            limit=limit,
        )
    except InvalidRequest as error:
        raise ConfigError(error.message, hint=error.hint) from error
    found = _read(config, query)
    if as_json:
        print_json(found)
        return
    rows = _rows(found)
    if as_csv:
        csv.writer(sys.stdout, lineterminator="\n").writerows(map(_without_formulas, rows))
    elif len(rows) > 1:
        print_rows(rows[0], rows[1:])
    else:
        click.echo("There was no usage in that time.", err=True)
    if found.next_page is not None:
        click.echo(f"There are more: add --page {found.next_page}", err=True)


def _read(config: StoreConfig, query: UsageQuery) -> UsagePage:
    import msgspec

    from penstock.gateway.ledger.usage_store import usage_page, usage_totals

    database = open_database(config)
    try:
        if not database.exists:
            return usage_page(query, [])
        ask = msgspec.structs.replace(query, limit=query.limit + 1)
        totals = database.run_now(lambda connection: usage_totals(connection, ask), reads_only=True)
        return usage_page(query, totals)
    finally:
        database.close()


def _without_formulas(row: list[str]) -> list[str]:
    """Put an apostrophe before cells that a spreadsheet would take for formulas."""
    return [f"'{cell}" if cell.startswith(("=", "+", "-", "@", "\t", "\r")) else cell for cell in row]


def _rows(page: UsagePage) -> list[list[str]]:
    """Return a table with a header row. Numbers have no separators, so that programs can read them."""
    heads = [*page.group_by, "requests", "completed", "cancelled", "failed", "interrupted", "cached"]
    return [[*heads, *_COUNTS, "cost_usd"], *(_row(page, entry) for entry in page.data)]


def _row(page: UsagePage, entry: UsageEntry) -> list[str]:
    requests = entry.requests
    return [
        *(getattr(entry, name) or "" for name in page.group_by),
        *map(
            str,
            (
                requests.total,
                requests.completed,
                requests.cancelled,
                requests.failed,
                requests.interrupted,
                requests.cached,
            ),
        ),
        *(str(getattr(entry, name)) for name in _COUNTS),
        entry.cost_usd,
    ]
