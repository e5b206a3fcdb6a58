"""`penstock settings`: show and change the settings that all gateways of a database follow."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from penstock.cli.commands import PenstockGroup
from penstock.cli.console import json_option, print_rows, shown_time
from penstock.cli.options import config_options
from penstock.cli.tenants import actor, in_database
from penstock.core.errors import ConfigError
from penstock.core.gateway_config import StoreConfig

if TYPE_CHECKING:
    from penstock.gateway.settings.store import SettingsStore, SettingsVersion

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
