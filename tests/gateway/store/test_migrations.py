"""A new database, and one of an earlier version that was migrated, both have exactly the tables of tables.py."""

from __future__ import annotations

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, select, text

from penstock.core.errors import ConfigError
from penstock.gateway.store.database import Database
from penstock.gateway.store.tables import VERSIONS, metadata, organizations, version_table

# What the versions after the oldest one added.
TABLES = (
    *(
        "response_events",
        "stored_objects",
        "fleet_hosts",
        "document_versions",
        "fleet_leases",
        "fleet_documents",
    ),
    *("experiments", "history_samples"),
)
COLUMNS = (("responses", "num_event_bytes"), ("files", "details"))
INDEXES = ("ix_responses_workspace_id_created_at",)


def differences(connection: Connection) -> list[object]:
    return list(
        compare_metadata(MigrationContext.configure(connection, opts={"compare_type": True}), metadata)
    )


def make_oldest(connection: Connection) -> None:
    for table in TABLES:
        connection.execute(text(f"DROP TABLE {table}"))
    for table, column in COLUMNS:
        connection.execute(text(f"ALTER TABLE {table} DROP COLUMN {column}"))
    for index in INDEXES:
        connection.execute(text(f"DROP INDEX {index}"))
    connection.execute(version_table.update().values(version_num=VERSIONS[0]))


def check_migration(database: Database, again: Database) -> None:
    """Take away what later versions added, open the database again, and compare."""
    assert database.run_now(differences) == []
    database.run_now(make_oldest)
    assert len(database.run_now(differences)) >= len(TABLES + COLUMNS + INDEXES)
    assert again.run_now(differences) == []
    assert again.run_now(lambda connection: connection.scalar(select(version_table))) == VERSIONS[-1]
    assert again.run_now(lambda connection: connection.scalar(select(organizations.c.id))) == "default"
    again.close()


def test_a_database_of_the_oldest_version_gets_the_same_tables(database: Database) -> None:
    check_migration(database, Database(f"sqlite:///{database.file}"))


def test_a_migration_that_fails_changes_nothing(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    database.run_now(make_oldest)
    before = [str(each) for each in database.run_now(differences)]
    again = Database(f"sqlite:///{database.file}")

    def fail(connection: Connection) -> None:
        raise RuntimeError("interrupted")

    monkeypatch.setattr(metadata.tables["stored_objects"], "create", fail)
    with pytest.raises(RuntimeError, match="interrupted"):
        again.migrate()
    again.close()
    assert [str(each) for each in database.run_now(differences)] == before


def test_a_database_from_before_the_first_migration_is_refused(database: Database) -> None:
    database.run_now(
        lambda connection: connection.execute(version_table.update().values(version_num="0003_files_batches"))
    )
    again = Database(f"sqlite:///{database.file}")
    with pytest.raises(ConfigError, match=r"unreleased version.*0003_files_batches"):
        again.migrate()
    again.close()


def test_the_names_of_versions_sort_by_age() -> None:
    assert list(VERSIONS) == sorted(set(VERSIONS))


def test_migrating_again_changes_nothing(database: Database) -> None:
    database.migrate()
    database.migrate()
    assert database.run_now(differences) == []
