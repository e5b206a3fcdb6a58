"""`penstock database`: backup and restore of keys, usage, releases and stored responses."""

from __future__ import annotations

from pathlib import Path

import click

from penstock.cli.commands import PenstockGroup
from penstock.cli.options import config_options
from penstock.core.gateway_config import StoreConfig


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
