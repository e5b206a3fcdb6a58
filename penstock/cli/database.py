"""`penstock database`: backup and restore of keys, usage, releases and stored responses. `penstock settings`: the
settings that all gateways of a database follow. `penstock usage`: token usage and cost."""

from __future__ import annotations

import csv
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from penstock.cli.commands import PenstockCommand, PenstockGroup
from penstock.cli.console import json_option, print_json, print_rows, printable, shown_time
from penstock.cli.options import config_options
from penstock.cli.tenants import actor, in_database
from penstock.core.errors import ConfigError, InvalidRequest
from penstock.core.gateway_config import StoreConfig
from penstock.serve.environment import open_database

if TYPE_CHECKING:
    from penstock.gateway.ledger.usage_store import UsageEntry, UsagePage, UsageQuery
    from penstock.gateway.settings.store import SettingsStore, SettingsVersion


@click.group(cls=PenstockGroup, short_help="Back up and restore the database.")
def database() -> None:
    """Back up and restore the database of a server: keys, usage, settings, releases and stored responses.

    \b
      penstock database backup monday.backup
      penstock database restore monday.backup --replace
    """


@database.command(short_help="Write a copy of the database.")
@click.argument("file", type=click.Path(path_type=Path))
@config_options(StoreConfig)
def backup(config: StoreConfig, file: Path) -> None:
    """Write a consistent copy of the database to FILE. Servers continue meanwhile."""
    from penstock.serve.backup import back_up

    back_up(config, file)
    click.echo(f"{file}: {file.stat().st_size:,} bytes.")


@database.command(short_help="Restore a copy of the database.")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--replace", is_flag=True, help="Replace a database that exists. Stop its servers first.")
@config_options(StoreConfig)
def restore(config: StoreConfig, file: Path, replace: bool) -> None:
    """Restore the copy in FILE. The tables of an older version are migrated."""
    from penstock.serve.backup import restore as bring_back

    bring_back(config, file, replace=replace)
    click.echo("The database is restored.")


T = TypeVar("T")

_if_version_option = click.option(
    "--if-version",
    type=click.IntRange(0),
    metavar="N",
    help="Change nothing unless this version is the current one.  [default: whatever is current]",
)


@click.group(cls=PenstockGroup, short_help="Show and change the settings that all gateways follow.")
def settings() -> None:
    """Limits, prices, policies, tiers, names of models and caches in the database of the server. All gateways of the
    database take over a change within a second. A database without settings leaves them to each gateway's file.

    \b
      penstock settings apply settings.toml
      penstock settings show > settings.toml
      penstock settings history
      penstock settings revert 3
    """


@settings.command(short_help="Print the settings as TOML.")
@click.option("--version", type=click.IntRange(1), metavar="N", help="An earlier version.")
@json_option
@config_options(StoreConfig)
def show(version: int | None, as_json: bool, config: StoreConfig) -> None:
    """Print the current settings, as a file that `apply` takes."""
    found = _in_store(config, lambda store: store.latest() if version is None else store.version(version))
    if found is None or found.settings is None:
        click.echo("The database has no settings: each gateway uses its own file.", err=True)
        return
    if as_json:
        _print_json(found)
        return
    from penstock.gateway.settings.settings import to_toml

    click.echo(f"# version {found.version} of {shown_time(found.created_at)}, by {found.actor}")
    click.echo(to_toml(found.settings))


@settings.command(short_help="Put a settings file into the database.")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--note", default="", metavar="TEXT", help="Why, for the history.")
@_if_version_option
@json_option
@config_options(StoreConfig)
def apply(file: Path, note: str, if_version: int | None, as_json: bool, config: StoreConfig) -> None:
    """Check FILE and make it the settings of all gateways. A file that is refused changes nothing."""
    from penstock.gateway.settings.settings import parse_file

    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"The settings file {file} cannot be read: {reason}.") from error
    document, _ = parse_file(text, file.name)
    made = _in_store(
        config, lambda store: store.replace(actor(), document, if_version, note=note or f"from {file.name}")
    )
    _report(made, as_json)


@settings.command(short_help="List the versions, newest first.")
@click.option(
    "--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="Most rows to print."
)
@json_option
@config_options(StoreConfig)
def history(limit: int, as_json: bool, config: StoreConfig) -> None:
    """List the versions of the settings, newest first."""
    page = _in_store(config, lambda store: store.history(limit=limit))
    if as_json:
        _print_json(page)
        return
    rows = [
        (
            str(row.version),
            shown_time(row.created_at),
            row.actor,
            row.note if row.settings is not None else f"{row.note} (left to the files)".strip(),
        )
        for row in page.data
    ]
    print_rows(("VERSION", "MADE", "BY", "NOTE"), rows)


@settings.command(short_help="Make an earlier version the current one.")
@click.argument("version", type=click.IntRange(0))
@_if_version_option
@json_option
@config_options(StoreConfig)
def revert(version: int, if_version: int | None, as_json: bool, config: StoreConfig) -> None:
    """Make VERSION the current settings again, as a new version. With 0 the database has no settings any more, and
    each gateway returns to its own file."""
    _report(_in_store(config, lambda store: store.revert(actor(), version, if_version)), as_json)


def _in_store(config: StoreConfig, work: Callable[[SettingsStore], Awaitable[T]]) -> T:
    from penstock.gateway.settings.store import SettingsStore

    return in_database(config, lambda database: work(SettingsStore(database)))


def _print_json(shape: object) -> None:
    from penstock.gateway.settings.store import encode

    click.echo(encode(shape).decode())


def _report(made: SettingsVersion, as_json: bool) -> None:
    if as_json:
        _print_json(made)
        return
    click.echo(f"The settings are now at version {made.version}; gateways follow within a second.")


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
    """Put an apostrophe before cells that a spreadsheet would take for formulas. Control characters are spelled out:
    a lone carriage return would begin another row, with a formula in it, and a terminal obeys the others."""
    cells = map(printable, row)
    return [f"'{cell}" if cell.startswith(("=", "+", "-", "@")) else cell for cell in cells]


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
