"""A new database, and one that the migrations changed, both have exactly the tables of tables.py."""

from __future__ import annotations

from importlib import resources

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text

from penstock.core.errors import ConfigError
from penstock.gateway.store.database import Database
from penstock.gateway.store.tables import metadata


def differences(connection: Connection) -> list[object]:
    return list(
        compare_metadata(MigrationContext.configure(connection, opts={"compare_type": True}), metadata)
    )


def alembic_config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(resources.files("penstock.gateway.store") / "migrations"))
    return config


def test_a_new_database_has_the_tables_that_the_code_describes(database: Database) -> None:
    assert database.run_now(differences) == []


def test_the_migrations_bring_an_old_database_to_the_same_tables(database: Database) -> None:
    def go_back(connection: Connection) -> None:
        config = alembic_config()
        config.attributes["connection"] = connection
        command.downgrade(config, "0006_releases")

    database.run_now(go_back)
    again = Database(f"sqlite:///{database.file}")
    assert again.run_now(differences) == []
    again.close()


def test_a_database_from_before_the_first_migration_is_refused(database: Database) -> None:
    older = text("UPDATE alembic_version SET version_num = '0003_files_batches'")
    database.run_now(lambda connection: connection.execute(older))
    again = Database(f"sqlite:///{database.file}")
    with pytest.raises(ConfigError, match=r"unreleased version.*0003_files_batches"):
        again.migrate()
    again.close()


def test_there_is_one_line_of_migrations() -> None:
    script = ScriptDirectory.from_config(alembic_config())
    assert len(script.get_heads()) == 1
    names = [revision.revision for revision in script.walk_revisions()]
    assert names[-1] == "0006_releases"
    assert names == sorted(names, reverse=True), "numbers follow the order in which they are applied"


def test_migrating_again_changes_nothing(database: Database) -> None:
    database.migrate()
    database.migrate()
    assert database.run_now(differences) == []
