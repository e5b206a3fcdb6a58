"""What the commands about organisations, workspaces and keys share: the database, who acts, and how rows are shown.

They work on the database directly, so they need no server, and running servers notice within seconds.
"""

from __future__ import annotations

import asyncio
import getpass
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from penstock.core.gateway_config import StoreConfig
from penstock.serve.stores import open_database

if TYPE_CHECKING:
    from penstock.gateway.tenants.directory import Directory

T = TypeVar("T")

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
limit_option = click.option(
    "--limit", type=click.IntRange(1, 1000), default=100, show_default=True, help="Most rows to print."
)
after_option = click.option(
    "--after", metavar="ID", help="Go on after the row with this id, the last of the page before."
)


def in_directory(config: StoreConfig, work: Callable[[Directory], Awaitable[T]]) -> T:
    """What `work` returns, on the database that the settings name."""
    from penstock.gateway.tenants.directory import Directory

    # The log line of an audit entry is for those who collect a server's logs; a command says itself what it did.
    if not logging.getLogger().isEnabledFor(logging.DEBUG):
        logging.getLogger("penstock.audit").setLevel(logging.WARNING)
    database = open_database(config)

    async def run() -> T:
        return await work(Directory(database))

    try:
        return asyncio.run(run())
    finally:
        database.close()


def actor_name() -> str:
    """Who runs the command, for the audit log."""
    try:
        return f"cli:{getpass.getuser()}"
    except (KeyError, OSError):
        return "cli"


def place(config: StoreConfig) -> str:
    """Where it happened, as the end of a sentence."""
    database = open_database(config)
    try:
        return f"in {database.description}"
    finally:
        database.close()


def print_json(value: Any) -> None:
    click.echo(json.dumps(msgspec.to_builtins(value), indent=2, ensure_ascii=False))


def print_rows(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """In columns as wide as what they hold, never cut: the output may go into a pipe."""
    widths = [max(len(row[column]) for row in (heads, *rows)) for column in range(len(heads))]
    for row in (heads, *rows):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        click.echo("  ".join(cells).rstrip())


def print_facts(facts: Sequence[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        click.echo(f"{name.ljust(width)}  {value}")


def say_more(has_more: bool, last_id: str) -> None:
    if has_more:
        click.echo(f"There are more: add --after {last_id}", err=True)


def shown_time(unix_s: float | None, absent: str = "–") -> str:
    return absent if unix_s is None else datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
