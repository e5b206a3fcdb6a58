"""`penstock organizations`, `workspaces` and `audit`, and the parts they share with `penstock keys`.

These commands work on the database directly. They need no server, and running servers notice a change within seconds.
"""

from __future__ import annotations

import asyncio
import getpass
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from penstock.cli.commands import PenstockCommand, PenstockGroup
from penstock.cli.console import json_option, print_json, print_rows, shown_time
from penstock.cli.options import config_options
from penstock.core.gateway_config import StoreConfig
from penstock.serve.environment import open_database

if TYPE_CHECKING:
    from penstock.gateway.store.database import Database
    from penstock.gateway.tenants.directory import Actor, Directory
    from penstock.gateway.tenants.records import Kind, Organization, Page, Workspace


T = TypeVar("T")

limit_option = click.option(
    "--limit", type=click.IntRange(1, 1000), default=100, show_default=True, help="Most rows to print."
)
after_option = click.option(
    "--after", metavar="ID", help="Start after the row with this id, the last row of the previous page."
)


def in_database(
    config: StoreConfig, work: Callable[[Database], Awaitable[T]], *, reads_only: bool = False
) -> T:
    """Run `work` on the database that the settings name, and return its result. Work that only reads makes no file:
    it sees an empty database where there is none."""
    from penstock.gateway.store.database import Database

    # Audit entries are also log lines. A command prints its own sentence instead.
    if not logging.getLogger().isEnabledFor(logging.DEBUG):
        logging.getLogger("penstock.audit").setLevel(logging.WARNING)
    database = open_database(config)
    if reads_only and not database.exists:
        database.close()
        database = Database("sqlite://")

    async def run() -> T:
        return await work(database)

    try:
        return asyncio.run(run())
    finally:
        database.close()


def in_directory(
    config: StoreConfig, work: Callable[[Directory], Awaitable[T]], *, reads_only: bool = False
) -> T:
    from penstock.gateway.tenants.directory import Directory

    return in_database(config, lambda database: work(Directory(database)), reads_only=reads_only)


def actor_name() -> str:
    """Return the user who runs the command, for the audit log."""
    try:
        return f"cli:{getpass.getuser()}"
    except (KeyError, OSError):
        return "cli"


def place(config: StoreConfig) -> str:
    """Return `in DATABASE`, as the end of a sentence."""
    database = open_database(config)
    try:
        return f"in {database.description}"
    finally:
        database.close()


def say_more(has_more: bool, last_id: str) -> None:
    if has_more:
        click.echo(f"There are more: add --after {last_id}", err=True)


@click.group(cls=PenstockGroup, short_help="Make, list, rename and archive organisations.")
def organizations() -> None:
    """Manage organisations in the database of the server. An organisation owns workspaces.

    \b
      penstock organizations create "Acme"
      penstock organizations list
    """


@click.group(cls=PenstockGroup, short_help="Make, list, rename and archive workspaces.")
def workspaces() -> None:
    """Manage workspaces in the database of the server. A workspace owns keys, files, batches, caches and usage. No
    workspace can see the data of another.

    \b
      penstock workspaces create "Production" --organization org_…
      penstock workspaces list
    """


@organizations.command("create", short_help="Make an organisation.")
@click.argument("name")
@json_option
@config_options(StoreConfig)
def create_organization(name: str, as_json: bool, config: StoreConfig) -> None:
    """Make an organisation called NAME."""
    made = in_directory(config, lambda directory: directory.create_organization(actor(), name))
    _report("Made", made, as_json, config)


@organizations.command("list", short_help="List organisations, newest first.")
@limit_option
@after_option
@json_option
@config_options(StoreConfig)
def list_organizations(limit: int, after: str | None, as_json: bool, config: StoreConfig) -> None:
    """List organisations, newest first. Archived ones are listed too."""
    page = in_directory(
        config, lambda directory: directory.organizations(limit=limit, after=after), reads_only=True
    )
    rows = [(row.id, row.name, shown_time(row.created_at), shown_time(row.archived_at)) for row in page.data]
    _print_page(page, as_json, ("ID", "NAME", "MADE", "ARCHIVED"), rows)


@workspaces.command("create", short_help="Make a workspace.")
@click.argument("name")
@click.option(
    "--organization",
    default="default",
    show_default=True,
    metavar="ID",
    help="Organisation that owns the workspace.",
)
@json_option
@config_options(StoreConfig)
def create_workspace(name: str, organization: str, as_json: bool, config: StoreConfig) -> None:
    """Make a workspace called NAME."""
    made = in_directory(config, lambda directory: directory.create_workspace(actor(), name, organization))
    _report("Made", made, as_json, config)


@workspaces.command("list", short_help="List workspaces, newest first.")
@click.option("--organization", metavar="ID", help="Only the workspaces of this organisation.")
@limit_option
@after_option
@json_option
@config_options(StoreConfig)
def list_workspaces(
    organization: str | None, limit: int, after: str | None, as_json: bool, config: StoreConfig
) -> None:
    """List workspaces, newest first. Archived ones are listed too."""
    page = in_directory(
        config,
        lambda directory: directory.workspaces(limit=limit, after=after, organization_id=organization),
        reads_only=True,
    )
    rows = [
        (row.id, row.name, row.organization_id, shown_time(row.created_at), shown_time(row.archived_at))
        for row in page.data
    ]
    _print_page(page, as_json, ("ID", "NAME", "ORGANIZATION", "MADE", "ARCHIVED"), rows)


def _kind(action: str) -> Kind[Any]:
    from penstock.gateway.tenants.records import ORGANIZATIONS, WORKSPACES

    return {kind.action: kind for kind in (ORGANIZATIONS, WORKSPACES)}[action]


def _add_changes(group: click.Group, action: str, noun: str, what_ends: str) -> None:
    """Add `rename` and `archive` to the commands of organisations or workspaces. `action` is the kind's name in the
    audit log."""
    given_id = click.argument("record_id", metavar=f"{action.upper()}_ID")

    @group.command(
        short_help=f"Give {noun} another name.",
        help=f"Change the name of {noun} to NAME. The id stays the same.",
    )
    @given_id
    @click.argument("name")
    @json_option
    @config_options(StoreConfig)
    def rename(record_id: str, name: str, as_json: bool, config: StoreConfig) -> None:
        renamed = in_directory(
            config, lambda directory: directory.rename(actor(), _kind(action), record_id, name)
        )
        _report("Renamed", renamed, as_json, config)

    @group.command(
        short_help=f"Archive {noun} and end its keys.",
        help=f"Archive {noun}. {what_ends} stop working; its usage is kept.",
    )
    @given_id
    @json_option
    @config_options(StoreConfig)
    def archive(record_id: str, as_json: bool, config: StoreConfig) -> None:
        archived = in_directory(
            config, lambda directory: directory.archive(actor(), _kind(action), record_id)
        )
        _report("Archived", archived, as_json, config)


_add_changes(organizations, "organization", "an organisation", "All keys of its workspaces")
_add_changes(workspaces, "workspace", "a workspace", "All its keys")


@click.command(cls=PenstockCommand, short_help="Show the audit log of tenants and keys.")
@click.option("--target", metavar="ID", help="Only changes of this key, workspace or organisation.")
@limit_option
@click.option("--after", type=click.IntRange(min=1), metavar="N", help="Only entries older than entry N.")
@json_option
@config_options(StoreConfig)
def audit(target: str | None, limit: int, after: int | None, as_json: bool, config: StoreConfig) -> None:
    """Show the audit log, newest first: every change of organisations, workspaces and keys, with the user who made it
    and the values before and after."""
    page = in_directory(
        config,
        lambda directory: directory.audit(limit=limit, before_id=after, target=target),
        reads_only=True,
    )
    rows = [
        (str(entry.id), shown_time(entry.at), entry.actor, entry.action, entry.target, _summary(entry.after))
        for entry in page.data
    ]
    _print_page(page, as_json, ("N", "AT", "ACTOR", "ACTION", "TARGET", "AFTER"), rows)


def _print_page(page: Page[Any], as_json: bool, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a page as JSON, or as rows that begin with their ids."""
    if as_json:
        print_json(page)
        return
    print_rows(heads, rows)
    if rows:
        say_more(page.has_more, rows[-1][0])


def actor() -> Actor:
    """Return the user who runs the command, for the audit log."""
    from penstock.gateway.tenants.directory import Actor

    return Actor(actor_name())


def _report(verb: str, record: Organization | Workspace, as_json: bool, config: StoreConfig) -> None:
    if as_json:
        print_json(record)
        return
    noun = type(record).__name__.lower().replace("organization", "organisation")
    click.echo(f"{verb} the {noun} {record.id} ({record.name}) {place(config)}.")


def _summary(after: dict[str, Any] | None) -> str:
    return "" if after is None else msgspec.json.encode(after).decode()
