"""Brings the tables of a database to what this release needs.

Versions so far only added tables, columns that may be null, and indexes. A migration therefore compares the database
with `tables`, and adds what is missing. A change of another kind is carried out in `_bring_up` before the additions.
"""

from __future__ import annotations

import logging

from sqlalchemy import Column, Connection, MetaData, String, Table, inspect, select, text
from sqlalchemy.schema import CreateColumn

from penstock import __version__
from penstock.core.errors import ConfigError
from penstock.gateway.store.tables import create_tables, metadata

logger = logging.getLogger(__name__)

# The versions that the tables had, oldest first. Names sort in this order. Databases from before the first name, of
# earlier development versions, are refused.
VERSIONS = (
    "0006_releases",
    "0007_responses_by_workspace",
    "0008_stored_objects",
    "0009_fleet_hosts",
    "0010_document_versions",
    "0011_fleet_leases",
    "0012_experiments",
    "0013_history_samples",
    "0014_object_order",
)
_LOCK_NUMBER = 0x70656E73746F636B  # "penstock": any number that all our processes agree on

# One row. The name is that of Alembic's table, which earlier releases wrote.
version_table = Table("alembic_version", MetaData(), Column("version_num", String(32), primary_key=True))


def migrate(connection: Connection) -> None:
    """Create the tables of a new database, or migrate the tables of an older one. The transaction locks out
    other migrations, so that several starting gateways take turns."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:number)"), {"number": _LOCK_NUMBER})
    has_versions = inspect(connection).has_table(version_table.name)
    current = connection.scalar(select(version_table.c.version_num)) if has_versions else None
    if current == VERSIONS[-1]:
        return
    if current is None:
        create_tables(connection)
        version_table.create(connection, checkfirst=True)
        connection.execute(version_table.insert().values(version_num=VERSIONS[-1]))
        return
    refuse_unknown(current)
    _bring_up(connection)
    connection.execute(version_table.update().values(version_num=VERSIONS[-1]))
    logger.info("the tables of the database were migrated from %s to %s", current, VERSIONS[-1])


def refuse_unknown(current: str) -> None:
    """Raise ConfigError for tables of a version that this release does not know."""
    if current in VERSIONS:
        return
    age = (
        "a newer Penstock than this one"
        if current > VERSIONS[-1]
        else "an unreleased version before Penstock"
    )
    raise ConfigError(
        f"The database was written by {age} ({__version__}): its tables are at '{current}', which this release does "
        "not know.",
        hint="Upgrade Penstock, or choose another database.",
    )


def _bring_up(connection: Connection) -> None:
    existing = inspect(connection)
    quoted = connection.dialect.identifier_preparer.format_table
    for table in metadata.sorted_tables:
        if not existing.has_table(table.name):
            table.create(connection)
            continue
        columns = {column["name"] for column in existing.get_columns(table.name)}
        for column in table.columns:
            if column.name not in columns:
                definition = CreateColumn(column).compile(dialect=connection.dialect)
                connection.execute(text(f"ALTER TABLE {quoted(table)} ADD COLUMN {definition}"))
        indexes = {index["name"] for index in existing.get_indexes(table.name)}
        for index in table.indexes:
            if index.name not in indexes:
                index.create(connection)
