"""The chain of migrations leads to exactly the tables of tables.py, in one line."""

from __future__ import annotations

from importlib import resources

from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

from penstock.gateway.store.database import Database
from penstock.gateway.store.tables import metadata


def differences(connection: Connection) -> list[object]:
    return list(
        compare_metadata(MigrationContext.configure(connection, opts={"compare_type": True}), metadata)
    )


def test_the_migrations_make_the_tables_that_the_code_describes(database: Database) -> None:
    assert database.run_now(differences) == []


def test_there_is_one_line_of_migrations() -> None:
    config = Config()
    config.set_main_option("script_location", str(resources.files("penstock.gateway.store") / "migrations"))
    script = ScriptDirectory.from_config(config)
    assert len(script.get_heads()) == 1
    names = [revision.revision for revision in script.walk_revisions()]
    assert names[-1] == "0001_tenants"
    assert names == sorted(names, reverse=True), "numbers follow the order in which they are applied"


def test_migrating_again_changes_nothing(database: Database) -> None:
    database.migrate()
    database.migrate()
    assert database.run_now(differences) == []
